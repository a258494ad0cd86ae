"""Does a gradient have the same bits if it is run again, compiled again, or computed on another number of devices?

    python benchmarks/bits.py gpt-tiny:8                     # CPU: on 1, 2, 4 and 8 simulated devices
    python benchmarks/bits.py gpt2-scanned:8                 # all GPUs of this machine
    XLA_FLAGS="--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0" python benchmarks/bits.py gpt2-scanned:8
    python benchmarks/bits.py --indexing                     # are results of indexing right with these flags? seconds

Prints hashes of value and gradient. Expected: with `reproducible=True` one hash for all numbers of devices from 2 on,
and for 1 device too if XLA rewrites no division; without it, different hashes. A GPU needs the flags: without them it
adds up some gradients in the order in which threads arrive, and chooses kernels by timing them.

`--indexing` is there because JAX 0.5.3 returned a wrong result with `--xla_gpu_deterministic_ops=true` on a GPU:
`jnp.zeros(4, int).at[jnp.arange(4)].set(jnp.array([1, 2, 0, 0]))` was `[0, 2, 0, 0]` (jax-ml/jax, "breaks simple
indexing"). Scatters with batch dimensions also mixed up examples until openxla/xla's "Enable deterministic scatter for
batched operations". A process with the flags and one without compute these and other selections, and the gradients of
an embedding, of a cross entropy and of a GPT. Each result is compared with NumPy, where NumPy has it, and with the
process without the flags. Expected: all agree; with the flags, two runs have the same bits. Found on an H200 with JAX
0.11.2: all 25 agree, and all have the same bits again; without the flags, the gradient of the GPT does not.
"""

import argparse
import hashlib
import itertools
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import models
import numpy as np
import record
from jax.sharding import AxisType
from models import MODELS

import anybatch as ab

FLAGS = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"


def fingerprint(result: Any) -> str:
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(result):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()[:12]


def selections() -> Iterator[tuple[str, Any, Any]]:
    """A name, a function without arguments to run in JAX, and what NumPy says; None if NumPy has no such function."""
    draw = np.random.default_rng(0)
    reported = np.array([1, 2, 0, 0])
    yield "reported: at[positions].set", lambda: _set(reported, np.arange(4)), reported
    for size in (5, 127, 4096):
        order, numbers = draw.permutation(size), draw.integers(1, 100, size)
        expected = np.zeros(size, int)
        expected[order] = numbers
        yield f"at[permutation of {size}].set", lambda n=numbers, o=order: _set(n, o), expected
        yield f"gather of {size}", lambda n=numbers, o=order: jnp.asarray(n)[o], numbers[order]
    rows, numbers = draw.integers(0, 16, 4096), draw.integers(-9, 9, (4096, 8))
    expected = np.zeros((16, 8), int)
    np.add.at(expected, rows, numbers)
    yield "at[repeated rows].add, integers", lambda: jnp.zeros((16, 8), int).at[rows].add(numbers), expected
    yield "segment_sum", lambda: jax.ops.segment_sum(jnp.asarray(numbers), jnp.asarray(rows), 16), expected
    columns = draw.integers(0, 8, 4096)
    expected = np.zeros((16, 8), int)
    np.add.at(expected, (rows, columns), numbers[:, 0])
    added = numbers[:, 0]
    yield "at[row, column].add, integers", lambda: jnp.zeros((16, 8), int).at[rows, columns].add(added), expected
    for name, of_numpy in (("max", np.maximum), ("min", np.minimum), ("multiply", np.multiply)):
        expected = np.ones(16, int)
        few = 1 + (added % 3 == 0)  # 1 or 2, so that the products of 30 rows stay small
        of_numpy.at(expected, rows[:30], few[:30])
        yield f"at[rows].{name}", lambda name=name, few=few: _updated(name, rows[:30], few[:30]), expected
    inside = np.array([3, 50, -1, 2])  # 50 is out of bounds and dropped
    expected = np.array([0, 0, 8, 5, 0, 0, 0, 7])
    values = np.array([5, 6, 7, 8])
    yield "at[out of bounds].set", lambda: jnp.zeros(8, int).at[inside].set(values, mode="drop"), expected
    table, which = draw.normal(size=(6, 32, 50)).astype(np.float32), draw.integers(0, 50, (6, 32, 4))
    yield (
        "take_along_axis",
        lambda: jnp.take_along_axis(jnp.asarray(table), which, -1),
        np.take_along_axis(table, which, -1),
    )
    expected = np.zeros((6, 32, 50), np.float32)
    examples, tokens = np.arange(6)[:, None, None], np.arange(32)[None, :, None]
    np.add.at(expected, (examples, tokens, which), 1.0)
    by_index = jax.grad(lambda table: jnp.sum(jnp.take_along_axis(table, which, -1)))
    yield "gradient of take_along_axis", lambda: by_index(jnp.asarray(table)), expected
    order = np.stack([draw.permutation(64) for _ in range(5)])
    numbers = draw.integers(1, 100, (5, 64))
    expected = np.zeros((5, 64), int)
    np.put_along_axis(expected, order, numbers, 1)
    yield "vmap of at[permutation].set", lambda: jax.vmap(_set)(numbers, order), expected
    ids = draw.integers(0, 16, (5, 64))
    expected = np.zeros((5, 16), int)
    np.add.at(expected, (np.arange(5)[:, None], ids), numbers)
    summed = jax.vmap(lambda number, index: jnp.zeros(16, int).at[index].add(number))
    yield "vmap of at[repeated rows].add", lambda: summed(numbers, ids), expected
    for words, count, width in ((100, 1000, 32), (50304, 8192, 768)):
        inputs = draw.integers(0, words, count)
        # Whole numbers, so that sums in any order are exact.
        cotangents = draw.integers(-4, 5, (count, width)).astype(np.float32)
        expected = np.zeros((words, width), np.float32)
        np.add.at(expected, inputs, cotangents)
        for dtype in (jnp.float32, jnp.bfloat16):
            gradient = _embedding_gradient(jnp.zeros((words, width), dtype), inputs, cotangents)
            yield f"gradient of {count} of {words} embeddings, {dtype.__name__}", gradient, expected


