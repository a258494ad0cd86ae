"""The losses that the playground offers: small ones, each with something to look at.

Each is a complete file. It defines `loss(params, batch)`, and `example()`, which returns `(params, batch)`.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class PlaygroundLoss:
    """A loss to look at.

    Args:
      name: its name in an address, in lower case.
      title: its name for people.
      look_at: what to look at, in one sentence.
      source: the file.
      is_coupled: whether it needs rows of several examples at once.
    """

    name: str
    title: str
    look_at: str
    source: str
    is_coupled: bool = False


def named(name: str) -> PlaygroundLoss:
    """The loss of that name.

    >>> named("rmse").title
    'Root mean squared error'
    """
    return next(loss for loss in LOSSES if loss.name == name)


LOSSES: tuple[PlaygroundLoss, ...] = (
    PlaygroundLoss(
        "squares",
        "Mean squared error",
        "One pass is enough: every line is per example, until the mean adds the examples up.",
        """\
import jax
import jax.numpy as jnp


def loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["in"])
    error = hidden @ params["out"] - batch["y"]
    return jnp.mean(error**2)


def example():
    a, b, c, d = jax.random.split(jax.random.key(0), 4)
    params = {"in": 0.3 * jax.random.normal(a, (8, 64)), "out": 0.1 * jax.random.normal(b, (64,))}
    return params, {"x": jax.random.normal(c, (256, 8)), "y": jax.random.normal(d, (256,))}
""",
    ),
    PlaygroundLoss(
        "classifier",
        "Cross entropy of a classifier",
        "The softmax runs over the classes of one example, so it couples nothing.",
        """\
import jax
import jax.numpy as jnp


def layer(params, x):
    return x @ params["weights"] + params["bias"]


def loss(params, batch):
    hidden = jax.nn.relu(layer(params["first"], batch["image"]))
    logits = layer(params["second"], hidden)
    log_probs = jax.nn.log_softmax(logits)
    right = jnp.take_along_axis(log_probs, batch["label"][:, None], axis=1)
    return -jnp.mean(right)


def example():
    a, b, c, d = jax.random.split(jax.random.key(0), 4)
    params = {
        "first": {"weights": 0.1 * jax.random.normal(a, (64, 48)), "bias": jnp.zeros(48)},
        "second": {"weights": 0.1 * jax.random.normal(b, (48, 10)), "bias": jnp.zeros(10)},
    }
    return params, {"image": jax.random.normal(c, (256, 64)), "label": jax.random.randint(d, (256,), 0, 10)}
""",
    ),
    PlaygroundLoss(
        "masked",
        "Masked mean over tokens",
        "It divides by the number of real tokens, which differs between microbatches: a mean of means is wrong here.",
        """\
import jax
import jax.numpy as jnp


def loss(params, batch):
    hidden = jax.nn.gelu(batch["x"] @ params["in"])
    guess = hidden @ params["out"]
    error = (guess - batch["y"]) ** 2
    total = jnp.sum(error * batch["mask"])
    return total / jnp.sum(batch["mask"])


def example():
    a, b, c, d, e = jax.random.split(jax.random.key(0), 5)
    params = {"in": 0.3 * jax.random.normal(a, (8, 32)), "out": 0.1 * jax.random.normal(b, (32,))}
    lengths = jax.random.randint(e, (128, 1), 1, 13)
    return params, {
        "x": jax.random.normal(c, (128, 12, 8)),
        "y": jax.random.normal(d, (128, 12)),
        "mask": (jnp.arange(12) < lengths).astype(jnp.float32),
    }
""",
    ),
    PlaygroundLoss(
        "rmse",
        "Root mean squared error",
        "The root is taken once, of the mean: its factor is known only after the last microbatch, and still one pass "
        "is enough.",
        """\
import jax
import jax.numpy as jnp


def loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["in"])
    error = hidden @ params["out"] - batch["y"]
    mean = jnp.mean(error**2)
    return jnp.sqrt(mean)


def example():
    a, b, c, d = jax.random.split(jax.random.key(0), 4)
    params = {"in": 0.3 * jax.random.normal(a, (8, 64)), "out": 0.1 * jax.random.normal(b, (64,))}
    return params, {"x": jax.random.normal(c, (256, 8)), "y": jax.random.normal(d, (256,))}
""",
    ),
    PlaygroundLoss(
        "dropout",
        "With dropout",
        "The key is the same for all examples, and each microbatch draws its rows of the numbers of the full batch.",
        """\
import jax
import jax.numpy as jnp

KEY = jax.random.key(7)


