"""The check of this exercise. `anybatch.learn` documents everything that a `Check` can have."""

import numpy as np

from anybatch.learn import Case, Check, Mistake, Same


def cases(rng):
    """The cases, the simplest first. Cases with the same shapes share one compilation."""

    def some(examples):
        return np.float32(rng.uniform(1, 3)).reshape(()), rng.normal(size=examples).astype(np.float32)

    return [Case(some(6), "6 examples"), Case(some(6), "6 examples"), Case(some(1), "1 example")]


def reference(w, x):
    """The right answer, in numpy. The arguments come in float64."""
    return 2 * w * np.mean(x**2)


def permuted(rng, args):
    """The examples in another order."""
    return args[0], rng.permutation(args[1])


check = Check(
    function="mean_gradient",
    parameters=("w", "x"),
    cases=cases,
    reference=reference,
    mistakes=(
        Mistake(
            "a sum",
            lambda w, x: 2 * w * np.sum(x**2) if len(x) > 1 else None,  # None: no difference for one example
            lambda w, x: f"You have {len(x)} times the answer: this is the gradient of a sum, not of a mean.",
        ),
    ),
    same=(Same("the order of the examples", permuted, says="A mean does not depend on the order of its terms."),),
)
