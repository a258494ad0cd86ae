"""Memory that runs out all the same: smaller microbatches, said once, and the same gradient.

Here the runtime only says so; `benchmarks/out_of_memory.py` fills a real GPU.
"""

from typing import ClassVar

import chex
import jax
import jax.numpy as jnp
import pytest
from cases.planned import network, problem

import anybatch as ab
from anybatch.call.caches import Programs
from anybatch.gradients import computation
from anybatch.per_example.computation import ExampleGradient
from anybatch.planning import planner
from anybatch.planning.strategy import Strategy

MESSAGE = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 88.74GiB with allocator GPU_0_bfc on device 0."


@pytest.fixture
def device(monkeypatch):
    """A device on which programs of more than `room` examples at a time run out of memory when they run."""

    class Device:
        room, message, ran = 1000, MESSAGE, []

    state = Device()
    state.ran = []
    original = Programs.compile

    def compile(programs, fun, *arrays, has_effects):
        program = original(programs, fun, *arrays, has_effects=has_effects)
        size = _scanned(fun, arrays)

        class Guarded:
            executable, key, text_hash, has_run = program.executable, None, None, False

            def __call__(self, *values):
                state.ran.append(size)
                if size > state.room:
                    raise jax.errors.JaxRuntimeError(state.message)
                return program(*values)

        return Guarded()

    monkeypatch.setattr(Programs, "compile", compile)
    monkeypatch.setattr(jax, "device_count", lambda: 1)  # so that a slice of the batch is a microbatch
    planner._DECIDED.cache_clear()
    return state


def _scanned(fun, arrays):
    """The number of examples at a time: the batch, or what the loop over microbatches takes of it."""
    sizes = []

    def look(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dynamic_slice":
                sizes.append(equation.outvars[0].aval.shape[0])
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                look(getattr(inner, "jaxpr", inner))

    look(jax.make_jaxpr(fun)(*arrays).jaxpr)
    return max(sizes, default=64)


def test_the_microbatch_is_halved_and_the_gradient_is_the_same(device):
    params, batch = problem(64)
    expected = jax.value_and_grad(network)(params, batch)
    fun = ab.value_and_grad(network)
    device.room = 20
    with pytest.warns(ab.TightMemoryWarning) as caught:
        actual = fun(params, batch)
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-6)
    assert device.ran == [64, 32, 16]
    assert len(caught) == 1
    assert str(caught[0].message).startswith("Memory ran out at microbatch_size=64")
    assert "Continuing with microbatch_size=16; the gradient is the same." in str(caught[0].message)
    assert caught[0].filename == __file__


def test_it_is_said_once_and_the_next_call_begins_there(device, recwarn):
    params, batch = problem(64)
    fun = ab.value_and_grad(network)
    device.room = 20
    fun(params, batch)
    assert len(recwarn) == 1
    del device.ran[:]
    fun(params, batch)
    assert device.ran == [16] and len(recwarn) == 1


def test_what_fails_for_other_reasons_is_raised_as_it_is(device):
    params, batch = problem(64)
    device.room, device.message = 20, "INTERNAL: something else"
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        ab.value_and_grad(network)(params, batch)
    assert device.ran == [64]


@pytest.fixture
def compiler(monkeypatch):
    """A compiler that fails for some methods or sizes, as XLA may for a kernel that asks for too much."""

    class Compiler:
        message = "INTERNAL: a kernel asks for more than there is"
        fails = staticmethod(lambda strategy: False)
        tried: ClassVar[list[Strategy]] = []

    state = Compiler()
    state.tried = []
    original, strategy_of = Programs.compile, {}
    for kind in (computation.Gradient, ExampleGradient):
        make = kind.computation

        def made(gradient, strategy, make=make):
            found = make(gradient, strategy)
            strategy_of[found.fun] = strategy
            return found

        monkeypatch.setattr(kind, "computation", made)

    def compile(programs, fun, *arrays, has_effects):
        strategy = strategy_of[fun]
        state.tried.append(strategy)
        if state.fails(strategy):
            raise jax.errors.JaxRuntimeError(state.message)
        return original(programs, fun, *arrays, has_effects=has_effects)

    monkeypatch.setattr(Programs, "compile", compile)
    planner._DECIDED.cache_clear()
    return state


