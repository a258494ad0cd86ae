"""What `read` says of a loss: in which words, of which lines, and what it advises."""

import collections
import dataclasses
import inspect
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anybatch as ab
from anybatch.jaxprs import graph
from anybatch.reading.evaluation import constant_value
from anybatch.reading.report import LossKind
from anybatch.reading.states import Coupling

N = 12
X = np.linspace(-1.0, 1.0, N * 3, dtype=np.float32).reshape(N, 3)
MASK = (np.arange(N) % 3 > 0).astype(np.float32)
BATCH = {"x": X, "mask": MASK}
W = np.ones(3, np.float32)


def squares(w, batch):
    return (batch["x"] @ w) ** 2


KINDS = {
    "sum over 12 examples": lambda w, b: jnp.sum(squares(w, b)),
    "mean over 12 examples": lambda w, b: jnp.mean(squares(w, b)),
    "mean over 12 examples, plus a term of the parameters": lambda w, b: jnp.mean(squares(w, b)) + jnp.sum(w**2),
    "ratio of sums": lambda w, b: jnp.sum(squares(w, b) * b["mask"]) / jnp.sum(b["mask"]),
    "square root of a mean over 12 examples": lambda w, b: jnp.sqrt(jnp.mean(squares(w, b))),
    "logarithm of a mean over 12 examples": lambda w, b: jnp.log(jnp.mean(jnp.exp(squares(w, b)))),
    "exponential of a mean over 12 examples": lambda w, b: jnp.exp(jnp.mean(squares(w, b))),
    "couples examples": lambda w, b: jnp.max(squares(w, b)),
    "does not depend on the batch": lambda w, b: jnp.sum(w**2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kind_says_what_the_loss_is(kind):
    assert ab.read(KINDS[kind], W, BATCH).kind == kind


def test_kind_sees_a_mean_that_is_divided_by_hand():
    assert ab.read(lambda w, b: jnp.sum(squares(w, b)) / N, W, BATCH).kind == "mean over 12 examples"
    assert ab.read(lambda w, b: jnp.sum(squares(w, b) / N), W, BATCH).kind == "mean over 12 examples"
    assert ab.read(lambda w, b: jnp.sum(squares(w, b)) / 7, W, BATCH).kind == "sum over 12 examples"


PASSES = {
    "sum over 12 examples": 1,
    "square root of a mean over 12 examples": 1,
    "ratio of sums": 1,
    "couples examples": 2,
}


@pytest.mark.parametrize("kind", PASSES)
def test_passes(kind):
    reading = ab.read(KINDS[kind], W, BATCH)
    assert reading.passes == PASSES[kind]
    assert reading.separable == (reading.passes == 1)
    assert bool(reading.blame) == (reading.passes == 2)


def test_a_product_of_means_takes_two_passes_but_gathers_nothing():
    reading = ab.read(lambda w, b: jnp.mean(squares(w, b)) * jnp.mean(b["x"] @ w), W, BATCH)
    assert (reading.passes, reading.separable, reading.blame) == (2, True, ())
    assert [item.how for item in reading.frontier] == ["sum", "sum"]
    assert reading.kind == "function of 2 sums over 12 examples"


class Net(nn.Module):
    """A model of a user, with a layer that looks across examples."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4)(x)
        x = nn.BatchNorm(use_running_average=False)(x)  # this line is to blame
        return nn.Dense(1)(nn.relu(x))


def batch_norm_problem(num_examples=N, width=3):
    x = jnp.linspace(-1.0, 1.0, num_examples * width).reshape(num_examples, width) ** 3
    variables = Net().init(jax.random.key(0), x)

    def loss(params, x):
        state = {"params": params, "batch_stats": variables["batch_stats"]}
        predicted, updated = Net().apply(state, x, mutable=["batch_stats"])
        return jnp.mean(predicted**2), updated

    return loss, variables["params"], x


def line_to_blame():
    lines, first = inspect.getsourcelines(Net)
    return first + next(number for number, line in enumerate(lines) if "this line is to blame" in line)


def test_batch_norm_is_blamed_on_the_users_line_and_told_what_to_do():
    loss, params, x = batch_norm_problem()
    reading = ab.read(loss, params, x, has_aux=True)
    blame = reading.blame[0]
    assert (blame.file, blame.line, blame.function) == (__file__, line_to_blame(), "Net.__call__")
    assert blame.inside == "BatchNorm"
    text = str(reading)
    assert f"{__file__}:{line_to_blame()}" in text
    for advice in ("GroupNorm", "LayerNorm", 'reduction="mean"', "exact"):
        assert advice in text


def advantages_normalised(params, batch):
    """PPO: what is normalised over the batch are numbers, and no layer of the model follows."""
    value = jnp.tanh(batch["x"] @ params)
    advantage = jax.lax.stop_gradient(batch["mask"] - value)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)  # this line is to blame
    return jnp.mean((batch["x"] @ params) * advantage)


def test_a_norm_that_is_no_layer_is_not_taken_for_batch_norm():
    reading = ab.read(advantages_normalised, W, BATCH)
    lines, first = inspect.getsourcelines(advantages_normalised)
    line = first + next(number for number, line in enumerate(lines) if "this line is to blame" in line)
    assert (reading.blame[0].line, reading.blame[0].why) == (
        line,
        "it combines each example with a sum or mean over the batch",
    )
    assert reading.passes == 2 and not reading.layers_in_head
    texts = [str(reading), reading._repr_html_(), reading.advice]
    for options in ({"reduction": "infer"}, {"reduction": "infer", "memory": "1GiB"}):
        with pytest.raises(ab.CoupledError) as error:
            ab.grad(advantages_normalised, microbatch_size=4, on_coupled="error", **options)(W, BATCH)
        texts.append(str(error.value))
        assert f"{__file__}:{line}" in texts[-1] and "exact" in texts[-1] and " B." in texts[-1]
    with pytest.raises(ab.CoupledError) as error:
        ab.per_example_norms(advantages_normalised, keep_batch_dim=True)(W, BATCH)
    for text in [*texts, str(error.value)]:
        assert "BatchNorm" not in text and "GroupNorm" not in text


def test_a_loss_that_couples_examples_is_never_said_to_take_one_pass():
    def loss(w, batch):
        scores = batch["x"] @ w
        return jnp.mean(scores**2) + jax.lax.stop_gradient(jnp.max(scores))

    reading = ab.read(loss, W, BATCH)
    assert (reading.kind, reading.passes) == ("couples examples", 1)
    how = "each microbatch is computed once, then the coupled part once for the full batch"
    assert " ".join(str(reading).split()).startswith(f"couples examples: {how}") and how in reading._repr_html_()
    for text in (" ".join(str(reading).split()), reading._repr_html_()):
        assert "one pass" not in text and "it takes the max over the examples" in text


def test_on_coupled_error_names_the_line_and_the_ways_out():
    loss, params, x = batch_norm_problem()
    fun = ab.value_and_grad(loss, has_aux=True, microbatch_size=4, on_coupled="error")
    with pytest.raises(ab.CoupledError, match="looks across examples at") as error:
        fun(params, x)
    assert f"{__file__}:{line_to_blame()}" in str(error.value)
    assert 'on_coupled="exact"' in str(error.value)


def test_on_coupled_error_accepts_what_is_separable():
    expected = jax.grad(KINDS["ratio of sums"])(W, BATCH)
    actual = ab.grad(KINDS["ratio of sums"], microbatch_size=5, on_coupled="error")(W, BATCH)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_blame_of_a_jitted_library_function_is_the_line_of_this_call():
    """JAX keeps the trace of `jnp.sort` from the first caller, whose line would be wrong here."""
    ab.read(lambda w, b: jnp.sort(squares(w, b))[0], W, BATCH)

    def mine(w, b):
        return jnp.sort(squares(w, b))[0]

    blame = ab.read(mine, W, BATCH).blame[0]
    assert blame.line == inspect.getsourcelines(mine)[1] + 1
    assert blame.why == "it sorts the examples"


def test_a_reading_is_plain_and_frozen():
    reading = ab.read(KINDS["couples examples"], W, BATCH)
    with pytest.raises(dataclasses.FrozenInstanceError):
        reading.kind = "mean"
    leaves = jax.tree.leaves(dataclasses.asdict(reading))
    assert all(isinstance(leaf, (int, str, bool)) for leaf in leaves)
    assert reading == ab.read(KINDS["couples examples"], W, BATCH)


def test_a_reading_shows_itself_in_a_notebook():
    html = ab.read(lambda w, b: jnp.max(squares(w, b)), W, BATCH)._repr_html_()
    assert "<b>couples examples</b>" in html
    assert "<table>" in html and "float32[12]" in html
    assert "it takes the max over the examples" in html
    assert 'data-figure="share"' in html  # how much of it the full batch computes
    separable = ab.read(KINDS["ratio of sums"], W, BATCH)._repr_html_()
    assert "<b>ratio of sums</b>" in separable and 'data-figure="share"' not in separable


def test_the_bar_of_a_reading_is_as_long_as_the_share_of_the_full_batch():
    reading = ab.read(lambda w, b: jnp.max(squares(w, b)), W, BATCH)
    for head, share in ((0, 2.0), (500, 200.0), (1000, 400.0), (2000, 400.0)):  # in pixels, 2 at least
        shown = dataclasses.replace(reading, head_bytes=head, gathered_bytes=0, activation_bytes=1000)
        assert f'<path class="part orange" d="M0 6H{share}"/>' in shown._repr_html_()


def test_shapes_alone_can_be_read():
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (W, BATCH))
    assert ab.read(KINDS["ratio of sums"], *shapes) == ab.read(KINDS["ratio of sums"], W, BATCH)


def test_the_frontier_tells_shapes_and_bytes():
    def loss(w, b):
        embedded = b["x"] * w[None]
        return jnp.sum(jnp.max(embedded @ embedded.T, axis=0))

    (item,) = ab.read(loss, W, BATCH).frontier
    assert (item.how, item.shape, item.dtype, item.bytes) == ("rows", (N, 3), "float32", N * 3 * 4)
    assert (item.file, item.line) == (__file__, inspect.getsourcelines(loss)[1] + 1)


def test_randomness_is_told():
    def noisy(w, b, key):
        return jnp.mean(squares(w, b) * jax.random.normal(key, (N,)))

    reading = ab.read(noisy, W, BATCH, jax.random.key(0))
    assert (reading.stochastic, reading.randomness, reading.passes) == (True, "exact", 1)
    assert "those that the full batch would draw" in str(reading)
    assert not ab.read(KINDS["ratio of sums"], W, BATCH).stochastic


def test_a_loss_that_mutates_is_refused():
    def loss(w, b):
        total = jax.new_ref(jnp.zeros(()))
        total[...] = jnp.mean(squares(w, b))
        return total[...]

    with pytest.raises(ab.InputError, match="without effects") as error:
        ab.read(loss, W, BATCH)
    assert __file__ in str(error.value) and 'reduction="mean"' in str(error.value)


def test_prints_stay(capfd):
    def loss(w, b):
        jax.debug.print("rows {}", b["x"].shape[0])
        value = jnp.mean(squares(w, b))
        jax.debug.print("largest {}", jnp.max(b["x"]))
        return value

    jax.block_until_ready(ab.value_and_grad(loss, microbatch_size=4)(W, BATCH))
    jax.effects_barrier()
    printed = capfd.readouterr().out
    assert "largest 1.0" in printed and "rows 12" in printed


def test_arrays_with_a_row_for_each_example_that_every_microbatch_sees_are_named():
    def loss(params, users, items):
        return jnp.mean((users @ params) * (items @ params))

    params, users = jnp.ones((3, 2)), jnp.ones((8, 3))
    assert ab.read(loss, params, users, users, batch_argnums=(1, 2)).seen_whole == ()
    assert ab.read(loss, params, users, jnp.ones((1, 3))).seen_whole == ()
    reading = ab.read(loss, params, users, users)
    assert reading.seen_whole == ("items",)
    assert "every microbatch sees all rows of items: if these belong to the examples, name them" in " ".join(
        str(reading).split()
    )


FORMS = {
    "sum over 12 examples": LossKind.SUM,
    "mean over 12 examples": LossKind.MEAN,
    "mean over 12 examples, plus a term of the parameters": LossKind.MEAN,
    "ratio of sums": LossKind.RATIO,
    "square root of a mean over 12 examples": LossKind.FUNCTION,
    "couples examples": LossKind.COUPLED,
    "does not depend on the batch": LossKind.INVARIANT,
}


@pytest.mark.parametrize("kind", FORMS)
def test_the_form_is_a_member_of_an_enum(kind):
    form = ab.read(KINDS[kind], W, BATCH).form
    assert (form.kind, form.words, form.selection) == (FORMS[kind], kind, None)
    assert form.adds_parameters == kind.endswith("a term of the parameters")


def test_a_form_has_parts():
    def loss(w, b):
        return jnp.sqrt(KINDS["ratio of sums"](w, b)) + jnp.sum(squares(w, b))

    form = ab.read(loss, W, BATCH).form
    assert form.kind is LossKind.SEVERAL
    assert [part.kind for part in form.parts] == [LossKind.FUNCTION, LossKind.SUM]
    assert form.contains(LossKind.RATIO) and form.contains(LossKind.SUM) and not form.contains(LossKind.MEAN)


def test_a_selection_of_rows_is_not_all_examples():
    form = ab.read(lambda w, b: jnp.mean((b["x"][1:] @ w) ** 2), W, BATCH).form
    assert (form.kind, form.selection) == (LossKind.MEAN, 11)


def test_the_reason_for_a_line_is_a_member_of_an_enum():
    def normalized(w, b):
        x = b["x"] @ w
        return jnp.mean((x - jnp.mean(x)) ** 2)

    assert ab.read(normalized, W, BATCH).blame[0].reason is Coupling.FED_BACK
    assert ab.read(KINDS["couples examples"], W, BATCH).blame[0].reason is Coupling.OTHER


def test_each_value_that_indices_follow_from_is_looked_at_a_few_times(monkeypatch):
    """Not once for every path: 14 doublings have 16,384 of them."""
    looks = collections.Counter()
    monkeypatch.setattr(
        graph.Value, "size", property(lambda value: looks.update([id(value)]) or math.prod(value.shape))
    )

    def doubled(rows):
        for _ in range(14):
            rows = rows + rows
        return rows

    (indices,) = graph.Graph(jax.make_jaxpr(doubled)(jnp.zeros(4, jnp.int32))).outputs
    assert constant_value(None, indices) is None
    assert 0 < max(looks.values()) < 100
