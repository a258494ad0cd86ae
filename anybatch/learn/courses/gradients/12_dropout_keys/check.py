"""Dropout masks that belong to examples: the same whatever the microbatches are."""

import functools

import numpy as np

from anybatch.learn.check import Case, Check, Mistake, Same
from anybatch.learn.rules import carries, computes_in, one_microbatch, scans, stacks_less_than

EXAMPLES, WIDTH, HIDDEN, MICROBATCHES, RATE = 12, 4, 16, 4, 0.25


def threefry(key, counts):
    """JAX's generator: two words for each count. In numpy: grading compiles nothing, and takes no accelerator."""
    words = [*key, key[0] ^ key[1] ^ np.uint32(0x1BD11BDA)]
    one, other = words[0] + np.zeros_like(counts), words[1] + counts
    for turn in range(5):
        for by in ((13, 15, 26, 6), (17, 29, 16, 24))[turn % 2]:
            one = one + other
            other = one ^ (other << np.uint32(by) | other >> np.uint32(32 - by))
        one = one + words[(turn + 1) % 3]
        other = other + words[(turn + 2) % 3] + np.uint32(turn + 1)
    return one, other


def fold_in(key, indices):
    """As `jax.random.fold_in` for each index; `jax.random.split(key, n)` gives the same keys."""
    return zip(*threefry(key, np.asarray(indices, np.uint32)), strict=True)


def uniform(key, *shape):
    """As `jax.random.uniform(key, shape)`."""
    one, other = threefry(key, np.arange(np.prod(shape), dtype=np.uint32))
    return (((one ^ other) >> np.uint32(9)) * 2.0**-23).reshape(shape)


def kept(key, *shape):
    """As `jax.random.bernoulli(key, 1 - RATE, shape)`."""
    return uniform(key, *shape) < 1 - RATE


@functools.lru_cache(maxsize=16)
def rows(*key):
    """What the masks of all examples are drawn by."""
    return np.stack([uniform(each, HIDDEN) for each in fold_in(key, range(EXAMPLES))])


def by_example(key, n):
    """What is asked for. The others are what people draw instead."""
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
    """The answer of someone who keeps those hidden units, and scales them so."""

    def answer(params, key, x, y, n):
        mask = masks(key, n) * scale
        hidden = np.tanh(x @ params["w"])
        error = 2 / len(y) * ((hidden * mask) @ params["v"] - y)
        back = error[:, None] * params["v"] * mask * (1 - hidden**2)
        return {"w": x.T @ back, "v": error @ (hidden * mask)}

    return answer


WHAT_TO_DO = (
    "Fold the index of the example in the full batch into the key: jax.vmap over jnp.arange(N), cut into "
    "microbatches as x and y are."
)
MISTAKES = [
    Mistake(
        "the same masks in every microbatch",
        answer_with(same_in_each),
        lambda params, key, x, y, n: (
            f"All {n} microbatches have the same dropout masks: each drew them from the same key.\n"
            "The noise of the first example comes back in every microbatch, and does not average out. " + WHAT_TO_DO
        ),
    ),
    Mistake(
        "the same masks in every microbatch",
        answer_with(by_place_in_microbatch),
        lambda params, key, x, y, n: (
            f"All {n} microbatches have the same dropout masks: their examples are numbered from 0 in each.\n"
            "Add what comes before the microbatch to the number. " + WHAT_TO_DO
        ),
    ),
    Mistake(
        "a key for each microbatch",
        answer_with(by_microbatch),
        "You drew the masks of a microbatch from one key, made of its number.\n"
        "They are all different, but an example gets another mask if the batch is cut in another way. " + WHAT_TO_DO,
    ),
    Mistake(
        "a key for each microbatch",
        answer_with(by_first_example),
        "You drew the masks of a microbatch from one key, made of the index of its first example.\n"
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
        "All examples have the same mask: it was drawn once, from the key itself.\n" + WHAT_TO_DO,
    ),
    Mistake(
        "one draw for the full batch",
        answer_with(full_batch),
        "You drew the masks of the full batch at once, from the key itself.\n"
        "That does not depend on the microbatches, but all masks are in memory, and they are not those that were "
        "asked for. " + WHAT_TO_DO,
    ),
    Mistake(
        "another scale",
        answer_with(by_example, scale=1),
        "The masks are the right ones; what they keep must count 1 / (1 - RATE).\n"
        "A quarter of the units is gone, and the others make up for it, so that a hidden unit is as large as ever "
        "on average.",
    ),
    Mistake(
        "another scale",
        answer_with(by_example, scale=1 / RATE),
        "The masks are the right ones, but you divided by RATE; divide by 1 - RATE, the share that is kept.",
    ),
    Mistake(
        "kept and dropped mixed up",
        answer_with(lambda key, n: rows(*key) >= RATE),
        "You drew which units to drop, with RATE; draw which to keep, with 1 - RATE.\n"
        "On average that is the same. But one draw has to be agreed on, and here True is kept.",
    ),
    Mistake(
        "kept and dropped mixed up",
        answer_with(lambda key, n: rows(*key) < RATE),
        "You kept a quarter of the units; drop a quarter.\nPass bernoulli the probability to keep, 1 - RATE.",
    ),
    Mistake(
        "kept and dropped mixed up",
        answer_with(lambda key, n: ~by_example(key, n)),
        "You dropped the units that were to be kept: where bernoulli(..., 1 - RATE, ...) is True, a unit stays.",
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
            "The numbers are right, but masks or hidden units of the full batch are there at once, outside of the "
            "scan.\n"
            "Cut the indices as you cut x and y, and draw the masks of a microbatch in its own iteration.",
        ),
        stacks_less_than(
            lambda params, key, x, y, n: n * HIDDEN,
            "The numbers are right, but the scan keeps something of each microbatch until the end.\n"
            "These are the gradients, to be added up later, or what jax.grad needs to go back through the scan. "
            "Take the gradient inside it, and add it to the carry.",
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
            "Let the scan carry the sum of the gradients, and divide what it carried.",
            turns=lambda params, key, x, y, n: (n,),
        ),
    ],
)
