"""What does each way to accumulate a data-parallel gradient send, which memory does it take, and is it right?

    python benchmarks/mesh_ways.py                     # CPU, 8 simulated devices, about two minutes
    python benchmarks/mesh_ways.py --save benchmarks/results/mesh_ways.json
    python benchmarks/mesh_ways.py --microbatches 8 --table      # also the collectives of each program

Compiles each way for 8 devices with a batch that is sharded over them, and runs it. Collectives are counted as often as
one run executes them (`anybatch.collectives`). Bytes are those that each device sends, on a ring. Temporaries are
XLA's, for one device. `work` is the arithmetic of matrix products on one device, divided by its eighth of that of the
full batch. The difference is |gradient - full batch| / |full batch|, with `jax.value_and_grad` on one device; in
float32, a right one is below 1e-5. `loss` is a mean over the examples, or a masked mean with weights that differ
between examples. A way that averages means is exact for the first and wrong for the second.

XLA for the CPU neither makes reduce-scatters of all-reduces nor combines all collectives, as XLA for GPUs does. So the
number of collectives may be smaller on a GPU. XLA also moves the gathers of sharded parameters out of the loop, unless
a barrier ties them to the microbatch.

Found with JAX 0.10.2: a plain reshape under `jit` gathers the batch, and every device computes all of it (work 8). The
ways that XLA or JAX reduces by itself have an all-reduce in every microbatch. `mesh=` has one, as the best loop by
hand, and is right for the masked mean too. A `pmean` or `psum` of what JAX has added up already is 8 times too large.
"""

import argparse
import dataclasses
import math
import os
import re
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import record
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax import microbatching

import anybatch as ab
from anybatch.call.memory import readable
from anybatch.collectives import Traffic
from anybatch.jaxprs import versions
from anybatch.jaxprs.hlo import Program

DEVICES, LAYERS, WIDTH = 8, 8, 256
EXAMPLES = 4096
MESH = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
ROWS = NamedSharding(MESH, P("data"))
SPECS = [P("data", None)] * LAYERS

Loss = Callable[[Any, Any], jax.Array]
Gradient = Callable[[Any, Any], Any]


def outputs(params: Any, batch: Any) -> jax.Array:
    """The squared error of each example."""
    hidden = batch["x"]
    for weights in params:
        hidden = hidden + jnp.tanh(hidden @ weights)
    return jnp.mean((hidden - batch["y"]) ** 2, axis=1)


def mean_loss(params: Any, batch: Any) -> jax.Array:
    return jnp.mean(outputs(params, batch))


def masked_loss(params: Any, batch: Any) -> jax.Array:
    return jnp.sum(outputs(params, batch) * batch["mask"]) / jnp.sum(batch["mask"])


def problem() -> tuple[Any, Any]:
    generator = np.random.default_rng(0)
    params = [np.float32(generator.normal(size=(WIDTH, WIDTH)) * WIDTH**-0.5) for _ in range(LAYERS)]
    inputs, targets = generator.normal(size=(2, EXAMPLES, WIDTH))
    # Documents are sorted by length, so the weights of the devices and of the microbatches differ.
    mask = np.linspace(0.1, 1, EXAMPLES)
    return params, {"x": np.float32(inputs * mask[:, None]), "y": np.float32(targets), "mask": np.float32(mask)}


def contiguous(batch: Any, count: int) -> Any:
    """Microbatches of neighbouring rows: the usual reshape."""
    return jax.tree.map(lambda leaf: leaf.reshape(count, -1, *leaf.shape[1:]), batch)


