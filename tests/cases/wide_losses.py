"""Losses with a value far wider than their inputs: logits over a vocabulary, matrices of pairs, attention scores."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

WIDTH, VOCABULARY, LENGTH, HEADS = 8, 67, 11, 2
FEATURES, NUM_ROWS, NUM_CLASSES = 5, 23, 4


@dataclasses.dataclass(frozen=True)
class WideLoss:
    """A loss as its author would write it, with at least one value that is much wider than its inputs.

    Attributes:
        name: The name of the function.
        loss: `loss(params, batch)`; every leaf of the batch has the examples on axis 0.
        make: `make(dtype)` gives `(params, batch)`.
        has_aux: The loss returns `(value, aux)`.
        kind: What is wide: one row per token, one entry per pair of examples, attention scores, or something else.
        stays_whole: A wide value is needed as a whole, so that blocks cannot help with it.
    """

    name: str
    loss: Callable[..., Any]
    make: Callable[[Any], tuple[Any, Any]]
    has_aux: bool = False
    kind: Literal["tokens", "pairs", "attention", "other"] = "tokens"
    stays_whole: bool = False


WIDE: list[WideLoss] = []


def case(kind, make, **options):
    """Adds the decorated loss to the table."""

    def add(loss):
        WIDE.append(WideLoss(loss.__name__, loss, make, kind=kind, **options))
        return loss

    return add


# Arrays.


def weights(generator, dtype, *shape):
    """Normal numbers, scaled by the root of the number of rows."""
    return jnp.asarray(generator.standard_normal(shape) / math.sqrt(shape[0] if shape else 1), dtype)


def normals(generator, dtype, *shape):
    """Normal numbers."""
    return jnp.asarray(generator.standard_normal(shape), dtype)


def integers(generator, high, *shape):
    """Integers below `high`, in JAX's default integer type."""
    return jnp.asarray(generator.integers(0, high, shape))


def frozen(seed, dtype, *shape):
    """An array that a loss closes over."""
    return normals(np.random.default_rng(seed), dtype, *shape)


def full(x):
    """The same in at least float32, as losses are usually computed."""
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def along(vector, ndim, axis=-1):
    """A vector as an array of `ndim` dimensions that broadcasts along `axis`."""
    shape = [1] * ndim
    shape[axis] = -1
    return vector.reshape(shape)


def pick(x, index):
    """One entry of each row."""
    return jnp.take_along_axis(x, index[..., None], axis=-1)[..., 0]


def weighted_mean(x, weight):
    return jnp.sum(x * weight) / jnp.sum(weight)


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


# Tokens: a tiny GPT, with unrolled layers, scanned layers, or checkpointed layers.


def layer_params(generator, dtype):
    names = {"query": (WIDTH, WIDTH), "key": (WIDTH, WIDTH), "value": (WIDTH, WIDTH), "out": (WIDTH, WIDTH)}
    names |= {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
    layer = {name: weights(generator, dtype, *shape) for name, shape in names.items()}
    return layer | {"gain_1": jnp.ones(WIDTH, dtype), "gain_2": jnp.ones(WIDTH, dtype)}


def gpt_params(generator, dtype, layers=1, stacked=False):
    blocks = [layer_params(generator, dtype) for _ in range(layers)]
    if stacked:
        blocks = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
    return {
        "embedding": weights(generator, dtype, VOCABULARY, WIDTH) * 4,
        "position": weights(generator, dtype, LENGTH, WIDTH),
        "layers": blocks,
        "gain": jnp.ones(WIDTH, dtype),
    }


def rms_norm(x, gain):
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * along(gain, x.ndim)


def split_heads(x, heads=HEADS):
    return x.reshape(*x.shape[:2], heads, -1)


def attend(query, key, value, mask):
    """Attention of `(n, T, heads, width)` arrays, with a mask of `(T, S)` or `(n, T, S)`."""
    scores = jnp.einsum("nthd,nshd->nhts", query, key) / math.sqrt(query.shape[-1])
    mask = mask[None, None] if mask.ndim == 2 else mask[:, None]
    probs = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
    return jnp.einsum("nhts,nshd->nthd", probs, value).reshape(*query.shape[:2], -1)


def transformer_block(x, layer):
    y = rms_norm(x, layer["gain_1"])
    query, key, value = (split_heads(y @ layer[name]) for name in ("query", "key", "value"))
    x = x + attend(query, key, value, jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))) @ layer["out"]
    return x + jax.nn.gelu(rms_norm(x, layer["gain_2"]) @ layer["up"]) @ layer["down"]


def embed(params, tokens):
    return params["embedding"][tokens] + params["position"][None, : tokens.shape[1]]


def hidden_of(params, tokens, checkpoint=False):
    """The last hidden states of the GPT, `(n, T, width)`."""
    block = jax.checkpoint(transformer_block) if checkpoint else transformer_block
    x = embed(params, tokens)
    if isinstance(params["layers"], list):
        for layer in params["layers"]:
            x = block(x, layer)
    else:
        x, _ = jax.lax.scan(lambda x, layer: (block(x, layer), None), x, params["layers"])
    return rms_norm(x, params["gain"])


def logits_of(params, tokens, **options):
    """The logits of the GPT with tied embeddings, `(n, T, vocabulary)`."""
    return full(hidden_of(params, tokens, **options) @ params["embedding"].T)


def teacher_logits(tokens, dtype):
    """The logits of another GPT, which is not trained."""
    return jax.lax.stop_gradient(logits_of(gpt_params(np.random.default_rng(99), dtype), tokens))


def nll_of(logits, targets):
    """The negative log likelihood of each target."""
    return jax.nn.logsumexp(logits, axis=-1) - pick(logits, targets)


def text(generator, dtype, num_examples):
    mask = generator.uniform(size=(num_examples, LENGTH)) < 0.7
    mask[:, 0] = True
    return {
        "tokens": integers(generator, VOCABULARY, num_examples, LENGTH),
        "targets": integers(generator, VOCABULARY, num_examples, LENGTH),
        "mask": jnp.asarray(mask, dtype),
    }


def language(layers=1, stacked=False, num_examples=2, **extra):
    """A GPT with tokens, targets and a mask; `extra` names further parameters and their shapes."""

    def make(dtype):
        generator = np.random.default_rng(num_examples)
        params = gpt_params(generator, dtype, layers, stacked)
        params |= {name: weights(generator, dtype, *shape) for name, shape in extra.items()}
        return params, text(generator, dtype, num_examples)

    return make


def preferences(dtype):
    """A GPT, with an answer that was chosen, one that was rejected, and their log likelihood under a reference."""
    generator = np.random.default_rng(7)
    chosen, rejected = text(generator, dtype, 3), text(generator, dtype, 3)
    batch = {"chosen": chosen["tokens"], "chosen_mask": chosen["mask"]}
    batch |= {"rejected": rejected["tokens"], "rejected_mask": rejected["mask"]}
    batch |= {"reference_chosen": -30 + 2 * normals(generator, dtype, 3)}
    batch |= {"reference_rejected": -30 + 2 * normals(generator, dtype, 3)}
    return gpt_params(generator, dtype), batch | {"good": jnp.asarray([True, False, True])}


def policy(dtype):
    """A GPT, with actions, advantages, rewards, and the log likelihood under the policy that acted."""
    generator = np.random.default_rng(8)
    batch = text(generator, dtype, 3)
    batch["actions"] = batch.pop("targets")
    batch |= {"advantages": normals(generator, dtype, 3, LENGTH), "rewards": normals(generator, dtype, 3)}
    batch |= {"old_log_probs": -math.log(VOCABULARY) + normals(generator, dtype, 3, LENGTH)}
    return gpt_params(generator, dtype) | {"value": weights(generator, dtype, WIDTH)}, batch


def translation(dtype):
    """An encoder and a decoder, with padding on both sides."""
    generator = np.random.default_rng(9)
    params = {"encoder": gpt_params(generator, dtype), "decoder": gpt_params(generator, dtype)}
    params["cross"] = layer_params(generator, dtype)
    batch = text(generator, dtype, 3)
    batch["source"] = integers(generator, VOCABULARY, 3, 7)
    batch["source_length"] = jnp.asarray([7, 3, 5])
    batch["length"] = jnp.asarray([4, 11, 9])
    return params, batch


@case("tokens", language(layers=2))
def mean_of_log_softmax(params, batch):
    log_probs = jax.nn.log_softmax(logits_of(params, batch["tokens"]))
    return -jnp.mean(pick(log_probs, batch["targets"]))


@case("tokens", language(num_examples=3))
def masked_mean(params, batch):
    nll = optax.softmax_cross_entropy_with_integer_labels(logits_of(params, batch["tokens"]), batch["targets"])
    return jnp.sum(nll * batch["mask"]) / jnp.maximum(jnp.sum(batch["mask"]), 1.0)


@case("tokens", language())
def optax_mean(params, batch):
    logits = logits_of(params, batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


@case("tokens", language())
def optax_flattened_logits(params, batch):
    logits = logits_of(params, batch["tokens"]).reshape(-1, VOCABULARY)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"].reshape(-1)).mean()


@case("tokens", language(num_examples=3))
def optax_flattened_hidden(params, batch):
    hidden = hidden_of(params, batch["tokens"]).reshape(-1, WIDTH)
    logits = full(hidden @ params["embedding"].T)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"].reshape(-1)).mean()


@case("tokens", language(num_examples=3))
def next_token(params, batch):
    """The usual shift: all logits but the last, against all tokens but the first."""
    logits = logits_of(params, batch["tokens"])[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


@case("tokens", language())
def z_loss(params, batch):
    logits = logits_of(params, batch["tokens"])
    log_z = jax.nn.logsumexp(logits, axis=-1)
    nll = log_z - pick(logits, batch["targets"])
    return weighted_mean(nll, batch["mask"]) + 1e-2 * jnp.mean(log_z**2)


@case("tokens", language())
def smoothing_of_one_hot(params, batch):
    logits = logits_of(params, batch["tokens"])
    targets = jax.nn.one_hot(batch["targets"], VOCABULARY, dtype=logits.dtype) * 0.9 + 0.1 / VOCABULARY
    return -jnp.mean(jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1))


@case("tokens", language())
def smoothing_of_optax(params, batch):
    logits = logits_of(params, batch["tokens"])
    targets = optax.smooth_labels(jax.nn.one_hot(batch["targets"], VOCABULARY, dtype=logits.dtype), 0.1)
    return optax.softmax_cross_entropy(logits, targets).mean()


@case("tokens", language())
def distillation_with_temperature(params, batch):
    """Hinton's loss: softened targets of the teacher, and the labels."""
    logits = logits_of(params, batch["tokens"])
    soft = teacher_logits(batch["tokens"], params["embedding"].dtype) / 2.0
    kl = jnp.sum(jax.nn.softmax(soft) * (jax.nn.log_softmax(soft) - jax.nn.log_softmax(logits / 2.0)), axis=-1)
    return 4.0 * jnp.mean(kl) + jnp.mean(nll_of(logits, batch["targets"]))


@case("tokens", language(num_examples=3), has_aux=True)
def aux_by_token(params, batch):
    logits = logits_of(params, batch["tokens"])
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return jnp.mean(nll), {"nll": nll, "accuracy": jnp.mean(jnp.argmax(logits, axis=-1) == batch["targets"])}


@case("tokens", language())
def dropout_on_the_logits(params, batch):
    """Random bits on the hidden states and on the logits, and weight decay."""
    hidden = hidden_of(params, batch["tokens"])
    hidden = jnp.where(jax.random.bernoulli(jax.random.key(3), 0.8, hidden.shape), hidden / 0.8, 0)
    logits = full(hidden @ params["embedding"].T)
    logits = jnp.where(jax.random.bernoulli(jax.random.key(4), 0.9, logits.shape), logits, logits * 0.5)
    decay = sum(jnp.sum(x**2) for x in jax.tree.leaves(params))
    return jnp.mean(nll_of(logits, batch["targets"])) + 1e-3 * decay


@case("tokens", language(layers=2))
def checkpointed_head(params, batch):
    @jax.checkpoint
    def head(hidden, embedding):
        logits = full(hidden @ embedding.T)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    return head(hidden_of(params, batch["tokens"], checkpoint=True), params["embedding"])


@case("tokens", language())
def soft_capped(params, batch):
    logits = 30 * jnp.tanh(logits_of(params, batch["tokens"]) / 30)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]))


@case("tokens", language())
def perplexity(params, batch):
    """A function of the mean."""
    return jnp.exp(mean_of_log_softmax(params, batch))


@case("tokens", language())
def weighted_by_their_softmax(params, batch):
    """Tokens meet, but only after the vocabulary is gone."""
    nll = nll_of(logits_of(params, batch["tokens"]), batch["targets"])
    return jnp.sum(jax.nn.softmax(nll, axis=1) * nll)


@case("tokens", language(num_examples=3))
def hardest_tokens(params, batch):
    nll = nll_of(logits_of(params, batch["tokens"]), batch["targets"])
    return jnp.mean(jax.lax.top_k(nll, 3)[0])


@case("tokens", language(num_examples=3))
def log_of_the_mean_by_sequence(params, batch):
    nll = nll_of(logits_of(params, batch["tokens"]), batch["targets"])
    return jnp.mean(jnp.log(jnp.mean(nll, axis=1)))


@case("tokens", language())
def softmax_over_tokens(params, batch):
    """Tokens meet at full width: a softmax over them, for each entry of the vocabulary."""
    log_probs = jax.nn.log_softmax(logits_of(params, batch["tokens"]), axis=1)
    return -jnp.mean(pick(log_probs, batch["targets"]))


@case("tokens", language())
def centred_over_tokens(params, batch):
    """Normalised over the tokens, then over the vocabulary."""
    logits = logits_of(params, batch["tokens"])
    logits = logits - jnp.mean(logits, axis=1, keepdims=True)
    return jnp.mean(nll_of(logits, batch["targets"]))


@case("tokens", language())
def cumulative_logits(params, batch):
    logits = jnp.cumsum(logits_of(params, batch["tokens"]), axis=1)
    return jnp.mean(nll_of(logits, batch["targets"]))


@case("tokens", language(num_examples=3))
def ctc(params, batch):
    """Connectionist temporal classification, whose Optax version needs the usual promotion of types."""
    logits = logits_of(params, batch["tokens"])
    no_padding = jnp.zeros(batch["tokens"].shape, logits.dtype)
    labels = 1 + batch["targets"][:, :4] % (VOCABULARY - 1)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return jnp.mean(optax.ctc_loss(logits, no_padding, labels, no_padding[:, :4]))


# Tokens: other ways to write the model and the head.


@case("tokens", language(layers=2, stacked=True))
def scanned_layers(params, batch):
    return jnp.mean(nll_of(logits_of(params, batch["tokens"]), batch["targets"]))


@case("tokens", language(layers=2, stacked=True, num_examples=3))
def scanned_and_checkpointed_layers(params, batch):
    logits = logits_of(params, batch["tokens"], checkpoint=True)
    return weighted_mean(nll_of(logits, batch["targets"]), batch["mask"])


@case("tokens", language(layers=2))
def checkpointed_layers(params, batch):
    return jnp.mean(nll_of(logits_of(params, batch["tokens"], checkpoint=True), batch["targets"]))


@case("tokens", language(head=(WIDTH, VOCABULARY), head_bias=(VOCABULARY,)))
def untied_head_with_bias(params, batch):
    logits = full(hidden_of(params, batch["tokens"]) @ params["head"]) + full(params["head_bias"])[None, None]
    return jnp.mean(nll_of(logits, batch["targets"]))


@case("tokens", language(down=(WIDTH, 3), up=(3, VOCABULARY)))
def low_rank_head(params, batch):
    logits = full(hidden_of(params, batch["tokens"]) @ params["down"] @ params["up"])
    return jnp.mean(nll_of(logits, batch["targets"]))


@case("tokens", language(down=(VOCABULARY, 3), up=(3, VOCABULARY)))
def low_rank_correction_of_the_logits(params, batch):
    """A second projection, from logits to logits."""
    logits = logits_of(params, batch["tokens"])
    return jnp.mean(nll_of(logits + 0.1 * jnp.tanh(logits @ params["down"]) @ params["up"], batch["targets"]))


@case("tokens", language(head=(WIDTH, 68)))
def byte_level_heads(params, batch):
    """Four predictions of a fourth of the vocabulary for each token, as `(n, 4 T, V / 4)`."""
    logits = full(hidden_of(params, batch["tokens"]) @ params["head"]).reshape(-1, 4 * LENGTH, 17)
    targets = jnp.repeat(batch["targets"], 4, axis=1) // jnp.tile(jnp.asarray([1, 2, 4, 8]), LENGTH)[None] % 17
    return jnp.mean(nll_of(logits, targets))


@case("tokens", language())
def vocabulary_first(params, batch):
    logits = jnp.einsum("vd,ntd->vnt", params["embedding"], hidden_of(params, batch["tokens"]))
    log_probs = jax.nn.log_softmax(full(logits), axis=0)
    return -jnp.mean(jnp.take_along_axis(log_probs, batch["targets"][None], axis=0))


@case("tokens", language())
def vocabulary_in_the_middle(params, batch):
    logits = jnp.swapaxes(logits_of(params, batch["tokens"]), 1, 2)
    log_z = jax.nn.logsumexp(logits, axis=1)
    return jnp.mean(log_z - jnp.take_along_axis(logits, batch["targets"][:, None], axis=1)[:, 0])


@case("tokens", language(num_examples=3))
def vmap_over_sequences(params, batch):
    def of_one(tokens, targets):
        logits = logits_of(params, tokens[None])[0]
        return jnp.mean(nll_of(logits, targets))

    return jnp.mean(jax.vmap(of_one)(batch["tokens"], batch["targets"]))


@case("tokens", language(num_examples=3))
def map_over_sequences(params, batch):
    def of_one(row):
        tokens, targets, mask = row
        return weighted_mean(nll_of(logits_of(params, tokens[None])[0], targets), mask)

    return jnp.mean(jax.lax.map(of_one, (batch["tokens"], batch["targets"], batch["mask"])))


@case("tokens", language())
def jitted_head(params, batch):
    @jax.jit
    def head(hidden, embedding, targets):
        return nll_of(full(jnp.einsum("ntd,vd->ntv", hidden, embedding)), targets)

    return jnp.mean(head(hidden_of(params, batch["tokens"]), params["embedding"], batch["targets"]))


@case("tokens", language(num_examples=3))
def head_under_a_condition(params, batch):
    hidden = hidden_of(params, batch["tokens"])

    def some():
        return weighted_mean(nll_of(full(hidden @ params["embedding"].T), batch["targets"]), batch["mask"])

    def none():
        return jnp.zeros((), full(hidden).dtype)

    return jax.lax.cond(jnp.sum(batch["mask"]) > 0, some, none)


@case("tokens", language(head=(WIDTH, 80)))
def padded_vocabulary(params, batch):
    """A vocabulary padded to a round number, whose last entries are masked out."""
    logits = full(hidden_of(params, batch["tokens"]) @ params["head"])
    real = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) < VOCABULARY
    return jnp.mean(nll_of(jnp.where(real, logits, -1e9), batch["targets"]))


@case("tokens", language(none=(WIDTH,)))
def concatenated_with_another_class(params, batch):
    hidden = hidden_of(params, batch["tokens"])
    logits = jnp.concatenate([full(hidden @ params["embedding"].T), full(hidden @ params["none"])[..., None]], axis=-1)
    targets = jnp.where(batch["mask"] > 0, batch["targets"], VOCABULARY)
    return jnp.mean(nll_of(logits, targets))


@case("tokens", language())
def two_vocabularies_in_one(params, batch):
    first, second = jnp.split(logits_of(params, batch["tokens"]), [30], axis=-1)
    both = nll_of(first, batch["targets"] % 30) + nll_of(second, batch["targets"] % 37)
    return jnp.mean(both)


@case("tokens", language())
def cosine_head(params, batch):
    hidden, embedding = unit(hidden_of(params, batch["tokens"])), unit(params["embedding"])
    return jnp.mean(nll_of(10 * full(hidden @ embedding.T), batch["targets"]))


@case("tokens", language(gain_of_logits=(VOCABULARY,)))
def layer_norm_of_the_logits(params, batch):
    logits = logits_of(params, batch["tokens"])
    centred = logits - jnp.mean(logits, axis=-1, keepdims=True)
    logits = centred * jax.lax.rsqrt(jnp.var(logits, axis=-1, keepdims=True) + 1e-5)
    return jnp.mean(nll_of(logits * full(params["gain_of_logits"])[None, None] * 8, batch["targets"]))


@case("tokens", language(head=(4, WIDTH, VOCABULARY), weight=(WIDTH, 4)))
def mixture_of_softmaxes(params, batch):
    hidden = hidden_of(params, batch["tokens"])
    parts = jax.nn.log_softmax(full(jnp.einsum("ntd,kdv->ntkv", jnp.tanh(hidden), params["head"])))
    mix = jax.nn.log_softmax(full(hidden @ params["weight"]))
    log_probs = jax.nn.logsumexp(parts + mix[..., None], axis=2)
    return -jnp.mean(pick(log_probs, batch["targets"]))


@case("tokens", language(head=(WIDTH, 19), down=(WIDTH, 4), tail_1=(WIDTH, 20), tail_2=(4, 30)))
def adaptive_softmax(params, batch):
    """Frequent words in the first softmax; two more softmaxes for the others."""
    hidden, targets = hidden_of(params, batch["tokens"]), batch["targets"]
    head = jax.nn.log_softmax(full(hidden @ params["head"]))
    tail_1 = jax.nn.log_softmax(full(hidden @ params["tail_1"]))
    tail_2 = jax.nn.log_softmax(full(hidden @ params["down"] @ params["tail_2"]))
    in_head = pick(head, jnp.minimum(targets, 16))
    in_tail_1 = head[..., 17] + pick(tail_1, jnp.clip(targets - 17, 0, 19))
    in_tail_2 = head[..., 18] + pick(tail_2, jnp.clip(targets - 37, 0, 29))
    return -jnp.mean(jnp.where(targets < 17, in_head, jnp.where(targets < 37, in_tail_1, in_tail_2)))


