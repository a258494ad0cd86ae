"""Losses in which examples meet: contrastive losses, batch statistics, sorting, ranking, groups."""

import jax
import jax.numpy as jnp
import numpy as np
from cases.read_case import Table, labelled_rows, normal, views
from cases.read_separable import logits_of, predict, squared_errors

COUPLED = Table()


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def encode(params, batch):
    return unit(jnp.tanh(batch["image"] @ params["image"])), unit(jnp.tanh(batch["text"] @ params["text"]))


# Contrastive: every example is compared with every other.


@COUPLED.case(passes=2, make=views)
def clip(params, batch):
    image, text = encode(params, batch)
    logits = jnp.exp(params["scale"]) * image @ text.T
    labels = jnp.arange(logits.shape[0])
    by_image = -jax.nn.log_softmax(logits, axis=1)[labels, labels].mean()
    by_text = -jax.nn.log_softmax(logits, axis=0)[labels, labels].mean()
    return (by_image + by_text) / 2


@COUPLED.case(passes=2, make=views)
def siglip(params, batch):
    image, text = encode(params, batch)
    logits = jnp.exp(params["scale"]) * image @ text.T - 0.5
    signs = 2 * jnp.eye(logits.shape[0]) - 1
    return -jnp.mean(jnp.sum(jax.nn.log_sigmoid(signs * logits), axis=-1))


@COUPLED.case(passes=2, make=views)
def two_towers_with_a_diagonal(params, batch):
    image, text = encode(params, batch)
    logits = image @ text.T
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - jnp.diag(logits)) + 0.1 * jnp.trace(logits) ** 2


@COUPLED.case(passes=2, make=views)
def diagonal_of_fewer_columns(params, batch):
    """The first three examples alone."""
    image, _ = encode(params, batch)
    return jnp.mean(jnp.diag(image) ** 2) + jnp.mean(image**4)


@COUPLED.case(passes=2, make=views)
def nt_xent(params, batch):
    """Two views in one batch of 2N."""
    both = jnp.concatenate(encode(params, batch))
    num_rows = both.shape[0]
    similarities = both @ both.T / 0.5
    similarities = jnp.where(jnp.eye(num_rows, dtype=bool), -1e9, similarities)
    partner = (jnp.arange(num_rows) + num_rows // 2) % num_rows
    return -jnp.mean(jax.nn.log_softmax(similarities)[jnp.arange(num_rows), partner])


@COUPLED.case(passes=2, make=views)
def encoded_together(params, batch):
    """The two views go through the same network as one batch of 2N, as SimCLR does it."""
    x = jnp.concatenate([batch["image"], batch["image"][:, ::-1] * 1.1])
    first, second = jnp.split(unit(jnp.tanh(x @ params["image"])), 2)
    logits = first @ second.T
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - jnp.diagonal(logits))


@COUPLED.case(passes=2, make=views)
def info_nce(params, batch):
    queries, keys = encode(params, batch)
    logits = jnp.einsum("nd,md->nm", queries, keys) / 0.1
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.sum(queries * keys, axis=-1) / 0.1)


@COUPLED.case(passes=2)
def triplets(params, batch):
    """All triplets: an anchor, one of its class, one of another."""
    hidden = logits_of(params, batch["x"])
    distances = jnp.sum((hidden[:, None] - hidden[None]) ** 2, axis=-1)
    same = batch["label"][:, None] == batch["label"][None]
    margins = jax.nn.relu(distances[:, :, None] - distances[:, None, :] + 0.2)
    wanted = same[:, :, None] & ~same[:, None, :]
    return jnp.sum(margins * wanted) / jnp.maximum(wanted.sum(), 1)


@COUPLED.case(passes=2)
def supervised_contrastive(params, batch):
    hidden = unit(logits_of(params, batch["x"]))
    others = 1.0 - jnp.eye(hidden.shape[0])
    same = (batch["label"][:, None] == batch["label"][None]) * others
    scores = jnp.exp(hidden @ hidden.T) * others
    log_shares = jnp.log(scores + jnp.eye(hidden.shape[0])) - jnp.log(scores.sum(axis=1, keepdims=True))
    return -jnp.mean(jnp.sum(log_shares * same, axis=1) / jnp.maximum(same.sum(axis=1), 1))


@COUPLED.case(passes=2)
def maximum_mean_discrepancy(params, batch):
    hidden = logits_of(params, batch["x"])
    kernel = jnp.exp(-jnp.sum((hidden[:, None] - hidden[None]) ** 2, axis=-1))
    return jnp.mean(kernel * jnp.outer(batch["y"], batch["y"]))


