"""Checks a shard_map over all devices without communication, and a vmap, on one device and on eight."""

import numpy as np

from anybatch.learn.check import Case, Check, Mistake
from anybatch.learn.rules import MOVES, ROUNDING, other_numbers

COPIES = MOVES | {"stack", "tile", "scatter", "reshard", "axis_index"}
EXCHANGES = (
    *("psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant", "all_gather_reduced"),
    *("ppermute", "pshuffle", "all_to_all", "ragged_all_to_all", "reduce_scatter", "psum_scatter", "unreduced_psum"),
)


def cases(rng):
    """An x whose rows, and columns, can be sharded over eight devices; and one for a single device."""
    yield Case((rng.normal(size=(16, 24)).astype(np.float32),), "x of shape (16, 24)")
    yield Case((rng.normal(size=(6, 3)).astype(np.float32),), "x of shape (6, 3)", devices=(1,))


def reference(x):
    """Both rows are the same."""
    return np.stack([np.sum(x**2, axis=1)] * 2)


def over_devices(join):
    """The answer on eight devices if the results of all devices are joined in row 0."""

    def answer(x):
        if len(x) % 8:
            return None
        rows = np.sum(x**2, axis=1)
        return np.stack([np.tile(join(rows.reshape(8, -1)), 8), rows])

    return answer


def arithmetic(program, **where):
    """The operations that compute: not those that only move numbers or contain others."""
    return [each for each in program.find(**where) if each.name not in COPIES and not each.bodies]


def is_in_a_loop(operation):
    return "scan" in operation.inside or "while" in operation.inside


def is_sharded(program, args):
    """The program must have a shard_map over all devices, along the axis "data"."""
    found = program.find("shard_map")
    if not found:
        return (
            "There is no shard_map in the program that JAX traced.\n"
            "The values are right, but none of them was computed over a mesh. Compute row 0 with "
            "jax.shard_map(function, mesh=..., in_specs=..., out_specs=...)(x)."
        )
    fewest = min(each.params["devices"] for each in found)
    if fewest < program.devices:
        return (
            f"Your mesh has {fewest} of {program.devices} devices; the others have nothing to do.\n"
            'Make a mesh of all devices: jax.make_mesh((jax.device_count(),), ("data",), ...). '
            "jax.device_count() may be 1 on your own machine; in this check it is 1, and then 8."
        )
    if other := [each for each in found if "data" not in each.params["axes"]]:
        axes = ", ".join(repr(name) for name in other[0].params["axes"])
        return f'The axis of the mesh must be called "data"; yours is called {axes}.'
    return None


def rows_inside(program, args):
    """Inside the shard_map, each device must compute with its own rows, and exchange nothing."""
    rows, columns = args[0].shape
    share = rows * columns // program.devices
    inside = arithmetic(program, inside="shard_map")
    if program.devices > 1 and any(each.size > share for each in inside):
        return (
            f"Every device computes with all {rows} rows; it should have only its own {rows // program.devices}.\n"
            'in_specs=P() passes all of x to each device. in_specs=P("data") shards its first axis.'
        )
    exchanged = program.find(*EXCHANGES, inside="shard_map")
    if exchanged:
        return (
            f"The devices exchange something ({exchanged[0].name}), but nothing needs to be exchanged here.\n"
            "If the rows are sharded, each device has everything it needs. If you shard the columns, "
            'P(None, "data"), no device has a complete row: shard the rows instead, in_specs=P("data"). '
            'And out_specs=P("data") puts the results together without a gather.'
        )
    # The sum of all sizes, since a program that works column by column has many small operations.
    if not any(is_in_a_loop(each) for each in inside) and sum(each.size for each in inside) < columns:
        return (
            "The sums of squares of row 0 are not computed inside the shard_map.\n"
            "The function that you pass to shard_map gets some rows, and has to return their sums of squares: "
            "jax.vmap(sum_of_squares) does that."
        )
    return None


def vmap_outside(program, args):
    """Row 1 must be computed outside of the shard_map."""
    x = args[0]
    for each in arithmetic(program, outside="shard_map"):
        if each.size >= x.size or (is_in_a_loop(each) and each.size >= len(x)):
            return None
    return FROM_SHARD_MAP


def each_row_comes_from_its_way(program, args):
    """Row 0 must come from the arithmetic inside the shard_map, and row 1 must not."""
    rows, columns = args[0].shape
    if rows >= columns:
        return None  # sums of rows are as large as rows, so that the two look alike
    response = program.response([{"names": ["shard_map"]}], args, other_numbers(args, 0))
    if response is None or response.shares(lambda leaf: leaf[1])[0] < 1 - ROUNDING:
        return FROM_SHARD_MAP
    within = program.response([{"inside": "shard_map", "size": columns}], args, other_numbers(args, 0))
    if within is not None and within.shares(lambda leaf: leaf[0])[0] > ROUNDING:
        return (
            "The shard_map has no influence on row 0, or only passes it on: the sums are computed elsewhere.\n"
            "Row 0 must be what the devices computed from their own rows: return the result of the shard_map."
        )
    return None


FROM_SHARD_MAP = (
    "Both rows come from shard_map; compute row 1 without it: jax.vmap(sum_of_squares)(x).\n"
    "Only then can you compare the two ways."
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
            "On eight devices, row 0 has the rows of all devices added up: there is an unnecessary psum.\n"
            "jax.lax.psum adds what the devices have at the same place: the first rows of all eight, then the second. "
            "On one device it changes nothing, so it looks right there. Return what each device computed.",
        ),
        Mistake(
            "averaged over the devices",
            over_devices(lambda rows: rows.mean(axis=0)),
            "On eight devices, row 0 has the rows of all devices averaged: there is an unnecessary pmean.\n"
            "On one device it changes nothing, so it looks right there. Return what each device computed.",
        ),
    ),
    program=(is_sharded, rows_inside, vmap_outside, each_row_comes_from_its_way),
)
