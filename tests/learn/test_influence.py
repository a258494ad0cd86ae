"""How much of an answer comes from held operations, wherever they are in a program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from anybatch.learn.runner.influence import responses

W, X = np.float32(1.5).reshape(()), np.linspace(-1, 2, 24, dtype=np.float32)
OTHER = 2 * X + np.float32(0.5)
SCAN = [{"names": ["scan"], "turns": [4]}]


def gradient(w, x):
    return jax.grad(lambda w: jnp.sum(jnp.square(w * x)))(w)


def added(w, x):
    """The gradient, accumulated in a scan of length 4."""
    return lax.scan(lambda total, part: (total + gradient(w, part), None), jnp.zeros(()), x.reshape(4, -1))[0]


def in_a_reference(w, x):
    total = jax.new_ref(jnp.zeros(()))

    def turn(carry, part):
        total[...] += gradient(w, part)
        return carry, None

    lax.scan(turn, None, x.reshape(4, -1))
    return total[...]


@jax.custom_vjp
def custom(w, x):
    return added(w, x)


custom.defvjp(lambda w, x: (added(w, x), x), lambda x, ct: (ct, x))


def on_devices(w, x):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def share(w, x):
        part = lax.scan(
            lambda total, part: (total + gradient(lax.pcast(w, "data", to="varying"), part), None),
            lax.pcast(jnp.zeros(()), "data", to="varying"),
            x.reshape(4, -1),
        )[0]
        return lax.psum(part, "data")

    return jax.shard_map(share, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(w, x)


# Programs whose complete answer comes from the scan, in different surroundings.
CARRIED = {
    "plain": added,
    "jit": jax.jit(added),
    "checkpoint": jax.checkpoint(added),
    "custom_vjp": custom,
    "devices": on_devices,
    "a reference": in_a_reference,
    "vmap": lambda w, x: jax.vmap(added, (0, None))(jnp.stack([w, w]), x).sum(),
    "a branch": lambda w, x: lax.cond(w > 0, lambda: added(w, x), lambda: jnp.zeros(())),
    "a loop": lambda w, x: lax.fori_loop(0, 2, lambda i, total: total + added(w, x), jnp.zeros(())),
    "a while": lambda w, x: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + added(w, x)), (0, 0.0))[1],
    "a print": lambda w, x: (jax.debug.print("{}", x[0]), added(w, x))[1],
    "of the shapes alone": lambda w, x: added(w, x) / len(x) + jnp.zeros_like(x).sum(),
}
# Programs whose answer partly bypasses the scan: by how much.
AROUND = {
    "0": (lambda w, x: gradient(w, x) + jnp.minimum(jnp.abs(w), 0) * added(w, x), 1.0),
    "where": (lambda w, x: jnp.where(jnp.isnan(w), added(w, x), gradient(w, x)), 1.0),
    "cond": (lambda w, x: lax.cond(w > 9, lambda: added(w, x), lambda: gradient(w, x)), 1.0),
    "little": (lambda w, x: 0.75 * gradient(w, x) + 0.25 * added(w, x), 0.75),
    "cancelled": (lambda w, x: gradient(w, x) + added(w, x) - added(w, x), 1.0),
    "divided": (lambda w, x: gradient(w, x) * added(w, x) / added(w, x), 1.0),
    "another scan": (lambda w, x: lax.scan(lambda t, p: (t + gradient(w, p), None), 0.0, x.reshape(3, -1))[0], 1.0),
    "in a loop": (
        lambda w, x: lax.fori_loop(0, 2, lambda i, t: t + gradient(w, x) + 1e-30 * added(w, x), jnp.zeros(())),
        1.0,
    ),
    "in a reference": (lambda w, x: gradient(w, x) + 1e-30 * in_a_reference(w, x), 1.0),
    "on devices": (lambda w, x: gradient(w, x) + 1e-30 * on_devices(w, x), 1.0),
}


def held(function, selects=SCAN, others=(W, OTHER), distorts=False):
    """The answer before, held and after; the first two are None if nothing can reach it."""
    traced = jax.jit(function).trace(W, X)
    found = responses(traced.jaxpr, selects, [W, X], list(others), distorts=distorts)
    return found and (float(found[0][0]), float(jax.jit(function)(*others)), float(found[1][0]))


@pytest.mark.parametrize("function", CARRIED.values(), ids=CARRIED)
def test_nothing_goes_around_a_scan_that_carries_all(function):
    found = held(function)
    assert found is None or abs(found[2] - found[0]) <= 1e-6 * abs(found[0])
    before, _, after = held(function, [{"names": ["none of these"]}])  # nothing is held
    assert np.isclose(before, function(W, X)) and np.isclose(after, function(W, OTHER)) and before != after


def test_what_cannot_be_reached_needs_no_run():
    assert held(added) is None and held(jax.jit(added)) is None and held(on_devices) is None


@pytest.mark.parametrize("function, share", AROUND.values(), ids=AROUND)
def test_what_goes_around_a_scan_is_seen(function, share):
    before, after, kept = held(function)
    assert np.isclose((kept - before) / (after - before), share, atol=1e-5)


def twice(a):
    """A scan that only passes on its input."""
    return lax.scan(lambda c, _: (2 * c, None), a, None, length=4)[0] / 2**4


# Programs whose scan gets something computed from the batch, and programs whose scan gets the batch itself.
HANDED_THROUGH = {
    "a carry": lambda w, x: twice(gradient(w, x)),
    "of slices": lambda w, x: twice(sum(2 * w * one * one for one in x)),
    "many": lambda w, x: twice(jnp.broadcast_to(gradient(w, x), x.shape))[0],
    "in a call": lambda w, x: jax.jit(twice)(jax.jit(gradient)(w, x)),
    "in a branch": lambda w, x: lax.cond(w > 0, lambda a: twice(a), lambda a: a, gradient(w, x)),
    "in a loop": lambda w, x: lax.fori_loop(0, 2, lambda i, t: t + twice(gradient(w, x)), 0.0),
    "in a later iteration": lambda w, x: lax.fori_loop(0, 2, lambda i, c: (gradient(w, x), twice(c[0])), (0.0, 0.0))[1],
}
PREPARED = {
    "scaled": lambda w, x: added(w, 2 * x),
    "where": lambda w, x: added(w, jnp.where(x > 0, x, 0.0)),
    "in a call": lambda w, x: added(w, jax.jit(lambda x: jnp.square(x) + 1)(x)),
    "two passes": lambda w, x: added(w - 0.1 * added(w, x), x),
}


@pytest.mark.parametrize("function", HANDED_THROUGH.values(), ids=HANDED_THROUGH)
def test_what_is_made_before_a_scan_is_seen(function):
    before, after, kept = held(function, [SCAN[0] | {"given": True}])
    assert abs(kept - before) > 0.4 * abs(after - before) > 0
    found = held(function)
    assert found is None or np.isclose(found[2], found[0])


@pytest.mark.parametrize("function", (CARRIED | PREPARED).values(), ids=[*CARRIED, *PREPARED])
def test_a_scan_may_be_given_a_prepared_batch(function):
    found = held(function, [SCAN[0] | {"given": True}])
    assert found is None or np.isclose(found[2], found[0], rtol=1e-6)


@pytest.mark.parametrize("function", [each for name, each in CARRIED.items() if name != "a print"])
def test_a_result_that_is_distorted_changes_the_answer(function):
    before, _, distorted = held(function, others=(W, X), distorts=True)
    assert abs(distorted - before) > 0.04 * abs(before)


def test_a_result_that_does_not_matter_can_be_distorted():
    for function in (AROUND[name][0] for name in ("0", "where", "cancelled", "divided")):
        found = held(function, others=(W, X), distorts=True)
        assert found is None or np.isclose(found[2], found[0], rtol=1e-5)


def test_derivatives_are_told_by_what_made_them():
    def each(w, x):
        return jax.vmap(jax.grad(lambda w, x: jnp.square(w * x)), (None, 0))(w, x).sum()

    def formula(w, x):
        return 2 * w * jnp.sum(x * x)

    derivative, of_each = [{"stack": "jvp"}], [{"stack": r"vmap\(.*jvp"}]
    assert held(each, derivative) is None and held(each, of_each) is None and held(gradient, derivative) is None
    before, after, kept = held(formula, derivative)
    assert np.isclose(kept, after) and before != after
    before, after, kept = held(gradient, of_each)
    assert np.isclose(kept, after) and before != after
    in_a_loop = [{"names": ["scan"], "around": "jvp"}]
    assert held(added, in_a_loop) is None
    assert held(added, [{"inside": "scan", "size": 6}])[2] == pytest.approx(float(added(W, X)))
