"""A small GPT in plain JAX, in one file: parameters, loss and sampling.

A pre-norm transformer with RMS norms, rotary position embeddings, a squared-ReLU MLP and tied embeddings. The layers'
parameters are stacked and the layers run by `lax.scan`, so that twelve compile as fast as one.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]

# Up to this many layers are unrolled: they compile and run faster than a loop.
FEW = 3


@dataclasses.dataclass(frozen=True)
class GPT:
    """The shape of a GPT.

    >>> gpt = GPT(vocabulary=50, context=16, layers=2, heads=2, width=8)
    >>> params = gpt.init(jax.random.key(0))
    >>> tokens = jnp.zeros((3, 17), jnp.int32)  # context + 1: each token is predicted from those before it
    >>> bool(abs(jax.jit(gpt.loss)(params, tokens) - 3.9) < 0.1)  # untrained: log(50)
    True

    Args:
      vocabulary: the number of different tokens.
      context: the number of tokens that the model sees at a time.
      layers: the number of layers.
      heads: the number of attention heads in each layer.
      width: the number of features of a token; a multiple of twice the heads.
      dropout: the dropout rate of the output of attention and MLP. Applied only if `loss` gets a key.
      dtype: the dtype the layers compute in. Parameters, norms and the loss stay in float32.
    """

    vocabulary: int
    context: int
    layers: int
    heads: int
    width: int
    dropout: float = 0.0
    dtype: str = "float32"

    @functools.partial(jax.jit, static_argnames="self")
    def init(self, key: jax.Array) -> Params:
        """Initial parameters. The output projections of a layer are scaled down by the square root of 2 * layers."""
        keys = iter(jax.random.split(key, 5))
        layers, width = self.layers, self.width

        def normal(*shape: int, scale: float) -> jax.Array:
            return scale * jax.random.normal(next(keys), shape, jnp.float32)

        inner, outer = width**-0.5, (2 * layers * width) ** -0.5
        return {
            "embedding": normal(self.vocabulary, width, scale=0.02),
            "layers": {
                "attention_norm": jnp.ones((layers, width)),
                "attention_in": normal(layers, width, 3 * width, scale=inner),
                "attention_out": normal(layers, width, width, scale=outer),
                "network_norm": jnp.ones((layers, width)),
                "network_in": normal(layers, width, 4 * width, scale=inner),
                "network_out": normal(layers, 4 * width, width, scale=outer / 2),
            },
            "norm": jnp.ones(width),
        }

    def loss(self, params: Params, tokens: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """The mean cross-entropy of each token given those before it. The first token of a row is not predicted.

        Args:
          params: as returned by `init`.
          tokens: integers of shape (examples, context + 1). Rows may be shorter.
          key: for dropout. None for no dropout.
        """
        tokens = tokens.astype(jnp.int32)
        logits = self.logits(params, tokens[:, :-1], key)
        # log_softmax would keep a second array as large as the logits.
        chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)

    def logits(self, params: Params, tokens: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """The logits of the next token, in float32, of shape (examples, length, vocabulary)."""
        dtype = jnp.dtype(self.dtype)
        layers = jax.tree.map(lambda leaf: leaf.astype(dtype), params["layers"])
        keys = None if key is None or not self.dropout else jax.random.split(key, self.layers)
        angles = _angles(tokens.shape[1], self.width // self.heads)

        def one_layer(x: jax.Array, layer: tuple[Params, jax.Array | None]) -> tuple[jax.Array, None]:
            weights, key = layer
            attention_key, network_key = (None, None) if key is None else jax.random.split(key)
            x = x + self._drop(attention_key, self._attend(weights, _normalise(x, weights["attention_norm"]), angles))
            hidden = jax.nn.relu(_normalise(x, weights["network_norm"]) @ weights["network_in"])
            hidden = hidden**2  # as good as gelu, and much cheaper on a CPU
            return x + self._drop(network_key, hidden @ weights["network_out"]), None

        # Embeddings are small, so that the tied logits start near zero. As inputs they are scaled up.
        x = (params["embedding"][tokens] * self.width**0.5).astype(dtype)
        x, _ = jax.lax.scan(one_layer, x, (layers, keys), unroll=self.layers <= FEW)
        x = _normalise(x, params["norm"].astype(dtype))
        return jnp.einsum("btw,vw->btv", x, params["embedding"].astype(dtype), preferred_element_type=jnp.float32)

    def _attend(self, weights: Params, x: jax.Array, angles: jax.Array) -> jax.Array:
        """Causal multi-head attention."""
        examples, length, width = x.shape
        mixed = (x @ weights["attention_in"]).reshape(examples, length, 3, self.heads, width // self.heads)
        query, keys, values = (mixed[:, :, part] for part in range(3))
        query, keys = _rotate(query, angles), _rotate(keys, angles)
        scores = (
            jnp.einsum("bqhw,bkhw->bhqk", query, keys, preferred_element_type=jnp.float32) * query.shape[-1] ** -0.5
        )
        is_causal = jnp.tri(length, dtype=bool)[None, None]
        shares = jax.nn.softmax(jnp.where(is_causal, scores, jnp.full_like(scores, -1e30)))
        attended = jnp.einsum("bhqk,bkhw->bqhw", shares.astype(x.dtype), values)
        return attended.reshape(examples, length, width) @ weights["attention_out"]

    def _drop(self, key: jax.Array | None, x: jax.Array) -> jax.Array:
        if key is None:
            return x
        kept = jax.random.bernoulli(key, 1 - self.dropout, x.shape)
        return jnp.where(kept, x / (1 - self.dropout), jnp.zeros_like(x))

    @functools.partial(jax.jit, static_argnames=("self", "length"))
    def sample(
        self, params: Params, prompt: jax.Array, key: jax.Array, *, length: int, temperature: float = 1.0
    ) -> jax.Array:
        """Samples `length` tokens after the prompt. Returns the prompt and these tokens.

        >>> gpt = GPT(vocabulary=50, context=16, layers=2, heads=2, width=8)
        >>> prompt = jnp.array([1, 2, 3])
        >>> text = gpt.sample(gpt.init(jax.random.key(0)), prompt, jax.random.key(1), length=40)
        >>> text.shape, text[:3].tolist()
        ((43,), [1, 2, 3])

        Args:
          params: as returned by `init`.
          prompt: at least one token.
          key: a PRNG key.
          length: the number of tokens to sample.
          temperature: below 1, likely tokens become likelier; at 0 the likeliest token is always taken.
        """
        begin, end = len(prompt), len(prompt) + length
        # Tokens not sampled yet are zeros, which causal attention never sees.
        text = jnp.zeros(max(end, self.context), jnp.int32).at[:begin].set(prompt)

        def write(place: jax.Array, text: jax.Array) -> jax.Array:
            first = jnp.maximum(place - self.context, 0)
            window = jax.lax.dynamic_slice_in_dim(text, first, self.context)
            logits = self.logits(params, window[None])[0, place - 1 - first]
            noise = jax.random.gumbel(jax.random.fold_in(key, place), logits.shape)
            return text.at[place].set(jnp.argmax(logits + temperature * noise).astype(jnp.int32))

        return jax.lax.fori_loop(begin, end, write, text)[:end]


def _normalise(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype) * scale[None, None]


def _angles(length: int, width: int) -> jax.Array:
    """The angles of the rotary embedding, of shape (length, width / 2): 1 radian per position down to almost 0."""
    frequencies = 10_000.0 ** -jnp.linspace(0.0, 1.0, width // 2, endpoint=False)
    return jnp.arange(length, dtype=jnp.float32)[:, None] * frequencies[None]


def _rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotary position embedding: products of rotated queries and keys depend on their distance only."""
    one, other = jnp.split(x, 2, axis=-1)
    cosine, sine = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    return jnp.concatenate([one * cosine - other * sine, one * sine + other * cosine], axis=-1)


def count(params: Params) -> int:
    """The number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
