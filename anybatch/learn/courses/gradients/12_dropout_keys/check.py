"""Checks that dropout masks depend on the examples, and not on how the batch is cut."""

import functools

import numpy as np

from anybatch.learn.check import Case, Check, Mistake, Same
from anybatch.learn.rules import carries, computes_in, one_microbatch, scans, stacks_less_than

EXAMPLES, WIDTH, HIDDEN, MICROBATCHES, RATE = 12, 4, 16, 4, 0.25


def threefry(key, counts):
    """JAX's generator, two words for each count, in numpy: grading should compile nothing and use no accelerator."""
    words = [*key, key[0] ^ key[1] ^ np.uint32(0x1BD11BDA)]
    one, other = words[0] + np.zeros_like(counts), words[1] + counts
    for step in range(5):
        for by in ((13, 15, 26, 6), (17, 29, 16, 24))[step % 2]:
            one = one + other
            other = one ^ (other << np.uint32(by) | other >> np.uint32(32 - by))
        one = one + words[(step + 1) % 3]
        other = other + words[(step + 2) % 3] + np.uint32(step + 1)
    return one, other


def fold_in(key, indices):
    """The same as `jax.random.fold_in` for each index; `jax.random.split(key, n)` gives the same keys."""
    return zip(*threefry(key, np.asarray(indices, np.uint32)), strict=True)


def uniform(key, *shape):
    """The same as `jax.random.uniform(key, shape)`."""
    one, other = threefry(key, np.arange(np.prod(shape), dtype=np.uint32))
    return (((one ^ other) >> np.uint32(9)) * 2.0**-23).reshape(shape)


def kept(key, *shape):
    """The same as `jax.random.bernoulli(key, 1 - RATE, shape)`."""
    return uniform(key, *shape) < 1 - RATE


@functools.lru_cache(maxsize=16)
def rows(*key):
    """The uniform numbers from which the masks of all examples are drawn."""
    return np.stack([uniform(each, HIDDEN) for each in fold_in(key, range(EXAMPLES))])


def by_example(key, n):
    """The right masks. The functions below draw others, by mistake."""
    return rows(*key) < 1 - RATE


