"""The sum over microbatches, in a scan of n turns with the gradient inside of it."""

import numpy as np

from anybatch.learn.check import Case, Check, Mistake, Raises, Same
from anybatch.learn.rules import MOVES, carries, other_numbers

N = 24
DIVISORS = (1, 2, 3, 6, 8, 12, 24)
# What is done to the whole batch before the loop, by those who cut it with jnp.stack(jnp.split(...)) or .at[].set.
CUTS = MOVES | {"stack", "tile", "scatter"}


def cases(rng):
    """Plain numbers of microbatches; a float one with Python numbers; and those that do not fit."""

    def numbers():
        # Away from zero, so that no mistake hides: w x - y is large for most examples, and the sum does not cancel.
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
    """What is left if the carry is replaced, not added to."""
    return reference(w, b, x[-(N // int(n)) :], y[-(N // int(n)) :], n)


def loop_over_microbatches(program, args):
    """A scan with a turn for each microbatch, but for the first, which may come before the loop."""
    n = int(args[4])
    if any(scan.params["length"] in (n, n - 1) for scan in program.find("scan")):
        return None
    return (
        f"There is no scan of {n} turns in the program that JAX traced.\n"
        "A Python loop is unrolled, n copies one after the other, and the whole batch at once needs the memory of all. "
        "Use jax.lax.scan over microbatches of N / n examples: one body, which runs n times."
    )


def loops_that_stack(program, args):
    """Neither residuals nor gradients of all microbatches are put out by a loop."""
    n = int(args[4])
    # A loop over the examples of one microbatch, inside of a turn, may.
    loops = [scan for scan in program.find("scan") if "scan" not in scan.inside or scan.params["length"] == n]
    if not any(sum(array.size for array in scan.stacked) >= n for scan in loops):
        return None
    # Differentiating a loop makes two of it: one forward, which keeps what the other, backward, needs.
    if any(scan.params["reverse"] for scan in program.find("scan")):
        return (
            "You took the gradient of the whole loop; take it inside of the loop.\n"
            "To differentiate a scan, JAX keeps what every turn computed until the way back: all microbatches are in "
            "memory at once. Call jax.grad(loss) in the body of the scan, and carry the sum of the gradients."
        )
    return (
        "Your loop keeps the gradient of every microbatch, and they are added up afterwards.\n"
        "What the body returns second (and what jax.lax.map returns) is stacked: n gradients in memory. "
        "Add up in the carry, which is one number here, and return None second."
    )


def whole_batch_at_once(program, args):
    """Arithmetic is done with one microbatch; the whole batch is only cut, moved and cast."""
    size, n = len(args[2]), int(args[4])
    # What holds a program of its own (a scan, a call of any kind) computes nothing beside what is in it.
    arithmetic = [each for each in program.find() if each.name not in CUTS and not each.bodies]
    for operation in arithmetic:
        arrays = (*operation.inputs, *operation.outputs)
        # Whole numbers are indices, which somebody may take the microbatches by.
        found = max((array.size for array in arrays if array.dtype.startswith(("float", "complex"))), default=0)
        if found <= size // n:
            continue
        what = "the whole batch" if found >= size else f"{found} examples"
        if "scan" not in operation.inside:
            return (
                f"There is a scan, but {what} {'is' if found >= size else 'are'} computed with outside of it.\n"
                "Only cutting and reshaping belong there. Take the gradient of one microbatch in the body of the scan, "
                f"of {size // n} examples."
            )
        return (
            f"Every turn of your scan computes with {what}.\n"
            f"There are {size} examples, and a turn should see {size // n} of them: "
            "give the scan the microbatches, an array of n rows, as its third argument."
        )
    return None


def other_rows(args):
    """Other examples, but for those of the first and the last microbatch, which may come before or after the loop."""
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
                "The loss is a sum over examples, so the gradients of the microbatches only have to be added up."
            ),
        ),
        Mistake(
            "the mean over the examples",
            lambda w, b, x, y, n: reference(w, b, x, y, n) / N,
            f"You averaged over the {N} examples; this exercise asks for the sum.\n"
            "The loss is jnp.sum((w * x - y) ** 2): nothing is divided by the number of examples.",
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
            "This is the gradient of the last microbatch alone.\n"
            "The body of the scan has to add its gradient to the carry: return carry + gradient, None.",
        ),
    ),
    same=(
        Same(
            "the number of microbatches",
            lambda rng, args: (*args[:4], int(rng.choice(DIVISORS))),
            says="A sum may be cut anywhere. Does your code use every example once, and divide by nothing?",
        ),
    ),
    program=(
        loop_over_microbatches,
        loops_that_stack,
        whole_batch_at_once,
        carries(
            "scan",
            other_rows,
            "Let the scan carry the sum of the gradients, and return what it carried.",
            turns=lambda w, b, x, y, n: (int(n), int(n) - 1),
        ),
    ),
)