@case("tokens", language(head_1=(WIDTH, VOCABULARY), head_2=(WIDTH, VOCABULARY), head_3=(WIDTH, VOCABULARY)))
def several_tokens_ahead(params, batch):
    """A head for each of the next three tokens."""
    hidden, total = hidden_of(params, batch["tokens"]), 0.0
    for ahead in (1, 2, 3):
        logits = full(hidden[:, :-ahead] @ params[f"head_{ahead}"])
        total = total + jnp.mean(nll_of(logits, batch["tokens"][:, ahead:])) / ahead
    return total


@case("tokens", language(heads=(3, WIDTH, VOCABULARY)))
def stacked_heads_ahead(params, batch):
    logits = full(jnp.einsum("ntd,hdv->nthv", hidden_of(params, batch["tokens"]), params["heads"]))
    ahead = jnp.stack([jnp.roll(batch["tokens"], -step, axis=1) for step in (1, 2, 3)], axis=-1)
    valid = jnp.arange(LENGTH)[:, None] + jnp.arange(1, 4)[None] < LENGTH
    return jnp.sum(jnp.where(valid[None], nll_of(logits, ahead), 0)) / jnp.sum(valid, dtype=logits.dtype)


@case("tokens", language(merge=(2 * WIDTH, WIDTH)))
def chained_prediction_ahead(params, batch):
    """The second token ahead is predicted from the first hidden state and the next token, by the same head."""
    hidden = hidden_of(params, batch["tokens"])
    nxt = params["embedding"][jnp.roll(batch["tokens"], -1, axis=1)]
    later = transformer_block(jnp.concatenate([hidden, nxt], axis=-1) @ params["merge"], params["layers"][0])
    first = nll_of(full(hidden @ params["embedding"].T)[:, :-1], batch["tokens"][:, 1:])
    second = nll_of(full(later @ params["embedding"].T)[:, :-2], batch["tokens"][:, 2:])
    return jnp.mean(first) + 0.3 * jnp.mean(second)


@case("tokens", language(layers=3))
def early_exits(params, batch):
    x, total = embed(params, batch["tokens"]), 0.0
    for depth, layer in enumerate(params["layers"]):
        x = transformer_block(x, layer)
        logits = full(rms_norm(x, params["gain"]) @ params["embedding"].T)
        total = total + (depth + 1) * jnp.mean(nll_of(logits, batch["targets"]))
    return total / 6


@case("tokens", language(layers=3, stacked=True))
def early_exits_in_a_scan(params, batch):
    """The logits are computed in the body of the loop over the layers."""

    def step(x, layer):
        x = transformer_block(x, layer)
        logits = full(rms_norm(x, params["gain"]) @ params["embedding"].T)
        return x, jnp.mean(nll_of(logits, batch["targets"]))

    return jnp.sum(jax.lax.scan(step, embed(params, batch["tokens"]), params["layers"])[1])


@case("tokens", language(mix=(2 * WIDTH, WIDTH)))
def recurrent_with_stacked_logits(params, batch):
    """A loop over the tokens gives hidden states, time first."""

    def step(state, x):
        state = jnp.tanh(jnp.concatenate([state, x], axis=-1) @ params["mix"])
        return state, state

    inputs = jnp.swapaxes(params["embedding"][batch["tokens"]], 0, 1)
    _, states = jax.lax.scan(step, jnp.zeros_like(inputs[0]), inputs)
    return jnp.mean(nll_of(full(states @ params["embedding"].T), batch["targets"].T))


@case("tokens", language(mix=(2 * WIDTH, WIDTH), num_examples=3))
def recurrent_with_the_loss_inside(params, batch):
    def step(carry, row):
        state, total = carry
        tokens, targets = row
        state = jnp.tanh(jnp.concatenate([state, params["embedding"][tokens]], axis=-1) @ params["mix"])
        logits = full(state @ params["embedding"].T)
        return (state, total + jnp.sum(nll_of(logits, targets))), None

    embedding = params["embedding"]
    start = jnp.zeros((3, WIDTH), embedding.dtype), jnp.zeros((), full(embedding).dtype)
    return jax.lax.scan(step, start, (batch["tokens"].T, batch["targets"].T))[0][1] / batch["tokens"].size


@case("tokens", language())
def tiled_by_its_author(params, batch):
    """MaxText's vocabulary tiling: the author has a loop over blocks of tokens already."""
    hidden = hidden_of(params, batch["tokens"]).reshape(2, -1, WIDTH)
    targets = batch["targets"].reshape(2, -1)

    @jax.checkpoint
    def step(total, block):
        rows, labels = block
        return total + jnp.sum(nll_of(full(rows @ params["embedding"].T), labels)), None

    total, _ = jax.lax.scan(step, jnp.zeros((), full(hidden).dtype), (hidden, targets))
    return total / targets.size


@case("tokens", language(num_examples=3))
def tiled_over_the_vocabulary(params, batch):
    """An online logsumexp over blocks of the vocabulary, as in the papers."""
    hidden = hidden_of(params, batch["tokens"])
    blocks = params["embedding"][:66].reshape(6, 11, WIDTH)

    def step(carry, block):
        top, total = carry
        logits = full(hidden @ block.T)
        new_top = jnp.maximum(top, jax.lax.stop_gradient(jnp.max(logits, axis=-1)))
        total = total * jnp.exp(top - new_top) + jnp.sum(jnp.exp(logits - new_top[..., None]), axis=-1)
        return (new_top, total), None

    start = jnp.full(hidden.shape[:2], -1e9, full(hidden).dtype), jnp.zeros(hidden.shape[:2], full(hidden).dtype)
    (top, total), _ = jax.lax.scan(step, start, blocks)
    picked = jnp.sum(hidden * params["embedding"][batch["targets"] % 66], axis=-1)
    return jnp.mean(top + jnp.log(total) - full(picked))


# Tokens: cross entropies with their own derivative, or in pieces.


@jax.custom_vjp
def fused_cross_entropy(logits, targets):
    """T5X's: the backward pass is softmax minus one-hot, with the term of the z-loss."""
    log_z = jax.nn.logsumexp(logits, axis=-1)
    return log_z - pick(logits, targets) + 1e-2 * log_z**2


def _fused_forward(logits, targets):
    log_z = jax.nn.logsumexp(logits, axis=-1)
    return log_z - pick(logits, targets) + 1e-2 * log_z**2, (logits, targets, log_z)


def _fused_backward(saved, cotangent):
    logits, targets, log_z = saved
    probs = jnp.exp(logits - log_z[..., None])
    one_hot = jax.nn.one_hot(targets, logits.shape[-1], dtype=logits.dtype)
    return cotangent[..., None] * ((1 + 2e-2 * log_z[..., None]) * probs - one_hot), None


fused_cross_entropy.defvjp(_fused_forward, _fused_backward)


@case("tokens", language(num_examples=3))
def custom_vjp_of_the_logits(params, batch):
    return weighted_mean(fused_cross_entropy(logits_of(params, batch["tokens"]), batch["targets"]), batch["mask"])


@jax.custom_vjp
def fused_linear_cross_entropy(hidden, head, targets):
    """Liger's: the projection belongs to the function, and the forward pass computes the gradients already."""
    return jnp.mean(nll_of(hidden @ head, targets))


def _linear_forward(hidden, head, targets):
    logits = hidden @ head
    probs = jax.nn.softmax(logits) - jax.nn.one_hot(targets, head.shape[-1], dtype=head.dtype)
    probs = probs / targets.size
    return jnp.mean(nll_of(logits, targets)), (probs @ head.T, hidden.T @ probs)


def _linear_backward(saved, cotangent):
    return cotangent * saved[0], cotangent * saved[1], None


fused_linear_cross_entropy.defvjp(_linear_forward, _linear_backward)


