"""Collectives are counted as one run executes them: in programs whose collectives are known, beside a count by text.

The programs are compiled here, for eight simulated devices; `test_hlo.py` has texts that other machines write.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from anybatch.collectives import KINDS, Collective, Traffic, collectives_of
from anybatch.errors import InputError

pytestmark = pytest.mark.every_jax

X = jax.ShapeDtypeStruct((8, 4), jnp.float32)
ROW = 4 * 4  # bytes of what one device has of X
SPREAD = P("data")


def mesh_of(*sizes):
    return jax.make_mesh(sizes, ("data", "model")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


def compiled(fun, *args, mesh=None, in_specs=SPREAD, out_specs=SPREAD):
    mesh = mesh or mesh_of(8)
    spread = jax.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(spread).lower(*(args or (X,))).compile()


def counted_by_text(program):
    """What the control does: it looks for collectives in the text, as one would by hand."""
    return len(re.findall(rf" (?:{'|'.join(KINDS)})(?:-start)?\(", program.as_text()))


def repeated(fun, length):
    def loop(x):
        return lax.scan(lambda carry, _: (jnp.sin(fun(carry)), None), x, None, length=length)[0]

    return loop


def mean(x):
    return lax.pmean(x, "data")


# Counts.


def test_a_reduction_after_a_loop_is_executed_once():
    def fun(x):
        return mean(repeated(jnp.cos, 5)(x))

    program = compiled(fun, mesh=(mesh := mesh_of(8)))
    (found,) = collectives_of(program, mesh)
    assert (found.kind, found.times, found.in_loop, found.optional) == ("all-reduce", 1, False, False)
    assert (found.bytes, found.arrays, found.group, found.axes) == (ROW, 1, 8, ("data",))
    assert found.wire == 2 * 7 * ROW // 8
    assert "psum" in found.source
    assert " while(" in program.as_text()  # the control: there is a loop, which must not count


def test_a_reduction_in_a_loop_is_executed_as_often_as_the_loop_runs():
    program = compiled(repeated(mean, 5))
    (found,) = collectives_of(program)
    assert (found.times, found.in_loop) == (5, True)
    assert counted_by_text(program) == 1


def test_nested_loops_multiply():
    program = compiled(repeated(repeated(mean, 4), 3))
    assert Traffic.of(program).executed == 12
    assert counted_by_text(program) == 1


def test_a_loop_beside_a_loop_does_not_multiply():
    program = compiled(lambda x: repeated(mean, 4)(repeated(mean, 3)(x)))
    assert [each.times for each in collectives_of(program)] == [3, 4]
    assert counted_by_text(program) == 2


def test_a_trip_count_that_is_not_known_is_none():
    def fun(x, count):
        return lax.fori_loop(0, count, lambda _, carry: jnp.sin(mean(carry)), x)

    program = compiled(fun, X, jax.ShapeDtypeStruct((), jnp.int32), in_specs=(SPREAD, P()))
    (found,) = collectives_of(program)
    assert (found.times, found.in_loop) == (None, True)
    assert counted_by_text(program) == 1
    traffic = Traffic.of(program)
    assert (traffic.executed, traffic.sent, traffic.seconds(1e9)) == (None, None, None)
    assert "an unknown number of collectives" in str(traffic)


def test_a_branch_counts_once_at_most():
    def fun(x, flag):
        return lax.cond(flag, lambda x: jnp.sin(mean(x)), jnp.cos, x)

    program = compiled(fun, X, jax.ShapeDtypeStruct((), jnp.bool), in_specs=(SPREAD, P()))
    (found,) = collectives_of(program)
    assert (found.times, found.optional, found.in_loop) == (1, True, False)
    assert str(Traffic((found,))).startswith("at most 1 collective in a run, each device sends at most 28 B")


def test_a_branch_in_a_loop_counts_as_often_as_the_loop_runs():
    def fun(x, flag):
        return repeated(lambda x: lax.cond(flag, lambda x: jnp.sin(mean(x)), jnp.cos, x), 5)(x)

    (found,) = collectives_of(compiled(fun, X, jax.ShapeDtypeStruct((), jnp.bool), in_specs=(SPREAD, P())))
    assert (found.times, found.optional, found.in_loop) == (5, True, True)


def test_the_reduction_of_a_tree_is_one_collective_of_several_arrays():
    tree = {"a": X, "b": jax.ShapeDtypeStruct((8,), jnp.float32), "c": jax.ShapeDtypeStruct((8, 3), jnp.float32)}
    program = compiled(lambda tree: lax.psum(tree, "data"), tree, out_specs=P())
    (found,) = collectives_of(program)
    assert (found.arrays, found.times, found.bytes) == (3, 1, ROW + 4 + 12)


def test_reductions_that_wait_for_each_other_are_not_one():
    """The control of the one before: arrays are not taken for collectives, nor collectives for arrays."""
    program = compiled(lambda x: lax.psum(jnp.sin(lax.psum(x, "data")), "data"))
    assert [(each.arrays, each.times) for each in collectives_of(program)] == [(1, 1), (1, 1)]


@pytest.mark.parametrize("fun", [jnp.sin, repeated(jnp.sin, 5)], ids=["plain", "loop"])
def test_a_program_without_collectives(fun):
    program = compiled(fun)
    assert collectives_of(program, mesh_of(8)) == []
    assert (Traffic.of(program).executed, Traffic.of(program).sent) == (0, 0)
    assert str(Traffic.of(program)) == "no collectives"


def test_a_group_of_one_device_is_no_collective():
    program = compiled(lambda x: lax.psum(x, "data"), mesh=mesh_of(1))
    assert collectives_of(program) == []


def test_names_of_a_user_that_look_like_collectives_are_not_counted():
    def fun(x):
        with jax.named_scope(" all-reduce(x), body=%all-gather("):
            return mean(x)

    program = compiled(fun)
    assert Traffic.of(program).by_kind == {"all-reduce": 1}
    assert counted_by_text(program) > 1


# Kinds.


def test_all_gather():
    (found,) = collectives_of(compiled(lambda x: lax.all_gather(x, "data"), out_specs=P()))
    assert (found.kind, found.bytes, found.wire) == ("all-gather", 8 * ROW, 7 * ROW)


def test_reduce_scatter():
    program = compiled(lambda x: lax.psum_scatter(x, "data", tiled=True), in_specs=P())
    (found,) = collectives_of(program)
    assert (found.kind, found.bytes, found.wire) == ("reduce-scatter", ROW, 7 * ROW)


def test_permute():
    around = [(i, (i + 1) % 8) for i in range(8)]
    program = compiled(lambda x: lax.ppermute(x, "data", around), mesh=(mesh := mesh_of(8)))
    (found,) = collectives_of(program, mesh)
    assert (found.kind, found.bytes, found.wire, found.group) == ("collective-permute", ROW, ROW, 8)
    assert found.axes == ("data",)


def test_all_to_all():
    program = compiled(lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True), in_specs=P())
    (found,) = collectives_of(program)
    assert (found.kind, found.bytes, found.wire, found.arrays) == ("all-to-all", 8 * ROW, 7 * ROW, 1)


# Groups and axes.


@pytest.mark.parametrize("axes, group", [("data", 4), ("model", 2), (("data", "model"), 8)])
def test_axes_of_a_mesh(axes, group):
    program = compiled(lambda x: lax.psum(x, axes), mesh=(mesh := mesh_of(4, 2)), in_specs=P("data", "model"))
    (found,) = collectives_of(program, mesh)
    assert (found.group, found.axes) == (group, (axes,) if isinstance(axes, str) else axes)


def test_axes_of_a_permutation():
    program = compiled(
        lambda x: lax.ppermute(x, "data", [(0, 1), (1, 2), (2, 3), (3, 0)]),
        mesh=(mesh := mesh_of(4, 2)),
        in_specs=P("data", "model"),
        out_specs=P("data", "model"),
    )
    (found,) = collectives_of(program, mesh)
    assert (found.group, found.axes) == (4, ("data",))


def test_axes_of_a_mesh_whose_devices_are_in_another_order():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4).T, ("data", "model"))
    program = compiled(lambda x: lax.psum(x, "model"), mesh=mesh, in_specs=P("data", "model"), out_specs=P("data"))
    (found,) = collectives_of(program, mesh)
    assert (found.group, found.axes) == (2, ("model",))


def test_axes_of_collectives_that_the_compiler_made():
    """Nobody wrote a collective here: shardings ask for them, and XLA names its own axes."""
    mesh = mesh_of(4, 2)
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, P("data", "model")))
    w = jax.ShapeDtypeStruct((4, 6), jnp.float32, sharding=NamedSharding(mesh, P("model", None)))
    program = jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, P("data", None))).lower(x, w).compile()
    (found,) = collectives_of(program, mesh)
    assert (found.kind, found.group, found.axes, found.bytes) == ("all-reduce", 2, ("model",), 2 * 6 * 4)


def test_parts_of_an_axis():
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
    program = compiled(lambda x: lax.psum(x, "data", axis_index_groups=groups), mesh=(mesh := mesh_of(8)))
    (found,) = collectives_of(program, mesh)
    assert (found.group, found.axes) == (4, ("data",))


# Totals, and on paper.


def test_axes_are_asked_for_where_they_are_needed():
    with pytest.raises(InputError, match=r"Traffic\.of\(compiled, mesh\)"):
        Traffic.of(compiled(mean)).over("data")


def test_traffic_adds_up():
    mesh = mesh_of(4, 2)

    def fun(x):
        return lax.psum(repeated(lambda x: lax.pmean(x, "model"), 5)(x), "data")

    program = compiled(fun, mesh=mesh, in_specs=P("data", "model"), out_specs=P(None, "model"))
    traffic = Traffic.of(program, mesh)
    part = 2 * 2 * 4
    assert traffic.by_kind == {"all-reduce": 6}
    assert (traffic.executed, traffic.in_loops.executed, traffic.outside.executed) == (6, 5, 1)
    assert (traffic.in_loops.sent, traffic.outside.sent) == (5 * part, 2 * 3 * part // 4)
    assert traffic.sent == traffic.in_loops.sent + traffic.outside.sent
    assert traffic.over("model") == traffic.in_loops
    assert traffic.over("data") == traffic.outside
    lines = str(traffic).splitlines()
    assert lines[0] == "6 collectives in a run, each device sends 104 B, 80 B of it in loops"
    assert [line.split()[:2] for line in lines[2:]] == [["5", "all-reduce"], ["1", "all-reduce"]]


@pytest.mark.parametrize("kind, rounds, hops", [("all-reduce", 2, 14), ("all-gather", 1, 7), ("all-to-all", 1, 7)])
def test_seconds_around_a_ring(kind, rounds, hops):
    traffic = Traffic((Collective(kind, 3, 8 * 10**9, 1, 8, None, True, False, ""),))
    assert traffic.seconds(bandwidth=1e9) == 3 * rounds * 7
    assert traffic.seconds(bandwidth=1e9, latency=1.0) == 3 * (rounds * 7 + hops)


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("fun", [mean, lambda x: lax.psum_scatter(x, "data", tiled=True)], ids=["reduce", "scatter"])
def test_a_projection_is_what_is_compiled_for_so_many_devices(fun, devices):
    """From the program for two devices to those for more, with as many examples on each."""

    def traffic(devices):
        return Traffic.of(compiled(fun, mesh=mesh_of(devices), in_specs=P(), out_specs=P()))

    projected = traffic(2).at(devices)
    expected = traffic(devices)
    assert len(expected.collectives) == 1
    assert [dataclasses.replace(each, source="") for each in projected.collectives] == [
        dataclasses.replace(each, source="") for each in expected.collectives
    ]
    assert projected.sent == expected.sent
    assert traffic(2).at(1).executed == 0


def test_what_is_not_compiled_is_refused():
    with pytest.raises(InputError, match=r"Pass jax\.jit\(fun\)\.lower\(\.\.\.\)\.compile\(\)"):
        collectives_of(jax.jit(jnp.sin).lower(X))


def test_a_mesh_of_another_size_is_refused():
    with pytest.raises(InputError, match="a mesh of 2 devices and a program for 8"):
        collectives_of(compiled(mean), mesh_of(2))
