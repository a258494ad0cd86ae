"""Per-example gradients of losses that are written for batches: `keep_batch_dim=True`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.meshes import mesh_of
from cases.per_example_losses import clipped_sum, norms_of
from jax.experimental import io_callback
from per_example.test_factors import assert_close

import anybatch as ab
from anybatch.gradients import head_budget

pytestmark = pytest.mark.every_jax

FUNCTIONS = {
    "per_example_grads": ab.per_example_grads,
    "per_example_norms": ab.per_example_norms,
    "clipped_grad": functools.partial(ab.clipped_grad, clip_norm=1.0),
    "clipped_value_and_grad": functools.partial(ab.clipped_value_and_grad, clip_norm=1.0),
}


def problem(number=6):
    random = np.random.default_rng(0)
    params = {"w": random.normal(size=(5, 4)), "v": random.normal(size=(4, 3))}
    batch = {
        "x": random.normal(size=(number, 5)),
        "y": random.normal(size=(number, 3)),
        "mask": (np.arange(3)[None] < 1 + np.arange(number)[:, None] % 3).astype(np.float64),
    }
    return jax.tree.map(jnp.asarray, (params, batch))


def outputs_of(params, batch):
    return jnp.tanh(batch["x"] @ params["w"]) @ params["v"]


def mean(params, batch):
    return jnp.mean((outputs_of(params, batch) - batch["y"]) ** 2)


def with_batch_norm(params, batch):
    rows = outputs_of(params, batch)
    rows = rows - jnp.mean(rows, axis=0, keepdims=True)  # BATCH NORM
    return jnp.mean(rows**2)


def contrastive(params, batch):
    scores = outputs_of(params, batch) @ batch["y"].T  # CONTRASTIVE, of data that is whole
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(scores)))


def contrastive_of_itself(params, batch):
    rows = outputs_of(params, batch)
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(rows @ rows.T)))  # CONTRASTIVE


def standardised(params, batch):
    x = batch["x"] - jnp.mean(batch["x"], axis=0, keepdims=True)  # STANDARDISED
    return mean(params, {**batch, "x": x})


def mixed_up(params, batch):
    return mean(params, {**batch, "x": (batch["x"] + batch["x"][::-1]) / 2})  # MIXED UP


def weighted_by_share(params, batch):
    losses = jnp.sum((outputs_of(params, batch) - batch["y"]) ** 2, axis=1)
    counts = jnp.sum(batch["mask"], axis=1)
    return jnp.sum(losses * (counts / jnp.sum(counts)))  # SHARES


COUPLED = {
    "BATCH NORM": with_batch_norm,
    "CONTRASTIVE, of data that is whole": contrastive,
    "CONTRASTIVE": contrastive_of_itself,
    "STANDARDISED": standardised,
    "MIXED UP": mixed_up,
    "SHARES": weighted_by_share,
}


def token_mean(params, batch):
    losses = (outputs_of(params, batch) - batch["y"]) ** 2
    return jnp.sum(losses * batch["mask"]) / jnp.sum(batch["mask"])


def with_group_norm(params, batch):
    rows = outputs_of(params, batch)
    return jnp.mean((rows - jnp.mean(rows, axis=1, keepdims=True)) ** 2)


def with_a_penalty(params, batch):
    return jnp.sum(jnp.abs(outputs_of(params, batch))) + 0.1 * jnp.sum(params["w"] ** 2)


SEPARABLE = [mean, token_mean, with_group_norm, with_a_penalty]


def line_of(marker):
    with open(__file__) as lines:
        return next(number for number, line in enumerate(lines, 1) if line.rstrip().endswith("# " + marker))


def one_by_one(loss, params, batch):
    """The oracle: the gradient of every batch of one, by JAX."""
    number = batch["x"].shape[0]
    ones = [jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], batch) for i in range(number)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *(jax.grad(loss)(params, one) for one in ones))


# Losses that look across examples.


@pytest.mark.parametrize("name", FUNCTIONS)
def test_batch_norm_is_refused_with_its_line(float64, name):
    params, batch = problem()
    # The control: batches of one have no gradient at all.
    assert not np.any(norms_of(one_by_one(with_batch_norm, params, batch)))
    with pytest.raises(ab.CoupledError) as caught:
        FUNCTIONS[name](with_batch_norm, keep_batch_dim=True)(params, batch)
    first, *others = str(caught.value).splitlines()
    assert first == (
        f"This loss looks across examples at {__file__}:{line_of('BATCH NORM')} in with_batch_norm (sub): "
        "it combines each example with a sum or mean over the batch."
    )
    assert others == [
        "keep_batch_dim=True calls it with batches of one, where it is a different loss: there are no other examples "
        "to average over or to compare with. "
        "Keep the examples separate there (GroupNorm or LayerNorm instead of BatchNorm). "
        "If you mean batches of one, write that loss of one example and leave keep_batch_dim out: "
        "lambda params, example: loss(params, jax.tree.map(lambda leaf: leaf[None], example))."
    ]


@pytest.mark.parametrize("marker", COUPLED)
def test_what_couples_parameters_or_data_is_refused(float64, marker):
    params, batch = problem()
    with pytest.raises(ab.CoupledError, match=f"{__file__}:{line_of(marker)} in "):
        ab.per_example_norms(COUPLED[marker], keep_batch_dim=True)(params, batch)


@pytest.mark.parametrize("loss", [with_batch_norm, contrastive])
def test_it_is_refused_everywhere(float64, loss):
    """With both methods, under `jit`, on a mesh, with a plan, and with one example or none."""
    params, batch = problem(8)
    norms = functools.partial(ab.per_example_norms, loss, keep_batch_dim=True)
    clipped = ab.clipped_grad(loss, clip_norm=1.0, keep_batch_dim=True)
    for call in (
        norms(method="vmap"),
        norms(method="factored", microbatch_size=3),
        jax.jit(norms()),
        norms(mesh=mesh_of(4)),
        jax.jit(norms(mesh=mesh_of(4), microbatch_size=1)),
        functools.partial(ab.plan, clipped),
        functools.partial(ab.explain, clipped),
        ab.noise_scale(loss, exact=True, reduction="mean"),
        ab.noise_scale(loss, exact=True),
    ):
        with pytest.raises((ab.CoupledError, ab.InputError), match=r"looks across examples|compared with"):
            call(params, batch)
    for number in (1, 0):
        with pytest.raises(ab.CoupledError):
            norms()(params, jax.tree.map(lambda leaf, number=number: leaf[:number], batch))


@pytest.mark.parametrize("loss", SEPARABLE)
@pytest.mark.parametrize("method", ["vmap", "factored"])
def test_what_keeps_examples_apart_goes_on_working(float64, method, loss):
    params, batch = problem(8)
    grads = one_by_one(loss, params, batch)
    clip_norm = float(np.median(norms_of(grads)))
    options = {"keep_batch_dim": True, "method": method, "return_norms": True, "clip_norm": clip_norm}
    for fun in (
        ab.clipped_grad(loss, microbatch_size=3, **options),
        jax.jit(ab.clipped_grad(loss, **options)),
        ab.clipped_grad(loss, microbatch_size=1, mesh=mesh_of(4), **options),
    ):
        total, beside = fun(params, batch)
        np.testing.assert_allclose(beside.norms, norms_of(grads), rtol=1e-12)
        assert_close(total, clipped_sum(grads, clip_norm), rtol=1e-12)


def test_of_a_mean_over_tokens_every_example_has_its_own(float64):
    """The loss of an example is its own mean, and not its share of the batch's. Examples have 1, 2 or 3 tokens."""
    params, batch = problem()
    grads = ab.per_example_grads(token_mean, keep_batch_dim=True)(params, batch)
    assert_close(grads, one_by_one(token_mean, params, batch), rtol=1e-12)
    of_batch = jax.grad(token_mean)(params, batch)
    assert np.max(np.abs(np.mean(grads["w"], axis=0) / of_batch["w"] - 1)) > 0.1
    counts = np.sum(batch["mask"], axis=1)
    np.testing.assert_allclose(np.average(grads["w"], axis=0, weights=counts), of_batch["w"], rtol=1e-12)


