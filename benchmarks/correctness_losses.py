"""The twenty-five losses of `correctness.py`: what they compute, on which data, and how they could be rewritten.

A loss is written in two parts, because one of the ways that are compared (GradCache's) needs them apart:

    representations = encode(*params, batch, *rest)           # one row for each example
    loss = head(*params, representations, batch, counts(batch))

`counts(batch)` are its denominators: numbers of examples, tokens or labels. They depend on the data alone. Many losses
can be rewritten with them: if a microbatch is given the counts of the *full* batch, the parts of all microbatches add
up to the loss. This is the `num_items_in_batch` of Hugging Face's Trainer, and it works in every loop.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

EXAMPLES, SIZE, FEATURES, CLASSES, TOKENS = 32, 4, 6, 4, 5


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a loss is called with: `loss(*params, batch, *rest)`, in microbatches of `size` examples."""

    params: tuple[Any, ...]
    batch: Any
    rest: tuple[Any, ...] = ()
    size: int = SIZE


@dataclasses.dataclass(frozen=True)
class Loss:
    """One row of the table.

    Attributes:
      name: what it is called in the table.
      group: which part of the table it is in.
      encode: the representations of the examples, a row each.
      head: the loss of the representations.
      problem: makes its parameters and its batch.
      counts: the denominators of a batch.
      reduction: "mean" or "sum": how a user would combine the gradients of microbatches.
      arguments: how many arguments are differentiated.
      per_example: it is a sum over examples of terms that depend on one example each, divided by counts.
      cut: another `encode` and `head` of the same loss, whose `encode` does not look across examples, if its own does.
      special: what the ways have to know about it: "key", "aux", "narrow", "mesh" or "".
      tolerance: the relative difference that is rounding.
    """

    name: str
    group: str
    encode: Callable[..., Any]
    head: Callable[..., Any]
    problem: Callable[[], Problem]
    counts: Callable[[Any], Any] = lambda batch: {"examples": jax.tree.leaves(batch)[0].shape[0]}
    reduction: str = "mean"
    arguments: int = 1
    per_example: bool = True
    cut: tuple[Callable[..., Any], Callable[..., Any]] | None = None
    special: str = ""
    tolerance: float = 1e-12

    def part(self, *args: Any, counts: Any = None) -> Any:
        """The loss of a batch; or, with the counts of a larger batch, what this batch contributes to its loss."""
        params, batch = args[: self.arguments], args[self.arguments]
        counts = self.counts(batch) if counts is None else counts
        return self.head(*params, self.encode(*args), batch, counts)

    def __call__(self, *args: Any) -> Any:
        return self.part(*args)


LOSSES: list[Loss] = []


def _add(name: str, group: str, encode: Any, head: Any, problem: Any, **options: Any) -> None:
    LOSSES.append(Loss(name, group, encode, head, problem, **options))


# --- data and model -------------------------------------------------------------------------------------------------


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def _params() -> dict[str, np.ndarray]:
    return {
        "w": _normal(1, FEATURES, 8) / 2,
        "b": _normal(2, 8) / 4,
        "v": _normal(3, 8, CLASSES) / 2,
    }


def _examples(number: int = EXAMPLES) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(4)
    return {
        "x": generator.normal(size=(number, FEATURES)) * np.linspace(0.5, 1.5, number)[:, None],
        "y": generator.normal(size=(number, CLASSES)),
        "label": generator.integers(0, CLASSES, number),
    }


