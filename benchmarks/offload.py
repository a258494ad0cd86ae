"""What does it save, and what does it cost, to keep the optimizer's state on the host?

    python benchmarks/offload.py                  # CPU, half a minute: whether the parameters are the same
    python benchmarks/offload.py --described      # the memory on an H200, on a machine without one: two minutes
    python benchmarks/offload.py --least          # the least memory of GPT 1.3B with AdamW, likewise: six minutes
    python benchmarks/offload.py --accelerator    # one 80 GiB GPU, about three minutes

AdamW, with `ab.train_step(offload=None)` and with `offload="optimizer"`. On the CPU and on a GPU, both train a GPT and
their parameters are compared; on a GPU (GPT 1.3B, 16 sequences of 1,024 tokens in microbatches of 1) also the peak of
the device's memory and the time of a step. The peak needs a process for each contestant, so the program starts itself.

With `--described`, XLA's compiler for GPUs compiles for an H200 that is only described to it, and nothing runs: install
`jax[cuda13]`. It compiles the update of 24 matrices of 2,048 x 2,048 in float32 alone, with windows of several sizes,
and a complete step of a GPT with 8 layers of width 2,048. Printed are the bytes on the device.

Found for a described H200 with JAX 0.11.2: the update alone takes 1,536 MiB on the device, all of them arguments; with
offload 768 MiB of arguments (parameters and gradients) and 96 of temporaries (6 of the 48 moments). Without a window
XLA has all moments there at once: 800 MiB of temporaries. The complete step takes 9,661 and 5,787 MiB: what is saved
are the 3,874 MiB of moments, and the temporaries are the same, since those of the gradient are larger than the window.
Found with `--least` for GPT 1.3B in float32, 16 sequences of 1,024 tokens one at a time: the complete step takes
24.2 GiB on the device as it is, 22.4 GiB with remat=1.0, and 12.6 GiB with offload="optimizer" as well, with 9.8 GiB on
the host: a factor of 1.9. With bfloat16 parameters and float32 masters on the host it takes 9.4 GiB, a factor of 2.6.
"""

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import record
from blocks import H200
from jax.experimental import topologies
from models import GPT, MODELS

import anybatch as ab
from anybatch.call.placement import HOST, SMALL
from anybatch.gradients.computation import Gradient
from anybatch.training import offload
from anybatch.training.arrays import split_arrays
from anybatch.training.state import ANYBATCH, NewGradient
from anybatch.training.update import StepInputs

WAYS = (None, "optimizer")
MIB = 2**20


def trained(name: str, way: str | None, steps: int, size: int) -> tuple[Any, dict[str, Any]]:
    """A model after some steps, and what the steps took."""
    model, examples = MODELS[name]
    step = ab.train_step(model.loss, optax.adamw(1e-4), microbatch_size=size, offload=way)
    state = step.init(lambda: jax.jit(model.init)(jax.random.key(0)))
    batch = jax.jit(lambda key: model.batch(key, examples))(jax.random.key(1))
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - start)
    stats = jax.devices()[0].memory_stats() or {}
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.sharding.memory_kind == HOST]
    took = {
        "host_bytes": sum(leaf.nbytes for leaf in moments),
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "milliseconds": 1e3 * float(np.median(seconds[1:])),
        "loss": float(metrics.loss),
    }
    return state.params, took


def on_the_cpu(add: Any) -> None:
    """Whether both ways end with the same parameters."""
    ends = [trained("gpt-tiny", way, 4, 16) for way in WAYS]
    pairs = list(zip(*(map(np.asarray, jax.tree.leaves(params)) for params, _ in ends), strict=True))
    for way, (_, took) in zip(WAYS, ends, strict=True):
        add(question="bits", way=way, host_bytes=took["host_bytes"], loss=took["loss"])
        print(f"offload={way!s:10} {took['host_bytes'] / MIB:8.1f} MiB on the host, loss {took['loss']:.8f}")
    same = sum(bool((one == two).all()) for one, two in pairs)
    print(
        f"{same} of {len(pairs)} parameters have the same bits; largest difference "
        f"{max(float(np.abs(one - two).max()) for one, two in pairs):.3g}"
    )


