"""What do blocks along another axis save, and what do they cost, beside the same loss written by hand in blocks?

    python benchmarks/blocks.py                                  # CPU, about three minutes: memory only
    python benchmarks/blocks.py --accelerator                    # one 80 GiB GPU, about eight minutes
    python benchmarks/blocks.py --accelerator logits gradcache   # some of the questions, about three minutes
    python benchmarks/blocks.py --described logits gpt2          # the memory on an H200, on a machine without one

  logits      one example of 32,768 tokens and 128,256 words: the cross entropy in blocks of tokens
  vocabulary  one example of 8,192 tokens and 256,128 words
  float32     the same with float32 parameters, whose gradients need no wider sums
  planned     two examples of `logits`, planned within 24 GiB
  gpt2        GPT-2 124M, one example at a time
  clip        65,536 pairs of two towers with 12 layers: the matrix of all pairs in blocks of rows
  gradcache   65,536 pairs of two towers with 4 layers, 256 at a time, beside GradCache written by hand

By hand, the cross entropy is written in two ways. "checkpoint" is `lax.map` over blocks of tokens, in
`jax.checkpoint`: the logits of a block are computed twice. "custom_vjp" takes the gradient of a block in the forward
pass.

Every question prints the temporaries and the time of each contestant, and their ratios to the first. With
`--described`, XLA's compiler for GPUs compiles for an H200 that is only described to it, and nothing runs: install
`jax[cuda13]`. Its kernels are then not tuned, so that temporaries may differ by some percent.

Found on one H200: see docs/blocks.md.
"""

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import models
import record
from contrastive import TwoTowers, grad_cache
from jax.experimental import topologies
from models import GPT, norm

import anybatch as ab
from anybatch.jaxprs import versions

# What XLA asks about a GPU that it compiles for.
H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000
  device_memory_size: 149000000000
  l2_cache_size: 62914560
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 13 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""
DESCRIBED: list[jax.Device] = []  # the device to compile for, if it is only described
QUESTIONS = ["logits", "vocabulary", "float32", "planned", "gpt2", "clip", "gradcache"]


def describe() -> None:
    """Makes `DESCRIBED` an H200."""
    models.ATTENTION = "cudnn"
    DESCRIBED.extend(topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1").devices)


def by_hand(model: GPT, block: int) -> Callable[..., Any]:
    """The loss of a GPT whose cross entropy runs in blocks of tokens, with its gradient taken in the forward pass."""

    @jax.custom_vjp
    def cross_entropy(hidden: jax.Array, embedding: jax.Array, targets: jax.Array) -> jax.Array:
        return forward(hidden, embedding, targets)[0]

    def of_block(hidden: jax.Array, embedding: jax.Array, targets: jax.Array) -> jax.Array:
        logits = (hidden @ embedding.astype(hidden.dtype).T).astype(jnp.float32)
        right = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - right)

    def forward(hidden: jax.Array, embedding: jax.Array, targets: jax.Array) -> Any:
        wide = embedding.astype(jnp.float32)

        def step(carry: Any, part: Any) -> Any:
            total, of_embedding = carry
            value, (of_hidden, more) = jax.value_and_grad(of_block, argnums=(0, 1))(part[0], wide, part[1])
            return (total + value, of_embedding + more), of_hidden

        parts = hidden.reshape(-1, block, hidden.shape[-1]), targets.reshape(-1, block)
        (total, of_embedding), of_hidden = jax.lax.scan(step, (jnp.zeros(()), jnp.zeros_like(wide)), parts)
        number = targets.size
        return total / number, (of_hidden.reshape(hidden.shape), of_embedding, number)

    def backward(kept: Any, cotangent: jax.Array) -> Any:
        of_hidden, of_embedding, number = kept
        scale = cotangent / number
        return (of_hidden * scale).astype(of_hidden.dtype), (of_embedding * scale).astype(jnp.bfloat16), None

    cross_entropy.defvjp(forward, backward)

    def loss(params: Any, batch: Any) -> jax.Array:
        hidden, embedding = hidden_of(model, params, batch), params["embedding"].astype(jnp.bfloat16)
        return cross_entropy(hidden.reshape(-1, model.width), embedding, batch["targets"].reshape(-1))

    return loss


