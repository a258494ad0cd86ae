"""Checks the gradient of a network's mean loss, and that its memory does not grow with the batch."""

import itertools

import jax
import numpy as np

from anybatch.learn.check import Case, Check, Mistake, Same, Slope

# Activations (64 examples of 256 numbers) are far larger than the parameters (1025). A copy of the inputs (3 numbers
# for each example), which jnp.stack(jnp.split(...)) makes, stays within the 5%; gradients that are stacked do not.
WIDTHS, SIZE, COUNT = (2, 256, 1), 64, 2


def problem(rng, widths, num_examples):
    """A network and a batch."""
    params = [
        {
            "w": (rng.normal(size=(inputs, outputs)) / np.sqrt(inputs)).astype(np.float32),
            "b": rng.normal(size=outputs).astype(np.float32),
        }
        for inputs, outputs in itertools.pairwise(widths)
    ]
    x = rng.normal(size=(num_examples, widths[0])).astype(np.float32)
    return params, x, (2 + rng.normal(size=num_examples)).astype(np.float32)


def larger(rng, times):
    """A batch `times` times as large, in microbatches of the same size."""
    return *problem(rng, WIDTHS, SIZE * COUNT * times), COUNT * times


def cases(rng):
    """Two problems with the shapes that `memory` uses, so that nothing more has to be compiled."""
    # The number of microbatches makes no difference: there are 2 here, and 8 in the larger batch of `memory`.
    for _ in range(2):
        yield Case(larger(rng, 1), f"{SIZE * COUNT} examples in {COUNT} microbatches")


def reference(params, x, y, n):
    """Forward and backward through the network, all examples at once."""
    inputs = [x]
    for layer in params[:-1]:
        inputs.append(np.tanh(inputs[-1] @ layer["w"] + layer["b"]))
    errors = (inputs[-1] @ params[-1]["w"] + params[-1]["b"])[:, 0] - y
    back = 2 * errors[:, None] / len(y)
    gradients = []
    for layer, given in zip(reversed(params), reversed(inputs), strict=True):
        gradients.append({"w": given.T @ back, "b": back.sum(axis=0)})
        back = (back @ layer["w"].T) * (1 - given**2)
    return gradients[::-1]


def times(factor):
    """The right answer times a factor, a function of the numbers of microbatches and examples."""

    def answer(params, x, y, n):
        return jax.tree.map(lambda leaf: leaf * factor(n, len(y)), reference(params, x, y, n))

    return answer


def last_only(params, x, y, n):
    """The gradient of the last microbatch."""
    size = len(y) // n
    return reference(params, x[-size:], y[-size:], 1)


def loops_that_stack(program, args):
    """No loop may stack what its iterations computed. The memory check would find it, too, but not say why."""
    params, _, _, n = args
    large = n * sum(leaf.size for leaf in jax.tree.leaves(params))
    loops = program.find("scan", outside="scan")
    if not any(sum(array.size for array in scan.stacked) >= large for scan in loops):
        return None
    # Differentiating a scan makes two: one forward, which stacks what the other one, backward, needs.
    if any(scan.params["reverse"] for scan in loops):
        return (
            "You took the gradient of the loop; take it inside the loop.\n"
            "To differentiate a scan, JAX keeps the activations of all microbatches until the backward pass. Call "
            "jax.grad(loss) in the body of the scan, and carry the sum of the gradients."
        )
    return (
        "Your loop keeps the gradient of every microbatch, and they are averaged afterwards.\n"
        "The second output of a scan's body is stacked, and so is the output of jax.lax.map: n gradients are in "
        "memory. Carry one running sum, jax.tree.map(jnp.add, total, gradient), and return None as the second output."
    )


check = Check(
    function="accumulate",
    parameters=("params", "x", "y", "n_microbatches"),
    cases=cases,
    reference=reference,
    mistakes=(
        Mistake(
            "the sum of the microbatches",
            times(lambda n, size: n),
            lambda params, x, y, n: (
                f"You added up the gradients of {n} microbatches; the loss is a mean, so divide by {n}.\n"
                "Each microbatch gives the gradient of its own mean, and has the weight 1/n."
            ),
        ),
        Mistake(
            "divided twice",
            times(lambda n, size: 1 / n),
            lambda params, x, y, n: (
                f"Divided twice: this is the gradient, divided by {n} once too often.\n"
                "Divide either in the body of the loop or after it, not both."
            ),
        ),
        Mistake(
            "divided by the examples",
            times(lambda n, size: n / size),
            lambda params, x, y, n: (
                f"You divided by the number of examples, {len(y)}; the loss of a microbatch is already a mean.\n"
                f"Only the {n} gradients remain to be averaged: divide their sum by {n}."
            ),
        ),
        Mistake(
            "only the last microbatch",
            last_only,
            "This is the gradient of only the last microbatch.\n"
            "Add each gradient to the carry in the body of the scan: jax.tree.map(jnp.add, total, gradient).",
        ),
    ),
    same=(
        Same(
            "the order of the examples",
            lambda rng, args: _permuted(rng, *args),
            says="A mean does not depend on the order of the examples. Does every example count, with the same weight?",
        ),
    ),
    program=(loops_that_stack,),
    memory=Slope(
        larger,
        "Something keeps the activations of all microbatches. jax.grad of the full batch and jax.vmap over "
        "microbatches run all examples through the network at once, and so may a Python loop, which is unrolled.\n"
        "Use jax.lax.scan: take the gradient of one microbatch in its body, and carry the sum.",
        full_batch="full_batch",
    ),
)


def _permuted(rng, params, x, y, n):
    order = rng.permutation(len(y))
    return params, x[order], y[order], n