@case("tokens", language())
def custom_vjp_of_the_head(params, batch):
    hidden = hidden_of(params, batch["tokens"]).reshape(-1, WIDTH)
    return fused_linear_cross_entropy(full(hidden), full(params["embedding"]).T, batch["targets"].reshape(-1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def smoothed_cross_entropy(logits, targets, epsilon):
    log_probs = jax.nn.log_softmax(logits)
    return -(1 - epsilon) * pick(log_probs, targets) - epsilon * jnp.mean(log_probs, axis=-1)


def _smoothed_forward(logits, targets, epsilon):
    return smoothed_cross_entropy(logits, targets, epsilon), (jax.nn.softmax(logits), targets)


def _smoothed_backward(epsilon, saved, cotangent):
    probs, targets = saved
    width = probs.shape[-1]
    wanted = jnp.where(jnp.arange(width)[None, None] == targets[..., None], 1 - epsilon, 0.0).astype(probs.dtype)
    return cotangent[..., None] * (probs - wanted - epsilon / width), None


smoothed_cross_entropy.defvjp(_smoothed_forward, _smoothed_backward)


@case("tokens", language())
def custom_vjp_with_smoothing(params, batch):
    return jnp.mean(smoothed_cross_entropy(logits_of(params, batch["tokens"]), batch["targets"], 0.1))


@jax.custom_jvp
def stable_logsumexp(x):
    top = jnp.max(x, axis=-1, keepdims=True)
    return jnp.log(jnp.sum(jnp.exp(x - top), axis=-1)) + top[..., 0]


@stable_logsumexp.defjvp
def _stable_logsumexp_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    out = stable_logsumexp(x)
    return out, jnp.sum(jnp.exp(x - out[..., None]) * dx, axis=-1)


@case("tokens", language())
def custom_jvp_of_logsumexp(params, batch):
    logits = logits_of(params, batch["tokens"])
    return jnp.mean(stable_logsumexp(logits) - pick(logits, batch["targets"]))


@jax.custom_vjp
def scaled_backward(x):
    return x


scaled_backward.defvjp(lambda x: (x, None), lambda _, cotangent: (cotangent * 1.0,))


@case("tokens", language())
def custom_vjp_identity_on_the_logits(params, batch):
    return jnp.mean(nll_of(scaled_backward(logits_of(params, batch["tokens"])), batch["targets"]))


@case("tokens", language())
def unfused(params, batch):
    logits = logits_of(params, batch["tokens"])
    shifted = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    exps = jnp.exp(shifted)
    probs = exps / jnp.sum(exps, axis=-1, keepdims=True)
    return -jnp.mean(jnp.log(pick(probs, batch["targets"])))


@case("tokens", language())
def one_hot_einsum(params, batch):
    log_probs = jax.nn.log_softmax(logits_of(params, batch["tokens"]))
    one_hot = jax.nn.one_hot(batch["targets"], VOCABULARY, dtype=log_probs.dtype)
    return -jnp.einsum("ntv,ntv,nt->", log_probs, one_hot, batch["mask"]) / jnp.sum(batch["mask"])


@case("tokens", language())
def target_by_embedding(params, batch):
    """The logit of the target is a dot product of its own, so the logits are used once."""
    hidden = hidden_of(params, batch["tokens"])
    wanted = jnp.einsum("ntd,ntd->nt", hidden, params["embedding"][batch["targets"]])
    return jnp.mean(jax.nn.logsumexp(full(hidden @ params["embedding"].T), axis=-1) - full(wanted))


@case("tokens", language())
def target_by_advanced_indexing(params, batch):
    log_probs = jax.nn.log_softmax(logits_of(params, batch["tokens"]))
    rows, columns = jnp.arange(2)[:, None], jnp.arange(LENGTH)[None]
    return -jnp.mean(log_probs[rows, columns, batch["targets"]])


@case("tokens", language())
def target_by_iota_mask(params, batch):
    log_probs = jax.nn.log_softmax(logits_of(params, batch["tokens"]))
    hit = jnp.arange(VOCABULARY)[None, None] == batch["targets"][..., None]
    return -jnp.sum(jnp.where(hit, log_probs, 0)) / batch["targets"].size


@case("tokens", language(num_examples=3))
def target_by_vmapped_index(params, batch):
    logits = logits_of(params, batch["tokens"])
    wanted = jax.vmap(jax.vmap(lambda row, target: row[target]))(logits, batch["targets"])
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - wanted)


@case("tokens", language())
def smoothing_by_two_terms(params, batch):
    log_probs = jax.nn.log_softmax(logits_of(params, batch["tokens"]))
    return -0.9 * jnp.mean(pick(log_probs, batch["targets"])) - 0.1 * jnp.mean(log_probs)


@case("tokens", language())
def smoothing_over_the_other_classes(params, batch):
    log_probs = jax.nn.log_softmax(logits_of(params, batch["tokens"]))
    hit = jax.nn.one_hot(batch["targets"], VOCABULARY, dtype=bool)
    targets = jnp.where(hit, 0.9, 0.1 / (VOCABULARY - 1)).astype(log_probs.dtype)
    return weighted_mean(-jnp.sum(targets * log_probs, axis=-1), batch["mask"])


@case("tokens", language())
def focal(params, batch):
    log_probs = pick(jax.nn.log_softmax(logits_of(params, batch["tokens"])), batch["targets"])
    return -jnp.mean((1 - jnp.exp(log_probs)) ** 2 * log_probs)


@case("tokens", language())
def poly_loss(params, batch):
    nll = nll_of(logits_of(params, batch["tokens"]), batch["targets"])
    return jnp.mean(nll + 2.0 * (1 - jnp.exp(-nll)))


@case("tokens", language())
def brier_score(params, batch):
    probs = jax.nn.softmax(logits_of(params, batch["tokens"]))
    return jnp.mean(jnp.sum((probs - jax.nn.one_hot(batch["targets"], VOCABULARY, dtype=probs.dtype)) ** 2, axis=-1))


@case("tokens", language())
def ranked_probability_score(params, batch):
    """Cumulative sums over the vocabulary."""
    below = jnp.cumsum(jax.nn.softmax(logits_of(params, batch["tokens"])), axis=-1)
    wanted = (jnp.arange(VOCABULARY)[None, None] >= batch["targets"][..., None]).astype(below.dtype)
    return jnp.mean(jnp.sum((below - wanted) ** 2, axis=-1))


@case("tokens", language())
def multiclass_hinge(params, batch):
    logits = logits_of(params, batch["tokens"])
    hit = jax.nn.one_hot(batch["targets"], VOCABULARY, dtype=bool)
    return jnp.mean(
        jax.nn.relu(1 + jnp.max(jnp.where(hit, -jnp.inf, logits), axis=-1) - pick(logits, batch["targets"]))
    )


@case("tokens", language())
def binary_cross_entropies(params, batch):
    logits = logits_of(params, batch["tokens"])
    one_hot = jax.nn.one_hot(batch["targets"], VOCABULARY, dtype=logits.dtype)
    return optax.sigmoid_binary_cross_entropy(logits, one_hot).sum(axis=-1).mean()


@case("tokens", language())
def sparsemax(params, batch):
    """A sort over the vocabulary gives the threshold."""
    logits = logits_of(params, batch["tokens"])
    ordered = -jnp.sort(-logits, axis=-1)
    ranks = jnp.arange(1, VOCABULARY + 1, dtype=logits.dtype)[None, None]
    support = 1 + ranks * ordered > jnp.cumsum(ordered, axis=-1)
    size = jnp.sum(support, axis=-1, dtype=logits.dtype)
    threshold = (jnp.sum(jnp.where(support, ordered, 0), axis=-1) - 1) / size
    probs = jax.nn.relu(logits - threshold[..., None])
    value = jnp.sum(probs * logits, axis=-1) + 0.5 * (1 - jnp.sum(probs**2, axis=-1))
    return jnp.mean(value - pick(logits, batch["targets"]))


@case("tokens", language(), has_aux=True)
def aux_top_k_accuracy(params, batch):
    logits = logits_of(params, batch["tokens"])
    _, best = jax.lax.top_k(logits, 5)
    hits = jnp.any(best == batch["targets"][..., None].astype(best.dtype), axis=-1)
    rank = jnp.sum(logits > pick(logits, batch["targets"])[..., None], axis=-1)
    aux = {"top_5": jnp.mean(hits), "rank": rank, "entropy": -jnp.sum(jax.nn.softmax(logits) * logits, axis=-1)}
    return jnp.mean(nll_of(logits, batch["targets"])), aux


@case("tokens", language(num_examples=3), has_aux=True)
def aux_is_the_logits(params, batch):
    """The wide value itself is asked for."""
    logits = logits_of(params, batch["tokens"])
    return jnp.mean(nll_of(logits, batch["targets"])), {"logits": logits, "best": jnp.argmax(logits, axis=-1)}


@case("tokens", language())
def sampled_softmax(params, batch):
    """The target against 31 random entries of the vocabulary, with the correction for their frequency."""
    hidden = hidden_of(params, batch["tokens"])
    negatives = jax.random.randint(jax.random.key(5), (31,), 0, VOCABULARY)
    positive = full(jnp.sum(hidden * params["embedding"][batch["targets"]], axis=-1))
    others = full(hidden @ params["embedding"][negatives].T) - math.log(31 / VOCABULARY)
    accidental = negatives[None, None] == batch["targets"][..., None]
    logits = jnp.concatenate([positive[..., None], jnp.where(accidental, -1e9, others)], axis=-1)
    return jnp.mean(-jax.nn.log_softmax(logits)[..., 0])


@case("tokens", language(num_examples=3))
def noise_contrastive(params, batch):
    """Random negatives for each token."""
    hidden = hidden_of(params, batch["tokens"])
    negatives = jax.random.randint(jax.random.key(6), (3, LENGTH, 13), 0, VOCABULARY)
    scores = full(jnp.einsum("ntd,ntkd->ntk", hidden, params["embedding"][negatives]))
    positive = full(jnp.sum(hidden * params["embedding"][batch["targets"]], axis=-1))
    return -jnp.mean(jax.nn.log_sigmoid(positive) + jnp.sum(jax.nn.log_sigmoid(-scores), axis=-1))


# Tokens: two distributions.


@case("tokens", language())
def forward_kl(params, batch):
    ours = jax.nn.log_softmax(logits_of(params, batch["tokens"]))
    theirs = jax.nn.log_softmax(teacher_logits(batch["tokens"], params["embedding"].dtype))
    return weighted_mean(optax.losses.kl_divergence_with_log_targets(ours, theirs), batch["mask"])


@case("tokens", language())
def reverse_kl(params, batch):
    ours = jax.nn.log_softmax(logits_of(params, batch["tokens"]))
    theirs = jax.nn.log_softmax(teacher_logits(batch["tokens"], params["embedding"].dtype))
    return jnp.mean(jnp.sum(jnp.exp(ours) * (ours - theirs), axis=-1))


@case("tokens", language())
def jensen_shannon(params, batch):
    ours = jax.nn.log_softmax(logits_of(params, batch["tokens"]))
    theirs = jax.nn.log_softmax(teacher_logits(batch["tokens"], params["embedding"].dtype))
    middle = jnp.logaddexp(ours, theirs) - math.log(2)
    both = jnp.exp(ours) * (ours - middle) + jnp.exp(theirs) * (theirs - middle)
    return jnp.mean(jnp.sum(both, axis=-1)) / 2


@case("tokens", language())
def jensen_shannon_of_two_heads(params, batch):
    """Two big values that meet in a function with a derivative of its own, `logaddexp`."""
    hidden = hidden_of(params, batch["tokens"])
    ours = jax.nn.log_softmax(full(hidden @ params["embedding"].T) / 2)
    theirs = jax.nn.log_softmax(jax.lax.stop_gradient(full(jnp.tanh(hidden) @ params["embedding"].T)) / 2)
    middle = jnp.logaddexp(ours + math.log(0.3), theirs + math.log(0.7))
    both = 0.3 * jnp.exp(ours) * (ours - middle) + 0.7 * jnp.exp(theirs) * (theirs - middle)
    return jnp.mean(jnp.sum(both, axis=-1))


@case("tokens", language())
def distillation_of_the_top_k(params, batch):
    """The ten best tokens of the teacher, gathered from the logits of the student."""
    logits = logits_of(params, batch["tokens"])
    best, where = jax.lax.top_k(teacher_logits(batch["tokens"], params["embedding"].dtype), 10)
    ours = jax.nn.log_softmax(jnp.take_along_axis(logits, where, axis=-1))
    return -jnp.mean(jnp.sum(jax.nn.softmax(best) * ours, axis=-1))


@case("tokens", language())
def distillation_of_the_logits(params, batch):
    difference = logits_of(params, batch["tokens"]) - teacher_logits(batch["tokens"], params["embedding"].dtype)
    return jnp.sqrt(jnp.mean(difference**2))


@case("tokens", language())
def two_dropout_passes(params, batch):
    """R-Drop: two passes with different masks, and the symmetric divergence between them."""
    hidden = hidden_of(params, batch["tokens"])
    logs = []
    for seed in (1, 2):
        keep = jax.random.bernoulli(jax.random.key(seed), 0.7, hidden.shape)
        logs.append(jax.nn.log_softmax(full(jnp.where(keep, hidden / 0.7, 0) @ params["embedding"].T)))
    first, second = logs
    nll = -pick(first, batch["targets"]) - pick(second, batch["targets"])
    divergence = jnp.sum((jnp.exp(first) - jnp.exp(second)) * (first - second), axis=-1)
    return jnp.mean(nll + 0.5 * divergence)


@case("tokens", language())
def guided_by_an_unconditional_model(params, batch):
    """Classifier-free guidance: two logits of the same weights are extrapolated."""
    with_context = logits_of(params, batch["tokens"])
    without = logits_of(params, jnp.zeros_like(batch["tokens"]))
    return jnp.mean(nll_of(without + 1.5 * (with_context - without), batch["targets"]))


# Tokens: preferences and policies.


def sequence_log_prob(params, tokens, mask, mean=False):
    """The log likelihood of each sequence."""
    nll = nll_of(logits_of(params, tokens)[:, :-1], tokens[:, 1:]) * mask[:, 1:]
    return -jnp.sum(nll, axis=1) / (jnp.sum(mask[:, 1:], axis=1) if mean else 1.0)


def reference_log_prob(tokens, mask, dtype):
    """The log likelihood under a model that the loss closes over."""
    return jax.lax.stop_gradient(sequence_log_prob(gpt_params(np.random.default_rng(98), dtype), tokens, mask))


@case("tokens", preferences)
def dpo(params, batch):
    """The reference model is closed over."""
    dtype = params["embedding"].dtype
    margin = sequence_log_prob(params, batch["chosen"], batch["chosen_mask"])
    margin -= sequence_log_prob(params, batch["rejected"], batch["rejected_mask"])
    margin -= reference_log_prob(batch["chosen"], batch["chosen_mask"], dtype)
    margin += reference_log_prob(batch["rejected"], batch["rejected_mask"], dtype)
    return -jnp.mean(jax.nn.log_sigmoid(0.1 * margin))


@case("tokens", preferences, has_aux=True)
def dpo_concatenated(params, batch):
    """Both answers go through the model as one batch of 2n; the reference was computed beforehand."""
    tokens = jnp.concatenate([batch["chosen"], batch["rejected"]])
    mask = jnp.concatenate([batch["chosen_mask"], batch["rejected_mask"]])
    chosen, rejected = jnp.split(sequence_log_prob(params, tokens, mask), 2)
    rewards = 0.1 * (chosen - batch["reference_chosen"]), 0.1 * (rejected - batch["reference_rejected"])
    value = -jnp.mean(jax.nn.log_sigmoid(rewards[0] - rewards[1]))
    return value, {"chosen": rewards[0], "accuracy": jnp.mean(rewards[0] > rewards[1])}


@case("tokens", preferences)
def ipo(params, batch):
    chosen = sequence_log_prob(params, batch["chosen"], batch["chosen_mask"], mean=True)
    rejected = sequence_log_prob(params, batch["rejected"], batch["rejected_mask"], mean=True)
    reference = (batch["reference_chosen"] - batch["reference_rejected"]) / LENGTH
    return jnp.mean((chosen - rejected - reference - 1 / (2 * 0.1)) ** 2)


@case("tokens", preferences)
def orpo(params, batch):
    """The log odds of two sequences, and the likelihood of the first."""
    chosen = sequence_log_prob(params, batch["chosen"], batch["chosen_mask"], mean=True)
    rejected = sequence_log_prob(params, batch["rejected"], batch["rejected_mask"], mean=True)
    odds = chosen - rejected - jnp.log1p(-jnp.exp(chosen)) + jnp.log1p(-jnp.exp(rejected))
    return -jnp.mean(chosen) - 0.1 * jnp.mean(jax.nn.log_sigmoid(odds))


@case("tokens", preferences)
def simpo(params, batch):
    chosen = sequence_log_prob(params, batch["chosen"], batch["chosen_mask"], mean=True)
    rejected = sequence_log_prob(params, batch["rejected"], batch["rejected_mask"], mean=True)
    return -jnp.mean(jax.nn.log_sigmoid(2.0 * (chosen - rejected) - 0.5))


@case("tokens", preferences)
def kto(params, batch):
    """Good and bad answers without pairs, against the mean divergence of the batch."""
    ratio = sequence_log_prob(params, batch["chosen"], batch["chosen_mask"]) - batch["reference_chosen"]
    other = sequence_log_prob(params, batch["rejected"], batch["rejected_mask"]) - batch["reference_rejected"]
    baseline = jnp.logaddexp(jnp.mean(other), 0.0)
    good, bad = jax.nn.sigmoid(0.1 * (ratio - baseline)), jax.nn.sigmoid(0.1 * (baseline - ratio))
    return jnp.mean(jnp.where(batch["good"], 1 - good, 1.3 * (1 - bad)))


@case("tokens", preferences)
def reward_model(params, batch):
    """Bradley-Terry, with the logit of one token as the reward."""
    chosen = logits_of(params, batch["chosen"])[:, -1, 5]
    rejected = logits_of(params, batch["rejected"])[:, -1, 5]
    return -jnp.mean(jax.nn.log_sigmoid(chosen - rejected))


@case("tokens", policy)
def ppo_with_entropy(params, batch):
    """The clipped ratio, a value head, and the entropy over the vocabulary."""
    hidden = hidden_of(params, batch["tokens"])
    log_probs = jax.nn.log_softmax(full(hidden @ params["embedding"].T))
    ratio = jnp.exp(pick(log_probs, batch["actions"]) - batch["old_log_probs"])
    gain = jnp.minimum(ratio * batch["advantages"], jnp.clip(ratio, 0.8, 1.2) * batch["advantages"])
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
    values = (full(hidden @ params["value"]) - batch["rewards"][:, None]) ** 2
    return weighted_mean(-gain - 0.01 * entropy + 0.5 * values, batch["mask"])


@case("tokens", policy)
def grpo(params, batch):
    """Advantages from the mean and deviation of the rewards, and the k3 estimate of the divergence."""
    rewards = batch["rewards"]
    advantages = ((rewards - jnp.mean(rewards)) / (jnp.std(rewards) + 1e-4))[:, None]
    log_probs = -nll_of(logits_of(params, batch["tokens"]), batch["actions"])
    theirs = -nll_of(teacher_logits(batch["tokens"], params["embedding"].dtype), batch["actions"])
    ratio = jnp.exp(log_probs - batch["old_log_probs"])
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
    k3 = jnp.exp(theirs - log_probs) - (theirs - log_probs) - 1
    by_sequence = jnp.sum((gain - 0.04 * k3) * batch["mask"], axis=1) / jnp.sum(batch["mask"], axis=1)
    return -jnp.mean(by_sequence)


@case("tokens", policy)
def reinforce_with_expected_reward(params, batch):
    """The exact expectation under the policy of a reward for every entry of the vocabulary."""
    probs = jax.nn.softmax(logits_of(params, batch["tokens"]))
    rewards = frozen(3, probs.dtype, VOCABULARY)
    return -jnp.mean(probs @ rewards * batch["advantages"])


@case("tokens", policy)
def soft_q_learning(params, batch):
    """The value of a state is the logsumexp of its logits; neighbouring tokens are bound by Bellman's equation."""
    q = logits_of(params, batch["tokens"])
    value = 0.5 * jax.nn.logsumexp(q / 0.5, axis=-1)
    error = pick(q, batch["actions"])[:, :-1] - batch["rewards"][:, None] - 0.9 * value[:, 1:]
    return weighted_mean(error**2, batch["mask"][:, 1:])


# Tokens: masks, spans, sequences.


@case("tokens", language(num_examples=3))
def mean_of_means(params, batch):
    nll = nll_of(logits_of(params, batch["tokens"]), batch["targets"]) * batch["mask"]
    return jnp.mean(jnp.sum(nll, axis=1) / jnp.sum(batch["mask"], axis=1))


@case("tokens", language(num_examples=3))
def ignored_index(params, batch):
    """Targets of -100 do not count, as in PyTorch."""
    targets = jnp.where(batch["mask"] > 0, batch["targets"], -100)
    valid = targets != -100
    nll = nll_of(logits_of(params, batch["tokens"]), jnp.where(valid, targets, 0))
    return jnp.sum(jnp.where(valid, nll, 0)) / jnp.sum(valid, dtype=nll.dtype)


@case("tokens", language(layers=2, mask_token=(WIDTH,)))
def masked_language_model(params, batch):
    """Some inputs are replaced by a mask token, and only these are predicted."""
    masked = jax.random.bernoulli(jax.random.key(11), 0.3, batch["tokens"].shape)
    x = jnp.where(masked[..., None], params["mask_token"][None, None], embed(params, batch["tokens"]))
    for layer in params["layers"]:
        x = transformer_block(x, layer)
    nll = nll_of(full(rms_norm(x, params["gain"]) @ params["embedding"].T), batch["tokens"])
    return jnp.sum(jnp.where(masked, nll, 0)) / jnp.sum(masked, dtype=nll.dtype)


@case("tokens", language(num_examples=3))
def gathered_positions(params, batch):
    """BERT's: the positions to predict are gathered before the head."""
    hidden = hidden_of(params, batch["tokens"])
    _, positions = jax.lax.top_k(batch["mask"] + frozen(1, batch["mask"].dtype, 3, LENGTH) * 0.01, 5)
    hidden = jnp.take_along_axis(hidden, positions[..., None], axis=1)
    targets = jnp.take_along_axis(batch["targets"], positions, axis=1)
    return jnp.mean(nll_of(full(hidden @ params["embedding"].T), targets))


@case("tokens", language(start=(WIDTH,), end=(WIDTH,)))
def start_and_end_of_a_span(params, batch):
    """Softmaxes over the positions, beside one over the vocabulary."""
    hidden = hidden_of(params, batch["tokens"])
    begin = jnp.argmax(batch["targets"], axis=1) % 6
    start = nll_of(full(hidden @ params["start"]), begin)
    end = nll_of(full(hidden @ params["end"]), begin + 3)
    return jnp.mean(start + end) + 0.1 * jnp.mean(nll_of(full(hidden @ params["embedding"].T), batch["targets"]))


@case("tokens", language(biaffine=(7, WIDTH, WIDTH), num_examples=3))
def labelled_spans(params, batch):
    """A score for each pair of positions and each label, `(n, T, T, labels)`."""
    hidden = hidden_of(params, batch["tokens"])
    scores = full(jnp.einsum("nid,kde,nje->nijk", hidden, params["biaffine"], hidden))
    labels = (batch["targets"][:, :, None] + batch["targets"][:, None, :]) % 7
    upper = jnp.triu(jnp.ones((LENGTH, LENGTH), bool))[None]
    return jnp.sum(jnp.where(upper, nll_of(scores, labels), 0)) / (3 * LENGTH * (LENGTH + 1) / 2)


@case("tokens", translation)
def sequence_to_sequence(params, batch):
    """An encoder, a decoder that attends to it, and padding on both sides."""
    source = hidden_of(params["encoder"], batch["source"])
    hidden, cross = hidden_of(params["decoder"], batch["tokens"]), params["cross"]
    real = jnp.arange(7)[None] < batch["source_length"][:, None]
    query, key, value = hidden @ cross["query"], source @ cross["key"], source @ cross["value"]
    mask = jnp.broadcast_to(real[:, None], (3, LENGTH, 7))
    hidden = hidden + attend(split_heads(query), split_heads(key), split_heads(value), mask) @ cross["out"]
    nll = nll_of(full(hidden @ params["decoder"]["embedding"].T), batch["targets"])
    counted = (jnp.arange(LENGTH)[None] < batch["length"][:, None]).astype(nll.dtype)
    return weighted_mean(nll, counted)


@case("tokens", translation)
def copying_from_the_source(params, batch):
    """A pointer network: probabilities of source positions are scattered into the vocabulary."""
    source = hidden_of(params["encoder"], batch["source"])
    hidden = hidden_of(params["decoder"], batch["tokens"])
    probs = jax.nn.softmax(full(hidden @ params["decoder"]["embedding"].T))
    pointer = jax.nn.softmax(full(jnp.einsum("ntd,nsd->nts", hidden, source)))
    rows, columns = jnp.arange(3)[:, None, None], jnp.arange(LENGTH)[None, :, None]
    mixed = (0.6 * probs).at[rows, columns, batch["source"][:, None, :]].add(0.4 * pointer)
    return -jnp.mean(jnp.log(pick(mixed, batch["targets"])))


@case("tokens", language(transition=(VOCABULARY, VOCABULARY)))
def conditional_random_field(params, batch):
    """The forward algorithm: a loop over the tokens with a `(n, tags, tags)` value in its body."""
    emissions = logits_of(params, batch["tokens"])

    def step(alpha, emission):
        return jax.nn.logsumexp(alpha[:, :, None] + full(params["transition"])[None], axis=1) + emission, None

    alpha, _ = jax.lax.scan(step, emissions[:, 0], jnp.swapaxes(emissions[:, 1:], 0, 1))
    tags = batch["targets"]
    score = jnp.sum(pick(emissions, tags), axis=1)
    score = score + jnp.sum(full(params["transition"])[tags[:, :-1], tags[:, 1:]], axis=1)
    return jnp.mean(jax.nn.logsumexp(alpha, axis=-1) - score) / LENGTH


@case("tokens", language(num_examples=3))
def unlikelihood_of_earlier_tokens(params, batch):
    """Tokens seen before in the sequence are made less likely: a cumulative one-hot mask over the vocabulary."""
    log_probs = jax.nn.log_softmax(logits_of(params, batch["tokens"]))
    one_hot = jax.nn.one_hot(batch["tokens"], VOCABULARY, dtype=log_probs.dtype)
    seen = jnp.cumsum(one_hot, axis=1) > 0
    seen = seen & ~jax.nn.one_hot(batch["targets"], VOCABULARY, dtype=bool)
    against = jnp.where(seen, -jnp.log1p(-jnp.exp(log_probs) * 0.999), 0)
    return jnp.mean(jnp.sum(against, axis=-1) - pick(log_probs, batch["targets"]))


@case("tokens", language(num_examples=3))
def repetition_penalty(params, batch):
    """Counts of tokens, scattered per sequence, are taken off all its logits."""
    logits = logits_of(params, batch["tokens"])
    counts = jnp.zeros((3, VOCABULARY), logits.dtype).at[jnp.arange(3)[:, None], batch["tokens"]].add(1.0)
    return jnp.mean(nll_of(logits - 0.5 * counts[:, None], batch["targets"]))


@case("tokens", language(prior=(VOCABULARY,)))
def logits_adjusted_by_a_prior(params, batch):
    logits = logits_of(params, batch["tokens"]) + jax.nn.log_softmax(full(params["prior"]))[None, None]
    return jnp.mean(nll_of(logits, batch["targets"]))


@case("tokens", language())
def soft_tokens(params, batch):
    """The expected embedding under the prediction goes through the model once more."""
    probs = jax.nn.softmax(logits_of(params, batch["tokens"]))
    x = probs.astype(params["embedding"].dtype) @ params["embedding"]
    hidden = transformer_block(x, params["layers"][0])
    return jnp.mean(nll_of(full(hidden @ params["embedding"].T), batch["targets"]))


@case("tokens", language())
def straight_through_gumbel(params, batch):
    """Hard samples forward, soft ones backward."""
    logits = logits_of(params, batch["tokens"])
    noisy = logits + jax.random.gumbel(jax.random.key(12), logits.shape, logits.dtype)
    soft = jax.nn.softmax(noisy)
    hard = jax.nn.one_hot(jnp.argmax(noisy, axis=-1), VOCABULARY, dtype=soft.dtype)
    sample, embedding = hard + soft - jax.lax.stop_gradient(soft), full(params["embedding"])
    return jnp.mean((sample @ embedding - embedding[batch["targets"]]) ** 2)


@case("tokens", language())
def weights_of_detached_probabilities(params, batch):
    log_probs = jax.nn.log_softmax(logits_of(params, batch["tokens"]))
    return -jnp.mean(jax.lax.stop_gradient(jnp.exp(log_probs)) * log_probs) - jnp.mean(
        pick(log_probs, batch["targets"])
    )


@case("tokens", language(num_examples=3))
def entropy_of_the_mean_distribution(params, batch):
    """All tokens meet in one distribution over the vocabulary."""
    probs = jax.nn.softmax(logits_of(params, batch["tokens"]))
    usage = jnp.mean(probs, axis=(0, 1))
    return jnp.sum(usage * jnp.log(usage)) - jnp.mean(jnp.log(pick(probs, batch["targets"])))


@case("tokens", language(num_examples=3))
def bag_of_words(params, batch):
    """SPLADE: the maximum over the tokens, then contrast between the examples, and the FLOPS penalty."""
    logits = jnp.log1p(jax.nn.softplus(logits_of(params, batch["tokens"])))
    bags = jnp.max(jnp.where(batch["mask"][..., None] > 0, logits, 0), axis=1)
    scores = bags @ jax.nn.one_hot(batch["targets"], VOCABULARY, dtype=bags.dtype).sum(axis=1).T
    return jnp.mean(nll_of(scores, jnp.arange(3))) + 1e-2 * jnp.sum(jnp.mean(bags, axis=0) ** 2)


@case("tokens", language(num_examples=3))
def nll_averaged_by_class(params, batch):
    """A macro average: sums by target with `segment_sum`, then a mean over the targets that occur."""
    nll = nll_of(logits_of(params, batch["tokens"]), batch["targets"]).reshape(-1)
    targets = batch["targets"].reshape(-1)
    sums = jax.ops.segment_sum(nll, targets, VOCABULARY)
    counts = jax.ops.segment_sum(jnp.ones_like(nll), targets, VOCABULARY)
    return jnp.sum(sums / jnp.maximum(counts, 1)) / jnp.sum(counts > 0, dtype=nll.dtype)


@case("tokens", language(num_examples=3))
def logits_averaged_by_class(params, batch):
    """Rows of logits are scattered by the input token: a `(vocabulary, vocabulary)` table."""
    logits = logits_of(params, batch["tokens"]).reshape(-1, VOCABULARY)
    tokens = batch["tokens"].reshape(-1)
    table = jnp.zeros((VOCABULARY, VOCABULARY), logits.dtype).at[tokens].add(logits)
    return jnp.mean(nll_of(table[tokens] * 0.5, batch["targets"].reshape(-1)))


@case("tokens", language())
def smooth_from_token_to_token(params, batch):
    """Neighbouring rows of the logits meet."""
    logits = logits_of(params, batch["tokens"])
    jumps = jnp.mean((logits[:, 1:] - logits[:, :-1]) ** 2)
    return jnp.mean(nll_of(logits, batch["targets"])) + 0.1 * jumps


@case("tokens", language())
def rolled_and_reversed_logits(params, batch):
    logits = logits_of(params, batch["tokens"])
    mixed = logits + 0.3 * jnp.roll(logits, 1, axis=1) + 0.2 * logits[:, ::-1]
    return jnp.mean(nll_of(mixed, batch["targets"]))


@case("tokens", language(filters=(3, 1, 1)))
def convolved_logits(params, batch):
    """A convolution over the tokens, for each entry of the vocabulary."""
    logits = logits_of(params, batch["tokens"])
    columns = jnp.swapaxes(logits, 1, 2).reshape(-1, LENGTH, 1)
    numbers = ("NWC", "WIO", "NWC")
    mixed = jax.lax.conv_general_dilated(columns, full(params["filters"]), (1,), "SAME", dimension_numbers=numbers)
    mixed = jnp.swapaxes(mixed.reshape(2, VOCABULARY, LENGTH), 1, 2)
    return jnp.mean(nll_of(mixed, batch["targets"]))


@case("tokens", language())
def top_k_filtered(params, batch):
    """Logits below the twentieth are pushed down, but for the target."""
    logits = logits_of(params, batch["tokens"])
    bound = jax.lax.top_k(logits, 20)[0][..., -1:]
    keep = (logits >= bound) | jax.nn.one_hot(batch["targets"], VOCABULARY, dtype=bool)
    return jnp.mean(nll_of(jnp.where(keep, logits, logits - 3.0), batch["targets"]))


@case("tokens", language())
def sorted_probabilities(params, batch):
    """A sort along the vocabulary, and a penalty on the tail."""
    probs = jnp.sort(jax.nn.softmax(logits_of(params, batch["tokens"])), axis=-1)
    return jnp.mean(jnp.sum(probs * jnp.linspace(1, 0, VOCABULARY, dtype=probs.dtype)[None, None], axis=-1))


@case("tokens", language(num_examples=3))
def sorted_over_tokens(params, batch):
    """A sort along the tokens, for each entry of the vocabulary."""
    logits = jnp.sort(logits_of(params, batch["tokens"]), axis=1)
    return jnp.mean(nll_of(logits, batch["targets"]))


@case("tokens", language(num_examples=3))
def sums_with_different_denominators(params, batch):
    logits = logits_of(params, batch["tokens"])
    nll, log_z = nll_of(logits, batch["targets"]), jax.nn.logsumexp(logits, axis=-1)
    first = jnp.sum(nll * batch["mask"]) / jnp.sum(batch["mask"])
    second = jnp.sum(nll * (1 - batch["mask"])) / jnp.sum(1 - batch["mask"])
    return first + 0.5 * second + 1e-3 * jnp.sum(log_z**2) / 3 + 1e-2 * jnp.mean(logits**2)


@case("tokens", language())
def functions_of_sums(params, batch):
    """Roots, logarithms and ratios of sums over everything that is wide."""
    logits = logits_of(params, batch["tokens"])
    nll = nll_of(logits, batch["targets"])
    return jnp.sqrt(jnp.sum(logits**2)) / jnp.log(1 + jnp.sum(nll)) + jnp.sum(nll**2) / jnp.sum(nll)


@case("tokens", language())
def weighted_by_the_largest(params, batch):
    """Each token is weighted against the hardest token of the batch."""
    nll = nll_of(logits_of(params, batch["tokens"]), batch["targets"])
    return jnp.sum(nll * jnp.exp(nll - jnp.max(nll))) / nll.size


@case("tokens", language())
def gradient_penalty_on_the_embeddings(params, batch):
    """A derivative in the loss: how much the prediction depends on the hidden states."""

    def total(hidden):
        return jnp.mean(nll_of(full(hidden @ params["embedding"].T), batch["targets"]))

    value, slope = jax.value_and_grad(total)(hidden_of(params, batch["tokens"]))
    return value + 0.5 * full(jnp.sum(slope**2))


@case("tokens", language(), has_aux=True)
def aux_of_nested_outputs(params, batch):
    logits = logits_of(params, batch["tokens"])
    nll = nll_of(logits, batch["targets"])
    aux = {"by_sequence": jnp.sum(nll, axis=1), "largest": jnp.max(logits), "mean_row": jnp.mean(logits, axis=(0, 1))}
    return jnp.mean(nll), (aux, [jnp.sum(batch["mask"]), nll.T])


# Pairs: two towers that encode examples, and what is made of their similarities.


def tower_params(generator, dtype):
    return {
        "first": weights(generator, dtype, FEATURES, WIDTH),
        "second": weights(generator, dtype, WIDTH, WIDTH // 2),
    }


def towers(num_examples=NUM_ROWS, **extra):
    """Two towers with a scale and a bias; rows of two modalities with weights, labels and relevances."""

    def make(dtype):
        generator = np.random.default_rng(num_examples)
        params = {"image": tower_params(generator, dtype), "text": tower_params(generator, dtype)}
        params |= {"log_scale": jnp.asarray(1.3, dtype), "bias": jnp.asarray(-1.0, dtype)}
        params |= {name: weights(generator, dtype, *shape) for name, shape in extra.items()}
        batch = {
            "image": normals(generator, dtype, num_examples, FEATURES),
            "text": normals(generator, dtype, num_examples, FEATURES),
            "weight": jnp.asarray(generator.uniform(0.1, 2.0, num_examples), dtype),
            "label": integers(generator, NUM_CLASSES, num_examples),
            "relevance": normals(generator, dtype, num_examples),
        }
        return params, batch

    return make


def encode(tower, x):
    return unit(jnp.tanh(x @ tower["first"]) @ tower["second"])


def both_views(params, batch):
    return full(encode(params["image"], batch["image"])), full(encode(params["text"], batch["text"]))


def image_rows(params, batch):
    return full(encode(params["image"], batch["image"]))


def scaled_similarity(params, batch):
    image, text = both_views(params, batch)
    return jnp.exp(full(params["log_scale"])) * image @ text.T


def squared_distances(x, y):
    """All squared distances, by differences."""
    return jnp.sum((x[:, None] - y[None]) ** 2, axis=-1)


def expanded_distances(x, y):
    """All squared distances, by a product of matrices."""
    return jnp.sum(x**2, axis=1)[:, None] + jnp.sum(y**2, axis=1)[None] - 2 * x @ y.T


def scores_of(params, batch):
    """One score for each example."""
    return full(jnp.tanh(batch["image"] @ params["image"]["first"]) @ params["image"]["second"]).sum(axis=-1)


def same_label(batch):
    return batch["label"][:, None] == batch["label"][None]


@case("pairs", towers())
def clip(params, batch):
    logits = scaled_similarity(params, batch)
    labels = jnp.arange(logits.shape[0])
    by_image = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    by_text = optax.softmax_cross_entropy_with_integer_labels(logits.T, labels)
    return (jnp.mean(by_image) + jnp.mean(by_text)) / 2


@case("pairs", towers())
def clip_with_one_mean(params, batch):
    logits = scaled_similarity(params, batch)
    both = 0.5 * (jax.nn.logsumexp(logits, axis=1) + jax.nn.logsumexp(logits, axis=0))
    return jnp.mean(both - jnp.diag(logits))


@case("pairs", towers())
def clip_by_log_softmax(params, batch):
    logits = scaled_similarity(params, batch)
    rows, columns = jax.nn.log_softmax(logits, axis=1), jax.nn.log_softmax(logits, axis=0)
    return -(jnp.mean(jnp.diagonal(rows)) + jnp.mean(jnp.diagonal(columns))) / 2


@case("pairs", towers())
def siglip(params, batch):
    logits = scaled_similarity(params, batch) + full(params["bias"])
    signs = 2 * jnp.eye(logits.shape[0], dtype=logits.dtype) - 1
    return -jnp.sum(jax.nn.log_sigmoid(signs * logits)) / logits.shape[0]


@case("pairs", towers())
def weighted_by_a_mask_of_labels(params, batch):
    """The mask follows from data alone, and is as wide as the logits."""
    logits = scaled_similarity(params, batch)
    same = (batch["label"][:, None] == batch["label"][None]).astype(logits.dtype)
    return jnp.mean(same * jax.nn.softplus(-logits) + (1 - same) * jax.nn.softplus(logits))


@case("pairs", towers())
def similarities_of_the_data_as_targets(params, batch):
    targets = jnp.exp(-jnp.square(full(batch["weight"])[:, None] - full(batch["weight"])[None]))
    return jnp.mean(jnp.square(scaled_similarity(params, batch) - targets))


@case("pairs", towers())
def nt_xent(params, batch):
    """SimCLR's: two views as one batch of 2N, without the diagonal."""
    rows = jnp.concatenate([encode(params["image"], batch["image"]), encode(params["image"], batch["text"])])
    size = rows.shape[0] // 2
    logits = jnp.where(jnp.eye(2 * size, dtype=bool), -jnp.inf, full(rows @ rows.T) / 0.5)
    partner = jnp.concatenate([jnp.arange(size) + size, jnp.arange(size)])
    return optax.softmax_cross_entropy_with_integer_labels(logits, partner).mean()


@case("pairs", towers())
def in_batch_negatives(params, batch):
    """One-sided, with weights."""
    image, text = both_views(params, batch)
    log_probs = jax.nn.log_softmax(20.0 * image @ text.T, axis=-1)
    return -jnp.sum(batch["weight"] * jnp.diagonal(log_probs)) / jnp.sum(batch["weight"])


@case("pairs", towers(), has_aux=True)
def aux_accuracy_both_ways(params, batch):
    image, text = both_views(params, batch)
    logits = 20.0 * image @ text.T
    order = jnp.arange(logits.shape[0])
    aux = {"rows": jnp.mean(jnp.argmax(logits, 1) == order), "columns": jnp.mean(jnp.argmax(logits, 0) == order)}
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(logits, axis=-1))), aux


