"""Products with the Hessian and the Gauss-Newton matrix, and the Fisher's diagonal, against plain JAX at full batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.comparing import assert_same
from cases.meshes import mesh_of
from jax.flatten_util import ravel_pytree

import anybatch as ab

pytestmark = pytest.mark.usefixtures("model_defaults")

EXAMPLES = 13


def random(shape, seed):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def parameters(seed=0):
    return {"w": random((5, 7), seed), "v": random((7, 3), seed + 1)}


def examples():
    labels = jnp.asarray(np.random.default_rng(3).integers(0, 3, EXAMPLES))
    mask = jnp.asarray(np.random.default_rng(4).random(EXAMPLES) < 0.6) * 1.0
    return {"x": random((EXAMPLES, 5), 2), "label": labels, "mask": mask}


def predict(params, batch):
    return jnp.tanh(batch["x"] @ params["w"]) @ params["v"]


def cross_entropy(logits, batch):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][:, None], axis=1)[:, 0]
    return -jnp.sum(chosen * batch["mask"]) / jnp.sum(batch["mask"])


def root_mean_square(predictions, batch):
    return jnp.sqrt(jnp.mean((predictions - batch["x"][:, :3]) ** 2))


def test_predictions_may_have_masks_and_indices():
    """They have no derivative, and reach the loss as they are."""

    def predict_all(params, batch):
        return {"logits": predict(params, batch), "keep": batch["x"][:, 0] > 0, "index": batch["label"]}

    def loss(made, batch):
        chosen = jnp.take_along_axis(jax.nn.log_softmax(made["logits"]), made["index"][:, None], axis=1)[:, 0]
        return -jnp.sum(jnp.where(made["keep"], chosen, 0)) / jnp.sum(made["keep"])

    def of_logits(logits, batch):
        return loss({"logits": logits, "keep": batch["x"][:, 0] > 0, "index": batch["label"]}, batch)

    args = parameters(), examples()
    found = ab.ggn_product(predict_all, loss, microbatch_size=4)(*args, vector=parameters(5))
    assert_same(found, ab.ggn_product(predict, of_logits, microbatch_size=None)(*args, vector=parameters(5)))


def contrastive(embeddings, batch):
    similarity = embeddings @ embeddings.T
    positions = jnp.arange(len(similarity))
    return -jnp.mean(jax.nn.log_softmax(similarity)[positions, (positions + 1) % len(similarity)])


LOSSES = [cross_entropy, root_mean_square, contrastive]


def hessian_product(loss, params, batch, vector):
    return jax.jvp(lambda params: jax.grad(loss)(params, batch), (params,), (vector,))[1]


def gauss_newton_product(loss, params, batch, vector):
    """With the matrix J.T @ H @ J as a whole, so that no product is shared with what is tested."""
    (params, unflatten), (vector, _) = (ravel_pytree(tree) for tree in (params, vector))

    def predictions(params):
        return predict(unflatten(params), batch).reshape(-1)

    made = predictions(params)
    jacobian = jax.jacrev(predictions)(params)
    curvature = jax.hessian(lambda flat: loss(flat.reshape(EXAMPLES, 3), batch))(made)
    return unflatten(jacobian.T @ curvature @ jacobian @ vector)


@pytest.mark.every_jax
@pytest.mark.parametrize("size", [1, 4, EXAMPLES, None, "auto"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_a_hessian_product_is_that_of_the_full_batch(loss, size):
    def of_params(params, batch):
        return loss(predict(params, batch), batch) + 0.1 * jnp.sum(params["w"] ** 4)

    params, vector = parameters(), parameters(8)
    product = ab.hvp(of_params, microbatch_size=size)(params, examples(), vector=vector)
    assert_same(product, hessian_product(of_params, params, examples(), vector))


@pytest.mark.every_jax
@pytest.mark.parametrize("size", [1, 4, EXAMPLES, None, "auto"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_a_gauss_newton_product_is_that_of_the_full_batch(loss, size):
    params, vector = parameters(), parameters(8)
    product = ab.ggn_product(predict, loss, microbatch_size=size)(params, examples(), vector=vector)
    assert_same(product, gauss_newton_product(loss, params, examples(), vector), rtol=1e-9)


def test_the_gauss_newton_matrix_is_not_the_hessian():
    """The control of the two tests above."""
    params, vector = parameters(), parameters(8)
    one = gauss_newton_product(cross_entropy, params, examples(), vector)
    other = hessian_product(
        lambda params, batch: cross_entropy(predict(params, batch), batch), params, examples(), vector
    )
    assert jnp.abs(one["w"] - other["w"]).max() > 1e-3


@pytest.mark.parametrize("keep_batch_dim", [False, True])
@pytest.mark.parametrize("size", [1, 4, EXAMPLES, "auto"])
def test_the_fisher_diagonal_is_that_of_the_full_batch(size, keep_batch_dim):
    def loss(params, example):
        return -jax.nn.log_softmax(predict(params, example))[example["label"]]

    def of_one(params, batch):
        return jnp.mean(jax.vmap(loss, (None, 0))(params, batch))

    each = jax.vmap(jax.grad(loss), (None, 0))(parameters(), examples())
    fun = ab.fisher_diagonal(of_one if keep_batch_dim else loss, keep_batch_dim=keep_batch_dim, microbatch_size=size)
    assert_same(fun(parameters(), examples()), jax.tree.map(lambda leaf: jnp.mean(leaf**2, axis=0), each))
    gradient = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0) ** 2, each)  # the control: the square of the mean
    assert jnp.abs(gradient["w"] - fun(parameters(), examples())["w"]).max() > 1e-3


@pytest.mark.full
def test_the_fisher_diagonal_has_the_arguments_of_per_example_gradients():
    """Batches by name, several parameters, and keys that differ from example to example."""

    def loss(params, x, shift, label, key):
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        return -jax.nn.log_softmax(predict(params, {"x": jnp.where(kept, x, 0.0)}) + shift)[label]

    batch, shift, key = examples(), random((3,), 9), jax.random.key(5)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(EXAMPLES))
    each = jax.vmap(jax.grad(loss, (0, 2)), (None, 0, None, 0, 0))
    expected = each(parameters(), batch["x"], shift, batch["label"], keys)
    for size in (4, None):
        fun = ab.fisher_diagonal(loss, (0, 2), batch_argnums=(1, 3), rng_argnums=4, microbatch_size=size)
        found = fun(parameters(), batch["x"], shift, batch["label"], key)
        assert_same(found, jax.tree.map(lambda leaf: jnp.mean(leaf**2, axis=0), expected))

    def named(params, x, label):
        return loss(params, x, 0.0, label, keys[0])

    each = jax.vmap(jax.grad(named), (None, 0, 0))(parameters(), batch["x"], batch["label"])
    fun = ab.fisher_diagonal(named, batch_argnames="label", microbatch_size=4)
    expected = jax.tree.map(lambda leaf: jnp.mean(leaf**2, axis=0), each)
    assert_same(fun(parameters(), batch["x"], label=batch["label"]), expected)
    with pytest.raises(ab.InputError, match='batch_argnames="label"'):  # every example would see all labels
        ab.fisher_diagonal(named, microbatch_size=4)(parameters(), batch["x"], label=batch["label"])


def test_the_fisher_diagonal_of_a_loss_that_looks_across_examples_is_refused():
    def normalised(params, batch):
        hidden = batch["x"] @ params["w"]
        return jnp.mean(((hidden - hidden.mean(axis=0)) @ params["v"]) ** 2)

    with pytest.raises(ab.CoupledError, match="looks across examples"):
        ab.fisher_diagonal(normalised, keep_batch_dim=True, microbatch_size=4)(parameters(), examples())


def test_arguments_of_products_are_checked():
    params, vector = parameters(), parameters(8)

    def loss(params, batch):
        return cross_entropy(predict(params, batch), batch)

    with pytest.raises(ab.InputError, match=r"argnums must be the position of one argument, got argnums=\(0, 1\)"):
        ab.hvp(loss, (0, 1))
    with pytest.raises(ab.InputError, match="batch_argnums must be the position of one argument"):
        ab.ggn_product(predict, cross_entropy, batch_argnums=(1, 2))
    with pytest.raises(ab.InputError, match="must be passed by position, got batch_argnums=1"):
        ab.ggn_product(predict, cross_entropy)(params, batch=examples(), vector=vector)
    with pytest.raises(ab.InputError, match="must be passed by position, got argnums=0"):
        ab.hvp(loss)(params=params, batch=examples(), vector=vector)
    by_name = ab.hvp(loss, microbatch_size=4)(params, batch=examples(), vector=vector)
    assert_same(by_name, hessian_product(loss, params, examples(), vector))


@pytest.mark.full
@pytest.mark.parametrize("devices", [2, 8])
def test_products_on_a_mesh(devices):
    params, vector, how = parameters(), parameters(8), {"mesh": mesh_of(devices), "microbatch_size": 1}

    def loss(params, batch):
        return cross_entropy(predict(params, batch), batch)

    assert_same(
        ab.hvp(loss, **how)(params, examples(), vector=vector), hessian_product(loss, params, examples(), vector)
    )
    assert_same(
        ab.ggn_product(predict, cross_entropy, **how)(params, examples(), vector=vector),
        gauss_newton_product(cross_entropy, params, examples(), vector),
        rtol=1e-9,
    )


def temporaries(fun, number, width=512):
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, width), (number, 64), (64, width))]
    return jax.jit(fun).lower(*types).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("which", ["hvp", "ggn_product", "fisher_diagonal"])
def test_temporaries_are_flat_in_the_batch(which):
    def predict(w, x):
        return jnp.tanh(x @ w) @ w.T

    def loss(z, x):
        return jnp.mean(jnp.sum((z - x) ** 2, axis=-1))

    functions = {
        "hvp": lambda size: ab.hvp(lambda w, x: loss(predict(w, x), x), microbatch_size=size),
        "ggn_product": lambda size: ab.ggn_product(predict, loss, microbatch_size=size),
        "fisher_diagonal": lambda size: ab.fisher_diagonal(lambda w, x: loss(predict(w, x), x), microbatch_size=size),
    }

    def bytes_for(size, number):
        fun = functions[which](size)
        call = fun if which == "fisher_diagonal" else lambda w, x, vector: fun(w, x, vector=vector)
        return temporaries(lambda w, x, v: call(w, x) if which == "fisher_diagonal" else call(w, x, v), number)

    few, many = bytes_for(16, 256), bytes_for(16, 2048)
    assert many <= 1.02 * few + 4096
    assert bytes_for(None, 2048) > 4 * many  # the control


@pytest.mark.every_jax
def test_a_loss_with_a_custom_vjp():
    @jax.custom_vjp
    def squash(x):
        return jnp.tanh(x)

    squash.defvjp(lambda x: (jnp.tanh(x), x), lambda x, ct: (ct * (1 - jnp.tanh(x) ** 2),))

    def loss(params, batch):
        return jnp.mean((squash(batch["x"] @ params["w"]) @ params["v"]) ** 2)

    params, vector = parameters(), parameters(8)
    product = ab.hvp(loss, microbatch_size=4)(params, examples(), vector=vector)
    assert_same(product, hessian_product(loss, params, examples(), vector))

    def squashed(params, batch):
        return squash(batch["x"] @ params["w"]) @ params["v"]

    product = ab.ggn_product(squashed, cross_entropy, microbatch_size=4)(params, examples(), vector=vector)
    assert_same(product, gauss_newton_product(cross_entropy, params, examples(), vector), rtol=1e-9)


def test_aux_and_equinox_models():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(5, 3, 7, 1, key=jax.random.key(0))
    vector = eqx.filter(model, eqx.is_inexact_array)

    def loss(model, batch):
        logits = jax.vmap(model)(batch["x"])
        return cross_entropy(logits, batch), logits

    product = ab.hvp(loss, has_aux=True, microbatch_size=4)(model, examples(), vector=vector)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    expected = hessian_product(lambda p, b: loss(eqx.combine(p, static), b)[0], params, examples(), vector)
    assert_same(jax.tree.leaves(product), jax.tree.leaves(expected))


def test_plan_read_and_verify_take_a_product():
    product = ab.hvp(lambda params, batch: cross_entropy(predict(params, batch), batch))
    params, batch, vector = parameters(), examples(), parameters(8)
    assert ab.read(product, params, batch, vector=vector).kind == "ratio of sums"
    assert ab.verify(product, params, batch, vector=vector, microbatch_sizes=4).ok
    assert ab.plan(product, params, batch, vector=vector, timed=False).chosen.fits


def test_a_vector_of_another_shape_is_refused():
    product = ab.hvp(lambda params, batch: cross_entropy(predict(params, batch), batch), microbatch_size=4)
    params, batch = parameters(), examples()
    with pytest.raises(ab.InputError, match="vector must be a tree like"):
        product(params, batch, vector=params["w"])
    with pytest.raises(ab.InputError, match=r"vector\['v'\] = float64\[3,7\] for float64\[7,3\]"):
        product(params, batch, vector={"w": params["w"], "v": params["v"].T})


def test_an_nnx_model_is_refused_with_the_way_out():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(5, 3, rngs=nnx.Rngs(0))
    product = ab.hvp(lambda model, x: jnp.mean(model(x) ** 2), microbatch_size=4)
    with pytest.raises(ab.InputError, match=r"nnx.split\(model, nnx.Param, \.\.\.\)"):
        product(model, examples()["x"], vector=None)


def test_totals_and_weights_are_refused():
    """The derivative of a ratio is not the ratio of derivatives."""

    def weighted(w, x):
        return jnp.sum((x @ w) ** 2), jnp.sum(x[:, 0])

    for make in (ab.hvp, lambda loss, **options: ab.ggn_product(lambda w, x: x @ w, loss, **options)):
        with pytest.raises(ab.InputError, match="not made of a total and a weight") as caught:
            make(weighted, reduction="weighted")
        assert "total / weight" in caught.value.remedy


@pytest.mark.every_jax
@pytest.mark.parametrize("size", [3, None])
def test_a_custom_vjp_that_is_no_derivative(float64, size):
    """The product is that of the gradient that JAX returns: with limited entries, or a slope in place of a sign."""

    @jax.custom_vjp
    def limited(x):
        return x

    limited.defvjp(lambda x: (x, None), lambda _, cotangent: (jnp.clip(cotangent, -0.2, 0.2),))

    @jax.custom_vjp
    def sign(x):
        return jnp.sign(x)

    sign.defvjp(lambda x: (sign(x), x), lambda x, cotangent: (cotangent * (1 - jnp.tanh(x) ** 2),))
    random = np.random.default_rng(0)
    w, vector, x, y = (jnp.asarray(random.normal(size=shape)) for shape in (4, 4, (10, 4), 10))
    batch = {"x": x, "y": y}
    for predict in (lambda w, x: jnp.tanh(x @ limited(w)), lambda w, x: sign(x @ w) * jnp.sum(w)):

        def loss(w, batch, predict=predict):
            return jnp.mean((predict(w, batch["x"]) - batch["y"]) ** 2)

        expected = jax.grad(lambda w, loss=loss: jax.grad(loss)(w, batch) @ vector)(w)
        assert_same(ab.hvp(loss, microbatch_size=size)(w, batch, vector=vector), expected)