def loss(params, batch):
    hidden = jax.nn.relu(batch["x"] @ params["in"])
    keep = jax.random.bernoulli(KEY, 0.8, hidden.shape)
    hidden = jnp.where(keep, hidden / 0.8, 0.0)
    error = hidden @ params["out"] - batch["y"]
    return jnp.mean(error**2)


def example():
    a, b, c, d = jax.random.split(jax.random.key(0), 4)
    params = {"in": 0.3 * jax.random.normal(a, (8, 64)), "out": 0.1 * jax.random.normal(b, (64,))}
    return params, {"x": jax.random.normal(c, (256, 8)), "y": jax.random.normal(d, (256,))}
""",
    ),
    PlaygroundLoss(
        "regulariser",
        "With an L2 regulariser",
        "The regulariser is the same for every example, and is added once, not once for each microbatch.",
        """\
import jax
import jax.numpy as jnp


def loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["in"])
    error = hidden @ params["out"] - batch["y"]
    squares = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
    penalty = 0.01 * squares
    fit = jnp.mean(error**2)
    return fit + penalty


def example():
    a, b, c, d = jax.random.split(jax.random.key(0), 4)
    params = {"in": 0.3 * jax.random.normal(a, (8, 64)), "out": 0.1 * jax.random.normal(b, (64,))}
    return params, {"x": jax.random.normal(c, (256, 8)), "y": jax.random.normal(d, (256,))}
""",
    ),
    PlaygroundLoss(
        "contrastive",
        "Contrastive, as CLIP",
        "Every image is compared with every text: embeddings are gathered first, and a second pass computes the "
        "gradient.",
        """\
import jax
import jax.numpy as jnp


def embed(weights, x):
    hidden = jax.nn.gelu(x @ weights["in"])
    out = hidden @ weights["out"]
    return out / jnp.linalg.norm(out, axis=1, keepdims=True)


def loss(params, batch):
    image = embed(params["image"], batch["image"])
    text = embed(params["text"], batch["text"])
    logits = 10 * image @ text.T
    rows = jax.nn.logsumexp(logits, axis=1)
    columns = jax.nn.logsumexp(logits, axis=0)
    return jnp.mean((rows + columns) / 2 - jnp.diag(logits))


def example():
    a, b, c, d, e, f = jax.random.split(jax.random.key(0), 6)
    params = {
        "image": {"in": 0.3 * jax.random.normal(a, (16, 256)), "out": 0.1 * jax.random.normal(b, (256, 8))},
        "text": {"in": 0.3 * jax.random.normal(c, (16, 256)), "out": 0.1 * jax.random.normal(d, (256, 8))},
    }
    return params, {"image": jax.random.normal(e, (128, 16)), "text": jax.random.normal(f, (128, 16))}
""",
        is_coupled=True,
    ),
    PlaygroundLoss(
        "batchnorm",
        "BatchNorm in training",
        "Every example is compared with the mean of all: what comes after that line runs on the full batch.",
        """\
import jax
import jax.numpy as jnp


def batch_norm(x):
    mean = jnp.mean(x, axis=0)
    variance = jnp.mean((x - mean) ** 2, axis=0)
    return (x - mean) / jnp.sqrt(variance + 1e-5)


def loss(params, batch):
    hidden = batch["x"] @ params["in"]
    hidden = jax.nn.relu(batch_norm(hidden))
    error = hidden @ params["out"] - batch["y"]
    return jnp.mean(error**2)


def example():
    a, b, c, d = jax.random.split(jax.random.key(0), 4)
    params = {"in": 0.3 * jax.random.normal(a, (8, 64)), "out": 0.1 * jax.random.normal(b, (64,))}
    return params, {"x": jax.random.normal(c, (256, 8)), "y": jax.random.normal(d, (256,))}
""",
        is_coupled=True,
    ),
    PlaygroundLoss(
        "experts",
        "Balance of a mixture of experts",
        "A product of means over the batch: no example meets another, and yet the means of microbatches would be "
        "wrong, so there are two passes.",
        """\
import jax
import jax.numpy as jnp


def loss(params, batch):
    gates = jax.nn.softmax(batch["x"] @ params["router"])
    outputs = jnp.einsum("nd,edh->neh", batch["x"], params["experts"])
    guess = jnp.einsum("ne,neh,h->n", gates, jnp.tanh(outputs), params["out"])
    fit = jnp.mean((guess - batch["y"]) ** 2)
    chosen = jax.nn.one_hot(jnp.argmax(gates, axis=1), 4)
    share = jnp.mean(chosen, axis=0)
    gate = jnp.mean(gates, axis=0)
    balance = 4 * jnp.sum(share * gate)
    return fit + 0.1 * balance


