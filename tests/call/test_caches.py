"""Caches are bounded and thread-safe. After they are cleared, the next call compiles and plans again."""

import random
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.compilations import counted_compilations
from jax.extend import core as jex_core
from jax.interpreters import mlir

import anybatch as ab
from anybatch.call.caches import Cache
from anybatch.reading.rules import RULES, USER_RULES

X = jnp.arange(24.0).reshape(8, 3)


def compilations(fun, *args):
    with counted_compilations() as count:
        jax.block_until_ready(fun(*args))
    return count[0]


# The class.


def test_a_full_cache_forgets_its_oldest_entry():
    cache = Cache(3)
    for number in range(5):
        cache.put(number, str(number))
    assert len(cache) == 3 and list(cache) == [2, 3, 4]
    assert cache.get(1) is None and cache.get(4) == "4"


def test_an_entry_that_was_read_is_not_the_oldest():
    cache = Cache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert list(cache) == ["a", "c"]


def test_an_entry_that_was_replaced_is_not_the_oldest():
    cache = Cache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    cache.put("a", 10)
    cache.put("c", 3)
    assert list(cache) == ["a", "c"] and cache.get("a") == 10


def test_a_key_that_is_not_there_does_not_change_the_order():
    cache = Cache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("z") is None
    cache.put("c", 3)
    assert list(cache) == ["b", "c"]


def test_eight_threads_use_one_cache():
    """Every value that is found is the one of its key, and there are never more entries than the capacity."""
    cache, errors, together = Cache(16), [], threading.Barrier(8)

    def work(seed):
        draw = random.Random(seed)
        together.wait()
        try:
            for _ in range(2000):
                key = draw.randrange(40)
                found = cache.get(key)
                assert found is None or found == key**2
                cache.put(key, key**2)
                assert len(cache) <= 16
                list(cache)
                if draw.random() < 0.01:
                    cache.cache_clear()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(cache) <= 16


def test_clear_caches_empties_every_cache():
    caches = [Cache(4), Cache(4, of_programs=True)]
    for cache in caches:
        cache.put("a", 1)
    ab.clear_caches()
    assert [len(cache) for cache in caches] == [0, 0]


def test_jax_clears_programs_only():
    decisions, programs = Cache(4), Cache(4, of_programs=True)
    for cache in (decisions, programs):
        cache.put("a", 1)
    jax.clear_caches()
    assert (len(decisions), len(programs)) == (1, 0)


# Calls.


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


W = jnp.ones(3)


@pytest.mark.parametrize("clear", [ab.clear_caches, jax.clear_caches], ids=["anybatch", "jax"])
@pytest.mark.parametrize("microbatch_size", [3, None])
def test_after_clearing_a_call_compiles_again(clear, microbatch_size):
    fun = ab.value_and_grad(loss, microbatch_size=microbatch_size)
    before = fun(W, X)
    assert compilations(fun, W, X) == 0  # the control: a program is kept
    clear()
    assert compilations(fun, W, X) >= 1
    assert compilations(fun, W, X) == 0
    np.testing.assert_array_equal(fun(W, X)[1], before[1])


def test_after_clearing_a_call_plans_again():
    """A decision is found again without reading the memory of the device, and after clearing it is not."""
    from anybatch.planning.planner import _DECIDED

    ab.clear_caches()
    fun = ab.value_and_grad(loss, memory="1GiB")
    fun(W, X)
    decided = list(_DECIDED)
    assert decided
    fun(W, X)
    assert list(_DECIDED) == decided  # the control: the second call needs no other decision
    ab.clear_caches()
    assert not list(_DECIDED)
    fun(W, X)
    assert list(_DECIDED) == decided


def test_eight_threads_call_one_gradient():
    ab.clear_caches()
    fun = ab.value_and_grad(loss, microbatch_size=3)
    expected = jax.value_and_grad(loss)(W, X)
    results, errors, together = [], [], threading.Barrier(8)

    def work(seed):
        together.wait()
        try:
            for turn in range(3):
                if seed == 0 and turn == 1:
                    ab.clear_caches()
                results.append(fun(W, X))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(results) == 24
    for value, grad in results:
        np.testing.assert_allclose(value, expected[0], rtol=1e-6)
        np.testing.assert_allclose(grad, expected[1], rtol=1e-6)


# Rules that a user registered are part of a plan's key.


@pytest.fixture
def doubled():
    """A primitive without a rule, whose name no other test uses."""
    primitive = jex_core.Primitive("doubled_in_a_cache_test")
    primitive.def_abstract_eval(lambda x: x)
    primitive.def_impl(lambda x: x * 2)
    mlir.register_lowering(primitive, mlir.lower_fun(lambda x: x * 2, multiple_results=False))
    yield primitive
    RULES.pop(primitive.name, None)
    USER_RULES.pop(primitive.name, None)


def test_a_registered_rule_makes_a_new_plan(doubled, tmp_path, monkeypatch):
    monkeypatch.setenv("ANYBATCH_CACHE", str(tmp_path))

    def loss(w, x):
        return jnp.mean(jnp.tanh(doubled.bind(x) @ w) ** 2)

    w, x = jnp.ones((32, 32)), jnp.ones((256, 32))

    def planned():
        return ab.plan(loss, w, x, memory="1MiB", timed=False).compilations > 0

    assert [planned(), planned()] == [True, False]  # the control: without a change, the plan on disk is used
    ab.register_rule("a_primitive_that_this_loss_does_not_use", lambda axes, params: axes)
    USER_RULES.pop("a_primitive_that_this_loss_does_not_use")
    RULES.pop("a_primitive_that_this_loss_does_not_use")
    assert not planned()
    ab.register_rule(doubled, lambda axes, params: axes)
    assert [planned(), planned()] == [True, False]
    ab.register_rule(doubled, lambda axes, params: [axis for axis in axes])
    assert [planned(), planned()] == [True, False]
