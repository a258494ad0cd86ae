"""Checks three steps of Adam, computed in two ways. Names sums instead of means, extra steps and lost states."""

import numpy as np

from anybatch.learn.check import Case, Check, Mistake, Same
from anybatch.learn.rules import ROUNDING, other_numbers

STEPS, MICROBATCHES, SIZE, WIDTH = 3, 2, 4, 3
# With Adam's usual b2 = 0.999, rounding 1 - b2 to float32 has a relative error of 3e-5, too much for a tolerance.
LR, B1, B2, EPS = 0.1, 0.9, 0.9, 0.1


def gradient(params, x, y):
    """The gradient of the mean squared error of one microbatch."""
    error = x @ params["w"] + params["b"] - y
    return {"w": 2 * error @ x / len(y), "b": 2 * error.mean()}


def adam(params, x, y, lr, *, scale=1 / MICROBATCHES, is_carried=True):
    """The parameters after one step for each entry of x, with `scale` times the sum of its microbatches' gradients."""
    zeros = {name: np.zeros_like(value) for name, value in params.items()}
    count, first, second = 0, zeros, zeros
    for x_step, y_step in zip(x, y, strict=True):
        if not is_carried:
            count, first, second = 0, zeros, zeros
        count += 1
        grads = [gradient(params, *microbatch) for microbatch in zip(x_step, y_step, strict=True)]
        total = {name: scale * sum(grad[name] for grad in grads) for name in params}
        first = {name: B1 * first[name] + (1 - B1) * total[name] for name in params}
        second = {name: B2 * second[name] + (1 - B2) * total[name] ** 2 for name in params}
        params = {
            name: value - lr * (first[name] / (1 - B1**count)) / (np.sqrt(second[name] / (1 - B2**count)) + EPS)
            for name, value in params.items()
        }
    return params


def six(params, x, y, lr, **options):
    """A step of Adam after every microbatch."""
    return adam(params, x.reshape(6, 1, *x.shape[2:]), y.reshape(6, 1, -1), lr, scale=1, **options)


def reference(params, x, y, lr):
    """The same parameters, twice."""
    return adam(params, x, y, lr), adam(params, x, y, lr)


def mistakes_of(name, wrong, by_hand, in_multi_steps):
    """The same mistake in the first answer, in the second, or in both: one name, and a text for each."""

    def made(is_first, is_second):
        return lambda *args: tuple((wrong if is_wrong else adam)(*args) for is_wrong in (is_first, is_second))

    return [
        Mistake(name, made(True, False), f"First answer: {by_hand}"),
        Mistake(name, made(False, True), f"Second answer: {in_multi_steps}"),
        Mistake(name, made(True, True), f"First answer: {by_hand}\nSecond answer: {in_multi_steps}"),
    ]


MISTAKES = [
    *mistakes_of(
        "the sum of the microbatches",
        lambda *args: adam(*args, scale=1),
        "you added up the two gradients; the gradient of the full batch is their mean.\n"
        "With the usual eps of 1e-8, Adam would have hidden this: it divides by the size of the gradient.",
        "MultiSteps passed the sum of the two gradients to Adam.\n"
        "By default it averages them: do not change use_grad_mean, and do not scale the gradients yourself.",
    ),
    *mistakes_of(
        "half of the mean",
        lambda *args: adam(*args, scale=1 / 4),
        "you divided by the number of microbatches twice.\nThe mean is (first + second) / 2.",
        "you divided by 2, but MultiSteps averages itself.\n"
        "Together that is half of the mean. Pass it the gradients without dividing.",
    ),
    *mistakes_of(
        "a step for every microbatch",
        six,
        "you took six steps, one after each microbatch.\n"
        "Take both gradients at the same parameters, average them, and then take one step.",
        "MultiSteps took six steps, one in each call.\n"
        "With every_k_schedule=2 it waits for the second gradient before it takes a step.",
    ),
    *mistakes_of(
        "moments that are reset",
        lambda *args: adam(*args, is_carried=False),
        "Adam's moments are reset in each step.\n"
        "Call init once, before the loop, and carry the state that update returns into the next step.",
        "the state of MultiSteps is reset in each step, and Adam's moments with it.\n"
        "Call init once, before the loop, and carry the state that update returns into the next call.",
    ),
    *mistakes_of(
        "parameters that never change",
        lambda params, x, y, lr: params,
        "the parameters are still the initial ones.\n"
        "Nothing is changed in place: continue with what update and apply_updates return.",
        "the parameters are still the initial ones.\n"
        "MultiSteps takes a step on every second gradient, and counts them in its state: carry the state that update "
        "returns into the next call, and apply every update.",
    ),
]


