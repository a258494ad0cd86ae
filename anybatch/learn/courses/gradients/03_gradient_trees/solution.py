"""jax.tree.map goes through all trees together and passes the leaves at the same place, so the nesting never matters.

Its result has the structure of the first tree, including None. The same code works for a dict of two arrays and for a
transformer.
"""

import jax


def weighted_sum(trees, weights):
    """The sum over i of weights[i] * trees[i]."""

    def add_up(*leaves):
        return sum(weight * leaf for weight, leaf in zip(weights, leaves, strict=True))

    return jax.tree.map(add_up, *trees)
