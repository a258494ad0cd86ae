"""The text of compiled programs, as other machines and versions write it, and what is refused.

The texts are short and literal, so that the expected numbers can be checked by eye.
"""

import re

import jax
import pytest

from anybatch.collectives import Traffic, collectives_of
from anybatch.jaxprs.hlo import UnreadableProgramError

pytestmark = pytest.mark.every_jax

GPU = """HloModule jit_step, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%a, %b)
}

%async_computation (p: f32[16,4]) -> f32[2,4] {
  %p = f32[16,4]{1,0} parameter(0)
  ROOT %reduce-scatter.1 = f32[2,4]{1,0} reduce-scatter(%p), channel_id=3, replica_groups=[1,8]<=[8], \
dimensions={0}, to_apply=%add, use_global_device_ids=true
}

%body (s: (s32[], f32[16,4])) -> (s32[], f32[16,4]) {
  %s = (s32[], f32[16,4]{1,0}) parameter(0)
  %x.2 = f32[16,4]{1,0} get-tuple-element(%s), index=1
  %all-gather-start = (f32[16,4]{1,0}, f32[128,4]{1,0}) all-gather-start(%x.2), channel_id=1, \
replica_groups=[1,8]<=[8], dimensions={0}, use_global_device_ids=true, backend_config={"is_sync":false}
  %all-gather-done = f32[128,4]{1,0} all-gather-done(%all-gather-start)
  ROOT %t = (s32[], f32[16,4]{1,0}) tuple(%i, %x.2)
}

%cond (s.1: (s32[], f32[16,4])) -> pred[] {
  %s.1 = (s32[], f32[16,4]{1,0}) parameter(0)
  ROOT %lt = pred[] compare(%i.1, %n), direction=LT
}

ENTRY %main (x: f32[16,4], y: bf16[3]) -> f32[2,4] {
  %x = f32[16,4]{1,0} parameter(0)
  %y = bf16[3]{0:T(128)(2,1)} parameter(1)
  %while = (s32[], f32[16,4]{1,0}) while(%init), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"6"},"known_init_step":{"init":"0","step":"1"}}
  %all-reduce-start = (f32[16,4]{1,0:T(8,128)}, bf16[3]{0:T(128)(2,1)}) all-reduce-start(%x, %y), channel_id=2, \
replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, to_apply=%add, metadata={op_name="jit(step)/psum"}
  %all-reduce-done = (f32[16,4]{1,0}, bf16[3]{0}) all-reduce-done(%all-reduce-start)
  %permute-start = (f32[16,4]{1,0}, f32[16,4]{1,0}, u32[], u32[]) collective-permute-start(%x), channel_id=4, \
source_target_pairs={{0,1},{1,0},{2,2}}
  %permute-done = f32[16,4]{1,0} collective-permute-done(%permute-start)
  %gathers-start = ((f32[16,4]{1,0}, bf16[3]{0}), (f32[32,4]{1,0}, bf16[6]{0})) all-gather-start(%x, %y), \
channel_id=5, replica_groups=[4,2]<=[8], dimensions={0}, use_global_device_ids=true
  %gathers-done = (f32[32,4]{1,0}, bf16[6]{0}) all-gather-done(%gathers-start)
  %scatter-start = ((f32[16,4]{1,0}), f32[2,4]{1,0}) async-start(%x), calls=%async_computation
  %scatter-update = ((f32[16,4]{1,0}), f32[2,4]{1,0}) async-update(%scatter-start), calls=%async_computation
  %scatter-done = f32[2,4]{1,0} async-done(%scatter-update), calls=%async_computation
  %sugar-start = ((f32[16,4]{1,0}), f32[4,4]{1,0}, s32[]) reduce-scatter-start(%x), channel_id=6, \
replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add, use_global_device_ids=true
  %sugar-done = f32[4,4]{1,0} reduce-scatter-done(%sugar-start)
  %host = (f32[16,4]{1,0}, u32[], token[]) send(%x, %token), channel_id=7, is_host_transfer=true
  ROOT %r = f32[2,4]{1,0} copy(%scatter-done)
}
"""


