"""`map_batch` returns what the function returns for the full batch, in the memory of a microbatch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.comparing import assert_same
from cases.compilations import counted_compilations
from cases.meshes import mesh_of
from fuzz.programs import Program, compare_mapped

import anybatch as ab

pytestmark = pytest.mark.usefixtures("model_defaults")

EXAMPLES, FEATURES, CLASSES = 23, 6, 4


def parameters():
    random = np.random.default_rng(0)
    shapes = {"w": (FEATURES, 8), "v": (8, CLASSES), "b": (CLASSES,)}
    return {name: jnp.asarray(random.normal(size=shape)) for name, shape in shapes.items()}


def examples(number=EXAMPLES):
    random = np.random.default_rng(1)
    return {
        "x": jnp.asarray(random.normal(size=(number, FEATURES))),
        "label": jnp.asarray(random.integers(0, CLASSES, number)),
        "mask": jnp.asarray(random.random(number) < 0.7),
    }


def logits_of(params, batch):
    return jnp.tanh(batch["x"] @ params["w"]) @ params["v"] + params["b"]


# What people compute on a batch.


def rows(params, batch):
    return jax.nn.softmax(logits_of(params, batch))


def accuracy(params, batch):
    right = jnp.argmax(logits_of(params, batch), axis=-1) == batch["label"]
    return jnp.mean(right, where=batch["mask"])


def f1_score(params, batch):
    found = jnp.argmax(logits_of(params, batch), axis=-1) == 1
    true, both = batch["label"] == 1, found & (batch["label"] == 1)
    precision, recall = (jnp.sum(both) / jnp.maximum(jnp.sum(of), 1) for of in (found, true))
    return {"f1": 2 * precision * recall / (precision + recall), "counts": jnp.stack([jnp.sum(found), jnp.sum(both)])}


def area_under_curve(params, batch):
    """By sorting the scores of all examples."""
    order = jnp.argsort(logits_of(params, batch)[:, 1])
    positive = (batch["label"] == 1)[order]
    ranks = jnp.arange(1, len(order) + 1)
    number = jnp.sum(positive)
    wins = jnp.sum(jnp.where(positive, ranks, 0)) - number * (number + 1) // 2
    return wins / (number * (len(order) - number))


def perplexity(params, batch):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits_of(params, batch)), batch["label"][:, None], axis=1)[:, 0]
    return jnp.exp(-jnp.sum(chosen * batch["mask"]) / jnp.sum(batch["mask"]))


def confusion_matrix(params, batch):
    found = jnp.argmax(logits_of(params, batch), axis=-1)
    return jnp.zeros((CLASSES, CLASSES), jnp.int32).at[batch["label"], found].add(1)


def calibration(params, batch):
    probabilities = jax.nn.softmax(logits_of(params, batch))
    bins = jnp.clip((jnp.max(probabilities, axis=-1) * 5).astype(jnp.int32), 0, 4)
    right = (jnp.argmax(probabilities, axis=-1) == batch["label"]).astype(probabilities.dtype)
    count, confidence, correct = (
        jax.ops.segment_sum(values, bins, 5) for values in (jnp.ones_like(right), jnp.max(probabilities, -1), right)
    )
    return jnp.sum(jnp.abs(confidence - correct)) / jnp.sum(count), count


def moments(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w"])
    return {"mean": hidden.mean(0), "std": hidden.std(0), "cov": jnp.cov(hidden, rowvar=False), "top": hidden.max(0)}


def nearest(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w"])
    similarity = hidden @ hidden.T - 1e3 * jnp.eye(len(hidden))
    return jax.lax.top_k(similarity, 2)


def jacobian(params, batch):
    return jax.vmap(jax.jacrev(lambda x: logits_of(params, {"x": x[None]})[0]))(batch["x"])


def dropout(params, batch):
    kept = jax.random.bernoulli(jax.random.key(3), 0.8, batch["x"].shape)
    return logits_of(params, {"x": jnp.where(kept, batch["x"], 0.0)})


def gradient_and_value(params, batch):
    def loss(params):
        return -jnp.mean(jax.nn.log_softmax(logits_of(params, batch))[jnp.arange(len(batch["x"])), batch["label"]])

    return jax.value_and_grad(loss)(params)


def constants(params, batch):
    return {"norm": jnp.sum(params["w"] ** 2), "number": len(batch["x"]), "nothing": None, "rows": 2 * batch["x"]}


def layouts(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w"])
    return hidden.T, hidden.reshape(-1), hidden[:, None] * jnp.ones((3, 1)), jnp.concatenate([hidden, -hidden])


FUNCTIONS = [
    rows,
    accuracy,
    f1_score,
    area_under_curve,
    perplexity,
    confusion_matrix,
    calibration,
    moments,
    nearest,
    jacobian,
    dropout,
    gradient_and_value,
    constants,
    layouts,
]


def as_arrays(tree):
    return jax.tree.map(jnp.asarray, tree)


@pytest.mark.every_jax
@pytest.mark.parametrize("size", [1, 5, EXAMPLES, None, "auto"])
@pytest.mark.parametrize("fun", FUNCTIONS, ids=lambda fun: fun.__name__)
def test_it_is_the_result_of_the_full_batch(fun, size):
    expected = jax.jit(fun)(parameters(), examples())
    actual = ab.map_batch(fun, microbatch_size=size)(parameters(), examples())
    assert_same(as_arrays(actual), as_arrays(expected))


@pytest.mark.full
@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize("fun", FUNCTIONS, ids=lambda fun: fun.__name__)
def test_it_is_the_result_on_a_mesh(fun, devices):
    expected = jax.jit(fun)(parameters(), examples())
    actual = ab.map_batch(fun, microbatch_size=2, mesh=mesh_of(devices))(parameters(), examples())
    assert_same(as_arrays(actual), as_arrays(expected))


def test_a_mean_of_means_would_differ():
    """The control: the accuracy of the microbatches, averaged."""
    batch = examples(20)
    in_microbatches = jax.tree.map(lambda leaf: leaf.reshape(4, 5, *leaf.shape[1:]), batch)
    parts = jax.vmap(accuracy, (None, 0))(parameters(), in_microbatches)
    exact = ab.map_batch(accuracy, microbatch_size=5)(parameters(), batch)
    assert abs(jnp.mean(parts) - exact) > 1e-3
    assert exact == accuracy(parameters(), batch)


def test_under_jit_vmap_and_grad():
    mapped = ab.map_batch(perplexity, microbatch_size=5)
    params, batch = parameters(), examples()
    assert_same(jax.jit(mapped)(params, batch), perplexity(params, batch))
    assert_same(jax.grad(mapped)(params, batch), jax.grad(perplexity)(params, batch))
    several = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), params)
    assert_same(jax.vmap(mapped, (0, None))(several, batch), jax.vmap(perplexity, (0, None))(several, batch))


def test_the_batch_may_be_any_argument():
    def fun(x, scale=2.0, *, y):
        return jnp.sum(x * scale * y), x + y

    x, y = jnp.arange(7.0), jnp.arange(7.0) ** 2
    mapped = ab.map_batch(fun, batch_argnums=0, batch_argnames="y", microbatch_size=3)
    assert_same(mapped(x, 3.0, y=y), fun(x, 3.0, y=y))


def test_no_examples():
    mapped = ab.map_batch(lambda p, b: (jnp.sum(b["x"] @ p["w"]), b["x"] @ p["w"]), microbatch_size=3)
    total, hidden = mapped(parameters(), examples(0))
    assert total == 0 and hidden.shape == (0, 8)


def test_sums_of_bfloat16_are_added_in_float32():
    def total(scale, x):
        return jnp.vdot(scale * x, x)

    one, x = jnp.ones((), jnp.bfloat16), jnp.ones(4096, jnp.bfloat16)
    exact = 4096
    assert abs(float(ab.map_batch(total, microbatch_size=1)(one, x)) - exact) < 0.004 * exact
    narrow = ab.map_batch(total, microbatch_size=1, accumulator_dtype=None)
    assert abs(float(narrow(one, x)) - exact) > 0.5 * exact  # the control


def test_temporaries_are_flat_in_the_batch():
    def fun(params, batch):
        hidden = jnp.tanh(batch @ params)
        return jnp.sum(jnp.tanh(hidden @ params.T) ** 2), jnp.argmax(hidden, axis=1)

    def temporaries(run, number):
        types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 512), (number, 64))]
        return jax.jit(run).lower(*types).compile().memory_analysis().temp_size_in_bytes

    mapped = ab.map_batch(fun, microbatch_size=32)
    few, many = (temporaries(mapped, number) for number in (512, 4096))
    assert many - few <= 2 * 4 * (4096 - 512)  # the positions that are returned, twice
    assert temporaries(fun, 4096) > 5 * many  # the control


def test_a_function_of_data_alone_is_flat_too():
    def fun(x):
        waves = jnp.sin(x[:, None] * jnp.arange(1000.0))
        return jnp.sum(jnp.sort(waves, axis=1)[:, ::2]), jnp.argmax(waves, axis=1)

    def temporaries(size, number):
        run = jax.jit(ab.map_batch(fun, batch_argnums=0, microbatch_size=size))
        return run.lower(jax.ShapeDtypeStruct((number,), jnp.float32)).compile().memory_analysis().temp_size_in_bytes

    few, many = temporaries(16, 256), temporaries(16, 2048)
    assert many - few <= 3 * 8 * (2048 - 256)  # the positions that are returned
    assert temporaries(None, 2048) > 5 * many  # the control
    x = jnp.linspace(-1, 1, 53)
    assert_same(ab.map_batch(fun, batch_argnums=0, microbatch_size=16)(x), fun(x))


def test_it_compiles_once():
    mapped = ab.map_batch(lambda p, b: jnp.sum(b * p), microbatch_size=4)
    x = jnp.arange(10.0)
    mapped(2.0, x)
    with counted_compilations() as count:
        for number in range(3):
            mapped(2.0, x + number)
    assert count[0] <= 1  # the sum x + number


def test_a_plan_keeps_the_budget():
    def fun(w, x):
        return jnp.sum(jnp.sort(jnp.tanh(x @ w), axis=1) * w[0], axis=1)

    w, x = jnp.ones((256, 256), jnp.float32), jnp.ones((2048, 256), jnp.float32)
    mapped = ab.map_batch(fun, memory="4MiB")
    plan = ab.plan(mapped, w, x, timed=False)
    assert plan.noun == "result" and plan.chosen.fits and plan.microbatch_size < 2048
    assert "gradient" not in str(plan)
    np.testing.assert_allclose(mapped(w, x), fun(w, x), rtol=1e-6)
    with pytest.raises(ab.NothingFitsError):
        ab.plan(mapped, w, x, memory="1MiB", timed=False)


def test_reading_says_what_each_output_is():
    reading = ab.read(ab.map_batch(f1_score), parameters(), examples())
    assert reading.separable and reading.passes == 1
    reading = ab.read(ab.map_batch(moments), parameters(), examples())
    forms = {name: form.words for name, form in reading.outputs}
    assert forms["result['mean']"] == "mean over 23 examples"
    assert forms["result['std']"] == "couples examples"
    assert "returns result['std']: couples examples" in str(reading) and "gradient" not in str(reading)
    assert "returns result" in reading._repr_html_()
    assert ab.read(ab.map_batch(rows), parameters(), examples()).kind == "rows along axis 0"


def test_on_coupled_error_names_the_line():
    with pytest.raises(ab.CoupledError, match=r"test_map_batch\.py:\d+ in nearest"):
        ab.map_batch(nearest, microbatch_size=4, on_coupled="error")(parameters(), examples())


def test_verify_compares_the_outputs():
    verification = ab.verify(ab.map_batch(moments), parameters(), examples(), microbatch_sizes=(1, 5))
    assert verification.ok and verification.noun == "result"
    assert {leaf.name for leaf in verification.routes[0].leaves} >= {"result['std']", "result['cov']"}
    assert "gradient" not in str(verification)


def test_verify_notices_a_function_that_changes(monkeypatch):
    """The control: a rule that returns something else for microbatches than for the batch."""
    from anybatch.reading import split

    honest = split.Split.prefix
    monkeypatch.setattr(split.Split, "prefix", lambda *args: [1.001 * leaf for leaf in honest(*args)])
    verification = ab.verify(ab.map_batch(rows), parameters(), examples(), microbatch_sizes=5)
    assert not verification.ok and "bug in anybatch" in verification.diagnosis
    with pytest.raises(ab.DifferentGradientError, match="result"):
        verification.raise_if_different()


def test_a_result_that_is_no_array_is_refused():
    with pytest.raises(ab.InputError, match=r"result\['name'\] = 'model'"):
        ab.map_batch(lambda p, b: {"name": "model"}, microbatch_size=4)(parameters(), examples())
    for array in (np.array(["model"]), np.array([None]), np.zeros(1, "M8[s]"), np.zeros(1, ">f8")):
        with pytest.raises(ab.InputError, match=r"(?s)result\['name'\] = .*Leave it out"):
            ab.map_batch(lambda p, b, array=array: {"name": array}, microbatch_size=4)(parameters(), examples())


@pytest.mark.every_jax
def test_models_of_nnx_and_equinox():
    eqx, nnx = pytest.importorskip("equinox"), pytest.importorskip("flax.nnx")
    x = jnp.asarray(np.random.default_rng(0).normal(size=(11, 4)), jnp.float32)
    linear = eqx.nn.MLP(4, 3, 8, 2, key=jax.random.key(0))

    def predict(model, x):
        return jax.vmap(model)(x)

    np.testing.assert_allclose(ab.map_batch(predict, microbatch_size=4)(linear, x), predict(linear, x), rtol=1e-6)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layer, self.norm = nnx.Linear(4, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.layer(x))

    one, other = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    mapped = ab.map_batch(lambda model, x: model(x), microbatch_size=4)
    np.testing.assert_allclose(mapped(one, x), other(x), rtol=1e-5, atol=1e-6)  # both in training mode
    np.testing.assert_allclose(one.norm.mean[...], other.norm.mean[...], rtol=1e-5)  # updated in place
    one.eval()
    np.testing.assert_allclose(mapped(one, x), one(x), rtol=1e-5, atol=1e-6)


@pytest.mark.every_jax
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_random_programs_with_many_outputs(compiled):
    seeds = range(700, 715) if compiled else range(800, 812)
    outcomes = {seed: compare_mapped(Program(seed), compiled) for seed in seeds}
    wrong = [f"{one.kind} {one.text}\n{Program(seed)}" for seed, one in outcomes.items() if one.kind != "same"]
    assert len(wrong) <= 2 and not any(one.kind in ("different", "crashed") for one in outcomes.values()), wrong
