"""The programs of clipped sums stay small, since the time to compile them grows with the number of instructions."""

import functools

import jax
import jax.numpy as jnp
import pytest

import anybatch as ab
from anybatch.per_example import kept_gradients, norms


def loss(params, example):
    hidden = example["x"]
    for layer in params:
        hidden = jnp.tanh(hidden @ layer["w"] + layer["b"][None])
    return jnp.mean(hidden**2)


def lowered(fun, layers, examples):
    layer = {"w": jax.ShapeDtypeStruct((16, 16), jnp.float32), "b": jax.ShapeDtypeStruct((16,), jnp.float32)}
    batch = {"x": jax.ShapeDtypeStruct((examples, 4, 16), jnp.float32)}
    return jax.jit(fun).lower([layer] * layers, batch)


def lines(method, examples):
    """The lines of a clipped sum, before XLA optimizes them."""
    fun = ab.clipped_grad(loss, clip_norm=1.0, method=method, microbatch_size=None)
    return len(lowered(fun, 3, examples).as_text().splitlines())


def instructions(fun, layers):
    """The number of instructions of a compiled program, also inside of its kernels."""
    return lowered(fun, layers, 6).compile().as_text().count(" = ")


def relative_to_plain(layers, more):
    """The instructions that further layers add to a clipped sum, in those that they add to the plain gradient."""
    clipped = ab.clipped_grad(loss, clip_norm=1.0, method="factored", microbatch_size=None)
    plain = jax.grad(lambda params, batch: jnp.sum(jax.vmap(loss, (None, 0))(params, batch)))
    of_clipped, of_plain = (instructions(fun, layers + more) - instructions(fun, layers) for fun in (clipped, plain))
    return of_clipped / of_plain


@pytest.mark.parametrize("method", ["factored", "vmap"])
def test_a_program_does_not_grow_with_the_microbatch(method):
    assert lines(method, 31) == lines(method, 4)
    assert lines(method, 32) < 1.5 * lines(method, 4)


def test_a_chain_of_additions_grows_with_the_microbatch(monkeypatch):
    def one_by_one(array, weights, dtype):
        terms = kept_gradients._times(array, weights, dtype)
        return functools.reduce(jnp.add, [terms[index] for index in range(terms.shape[0])])

    monkeypatch.setattr(kept_gradients, "_sum_of_values", one_by_one)
    assert lines("vmap", 32) > 2 * lines("vmap", 4)


@pytest.mark.full
def test_every_layer_adds_as_many_instructions_as_the_one_before():
    """Relative to the plain gradient, whose layers all add the same number."""
    assert relative_to_plain(6, 2) < 1.2 * relative_to_plain(2, 2)


@pytest.mark.full
def test_a_chain_of_squares_is_repeated_in_every_sum(monkeypatch):
    for module in (kept_gradients, norms):
        monkeypatch.setattr(module, "sum_of", lambda squares: functools.reduce(jnp.add, squares))
    assert relative_to_plain(6, 2) > 1.2 * relative_to_plain(2, 2)