def test_a_method_that_does_not_compile_is_not_taken_by_default(compiler):
    params, batch = problem(16)
    compiler.fails = lambda strategy: strategy.method == "factored"
    expected = ab.clipped_grad(network, clip_norm=0.1, keep_batch_dim=True, method="vmap")(params, batch)
    for size in ("auto", 4):
        fun = ab.clipped_grad(network, clip_norm=0.1, keep_batch_dim=True, microbatch_size=size)
        del compiler.tried[:]
        with pytest.warns(ab.TightMemoryWarning, match='XLA cannot compile .*method="factored": INTERNAL') as caught:
            chex.assert_trees_all_close(fun(params, batch), expected, rtol=1e-4, atol=1e-6)
        assert caught[0].filename == __file__
        assert [strategy.method for strategy in compiler.tried] == ["factored", "vmap"]
        fun(params, batch)  # the next call begins there
        assert [strategy.method for strategy in compiler.tried] == ["factored", "vmap", "vmap"]


def test_a_method_that_was_asked_for_fails_as_it_is(compiler):
    params, batch = problem(16)
    compiler.fails = lambda strategy: strategy.method == "factored"
    fun = ab.clipped_grad(network, clip_norm=0.1, keep_batch_dim=True, microbatch_size=4, method="factored")
    with pytest.raises(jax.errors.JaxRuntimeError, match="more than there is"):
        fun(params, batch)


def test_a_size_that_does_not_compile_is_never_chosen(compiler):
    params, batch = problem(64)
    expected = jax.value_and_grad(network)(params, batch)
    compiler.fails = lambda strategy: strategy.microbatch_size == 64
    with pytest.warns(ab.TightMemoryWarning, match="XLA cannot compile microbatch_size=64: INTERNAL"):
        actual = ab.value_and_grad(network)(params, batch)
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-6)
    plan = ab.explain(network, params, batch, memory="1GiB", timed=False)
    assert plan.microbatch_size < 64
    assert plan.candidates[0].fits is False
    told = "XLA cannot compile microbatch_size=64: INTERNAL: a kernel asks for more than there is"
    assert told in plan.text(width=None)


def test_what_never_compiles_is_tried_a_few_times_and_raised_as_it_is(compiler):
    params, batch = problem(4096)
    compiler.fails = lambda strategy: True
    for fun in (ab.value_and_grad(network), ab.value_and_grad(network, memory="1GiB")):
        del compiler.tried[:]
        with pytest.raises(jax.errors.JaxRuntimeError, match="more than there is"):
            fun(params, batch)
        assert len(compiler.tried) <= 4


def test_a_plan_of_what_never_compiles_ends(compiler):
    compiler.fails = lambda strategy: True
    with pytest.raises(jax.errors.JaxRuntimeError, match="more than there is"):
        ab.plan(network, *problem(4096), memory="1GiB")
    assert len(compiler.tried) <= 4


def test_where_no_size_is_left_the_error_comes_through(device):
    params, batch = problem(64)
    device.room = 0
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        ab.value_and_grad(network)(params, batch)
    assert device.ran == [64, 32, 16, 8, 4, 2, 1]


def test_a_size_that_was_given_stays_as_given(device):
    params, batch = problem(64)
    device.room = 4
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        ab.value_and_grad(network, microbatch_size=8)(params, batch)
    assert device.ran == [8]


def test_only_the_first_run_of_a_program_is_waited_for(monkeypatch):
    """Later calls return before the program has finished, as those of `jax.jit` do."""
    waited = []
    wait = jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda outputs: waited.append(1) or wait(outputs))
    fun = ab.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2))
    for _ in range(3):
        fun(jnp.ones(5), jnp.ones((8, 5)))
    assert len(waited) == 1