def _texts(lengths: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Sequences of tokens of unequal lengths, as features with a label and a mask for each token."""
    generator = np.random.default_rng(5)
    lengths = generator.integers(1, TOKENS + 1, EXAMPLES) if lengths is None else lengths
    return {
        "x": generator.normal(size=(EXAMPLES, TOKENS, FEATURES)),
        "label": generator.integers(0, CLASSES, (EXAMPLES, TOKENS)),
        "mask": (np.arange(TOKENS) < lengths[:, None]).astype(float),
    }


def _jax(tree: Any) -> Any:
    return jax.tree.map(jnp.asarray, tree)


def _plain() -> Problem:
    return Problem((_jax(_params()),), _jax(_examples()))


def _tokens() -> Problem:
    return Problem((_jax(_params()),), _jax(_texts()))


def predict(params: Any, batch: Any) -> jax.Array:
    """A network with one hidden layer: the representations of most losses here."""
    return jnp.tanh(batch["x"] @ params["w"] + params["b"]) @ params["v"]


def _errors(outputs: jax.Array, batch: Any) -> jax.Array:
    return jnp.sum((outputs - batch["y"]) ** 2, axis=-1)


def _nll(logits: jax.Array, batch: Any) -> jax.Array:
    """The cross entropy of every example or token."""
    logs = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(logs, batch["label"][..., None], axis=-1)[..., 0]


# --- reductions -----------------------------------------------------------------------------------------------------


def _mean(params: Any, outputs: Any, batch: Any, counts: Any) -> jax.Array:
    return jnp.sum(_errors(outputs, batch)) / counts["examples"]


def _sum(params: Any, outputs: Any, batch: Any, counts: Any) -> jax.Array:
    return jnp.sum(_errors(outputs, batch))


def _token_count(batch: Any) -> Any:
    return {"tokens": jnp.sum(batch["mask"])}


def _masked_mean(params: Any, logits: Any, batch: Any, counts: Any) -> jax.Array:
    return jnp.sum(_nll(logits, batch) * batch["mask"]) / counts["tokens"]


def _two_counts(batch: Any) -> Any:
    return {"tokens": jnp.sum(batch["mask"]), "rated": jnp.sum(batch["rated"])}


def _two_terms(params: Any, logits: Any, batch: Any, counts: Any) -> jax.Array:
    """Cross entropy per token, and the error of a rating that only some of the examples have."""
    rating = jnp.sum(jax.nn.softmax(logits[:, 0]) * batch["rating"], axis=-1)
    language = jnp.sum(_nll(logits, batch) * batch["mask"]) / counts["tokens"]
    return language + jnp.sum((rating - 1) ** 2 * batch["rated"]) / counts["rated"]


def _rated_texts() -> Problem:
    generator = np.random.default_rng(6)
    more = {"rating": generator.normal(size=(EXAMPLES, CLASSES)), "rated": np.arange(EXAMPLES) % 5 // 2 + 0.0}
    return Problem((_jax(_params()),), _jax(_texts() | more))


def _regularised(params: Any, outputs: Any, batch: Any, counts: Any) -> jax.Array:
    return _mean(params, outputs, batch, counts) + 0.1 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))


def _rmse(params: Any, outputs: Any, batch: Any, counts: Any) -> jax.Array:
    return jnp.sqrt(_mean(params, outputs, batch, counts))


def _perplexity(params: Any, logits: Any, batch: Any, counts: Any) -> jax.Array:
    return jnp.exp(_masked_mean(params, logits, batch, counts))


_add("mean", "reductions", predict, _mean, _plain)
_add("sum", "reductions", predict, _sum, _plain, reduction="sum")
_add("masked mean over tokens", "reductions", predict, _masked_mean, _tokens, counts=_token_count)
_add("two terms, own denominators", "reductions", predict, _two_terms, _rated_texts, counts=_two_counts)
_add("mean + L2 of the parameters", "reductions", predict, _regularised, _plain)
_add("RMSE: root of a mean", "reductions", predict, _rmse, _plain, per_example=False)
_add("perplexity: exp of a mean", "reductions", predict, _perplexity, _tokens, counts=_token_count, per_example=False)


# --- losses that look across examples -------------------------------------------------------------------------------


def _route(params: Any, batch: Any) -> Any:
    """A mixture of eight experts, of which each example uses the one with the largest score."""
    scores = batch["x"] @ params["w"]
    chosen = jax.nn.one_hot(jnp.argmax(scores, axis=-1), scores.shape[-1], dtype=scores.dtype)
    gates = jax.nn.softmax(scores)
    return {"outputs": (gates * chosen) @ params["v"], "gates": gates, "chosen": chosen}


def _balanced(params: Any, routed: Any, batch: Any, counts: Any) -> jax.Array:
    """The load balancing loss of Switch Transformers: a product of two means over the batch, for each expert."""
    balance = jnp.sum(jnp.mean(routed["chosen"], axis=0) * jnp.mean(routed["gates"], axis=0))
    return _mean(params, routed["outputs"], batch, counts) + routed["gates"].shape[-1] * balance


def _dice(params: Any, logits: Any, batch: Any, counts: Any) -> jax.Array:
    """One minus the mean over classes of a ratio of sums over the batch."""
    guessed, right = jax.nn.softmax(logits), jax.nn.one_hot(batch["label"], CLASSES, dtype=logits.dtype)
    overlap = jnp.sum(guessed * right, axis=0)
    return 1 - jnp.mean(2 * overlap / (jnp.sum(guessed, axis=0) + jnp.sum(right, axis=0)))


def _unit(rows: jax.Array) -> jax.Array:
    return rows / jnp.sqrt(jnp.sum(rows**2, axis=-1, keepdims=True) + 1e-6)


def _towers(params: Any, batch: Any) -> Any:
    return {"images": _unit(predict(params, batch)), "texts": _unit(jnp.tanh(batch["text"] @ params["text"]))}


def _pairs() -> Problem:
    params = _params() | {"text": _normal(7, FEATURES, CLASSES), "temperature": np.asarray(1.0)}
    return Problem((_jax(params),), _jax(_examples() | {"text": _normal(8, EXAMPLES, FEATURES)}))


def _clip(params: Any, rows: Any, batch: Any, counts: Any) -> jax.Array:
    """Cross entropy of every image with all texts of the batch, and of every text with all images."""
    logits = rows["images"] @ rows["texts"].T * jnp.exp(params["temperature"])
    right = jnp.diagonal(logits)
    images, texts = jax.nn.logsumexp(logits, axis=1), jax.nn.logsumexp(logits, axis=0)
    return jnp.mean(images - right) / 2 + jnp.mean(texts - right) / 2


def _supervised_contrast(params: Any, outputs: Any, batch: Any, counts: Any) -> jax.Array:
    """SupCon: examples of the same class attract each other, among all others of the batch."""
    rows, label = _unit(outputs), batch["label"]
    other = 1 - jnp.eye(len(label), dtype=rows.dtype)
    logits = rows @ rows.T * 4
    logs = logits - jax.nn.logsumexp(jnp.where(other > 0, logits, -1e9), axis=1, keepdims=True)
    same = (label[:, None] == label[None, :]) * other
    return -jnp.mean(jnp.sum(logs * same, axis=1) / jnp.maximum(jnp.sum(same, axis=1), 1))


def _views(params: Any, batch: Any) -> Any:
    return {"one": predict(params, batch), "two": predict(params, {"x": batch["text"]})}


def _cross_correlation(params: Any, rows: Any, batch: Any, counts: Any) -> jax.Array:
    """Barlow Twins: the features of two views are standardised over the batch, and correlated."""
    one, two = ((each - jnp.mean(each, axis=0)) / (jnp.std(each, axis=0) + 1e-3) for each in (rows["one"], rows["two"]))
    correlation = one.T @ two / len(one)
    return jnp.sum((correlation - jnp.eye(CLASSES)) ** 2 * (0.1 + 0.9 * jnp.eye(CLASSES)))


def _ranking(params: Any, outputs: Any, batch: Any, counts: Any) -> jax.Array:
    """The mean over all pairs of the batch in which the first example should have the larger score."""
    score, relevance = outputs[:, 0], batch["y"][:, 0]
    ordered = (relevance[:, None] > relevance[None, :]).astype(score.dtype)
    return jnp.sum(jax.nn.softplus(score[None, :] - score[:, None]) * ordered) / jnp.sum(ordered)


def _hardest(params: Any, logits: Any, batch: Any, counts: Any) -> jax.Array:
    """The mean over the quarter of the examples that have the largest loss."""
    losses = _nll(logits, batch)
    return jnp.mean(jax.lax.top_k(losses, len(losses) // 4)[0])


def _first_layer(params: Any, batch: Any) -> jax.Array:
    return batch["x"] @ params["w"]


def _normalised(params: Any, before: jax.Array) -> jax.Array:
    """BatchNorm as in training, an activation, and a second layer."""
    centred = before - jnp.mean(before, axis=0)
    hidden = centred / jnp.sqrt(jnp.mean(centred**2, axis=0) + 1e-5) + params["b"]
    return jax.nn.relu(hidden) @ params["v"]


def _batch_norm(params: Any, batch: Any) -> jax.Array:
    return _normalised(params, _first_layer(params, batch))


def _mean_after_norm(params: Any, before: Any, batch: Any, counts: Any) -> jax.Array:
    return _mean(params, _normalised(params, before), batch, counts)


_ACROSS: dict[str, Any] = {"group": "across examples", "per_example": False}
_add("mixture of experts, balanced", encode=_route, head=_balanced, problem=_plain, **_ACROSS)
_add("dice: ratios of sums", encode=predict, head=_dice, problem=_plain, **_ACROSS)
_add("CLIP, in-batch negatives", encode=_towers, head=_clip, problem=_pairs, **_ACROSS)
_add("SupCon", encode=predict, head=_supervised_contrast, problem=_plain, **_ACROSS)
_add("Barlow Twins", encode=_views, head=_cross_correlation, problem=_pairs, **_ACROSS)
_add("pairwise ranking", encode=predict, head=_ranking, problem=_plain, **_ACROSS)
_add("hardest quarter of the batch", encode=predict, head=_hardest, problem=_plain, **_ACROSS)
_CUT = (_first_layer, _mean_after_norm)
_add("BatchNorm in training", encode=_batch_norm, head=_mean, problem=_plain, cut=_CUT, **_ACROSS)


# --- randomness -----------------------------------------------------------------------------------------------------


def _dropout(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """Two layers of dropout, both from one key for the batch."""
    first, second = jax.random.split(key)
    x = jnp.where(jax.random.bernoulli(first, 0.8, batch["x"].shape), batch["x"] / 0.8, 0)
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    hidden = jnp.where(jax.random.bernoulli(second, 0.5, hidden.shape), hidden / 0.5, 0)
    return hidden @ params["v"]


def _dropout_problem() -> Problem:
    return dataclasses.replace(_plain(), rest=(jax.random.key(0),))


def _augmented(params: Any, batch: Any) -> jax.Array:
    """Noise on every example from a key of its own, which is part of the batch, as two words."""
    noise = jax.vmap(lambda key: jax.random.normal(key, (FEATURES,), batch["x"].dtype))(batch["key"])
    return predict(params, {"x": batch["x"] + noise})


def _augmented_problem() -> Problem:
    # As words and not as typed keys, which JAX 0.10 fails to reshape in column-major order, as jax_privacy does.
    keys = jax.random.key_data(jax.random.split(jax.random.key(1), EXAMPLES))
    return Problem((_jax(_params()),), _jax(_examples()) | {"key": keys})


_add("dropout, one key for the batch", "randomness", _dropout, _mean, _dropout_problem, special="key")
_add("noise, a key for each example", "randomness", _augmented, _mean, _augmented_problem)


# --- shapes of data, arguments and outputs --------------------------------------------------------------------------


def _ragged() -> Problem:
    return Problem((_jax(_params()),), _jax(_examples(EXAMPLES - 3)))


def _with_an_empty_microbatch() -> Problem:
    """No tokens in a microbatch of neighbouring examples, nor in one of every eighth example, as Optax takes them."""
    lengths = np.random.default_rng(5).integers(1, TOKENS + 1, EXAMPLES)
    lengths[4:8] = 0
    lengths[1 :: EXAMPLES // SIZE] = 0
    return Problem((_jax(_params()),), _jax(_texts(lengths)))


def _two_networks(one: Any, two: Any, batch: Any) -> Any:
    return predict(one, batch) + predict(two, {"x": batch["text"]})


def _mean_of_two(one: Any, two: Any, outputs: Any, batch: Any, counts: Any) -> jax.Array:
    return _mean(one, outputs, batch, counts)


def _two_arguments() -> Problem:
    second = jax.tree.map(lambda leaf: leaf[::-1].copy(), _params())
    batch = _examples() | {"text": _normal(8, EXAMPLES, FEATURES)}
    return Problem((_jax(_params()), _jax(second)), _jax(batch))


def _labelled() -> Problem:
    weight = np.random.default_rng(9).integers(0, 4, EXAMPLES) / 3
    return Problem((_jax(_params()),), _jax(_examples() | {"mask": weight}))


def sums_of_accuracy(logits: Any, batch: Any) -> Any:
    """The two sums of which the accuracy of examples with weights is the ratio."""
    right = (jnp.argmax(logits, axis=-1) == batch["label"]).astype(logits.dtype)
    return {"right": jnp.sum(right * batch["mask"]), "weight": jnp.sum(batch["mask"])}


def accuracy(sums: Any) -> Any:
    """The aux output of these sums."""
    return {"accuracy": sums["right"] / jnp.maximum(sums["weight"], 1e-9)}


def _mean_and_accuracy(params: Any, logits: Any, batch: Any, counts: Any) -> Any:
    """A mean over all examples, and as aux output the accuracy on the examples that count."""
    return _cross_entropy(params, logits, batch, counts), accuracy(sums_of_accuracy(logits, batch))


def mean_and_sums(params: Any, batch: Any) -> Any:
    """The same loss with the sums as aux output, which can be added up over microbatches."""
    logits = predict(params, batch)
    return _cross_entropy(params, logits, batch, {"examples": len(logits)}), sums_of_accuracy(logits, batch)


_add("ragged: 29 examples by 4", "data", predict, _mean, _ragged)
_add("a microbatch without tokens", "data", predict, _masked_mean, _with_an_empty_microbatch, counts=_token_count)
_add("gradient of two arguments", "data", _two_networks, _mean_of_two, _two_arguments, arguments=2)
_add("aux: masked accuracy", "data", predict, _mean_and_accuracy, _labelled, special="aux")


# --- precision and programs -----------------------------------------------------------------------------------------

NARROW_EXAMPLES = 1024


def _narrow() -> Problem:
    """Parameters in bfloat16, 1024 microbatches of one example. The loss computes in the dtype of its data."""
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), _params())
    data = _examples(NARROW_EXAMPLES)
    batch = {"x": jnp.asarray(data["x"], jnp.float32), "y": jnp.asarray(data["y"] + 1, jnp.float32)}
    return Problem((params,), batch, size=1)


def _wide_predict(params: Any, batch: Any) -> jax.Array:
    return predict(jax.tree.map(lambda leaf: leaf.astype(batch["x"].dtype), params), batch)


@jax.jit
def _tied_network(table: jax.Array, out: jax.Array, words: jax.Array) -> jax.Array:
    return jnp.tanh(table[words]) @ out.T


def _tied(params: Any, batch: Any) -> jax.Array:
    return _tied_network(params["table"], params["table"], batch["words"])


def _tied_problem() -> Problem:
    generator = np.random.default_rng(10)
    batch = {"words": generator.integers(0, 9, EXAMPLES), "label": generator.integers(0, 9, EXAMPLES)}
    return Problem(({"table": jnp.asarray(generator.normal(size=(9, 5)))},), _jax(batch))


def _cross_entropy(params: Any, logits: Any, batch: Any, counts: Any) -> jax.Array:
    return jnp.sum(_nll(logits, batch)) / counts["examples"]


def _layers(params: Any, batch: Any) -> jax.Array:
    """Three layers in `lax.scan`, over two stacked leaves."""

    def layer(hidden: jax.Array, block: Any) -> tuple[jax.Array, None]:
        return hidden + jnp.tanh(hidden @ block["w"] + block["b"]), None

    return jax.lax.scan(layer, batch["x"], params["layers"])[0] @ params["v"]


def _layers_problem() -> Problem:
    layers = {"w": _normal(11, 3, FEATURES, FEATURES) / 2, "b": _normal(12, 3, FEATURES) / 2}
    return Problem((_jax({"layers": layers, "v": _normal(13, FEATURES, CLASSES)}),), _jax(_examples()))


def _mesh_problem() -> Problem:
    return dataclasses.replace(_tokens(), size=8)


_PROGRAMS = "precision and programs"
# bfloat16 has eight significant bits, so that a rounded number is off by at most 2^-9 of itself; the gradient of a
# microbatch is rounded, and so is the result.
_HALF_UNITS = 2 * 2.0**-9
_add("bfloat16, 1024 microbatches", _PROGRAMS, _wide_predict, _mean, _narrow, special="narrow", tolerance=_HALF_UNITS)
_add("tied weights in a jitted loss", _PROGRAMS, _tied, _cross_entropy, _tied_problem)
_add("layers in lax.scan", _PROGRAMS, _layers, _mean, _layers_problem)
_add("masked mean on a mesh of 4", _PROGRAMS, predict, _masked_mean, _mesh_problem, counts=_token_count, special="mesh")