def by_checkpoint(model: GPT, block: int) -> Callable[..., Any]:
    """The same with `lax.map` and `jax.checkpoint`: the short way to write it."""

    def loss(params: Any, batch: Any) -> jax.Array:
        hidden, embedding = hidden_of(model, params, batch), params["embedding"].astype(jnp.bfloat16)

        @jax.checkpoint
        def of_block(part: Any) -> jax.Array:
            logits = (part[0] @ embedding.T).astype(jnp.float32)
            right = jnp.take_along_axis(logits, part[1][:, None], axis=-1)[:, 0]
            return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - right)

        parts = hidden.reshape(-1, block, model.width), batch["targets"].reshape(-1, block)
        return jnp.sum(jax.lax.map(of_block, parts)) / batch["targets"].size

    return loss


def hidden_of(model: GPT, params: Any, batch: Any) -> jax.Array:
    """The model up to its logits."""
    hidden = params["embedding"].astype(jnp.bfloat16)[batch["inputs"]] + params["position"].astype(jnp.bfloat16)
    for layer in params["blocks"]:
        hidden = model._block(layer, hidden)
    return norm(hidden, params["norm"])


def logits(model: GPT, blocks: tuple[int, ...], add: Callable[..., None]) -> None:
    """The tail of a language model."""
    params, batch = problem(model, 1)
    contestants = {"jax.value_and_grad": jax.value_and_grad(model.loss)}
    for block in blocks:
        contestants[f"checkpoint, {block}"] = jax.value_and_grad(by_checkpoint(model, block))
        contestants[f"custom_vjp, {block}"] = jax.value_and_grad(by_hand(model, block))
        contestants[f"anybatch, {block}"] = ab.value_and_grad(model.loss, microbatch_size=1, block_size=block)

    def without_logits(params: Any, batch: Any) -> jax.Array:
        return jnp.mean(hidden_of(model, params, batch).astype(jnp.float32) ** 2)

    contestants["without the logits"] = jax.value_and_grad(without_logits)
    compare(contestants, (params, batch), add)


def planned(model: GPT, examples: int, memory: str) -> None:
    """What a plan chooses within a budget that one example does not fit."""
    params, batch = problem(model, examples)
    print(ab.plan(model.loss, params, batch, memory=memory))


def gpt2(model: GPT, examples: int, blocks: tuple[int, ...], add: Callable[..., None]) -> None:
    """One example at a time."""
    params, batch = problem(model, examples)
    contestants = {"anybatch, in full": ab.value_and_grad(model.loss, microbatch_size=1)}
    for block in blocks:
        make = functools.partial(ab.value_and_grad, model.loss, microbatch_size=1, block_size=block)
        contestants[f"anybatch, {block}"] = make()
        contestants[f"anybatch with remat, {block}"] = make(remat="nothing_saveable")
    compare(contestants, (params, batch), add)


def gradcache(model: TwoTowers, pairs: int, size: int, block: int, add: Callable[..., None]) -> None:
    """All pairs, by hand and with anybatch, in full and in blocks."""
    fun = functools.partial(ab.value_and_grad, model.loss, microbatch_size=size)
    contestants = {
        "GradCache by hand": grad_cache(model, size),
        "anybatch, in full": fun(block_size=None),
        f"anybatch, {block}": fun(block_size=block),
    }
    compare(contestants, problem(model, pairs), add, rounds=2, warm=False)


