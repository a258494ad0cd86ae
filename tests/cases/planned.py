"""Losses to plan for: large enough that memory matters, small enough to compile in a second."""

import jax
import jax.numpy as jnp
import numpy as np


def network(params, batch):
    hidden = batch["x"]
    for weights in params["layers"]:
        hidden = jnp.tanh(hidden @ weights)
    return jnp.mean((hidden - batch["y"]) ** 2)


def scanned(params, batch):
    hidden, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch["x"], params["layers"])
    return jnp.mean((hidden - batch["y"]) ** 2)


def contrastive(params, batch):
    z = jnp.tanh(batch["x"] @ params["layers"][0])
    for weights in params["layers"][1:]:
        z = jnp.tanh(z @ weights)
    logits = z[:, :8] @ jnp.tanh(batch["y"] @ params["layers"][0])[:, :8].T
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - jnp.diagonal(logits))


def elementwise(params, batch):
    """Few products and much between them: where computing twice pays."""

    def layer(hidden, weights):
        hidden = hidden @ weights
        for _ in range(4):
            hidden = jnp.sin(hidden) * jnp.cos(hidden)
        return hidden, None

    hidden, _ = jax.lax.scan(layer, batch["x"], params["layers"])
    return jnp.mean((hidden - batch["y"]) ** 2)


def totals(params, batch):
    losses = jnp.sum((jnp.tanh(batch["x"] @ params["layers"][0]) - batch["y"]) ** 2, axis=1)
    return jnp.sum(losses), jnp.float32(losses.size)


def problem(examples, width=64, depth=4):
    generator = np.random.default_rng(examples)
    params = {"layers": generator.standard_normal((depth, width, width)).astype(np.float32) / width**0.5}
    batch = {name: generator.standard_normal((examples, width)).astype(np.float32) for name in ("x", "y")}
    return jax.tree.map(jnp.asarray, params), jax.tree.map(jnp.asarray, batch)


def total_bytes(compiled):
    """What XLA says of a compiled program, in all."""
    analysis = compiled.memory_analysis()
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.argument_size_in_bytes + outputs + analysis.temp_size_in_bytes