def on_a_gpu(add: Any) -> None:
    """Both ways, each in a process of its own."""
    rows = []
    for way in WAYS:
        command = [sys.executable, __file__, "--accelerator", "--way", str(way)]
        rows.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1]))
        row = rows[-1] | {
            "memory_ratio": rows[-1]["peak_bytes"] / rows[0]["peak_bytes"],
            "time_ratio": rows[-1]["milliseconds"] / rows[0]["milliseconds"],
        }
        add(question="gpt-1.3b", way=way, **row)
        print(
            f"offload={way!s:10} peak {row['peak_bytes'] / 2**30:6.2f} GiB {row['memory_ratio']:.3f}, on the host "
            f"{row['host_bytes'] / 2**30:5.2f} GiB, {row['milliseconds']:8.1f} ms {row['time_ratio']:.3f}, "
            f"loss {row['loss']:.6f}, norm {row['norm']:.9g}",
            flush=True,
        )


def one_way(way: str | None) -> None:
    params, took = trained("gpt-1.3b", way, 6, 1)
    norm = float(optax.global_norm(params))
    print(json.dumps(took | {"norm": norm, "device": jax.devices()[0].device_kind}))


def described(add: Any) -> None:
    """The bytes on an H200 that is not there."""
    device = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1").devices[0]
    matrices = {f"w{number}": jax.ShapeDtypeStruct((2048, 2048), jnp.float32) for number in range(24)}
    optimizer = optax.adamw(1e-3)

    def update(state: Any, arrays: list[Any], grads: Any) -> Any:
        norm = optax.global_norm(grads)
        new = NewGradient(grads, jnp.isfinite(norm), {}, optimizer, {})
        return offload.updated(ANYBATCH, state, arrays, new, norm)

    usual = offload.WINDOW
    for way, window in ((None, usual), *(("optimizer", window) for window in (1, 2, 4, 8, 48))):  # 48: all at once
        offload.WINDOW = window
        show("24 matrices", way, window, compiled(update, matrices, optimizer, matrices, way, device), add)
    offload.WINDOW = usual

    model = GPT(layers=8, width=2048, heads=16)
    for way in WAYS:
        show("GPT", way, usual, complete_step(model, optimizer, way, device), add)


def least(add: Any) -> None:
    """The bytes of a step of GPT 1.3B on an H200 that is not there, with less and less of it on the device."""
    device = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1").devices[0]
    adamw, window = optax.adamw(1e-3), offload.WINDOW
    for dtype, optimizer, way, remat in (
        (jnp.float32, adamw, None, None),
        (jnp.float32, adamw, None, 1.0),
        (jnp.float32, adamw, "optimizer", 1.0),
        (jnp.bfloat16, with_masters(adamw), "optimizer", 1.0),
    ):
        model = GPT(layers=24, width=2048, heads=16, param_dtype=dtype)
        program = complete_step(model, optimizer, way, device, remat=remat)
        show(f"1.3B, {dtype.__name__}, remat={remat}", way, window, program, add)


def with_masters(inner: Any) -> Any:
    """An optimizer that keeps float32 copies of narrow parameters, updates these, and rounds them."""

    def widened(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)

    def init(params: Any) -> Any:
        return widened(params), inner.init(widened(params))

    def update(grads: Any, state: Any, params: Any) -> Any:
        masters, inner_state = state
        updates, inner_state = inner.update(widened(grads), inner_state, masters)
        masters = optax.apply_updates(masters, updates)
        changes = jax.tree.map(lambda new, old: (new - old.astype(new.dtype)).astype(old.dtype), masters, params)
        return changes, (masters, inner_state)

    return optax.GradientTransformation(init, update)


def complete_step(model: GPT, optimizer: Any, way: str | None, device: Any, **options: Any) -> Any:
    """The program of a step with 16 sequences, one at a time."""
    params = jax.eval_shape(model.init, jax.random.key(0))
    batch = jax.eval_shape(lambda key: model.batch(key, 16), jax.random.key(1))
    step = ab.train_step(model.loss, optimizer, microbatch_size=1, **options)

    def complete(state: Any, arrays: list[Any], batch: Any) -> Any:
        inputs = StepInputs(ANYBATCH, *ANYBATCH.split(state), *split_arrays((batch, {})))
        inputs = inputs.with_arrays(arrays, inputs.batch_arrays)
        gradient: Gradient = step._update.gradient(inputs)
        return step._update.results(inputs, gradient.options)

    return compiled(complete, params, optimizer, batch, way, device)


