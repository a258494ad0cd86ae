"""Losses of other fields: graphs, contrastive learning, reinforcement learning, probabilistic regression."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from cases.zoo_arrays import generator, params_of
from jax.scipy.linalg import solve_triangular

NUM_NODES, NUM_EDGES = 6, 8


def padded_graphs(num_examples):
    """Graphs of unequal size. The last node is padding, and so is every edge from it to itself."""
    random = generator()
    num_nodes = random.integers(2, NUM_NODES, (num_examples, 1))
    is_edge = np.arange(NUM_EDGES)[None, :] < random.integers(3, NUM_EDGES + 1, (num_examples, 1))
    ends = random.integers(0, num_nodes, (2, num_examples, NUM_EDGES))
    return {
        "nodes": random.normal(size=(num_examples, NUM_NODES, 4)),
        "is_node": np.arange(NUM_NODES)[None, :] < num_nodes,
        "senders": np.where(is_edge, ends[0], NUM_NODES - 1),
        "receivers": np.where(is_edge, ends[1], NUM_NODES - 1),
        "target": random.normal(size=num_examples),
    }


class GraphNetwork(nn.Module):
    """One graph: messages along its edges, weighted by an attention over those that a node receives; then a mean."""

    @nn.compact
    def __call__(self, graph):
        x = nn.Dense(6)(graph["nodes"])
        senders, receivers = graph["senders"], graph["receivers"]
        for _ in range(2):
            ends = jnp.concatenate([x[senders], x[receivers]], axis=-1)
            messages = nn.relu(nn.Dense(6)(ends))
            scores = nn.leaky_relu(nn.Dense(1, use_bias=False)(ends))[:, 0]
            highest = jax.ops.segment_max(jax.lax.stop_gradient(scores), receivers, num_segments=NUM_NODES)
            scores = jnp.exp(scores - highest[receivers])
            totals = jax.ops.segment_sum(scores, receivers, num_segments=NUM_NODES)
            received = jax.ops.segment_sum(messages * scores[:, None], receivers, num_segments=NUM_NODES)
            received = received / jnp.maximum(totals, 1e-6)[:, None]
            x = nn.LayerNorm()(x + nn.Dense(6)(received))
        # A mean: compiled by XLA, JAX's gradient of a maximum can miss the element that it came from.
        pooled = jnp.mean(x, axis=0, where=graph["is_node"][:, None])
        return nn.Dense(1)(pooled)[0]


def graph_network(num_examples):
    """The model takes one graph and is mapped over the batch; the loss is the root of a mean square."""
    model = GraphNetwork()
    batch = padded_graphs(num_examples)

    def loss(params, batch):
        predicted = jax.vmap(lambda graph: model.apply({"params": params}, graph))(batch)
        error = jnp.sqrt(jnp.mean(jnp.square(predicted - batch["target"])))
        return error, {"predicted": predicted, "worst": jnp.max(jnp.abs(predicted - batch["target"]))}

    first = jax.tree.map(lambda leaf: leaf[0], batch)
    return loss, params_of(model, first), batch, ()


class Tower(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4)(nn.gelu(nn.Dense(8)(x)))
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


class TwoTowers(nn.Module):
    def setup(self):
        self.image, self.text = Tower(), Tower()
        self.embed = nn.Embed(11, 6)
        self.log_scale = self.param("log_scale", nn.initializers.constant(jnp.log(1 / 0.07)), ())

    def __call__(self, images, ids):
        images = self.image(images.reshape(images.shape[0], -1))
        return images, self.text(self.embed(ids).mean(axis=1)), jnp.exp(self.log_scale)


def two_towers(num_examples):
    """Contrastive: every image against every text of the batch, in both directions."""
    model = TwoTowers()
    random = generator()
    images = random.normal(size=(num_examples, 2, 2, 3))
    ids = random.integers(0, 11, (num_examples, 5))

    def loss(params, batch):
        images, texts, scale = model.apply({"params": params}, *batch)
        logits = scale * images @ texts.T
        labels = jnp.arange(logits.shape[0])
        by_image = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        by_text = optax.softmax_cross_entropy_with_integer_labels(logits.T, labels)
        accuracy = jnp.mean(jnp.argmax(logits, axis=1) == labels)
        return (by_image.mean() + by_text.mean()) / 2, {"accuracy": accuracy, "images": images, "logits": logits}

    return loss, params_of(model, images, ids), (images, ids), ()


class QNetwork(nn.Module):
    """Values of the actions, from a value of the state and advantages that have mean zero."""

    num_actions: int = 3

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(8)(x))
        advantages = nn.Dense(self.num_actions)(x)
        return nn.Dense(1)(x) + advantages - jnp.mean(advantages, axis=-1, keepdims=True)


def q_learning(num_examples):
    """Double Q-learning: gathered actions, a target network beside the batch, importance weights, new priorities."""
    model = QNetwork()
    random = generator()
    batch = {
        "state": random.normal(size=(num_examples, 4)),
        "next_state": random.normal(size=(num_examples, 4)),
        "action": random.integers(0, 3, num_examples),
        "reward": random.normal(size=num_examples),
        "done": random.uniform(size=num_examples) < 0.2,
        "weight": random.uniform(0.2, 1.0, num_examples),
    }

    def loss(params, batch, target_params):
        rows = jnp.arange(batch["action"].shape[0])
        values = model.apply({"params": params}, batch["state"])[rows, batch["action"]]
        best = jnp.argmax(model.apply({"params": params}, batch["next_state"]), axis=-1)
        following = model.apply({"params": target_params}, batch["next_state"])[rows, best]
        target = batch["reward"] + 0.99 * jnp.where(batch["done"], 0.0, following)
        errors = jax.lax.stop_gradient(target) - values
        weights = batch["weight"] / jnp.max(batch["weight"])
        return jnp.mean(weights * optax.huber_loss(errors)), {"priorities": jnp.abs(errors)}

    return loss, params_of(model, batch["state"]), batch, (params_of(model, batch["state"], seed=2),)


class ActorCritic(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(8)(x))
        return nn.log_softmax(nn.Dense(3)(x)), nn.Dense(1)(x)[:, 0]


def decisions(num_examples):
    random = generator()
    return {
        "state": random.normal(size=(num_examples, 4)),
        "action": random.integers(0, 3, num_examples),
        "log_probability": np.log(random.uniform(0.2, 0.5, num_examples)),
        "advantage": random.normal(size=num_examples),
        "return": random.normal(size=num_examples),
    }


def proximal_policy(num_examples):
    """Advantages are normalised over the batch, but they are data: their mean is known before any gradient."""
    model = ActorCritic()
    batch = decisions(num_examples)

    def loss(params, batch):
        log_probabilities, values = model.apply({"params": params}, batch["state"])
        chosen = jnp.take_along_axis(log_probabilities, batch["action"][:, None], axis=1)[:, 0]
        ratio = jnp.exp(chosen - batch["log_probability"])
        advantage = (batch["advantage"] - batch["advantage"].mean()) / (batch["advantage"].std() + 1e-8)
        surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
        of_values = 0.5 * jnp.square(values - batch["return"]).mean()
        entropy = -jnp.sum(jnp.exp(log_probabilities) * log_probabilities, axis=-1).mean()
        aux = {"entropy": entropy, "clipped": jnp.mean(jnp.abs(ratio - 1) > 0.2), "ratio": ratio}
        return -surrogate.mean() + 0.5 * of_values - 0.01 * entropy, aux

    return loss, params_of(model, batch["state"]), batch, ()


def advantage_actor_critic(num_examples):
    """Advantages come from the critic and are normalised over the batch: no gradient goes there, but values do."""
    model = ActorCritic()
    batch = decisions(num_examples)

    def loss(params, batch):
        log_probabilities, values = model.apply({"params": params}, batch["state"])
        chosen = log_probabilities[jnp.arange(len(values)), batch["action"]]
        advantage = jax.lax.stop_gradient(batch["return"] - values)
        advantage = (advantage - jnp.mean(advantage)) / (jnp.std(advantage) + 1e-8)
        return -jnp.mean(chosen * advantage) + 0.5 * jnp.mean(jnp.square(batch["return"] - values))

    return loss, params_of(model, batch["state"]), batch, ()


class GaussianRegression(nn.Module):
    """A mean and a full covariance for each example."""

    size: int = 3

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(8)(x))
        factor = nn.Dense(self.size * self.size)(x).reshape(-1, self.size, self.size)
        covariance = factor @ jnp.swapaxes(factor, -1, -2) + 0.5 * jnp.eye(self.size, dtype=x.dtype)
        return nn.Dense(self.size)(x), covariance


def negative_log_likelihood(mean, covariance, target):
    triangle = jnp.linalg.cholesky(covariance)
    whitened = solve_triangular(triangle, target - mean, lower=True)
    log_determinant = 2 * jnp.sum(jnp.log(jnp.diagonal(triangle)))
    return 0.5 * (whitened @ whitened + log_determinant + mean.size * jnp.log(2 * jnp.pi))


def gaussian_likelihood(num_examples):
    """Linear algebra for each example: Cholesky and triangular solves mapped, a solve and a determinant batched."""
    model = GaussianRegression()
    random = generator()
    inputs, targets = random.normal(size=(num_examples, 4)), random.normal(size=(num_examples, 3))

    def loss(params, batch):
        inputs, targets = batch
        mean, covariance = model.apply({"params": params}, inputs)
        likelihood = jax.vmap(negative_log_likelihood)(mean, covariance, targets)
        steps = jnp.linalg.solve(covariance, (targets - mean)[:, :, None])[:, :, 0]
        _, log_determinant = jnp.linalg.slogdet(covariance)
        penalty = jnp.mean(jnp.sum(steps**2, axis=-1)) + jnp.mean(log_determinant**2)
        return likelihood.mean() + 0.1 * penalty, {"mean": mean, "log_determinant": log_determinant}

    return loss, params_of(model, inputs), (inputs, targets), ()