def example():
    a, b, c, d, e = jax.random.split(jax.random.key(0), 5)
    params = {
        "router": jax.random.normal(a, (8, 4)),
        "experts": 0.3 * jax.random.normal(b, (4, 8, 16)),
        "out": 0.3 * jax.random.normal(c, (16,)),
    }
    return params, {"x": jax.random.normal(d, (128, 8)), "y": jax.random.normal(e, (128,))}
""",
    ),
    PlaygroundLoss(
        "hardest",
        "The hardest quarter",
        "To know which examples are the hardest, it needs the errors of all of them: top_k couples.",
        """\
import jax
import jax.numpy as jnp


def loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["in"])
    guess = hidden @ params["out"]
    error = (guess - batch["y"]) ** 2
    hardest, _ = jax.lax.top_k(error, len(error) // 4)
    return jnp.mean(hardest)


def example():
    a, b, c, d = jax.random.split(jax.random.key(0), 4)
    params = {"in": 0.3 * jax.random.normal(a, (8, 64)), "out": 0.1 * jax.random.normal(b, (64,))}
    return params, {"x": jax.random.normal(c, (256, 8)), "y": jax.random.normal(d, (256,))}
""",
        is_coupled=True,
    ),
    PlaygroundLoss(
        "weights",
        "A weight for each example",
        "A weighted mean is a ratio of two sums: the sum of the weights is known before the first microbatch.",
        """\
import jax
import jax.numpy as jnp


def loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["in"])
    error = (hidden @ params["out"] - batch["y"]) ** 2
    share = batch["weight"] / jnp.sum(batch["weight"])
    return jnp.sum(share * error)


def example():
    a, b, c, d, e = jax.random.split(jax.random.key(0), 5)
    params = {"in": 0.3 * jax.random.normal(a, (8, 64)), "out": 0.1 * jax.random.normal(b, (64,))}
    return params, {
        "x": jax.random.normal(c, (256, 8)),
        "y": jax.random.normal(d, (256,)),
        "weight": jax.random.uniform(e, (256,)),
    }
""",
    ),
    PlaygroundLoss(
        "attention",
        "A tiny attention model",
        "Attention compares the tokens of one sequence, never two sequences: all of it is per example.",
        """\
import jax
import jax.numpy as jnp


def block(x, weights):
    queries, keys, values = x @ weights["q"], x @ weights["k"], x @ weights["v"]
    scores = jnp.einsum("ntd,nsd->nts", queries, keys) / 4
    causal = jnp.tril(jnp.ones(scores.shape[1:], bool))
    mixed = jax.nn.softmax(jnp.where(causal, scores, -1e9)) @ values
    return x + jax.nn.gelu(mixed @ weights["up"]) @ weights["down"], None


def loss(params, batch):
    x = params["embed"][batch["tokens"][:, :-1]]
    x, _ = jax.lax.scan(block, x, params["blocks"])
    log_probs = jax.nn.log_softmax(x @ params["embed"].T)
    right = jnp.take_along_axis(log_probs, batch["tokens"][:, 1:, None], axis=2)
    return -jnp.mean(right)


def example():
    keys = iter(jax.random.split(jax.random.key(0), 7))
    shapes = {"q": (16, 16), "k": (16, 16), "v": (16, 16), "up": (16, 64), "down": (64, 16)}
    blocks = {name: 0.2 * jax.random.normal(next(keys), (2, *shape)) for name, shape in shapes.items()}
    params = {"embed": 0.3 * jax.random.normal(next(keys), (32, 16)), "blocks": blocks}
    return params, {"tokens": jax.random.randint(next(keys), (64, 17), 0, 32)}
""",
    ),
    PlaygroundLoss(
        "vocabulary",
        "Logits of a large vocabulary",
        "The logits are far larger than anything else: see how steeply the memory grows with the microbatch.",
        """\
import jax
import jax.numpy as jnp


def loss(params, batch):
    hidden = jnp.tanh(params["embed"][batch["token"]])
    logits = hidden @ params["embed"].T
    log_total = jax.nn.logsumexp(logits, axis=1)
    of_next = jnp.take_along_axis(logits, batch["next"][:, None], axis=1)[:, 0]
    return jnp.mean(log_total - of_next)


def example():
    a, b, c = jax.random.split(jax.random.key(0), 3)
    params = {"embed": 0.3 * jax.random.normal(a, (2048, 16))}
    return params, {"token": jax.random.randint(b, (256,), 0, 2048), "next": jax.random.randint(c, (256,), 0, 2048)}
""",
    ),
)
