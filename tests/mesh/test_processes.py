"""Gradients over the devices of several processes."""

import pathlib

import jax
import numpy as np
import pytest
from cases.meshes import bits, examples, masked, mesh_of, parameters, worst
from cases.processes import run

import anybatch as ab

# What each process runs: its own rows become one batch, and the gradient is that of all of them.
BODY = """
    sys.path.insert(0, {folder!r})
    import anybatch as ab
    from anybatch.collectives import Traffic
    from cases.meshes import contrastive, examples, masked, parameters, spread

    found = distributed.initialize(timeout=50, heartbeat=10)
    mesh = Mesh(np.asarray(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    rows = 128 // found.count
    mine = jax.tree.map(lambda leaf: leaf[found.index * rows :][:rows], examples(128, np.float32))
    batch = distributed.global_batch(mine, mesh)
    params = parameters(width=64, dtype=np.float32)

    def keep(name, result):
        value, grads = result
        whole = jax.tree.map(lambda leaf: np.asarray(leaf.addressable_data(0)), (value, grads))
        np.savez({out!r} + f"/{{name}}.{{found.index}}", value=whole[0], **whole[1])

    keep("bits", ab.value_and_grad(masked, microbatch_size=4, mesh=mesh, reproducible=True)(params, batch))
    step = jax.jit(ab.value_and_grad(contrastive, microbatch_size=4, mesh=mesh))
    keep("pairs", step(params, batch))
    one_pass = jax.jit(ab.value_and_grad(masked, microbatch_size=4, mesh=mesh))
    assert Traffic.of(one_pass.lower(params, batch).compile(), mesh).by_kind == {{"all-reduce": 1}}
    # Every process has all of a batch that does not divide the devices.
    keep("ragged", ab.value_and_grad(masked, microbatch_size=4, mesh=mesh)(params, examples(61, np.float32)))
    # Shards of parameters, each process with its own.
    specs = {{"w": jax.sharding.PartitionSpec(None, "data"), "v": None, "b": None}}
    sharded = jax.jit(lambda params: params, out_shardings=jax.tree.map(
        lambda spec: jax.sharding.NamedSharding(mesh, spec or jax.sharding.PartitionSpec()), specs,
        is_leaf=lambda spec: spec is None or isinstance(spec, jax.sharding.PartitionSpec)))(params)
    for reduce in ("once", "each"):
        value, grads = ab.value_and_grad(masked, microbatch_size=4, mesh=mesh, reduce=reduce)(sharded, batch)
        assert grads["w"].sharding.shard_shape(grads["w"].shape) == (5, 8)
        whole = jax.jit(lambda tree: tree, out_shardings=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
        keep(reduce, whole((value, grads)))
    # They plan alike, though one of them has less memory left than the other.
    from anybatch.planning import budget
    budget.memory_left = lambda devices: (2**30, 200_000)[found.index % 2]
    def planned(params, batch):
        sizes.append(ab.plan(masked, params, batch, mesh=mesh).microbatch_size)
        return ab.value_and_grad(masked, mesh=mesh)(params, batch)
    sizes = []
    wide = parameters(width=512, dtype=np.float32)
    many = distributed.global_batch(jax.tree.map(lambda leaf: np.tile(leaf, (8, *[1] * (leaf.ndim - 1))), mine), mesh)
    keep("planned", planned(wide, many))
    keep("traced", jax.jit(planned)(wide, many))
    assert sizes[0] < 128 and sizes[1] < 128, sizes
    print("sizes", sizes)
    print("done")
"""


def results_of(folder, name, index):
    saved = np.load(folder / f"{name}.{index}.npz")
    return saved["value"], {key: saved[key] for key in ("w", "v", "b")}


@pytest.mark.full
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_gradient_is_that_of_one_process_to_the_bit(tmp_path, count):
    body = BODY.format(folder=str(pathlib.Path(__file__).parents[1]), out=str(tmp_path))
    all_ended = run(body, tmp_path, count=count, devices=8 // count, timeout=120)
    for ended in all_ended:
        assert ended.status == 0, ended.output
    assert len({ended.output.partition("sizes")[2] for ended in all_ended}) == 1
    params, batch = parameters(width=64, dtype=np.float32), examples(128, np.float32)
    here = ab.value_and_grad(masked, microbatch_size=4, mesh=mesh_of(8), reproducible=True)(params, batch)
    plain = jax.value_and_grad(masked)
    for index in range(count):
        assert bits(results_of(tmp_path, "bits", index)) == bits(
            (here[0], {key: here[1][key] for key in ("w", "v", "b")})
        )
        for name, expected in (
            ("ragged", plain(params, examples(61, np.float32))),
            ("once", plain(params, batch)),
            ("each", plain(params, batch)),
            ("planned", plain(parameters(width=512, dtype=np.float32), batch)),
            ("traced", plain(parameters(width=512, dtype=np.float32), batch)),
        ):
            assert worst(results_of(tmp_path, name, index), expected) < 1e-5
    assert bits(results_of(tmp_path, "pairs", 0)) == bits(results_of(tmp_path, "pairs", 1))
