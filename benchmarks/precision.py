"""How far is an accumulated gradient from the one computed in float64, with 8 to 4,096 microbatches?

    python benchmarks/precision.py                             # CPU, about half a minute
    python benchmarks/precision.py --save benchmarks/results/precision.json
    python benchmarks/precision.py --examples 8192 --microbatches 8192

The batch has 4,096 examples, and only the number of microbatches changes. The model is an MLP with labels from another
MLP. It computes in float32, and its parameters are in float32 or in bfloat16, so that all errors come from rounding
gradients and sums. The error is |gradient - exact| / |exact|, over all parameters; `exact` is `jax.grad` of the full
batch in float64, at the same parameters.

`full batch` is `jax.grad` without microbatches. With bfloat16 parameters the gradient is rounded to 8 bits at the end,
an error of about 1.7e-3 in every way. `equal` examples are one example repeated: all microbatches then have the same
gradient, and a bfloat16 sum stops growing once it is 256 times its terms.

Found with JAX 0.10.2 and optax 0.2.8, for 8 and 4,096 microbatches of different examples. Float32 sums of float32
gradients: 1e-7 and 9e-7 by hand, in optax and in anybatch, and 6e-8 for 4,096 with `reproducible=True`. Bfloat16 sums,
by hand and in `optax.microbatching`: 3e-3 and 0.11, or 0.91 for equal examples. Float32 sums of bfloat16 gradients, as
in anybatch and `optax.MultiSteps`: 1.7e-3, as the full batch.
"""

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import record
from optax import microbatching

import anybatch as ab

WIDTHS = (32, 128, 128, 10)
PARAM_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def loss(params: Any, batch: Any) -> jax.Array:
    """The mean cross entropy of an MLP that computes in the dtype of its inputs."""
    hidden = batch["x"]
    for weights in params[:-1]:
        hidden = jnp.tanh(hidden @ weights.astype(hidden.dtype))
    log_probabilities = jax.nn.log_softmax(hidden @ params[-1].astype(hidden.dtype))
    return -jnp.mean(jnp.take_along_axis(log_probabilities, batch["y"][:, None], axis=1))


def make_params(seed: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.normal(size=shape) * shape[0] ** -0.5 for shape in itertools.pairwise(WIDTHS)]


def make_batch(examples: int, *, equal: bool) -> dict[str, np.ndarray]:
    """Inputs, and the labels that another MLP gives them. With `equal`, all examples are the first one."""
    inputs = np.random.default_rng(1).normal(size=(examples, WIDTHS[0]))
    inputs = np.broadcast_to(inputs[:1], inputs.shape) if equal else inputs
    hidden = inputs
    for weights in make_params(2)[:-1]:
        hidden = np.tanh(hidden @ weights)
    return {"x": inputs.astype(np.float32), "y": np.argmax(hidden @ make_params(2)[-1], axis=1).astype(np.int32)}


def by_scan(count: int, sum_dtype: Any) -> Callable[..., Any]:
    """The loop by hand: a scan over equal microbatches, one division at the end. `None` sums in the params' dtype."""

    def grad(params: Any, batch: Any) -> Any:
        microbatches = jax.tree.map(lambda leaf: leaf.reshape(count, -1, *leaf.shape[1:]), batch)

        def step(total: Any, microbatch: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, microbatch)), None

        zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, sum_dtype or leaf.dtype), params)
        total, _ = jax.lax.scan(step, zero, microbatches)
        return jax.tree.map(lambda leaf, like: (leaf / count).astype(like.dtype), total, params)

    return grad


def by_microbatching(count: int, accumulator: microbatching.AccumulationType) -> Callable[..., Any]:
    def grad(params: Any, batch: Any) -> Any:
        size = jax.tree.leaves(batch)[0].shape[0] // count
        return microbatching.microbatch(jax.grad(loss), 1, size, accumulator)(params, batch)

    return grad