@case("pairs", towers())
def supervised_contrastive(params, batch):
    rows = image_rows(params, batch)
    logits, own = rows @ rows.T / 0.5, jnp.eye(rows.shape[0], dtype=bool)
    positives = same_label(batch) & ~own
    log_probs = logits - jax.nn.logsumexp(jnp.where(own, -jnp.inf, logits), axis=1, keepdims=True)
    counts = jnp.maximum(jnp.sum(positives, axis=1, dtype=rows.dtype), 1)
    return -jnp.mean(jnp.sum(jnp.where(positives, log_probs, 0), axis=1) / counts)


@case("pairs", towers())
def hardest_triplets(params, batch):
    rows, same = image_rows(params, batch), same_label(batch)
    distances = squared_distances(rows, rows)
    positive = jnp.max(jnp.where(same, distances, -jnp.inf), axis=1)
    negative = jnp.min(jnp.where(same, jnp.inf, distances), axis=1)
    return jnp.mean(jax.nn.relu(positive - negative + 0.3))


@case("pairs", towers(num_examples=13))
def all_triplets(params, batch):
    """One entry for each triplet of examples."""
    rows, same = image_rows(params, batch), same_label(batch)
    distances = squared_distances(rows, rows)
    margins = distances[:, :, None] - distances[:, None, :] + 0.3001
    wanted = same[:, :, None] & ~same[:, None, :]
    return jnp.sum(jnp.where(wanted, jax.nn.relu(margins), 0)) / jnp.maximum(jnp.sum(wanted, dtype=rows.dtype), 1)


@case("other", towers())
def barlow_twins_of_one_view(params, batch):
    """Sums over the batch: one entry for each pair of features, none for a pair of examples."""
    rows = image_rows(params, batch)
    rows = (rows - jnp.mean(rows, axis=0, keepdims=True)) / jnp.std(rows, axis=0, keepdims=True)
    correlation = rows.T @ rows / rows.shape[0]
    return jnp.sum((correlation - 0.5 * jnp.eye(correlation.shape[0], dtype=rows.dtype)) ** 2)


@case("pairs", towers())
def hsic(params, batch):
    """Two kernels, one of them centred over both axes."""
    image, text = both_views(params, batch)
    first, second = jnp.exp(image @ image.T), jnp.exp(text @ text.T)
    first = first - first.mean(axis=0, keepdims=True) - first.mean(axis=1, keepdims=True) + first.mean()
    return jnp.sum(first * second) / first.shape[0] ** 2


@case("pairs", towers(), stays_whole=True)
def determinant_of_similarities(params, batch):
    image, text = both_views(params, batch)
    logits = image @ text.T
    gram = logits @ logits.T + jnp.eye(logits.shape[0], dtype=logits.dtype)
    return jnp.mean(jax.nn.logsumexp(logits, axis=1)) + 0.1 * jnp.linalg.slogdet(gram)[1]


@case("pairs", towers())
def sinkhorn_unrolled(params, batch):
    image, text = both_views(params, batch)
    logits = 5.0 * image @ text.T
    rows, columns = jnp.zeros_like(logits[:, 0]), jnp.zeros_like(logits[0])
    for _ in range(3):
        rows = -jax.nn.logsumexp(logits + columns[None], axis=1)
        columns = -jax.nn.logsumexp(logits + rows[:, None], axis=0)
    return -jnp.sum(jnp.exp(logits + rows[:, None] + columns[None]) * logits)


@case("pairs", towers())
def sinkhorn_in_a_scan(params, batch):
    image, text = both_views(params, batch)
    logits = -5.0 * expanded_distances(image, text)

    def step(potentials, _):
        rows, columns = potentials
        rows = -jax.nn.logsumexp(logits + columns[None], axis=1)
        return (rows, -jax.nn.logsumexp(logits + rows[:, None], axis=0)), None

    start = jnp.zeros_like(logits[:, 0]), jnp.zeros_like(logits[0])
    (rows, columns), _ = jax.lax.scan(step, start, None, length=4)
    return -jnp.sum(jnp.exp(logits + rows[:, None] + columns[None]) * logits) / logits.shape[0]


@case("pairs", towers(), stays_whole=True)
def sinkhorn_in_a_fori_loop(params, batch):
    """The plan itself is what the loop carries."""
    image, text = both_views(params, batch)
    cost = squared_distances(image, text)

    def step(_, plan):
        plan = plan / jnp.sum(plan, axis=1, keepdims=True)
        return plan / jnp.sum(plan, axis=0, keepdims=True)

    plan = jax.lax.fori_loop(0, 5, step, jnp.exp(-2.0 * cost))
    return jnp.sum(plan * cost) / cost.shape[0]


@case("pairs", towers())
def negatives_from_a_queue(params, batch):
    """MoCo's: a queue of old keys that the loss closes over."""
    queries, keys = both_views(params, batch)
    queue = unit(frozen(2, queries.dtype, 61, WIDTH // 2))
    positive = jnp.sum(queries * keys, axis=-1, keepdims=True)
    logits = jnp.concatenate([positive, queries @ queue.T], axis=1) / 0.2
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - logits[:, 0])


@case("pairs", towers(queue=(61, WIDTH // 2)))
def negatives_from_parameters(params, batch):
    queries, keys = both_views(params, batch)
    everything = jnp.concatenate([keys, full(unit(params["queue"]))])
    logits = queries @ everything.T / 0.2
    return jnp.mean(nll_of(logits, jnp.arange(queries.shape[0])))


@case("pairs", towers())
def semi_hard_triplets(params, batch):
    """FaceNet's: the closest negative that is farther than the positive."""
    rows, same = image_rows(params, batch), same_label(batch)
    distances = squared_distances(rows, rows)
    farther = (distances[:, None, :] > distances[:, :, None]) & ~same[:, None, :]
    closest = jnp.min(jnp.where(farther, distances[:, None, :], 5.0), axis=-1)
    wanted = same & ~jnp.eye(rows.shape[0], dtype=bool)
    margins = jax.nn.relu(distances - closest + 0.5)
    return jnp.sum(jnp.where(wanted, margins, 0)) / jnp.sum(wanted, dtype=rows.dtype)


@case("pairs", towers())
def pairwise_logistic_ranking(params, batch):
    scores = scores_of(params, batch)
    better = batch["relevance"][:, None] > batch["relevance"][None]
    losses = jax.nn.softplus(-(scores[:, None] - scores[None]))
    return jnp.sum(jnp.where(better, losses, 0)) / jnp.sum(better, dtype=scores.dtype)


@case("pairs", towers())
def list_net(params, batch):
    """Softmaxes over the examples; no pairs but those of the similarities."""
    image, text = both_views(params, batch)
    wanted = jax.nn.softmax(jnp.broadcast_to(batch["relevance"][None], (image.shape[0],) * 2) * 2, axis=1)
    return -jnp.mean(jnp.sum(wanted * jax.nn.log_softmax(image @ text.T / 0.3, axis=1), axis=1))


@case("pairs", towers())
def lambda_rank(params, batch):
    """Pairs weighted by the change of the gain if they swapped places; the places come from a sort."""
    scores = scores_of(params, batch)
    places = jnp.argsort(jnp.argsort(-scores))
    discount = 1 / jnp.log2(2.0 + places.astype(scores.dtype))
    gain = 2 ** batch["relevance"]
    change = jnp.abs((gain[:, None] - gain[None]) * (discount[:, None] - discount[None]))
    better = batch["relevance"][:, None] > batch["relevance"][None]
    return jnp.sum(jnp.where(better, change * jax.nn.softplus(scores[None] - scores[:, None]), 0))


@case("pairs", towers())
def soft_ranks(params, batch):
    """ApproxNDCG: a rank is a sum of sigmoids over the others."""
    scores = scores_of(params, batch)
    differences = (scores[None] - scores[:, None]) / 0.3
    ranks = 0.5 + jnp.sum(jax.nn.sigmoid(differences), axis=1)
    return -jnp.sum(2 ** batch["relevance"] / jnp.log2(1.0 + ranks))


@case("pairs", towers(num_examples=13))
def smooth_average_precision(params, batch):
    """A sigmoid for each triplet of examples."""
    rows, same = image_rows(params, batch), same_label(batch)
    similarity, own = rows @ rows.T, jnp.eye(rows.shape[0], dtype=bool)
    above = jax.nn.sigmoid((similarity[:, None, :] - similarity[:, :, None]) / 0.1)
    above = jnp.where(own[None], 0, above)
    everyone = 1 + jnp.sum(above, axis=-1)
    alike = 1 + jnp.sum(jnp.where(same[:, None, :], above, 0), axis=-1)
    return 1 - jnp.sum(jnp.where(same, alike / everyone, 0)) / jnp.sum(same, dtype=rows.dtype)


@case("pairs", towers())
def area_under_the_curve(params, batch):
    """A surrogate over all pairs of a positive and a negative example."""
    scores, positive = scores_of(params, batch), batch["label"] < 2
    pairs = positive[:, None] & ~positive[None]
    hinge = jax.nn.relu(1.01 - (scores[:, None] - scores[None])) ** 2
    return jnp.sum(hinge * pairs.astype(hinge.dtype)) / jnp.sum(pairs, dtype=hinge.dtype)


@case("pairs", towers())
def cox_partial_likelihood(params, batch):
    """Who is at risk is a comparison of times."""
    scores, times = scores_of(params, batch), batch["relevance"]
    at_risk = times[None] >= times[:, None]
    log_risk = jax.nn.logsumexp(jnp.where(at_risk, scores[None], -jnp.inf), axis=1)
    observed = (batch["label"] > 0).astype(scores.dtype)
    return -weighted_mean(scores - log_risk, observed)


@case("pairs", towers())
def maximum_mean_discrepancy(params, batch):
    image, text = both_views(params, batch)

    def kernel(x, y):
        distances = squared_distances(x, y)
        return sum(jnp.exp(-distances / width) for width in (0.5, 1.0, 4.0))

    size = image.shape[0]
    off = 1 - jnp.eye(size, dtype=image.dtype)
    own = jnp.sum((kernel(image, image) + kernel(text, text)) * off) / (size * (size - 1))
    return own - 2 * jnp.mean(kernel(image, text))


@case("pairs", towers())
def detached_bandwidth(params, batch):
    """A kernel whose width is the detached mean of all distances."""
    image, text = both_views(params, batch)
    rows = jnp.concatenate([image, text])
    distances = expanded_distances(rows, rows)
    kernel = jnp.exp(-distances / jax.lax.stop_gradient(jnp.mean(distances)))
    signs = jnp.concatenate([jnp.ones_like(image[:, 0]), -jnp.ones_like(text[:, 0])])
    return jnp.sum(kernel * signs[:, None] * signs[None]) / image.shape[0] ** 2


@case("pairs", towers())
def mean_bandwidth(params, batch):
    """The same with a width that takes part in the gradient."""
    image, text = both_views(params, batch)
    distances = expanded_distances(image, text)
    return -jnp.log(jnp.mean(jnp.exp(-distances / jnp.mean(distances))))


@case("pairs", towers())
def self_tuning_bandwidth(params, batch):
    """A width for each example, from its fifth neighbour, used for rows and for columns."""
    rows = image_rows(params, batch)
    distances = squared_distances(rows, rows)
    width = jnp.sqrt(-jax.lax.top_k(-distances, 5)[0][:, -1])
    kernel = jnp.exp(-distances / (width[:, None] * width[None]))
    return jnp.mean(kernel) - 0.5 * jnp.mean(jnp.where(same_label(batch), kernel, 0))


@case("pairs", towers())
def centred_kernel_alignment(params, batch):
    image, text = both_views(params, batch)

    def centred(kernel):
        return kernel - kernel.mean(axis=0, keepdims=True) - kernel.mean(axis=1, keepdims=True) + kernel.mean()

    first, second = centred(jnp.exp(image @ image.T)), centred(jnp.exp(text @ text.T))
    return -jnp.sum(first * second) / jnp.sqrt(jnp.sum(first**2) * jnp.sum(second**2))


@case("pairs", towers(), stays_whole=True)
def alignment_by_centring_matrices(params, batch):
    """The trace of a product of four matrices of pairs."""
    image, text = both_views(params, batch)
    size = image.shape[0]
    centring = jnp.eye(size, dtype=image.dtype) - 1 / size
    return jnp.trace(jnp.exp(image @ image.T) @ centring @ jnp.exp(text @ text.T) @ centring) / (size - 1) ** 2


def safe_distances(x, y):
    """Distances with a zero gradient where two rows coincide, whatever the rounding of their squared distance."""
    squares = squared_distances(x, y)
    zero = squares < 1e-9
    return jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, squares)))


@case("pairs", towers())
def energy_distance(params, batch):
    image, text = both_views(params, batch)
    between = jnp.mean(safe_distances(image, text))
    return 2 * between - jnp.mean(safe_distances(image, image)) - jnp.mean(safe_distances(text, text))


@case("pairs", towers())
def distance_correlation(params, batch):
    """Two matrices of distances, centred over both axes, and a ratio of their sums."""
    image, text = both_views(params, batch)

    def centred(rows):
        distances = safe_distances(rows, rows)
        return distances - distances.mean(axis=0)[None] - distances.mean(axis=1)[:, None] + distances.mean()

    first, second = centred(image), centred(text)
    return jnp.mean(first * second) / jnp.sqrt(jnp.mean(first**2) * jnp.mean(second**2))


@case("pairs", towers(), stays_whole=True)
def gaussian_process(params, batch):
    rows = image_rows(params, batch)
    kernel = jnp.exp(-squared_distances(rows, rows)) + 0.5 * jnp.eye(rows.shape[0], dtype=rows.dtype)
    root = jnp.linalg.cholesky(kernel)
    white = jax.scipy.linalg.solve_triangular(root, batch["relevance"], lower=True)
    return 0.5 * jnp.sum(white**2) + jnp.sum(jnp.log(jnp.diag(root)))


@case("pairs", towers(), stays_whole=True)
def kernel_ridge(params, batch):
    """A linear system of pairs."""
    image, text = both_views(params, batch)
    kernel = jnp.exp(image @ image.T)
    solution = jnp.linalg.solve(kernel + jnp.eye(image.shape[0], dtype=image.dtype), text)
    return jnp.mean((kernel @ solution - text) ** 2)


@case("pairs", towers(), stays_whole=True)
def three_hops(params, batch):
    """The product of three matrices of pairs."""
    image, text = both_views(params, batch)
    walk = jax.nn.softmax(image @ text.T / 0.3, axis=1)
    home = jax.nn.softmax(text @ image.T / 0.3, axis=1)
    stay = jax.nn.softmax(text @ text.T / 0.3, axis=1)
    return -jnp.mean(jnp.log(jnp.diag(walk @ stay @ home)))


@case("pairs", towers(), stays_whole=True)
def there_and_back(params, batch):
    """The product of two matrices of pairs: a cycle from images to texts and back."""
    image, text = both_views(params, batch)
    logits = image @ text.T / 0.3
    cycle = jax.nn.softmax(logits, axis=1) @ jax.nn.softmax(logits.T, axis=1)
    return -jnp.mean(jnp.log(jnp.diagonal(cycle)))


@case("pairs", towers())
def circle_loss(params, batch):
    rows = image_rows(params, batch)
    similarity, same = rows @ rows.T, same_label(batch)
    other = ~jnp.eye(rows.shape[0], dtype=bool)
    positive = -8 * jax.nn.relu(1.25 - similarity) * (similarity - 0.75)
    negative = 8 * jax.nn.relu(similarity + 0.2503) * (similarity - 0.25)
    by_positive = jax.nn.logsumexp(jnp.where(same & other, positive, -1e9), axis=1)
    by_negative = jax.nn.logsumexp(jnp.where(same, -1e9, negative), axis=1)
    return jnp.mean(jax.nn.softplus(by_positive + by_negative))


@case("pairs", towers())
def multi_similarity(params, batch):
    rows = image_rows(params, batch)
    similarity, same = rows @ rows.T, same_label(batch)
    other = ~jnp.eye(rows.shape[0], dtype=bool)
    pull = jnp.log1p(jnp.sum(jnp.where(same & other, jnp.exp(-2 * (similarity - 0.5)), 0), axis=1)) / 2
    push = jnp.log1p(jnp.sum(jnp.where(same, 0, jnp.exp(10 * (similarity - 0.5))), axis=1)) / 10
    return jnp.mean(pull + push)


@case("pairs", towers())
def lifted_structure(params, batch):
    """Each positive pair against the negatives of both its members: a row and a column of the same sums."""
    rows, same = image_rows(params, batch), same_label(batch)
    distances = safe_distances(rows, rows)
    push = jnp.sum(jnp.where(same, 0, jnp.exp(1.0 - distances)), axis=1)
    pairs = jnp.log(push[:, None] + push[None]) + distances
    wanted = jnp.triu(same, 1)
    return jnp.sum(jnp.where(wanted, jax.nn.softplus(pairs) ** 2, 0)) / (2 * jnp.sum(wanted, dtype=rows.dtype))


@case("pairs", towers())
def soft_nearest_neighbours(params, batch):
    """Neighbourhood components: the share of one's own class among the neighbours."""
    rows = image_rows(params, batch)
    logits = jnp.where(jnp.eye(rows.shape[0], dtype=bool), -1e9, -squared_distances(rows, rows) / 0.3)
    share = jnp.sum(jnp.where(same_label(batch), jax.nn.softmax(logits, axis=1), 0), axis=1)
    return -jnp.mean(jnp.log(share + 1e-3))


@case("pairs", towers(proxies=(47, WIDTH // 2)))
def arc_face(params, batch):
    """An angle is added at the target, for one row per example and one column per class."""
    rows, proxies = image_rows(params, batch), full(unit(params["proxies"]))
    cosines = jnp.clip(rows @ proxies.T, -0.9999, 0.9999)
    target = jax.nn.one_hot(batch["label"] * 11, 47, dtype=bool)
    return jnp.mean(nll_of(8 * jnp.where(target, jnp.cos(jnp.arccos(cosines) + 0.3), cosines), batch["label"] * 11))


@case("pairs", towers())
def alignment_and_uniformity(params, batch):
    """The logarithm of a mean over all pairs of different examples."""
    image, text = both_views(params, batch)
    upper = jnp.triu_indices(image.shape[0], 1)
    distances = squared_distances(image, image)[upper]
    return jnp.mean(jnp.sum((image - text) ** 2, axis=1)) + jnp.log(jnp.mean(jnp.exp(-2 * distances)))


@case("pairs", towers())
def neighbour_embedding(params, batch):
    """t-SNE: two matrices of pairs, one of them normalised by row and made symmetric, one normalised as a whole."""
    image, text = both_views(params, batch)
    own = jnp.eye(image.shape[0], dtype=bool)
    near = jax.nn.softmax(jnp.where(own, -1e9, -squared_distances(text, text) / 0.2), axis=1)
    near = (near + near.T) / (2 * image.shape[0])
    close = jnp.where(own, 0, 1 / (1 + squared_distances(image, image)))
    close = close / jnp.sum(close)
    return jnp.sum(jnp.where(own, 0, near * (jnp.log(near + 1e-12) - jnp.log(jnp.where(own, 1, close)))))


@case("pairs", towers())
def stress(params, batch):
    """Multidimensional scaling: distances of two views, each divided by its own mean."""
    image, text = both_views(params, batch)
    first, second = safe_distances(image, image), safe_distances(text, text)
    return jnp.sum((first / jnp.mean(first) - second / jnp.mean(second)) ** 2) / jnp.sum(second**2)


@case("pairs", towers())
def graph_laplacian(params, batch):
    """Degrees are sums over rows, and scale rows and columns."""
    image, text = both_views(params, batch)
    kernel = jnp.exp(-squared_distances(image, image))
    degree = 1 / jnp.sqrt(jnp.sum(kernel, axis=1))
    smooth = kernel * degree[:, None] * degree[None]
    return jnp.sum(text * text) - jnp.sum(text * (smooth @ text))


@case("pairs", towers())
def spectral_contrastive(params, batch):
    image, text = both_views(params, batch)
    logits = image @ text.T
    size = logits.shape[0]
    off = jnp.sum(logits**2) - jnp.sum(jnp.diagonal(logits) ** 2)
    return -2 * jnp.trace(logits) / size + off / (size * (size - 1))


@case("pairs", towers())
def decoupled_contrastive(params, batch):
    """The positive is left out of its own normaliser."""
    logits = scaled_similarity(params, batch)
    own = jnp.arange(logits.shape[0])[:, None] == jnp.arange(logits.shape[0])[None]
    return jnp.mean(jax.nn.logsumexp(jnp.where(own, -jnp.inf, logits), axis=1)) - jnp.mean(jnp.diagonal(logits))


@case("pairs", towers())
def hard_negatives_reweighted(params, batch):
    """Negatives are weighted by their own detached similarity."""
    image, text = both_views(params, batch)
    logits = image @ text.T / 0.5
    off = 1 - jnp.eye(logits.shape[0], dtype=logits.dtype)
    weight = jax.lax.stop_gradient(jnp.exp(0.5 * logits) * off)
    weight = weight / jnp.mean(weight, axis=1, keepdims=True)
    positive = jnp.exp(jnp.diagonal(logits))
    return -jnp.mean(jnp.log(positive / (positive + jnp.sum(weight * jnp.exp(logits) * off, axis=1))))


@case("pairs", towers())
def debiased_contrastive(params, batch):
    image, text = both_views(params, batch)
    scores = jnp.exp(image @ text.T / 0.5)
    size, positive = scores.shape[0], jnp.diagonal(scores)
    negative = (jnp.sum(scores, axis=1) - positive - 0.1 * (size - 1) * positive) / 0.9
    return -jnp.mean(jnp.log(positive / (positive + jnp.maximum(negative, 0.01))))


@case("pairs", towers())
def retrieval_of_associations(params, batch):
    """CLOOB: rows are replaced by what they retrieve from the batch, then contrasted with the diagonal left out."""
    image, text = both_views(params, batch)
    from_image = unit(jax.nn.softmax(4 * text @ image.T, axis=1) @ image)
    from_text = unit(jax.nn.softmax(4 * image @ text.T, axis=1) @ text)
    logits = 3 * from_image @ from_text.T
    own = jnp.eye(logits.shape[0], dtype=bool)
    return jnp.mean(jax.nn.logsumexp(jnp.where(own, -1e9, logits), axis=1) - jnp.diag(logits))


@case("pairs", towers())
def chamfer(params, batch):
    image, text = both_views(params, batch)
    distances = squared_distances(image, text)
    return jnp.mean(jnp.min(distances, axis=1)) + jnp.mean(jnp.min(distances, axis=0))


@case("pairs", towers())
def hausdorff(params, batch):
    """The maximum over rows of a minimum over columns, and the other way round."""
    image, text = both_views(params, batch)
    distances = jnp.sqrt(expanded_distances(image, text) + 1e-3)
    return jnp.maximum(jnp.max(jnp.min(distances, axis=1)), jnp.max(jnp.min(distances, axis=0)))


@case("pairs", towers())
def maximum_over_rows_then_columns(params, batch):
    logits = scaled_similarity(params, batch)
    lower = logits - jnp.max(logits, axis=1, keepdims=True)
    return jnp.mean(jnp.exp(lower - jnp.max(lower, axis=0, keepdims=True))) + jnp.max(logits)


@case("pairs", towers())
def mutual_information_by_donsker_varadhan(params, batch):
    image, text = both_views(params, batch)
    scores = jnp.sin(2 * image @ text.T) + full(params["bias"])
    off = ~jnp.eye(scores.shape[0], dtype=bool)
    marginal = jax.nn.logsumexp(jnp.where(off, scores, -jnp.inf)) - math.log(NUM_ROWS * (NUM_ROWS - 1))
    return marginal - jnp.mean(jnp.diagonal(scores))


@case("pairs", towers(hidden=(WIDTH, 9), out=(9,)))
def relation_network(params, batch):
    """A network on each pair: a `(N, N, hidden)` value."""
    image, text = both_views(params, batch)
    size = image.shape[0]
    pairs = jnp.concatenate(
        [jnp.broadcast_to(image[:, None], (size, *image.shape)), jnp.broadcast_to(text[None], (size, *text.shape))],
        axis=-1,
    )
    scores = jnp.tanh(pairs @ full(params["hidden"])) @ full(params["out"])
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(scores * 3, axis=1)))


@case("pairs", towers())
def city_block_distances(params, batch):
    image, text = both_views(params, batch)
    logits = -3 * jnp.sum(jnp.abs(image[:, None] - text[None]), axis=-1)
    return jnp.mean(nll_of(logits, jnp.arange(image.shape[0])))


@case("pairs", towers())
def vmap_of_vmap(params, batch):
    image, text = both_views(params, batch)
    logits = jax.vmap(lambda x: jax.vmap(lambda y: jnp.vdot(x, y) / 0.2)(text))(image)
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(logits)))