def equal_rows() -> Iterator[tuple[str, Any, Any]]:
    """Rows that are the same have the same softmax: a report about the same flag with JAX 0.4.38."""
    rows = jax.random.uniform(jax.random.key(42), (1, 4, 1765, 1765), jnp.bfloat16)

    # The comparison is a program of its own: inside one program, XLA may compare values before they are rounded.
    soft = jax.jit(lambda rows: jax.nn.softmax(jnp.repeat(rows, 8, axis=0), axis=-1))
    count = jax.jit(lambda soft: jnp.sum(soft != soft[:1]))
    yield "softmax of equal rows, elements that differ", lambda: count(soft(rows)), np.zeros((), int)


def gradients() -> Iterator[tuple[str, Any, Any]]:
    """Gradients that NumPy does not compute."""
    draw = np.random.default_rng(1)
    logits, targets = draw.normal(size=(8, 128, 1000)).astype(np.float32), draw.integers(0, 1000, (8, 128))

    def cross_entropy(logits: jax.Array) -> jax.Array:
        right = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - right)

    exact = np.exp(logits.astype(np.float64))
    exact /= exact.sum(-1, keepdims=True)
    np.put_along_axis(exact, targets[..., None], np.take_along_axis(exact, targets[..., None], -1) - 1, -1)
    yield "gradient of a cross entropy", lambda: jax.jit(jax.grad(cross_entropy))(logits), exact / targets.size
    # cuDNN's attention cannot be compiled without tuning: with these flags, jit(grad) fails in XLA (JAX 0.11.2).
    models.ATTENTION = "xla"
    model, examples = MODELS["gpt-tiny"]
    params, batch = jax.jit(model.init)(jax.random.key(0)), model.batch(jax.random.key(1), examples)
    fun = jax.jit(ab.grad(model.loss, microbatch_size=8))
    flat = jax.jit(lambda tree: jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)]))
    yield "gradient of gpt-tiny, microbatches of 8", lambda: flat(fun(params, batch)), None


def _set(numbers: Any, order: Any) -> jax.Array:
    return jnp.zeros(numbers.shape, int).at[order].set(numbers)


def _updated(name: str, rows: Any, numbers: Any) -> jax.Array:
    return getattr(jnp.ones(16, int).at[rows], name)(numbers)


def _embedding_gradient(table: jax.Array, inputs: Any, cotangents: Any) -> Any:
    @jax.jit
    def gradient(table: jax.Array, inputs: jax.Array, cotangents: jax.Array) -> jax.Array:
        return jax.grad(lambda table: jnp.sum(table[inputs].astype(jnp.float32) * cotangents))(table)

    return lambda: gradient(table, inputs, cotangents)


def save_results(file: str) -> None:
    """Computes everything twice in this process and saves the results, what NumPy says, and whether the bits agree."""
    saved = {}
    for name, compute, expected in itertools.chain(selections(), equal_rows(), gradients()):
        first, second = (np.asarray(compute().astype(jnp.float32)) for _ in range(2))
        saved[f"{name}|result"], saved[f"{name}|again"] = first, np.array(fingerprint(first) == fingerprint(second))
        if expected is not None:
            saved[f"{name}|numpy"] = np.asarray(expected, np.float32)
    np.savez(file, device=jax.devices()[0].device_kind, **saved)


