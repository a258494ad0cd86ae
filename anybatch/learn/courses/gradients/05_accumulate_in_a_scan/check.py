"""Checks the sum over microbatches, and that it is accumulated in a scan of length n with the gradient inside."""

import numpy as np

from anybatch.learn.check import Case, Check, Mistake, Raises, Same
from anybatch.learn.rules import MOVES, carries, other_numbers

N = 24
DIVISORS = (1, 2, 3, 6, 8, 12, 24)
# Operations that may be applied to the full batch before the loop: jnp.stack(jnp.split(...)) or .at[].set can cut it.
CUTS = MOVES | {"stack", "tile", "scatter"}


def cases(rng):
    """Counts that divide N, one of them a float, with Python numbers; and counts that do not fit."""

    def numbers():
        # Away from zero: w x - y is large for most examples and the sum does not cancel, so every mistake shows.
        x = rng.uniform(0.5, 2.0, N) * rng.choice((-1.0, 1.0), N)
        return x.astype(np.float32), (x * rng.uniform(-1.0, 1.0, N)).astype(np.float32)

    w, b = np.float32(rng.uniform(2.0, 3.0)), np.float32(rng.normal())
    x, y = numbers()
    other_x, other_y = numbers()
    yield Case((w, b, x, y, 4), f"{N} examples in 4 microbatches")
    yield Case((-w, b, other_x, other_y, 4), f"{N} examples in 4 microbatches, a negative w")
    yield Case((2, 0, x, y, 3.0), f"{N} examples in 3.0 microbatches, with w = 2, a Python int")
    for n in (7, 2.5, 0, -4, 48):
        yield Raises((w, b, x, y, n), mentions=(str(n), str(N)), note=f"{N} examples, n_microbatches={n}")


def reference(w, b, x, y, n):
    """The sum over all examples."""
    return np.sum(2 * x * (w * x - y))


def last_only(w, b, x, y, n):
    """The gradient of the last microbatch: the carry is replaced, not added to."""
    return reference(w, b, x[-(N // int(n)) :], y[-(N // int(n)) :], n)


def loop_over_microbatches(program, args):
    """The program must have a scan over the microbatches; the first may be computed before the loop."""
    n = int(args[4])
    if any(scan.params["length"] in (n, n - 1) for scan in program.find("scan")):
        return None
    return (
        f"There is no scan of length {n} in the program that JAX traced.\n"
        "A Python loop is unrolled into n copies, and the full batch at once needs the memory of all examples. "
        "Use jax.lax.scan over microbatches of N / n examples: its body is compiled once, and runs n times."
    )


def loops_that_stack(program, args):
    """No loop may stack the residuals or gradients of all microbatches."""
    n = int(args[4])
    # A loop over the examples of one microbatch, inside an iteration, may.
    loops = [scan for scan in program.find("scan") if "scan" not in scan.inside or scan.params["length"] == n]
    if not any(sum(array.size for array in scan.stacked) >= n for scan in loops):
        return None
    # Differentiating a scan makes two: one forward, which stacks what the other one, backward, needs.
    if any(scan.params["reverse"] for scan in program.find("scan")):
        return (
            "You took the gradient of the loop; take it inside the loop.\n"
            "To differentiate a scan, JAX keeps what every iteration computed until the backward pass, so all "
            "microbatches are in memory at once. Call jax.grad(loss) in the body of the scan, and carry the sum of the "
            "gradients."
        )
    return (
        "Your loop keeps the gradient of every microbatch, and they are added up afterwards.\n"
        "The second output of the body (and of jax.lax.map) is stacked: n gradients are in memory. "
        "Add them up in the carry, which is one number here, and return None as the second output."
    )


def full_batch_at_once(program, args):
    """Only one microbatch may be computed with at a time; the full batch may only be cut, moved and cast."""
    size, n = len(args[2]), int(args[4])
    # A scan or a call computes nothing itself; the operations inside of it do.
    arithmetic = [each for each in program.find() if each.name not in CUTS and not each.bodies]
    for operation in arithmetic:
        arrays = (*operation.inputs, *operation.outputs)
        # Integer arrays may be indices that select the microbatches.
        found = max((array.size for array in arrays if array.dtype.startswith(("float", "complex"))), default=0)
        if found <= size // n:
            continue
        what = "the full batch" if found >= size else f"{found} examples"
        if "scan" not in operation.inside:
            return (
                f"There is a scan, but your code also computes with {what} outside of it.\n"
                "Only cut and reshape there. In the body of the scan, take the gradient of one microbatch of "
                f"{size // n} examples."
            )
        return (
            f"Every iteration of your scan computes with {what}.\n"
            f"There are {size} examples, and each iteration should use {size // n} of them: "
            "pass the microbatches, an array of n rows, as the third argument of the scan."
        )
    return None


def other_rows(args):
    """Other numbers for all examples but those of the first and last microbatch, which may be outside of the loop."""
    size = len(args[2]) // int(args[4])
    return other_numbers(args, 2, 3, rows=slice(size, -size))


check = Check(
    function="microbatched_grads",
    parameters=("w", "b", "x_full", "y_full", "n_microbatches"),
    cases=cases,
    reference=reference,
    mistakes=(
        Mistake(
            "the mean of the microbatches",
            lambda w, b, x, y, n: reference(w, b, x, y, n) / n,
            lambda w, b, x, y, n: (
                f"You averaged over the {int(n)} microbatches; this exercise asks for the sum.\n"
                "The loss is a sum over examples, so just add up the gradients of the microbatches."
            ),
        ),
        Mistake(
            "the mean over the examples",
            lambda w, b, x, y, n: reference(w, b, x, y, n) / N,
            f"You averaged over the {N} examples; this exercise asks for the sum.\n"
            "The loss is jnp.sum((w * x - y) ** 2): do not divide by the number of examples.",
        ),
        Mistake(
            "the sum of the means of the microbatches",
            lambda w, b, x, y, n: reference(w, b, x, y, n) * n / N,
            lambda w, b, x, y, n: (
                f"Your loss is a mean over the {N // int(n)} examples of a microbatch; it must be a sum.\n"
                "Sums can be cut anywhere. With means, the result would depend on the number of microbatches."
            ),
        ),
        Mistake(
            "only the last microbatch",
            last_only,
            "This is the gradient of only the last microbatch.\n"
            "Add each gradient to the carry in the body of the scan: return carry + gradient, None.",
        ),
    ),
    same=(
        Same(
            "the number of microbatches",
            lambda rng, args: (*args[:4], int(rng.choice(DIVISORS))),
            says="A sum can be cut anywhere. Does your code use every example once, and divide by nothing?",
        ),
    ),
    program=(
        loop_over_microbatches,
        loops_that_stack,
        full_batch_at_once,
        carries(
            "scan",
            other_rows,
            "Carry the sum of the gradients through the scan, and return the final carry.",
            turns=lambda w, b, x, y, n: (int(n), int(n) - 1),
        ),
    ),
)
