"""Is the fuzzer of blocks good enough? Blocks are made wrong on purpose, and a random program must notice it.

Where no random program does, a loss of the table `wide_losses.py` must.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from cases.comparing import assert_same, quick_jit
from cases.wide_losses import WIDE
from fuzz.wide_programs import WideProgram, compare
from jax import lax

import anybatch as ab
from anybatch.jaxprs import tracing
from anybatch.reading import block_loop
from anybatch.reading.block_loop import BlockLoop
from anybatch.reading.blocks import BlockedProgram, CotangentProgram
from anybatch.reading.reader import RuleResult
from anybatch.reading.regions import Region, RegionReader, Regions
from anybatch.reading.states import SUMMED, Batched, NotRowwise

pytestmark = pytest.mark.slow

MOST_PROGRAMS = 150


@pytest.fixture(autouse=True)
def as_their_authors_write(float64):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def replace(owner, name, make):
    """A mutation that replaces an attribute."""
    return lambda monkeypatch: monkeypatch.setattr(owner, name, make(getattr(owner, name)))


def believe(names, answer):
    """A mutation of regions alone: where the rules of these primitives refuse, an answer is believed."""

    def make(right):
        def guarded(self, rule, node, states):
            try:
                return right(self, rule, node, states)
            except NotRowwise:
                outcome = answer(node, states) if node.name in names.split() else None
                if outcome is None:
                    raise
                return outcome

        return guarded

    return replace(RegionReader, "_guarded", make)


def a_sum(node, states):
    return RuleResult([SUMMED]) if any(isinstance(state, Batched) for state in states) else None


def same_rows(node, states):
    fits = isinstance(states[0], Batched) and node.outputs[0].shape == node.inputs[0].shape
    return RuleResult([states[0]] * len(node.outputs)) if fits else None


def untransposed(right):
    def guarded(self, rule, node, states):
        outcome = right(self, rule, node, states)
        if node.name == "transpose" and isinstance(states[0], Batched) and len(set(node.inputs[0].shape)) == 1:
            return RuleResult([states[0]])
        return outcome

    return guarded


def without_the_ragged_block(right):
    def over_blocks(self, step, carry, length):
        size = max(1, min(self.block_size, length))
        starts = jnp.arange(length // size, dtype=jnp.int32) * size
        return lax.scan(lambda carry, start: (step(carry, start, size), None), carry, starts)[0]

    return over_blocks


def entries_of_the_last_block(right):
    def over_blocks(self, step, carry, length):
        def forgetful(carry, start, size):
            if isinstance(carry, tuple):
                carry = (*carry[:2], [jnp.zeros_like(each) for each in carry[2]])
            return step(carry, start, size)

        return right(self, forgetful, carry, length)

    return over_blocks


def sums_of_the_last_block(right):
    def collect(self, made, new, length, start):
        kept = [
            each if isinstance(state, Batched) else jnp.zeros_like(each)
            for each, state in zip(made, self.states, strict=True)
        ]
        return right(self, kept, new, length, start)

    return collect


def without_totals(right):
    def backward(self, cuts, entries, cotangents, *, keeps_exits, totals=None):
        return right(self, cuts, entries, cotangents, keeps_exits=keeps_exits)

    return backward


def doubled(right):
    return lambda self, run, seeds: [2 * each for each in right(self, run, seeds)]


def first_exit_alone(right):
    return property(lambda self: right.fget(self)[:1])


MUTATIONS = {
    "positions start at 0 in every block": replace(
        block_loop, "Examples", lambda right: lambda start, *a: right(0, *a)
    ),
    "the first rows for every block": replace(
        block_loop,
        "take_rows",
        lambda right: lambda array, rows, length, start, size: right(array, rows, length, 0, size),
    ),
    "a maximum over the rows is a sum": believe("reduce_max reduce_min argmax argmin", a_sum),
    "a cumulative sum over the rows is rows": believe("cumsum cumlogsumexp cummax", same_rows),
    "sorting the rows is rows": believe("sort", same_rows),
    "rows of a transposed value are along the same axis": replace(RegionReader, "_guarded", untransposed),
    "known cotangents are doubled": replace(CotangentProgram, "__call__", doubled),
    "cotangents that depend on results are known": replace(
        tracing.Traced, "inputs_used_by", lambda right: lambda self, position: [False] * len(right(self, position))
    ),
    "cotangents of two regions do not need each other": replace(
        BlockedProgram, "_needs", lambda right: lambda *_: False
    ),
    "only the first result has a cotangent": replace(Region, "differentiated", first_exit_alone),
    "blocks are put at the beginning": replace(
        block_loop,
        "put_block",
        lambda right: lambda array, new, rows, length, start: right(array, new, rows, length, 0),
    ),
    "blocks are put one row too far": replace(
        block_loop,
        "put_block",
        lambda right: lambda array, new, rows, length, start: right(array, new, rows, length, start + 1),
    ),
    "the gradient of an entry is that of the last block": replace(BlockLoop, "_over_blocks", entries_of_the_last_block),
    "a sum is that of the last block": replace(BlockLoop, "_collect", sums_of_the_last_block),
    "the ragged block is dropped": replace(BlockLoop, "_over_blocks", without_the_ragged_block),
    "totals are ignored": replace(BlockLoop, "backward", without_totals),
    "a slice begins at the first row": replace(
        Regions,
        "_sliced",
        lambda right: lambda self: {value: (region, 0, size) for value, (region, _, size) in right(self).items()},
    ),
    "a cotangent may be divided": replace(Regions, "_dividing_a_cotangent", lambda right: lambda self: None),
}


def table_goes_wrong(case):
    """Whether a loss of the table comes out different, or not at all."""
    full = jax.value_and_grad(case.loss, has_aux=case.has_aux)
    mine = ab.value_and_grad(case.loss, has_aux=case.has_aux, microbatch_size=2, block_size=3)
    try:
        expected, actual = quick_jit(lambda *args: (full(*args), mine(*args)))(*case.make(jnp.float64))
        assert_same(actual, expected, rtol=1e-8, atol=1e-8)
    except Exception:
        return True
    return False


def program_goes_wrong(seed):
    return compare(WideProgram(seed)).kind in ("different", "crashed")


def noticed_by():
    """Everything that goes wrong, one after the other: random programs first, then the losses of the table."""
    for seed in range(MOST_PROGRAMS):
        if program_goes_wrong(seed):
            yield f"program {seed}", functools.partial(program_goes_wrong, seed)
    for case in reversed(WIDE):  # the latest are those that were once wrong
        if table_goes_wrong(case):
            yield case.name, functools.partial(table_goes_wrong, case)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_block_is_noticed(name):
    with pytest.MonkeyPatch.context() as monkeypatch:
        MUTATIONS[name](monkeypatch)
        by, repeat = next(noticed_by(), (None, None))
    print(f"{name}: noticed by {by}")
    assert by is not None, f"noticed by none of {MOST_PROGRAMS} programs and {len(WIDE)} losses"
    assert not repeat()  # the control: with the right code, nothing goes wrong
