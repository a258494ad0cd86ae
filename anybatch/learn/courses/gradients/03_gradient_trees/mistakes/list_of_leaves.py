"""The leaves, without their tree.

caught by: structure
says: in a flat list
"""

import jax


def weighted_sum(trees, weights):
    """The tree is taken apart, and not put together again."""
    columns = zip(*(jax.tree.leaves(tree) for tree in trees), strict=True)
    return [sum(weight * leaf for weight, leaf in zip(weights, column, strict=True)) for column in columns]
