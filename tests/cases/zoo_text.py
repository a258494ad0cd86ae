"""Models of sequences: plain functions of a dictionary, and Flax Linen. Only the widths are small.

Where it costs nothing there are as many tokens as examples, so that a reader which goes by sizes alone is misled.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from cases.zoo_arrays import filled, generator, params_of
from jax import lax

VOCABULARY = 11


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float64)


def sentences(num_examples, length=6):
    """Token ids that are zero, for padding, after a length of each sentence's own."""
    random = generator()
    lengths = random.integers(2, length + 1, num_examples)
    ids = random.integers(1, VOCABULARY, (num_examples, length))
    return np.where(np.arange(length)[None, :] < lengths[:, None], ids, 0), lengths


def gpt_params(length, width=8, num_layers=2):
    layers = [
        {
            "norm_of_attention": {"scale": shape(width), "bias": shape(width)},
            "query_key_value": shape(width, 3 * width),
            "projection": shape(width, width),
            "norm_of_mlp": {"scale": shape(width), "bias": shape(width)},
            "up": shape(width, 4 * width),
            "down": shape(4 * width, width),
        }
        for _ in range(num_layers)
    ]
    tokens, positions = shape(VOCABULARY, width), shape(length, width)
    return filled({"tokens": tokens, "positions": positions, "layers": layers, "scale": shape(width)})


def layer_norm(params, x):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.var(x, axis=-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * params["scale"] + params["bias"]


def rms_norm(scale, x):
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6) * scale


def gpt_unrolled(num_examples):
    """Layers in a Python loop, JAX's own attention, tied embeddings, a mean over the tokens that are not padding."""
    ids, _ = sentences(num_examples, length=7)

    def loss(params, ids):
        inputs, targets = ids[:, :-1], ids[:, 1:]
        n, length = inputs.shape
        x = params["tokens"][inputs] + params["positions"][:length]
        for layer in params["layers"]:
            y = layer_norm(layer["norm_of_attention"], x) @ layer["query_key_value"]
            query, key, value = (part.reshape(n, length, 2, -1) for part in jnp.split(y, 3, axis=-1))
            attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
            x = x + attended.reshape(n, length, -1) @ layer["projection"]
            y = layer_norm(layer["norm_of_mlp"], x)
            x = x + jax.nn.gelu(y @ layer["up"]) @ layer["down"]
        logits = rms_norm(params["scale"], x) @ params["tokens"].T
        # One axis of all tokens of all sentences, as in many training loops.
        log_probabilities = jax.nn.log_softmax(logits.reshape(-1, VOCABULARY))
        targets = targets.reshape(-1)
        losses = -jnp.take_along_axis(log_probabilities, targets[:, None], axis=1).squeeze(1)
        mask = (targets != 0).astype(losses.dtype)
        return jnp.sum(losses * mask) / jnp.maximum(jnp.sum(mask), 1)

    return loss, gpt_params(length=6), ids, ()


