"""Twenty published bugs are found, each with its cause, and twenty right loops are not accused."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.loops import BUGS, RIGHT, slices

from anybatch.auditing.audit import audit
from anybatch.auditing.causes import Cause

pytestmark = pytest.mark.every_set

DIFFERENT = 1e-3  # the least relative difference of a bug


def chosen(loops, topic=None):
    loops = [loop for loop in loops if topic in (None, loop.topic)]
    return [pytest.param(loop, id=loop.name, marks=[] if loop.central else pytest.mark.full) for loop in loops]


@pytest.fixture(autouse=True)
def defaults():
    """Other libraries are written for JAX's own promotion of dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def audited(loop):
    problem = loop.make()
    return audit(problem.candidate, problem.loss, problem.params, problem.batch, *problem.args, **problem.options)


def check_bug(loop):
    result = audited(loop)
    assert not result.same
    assert result.kind == Cause[loop.cause], result


def check_right(loop):
    result = audited(loop)
    assert result.same and result.kind is None, result


# A test for each topic: `make test` runs two loops of each.


@pytest.mark.parametrize("loop", chosen(BUGS, "sums"))
def test_a_bug_in_how_gradients_are_added_is_found(loop):
    check_bug(loop)


@pytest.mark.parametrize("loop", chosen(BUGS, "batch"))
def test_a_bug_in_what_depends_on_the_whole_batch_is_found(loop):
    check_bug(loop)


@pytest.mark.parametrize("loop", chosen(BUGS, "steps"))
def test_a_bug_in_optimizers_devices_and_dtypes_is_found(loop):
    check_bug(loop)


@pytest.mark.parametrize("loop", chosen(RIGHT, "sums"))
def test_gradients_that_are_added_rightly_are_not_accused(loop):
    check_right(loop)


@pytest.mark.parametrize("loop", chosen(RIGHT, "batch"))
def test_loops_that_know_the_whole_batch_are_not_accused(loop):
    check_right(loop)


@pytest.mark.parametrize("loop", chosen(RIGHT, "steps"))
def test_right_optimizers_devices_and_dtypes_are_not_accused(loop):
    check_right(loop)


def test_there_are_twenty_of_each():
    assert (len(BUGS), len(RIGHT)) == (20, 20)
    assert len({loop.name for loop in BUGS + RIGHT}) == len({loop.published for loop in BUGS + RIGHT}) == 40
    assert not any(loop.cause for loop in RIGHT)
    topics = {"sums", "batch", "steps"}
    assert {loop.topic for loop in BUGS} == {loop.topic for loop in RIGHT} == topics


def test_the_bugs_have_all_causes():
    found = collections.Counter(loop.cause for loop in BUGS)
    assert set(found) == set(Cause.__members__) - {"UNKNOWN", "OPTIMIZER_STATE"}


# The corpus by itself, beside `jax.value_and_grad` in float64.


def floats(tree):
    """The floating-point arrays of a pytree, or of a model, as float64."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]
    return [np.asarray(leaf, np.float64) for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def outputs(problem):
    """The value or None, and the gradient, or the change of the parameters: of the candidate, and the right ones."""
    if "state" in problem.options:
        return outputs_of_state(problem)
    if "optimizer" in problem.options:
        return outputs_of_optimizer(problem)
    found = problem.candidate(problem.params, problem.batch, *problem.args)
    found_value, found_grads = found if isinstance(found, tuple) else (None, found)
    value, grads = full_batch(problem)
    return found_value, floats(found_grads), value, floats(grads)


def full_batch(problem):
    if type(problem.params).__module__.startswith("equinox"):
        import equinox as eqx

        return eqx.filter_value_and_grad(problem.loss)(problem.params, problem.batch)
    wide = jax.tree.map(
        lambda leaf: leaf.astype(jnp.float64) if leaf.dtype == jnp.bfloat16 else leaf, (problem.params, problem.batch)
    )
    return jax.value_and_grad(problem.loss)(*wide, *problem.args)


def outputs_of_optimizer(problem):
    params, optimizer = problem.params, problem.options["optimizer"]
    reference = problem.options.get("reference_optimizer", optimizer)
    value, grads = full_batch(problem)
    updates, _ = reference.update(grads, reference.init(params), params)
    new, opt_state = params, optimizer.init(params)
    for part in slices(problem.batch, problem.options.get("microbatch_size", 10**6)):
        new, opt_state = problem.candidate(new, opt_state, part, *problem.args)
    return None, floats(jax.tree.map(jnp.subtract, new, params)), value, floats(updates)


def outputs_of_state(problem):
    from flax import nnx

    state = problem.options["state"]
    if not isinstance(state, nnx.Optimizer):
        value, grads = full_batch(problem)
        expected = state.apply_gradients(grads=grads).params
        return None, floats(problem.candidate(state, problem.batch).params), value, floats(expected)
    model, optimizer = nnx.clone((problem.params, state))
    value, grads = nnx.value_and_grad(problem.loss)(model, problem.batch)
    optimizer.update(model, grads)
    found = problem.candidate(problem.params, state, problem.batch)
    return found, floats(nnx.state(problem.params)), value, floats(nnx.state(model))


def difference(found, expected):
    """The largest difference of a leaf, relative to the largest entry of all leaves."""
    assert [leaf.shape for leaf in found] == [leaf.shape for leaf in expected]
    largest = max(np.max(np.abs(leaf)) for leaf in expected)
    return max(np.max(np.abs(one - other)) for one, other in zip(found, expected, strict=True)) / largest


@pytest.mark.full
@pytest.mark.parametrize("loop", chosen(BUGS))
def test_each_bug_gives_another_gradient_or_value(loop, float64):
    found_value, found, value, expected = outputs(loop.make())
    if loop.cause == "VALUE_ONLY":
        assert abs(found_value - value) > DIFFERENT * abs(value)
        assert difference(found, expected) < 1e-12
    else:
        assert difference(found, expected) > DIFFERENT


@pytest.mark.full
@pytest.mark.parametrize("loop", chosen(RIGHT))
def test_each_right_loop_gives_the_gradient_of_the_full_batch(loop, float64):
    found_value, found, value, expected = outputs(loop.make())
    assert difference(found, expected) < loop.tolerance
    assert found_value is None or abs(found_value - value) < loop.tolerance * abs(value)
