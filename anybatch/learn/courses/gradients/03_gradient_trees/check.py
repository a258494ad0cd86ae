"""Add and scale gradient trees: whatever their nesting, which is drawn anew for each check."""

import jax
import numpy as np

from anybatch.learn.check import Case, Check, Mistake, Same

SHAPES = ((), (3,), (2, 3), (2, 1, 2))
NAMES = ("bias", "conv", "dense", "embed", "head", "norm", "scale")


def cases(rng):
    """A flat dict first, for which a loop over its keys would do; then trees that nobody has seen before."""
    flat = {"b": np.zeros(3), "w": np.zeros((2, 3))}
    in_a_dict, in_anything = nested(rng, "dict"), nested(rng, rng.choice(["list", "tuple"]))
    return [
        *(Case(drawn(rng, flat, 3), "a flat dict, 3 trees") for _ in range(2)),
        Case(drawn(rng, in_a_dict, 4), f"a nested tree, {outline(in_a_dict)}, 4 trees"),
        Case(drawn(rng, in_anything, 1), f"a nested tree, {outline(in_anything)}, 1 tree"),
    ]


def nested(rng, kind):
    """A tree of five arrays and a None, in containers inside of others, of which the outermost is given."""
    leaves = [np.zeros(SHAPES[index]) for index in rng.integers(0, len(SHAPES), 5)] + [None]
    return contained(rng, [leaves[index] for index in rng.permutation(6)], kind)


def contained(rng, leaves, kind):
    """The leaves in two or three parts, each a container of another kind, or a leaf by itself."""
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
    """Trees of random numbers like the template, and weights, of which none is 1 and some are negative."""

    def one():
        return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), template)

    weights = rng.uniform(1.5, 3.0, number) * np.where(np.arange(number) % 2, -0.5, 1)
    return [one() for _ in range(number)], weights.astype(np.float32)


def reference(trees, weights):
    """Leaf by leaf."""
    return jax.tree.map(lambda *leaves: sum(w * leaf for w, leaf in zip(weights, leaves, strict=True)), *trees)


def unscaled(trees, weights):
    """The weights are forgotten."""
    return reference(trees, np.ones_like(weights))


def first_leaf_only(trees, weights):
    """The weights are applied to the first leaf of each tree."""
    leaves, structure = jax.tree.flatten(unscaled(trees, weights))
    return jax.tree.unflatten(structure, [jax.tree.leaves(reference(trees, weights))[0], *leaves[1:]])


def last_tree(trees, weights):
    """Every tree takes the place of the one before."""
    return jax.tree.map(lambda leaf: weights[-1] * leaf, trees[-1])


def divided(by):
    """The right answer, divided by a function of the weights."""

    def answer(trees, weights):
        return jax.tree.map(lambda leaf: leaf / by(weights), reference(trees, weights))

    return answer


def raveled(trees, weights):
    """All numbers in one row."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(reference(trees, weights))])


MISTAKES = (
    Mistake(
        "not scaled",
        unscaled,
        "The trees are added up as they are.\nEvery tree counts for its weight, weights[i] * trees[i].",
    ),
    Mistake(
        "the mean of the scaled trees",
        divided(len),
        lambda trees, weights: (
            f"The sum is divided by the number of trees, {len(trees)}.\n"
            "This exercise asks for the sum; whoever wants a mean puts it into the weights."
        ),
    ),
    Mistake(
        "weights that add up to 1",
        divided(np.sum),
        "The sum is divided by the sum of the weights.\nThis exercise asks for the weights as they are.",
    ),
    Mistake(
        "only the first leaf scaled",
        first_leaf_only,
        "Only the first leaf is scaled; the others are added up as they are.\n"
        "A weight belongs to a whole tree: scale inside of the function that jax.tree.map applies to every leaf.",
    ),
    Mistake(
        "only the last tree",
        last_tree,
        "Only the last tree is left: each one took the place of the one before.\nAdd them up.",
    ),
    Mistake(
        "one flat array",
        raveled,
        "The numbers are right, in one flat array, and their names are gone.\n"
        "An optimizer needs the tree of the parameters: unravel it, or use jax.tree.map, which never takes "
        "the tree apart.",
    ),
    Mistake(
        "a list of leaves",
        lambda trees, weights: jax.tree.leaves(reference(trees, weights)),
        "The leaves are right, in a flat list, and their names are gone.\n"
        "jax.tree.map keeps the tree; or put them back with jax.tree.unflatten.",
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
        Same("the order of the trees, each with its weight", reordered, says="A sum has no first and no last term."),
    ),
)
