"""Every way in which a parameter reaches a nested function, with every mixture of gradients in place and by value.

The table is generated: `WAYS` nest a function, alone and inside one another; `USES` decide for each of its parameters
whether the gradient is written in place. All of it is compared with `jax.grad`, in float64. What JAX traces is
evaluated with NumPy: compiling all of it would take XLA half an hour.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuzz.interpreter import results_of
from jax import lax

import anybatch as ab
from anybatch.gradients import references
from anybatch.jaxprs import versions

pytestmark = pytest.mark.every_jax

WIDTH, STACKED = 3, 2


# A parameter is used by an operation that may write in place, or by one that may not; or it is changed before it
# reaches the nested function, into a value with a gradient of its own or into one that has the same accumulator.
USES = {
    "in place": (lambda w: w, lambda row: row),
    "by value": (lambda w: w, jax.nn.sigmoid),
    "scaled": (lambda w: 2.0 * w, lambda row: row),
    "shifted": (lambda w: w + 1.0, lambda row: row),
}


def body(uses, leaves, h):
    """A function in which no two parameters play the same part."""
    for number, (use, leaf) in enumerate(zip(uses, leaves, strict=True)):
        row = jnp.sum(USES[use][1](leaf), axis=tuple(range(leaf.ndim - 1)))
        h = jnp.tanh(h * row[None, :]) + 0.3 * (number + 1) * h
    return h


def with_custom_jvp(inner, leaves, h):
    @jax.custom_jvp
    def fun(leaves, h):
        return inner(leaves, h)

    fun.defjvp(lambda primals, tangents: jax.jvp(inner, primals, tangents))
    return fun(leaves, h)


def with_custom_vjp(inner, leaves, h):
    @jax.custom_vjp
    def fun(leaves, h):
        return inner(leaves, h)

    fun.defvjp(lambda *args: jax.vjp(inner, *args), lambda pullback, cotangent: pullback(cotangent))
    return fun(leaves, h)


def flag(leaves):
    return jnp.sum(lax.stop_gradient(leaves[0])) > 0


# Each takes the function to nest, its parameters with one or two stacked axes before the last, and the examples.
WAYS = {
    "scan over": lambda inner, leaves, h: lax.scan(lambda h, ws: (inner(ws, h), None), h, leaves)[0],
    "scan over, reversed": lambda inner, leaves, h: lax.scan(
        lambda h, ws: (inner(ws, h), None), h, leaves, reverse=True
    )[0],
    "scan over, beside data and an intermediate": lambda inner, leaves, h: lax.scan(
        lambda h, xs: (inner(xs[1], h * xs[0]) + xs[2], None),
        h,
        (jnp.arange(1.0, STACKED + 1), leaves, jnp.broadcast_to(jnp.sin(h)[None], (STACKED, *h.shape))),
    )[0],
    "scan, closed over": lambda inner, leaves, h: lax.scan(
        lambda h, _: (inner(leaves, h), None), h, None, length=STACKED
    )[0],
    "scan, carried": lambda inner, leaves, h: lax.scan(
        lambda c, _: ((inner(c[1], c[0]), c[1]), None), (h, leaves), None, length=STACKED
    )[0][0],
    "fori_loop": lambda inner, leaves, h: lax.fori_loop(0, STACKED, lambda _, h: inner(leaves, h), h),
    "map": lambda inner, leaves, h: jnp.sum(lax.map(lambda ws: inner(ws, h), leaves), axis=0),
    "cond": lambda inner, leaves, h: lax.cond(flag(leaves), inner, lambda ws, h: -inner(ws, h), leaves, h),
    "switch": lambda inner, leaves, h: lax.switch(
        flag(leaves).astype(jnp.int32), [inner, lambda ws, h: h, inner], leaves, h
    ),
    "jit": lambda inner, leaves, h: jax.jit(inner)(leaves, h),
    "checkpoint": lambda inner, leaves, h: jax.checkpoint(inner)(leaves, h),
    "checkpoint, with a policy": lambda inner, leaves, h: jax.checkpoint(
        inner, policy=jax.checkpoint_policies.dots_saveable
    )(leaves, h),
    "custom_jvp": with_custom_jvp,
    "custom_vjp": with_custom_vjp,
    "grad": lambda inner, leaves, h: jax.grad(lambda h: jnp.sum(jnp.sin(inner(leaves, h))))(h),
}


def shapes(equal, count, nested):
    """Of parameters that can be mistaken for one another, or that cannot."""
    stack = (STACKED,) * nested
    return [(*stack, WIDTH) if equal or number % 2 else (*stack, 4, WIDTH) for number in range(count)]


def check(cases, nest, nested, reduction):
    """Compares the gradients of all cases, each with parameters of its own, in one program."""
    examples = jax.random.normal(jax.random.key(0), (3, WIDTH))
    params = {}
    for number, (uses, equal) in enumerate(cases):
        keys = jax.random.split(jax.random.key(number + 1), len(uses))
        made = [jax.random.normal(*each) for each in zip(keys, shapes(equal, len(uses), nested), strict=True)]
        params[f"{number:02d}: {', '.join(uses)}; {'equal' if equal else 'unequal'} shapes"] = made

    def loss(params, x):
        total = 0.0
        for (uses, _), leaves in zip(cases, params.values(), strict=True):
            changed = [USES[use][0](leaf) for use, leaf in zip(uses, leaves, strict=True)]
            total += jnp.mean(nest(functools.partial(body, uses), changed, x))
        return total

    expected = results_of(jax.grad(loss), params, examples)
    actual = results_of(ab.grad(loss, microbatch_size=1, reduction=reduction), params, examples)
    for name, wanted in expected.items():
        for leaf, (mine, its) in enumerate(zip(actual[name], wanted, strict=True)):
            np.testing.assert_allclose(mine, its, rtol=1e-11, atol=1e-13, err_msg=f"{name}: parameter {leaf}")
    return expected


MIXTURES = [
    *((uses, True) for uses in itertools.product(USES, repeat=2)),
    *((uses, equal) for uses in itertools.product(["in place", "by value"], repeat=3) for equal in (True, False)),
]


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_every_mixture_of_gradients_in_place_and_by_value(float64, way):
    check(MIXTURES, WAYS[way], 1, "infer")


@pytest.mark.full
@pytest.mark.parametrize("outer", WAYS)
def test_every_way_inside_every_other(float64, outer):
    for inner in WAYS:
        mixtures = [(uses, False) for uses in itertools.product(["in place", "by value"], repeat=2)]

        def nest(fun, leaves, h, inner=inner):
            return WAYS[outer](lambda ws, h: WAYS[inner](fun, ws, h), leaves, h)

        check([*mixtures, (("by value", "in place"), True)], nest, 2, "mean")


def test_the_comparison_can_fail(float64):
    """The control: gradients of parameters of equal shape differ, so that swapping them would be seen."""
    for first, second in check([(("by value", "in place"), True)], WAYS["scan over"], 1, "infer").values():
        assert not np.allclose(first, second, rtol=1e-3)


@pytest.mark.skipif(versions.TRANSPOSES_MIXED_SCANS, reason="this version of JAX transposes mixed scans")
def test_mixed_scans_are_wrong_where_they_are_avoided(float64, monkeypatch):
    """The control: what is avoided in this version of JAX is wrong in it."""
    monkeypatch.setattr(versions, "TRANSPOSES_MIXED_SCANS", True)
    monkeypatch.setattr(references, "reach_nested_functions", lambda *_: False)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check([(("by value", "in place"), True)], WAYS["scan over"], 1, "infer")


# The second line of defence: the terms of both programs are compared.


@pytest.mark.skipif(versions.TRANSPOSES_MIXED_SCANS, reason="this version of JAX transposes mixed scans")
@pytest.mark.parametrize("reduction", ["infer", "mean"])
@pytest.mark.parametrize("equal", [True, False])
def test_mixed_scans_would_be_noticed(float64, monkeypatch, equal, reduction):
    """Where shapes are equal the gradients are swapped; where they are not, JAX fails."""
    monkeypatch.setattr(versions, "TRANSPOSES_MIXED_SCANS", True)
    with pytest.warns(RuntimeWarning, match="1 of 2 are added up by value, which is right"):
        check([(("by value", "in place"), equal)], WAYS["scan over"], 1, reduction)


def programs(params, x):
    """One step of an accumulation, in references and as values."""

    def loss(params):
        h = lax.scan(lambda h, ws: (jnp.tanh(h * ws[0][None]) + jnp.sin(h @ ws[1]), None), x, params["layers"])[0]
        return jnp.mean(jax.checkpoint(jnp.sin)(h @ params["table"].T) * params["table"][jnp.array([1, 2, 1])])

    def by_value(totals):
        return references.add(
            jax.vjp(lambda leaves: loss(tree.unflatten(leaves)), leaves)[1], 1.0, totals, mutate=False
        )

    def in_place(totals):
        return references.add(jax.vjp(lambda leaves: loss(tree.unflatten(leaves)), leaves)[1], 1.0, totals, mutate=True)

    leaves, tree = jax.tree.flatten(params)
    totals = [jnp.zeros_like(leaf) for leaf in leaves]
    return [jax.make_jaxpr(fun)(totals) for fun in (by_value, in_place)]


def test_fingerprints_tell_which_terms_a_program_adds_up(float64):
    params = {
        "layers": [jnp.ones((2, WIDTH)), jnp.ones((2, WIDTH, WIDTH))],
        "table": jnp.ones((3, WIDTH)),
    }
    by_value, in_place = programs(params, jnp.ones((3, WIDTH)))
    names = range(3)
    expected = references.fingerprints(by_value, names)
    assert expected == references.fingerprints(in_place, names)
    assert len(set(expected)) == 3
    # The control: in another program, terms are others, or those of another parameter.
    assert expected != references.fingerprints(programs(params, 2.0 * jnp.ones((3, WIDTH)))[0], names)
    assert expected != references.fingerprints(in_place, [1, 0, 2])


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="this version of JAX is right there")
def test_an_accumulator_that_is_given_twice_would_be_noticed(float64, monkeypatch):
    """JAX 0.10 and 0.11 lose a gradient there only when they lower the program, which no trace shows."""
    monkeypatch.setattr(references, "_is_safe", lambda *_: True)
    tied = jax.jit(lambda one, other, x: jnp.mean(jnp.sin(x @ one) @ other))
    w, x = jnp.eye(WIDTH) + 0.5, jnp.arange(12.0).reshape(4, WIDTH)
    with pytest.warns(RuntimeWarning, match="1 of 1 are added up by value, which is right"):
        actual = ab.grad(lambda w, x: tied(w, w, x), microbatch_size=2, reduction="mean")(w, x)
    np.testing.assert_allclose(actual, jax.grad(lambda w, x: tied(w, w, x))(w, x), rtol=1e-12)
