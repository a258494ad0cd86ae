"""Rows spread over all devices, and nothing exchanged, beside a plain vmap; on one device and on eight."""

import numpy as np

from anybatch.learn.check import Case, Check, Mistake
from anybatch.learn.rules import MOVES, ROUNDING, other_numbers

COPIES = MOVES | {"stack", "tile", "scatter", "reshard", "axis_index"}
EXCHANGES = (
    *("psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant", "all_gather_reduced"),
    *("ppermute", "pshuffle", "all_to_all", "ragged_all_to_all", "reduce_scatter", "psum_scatter", "unreduced_psum"),
)


def cases(rng):
    """Rows that eight devices can share, with columns that they could share, too; and some that only one can have."""
    yield Case((rng.normal(size=(16, 24)).astype(np.float32),), "x of shape (16, 24)")
    yield Case((rng.normal(size=(6, 3)).astype(np.float32),), "x of shape (6, 3)", devices=(1,))


def reference(x):
    """Both ways are the same."""
    return np.stack([np.sum(x**2, axis=1)] * 2)


def over_devices(join):
    """What is left on eight devices of the first row if the results of all are joined."""

    def answer(x):
        if len(x) % 8:
            return None
        rows = np.sum(x**2, axis=1)
        return np.stack([np.tile(join(rows.reshape(8, -1)), 8), rows])

    return answer


def arithmetic(program, **where):
    """What computes, and does not only move numbers or hold other programs."""
    return [each for each in program.find(**where) if each.name not in COPIES and not each.bodies]


def is_in_a_loop(operation):
    return "scan" in operation.inside or "while" in operation.inside


def is_spread(program, args):
    """There is a shard_map, over all devices, along an axis of the right name."""
    found = program.find("shard_map")
    if not found:
        return (
            "There is no shard_map in the program that JAX traced.\n"
            "The values are right, but all of them were computed in one place. Row 0 has to come from "
            "jax.shard_map(function, mesh=..., in_specs=..., out_specs=...)(x)."
        )
    fewest = min(each.params["devices"] for each in found)
    if fewest < program.devices:
        return (
            f"Your mesh has {fewest} of {program.devices} devices; the others have nothing to do.\n"
            'Make it of all that there are: jax.make_mesh((jax.device_count(),), ("data",), ...). '
            "jax.device_count() may be 1 on your own machine; here it is 1, and then 8."
        )
    if other := [each for each in found if "data" not in each.params["axes"]]:
        axes = ", ".join(repr(name) for name in other[0].params["axes"])
        return f'The axis of the mesh is to be called "data"; yours is called {axes}.'
    return None


def rows_inside(program, args):
    """Each device computes with its own rows, inside the shard_map, and keeps what it has."""
    rows, columns = args[0].shape
    share = rows * columns // program.devices
    inside = arithmetic(program, inside="shard_map")
    if program.devices > 1 and any(each.size > share for each in inside):
        return (
            f"Every device computes with all {rows} rows; it should have its own {rows // program.devices}.\n"
            'in_specs=P() hands the whole of x to each device. in_specs=P("data") cuts its first axis.'
        )
    exchanged = program.find(*EXCHANGES, inside="shard_map")
    if exchanged:
        return (
            f"The devices exchange something ({exchanged[0].name}), and here nothing needs to be exchanged.\n"
            "If rows are cut, each device has all that it needs for its own. If you cut columns, "
            'P(None, "data"), no device has a whole row: cut rows instead, in_specs=P("data"). '
            'And out_specs=P("data") puts the results side by side, without a gather.'
        )
    # Column by column, each operation is small, and all together they are not.
    if not any(is_in_a_loop(each) for each in inside) and sum(each.size for each in inside) < columns:
        return (
            "The sums of squares of row 0 are not computed inside the shard_map.\n"
            "The function that you hand to shard_map is given some rows, and has to return their sums of squares: "
            "jax.vmap(sum_of_squares) does that."
        )
    return None


def vmap_outside(program, args):
    """The second row is computed beside the shard_map."""
    x = args[0]
    for each in arithmetic(program, outside="shard_map"):
        if each.size >= x.size or (is_in_a_loop(each) and each.size >= len(x)):
            return None
    return FROM_SHARD_MAP


def each_row_comes_from_its_way(program, args):
    """Row 0 is made by the arithmetic inside the shard_map, and row 1 by nothing of it."""
    rows, columns = args[0].shape
    if rows >= columns:
        return None  # sums of rows could not be told from rows
    response = program.response([{"names": ["shard_map"]}], args, other_numbers(args, 0))
    if response is None or response.shares(lambda leaf: leaf[1])[0] < 1 - ROUNDING:
        return FROM_SHARD_MAP
    within = program.response([{"inside": "shard_map", "size": columns}], args, other_numbers(args, 0))
    if within is not None and within.shares(lambda leaf: leaf[0])[0] > ROUNDING:
        return (
            "The shard_map has no influence on row 0, or only hands it on: its sums are computed elsewhere.\n"
            "Row 0 has to be what the devices computed from their own rows: return what the shard_map gives."
        )
    return None


FROM_SHARD_MAP = (
    "Both rows come from shard_map; row 1 has to be computed without it, by jax.vmap(sum_of_squares)(x).\n"
    "It is the comparison that makes the first row believable."
)


check = Check(
    function="shard_map_vs_vmap",
    parameters=("x",),
    cases=cases,
    reference=reference,
    devices=(1, 8),
    mistakes=(
        Mistake(
            "summed over the devices",
            over_devices(lambda rows: rows.sum(axis=0)),
            "On eight devices, row 0 has the rows of all devices added up: there is a psum, with no need.\n"
            "jax.lax.psum adds what the devices have at the same place: the first rows of all eight, then the second. "
            "On one device it does nothing, so it looks right there. Return what each device computed, as it is.",
        ),
        Mistake(
            "averaged over the devices",
            over_devices(lambda rows: rows.mean(axis=0)),
            "On eight devices, row 0 has the rows of all devices averaged: there is a pmean, with no need.\n"
            "On one device it does nothing, so it looks right there. Return what each device computed, as it is.",
        ),
    ),
    program=(is_spread, rows_inside, vmap_outside, each_row_comes_from_its_way),
)
