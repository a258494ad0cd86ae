"""Checks the mean gradient of a sharded batch on 8 devices, and on 1, where some mistakes do not show."""

import numpy as np

from anybatch.learn.check import Case, Check, Collectives, Mistake, Same
from anybatch.learn.rules import carries, scans

DEVICES = 8
INPUTS, HIDDEN = 6, 16
EXAMPLES, MICROBATCHES = 64, 4


def problem(rng):
    """Parameters and a batch, with predictions that are far from the targets."""
    params = {"w": rng.normal(size=(INPUTS, HIDDEN)) / INPUTS**0.5, "v": rng.normal(size=HIDDEN) / HIDDEN**0.5}
    x = rng.normal(size=(EXAMPLES, INPUTS))
    y = x[:, 0] + rng.normal(size=EXAMPLES)
    params = {name: leaf.astype(np.float32) for name, leaf in params.items()}
    return params, x.astype(np.float32), y.astype(np.float32)


def reference(params, x, y, n_microbatches):
    """The gradient of the mean squared error of all rows."""
    hidden = np.tanh(x @ params["w"])
    error = 2 * (hidden @ params["v"] - y) / len(x)
    return {"w": x.T @ (error[:, None] * params["v"] * (1 - hidden**2)), "v": error @ hidden}


def share(params, x, y, n_microbatches):
    """The gradient of the first device's rows, of 8 devices."""
    return reference(params, x[: len(x) // DEVICES], y[: len(x) // DEVICES], n_microbatches)


def times(factor):
    """The right answer, times a number."""
    return lambda *args: {name: leaf * factor for name, leaf in reference(*args).items()}


def cases(rng):
    """4 microbatches on each of 8 devices, and 2 on one device: two programs, compiled at the same time."""
    args = problem(rng)
    return [
        Case(
            (*args, MICROBATCHES), f"{EXAMPLES} examples, 8 on each device, in {MICROBATCHES} microbatches", (DEVICES,)
        ),
        Case((*args, 2), f"{EXAMPLES} examples in 2 microbatches", (1,)),
    ]


def other_order(rng, args):
    """The same examples in another order."""
    params, x, y, number = args
    order = rng.permutation(len(x))
    return params, x[order], y[order], number


def everyone_does_its_share(program, args):
    """On several devices, none may compute with all rows."""
    rows = EXAMPLES // args[-1]
    products = program.find("dot_general")
    if not program.count("shard_map"):
        return None  # rows may be sharded in another way, and then only the collectives tell
    if program.devices > 1 and any(product.size >= rows * HIDDEN for product in products):
        return (
            "Every device goes through the full batch.\nThe answer is right, but all eight devices do the same work. "
            'Take the gradients inside the shard_map, and use P("data") in in_specs to shard the rows; P() passes all '
            "rows to each device."
        )
    return None


REDUCTIONS = (
    *("psum", "psum_invariant", "psum2", "pmean", "unreduced_psum", "all_reduce", "reduce_scatter", "psum_scatter"),
)
all_reduced = carries(
    "all-reduce",
    (1, 2),
    'Average what each device computed from its own rows: jax.lax.pmean(gradient, "data").',
    names=REDUCTIONS,
)


def is_all_reduced(program, args):
    """The gradient must come from the all-reduce, if the traced program has one."""
    return all_reduced(program, args) if program.count(*REDUCTIONS) else None  # else XLA inserts it


def says(counts):
    """Why there should be one all-reduce, and where the others come from."""
    reduced = counts.get("all-reduce", 0)
    if set(counts) - {"all-reduce"}:
        return (
            "The devices exchange something other than a sum.\nShard the rows with in_specs, compute on each device "
            "with its own rows, and average the gradients with one jax.lax.pmean."
        )
    if not reduced:
        return (
            "Nothing was exchanged, so every device must have gone through the full batch.\n"
            "Shard the rows over the mesh with jax.shard_map, and average the gradients with one jax.lax.pmean."
        )
    if reduced >= MICROBATCHES:
        return (
            f"There is an all-reduce in the loop: it is executed in each of the {MICROBATCHES} iterations.\n"
            "If you wrote psum or pmean inside the scan, move it after the scan.\n"
            "If you did not, it was jax.grad: the gradient with respect to parameters that all devices share is a sum "
            'over all devices.\nMake them varying first: params = jax.lax.pcast(params, "data", to="varying").'
        )
    if reduced == 1:
        return (
            "There is one all-reduce, as there should be, but it transfers more than one gradient: perhaps those of "
            "all microbatches.\nAdd them up on each device first, in the carry of the scan."
        )
    return 'Reduce all leaves at the same time, and only once: jax.lax.pmean(tree, "data") takes a tree.'


check = Check(
    function="data_parallel_grads",
    parameters=("params", "x", "y", "n_microbatches"),
    cases=cases,
    reference=reference,
    mistakes=(
        Mistake(
            "the sum over devices",
            times(DEVICES),
            "Eight times too large: the means of the 8 devices were added up, not averaged.\n"
            "Either you used psum instead of pmean, or jax.grad has already added them up: the gradient with respect "
            "to parameters that all devices share is a sum over all devices, and a pmean of it changes nothing.\n"
            'Make them varying first, params = jax.lax.pcast(params, "data", to="varying"), and then use pmean.',
        ),
        Mistake(
            "the sum over devices",
            times(DEVICES**2),
            "64 times too large: gradients were added up over the 8 devices twice, by jax.grad and then by your psum.\n"
            "The gradient with respect to parameters that all devices share is already a sum over all devices.\n"
            'Make them varying first, params = jax.lax.pcast(params, "data", to="varying"), and then use pmean.',
        ),
        Mistake(
            "the share of one device",
            share,
            "This is the gradient of the first device's rows; those of the other devices are missing.\n"
            "On one device it is right, because that device has all rows. Average over the devices at the end: "
            'jax.lax.pmean(gradient, "data").',
        ),
    ),
    same=(Same("the order of the examples", other_order),),
    program=(
        scans(
            lambda params, x, y, n: n,
            "No scan loops over the microbatches.\n"
            "Each device should scan over its own rows, in `n_microbatches` iterations.",
        ),
        everyone_does_its_share,
        carries(
            "scan",
            (1, 2),
            "Carry the sum of a device's gradients through the scan, and reduce the final carry.",
            turns=lambda params, x, y, n: (n,),
            may_hand_on=True,
        ),
        is_all_reduced,
    ),
    collectives=Collectives(
        {"all-reduce": 1},
        says,
        devices=DEVICES,
        # Twice a gradient, so that a loss or a count may be reduced with it.
        largest=2 * 4 * (INPUTS * HIDDEN + HIDDEN),
        slack=1.5,
    ),
    devices=(1, DEVICES),
)