def by_place_in_microbatch(key, n):
    return np.tile(by_example(key, n)[: EXAMPLES // n], (n, 1))


def same_in_each(key, n):
    return np.tile(kept(key, EXAMPLES // n, HIDDEN), (n, 1))


def by_microbatch(key, n):
    return np.concatenate([kept(each, EXAMPLES // n, HIDDEN) for each in fold_in(key, range(n))])


def by_first_example(key, n):
    size = EXAMPLES // n
    return np.concatenate([kept(each, size, HIDDEN) for each in fold_in(key, range(0, EXAMPLES, size))])


def a_row_by_microbatch(key, n):
    return np.repeat(by_example(key, n)[:n], EXAMPLES // n, 0)


def one_for_all(key, n):
    return np.tile(kept(key, HIDDEN), (EXAMPLES, 1))


def full_batch(key, n):
    return kept(key, EXAMPLES, HIDDEN)


def answer_with(masks, scale=1 / (1 - RATE)):
    """The answer with these masks and this scale."""

    def answer(params, key, x, y, n):
        mask = masks(key, n) * scale
        hidden = np.tanh(x @ params["w"])
        error = 2 / len(y) * ((hidden * mask) @ params["v"] - y)
        back = error[:, None] * params["v"] * mask * (1 - hidden**2)
        return {"w": x.T @ back, "v": error @ (hidden * mask)}

    return answer


WHAT_TO_DO = (
    "Fold the example's index in the full batch into the key: cut jnp.arange(N) into microbatches like x and y, and "
    "use jax.vmap over the indices."
)
MISTAKES = [
    Mistake(
        "the same masks in every microbatch",
        answer_with(same_in_each),
        lambda params, key, x, y, n: (
            f"All {n} microbatches have the same dropout masks: each drew them from the same key.\n"
            "The noise is repeated in every microbatch, and does not average out. " + WHAT_TO_DO
        ),
    ),
    Mistake(
        "the same masks in every microbatch",
        answer_with(by_place_in_microbatch),
        lambda params, key, x, y, n: (
            f"All {n} microbatches have the same dropout masks: the indices start at 0 in each of them.\n" + WHAT_TO_DO
        ),
    ),
    Mistake(
        "a key for each microbatch",
        answer_with(by_microbatch),
        "You drew the masks of a microbatch from one key, made from its number.\n"
        "They are all different, but an example gets another mask if the batch is cut in another way. " + WHAT_TO_DO,
    ),
    Mistake(
        "a key for each microbatch",
        answer_with(by_first_example),
        "You drew the masks of a microbatch from one key, made from the index of its first example.\n"
        "They are all different, but an example gets another mask if the batch is cut in another way. " + WHAT_TO_DO,
    ),
    Mistake(
        "a key for each microbatch",
        answer_with(a_row_by_microbatch),
        "All examples of a microbatch have the same mask: you drew one row for each microbatch.\n" + WHAT_TO_DO,
    ),
    Mistake(
        "the same masks in every microbatch",
        answer_with(one_for_all),
        "All examples have the same mask: you drew it once, from the key itself.\n" + WHAT_TO_DO,
    ),
    Mistake(
        "one draw for the full batch",
        answer_with(full_batch),
        "You drew the masks of the full batch at once, from the key itself.\n"
        "They do not depend on the microbatches, but all of them are in memory at once, and they are not the masks "
        "that the exercise asks for. " + WHAT_TO_DO,
    ),
    Mistake(
        "another scale",
        answer_with(by_example, scale=1),
        "You kept the right units, but they must be scaled by 1 / (1 - RATE).\n"
        "A quarter of the units is dropped, and the scale makes up for it, so that the mean of a hidden unit does not "
        "change.",
    ),
    Mistake(
        "another scale",
        answer_with(by_example, scale=1 / RATE),
        "You kept the right units, but divided by RATE; divide by 1 - RATE, the fraction that is kept.",
    ),
    Mistake(
        "kept and dropped mixed up",
        answer_with(lambda key, n: rows(*key) >= RATE),
        "You drew which units to drop, with RATE; draw which to keep, with 1 - RATE.\n"
        "Both are valid dropout, but the masks differ, and in this exercise True means kept.",
    ),
    Mistake(
        "kept and dropped mixed up",
        answer_with(lambda key, n: rows(*key) < RATE),
        "You kept a quarter of the units; drop a quarter.\nPass bernoulli the probability to keep, 1 - RATE.",
    ),
    Mistake(
        "kept and dropped mixed up",
        answer_with(lambda key, n: ~by_example(key, n)),
        "You dropped the units to keep: where bernoulli(..., 1 - RATE, ...) is True, a unit is kept.",
    ),
]


def cases(rng):
    def case(note):
        params = {"w": rng.normal(size=(WIDTH, HIDDEN)) / 2, "v": rng.normal(size=HIDDEN) / 4}
        arrays = (rng.normal(size=(EXAMPLES, WIDTH)), rng.normal(size=EXAMPLES))
        key = rng.integers(0, 2**32, 2, dtype=np.uint32)
        floats = {name: value.astype(np.float32) for name, value in params.items()}
        return Case((floats, key, *(each.astype(np.float32) for each in arrays), MICROBATCHES), note)

    yield case("12 examples in 4 microbatches")
    yield case("12 examples in 4 microbatches, with another key")


def other_number(rng, args):
    return (*args[:-1], 2)


check = Check(
    function="dropout_grads",
    parameters=("params", "key", "x", "y", "n_microbatches"),
    cases=lambda rng: list(cases(rng)),
    reference=answer_with(by_example),
    mistakes=MISTAKES,
    same=[Same("the number of microbatches", other_number, says="Examples get other masks. " + WHAT_TO_DO)],
    program=[
        scans(
            lambda params, key, x, y, n: n,
            "The numbers are right, but there is no lax.scan with one iteration for each microbatch.\n"
            "Cut x, y and the indices into (n_microbatches, N // n_microbatches, ...) and scan over them.",
        ),
        computes_in(
            "scan",
            lambda params, key, x, y, n: EXAMPLES * HIDDEN,
            "The numbers are right, but masks or hidden units of the full batch are computed at once, outside of the "
            "scan.\n"
            "Cut the indices like x and y, and draw the masks of a microbatch in its own iteration.",
        ),
        stacks_less_than(
            lambda params, key, x, y, n: n * HIDDEN,
            "The numbers are right, but the scan keeps something of each microbatch until the end.\n"
            "Either it stacks the gradients, or jax.grad of the scan keeps what the backward pass needs. "
            "Take the gradient inside the scan, and add it to the carry.",
            turns=lambda params, key, x, y, n: n,
        ),
        one_microbatch(
            # The weights are larger than the hidden units of a microbatch, and smaller than those of half of the batch.
            lambda params, key, x, y, n: max(EXAMPLES // n * HIDDEN, WIDTH * HIDDEN),
            "The numbers are right, but more than one microbatch is computed at once.\n"
            "In each iteration of the scan, use only its own N // n_microbatches examples, and their masks.",
            of=("float", "uint", "int", "bool"),
            # A gradient for each example of a microbatch.
            but=lambda params, key, x, y, n: (EXAMPLES // n, WIDTH, HIDDEN),
        ),
        carries(
            "scan",
            (2, 3),
            "Carry the sum of the gradients through the scan, and divide the final carry.",
            turns=lambda params, key, x, y, n: (n,),
        ),
    ],
)
