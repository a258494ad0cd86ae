"""Assigned in the loop, and not added.

caught by: value
says: Only the last tree is left
"""

import jax


def weighted_sum(trees, weights):
    """The total is overwritten in every iteration."""
    for weight, tree in zip(weights, trees, strict=True):
        total = jax.tree.map(lambda leaf, weight=weight: weight * leaf, tree)
    return total
