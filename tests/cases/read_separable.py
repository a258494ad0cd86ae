"""Losses that are sums over examples, and functions of sums: every usual way of reducing a batch to a number."""

import jax
import jax.numpy as jnp
from cases.read_case import Table, sentences

SEPARABLE = Table()


def logits_of(params, x):
    return jnp.tanh(x @ params["w"] + params["b"])


def predict(params, x):
    return logits_of(params, x) @ params["out"]


def cross_entropies(params, batch):
    log_probabilities = jax.nn.log_softmax(logits_of(params, batch["x"]) * params["out"])
    return -jnp.take_along_axis(log_probabilities, batch["label"][:, None], axis=1)[:, 0]


def squared_errors(params, batch):
    return (predict(params, batch["x"]) - batch["y"]) ** 2


# Sums and means.


@SEPARABLE.case(passes=1)
def total(params, batch):
    return jnp.sum(squared_errors(params, batch))


@SEPARABLE.case(passes=1)
def mean(params, batch):
    return jnp.mean(cross_entropies(params, batch))


@SEPARABLE.case(passes=1)
def mean_over_every_axis(params, batch):
    return jnp.mean((logits_of(params, batch["x"]) - batch["y"][:, None]) ** 2)


@SEPARABLE.case(passes=1)
def divided_by_the_length(params, batch):
    return squared_errors(params, batch).sum() / batch["x"].shape[0]


@SEPARABLE.case(passes=1)
def per_example_function(params, batch):
    def of_one(x, y):
        return (jnp.tanh(x @ params["w"] + params["b"]) @ params["out"] - y) ** 2

    return jax.vmap(of_one)(batch["x"], batch["y"]).mean()


@SEPARABLE.case(passes=1)
def dot_with_ones(params, batch):
    losses = squared_errors(params, batch)
    return losses @ jnp.ones(losses.shape[0]) / losses.shape[0]


@SEPARABLE.case(passes=1)
def norm_of_residuals_squared(params, batch):
    residuals = predict(params, batch["x"]) - batch["y"]
    return 0.5 * jnp.vdot(residuals, residuals)


# Masks, weights, tokens.


@SEPARABLE.case(passes=1)
def masked_mean(params, batch):
    return jnp.sum(cross_entropies(params, batch) * batch["mask"]) / jnp.sum(batch["mask"])


@SEPARABLE.case(passes=1)
def masked_mean_by_where(params, batch):
    return jnp.mean(squared_errors(params, batch), where=batch["mask"])


@SEPARABLE.case(passes=1)
def masked_mean_that_cannot_divide_by_zero(params, batch):
    mask = batch["mask"].astype(jnp.float64)
    return jnp.sum(squared_errors(params, batch) * mask) / jnp.maximum(mask.sum(), 1.0)


@SEPARABLE.case(passes=1)
def weighted_mean(params, batch):
    return jnp.sum(squared_errors(params, batch) * batch["weight"]) / jnp.sum(batch["weight"])


@SEPARABLE.case(passes=1)
def weights_normalised_first(params, batch):
    weights = batch["weight"] / batch["weight"].sum()
    return jnp.sum(squared_errors(params, batch) * weights)


@SEPARABLE.case(passes=1)
def numpy_average(params, batch):
    return jnp.average(squared_errors(params, batch), weights=batch["weight"])


@SEPARABLE.case(passes=2)
def weights_of_the_params(params, batch):
    weights = jax.nn.softplus(batch["x"] @ params["w"][:, 0])
    return jnp.sum(squared_errors(params, batch) * weights) / jnp.sum(weights)


@SEPARABLE.case(passes=2)
def softmax_weights(params, batch):
    losses = squared_errors(params, batch)
    return jnp.sum(jax.lax.stop_gradient(jax.nn.softmax(losses)) * losses)


def token_losses(params, batch):
    hidden = jnp.tanh(params["embedding"][batch["tokens"][:, :-1]] @ params["mix"])
    log_probabilities = jax.nn.log_softmax(hidden @ params["embedding"].T)
    losses = -jnp.take_along_axis(log_probabilities, batch["tokens"][:, 1:, None], axis=-1)[..., 0]
    return losses, batch["mask"][:, 1:]


@SEPARABLE.case(passes=1, make=sentences)
def token_mean(params, batch):
    losses, mask = token_losses(params, batch)
    return jnp.where(mask, losses, 0.0).sum() / mask.sum()


@SEPARABLE.case(passes=1, make=sentences)
def token_mean_of_every_sentence(params, batch):
    losses, mask = token_losses(params, batch)
    return jnp.mean((losses * mask).sum(axis=1) / jnp.maximum(mask.sum(axis=1), 1))


@SEPARABLE.case(passes=1, make=sentences)
def perplexity(params, batch):
    losses, mask = token_losses(params, batch)
    return jnp.exp(jnp.sum(losses * mask) / jnp.sum(mask))


@SEPARABLE.case(passes=1, make=sentences)
def tokens_flattened(params, batch):
    """(N * T, V), as cross entropies are often fed."""
    hidden = params["embedding"][batch["tokens"]] @ params["mix"]
    logits = (hidden @ params["embedding"].T).reshape(-1, 7)
    labels = jnp.roll(batch["tokens"], -1, axis=1).reshape(-1)
    losses = -jax.nn.log_softmax(logits)[jnp.arange(labels.shape[0]), labels]
    mask = batch["mask"].reshape(-1)
    return jnp.sum(losses * mask) / jnp.sum(mask)


