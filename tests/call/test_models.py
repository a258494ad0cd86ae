"""Models of Flax NNX and Equinox as parameters: gradients as those libraries return them."""

import functools
import subprocess
import sys

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from call.test_compilation import counted_compilations
from cases.meshes import mesh_of
from flax import nnx
from jax.sharding import PartitionSpec as P

import anybatch as ab
from anybatch import privacy

pytestmark = pytest.mark.every_jax


@pytest.fixture(autouse=True)
def defaults(model_defaults):
    """Models are written for JAX's own promotion, and compared in float64."""


SIZES = [1, 5, None]
X = np.random.default_rng(0).normal(size=(24, 6))
Y = np.random.default_rng(1).normal(size=24)


# NNX.


class Network(nnx.Module):
    """Parameters, an array that is none, a flag; what `between` keeps is changed by each call."""

    def __init__(self, between="nothing", seed=0):
        rngs = nnx.Rngs(seed)
        self.a = nnx.Linear(6, 8, rngs=rngs, param_dtype=jnp.float64)
        if between == "dropout":
            self.between = nnx.Dropout(0.3, rngs=rngs)
        elif between == "batch norm":
            self.between = nnx.BatchNorm(8, rngs=rngs, param_dtype=jnp.float64, dtype=jnp.float64)
            self.between.mean.set_value(jnp.zeros(8, jnp.float64))
            self.between.var.set_value(jnp.ones(8, jnp.float64))
        else:
            self.between = jnp.tanh
        self.b = nnx.Linear(8, 1, rngs=rngs, param_dtype=jnp.float64)
        self.order = nnx.Variable(jnp.arange(6))

    def __call__(self, x):
        return self.b(nnx.tanh(self.between(self.a(x[:, self.order.get_value()]))))[:, 0]


