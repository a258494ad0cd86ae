"""Cut a batch: contiguous microbatches, and a clear error for a count that does not fit."""

import numpy as np

from anybatch.learn.check import Case, Check, Mistake, Raises


def cases(rng):
    """Counts that divide, one of them a float, the smallest and the largest; and counts that do not."""
    return [
        *(Case((batch(rng, 12), 3), "12 examples in 3 microbatches") for _ in range(2)),
        Case((batch(rng, 12), 4.0), "12 examples in 4.0 microbatches, a float"),
        Case((batch(rng, 10), 1), "10 examples in 1 microbatch"),
        Case((batch(rng, 6), 6), "6 examples in 6 microbatches"),
        *(Raises((batch(rng, 12), count), (str(count), "12"), note) for count, note in REFUSED.items()),
    ]


REFUSED = {
    5: "12 examples in 5 microbatches: 2 examples would be left over",
    24: "12 examples in 24 microbatches: there would be half an example in each",
    2.5: "12 examples in 2.5 microbatches: a count is a whole number, even as a float",
    0: "12 examples in 0 microbatches: there would be no place for them",
    -3: "12 examples in -3 microbatches: 12 % -3 is 0 in Python, and still it is no count",
}


def batch(rng, examples):
    """Arrays of three kinds, nested, with the examples along axis 0."""
    return {
        "target": (rng.integers(0, 9, examples).astype(np.int32), rng.random(examples).astype(np.float32)),
        "x": rng.normal(size=(examples, 2, 3)).astype(np.float32),
    }


def each_leaf(change):
    """An answer: every array of the batch, changed by a function of it, the count, and the size of a microbatch."""

    def answer(batch, n_microbatches):
        n = int(n_microbatches)
        labels, weights = batch["target"]
        changed = [change(leaf, n, len(leaf) // n) for leaf in (labels, weights, batch["x"])]
        return {"target": tuple(changed[:2]), "x": changed[2]}

    return answer


reference = each_leaf(lambda leaf, n, size: leaf.reshape(n, size, *leaf.shape[1:]))


def list_of_batches(batch, n_microbatches):
    """A list of n trees."""
    whole = reference(batch, n_microbatches)
    labels, weights = whole["target"]
    rows = zip(labels, weights, whole["x"], strict=True)
    return [{"target": (label, weight), "x": x} for label, weight, x in rows]


MISTAKES = (
    Mistake(
        "count and size swapped",
        each_leaf(lambda leaf, n, size: leaf.reshape(size, n, *leaf.shape[1:])),
        lambda batch, n: (
            f"There are {len(batch['x']) // int(n)} microbatches of {int(n)} examples; it should be {int(n)} of "
            f"{len(batch['x']) // int(n)}.\nThe microbatches go along the first axis, where a scan walks; the examples "
            "of one along the second."
        ),
    ),
    Mistake(
        "strided",
        each_leaf(lambda leaf, n, size: leaf.reshape(size, n, *leaf.shape[1:]).swapaxes(0, 1)),
        lambda batch, n: (
            f"The shape is right, but the examples are dealt like cards.\nMicrobatch 0 has the examples 0, {int(n)}, "
            f"{2 * int(n)}, ... This exercise asks for neighbours: 0, 1, 2, ... A reshape alone keeps the order."
        ),
    ),
    Mistake(
        "flattened",
        each_leaf(lambda leaf, n, size: leaf.reshape(n, -1)),
        "Each microbatch has become one long row; the other axes of the examples are gone.\nKeep them: "
        "leaf.reshape(n, size, *leaf.shape[1:]).",
    ),
    Mistake(
        "a list of microbatches",
        list_of_batches,
        "This is a list of microbatches; the exercise asks for one tree, whose arrays have an axis more.\n"
        "lax.scan walks along that axis, and cannot walk along a list.",
    ),
    Mistake(
        "a list for each array",
        each_leaf(lambda leaf, n, size: list(leaf.reshape(n, size, *leaf.shape[1:]))),
        "Each array has become a list of pieces, as jnp.split makes it; the exercise asks for one array with an axis "
        "more.\nlax.scan walks along that axis, and cannot walk along a list.",
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