def strided(batch: Any, count: int) -> Any:
    """Microbatches with rows from every device: microbatch i has rows i, i + count, i + 2 count, ..."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, count, *leaf.shape[1:]).swapaxes(0, 1), batch)


def sums(grad: Gradient, params: Any, microbatches: Any, initial: Any = None) -> Any:
    """The sum of the gradients of the microbatches, by a scan."""

    def step(total: Any, microbatch: Any) -> Any:
        return jax.tree.map(jnp.add, total, grad(params, microbatch)), None

    return lax.scan(step, jax.tree.map(jnp.zeros_like, params if initial is None else initial), microbatches)[0]


def divided(tree: Any, by: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf / by, tree)


# Under jit, the batch is one array that is sharded over the devices, and XLA inserts the collectives.


def jit_reshape(loss: Loss, count: int) -> Gradient:
    return lambda params, batch: divided(sums(jax.grad(loss), params, contiguous(batch, count)), count)


def jit_reshape_constrained(loss: Loss, count: int) -> Gradient:
    def grad(params: Any, batch: Any) -> Any:
        place = NamedSharding(MESH, P(None, "data"))
        microbatches = lax.with_sharding_constraint(contiguous(batch, count), place)
        return divided(sums(jax.grad(loss), params, microbatches), count)

    return grad


def jit_strided(loss: Loss, count: int) -> Gradient:
    return lambda params, batch: divided(sums(jax.grad(loss), params, strided(batch, count)), count)


def jit_microbatching(loss: Loss, count: int) -> Gradient:
    """`optax.microbatching`, which takes rows from every device by itself."""
    mean = microbatching.AccumulationType.MEAN
    return microbatching.microbatch(jax.grad(loss), 1, EXAMPLES // count, mean)


def jit_multisteps(loss: Loss, count: int) -> Gradient:
    """`optax.MultiSteps` in a scan, around an optimizer that returns the gradient."""

    def grad(params: Any, batch: Any) -> Any:
        optimizer = optax.MultiSteps(optax.identity(), every_k_schedule=count)

        def step(carry: Any, microbatch: Any) -> Any:
            updates, state = optimizer.update(jax.grad(loss)(params, microbatch), carry[0], params)
            return (state, updates), None

        return lax.scan(step, (optimizer.init(params), params), strided(batch, count))[0][1]

    return grad


def jit_anybatch(loss: Loss, count: int) -> Gradient:
    return ab.grad(loss, microbatch_size=EXAMPLES // count)


# In shard_map each device sees its own rows, and the collectives are written by hand.


def mapped(local: Gradient, specs: Any = None, **options: Any) -> Gradient:
    specs = P() if specs is None else specs
    return jax.shard_map(local, mesh=MESH, in_specs=(specs, P("data")), out_specs=specs, **options)


def map_each(loss: Loss, count: int) -> Gradient:
    """The gradient of every microbatch is averaged over the devices, then added."""

    def local(params: Any, batch: Any) -> Any:
        each = lambda *args: lax.pmean(jax.grad(loss)(*args), "data")  # noqa: E731
        return divided(sums(each, params, contiguous(batch, count)), count)

    return mapped(local, check_vma=False)


def map_once(loss: Loss, count: int) -> Gradient:
    """Each device adds up its own gradients. They are averaged over the devices at the end."""

    def local(params: Any, batch: Any) -> Any:
        params = jax.tree.map(lambda leaf: lax.pcast(leaf, "data", to="varying"), params)
        return lax.pmean(divided(sums(jax.grad(loss), params, contiguous(batch, count)), count), "data")

    return mapped(local)


def map_default_pmean(loss: Loss, count: int) -> Gradient:
    """The same without `pcast`: JAX adds up the gradients of replicated parameters, in every microbatch."""

    def local(params: Any, batch: Any) -> Any:
        return lax.pmean(divided(sums(jax.grad(loss), params, contiguous(batch, count)), count), "data")

    return mapped(local)


def map_default_psum(loss: Loss, count: int) -> Gradient:
    """A `psum` of what JAX has added up, in every microbatch, divided by the number of devices."""

    def local(params: Any, batch: Any) -> Any:
        each = lambda *args: lax.psum(jax.grad(loss)(*args), "data")  # noqa: E731
        return divided(sums(each, params, contiguous(batch, count)), count * lax.axis_size("data"))

    return mapped(local)


def map_default_right(loss: Loss, count: int) -> Gradient:
    """What JAX has added up, divided by the number of devices."""

    def local(params: Any, batch: Any) -> Any:
        return divided(sums(jax.grad(loss), params, contiguous(batch, count)), count * lax.axis_size("data"))

    return mapped(local)


def pmap_once(loss: Loss, count: int) -> Gradient:
    """The older way: `pmap` with rows folded to (devices, rows of a device), and a `pmean` at the end."""

    def local(params: Any, batch: Any) -> Any:
        return lax.pmean(divided(sums(jax.grad(loss), params, contiguous(batch, count)), count), "data")

    return jax.pmap(local, axis_name="data", in_axes=(None, 0), out_axes=None)


def mesh_anybatch(loss: Loss, count: int) -> Gradient:
    return ab.grad(loss, mesh=MESH, microbatch_size=EXAMPLES // DEVICES // count)


# Parameters that are sharded over the devices (FSDP).


def fsdp_gather_each(loss: Loss, count: int) -> Gradient:
    """Gathers the parameters of a layer where they are used, in every microbatch; JAX then scatters its gradient."""

    def local(params: Any, batch: Any) -> Any:
        def gathered_loss(params: Any, batch: Any) -> jax.Array:
            return loss([lax.all_gather(leaf, "data", tiled=True) for leaf in params], batch)

        return divided(sums(jax.grad(gathered_loss), params, contiguous(batch, count)), count * DEVICES)

    return mapped(local, SPECS, check_vma=False)


def fsdp_gather_each_barrier(loss: Loss, count: int) -> Gradient:
    """The same with a barrier, so that XLA leaves the gathers in the loop."""

    def local(params: Any, batch: Any) -> Any:
        def gathered_loss(params: Any, batch: Any) -> jax.Array:
            params, batch = lax.optimization_barrier((params, batch))
            return loss([lax.all_gather(leaf, "data", tiled=True) for leaf in params], batch)

        return divided(sums(jax.grad(gathered_loss), params, contiguous(batch, count)), count * DEVICES)

    return mapped(local, SPECS, check_vma=False)


def fsdp_gather_once(loss: Loss, count: int) -> Gradient:
    """Gathers the parameters once, adds up full gradients, and scatters their sum once."""

    def local(params: Any, batch: Any) -> Any:
        full = [lax.all_gather(leaf, "data", tiled=True) for leaf in params]
        total = sums(jax.grad(loss), full, contiguous(batch, count))
        return [lax.psum_scatter(leaf, "data", tiled=True) / (count * DEVICES) for leaf in total]

    return mapped(local, SPECS, check_vma=False)


def fsdp_anybatch(reduce: str) -> Callable[[Loss, int], Gradient]:
    def make(loss: Loss, count: int) -> Gradient:
        size = EXAMPLES // DEVICES // count
        return ab.grad(loss, mesh=MESH, param_specs=SPECS, reduce=reduce, microbatch_size=size)

    return make


REPLICATED: dict[str, Callable[[Loss, int], Gradient]] = {
    "jit, reshape to (n, m, ...)": jit_reshape,
    "jit, reshape and constrain": jit_reshape_constrained,
    "jit, rows of every device": jit_strided,
    "optax microbatching": jit_microbatching,
    "optax MultiSteps": jit_multisteps,
    "anybatch, without mesh=": jit_anybatch,
    "shard_map, pmean of each": map_each,
    "shard_map, pmean at the end": map_once,
    "shard_map, JAX's own psum": map_default_right,
    "shard_map, pmean after JAX's psum": map_default_pmean,
    "shard_map, psum after JAX's psum": map_default_psum,
    "pmap, pmean at the end": pmap_once,
    "anybatch, mesh=": mesh_anybatch,
}
SHARDED: dict[str, Callable[[Loss, int], Gradient]] = {
    "jit, reshape to (n, m, ...)": jit_reshape,
    "jit, rows of every device": jit_strided,
    "optax microbatching": jit_microbatching,
    "shard_map, gather in each": fsdp_gather_each,
    "shard_map, gather in each, barrier": fsdp_gather_each_barrier,
    "shard_map, gather once": fsdp_gather_once,
    'anybatch, reduce="each"': fsdp_anybatch("each"),
    'anybatch, reduce="once"': fsdp_anybatch("once"),
}


@dataclasses.dataclass(frozen=True)
class Found:
    """One way, compiled and run."""

    traffic: Traffic
    temporaries: int
    work: float
    gradient: Any


def measure(fun: Gradient, params: Any, batch: Any) -> Found:
    """Compiles a way and runs it. Gradients stay where the parameters are."""
    if hasattr(fun, "lower"):  # pmap, which takes rows by device
        batch = jax.tree.map(lambda leaf: np.asarray(leaf).reshape(DEVICES, -1, *leaf.shape[1:]), batch)
        lowered = fun.lower(jax.tree.map(np.asarray, params), batch)
    else:
        place = jax.tree.map(lambda leaf: leaf.sharding, params)
        lowered = jax.jit(lambda *args: fun(*args), out_shardings=place).lower(params, batch)
    compiled = lowered.compile()
    gradient = fun(params, batch) if hasattr(fun, "lower") else compiled(params, batch)
    # Three products for each layer, one of them for the gradient of its input, which the first layer does not need.
    share = (3 * LAYERS - 1) * 2 * WIDTH * WIDTH * EXAMPLES // DEVICES
    work = product_flops(compiled.as_text()) / share
    return Found(Traffic.of(compiled), versions.temporaries(compiled), work, gradient)


def product_flops(text: str) -> float:
    """The arithmetic of all matrix products that one device executes, loops counted by their turns."""
    program = Program(text)

    def walk(name: str, times: int) -> float:
        total = 0.0
        shapes = {line.split(" = ")[0].split()[-1].lstrip("%"): line for line in lines(name)}
        for each in program[name]:
            if each.op == "dot":
                result = _dimensions(each.shape)
                operand = re.match(r"\s*(?:(\w+\[[\d,]*\])\S*\s+)?%?([\w.\-]+)", each.attributes)
                left = operand[1] or shapes[operand[2]].split(" = ")[1]
                axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", each.attributes)[1]
                contracted = math.prod(_dimensions(left)[int(axis)] for axis in axes.split(",") if axis)
                total += 2 * times * contracted * math.prod(result)
            turns = each.trip_count if each.op == "while" else 1
            for attribute in ("body", "to_apply", "calls"):
                if each.op in ("while", "call", "fusion"):
                    total += sum(walk(inner, times * (turns or 1)) for inner in each.names(attribute))
        return total

    def lines(name: str) -> list[str]:
        return [each.line for each in program[name]]

    return walk(program.entry, 1)


def _dimensions(shape: str) -> list[int]:
    return [int(number) for number in re.search(r"\[([\d,]*)\]", shape)[1].split(",") if number]


def difference(gradient: Any, expected: Any) -> float:
    """|gradient - expected| / |expected| over all parameters."""
    pairs = [(np.float64(x), np.float64(y)) for x, y in zip(gradient, expected, strict=True)]
    return float(np.sqrt(sum(np.sum((x - y) ** 2) for x, y in pairs) / sum(np.sum(y**2) for _, y in pairs)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", nargs="+", type=int, default=[8, 32], help="on each device, in a step")
    parser.add_argument("--table", action="store_true", help="print the collectives of each program")
    record.add_option(parser)
    options = parser.parse_args()
    results = record.Results(options.save, device=f"{DEVICES} simulated devices, cpu", packages=("optax",))
    params, batch = problem()
    size = sum(leaf.nbytes for leaf in params)
    print(f"JAX {jax.__version__}, {DEVICES} simulated devices, parameters of {readable(size)}, {EXAMPLES} examples")
    losses: dict[str, Loss] = {"mean": mean_loss, "masked mean": masked_loss}
    expected = {name: jax.jit(jax.grad(loss))(params, batch) for name, loss in losses.items()}
    placed_batch = jax.device_put(batch, ROWS)
    for kind, specs, ways in (("replicated", [P()] * LAYERS, REPLICATED), ("sharded", SPECS, SHARDED)):
        placed = [jax.device_put(leaf, NamedSharding(MESH, spec)) for leaf, spec in zip(params, specs, strict=True)]
        for count in options.microbatches:
            print(f"\n{kind} parameters, {count} microbatches")
            print(f"  {'':34} {'reduce':>6} {'gather':>6} {'scatter':>7} {'other':>5} {'sent':>10}", end="")
            print(f" {'temporaries':>11} {'work':>5} {'mean':>9} {'masked mean':>11}")
            for way, make in ways.items():
                found = {name: measure(make(loss, count), placed, placed_batch) for name, loss in losses.items()}
                shown = []
                for name, each in found.items():
                    kinds = dict(each.traffic.by_kind)
                    counts = [kinds.pop(k, 0) for k in ("all-reduce", "all-gather", "reduce-scatter")]
                    shown.append(difference(each.gradient, expected[name]))
                    results.add(
                        way=way,
                        params=kind,
                        loss=name,
                        microbatches=count,
                        all_reduces=counts[0],
                        all_gathers=counts[1],
                        reduce_scatters=counts[2],
                        other=sum(kinds.values()),
                        bytes_per_device=each.traffic.sent,
                        params_bytes=size,
                        temporaries_bytes=each.temporaries,
                        work=each.work,
                        difference=shown[-1],
                    )
                    if name == "mean":
                        first = f"{counts[0]:>6} {counts[1]:>6} {counts[2]:>7} {sum(kinds.values()):>5}"
                        first += f" {readable(each.traffic.sent):>10} {readable(each.temporaries):>11} {each.work:5.2f}"
                print(f"  {way:34} {first} {shown[0]:9.1e} {shown[1]:11.1e}", flush=True)
                if options.table:
                    print(found["mean"].traffic)


if __name__ == "__main__":
    main()