def test_pairs_of_start_and_done_are_one_and_have_the_size_of_their_result():
    found = [(each.kind, each.times, each.bytes, each.arrays, each.group) for each in collectives_of(GPU)]
    assert found == [
        ("all-gather", 6, 128 * 4 * 4, 1, 8),
        ("all-reduce", 1, 16 * 4 * 4 + 6, 2, 8),
        ("collective-permute", 1, 16 * 4 * 4, 1, 2),
        ("all-gather", 1, 32 * 4 * 4 + 12, 2, 2),
        ("reduce-scatter", 1, 2 * 4 * 4, 1, 8),
        ("reduce-scatter", 1, 4 * 4 * 4, 1, 4),
    ]


def test_the_condition_of_a_loop_is_asked_once_more_than_its_body_runs():
    program = GPU.replace("condition=%cond", "condition=%body").replace("body=%body", "body=%cond")
    assert Traffic(tuple(each for each in collectives_of(program) if each.in_loop)).executed == 7


def test_a_group_of_one_device_is_no_collective():
    alone = GPU.replace("{{0,1,2,3,4,5,6,7}}", "{{0},{1},{2},{3},{4},{5},{6},{7}}")
    assert len(collectives_of(alone)) == len(collectives_of(GPU)) - 1


CALLS = """HloModule jit_step, num_partitions=2

%reduce (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %all-reduce = f32[4]{0} all-reduce(%p), channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true, \
to_apply=%add
}

%fused (q: f32[4]) -> f32[4] {
  %q = f32[4]{0} parameter(0)
  ROOT %call = f32[4]{0} call(%q), to_apply=%reduce
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %call.1 = f32[4]{0} call(%x), to_apply=%reduce
  %fusion = f32[4]{0} fusion(%call.1), kind=kCustom, calls=%fused
  %sum = f32[] reduce(%fusion, %zero), dimensions={0}, to_apply=%add
  ROOT %r = f32[4]{0} copy(%fusion)
}
"""


def test_two_calls_of_one_computation_are_two_collectives():
    assert [each.times for each in collectives_of(CALLS)] == [1, 1]


def test_the_branches_of_a_conditional_each_count_once_at_most():
    old = "fusion(%call.1), kind=kCustom, calls=%fused"
    for branches in ("branch_computations={%reduce, %fused}", "true_computation=%reduce, false_computation=%fused"):
        text = CALLS.replace(old, f"conditional(%flag, %call.1, %call.1), {branches}")
        assert [(each.times, each.optional) for each in collectives_of(text)] == [(1, False), (1, True), (1, True)]


def groups_of(notation, *, attributes="channel_id=1, use_global_device_ids=true", header="num_partitions=8"):
    """The axes and the size of the groups that a notation stands for, on a mesh of three axes of two."""
    text = f"""HloModule test, {header}

ENTRY %main (x: f32[4]) -> f32[4] {{
  %x = f32[4]{{0}} parameter(0)
  ROOT %all-reduce = f32[4]{{0}} all-reduce(%x), {attributes}, replica_groups={notation}, to_apply=%add
}}
"""
    mesh = jax.sharding.AbstractMesh((2, 2, 2), ("a", "b", "c"))
    return [(each.group, "".join(each.axes)) for each in collectives_of(text, mesh)]


