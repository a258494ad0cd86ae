"""Bad input gets an error in three parts, before any work: what must hold, what was given, the ways out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import anybatch as ab

X = jnp.arange(6.0)


def loss(w, x):
    return jnp.mean(w * x)


def must_not_run(*_):
    raise RuntimeError("the loss ran before its arguments were checked")


def text_of(make):
    with pytest.raises(ab.InputError) as caught:
        make()
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, TypeError)  # jax raises this one for some of the same mistakes
    return str(caught.value)


def wrap(fun=must_not_run, **options):
    return ab.value_and_grad(fun, **{"microbatch_size": 2, "reduction": "mean", **options})


# When wrapping.


@pytest.mark.parametrize("size", [0, -1, 2.5, "8", True, (2,), np.float32(2)])
def test_microbatch_size(size):
    assert text_of(lambda: wrap(microbatch_size=size)) == (
        f'microbatch_size must be a whole number of at least 1, None or "auto", got microbatch_size={size!r}.\n'
        "Pass the number of examples at a time, e.g. microbatch_size=8, or None for the full batch."
    )


def test_microbatch_size_may_be_a_numpy_integer():
    assert float(wrap(loss, microbatch_size=np.int64(2))(1.0, X)[0]) == 2.5


@pytest.mark.parametrize("reduction", ["average", None, 3])
def test_unknown_reduction(reduction):
    assert text_of(lambda: wrap(reduction=reduction)) == (
        f"reduction must be one of 'infer', 'sum', 'mean', 'weighted', got reduction={reduction!r}.\n"
        'Choose one of them, e.g. reduction="weighted".'
    )


def test_unknown_on_coupled():
    assert "on_coupled must be one of 'exact', 'error', got on_coupled='warn'." in text_of(
        lambda: wrap(on_coupled="warn")
    )


@pytest.mark.parametrize("argnums", ["0", 1.5, None, (), True, (0, "1")])
@pytest.mark.parametrize("name", ["argnums", "batch_argnums"])
def test_argnums_that_are_no_positions(name, argnums):
    assert text_of(lambda: wrap(**{name: argnums})) == (
        f"{name} must be the position of an argument, or a tuple of positions, got {name}={argnums!r}.\n"
        f"Pass an int or a tuple of ints, e.g. {name}=1 or {name}=(1, 2)."
    )


@pytest.mark.parametrize(
    "options, given",
    [
        ({"argnums": 1}, "position 1 in argnums and in batch_argnums"),
        ({"argnums": (0, 0)}, "position 0 in argnums twice"),
        ({"rng_argnums": 1}, "position 1 in batch_argnums and in rng_argnums"),
    ],
)
def test_overlapping_argnums(options, given):
    assert text_of(lambda: wrap(**options)) == (
        f"argnums, batch_argnums and rng_argnums must not overlap, got {given}.\n"
        "An argument is differentiated, or is divided into microbatches, or is a PRNG key: "
        "e.g. value_and_grad(loss, argnums=0, batch_argnums=1, rng_argnums=2)."
    )


def test_overlap_that_shows_only_in_a_call():
    assert "got position 1 in argnums and in batch_argnums." in text_of(lambda: wrap(argnums=-1)(1.0, X))


def test_fun_must_be_callable():
    assert text_of(lambda: wrap(3.0)).startswith("The loss must be a function, got fun=3.0.\n")


@pytest.mark.parametrize("dtype", ["int32", jnp.int32, "float31", 7])
def test_accumulator_dtype(dtype):
    assert text_of(lambda: wrap(accumulator_dtype=dtype)).startswith(
        f"accumulator_dtype must be a floating-point dtype or None, got accumulator_dtype={dtype!r}.\n"
    )


@pytest.mark.parametrize("aux_reduction", ["median", {"a": "mean", "b": 3}])
def test_unknown_aux_reduction(aux_reduction):
    assert text_of(lambda: wrap(has_aux=True, aux_reduction=aux_reduction)).startswith(
        f"aux_reduction must be one of 'stack', 'mean', 'sum', 'last', or a tree of them, "
        f"got aux_reduction={aux_reduction!r}.\n"
    )


# When called.


def test_unequal_numbers_of_examples():
    batch = {"x": jnp.ones((12, 2)), "mask": jnp.ones(3)}
    assert text_of(lambda: wrap()(1.0, batch)) == (
        "Every array in the batch needs the same number of examples along axis 0, got\n"
        "    args[1]['mask']: 3\n"
        "    args[1]['x']: 12\n"
        "If one of these is not per-example data, take it out of batch_argnums or close over it."
    )


def test_the_leaves_go_by_the_names_of_the_arguments():
    def named(weights, batch):
        raise AssertionError("the loss ran before its arguments were checked")

    text = text_of(lambda: wrap(named)(1.0, {"x": jnp.ones(4), "y": jnp.ones(5)}))
    assert "batch['x']: 4" in text
    assert "weights = int32[3]" in text_of(lambda: wrap(named)(jnp.arange(3), X))


@pytest.mark.parametrize("leaf, shown", [(jnp.float32(3), "float32[]"), (3.5, "3.5"), ("text", "'text'")])
def test_leaves_without_examples(leaf, shown):
    assert text_of(lambda: wrap()(1.0, {"x": X, "temperature": leaf})) == (
        "Every leaf of the batch must be an array with examples along axis 0, got\n"
        f"    args[1]['temperature']: {shown}  <- this one\n"
        "    args[1]['x']: float32[6]\n"
        "Pass what is not per-example data as another argument, or close over it."
    )


@pytest.mark.parametrize("batch", [None, {}, [(), {}]])
def test_a_batch_without_arrays(batch):
    assert text_of(lambda: wrap()(1.0, batch)) == (
        "The batch needs at least one array, got no leaves in the argument at batch_argnums=1.\n"
        "Point batch_argnums at the argument that holds the examples, e.g. batch_argnums=1."
    )


@pytest.mark.parametrize("name, options", [("batch_argnums", {"batch_argnums": 2}), ("argnums", {"argnums": 5})])
def test_argnums_out_of_range(name, options):
    assert text_of(lambda: wrap(**options)(1.0, X)) == (
        f"{name} must be among the 2 positional arguments of the call, got {name}={options[name]}.\n"
        f"Pass that argument by position, not by keyword, or choose {name} from 0 to 1."
    )


ROWS = jnp.ones((4, 3))
TARGETS = jnp.ones(4)
P = jnp.ones(3)


def closes(p):
    return jnp.mean((ROWS @ p - TARGETS) ** 2)


def closes_with_another(p, scale):
    return scale * jnp.mean((ROWS @ p - TARGETS) ** 2)


ENTRIES = {
    "value_and_grad": lambda fun: ab.value_and_grad(fun),
    "value_and_grad of a size": lambda fun: ab.value_and_grad(fun, microbatch_size=2),
    "value_and_grad at once": lambda fun: ab.value_and_grad(fun, microbatch_size=None),
    "value_and_grad with memory": lambda fun: ab.value_and_grad(fun, memory="1GiB"),
    "value_and_grad, declared": lambda fun: ab.value_and_grad(fun, microbatch_size=2, reduction="mean"),
    "under jit": lambda fun: jax.jit(ab.value_and_grad(fun, microbatch_size=2)),
    "grad": lambda fun: ab.grad(fun),
    "plan": lambda fun: functools.partial(ab.plan, fun),
    "explain": lambda fun: functools.partial(ab.explain, fun),
    "read": lambda fun: functools.partial(ab.read, fun),
    "verify": lambda fun: functools.partial(ab.verify, fun),
    "noise_scale": lambda fun: ab.noise_scale(fun, microbatch_size=2),
    "per_example_grads": lambda fun: ab.per_example_grads(fun),
    "per_example_norms": lambda fun: ab.per_example_norms(fun),
    "clipped_grad": lambda fun: ab.clipped_grad(fun, clip_norm=1.0),
}


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_a_loss_that_closes_over_its_batch(entry):
    assert text_of(lambda: entry(closes)(P)) == (
        "The batch must be an argument of the loss, got batch_argnums=1 and a call with (p).\n"
        "The loss closes over ROWS = float32[4,3], TARGETS = float32[4]. If that is its batch, make it an argument: "
        "def loss(p, ROWS, TARGETS): ..., with batch_argnums=(1, 2), called with (p, ROWS, TARGETS)."
    )
    assert text_of(lambda: entry(closes_with_another)(P, jnp.asarray(2.0))).endswith(
        "The loss closes over ROWS = float32[4,3], TARGETS = float32[4]. If that is its batch, make it an argument: "
        "def loss(p, scale, ROWS, TARGETS): ..., with batch_argnums=(2, 3), called with (p, scale, ROWS, TARGETS)."
    )


@pytest.mark.parametrize("batch", [None, {}, 2.0, jax.random.key(0)], ids=["None", "empty", "number", "key"])
def test_an_argument_without_rows_beside_a_batch_that_is_closed_over(batch):
    assert "def loss(p, scale, ROWS, TARGETS): ..., with batch_argnums=(2, 3)" in text_of(
        lambda: ab.grad(closes_with_another)(P, batch)
    )


def test_a_loss_that_closes_over_its_batch_in_other_ways():
    def make(data):
        return lambda params: jnp.mean(data["x"] @ params)

    general = (
        "If the loss closes over its batch, make it an argument: def loss(params, batch): ..., with batch_argnums=1"
    )
    assert general in text_of(lambda: ab.grad(make({"x": ROWS}))(P))
    bound = functools.partial(lambda params, x: jnp.mean(x @ params), x=ROWS)
    assert "closes over x = float32[4,3]. If that is its batch, make it an argument: def loss(params, x): " in text_of(
        lambda: ab.grad(bound)(P)
    )
    assert "def loss(p, ROWS, TARGETS): ..." in text_of(lambda: ab.grad(jax.jit(closes))(P))
    assert "def loss(p, ROWS, TARGETS): ..." in text_of(lambda: ab.grad(functools.partial(closes))(P))
    assert "a call with ()" in text_of(lambda: ab.grad(lambda: jnp.mean(ROWS))())
    written = ab.grad(lambda p, x, y: jnp.mean((x @ p - y) ** 2), batch_argnums=(1, 2), microbatch_size=3)
    np.testing.assert_allclose(written(P, ROWS, TARGETS), jax.grad(closes)(P))


def test_a_step_of_a_loss_that_closes_over_its_batch():
    assert text_of(lambda: ab.train_step(closes, optax.sgd(0.1))) == (
        "The loss of a step must take the parameters and the batch, got a loss that takes (p).\n"
        "If it closes over its batch, make the batch an argument: def loss(params, batch): ..., called by "
        'step(state, batch). Several arrays of a batch go into one tree, e.g. {"x": x, "y": y}.'
    )


def test_parameters_passed_by_keyword():
    """As in JAX. A batch may be: it is found by the signature."""
    assert "Pass that argument by position, not by keyword" in text_of(lambda: wrap(loss)(w=1.0, x=X))
    assert wrap(loss)(1.0, x=X)[0] == 2.5


@pytest.mark.parametrize("params, shown", [(jnp.arange(3), "int32[3]"), (3, "3"), (True, "True"), ("w", "'w'")])
def test_parameters_that_are_no_real_numbers(params, shown):
    assert text_of(lambda: wrap()({"w": params}, X)) == (
        "Gradients are taken with respect to arrays of floating-point or complex numbers, "
        f"got args[0]['w'] = {shown}.\n"
        "Cast it, e.g. x.astype(jnp.float32), or take its argument out of argnums "
        "(pass integers and configuration as a separate argument)."
    )


def test_rng_argnums_that_are_no_keys():
    assert text_of(lambda: wrap(rng_argnums=2)(1.0, X, jnp.ones(3))) == (
        "rng_argnums must point at arguments whose leaves are single PRNG keys, got args[2] = float32[3].\n"
        "Pass jax.random.key(0), or take this argument out of rng_argnums."
    )
    assert "key<fry>[4]" in text_of(lambda: wrap(rng_argnums=2)(1.0, X, jax.random.split(jax.random.key(0), 4)))


# When the loss is traced, and nothing has been computed.


@pytest.mark.parametrize(
    "result, shown",
    [
        (lambda w, x: w * x, "float32[2]"),
        (lambda w, x: jnp.sum(x).astype(jnp.int32), "int32[]"),
        (lambda w, x: {"loss": jnp.sum(w * x)}, "dict {'loss': float32[]}"),
        (lambda w, x: None, "NoneType None"),
        (lambda w, x: jnp.sum(w * x).astype(jnp.complex64), "complex64[]"),
    ],
)
def test_a_loss_that_is_no_scalar(result, shown):
    assert text_of(lambda: wrap(result)(1.0, X)) == (
        f"The loss must return a scalar of real floating-point numbers, got {shown}.\n"
        "Reduce it over the examples, e.g. jnp.mean(losses) or jnp.sum(losses)."
    )


def test_a_pair_where_a_scalar_was_expected():
    text = text_of(lambda: wrap(lambda w, x: (jnp.sum(w * x), 3))(1.0, X))
    assert text.endswith(
        "got tuple (float32[], 3).\n"
        'For a pair (loss, aux) pass has_aux=True; for a pair (total, weight) pass reduction="weighted".'
    )


def test_a_scalar_where_a_pair_was_expected():
    assert text_of(lambda: wrap(loss, has_aux=True)(1.0, X)) == (
        "With has_aux=True the loss must return a pair (loss, aux), got float32[].\n"
        "Return (loss, aux), or leave has_aux out."
    )
    assert text_of(lambda: wrap(loss, reduction="weighted")(1.0, X)) == (
        'With reduction="weighted" the loss must return a pair (total, weight), got float32[].\n'
        "Return the sum over the examples and what to divide it by, e.g. (jnp.sum(losses * mask), jnp.sum(mask))."
    )


def test_a_weight_that_is_no_scalar():
    text = text_of(lambda: wrap(lambda w, x: (jnp.sum(w * x), x), reduction="weighted")(1.0, X))
    assert text.startswith("The weight of a weighted loss must be a scalar number, got float32[2].\n")


# aux.


def aux_error(aux, **options):
    return text_of(lambda: wrap(lambda w, x: (jnp.mean(w * x), aux(w, x)), has_aux=True, **options)(1.0, X))


def test_aux_that_nobody_said_how_to_combine():
    assert aux_error(lambda w, x: {"rows": x, "accuracy": jnp.mean(x)}) == (
        "Every aux leaf without a row for each example needs an aux_reduction, "
        "got none for aux['accuracy'], float32[].\n"
        'Say how to combine the values of the microbatches: aux_reduction="mean", "sum", "last" or "stack", '
        "for all leaves or as a tree like aux."
    )


def test_aux_that_grows_with_the_batch_in_another_way():
    assert aux_error(lambda w, x: x[:, None] * x[None, :]) == (
        "Every aux leaf must have a row for each example along one axis, or one shape for every batch, "
        "got aux: float32[2,2] for 2 examples and float32[6,6] for 6.\n"
        "Give it one axis of the number of examples, or reduce it over them, or leave it out."
    )


def test_aux_with_the_examples_merged_into_another_axis():
    assert "float32[6] for 2 examples and float32[18] for 6" in aux_error(lambda w, x: jnp.tile(x, 3))


@pytest.mark.parametrize("reduction, leaf", [("mean", jnp.int32(3)), ("sum", jnp.bool_(True))])
def test_aux_that_cannot_be_averaged_or_added(reduction, leaf):
    needs = {"mean": "floating-point numbers", "sum": "numbers"}[reduction]
    text = aux_error(lambda w, x: leaf, aux_reduction=reduction)
    assert text.startswith(f'aux_reduction="{reduction}" needs {needs}, got aux, {leaf.dtype}[].\n')


def test_aux_reduction_of_another_tree():
    assert aux_error(lambda w, x: {"a": w, "b": w}, aux_reduction={"a": "mean"}).startswith(
        "aux_reduction must be one name, or a tree of names that is a prefix of aux, "
        "got aux_reduction={'a': 'mean'} for aux PyTreeDef({'a': *, 'b': *}).\n"
    )


def test_aux_of_another_tree_in_another_batch():
    text = aux_error(lambda w, x: {f"of {len(x)}": x})
    assert text.startswith("aux must have the same tree for every number of examples, got\n    for 2 examples: ")


def test_aux_that_is_no_array():
    assert aux_error(lambda w, x: {"name": "adam"}) == (
        "Every leaf of aux must be an array or a number, got aux['name'] = 'adam'.\n"
        "Leave it out of what the loss returns."
    )


def test_the_full_batch_needs_no_reduction():
    assert float(ab.value_and_grad(loss, microbatch_size=None)(1.0, X)[0]) == 2.5


def test_the_leaf_of_a_batch_without_rows_is_marked():
    batch = {"x": jnp.ones((4, 2)), "temperature": jnp.float32(0.1)}
    with pytest.raises(ab.InputError, match=r"temperature.*<- this one") as caught:
        ab.value_and_grad(lambda w, batch: jnp.sum(batch["x"] @ w), microbatch_size=2)(jnp.ones(2), batch)
    assert str(caught.value).count("<- this one") == 1


def test_a_long_batch_is_cut_and_a_swap_is_named():
    params, batch = {f"w{number:02}": jnp.ones((number + 1, 2)) for number in range(20)}, {"x": jnp.ones((4, 2))}

    def loss(params, batch):
        return jnp.sum(batch["x"] @ params["w00"].T)

    with pytest.raises(ab.InputError) as caught:
        ab.value_and_grad(loss, microbatch_size=2)(batch, params)
    assert str(caught.value).count("\n    ") == 11 and "... and 10 more" in str(caught.value)
    assert str(caught.value).endswith(
        "If parameters and batch are in the wrong order, swap them, or pass argnums=1, batch_argnums=0."
    )
    ab.value_and_grad(lambda batch, params: loss(params, batch), argnums=1, batch_argnums=0)(batch, params)


def test_a_key_is_no_batch():
    data = {"x": jnp.ones((4, 2))}
    with pytest.raises(
        ab.InputError, match=r"If the loss closes over its batch, make it an argument: def loss\(w, key, "
    ):
        ab.value_and_grad(lambda w, key: jnp.sum(data["x"] @ w))(jnp.ones(2), jax.random.key(0))


def test_text_is_no_batch():
    batch = {"x": jnp.ones((4, 2)), "names": np.array(["a", "b", "c", "d"])}
    with pytest.raises(ab.InputError, match=r"names'\].*<- this one"):
        ab.value_and_grad(lambda w, batch: jnp.sum(batch["x"] @ w))(jnp.ones(2), batch)