def by_multisteps(count: int) -> Callable[..., Any]:
    """`optax.MultiSteps` with its defaults, around an optimizer that returns what it gets: the mean."""

    def grad(params: Any, batch: Any) -> Any:
        microbatches = jax.tree.map(lambda leaf: leaf.reshape(count, -1, *leaf.shape[1:]), batch)
        optimizer = optax.MultiSteps(optax.identity(), every_k_schedule=count)

        def step(carry: Any, microbatch: Any) -> Any:
            state, _ = carry
            updates, state = optimizer.update(jax.grad(loss)(params, microbatch), state, params)
            return (state, updates), None

        (_, updates), _ = jax.lax.scan(step, (optimizer.init(params), params), microbatches)
        return updates

    return grad


def by_anybatch(count: int, **options: Any) -> Callable[..., Any]:
    def grad(params: Any, batch: Any) -> Any:
        size = jax.tree.leaves(batch)[0].shape[0] // count
        return ab.grad(loss, microbatch_size=size, **options)(params, batch)

    return grad


WAYS: dict[str, Callable[[int], Callable[..., Any]]] = {
    "full batch": lambda count: jax.grad(loss),
    "scan, float32 sums": lambda count: by_scan(count, jnp.float32),
    "scan, bfloat16 sums": lambda count: by_scan(count, None),
    "optax microbatching, mean": lambda count: by_microbatching(count, microbatching.AccumulationType.MEAN),
    "optax microbatching, running mean": lambda count: by_microbatching(
        count, microbatching.AccumulationType.RUNNING_MEAN
    ),
    "optax MultiSteps": by_multisteps,
    "anybatch": by_anybatch,
    "anybatch, accumulator_dtype=None": lambda count: by_anybatch(count, accumulator_dtype=None),
    "anybatch, reproducible=True": lambda count: by_anybatch(count, reproducible=True),
}
# With float32 parameters these are the same programs as others.
ONLY_BFLOAT16 = ("scan, bfloat16 sums", "anybatch, accumulator_dtype=None")


def exact_gradient(params: Any, batch: Any) -> Any:
    """The gradient of the full batch, computed in float64 at the same parameters."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)), params)
        inputs = {"x": jnp.asarray(np.asarray(batch["x"], np.float64)), "y": jnp.asarray(batch["y"])}
        return jax.tree.map(np.asarray, jax.jit(jax.grad(loss))(wide, inputs))


def error(gradient: Any, exact: Any) -> float:
    """|gradient - exact| / |exact| over all parameters, in float64."""
    pairs = zip(*map(jax.tree.leaves, (gradient, exact)), strict=True)
    squares = sum(float(np.sum((np.asarray(mine, np.float64) - its) ** 2)) for mine, its in pairs)
    return (squares / sum(float(np.sum(leaf**2)) for leaf in jax.tree.leaves(exact))) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=4096)
    parser.add_argument("--microbatches", nargs="+", type=int, default=[8, 64, 512, 4096])
    record.add_option(parser)
    options = parser.parse_args()
    results = record.Results(options.save, packages=("optax",))
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, {options.examples} examples: errors")
    for data in ("different", "equal"):
        batch = make_batch(options.examples, equal=data == "equal")
        for name, dtype in PARAM_DTYPES.items():
            params = [jnp.asarray(leaf, jnp.float32).astype(dtype) for leaf in make_params(0)]
            exact = exact_gradient(params, batch)
            title = f"{name} parameters, {data} examples"
            print(f"\n{title:48}" + "".join(f"{count:>10}" for count in options.microbatches))
            for way, make in WAYS.items():
                if way in ONLY_BFLOAT16 and name != "bfloat16":
                    continue
                cells = []
                for count in options.microbatches:
                    # A new function each time: `jit` would find the program of another number of microbatches.
                    found = error(jax.jit(make(count))(params, batch), exact)
                    cells.append(f"{found:10.1e}")
                    results.add(way=way, param_dtype=name, data=data, microbatches=count, error=found)
                print(f"  {way:46}{''.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
