"""What does one step send, and is it bound by computation or by exchange, on up to 1,024 devices?

    python benchmarks/scaling.py                                          # CPU, about two minutes; nothing is run
    python benchmarks/scaling.py gpt2-scanned --devices 1 2 4 8 16 32     # one model, on these numbers of devices
    python benchmarks/scaling.py --examples 8                             # less to compute for each device
    python benchmarks/scaling.py --rails 1                                # one network card for a whole node

Every program is the complete model, compiled for simulated devices. Its collectives are counted as often as one run
executes them. `anybatch` reduces the gradient once in a step. `loop` is the usual first attempt, which reduces the
gradient of every microbatch. Expected: one reduction instead of one for each microbatch, each of 2(n-1)/n of the
bytes of the gradient; and the traffic projected from the program for 2 devices equals that of the programs for all
others.

Times are calculated from the constants below, not measured. A step computes as long on n devices as on one. Within a
node, a reduction goes around a ring over NVLink. Between nodes, one ring for each network card runs at the same time.
Computation and exchange do not overlap in this model, so a real step may be faster; no device waits for another, so it
may be slower.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from models import GPT, MODELS

import anybatch as ab
from anybatch.call.memory import readable
from anybatch.collectives import Traffic

DEFAULT_MODELS = ["gpt2-scanned", "gpt-1.3b-scanned"]
DEFAULT_DEVICES = [1, 2, 8, 64, 256, 1024]
HOWS = ("anybatch", "loop", "once")  # once: by hand, with the traffic that anybatch should have


@dataclasses.dataclass(frozen=True)
class Machine:
    """A cluster: nodes with GPUs like an H200."""

    flops: float = 989e12  # dense, in bfloat16, as its data sheet says
    utilisation: float = 0.4  # the share of it that training reaches
    nvlink: float = 450e9  # bytes a second that a device sends within its node
    network: float = 50e9  # bytes a second through a network card: 400 Gb/s
    latency: float = 5e-6  # seconds of a message from one device to the next
    node: int = 8  # devices in a node
    rails: int = 8  # network cards in a node that send at the same time

    def compute_seconds(self, flops: float) -> float:
        return flops / (self.flops * self.utilisation)

    def exchange_seconds(self, traffic: Traffic, devices: int) -> float:
        """The seconds of all collectives: within the nodes, and between them, where each card sends its part."""
        nodes = -(-devices // self.node)
        inside = traffic.at(min(devices, self.node)).seconds(self.nvlink, self.latency)
        between = traffic.at(nodes).seconds(self.network * self.rails, self.latency)
        if inside is None or between is None:
            raise ValueError(f"It is not known how often a step exchanges:\n{traffic}")
        return inside + between


def gradient(loss: Callable[..., Any], mesh: Mesh, microbatch_size: int, how: str) -> Callable[..., Any]:
    """A function for the mean loss and its gradient over a batch that is sharded over the mesh, in microbatches."""
    if how == "anybatch":
        return ab.value_and_grad(loss, mesh=mesh, axis_name="data", microbatch_size=microbatch_size)

    def value_and_grad(params: Any, batch: Any) -> Any:
        count = jax.tree.leaves(batch)[0].shape[0] // microbatch_size
        microbatches = jax.tree.map(lambda leaf: leaf.reshape(count, microbatch_size, *leaf.shape[1:]), batch)

        def step(carry: Any, microbatch: Any) -> Any:
            new = jax.value_and_grad(loss)(params, microbatch)
            new = lax.pmean(new, "data") if how == "loop" else new
            return jax.tree.map(lambda total, leaf: total + leaf.astype(total.dtype), carry, new), None

        zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), (jnp.zeros(()), params))
        total, _ = lax.scan(step, zero, microbatches)
        total = lax.pmean(total, "data") if how == "once" else total
        return jax.tree.map(lambda leaf: leaf / count, total)

    # With check_vma=True, JAX would put a reduction into the loop.
    return jax.shard_map(value_and_grad, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)


def traffic_of(model: GPT, devices: int, examples: int, microbatch_size: int, how: str) -> Traffic:
    """What one step sends, from the program compiled for `devices` devices with `examples` examples each."""
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])

    def placed(make: Callable[..., Any], spec: P) -> Any:
        shapes = jax.eval_shape(make, jax.random.key(0))
        place = NamedSharding(mesh, spec)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes)

    params = placed(model.init, P())
    batch = placed(lambda key: model.batch(key, devices * examples), P("data"))
    fun = gradient(model.loss, mesh, microbatch_size, how)
    return Traffic.of(jax.jit(fun).lower(params, batch).compile(), mesh)


def flops_of(model: GPT, examples: int) -> float:
    """FLOPs of forward and backward. Per token: 6 per parameter, and 12 * layers * width * context for attention."""
    count = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
    return (6 * count + 12 * model.layers * model.width * model.context) * examples * model.context


def report(name: str, options: argparse.Namespace, machine: Machine) -> None:
    """Prints a table for a model, and whether the projection from 2 devices holds."""
    model, usual = MODELS[name]
    examples = options.examples or usual
    size = max(1, examples // options.microbatches)
    compute = machine.compute_seconds(flops_of(model, examples))
    print(f"\n{name}, {examples} examples on each device in microbatches of {size}: computes {compute * 1e3:.0f} ms")
    print(f"  {'devices':>7}  {'how':8}  {'collectives':>11}  {'in loops':>8}  {'sends':>10}", end="")
    print(f"  {'exchange':>10}  {'of compute':>10}  bound by")
    pairs = {how: traffic_of(model, 2, examples, size, how) for how in options.how}
    differ = []
    for devices in options.devices:
        for how in options.how:
            traffic = pairs[how] if devices == 2 else traffic_of(model, devices, examples, size, how)
            projected = pairs[how].at(devices)
            if (traffic.executed, traffic.sent) != (projected.executed, projected.sent):
                differ.append(f"{how} on {devices} devices: {projected.sent} bytes projected, {traffic.sent} compiled")
            exchange = machine.exchange_seconds(traffic, devices)
            bound = "exchange" if exchange > compute else "compute"
            print(
                f"  {devices:>7}  {how:8}  {traffic.executed:>11}  {traffic.in_loops.executed:>8}"
                f"  {readable(traffic.sent or 0):>10}  {exchange * 1e3:>7.1f} ms  {exchange / compute:>10.1%}  {bound}",
                flush=True,
            )
    for difference in differ:
        print(f"  the projection from 2 devices does not hold: {difference}")
    if not differ:
        print("  the projection from 2 devices equals every compiled program")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name for name, (model, _) in MODELS.items() if isinstance(model, GPT)]
    parser.add_argument("models", nargs="*", default=DEFAULT_MODELS, help=", ".join(names))
    parser.add_argument("--devices", nargs="+", type=int, default=DEFAULT_DEVICES)
    parser.add_argument("--how", nargs="+", choices=HOWS, default=["anybatch", "loop"])
    parser.add_argument("--microbatches", type=int, default=8, help="on each device, in a step")
    parser.add_argument("--examples", type=int, help="on each device, in a step; as in the other benchmarks")
    for field in dataclasses.fields(Machine):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    options = parser.parse_args()
    machine = Machine(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Machine)})
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(2, *options.devices))
    print(f"JAX {jax.__version__}, calculated for {machine}")
    for name in options.models:
        report(name, options, machine)


if __name__ == "__main__":
    main()