def gpt_scanned(num_examples):
    """Layers stacked and scanned over, each one rematerialised, attention written out, and a z-loss beside the mean."""
    ids, _ = sentences(num_examples, length=7)

    def block(x, layer):
        n, length, _ = x.shape
        y = layer_norm(layer["norm_of_attention"], x) @ layer["query_key_value"]
        query, key, value = jnp.split(y.reshape(n, length, 2, -1), 3, axis=-1)
        scores = jnp.einsum("nqhd,nkhd->nhqk", query, key) / jnp.sqrt(query.shape[-1])
        causal = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
        x = x + jnp.einsum("nhqk,nkhd->nqhd", weights, value).reshape(x.shape) @ layer["projection"]
        return x + jax.nn.silu(layer_norm(layer["norm_of_mlp"], x) @ layer["up"]) @ layer["down"], None

    def loss(params, ids):
        inputs, targets = ids[:, :-1], ids[:, 1:]
        x = params["tokens"].at[inputs].get(mode="clip") + params["positions"]
        x, _ = lax.scan(jax.checkpoint(block), x, params["layers"])
        logits = jnp.einsum("ntd,vd->ntv", rms_norm(params["scale"], x), params["tokens"])
        normalisers = jax.nn.logsumexp(logits, axis=-1)
        losses = normalisers - jnp.sum(logits * jax.nn.one_hot(targets, VOCABULARY), axis=-1)
        mask = targets != 0
        mean = jnp.mean(losses, where=mask)
        return mean + 1e-2 * jnp.mean(jnp.square(normalisers)), {"perplexity": jnp.exp(mean), "tokens": mask.sum()}

    params = gpt_params(length=6)
    params["layers"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"])
    return loss, params, ids, ()


class Bert(nn.Module):
    width: int = 8

    @nn.compact
    def __call__(self, ids, segments, masked_positions):
        embed = nn.Embed(VOCABULARY, self.width)
        positions = nn.Embed(ids.shape[1], self.width)(jnp.arange(ids.shape[1])[None, :])
        x = nn.LayerNorm()(embed(ids) + positions + nn.Embed(2, self.width)(segments))
        mask = nn.make_attention_mask(ids > 0, ids > 0)
        for _ in range(2):
            x = nn.LayerNorm()(x + nn.MultiHeadDotProductAttention(num_heads=2)(x, mask=mask))
            x = nn.LayerNorm()(x + nn.Dense(self.width)(nn.gelu(nn.Dense(12)(x), approximate=False)))
        masked = jnp.take_along_axis(x, masked_positions[:, :, None], axis=1)
        masked = nn.LayerNorm()(nn.gelu(nn.Dense(self.width)(masked)))
        bias = self.param("output_bias", nn.initializers.zeros_init(), (VOCABULARY,))
        return embed.attend(masked) + bias, nn.Dense(2)(nn.tanh(nn.Dense(self.width)(x[:, 0])))


def bert(num_examples):
    """Two terms with denominators of their own: weights of the masked tokens, and sentences."""
    model = Bert()
    ids, lengths = sentences(num_examples)
    random = generator(2)
    positions = random.integers(0, lengths[:, None], (num_examples, 3))
    batch = {
        "ids": ids,
        "segments": (np.arange(6)[None, :] >= lengths[:, None] // 2).astype(int),
        "positions": positions,
        "labels": np.take_along_axis(ids, positions, axis=1),
        "weights": random.integers(0, 2, (num_examples, 3)).astype(float),
        "is_next": random.integers(0, 2, num_examples),
    }

    def loss(params, batch):
        inputs = batch["ids"], batch["segments"], batch["positions"]
        token_logits, sentence_logits = model.apply({"params": params}, *inputs)
        losses = optax.softmax_cross_entropy_with_integer_labels(token_logits, batch["labels"])
        masked = jnp.sum(losses * batch["weights"]) / (jnp.sum(batch["weights"]) + 1e-5)
        following = optax.softmax_cross_entropy_with_integer_labels(sentence_logits, batch["is_next"]).mean()
        right = (jnp.argmax(token_logits, axis=-1) == batch["labels"]) * batch["weights"]
        return masked + following, {"masked": masked, "accuracy": jnp.sum(right) / jnp.sum(batch["weights"])}

    return loss, params_of(model, ids, batch["segments"], positions), batch, ()


class Translator(nn.Module):
    """An encoder and a decoder with dropout on embeddings, attention and residuals."""

    width: int = 8

    def residual(self, x, y):
        return x + nn.Dropout(0.2, deterministic=False)(y)

    def attend(self, x, memory, mask):
        attention = nn.MultiHeadDotProductAttention(2, dropout_rate=0.2, deterministic=False)
        return self.residual(x, attention(nn.LayerNorm()(x), memory, mask=mask))

    def mlp(self, x):
        return self.residual(x, nn.Dense(self.width)(nn.relu(nn.Dense(12)(nn.LayerNorm()(x)))))

    @nn.compact
    def __call__(self, inputs, targets):
        embed = nn.Embed(VOCABULARY, self.width)
        dropout = nn.Dropout(0.2, deterministic=False)
        x = dropout(embed(inputs))
        x = self.mlp(self.attend(x, None, nn.make_attention_mask(inputs > 0, inputs > 0)))
        shifted = jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1]
        y = dropout(embed(shifted))
        causal = nn.combine_masks(nn.make_causal_mask(targets), nn.make_attention_mask(targets > 0, targets > 0))
        y = self.attend(y, None, causal)
        y = self.mlp(self.attend(y, x, nn.make_attention_mask(targets > 0, inputs > 0)))
        return embed.attend(nn.LayerNorm()(y))


def transformer_with_dropout(num_examples):
    """Translation with smoothed labels; the key is of the old kind, an array of two integers."""
    model = Translator()
    inputs, _ = sentences(num_examples)
    batch = {"inputs": inputs, "targets": np.roll(inputs, 1, axis=0)[:, :5]}

    def loss(params, batch, key):
        logits = model.apply({"params": params}, batch["inputs"], batch["targets"], rngs={"dropout": key})
        targets = optax.smooth_labels(jax.nn.one_hot(batch["targets"], VOCABULARY), 0.1)
        weights = jnp.where(batch["targets"] > 0, 1, 0).astype(logits.dtype)
        losses = -jnp.sum(targets * nn.log_softmax(logits), axis=-1) * weights
        normaliser = weights.sum()
        return losses.sum() / normaliser, {"logits": logits, "normaliser": normaliser}

    return loss, params_of(model, batch["inputs"], batch["targets"]), batch, (jax.random.PRNGKey(5),)


class SequenceClassifier(nn.Module):
    @nn.compact
    def __call__(self, ids, lengths):
        x = nn.Embed(VOCABULARY, 5)(ids)
        # The cells make their first state in the dtype of the parameters, which is given here and not found out.
        forward = nn.RNN(nn.OptimizedLSTMCell(6, param_dtype=jnp.float64))
        backward = nn.RNN(nn.GRUCell(6, param_dtype=jnp.float64))
        x = nn.Bidirectional(forward, backward)(x, seq_lengths=lengths)
        last = nn.RNN(nn.OptimizedLSTMCell(7, param_dtype=jnp.float64), return_carry=True)
        (_, last), _ = last(x, seq_lengths=lengths)
        return nn.Dense(3)(last)


def lstm_of_unequal_lengths(num_examples):
    """Recurrences over time in both directions, then the state at the end of each sentence."""
    model = SequenceClassifier()
    ids, lengths = sentences(num_examples)
    batch = {"ids": ids, "lengths": lengths, "labels": lengths % 3}

    def loss(params, batch):
        logits = model.apply({"params": params}, batch["ids"], batch["lengths"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    return loss, params_of(model, ids, lengths), batch, ()


def recurrence_over_time(num_examples):
    """A language model by `lax.scan` over time, time first, whose state stands still after the end of a sentence."""
    ids, lengths = sentences(num_examples)
    width = 6
    params = {
        "tokens": shape(VOCABULARY, width),
        "input": shape(width, 4 * width),
        "recurrent": shape(width, 4 * width),
        "output": shape(width, VOCABULARY),
    }

    def loss(params, batch):
        ids, lengths = batch
        embedded = jnp.swapaxes(params["tokens"][ids[:, :-1]], 0, 1)

        def step(carry, inputs):
            hidden, cell = carry
            x, time = inputs
            gates = x @ params["input"] + hidden @ params["recurrent"]
            keep, write, read, candidate = jnp.split(gates, 4, axis=-1)
            new_cell = jax.nn.sigmoid(keep) * cell + jax.nn.sigmoid(write) * jnp.tanh(candidate)
            new_hidden = jax.nn.sigmoid(read) * jnp.tanh(new_cell)
            running = (time < lengths)[:, None]
            carry = jnp.where(running, new_hidden, hidden), jnp.where(running, new_cell, cell)
            return carry, new_hidden

        zeros = jnp.zeros((ids.shape[0], width), embedded.dtype)
        _, hiddens = lax.scan(step, (zeros, zeros), (embedded, jnp.arange(embedded.shape[0])))
        logits = jnp.swapaxes(hiddens @ params["output"], 0, 1)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])
        mask = jnp.arange(1, ids.shape[1])[None, :] < lengths[:, None]
        return jnp.sum(jnp.where(mask, losses, 0.0)) / mask.sum()

    return loss, filled(params), (ids, lengths), ()


def mixture_of_experts(num_examples):
    """Two experts of four for each token, with a capacity in each sentence, and the load-balancing loss of Switch.

    That loss multiplies two means over the batch: the share of tokens that an expert gets, and its mean probability.
    """
    ids, _ = sentences(num_examples)
    width, num_experts, capacity = 6, 4, 4
    params = {
        "tokens": shape(VOCABULARY, width),
        "router": shape(width, num_experts),
        "up": shape(num_experts, width, 8),
        "down": shape(num_experts, 8, width),
        "output": shape(width, VOCABULARY),
    }

    def loss(params, ids):
        x = params["tokens"][ids]
        probabilities = jax.nn.softmax(x @ params["router"], axis=-1)
        gates, chosen = lax.top_k(probabilities, 2)
        gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
        wanted = jax.nn.one_hot(chosen, num_experts, dtype=jnp.int32)  # sentence, token, choice, expert
        # Places are given to first choices before second ones, in the order of the tokens.
        ordered = jnp.swapaxes(wanted, 1, 2).reshape(ids.shape[0], -1, num_experts)
        place = (jnp.cumsum(ordered, axis=1) * ordered - 1).reshape(ids.shape[0], 2, -1, num_experts)
        place = jnp.swapaxes(place, 1, 2)
        seats = jax.nn.one_hot(place, capacity, dtype=x.dtype)  # no seat for a place of -1, or beyond the capacity
        combine = jnp.einsum("ntk,ntkec->ntec", gates, seats)
        dispatch = (combine > 0).astype(x.dtype)
        inputs = jnp.einsum("ntec,ntd->encd", dispatch, x)
        hidden = jax.nn.relu(jnp.einsum("encd,edf->encf", inputs, params["up"]))
        outputs = jnp.einsum("encf,efd->encd", hidden, params["down"])
        x = x + jnp.einsum("ntec,encd->ntd", combine, outputs)
        share = jnp.mean(wanted[:, :, 0].astype(x.dtype), axis=(0, 1))
        balance = num_experts * jnp.sum(share * jnp.mean(probabilities, axis=(0, 1)))
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ params["output"], jnp.roll(ids, -1, axis=1))
        return losses.mean() + 0.1 * balance, {"share": share, "balance": balance}

    return loss, filled(params), ids, ()


class FNet(nn.Module):
    """Tokens are mixed by the real part of a Fourier transform over both the sequence and the features."""

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCABULARY, 8)(ids) + self.param("positions", nn.initializers.normal(0.02), (1, ids.shape[1], 8))
        for _ in range(2):
            x = nn.LayerNorm()(x + jnp.fft.fft2(x, axes=(-2, -1)).real)
            x = nn.LayerNorm()(x + nn.Dense(8)(nn.gelu(nn.Dense(12)(x))))
        spectrum = jnp.fft.rfft(x, axis=1)
        return nn.Dense(2)(jnp.abs(spectrum).mean(axis=1))


def fourier_network(num_examples):
    model = FNet()
    ids, lengths = sentences(num_examples)

    def loss(params, batch):
        logits = model.apply({"params": params}, batch["ids"])
        targets = jax.nn.one_hot(batch["labels"], 2)
        return optax.sigmoid_binary_cross_entropy(logits, targets).sum(axis=-1).mean()

    return loss, params_of(model, ids), {"ids": ids, "labels": lengths % 2}, ()
