"""Trains a GPT on a batch that is far larger than the memory for it: 2,048 sequences in 256 MiB.

    python examples/gpt_huge_batch.py                       # the fables that come with anybatch
    python examples/gpt_huge_batch.py my_text.txt           # any text, as bytes
    python examples/gpt_huge_batch.py train.bin --gpt2      # GPT-2 124M on a GPU, tokens from nanoGPT's prepare.py

Cost: about 40 s on two CPU cores, for the fables. The step takes 244 MiB; the process with Python and JAX takes 1 GB.
Expected: the plan chooses microbatches of 410 (half the batch would need 607 MiB). The loss falls from 6.55 to 2.19 in
25 steps, and to 2.16 on held-out text.

You choose the batch size and the memory budget of a step. anybatch plans the microbatches, and the gradient is that of
the full batch. Ctrl-C stops the run after the current step. The same command continues it, with the same bits.
"""

import argparse
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import anybatch as ab
from anybatch.demo.text import read_text

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("text", nargs="?", default="", help="a text file, or a .bin of 16-bit tokens; default: the fables")
parser.add_argument("--steps", type=int, default=25)
parser.add_argument("--batch", type=int, default=2048, help="sequences in a step")
parser.add_argument("--memory", default="256MiB", help="budget of the step, parameters included, such as 16GiB or 80%%")
parser.add_argument("--context", type=int, default=32)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--heads", type=int, default=2)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--rate", type=float, default=1e-2, help="the learning rate")
parser.add_argument("--dtype", default="float32", help="the dtype in which the layers compute")
parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/gpt"), help="for checkpoints and the log")
parser.add_argument("--gpt2", action="store_true", help="the sizes of GPT-2 124M: half a million tokens in a step")
GPT2 = {"layers": 12, "heads": 12, "width": 768, "context": 1024, "batch": 512, "steps": 10_000, "memory": "80%"}
GPT2 |= {"rate": 6e-4, "dtype": "bfloat16"}


def load(path, context):
    """All windows of a text, one token longer than the context, and the vocabulary size. The windows are views."""
    if path.endswith(".bin"):
        tokens, vocabulary = np.memmap(path, np.uint16, mode="r"), 50_304
    else:
        tokens, vocabulary = np.frombuffer(read_text(path, "bytes").encode("utf-8", "surrogateescape"), np.uint8), 256
    windows = np.lib.stride_tricks.sliding_window_view(tokens, context + 1)
    return windows[:: context if len(tokens) > 10_000_000 else 1], vocabulary  # short text: from every position


# The model: pre-norm, learned positions, tied embeddings. The layers are stacked, so that one is compiled for all.


def init(key, args, vocabulary):
    """The initial parameters."""
    layers, width = args.layers, args.width
    keys = iter(jax.random.split(key, 6))

    def normal(*shape, scale):
        return scale * jax.random.normal(next(keys), shape)

    # `outer` is for layers that add to their input: the more layers, the smaller.
    inner, outer = width**-0.5, (2 * layers * width) ** -0.5
    return {
        "tokens": normal(vocabulary, width, scale=inner),
        "positions": normal(args.context, width, scale=inner / 8),
        "layers": {
            "norms": jnp.ones((layers, 2, width)),
            "attention_in": normal(layers, width, 3 * width, scale=inner),
            "attention_out": normal(layers, width, width, scale=outer),
            "network_in": normal(layers, width, 4 * width, scale=inner),
            "network_out": normal(layers, 4 * width, width, scale=outer / 2),
        },
        "norm": jnp.ones(width),
    }


def normalised(x, scale):
    """Each row with mean 0 and variance 1, computed in float32."""
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)).astype(x.dtype) * scale


def layer(x, weights, heads):
    """Causal attention, then a network for each token; both are added to their input."""
    count, length, width = x.shape
    mixed = normalised(x, weights["norms"][0]) @ weights["attention_in"]
    query, key, value = jnp.moveaxis(mixed.reshape(count, length, 3, heads, width // heads), 2, 0)
    attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    x = x + attended.reshape(x.shape) @ weights["attention_out"]
    hidden = jax.nn.relu(normalised(x, weights["norms"][1]) @ weights["network_in"])
    return x + hidden**2 @ weights["network_out"]  # learns as well as gelu, and is far cheaper on a CPU


def loss(params, batch, *, heads, dtype):
    """The cross entropy: the mean over all tokens of all sequences."""
    tokens = batch.astype(jnp.int32)
    inner = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    x = normalised(inner["tokens"][tokens[:, :-1]] + inner["positions"], 1)
    x, _ = jax.lax.scan(lambda x, weights: (layer(x, weights, heads), None), x, inner["layers"])
    x = normalised(x, inner["norm"])
    logits = jnp.einsum("btw,vw->btv", x, inner["tokens"], preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def main():
    """Prints the plan and trains."""
    args = parser.parse_args()
    if args.gpt2:
        parser.set_defaults(**GPT2)
        args = parser.parse_args()
    windows, vocabulary = load(args.text, args.context)
    held_out = max(len(windows) // 20, args.context)  # windows at the end of the text, for validation
    training, validation = windows[: -held_out - args.context], windows[-held_out :: args.context][:64]

    warmup = min(100, args.steps // 10 + 1)
    schedule = optax.warmup_cosine_decay_schedule(0.0, args.rate, warmup, max(args.steps, warmup + 1), args.rate / 10)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1))
    mean_loss = functools.partial(loss, heads=args.heads, dtype=args.dtype)
    step = ab.train_step(mean_loss, optimizer, memory=args.memory, tokens=lambda batch: batch[:, 1:].size)
    state = step.init(init(jax.random.key(0), args, vocabulary))
    batches = ab.Batches(training, args.batch, seed=0)

    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    print(f"{count:,} parameters; {args.batch:,} sequences, {args.batch * args.context:,} tokens in a step")
    print(step.plan(state, next(iter(batches))))  # the microbatch size, and why

    validation_loss = jax.jit(mean_loss)
    run = ab.fit(
        step,
        state,
        batches,
        steps=args.steps,
        evaluate=lambda state: validation_loss(state.params, validation),
        evaluate_every=max(args.steps // 5, 1),
        log=args.folder / "log.csv",
        checkpoints=args.folder / "checkpoints",
    )
    first, last = run.history[0], run.history[-1]
    print(f"loss {first['loss']:.2f} at first, {last['loss']:.2f} after {run.steps} steps")
    print(f"loss on held-out text: {last.get('eval', float('nan')):.2f}")
    raise SystemExit(run.exit_code)


if __name__ == "__main__":
    main()