def indexing(save: str | None) -> None:
    """Runs two processes, with the flags and without, and compares their results with NumPy's and with each other."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        processes = {}
        for name, flags in (("without", ""), ("with", FLAGS)):
            command = [sys.executable, __file__, "--save-results", str(pathlib.Path(folder) / f"{name}.npz")]
            environment = {**os.environ, "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            processes[name] = subprocess.Popen(command, env=environment)
        for name, process in processes.items():
            if process.wait():
                sys.exit(f"the process {name} the flags failed")
            found[name] = dict(np.load(pathlib.Path(folder) / f"{name}.npz"))
    device = str(found["with"].pop("device"))
    results = record.Results(save, device=device)
    print(f"{device}, JAX {jax.__version__}, {FLAGS}\n")
    print(f"{'':50} {'numpy':>12} {'without flags':>14} {'run again':>10}")
    wrong = []
    for name in [key.removesuffix("|result") for key in found["with"] if key.endswith("|result")]:
        result, other = (found[which][f"{name}|result"] for which in ("with", "without"))
        expected = found["with"].get(f"{name}|numpy")
        from_numpy = None if expected is None else apart(result, expected)
        again, before = (bool(found[which][f"{name}|again"]) for which in ("with", "without"))
        # Whole numbers are exact. Other gradients differ by rounding, those of the GPT by that of bfloat16.
        allowed = 0.02 if "gpt" in name else 1e-5 if "cross entropy" in name else 0.0
        fails = max(from_numpy or 0.0, apart(result, other)) > allowed or not again
        wrong += [name] if fails else []
        shown = "-" if from_numpy is None else f"{from_numpy:.1e}"
        print(f"{name:50} {shown:>12} {apart(result, other):14.1e} {again!s:>10}{'  WRONG' if fails else ''}")
        results.add(
            check=name,
            difference_from_numpy=from_numpy,
            difference_from_without_flags=apart(result, other),
            same_bits_again=again,
            same_bits_again_without_flags=before,
            agrees=not fails,
        )
    if wrong:
        sys.exit(f"With {FLAGS}, wrong: {'; '.join(wrong)}")
    print("\nAll agree.")


def apart(mine: np.ndarray, its: np.ndarray) -> float:
    """The largest difference, relative to the largest number of the second; infinite if the shapes differ."""
    if mine.shape != its.shape:
        return float("inf")
    largest = np.abs(its).max()
    return float(np.abs(mine - its).max() / (largest if largest else 1.0))


def hashes(cases: list[str]) -> None:
    """Prints the hashes of gradients that are run again, compiled again, and computed on several devices."""
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, XLA_FLAGS={os.environ['XLA_FLAGS'].split()}")
    for case in cases:
        name, size = case.split(":")
        model, examples = MODELS[name]
        params, batch = jax.jit(model.init)(jax.random.key(0)), model.batch(jax.random.key(1), examples)
        print(f"\n{name}, {examples} examples, microbatch {size}")
        for reproducible in (False, True):
            for devices in (None, 1, 2, 4, 8):
                if (devices or 1) > jax.device_count() or examples % ((devices or 1) * int(size)):
                    continue
                mesh = None
                if devices is not None:
                    some = jax.devices()[:devices]
                    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=some)
                fun = ab.value_and_grad(model.loss, microbatch_size=int(size), mesh=mesh, reproducible=reproducible)
                found = []
                for _ in range(2):
                    compiled = jax.jit(lambda params, batch, fun=fun: fun(params, batch)).lower(params, batch).compile()
                    found += [fingerprint(compiled(params, batch)) for _ in range(2)]
                how = "fixed order" if reproducible else "plain"
                where = "no mesh" if devices is None else f"{devices} device{'s' if devices > 1 else ''}"
                print(f"  {how:11} {where:10} run twice {found[:2]}, compiled again {found[2:]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["gpt-tiny:8"], help="model:microbatch size")
    parser.add_argument("--indexing", action="store_true", help="check results of indexing with the flags")
    parser.add_argument("--save-results", metavar="FILE", help=argparse.SUPPRESS)
    record.add_option(parser)
    options = parser.parse_args()
    if options.save_results:
        save_results(options.save_results)
    elif options.indexing:
        indexing(options.save)
    else:
        hashes(options.cases)


if __name__ == "__main__":
    main()