def clip(model: TwoTowers, pairs: int, few: int, size: int, blocks: tuple[int, ...], add: Callable[..., None]) -> None:
    """All pairs. The first contestant has the towers' two passes, and next to nothing after them."""
    params, batch = problem(model, pairs)

    def towers(params: Any, batch: Any) -> jax.Array:
        images, texts = model.tower(params["images"], batch[0]), model.tower(params["texts"], batch[1])
        return jnp.sqrt(jnp.sum(jnp.square(images.mean(0) - texts.mean(0)))) * jnp.exp(params["temperature"])

    contestants = {"towers alone": ab.value_and_grad(towers, microbatch_size=size)}
    for block in blocks:
        contestants[f"anybatch, {block}"] = ab.value_and_grad(model.loss, microbatch_size=size, block_size=block)
    programs = compare(contestants, (params, batch), add, rounds=2)
    fun = ab.value_and_grad(model.loss, microbatch_size=size, block_size=blocks[-1])
    small = compiled(fun, params, jax.eval_shape(lambda batch: [leaf[:few] for leaf in batch], batch))
    for number, program in ((few, small), (pairs, programs[f"anybatch, {blocks[-1]}"])):
        taken = versions.temporaries(program)
        # Embeddings and their gradients, of both towers, and copies of them in other layouts.
        beside = taken - 4 * number * model.embedding * 4
        print(
            f"{number} pairs: {taken / 2**30:.3f} GiB, beside embeddings and their gradients {beside / 2**30:.3f} GiB"
        )


def problem(model: Any, examples: int) -> tuple[Any, Any]:
    """The parameters and a batch of a model; their types, if the device is only described."""
    make = jax.eval_shape if DESCRIBED else lambda fun, *arguments: jax.jit(fun)(*arguments)
    return make(model.init, jax.random.key(0)), make(lambda key: model.batch(key, examples), jax.random.key(1))


def compiled(fun: Callable[..., Any], *arguments: Any) -> Any:
    """The program of a function on the device."""
    if DESCRIBED:
        place = jax.sharding.SingleDeviceSharding(DESCRIBED[0])
        arguments = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tuple(arguments)
        )
    return jax.jit(fun).lower(*arguments).compile()


def named(contestant: str) -> dict[str, Any]:
    """The way and the block size in the name of a contestant."""
    way, _, block = contestant.rpartition(", ")
    return {"way": way, "block_size": int(block)} if block.isdecimal() else {"way": contestant, "block_size": None}


@jax.jit
def squared_norm(tree: Any) -> jax.Array:
    return jnp.sum(jnp.stack([jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]))


