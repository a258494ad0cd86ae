"""Blocks that are computed twice: the same gradient, in less memory."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.comparing import assert_same
from cases.planned import elementwise, problem
from cases.read_losses import INFERRED
from cases.zoo import ZOO
from jax.experimental import io_callback

import anybatch as ab
from anybatch.call.options import POLICIES
from anybatch.gradients import remat
from anybatch.jaxprs import interpreter

SOME = (
    "gpt_scanned",
    "two_towers",
    "equinox_model",
)


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in ZOO if case.name in SOME], ids=lambda case: case.name)
def test_blocks_of_real_models_give_the_same_gradient(model_defaults, case):
    loss, arguments = case.problem(num_examples=6)
    expected = jax.jit(jax.value_and_grad(loss, has_aux=case.has_aux))(*arguments)
    options = {"has_aux": case.has_aux, "microbatch_size": 4, "remat": "nothing_saveable"}
    actual = jax.jit(ab.value_and_grad(loss, **options))(*arguments)
    assert_same(actual, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("policy", [*POLICIES, 0.01, 0.5, 1.0])
def test_every_policy_gives_the_same_gradient(float64, policy):
    params, batch = jax.tree.map(_double, problem(12, width=4))
    expected = jax.value_and_grad(elementwise)(params, batch)
    for options in ({"reduction": "infer"}, {"reduction": "mean"}):
        for size in (5, None):
            fun = ab.value_and_grad(elementwise, microbatch_size=size, remat=policy, **options)
            assert_same(fun(params, batch), expected)


def test_what_takes_the_least_time_for_each_byte_is_computed_again_first():
    """Of a sum and a wide product of one layer, the product is kept longer."""

    def layer(x, w):
        return jnp.sin(x @ w) * jnp.sin(jax.lax.cumsum(x, axis=1))

    steps = remat._steps_of_block(None, _equations(layer))
    assert [name for step in steps for name in _names(step)] == ["cumsum", "dot_general"]
    *_, last = steps
    kept, _ = remat._kept(steps, 1 - 1.01 * last.num_bytes / sum(each.num_bytes for each in steps))
    assert kept == set(map(id, last.equations))


def test_what_a_later_value_is_computed_from_is_kept_with_it():
    """The backward pass needs a sum with a product, and not the product, without which the sum is slow to compute."""

    def layer(x, w):
        return jnp.sin(x + x @ w)

    first, *others = remat._steps_of_block(None, _equations(layer))
    sizes = [each.num_bytes for each in (first, *others)]
    assert sum(sizes) == remat.FUSED_SHARE * WIDTH * WIDTH * 4  # if nothing is computed again, only the sum is kept
    assert ["dot_general"] in map(_names, (first, *others))


def test_all_is_computed_again_but_the_products_of_the_last_block_and_small_sums():
    """The backward pass begins with the last block. Small sums are slow to compute again for what they take."""

    def loss(params, x):
        for index in range(6):
            x = x + jnp.tanh(jax.nn.standardize(x) @ params["in"][index]) @ params["out"][index]
        return jnp.mean(jax.nn.logsumexp(x @ params["words"], axis=-1))

    shapes = {"in": (6, 256, 1024), "out": (6, 1024, 256), "words": (256, 8192)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    traced = jax.make_jaxpr(loss)(params, jax.ShapeDtypeStruct((2048, 256), jnp.float32))
    jaxpr = remat._inlined(traced, [each.aval for each in traced.jaxpr.invars])
    steps = remat._steps(jaxpr, remat._written(jaxpr))
    kept, as_is = remat._kept(steps, 1.0)
    values = [each for step in steps for each in step.equations]
    products = [each for each in values if each.primitive.name == "dot_general"]
    sums = [each for each in values if each.primitive.name == "reduce_sum"]
    assert not as_is and [each.outvars[0].aval.shape for each in products if id(each) in kept] == [(2048, 8192)]
    assert len(products) > 1 and len(sums) >= 12 and all(id(each) in kept for each in sums)


WIDTH = 4096


def _equations(layer):
    square = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    return interpreter.equations_of(jax.make_jaxpr(layer)(square, square))


def _names(step):
    return [equation.primitive.name for equation in step.equations]


def _call_back(x, *, ordered, of):
    if of == "debug":
        jax.debug.callback(lambda x: None, x, ordered=ordered)
    else:
        io_callback(lambda x: None, None, x, ordered=ordered)


@pytest.mark.every_jax
@pytest.mark.parametrize("again", [0.25, 0.6, 1.0, "dots_saveable"])
@pytest.mark.parametrize("of", ["debug", "io"])
@pytest.mark.parametrize("scanned", [False, True])
def test_losses_that_call_back_are_computed_again(again, of, scanned):
    """JAX can neither keep what only a print reads, nor compute again what calls back to write something."""
    params, batch = jnp.stack([jnp.eye(8) * 0.9] * 4), jnp.arange(96.0).reshape(12, 8) / 96

    def loss(params, x, tells=True):
        def layer(x, w):
            x = jnp.tanh(x @ w)
            if tells:
                _call_back(jax.lax.stop_gradient(x).sum(), ordered=False, of=of)
            return x, None

        if scanned:
            x, _ = jax.lax.scan(layer, x, params)
        else:
            for w in params:
                x, _ = layer(x, w)
        return jnp.mean(x**2)

    expected = jax.value_and_grad(loss)(params, batch, tells=False)
    for size in (5, None):
        fun = ab.value_and_grad(loss, reduction="mean", microbatch_size=size, remat=again)
        assert_same(fun(params, batch), expected, rtol=1e-5)


@pytest.mark.parametrize("case", INFERRED[::16], ids=lambda case: case.name)
def test_blocks_of_small_losses_give_the_same_gradient(model_defaults, case):
    arguments = jax.tree.map(jnp.asarray, case.make(case.num_examples or 12))
    options = {"has_aux": case.has_aux}
    expected = jax.value_and_grad(case.loss, **options)(*arguments)
    fun = ab.value_and_grad(
        case.loss, **options, batch_argnums=case.batch_argnums, microbatch_size=5, remat="nothing_saveable"
    )
    assert_same(fun(*arguments), expected)


def test_blocks_take_less_memory():
    params, batch = problem(64, width=32, depth=16)

    def temporaries(**options):
        fun = jax.jit(ab.value_and_grad(elementwise, microbatch_size=16, **options))
        return fun.lower(params, batch).compile().memory_analysis().temp_size_in_bytes

    plain, dots, nothing = temporaries(), temporaries(remat="dots_saveable"), temporaries(remat="nothing_saveable")
    assert nothing < dots < plain / 2


def wide_layers(examples=12):
    """Layers in a loop that pass on 64 KiB for each example, and a counter and a key."""
    generator = np.random.default_rng(0)
    params = {"in": generator.standard_normal((6, 64, 96)) / 8, "out": generator.standard_normal((6, 96, 64)) / 8}
    batch = {name: generator.standard_normal((examples, 128, 64)) for name in ("x", "y")}
    return jax.tree.map(jnp.asarray, (params, batch))


def passes_on(params, batch):
    def layer(carry, weights):
        hidden, number, key = carry
        key, of_layer = jax.random.split(key)
        kept = jax.random.bernoulli(of_layer, 0.9, hidden.shape)
        inner = jnp.tanh(hidden @ weights["in"]) @ weights["out"]
        return (hidden + jnp.where(kept, inner, 0.0), number + 1, key), jnp.mean(inner**2)

    (hidden, _, _), sizes = jax.lax.scan(layer, (batch["x"], 0, jax.random.key(7)), params)
    return jnp.mean((hidden - batch["y"]) ** 2) + 0.1 * jnp.sum(sizes)


@pytest.mark.full
@pytest.mark.every_jax
@pytest.mark.parametrize("where", ["eager", "jit", "full batch", "two devices", "vmap"])
def test_layers_that_pass_on_activations_by_the_host_have_the_same_gradient(float64, where):
    params, batch = wide_layers()
    expected = jax.value_and_grad(passes_on)(params, batch)
    options = {"microbatch_size": None if where == "full batch" else 5, "remat": "offload"}
    if where == "two devices":
        options |= {"mesh": jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]), "microbatch_size": 2}
    fun = ab.value_and_grad(passes_on, **options)
    if where == "vmap":
        fun = jax.vmap(fun, in_axes=(None, 0))
        actual = fun(params, jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), batch))
        assert_same(jax.tree.map(lambda leaf: leaf[1], actual), expected)
        return
    actual = (fun if where == "eager" else jax.jit(fun))(params, batch)
    assert_same(actual, expected)


@pytest.mark.every_jax
def test_only_what_layers_pass_on_is_on_the_host(float64):
    """And only what is large: not the counter, nor the key, nor anything inside the layers."""
    params, batch = wide_layers()

    def on_host(**options):
        text = str(jax.make_jaxpr(ab.value_and_grad(passes_on, **options))(params, batch))
        return set(re.findall(r"(\w+)<host>\[([\d,]*)\]", text))

    assert on_host(microbatch_size=4, remat="offload") == {("f64", "4,128,64"), ("f64", "6,4,128,64")}
    assert not on_host(microbatch_size=4, remat=1.0)
    small = jax.tree.map(lambda leaf: leaf[:, :1], batch)
    text = str(jax.make_jaxpr(ab.value_and_grad(passes_on, microbatch_size=4, remat="offload"))(params, small))
    assert "<host>" not in text


@pytest.mark.parametrize("remat", [0.5, "nothing_saveable"])
def test_a_loss_with_references_is_left_as_it_is_around_them(float64, remat):
    """JAX cannot compute a reference again."""
    params, batch = problem(12, width=8, depth=6)
    params, batch = jax.tree.map(_double, (list(params["layers"]), batch))

    def loss(params, batch):
        hidden, total = batch["x"], jax.new_ref(jnp.zeros_like(batch["x"]))
        for weights in params:
            hidden = jnp.tanh(hidden @ weights)
            total[...] += hidden
        return jnp.mean((total[...] - batch["y"]) ** 2)

    expected = jax.value_and_grad(loss)(params, batch)
    fun = ab.value_and_grad(loss, reduction="mean", microbatch_size=5, remat=remat)
    assert_same(fun(params, batch), expected)


@pytest.mark.parametrize("remat", ["dots_saveable", 0.3, "nothing_saveable", "offload"])
@pytest.mark.parametrize("made", ["outside", "inside"])
def test_references_in_a_scan_are_left_as_they_are(float64, made, remat):
    params, batch = problem(12, width=8, depth=6)
    params, batch = jax.tree.map(_double, (list(params["layers"]), batch))

    def loss(params, batch):
        total = jax.new_ref(jnp.zeros_like(batch["x"]))

        def layer(hidden, weights):
            sums = jax.new_ref(jnp.zeros_like(hidden)) if made == "inside" else total
            hidden = jnp.tanh(hidden @ weights)
            sums[...] += 2.0 * hidden
            return hidden + jnp.sin(sums[...]) if made == "inside" else hidden, None

        hidden, _ = jax.lax.scan(layer, batch["x"], jnp.stack(params))
        return jnp.mean((total[...] + hidden - batch["y"]) ** 2)

    expected = jax.value_and_grad(loss)(params, batch)
    fun = ab.value_and_grad(loss, reduction="mean", microbatch_size=5, remat=remat)
    assert_same(fun(params, batch), expected)


@pytest.mark.full
@pytest.mark.parametrize("remat", ["dots_saveable", 0.2, "offload"])
@pytest.mark.parametrize("way", ["unrolled", "scanned", "by FFT"])
def test_complex_numbers_are_computed_again(float64, model_defaults, way, remat):
    """JAX cannot keep them."""
    params, batch = problem(12, width=8, depth=6)
    params = jnp.stack([_double(weights) * (1 + 0.5j) for weights in params["layers"]])
    batch = jax.tree.map(_double, batch)

    def layer(hidden, weights):
        if way == "by FFT":
            spectrum = jnp.fft.rfft(hidden.real, axis=1) * weights[:1, :5]
            return jnp.sin(jnp.fft.irfft(spectrum, n=8, axis=1)) + 0.1j * hidden, None
        return 0.3 * jnp.sin(hidden @ weights), None

    def loss(params, batch):
        hidden = batch["x"].astype(complex)
        if way == "scanned":
            hidden, _ = jax.lax.scan(layer, hidden, params)
        else:
            for weights in params:
                hidden, _ = layer(hidden, weights)
        return jnp.mean(jnp.abs(hidden - batch["y"]) ** 2)

    expected = jax.value_and_grad(loss)(params, batch)
    assert_same(ab.value_and_grad(loss, microbatch_size=5, remat=remat)(params, batch), expected)


def test_a_call_that_uses_a_reference_still_becomes_blocks():
    params, batch = problem(64, width=32, depth=16)

    @jax.jit
    def loss(params, batch):
        hidden = batch["x"]
        for weights in params["layers"]:
            hidden = jnp.tanh(hidden @ weights)
            hidden = hidden + jnp.tanh(hidden @ weights.T) @ weights
        seen = jax.new_ref(jnp.zeros_like(hidden))
        seen[...] += hidden
        return jnp.mean((seen[...] - batch["y"]) ** 2)

    fun = ab.value_and_grad(loss, reduction="mean", microbatch_size=None, remat="nothing_saveable")
    text = str(jax.make_jaxpr(fun)(params, batch))
    assert text.count("remat2[") + text.count("checkpoint[") >= 2


def test_layers_that_are_written_out_become_blocks():
    """As many checkpoints as memory wants, each around about a layer; and around all of them there is none."""
    params, batch = problem(64, width=32, depth=16)

    def unrolled(params, batch):
        hidden = batch["x"]
        for weights in params["layers"]:
            hidden = jnp.tanh(hidden @ weights)
            hidden = hidden + jnp.tanh(hidden @ weights.T) @ weights
        return jnp.mean((hidden - batch["y"]) ** 2)

    fun = ab.value_and_grad(unrolled, microbatch_size=None, remat="nothing_saveable")
    text = str(jax.make_jaxpr(fun)(params, batch))
    assert 3 <= text.count("remat2[") + text.count("checkpoint[") <= 40


def test_layers_become_blocks_beside_wide_values():
    """However many bytes the logits have: those in blocks keep nothing that could be computed again."""
    words, width, depth = 2048, 32, 12
    keys = jax.random.split(jax.random.key(0), depth + 1)
    params = {
        "embedding": jax.random.normal(keys[0], (words, width)),
        "layers": [0.1 * jax.random.normal(key, (width, 4 * width)) for key in keys[1:]],
    }
    tokens = jax.random.randint(jax.random.key(1), (4, 129), 0, words)

    def loss(params, tokens):
        hidden = params["embedding"][tokens[:, :-1]]
        for weights in params["layers"]:
            hidden = hidden + jnp.tanh(jnp.tanh(hidden @ weights) * 2) @ weights.T
        logits = hidden @ params["embedding"].T
        right = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - right)

    fun = ab.value_and_grad(loss, microbatch_size=1, block_size=8, remat="nothing_saveable")
    text = str(jax.make_jaxpr(fun)(params, tokens))
    assert 4 <= text.count("remat2[") + text.count("checkpoint[") <= 40


def _double(leaf):
    leaf = jnp.asarray(leaf)
    return leaf.astype(jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


@pytest.mark.every_jax
@pytest.mark.parametrize("again", [0.25, 0.5, 1.0])
def test_one_of_several_results_is_told_to_a_callback(float64, again):
    """As the experts that tokens are sent to are printed."""
    params, batch = jax.tree.map(_double, problem(12, width=8, depth=1))
    told = []

    def loss(weights, x):
        best, places = jax.lax.top_k(x @ weights, 3)
        jax.debug.callback(lambda places: told.append(places.shape), places)
        return jnp.mean(best**2)

    weights, x = params["layers"][0], batch["x"]
    fun = ab.value_and_grad(loss, reduction="mean", microbatch_size=6, remat=again)
    assert_same(fun(weights, x), jax.value_and_grad(loss)(weights, x))
    jax.effects_barrier()
    assert (6, 3) in told
