"""Big values in blocks along another axis: exact, lean, and planned."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases.meshes import mesh_of, traffic
from cases.wide_losses import WIDE

import anybatch as ab
from anybatch.jaxprs import versions
from anybatch.jaxprs.graph import Graph
from anybatch.reading import block_loop, blocks, regions
from anybatch.reading.states import Blame, RuleFailed

SIZES = [(None, 4), (2, 3)]


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def close(actual, expected, tolerance=1e-12):
    """Whether two trees agree, relative to the largest element of each leaf."""
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        if np.max(np.abs(one - other), initial=0) > tolerance * (1e-3 + np.max(np.abs(other), initial=0)):
            return False
    return True


def check(case):
    params, batch = case.make(jnp.float64)
    oracle = jax.value_and_grad(case.loss, has_aux=case.has_aux)
    expected = jax.jit(oracle)(params, batch)
    for microbatch_size, block_size in SIZES:
        options = {"has_aux": case.has_aux, "microbatch_size": microbatch_size, "block_size": block_size}
        actual = ab.value_and_grad(case.loss, **options)(params, batch)
        # XLA compiles some of these wrong for the CPU: square roots of distances, of which some are 0. Without jit, JAX
        # computes them right.
        assert close(actual, expected) or close(actual, oracle(params, batch)), (case.name, options)


@pytest.mark.every_jax
@pytest.mark.filterwarnings("ignore::anybatch.LargeHeadWarning")
@pytest.mark.parametrize("case", WIDE[::12], ids=lambda case: case.name)
def test_gradient_in_blocks_equals_the_full_gradient(case, x64):
    check(case)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::anybatch.LargeHeadWarning")
@pytest.mark.parametrize("case", [case for number, case in enumerate(WIDE) if number % 12], ids=lambda case: case.name)
def test_gradient_of_all_other_losses_equals_the_full_gradient(case, x64):
    check(case)


def test_the_comparison_can_fail(x64, monkeypatch):
    """The control: every block computes the rows of the first one."""
    case = next(case for case in WIDE if case.name == "mean_of_log_softmax")
    params, batch = case.make(jnp.float64)
    take_rows = block_loop.take_rows
    monkeypatch.setattr(block_loop, "take_rows", lambda array, rows, n, start, size: take_rows(array, rows, n, 0, size))
    actual = ab.value_and_grad(case.loss, microbatch_size=None, block_size=4)(params, batch)
    assert not close(actual, jax.jit(jax.value_and_grad(case.loss))(params, batch), 1e-3)


# A language model without layers: an embedding, and its logits.


def language_model(tokens=24, words=211, width=8, examples=4, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "embedding": jax.random.normal(keys[0], (words, width), dtype),
        "mix": jax.random.normal(keys[1], (width, width), dtype) / 3,
    }
    batch = {
        "x": jax.random.randint(keys[2], (examples, tokens), 0, words),
        "y": jax.random.randint(keys[3], (examples, tokens), 0, words),
    }
    return params, batch


def token_losses(params, batch):
    hidden = jnp.tanh(params["embedding"][batch["x"]] @ params["mix"])
    logits = (hidden @ params["embedding"].T).astype(jnp.float32 if hidden.dtype != jnp.float64 else jnp.float64)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def mean_loss(params, batch):
    return jnp.mean(token_losses(params, batch))


def masked_loss(params, batch):
    total, weight = total_and_weight(params, batch)
    return total / weight


def total_and_weight(params, batch):
    losses = token_losses(params, batch)
    mask = (batch["y"] % 3 > 0).astype(losses.dtype)
    return jnp.sum(losses * mask), jnp.sum(mask)


def perplexity(params, batch):
    return jnp.exp(mean_loss(params, batch))


def of_sequences(params, batch):
    """Two passes over the batch: the gradient of a sequence depends on the losses of all."""
    losses = token_losses(params, batch).mean(axis=1)
    return jnp.sum(jax.nn.softmax(losses) * losses)


LOSSES = [mean_loss, masked_loss, perplexity, of_sequences]


@pytest.mark.full
def test_a_microbatch_smaller_than_the_batch_and_blocks_that_do_not_divide(x64):
    params, batch = language_model(examples=5, dtype=jnp.float64)
    expected = jax.value_and_grad(mean_loss)(params, batch)
    for microbatch_size in (1, 2, 5, None):
        for block_size in (1, 7, 24, 1000):
            options = {"microbatch_size": microbatch_size, "block_size": block_size}
            assert close(ab.value_and_grad(mean_loss, **options)(params, batch), expected), options


@pytest.mark.full
@pytest.mark.every_jax
@pytest.mark.parametrize("remat", [None, "nothing_saveable", "dots_saveable"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_with_remat(loss, remat, x64):
    params, batch = language_model(dtype=jnp.float64)
    expected = jax.value_and_grad(loss)(params, batch)
    assert close(ab.value_and_grad(loss, microbatch_size=2, block_size=5, remat=remat)(params, batch), expected)


@pytest.mark.full
@pytest.mark.every_jax
@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_on_a_mesh_with_no_more_collectives(loss, devices, x64):
    params, batch = language_model(examples=8, dtype=jnp.float64)
    mesh = mesh_of(devices)
    options = {"mesh": mesh, "microbatch_size": 1}
    with_blocks = ab.value_and_grad(loss, block_size=5, **options)
    assert close(with_blocks(params, batch), jax.value_and_grad(loss)(params, batch))
    without = ab.value_and_grad(loss, block_size=None, **options)
    assert traffic(with_blocks, mesh, params, batch).executed <= traffic(without, mesh, params, batch).executed


@pytest.mark.full
@pytest.mark.parametrize("reduction", ["mean", "sum", "weighted"])
def test_declared_reductions(reduction):
    params, batch = language_model(examples=5)
    losses = {
        "mean": mean_loss,
        "sum": lambda params, batch: jnp.sum(token_losses(params, batch)),
        "weighted": total_and_weight,
    }
    oracle = masked_loss if reduction == "weighted" else losses[reduction]
    expected = jax.value_and_grad(oracle)(params, batch)
    for size in (2, 5):
        fun = ab.value_and_grad(losses[reduction], reduction=reduction, microbatch_size=size, block_size=7)
        chex.assert_trees_all_close(fun(params, batch), expected, rtol=2e-5, atol=1e-5)


@pytest.mark.full
@pytest.mark.every_jax
def test_narrow_parameters_are_summed_wide():
    """In bfloat16, the gradient of an embedding is as near to float64 as it is without blocks."""
    params, batch = language_model(tokens=64, examples=8, dtype=jnp.bfloat16)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
        expected = jax.grad(mean_loss)(wide, batch)

    def error(**options):
        found = ab.grad(mean_loss, microbatch_size=2, **options)(params, batch)
        return max(
            np.linalg.norm(np.asarray(one, np.float64) - np.asarray(other)) / np.linalg.norm(other)
            for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
        )

    assert error(block_size=3) <= 1.1 * error(block_size=None)


@pytest.mark.full
def test_float16_is_not_scaled_afterwards():
    """A gradient that is divided only at the end would overflow in float16."""
    params, batch = language_model(tokens=64, examples=64)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), params)

    def loss(params, batch):
        return jnp.mean(token_losses(params, batch) * 2000.0)

    found = ab.grad(loss, microbatch_size=64, block_size=16)(params, batch)
    expected = jax.grad(loss)(params, batch)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    chex.assert_trees_all_close(found, expected, rtol=0.05, atol=0.02)


def test_a_backward_pass_that_is_not_linear(x64):
    """A gradient that the user clips for each token is clipped with the cotangent of the token."""

    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, grad: (jnp.clip(grad, -1e-3, 1e-3),))

    def loss(params, batch):
        hidden = jnp.tanh(params["embedding"][batch["x"]] @ params["mix"])
        logits = clipped(hidden @ params["embedding"].T)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))

    params, batch = language_model(dtype=jnp.float64)
    expected = jax.value_and_grad(loss)(params, batch)
    assert close(ab.value_and_grad(loss, microbatch_size=2, block_size=5)(params, batch), expected)


@pytest.mark.full
def test_a_generator_that_cannot_draw_some_rows(x64):
    """The full batch draws what JAX draws, and so do blocks."""

    def loss(params, batch):
        hidden = jnp.tanh(params["embedding"][batch["x"]] @ params["mix"])
        logits = hidden @ params["embedding"].T
        kept = jax.random.bernoulli(jax.random.key(0, impl="rbg"), 0.5, logits.shape)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(jnp.where(kept, logits, 0), batch["y"]))

    params, batch = language_model(dtype=jnp.float64)
    expected = jax.value_and_grad(loss)(params, batch)
    for microbatch_size in (None, 4):
        assert close(ab.value_and_grad(loss, microbatch_size=microbatch_size, block_size=5)(params, batch), expected)
    with pytest.raises(ab.InputError, match="threefry2x32"):
        ab.value_and_grad(loss, microbatch_size=2, block_size=5)(params, batch)


@pytest.mark.full
def test_the_gradient_of_a_gradient_with_respect_to_the_batch(x64):
    """A result of blocks that depends on data alone has no gradient now, and one under an outer `grad`."""

    def loss(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["w"])
        pairs = hidden @ hidden.T
        weights = jnp.mean(jnp.tanh(batch["weight"][:, None] * batch["weight"][None]), axis=1)
        return jnp.mean(weights * jax.nn.logsumexp(pairs, axis=1))

    keys = jax.random.split(jax.random.key(0), 3)
    params = {"w": jax.random.normal(keys[0], (8, 2), jnp.float64)}
    x, weight = (
        jax.random.normal(key, shape, jnp.float64) for key, shape in zip(keys[1:], ((23, 8), (23,)), strict=True)
    )

    def outer(grad):
        return jax.grad(lambda weight: jnp.sum(jnp.sin(grad(params, {"x": x, "weight": weight})["w"])))

    expected = outer(jax.grad(loss))(weight)
    assert close(outer(ab.grad(loss, microbatch_size=None, block_size=4))(weight), expected)


NOT_IN_FULL = {
    "small_vocabulary": (None, 4),
    "last_token": (None, 4),
    "written_by_positions": (None, 4),
    "optax_focal": (None, 4),
    "clip_of_wide_towers": (None, 4),
    "binary_cross_entropies": (None, 4),
}


@pytest.mark.parametrize("name", NOT_IN_FULL)
def test_no_value_is_as_large_as_the_largest_of_the_full_batch(name, x64):
    case = next(case for case in WIDE if case.name == name)
    params, batch = case.make(jnp.float64)
    microbatch_size, block_size = NOT_IN_FULL[name]
    fun = ab.value_and_grad(case.loss, microbatch_size=microbatch_size, block_size=block_size)
    full, in_blocks = (jax.make_jaxpr(each)(params, batch) for each in (jax.value_and_grad(case.loss), fun))
    assert blocks.largest_value(in_blocks) < 0.6 * blocks.largest_value(full)


def mutual_neighbours(params, batch):
    """The pairs that are the largest of their row and of their column."""
    z = jnp.tanh(batch @ params)
    pairs = z @ jnp.roll(z, 1, axis=1).T
    best = (pairs == pairs.max(axis=1, keepdims=True)) & (pairs == pairs.max(axis=0, keepdims=True))
    return jnp.sum(jnp.where(best, pairs, 0))


@pytest.mark.full
@pytest.mark.every_jax
@pytest.mark.parametrize("compares", [False, True])
def test_values_are_not_compared_with_themselves_across_loops(compares, x64, monkeypatch):
    """A value from blocks of rows is not always equal to the same value from blocks of columns."""
    params = jax.random.normal(jax.random.key(0), (8, 777))
    batch = jax.random.normal(jax.random.key(1), (600, 8))
    expected = jax.value_and_grad(mutual_neighbours)(params, batch)
    if compares:  # the control
        monkeypatch.setattr(regions.Regions, "_computing_differently", lambda self: None)
    actual = jax.jit(ab.value_and_grad(mutual_neighbours, microbatch_size=None, block_size=7))(params, batch)
    assert close(actual, expected) is not compares


@pytest.mark.parametrize("name", ["embedding", "mix"])
def test_some_parameters_only(name, x64):
    """If only the embedding has a gradient, JAX does not differentiate the region at all."""
    params, batch = language_model(dtype=jnp.float64)

    def loss(own, batch):
        hidden = jnp.tanh(params["embedding"][batch["x"]] @ {**params, **own}["mix"])
        return jnp.mean(
            optax.softmax_cross_entropy_with_integer_labels(hidden @ {**params, **own}["embedding"].T, batch["y"])
        )

    own = {name: params[name]}
    expected = jax.value_and_grad(loss)(own, batch)
    assert close(ab.value_and_grad(loss, microbatch_size=2, block_size=5)(own, batch), expected)


@pytest.mark.full
def test_under_jit_grad_and_vmap(x64):
    params, batch = language_model(dtype=jnp.float64)
    fun = functools.partial(ab.value_and_grad, microbatch_size=2, block_size=5)

    def norm(of):
        return lambda params: sum(
            jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(of(mean_loss)(params, batch)[1])
        )

    assert close(jax.jit(jax.grad(norm(fun)))(params), jax.jit(jax.grad(norm(jax.value_and_grad)))(params), 1e-11)
    several = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), params)
    mapped = jax.vmap(fun(mean_loss), in_axes=(0, None))(several, batch)
    assert close(mapped, jax.vmap(jax.value_and_grad(mean_loss), in_axes=(0, None))(several, batch))


@pytest.mark.full
def test_a_training_step():
    params, batch = language_model()
    optimizer = optax.sgd(0.1)
    states = []
    for block_size in (None, 5):
        step = ab.train_step(mean_loss, optimizer, microbatch_size=2, block_size=block_size)
        states.append(step(step.init(params), batch)[0].params)
    chex.assert_trees_all_close(*states, rtol=1e-5, atol=1e-6)


# Memory.


def temporaries(block_size, **sizes):
    params, batch = language_model(examples=2, **sizes)
    fun = ab.value_and_grad(mean_loss, microbatch_size=1, block_size=block_size)
    return versions.temporaries(jax.jit(fun).lower(params, batch).compile())


def test_memory_is_flat_in_the_tokens():
    """With blocks, four times the tokens take hardly more memory; without, four times as much."""
    sizes = {"words": 4096, "width": 16}
    assert temporaries(64, tokens=2048, **sizes) < 1.5 * temporaries(64, tokens=512, **sizes)
    assert temporaries(None, tokens=2048, **sizes) > 3 * temporaries(None, tokens=512, **sizes)


def contrastive(params, batch):
    a, b = batch["a"] @ params["a"], batch["b"] @ params["b"]
    logits = a @ b.T
    right = jnp.diagonal(logits)
    return jnp.mean(jax.nn.logsumexp(logits, 1) + jax.nn.logsumexp(logits, 0) - 2 * right)


def pairs(examples, width=16):
    keys = jax.random.split(jax.random.key(0), 4)
    params = {name: jax.random.normal(key, (width, width)) / 4 for name, key in zip("ab", keys, strict=False)}
    return params, {name: jax.random.normal(key, (examples, width)) for name, key in zip("ab", keys[2:], strict=True)}


@pytest.mark.filterwarnings("ignore::anybatch.LargeHeadWarning")
def test_memory_of_pairs_grows_with_their_number_and_not_with_its_square():
    def taken(examples, block_size):
        fun = ab.value_and_grad(contrastive, microbatch_size=64, block_size=block_size)
        return versions.temporaries(jax.jit(fun).lower(*pairs(examples)).compile())

    assert taken(4096, 32) < 5 * taken(1024, 32)
    assert taken(4096, None) > 12 * taken(1024, None)


# Plans.


@pytest.mark.full
def test_blocks_are_tried_before_nothing_fits():
    params, batch = language_model(tokens=1024, words=8192, width=16, examples=2)
    plan = ab.plan(mean_loss, params, batch, memory="40MiB", timed=False)
    assert plan.chosen is not None and plan.block_size is not None
    assert plan.chosen.total <= 40 * 2**20
    value, _ = ab.value_and_grad(mean_loss, memory="40MiB")(params, batch)
    assert np.isclose(value, mean_loss(params, batch), rtol=1e-5)
    assert f"big values in blocks of {plan.block_size} rows" in plan.text(width=None)
    with pytest.raises(ab.NothingFitsError):
        ab.value_and_grad(mean_loss, memory="40MiB", block_size=None)(params, batch)


@pytest.mark.full
def test_one_example_is_planned_too():
    params, batch = language_model(tokens=2048, words=8192, width=16, examples=1)
    plan = ab.plan(mean_loss, params, batch, memory="40MiB", timed=False)
    assert plan.block_size is not None


def test_no_blocks_where_the_full_batch_fits():
    params, batch = language_model()
    assert ab.plan(mean_loss, params, batch, memory="1GiB", timed=False).block_size is None


@pytest.mark.parametrize("value", [0, -3, 1.5, "all", True])
def test_sizes_that_are_refused(value):
    with pytest.raises(ab.InputError, match=r"block_size must be .* None or \"auto\""):
        ab.value_and_grad(mean_loss, block_size=value)


# Reading.


def test_the_reading_names_what_blocks_can_compute():
    params, batch = language_model(tokens=512, words=8192, width=16)
    (value,) = ab.read(mean_loss, params, batch).wide
    assert value.shape == (1, 512, 8192) and value.axis == 1 and value.per_example and value.bytes == 512 * 8192 * 4
    text = str(ab.read(mean_loss, params, batch))
    assert "16.0 MiB as float32[1,512,8192]" in text and "test_blocks.py" in text and "along axis 1" in text


def test_two_big_values_that_meet_in_a_function_with_its_own_derivative_are_in_blocks():
    """`logaddexp` of the logits of two heads: neither is computed in full."""

    def loss(params, batch):
        hidden = params["embedding"][batch["x"]]
        ours = jax.nn.log_softmax(jnp.tanh(hidden) @ params["embedding"].T / 2)
        theirs = jax.nn.log_softmax(jax.lax.stop_gradient(jnp.sin(hidden) @ params["embedding"].T) / 2)
        middle = jnp.logaddexp(ours - 1.2, theirs - 0.4)
        both = jnp.sum(jnp.exp(ours) * (ours - middle), -1) + jnp.sum(jnp.exp(theirs) * (theirs - middle), -1)
        return jnp.mean(both)

    params, batch = language_model(tokens=512, words=8192, width=16)
    assert {value.axis for value in ab.read(loss, params, batch).wide} == {1}


def test_the_reading_names_what_stays_in_full():
    def loss(params, batch):
        logits = batch["a"] @ params["a"] @ (batch["b"] @ params["b"]).T
        return jnp.linalg.slogdet(logits @ logits.T + jnp.eye(logits.shape[0]))[1]

    (value,) = [value for value in ab.read(loss, *pairs(1024)).wide if value.axis is None][:1]
    assert not value.per_example and "in full" in str(value)


@pytest.mark.full
def test_a_head_that_is_too_large_says_which_blocks_fit():
    params, batch = pairs(2048)
    with pytest.raises(ab.HeadTooLargeError, match="block_size=") as raised:
        ab.value_and_grad(contrastive, microbatch_size=64, memory="12MiB")(params, batch)
    size = int(str(raised.value).partition("block_size=")[2].partition(",")[0])
    value, _ = ab.value_and_grad(contrastive, microbatch_size=64, memory="12MiB", block_size=size)(params, batch)
    assert np.isclose(value, contrastive(params, batch), rtol=1e-5)


def test_a_head_in_blocks_is_not_warned_of():
    params, batch = pairs(2048)
    with pytest.warns(ab.LargeHeadWarning, match="block_size"):
        ab.value_and_grad(contrastive, microbatch_size=64)(params, batch)
    ab.value_and_grad(contrastive, microbatch_size=64, block_size=64)(params, batch)


# Finding regions.


@pytest.mark.full
def test_regions_do_not_wait_for_each_other(x64):
    """Two values that each need results of the other's rows are computed one after the other, or in full."""
    case = next(case for case in WIDE if case.name == "distance_correlation")
    params, batch = case.make(jnp.float64)
    leaves, tree = jax.tree.flatten((params, batch))
    jaxpr = jax.make_jaxpr(lambda *flat: [case.loss(*jax.tree.unflatten(tree, flat))])(*leaves)
    number = len(jax.tree.leaves(params))
    flags = tuple(position < number for position in range(len(leaves)))
    found = regions.Regions(jaxpr, tuple(not flag for flag in flags), flags, 1000, [0])
    assert isinstance(found.graph, Graph) and found.regions
    found.keep(lambda region: True)
    done = set()
    for value in found.graph.outputs:
        pending = [value]
        while pending:  # ends only without circles
            each = pending.pop()
            if each not in done and not each.is_constant:
                done.add(each)
                pending.extend(found.operands_of(each))
    assert len(done) > 1


