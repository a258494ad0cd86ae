"""Losses of one example, small ones: each has a way of its own to the gradient of a parameter."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss of one example, and what is kept of its gradients if factors are preferred to gradients."""

    name: str
    loss: Callable[..., Any]
    shapes: Any  # of the parameters
    example: tuple[int, ...]  # the shape of an example
    kept: Any  # for each parameter: "gram", "rows" or "direct"
    tokens: int = 0  # examples are numbers below this

    def params(self, dtype=jnp.float64):
        leaves, tree = jax.tree.flatten(self.shapes, is_leaf=lambda shape: isinstance(shape, tuple))
        random = np.random.default_rng(0)
        return jax.tree.unflatten(tree, [jnp.asarray(0.4 * random.normal(size=shape), dtype) for shape in leaves])

    def batch(self, number, dtype=jnp.float64):
        random = np.random.default_rng(1)
        if self.tokens:
            return jnp.asarray(random.integers(0, self.tokens, (number, *self.example)), jnp.int32)
        # Of very different sizes, so that some are clipped and others are not.
        scale = np.geomspace(0.3, 2, number).reshape(-1, *[1] * len(self.example))
        return jnp.asarray(scale * random.normal(size=(number, *self.example)), dtype)


def dense(params, x):
    return jnp.sum((jnp.tanh(x @ params["w"] + broadcast(params["b"], x)) @ params["v"]) ** 2)


def broadcast(bias, x):
    return jnp.broadcast_to(bias, (*x.shape[:-1], *bias.shape))


def recurrent(params, xs):
    def step(hidden, x):
        return jnp.tanh(x @ params["w"] + hidden @ params["u"] + params["b"]), None

    return jnp.sum(lax.scan(step, jnp.zeros(4, xs.dtype), xs)[0] ** 2)


def stacked(params, x, wrap=lambda layer: layer):
    def step(hidden, layer):
        apply = wrap(lambda hidden, layer: jnp.tanh(hidden @ layer["a"]) @ layer["b"] + broadcast(layer["c"], hidden))
        return apply(hidden, layer), None

    return jnp.sum(lax.scan(step, x, params)[0] ** 2)


def stacked_recurrent(params, xs):
    """A loop over layers with a loop over time inside."""

    def layer(xs, weights):
        def step(hidden, x):
            hidden = jnp.tanh(x @ weights["w"] + hidden @ weights["u"])
            return hidden, hidden

        return lax.scan(step, jnp.zeros(4, xs.dtype), xs)[1], None

    return jnp.sum(lax.scan(layer, xs, params)[0] ** 2)


def tied(params, tokens):
    hidden = jnp.tanh(params["table"][tokens] @ params["w"])
    chosen = jax.nn.log_softmax(hidden @ params["table"].T)
    return -jnp.mean(jnp.take_along_axis(chosen, tokens[:, None], axis=1))


def experts(params, x):
    """Every token goes to one of three, in two slots each; the router is learned too."""
    scores = jax.nn.softmax(x @ params["router"])
    place = jax.nn.one_hot(jnp.argmax(scores, axis=1), 3, dtype=x.dtype)
    slot = (jnp.cumsum(place, axis=0) - 1) * place
    dispatch = place[:, :, None] * jax.nn.one_hot(slot.astype(jnp.int32), 2, dtype=x.dtype)
    inside = jnp.tanh(jnp.einsum("tec,td,edf->ecf", dispatch, x, params["experts"]))
    return jnp.sum(jnp.einsum("tec,ecf,te->tf", dispatch, inside, scores) ** 2)


@jax.custom_vjp
def doubled(x, w):
    return x @ w


doubled.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (2 * g @ kept[1].T, 2 * kept[0].T @ g))


def penalised(w, x):
    """A gradient inside the loss."""
    inner = jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w)))(x)
    return jnp.sum(jnp.tanh(x @ w) ** 2) + jnp.sum(inner**2)


def convolution(params, image):
    numbers = ("NHWC", "HWIO", "NHWC")
    hidden = lax.conv_general_dilated(image[None], params["k"], (2, 2), "SAME", dimension_numbers=numbers)
    hidden = jnp.tanh(hidden + jnp.broadcast_to(params["b"], hidden.shape))
    return jnp.sum((hidden.mean((1, 2)) @ params["v"]) ** 2)


def dilated(params, signal):
    """Along one axis, with strides, dilations and uneven padding; the channels come first."""
    hidden = lax.conv_general_dilated(
        signal[None],
        params["k"],
        (2,),
        ((3, 1),),
        lhs_dilation=(2,),
        rhs_dilation=(3,),
        dimension_numbers=("NCH", "OIH", "NHC"),
    )
    grouped = lax.conv_general_dilated(
        hidden, params["g"], (1,), "VALID", feature_group_count=2, dimension_numbers=("NHC", "HIO", "NHC")
    )
    return jnp.sum(jnp.tanh(grouped) ** 2)


def attention(params, x):
    q, k, v = (jnp.einsum("td,dhk->thk", x, params[name]) for name in "qkv")
    scores = jax.nn.softmax(jnp.einsum("thk,shk->hts", q, k))
    return jnp.sum(jnp.einsum("hts,shk,hkd->td", scores, v, params["o"]) ** 2)


