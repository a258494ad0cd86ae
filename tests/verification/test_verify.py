"""`verify`: right routes agree to rounding; what it looks at, what it returns, what it refuses."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest
from cases.verified import BATCH, CASES, PARAMS, READ_IT, X, add_up, line, masked_mean, mean_loss

import anybatch as ab
from anybatch.verification import comparison
from anybatch.verification.comparison import LeafDifference
from anybatch.verification.verify import DifferentGradientError, RouteCheck, Verification, verify

# Routes that agree.


@pytest.mark.parametrize("name", ["masked_mean", "token_mean", "custom_vjp"])
def test_right_declarations_agree(name):
    case = CASES[name]
    result = verify(case.loss, *case.problem(num_examples=10), reduction=case.reduction, microbatch_sizes=(3,))
    assert result.ok and result.diagnosis is None and result.raise_if_different() is result
    (route,) = result.routes
    assert result.dtype == "float64" and 0 <= route.gradient <= route.tolerance < 1e-13
    assert result.given_dtype == "float32" and 1e-9 < route.rounding <= route.expected_rounding < 1e-4


def test_a_loss_that_is_read_agrees():
    """Randomness and a ratio of sums too, with nothing declared."""

    def loss(params, batch, key):
        kept = batch["mask"] & jax.random.bernoulli(key, 0.7, batch["mask"].shape)
        return masked_mean(params, {**batch, "mask": kept})

    result = verify(loss, PARAMS, BATCH, jax.random.key(0), microbatch_sizes=(3,))
    assert result.raise_if_different().dtype == "float64"


def test_the_smallest_error_is_found_and_its_leaf_is_named(monkeypatch):
    """The control: a route that is off by 1e-12 in one leaf."""

    def off(fun, **options):
        right = ab.value_and_grad(fun, **options)

        def wrong(*args):
            value, gradient = right(*args)
            return value, {**gradient, "scale": gradient["scale"] * (1 + 1e-12)}

        return wrong

    monkeypatch.setattr(comparison, "value_and_grad", off)
    result = verify(mean_loss, PARAMS, BATCH, reduction="mean", microbatch_sizes=(3,))
    assert not result.ok
    assert result.routes[0].leaf == "params['scale']"
    assert result.routes[0].gradient == pytest.approx(1e-12, rel=0.01)
    assert [leaf.name for leaf in result.routes[0].leaves if not leaf.ok] == ["params['scale']"]
    assert result.diagnosis.startswith("No known cause explains the difference.")


def test_arguments_in_other_places():
    def loss(batch, v, w, *, power):
        return jnp.mean(jnp.abs(batch["x"] * w + v) ** power)

    result = verify(
        loss, {"x": X}, 0.25, 2.0, argnums=(2, 1), batch_argnums=0, reduction="mean", microbatch_sizes=4, power=3
    )
    assert result.ok
    assert [leaf.name for leaf in result.routes[0].leaves] == ["w", "v", "value"]


# Which sizes, how many examples.


def test_default_sizes_divide_or_do_not():
    result = verify(line, 2.0, jnp.tile(X, 2), reduction="mean")
    assert [route.name for route in result.routes] == [f"microbatch_size={size}" for size in (1, 4, 5, 12)]


@pytest.mark.parametrize("examples, names", [(1, [1]), (2, [1, 2]), (3, [1, 2, 3])])
def test_default_sizes_of_few_examples(examples, names):
    result = verify(line, 2.0, X[:examples], reduction="mean")
    assert result.ok
    assert [route.name for route in result.routes] == [f"microbatch_size={size}" for size in names]


@pytest.mark.parametrize("options, used", [({"sample": 7}, 7), ({"sample": 999}, 200), ({"microbatch_sizes": 50}, 101)])
def test_the_first_examples_are_used(options, used):
    """By default enough for microbatches of the sizes given."""
    result = verify(add_up, 1.0, jnp.arange(200.0), reduction="sum", **{"microbatch_sizes": 3, **options})
    assert (result.num_examples, result.batch_size) == (used, 200)


def test_at_most_64_examples_by_default():
    result = verify(line, 2.0, jnp.linspace(0.1, 1, 70), reduction="mean", microbatch_sizes=9)
    assert result.num_examples == 64
    title = "64 examples (the first 64 of 70): microbatches compared with jax.value_and_grad of all 64,"
    assert result.text(width=None).startswith(title)


def test_a_loss_that_takes_no_fewer_examples_says_so():
    def loss(w, x):
        return jnp.mean((w * x.reshape(35, 2)) ** 2)

    with pytest.raises(TypeError) as caught:
        verify(loss, 2.0, jnp.linspace(0.1, 1, 70), reduction="mean", microbatch_sizes=14)
    assert caught.value.__notes__[-1] == (
        "verify computed the loss for the first 64 of the 70 examples. If it takes no fewer, pass sample=70."
    )


# aux.


def with_aux(w, x):
    aux = {"rows": w * x, "count": jnp.float32(x.shape[0]), "mean": jnp.mean(x), "largest": jnp.max(x)}
    return line(w, x), aux


def test_aux_is_compared():
    declared = {"rows": None, "count": "sum", "mean": "mean", "largest": "last"}
    options = {"has_aux": True, "reduction": "mean", "microbatch_sizes": 4}
    result = verify(with_aux, 2.0, X, aux_reduction=declared, **options)
    assert result.ok and result.routes[0].aux < 1e-14
    assert [leaf.name for leaf in result.routes[0].leaves][2:] == ["aux['count']", "aux['mean']", "aux['rows']"]

    result = verify(with_aux, 2.0, X, aux_reduction={**declared, "count": "mean"}, **options)
    assert not result.ok and result.routes[0].aux == pytest.approx(4 / 9)
    assert result.diagnosis == (
        "The gradient is right, and aux['count'] is not: it is a sum over the examples, and "
        'aux_reduction="mean" was declared. With aux_reduction="sum" it agrees.\n'
        f"Pass that for this leaf, {READ_IT}"
    )

    result = verify(with_aux, 2.0, X, aux_reduction={**declared, "largest": "mean"}, **options)
    assert "aux['largest'] is not: over the examples it is neither a mean nor a sum." in result.diagnosis
    assert verify(with_aux, 2.0, X, has_aux=True, microbatch_sizes=4).ok


# What is returned.


def example(ok=True, aux=None):
    leaf = LeafDifference("w['<a>']", 0.5, 1e-14)
    routes = (
        RouteCheck("microbatch_size=1", True, 0.0, "w['<a>']", 1e-14, 2e-16, aux, (leaf,), 1e-7, 2e-6),
        RouteCheck("microbatch_size=10", ok, math.inf, "v", 1e-14, 0.0, aux, (leaf,), 1e-7, 2e-6),
    )
    return Verification(ok, routes, 10, 10, "float64", "float32", ("A note.",), None if ok else "Because.\nDo this.")


def test_it_prints_as_a_table():
    assert str(example()) == repr(example())
    assert example(ok=False, aux=0.25).text(width=None) == (
        "10 examples (all): microbatches compared with jax.value_and_grad of all 10, "
        "relative differences in float64\n\n"
        "route               gradient  worst at  allowed    value      aux  in float32  allowed\n"
        "microbatch_size=1          0  w['<a>']  1.0e-14  2.0e-16  2.5e-01     1.0e-07  2.0e-06       same\n"
        "microbatch_size=10       inf  v         1.0e-14        0  2.5e-01     1.0e-07  2.0e-06  DIFFERENT\n"
        "\n"
        "A note.\n"
        "Because.\n"
        "Do this."
    )
    assert str(example()).endswith("\nAll routes give the gradient of the full batch.")
    assert str(example(ok=False, aux=0.25)) == (
        "10 examples (all): microbatches compared with jax.value_and_grad of all 10,\n"
        "relative differences in float64\n\n"
        "route               gradient  worst at  allowed      aux  in float32\n"
        "microbatch_size=1          0  w['<a>']  1.0e-14  2.5e-01     1.0e-07       same\n"
        "microbatch_size=10       inf  v         1.0e-14  2.5e-01     1.0e-07  DIFFERENT\n"
        "\n"
        "A note.\n"
        "Columns left out: value, allowed in float32. result.text(width=None) shows all.\n"
        "Because.\n"
        "Do this."
    )


@pytest.mark.parametrize("axes", ["data=8", "data=4, model=2"])
@pytest.mark.parametrize("fault", ["value", "aux['count']", "rounding"])
def test_a_column_in_which_a_route_fails_is_not_left_out(fault, axes):
    name = "params['encoder']['layers_11']['attention']['query']['kernel']"
    leaves = tuple(
        LeafDifference(each, 0.5 if each == fault else 0.0, 1e-14) for each in (name, "value", "aux['count']")
    )
    rounding = 0.5 if fault == "rounding" else 1e-7
    route = RouteCheck(
        f"microbatch_size=16, block_size=128, mesh({axes})", False, 1e-16, name, 1e-14, 0.0, 0.0, leaves, rounding, 2e-6
    )
    result = Verification(False, (route,), 64, 4096, "float64", "bfloat16", ("A long note, " * 20,), None)
    lines = str(result).splitlines()
    assert max(map(len, lines)) <= 80
    header = next(line for line in lines if line.startswith("route"))
    kept = {"value": "value", "aux['count']": "aux", "rounding": "bfloat16"}
    for column in ("route", "gradient", "worst at", kept[fault]):
        assert column in header
    assert any(column not in header for column in kept.values())
    assert "microbatch=16, block=128, mesh(data" in str(result)
    assert "nel']" in str(result) and "DIFFERENT" in str(result)
    assert name in result.text(width=None) and max(map(len, result.text(width=None).splitlines())) > 80


def test_it_renders_in_a_notebook():
    text = example(ok=False)._repr_html_()
    assert '<td class="left">w[&#x27;&lt;a&gt;&#x27;]</td>' in text and "<a>" not in text
    assert text.count("<tr") == 3 and text.count('<tr class="bad">') == 1
    assert "1 of 2 routes give another gradient than the full batch.</p>" in text
    assert "<p>Because.<br>Do this.</p>" in text
    assert '<p class="lead good">All routes give the gradient of the full batch.</p>' in example()._repr_html_()


def test_each_difference_is_drawn_on_a_logarithmic_scale():
    """A point at the difference, and a band to what is allowed: 17 powers of ten on 160 pixels."""
    text = example(ok=False)._repr_html_()
    points = re.findall(r'<circle class="point (\w+)" cx="([\d.]+)"', text)
    assert points == [("green", "0.0"), ("red", "160.0")]  # no difference, and an infinite one
    bands = [float(place) for place in re.findall(r'class="allowed" d="M0 10H([\d.]+)"', text)]
    assert bands == pytest.approx([160 * 3 / 17] * 2, abs=0.06)
    assert "<title>0 at w[&#x27;&lt;a&gt;&#x27;], 1.0e-14 allowed</title>" in text


def test_it_raises_where_routes_differ():
    assert example().raise_if_different() == example()
    with pytest.raises(DifferentGradientError) as caught:
        example(ok=False).raise_if_different()
    assert isinstance(caught.value, AssertionError) and isinstance(caught.value, ab.AnybatchError)
    assert str(caught.value) == str(example(ok=False))


def test_it_holds_no_arrays():
    result = verify(line, 2.0, X, reduction="mean", microbatch_sizes=4)
    leaves = jax.tree.leaves(dataclasses.asdict(result))
    assert {type(leaf) for leaf in leaves} <= {bool, int, float, str}
    assert len(leaves) > 15
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.ok = False


# Bad input.


def text_of(make):
    with pytest.raises(ab.InputError) as caught:
        make()
    return str(caught.value)


@pytest.mark.parametrize("sizes", [0, (2, -1), "8", 2.5, (), True, None])
def test_microbatch_sizes(sizes):
    given = () if sizes is None else sizes
    assert text_of(lambda: verify(line, 2.0, X, reduction="mean", microbatch_sizes=given)) == (
        f"microbatch_sizes must be whole numbers of at least 1, got microbatch_sizes={given!r}.\n"
        "Pass the sizes to try, e.g. microbatch_sizes=(1, 8, 24), or leave it out."
    )


@pytest.mark.parametrize("sample", [0, -1, 2.5, "all", True])
def test_sample(sample):
    assert text_of(lambda: verify(line, 2.0, X, reduction="mean", sample=sample)) == (
        f"sample must be a whole number of at least 1, or None, got sample={sample!r}.\n"
        "Pass how many examples of the batch to use, e.g. sample=32, or leave it out."
    )


def test_an_empty_batch():
    assert text_of(lambda: verify(line, 2.0, X[:0], reduction="mean")) == (
        "The batch needs at least one example, got arrays of 0 examples.\nPass a batch that you would train on."
    )


def test_inside_jit():
    text = text_of(lambda: jax.jit(lambda w: verify(line, w, X, reduction="mean"))(2.0))
    assert text == (
        "verify compares numbers, so its arguments must be concrete arrays, got w inside a jit, grad or vmap.\n"
        "Call it outside, once, before training: ab.verify(loss, params, batch).raise_if_different()."
    )


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: verify(3.0, 2.0, X), "The loss must be a function, got fun=3.0."),
        (lambda: verify(line, 2.0, X, reduction="median"), "reduction must be one of"),
        (lambda: verify(line, 2.0, X, batch_argnums=0), "must not overlap"),
        (lambda: verify(line, w=2.0, x=X), "Pass that argument by position"),
        (lambda: verify(lambda w, x: w * x, 2.0, X), "The loss must return a scalar"),
        (lambda: verify(line, 2.0, X, reduction="weighted"), "the loss must return a pair (total, weight)"),
        (lambda: verify(with_aux, 2.0, X, reduction="mean", has_aux=True), "needs an aux_reduction"),
    ],
)
def test_what_value_and_grad_refuses_is_refused(call, text):
    assert text in text_of(call)


def test_the_full_batch_is_compiled_twice(caplog):
    """Once in float64 and once in the given dtype, as the documentation says: also for the nudged inputs."""
    with jax.log_compiles(), caplog.at_level("WARNING"):
        ab.verify(lambda w, x: jnp.mean((x @ w) ** 2), jnp.ones(3), jnp.ones((20, 3)), microbatch_sizes=7)
    finished = [line for line in caplog.messages if "Finished XLA compilation" in line]
    assert sum("_gradient_by_jax" in line for line in finished) == 2
