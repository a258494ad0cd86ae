"""A weight for one leaf.

caught by: value
says: Only the first leaf is scaled
"""

import jax


def weighted_sum(trees, weights):
    """Scales leaves[0] where leaves are those of a tree, not one of each."""
    total = [0] * len(jax.tree.leaves(trees[0]))
    for weight, tree in zip(weights, trees, strict=True):
        leaves = jax.tree.leaves(tree)
        leaves[0] = weight * leaves[0]
        total = [one + other for one, other in zip(total, leaves, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(trees[0]), total)