@pytest.mark.full
def test_effects_are_left_as_they_are(capfd):
    def loss(params, batch):
        losses = token_losses(params, batch)
        jax.debug.print("{}", losses.shape[0])
        return jnp.mean(losses)

    params, batch = language_model()
    value, _ = ab.value_and_grad(loss, microbatch_size=2, block_size=5)(params, batch)
    assert np.isclose(value, mean_loss(params, batch), rtol=1e-5)
    assert capfd.readouterr().out.split() == ["4"]


@pytest.mark.full
def test_verify_compares_blocks_too():
    params, batch = language_model(tokens=512, words=1024)
    found = ab.verify(mean_loss, params, batch, microbatch_sizes=(1, 4))
    assert found.ok and any("block_size=" in route.name for route in found.routes)
    found = ab.verify(mean_loss, params, batch, microbatch_sizes=4, block_sizes=(5, 24))
    assert [route.name for route in found.routes][1:] == [f"microbatch_size=4, block_size={size}" for size in (5, 24)]


@pytest.mark.full
def test_verify_finds_wrong_blocks(monkeypatch):
    """The control."""
    params, batch = language_model()
    put_block = block_loop.put_block
    wrong = lambda array, new, rows, length, start: put_block(array, 2 * new, rows, length, start)  # noqa: E731
    monkeypatch.setattr(block_loop, "put_block", wrong)
    found = ab.verify(mean_loss, params, batch, microbatch_sizes=4, block_sizes=5)
    assert not found.ok and "blocks do not" in found.diagnosis


def test_if_looking_for_regions_fails_the_gradient_is_computed_in_full(monkeypatch):
    def fails(*_):
        raise KeyError("a mistake")

    params, batch = language_model()
    expected = jax.value_and_grad(mean_loss)(params, batch)
    monkeypatch.setattr(regions.Regions, "_cover", fails)
    with pytest.warns(ab.RuleFailedWarning, match="failed to divide a loss into blocks"):
        actual = ab.value_and_grad(mean_loss, microbatch_size=2, block_size=5)(params, batch)
    chex.assert_trees_all_close(actual, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.full
def test_if_a_block_cannot_be_computed_the_gradient_is_computed_in_full(monkeypatch):
    def fails(*_):
        raise RuleFailed(Blame("model.py", 1, "loss", "dot_general", "a mistake"))

    params, batch = language_model()
    expected = jax.value_and_grad(mean_loss)(params, batch)
    monkeypatch.setattr(block_loop.BlockLoop, "of_block", fails)
    with pytest.warns(ab.RuleFailedWarning, match="a mistake"):
        actual = ab.value_and_grad(mean_loss, microbatch_size=2, block_size=5)(params, batch)
    chex.assert_trees_all_close(actual, expected, rtol=2e-5, atol=1e-6)
