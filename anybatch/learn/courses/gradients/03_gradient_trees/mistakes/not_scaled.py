"""The weights are not used.

caught by: value
says: The trees are added up without their weights
"""

import jax


def weighted_sum(trees, weights):
    """Adds, and forgets to scale."""
    return jax.tree.map(lambda *leaves: sum(leaves), *trees)