def compare(
    contestants: dict[str, Any],
    arguments: tuple[Any, ...],
    add: Callable[..., None],
    rounds: int = 5,
    warm: bool = True,
) -> dict[str, Any]:
    """Compiles the contestants, runs them in turns, and prints bytes, times and ratios to the first.

    Args:
      contestants: functions that return a value and a gradient, by name.
      arguments: their arguments.
      add: saves a row.
      rounds: how often each is timed.
      warm: whether each runs once more before it is timed: it may profit from a device that the one before let cool.

    Returns:
      The compiled programs.
    """
    programs: dict[str, Any] = {}
    compiling: dict[str, float] = {}
    values: dict[str, tuple[float, float]] = {}
    for name, fun in contestants.items():
        start = time.perf_counter()
        try:
            programs[name] = compiled(fun, *arguments)
            compiling[name] = time.perf_counter() - start
            if not DESCRIBED:
                value, grads = programs[name](*arguments)
                values[name] = float(value), float(squared_norm(grads))
                del value, grads
        except jax.errors.JaxRuntimeError as error:
            print(f"{name:28} {str(error)[:80]}")
            programs.pop(name, None)
            add(**named(name), note=str(error)[:80].splitlines()[0])
            continue
        print(f"{name:28} compiled in {compiling[name]:.1f} s", flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    timed = not DESCRIBED and jax.default_backend() != "cpu"
    for _ in range(rounds if timed else 0):
        for name, program in programs.items():
            if warm:
                jax.block_until_ready(program(*arguments))
            start = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            seconds[name].append(time.perf_counter() - start)
            gc.collect()
    first = next(iter(programs), None)
    for name, program in programs.items():
        taken = versions.temporaries(program)
        median = statistics.median(seconds[name]) if timed else None
        row: dict[str, Any] = {
            **named(name),
            "temporaries_bytes": taken,
            "memory_ratio": taken / versions.temporaries(programs[first]),
            "milliseconds": median and 1e3 * median,
            "time_ratio": median and median / statistics.median(seconds[first]),
            "compile_seconds": compiling[name] if timed else None,
            "loss": values[name][0] if name in values else None,
            "squared_norm": values[name][1] if name in values else None,
            "note": "",
        }
        add(**row)
        times = f"{row['milliseconds']:9.1f} ms {row['time_ratio']:6.3f}" if timed else ""
        found = "loss {:.6f}, squared norm of the gradient {:.5g}".format(*values[name]) if name in values else ""
        print(f"{name:28} {taken / 2**30:8.3f} GiB {row['memory_ratio']:6.3f}   {times}   {found}", flush=True)
    return programs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", help=", ".join(QUESTIONS))
    parser.add_argument("--accelerator", action="store_true", help="the sizes for a large GPU")
    parser.add_argument("--described", action="store_true", help="compile for an H200 that is not there, run nothing")
    record.add_option(parser)
    options = parser.parse_args()
    if not options.questions:  # on a CPU, `float32` is the same as `vocabulary`
        large = options.accelerator or options.described
        options.questions = [name for name in QUESTIONS if large or name != "float32"]
    if unknown := [name for name in options.questions if name not in QUESTIONS]:
        parser.error(f"the questions are {', '.join(QUESTIONS)}, got {', '.join(unknown)}")
    if options.described:
        describe()
        options.questions = [name for name in options.questions if name != "planned"]  # plans are for devices that run
    kind = "described H200" if DESCRIBED else jax.devices()[0].device_kind
    print(f"{kind}, JAX {jax.__version__}, anybatch {ab.__version__}")
    large = options.accelerator or options.described
    results = record.Results(options.save, device=kind)

    def adds(question: str) -> Callable[..., None]:
        return lambda **row: results.add(question=question, **row)

    questions: dict[str, Callable[[], None]] = {
        "logits": lambda: logits(
            GPT(layers=4, width=2048, heads=16, context=32768, vocabulary=128256, param_dtype=jnp.bfloat16)
            if large
            else GPT(layers=1, width=64, heads=4, context=512, vocabulary=8192),
            (8192, 2048) if large else (128, 32),
            adds("logits"),
        ),
        "vocabulary": lambda: logits(
            GPT(layers=4, width=2048, heads=16, context=8192, vocabulary=256128, param_dtype=jnp.bfloat16)
            if large
            else GPT(layers=1, width=64, heads=4, context=128, vocabulary=32768),
            (1024, 512) if large else (32, 8),
            adds("vocabulary"),
        ),
        "float32": lambda: logits(
            GPT(layers=4, width=2048, heads=16, context=8192, vocabulary=256128)
            if large
            else GPT(layers=1, width=64, heads=4, context=128, vocabulary=32768),
            (512, 256, 128) if large else (32, 8),
            adds("float32"),
        ),
        "gpt2": lambda: gpt2(
            GPT(layers=12, width=768, heads=12)
            if large
            else GPT(layers=4, width=128, heads=4, context=64, vocabulary=4096),
            64 if large else 8,
            (256, 128) if large else (16, 8),
            adds("gpt2"),
        ),
        "planned": lambda: planned(
            GPT(layers=4, width=2048, heads=16, context=32768, vocabulary=128256, param_dtype=jnp.bfloat16)
            if large
            else GPT(layers=1, width=64, heads=4, context=512, vocabulary=8192),
            2,
            "24GiB" if large else "48MiB",
        ),
        "clip": lambda: clip(
            TwoTowers(12, 512, 64) if large else TwoTowers(2, 64, 4),
            65536 if large else 2048,
            2048 if large else 256,
            1024 if large else 64,
            (4096, 1024) if large else (256, 64),
            adds("clip"),
        ),
        "gradcache": lambda: gradcache(
            TwoTowers(4, 512, 64) if large else TwoTowers(2, 64, 4),
            65536 if large else 2048,
            256 if large else 64,
            4096 if large else 256,
            adds("gradcache"),
        ),
    }
    for name in options.questions:
        print(f"\n{name}: {(questions[name].__doc__ or '').strip()}")
        questions[name]()


if __name__ == "__main__":
    main()