def nnx_loss(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def with_aux(loss):
    @functools.wraps(loss)
    def both(model, x, y):
        return loss(model, x, y), {"x": jnp.sum(x, axis=1), "mean": jnp.mean(y)}

    return both


def numbers(model):
    leaves = jax.tree.leaves(nnx.state(model))
    return [
        np.asarray(jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
        for leaf in leaves
    ]


def assert_same(actual, expected):
    chex.assert_trees_all_equal_structs(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=1e-9, atol=1e-12)


NETWORKS = ["nothing", "dropout", "batch norm"]


@pytest.mark.parametrize("microbatch_size", SIZES)
@pytest.mark.parametrize("between", NETWORKS)
def test_a_model_of_nnx(between, microbatch_size):
    """Twice: a call leaves running averages and counts of random streams as one of `nnx.value_and_grad` does."""
    model, expected_model = Network(between), Network(between)
    fun = ab.value_and_grad(with_aux(nnx_loss), 0, True, batch_argnums=(1, 2), microbatch_size=microbatch_size)
    for _ in range(2):
        (value, aux), grads = fun(model, X, Y)
        expected = nnx.value_and_grad(with_aux(nnx_loss), has_aux=True)(expected_model, X, Y)
        assert isinstance(grads, nnx.State)
        assert_same(((value, aux), grads), expected)
        chex.assert_trees_all_close(numbers(model), numbers(expected_model), rtol=1e-9, atol=1e-12)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    optimizer.update(model, grads)  # it takes them


@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("between", NETWORKS)
def test_a_model_of_nnx_on_a_mesh(between, devices):
    model, expected_model = Network(between), Network(between)
    fun = ab.value_and_grad(nnx_loss, batch_argnums=(1, 2), microbatch_size=2, mesh=mesh_of(devices))
    assert_same(fun(model, X, Y), nnx.value_and_grad(nnx_loss)(expected_model, X, Y))
    chex.assert_trees_all_close(numbers(model), numbers(expected_model), rtol=1e-9, atol=1e-12)


def test_grad_auto_and_memory():
    expected = nnx.grad(nnx_loss)(Network("batch norm"), X, Y)
    for options in ({}, {"memory": "1GiB"}, {"microbatch_size": 5, "remat": "nothing_saveable"}):
        assert_same(ab.grad(nnx_loss, batch_argnums=(1, 2), **options)(Network("batch norm"), X, Y), expected)


def test_specs_for_the_parameters_of_a_model():
    mesh, model = mesh_of(2), Network()
    specs = jax.tree.map(lambda leaf: P(), nnx.state(model, nnx.Param))
    fun = ab.value_and_grad(nnx_loss, batch_argnums=(1, 2), microbatch_size=2, mesh=mesh, param_specs=specs)
    assert_same(fun(model, X, Y), nnx.value_and_grad(nnx_loss)(Network(), X, Y))


@pytest.mark.full
def test_several_arguments_and_containers():
    def loss(x, models, scale, rngs):
        noise = jax.random.normal(rngs.params(), x.shape)
        return jnp.mean((models["one"](x + noise) * scale - models["other"](x)) ** 2)

    def given():
        return X, {"one": Network("dropout"), "other": Network("batch norm")}, jnp.float64(2), nnx.Rngs(7)

    args, expected_args = given(), given()
    expected = nnx.value_and_grad(loss, argnums=(1, 2))(*expected_args)
    assert_same(ab.value_and_grad(loss, (1, 2), batch_argnums=0, microbatch_size=5)(*args), expected)
    chex.assert_trees_all_close(numbers(args[1]), numbers(expected_args[1]), rtol=1e-9, atol=1e-12)
    assert int(args[3].params.count.get_value()) == 1  # a model that is not differentiated is changed as well


@pytest.mark.full
def test_a_filter_of_variables():
    """`nnx.DiffState`, as `nnx.value_and_grad` takes it; alone or beside positions."""

    class Adapted(Network):
        def __init__(self):
            super().__init__()
            self.adapter = nnx.LoRA(6, 2, 8, rngs=nnx.Rngs(1), param_dtype=jnp.float64)

        def __call__(self, x):
            return self.b(jnp.tanh(self.a(x) + self.adapter(x)))[:, 0]

    wrt = nnx.DiffState(0, nnx.LoRAParam)
    options = {"batch_argnums": (1, 2), "microbatch_size": 5}
    actual = ab.value_and_grad(nnx_loss, wrt, **options)(Adapted(), X, Y)
    assert_same(actual, nnx.value_and_grad(nnx_loss, argnums=wrt)(Adapted(), X, Y))
    assert list(actual[1]) == ["adapter"]

    def loss(scale, model, x, y):
        return nnx_loss(model, x, y) * scale

    both = (0, nnx.DiffState(1, nnx.PathContains("bias")))
    actual = ab.grad(loss, both, batch_argnums=(2, 3), microbatch_size=5)(jnp.float64(2), Adapted(), X, Y)
    assert_same(actual, nnx.grad(loss, argnums=both)(jnp.float64(2), Adapted(), X, Y))
    assert ab.verify(nnx_loss, Adapted(), X, Y, argnums=wrt, batch_argnums=(1, 2), microbatch_sizes=5).ok
    with pytest.raises(ab.InputError, match="must point at an argument with an NNX model"):
        ab.grad(nnx_loss, wrt, **options)(Model(), X, Y)


def test_references_that_are_shared():
    """Of a weight that is used twice there is one gradient, the sum."""

    class Tied(nnx.Module):
        def __init__(self):
            self.embed = nnx.Linear(6, 6, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
            self.again = self.embed

        def __call__(self, x):
            return self.again(jnp.tanh(self.embed(x)))[:, 0]

    expected = nnx.value_and_grad(nnx_loss)(Tied(), X, Y)
    actual = ab.value_and_grad(nnx_loss, batch_argnums=(1, 2), microbatch_size=5)(Tied(), X, Y)
    assert_same(actual, expected)
    assert len(jax.tree.leaves(actual[1])) == 2
    model = Tied()
    plan = ab.plan(nnx_loss, model, X, Y, batch_argnums=(1, 2), memory="1GiB", timed=False)
    assert plan.chosen is not None and model.again is model.embed


def test_attributes_that_the_loss_sets():
    def loss(model, x, y):
        model.train() if not model.between.deterministic else model.eval()
        model.seen = x.shape[1]
        return nnx_loss(model, x, y)

    model, expected = Network("dropout"), Network("dropout")
    model.between.deterministic = expected.between.deterministic = True
    model.empty = expected.empty = empty = nnx.Dropout(0.5)  # without any variables
    assert_same(
        ab.value_and_grad(loss, batch_argnums=(1, 2), microbatch_size=5)(model, X, Y),
        nnx.value_and_grad(loss)(expected, X, Y),
    )
    assert model.seen == expected.seen == 6 and model.empty is empty
    assert nnx.graphdef(model) == nnx.graphdef(expected)


def test_under_the_jits_of_jax_and_nnx():
    fun = ab.value_and_grad(nnx_loss, batch_argnums=(1, 2), microbatch_size=5)
    model, expected_model = Network("batch norm"), Network("batch norm")
    expected = nnx.value_and_grad(nnx_loss)(expected_model, X, Y)
    assert_same(nnx.jit(lambda model, x, y: fun(model, x, y))(model, X, Y), expected)
    chex.assert_trees_all_close(numbers(model), numbers(expected_model), rtol=1e-9, atol=1e-12)
    assert_same(jax.jit(fun)(Network("batch norm"), X, Y), expected)


def counted(loss):
    traces = []

    @functools.wraps(loss)
    def fun(*args):
        traces.append(1)
        return loss(*args)

    return fun, traces


@pytest.mark.parametrize("between", NETWORKS)
def test_a_model_of_nnx_is_compiled_once(between):
    model, fun = Network(between), ab.value_and_grad(nnx_loss, batch_argnums=(1, 2), microbatch_size=5)
    fun(model, X, Y)
    with counted_compilations() as count:
        for _ in range(3):
            fun(model, X, Y)
    assert count == [0]
    loss, traces = counted(nnx_loss)
    compiled = nnx.jit(lambda model, x, y: ab.grad(loss, batch_argnums=(1, 2), microbatch_size=5)(model, x, y))
    compiled(model, X, Y)
    first = len(traces)
    compiled(model, X, Y)
    assert len(traces) == first


def typed(error, **names):
    """Runs the lines of code in a message, as somebody would type them in; the last is the result."""
    names |= {"ab": ab, "nnx": nnx, "jax": jax}
    lines = str(error).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("graphdef, "))
    *lines, last = lines[first:]
    exec("\n".join([*lines, f"result = {last}"]), names)
    return names


@pytest.mark.full
def test_what_a_model_of_nnx_keeps_with_a_declared_reduction():
    """A count of calls is the same after each microbatch; a running average is not, and is refused."""
    options = {"batch_argnums": (1, 2), "microbatch_size": 6, "reduction": "mean"}
    model, plain = Network("dropout"), Network()
    with pytest.warns(RuntimeWarning, match=r'random stream of NNX \(default\)[^$]*reduction="infer"'):
        ab.value_and_grad(nnx_loss, **options)(model, X, Y)
    assert int(model.between.rngs.count.get_value()) == 1
    for silent in (options | {"microbatch_size": None}, options | {"reduction": "infer"}):
        ab.value_and_grad(nnx_loss, **silent)(model, X, Y)
    assert_same(ab.value_and_grad(nnx_loss, **options)(plain, X, Y), nnx.value_and_grad(nnx_loss)(Network(), X, Y))

    def distilled(model, x, teacher=None):
        return jnp.mean((model(x) - teacher(x)) ** 2)

    x = X[:8]  # as many examples as the teacher has rows in a parameter
    actual = ab.grad(distilled, microbatch_size=4, reduction="mean")(Network(), x, teacher=Network(seed=1))
    assert_same(actual, nnx.grad(distilled)(Network(), x, teacher=Network(seed=1)))
    model = Network("batch norm")
    before = numbers(model)
    with pytest.raises(ab.InputError, match="the state of a model must not depend on the batch") as caught:
        ab.value_and_grad(nnx_loss, **options)(model, X, Y)
    assert 'reduction="infer"' in str(caught.value) and "got between.mean = float64[8]" in str(caught.value)
    chex.assert_trees_all_equal(numbers(model), before)

    def loss(model, batch):
        return nnx_loss(model, batch["x"], batch["y"])

    names = typed(caught.value, model=model, loss=loss, batch={"x": X, "y": Y})  # microbatches of any size
    expected = Network("batch norm")
    value, grads = nnx.value_and_grad(nnx_loss)(expected, X, Y)
    assert_same((names["value"], names["grads"]), (value, grads))
    chex.assert_trees_all_close(numbers(model), numbers(expected), rtol=1e-9)


def test_a_step_of_ones_own_under_nnx_jit():
    """What users of NNX write."""

    def steps(value_and_grad, model):
        optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

        @nnx.jit
        def train_step(model, optimizer, x, y):
            value, grads = value_and_grad(nnx_loss)(model, x, y)
            optimizer.update(model, grads)
            return value

        return [train_step(model, optimizer, X, Y) for _ in range(3)]

    model, expected_model = Network("batch norm"), Network("batch norm")
    ours = functools.partial(ab.value_and_grad, batch_argnums=(1, 2), microbatch_size=5)
    expected = steps(nnx.value_and_grad, expected_model)
    chex.assert_trees_all_close(steps(ours, model), expected, rtol=1e-9)
    chex.assert_trees_all_close(numbers(model), numbers(expected_model), rtol=1e-8, atol=1e-12)


@pytest.mark.full
def test_a_model_by_keyword_and_one_from_outside():
    """A teacher that is not differentiated; and a model that a `vmap` around the call does not map over."""

    def loss(model, x, teacher=None):
        return jnp.mean((model(x) - teacher(x)) ** 2)

    def given():
        return Network("dropout"), Network("batch norm")

    (model, teacher), (expected_model, expected_teacher) = given(), given()
    expected = nnx.value_and_grad(loss)(expected_model, X, teacher=expected_teacher)
    assert_same(ab.value_and_grad(loss, microbatch_size=5)(model, X, teacher=teacher), expected)
    chex.assert_trees_all_close(numbers((model, teacher)), numbers((expected_model, expected_teacher)), rtol=1e-9)

    model, rows = Network(), X.reshape(4, 6, 6)
    mapped = jax.vmap(lambda x: ab.grad(loss, microbatch_size=4)(model, x, teacher=lambda x: x[:, 0]))(rows)
    by_one = [nnx.grad(loss)(model, x, teacher=lambda x: x[:, 0]) for x in rows]
    assert_same(mapped, jax.tree.map(lambda *leaves: jnp.stack(leaves), *by_one))


@pytest.mark.parametrize("by", ["position", "keyword"])
def test_references_that_arguments_share(by):
    """What is differentiated is, wherever the loss uses it: also through an argument that comes before it."""

    def loss(part, x, model):
        return jnp.mean((model(x) - jnp.sum(jnp.tanh(part(x)), axis=1)) ** 2)

    def reference(model, x):
        definition, params, rest = nnx.split(model, nnx.Param, ...)

        def merged(params):
            model = nnx.merge(definition, params, rest, copy=True)
            return loss(model.a, x, model)

        return jax.value_and_grad(merged)(params)

    model = Network("nothing")
    if by == "position":
        actual = ab.value_and_grad(loss, 2, microbatch_size=5)(model.a, X, model)
    else:
        fun = ab.value_and_grad(lambda model, x, part: loss(part, x, model), microbatch_size=5)
        actual = fun(model, X, part=model.a)
    assert_same(actual, reference(Network("nothing"), X))


@pytest.mark.full
@pytest.mark.parametrize("name", ["value_and_grad", "grad", "noise_scale"])
@pytest.mark.parametrize("by", ["position", "keyword"])
def test_random_streams_and_metrics_beside_a_model(name, by):
    """They are changed as `nnx.value_and_grad` changes them, and refused for single examples."""

    def loss(model, x, rngs, metrics):
        predictions = model(x) * jax.random.bernoulli(rngs.dropout(), 0.5, x.shape[:1])
        metrics.update(values=predictions.astype(jnp.float32))
        return jnp.mean(predictions**2)

    def given():
        return nnx.Rngs(5), nnx.metrics.Average()

    fun, (rngs, metrics), expected = getattr(ab, name)(loss, microbatch_size=5), given(), given()
    model = Network()
    for _ in range(3):
        args, kwargs = ((rngs, metrics), {}) if by == "position" else ((), {"rngs": rngs, "metrics": metrics})
        found = fun(model, X, *args, **kwargs)
        grads = nnx.grad(loss)(Network(), X, *expected)
        chex.assert_trees_all_close(found if name == "grad" else found[1], grads, rtol=1e-9, atol=1e-12)
        chex.assert_trees_all_close(numbers(rngs), numbers(expected[0]))
        chex.assert_trees_all_close(metrics.compute(), expected[1].compute(), rtol=1e-6)
    assert int(rngs.default.count[...]) == 3
    before = numbers((rngs, metrics))
    with pytest.raises(ab.InputError, match="need a loss that does not change the model") as caught:
        ab.per_example_grads(loss, keep_batch_dim=True)(model, X, *args, **kwargs)
    assert "default.count" in str(caught.value)
    chex.assert_trees_all_equal(numbers((rngs, metrics)), before)


@pytest.mark.parametrize("by", ["position", "keyword"])
def test_a_variable_by_itself_beside_a_model(by):
    """It is changed, unlike those of an `nnx.State`, which NNX takes as values."""

    def loss(model, x, total, values):
        total[...] = total[...] + jnp.sum(x)
        return jnp.mean(model(x) ** 2) * values["scale"][...]

    def given():
        return nnx.Variable(jnp.zeros((), jnp.float64)), nnx.State({"scale": nnx.Variable(jnp.float64(2))})

    (total, values), (expected, _) = given(), given()
    args, kwargs = ((total, values), {}) if by == "position" else ((), {"total": total, "values": values})
    actual = ab.value_and_grad(loss, microbatch_size=5)(Network(), X, *args, **kwargs)
    assert_same(actual, nnx.value_and_grad(loss)(Network(), X, expected, values))
    chex.assert_trees_all_close(total[...], expected[...], rtol=1e-9)
    model = Network()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    if by == "keyword":
        step = ab.train_step(loss, microbatch_size=5)
        for _ in range(2):
            step((model, optimizer), X, **kwargs)
        chex.assert_trees_all_close(total[...], 3 * expected[...], rtol=1e-9)


def test_a_batch_at_another_position_is_found():
    """The order of arguments that tutorials of NNX have."""

    def loss(model, rngs, batch):
        return jnp.mean((model(batch["x"] + rngs.noise.normal(())) - batch["y"]) ** 2)

    def drawing(model, key, batch):
        return loss(model, nnx.Rngs(key), batch)

    batch = {"x": X, "y": Y}
    for fun, second in ((loss, nnx.Rngs(0)), (loss, Network()), (drawing, jax.random.key(0))):
        for wrapped in (ab.value_and_grad(fun), ab.grad(fun, microbatch_size=5)):
            with pytest.raises(ab.InputError, match="whose arrays have a row for each example") as caught:
                wrapped(Network(), second, batch)
            assert "Pass batch_argnums=2: batch." in str(caught.value)
    with pytest.raises(ab.InputError, match=r"Pass batch_argnums=\(2, 3\): x, y."):
        ab.grad(lambda model, rngs, x, y: nnx_loss(model, x, y))(Network(), nnx.Rngs(0), X, Y)
    assert_same(
        ab.value_and_grad(drawing, batch_argnums=2, microbatch_size=5)(Network(), jax.random.key(0), batch),
        nnx.value_and_grad(drawing)(Network(), jax.random.key(0), batch),
    )


@pytest.mark.full
def test_a_gradient_of_a_gradient():
    definition, params, rest = nnx.split(Network(), nnx.Param, ...)

    def by_jax(params):
        return jax.grad(lambda params: nnx_loss(nnx.merge(definition, params, rest), X, Y))(params)

    def by_us(params):
        fun = ab.grad(nnx_loss, batch_argnums=(1, 2), microbatch_size=5)
        return fun(nnx.merge(definition, params, rest), X, Y)

    def size(params, grad):
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grad(params)))

    assert_same(jax.grad(size)(params, by_us), jax.grad(size)(params, by_jax))


