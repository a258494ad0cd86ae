"""Random ways to look up and write by index, against `jax.value_and_grad`, in float64.

The axis of the examples is a batching, an offset or a collapsed dimension of the gather or scatter. The array, its
indices or both come from the batch. Some axes have as many elements as there are examples, but do not count them.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuzz.interpreter import results_of
from jax import lax

import anybatch as ab

pytestmark = pytest.mark.every_jax

WIDTH = 3


def draw_array(rng, params, batch):
    """An array of two or three axes, of the batch or of the parameters, and which of its axes has the examples."""
    count, x = len(batch["x"]), batch["x"]
    by_count = jnp.einsum("bi,ij->bj", x, params["by_count"])  # as wide as there are examples
    arrays = [
        x * params["w"][None],
        by_count,
        by_count[:, :, None] * params["w"][None, None],
        jnp.einsum("bi,ijk->bjk", x, params["cube"]),
        jnp.repeat(x * params["w"][None], 2, axis=0)[:, :, None] * params["w"][None, None],
        params["table"],
        params["table"][:, :, None] * params["w"][None, None],
        params["cube"],
        jnp.broadcast_to(params["w"][None, :], (count, WIDTH)),
    ]
    array = rng.choice(arrays)
    return jnp.transpose(array, rng.sample(range(array.ndim), array.ndim))


def draw_indices(rng, batch, bound, length):
    """Integers from `-bound` to `bound`, `length` of them: those of the batch, counted, or any."""
    kinds = ["counted", "counted", "backwards", "negative", "shifted", "any"]
    if len(batch["label"]) == length:
        kinds += ["label", "label"]
    kind = rng.choice(kinds)
    counted = jnp.arange(length)
    match kind:
        case "counted":
            indices = counted
        case "backwards":
            indices = counted[::-1]
        case "negative":
            indices = counted - bound
        case "shifted":
            indices = counted + 1
        case "any":
            indices = jnp.asarray([rng.randrange(bound) for _ in range(length)])
        case "label":
            indices = batch["label"]
    return indices % bound - (bound if kind == "negative" else 0)


def look_up(rng, array, batch):
    """Some elements of `array`."""
    axis = rng.randrange(array.ndim)
    other = rng.choice([each for each in range(array.ndim) if each != axis])
    signed = rng.choice([axis, axis - array.ndim])
    size, length = array.shape[axis], array.shape[other]
    mode = rng.choice([None, "clip", "fill"])
    kinds = "take along along_wide fancy both vmapped vmapped_slice diagonal dynamic"
    kinds += " set add few update put vmapped_put segments"
    match rng.choice(kinds.split()):
        case "take":
            indices = draw_indices(rng, batch, size, rng.choice([len(batch["x"]), 2]))
            return jnp.take(array, indices, signed, mode=mode)
        case "along" | "along_wide" as kind:
            indices = jnp.expand_dims(
                draw_indices(rng, batch, size, length), [e for e in range(array.ndim) if e != other]
            )
            if kind == "along_wide":
                indices = jnp.broadcast_to(indices, [3 if e == axis else n for e, n in enumerate(array.shape)])
            return jnp.take_along_axis(array, indices, signed, mode=mode)
        case "fancy":
            position = [slice(None)] * array.ndim
            position[axis], position[other] = draw_indices(rng, batch, size, length), jnp.arange(length)
            return array[tuple(position)]
        case "both":
            count = rng.choice([len(batch["x"]), length])
            position = [slice(None)] * array.ndim
            position[axis], position[other] = (draw_indices(rng, batch, n, count) for n in (size, length))
            return array.at[tuple(position)].get(mode=mode)
        case "vmapped":
            indices = draw_indices(rng, batch, size, length)
            inner = axis - (other < axis)
            return jax.vmap(lambda a, i: jnp.take(a, i, inner), (other, 0), rng.choice([0, -1]))(array, indices)
        case "vmapped_slice":
            indices = draw_indices(rng, batch, size, length)
            inner = axis - (other < axis)
            return jax.vmap(lambda a, i: lax.dynamic_slice_in_dim(a, i, min(2, size), inner), (other, 0))(
                array, indices
            )
        case "diagonal":
            found = jnp.diagonal(array, rng.choice([0, 0, 1, -1]), axis, other)
            return found if found.size else array
        case "dynamic":
            start = rng.choice([0, 1, jnp.argmax(batch["x"][0]), batch["label"][0]])
            return lax.dynamic_slice_in_dim(array, start, rng.choice([size, max(1, size - 1)]), axis)
        case "update":
            start = rng.choice([0, 1, batch["label"][0]])
            part = jnp.sin(lax.slice_in_dim(array, 0, rng.choice([size, 1]), axis=axis))
            return lax.dynamic_update_slice_in_dim(array, part, start, axis)
        case "segments":
            moved = jnp.moveaxis(array, axis, 0)
            return jax.ops.segment_sum(moved, draw_indices(rng, batch, size, size) % 3, 3)
        case "put":
            indices = jnp.expand_dims(
                draw_indices(rng, batch, size, length), [e for e in range(array.ndim) if e != other]
            )
            indices = jnp.broadcast_to(indices, [1 if e == axis else n for e, n in enumerate(array.shape)])
            values = jnp.cos(jnp.take_along_axis(array, indices, signed))
            return jnp.put_along_axis(array, indices, values, signed, inplace=False)
        case "vmapped_put":
            indices = draw_indices(rng, batch, size, length)
            array = jnp.moveaxis(array, axis, -1)
            axes = (other - (axis < other), 0)
            add = rng.random() < 0.5

            def put(a, i):
                return a.at[..., i].add(jnp.sin(a[..., i])) if add else a.at[..., i].set(0.5)

            return jax.vmap(put, axes)(array, indices)
        case "few":
            position = [slice(None)] * array.ndim
            position[axis] = draw_indices(rng, batch, size, 2)
            return array.at[tuple(position)].add(jnp.sin(array[tuple(position)]))
        case name:
            position = [slice(None)] * array.ndim
            position[axis], position[other] = draw_indices(rng, batch, size, length), jnp.arange(length)
            return getattr(array.at[tuple(position)], name)(jnp.sin(array[tuple(position)]))


def random_loss(seed):
    def loss(params, batch):
        rng, total = random.Random(f"loss {seed}"), 0.0
        for _ in range(rng.choice([1, 1, 2])):
            array = draw_array(rng, params, batch)
            for _ in range(rng.choice([1, 1, 2])):
                if array.ndim > 1:
                    array = look_up(rng, array, batch)
            total += rng.choice([jnp.mean, jnp.sum])(rng.choice([jnp.sin, jnp.square])(array))
        return total

    return loss


def problem(seed):
    rng = random.Random(f"problem {seed}")
    count = rng.choice([1, 2, 3, 5, 6])
    keys = jax.random.split(jax.random.key(seed), 6)
    params = {
        "w": jax.random.normal(keys[0], (WIDTH,)),
        "by_count": jax.random.normal(keys[1], (WIDTH, count)),
        "cube": jax.random.normal(keys[2], (WIDTH, count, count)),
        "table": jax.random.normal(keys[3], (count, count)),
    }
    batch = {"x": jax.random.normal(keys[4], (count, WIDTH)), "label": jax.random.randint(keys[5], (count,), 0, 3)}
    return params, batch, rng.randint(1, count)


def check(seed):
    loss, (params, batch, size) = random_loss(seed), problem(seed)
    expected = results_of(jax.value_and_grad(loss), params, batch)
    actual = results_of(ab.value_and_grad(loss, microbatch_size=size), params, batch)
    for mine, its in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seed", range(60, 100))
def test_random_indexing(float64, seed):
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 3000))
def test_much_random_indexing(float64, seed):
    check(seed)
