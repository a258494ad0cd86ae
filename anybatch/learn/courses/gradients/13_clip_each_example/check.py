"""Checks the clipped sum for a small network, with half of the gradients longer than the clip."""

import numpy as np

from anybatch.learn.check import Case, Check, Mistake, Same, Slope
from anybatch.learn.rules import carries, one_microbatch, scans

CLIP = 1.5
INPUTS, HIDDEN = 8, 32


def problem(rng, examples):
    """Parameters and a batch: one half of the gradients is well below the clip, the other well above it."""
    params = {"w": rng.normal(size=(INPUTS, HIDDEN)) / INPUTS**0.5, "v": rng.normal(size=HIDDEN) / HIDDEN**0.5}
    x = rng.normal(size=(examples, INPUTS))
    hidden = np.tanh(x @ params["w"])
    # The gradient of an example is twice its residual times that of its prediction, so the residual sets the norm.
    slope = np.sqrt(np.sum(hidden**2, axis=1) + np.sum(x**2, axis=1) * np.sum(back(params, hidden) ** 2, axis=1))
    is_long = np.arange(examples) % 2
    norms = CLIP * np.where(is_long, rng.uniform(1.5, 4.0, examples), rng.uniform(0.2, 0.7, examples))
    y = hidden @ params["v"] + rng.choice((-0.5, 0.5), examples) * norms / slope
    order = rng.permutation(examples)
    params = {name: leaf.astype(np.float32) for name, leaf in params.items()}
    return params, x[order].astype(np.float32), y[order].astype(np.float32)


def back(params, hidden):
    """The derivative of the prediction with respect to the hidden units before the tanh."""
    return params["v"] * (1 - hidden**2)


def gradients(params, x, y):
    """A gradient for each example, stacked."""
    hidden = np.tanh(x @ params["w"])
    residual = 2 * (hidden @ params["v"] - y)[:, None]
    return {"w": x[:, :, None] * (residual * back(params, hidden))[:, None, :], "v": residual * hidden}


def norms_of(each):
    """The norm of each gradient, over all leaves."""
    return np.sqrt(sum(np.sum(leaf.reshape(len(leaf), -1) ** 2, axis=1) for leaf in each.values()))


def shortened(norms, clip):
    """min(1, clip / norm), also for a norm of 0."""
    return clip / np.maximum(norms, clip)


def weighted_sum(each, factors):
    """The sum of the gradients, each times its factor."""
    return {name: np.tensordot(factors, leaf, 1) for name, leaf in each.items()}


def reference(params, x, y, clip, n_microbatches):
    """Each gradient clipped, then added up."""
    each = gradients(params, x, y)
    return weighted_sum(each, shortened(norms_of(each), clip))


def groups(params, x, y, n_microbatches, mean=False):
    """The gradients of the microbatches, stacked: sums or means."""
    each = gradients(params, x, y)
    cut = {name: leaf.reshape(n_microbatches, -1, *leaf.shape[1:]) for name, leaf in each.items()}
    return {name: leaf.mean(axis=1) if mean else leaf.sum(axis=1) for name, leaf in cut.items()}


def clipped_groups(params, x, y, clip, n_microbatches, mean=False):
    """The gradients of the microbatches, clipped and added up."""
    each = groups(params, x, y, n_microbatches, mean)
    return weighted_sum(each, shortened(norms_of(each), clip))


def clipped_leaves(params, x, y, clip, n_microbatches):
    """Every leaf clipped by itself."""
    each = gradients(params, x, y)
    return {name: np.tensordot(shortened(norms_of({name: leaf}), clip), leaf, 1) for name, leaf in each.items()}


def norms_added(params, x, y, clip, n_microbatches):
    """Clipped by the sum of the norms of the leaves."""
    each = gradients(params, x, y)
    norms = sum(norms_of({name: leaf}) for name, leaf in each.items())
    return weighted_sum(each, shortened(norms, clip))


def all_scaled(params, x, y, clip, n_microbatches):
    """Every gradient scaled to the norm of the clip, short ones, too."""
    each = gradients(params, x, y)
    norms = norms_of(each)
    return None if np.any(norms == 0) else weighted_sum(each, clip / norms)


def nothing_over_nothing(params, x, y, clip, n_microbatches):
    """NaN everywhere if a gradient is 0."""
    right = reference(params, x, y, clip, n_microbatches)
    has_zero = np.any(norms_of(gradients(params, x, y)) == 0)
    return {name: np.full_like(leaf, np.nan) for name, leaf in right.items()} if has_zero else None


