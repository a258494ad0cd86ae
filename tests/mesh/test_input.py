"""Bad input to `mesh=` and its options, and the traps of gradients over many devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.meshes import examples, masked, mean, mesh_of, parameters, spread, worst
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import anybatch as ab


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mesh": "data"}, "mesh must be a jax.sharding.Mesh"),
        ({"mesh": AbstractMesh((8,), ("data",))}, "mesh must be a jax.sharding.Mesh"),
        ({"axis_name": "batch"}, r"axis_name='batch' for a mesh with the axes \('data',\)"),
        ({"axis_name": ()}, "axis_name must be an axis"),
        ({"axis_name": ("data", "data")}, "twice"),
        ({"axis_name": 0}, "axis_name must be an axis"),
        ({"reduce": "twice"}, "reduce must be one of"),
        ({"mesh": None, "reduce": "each"}, "reduce needs a mesh"),
        ({"mesh": None, "param_specs": P("data")}, "param_specs needs a mesh"),
        ({"param_specs": {"w": P("model")}}, "of axes of the mesh"),
        ({"param_specs": {"w": "data"}}, "must be a jax.sharding.PartitionSpec"),
    ],
    ids=str,
)
def test_options_are_checked_when_the_loss_is_wrapped(options, match):
    with pytest.raises(ab.InputError, match=match):
        ab.value_and_grad(mean, **{"mesh": mesh_of(8), **options})


def test_specs_must_fit_the_parameters():
    fun = ab.value_and_grad(mean, mesh=mesh_of(8), microbatch_size=1, param_specs={"w": P(), "q": P()})
    with pytest.raises(ab.InputError, match="prefix of the gradient"):
        fun(parameters(dtype=np.float32), examples(16, np.float32))


@pytest.mark.parametrize("spec", [P("data"), P(None, None, "data")], ids=str)
@pytest.mark.parametrize("jit", [False, True])
def test_specs_must_cut_parameters_evenly(spec, jit):
    fun = ab.value_and_grad(mean, mesh=mesh_of(8), microbatch_size=1, param_specs={"w": spec, "v": None, "b": None})
    with pytest.raises(ab.InputError, match=r"params\['w'\] of shape \(5, 8\)"):
        (jax.jit(fun) if jit else fun)(parameters(dtype=np.float32), examples(16, np.float32))


def test_another_mesh_that_is_set_is_refused_under_jit():
    fun = jax.jit(ab.value_and_grad(mean, mesh=mesh_of(8), microbatch_size=1))
    with jax.set_mesh(mesh_of(4)), pytest.raises(ab.InputError, match="the mesh that is set"):
        fun(parameters(dtype=np.float32), examples(16, np.float32))


def test_each_needs_as_many_examples_on_every_device():
    fun = ab.value_and_grad(mean, mesh=mesh_of(8), microbatch_size=1, reduce="each")
    with pytest.raises(ab.InputError, match="16 or 24 examples"):
        fun(parameters(dtype=np.float32), examples(17, np.float32))


def test_a_collective_in_the_loss_is_refused():
    """Its gradient would be counted once for every device."""

    def loss(params, batch):
        return lax.pmean(mean(params, batch), "data")

    with pytest.raises(ab.InputError, match="Leave lax"):
        ab.value_and_grad(loss, mesh=mesh_of(8), microbatch_size=1)(
            parameters(dtype=np.float32), examples(16, np.float32)
        )


def test_a_mesh_inside_shard_map_is_refused():
    mesh = mesh_of(8)

    def on_device(params, batch):
        return ab.grad(mean, mesh=mesh, microbatch_size=1)(params, batch)

    run = jax.shard_map(on_device, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    with pytest.raises(ab.InputError, match="outside of shard_map"):
        run(parameters(dtype=np.float32), examples(16, np.float32))


def test_a_constraint_in_derivatives_of_ones_own_is_refused():
    mesh = mesh_of(4, 2)

    @jax.custom_vjp
    def spread_out(x):
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P("data", "model")))

    spread_out.defvjp(lambda x: (spread_out(x), None), lambda _, cotangent: (cotangent,))

    def loss(params, batch):
        return jnp.mean(spread_out(batch["x"] @ params["w"]) ** 2)

    with pytest.raises(ab.InputError, match="custom_vjp"):
        ab.value_and_grad(loss, mesh=mesh, microbatch_size=2)(parameters(dtype=np.float32), examples(16, np.float32))


# The traps: what people write by hand, beside what they should have got.


@pytest.mark.usefixtures("float64")
class TestTraps:
    def expected(self):
        return jax.grad(masked)(parameters(), examples(32))

    def by_hand(self, on_device, **options):
        mesh = mesh_of(8)
        run = jax.shard_map(on_device, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), **options)
        return jax.jit(run)(parameters(), spread(examples(32), mesh, "data"))

    def ours(self):
        return ab.grad(masked, microbatch_size=2, mesh=mesh_of(8))(parameters(), examples(32))

    def test_a_psum_counted_twice(self):
        def on_device(params, batch):  # JAX has added them up already
            return lax.psum(jax.grad(lambda p, b: jnp.sum(b["x"] @ p["w"]))(params, batch), "data")

        wrong = self.by_hand(on_device)
        right = ab.grad(lambda p, b: jnp.sum(b["x"] @ p["w"]), microbatch_size=2, mesh=mesh_of(8))
        expected = jax.grad(lambda p, b: jnp.sum(b["x"] @ p["w"]))(parameters(), examples(32))
        assert worst(wrong, jax.tree.map(lambda leaf: 8 * leaf, expected)) < 1e-12
        assert worst(right(parameters(), examples(32)), expected) < 1e-12

    def test_a_mean_of_the_means_of_devices(self):
        def on_device(params, batch):
            safe = {**batch, "mask": batch["mask"] + 1e-9}  # some devices have no example that counts
            return lax.pmean(jax.grad(masked)(params, safe), "data")

        assert worst(self.by_hand(on_device, check_vma=False), self.expected()) > 0.1
        assert worst(self.ours(), self.expected()) < 1e-12

    def test_gradients_of_examples_summed_over_devices(self):
        def on_device(params, batch):  # of each example, so one thinks
            def norm(x):
                grad = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(params["w"])
                return jnp.linalg.norm(grad)

            return lax.pmean(jnp.sum(jax.vmap(norm)(batch["x"])), "data")

        params, batch = parameters(), examples(32)
        norms = jax.vmap(lambda x: jnp.linalg.norm(jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(params["w"])))
        right = float(jnp.mean(norms(jnp.asarray(batch["x"])))) * 4
        assert abs(float(self.by_hand(on_device)) / right - 1) > 0.1

        # Norms of the gradients of examples, inside a loss: examples of other devices have no part in them.
        def penalized(params, batch):
            def norm(x):
                return jnp.linalg.norm(jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(params["w"]))

            return jnp.mean(jax.vmap(norm)(batch["x"]))

        ours = ab.value_and_grad(penalized, microbatch_size=2, mesh=mesh_of(8))(params, batch)
        assert worst(ours, jax.value_and_grad(penalized)(params, batch)) < 1e-12

    def test_padding_that_is_computed(self):
        """An example of zeros makes a norm whose gradient is not a number; nothing is padded here."""

        def loss(params, batch):
            return jnp.mean(jnp.linalg.norm(batch["x"] @ params["w"], axis=-1))

        ours = ab.grad(loss, microbatch_size=2, mesh=mesh_of(8))
        for number in (29, 5):
            for call in (ours, jax.jit(ours)):
                got = call(parameters(), examples(number))
                assert worst(got, jax.grad(loss)(parameters(), examples(number))) < 1e-12
        assert np.isnan(jax.grad(loss)(parameters(), {"x": np.zeros((1, 5))})["w"]).all()