def cases(rng):
    """Microbatches with different gradients, so that every mistake changes the answer."""

    def case(scale, note):
        params = {"w": rng.normal(size=WIDTH), "b": rng.normal(size=())}
        x = rng.normal(size=(STEPS, MICROBATCHES, SIZE, WIDTH))
        truth = rng.normal(size=(STEPS, MICROBATCHES, 1, WIDTH))
        y = (x * truth).sum(-1) + scale * np.array([1, -0.5])[:, None]
        params = {name: value.astype(np.float32) for name, value in params.items()}
        return Case((params, x.astype(np.float32), y.astype(np.float32), LR), note)

    yield case(0.5, "three steps of two microbatches")
    yield case(3, "microbatches that disagree")


def swapped(rng, args):
    """The two microbatches of each step change places."""
    params, x, y, lr = args
    return params, x[:, ::-1].copy(), y[:, ::-1].copy(), lr


def both_ways(program, args):
    """MultiSteps must be in the program, and plain Adam, too. Only MultiSteps has a `cond`, and counts modulo k."""
    if not program.count("cond", "rem"):
        return f"The numbers are right, but optax.MultiSteps is not in your program.\n{WRAP}"
    roots = [
        sum(each.name in ("sqrt", "rsqrt", "pow") for each in body) for cond in conds(program) for body in cond.bodies
    ]
    if roots and program.count("sqrt", "rsqrt", "pow") <= sum(roots):
        return BOTH_MULTI_STEPS
    return None


def conds(program):
    """The conds of MultiSteps, which count modulo k inside; all conds if there are none of these."""
    found = program.find("cond")
    return [each for each in found if any(body.count("rem") for body in each.bodies)] or found


def each_answer_comes_from_its_way(program, args):
    """The second answer must come from the `cond` of MultiSteps, and the first must not."""
    found = conds(program)
    if not found:
        return None
    holding = "rem" if any(body.count("rem") for body in found[0].bodies) else ""
    response = program.response([{"names": ["cond"], "holding": holding}], args, other_numbers(args, 1, 2))
    if response is None:
        return BOTH_MULTI_STEPS
    shares = response.shares()
    by_hand, by_multi_steps = shares[: len(shares) // 2], shares[len(shares) // 2 :]
    if max(by_multi_steps) > ROUNDING:
        return f"The optax.MultiSteps in your program has no influence on the second answer.\n{WRAP}"
    return BOTH_MULTI_STEPS if min(by_hand) < 1 - ROUNDING else None


WRAP = (
    "For the second answer, wrap the optimizer, optax.MultiSteps(make_optimizer(lr), every_k_schedule=2), and pass it "
    "the gradient of one microbatch at a time."
)
BOTH_MULTI_STEPS = (
    "The numbers are right, but both answers come from optax.MultiSteps.\n"
    "Compute the first by hand: average the two gradients, and call the plain optimizer once per step."
)


check = Check(
    function="three_steps",
    parameters=("params", "x", "y", "lr"),
    cases=lambda rng: list(cases(rng)),
    reference=reference,
    mistakes=MISTAKES,
    same=[
        Same(
            "the order of the two microbatches of a step",
            swapped,
            says="A mean does not depend on the order: take both gradients at the parameters before the step.",
        )
    ],
    program=[both_ways, each_answer_comes_from_its_way],
)
