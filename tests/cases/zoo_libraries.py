"""The same kind of model in the libraries that hold parameters in objects: NNX, Equinox, and Haiku if it is there."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from cases.zoo_arrays import filled, generator, labels, variables_of
from flax import nnx


def images_and_labels(num_examples):
    return generator().normal(size=(num_examples, 4, 4, 2)), labels(num_examples, 3)


class NnxModel(nnx.Module):
    """Convolution, attention, LayerNorm and an MLP, with dropout where a rate is given."""

    def __init__(self, *, dropout_rate, rngs):
        self.conv = nnx.Conv(2, 8, kernel_size=(3, 3), strides=(2, 2), rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=2, in_features=8, dropout_rate=dropout_rate, broadcast_dropout=False, decode=False, rngs=rngs
        )
        self.up = nnx.Linear(8, 12, rngs=rngs)
        self.down = nnx.Linear(12, 8, rngs=rngs)
        self.dropout = nnx.Dropout(dropout_rate, rngs=rngs)
        self.output = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.conv(images))
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        x = x + self.dropout(self.attention(self.norm(x)))
        x = x + self.dropout(self.down(nnx.gelu(self.up(self.norm(x)))))
        return self.output(jnp.mean(x, axis=1))


def split(make):
    """The graph of a module, its parameters, and its other state, without the time that its own first values take."""
    graph, params, others = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
    return graph, filled(params), filled(others)


def nnx_model(num_examples):
    """Parameters as the first argument, the graph of the module closed over."""
    graph, params, others = split(lambda: NnxModel(dropout_rate=0.0, rngs=nnx.Rngs(0)))

    def loss(params, batch):
        images, labels = batch
        model = nnx.merge(graph, params, others, copy=True)
        model.eval()
        logits = model(images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), {"accuracy": jnp.mean(logits.argmax(axis=-1) == labels)}

    return loss, params, images_and_labels(num_examples), ()


def nnx_model_with_dropout(num_examples):
    """The generators of random numbers are state of the module: they go in as an argument and come out as aux."""
    graph, params, others = split(lambda: NnxModel(dropout_rate=0.3, rngs=nnx.Rngs(0)))

    def loss(params, batch, others):
        images, labels = batch
        model = nnx.merge(graph, params, others, copy=True)
        model.train()
        losses = optax.softmax_cross_entropy_with_integer_labels(model(images), labels)
        _, _, others = nnx.split(model, nnx.Param, ...)
        return losses.mean(), others

    return loss, params, images_and_labels(num_examples), (others,)


class NnxNormalised(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(2, 4, kernel_size=(3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.output = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, images):
        return self.output(jnp.mean(nnx.relu(self.norm(self.conv(images))), axis=(1, 2)))


def nnx_model_with_batch_norm(num_examples):
    graph, params, statistics = split(lambda: NnxNormalised(nnx.Rngs(0)))

    def loss(params, batch, statistics):
        images, labels = batch
        model = nnx.merge(graph, params, statistics, copy=True)
        losses = optax.softmax_cross_entropy_with_integer_labels(model(images), labels)
        return losses.mean(), nnx.state(model, nnx.BatchStat)

    return loss, params, images_and_labels(num_examples), (statistics,)


class EquinoxModel(eqx.Module):
    """One example: attention over its tokens, an MLP for each token, dropout on both."""

    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout
    output: eqx.nn.Linear

    def __init__(self, dropout_rate, key):
        keys = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(2, 6, dropout_p=dropout_rate, key=keys[0])
        self.norm = eqx.nn.LayerNorm(6)
        self.mlp = eqx.nn.MLP(6, 6, width_size=8, depth=2, activation=jax.nn.gelu, key=keys[1])
        self.dropout = eqx.nn.Dropout(dropout_rate)
        self.output = eqx.nn.Linear(6, 2, key=keys[2])

    def __call__(self, x, *, key=None, inference=False):
        of_attention, of_first, of_second = (None,) * 3 if key is None else jax.random.split(key, 3)
        y = jax.vmap(self.norm)(x)
        y = self.attention(y, y, y, key=of_attention, inference=inference)
        x = x + self.dropout(y, key=of_first, inference=inference)
        y = jax.vmap(self.mlp)(jax.vmap(self.norm)(x))
        x = x + self.dropout(y, key=of_second, inference=inference)
        return self.output(jnp.mean(x, axis=0))


def tokens_and_targets(num_examples):
    random = generator()
    return random.normal(size=(num_examples, 5, 6)), random.normal(size=(num_examples, 2))


def partition(dropout_rate):
    model = eqx.filter_eval_shape(EquinoxModel, dropout_rate, jax.random.key(0))
    shapes, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    return filled(shapes), static


def equinox_model(num_examples):
    params, static = partition(0.0)

    def loss(params, batch):
        tokens, targets = batch
        model = eqx.combine(params, static)
        predicted = jax.vmap(lambda x: model(x, inference=True))(tokens)
        return jnp.mean((predicted - targets) ** 2), predicted

    return loss, params, tokens_and_targets(num_examples), ()


def equinox_model_with_dropout(num_examples):
    """A key for each example, by splitting one for the batch."""
    params, static = partition(0.3)

    def loss(params, batch, key):
        tokens, targets = batch
        model = eqx.combine(params, static)
        keys = jax.random.split(key, tokens.shape[0])
        predicted = jax.vmap(lambda x, key: model(x, key=key))(tokens, keys)
        return jnp.mean((predicted - targets) ** 2)

    return loss, params, tokens_and_targets(num_examples), (jax.random.key(2),)


def haiku_model(num_examples):
    """Not among the requirements of the tests: the case is skipped where Haiku is not installed."""
    import haiku as hk

    def forward(images):
        x = jax.nn.relu(hk.Conv2D(4, 3)(images))
        x = hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(hk.Flatten()(x))
        x = hk.dropout(hk.next_rng_key(), 0.2, jax.nn.relu(hk.Linear(8)(x)))
        return hk.nets.MLP([8, 3])(x)

    model = hk.transform(forward)
    batch = images_and_labels(num_examples)

    def loss(params, batch, key):
        images, labels = batch
        logits = model.apply(params, key, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return loss, variables_of(model, batch[0]), batch, (jax.random.key(2),)
