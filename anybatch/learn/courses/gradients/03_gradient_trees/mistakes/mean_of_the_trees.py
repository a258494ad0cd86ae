"""Divided by the number of trees.

caught by: value
says: divided by the number of trees
"""

import jax


def weighted_sum(trees, weights):
    """A mean, as one would take it of microbatches."""

    def average(*leaves):
        return sum(weight * leaf for weight, leaf in zip(weights, leaves, strict=True)) / len(leaves)

    return jax.tree.map(average, *trees)