@case("pairs", towers())
def map_over_rows(params, batch):
    """The author loops over the rows already."""
    image, text = both_views(params, batch)

    def of_one(row):
        x, own = row
        logits = text @ x / 0.2
        return jax.nn.logsumexp(logits) - logits[own]

    return jnp.mean(jax.lax.map(of_one, (image, jnp.arange(image.shape[0]))))


@case("pairs", towers(), has_aux=True)
def aux_is_the_matrix(params, batch):
    """The pairs themselves are asked for, with their order by row."""
    logits = scaled_similarity(params, batch)
    value = jnp.mean(nll_of(logits, jnp.arange(logits.shape[0])))
    return value, {"logits": logits, "order": jnp.argsort(-logits, axis=1), "by_column": jnp.max(logits, axis=0)}


@case("pairs", towers(), has_aux=True)
def aux_recall_at_k(params, batch):
    logits = scaled_similarity(params, batch)
    own = jnp.diagonal(logits)
    ranks = jnp.sum(logits > own[:, None], axis=1), jnp.sum(logits > own[None], axis=0)
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - own), {"at_5": jnp.mean(ranks[0] < 5), "ranks": ranks}


@case("pairs", towers())
def diagonal_by_eye(params, batch):
    log_probs = jax.nn.log_softmax(scaled_similarity(params, batch), axis=1)
    return -jnp.sum(log_probs * jnp.eye(log_probs.shape[0], dtype=log_probs.dtype)) / log_probs.shape[0]


@case("pairs", towers())
def diagonal_by_einsum(params, batch):
    logits = scaled_similarity(params, batch)
    return jnp.mean(jax.nn.logsumexp(logits, axis=0) - jnp.einsum("ii->i", logits))


@case("pairs", towers())
def diagonal_by_take_along_axis(params, batch):
    logits = scaled_similarity(params, batch)
    own = jnp.take_along_axis(logits, jnp.arange(logits.shape[0])[:, None], axis=1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=1, keepdims=True) - own)


@case("pairs", towers())
def diagonal_by_advanced_indexing(params, batch):
    logits = scaled_similarity(params, batch)
    order = jnp.arange(logits.shape[0])
    return -jnp.mean(jax.nn.log_softmax(logits, axis=0)[order, order]) - 0.1 * jnp.mean(logits[order, order[::-1]])


@case("pairs", towers())
def diagonals_beside_the_main_one(params, batch):
    """A temporal loss: neighbours in the batch are positives."""
    rows = image_rows(params, batch)
    log_probs = jax.nn.log_softmax(rows @ rows.T / 0.5, axis=1)
    return -jnp.mean(jnp.diagonal(log_probs, offset=1)) - jnp.mean(jnp.diag(log_probs, -2))


@case("pairs", towers())
def band_by_iota(params, batch):
    logits = scaled_similarity(params, batch)
    rows, columns = (jax.lax.broadcasted_iota(jnp.int32, logits.shape, axis) for axis in (0, 1))
    band = jnp.abs(rows - columns) <= 3
    return jnp.mean(jax.nn.logsumexp(jnp.where(band, logits, -1e9), axis=1)) - jnp.mean(jnp.where(band, logits, 0))


@case("pairs", towers())
def triangles(params, batch):
    """Upper and lower triangles are treated differently."""
    logits = scaled_similarity(params, batch)
    return jnp.mean(jnp.tril(logits) ** 2) + jnp.mean(jnp.sin(jnp.triu(logits, 1))) + jnp.sum(jnp.tril(logits, -3)) / 99


@case("pairs", towers())
def symmetrised(params, batch):
    """A matrix and its transpose, added and multiplied."""
    logits = scaled_similarity(params, batch)
    even, odd = (logits + logits.T) / 2, (logits - logits.T) / 2
    return (
        jnp.mean(jax.nn.logsumexp(even, axis=1) - jnp.diagonal(even)) + jnp.mean(odd**2) + jnp.mean(logits * logits.T)
    )


@case("pairs", towers())
def one_value_as_rows_and_columns(params, batch):
    scores = scores_of(params, batch)
    products = jnp.tanh(scores[:, None] * scores[None] - scores[:, None])
    return jnp.mean(jnp.exp(products) * batch["weight"][None]) + jnp.mean(jnp.outer(scores, scores) ** 2)


@case("pairs", towers())
def softmax_over_both_axes(params, batch):
    """One softmax over all pairs."""
    logits = scaled_similarity(params, batch)
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(logits, axis=(0, 1))))


@case("pairs", towers())
def softmax_over_rows_and_over_columns(params, batch):
    """Dual softmax: the product of both, then its logarithm."""
    logits = scaled_similarity(params, batch)
    confidence = jax.nn.softmax(logits, axis=0) * jax.nn.softmax(logits, axis=1)
    return -jnp.mean(jnp.log(jnp.diagonal(confidence) + 1e-6))


@case("pairs", towers())
def softmax_of_a_softmax(params, batch):
    """A softmax over columns of a softmax over rows."""
    prior = jax.nn.softmax(scaled_similarity(params, batch), axis=0)
    logits = scaled_similarity(params, batch) * prior * prior.shape[0]
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(logits, axis=1)))


@case("pairs", towers())
def centred_and_scaled_over_both_axes(params, batch):
    logits = scaled_similarity(params, batch)
    logits = logits - jnp.mean(logits, axis=0, keepdims=True)
    logits = logits / jnp.std(logits, axis=1, keepdims=True)
    logits = logits - jnp.mean(logits)
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - jnp.diagonal(logits)) + jnp.mean(logits**4) ** 0.25


@case("pairs", towers())
def ratio_of_totals(params, batch):
    kernel = jnp.exp(scaled_similarity(params, batch))
    positives = jnp.where(same_label(batch), kernel, 0)
    return -jnp.log(jnp.sum(positives) / jnp.sum(kernel)) + jnp.sqrt(jnp.sum(kernel**2)) / jnp.trace(kernel)


@case("pairs", towers())
def pair_sums_with_different_denominators(params, batch):
    logits, same = scaled_similarity(params, batch), same_label(batch)
    attract = jnp.sum(jnp.where(same, -logits, 0)) / jnp.sum(same, dtype=logits.dtype)
    repel = jnp.sum(jnp.where(same, 0, jnp.exp(logits))) / jnp.sum(~same, dtype=logits.dtype)
    by_weight = jnp.sum(logits * batch["weight"][:, None] * batch["weight"][None]) / jnp.sum(batch["weight"]) ** 2
    return attract + repel + by_weight


@case("pairs", towers())
def dropout_on_pairs(params, batch):
    logits = scaled_similarity(params, batch)
    keep = jax.random.bernoulli(jax.random.key(21), 0.7, logits.shape) | jnp.eye(logits.shape[0], dtype=bool)
    return jnp.mean(jax.nn.logsumexp(jnp.where(keep, logits, -1e9), axis=1) - jnp.diagonal(logits))


@case("pairs", towers())
def noise_on_pairs(params, batch):
    """Gumbel noise, and a soft permutation."""
    logits = scaled_similarity(params, batch)
    noisy = logits + jax.random.gumbel(jax.random.key(22), logits.shape, logits.dtype)
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(noisy, axis=0)) * batch["weight"])


@case("pairs", towers())
def random_negatives(params, batch):
    """Seven columns for each row, gathered from the pairs."""
    logits = scaled_similarity(params, batch)
    columns = jax.random.randint(jax.random.key(23), (logits.shape[0], 7), 0, logits.shape[0])
    negatives = jnp.take_along_axis(logits, columns, axis=1)
    return jnp.mean(jax.nn.softplus(negatives - jnp.diagonal(logits)[:, None]))


@case("pairs", towers())
def hardest_of_rows_and_columns(params, batch):
    """VSE++: the hardest negative of each row and of each column, and the mean of the five next."""
    image, text = both_views(params, batch)
    logits = image @ text.T
    off = jnp.where(jnp.eye(logits.shape[0], dtype=bool), -9.0, logits)
    own = jnp.diagonal(logits)
    rows = jax.nn.relu(0.2 + jnp.max(off, axis=1) - own)
    columns = jax.nn.relu(0.2 + jnp.max(off, axis=0) - own)
    return jnp.mean(rows + columns) + 0.1 * jnp.mean(jax.lax.top_k(off.T, 5)[0])


@case("pairs", towers())
def argmax_of_rows_gathers_columns(params, batch):
    """Nearest neighbours as positives: NNCLR."""
    image, text = both_views(params, batch)
    nearest = jnp.argmax(text @ text.T - 9 * jnp.eye(text.shape[0], dtype=text.dtype), axis=1)
    logits = text[nearest] @ image.T / 0.3
    return jnp.mean(nll_of(logits, jnp.arange(image.shape[0])))


@case("pairs", towers())
def sorted_rows(params, batch):
    """A sort of each row, and weights by place."""
    logits = jnp.sort(scaled_similarity(params, batch), axis=1)
    places = jnp.linspace(0, 1, logits.shape[1], dtype=logits.dtype)
    return jnp.mean(logits**2 * places[None]) - jnp.mean(jnp.median(logits, axis=1))


@case("pairs", towers())
def argsort_gathers_rows(params, batch):
    """Rows and columns are put into the order of the scores first."""
    order = jnp.argsort(scores_of(params, batch))
    logits = scaled_similarity(params, batch)[order][:, order]
    return jnp.mean(jnp.tril(logits)) - 0.3 * jnp.mean(jax.nn.logsumexp(jnp.triu(logits), axis=1))


@case("pairs", towers(num_examples=11), stays_whole=True)
def sort_of_all_pairs(params, batch):
    """Quantiles over the whole matrix."""
    values = jnp.sort(scaled_similarity(params, batch).reshape(-1))
    wanted = jnp.linspace(-1, 1, values.shape[0], dtype=values.dtype)
    return jnp.mean((values - wanted) ** 2)


@case("pairs", towers())
def rows_summed_by_class(params, batch):
    """Rows of pairs are added up by label, for class centres of similarities."""
    logits = scaled_similarity(params, batch)
    sums = jax.ops.segment_sum(logits, batch["label"], NUM_CLASSES)
    return jnp.mean(nll_of(sums.T / 3, batch["label"]))


@case("pairs", towers())
def columns_scattered_by_class(params, batch):
    """The probabilities of columns are added up by label with `.at[].add`."""
    probs = jax.nn.softmax(scaled_similarity(params, batch), axis=1)
    by_class = jnp.zeros((probs.shape[0], NUM_CLASSES), probs.dtype).at[:, batch["label"]].add(probs)
    return -jnp.mean(jnp.log(pick(by_class, batch["label"])))


@case("pairs", towers())
def diagonal_set_by_scatter(params, batch):
    logits = scaled_similarity(params, batch)
    order = jnp.arange(logits.shape[0])
    without = logits.at[order, order].set(-1e9)
    raised = logits.at[order, order].add(-0.5)
    return jnp.mean(jax.nn.logsumexp(without, axis=1)) + jnp.mean(jax.nn.logsumexp(raised, axis=0) - jnp.diag(logits))


@case("pairs", towers())
def batch_as_a_graph(params, batch):
    """Attention over the batch: every example is a mean of all, and then contrasted again."""
    image, text = both_views(params, batch)
    mixed = image + jax.nn.softmax(image @ image.T / 0.5, axis=1) @ text
    return jnp.mean(nll_of(unit(mixed) @ text.T / 0.2, jnp.arange(image.shape[0])))


@case("pairs", towers())
def similarity_preserving(params, batch):
    """Two Gram matrices, each row brought to length one."""
    image, text = both_views(params, batch)
    return jnp.sum((unit(image @ image.T) - unit(text @ text.T)) ** 2) / image.shape[0] ** 2


@case("pairs", towers(num_examples=11))
def angles_of_triplets(params, batch):
    """Relational distillation: a cosine for each triplet."""
    image, text = both_views(params, batch)

    def angles(rows):
        differences = rows[None] - rows[:, None]
        differences = differences / jnp.sqrt(jnp.sum(differences**2, axis=-1, keepdims=True) + 1e-6)
        return jnp.einsum("ijd,ikd->ijk", differences, differences)

    return jnp.mean(optax.huber_loss(angles(image), angles(text), delta=1.0))


