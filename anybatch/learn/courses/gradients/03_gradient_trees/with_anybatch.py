"""A weighted sum of trees is the gradient of a loss that is linear in the parameters: <params, tree> for each tree.

The trees are then the batch, and anybatch takes a few at a time, however many there are.
"""

import jax
import jax.numpy as jnp

import anybatch as ab


def loss(params, batch):
    """The sum over i of weights[i] * <params, trees[i]>."""
    trees, weights = batch
    products = jax.tree.map(lambda leaf, rows: jnp.tensordot(rows, leaf, leaf.ndim), params, trees)
    return weights @ sum(jax.tree.leaves(products))


def weighted_sum(trees, weights):
    """The sum over i of weights[i] * trees[i]."""
    zeros = jax.tree.map(jnp.zeros_like, trees[0])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
    return ab.grad(loss, microbatch_size=2)(zeros, (stacked, weights))
