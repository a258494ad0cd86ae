"""A small GPT in plain JAX, in one file: parameters, loss, and text that it writes.

Layers of attention and of a network of two matrices, each behind a norm and added to what came before. Positions are
rotations of queries and keys. The embedding of a token is also the row that its probability is computed with. All
layers are stacked and run by `lax.scan`, so that twelve compile as fast as one.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]

# So many layers compile and run faster one by one than as a loop.
FEW = 3


@dataclasses.dataclass(frozen=True)
class GPT:
    """The shape of a GPT.

    >>> gpt = GPT(vocabulary=50, context=16, layers=2, heads=2, width=8)
    >>> params = gpt.init(jax.random.key(0))
    >>> tokens = jnp.zeros((3, 17), jnp.int32)  # one more than the context: each is predicted from those before it
    >>> bool(abs(jax.jit(gpt.loss)(params, tokens) - 3.9) < 0.1)  # it knows nothing yet: log(50)
    True

    Args:
      vocabulary: how many tokens there are.
      context: how many tokens it looks back on.
      layers: how many layers.
      heads: of attention, in each layer.
      width: of what goes from layer to layer, a multiple of twice the heads.
      dropout: the share of what each half of a layer adds that is left out in training, if there is a key.
      dtype: in which the layers compute. Parameters, norms, and the loss stay in float32.
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
        """Parameters to begin with: what a layer adds is small, the smaller the more layers there are."""
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
        """The mean over all tokens but the first of each row, of what it costs to say them: -log(probability).

        Args:
          params: as of `init`.
          tokens: whole numbers of shape (examples, context + 1), or shorter rows.
          key: for dropout. Without one, nothing is left out.
        """
        tokens = tokens.astype(jnp.int32)
        logits = self.logits(params, tokens[:, :-1], key)
        # log_softmax would keep a second array as large as the logits.
        chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)

    def logits(self, params: Params, tokens: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """What it thinks of each token that may come next: float32, of shape (examples, length, vocabulary)."""
        dtype = jnp.dtype(self.dtype)
        layers = jax.tree.map(lambda leaf: leaf.astype(dtype), params["layers"])
        keys = None if key is None or not self.dropout else jax.random.split(key, self.layers)
        angles = _angles(tokens.shape[1], self.width // self.heads)

        def one_layer(x: jax.Array, layer: tuple[Params, jax.Array | None]) -> tuple[jax.Array, None]:
            weights, key = layer
            ours, theirs = (None, None) if key is None else jax.random.split(key)
            x = x + self._drop(ours, self._attend(weights, _normalise(x, weights["attention_norm"]), angles))
            hidden = jax.nn.relu(_normalise(x, weights["network_norm"]) @ weights["network_in"])
            hidden = hidden**2  # as good as gelu, and far cheaper where there is no accelerator
            return x + self._drop(theirs, hidden @ weights["network_out"]), None

        # The rows are small numbers, so that the first probabilities are alike; as a beginning they are made larger.
        x = (params["embedding"][tokens] * self.width**0.5).astype(dtype)
        x, _ = jax.lax.scan(one_layer, x, (layers, keys), unroll=self.layers <= FEW)
        x = _normalise(x, params["norm"].astype(dtype))
        return jnp.einsum("btw,vw->btv", x, params["embedding"].astype(dtype), preferred_element_type=jnp.float32)

    def _attend(self, weights: Params, x: jax.Array, angles: jax.Array) -> jax.Array:
        """From each token to those before it."""
        examples, length, width = x.shape
        mixed = (x @ weights["attention_in"]).reshape(examples, length, 3, self.heads, width // self.heads)
        query, keys, values = (mixed[:, :, part] for part in range(3))
        query, keys = _rotate(query, angles), _rotate(keys, angles)
        scores = (
            jnp.einsum("bqhw,bkhw->bhqk", query, keys, preferred_element_type=jnp.float32) * query.shape[-1] ** -0.5
        )
        is_before = jnp.tri(length, dtype=bool)[None, None]
        shares = jax.nn.softmax(jnp.where(is_before, scores, jnp.full_like(scores, -1e30)))
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
        """Goes on writing: the prompt, and `length` tokens after it, each drawn by its probability.

        >>> gpt = GPT(vocabulary=50, context=16, layers=2, heads=2, width=8)
        >>> prompt = jnp.array([1, 2, 3])
        >>> text = gpt.sample(gpt.init(jax.random.key(0)), prompt, jax.random.key(1), length=40)
        >>> text.shape, text[:3].tolist()
        ((43,), [1, 2, 3])

        Args:
          params: as of `init`.
          prompt: at least one token.
          key: of the numbers it draws.
          length: how many tokens to write.
          temperature: below 1 it prefers what is likely; at 0 it always takes the likeliest.
        """
        begin, end = len(prompt), len(prompt) + length
        # What is not written yet is zeros: no token looks ahead.
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
    """How far the pairs of numbers of a head are rotated, at each position: from one radian to almost none."""
    frequencies = 10_000.0 ** -jnp.linspace(0.0, 1.0, width // 2, endpoint=False)
    return jnp.arange(length, dtype=jnp.float32)[:, None] * frequencies[None]


def _rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotates pairs by their positions, so that a query and a key know how far apart they are."""
    one, other = jnp.split(x, 2, axis=-1)
    cosine, sine = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    return jnp.concatenate([one * cosine - other * sine, one * sine + other * cosine], axis=-1)


def count(params: Params) -> int:
    """How many numbers there are to learn."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