@COUPLED.case(passes=2)
def pairwise_ranking(params, batch):
    scores = predict(params, batch["x"])
    better = batch["y"][:, None] > batch["y"][None]
    return jnp.sum(jnp.where(better, jax.nn.softplus(scores[None] - scores[:, None]), 0.0)) / better.sum()


@COUPLED.case(passes=2)
def attention_over_the_batch(params, batch):
    hidden = logits_of(params, batch["x"])
    shares = jax.nn.softmax(hidden @ hidden.T)
    return jnp.mean((shares @ batch["y"] - batch["y"]) ** 2)


# Statistics of the batch.


@COUPLED.case(passes=2, make=views)
def barlow_twins(params, batch):
    first, second = batch["image"] @ params["image"], jnp.tanh(batch["text"] @ params["text"])
    first, second = ((z - z.mean(axis=0)) / z.std(axis=0) for z in (first, second))
    correlation = first.T @ second / first.shape[0]
    off_diagonal = correlation * (1 - jnp.eye(3))
    return jnp.sum((jnp.diagonal(correlation) - 1) ** 2) + 0.1 * jnp.sum(off_diagonal**2)


@COUPLED.case(passes=2, make=views)
def vicreg(params, batch):
    first, second = batch["image"] @ params["image"], jnp.tanh(batch["text"] @ params["text"])

    def spread(z):
        z = z - z.mean(axis=0)
        covariance = z.T @ z / (z.shape[0] - 1)
        hinge = jnp.mean(jax.nn.relu(1.5 - jnp.sqrt(z.var(axis=0) + 1e-4)))
        return hinge + jnp.sum(covariance**2) - jnp.sum(jnp.diagonal(covariance) ** 2)

    return jnp.mean((first - second) ** 2) + spread(first) + spread(second)


@COUPLED.case(passes=2)
def batch_norm_by_hand(params, batch):
    hidden = batch["x"] @ params["w"]
    hidden = (hidden - hidden.mean(axis=0)) / jnp.sqrt(hidden.var(axis=0) + 1e-5)
    prediction = jax.nn.relu(hidden + params["b"]) @ params["out"]
    return jnp.mean((prediction - batch["y"]) ** 2)


@COUPLED.case(passes=2)
def whitened(params, batch):
    hidden = logits_of(params, batch["x"])
    hidden = hidden - hidden.mean(axis=0)
    covariance = hidden.T @ hidden / hidden.shape[0] + 0.1 * jnp.eye(3)
    _, log_volume = jnp.linalg.slogdet(covariance)
    return -log_volume + jnp.mean(jnp.linalg.solve(covariance, hidden.T) ** 2)


@COUPLED.case(passes=2)
def variance_across_the_batch(params, batch):
    return jnp.mean(squared_errors(params, batch)) + 0.5 * jnp.var(squared_errors(params, batch))


@COUPLED.case(passes=1)
def inputs_normalised(params, batch):
    """Statistics of the data only: nothing of the model goes through them."""
    x = (batch["x"] - batch["x"].mean(axis=0)) / (batch["x"].std(axis=0) + 1e-6)
    return jnp.mean((predict(params, x) - batch["y"]) ** 2)


@COUPLED.case(passes=1)
def labels_replaced_by_their_ranks(params, batch):
    ranks = jnp.argsort(jnp.argsort(batch["y"]))
    target = jax.scipy.special.ndtri((ranks + 0.5) / batch["y"].shape[0])
    return jnp.mean((predict(params, batch["x"]) - target) ** 2)


@COUPLED.case(passes=1)
def advantages_normalised(params, batch):
    """A policy gradient: rewards less their mean, over their deviation."""
    advantages = (batch["y"] - batch["y"].mean()) / (batch["y"].std() + 1e-8)
    log_probabilities = jax.nn.log_softmax(logits_of(params, batch["x"]))
    chosen = jnp.take_along_axis(log_probabilities, batch["label"][:, None], axis=1)[:, 0]
    return -jnp.mean(chosen * advantages)


# Order: sorting, ranking, the worst of the batch.


@COUPLED.case(passes=2)
def hard_example_mining(params, batch):
    hardest, _ = jax.lax.top_k(squared_errors(params, batch), 4)
    return jnp.mean(hardest)


