"""Checks a mean over tokens, computed from microbatches with different numbers of tokens, or none."""

import numpy as np

from anybatch.learn.check import Case, Check, Mistake, Same
from anybatch.learn.rules import carries, one_microbatch, scans, stacks_less_than

SEQUENCES, TOKENS, WIDTH, MICROBATCHES = 8, 6, 4, 4

# Operations that reduce. Masking the full batch before the scan is allowed; a matrix product with it is not.
REDUCES = ("dot_general", "reduce_sum", "reduce_max", "cumsum", "conv_general_dilated", "reduce")


def grads_of_sum(params, x, y, weights):
    """The gradient of the weighted sum of the squared errors."""
    error = weights * (x @ params["w"] + params["b"] - y)
    return {"w": 2 * np.einsum("nt,ntd->d", error, x), "b": 2 * error.sum()}


def weighted(weights_of):
    """An answer with the weights of the tokens that `weights_of(mask, n)` returns."""

    def answer(params, x, y, mask, n):
        return grads_of_sum(params, x, y, weights_of(mask.astype(np.float64), n))

    return answer


def in_microbatches(mask, n):
    """For each token, how many tokens count in its microbatch."""
    counts = mask.reshape(n, -1).sum(1)
    return np.repeat(counts, mask.size // n).reshape(mask.shape)


def mean_of_means(mask, n):
    return mask / np.maximum(in_microbatches(mask, n), 1) / n


def mean_of_means_that_exist(mask, n):
    there = (mask.reshape(n, -1).sum(1) > 0).sum()
    return mask / np.maximum(in_microbatches(mask, n), 1) / np.maximum(there, 1)


def without_a_number(params, x, y, mask, n):
    """A microbatch in which no token counts was divided by 0."""
    if mask.reshape(n, -1).any(1).all() or not mask.any():
        return None
    return {name: np.full_like(value, np.nan) for name, value in params.items()}


def without_any(params, x, y, mask, n):
    """A batch in which no token counts was divided by 0."""
    return None if mask.any() else {name: np.full_like(value, np.nan) for name, value in params.items()}


def counts_in_words(mask, n):
    counts = mask.reshape(n, -1).sum(1)
    return ", ".join(str(count) for count in counts[:-1]) + f" and {counts[-1]}"


def says_mean_of_means(params, x, y, mask, n):
    return (
        f"You averaged over the {n} microbatches; this exercise asks for the mean over all tokens.\n"
        f"They have {counts_in_words(mask, n)} tokens, but each got the same weight. In the scan, add up the gradients "
        "of the *sums* and the numbers of tokens, and divide once, at the end."
    )


MISTAKES = [
    Mistake("the mean of the microbatches' means", weighted(mean_of_means), says_mean_of_means),
    Mistake("the mean of the microbatches' means", weighted(mean_of_means_that_exist), says_mean_of_means),
    Mistake(
        "0 / 0",
        without_a_number,
        "A microbatch without tokens makes the answer NaN: you divided by its 0 tokens.\n"
        "A NaN in the carry stays there. Do not divide inside the scan: add up sums and counts, to which such a "
        "microbatch adds 0.",
    ),
    Mistake(
        "0 / 0",
        without_any,
        "A batch in which no token counts gives NaN, 0 / 0; here it must give zeros.\nDivide by jnp.maximum(count, 1).",
    ),
    Mistake(
        "divided by all tokens",
        weighted(lambda mask, n: mask / mask.size),
        lambda params, x, y, mask, n: (
            f"You divided by all {mask.size} tokens; only {int(mask.sum())} of them count.\n"
            "Use the mask in the sum of the losses, and in the number that you divide by."
        ),
    ),
    Mistake(
        "the mask left out",
        weighted(lambda mask, n: np.full_like(mask, 1 / mask.size)),
        "You averaged over all tokens; the mask has no effect.\n"
        "Use the mask in the sum of the losses, and in the number that you divide by.",
    ),
    Mistake(
        "the mask left out",
        weighted(lambda mask, n: np.full_like(mask, 1 / np.maximum(mask.sum(), 1))),
        "You divided by the number of tokens that count, but added up the losses of all tokens.\n"
        "Use the mask in the sum, too: jnp.where(mask, losses, 0.0).",
    ),
    Mistake(
        "the mean of the sequences' means",
        weighted(lambda mask, n: mask / np.maximum(mask.sum(1, keepdims=True), 1) / len(mask)),
        "You averaged within each sequence first; this exercise asks for the mean over all tokens.\n"
        "A token of a short sequence then counts more than one of a long sequence. Add up everything before you "
        "divide.",
    ),
]


def cases(rng):
    """Sequences that are padded to the same length."""

    def case(lengths, note):
        params = {"w": rng.normal(size=WIDTH).astype(np.float32), "b": rng.normal(size=()).astype(np.float32)}
        x = rng.normal(size=(SEQUENCES, TOKENS, WIDTH)).astype(np.float32)
        # Shorter sequences have larger losses, so that every wrong mean differs from the right one.
        y = (rng.normal(size=(SEQUENCES, TOKENS)) + 4 / (1 + lengths[:, None])).astype(np.float32)
        return Case((params, x, y, np.arange(TOKENS) < lengths[:, None], MICROBATCHES), note)

    # Microbatches of two sequences of different lengths, with different numbers of tokens.
    ragged = np.array([rng.integers(5, 7), rng.integers(3, 5), rng.integers(3, 5), rng.integers(1, 3), 2, 1, 1, 1])
    yield case(ragged, "8 sequences of 1 to 6 tokens, in 4 microbatches")
    yield case(ragged * np.repeat([0, 1, 1, 1], 2), "a microbatch in which no token counts")
    yield case(0 * ragged, "a batch in which no token counts")


def other_number(rng, args):
    return (*args[:-1], 2)


def permuted(rng, args):
    params, x, y, mask, n = args
    order = rng.permutation(len(x))
    return params, x[order], y[order], mask[order], n


def other_padding(rng, args):
    params, x, y, mask, n = args
    x = np.where(mask[..., None], x, rng.uniform(-1e4, 1e4, x.shape)).astype(np.float32)
    return params, x, np.where(mask, y, rng.uniform(-1e4, 1e4, y.shape)).astype(np.float32), mask, n


def one_at_a_time(program, args):
    """No matrix product and no sum may take the full batch at once, inside the scan or outside."""
    size = args[1].size
    if any(operation.size >= size for operation in program.find(*REDUCES)):
        return (
            "The numbers are right, but the full batch is computed at once.\n"
            "Inside the scan, use only the microbatch of that iteration: its x, its y and its mask. That is what "
            "saves memory."
        )
    return None


half_at_a_time = one_microbatch(
    lambda params, x, y, mask, n: x.size // n,
    "The numbers are right, but more than one microbatch is computed at once.\n"
    "In each iteration of the scan, use only its own microbatch: N // n_microbatches sequences.",
    names=REDUCES,
)


check = Check(
    function="masked_mean_grads",
    parameters=("params", "x", "y", "mask", "n_microbatches"),
    cases=lambda rng: list(cases(rng)),
    reference=weighted(lambda mask, n: mask / np.maximum(mask.sum(), 1)),
    mistakes=MISTAKES,
    same=[
        Same(
            "the number of microbatches",
            other_number,
            says="Sums can be split in any way; means cannot. Divide once, at the end.",
        ),
        Same("the order of the sequences", permuted, says="Every token must have the same weight, wherever it is."),
        Same(
            "the values where the mask is False",
            other_padding,
            says="Padding may contain anything. Leave it out of the sum, and out of the count.",
        ),
    ],
    program=[
        scans(
            lambda params, x, y, mask, n: n,
            "The numbers are right, but there is no lax.scan with one iteration for each microbatch.\n"
            "Reshape x, y and mask to (n_microbatches, N // n_microbatches, ...) and scan over them.",
        ),
        one_at_a_time,
        stacks_less_than(
            # The counts of all iterations may be kept; the gradients may not.
            lambda params, x, y, mask, n: n * WIDTH,
            "The numbers are right, but the scan keeps something of each microbatch until the end.\n"
            "Either it stacks the gradients, or jax.grad of the scan keeps what the backward pass needs. Take the "
            "gradient inside the scan, and add it to the carry: then only one gradient is in memory, however many "
            "microbatches there are.",
            turns=lambda params, x, y, mask, n: n,
        ),
        half_at_a_time,
        carries(
            "scan",
            (1, 2),
            "Carry the gradients of the sums through the scan, and divide the final carry.",
            turns=lambda params, x, y, mask, n: (n,),
        ),
    ],
)
