"""A loop over the keys of a flat dict.

caught by: run
says: a nested tree
"""


def weighted_sum(trees, weights):
    """Right for {"w": ..., "b": ...}, and for nothing else."""
    return {name: sum(weight * tree[name] for weight, tree in zip(weights, trees, strict=True)) for name in trees[0]}