@SEPARABLE.case(passes=1, make=sentences)
def time_first(params, batch):
    """(T, N, d), as recurrent models like it."""
    hidden = jnp.cumsum(params["embedding"][batch["tokens"].T], axis=0)
    losses = jnp.sum(jnp.tanh(hidden @ params["mix"]) ** 2, axis=-1)
    return jnp.sum(losses * batch["mask"].T) / batch["mask"].sum()


@SEPARABLE.case(passes=1, make=sentences)
def time_first_and_flattened(params, batch):
    """(T * N, d): the examples are the inner part of the merged axis."""
    hidden = params["embedding"][batch["tokens"].T.reshape(-1)]
    losses = jnp.sum(jnp.sin(hidden @ params["mix"]), axis=-1)
    return jnp.mean(losses.reshape(5, -1).sum(axis=0) ** 2)


# Several terms, and functions of sums.


@SEPARABLE.case(passes=1)
def several_terms(params, batch):
    """Every term has its own denominator."""
    classes = jnp.sum(cross_entropies(params, batch) * batch["mask"]) / batch["mask"].sum()
    regression = jnp.sum(squared_errors(params, batch) * batch["weight"]) / batch["weight"].sum()
    smoothness = jnp.abs(logits_of(params, batch["x"])).mean()
    return classes + 0.3 * regression - 0.1 * smoothness


@SEPARABLE.case(passes=1)
def mean_and_regulariser(params, batch):
    penalty = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
    return jnp.mean(squared_errors(params, batch)) + 0.01 * penalty


@SEPARABLE.case(passes=1)
def learned_balance(params, batch):
    """Homoscedastic uncertainty: the scale of a term is a parameter."""
    log_variance = params["b"][0]
    return jnp.exp(-log_variance) * jnp.mean(squared_errors(params, batch)) + log_variance


@SEPARABLE.case(passes=1)
def root_mean_square(params, batch):
    return jnp.sqrt(jnp.mean(squared_errors(params, batch)))


@SEPARABLE.case(passes=1)
def log_mean_exp(params, batch):
    return jnp.log(jnp.mean(jnp.exp(squared_errors(params, batch))))


@SEPARABLE.case(passes=2)
def log_sum_exp(params, batch):
    """`logsumexp` subtracts the largest of the batch first."""
    losses = squared_errors(params, batch)
    return jax.nn.logsumexp(losses) - jnp.log(losses.shape[0])


@SEPARABLE.case(passes=2)
def likelihood_of_all_examples(params, batch):
    """The product that a mean of logarithms stands for, written as it is in books."""
    return -jnp.log(jnp.prod(jax.nn.sigmoid(predict(params, batch["x"]) * batch["y"])))


@SEPARABLE.case(passes=1)
def flooded(params, batch):
    loss = jnp.mean(squared_errors(params, batch))
    return jnp.abs(loss - 0.7) + 0.7


@SEPARABLE.case(passes=2)
def product_of_batch_means(params, batch):
    """The balancing loss of mixtures of experts: share of the examples times mean probability."""
    probabilities = jax.nn.softmax(batch["x"] @ params["w"])
    chosen = jax.nn.one_hot(jnp.argmax(probabilities, axis=-1), 3)
    balance = 3 * jnp.sum(chosen.mean(axis=0) * probabilities.mean(axis=0))
    return jnp.mean(squared_errors(params, batch)) + 0.1 * balance


@SEPARABLE.case(passes=2)
def dice(params, batch):
    probabilities = jax.nn.sigmoid(logits_of(params, batch["x"]))
    target = jax.nn.one_hot(batch["label"], 3)
    overlap = jnp.sum(probabilities * target, axis=0)
    return 1 - jnp.mean((2 * overlap + 1) / (probabilities.sum(axis=0) + target.sum(axis=0) + 1))


@SEPARABLE.case(passes=2)
def pearson_correlation(params, batch):
    prediction = predict(params, batch["x"])
    a = prediction - prediction.mean()
    b = batch["y"] - batch["y"].mean()
    return -jnp.sum(a * b) / jnp.sqrt(jnp.sum(a**2) * jnp.sum(b**2))


@SEPARABLE.case(passes=1)
def r_squared(params, batch):
    """The denominator is of the data alone."""
    variation = jnp.sum((batch["y"] - batch["y"].mean()) ** 2)
    return jnp.sum(squared_errors(params, batch)) / variation - 1


@SEPARABLE.case(passes=1)
def inverse_of_a_sum(params, batch):
    return jnp.sum(params["w"] ** 2) / jnp.sum(jnp.exp(-(predict(params, batch["x"]) ** 2)))


@SEPARABLE.case(passes=2)
def sums_beside_parameters(params, batch):
    """One vector of means, parameters and a constant."""
    means = logits_of(params, batch["x"]).mean(axis=0)
    padded = jnp.pad(means, (1, 0), constant_values=0.5)
    return jax.nn.logsumexp(jnp.concatenate([padded, params["b"]]))


@SEPARABLE.case(passes=2)
def chosen_by_a_sum(params, batch):
    """The term that is larger in the whole batch, and a floor under it."""
    errors = predict(params, batch["x"]) - batch["y"]
    one, other = jnp.sum(errors**2), 2 * jnp.sum(jnp.abs(errors))
    return jnp.maximum(jnp.where(one > other, one, other), 0.1)