@pytest.mark.parametrize(
    "notation, expected",
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", (2, "c")),
        ("{{0,4},{1,5},{2,6},{3,7}}", (2, "a")),
        ("{{0,1,4,5},{2,3,6,7}}", (4, "ac")),
        ("{{0,1,2},{3},{4},{5},{6},{7}}", (3, "bc")),
        ("[4,2]<=[8]", (2, "c")),
        ("[4,2]<=[2,4]T(1,0)", (2, "a")),
        ("[2,4]<=[2,2,2]T(1,0,2)", (4, "ac")),
        ("[1,8]<=[8]", (8, "abc")),
        ("mesh['a'=2,'b'=2,'c'=2] {'c'}", (2, "c")),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", (4, "ac")),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", (4, "ab")),
        ("mesh[x=4,y=2] {y}", (2, "c")),
        ("mesh['x'=8] {'x'}", (8, "abc")),
        ("mesh['x'=8] {'x':(1)2}", (2, "a")),
        ("mesh['x'=8] {'x':(2)2}", (2, "b")),
        ("mesh['x'=8] {'x':(4)2}", (2, "c")),
        ("mesh['x'=8] {'x':(1)2,'x':(4)2}", (4, "ac")),
        ("mesh['x'=8] {'x':(4)2,'x':(1)2}", (4, "ac")),
        ("mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'x'}", (2, "c")),
        ("mesh['x'=2,'y'=4], device_ids=([2,4]<=[4,2]T(1,0)) {'y'}", (4, "ab")),
        ("mesh['x'=2,'y'=4], device_ids=(0,2,4,6,1,3,5,7) {'x'}", (2, "c")),
    ],
)
def test_every_notation_of_groups(notation, expected):
    assert groups_of(notation) == [expected]


@pytest.mark.parametrize("notation", ["{{0},{1},{2},{3},{4},{5},{6},{7}}", "[8,1]<=[8]", "mesh['x'=8] {}"])
def test_every_notation_of_groups_of_one(notation):
    assert groups_of(notation) == []


@pytest.mark.parametrize(
    "header, attributes, notation, expected",
    [
        ("num_partitions=8", "channel_id=1", "{{0}}", (8, "abc")),
        ("num_partitions=8", "channel_id=1", "{}", (8, "abc")),
        ("replica_count=2, num_partitions=4", "channel_id=1", "{{0},{1}}", (4, "bc")),
        ("replica_count=2, num_partitions=4", "channel_id=1", "{}", (8, "abc")),
        ("replica_count=2, num_partitions=4", "metadata={}", "{{0,1}}", (2, "a")),
        ("replica_count=8", "metadata={}", "{}", (8, "abc")),
        ("replica_count=8", "metadata={}", "mesh['x'=4,'y'=2] {'y'}", (2, "c")),
    ],
)
def test_numbers_of_replicas_and_of_partitions(header, attributes, notation, expected):
    """Whose numbers the groups have, and who is meant by none, depends on two other attributes."""
    assert groups_of(notation, header=header, attributes=attributes) == [expected]


@pytest.mark.parametrize(
    "notation", ["@mesh<a=8> {a}", "mesh['x'=8] {'y'}", "mesh['x'=8] {'x':(3)2}", "{{0,8}}", "{}", "8 devices"]
)
def test_unknown_groups_raise(notation):
    with pytest.raises(UnreadableProgramError, match=r"but .*\n    ROOT %all-reduce = "):
        groups_of(notation)


@pytest.mark.parametrize(
    "old, new, why",
    [
        ("calls=%async_computation", "runs=%async_computation", "looks like a collective and was not reached"),
        ("body=%body", "repeats=%body", "looks like a collective and was not reached"),
        (" collective-permute-start(", " collective-swap-start(", "looks like a collective and was not reached"),
        ("is_host_transfer=true", "is_host_transfer=false", "looks like a collective and was not reached"),
        ("%permute-start = ", "%permute-start := ", "looks like a collective and was not reached"),
        ("ENTRY %main", "%main", "has 0 entries instead of 1"),
        ("body=%body", "body=%elsewhere", "the computation elsewhere is missing"),
        ("(f32[16,4]{1,0}, f32[128,4]{1,0}) all-gather-start", "f32[128,4]{1,0} all-gather-start", "has no result"),
        ("f32[16,4]{1,0}, u32[], u32[])", "word[16,4]{1,0}, u32[], u32[])", "the type word has no known size"),
        ("source_target_pairs={{0,1},{1,0},{2,2}}", "pairs=ring", "pairs of devices are in an unknown notation"),
    ],
)
def test_what_is_not_understood_raises(old, new, why):
    assert old in GPU
    with pytest.raises(UnreadableProgramError, match=re.escape(why)):
        collectives_of(GPU.replace(old, new))