@case("pairs", towers(prototypes=(WIDTH // 2, 41)))
def swav_codes(params, batch):
    """Balanced codes of one view, without gradient, predict those of the other."""
    image, text = both_views(params, batch)
    first, second = image @ full(params["prototypes"]), text @ full(params["prototypes"])

    def codes(scores):
        plan = jnp.exp(jax.lax.stop_gradient(scores) / 0.3)
        for _ in range(3):
            plan = plan / jnp.sum(plan, axis=0, keepdims=True)
            plan = plan / jnp.sum(plan, axis=1, keepdims=True)
        return plan

    one = jnp.sum(codes(first) * jax.nn.log_softmax(second / 0.2), axis=1)
    two = jnp.sum(codes(second) * jax.nn.log_softmax(first / 0.2), axis=1)
    return -jnp.mean(one + two) / 2


@case("pairs", towers(popularity=(NUM_ROWS,)))
def corrected_for_popularity(params, batch):
    """A column is lowered by how often it occurs, and duplicates of the positive do not count."""
    logits = scaled_similarity(params, batch) - jnp.log(batch["weight"])[None] + full(params["popularity"])[None]
    duplicate = same_label(batch) & ~jnp.eye(logits.shape[0], dtype=bool)
    return jnp.mean(nll_of(jnp.where(duplicate, -1e9, logits), jnp.arange(logits.shape[0])))


@case("pairs", towers())
def smoothed_clip(params, batch):
    """Soft targets that are themselves similarities."""
    image, text = both_views(params, batch)
    logits = image @ text.T / 0.3
    targets = jax.nn.softmax((image @ image.T + text @ text.T) / 0.6, axis=1)
    rows = -jnp.sum(targets * jax.nn.log_softmax(logits, axis=1), axis=1)
    columns = -jnp.sum(targets.T * jax.nn.log_softmax(logits.T, axis=1), axis=1)
    return jnp.mean(rows + columns) / 2


@case("pairs", towers())
def clip_of_the_first_rows(params, batch):
    """A part of the rows against all columns."""
    image, text = both_views(params, batch)
    logits = image[:9] @ text.T / 0.3
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - jnp.diagonal(logits)) + jnp.mean(logits[:, 9:] ** 2)


@case("pairs", towers())
def clip_of_a_concatenation(params, batch):
    """Blocks of pairs are put together to a matrix of twice the size."""
    image, text = both_views(params, batch)
    top = jnp.concatenate([image @ image.T, image @ text.T], axis=1)
    low = jnp.concatenate([text @ image.T, text @ text.T], axis=1)
    logits = jnp.concatenate([top, low], axis=0) / 0.5
    size = image.shape[0]
    logits = logits - 1e9 * jnp.eye(2 * size, dtype=logits.dtype)
    return jnp.mean(nll_of(logits, jnp.roll(jnp.arange(2 * size), size)))


@case("pairs", towers())
def cumulative_over_columns(params, batch):
    """Each row is compared with the rows before it only, by a running logsumexp."""
    logits = scaled_similarity(params, batch)
    running = jax.lax.cumlogsumexp(logits, axis=1)
    return jnp.mean(jnp.diagonal(running) - jnp.diagonal(logits)) + 0.1 * jnp.mean(jnp.cumsum(logits, axis=0) ** 2)


@case("pairs", towers())
def checkpointed_pairs(params, batch):
    @jax.checkpoint
    def contrast(image, text, scale):
        logits = jnp.exp(scale) * jnp.einsum("id,jd->ij", image, text)
        return jnp.mean(jax.nn.logsumexp(logits, axis=1) + jax.nn.logsumexp(logits, axis=0) - 2 * jnp.diag(logits))

    return contrast(*both_views(params, batch), full(params["log_scale"]))


@jax.custom_vjp
def pair_loss(image, text):
    """The mean over rows of logsumexp minus diagonal, with its gradient written out."""
    logits = image @ text.T
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - jnp.diagonal(logits))


def _pair_forward(image, text):
    return pair_loss(image, text), (image, text)


def _pair_backward(saved, cotangent):
    image, text = saved
    slope = jax.nn.softmax(image @ text.T, axis=1) - jnp.eye(image.shape[0], dtype=image.dtype)
    slope = cotangent * slope / image.shape[0]
    return slope @ text, slope.T @ image


pair_loss.defvjp(_pair_forward, _pair_backward)


@case("pairs", towers())
def custom_vjp_of_pairs(params, batch):
    image, text = both_views(params, batch)
    return pair_loss(3 * image, text) + pair_loss(3 * text, image)


def token_views(dtype):
    """Two sets of vectors for each example: four for a query, five for a document."""
    generator = np.random.default_rng(13)
    params = {
        "query": weights(generator, dtype, FEATURES, WIDTH),
        "document": weights(generator, dtype, FEATURES, WIDTH),
    }
    batch = {
        "query": normals(generator, dtype, 11, 4, FEATURES),
        "document": normals(generator, dtype, 11, 5, FEATURES),
        "length": 1 + integers(generator, 5, 11),
    }
    return params, batch


@case("pairs", token_views)
def late_interaction(params, batch):
    """ColBERT: each query token takes its best document token, `(N, N, 4, 5)`."""
    query, document = full(unit(batch["query"] @ params["query"])), full(unit(batch["document"] @ params["document"]))
    scores = jnp.einsum("iqd,jkd->ijqk", query, document)
    real = jnp.arange(5)[None] < batch["length"][:, None]
    best = jnp.max(jnp.where(real[None, :, None], scores, -9.0), axis=-1)
    return jnp.mean(nll_of(3 * jnp.sum(best, axis=-1), jnp.arange(11)))


@case("pairs", token_views)
def all_tokens_against_all(params, batch):
    """Tokens of all examples as one set of rows."""
    query, document = full(unit(batch["query"] @ params["query"])), full(unit(batch["document"] @ params["document"]))
    logits = 4 * query.reshape(-1, WIDTH) @ document.reshape(-1, WIDTH).T
    owner = jnp.arange(44) // 4
    same = owner[:, None] == (jnp.arange(55) // 5)[None]
    every = jax.nn.logsumexp(logits, axis=1)
    return jnp.mean(every - jax.nn.logsumexp(jnp.where(same, logits, -1e9), axis=1))


# Attention: scores of every position against every other, written out.

STEPS = 29


def sequences(num_examples=2, **extra):
    """Projections of an attention layer; sequences of vectors with targets and lengths."""

    def make(dtype):
        generator = np.random.default_rng(30 + num_examples)
        names = ("query", "key", "value", "out")
        params = {name: 1.5 * weights(generator, dtype, WIDTH, WIDTH) for name in names}
        params |= {name: weights(generator, dtype, *shape) for name, shape in extra.items()}
        batch = {
            "x": normals(generator, dtype, num_examples, STEPS, WIDTH),
            "y": normals(generator, dtype, num_examples, STEPS, WIDTH),
            "length": STEPS - integers(generator, 12, num_examples),
        }
        return params, batch

    return make


def projections(params, x, heads=HEADS):
    return [split_heads(full(x @ params[name]), heads) for name in ("query", "key", "value")]


def raw_scores(query, key):
    return jnp.einsum("nthd,nshd->nhts", query, key) / math.sqrt(query.shape[-1])


def read_out(params, probs, value):
    """What the probabilities read from the values, projected."""
    mixed = jnp.einsum("nhts,nshd->nthd", probs, value)
    return mixed.reshape(*mixed.shape[:2], -1) @ full(params["out"])


def squared_error(outputs, batch):
    return jnp.mean((outputs - full(batch["y"])) ** 2)


def causal_mask(steps=STEPS):
    return jnp.tril(jnp.ones((steps, steps), bool))[None, None]


@case("attention", sequences())
def causal_attention(params, batch):
    query, key, value = projections(params, batch["x"])
    scores = jnp.where(causal_mask(), raw_scores(query, key), -jnp.inf)
    return squared_error(read_out(params, jax.nn.softmax(scores, axis=-1), value), batch)


@case("attention", sequences(num_examples=3))
def padded_attention(params, batch):
    """Keys and queries beyond the length of their sequence do not count."""
    query, key, value = projections(params, batch["x"])
    real = jnp.arange(STEPS)[None] < batch["length"][:, None]
    probs = jax.nn.softmax(raw_scores(query, key), axis=-1, where=real[:, None, None])
    error = jnp.sum((read_out(params, probs, value) - full(batch["y"])) ** 2, axis=-1)
    return weighted_mean(error, real.astype(error.dtype))


@case("attention", sequences())
def attention_with_linear_biases(params, batch):
    """ALiBi."""
    query, key, value = projections(params, batch["x"])
    steps = jnp.arange(STEPS, dtype=query.dtype)
    slopes = jnp.asarray([0.5, 0.125], query.dtype)
    bias = -slopes[:, None, None] * jnp.abs(steps[:, None] - steps[None])[None]
    scores = jnp.where(causal_mask(), raw_scores(query, key) + bias[None], -1e9)
    return squared_error(read_out(params, jax.nn.softmax(scores, axis=-1), value), batch)


@case("attention", sequences(table=(2 * STEPS - 1, HEADS)))
def attention_with_relative_biases(params, batch):
    """A table of biases is gathered for each distance."""
    query, key, value = projections(params, batch["x"])
    distance = jnp.arange(STEPS)[:, None] - jnp.arange(STEPS)[None] + STEPS - 1
    bias = jnp.transpose(full(params["table"])[distance], (2, 0, 1))
    probs = jax.nn.softmax(raw_scores(query, key) + 4 * bias[None], axis=-1)
    return squared_error(read_out(params, probs, value), batch)


@case("attention", sequences(table=(8, HEADS)))
def attention_with_bucketed_biases(params, batch):
    """T5's: distances share logarithmic buckets."""
    query, key, value = projections(params, batch["x"])
    distance = jnp.abs(jnp.arange(STEPS)[:, None] - jnp.arange(STEPS)[None])
    bucket = jnp.minimum(jnp.sum(distance[..., None] >= jnp.asarray([1, 2, 3, 5, 8, 13, 21])[None, None], axis=-1), 7)
    bias = jnp.moveaxis(full(params["table"])[bucket], -1, 0)[None]
    return squared_error(read_out(params, jax.nn.softmax(raw_scores(query, key) + bias, axis=-1), value), batch)


@case("attention", sequences(position=(STEPS, WIDTH // HEADS)))
def attention_with_a_relative_shift(params, batch):
    """Transformer-XL's: scores of distances are skewed into place by padding and reshaping."""
    query, key, value = projections(params, batch["x"])
    distances = jnp.einsum("nthd,sd->nhts", query, full(params["position"]))
    padded = jnp.pad(distances, ((0, 0), (0, 0), (0, 0), (1, 0)))
    shifted = padded.reshape(2, HEADS, STEPS + 1, STEPS)[:, :, 1:]
    scores = jnp.where(causal_mask(), raw_scores(query, key) + shifted, -1e9)
    return squared_error(read_out(params, jax.nn.softmax(scores, axis=-1), value), batch)


@case("attention", sequences())
def sliding_window_attention(params, batch):
    query, key, value = projections(params, batch["x"])
    rows, columns = (jax.lax.broadcasted_iota(jnp.int32, (STEPS, STEPS), axis) for axis in (0, 1))
    window = (rows >= columns) & (rows - columns < 7)
    scores = jnp.where(window[None, None], raw_scores(query, key), -1e9)
    return squared_error(read_out(params, jax.nn.softmax(scores, axis=-1), value), batch)


@case("attention", sequences())
def grouped_query_attention(params, batch):
    """Four query heads, two key heads."""
    x = batch["x"]
    query = full(x @ params["query"]).reshape(2, STEPS, 2, 2, 2)
    key, value = (full(x @ params[name])[..., :4].reshape(2, STEPS, 2, 2) for name in ("key", "value"))
    scores = jnp.einsum("ntkgd,nskd->nkgts", query, key)
    probs = jax.nn.softmax(jnp.where(causal_mask()[None], scores, -1e9), axis=-1)
    mixed = jnp.einsum("nkgts,nskd->ntkgd", probs, value).reshape(2, STEPS, WIDTH)
    return squared_error(mixed @ full(params["out"]), batch)


@case("attention", sequences())
def repeated_key_heads(params, batch):
    """Grouped queries written with `jnp.repeat`."""
    query = split_heads(full(batch["x"] @ params["query"]), 4)
    key, value = (split_heads(full(batch["x"] @ params[name])[..., :4], 2) for name in ("key", "value"))
    key, value = jnp.repeat(key, 2, axis=2), jnp.repeat(value, 2, axis=2)
    return squared_error(read_out(params, jax.nn.softmax(raw_scores(query, key), axis=-1), value), batch)


@case("attention", sequences(num_examples=3))
def cross_attention(params, batch):
    """Queries from one sequence, keys and values from a longer one."""
    query, _, _ = projections(params, batch["x"][:, :13])
    _, key, value = projections(params, batch["y"])
    out = read_out(params, jax.nn.softmax(raw_scores(query, key), axis=-1), value)
    return jnp.mean((out - full(batch["x"][:, :13])) ** 2)


@case("attention", sequences(latents=(5, WIDTH)))
def latent_queries(params, batch):
    """Perceiver's: a few learned queries read a long sequence, and the sequence reads them."""
    _, key, value = projections(params, batch["x"])
    latents = jnp.broadcast_to(params["latents"][None], (2, 5, WIDTH))
    read = read_out(params, jax.nn.softmax(raw_scores(split_heads(full(latents)), key), axis=-1), value)
    query, _, _ = projections(params, batch["x"])
    read = split_heads(read)
    return squared_error(read_out(params, jax.nn.softmax(raw_scores(query, read), axis=-1), read), batch)


@case("attention", sequences())
def linear_attention(params, batch):
    """Features of keys are summed first: nothing is quadratic in the length."""
    query, key, value = projections(params, batch["x"])
    query, key = jax.nn.elu(query) + 1, jax.nn.elu(key) + 1
    memory = jnp.einsum("nshd,nshe->nhde", key, value)
    mass = jnp.einsum("nthd,nhd->nth", query, jnp.sum(key, axis=1))
    mixed = jnp.einsum("nthd,nhde->nthe", query, memory) / mass[..., None]
    return squared_error(mixed.reshape(2, STEPS, WIDTH) @ full(params["out"]), batch)


@case("attention", sequences())
def causal_linear_attention(params, batch):
    """Running sums of outer products, `(n, T, heads, d, d)`."""
    query, key, value = projections(params, batch["x"])
    query, key = jax.nn.softplus(query), jax.nn.softplus(key)
    memory = jnp.cumsum(jnp.einsum("nshd,nshe->nshde", key, value), axis=1)
    mass = jnp.einsum("nthd,nthd->nth", query, jnp.cumsum(key, axis=1))
    mixed = jnp.einsum("nthd,nthde->nthe", query, memory) / mass[..., None]
    return squared_error(mixed.reshape(2, STEPS, WIDTH) @ full(params["out"]), batch)


@case("attention", sequences())
def retention(params, batch):
    """A decay by distance instead of a softmax, and the absolute sum of a row as its scale."""
    query, key, value = projections(params, batch["x"])
    steps = jnp.arange(STEPS, dtype=query.dtype)
    distance = jnp.maximum(steps[:, None] - steps[None], 0)
    decay = jnp.asarray([0.9, 0.7], query.dtype)[:, None, None] ** distance[None]
    scores = raw_scores(query, key) * jnp.where(causal_mask(), decay[None], 0)
    scores = scores / jnp.maximum(jnp.abs(jnp.sum(scores, axis=-1, keepdims=True)), 1.0)
    return squared_error(read_out(params, scores, value), batch)


@case("attention", sequences())
def rotary_attention(params, batch):
    query, key, value = projections(params, batch["x"])
    angle = jnp.arange(STEPS, dtype=query.dtype)[:, None] * jnp.asarray([1.0, 0.1], query.dtype)[None]
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]

    def rotate(x):
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    scores = jnp.where(causal_mask(), raw_scores(rotate(query), rotate(key)), -1e9)
    return squared_error(read_out(params, jax.nn.softmax(scores, axis=-1), value), batch)


@case("attention", sequences(sink=(HEADS,)))
def attention_with_a_sink(params, batch):
    """One more logit for each head, which reads nothing."""
    query, key, value = projections(params, batch["x"])
    scores = jnp.where(causal_mask(), raw_scores(query, key), -1e9)
    sink = jnp.broadcast_to(full(params["sink"])[None, :, None, None], (2, HEADS, STEPS, 1))
    probs = jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1), axis=-1)[..., :-1]
    return squared_error(read_out(params, probs, value), batch)


@case("attention", sequences())
def soft_capped_attention(params, batch):
    """Gemma's: queries and keys of length one, capped scores."""
    query, key, value = projections(params, batch["x"])
    scores = 5 * jnp.tanh(4 * raw_scores(unit(query), unit(key)) / 5)
    return squared_error(read_out(params, jax.nn.softmax(scores, axis=-1), value), batch)


@case("attention", sequences(before=(HEADS, HEADS), after=(HEADS, HEADS)))
def talking_heads(params, batch):
    """Heads are mixed before and after the softmax."""
    query, key, value = projections(params, batch["x"])
    scores = jnp.einsum("nhts,hg->ngts", raw_scores(query, key), full(params["before"]))
    probs = jnp.einsum("nhts,hg->ngts", jax.nn.softmax(scores, axis=-1), full(params["after"]))
    return squared_error(read_out(params, probs, value), batch)


@case("attention", sequences(weight=(HEADS,)))
def differential_attention(params, batch):
    """The difference of two softmaxes."""
    query, key, value = projections(params, batch["x"])
    first, second = (raw_scores(q, k) for q, k in zip(jnp.split(query, 2, -1), jnp.split(key, 2, -1), strict=True))
    probs = jax.nn.softmax(first, axis=-1)
    probs = probs - along(full(params["weight"]), 4, 1) * jax.nn.softmax(second, axis=-1)
    return squared_error(read_out(params, probs, value), batch)


@case("attention", sequences())
def sigmoid_attention(params, batch):
    query, key, value = projections(params, batch["x"])
    probs = jnp.where(causal_mask(), jax.nn.sigmoid(raw_scores(query, key) - math.log(STEPS)), 0)
    return squared_error(read_out(params, probs, value), batch)


@case("attention", sequences())
def attention_normalised_over_queries(params, batch):
    """Slots compete: a softmax over the queries, then a weighted mean over the keys."""
    query, key, value = projections(params, batch["x"])
    probs = jax.nn.softmax(raw_scores(query[:, :7], key), axis=2) + 1e-6
    probs = probs / jnp.sum(probs, axis=-1, keepdims=True)
    return jnp.mean((read_out(params, probs, value) - full(batch["y"][:, :7])) ** 2)


@case("attention", sequences())
def attention_of_the_best_keys(params, batch):
    """Only the eight largest scores of each row are read."""
    query, key, value = projections(params, batch["x"])
    scores = raw_scores(query, key)
    bound = jax.lax.top_k(scores, 8)[0][..., -1:]
    probs = jax.nn.softmax(jnp.where(scores >= bound, scores, -1e9), axis=-1)
    return squared_error(read_out(params, probs, value), batch)


@case("attention", sequences())
def attention_with_dropout(params, batch):
    query, key, value = projections(params, batch["x"])
    probs = jax.nn.softmax(raw_scores(query, key), axis=-1)
    keep = jax.random.bernoulli(jax.random.key(31), 0.9, probs.shape)
    return squared_error(read_out(params, jnp.where(keep, probs / 0.9, 0), value), batch)


@case("attention", sequences(), has_aux=True)
def aux_entropy_of_attention(params, batch):
    """The entropy of each row is a term of the loss, and the map of one head is asked for."""
    query, key, value = projections(params, batch["x"])
    log_probs = jax.nn.log_softmax(raw_scores(query, key), axis=-1)
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
    out = read_out(params, jnp.exp(log_probs), value)
    return squared_error(out, batch) + 0.1 * jnp.mean(entropy), {"map": jnp.exp(log_probs)[:, 0], "entropy": entropy}


@case("attention", sequences())
def guided_attention(params, batch):
    """Attention far from the diagonal is punished."""
    query, key, value = projections(params, batch["x"])
    probs = jax.nn.softmax(raw_scores(query, key), axis=-1)
    steps = jnp.arange(STEPS, dtype=probs.dtype) / STEPS
    far = 1 - jnp.exp(-((steps[:, None] - steps[None]) ** 2) / 0.08)
    return squared_error(read_out(params, probs, value), batch) + jnp.mean(probs * far[None, None])


@case("attention", sequences())
def coverage_of_attention(params, batch):
    """Running sums of attention over the queries, compared with attention itself."""
    query, key, value = projections(params, batch["x"])
    probs = jax.nn.softmax(raw_scores(query, key), axis=-1)
    covered = jnp.cumsum(probs, axis=2) - probs
    return squared_error(read_out(params, probs, value), batch) + jnp.mean(jnp.minimum(probs, covered))


@case("attention", sequences(), stays_whole=True)
def attention_flow(params, batch):
    """Attention rollout: the maps of three layers are multiplied, so that each is needed as a whole."""
    x, flow = full(batch["x"]), jnp.eye(STEPS, dtype=full(batch["x"]).dtype)[None]
    for _ in range(3):
        query, key, value = (split_heads(x @ full(params[name])) for name in ("query", "key", "value"))
        probs = jax.nn.softmax(raw_scores(query, key), axis=-1)
        flow = jnp.mean(probs, axis=1) @ flow
        x = jnp.tanh(x + read_out(params, probs, value))
    return squared_error(x, batch) + jnp.mean(flow[:, -1] ** 2)


@case("attention", sequences())
def layers_of_attention_in_a_scan(params, batch):
    """The same layer four times, checkpointed."""

    @jax.checkpoint
    def step(x, _):
        query, key, value = (split_heads(x @ full(params[name])) for name in ("query", "key", "value"))
        scores = jnp.where(causal_mask(), raw_scores(query, key), -1e9)
        return jnp.tanh(x + read_out(params, jax.nn.softmax(scores, axis=-1), value)), None

    return squared_error(jax.lax.scan(step, full(batch["x"]), None, length=4)[0], batch)


@case("attention", sequences())
def attention_by_blocks_of_its_author(params, batch):
    """Flash attention by hand: an online softmax in a scan over blocks of keys."""
    query, key, value = projections(params, batch["x"][:, :28])
    blocks = [jnp.moveaxis(x.reshape(2, 4, 7, HEADS, -1), 1, 0) for x in (key, value)]

    def step(carry, block):
        top, mass, total = carry
        scores = raw_scores(query, block[0])
        new_top = jnp.maximum(top, jax.lax.stop_gradient(jnp.max(scores, axis=-1)))
        scale, probs = jnp.exp(top - new_top), jnp.exp(scores - new_top[..., None])
        total = total * scale[..., None] + jnp.einsum("nhts,nshd->nhtd", probs, block[1])
        return (new_top, mass * scale + jnp.sum(probs, axis=-1), total), None

    rows = jnp.zeros((2, HEADS, 28), query.dtype)
    start = rows - 1e9, rows, jnp.zeros((*rows.shape, query.shape[-1]), query.dtype)
    (_, mass, total), _ = jax.lax.scan(step, start, tuple(blocks))
    out = jnp.swapaxes(total / mass[..., None], 1, 2).reshape(2, 28, WIDTH) @ full(params["out"])
    return jnp.mean((out - full(batch["y"][:, :28])) ** 2)


@case("attention", sequences(num_examples=3))
def vmapped_heads(params, batch):
    """One head of one example, mapped over heads and examples."""

    def one_head(query, key, value):
        scores = jnp.where(jnp.tril(jnp.ones((STEPS, STEPS), bool)), query @ key.T, -1e9)
        return jax.nn.softmax(scores, axis=-1) @ value

    heads = jax.vmap(one_head, in_axes=1, out_axes=1)
    mixed = jax.vmap(heads)(*projections(params, batch["x"]))
    return squared_error(mixed.reshape(3, STEPS, WIDTH) @ full(params["out"]), batch)


@case("attention", sequences(score=(WIDTH // HEADS,)))
def additive_attention(params, batch):
    """Bahdanau's: a network on each pair of positions, `(n, T, T, heads, d)`."""
    query, key, value = projections(params, batch["x"])
    scores = jnp.tanh(query[:, :, None] + key[:, None]) @ full(params["score"])
    probs = jax.nn.softmax(scores, axis=2)
    mixed = jnp.einsum("ntsh,nshd->nthd", probs, value).reshape(2, STEPS, WIDTH)
    return squared_error(mixed @ full(params["out"]), batch)


@case("attention", sequences())
def distance_attention(params, batch):
    """Scores are distances, made by differences."""
    query, key, value = projections(params, batch["x"])
    scores = -jnp.sum((query[:, :, None] - key[:, None]) ** 2, axis=-1)
    probs = jax.nn.softmax(jnp.moveaxis(scores, -1, 1), axis=-1)
    return squared_error(read_out(params, probs, value), batch)


@case("attention", sequences(mix=(WIDTH, WIDTH)), stays_whole=True)
def pairs_of_positions_as_a_state(params, batch):
    """AlphaFold's: outer products as `(n, T, T, d)`, and a triangular product over the third position."""
    x = full(batch["x"])[:, :13]
    pairs = jnp.tanh(x[:, :, None] * (x @ full(params["key"]))[:, None])
    triangle = jnp.einsum("nikd,njkd->nijd", pairs @ full(params["query"]), pairs @ full(params["value"])) / 13
    out = jnp.mean(pairs + jnp.tanh(triangle), axis=2) @ full(params["mix"])
    return jnp.mean((out - full(batch["y"])[:, :13]) ** 2)


@case("attention", sequences(filters=(STEPS, WIDTH)))
def long_convolution(params, batch):
    """A Toeplitz matrix for each channel, `(T, T, d)`, gathered from a filter."""
    distance = jnp.arange(STEPS)[:, None] - jnp.arange(STEPS)[None]
    toeplitz = jnp.where((distance >= 0)[..., None], full(params["filters"])[jnp.maximum(distance, 0)], 0)
    mixed = jnp.einsum("tsd,nsd->ntd", toeplitz, full(batch["x"] @ params["value"]))
    return squared_error(jax.nn.silu(full(batch["x"] @ params["query"])) * mixed @ full(params["out"]), batch)


@case("attention", sequences(num_examples=3))
def contrast_within_sequences(params, batch):
    """Predictive coding: each step against all steps of all sequences, at a distance of two."""
    query, key = full(unit(batch["x"] @ params["query"])), full(unit(batch["y"] @ params["key"]))
    logits = jnp.einsum("ntd,msd->ntms", query[:, :-2], key[:, 2:]) / 0.3
    logits = logits.reshape(3 * (STEPS - 2), -1)
    return jnp.mean(nll_of(logits, jnp.arange(3 * (STEPS - 2))))


# Other wide values: experts, codebooks, dictionaries, mixtures, states of a scan.


def rows_with_targets(num_examples=7, **shapes):
    """Parameters of the given shapes; rows of features with targets and labels."""

    def make(dtype):
        generator = np.random.default_rng(50 + num_examples)
        params = {name: weights(generator, dtype, *shape) for name, shape in shapes.items()}
        batch = {
            "x": normals(generator, dtype, num_examples, WIDTH),
            "y": normals(generator, dtype, num_examples, WIDTH),
            "label": integers(generator, 101, num_examples),
        }
        return params, batch

    return make


@case("other", sequences(router=(WIDTH, 5), up=(5, WIDTH, WIDTH), down=(5, WIDTH, WIDTH)))
def mixture_of_experts(params, batch):
    """Switch: tokens are dispatched to experts of limited capacity by a `(n T, experts, capacity)` one-hot mask."""
    x = full(batch["x"]).reshape(-1, WIDTH)
    probs = jax.nn.softmax(x @ full(params["router"]))
    chosen = jax.nn.one_hot(jnp.argmax(probs, axis=-1), 5, dtype=x.dtype)
    place = jnp.sum(jnp.cumsum(chosen, axis=0) * chosen, axis=-1) - 1
    seat = jax.nn.one_hot(place.astype(jnp.int32), 16, dtype=x.dtype)
    dispatch = chosen[:, :, None] * seat[:, None, :]
    inside = jnp.einsum("xec,xd->ecd", dispatch, x)
    outside = jnp.einsum(
        "ecd,edf->ecf", jnp.tanh(jnp.einsum("ecd,edf->ecf", inside, full(params["up"]))), full(params["down"])
    )
    combined = jnp.einsum("xec,ecd->xd", dispatch * probs[:, :, None], outside)
    balance = 5 * jnp.sum(jnp.mean(chosen, axis=0) * jnp.mean(probs, axis=0))
    return squared_error(combined.reshape(batch["x"].shape), batch) + 0.01 * balance


@case("other", sequences(router=(WIDTH, 5), up=(5, WIDTH, WIDTH)))
def all_experts_weighted(params, batch):
    """Every expert sees every token, `(n, T, experts, d)`, and the best two count."""
    x = full(batch["x"])
    scores = x @ full(params["router"])
    bound = jax.lax.top_k(scores, 2)[0][..., -1:]
    gates = jax.nn.softmax(jnp.where(scores >= bound, scores, -1e9))
    outputs = jnp.tanh(jnp.einsum("ntd,edf->ntef", x, full(params["up"])))
    log_z = jax.nn.logsumexp(scores, axis=-1)
    return squared_error(jnp.einsum("nte,ntef->ntf", gates, outputs), batch) + 1e-3 * jnp.mean(log_z**2)


@case("other", rows_with_targets(keys=(211, WIDTH), values=(211, WIDTH)))
def memory_lookup(params, batch):
    """A softmax over a large table of keys reads a large table of values."""
    probs = jax.nn.softmax(2 * full(batch["x"] @ params["keys"].T) * 15)
    return jnp.mean((probs @ full(params["values"]) * 10 - full(batch["y"])) ** 2)


@case("other", rows_with_targets(keys=(211, WIDTH), values=(211, WIDTH)))
def memory_lookup_of_the_best(params, batch):
    """The values of the four best keys are gathered."""
    best, where = jax.lax.top_k(15 * full(batch["x"] @ params["keys"].T), 4)
    read = jnp.einsum("nk,nkd->nd", jax.nn.softmax(best), full(params["values"])[where])
    return jnp.mean((read * 10 - full(batch["y"])) ** 2)


@case("other", rows_with_targets(encoder=(WIDTH, WIDTH), codes=(97, WIDTH)))
def codebook_straight_through(params, batch):
    """A vector-quantised autoencoder: the nearest code, with the gradient passed through it."""
    hidden, codes = full(batch["x"] @ params["encoder"]), 10 * full(params["codes"])
    nearest = codes[jnp.argmin(expanded_distances(hidden, codes), axis=1)]
    quantised = hidden + jax.lax.stop_gradient(nearest - hidden)
    stop = jax.lax.stop_gradient
    commitment = jnp.mean((stop(hidden) - nearest) ** 2) + 0.25 * jnp.mean((hidden - stop(nearest)) ** 2)
    return jnp.mean((quantised - full(batch["y"])) ** 2) + commitment


@case("other", rows_with_targets(encoder=(WIDTH, WIDTH), codes=(97, WIDTH)))
def soft_codebook(params, batch):
    """Soft assignments, and the entropy of how often each code is used."""
    hidden, codes = full(batch["x"] @ params["encoder"]), 10 * full(params["codes"])
    probs = jax.nn.softmax(-squared_distances(hidden, codes))
    usage = jnp.mean(probs, axis=0)
    return jnp.mean((probs @ codes - full(batch["y"])) ** 2) + jnp.sum(usage * jnp.log(usage + 1e-9))


@case("other", rows_with_targets(num_examples=11, means=(31, WIDTH), log_scales=(31, WIDTH), mix=(31,)))
def mixture_of_gaussians(params, batch):
    """A density for each example, component and feature."""
    scaled = (full(batch["x"])[:, None] - 5 * full(params["means"])[None]) * jnp.exp(-full(params["log_scales"]))[None]
    logs = -0.5 * jnp.sum(scaled**2, axis=-1) - jnp.sum(full(params["log_scales"]), axis=1)[None]
    return -jnp.mean(jax.nn.logsumexp(logs + jax.nn.log_softmax(full(params["mix"]))[None], axis=1))


@case("other", rows_with_targets(num_examples=11, trunk=(WIDTH, 3 * 41)))
def mixture_density_network(params, batch):
    logits, means, scales = jnp.split(full(batch["x"] @ params["trunk"]), 3, axis=-1)
    scales = jax.nn.softplus(scales) + 0.1
    logs = -0.5 * ((full(batch["y"])[:, :1] - means) / scales) ** 2 - jnp.log(scales)
    return -jnp.mean(jax.nn.logsumexp(jax.nn.log_softmax(logits) + logs, axis=-1))


@case("other", rows_with_targets(num_examples=11, points=(101, WIDTH)))
def kernel_density(params, batch):
    """Learned points under a kernel; the log of a mean for each example."""
    kernel = jnp.exp(-0.1 * squared_distances(full(batch["x"]), 10 * full(params["points"])))
    return -jnp.mean(jnp.log(jnp.mean(kernel, axis=1)))


@case("other", rows_with_targets(encoder=(WIDTH, 307), decoder=(307, WIDTH), bias=(307,)))
def sparse_autoencoder(params, batch):
    """A dictionary much wider than the data, with an L1 penalty."""
    codes = jax.nn.relu(full(batch["x"] @ params["encoder"]) + full(params["bias"])[None])
    norms = jnp.linalg.norm(full(params["decoder"]), axis=1)
    return jnp.mean((codes @ full(params["decoder"]) - full(batch["x"])) ** 2) + 0.1 * jnp.mean(codes * norms[None])


@case("other", rows_with_targets(num_examples=13, encoder=(WIDTH, 307), decoder=(307, WIDTH)))
def sparse_autoencoder_of_the_best(params, batch):
    """The ten largest codes of each row are scattered back."""
    hidden = full(batch["x"] @ params["encoder"])
    best, where = jax.lax.top_k(hidden, 10)
    codes = jnp.zeros_like(hidden).at[jnp.arange(13)[:, None], where].set(best)
    return jnp.mean((codes @ full(params["decoder"]) - full(batch["x"])) ** 2)


@case("other", rows_with_targets(gate=(WIDTH, 211), up=(WIDTH, 211), down=(211, WIDTH)))
def wide_gated_network(params, batch):
    hidden = jax.nn.silu(full(batch["x"] @ params["gate"])) * full(batch["x"] @ params["up"])
    return jnp.mean((hidden @ full(params["down"]) - full(batch["y"])) ** 2)


@case("other", rows_with_targets(num_examples=13, first=(WIDTH, 53), second=(WIDTH, 53)))
def barlow_twins(params, batch):
    """A `(features, features)` matrix of correlations, wider than the batch."""

    def normalised(rows):
        return (rows - jnp.mean(rows, axis=0, keepdims=True)) / jnp.std(rows, axis=0, keepdims=True)

    first, second = normalised(full(batch["x"] @ params["first"])), normalised(full(batch["y"] @ params["second"]))
    correlation = first.T @ second / first.shape[0]
    own = jnp.eye(53, dtype=bool)
    return jnp.mean(jnp.where(own, (1 - correlation) ** 2, 0.1 * correlation**2)) * 53


@case("other", rows_with_targets(num_examples=13, first=(WIDTH, 53), second=(WIDTH, 53)))
def vicreg(params, batch):
    """Invariance, a hinge on deviations, and covariances off the diagonal."""
    first, second = full(batch["x"] @ params["first"]), full(batch["y"] @ params["second"])
    total = jnp.mean((first - second) ** 2)
    for rows in (first, second):
        rows = rows - jnp.mean(rows, axis=0, keepdims=True)
        covariance = rows.T @ rows / (rows.shape[0] - 1)
        off = jnp.sum(covariance**2) - jnp.sum(jnp.diagonal(covariance) ** 2)
        total = total + jnp.mean(jax.nn.relu(1.3 - jnp.sqrt(jnp.diagonal(covariance) + 1e-4))) + off / 53
    return total


@case("other", rows_with_targets(num_examples=13, first=(WIDTH, 53)), stays_whole=True)
def whitening(params, batch):
    """A Cholesky root of the covariance of features."""
    rows = jnp.tanh(full(batch["x"] @ params["first"]))
    covariance = rows.T @ rows / rows.shape[0] + jnp.eye(53, dtype=rows.dtype)
    root = jnp.linalg.cholesky(covariance)
    white = jax.scipy.linalg.solve_triangular(root, rows.T, lower=True)
    return jnp.mean(white**2) - jnp.mean(jnp.log(jnp.diagonal(root)))


@case("other", sequences(first=(WIDTH, 23), second=(WIDTH, 23)))
def gram_matrices(params, batch):
    """Style: `(n, channels, channels)` sums over positions of two feature maps."""

    def gram(x):
        features = jnp.tanh(full(x @ params["first"])) * full(x @ params["second"])
        return jnp.einsum("ntc,ntd->ncd", features, features) / STEPS

    return jnp.mean((gram(batch["x"]) - gram(batch["y"])) ** 2)


@case("other", rows_with_targets(first=(WIDTH, 19), second=(WIDTH, 19), out=(361, WIDTH)))
def bilinear_pooling(params, batch):
    """An outer product for each example, with signed roots and unit length."""
    outer = jnp.einsum("ni,nj->nij", full(batch["x"] @ params["first"]), full(batch["y"] @ params["second"]))
    outer = outer.reshape(outer.shape[0], -1)
    outer = unit(jnp.sign(outer) * jnp.sqrt(jnp.abs(outer) + 1e-3))
    return jnp.mean((10 * outer @ full(params["out"]) - full(batch["y"])) ** 2)


@case("other", rows_with_targets(encoder=(WIDTH, 2 * WIDTH), decoder=(WIDTH, WIDTH)))
def importance_weighted_autoencoder(params, batch):
    """Forty-one samples for each example, and the logsumexp over them."""
    mean, log_scale = jnp.split(full(batch["x"] @ params["encoder"]), 2, axis=-1)
    noise = jax.random.normal(jax.random.key(51), (7, 41, WIDTH), mean.dtype)
    sample = mean[:, None] + 0.5 * jnp.exp(0.3 * log_scale)[:, None] * noise
    error = jnp.sum((jnp.tanh(sample) @ full(params["decoder"]) - full(batch["x"])[:, None]) ** 2, axis=-1)
    logs = -0.5 * error - 0.5 * jnp.sum(sample**2, axis=-1) + 0.5 * jnp.sum(noise**2, axis=-1)
    logs = logs + 0.3 * jnp.sum(log_scale, axis=-1)[:, None]
    return -jnp.mean(jax.nn.logsumexp(logs, axis=1) - math.log(41))


@case("other", rows_with_targets(num_examples=11, ensemble=(37, WIDTH, 3), out=(37, 3, WIDTH)))
def ensemble_of_networks(params, batch):
    """Many small networks by `vmap`, their mean, and how far they differ."""

    def one(first, second):
        return jnp.tanh(full(batch["x"] @ first)) @ full(second)

    outputs = jax.vmap(one)(params["ensemble"], params["out"])
    return jnp.mean((jnp.mean(outputs, axis=0) - full(batch["y"])) ** 2) - 0.1 * jnp.mean(jnp.var(outputs, axis=0))


@case("other", rows_with_targets(num_examples=11, hidden=(WIDTH, 101), out=(101,)))
def derivative_in_the_loss(params, batch):
    """The Laplacian of a network at each example: a Hessian per row."""

    def network(x):
        return jnp.tanh(x @ full(params["hidden"])) @ full(params["out"])

    laplacian = jax.vmap(lambda x: jnp.trace(jax.hessian(network)(x)))(full(batch["x"]))
    return jnp.mean((laplacian - full(batch["y"])[:, 0]) ** 2) + jnp.mean(jax.vmap(network)(full(batch["x"])) ** 2)


@case("other", sequences(decay=(WIDTH, 7), read=(WIDTH, 7), write=(WIDTH, 7)))
def state_space_model(params, batch):
    """Mamba: an associative scan over `(n, T, d, states)`."""
    x = full(batch["x"])
    step = jax.nn.softplus(x @ full(params["query"]))[..., None]
    decay = jnp.exp(-step * jnp.exp(full(params["decay"]))[None, None])
    inputs = step * (x @ full(params["write"]))[:, :, None] * x[..., None]

    def combine(left, right):
        return left[0] * right[0], left[1] * right[0] + right[1]

    _, states = jax.lax.associative_scan(combine, (decay, inputs), axis=1)
    outputs = jnp.einsum("ntds,nts->ntd", states, x @ full(params["read"]))
    return squared_error(outputs @ full(params["out"]), batch)


@case("other", sequences(transition=(37, 37), emission=(WIDTH, 37)))
def hidden_markov_model(params, batch):
    """A loop over positions with `(n, states, states)` inside, then the mean log likelihood by step."""
    emissions = jax.nn.log_softmax(full(batch["x"] @ params["emission"]))
    transition = jax.nn.log_softmax(3 * full(params["transition"]))

    def step(alpha, emission):
        alpha = jax.nn.logsumexp(alpha[:, :, None] + transition[None], axis=1) + emission
        return alpha, None

    alpha, _ = jax.lax.scan(step, emissions[:, 0], jnp.swapaxes(emissions[:, 1:], 0, 1))
    return -jnp.mean(jax.nn.logsumexp(alpha, axis=-1)) / STEPS


@case("other", sequences())
def soft_time_warping(params, batch):
    """Costs of every pair of positions, and a loop over their rows and columns."""
    first, second = full(batch["x"] @ params["query"])[:, :11], full(batch["y"] @ params["key"])[:, :13]
    costs = jnp.sum((first[:, :, None] - second[:, None]) ** 2, axis=-1) / WIDTH

    def softmin(*values):
        return -jax.nn.logsumexp(-jnp.stack(values), axis=0)

    def over_rows(above, row):
        def over_columns(carry, column):
            left, corner = carry
            cost, up = column
            here = cost + softmin(left, up, corner)
            return (here, up), here

        start = jnp.full_like(above[0], 1e3), above[0]
        _, values = jax.lax.scan(over_columns, start, (row, above[1:]))
        return jnp.concatenate([jnp.full_like(values[:1], 1e3), values]), None

    start = jnp.concatenate([jnp.zeros((1, 2), costs.dtype), jnp.full((13, 2), 1e3, costs.dtype)])
    last, _ = jax.lax.scan(over_rows, start, jnp.transpose(costs, (1, 2, 0)))
    return jnp.mean(last[-1]) / 24


@case("other", rows_with_targets(num_examples=11, head=(WIDTH, 101)))
def extreme_classification(params, batch):
    """Logits over many classes, for examples without tokens."""
    return jnp.mean(nll_of(10 * full(batch["x"] @ params["head"]), batch["label"]))


@case("other", rows_with_targets(num_examples=11, head=(WIDTH, 101)))
def quantile_regression(params, batch):
    """A hundred quantiles against targets by the pinball loss, and all pairs of quantiles in order."""
    quantiles = full(batch["x"] @ params["head"])
    levels = (jnp.arange(101, dtype=quantiles.dtype) + 0.5) / 101
    error = full(batch["y"])[:, :1] - quantiles
    pinball = jnp.maximum(levels[None] * error, (levels[None] - 1) * error)
    crossing = jax.nn.relu(quantiles[:, :-1] - quantiles[:, 1:])
    return jnp.mean(pinball) + 0.1 * jnp.mean(crossing)


@case("other", rows_with_targets(num_examples=11, head=(WIDTH, 51), target=(WIDTH, 51)))
def quantile_huber(params, batch):
    """Distributional reinforcement learning: every quantile against every target quantile, `(n, 51, 51)`."""
    ours, theirs = full(batch["x"] @ params["head"]), full(batch["y"] @ params["target"])
    error = theirs[:, None, :] - ours[:, :, None]
    levels = ((jnp.arange(51, dtype=ours.dtype) + 0.5) / 51)[None, :, None]
    weight = jnp.abs(levels - (error < 0).astype(ours.dtype))
    return jnp.mean(jnp.sum(weight * optax.huber_loss(error, delta=1.0), axis=1))


@case("other", sequences(filters=(3, WIDTH, 61), out=(61, WIDTH)))
def wide_convolution(params, batch):
    """Many channels after a convolution over the positions."""
    numbers = ("NWC", "WIO", "NWC")
    maps = jax.lax.conv_general_dilated(
        full(batch["x"]), full(params["filters"]), (1,), "SAME", dimension_numbers=numbers
    )
    return squared_error(jax.nn.gelu(maps) @ full(params["out"]), batch)


@case("other", sequences(filters=(3, WIDTH, 61), scale=(61,), out=(61, WIDTH)))
def wide_batch_norm(params, batch):
    """Statistics over examples and positions of many channels."""
    maps = full(batch["x"]) @ full(params["filters"])[0]
    maps = (maps - jnp.mean(maps, axis=(0, 1), keepdims=True)) / jnp.std(maps, axis=(0, 1), keepdims=True)
    return squared_error(jax.nn.silu(maps * full(params["scale"])[None, None]) @ full(params["out"]), batch)


@case("pairs", rows_with_targets(num_examples=NUM_ROWS, head=(WIDTH, 2)))
def mean_over_active_pairs(params, batch):
    """A mean over those pairs that are alike: the cotangent is a count of the same pairs."""
    embedded = full(batch["x"] @ params["head"])
    pairs = embedded @ embedded.T
    return jnp.sum(jnp.sin(pairs)) / (1 + jnp.sum(pairs > 0)).astype(pairs.dtype)


@case("pairs", rows_with_targets(num_examples=NUM_ROWS, head=(WIDTH, 2)))
def sum_over_a_sum_without_gradient(params, batch):
    """A sum over another of the same pairs, which is held fixed."""
    embedded = full(batch["x"] @ params["head"])
    pairs = embedded @ embedded.T
    return jnp.sum(jnp.sin(pairs)) / (1 + jax.lax.stop_gradient(jnp.sum(jnp.square(pairs))))


@jax.custom_vjp
def clipped_gradient(x):
    return x


clipped_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.001, 0.001),))


@case("pairs", rows_with_targets(num_examples=NUM_ROWS, head=(WIDTH, 2)))
def rows_and_columns_of_clipped_pairs(params, batch):
    """The sorted rows and the sorted columns of all pairs, whose gradient is clipped once, after both are added."""
    embedded = full(batch["x"] @ params["head"])
    pairs = clipped_gradient(embedded @ jnp.sin(embedded).T)
    rows, columns = jnp.sort(pairs, axis=1), jnp.sort(pairs, axis=0)
    return jnp.mean(jnp.cumsum(rows, axis=1) ** 2) + jnp.mean(jnp.cumsum(columns, axis=0) ** 2)


@case("pairs", rows_with_targets(num_examples=NUM_ROWS, head=(WIDTH, 2)))
def pairs_in_a_loop(params, batch):
    """All pairs, changed a few times in a loop that counts its steps."""
    embedded = full(batch["x"] @ params["head"])
    pairs = jax.lax.fori_loop(0, 3, lambda i, x: x + 0.1 * i * jnp.sin(x), embedded @ embedded.T)
    return jnp.sum(jnp.tanh(pairs))


@case("pairs", rows_with_targets(num_examples=NUM_ROWS, head=(WIDTH, 2)), stays_whole=True)
def range_of_all_pairs(params, batch):
    """The largest and the smallest of all pairs, which have a gradient."""
    embedded = full(batch["x"] @ params["head"])
    pairs = jnp.sin(embedded @ embedded.T)
    return jnp.square(jnp.max(pairs) - jnp.min(pairs)) + jnp.sum(jnp.tanh(pairs))


# What follows from wide values, but has no derivative.


@case("pairs", rows_with_targets(num_examples=NUM_ROWS, head=(WIDTH, 2)))
def loop_over_detached_rows(params, batch):
    """A loop of unknown length scales what was detached from all pairs: JAX cannot differentiate such a loop."""
    embedded = full(batch["x"] @ params["head"])
    pairs = embedded @ embedded.T
    scale = jax.nn.logsumexp(jax.lax.stop_gradient(pairs), axis=1)
    scale = jax.lax.while_loop(lambda scale: jnp.max(scale) > 0.5, lambda scale: 0.7 * scale, scale)
    return jnp.mean(scale * jax.nn.logsumexp(pairs, axis=1))


@case("pairs", rows_with_targets(num_examples=NUM_ROWS, head=(WIDTH, 2)))
def loop_over_rounded_rows(params, batch):
    """The same with sums of rounded pairs, whose derivative is zero."""
    embedded = full(batch["x"] @ params["head"])
    pairs = embedded @ embedded.T
    scale = jnp.sum(jnp.round(pairs) + jnp.sign(pairs), axis=1)
    scale = jax.lax.while_loop(lambda scale: jnp.max(scale) > 0.5, lambda scale: 0.7 * scale, scale)
    return jnp.mean(scale * jax.nn.logsumexp(pairs, axis=1))


@case("pairs", rows_with_targets(num_examples=NUM_ROWS, head=(WIDTH, 2)), stays_whole=True)
def loop_over_detached_rows_and_data(params, batch):
    """The same with a factor from the batch, with respect to which an outer `grad` might differentiate."""
    embedded = full(batch["x"] @ params["head"])
    pairs = embedded @ embedded.T
    scale = jnp.sum(jnp.tanh(jax.lax.stop_gradient(pairs) * full(batch["y"])[:, :1]), axis=1)
    scale = jax.lax.while_loop(lambda scale: jnp.max(scale) > 0.5, lambda scale: 0.7 * scale, scale)
    return jnp.mean(scale * jax.nn.logsumexp(pairs, axis=1))


@case("tokens", language(num_examples=5), has_aux=True)
def aux_exact_match(params, batch):
    """Whether all words of a sequence are predicted, and whether any is."""
    logits = logits_of(params, batch["tokens"])
    right = jnp.argmax(logits, axis=-1) == batch["targets"]
    aux = {"exact": jnp.all(right | (batch["mask"] == 0), axis=-1), "any": jnp.any(right, axis=-1)}
    aux |= {"confident": jnp.all(jnp.any(logits > 2, axis=-1), axis=-1)}
    return jnp.mean(nll_of(logits, batch["targets"])), aux


@case("tokens", language(num_examples=5), has_aux=True)
def aux_of_predicted_integers(params, batch):
    """Sums, bits and counts of the predicted words, and a matrix of confusions."""
    logits = logits_of(params, batch["tokens"])
    best = jnp.argmax(logits, axis=-1)
    confusions = jnp.zeros((VOCABULARY, VOCABULARY), jnp.int32).at[batch["targets"].ravel(), best.ravel()].add(1)
    aux = {"parity": jnp.bitwise_xor.reduce(best, axis=1), "bits": jax.lax.population_count(best)}
    aux |= {"confusions": confusions, "largest": jax.lax.cummax(best, 1), "positive": jnp.sum(logits > 0)}
    return jnp.mean(nll_of(logits, batch["targets"])), aux


@case("tokens", language(num_examples=3))
def keys_of_predicted_words(params, batch):
    """The predicted words choose random numbers."""
    hidden = hidden_of(params, batch["tokens"])
    logits = full(hidden @ params["embedding"].T)
    fold = jax.vmap(jax.vmap(lambda word: jax.random.fold_in(jax.random.key(0), word)))
    keys = fold(jnp.argmax(logits, axis=-1))
    noise = jax.vmap(jax.vmap(lambda key: jax.random.normal(key, (WIDTH,), logits.dtype)))(keys)
    return jnp.mean(nll_of(logits, batch["targets"])) + jnp.mean(noise * full(hidden))


@case("tokens", language(num_examples=3), has_aux=True)
def aux_of_a_loop(params, batch):
    logits = logits_of(params, batch["tokens"])
    log_z = jax.nn.logsumexp(logits, axis=-1)
    shrunk = jax.lax.while_loop(lambda x: jnp.max(x) > 0.5, lambda x: 0.7 * x, log_z)
    return jnp.mean(nll_of(logits, batch["targets"])), shrunk


# Hidden states that are nearly as large as the logits, and values that all examples share.


@case("tokens", language(layers=2, num_examples=3, head=(WIDTH, 52)))
def small_vocabulary(params, batch):
    """The logits are not even seven times as wide as the hidden states, and twice the layer inside a block."""
    logits = full(hidden_of(params, batch["tokens"]) @ params["head"])
    return jnp.mean(nll_of(logits, batch["targets"] % 52))


@case("pairs", towers(num_examples=NUM_ROWS))
def clip_of_wide_towers(params, batch):
    """The matrix of pairs is only a few times as large as the embeddings."""
    first, second = both_views(params, batch)
    logits = 5 * full(first @ second.T)
    hardest = jnp.argmax(jnp.where(jnp.eye(len(logits), dtype=bool), -jnp.inf, logits), axis=1)
    margin = jax.nn.relu(0.3 + jnp.sum(full(first) * full(second)[hardest], axis=-1))
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - jnp.diagonal(logits)) + jnp.mean(margin)


@case("tokens", language())
def last_token(params, batch):
    return jnp.mean(nll_of(logits_of(params, batch["tokens"])[:, -1], batch["targets"][:, -1]))


@case("tokens", language(num_examples=3))
def slices_of_slices(params, batch):
    logits = 2 * logits_of(params, batch["tokens"])[:, 1:][:, :-1]
    return jnp.mean(nll_of(jnp.tanh(logits)[:, :, 1:], jnp.maximum(batch["targets"][:, 1:-1] - 1, 0)))


@case("tokens", language(num_examples=3))
def written_by_positions(params, batch):
    """Every token writes into its own row of the logits."""
    logits = logits_of(params, batch["tokens"])
    rows = jnp.arange(3)[:, None], jnp.arange(LENGTH)[None]
    logits = logits.at[(*rows, batch["tokens"])].set(-9.0).at[..., 3].set(-4.0)
    logits = logits.at[(*rows, batch["targets"])].max(1.0)
    return -jnp.mean(jax.nn.log_softmax(logits)[(*rows, batch["targets"])])


@case("tokens", language(num_examples=3))
def flat_rows_by_positions(params, batch):
    logits = logits_of(params, batch["tokens"]).reshape(-1, VOCABULARY)
    rows = jnp.arange(3 * LENGTH)
    logits = logits.at[rows, batch["tokens"].ravel()].add(-1.0)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[rows, batch["targets"].ravel()])