def cases(rng):
    """32 examples in 4 microbatches; then with some rows of zeros."""
    params, x, y = problem(rng, 32)
    padded, count = np.copy(x), rng.integers(2, 6)
    padded[-count:] = 0
    return [
        Case((params, x, y, CLIP, 4), f"32 examples in 4 microbatches, clip {CLIP}"),
        Case((params, padded, y, CLIP, 4), f"the last {count} rows of x are zeros, and their gradients exactly zero"),
    ]


def other_order(rng, args):
    """The same examples in another order."""
    params, x, y, *rest = args
    order = rng.permutation(len(x))
    return (params, x[order], y[order], *rest)


def larger(rng, times):
    """A batch `times` times as large, in microbatches of 8."""
    return (*problem(rng, 32 * times), CLIP, 4 * times)


check = Check(
    function="clipped_sum",
    parameters=("params", "x", "y", "clip", "n_microbatches"),
    cases=cases,
    reference=reference,
    mistakes=(
        Mistake(
            "the full batch was clipped",
            lambda params, x, y, clip, n: clipped_groups(params, x, y, clip, 1),
            "You clipped the sum of all gradients; clip the gradient of each example before you add them up.\n"
            "In the sum, the longest gradients already dominate the others.",
        ),
        Mistake(
            "the full batch was clipped",
            lambda params, x, y, clip, n: clipped_groups(params, x, y, clip, 1, mean=True),
            "You clipped the mean of all gradients; clip the gradient of each example, and then add them up.",
        ),
        Mistake(
            "each microbatch was clipped",
            clipped_groups,
            "You clipped the gradient of each microbatch; clip the gradient of each example.\n"
            "Within a microbatch, jax.vmap(jax.grad(loss)) returns a gradient for each example, which you can clip.",
        ),
        Mistake(
            "each microbatch was clipped",
            lambda *args: clipped_groups(*args, mean=True),
            "You clipped the mean gradient of each microbatch; clip the gradient of each example.\n"
            "Within a microbatch, jax.vmap(jax.grad(loss)) returns a gradient for each example, which you can clip.",
        ),
        Mistake(
            "each leaf was clipped",
            clipped_leaves,
            "You clipped every leaf by its own norm; use the norm over all leaves.\n"
            "All leaves of an example are scaled by the same factor, so that its direction does not change.",
        ),
        Mistake(
            "norms of leaves were added",
            norms_added,
            "You added up the norms of the leaves; add up their squares: |tree| = sqrt(|w|**2 + |v|**2).",
        ),
        Mistake(
            "short gradients were made longer",
            all_scaled,
            "You scaled every gradient to the norm `clip`; those that are shorter must not change.\n"
            "The factor is min(1, clip / norm).",
        ),
        Mistake(
            "zero divided by zero",
            nothing_over_nothing,
            "Everything is NaN: the gradient of an example is exactly zero, and you divided by its norm, 0 / 0.\n"
            "Use a factor whose denominator cannot be zero, such as clip / max(norm, clip).",
        ),
    ),
    same=(Same("the order of the examples", other_order),),
    program=(
        scans(
            lambda params, x, y, clip, n: n,
            "No scan loops over the microbatches.\nIt should have `n_microbatches` iterations, and carry the sum of "
            "the clipped gradients.",
        ),
        carries(
            "scan",
            (1, 2),
            "Carry the sum of the clipped gradients through the scan, and return the final carry.",
            turns=lambda params, x, y, clip, n: (n,),
        ),
        one_microbatch(
            lambda params, x, y, clip, n: len(x) // n * (INPUTS * HIDDEN + HIDDEN),
            "The numbers are right, but the gradients of more than one microbatch exist at once.\n"
            "In each iteration of the scan, take the gradients of only N // n_microbatches examples.",
            names=("dot_general", "tanh"),
        ),
    ),
    memory=Slope(
        larger,
        "Either the gradients of all examples exist at once (a vmap over the full batch), or the scan stacks a "
        "gradient in every iteration, and they are kept until the end.\nCarry the sum of the clipped gradients, and "
        "stack nothing: return (total, None) from the body.",
        # jnp.stack(jnp.split(...)) copies the inputs, 7 KiB, which is allowed. Stacked gradients are 13 KiB.
        floor=10 * 1024,
        # Some correct programs have the gradients of a microbatch and the clipped ones in memory, 9 KiB each.
        room=3 * 4 * 8 * (INPUTS * HIDDEN + HIDDEN),
        full_batch="full_batch_beside_a_scan",
    ),
)
