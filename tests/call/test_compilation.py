"""Compiles once, traces little, and never runs a stale program."""

import gc
import re
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.compilations import counted_compilations

import anybatch as ab

pytestmark = pytest.mark.every_jax


def loss(w, x):
    return jnp.mean(jnp.tanh(x * w) ** 2)


@pytest.mark.parametrize("microbatch_size", [3, 4, None])
def test_jit_traces_the_loss_once_for_each_size(microbatch_size):
    traces = {3: 2, 4: 1, None: 1}  # of 8 examples: microbatches of 3 and 2, of 4, of 8
    counted = chex.assert_max_traces(loss, traces[microbatch_size])
    fun = jax.jit(ab.value_and_grad(counted, microbatch_size=microbatch_size, reduction="mean"))
    for scale in (1.0, 2.0, 3.0):
        fun(scale, jnp.arange(8.0))
    chex.clear_trace_counter()


@pytest.mark.parametrize("microbatch_size", [3, None])
def test_eager_calls_compile_once(microbatch_size):
    fun = ab.value_and_grad(loss, microbatch_size=microbatch_size, reduction="mean")
    x = jnp.arange(8.0)
    fun(0.5, x)
    with counted_compilations() as count:
        for scale in (1.0, 2.0, 3.0):
            fun(scale, x)
    assert count == [0]


def test_the_counter_counts():
    with counted_compilations() as count:
        jax.jit(lambda x: x * 3.25 + 1)(jnp.ones(17))
    assert count[0] >= 1


def test_eager_calls_see_a_changed_global():
    """A cache by the identity of the loss would return the gradient of yesterday's loss."""
    state = {"scale": jnp.asarray(1.0), "power": 2}

    def reads_state(w, x):
        return jnp.sum(state["scale"] * (w * x) ** state["power"])

    fun = ab.grad(reads_state, microbatch_size=2, reduction="sum")
    x = jnp.asarray([1.0, 2.0, 3.0])
    for scale, power in [(1.0, 2), (5.0, 2), (5.0, 3), (1.0, 2)]:
        state.update(scale=jnp.asarray(scale), power=power)
        np.testing.assert_allclose(fun(2.0, x), jax.grad(lambda w, x: reads_state(w, x))(2.0, x), rtol=1e-6)


def test_eager_calls_see_a_changed_attribute():
    class Distillation:
        teacher = jnp.asarray(1.0)

        def loss(self, w, x):
            return jnp.mean((w * x - self.teacher * x) ** 2)

    model = Distillation()
    fun = ab.grad(model.loss, microbatch_size=2, reduction="mean")
    x = jnp.asarray([1.0, 2.0, 3.0])
    first = float(fun(2.0, x))
    model.teacher = jnp.asarray(2.0)
    assert first != 0
    assert float(fun(2.0, x)) == 0


def test_weak_types_do_not_depend_on_what_was_compiled_before():
    def weak_type_of(make):
        fun = ab.value_and_grad(lambda w, x: (jnp.mean(x) * w, make()), has_aux=True, microbatch_size=None)
        return fun(1.5, jnp.ones(6))[0][1].weak_type

    for _ in range(2):
        assert weak_type_of(lambda: jnp.asarray(6.0))
        assert not weak_type_of(lambda: jnp.float32(6.0))


def test_eager_calls_keep_no_array_alive():
    """What is kept is an executable: neither the batch of the first call nor what the loss closed over."""
    held = {"teacher": jnp.full((3, 1237), 2.0)}
    fun = ab.grad(lambda w, x: jnp.sum(w * x * held["teacher"].sum()), microbatch_size=2, reduction="sum")
    fun(2.0, jnp.ones((1237,)))
    held.clear()
    gc.collect()
    assert not [array.shape for array in jax.live_arrays() if 1237 in array.shape]


def test_eager_calls_follow_their_arguments_to_another_device():
    fun = ab.grad(loss, microbatch_size=2, reduction="mean")
    x = jnp.arange(5.0)
    expected = fun(0.5, x)
    for device in jax.devices()[1:3]:
        moved = fun(jax.device_put(0.5, device), jax.device_put(x, device))
        assert moved.devices() == {device}
        np.testing.assert_array_equal(moved, expected)


def test_imported_first_inside_a_jit_it_still_knows_when_it_is_eager():
    program = """
import jax

@jax.jit
def first_use(x):
    import anybatch as ab
    return ab.grad(lambda w, x: jax.numpy.sum(w * x), microbatch_size=2, reduction="sum")(x, jax.numpy.arange(5.0))

first_use(1.0)
from anybatch.jaxprs import versions
print(versions.is_eager(), jax.jit(lambda x: x if versions.is_eager() else -x)(1.0))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "True -1.0\n"


def test_the_full_batch_compiles_to_what_jax_compiles_to():
    """One microbatch costs nothing: the same program as `jax.value_and_grad`, down to the bytes."""

    def fun(p, x):
        return jnp.mean(jnp.tanh(x @ p["w"]) ** 2)

    params, x = {"w": jnp.ones((16, 8))}, jnp.ones((32, 16))
    plain = jax.jit(jax.value_and_grad(fun)).lower(params, x).compile()
    for size in (None, 32, 100):
        ours = jax.jit(ab.value_and_grad(fun, microbatch_size=size, reduction="mean")).lower(params, x).compile()
        assert _operations(ours) == _operations(plain) != []
        assert ours.memory_analysis().temp_size_in_bytes == plain.memory_analysis().temp_size_in_bytes
        assert ours.cost_analysis()["flops"] == plain.cost_analysis()["flops"]


def _operations(compiled):
    """The opcodes of a compiled program, in order, without names and metadata."""
    return re.findall(r" = \S+ ([a-z-]+)\(", compiled.as_text())


def test_the_scan_is_visible_in_the_jaxpr():
    text = str(jax.make_jaxpr(ab.value_and_grad(loss, microbatch_size=2, reduction="mean"))(0.5, jnp.arange(8.0)))
    assert "scan[" in text


def test_a_profile_names_the_parts():
    fun = jax.jit(ab.value_and_grad(loss, microbatch_size=3, reduction="mean"))
    text = fun.lower(0.5, jnp.arange(8.0)).compile().as_text()
    for part in ("anybatch_microbatch", "anybatch_last_microbatch", "anybatch_head"):
        assert part in text
