"""Random nestings of jit, scan, remat and plain operations around shared parameters, against `jax.grad`."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import anybatch as ab

pytestmark = pytest.mark.thorough

KINDS = ["plain", "jit", "remat", "scan", "constant of a scan", "cond", "slice", "grad"]


def random_step(rng, depth):
    """A function of three parameters and a row, which uses some of the parameters in some nesting."""
    kind = rng.choice(KINDS) if depth < 3 else "plain"
    picks = [rng.randrange(3) for _ in range(3)]
    shifts = [rng.choice([0.0, 0.0, 0.1]) for _ in range(3)]
    inner = [random_step(rng, depth + 1) for _ in range(rng.choice([1, 2]))] if kind != "plain" else []

    def nested(ws, h):
        for one in inner:
            h = one(ws, h)
        return h

    def step(ws, h):
        some = [ws[pick] + shift for pick, shift in zip(picks, shifts, strict=True)]  # one may well come twice
        if not any(shifts):
            some = [ws[pick] for pick in picks]
        match kind:
            case "plain":
                return jnp.tanh(jnp.tanh(h @ some[0]) @ some[1])
            case "jit":
                return jax.jit(nested)(some, h)
            case "remat":
                return jax.checkpoint(nested)(some, h)
            case "scan":
                return lax.scan(lambda h, row: (nested(ws, h * row[None, :]), None), h, some[0])[0]
            case "constant of a scan":
                return lax.scan(lambda h, _: (nested(ws, h), None), h, None, length=2)[0]
            case "cond":
                return lax.cond(h.sum() > 0, lambda: nested(ws, h), lambda: nested(ws, -h))
            case "slice":
                return nested(ws, h * some[0][1][None, :])
            case "grad":
                return nested(ws, h) + 0.1 * jax.grad(lambda h: jnp.sum(nested(ws, h)))(h)

    return step


def random_loss(seed):
    rng = random.Random(seed)
    steps = [random_step(rng, 0) for _ in range(3)]

    def of_row(ws, row):
        h = row[None]
        for step in steps:
            h = step(ws, h)
        return jnp.sum(jnp.sin(h)) + 0.01 * sum(jnp.sum(w**2) for w in ws)

    return lambda ws, x: jnp.mean(jax.vmap(of_row, in_axes=(None, 0))(ws, x))


def check(seed):
    loss = random_loss(seed)
    ws = list(jax.random.normal(jax.random.key(seed), (3, 3, 3)))
    x = jax.random.normal(jax.random.key(seed + 1), (5, 3))
    expected = jax.jit(jax.grad(loss))(ws, x)
    actual = jax.jit(ab.grad(loss, microbatch_size=2, reduction="mean"))(ws, x)
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_random_programs(float64, seed):
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1300))
def test_many_random_programs(float64, seed):
    check(seed)
