"""Checks weighted sums of trees with random nestings, new for each check."""

import jax
import numpy as np

from anybatch.learn.check import Case, Check, Mistake, Same

SHAPES = ((), (3,), (2, 3), (2, 1, 2))
NAMES = ("bias", "conv", "dense", "embed", "head", "norm", "scale")


def cases(rng):
    """A flat dict first, for which a loop over its keys would work; then random nestings."""
    flat = {"b": np.zeros(3), "w": np.zeros((2, 3))}
    in_a_dict, in_anything = nested(rng, "dict"), nested(rng, rng.choice(["list", "tuple"]))
    return [
        *(Case(drawn(rng, flat, 3), "a flat dict, 3 trees") for _ in range(2)),
        Case(drawn(rng, in_a_dict, 4), f"a nested tree, {outline(in_a_dict)}, 4 trees"),
        Case(drawn(rng, in_anything, 1), f"a nested tree, {outline(in_anything)}, 1 tree"),
    ]


def nested(rng, kind):
    """A tree of five arrays and a None in nested containers; the outermost is of this kind."""
    leaves = [np.zeros(SHAPES[index]) for index in rng.integers(0, len(SHAPES), 5)] + [None]
    return contained(rng, [leaves[index] for index in rng.permutation(6)], kind)


def contained(rng, leaves, kind):
    """A container of this kind with two or three parts, each a leaf or a container of another kind."""
    ends = sorted(rng.choice(np.arange(1, len(leaves)), min(len(leaves) - 1, 2), replace=False))
    parts = [leaves[start:end] for start, end in zip([0, *ends], [*ends, len(leaves)], strict=True)]
    others = [other for other in ("dict", "list", "tuple") if other != kind]
    children = [part[0] if len(part) == 1 else contained(rng, part, rng.choice(others)) for part in parts]
    if kind == "dict":
        return dict(zip(sorted(rng.choice(NAMES, len(children), replace=False).tolist()), children, strict=True))
    return children if kind == "list" else tuple(children)


def outline(tree):
    """The nesting of a tree: {'a': [*, None], 'b': *}."""
    return str(jax.tree.structure(tree)).removeprefix("PyTreeDef(").removesuffix(")")


def drawn(rng, template, number):
    """Trees of random numbers like the template, and weights; none is 1, and some are negative."""

    def one():
        return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), template)

    weights = rng.uniform(1.5, 3.0, number) * np.where(np.arange(number) % 2, -0.5, 1)
    return [one() for _ in range(number)], weights.astype(np.float32)


def reference(trees, weights):
    """The weighted sum, leaf by leaf."""
    return jax.tree.map(lambda *leaves: sum(w * leaf for w, leaf in zip(weights, leaves, strict=True)), *trees)


def unscaled(trees, weights):
    """The sum without the weights."""
    return reference(trees, np.ones_like(weights))


def first_leaf_only(trees, weights):
    """The weights are applied only to the first leaf of each tree."""
    leaves, structure = jax.tree.flatten(unscaled(trees, weights))
    return jax.tree.unflatten(structure, [jax.tree.leaves(reference(trees, weights))[0], *leaves[1:]])


def last_tree(trees, weights):
    """Every tree replaces the one before."""
    return jax.tree.map(lambda leaf: weights[-1] * leaf, trees[-1])


def divided(by):
    """The right answer, divided by a function of the weights."""

    def answer(trees, weights):
        return jax.tree.map(lambda leaf: leaf / by(weights), reference(trees, weights))

    return answer


def raveled(trees, weights):
    """All numbers in one flat array."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(reference(trees, weights))])


MISTAKES = (
    Mistake(
        "not scaled",
        unscaled,
        "The trees are added up without their weights.\nMultiply each tree by its weight: weights[i] * trees[i].",
    ),
    Mistake(
        "the mean of the scaled trees",
        divided(len),
        lambda trees, weights: (
            f"The sum is divided by the number of trees, {len(trees)}.\n"
            "This exercise asks for the sum. A mean is a sum with weights 1/n."
        ),
    ),
    Mistake(
        "weights that add up to 1",
        divided(np.sum),
        "The sum is divided by the sum of the weights.\nUse the weights as they are.",
    ),
    Mistake(
        "only the first leaf scaled",
        first_leaf_only,
        "Only the first leaf is scaled; the others are added up without their weights.\n"
        "A weight applies to all leaves of a tree: scale inside the function that jax.tree.map calls for every leaf.",
    ),
    Mistake(
        "only the last tree",
        last_tree,
        "Only the last tree is left: each one replaced the one before.\nAdd them up.",
    ),
    Mistake(
        "one flat array",
        raveled,
        "The numbers are right, but they are in one flat array, without their names.\n"
        "An optimizer needs the structure of the parameters: unravel the array, or use jax.tree.map, which keeps the "
        "structure.",
    ),
    Mistake(
        "a list of leaves",
        lambda trees, weights: jax.tree.leaves(reference(trees, weights)),
        "The leaves are right, but they are in a flat list, without their names.\n"
        "Use jax.tree.map, which keeps the structure, or put it back with jax.tree.unflatten.",
    ),
)


def reordered(rng, args):
    """The trees in another order, each with its weight."""
    trees, weights = args
    order = rng.permutation(len(trees))
    return [trees[index] for index in order], weights[order]


check = Check(
    function="weighted_sum",
    parameters=("trees", "weights"),
    cases=cases,
    reference=reference,
    mistakes=MISTAKES,
    same=(
        Same(
            "the order of the trees, each with its weight",
            reordered,
            says="A sum does not depend on the order of its terms.",
        ),
    ),
)