LAYERS = {"a": (3, 4, 6), "b": (3, 6, 4), "c": (3, 4)}
DENSE = {"w": (5, 7), "b": (7,), "v": (7, 3)}
GRAM = {"w": "gram", "b": "direct", "v": "gram"}

CASES = [
    Case("dense", dense, DENSE, (5,), GRAM),
    Case("dense_over_tokens", dense, DENSE, (4, 5), GRAM),
    Case(
        "recurrent", recurrent, {"w": (3, 4), "u": (4, 4), "b": (4,)}, (5, 3), {"w": "gram", "u": "gram", "b": "direct"}
    ),
    Case("stacked", stacked, LAYERS, (7, 4), {"a": "gram", "b": "gram", "c": "direct"}),
    Case(
        "stacked_remat",
        lambda params, x: stacked(params, x, jax.checkpoint),
        LAYERS,
        (7, 4),
        {"a": "gram", "b": "gram", "c": "direct"},
    ),
    Case("stacked_recurrent", stacked_recurrent, {"w": (2, 4, 4), "u": (2, 4, 4)}, (5, 4), {"w": "gram", "u": "gram"}),
    Case("tied", tied, {"table": (11, 4), "w": (4, 4)}, (9,), {"table": "gram", "w": "gram"}, tokens=11),
    Case("looked_up", lambda table, t: jnp.sum(jnp.tanh(table[t]) ** 2), (11, 4), (9,), "rows", tokens=11),
    Case(
        "looked_up_beyond",
        lambda table, t: jnp.sum(jnp.tanh(table.at[t - 2].get(mode="clip")) ** 2),
        (7, 4),
        (9,),
        "rows",
        tokens=11,
    ),
    Case(
        "looked_up_or_zero",
        lambda table, t: jnp.sum(jnp.tanh(table.at[t].get(mode="fill", fill_value=0) + 1) ** 2),
        (7, 4),
        (9,),
        "rows",
        tokens=11,
    ),
    Case("twice", lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2), (4, 4), (5, 4), "gram"),
    Case("and_transposed", lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w.T) ** 2), (4, 5), (5, 4), "gram"),
    Case("scaled", lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ (w * 0.3)) @ (-w / 2).T) ** 2), (4, 5), (5, 4), "gram"),
    Case("reshaped", lambda w, x: jnp.sum(jnp.tanh(x @ w.reshape(4, 6)) ** 2), (2, 2, 6), (5, 4), "gram"),
    Case(
        "reshaped_and_not",  # cross products of these two have no common sides
        lambda w, x: jnp.sum(jnp.tanh(x @ w.reshape(4, 6)) ** 2) + jnp.sum(jnp.tanh(x[:, :2] @ w[0]) ** 2),
        (2, 2, 6),
        (5, 4),
        "direct",
    ),
    Case("experts", experts, {"router": (4, 3), "experts": (3, 4, 5)}, (6, 4), {"router": "gram", "experts": "gram"}),
    Case(
        "attention",
        attention,
        {**dict.fromkeys("qkv", (4, 2, 3)), "o": (2, 3, 4)},
        (5, 4),
        dict.fromkeys("qkvo", "gram"),
    ),
    Case(
        "convolution",
        convolution,
        {"k": (3, 3, 2, 5), "b": (5,), "v": (5, 3)},
        (6, 6, 2),
        {"k": "gram", "b": "direct", "v": "gram"},
    ),
    Case("dilated", dilated, {"k": (4, 3, 2), "g": (2, 2, 6)}, (3, 7), {"k": "gram", "g": "direct"}),
    Case(
        "integers",
        lambda w, x: jnp.sum(
            jnp.tanh(lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=w.dtype)) ** 2
        ),
        (4, 5),
        (3, 4),
        "direct",
        tokens=5,
    ),
    Case("derivative_of_its_own", lambda w, x: jnp.sum(jnp.tanh(doubled(x, w)) ** 2), (4, 5), (3, 4), "gram"),
    Case("gradient_inside", penalised, (4, 5), (4,), "gram"),
    Case(
        "unused",
        lambda params, x: jnp.sum((x @ params["w"]) ** 2),
        {"w": (4, 5), "z": (3,)},
        (4,),
        {"w": "gram", "z": "direct"},
    ),
    Case("through_jit", jax.jit(dense), DENSE, (4, 5), GRAM),
    Case(
        "in_a_branch",
        lambda w, x: lax.cond(jnp.sum(x) > 0, lambda: jnp.sum((x @ w) ** 2), lambda: jnp.sum(jnp.sin(x @ w))),
        (4, 5),
        (3, 4),
        "direct",
    ),
    Case("scalar", lambda w, x: jnp.sum(jnp.sin(w * x)), (), (3,), "direct"),
]


def gradients(loss, params, batch):
    """The oracle: the gradient of every example, by JAX."""
    return jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, batch)


def norms_of(grads):
    return np.sqrt(
        sum(
            np.sum(np.square(np.asarray(leaf, np.float64)), axis=tuple(range(1, leaf.ndim)))
            for leaf in jax.tree.leaves(grads)
        )
    )


def clipped_sum(grads, clip_norm, counts=True):
    """The oracle's gradients, clipped and summed in float64 by numpy."""
    norms = norms_of(grads)
    weights = np.minimum(1, clip_norm / np.where(norms == 0, 1, norms)) * counts
    return jax.tree.map(lambda leaf: np.tensordot(weights, np.asarray(leaf, np.float64), 1), grads)