@COUPLED.case(passes=2)
def trimmed_mean(params, batch):
    return jnp.mean(jnp.sort(squared_errors(params, batch))[2:-2])


@COUPLED.case(passes=2)
def conditional_value_at_risk(params, batch):
    losses = squared_errors(params, batch)
    threshold = jax.lax.stop_gradient(jnp.quantile(losses, 0.7))
    return threshold + jnp.mean(jax.nn.relu(losses - threshold)) / 0.3


@COUPLED.case(passes=1)
def conditional_value_at_risk_with_a_learned_threshold(params, batch):
    threshold = params["b"][0]
    return threshold + jnp.mean(jax.nn.relu(squared_errors(params, batch) - threshold)) / 0.3


@COUPLED.case(passes=2)
def median(params, batch):
    return jnp.median(squared_errors(params, batch))


@COUPLED.case(passes=2)
def worst_example(params, batch):
    return jnp.max(squared_errors(params, batch)) + 0.1 * jnp.min(squared_errors(params, batch))


@COUPLED.case(passes=2)
def worst_example_by_its_index(params, batch):
    losses = squared_errors(params, batch)
    return losses[jnp.argmax(losses)]


@COUPLED.case(passes=2)
def cox_partial_likelihood(params, batch):
    """Survival: every event against everyone still at risk, by a cumulative sum in the order of time."""
    order = jnp.argsort(-batch["y"])
    risk = predict(params, batch["x"])[order]
    event = batch["mask"][order]
    at_risk = jax.lax.cumlogsumexp(risk)
    return -jnp.sum((risk - at_risk) * event) / jnp.sum(event)


@COUPLED.case(passes=2)
def list_wise_ranking(params, batch):
    scores = predict(params, batch["x"])
    return -jnp.sum(jax.nn.softmax(batch["y"]) * jax.nn.log_softmax(scores))


@COUPLED.case(passes=2)
def neighbours_in_the_batch(params, batch):
    prediction = predict(params, batch["x"])
    return jnp.mean((prediction[1:] - prediction[:-1]) ** 2) + jnp.mean(jnp.cumsum(prediction))


# Groups that span examples.


@COUPLED.case(passes=1)
def sums_of_groups(params, batch):
    sums = jax.ops.segment_sum(squared_errors(params, batch), batch["label"], num_segments=3)
    counts = jax.ops.segment_sum(jnp.ones_like(batch["y"]), batch["label"], num_segments=3)
    return jnp.mean(sums / jnp.maximum(counts, 1.0))


@COUPLED.case(passes=2)
def group_robust(params, batch):
    """Group DRO: the worst group counts most."""
    losses = squared_errors(params, batch)
    member = jax.nn.one_hot(batch["label"], 3)
    of_groups = losses @ member / jnp.maximum(member.sum(axis=0), 1)
    weights = jax.lax.stop_gradient(jax.nn.softmax(3 * of_groups))
    return jnp.sum(weights * of_groups)


@COUPLED.case(passes=2)
def centres_of_classes(params, batch):
    hidden = logits_of(params, batch["x"])
    counts = jnp.zeros(3).at[batch["label"]].add(1.0)
    centres = jnp.zeros((3, 3)).at[batch["label"]].add(hidden) / jnp.maximum(counts, 1.0)[:, None]
    return jnp.mean(jnp.sum((hidden - centres[batch["label"]]) ** 2, axis=1))


def bags(num_examples):
    params, batch = labelled_rows(num_examples)
    return params, {**batch, "bag": np.arange(num_examples) // 5}


@COUPLED.case(passes=2, make=bags)
def multiple_instances(params, batch):
    """The largest score of a bag stands for the bag."""
    scores = jax.ops.segment_max(predict(params, batch["x"]), batch["bag"], num_segments=3)
    return jnp.mean(jax.nn.softplus(-scores))


def graph(num_nodes):
    generator = np.random.default_rng(num_nodes)
    params = {"message": normal(generator, 4, 4), "out": normal(generator, 4)}
    nodes = {"x": normal(generator, num_nodes, 4), "neighbour": generator.integers(0, num_nodes, num_nodes)}
    return params, {**nodes, "y": normal(generator, num_nodes)}


@COUPLED.case(passes=2, make=graph)
def message_passing(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["message"])
    received = jax.ops.segment_sum(hidden, batch["neighbour"], num_segments=hidden.shape[0])
    hidden = jnp.tanh((hidden + received[batch["neighbour"]]) @ params["message"])
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)