def compiled(fun: Any, params: Any, optimizer: Any, argument: Any, way: str | None, device: Any) -> Any:
    """The program of `fun(state, arrays, argument)`, with the state donated, and the optimizer's on the host."""
    state = jax.eval_shape(lambda params: ab.TrainState.create(params, optimizer), params)
    types, structure = jax.tree.flatten(state)
    large = [each.size * each.dtype.itemsize >= SMALL for each in types]
    arrays = jax.tree.unflatten(structure, map(np.empty_like, [np.empty(())] * len(types)))  # only their names count
    masks = zip(ANYBATCH.are_optimizers(arrays), large, strict=True)
    on_host = [way is not None and is_optimizer and is_large for is_optimizer, is_large in masks]
    place = jax.sharding.SingleDeviceSharding(device)
    host = jax.sharding.SingleDeviceSharding(device, memory_kind=HOST)
    flat = [
        jax.core.ShapedArray(each.shape, each.dtype, memory_space=jax.memory.Space.Host)
        if hosted
        else jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=place)
        for each, hosted in zip(types, on_host, strict=True)
    ]
    argument = jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=place), argument)
    lowered = jax.jit(
        lambda arrays, argument: fun(jax.tree.unflatten(structure, arrays), arrays, argument),
        donate_argnums=0,
        out_shardings=([host if hosted else place for hosted in on_host], None),
        keep_unused=True,
    ).lower(flat, argument)
    mark_as_hosted(lowered, [number for number, hosted in enumerate(on_host) if hosted])
    return lowered.compile()


def mark_as_hosted(lowered: Any, positions: list[int]) -> None:
    """Says of some arguments that they are on the host. A described device has no memories that JAX could name."""
    from jaxlib.mlir import ir

    module = lowered.compiler_ir()
    with module.context:
        functions = [each for each in module.body.operations if "arg_attrs" in each.attributes]
        main = next(each for each in functions if ir.StringAttr(each.attributes["sym_name"]).value == "main")
        attributes = [{each.name: each.attr for each in ir.DictAttr(one)} for one in main.attributes["arg_attrs"]]
        for position in positions:
            attributes[position]["mhlo.memory_kind"] = ir.StringAttr.get(HOST)
        main.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(each) for each in attributes])


def show(question: str, way: str | None, window: int, program: Any, add: Any) -> None:
    stats = program.memory_analysis()
    row = {
        "arguments_bytes": stats.argument_size_in_bytes,
        "temporaries_bytes": stats.temp_size_in_bytes,
        "new_results_bytes": stats.output_size_in_bytes - stats.alias_size_in_bytes,
        "host_bytes": stats.host_argument_size_in_bytes,
    }
    add(question=question, way=way, window=window, **row)
    total = row["arguments_bytes"] + row["temporaries_bytes"] + row["new_results_bytes"]
    print(
        f"{question:32} offload={way!s:10} window {window}: on the device {total / MIB:8.1f} MiB, of them arguments "
        f"{row['arguments_bytes'] / MIB:8.1f} and temporaries {row['temporaries_bytes'] / MIB:8.1f}; on the host "
        f"{row['host_bytes'] / MIB:8.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", action="store_true", help="train GPT 1.3B on a GPU")
    parser.add_argument("--described", action="store_true", help="compile for an H200 that is not there, run nothing")
    parser.add_argument("--least", action="store_true", help="the same, for GPT 1.3B in less and less memory")
    parser.add_argument("--way", choices=list(map(str, WAYS)), help=argparse.SUPPRESS)
    record.add_option(parser)
    options = parser.parse_args()
    if options.way is not None:
        one_way(None if options.way == "None" else options.way)
        return
    is_described = options.described or options.least
    if is_described:
        models.ATTENTION = "cudnn"
    # With --accelerator, this process must not take the memory of the GPU.
    kind = "described H200" if is_described else "a GPU" if options.accelerator else jax.devices()[0].device_kind
    print(f"{kind}, JAX {jax.__version__}, anybatch {ab.__version__}")
    results = record.Results(options.save, device=kind)
    (least if options.least else described if options.described else on_a_gpu if options.accelerator else on_the_cpu)(
        results.add
    )


if __name__ == "__main__":
    main()
