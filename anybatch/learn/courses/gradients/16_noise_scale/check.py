"""Checks unbiased estimates of the variance of a gradient, and of its square without noise."""

import numpy as np

from anybatch.learn.check import Case, Check, Mistake, Same, Slope
from anybatch.learn.rules import carries, one_microbatch, scans

INPUTS, HIDDEN = 8, 32


def problem(rng, examples):
    """Parameters and a batch with noise and gradient of similar size.

    A tenth to a half of the squared mean gradient of 32 examples is noise: enough to see a bias, and little enough that
    the difference keeps most of its digits.
    """
    params = {"w": rng.normal(size=(INPUTS, HIDDEN)) / INPUTS**0.5, "v": rng.normal(size=HIDDEN) / HIDDEN**0.5}
    x = 0.5 + rng.normal(size=(examples, INPUTS))
    y = np.tanh(x @ params["w"]) @ params["v"] + 1 + 0.5 * rng.normal(size=examples)
    params = {name: leaf.astype(np.float32) for name, leaf in params.items()}
    return params, x.astype(np.float32), y.astype(np.float32)


def gradients(params, x, y):
    """A gradient for each example, as a row."""
    hidden = np.tanh(x @ params["w"])
    error = 2 * (hidden @ params["v"] - y)[:, None]
    back = error * params["v"] * (1 - hidden**2)
    return np.concatenate([(x[:, :, None] * back[:, None, :]).reshape(len(x), -1), error * hidden], axis=1)


def parts(trace, gradient_square):
    """An answer."""
    return {"trace": np.asarray(trace), "gradient_square": np.asarray(gradient_square)}


def estimates(each, ddof=1, subtracted=1.0):
    """The variance of gradients, and the square of their mean minus `subtracted` times the variance of the mean."""
    trace = np.sum((each - each.mean(axis=0)) ** 2) / (len(each) - ddof)
    return parts(trace, np.sum(each.mean(axis=0) ** 2) - subtracted * trace / len(each))


def reference(params, x, y, n_microbatches):
    """The estimates from all examples at once."""
    return estimates(gradients(params, x, y))


def wrongly(**options):
    """The estimates, with other options."""
    return lambda params, x, y, n_microbatches: estimates(gradients(params, x, y), **options)


def not_centred(subtracted):
    """The mean of the squares instead of the variance."""

    def answer(params, x, y, n_microbatches):
        each = gradients(params, x, y)
        trace = np.sum(each**2) / len(each)
        return parts(trace, np.sum(each.mean(axis=0) ** 2) - subtracted * trace / len(each))

    return answer


def of_norms(params, x, y, n_microbatches):
    """The variance of norms, and the square of their mean."""
    return estimates(np.linalg.norm(gradients(params, x, y), axis=1)[:, None])


def variance_of_norms(params, x, y, n_microbatches):
    """The variance of norms, and the square of the mean gradient corrected with it."""
    each = gradients(params, x, y)
    trace = np.var(np.linalg.norm(each, axis=1), ddof=1)
    return parts(trace, np.sum(each.mean(axis=0) ** 2) - trace / len(each))


def square_of_mean_norm(subtracted):
    """The right variance, and the square of the mean of the norms."""

    def answer(params, x, y, n_microbatches):
        each = gradients(params, x, y)
        trace = estimates(each)["trace"]
        return parts(trace, np.mean(np.linalg.norm(each, axis=1)) ** 2 - subtracted * trace / len(each))

    return answer


