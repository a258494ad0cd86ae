"""Memory does not grow with the batch, and is no more than a hand-written scan needs."""

import jax
import jax.numpy as jnp
import pytest

import anybatch as ab

pytestmark = pytest.mark.every_jax


def shallow(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["first"])
    return jnp.mean((hidden @ params["second"] - batch["y"]) ** 2)


def shallow_shapes(num_examples, dtype):
    params = {"first": (64, 512), "second": (512, 64)}
    return _shapes(params, {"x": (num_examples, 64), "y": (num_examples, 64)}, dtype)


def scanned(params, batch):
    def layer(hidden, weights):
        return jnp.tanh(hidden @ weights), None

    hidden, _ = jax.lax.scan(layer, batch["x"], params["layers"])
    return jnp.mean((hidden - batch["y"]) ** 2)


def scanned_shapes(num_examples, dtype):
    return _shapes({"layers": (8, 128, 128)}, {"x": (num_examples, 128), "y": (num_examples, 128)}, dtype)


def _shapes(params, batch, dtype):
    def leaf(shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    return tuple(jax.tree.map(leaf, tree, is_leaf=lambda x: isinstance(x, tuple)) for tree in (params, batch))


MODELS = {"shallow": (shallow, shallow_shapes), "scanned": (scanned, scanned_shapes)}


def temporaries(fun, shapes):
    return jax.jit(fun).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


def by_hand(loss, size):
    """What one would write without a library."""

    def value_and_grad(params, batch):
        microbatches = jax.tree.map(lambda leaf: leaf.reshape(-1, size, *leaf.shape[1:]), batch)
        count = jax.tree.leaves(microbatches)[0].shape[0]

        def step(carry, microbatch):
            value, grads = jax.value_and_grad(loss)(params, microbatch)
            return jax.tree.map(lambda total, new: total + new.astype(total.dtype), carry, (value, grads)), None

        zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
        (value, total), _ = jax.lax.scan(step, (jnp.zeros(()), zero), microbatches)
        return value / count, jax.tree.map(lambda leaf, like: (leaf / count).astype(like.dtype), total, params)

    return value_and_grad


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("remainder", [0, 5])
@pytest.mark.parametrize("model", MODELS)
def test_temporaries_do_not_grow_with_the_batch(model, remainder, dtype):
    loss, shapes = MODELS[model]
    fun = ab.value_and_grad(loss, microbatch_size=16, reduction="mean")
    small, large = (temporaries(fun, shapes(n + remainder, dtype)) for n in (512, 16384))
    assert large <= 1.05 * small


@pytest.mark.parametrize("model", MODELS)
def test_the_full_batch_does_grow(model):
    """The control."""
    loss, shapes = MODELS[model]
    small, large = (temporaries(jax.value_and_grad(loss), shapes(n, jnp.float32)) for n in (512, 16384))
    assert large > 10 * small


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_temporaries_are_at_most_those_of_a_hand_written_scan(model, dtype):
    loss, shapes = MODELS[model]
    ours = temporaries(ab.value_and_grad(loss, microbatch_size=16, reduction="mean"), shapes(512, dtype))
    assert ours <= 1.02 * temporaries(by_hand(loss, 16), shapes(512, dtype))


def test_one_gradient_buffer_where_the_layers_are_scanned():
    """In place: a hand-written scan holds the gradient of the stacked layers twice, and so would we."""
    ours = temporaries(
        ab.value_and_grad(scanned, microbatch_size=16, reduction="mean"), scanned_shapes(512, jnp.float32)
    )
    theirs = temporaries(by_hand(scanned, 16), scanned_shapes(512, jnp.float32))
    gradient = 8 * 128 * 128 * 4
    assert ours <= theirs - 0.8 * gradient


def test_the_last_ragged_microbatch_adds_no_copy_of_the_batch():
    loss, shapes = MODELS["shallow"]
    fun = ab.value_and_grad(loss, microbatch_size=16, reduction="mean")
    whole, ragged = (temporaries(fun, shapes(n, jnp.float32)) for n in (16384, 16384 + 5))
    assert ragged <= 1.05 * whole
