"""Checks the value, and that the program really computes the gradient in both ways."""

import numpy as np

from anybatch.learn.check import Case, Check, Mistake, Same
from anybatch.learn.rules import ROUNDING, other_numbers


def cases(rng):
    """`w` as an array, a Python int and a Python float; and a batch of one example."""

    def examples(number):
        return rng.normal(0.3, 1.0, number).astype(np.float32)

    integer, number = int(rng.integers(2, 6)), float(rng.choice([-1.75, -0.5, 0.75, 2.5]))
    return [
        *(
            Case((np.float32(rng.uniform(1, 3)).reshape(()), examples(7)), "7 examples, w an array of shape ()")
            for _ in range(3)
        ),
        Case((integer, examples(7)), f"7 examples, w = {integer}, a Python int"),
        Case((number, examples(1)), f"1 example, w = {number}, a Python float"),
    ]


def reference(w, x_batch):
    """Both rows are 2 w Σx²."""
    gradient = 2 * w * np.sum(x_batch**2)
    return np.stack([gradient, gradient])


def wrong_rows(wrong, *places):
    """The right answer with something else in these rows."""

    def answer(w, x_batch):
        rows = reference(w, x_batch)
        rows[list(places)] = wrong(w, x_batch)
        return rows

    return answer


def mean(w, x):
    """The gradient of a mean, or the mean of the gradients."""
    return 2 * w * np.mean(x**2)


A_MEAN = (
    "is the mean over the examples; this exercise asks for the sum.\n"
    "A mean is the sum divided by the number of examples: use .sum()."
)

MISTAKES = (
    Mistake("a mean in row 0", wrong_rows(mean, 0), f"Row 0 {A_MEAN}"),
    Mistake("a mean in row 1", wrong_rows(mean, 1), f"Row 1 {A_MEAN}"),
    Mistake("a mean in each row", wrong_rows(mean, 0, 1), f"Each row {A_MEAN}"),
    Mistake(
        "the derivative with respect to x",
        wrong_rows(lambda w, x: np.sum(2 * w**2 * x), 0, 1),
        "Each row is a derivative with respect to x; this exercise asks for the one with respect to w.\n"
        "jax.grad differentiates with respect to the first argument, unless argnums says otherwise: make w the first.",
    ),
    Mistake(
        "the square of a sum",
        wrong_rows(lambda w, x: 2 * w * np.sum(x) ** 2, 1),
        "Row 1 squares the sum of the examples; it should be the sum of their squares.\n"
        "Apply f to every example first, with jax.vmap, and then sum.",
    ),
)


TWICE_OF_EACH = (
    "The value is right, but both rows add up a gradient for each example.\n"
    "Neither is the gradient of a sum. For row 1, write a function of w that returns the sum of all losses, and take "
    "its jax.grad."
)
TWICE_OF_A_SUM = (
    "The value is right, but both rows are gradients of a summed loss.\n"
    "For row 0, take the gradient of f for each example first: jax.vmap of jax.grad(f) returns one number for each "
    "example. Then add them up."
)


def is_differentiated_twice(program, args):
    """The program must have two derivatives: one for each example, and one of a sum.

    However f is differentiated, forward or backward, JAX multiplies at least four times: w x, 2 (w x), times the
    incoming derivative, times x. The formula needs at most three multiplications. A loop counts as one sum. The
    derivative of a sum has a broadcast between the multiplications, which copies the incoming 1 to every example. The
    derivative of each example has no broadcast, or one of w before the multiplications.
    """
    examples = len(args[1])
    if examples == 1:
        return None  # with one example, both ways look the same
    large = [each for each in program.find() if each.size >= examples or each.inside]
    names = [each.name for each in large if each.name in ("mul", "pow", "broadcast_in_dim")]
    products = sum(each.name == "mul" for each in large)
    sums = sum(each.name in ("reduce_sum", "psum", "dot_general", "cumsum", "scan", "while") for each in large)
    # Python's own sum() of an array.
    alone = [each for each in program.find() if each.size == 1 and not each.inside]
    sums += sum(each.name in ("add", "add_any") for each in alone) >= examples - 1
    if sum(each.name == "mul" for each in alone) >= 2 * examples:
        return (
            "The value is right, but the gradient of each example is written out by a Python loop.\n"
            f"The program has {examples} copies of it, and would have a thousand for a thousand examples. "
            "jax.vmap(jax.grad(f), in_axes=(None, 0)) needs only one."
        )
    if products < 3 * min(sums, 2):
        return (
            "The value is right, but a row is the formula 2 w Σx², worked out by hand.\n"
            "A network has no such formula: let jax.grad differentiate f in both rows."
        )
    if sums < 2:
        return (
            "The value is right, but there is only one gradient in the program, and both rows show it.\n"
            "Compute row 0 from a gradient for each example, and row 1 as the gradient of the summed loss."
        )
    other = {each.name for each in large} - {"mul", "pow", "integer_pow", "broadcast_in_dim", "reduce_sum"}
    if other or sums != 2:
        return None  # written in another way, about which nothing more is certain
    return _same_way(names)


def _same_way(names):
    broadcasts = names.count("broadcast_in_dim")
    if not broadcasts:
        return TWICE_OF_EACH
    half = names[: len(names) // 2]
    if names == half * 2 and half[0] != "broadcast_in_dim" and broadcasts == 2:
        return TWICE_OF_A_SUM
    return None


def both_ways_matter(program, args):
    """Each row must come from derivatives: row 0 from one for each example, row 1 from one of a sum."""
    x = args[1]
    if len(x) == 1:
        return None

    def comes_from(row, *selects):
        response = program.response(selects, args, other_numbers(args, 1))
        return response is None or response.shares(lambda leaf: leaf[row : row + 1])[0] <= ROUNDING

    derivatives = ({"stack": "jvp"},)
    of_each = ({"stack": r"vmap\(.*jvp"}, {"names": ["scan", "while"], "around": "jvp"})
    of_a_sum = (
        {"names": ["reduce_sum", "dot_general", "cumsum", "reduce"], "stack": "jvp", "size": len(x)},
        {"names": ["scan", "while", "add_any"], "stack": "jvp"},
    )
    for row in (0, 1):
        if not comes_from(row, *derivatives):
            return (
                f"No derivative has an influence on row {row}: jax.grad is in the program, but its result does not "
                "matter.\nA network has no formula that could be worked out by hand: let jax.grad differentiate f in "
                "both rows, and return its result."
            )
    if not comes_from(1, *of_a_sum):
        return TWICE_OF_EACH
    if not comes_from(0, *of_each) and comes_from(0, *of_a_sum):
        return TWICE_OF_A_SUM
    return None


def permuted(rng, args):
    """The examples in another order."""
    return args[0], rng.permutation(args[1])


check = Check(
    function="equivalent_two_ways",
    parameters=("w", "x_batch"),
    cases=cases,
    reference=reference,
    mistakes=MISTAKES,
    same=(Same("the order of the examples", permuted, says="A sum does not depend on the order of its terms."),),
    program=(is_differentiated_twice, both_ways_matter),
)