def test_dropout_with_a_key(float64):
    params, batch = problem()

    def loss(params, batch, key):
        kept = jax.random.bernoulli(key, 0.5, batch["x"].shape)
        return mean(params, {**batch, "x": jnp.where(kept, batch["x"], 0)})

    key = jax.random.key(3)
    norms = ab.per_example_norms(loss, keep_batch_dim=True, rng_argnums=2)(params, batch, key)
    for i in range(6):
        one = jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], batch)
        grad = jax.grad(loss)(params, one, jax.random.fold_in(key, i))
        expected = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(grad)))
        np.testing.assert_allclose(norms[i], expected, rtol=1e-12)

    def normalised(params, batch, key):
        kept = jax.random.bernoulli(key, 0.5, batch["x"].shape)
        return with_batch_norm(params, {**batch, "x": jnp.where(kept, batch["x"], 0)})

    with pytest.raises(ab.CoupledError):
        ab.per_example_norms(normalised, keep_batch_dim=True, rng_argnums=2)(params, batch, key)


def squeezed(params, batch):
    return jnp.sum(jnp.squeeze(outputs_of(params, batch), 0) ** 2)


def of_declared_shape(params, batch):
    return jnp.sum(outputs_of(params, {"x": batch["x"].reshape(1, 5)}) ** 2)