# Equinox.


class Model(eqx.Module):
    """Fields of all sorts: arrays, an integer array, a function, a flag, a number, a static field, another module."""

    layers: eqx.nn.MLP
    scale: jax.Array
    order: jax.Array
    is_squared: bool
    rate: float
    dropout: eqx.nn.Dropout
    name: str = eqx.field(static=True, default="model")

    def __init__(self):
        self.layers = eqx.nn.MLP(6, "scalar", 8, 1, key=jax.random.key(0), dtype=jnp.float64)
        self.scale, self.order = jnp.ones(6, jnp.float64), jnp.arange(6)
        self.is_squared, self.rate, self.dropout = True, 0.5, eqx.nn.Dropout(0.3)

    def __call__(self, x, key=None):
        x = self.dropout(x, key=key, inference=key is None)
        y = self.layers(x[self.order] * self.scale) * self.rate
        return y**2 if self.is_squared else y


def eqx_loss(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


@pytest.mark.parametrize("microbatch_size", [*SIZES, "auto"])
def test_a_model_of_equinox(microbatch_size):
    fun = ab.value_and_grad(with_aux(eqx_loss), 0, True, batch_argnums=(1, 2), microbatch_size=microbatch_size)
    actual = fun(Model(), X, Y)
    assert_same(actual, eqx.filter_value_and_grad(with_aux(eqx_loss), has_aux=True)(Model(), X, Y))
    assert type(actual[1]) is Model and actual[1].order is None and actual[1].rate is None
    updated = eqx.apply_updates(Model(), actual[1])
    assert updated.layers.activation is not None and updated.rate == 0.5


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_a_model_of_equinox_on_a_mesh(devices):
    fun = ab.value_and_grad(eqx_loss, batch_argnums=(1, 2), microbatch_size=2, mesh=mesh_of(devices))
    assert_same(fun(Model(), X, Y), eqx.filter_value_and_grad(eqx_loss)(Model(), X, Y))


@pytest.mark.parametrize("options", [{"reduction": "mean"}, {"memory": "1GiB", "microbatch_size": "auto"}])
def test_options_with_a_model_of_equinox(options):
    fun = ab.grad(eqx_loss, batch_argnums=(1, 2), **{"microbatch_size": 5, **options})
    assert_same(fun(Model(), X, Y), eqx.filter_grad(eqx_loss)(Model(), X, Y))


def test_models_of_equinox_in_containers_and_elsewhere():
    def loss(x, pair, scale):
        return jnp.mean((jax.vmap(pair["a"])(x) - jax.vmap(pair["b"])(x)) ** 2) * scale + pair["w"]

    pair = {"a": Model(), "b": Model(), "w": jnp.float64(3), "n": 4}
    actual = ab.value_and_grad(loss, (1, 2), batch_argnums=0, microbatch_size=5)(X, pair, jnp.float64(2))
    by_equinox = eqx.filter_value_and_grad(lambda both, x: loss(x, both[0], both[1]))((pair, jnp.float64(2)), X)
    assert_same(actual, by_equinox)


def test_leaves_of_equinox_that_are_shared():
    class Tied(eqx.Module):
        shared: eqx.nn.Shared

        def __init__(self):
            first, second = (eqx.nn.Linear(6, 6, key=jax.random.key(i), dtype=jnp.float64) for i in range(2))
            where, get = (lambda pair: pair[1].weight), (lambda pair: pair[0].weight)
            self.shared = eqx.nn.Shared((first, second), where, get)

        def __call__(self, x):
            first, second = self.shared()
            return second(jnp.tanh(first(x)))[0]

    actual = ab.value_and_grad(eqx_loss, batch_argnums=(1, 2), microbatch_size=5)(Tied(), X, Y)
    assert_same(actual, eqx.filter_value_and_grad(eqx_loss)(Tied(), X, Y))


def test_keys_with_a_model_of_equinox():
    def loss(model, x, y, key):
        return jnp.mean((jax.vmap(model)(x, jax.random.split(key, len(x))) - y) ** 2)

    key = jax.random.key(3)
    actual = ab.value_and_grad(loss, batch_argnums=(1, 2), microbatch_size=5)(Model(), X, Y, key)
    assert_same(actual, eqx.filter_value_and_grad(loss)(Model(), X, Y, key))


def test_under_the_jits_of_jax_and_equinox():
    loss, traces = counted(eqx_loss)
    fun = ab.value_and_grad(loss, batch_argnums=(1, 2), microbatch_size=5)
    expected = eqx.filter_value_and_grad(eqx_loss)(Model(), X, Y)
    compiled = eqx.filter_jit(fun)
    assert_same(compiled(Model(), X, Y), expected)
    first = len(traces)
    compiled(Model(), X, Y)
    assert len(traces) == first
    arrays, static = eqx.partition(Model(), eqx.is_array)
    assert_same(jax.jit(lambda arrays, x, y: fun(eqx.combine(arrays, static), x, y))(arrays, X, Y), expected)
    fun(Model(), X, Y)
    with counted_compilations() as count:
        fun(Model(), X, Y)
    assert count == [0]


@pytest.mark.full
def test_a_state_of_equinox():
    """BatchNorm: its state is an argument, and comes back as aux. It names the axis of the examples."""

    class Normed(eqx.Module):
        a: eqx.nn.Linear
        norm: eqx.nn.BatchNorm

        def __init__(self, key):
            self.a = eqx.nn.Linear(6, 4, key=key, dtype=jnp.float64)
            self.norm = eqx.nn.BatchNorm(4, axis_name="examples", mode="batch", dtype=jnp.float64)

        def __call__(self, x, state):
            x, state = self.norm(self.a(x), state)
            return jnp.sum(jnp.tanh(x)), state

    def loss(model, state, x, y):
        out, state = jax.vmap(model, axis_name="examples", in_axes=(0, None), out_axes=(0, None))(x, state)
        return jnp.mean((out - y) ** 2), state

    model, state = eqx.nn.make_with_state(Normed)(jax.random.key(0))
    expected_state = state
    fun = ab.value_and_grad(loss, has_aux=True, batch_argnums=(2, 3), microbatch_size=5)
    for _ in range(3):
        (value, state), grads = fun(model, state, X, Y)
        (expected, expected_state), expected_grads = eqx.filter_value_and_grad(loss, has_aux=True)(
            model, expected_state, X, Y
        )
        assert_same((value, grads), (expected, expected_grads))
        chex.assert_trees_all_close(jax.tree.leaves(state), jax.tree.leaves(expected_state), rtol=1e-9)


# The other functions.


def example_loss(model, x, y):
    predicted = model(x) if isinstance(model, Model) else model(x[None])[0]
    return (predicted - y) ** 2


LIBRARIES = {"equinox": (Model, eqx_loss, eqx.filter_grad), "nnx": (Network, nnx_loss, nnx.grad)}


@pytest.fixture(params=list(LIBRARIES))
def library(request):
    return LIBRARIES[request.param]


@pytest.mark.full
def test_gradients_of_single_examples(library):
    make, loss, grad = library
    x, y = X[:6], Y[:6]
    expected = [grad(loss)(make(), x[i : i + 1], y[i : i + 1]) for i in range(6)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *expected)
    options = {"batch_argnums": (1, 2), "microbatch_size": 4}
    assert_same(ab.per_example_grads(example_loss, **options)(make(), x, y), stacked)
    assert_same(ab.per_example_grads(loss, keep_batch_dim=True, **options)(make(), x, y), stacked)
    norms = jnp.sqrt(sum(jnp.sum(leaf.reshape(6, -1) ** 2, axis=1) for leaf in jax.tree.leaves(stacked)))
    chex.assert_trees_all_close(ab.per_example_norms(example_loss, **options)(make(), x, y), norms, rtol=1e-9)
    clip = np.median(norms)
    scales = jnp.minimum(1, clip / norms)
    clipped = jax.tree.map(lambda leaf: jnp.tensordot(scales, leaf, 1), stacked)
    fun = ab.clipped_grad(example_loss, clip_norm=float(clip), **options)
    assert_same(fun(make(), x, y), clipped)
    assert ab.plan(fun, make(), x, y, memory="1GiB", timed=False).chosen is not None


@pytest.mark.full
def test_reading_planning_verifying_and_the_noise_scale(library):
    make, loss, grad = library
    options = {"batch_argnums": (1, 2)}
    assert ab.read(loss, make(), X, Y, **options).kind == "mean over 24 examples"
    assert ab.plan(loss, make(), X, Y, memory="1GiB", timed=False, **options).chosen is not None
    assert "24 examples" in str(ab.explain(loss, make(), X, Y, memory="1GiB", timed=False, **options))
    assert ab.verify(loss, make(), X, Y, microbatch_sizes=5, **options).raise_if_different().ok
    assert not ab.verify(loss, make(), X, Y, reduction="sum", microbatch_sizes=5, **options).ok
    for exact in (False, True):
        _, grads, noise = ab.noise_scale(loss, exact=exact, microbatch_size=6, **options)(make(), X, Y)
        assert_same(grads, grad(loss)(make(), X, Y))
        assert float(noise.units) == 24 and float(noise.trace) > 0


def test_shapes_in_the_place_of_arrays(library):
    make, loss, _ = library
    rows = [jax.ShapeDtypeStruct(rows.shape, rows.dtype) for rows in (X, Y)]
    abstract = (nnx.eval_shape if make is Network else eqx.filter_eval_shape)(make)
    for model in (make(), abstract):
        assert ab.read(loss, model, *rows, batch_argnums=(1, 2)).passes == 1
        assert ab.plan(loss, model, *rows, batch_argnums=(1, 2), memory="1GiB").chosen is not None


def test_a_model_with_batch_norm_is_read_planned_and_verified_without_being_changed():
    model = Network("batch norm")
    before = numbers(model)
    options = {"batch_argnums": (1, 2)}
    assert ab.read(nnx_loss, model, X, Y, **options).passes == 2
    assert ab.plan(nnx_loss, model, X, Y, memory="1GiB", timed=False, **options).chosen is not None
    assert ab.verify(nnx_loss, model, X, Y, microbatch_sizes=5, **options).ok
    chex.assert_trees_all_equal(numbers(model), before)


@pytest.mark.parametrize(
    "wrapped",
    [
        ab.per_example_grads(example_loss, batch_argnums=(1, 2)),
        ab.per_example_norms(nnx_loss, batch_argnums=(1, 2), keep_batch_dim=True),
        ab.clipped_grad(example_loss, clip_norm=1.0, batch_argnums=(1, 2)),
        ab.noise_scale(nnx_loss, exact=True, batch_argnums=(1, 2), microbatch_size=6),
    ],
)
def test_a_model_that_single_examples_would_change_is_refused(wrapped):
    model = Network("dropout")
    with pytest.raises(ab.InputError, match="need a loss that does not change the model") as caught:
        wrapped(model, X, Y)
    assert "between.rngs.count" in str(caught.value)
    assert int(model.between.rngs.count.get_value()) == 0
    model.eval()
    wrapped(model, X, Y)


@pytest.mark.full
@pytest.mark.parametrize("streams", [{"default": 0}, {"params": 0, "dropout": 1}, {"default": 0, "dropout": 1}])
def test_the_way_out_for_a_model_that_draws_gives_each_example_its_own_numbers(streams):
    """Equal examples have different masks; layers too."""

    class Drawing(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Linear(6, 8, rngs=rngs, param_dtype=jnp.float64)
            self.one = nnx.Dropout(0.5, rngs=rngs)
            self.two = nnx.Dropout(0.5, rngs=rngs, rng_collection="default" if "default" in streams else "dropout")

        def __call__(self, x):
            ones = jnp.ones(8, jnp.float64)
            masks = self.one(ones), self.two(ones)
            return jnp.sum(self.a(x) * masks[0]), jnp.stack(masks)

    def loss(model, example):
        return model(example["x"])[0]

    model, batch = Drawing(nnx.Rngs(**streams)), {"x": np.ones((6, 6))}
    before = numbers(model)
    with pytest.raises(ab.InputError, match="which draws its own numbers") as caught:
        ab.per_example_grads(loss)(model, batch)
    names = typed(caught.value, model=model, loss=loss, batch=batch)
    rows = np.asarray(names["result"]["a"]["bias"][...])
    assert rows.shape == (6, 8) and len({row.tobytes() for row in rows}) == 6
    names["loss"] = lambda model, example: model(example["x"])
    _, masks = ab.per_example_norms(names["loss_of_one"], has_aux=True, rng_argnums=2)(
        names["params"], batch, jax.random.key(0)
    )
    assert (np.asarray(masks)[:, 0] != np.asarray(masks)[:, 1]).any(axis=1).all()
    chex.assert_trees_all_equal(numbers(model), before)


@pytest.mark.full
def test_the_way_out_for_a_model_that_keeps_averages():
    def loss(model, example):
        return nnx_loss(model, example["x"][None], example["y"][None])

    model, batch = Network("batch norm"), {"x": X, "y": Y}
    before = numbers(model)
    with pytest.raises(ab.InputError, match=r"changes between\.mean, between\.var") as caught:
        ab.per_example_grads(loss)(model, batch)
    result = typed(caught.value, model=model, loss=loss, batch=batch)["result"]
    expected = jax.vmap(lambda example: nnx.grad(loss)(Network("batch norm"), example))(batch)
    chex.assert_trees_all_close(jax.tree.leaves(result), jax.tree.leaves(expected), rtol=1e-9, atol=1e-12)
    chex.assert_trees_all_equal(numbers(model), before)


@pytest.mark.parametrize("make", [Network, Model])
def test_private_training_says_how_to_split_a_model(make):
    step = privacy.dp_sgd(
        example_loss, optax.sgd(0.1), clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=8, num_examples=24
    )
    with pytest.raises(ab.InputError, match="Noise can be added only to real floating-point numbers") as caught:
        step.init(make(), privacy.secret_key())
    assert "eqx.partition(model, eqx.is_inexact_array)" in str(caught.value)
    assert "nnx.split(model, nnx.Param, ...)" in str(caught.value)


def test_a_model_of_nnx_is_no_params_of_a_state():
    step = ab.train_step(lambda model, batch: nnx_loss(model, **batch), optax.adam(0.1))
    with pytest.raises(ab.InputError, match="pair of the model and its optimizer") as caught:
        step.init(Network())
    assert "nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param)" in str(caught.value)
    with pytest.raises(ab.InputError, match=r"A state must be an anybatch\.TrainState") as caught:
        step(Network(), {"x": X, "y": Y})
    assert "nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param)" in str(caught.value)


def test_neither_library_is_imported():
    program = "import anybatch as ab, sys; ab.value_and_grad; print({'flax', 'equinox'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.stdout == "set()\n", result.stderr


# What a loss does to its models.


class Counter(nnx.Module):
    """A weight, and a count that the loss changes."""

    def __init__(self):
        self.n, self.w, self.calls = nnx.Variable(jnp.asarray(0)), nnx.Param(jnp.ones(6)), 0


def _in_turn(fun, make):
    """What both `fun`s leave of models that are made for each of them."""
    found = []
    for wrap in (functools.partial(ab.value_and_grad, microbatch_size=5), nnx.value_and_grad):
        models = make()
        if wrap is not nnx.value_and_grad:
            wrap = functools.partial(wrap, batch_argnums=len(models))
        result = wrap(fun)(*models, X.astype(np.float32))
        found.append((result, nnx.state(list(models))))
    return found


@pytest.mark.full
def test_variables_whose_names_are_alike_are_all_updated():
    def norm():
        return nnx.BatchNorm(6, rngs=nnx.Rngs(0))

    def loss(pair, other, x):
        return jnp.mean((other(jnp.tanh(pair[1](pair[0](x) * 2 + 1))) * 3 - 1) ** 2)

    mine, its = _in_turn(loss, lambda: (nnx.List([norm(), norm()]), norm()))
    chex.assert_trees_all_close(mine, its, rtol=1e-5, atol=1e-6)  # a bias before a norm has gradient 0
    assert float(jnp.max(jnp.abs(its[1][0][1]["mean"][...]))) > 1e-4  # the control: (0, 1, "mean") and (1, "mean")


def test_a_variable_that_an_earlier_argument_shares_is_differentiated():
    class Generator(nnx.Module):
        def __init__(self, critic):
            self.critic, self.w = critic, nnx.Param(jnp.ones(6))

    critic = nnx.Linear(6, 1, rngs=nnx.Rngs(0))

    def loss(generator, critic, x):
        return jnp.mean(critic(x * generator.w) ** 2)

    grads = ab.grad(loss, 1, batch_argnums=2, microbatch_size=5)(Generator(critic), critic, X)
    expected = nnx.grad(lambda critic: jnp.mean(critic(X) ** 2))(critic)
    chex.assert_trees_all_close(grads, expected, rtol=1e-5)


def test_a_model_beside_its_own_variable_is_differentiated_once():
    def make():
        model = Counter()
        return ({"model": model, "tied": model.w},)

    def loss(models, x):
        return jnp.mean((x * models["model"].w * models["tied"][...] - 1) ** 2)

    mine, its = (wrap(loss)(*make(), X) for wrap in (functools.partial(ab.grad, microbatch_size=5), nnx.grad))
    chex.assert_trees_all_close(mine, its, rtol=1e-5)
    assert jax.tree.structure(mine) == jax.tree.structure(its)


def test_a_variable_by_itself_is_changed():
    def loss(model, average, x):
        average[...] = average[...] * 0.5 + x.mean(0)
        return jnp.mean((x * model.w) ** 2)

    mine, its = _in_turn(loss, lambda: (Counter(), nnx.BatchStat(jnp.zeros(6))))
    chex.assert_trees_all_close(mine, its, rtol=1e-5)


def test_what_depends_on_the_number_of_examples_is_not_kept_of_a_microbatch():
    def loss(model, x):
        model.n[...] += x.shape[0]
        return jnp.mean((x * model.w) ** 2)

    model = Counter()
    ab.value_and_grad(loss, microbatch_size=5)(model, X)
    assert model.n[...] == len(X)
    with pytest.raises(ab.InputError, match=r"must not depend on the batch.*got n = int"):
        ab.value_and_grad(loss, microbatch_size=5, reduction="mean")(Counter(), X)


def test_what_a_loss_takes_out_of_a_model_is_gone():
    class Sowing(nnx.Module):
        def __init__(self):
            self.w, self.h = nnx.Param(jnp.ones(6)), nnx.Intermediate(jnp.zeros(3))

    def loss(model, x):
        nnx.pop(model, nnx.Intermediate)
        return jnp.mean((x * model.w) ** 2)

    mine, its = _in_turn(loss, lambda: (Sowing(),))
    chex.assert_trees_all_close(mine, its, rtol=1e-5)
    assert "h" not in mine[1][0]


def test_a_module_that_a_loss_adds_is_refused_and_the_model_stays():
    def loss(model, x):
        model.extra = nnx.Linear(6, 6, rngs=nnx.Rngs(0))
        return jnp.mean((x * model.w) ** 2)

    model = Counter()
    with pytest.raises(ab.InputError, match=r"must not add modules, got a loss that adds extra\."):
        ab.value_and_grad(loss, microbatch_size=5)(model, X)
    assert not hasattr(model, "extra")


def test_attributes_that_a_step_does_not_keep_are_told():
    def loss(model, x):
        model.calls += 1
        return jnp.mean((x * model.w) ** 2)

    model = Counter()
    step = ab.train_step(loss, microbatch_size=5)
    with pytest.warns(RuntimeWarning, match="attributes of an NNX model that are not variables"):
        step((model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)), X)


def test_the_state_of_a_model_keeps_its_types():
    def loss(params, state, x):
        return jnp.mean((params * x) ** 2), {"average": 0.5 * state["average"] + 0.75}

    step = ab.train_step(loss, optax.sgd(0.1), has_state=True, microbatch_size=5)
    with pytest.raises(ab.InputError, match=r"model_state\['average'\] = int.* before the loss and float"):
        step(step.init(jnp.ones(6), model_state={"average": jnp.asarray(0)}), X)
    state, _ = step(step.init(jnp.ones(6), model_state={"average": jnp.asarray(0.0)}), X)
    assert state.model_state["average"] == 0.75