# Losses of optax, and other losses of tokens.


@case("tokens", language())
def optax_focal(params, batch):
    logits = logits_of(params, batch["tokens"])
    labels = jax.nn.one_hot(batch["targets"], VOCABULARY, dtype=logits.dtype)
    return jnp.mean(optax.losses.sigmoid_focal_loss(logits, labels, alpha=0.3, gamma=1.7))


@case("tokens", language())
def optax_where(params, batch):
    """A softmax over some words, and over the right one."""
    logits = logits_of(params, batch["tokens"])
    words = jnp.arange(VOCABULARY)[None, None]
    allowed = (words < 50) | (words == batch["targets"][..., None])
    return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"], where=allowed))


@case("tokens", language(num_examples=3))
def optax_ranking(params, batch):
    logits = logits_of(params, batch["tokens"])
    labels = jax.nn.one_hot(batch["targets"], VOCABULARY, dtype=logits.dtype)
    where = jnp.broadcast_to(batch["mask"][..., None] > 0, logits.shape)
    return optax.losses.ranking_softmax_loss(logits, labels, where=where)


@case("tokens", language(scales=(VOCABULARY,)))
def smoothing_with_class_weights(params, batch):
    log_probs = jax.nn.log_softmax(logits_of(params, batch["tokens"]))
    weight = jax.nn.softplus(full(params["scales"]))
    targets = optax.smooth_labels(jax.nn.one_hot(batch["targets"], VOCABULARY, dtype=weight.dtype), 0.1)
    return -jnp.sum(log_probs * targets * weight[None, None]) / jnp.sum(weight[batch["targets"]])