def not_a_scalar_of_more(params, batch):
    return jnp.squeeze(jnp.sum(outputs_of(params, batch) ** 2, axis=1))


@pytest.mark.parametrize("loss", [squeezed, of_declared_shape, not_a_scalar_of_more])
def test_a_loss_of_exactly_one_example_is_what_it_says(float64, loss):
    """It cannot be traced with more examples, so there is no other loss that it could differ from."""
    params, batch = problem()
    norms = ab.per_example_norms(loss, keep_batch_dim=True)(params, batch)
    np.testing.assert_allclose(norms, norms_of(one_by_one(loss, params, batch)), rtol=1e-12)


def test_a_reading_that_fails_lets_nothing_through(monkeypatch):
    def fails(*args, **options):
        raise RuntimeError("a rule is broken")

    monkeypatch.setattr(head_budget, "split_loss", fails)
    with pytest.raises(RuntimeError, match="a rule is broken"):
        ab.per_example_norms(mean, keep_batch_dim=True)(*problem())


def test_a_loss_with_effects_cannot_be_read():
    def loss(params, batch):
        io_callback(lambda _: None, None, batch["mask"])
        return mean(params, batch)

    with pytest.raises(ab.InputError, match=r"without effects, got io_callback at .*\n.* leave keep_batch_dim out"):
        ab.per_example_norms(loss, keep_batch_dim=True)(*problem())


def test_a_call_traces_the_loss_twice_and_a_compiled_one_not_at_all():
    params, batch = problem()
    sizes = []

    def loss(params, batch):
        sizes.append(batch["x"].shape[0])
        return mean(params, batch)

    fun = ab.clipped_grad(loss, clip_norm=1.0, keep_batch_dim=True, microbatch_size=2)
    fun(params, batch)
    assert sizes == [1, 6]
    compiled = jax.jit(fun)
    compiled(params, batch)
    assert sizes == [1, 6] * 2
    compiled(params, batch)
    assert sizes == [1, 6] * 2


# Losses of batches, given without keep_batch_dim.


def last_axis(params, batch):
    return jnp.mean(jnp.sum(batch["x"] @ params["w"], axis=1))


def number_of_columns(params, batch):
    return jnp.sum(batch["x"] @ params["w"]) / batch["x"].shape[1]


def of_two_axes(params, batch):
    return jnp.sum(jnp.mean(batch["x"][:, :, None] * params["w"][None], axis=(1, 2)))


@pytest.mark.parametrize("loss", [last_axis, number_of_columns, of_two_axes])
@pytest.mark.parametrize("options", [{}, {"mesh": 2}])
def test_a_loss_of_batches_is_told_from_one_of_an_example(loss, options):
    params, batch = problem()
    del batch["mask"]
    options = {"mesh": mesh_of(2)} if options else {}
    for fun in (ab.per_example_norms(loss, **options), jax.jit(ab.clipped_grad(loss, clip_norm=1.0, **options))):
        with pytest.raises(ab.InputError) as caught:
            fun(params, batch)
        cause = caught.value.__cause__
        assert str(caught.value) == (
            "Without keep_batch_dim the loss must take one example, without the batch axis, got\n"
            "    batch['x'] = float32[5]\n"
            "    batch['y'] = float32[3]\n"
            f"    and a loss that raises {type(cause).__name__}: {cause}\n"
            "If it is written for batches, pass keep_batch_dim=True: it then gets batches of one example."
        )
    ab.per_example_norms(loss, keep_batch_dim=True, **options)(params, batch)  # the way out is one


def test_a_loss_that_fails_either_way_raises_its_own_error():
    params, batch = problem()

    def loss(params, batch):
        return jnp.mean(batch["missing"])

    with pytest.raises(KeyError, match="missing") as caught:
        ab.per_example_norms(loss)(params, batch)
    assert caught.value.__notes__[-1] == (
        "This happened in the loss for one example, which is passed without the batch axis."
    )


def test_a_loss_of_batches_that_is_one_of_an_example_too_is_left_alone(float64):
    params, batch = problem()
    norms = ab.per_example_norms(mean)(params, batch)
    np.testing.assert_allclose(norms, norms_of(one_by_one(mean, params, batch)), rtol=1e-12)
