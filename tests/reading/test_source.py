"""Which line a loss that looks across examples is blamed on: the user's own, and not one of a library that it calls."""

import importlib
import inspect
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import anybatch as ab

pytestmark = pytest.mark.every_jax

X = np.sin(np.arange(12.0)).reshape(4, 3).astype(np.float32)
W = np.array([0.7, -1.2, 2.1], np.float32)

LAYERS = '''
"""A library that is installed."""
import functools
import jax
import jax.numpy as jnp
from jax import lax


def plain(x):
    return x - jnp.mean(x, 0, keepdims=True)


jitted = jax.jit(plain)
checkpointed = jax.checkpoint(plain)


@jax.jit
def jitted_twice(x):
    return jax.jit(plain)(jnp.sin(x))


@jax.custom_vjp
def with_vjp(x):
    return plain(x)


with_vjp.defvjp(lambda x: (plain(x), None), lambda _, g: (plain(g),))


@jax.custom_vjp
def with_mixing_backward(x):
    return jnp.sin(x)


with_mixing_backward.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.cos(x) * plain(g),))


@jax.custom_jvp
def with_jvp(x):
    return plain(x)


with_jvp.defjvp(lambda primals, tangents: (plain(*primals), plain(*tangents)))


def scanned(x):
    return lax.scan(lambda h, _: (plain(jnp.tanh(h)), None), x, None, length=2)[0]


def scanned_for_long(x):
    return lax.scan(lambda h, _: (plain(jnp.tanh(h)), None), x, None, length=100)[0]


def branching(x):
    return lax.cond(jnp.asarray(True), plain, jnp.sin, x)


def deep(x):
    return jax.checkpoint(lambda x: lax.cond(jnp.asarray(True), with_vjp, jnp.sin, jnp.cos(x)))(x)


def calls_back(function):
    return jax.jit(lambda x: 2 * function(jnp.sin(x)))


class Layer:
    def __call__(self, x):
        return with_vjp(x)
'''

PROJECT = '''
"""A project of a user that is itself installed, with its losses."""
import jax.numpy as jnp
from installed_layers import with_vjp


def loss(w, x):
    h = x * w[None]
    h = with_vjp(h)
    return jnp.mean(h**2)
'''

CALLS = """plain jitted jitted_twice checkpointed with_vjp with_mixing_backward with_jvp scanned scanned_for_long
    branching deep""".split()


@pytest.fixture
def layers(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    for name, text in (("installed_layers", LAYERS), ("installed_project", PROJECT)):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    return importlib.import_module("installed_layers")


def blame_of(loss):
    return ab.read(loss, W, X).blame[0]


def place_of(blame):
    return blame.file, blame.line


def line_in(function, text):
    lines, first = inspect.getsourcelines(function)
    return next(first + number for number, line in enumerate(lines) if text in line)


@pytest.mark.parametrize("name", CALLS)
def test_a_library_is_blamed_on_the_line_that_calls_it(layers, name):
    function = getattr(layers, name)
    ab.read(lambda w, x: jnp.mean(function(x * w[None]) ** 2), W, X)  # another line, which caches its trace

    def loss(w, x):
        h = x * w[None]
        h = function(h)  # this line
        return jnp.mean(h**2)

    blame = blame_of(loss)
    assert place_of(blame) == (__file__, line_in(loss, "this line"))
    assert blame.function.endswith("loss")


def test_the_function_of_the_library_is_named_second(layers):
    def loss(w, x):
        return jnp.mean(layers.Layer()(x * w[None]) ** 2)

    assert blame_of(loss).inside == "Layer"
    assert blame_of(lambda w, x: jnp.mean(layers.with_vjp(x * w[None]) ** 2)).inside == "with_vjp"


@pytest.mark.parametrize(
    "around",
    [jax.jit, jax.checkpoint, lambda f: lambda x: lax.cond(jnp.asarray(True), f, jnp.sin, x), eqx.filter_jit],
    ids=["jit", "checkpoint", "cond", "filter_jit"],
)
def test_a_line_of_the_user_inside_other_functions_is_the_one(layers, around):
    def mine(h):
        return layers.with_vjp(h)  # this line

    def loss(w, x):
        return jnp.mean(around(mine)(x * w[None]) ** 2)

    assert place_of(blame_of(loss)) == (__file__, line_in(mine, "this line"))


def test_a_line_of_the_user_that_a_library_calls_back_is_the_one(layers):
    def mine(h):
        return h - jnp.mean(h, 0, keepdims=True)  # this line

    def loss(w, x):
        return jnp.mean(layers.calls_back(mine)(x * w[None]) ** 2)

    assert place_of(blame_of(loss)) == (__file__, line_in(mine, "this line"))


def test_of_a_project_that_is_itself_installed_the_line_of_the_loss_is_named(layers):
    project = importlib.import_module("installed_project")
    blame = blame_of(project.loss)
    assert place_of(blame) == (project.__file__, line_in(project.loss, "with_vjp(h)"))
    assert blame.inside == "with_vjp"


def test_generated_code_is_no_line_of_the_user(layers):
    scope = {"layers": layers}
    exec("def generated(h): return layers.with_vjp(h)", scope)

    def loss(w, x):
        return jnp.mean(scope["generated"](x * w[None]) ** 2)  # this line

    assert place_of(blame_of(loss)) == (__file__, line_in(loss, "this line"))
