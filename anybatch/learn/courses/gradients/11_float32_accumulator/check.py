"""Checks a sum of bfloat16 gradients to more digits than bfloat16 has.

All numbers are small integers, so that no microbatch rounds anything: its gradient has at most 8 bits, and bfloat16
represents it exactly, in whatever order XLA adds. So every error in an answer comes from the accumulator, and the
reference can be computed in float64.
"""

import jax.numpy as jnp
import numpy as np

from anybatch.learn.check import Case, Check, Mistake, Same
from anybatch.learn.rules import carries, one_microbatch, scans, stacks_less_than

EXAMPLES, WIDTH, MICROBATCHES = 128, 4, 32
BFLOAT16 = np.dtype(jnp.bfloat16)


def grads_of(params, x, y):
    """The gradient of the mean squared error."""
    error = x @ params["w"] + params["b"] - y
    return {"w": 2 * error @ x / len(y), "b": 2 * error.mean()}


def reference(params, x, y, n):
    """The gradient of the mean over all examples; the microbatches have the same size."""
    return grads_of(params, x, y)


def narrow(value):
    """The value rounded to bfloat16 from float32, as XLA does it."""
    return np.asarray(value, np.float32).astype(BFLOAT16).astype(np.float64)


def in_a_narrow_carry(params, x, y, n):
    """Each sum rounded to bfloat16 before the next gradient is added."""
    total = {name: np.zeros_like(value) for name, value in params.items()}
    for part in zip(np.split(x, n), np.split(y, n), strict=True):
        grads = grads_of(params, *part)
        total = {name: narrow(total[name] + grads[name]) for name in total}
    return {name: value / n for name, value in total.items()}


MISTAKES = [
    Mistake(
        "a bfloat16 accumulator",
        in_a_narrow_carry,
        "Your accumulator is bfloat16: each sum is rounded to 8 bits before the next gradient is added.\n"
        "The larger the sum, the more of a gradient is lost: 256 + 1 = 256. A cast after the loop is too late. "
        "Start the carry with jnp.zeros(p.shape, jnp.float32), and cast each gradient when you add it.",
    ),
    Mistake(
        "rounded to bfloat16 at the end",
        lambda *args: {name: narrow(value) for name, value in reference(*args).items()},
        "The result was rounded to bfloat16 at the end: only 8 of its bits are left.\n"
        "Divide the float32 sum, and return it in float32.",
    ),
    Mistake(
        "the sum of the microbatches",
        lambda params, x, y, n: {name: n * value for name, value in reference(params, x, y, n).items()},
        lambda params, x, y, n: (
            f"You added up the gradients of the {n} microbatches; this exercise asks for their mean.\n"
            "Divide once, in float32, after the scan."
        ),
    ),
    Mistake(
        "the sum of the microbatches",
        lambda params, x, y, n: {name: n * value for name, value in in_a_narrow_carry(params, x, y, n).items()},
        lambda params, x, y, n: (
            f"You added up the gradients of the {n} microbatches; this exercise asks for their mean.\n"
            "And the sum is in bfloat16, which loses much of it. Start the carry with "
            "jnp.zeros(p.shape, jnp.float32), and divide once, after the scan."
        ),
    ),
]


def cases(rng):
    """Least squares in small integers, with chosen errors of at most 11."""

    def case(error, note):
        # An odd sum above 256 has more than 8 bits, so that no bfloat16 number is right.
        error[-1] += 1 - error.sum() % 2
        w, b = rng.integers(-1, 2, WIDTH), np.asarray(rng.integers(-2, 3))
        x = rng.integers(-1, 2, (EXAMPLES, WIDTH))
        # Half of the rows begin with a 1, so that the gradient of w adds up, too.
        x[::2, 0] = 1
        w, b, x, y = (each.astype(BFLOAT16) for each in (w, b, x, x @ w + b - error))
        return Case(({"w": w, "b": b}, x, y, MICROBATCHES), note)

    size = EXAMPLES // MICROBATCHES
    few = np.arange(EXAMPLES) < 8 * size
    last = np.arange(EXAMPLES) % size == 0
    # This case is first: a bfloat16 sum stops growing here, and cannot be mistaken for a right sum that was rounded.
    yield case(np.where(few, rng.integers(9, 11, EXAMPLES), last), "8 large gradients, and then 24 small ones")
    yield case(rng.integers(2, 10, EXAMPLES), "32 microbatches of 4 examples")


def other_number(rng, args):
    return (*args[:-1], 16)


def model_is_narrow(program, args):
    """Products of rows with parameters, which take the time and memory, must be in bfloat16."""
    rows = args[1].size // args[-1]
    products = program.find("dot_general") + [each for each in program.find("mul") if each.size >= rows]
    if any(array.dtype == "float32" for product in products for array in product.inputs):
        return (
            "The numbers are right, but the model runs in float32.\n"
            "That doubles its memory. Call jax.grad(loss) with params, x and y in bfloat16, as they are, and cast the "
            "gradient that it returns."
        )
    return None


def carry_is_wide(program, args):
    for scan in program.find("scan"):
        if any(array.dtype == "bfloat16" for array in scan.outputs[: scan.params["num_carry"]]):
            return (
                "The numbers are right, but a scan carries bfloat16 from one iteration to the next.\n"
                "A sum over many iterations should be float32: start the carry with jnp.zeros(p.shape, jnp.float32)."
            )
    return None


check = Check(
    function="accumulated_grads",
    parameters=("params", "x", "y", "n_microbatches"),
    cases=lambda rng: list(cases(rng)),
    reference=reference,
    mistakes=MISTAKES,
    same=[
        Same(
            "the number of microbatches",
            other_number,
            says="These sums are exact in float32, so it does not matter how the batch is cut.",
        )
    ],
    program=[
        scans(
            lambda params, x, y, n: n,
            "The numbers are right, but there is no lax.scan with one iteration for each microbatch.\n"
            "Reshape x and y to (n_microbatches, N // n_microbatches, ...) and scan over them.",
        ),
        model_is_narrow,
        carry_is_wide,
        stacks_less_than(
            lambda params, x, y, n: n * WIDTH,
            "The numbers are right, but the scan keeps something of each microbatch until the end.\n"
            "Either it stacks the gradients, or jax.grad of the scan keeps what the backward pass needs. "
            "Take the gradient inside the scan, and add it to the carry, in float32.",
            turns=lambda params, x, y, n: n,
        ),
        one_microbatch(
            lambda params, x, y, n: x.size // n,
            "The numbers are right, but more than one microbatch is computed at once.\n"
            "In each iteration of the scan, use only its own microbatch: N // n_microbatches examples.",
        ),
        carries(
            "scan",
            (1, 2),
            "Carry the sum of the gradients through the scan, and divide the final carry.",
            turns=lambda params, x, y, n: (n,),
        ),
    ],
)
