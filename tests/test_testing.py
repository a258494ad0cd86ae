"""The assertions pass for loops that are right, and fail for the control beside each of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import anybatch as ab
from anybatch.collectives import Traffic
from anybatch.errors import InputError
from anybatch.testing import ProgramMemory, assert_collectives, assert_flat_memory, assert_memory

pytestmark = pytest.mark.every_jax

W = jax.ShapeDtypeStruct((32, 128), jnp.float32)
X = jax.ShapeDtypeStruct((512, 32), jnp.float32)


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def in_steps(w, x, size):
    """The gradient in microbatches of one size."""
    microbatches = x.reshape(-1, size, x.shape[1])

    def step(total, microbatch):
        return total + jax.grad(loss)(w, microbatch), None

    total, _ = lax.scan(step, jnp.zeros_like(w), microbatches)
    return total / microbatches.shape[0]


def by_hand(w, x):
    return in_steps(w, x, 16)


# Memory.


def test_the_total_is_what_xla_reports():
    compiled = jax.jit(jax.grad(loss), donate_argnums=0).lower(W, X).compile()
    found, used = compiled.memory_analysis(), assert_memory(compiled, at_most="1GiB")
    assert used == ProgramMemory.of(compiled)
    assert used.aliased == 4 * 32 * 128  # the gradient takes the place of the donated parameters
    assert used.total == found.argument_size_in_bytes + found.temp_size_in_bytes
    assert used.temporaries > 0


@pytest.mark.parametrize("fun", [by_hand, jax.jit(by_hand), functools.partial(in_steps, size=16)])
def test_memory_is_the_same_for_a_function_jitted_or_not(fun):
    expected = ProgramMemory.of(jax.jit(by_hand).lower(W, X).compile())
    assert assert_memory(fun, (W, X), at_most=expected.total) == expected
    with pytest.raises(AssertionError, match="The program may take at most"):
        assert_memory(fun, (W, X), at_most=expected.total - 1)


def test_arrays_and_shapes_have_the_same_memory():
    w, x = jnp.ones(W.shape), jnp.ones(X.shape)
    assert (
        assert_memory(by_hand, (w, x))
        == assert_memory(by_hand, (W, X))
        == assert_memory(by_hand, (W,), kwargs={"x": X})
    )


def test_nothing_runs():
    def fun(w):
        jax.debug.callback(lambda: pytest.fail("it ran"))
        return w

    assert_memory(fun, (W,))


def test_the_message_has_the_bytes_by_kind_and_says_what_to_do():
    with pytest.raises(AssertionError) as caught:
        assert_memory(jax.grad(loss), (W, X), at_most="128KiB")
    text = str(caught.value)
    assert text.startswith("The program may take at most 128.0 KiB on each device.\nIt takes ")
    assert "arguments     80.0 KiB" in text
    assert "smaller microbatch_size" in text
    with pytest.raises(AssertionError, match=r"Arguments and outputs alone are too large: donate arguments"):
        assert_memory(jax.grad(loss), (W, X), at_most="64KiB")


@pytest.mark.parametrize(
    "at_most, given", [("lots", "at_most='lots'"), (0, "at_most=0"), (None, "at_most=None"), (True, "at_most=True")]
)
def test_a_limit_that_is_none_is_refused(at_most, given):
    with pytest.raises(InputError, match=f"at_most must be a number of bytes, or a text with a unit, got {given}"):
        assert_memory(by_hand, (W, X), at_most=at_most)


def test_arguments_that_are_no_tuple_are_refused():
    with pytest.raises(InputError, match=r"Pass for example args=\(params, batch\)"):
        assert_memory(by_hand, W)
    with pytest.raises(InputError, match=r"Pass for example args=\(params, batch\)"):
        assert_flat_memory(by_hand, W)
    with pytest.raises(InputError, match="fun must be a function or a compiled program, got float"):
        assert_memory(1.0, (W,))


@pytest.mark.full
def test_a_model_of_equinox():
    import equinox as eqx

    def model_loss(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    model = eqx.nn.MLP(32, 1, 128, 1, key=jax.random.key(0))
    grad = eqx.filter_grad(model_loss)
    x = jnp.ones(X.shape)
    plain, jitted = (assert_memory(fun, (model, x)) for fun in (grad, eqx.filter_jit(grad)))
    shapes = assert_memory(eqx.filter_jit(grad), (model, X))
    assert plain.temporaries == jitted.temporaries == shapes.temporaries
    assert plain.arguments > 4 * (32 * 128 + 512 * 32)
    with pytest.raises(AssertionError, match="Temporaries must not grow"):
        assert_flat_memory(eqx.filter_jit(grad), (model, X))


@pytest.mark.full
def test_a_model_of_nnx():
    from flax import nnx

    def model_loss(model, x):
        return jnp.mean(jnp.tanh(model(x)) ** 2)

    model = nnx.Linear(32, 128, rngs=nnx.Rngs(0))
    with jax.numpy_rank_promotion("allow"):
        plain, jitted = (
            assert_memory(fun, (model, X)) for fun in (nnx.grad(model_loss), nnx.jit(nnx.grad(model_loss)))
        )
        assert plain.arguments == jitted.arguments > 4 * (32 * 128 + 512 * 32)
        with pytest.raises(AssertionError, match="Temporaries must not grow"):
            assert_flat_memory(nnx.jit(nnx.grad(model_loss)), (model, X))


def test_a_step_of_anybatch():
    import optax

    step = ab.train_step(loss, optax.sgd(0.1), microbatch_size=16)
    args = step.init(jnp.ones(W.shape)), jnp.ones(X.shape)
    used = assert_memory(step, args)
    assert used.aliased >= 4 * 32 * 128  # it donates its state
    assert_flat_memory(step, args)
    with pytest.raises(AssertionError, match="Temporaries must not grow"):
        assert_flat_memory(ab.train_step(loss, optax.sgd(0.1), microbatch_size=None), args)


# Memory that does not grow.


@pytest.mark.parametrize("fun", [by_hand, jax.jit(by_hand), ab.grad(loss, microbatch_size=16)])
def test_microbatches_have_flat_memory(fun):
    small, large = assert_flat_memory(fun, (W, X))
    assert large.arguments - small.arguments == 3 * 4 * 512 * 32
    assert small.temporaries > 0


@pytest.mark.parametrize("fun", [jax.grad(loss), lambda w, x: in_steps(w, x, x.shape[0] // 4)], ids=["full", "fixed"])
def test_the_gradient_of_the_full_batch_and_a_fixed_number_of_microbatches_do_not(fun):
    """The control."""
    with pytest.raises(AssertionError) as caught:
        assert_flat_memory(fun, (W, X))
    text = str(caught.value)
    assert text.startswith("Temporaries must not grow with the number of examples.\nWith 4 times as many examples")
    assert "times the bytes of the examples that were added" in text
    assert "microbatch_size=8" in text


def test_outputs_may_grow():
    small, large = assert_flat_memory(lambda w, x: lax.map(lambda row: row @ w, x), (W, X))
    assert large.outputs == 4 * small.outputs


def test_the_batch_may_be_several_arguments_and_trees():
    def fun(x, w, rest):
        return by_hand(w, jnp.concatenate([x[:16], rest["x"][:16]])) + by_hand(w, x)

    assert_flat_memory(fun, (X, W, {"x": X}), batch_argnums=(0, 2), factor=2)


def test_slack():
    with pytest.raises(AssertionError, match=r"4\.0 MiB is allowed|grow by"):
        assert_flat_memory(jax.grad(loss), (W, X), slack="64KiB")
    with pytest.raises(InputError, match="slack must be a number of bytes"):
        assert_flat_memory(by_hand, (W, X), slack="-3")
    assert_flat_memory(by_hand, (W, X), slack="2%")


def test_a_batch_too_small_to_tell_is_refused():
    x = jax.ShapeDtypeStruct((16, 32), jnp.float32)
    with pytest.raises(InputError, match="The batch must be large enough to show growth"):
        assert_flat_memory(by_hand, (W, x), slack="64KiB")


@pytest.mark.parametrize(
    "args, options, match",
    [
        ((W, {"x": X, "size": 3}), {}, r"args\[1\]\['size'\]: 3"),
        ((W, jnp.float32(1)), {}, r"args\[1\]: float32\[\]"),
        ((W, X), {"batch_argnums": 2}, r"batch_argnums=\(2,\)"),
        ((W, X), {"factor": 1}, "factor must be a whole number of at least 2"),
    ],
)
def test_what_is_no_batch_is_refused(args, options, match):
    with pytest.raises(InputError, match=match):
        assert_flat_memory(by_hand, args, **options)


def test_a_compiled_program_has_one_batch():
    with pytest.raises(InputError, match="assert_flat_memory compiles for two batches"):
        assert_flat_memory(jax.jit(by_hand).lower(W, X).compile(), (W, X))


# Collectives.


@functools.cache
def mesh():
    return jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])


def placed(leaf, *spec):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh(), P(*spec)))


def reduced_once(w, x):
    return lax.psum(in_steps(lax.pcast(w, "data", to="varying"), x, 32), "data") / 4


def reduced_each_time(w, x):
    return in_steps(w, x, 32) / 4  # the gradient of a replicated array is a psum


def sharded(fun):
    return jax.shard_map(fun, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P())


@pytest.mark.parametrize("wrap", [lambda fun: fun, jax.jit], ids=["plain", "jit"])
def test_a_reduction_after_the_loop_is_executed_once(wrap):
    traffic = assert_collectives(wrap(sharded(reduced_once)), (W, X), mesh=mesh(), axis="data", all_reduce=1)
    with pytest.raises(InputError, match=r"axis must be one of 'data'.*got axis='date'"):  # nothing runs along it
        assert_collectives(wrap(sharded(reduced_once)), (W, X), mesh=mesh(), axis="date")
    assert isinstance(traffic, Traffic) and traffic.by_kind == {"all-reduce": 1}


def test_a_reduction_in_the_loop_is_executed_as_often_as_the_loop_runs():
    """The control: a count by text finds one."""
    assert_collectives(sharded(reduced_each_time), (W, X), all_reduce=4)
    with pytest.raises(AssertionError) as caught:
        assert_collectives(sharded(reduced_each_time), (W, X), all_reduce=1)
    text = str(caught.value)
    assert text.startswith("One run must execute 1 all-reduce.\nIt executes 4 all-reduce:\n    4 collectives in a run")
    assert text.endswith("reduce once after the loop, as ab.value_and_grad(loss, microbatch_size=8, mesh=mesh) does.")


@pytest.mark.parametrize("how", ["shapes", "arrays", "in_shardings", "compiled"])
def test_shardings_of_arguments(how):
    args = placed(W), placed(X, "data")
    fun, options = jax.grad(loss), {}
    if how == "arrays":
        args = tuple(jax.device_put(jnp.ones(leaf.shape), leaf.sharding) for leaf in args)
    if how == "in_shardings":
        args, options = (W, X), {"in_shardings": tuple(leaf.sharding for leaf in args)}
    if how == "compiled":
        fun, args = jax.jit(fun).lower(*args).compile(), ()
    assert_collectives(fun, args, all_reduce=1, **options)
    with pytest.raises(AssertionError, match="One run must execute 2 all-reduce"):
        assert_collectives(fun, args, all_reduce=2, **options)


def test_kinds_that_are_not_named_must_not_be_executed():
    args = placed(W, "data"), placed(X)
    gathered = NamedSharding(mesh(), P())
    with pytest.raises(AssertionError, match="One run must execute 0 all-gather"):
        assert_collectives(jnp.sin, (args[0],), out_shardings=gathered)
    assert_collectives(jnp.sin, (args[0],), out_shardings=gathered, others="any", all_reduce=0)
    assert_collectives(jnp.sin, (args[0],), out_shardings=gathered, all_gather=1)


def test_missing_reductions_are_named():
    with pytest.raises(AssertionError, match=r"Reductions may be missing"):
        assert_collectives(jnp.sin, (placed(X, "data"),), all_reduce=1)


def test_a_number_that_is_not_known_is_not_equal_to_any():
    def fun(w, x, steps):
        return lax.fori_loop(0, steps, lambda _, total: total + lax.pmean(loss(w + total, x), "data"), 0.0)

    steps = jax.ShapeDtypeStruct((), jnp.int32)
    spread = jax.shard_map(fun, mesh=mesh(), in_specs=(P(), P("data"), P()), out_specs=P(), check_vma=False)
    with pytest.raises(AssertionError, match="an unknown number of all-reduce"):
        assert_collectives(spread, (W, X, steps), all_reduce=1)


def test_a_program_for_one_device_is_refused():
    with pytest.raises(InputError, match="Collectives are counted in a program for several devices"):
        assert_collectives(jax.grad(loss), (W, X))


@pytest.mark.parametrize("options", [{"others": "none"}, {"others": 1}, {"all_reduce": -1}, {"all_reduce": 0.5}])
def test_numbers_that_are_none_are_refused(options):
    with pytest.raises(InputError, match="must be"):
        assert_collectives(jnp.sin, (placed(X, "data"),), **options)


# The gradient.


def test_a_right_loop_is_returned_as_an_audit():
    w, x = jnp.ones((3, 4)), jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
    audit = ab.testing.assert_full_batch_gradient(lambda w, x: in_steps(w, x, 2), loss, w, x)
    assert audit.same


def test_a_wrong_loop_is_an_assertion_error_that_names_the_cause():
    w, x = jnp.ones((3, 4)), jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
    with pytest.raises(AssertionError, match="4 times"):
        ab.testing.assert_full_batch_gradient(lambda w, x: 4 * in_steps(w, x, 2), loss, w, x)
