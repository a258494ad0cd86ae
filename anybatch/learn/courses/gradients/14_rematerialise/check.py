"""Checks the root of a mean of squares, and its gradient, in the memory of one microbatch.

The program needs a scan, but not a checkpoint: memory is what counts. A program that adds up gradients by hand, or uses
`jax.custom_vjp`, passes, too.
"""

import numpy as np

from anybatch.learn.check import Case, Check, Mistake, Same, Slope
from anybatch.learn.rules import carries, one_microbatch, scans

INPUTS, HIDDEN = 8, 32


def problem(rng, examples):
    """Parameters and a batch, with predictions that are far from the targets."""
    params = {"w": rng.normal(size=(INPUTS, HIDDEN)) / INPUTS**0.5, "v": rng.normal(size=HIDDEN) / HIDDEN**0.5}
    x = rng.normal(size=(examples, INPUTS))
    # Errors that grow along the batch, so that the means over microbatches differ, and their roots, too.
    y = x[:, 0] + rng.normal(size=examples) * np.linspace(0.3, 3.0, examples)
    params = {name: leaf.astype(np.float32) for name, leaf in params.items()}
    return params, x.astype(np.float32), y.astype(np.float32)


def squares(params, x, y):
    """The sum of the squared errors, and its gradient."""
    hidden = np.tanh(x @ params["w"])
    error = hidden @ params["v"] - y
    back = 2 * error[:, None] * params["v"] * (1 - hidden**2)
    return np.sum(error**2), {"w": x.T @ back, "v": 2 * error @ hidden}


def root(total, gradient, count):
    """The root of a mean, and its gradient."""
    value = np.sqrt(total / count)
    return value, {name: leaf / (2 * value * count) for name, leaf in gradient.items()}


def reference(params, x, y, n_microbatches):
    """The loss and its gradient, from the full batch at once."""
    return root(*squares(params, x, y), len(x))


def mean_of_roots(params, x, y, n_microbatches):
    """The mean over microbatches of their losses."""
    parts = [
        root(*squares(params, *part), len(part[0]))
        for part in zip(np.split(x, n_microbatches), np.split(y, n_microbatches), strict=True)
    ]
    gradient = {name: sum(part[1][name] for part in parts) / n_microbatches for name in params}
    return sum(part[0] for part in parts) / n_microbatches, gradient


def without_root(params, x, y, n_microbatches):
    """The mean squared error."""
    total, gradient = squares(params, x, y)
    return total / len(x), {name: leaf / len(x) for name, leaf in gradient.items()}


def scaled(value, gradient, factor):
    """Value and gradient, times a factor."""
    return value * factor, {name: leaf * factor for name, leaf in gradient.items()}


def cases(rng):
    """Two batches."""
    note = "64 examples in 4 microbatches"
    return [Case((*problem(rng, 64), 4), note), Case((*problem(rng, 64), 4), note)]


def other_order(rng, args):
    """The same examples in another order."""
    params, x, y, number = args
    order = rng.permutation(len(x))
    return params, x[order], y[order], number


def larger(rng, times):
    """A batch `times` times as large, in microbatches of 16."""
    return (*problem(rng, 64 * times), 4 * times)


check = Check(
    function="loss_and_grads",
    parameters=("params", "x", "y", "n_microbatches"),
    cases=cases,
    reference=reference,
    mistakes=(
        Mistake(
            "a root in each microbatch",
            mean_of_roots,
            "You took a root in each microbatch, and averaged the roots; that is another loss.\n"
            "Carry the sum of the squared errors, and take one root of the mean over all examples, after the scan.",
        ),
        Mistake(
            "a root in each microbatch",
            lambda params, x, y, n: scaled(*mean_of_roots(params, x, y, n), n),
            "You took a root in each microbatch, and added up the roots; that is another loss.\n"
            "Carry the sum of the squared errors, and take one root of the mean over all examples, after the scan.",
        ),
        Mistake(
            "the root is missing",
            without_root,
            "This is the mean squared error and its gradient; the loss is the root of it.",
        ),
    ),
    same=(
        Same("the order of the examples", other_order, says="Sum squares in the scan, and take one root, after it."),
    ),
    program=(
        scans(
            lambda params, x, y, n: n,
            "No scan loops over the microbatches.\nIt should have `n_microbatches` iterations, and carry the sum of "
            "the squared errors.",
        ),
        carries(
            "scan",
            (1, 2),
            "Carry the sum of the squared errors through the scan, and take the root of the final carry.",
            turns=lambda params, x, y, n: (n,),
            may_hand_on=True,
        ),
        one_microbatch(
            lambda params, x, y, n: len(x) // n * HIDDEN,
            "The numbers are right, but more than one microbatch is computed at once.\n"
            "In each iteration of the scan, use only its own microbatch: N // n_microbatches rows.",
            names=("dot_general", "tanh"),
        ),
    ),
    memory=Slope(
        larger,
        "The activations of every microbatch are kept for the backward pass.\n"
        "Put jax.checkpoint around the body of the scan, without a policy: then the backward pass computes each "
        "iteration again.\nAround the complete scan it saves nothing: the scan runs again, and keeps every iteration.",
        # A program that takes the rows of a microbatch outside of the checkpoint keeps a copy of the inputs, 6.8 KiB,
        # which is allowed.
        floor=10 * 1024,
        full_batch="full_batch",
    ),
)
