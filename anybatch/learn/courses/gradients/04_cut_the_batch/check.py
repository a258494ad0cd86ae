"""Checks that microbatches are contiguous, and that a count that does not fit gives a clear error."""

import numpy as np

from anybatch.learn.check import Case, Check, Mistake, Raises


def cases(rng):
    """Counts that divide N: one is a float, one the smallest, one the largest. And counts that do not."""
    return [
        *(Case((batch(rng, 12), 3), "12 examples in 3 microbatches") for _ in range(2)),
        Case((batch(rng, 12), 4.0), "12 examples in 4.0 microbatches, a float"),
        Case((batch(rng, 10), 1), "10 examples in 1 microbatch"),
        Case((batch(rng, 6), 6), "6 examples in 6 microbatches"),
        *(Raises((batch(rng, 12), count), (str(count), "12"), note) for count, note in REFUSED.items()),
    ]


REFUSED = {
    5: "12 examples in 5 microbatches: 2 examples would be left over",
    24: "12 examples in 24 microbatches: each would have half an example",
    2.5: "12 examples in 2.5 microbatches: a count must be an integer",
    0: "12 examples in 0 microbatches: they would have no place",
    -3: "12 examples in -3 microbatches: 12 % -3 is 0 in Python, but a count cannot be negative",
}


def batch(rng, examples):
    """A nested tree of three arrays, with the examples along axis 0."""
    return {
        "target": (rng.integers(0, 9, examples).astype(np.int32), rng.random(examples).astype(np.float32)),
        "x": rng.normal(size=(examples, 2, 3)).astype(np.float32),
    }


def each_leaf(change):
    """An answer: every array changed by a function of the array, the count, and the size of a microbatch."""

    def answer(batch, n_microbatches):
        n = int(n_microbatches)
        labels, weights = batch["target"]
        changed = [change(leaf, n, len(leaf) // n) for leaf in (labels, weights, batch["x"])]
        return {"target": tuple(changed[:2]), "x": changed[2]}

    return answer


reference = each_leaf(lambda leaf, n, size: leaf.reshape(n, size, *leaf.shape[1:]))


def list_of_batches(batch, n_microbatches):
    """A list of n trees."""
    right = reference(batch, n_microbatches)
    labels, weights = right["target"]
    rows = zip(labels, weights, right["x"], strict=True)
    return [{"target": (label, weight), "x": x} for label, weight, x in rows]


MISTAKES = (
    Mistake(
        "count and size swapped",
        each_leaf(lambda leaf, n, size: leaf.reshape(size, n, *leaf.shape[1:])),
        lambda batch, n: (
            f"There are {len(batch['x']) // int(n)} microbatches of {int(n)} examples; it should be {int(n)} of "
            f"{len(batch['x']) // int(n)}.\nPut the microbatches along the first axis, which a scan loops over, and "
            "the examples of each along the second."
        ),
    ),
    Mistake(
        "strided",
        each_leaf(lambda leaf, n, size: leaf.reshape(size, n, *leaf.shape[1:]).swapaxes(0, 1)),
        lambda batch, n: (
            f"The shape is right, but the examples are in the wrong order.\nMicrobatch 0 has the examples 0, {int(n)}, "
            f"{2 * int(n)}, ... This exercise asks for 0, 1, 2, ... A reshape without a transpose keeps the order."
        ),
    ),
    Mistake(
        "flattened",
        each_leaf(lambda leaf, n, size: leaf.reshape(n, -1)),
        "Each microbatch has become one long row: the other axes of the examples are gone.\nKeep them: "
        "leaf.reshape(n, size, *leaf.shape[1:]).",
    ),
    Mistake(
        "a list of microbatches",
        list_of_batches,
        "This is a list of microbatches; the exercise asks for one tree whose arrays have one more axis.\n"
        "jax.lax.scan loops over that axis, and cannot loop over a list.",
    ),
    Mistake(
        "a list for each array",
        each_leaf(lambda leaf, n, size: list(leaf.reshape(n, size, *leaf.shape[1:]))),
        "Each array has become a list of pieces, as jnp.split returns it; the exercise asks for one array with one "
        "more axis.\njax.lax.scan loops over that axis, and cannot loop over a list.",
    ),
)

check = Check(
    function="cut",
    parameters=("batch", "n_microbatches"),
    cases=cases,
    reference=reference,
    dtypes={"target": ("int32", "float32"), "x": "float32"},
    mistakes=MISTAKES,
)
