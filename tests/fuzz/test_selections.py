"""Random selections of rows of the batch before a model, against `jax.value_and_grad`, in float64."""

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


def select(rng, x):
    """Rows of `x`, selected at random: anything from one row to three times as many."""
    count = len(x)
    kind = rng.choice("slice stride pad rev roll repeat gather dynamic sort concatenate scale shift take".split())
    first, last = sorted(rng.sample(range(count + 1), 2))
    match kind:
        case "slice":
            return x[first:last]
        case "stride":
            return x[first :: rng.choice([1, 2, 3])] if first < count else x
        case "pad":
            config = [(rng.randint(-1, 2), rng.randint(-1, 2), rng.choice([0, 0, 1])), (0, 0, 0)]
            padded = lax.pad(x, jnp.asarray(0.3, x.dtype), config)
            return padded if len(padded) else x
        case "rev":
            return x[::-1]
        case "roll":
            return jnp.roll(x, rng.randint(1, 3), axis=0)
        case "repeat":
            return jnp.repeat(x, rng.choice([2, 3]), axis=0)
        case "gather":
            return x[np.array([rng.randrange(count) for _ in range(rng.randint(1, 2 * count))])]
        case "dynamic":
            return lax.dynamic_slice_in_dim(x, rng.randrange(count), rng.randint(1, count))
        case "sort":
            return jnp.sort(x, axis=0)
        case "concatenate":
            return jnp.concatenate([x[first:last], x, x[:1]][: rng.choice([2, 3])])
        case "scale":
            return jnp.sin(x * rng.uniform(0.5, 2.0)) + x
        case "shift":
            return x[1:] - x[:-1] if count > 1 else x
        case "take":
            return jnp.take(x, jnp.argsort(x[:, 0])[: max(1, count // 2)], axis=0)


def random_loss(seed):
    rng = random.Random(seed)
    plan = [(rng.randint(0, 3), rng.random(), rng.choice(["mean", "sum", "rms", "dropout"])) for _ in range(3)]
    plan = plan[: rng.choice([1, 2, 2, 3])]

    def model(params, x):
        return jnp.tanh(x @ params["w"] + params["b"][None, :]) @ params["v"]

    def loss(params, x):
        outputs = []
        for number, (depth, draw, _) in enumerate(plan):
            own, rows = random.Random(f"{seed} {number} {draw}"), x
            for _ in range(depth):
                rows = select(own, rows)
            outputs.append(model(params, rows))
        total = 0.0
        for (_, _, how), out in zip(plan, outputs, strict=True):
            match how:
                case "mean":
                    total += jnp.mean(out**2)
                case "sum":
                    total += jnp.sum(jnp.sin(out))
                case "rms":
                    total += jnp.sqrt(jnp.mean(out**2) + 0.1)
                case "dropout":
                    kept = jax.random.bernoulli(jax.random.key(seed), 0.5, out.shape)
                    total += jnp.mean(jnp.where(kept, out**2, jnp.zeros_like(out)))
        out, other = outputs[0], outputs[-1]
        if seed % 3 == 0 and len(out) == len(other):
            total += jnp.mean(out * other)
        if seed % 5 == 0:
            total += 0.1 * jnp.mean((out[:, None] * other[None, :]) ** 2)
        return total

    return loss


def check(seed):
    loss, rng = random_loss(seed), random.Random(seed)
    count = rng.choice([1, 2, 5, 8, 12])
    keys = jax.random.split(jax.random.key(seed), 4)
    params = {
        "w": jax.random.normal(keys[0], (WIDTH, WIDTH)),
        "b": jax.random.normal(keys[1], (WIDTH,)),
        "v": jax.random.normal(keys[2], (WIDTH,)),
    }
    x = jax.random.normal(keys[3], (count, WIDTH))
    expected = results_of(jax.value_and_grad(loss), params, x)
    actual = results_of(ab.value_and_grad(loss, microbatch_size=rng.randint(1, count)), params, x)
    for mine, its in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_random_selections(float64, seed):
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 2000))
def test_many_random_selections(float64, seed):
    check(seed)
