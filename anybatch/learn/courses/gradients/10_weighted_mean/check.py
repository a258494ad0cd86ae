"""A mean over tokens, from microbatches that have unequal numbers of them, or none."""

import numpy as np

from anybatch.learn.check import Case, Check, Mistake, Same
from anybatch.learn.rules import carries, one_microbatch, scans, stacks_less_than

SEQUENCES, TOKENS, WIDTH, MICROBATCHES = 8, 6, 4, 4

# What takes many numbers and makes few. Masking a full batch beforehand is fine; a matrix product of it is not.
REDUCES = ("dot_general", "reduce_sum", "reduce_max", "cumsum", "conv_general_dilated", "reduce")


def grads_of_sum(params, x, y, weights):
    """Of the weighted sum of the squared errors."""
    error = weights * (x @ params["w"] + params["b"] - y)
    return {"w": 2 * np.einsum("nt,ntd->d", error, x), "b": 2 * error.sum()}


def weighted(weights_of):
    """An answer that weights the tokens as that function of the mask and n says."""

    def answer(params, x, y, mask, n):
        return grads_of_sum(params, x, y, weights_of(mask.astype(np.float64), n))

    return answer


def in_microbatches(mask, n):
    """How many tokens the microbatch of each token keeps."""
    counts = mask.reshape(n, -1).sum(1)
    return np.repeat(counts, mask.size // n).reshape(mask.shape)


def mean_of_means(mask, n):
    return mask / np.maximum(in_microbatches(mask, n), 1) / n


def mean_of_means_that_exist(mask, n):
    there = (mask.reshape(n, -1).sum(1) > 0).sum()
    return mask / np.maximum(in_microbatches(mask, n), 1) / np.maximum(there, 1)


def without_a_number(params, x, y, mask, n):
    """A microbatch without any token was divided by its 0 tokens."""
    if mask.reshape(n, -1).any(1).all() or not mask.any():
        return None
    return {name: np.full_like(value, np.nan) for name, value in params.items()}


def without_any(params, x, y, mask, n):
    """A full batch without any token was divided by 0."""
    return None if mask.any() else {name: np.full_like(value, np.nan) for name, value in params.items()}


def counts_in_words(mask, n):
    counts = mask.reshape(n, -1).sum(1)
    return ", ".join(str(count) for count in counts[:-1]) + f" and {counts[-1]}"


def says_mean_of_means(params, x, y, mask, n):
    return (
        f"You averaged over the {n} microbatches; this exercise asks for the mean over all tokens.\n"
        f"They have {counts_in_words(mask, n)} tokens, and each counted the same. Add up the gradients of the *sums* "
        "in the scan, count the tokens beside them, and divide once, at the end."
    )


MISTAKES = [
    Mistake("the mean of the microbatches' means", weighted(mean_of_means), says_mean_of_means),
    Mistake("the mean of the microbatches' means", weighted(mean_of_means_that_exist), says_mean_of_means),
    Mistake(
        "0 / 0",
        without_a_number,
        "A microbatch without any token makes everything NaN: it was divided by its 0 tokens.\n"
        "In a carry a NaN stays for good. Do not divide inside the scan: add up sums and counts, where such a "
        "microbatch is a plain 0.",
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
            "The mask belongs into the sum of the losses, and into what it is divided by."
        ),
    ),
    Mistake(
        "the mask left out",
        weighted(lambda mask, n: np.full_like(mask, 1 / mask.size)),
        "You averaged over all tokens; the mask has no effect.\n"
        "Only where it is True does a token count: in the sum of the losses, and in what it is divided by.",
    ),
    Mistake(
        "the mask left out",
        weighted(lambda mask, n: np.full_like(mask, 1 / np.maximum(mask.sum(), 1))),
        "You divided by the tokens that count, but added up the losses of all of them.\n"
        "Put the mask into the sum as well: jnp.where(mask, losses, 0.0).",
    ),
    Mistake(
        "the mean of the sequences' means",
        weighted(lambda mask, n: mask / np.maximum(mask.sum(1, keepdims=True), 1) / len(mask)),
        "You averaged within each sequence first; this exercise asks for the mean over all tokens.\n"
        "A token of a short sequence then counts more than one of a long sequence. Add everything up before you "
        "divide.",
    ),
]


def cases(rng):
    """Sequences that are padded to one length."""

    def case(lengths, note):
        params = {"w": rng.normal(size=WIDTH).astype(np.float32), "b": rng.normal(size=()).astype(np.float32)}
        x = rng.normal(size=(SEQUENCES, TOKENS, WIDTH)).astype(np.float32)
        # Shorter sequences are harder, so that no wrong mean comes near the right one.
        y = (rng.normal(size=(SEQUENCES, TOKENS)) + 4 / (1 + lengths[:, None])).astype(np.float32)
        return Case((params, x, y, np.arange(TOKENS) < lengths[:, None], MICROBATCHES), note)

    # Microbatches of two sequences, which differ in their lengths, as the microbatches do in their tokens.
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
    """No matrix product and no sum takes the full batch at once, inside the scan or outside."""
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
            says="Sums may be taken in any parts; means may not. Divide once, at the end.",
        ),
        Same("the order of the sequences", permuted, says="Every token must count the same, wherever it stands."),
        Same(
            "what stands where the mask is False",
            other_padding,
            says="Padding may hold anything. Take it out of the sum, and out of the count.",
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
            "These are the gradients, to be added up later, or what jax.grad needs to go back through the scan. "
            "Take the gradient inside it, and add it to the carry: one gradient in memory, however many "
            "microbatches there are.",
            turns=lambda params, x, y, mask, n: n,
        ),
        half_at_a_time,
        carries(
            "scan",
            (1, 2),
            "Let the scan carry the gradients of the sums, and divide what it carried.",
            turns=lambda params, x, y, mask, n: (n,),
        ),
    ],
)