def of_microbatches(is_scaled):
    """The estimates from the mean gradients of microbatches; their variance is tr(C) over the microbatch size."""

    def answer(params, x, y, n_microbatches):
        means = gradients(params, x, y).reshape(n_microbatches, -1, INPUTS * HIDDEN + HIDDEN).mean(axis=1)
        found = estimates(means)
        return parts(found["trace"] * (len(x) // n_microbatches if is_scaled else 1), found["gradient_square"])

    return answer


def cases(rng):
    """Two batches."""
    note = "32 examples in 4 microbatches"
    return [Case((*problem(rng, 32), 4), note), Case((*problem(rng, 32), 4), note)]


def other_order(rng, args):
    """The same examples in another order."""
    params, x, y, number = args
    order = rng.permutation(len(x))
    return params, x[order], y[order], number


def larger(rng, times):
    """A batch `times` times as large, in microbatches of 8."""
    return (*problem(rng, 32 * times), 4 * times)


check = Check(
    function="noise_scale",
    parameters=("params", "x", "y", "n_microbatches"),
    cases=cases,
    reference=reference,
    mistakes=(
        Mistake(
            "noise in the square",
            wrongly(subtracted=0.0),
            "The trace is right, but gradient_square is the square of the mean gradient, including its noise.\n"
            "On average it is too large by the variance of that mean: subtract trace / N.",
        ),
        Mistake(
            "divided by N",
            wrongly(ddof=0),
            "You divided the sum of squared deviations by N; divide by N - 1.\n"
            "Gradients vary less around their own mean than around the true one, and N - 1 corrects for that.",
        ),
        Mistake(
            "divided by N",
            wrongly(ddof=0, subtracted=0.0),
            "Both estimates are biased.\nDivide the sum of squared deviations by N - 1, not by N; and subtract trace / "
            "N from the square of the mean gradient.",
        ),
        Mistake(
            "noise in the square",
            lambda params, x, y, n: wrongly(subtracted=float(len(x)))(params, x, y, n),
            "The trace is right, but you subtracted all of it from the square; the noise in a mean of N is trace / N.",
        ),
        Mistake(
            "noise in the square",
            wrongly(subtracted=-1.0),
            "The trace is right, but you added trace / N to the square; subtract it.\n"
            "Noise makes the square of the mean larger, not smaller.",
        ),
        *(
            Mistake(
                "the mean of the squares",
                not_centred(subtracted),
                "This trace is the mean of the squared norms; for a variance, subtract the squared mean.\n"
                "The trace is the sum of |g|**2 minus N |mean|**2, divided by N - 1.",
            )
            for subtracted in (0.0, 1.0)
        ),
        *(
            Mistake(
                "norms for gradients",
                answer,
                "You took the variance of the norms; take that of the gradients, which also vary in direction.\n"
                "The trace is the sum of the variances of all entries of a gradient.",
            )
            for answer in (of_norms, variance_of_norms)
        ),
        *(
            Mistake(
                "norms for gradients",
                square_of_mean_norm(subtracted),
                "The trace is right, but gradient_square uses the mean of the norms, not the norm of the mean.\n"
                "Gradients in opposite directions cancel, their norms do not.",
            )
            for subtracted in (0.0, 1.0)
        ),
        Mistake(
            "microbatches for examples",
            of_microbatches(is_scaled=False),
            "This is the variance of the mean gradients of microbatches; it is smaller than that of one example.\n"
            "Use per-example gradients: jax.vmap(jax.grad(loss), (None, 0, 0)).",
        ),
        Mistake(
            "microbatches for examples",
            of_microbatches(is_scaled=True),
            "This is also an unbiased estimate, but from the gradients of microbatches.\n"
            "Use per-example gradients: that estimate is more precise, and the same for any number of microbatches.",
        ),
    ),
    same=(Same("the order of the examples", other_order),),
    program=(
        scans(
            lambda params, x, y, n: n,
            "No scan loops over the microbatches.\nIt should have `n_microbatches` iterations, and carry the sum of "
            "the gradients and the sum of their squares.",
        ),
        carries(
            "scan",
            (1, 2),
            "Carry the sum of the gradients and the sum of their squares through the scan, and use the final carry.",
            turns=lambda params, x, y, n: (n,),
        ),
        one_microbatch(
            lambda params, x, y, n: len(x) // n * (INPUTS * HIDDEN + HIDDEN),
            "The numbers are right, but the gradients of more than one microbatch exist at once.\n"
            "In each iteration of the scan, take the gradients of only N // n_microbatches examples.",
            names=("dot_general", "tanh"),
        ),
    ),
    memory=Slope(
        larger,
        "Gradients are kept: those of all examples (a vmap over the full batch), or one of every iteration.\n"
        "Two sums are enough, of the gradients and of their squared norms. Carry both, and stack nothing.",
        # jnp.stack(jnp.split(...)) copies the inputs, 7 KiB, which is allowed. Stacked gradients are 13 KiB.
        floor=10 * 1024,
        # Some correct programs have the gradients of a microbatch and their squares in memory, 9 KiB each.
        room=3 * 4 * 8 * (INPUTS * HIDDEN + HIDDEN),
        full_batch="full_batch",
    ),
)