@case("tokens", language(num_examples=3))
def self_critical(params, batch):
    """Sampled words, rewarded by how much better they are than the most likely ones."""
    logits = logits_of(params, batch["tokens"])
    sampled = jax.random.categorical(jax.random.key(3), logits)
    right, expected = (words == batch["targets"] for words in (sampled, jnp.argmax(logits, axis=-1)))
    reward = jnp.mean(right.astype(logits.dtype) - expected.astype(logits.dtype), axis=-1)
    return -jnp.mean(jnp.sum(pick(jax.nn.log_softmax(logits), sampled), axis=-1) * reward)


@case("tokens", language(num_examples=3))
def beam_over_tokens_and_words(params, batch):
    log_probs = jax.nn.log_softmax(logits_of(params, batch["tokens"]))
    scores = jnp.cumsum(pick(log_probs, batch["targets"]), axis=-1)
    best = jax.lax.top_k((scores[:, :, None] + log_probs).reshape(3, -1), 6)[0]
    return jnp.mean(jax.nn.logsumexp(best, axis=-1) - scores[:, -1])


@case("tokens", language(classes=(WIDTH, 9), words=(9, WIDTH, 8)))
def hierarchical_softmax(params, batch):
    """The class of a word, and the word in its class."""
    hidden = full(hidden_of(params, batch["tokens"]))
    group, word = batch["targets"] // 8, batch["targets"] % 8
    of_words = jax.nn.log_softmax(jnp.einsum("ntd,cdw->ntcw", hidden, full(params["words"])))
    mine = jnp.take_along_axis(of_words, group[..., None, None], axis=2)[:, :, 0]
    return -jnp.mean(pick(jax.nn.log_softmax(hidden @ full(params["classes"])), group) + pick(mine, word))


@case("tokens", language(gate=(WIDTH, 4), experts=(4, WIDTH, VOCABULARY)))
def head_of_the_best_expert(params, batch):
    """A matrix for each token."""
    hidden = full(hidden_of(params, batch["tokens"]))
    gate = jax.nn.softmax(hidden @ full(params["gate"]))
    matrices = full(params["experts"])[jnp.argmax(gate, axis=-1)]
    logits = jnp.einsum("ntd,ntdv->ntv", hidden, matrices) * jnp.max(gate, axis=-1, keepdims=True)
    return jnp.mean(nll_of(logits, batch["targets"]))


@case("tokens", language())
def nucleus(params, batch):
    """The most likely words that together have a probability of 0.9."""
    logits = logits_of(params, batch["tokens"])
    ordered = -jnp.sort(-logits, axis=-1)
    least = jnp.min(jnp.where(jnp.cumsum(jax.nn.softmax(ordered), axis=-1) < 0.9, ordered, jnp.inf), -1, keepdims=True)
    kept = (logits >= least) | (jnp.arange(VOCABULARY)[None, None] == batch["targets"][..., None])
    return jnp.mean(nll_of(jnp.where(kept, logits, -1e9), batch["targets"]))


@case("tokens", language())
def survival(params, batch):
    hazard = jax.nn.sigmoid(logits_of(params, batch["tokens"]) - 2)
    return -jnp.mean(jnp.log(pick(jnp.cumprod(1 - hazard, axis=-1) * hazard, batch["targets"]) + 1e-9))


@case("tokens", language())
def logits_of_a_window(params, batch):
    """A slice of the logits around each target."""

    def of_one(logits, target):
        around = jax.lax.dynamic_slice(logits, (jnp.clip(target - 5, 0, VOCABULARY - 11),), (11,))
        return jax.nn.logsumexp(around) - logits[target]

    return jnp.mean(jax.vmap(jax.vmap(of_one))(logits_of(params, batch["tokens"]), batch["targets"]))


@case("tokens", language(), stays_whole=True)
def overwritten_tokens(params, batch):
    logits = logits_of(params, batch["tokens"])
    logits = jax.lax.dynamic_update_slice(logits, 0.5 * logits[:, :2], (0, 3, 0))
    return jnp.mean(nll_of(logits, batch["targets"]))


@case("tokens", language(num_examples=3), stays_whole=True)
def branch_by_a_mean(params, batch):
    """Which branch the logits take depends on all of them."""
    logits = logits_of(params, batch["tokens"])
    logits = jax.lax.cond(jnp.mean(logits) > 0, lambda x: 2 * x, jnp.sin, logits)
    return jnp.mean(nll_of(logits, batch["targets"]))


@case("tokens", language())
def roots_by_bisection(params, batch):
    """A loop that finds a threshold for each row of the logits."""
    logits = logits_of(params, batch["tokens"])
    largest = jnp.max(logits, axis=-1, keepdims=True)

    def step(bounds, _):
        middle = sum(bounds) / 2
        is_low = jnp.sum(jax.nn.relu(logits - middle) ** 2, axis=-1, keepdims=True) > 1
        return (jnp.where(is_low, middle, bounds[0]), jnp.where(is_low, bounds[1], middle)), None

    (low, _), _ = jax.lax.scan(step, (largest - 1, largest), None, length=6)
    return jnp.mean(jnp.sum(jax.nn.relu(logits - low) ** 2 * logits, axis=-1) - pick(logits, batch["targets"]))


@case("tokens", language(), stays_whole=True)
def temperature_by_gradient_descent(params, batch):
    """The gradient of the mean with respect to a temperature, in the loss."""
    logits, scale = logits_of(params, batch["tokens"]), 1.0
    for _ in range(2):
        scale -= 0.1 * jax.grad(lambda scale: jnp.mean(nll_of(logits * scale, batch["targets"])))(scale)
    return jnp.mean(nll_of(logits * scale, batch["targets"]))


@case("tokens", language(num_examples=3))
def one_step_of_the_head(params, batch):
    """Meta-learning: the head takes a step on one target, and is judged by another."""
    hidden = full(hidden_of(params, batch["tokens"]))
    head = full(params["embedding"])
    head = head - 0.5 * jax.grad(lambda head: jnp.mean(nll_of(hidden @ head.T, batch["targets"])))(head)
    return jnp.mean(nll_of(hidden @ head.T, jnp.roll(batch["targets"], 1, axis=1)))


@case("tokens", language())
def adversarial_hidden_states(params, batch):
    """The direction in which the predictions change the most, by a gradient in the loss."""
    hidden, head = full(hidden_of(params, batch["tokens"])), full(params["embedding"])
    log_probs = jax.nn.log_softmax(hidden @ head.T)
    fixed = jax.lax.stop_gradient(log_probs)

    def kl(change):
        return jnp.sum(jnp.exp(fixed) * (fixed - jax.nn.log_softmax((hidden + change) @ head.T)), axis=-1)

    start = 0.01 * jax.random.normal(jax.random.key(2), hidden.shape, hidden.dtype)
    direction = unit(jax.lax.stop_gradient(jax.grad(lambda change: jnp.sum(kl(change)))(start)))
    return -jnp.mean(pick(log_probs, batch["targets"])) + jnp.mean(kl(0.1 * direction))


@case("tokens", language())
def transducer(params, batch):
    """Logits for every pair of a position and a label, and a loop over both."""
    hidden, labels = full(hidden_of(params, batch["tokens"])), full(params["embedding"])[batch["targets"][:, :4]]
    joint = jnp.tanh(hidden[:, :, None] + labels[:, None]) @ full(params["embedding"]).T
    log_probs = jax.nn.log_softmax(joint)
    blank = log_probs[..., 0]
    words = jnp.take_along_axis(log_probs, batch["targets"][:, None, :4, None], axis=-1)[..., 0]

    def over_positions(before, row):
        def over_labels(left, column):
            here = jnp.logaddexp(column[0], left + column[1])
            return here, here

        start = before + row[0]
        _, after = jax.lax.scan(over_labels, start[:, 0] - 1e3, (start.T, row[1].T))
        return after.T, None

    rows = jnp.swapaxes(blank, 0, 1), jnp.swapaxes(words, 0, 1)
    last, _ = jax.lax.scan(over_positions, jnp.zeros_like(blank[:, 0]), rows)
    return -jnp.mean(last[:, -1])


@case("tokens", language())
def clipped_by_the_norm_of_rows(params, batch):
    """A backward pass that shortens the gradient of each token's logits."""

    @jax.custom_vjp
    def shortened(x):
        return x

    def backward(_, grad):
        return (grad / jnp.maximum(1.0, 1e3 * jnp.linalg.norm(grad, axis=-1, keepdims=True)),)

    shortened.defvjp(lambda x: (x, None), backward)
    return jnp.mean(nll_of(shortened(logits_of(params, batch["tokens"])), batch["targets"]))


@case("tokens", language(), stays_whole=True)
def clipped_by_the_norm_of_all(params, batch):
    """A backward pass that shortens the gradient of all logits together, which no block can compute."""

    @jax.custom_vjp
    def shortened(x):
        return x

    shortened.defvjp(lambda x: (x, None), lambda _, grad: (grad / jnp.maximum(1.0, 1e3 * jnp.linalg.norm(grad)),))
    return jnp.mean(nll_of(shortened(logits_of(params, batch["tokens"])), batch["targets"]))


@case("tokens", language(), stays_whole=True)
def clipped_gradient_of_the_head(params, batch):
    """A backward pass that clips the gradient of the embedding itself: the sum over all tokens."""

    @jax.custom_vjp
    def project(hidden, head):
        return hidden @ head.T

    def backward(kept, grad):
        hidden, head = kept
        return grad @ head, jnp.clip(jnp.einsum("ntv,ntd->vd", grad, hidden), -0.01, 0.01)

    project.defvjp(lambda hidden, head: (hidden @ head.T, (hidden, head)), backward)
    logits = project(full(hidden_of(params, batch["tokens"])), full(params["embedding"]))
    return jnp.mean(nll_of(logits, batch["targets"]))


# Other wide values.


@case("pairs", rows_with_targets(num_examples=NUM_ROWS, head=(WIDTH, 2)))
def iterated_powers(params, batch):
    """The largest eigenvalue of a kernel, by products with it."""
    embedded = full(batch["x"] @ params["head"])
    kernel = jnp.exp(-0.1 * squared_distances(embedded, embedded))
    vector = jnp.ones(len(kernel), kernel.dtype)
    for _ in range(3):
        vector = kernel @ vector
        vector = vector / jnp.linalg.norm(vector)
    return vector @ kernel @ vector


@case("pairs", rows_with_targets(num_examples=11, head=(WIDTH, 2), core=(2, 2, 2)))
def triples_of_examples(params, batch):
    embedded = full(batch["x"] @ params["head"])
    triples = jnp.einsum("ia,jb,kc,abc->ijk", embedded, embedded, embedded, full(params["core"]))
    return jnp.mean(jnp.tanh(triples) ** 2)


@case("tokens", language())
def spectra_of_the_logits(params, batch):
    """Fourier transforms over words and over tokens."""
    logits = logits_of(params, batch["tokens"])
    over_words = jnp.abs(jnp.fft.rfft(logits, axis=-1)[..., 1:9])
    return jnp.mean(over_words) + jnp.mean(jnp.log(1 + jnp.abs(jnp.fft.fft(jnp.sin(logits), axis=1)) ** 2))


@case("tokens", language(num_examples=3))
def products_of_neighbours(params, batch):
    """How often two words follow each other, `(n, words, words)`."""
    probs = jax.nn.softmax(logits_of(params, batch["tokens"]))
    return jnp.mean(jnp.sum(jnp.einsum("ntv,ntw->nvw", probs[:, :-1], probs[:, 1:]) ** 2, axis=(1, 2)))


@case("attention", sequences(num_examples=1, table=(2 * 40, HEADS)))
def learned_biases_of_one_sequence(params, batch):
    """The biases have as many entries as the scores."""
    x = full(batch["x"])
    distance = jnp.arange(x.shape[1])[:, None] - jnp.arange(x.shape[1])[None]
    biases = jnp.moveaxis(full(params["table"])[distance + 40], -1, 0)
    query, key, value = (split_heads(x @ full(params[name])) for name in ("query", "key", "value"))
    scores = jnp.einsum("nthd,nshd->nhts", query, key) + biases[None]
    out = jnp.einsum("nhts,nshd->nthd", jax.nn.softmax(scores), value).reshape(x.shape)
    return jnp.mean((out - full(batch["y"])) ** 2)
