"""Loops that compute the gradient of a batch in pieces: twenty published bugs, and twenty loops that are right.

Each bug has the mechanism that its project had, in code of our own and with a small model. `published` says where it
was found. `cause` is the name of the `Cause` that an audit must find. The right loops are as varied as the bugs, and
an audit must accuse none of them.

A candidate is what an audit takes: a function that returns gradients, or a step of an optimizer, or a step of a state.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import anybatch as ab


@dataclasses.dataclass(frozen=True)
class Problem:
    """The arguments of an audit: `audit(candidate, loss, params, batch, *args, **options)`."""

    candidate: Callable[..., Any]
    loss: Callable[..., Any]
    params: Any
    batch: Any
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Loop:
    """A published bug, or a right loop, whose `cause` is None.

    Attributes:
      topic: "sums" for how gradients are added up, "batch" for what depends on the batch as a whole, such as random
        numbers, and "steps" for optimizers, devices, dtypes and libraries.
      published: the project and the place; for a right loop, what it does.
      make: returns the problem. It is a function because arrays and meshes need JAX to be set up.
      tolerance: the relative difference that a right loop may have in float64.
      central: whether `make test` runs it.
    """

    name: str
    topic: str
    published: str
    make: Callable[[], Problem]
    cause: str | None = None
    tolerance: float = 1e-12
    central: bool = False


BUGS: list[Loop] = []
RIGHT: list[Loop] = []


def bug(topic, published, cause, **options):
    return lambda make: BUGS.append(Loop(make.__name__, topic, published, make, cause, **options)) or make


def right(topic, published, **options):
    return lambda make: RIGHT.append(Loop(make.__name__, topic, published, make, **options)) or make


# Models, losses and batches.


def mlp_params():
    random = np.random.default_rng(0)
    return {"w": jnp.asarray(random.normal(size=(4, 6)) / 2), "v": jnp.asarray(random.normal(size=6) / 2)}


def examples(number=12):
    random = np.random.default_rng(1)
    return {"x": jnp.asarray(random.normal(size=(number, 4))), "y": jnp.asarray(random.normal(size=number))}


def predict(params, x):
    return jnp.tanh(x @ params["w"]) @ params["v"]


def squares(params, batch):
    return (predict(params, batch["x"]) - batch["y"]) ** 2


def mean_loss(params, batch):
    return jnp.mean(squares(params, batch))


def sum_loss(params, batch):
    return jnp.sum(squares(params, batch))


def text_params():
    random = np.random.default_rng(2)
    return {"embedding": jnp.asarray(random.normal(size=(11, 4))), "head": jnp.asarray(random.normal(size=(4, 11)))}


def sentences(number=12, length=6):
    """Sentences of very unequal lengths, in an order in which the microbatches differ, too."""
    random = np.random.default_rng(3)
    lengths = 1 + (np.arange(number) * length) // number
    mask = (np.arange(length) < lengths[:, None]).astype(np.float64)
    ids = random.integers(0, 11, (number, length + 1))
    return {"ids": jnp.asarray(ids[:, :-1]), "labels": jnp.asarray(ids[:, 1:]), "mask": jnp.asarray(mask)}


def token_losses(params, batch):
    """The cross entropies of all tokens; those of padding are zero."""
    hidden = jnp.tanh(params["embedding"][batch["ids"]])
    return batch["mask"] * cross_entropies(hidden @ params["head"], batch["labels"])


def cross_entropies(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)[..., 0]


def token_sum(params, batch):
    return jnp.sum(token_losses(params, batch))


def token_mean(params, batch):
    return token_sum(params, batch) / jnp.sum(batch["mask"])


def towers():
    random = np.random.default_rng(4)
    return {"image": jnp.asarray(random.normal(size=(4, 3))), "text": jnp.asarray(random.normal(size=(5, 3)))}


def pairs(number=12):
    random = np.random.default_rng(5)
    return {"image": jnp.asarray(random.normal(size=(number, 4))), "text": jnp.asarray(random.normal(size=(number, 5)))}


def encode(params, batch):
    embeddings = {name: jnp.tanh(batch[name] @ params[name]) for name in ("image", "text")}
    return jax.tree.map(lambda rows: rows / jnp.linalg.norm(rows, axis=1, keepdims=True), embeddings)


def contrast(embeddings):
    """Each image must find its own text among those of the batch."""
    logits = 5 * embeddings["image"] @ embeddings["text"].T
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(logits)))


def contrastive_loss(params, batch):
    return contrast(encode(params, batch))


def router_params():
    random = np.random.default_rng(6)
    return {"router": jnp.asarray(random.normal(size=(4, 3))), "experts": jnp.asarray(random.normal(size=(3, 4)))}


def chosen_experts(params, x):
    """The probabilities of the experts for each row, and the one that is chosen, as zeros and a one."""
    probabilities = jax.nn.softmax(x @ params["router"])
    return probabilities, jax.nn.one_hot(jnp.argmax(probabilities, axis=-1), 3, dtype=probabilities.dtype)


def expert_loss(params, batch):
    _, chosen = chosen_experts(params, batch["x"])
    return jnp.mean((jnp.sum((chosen @ params["experts"]) * batch["x"], axis=-1) - batch["y"]) ** 2)


# Cutting a batch.


def count(batch):
    return jax.tree.leaves(batch)[0].shape[0]


def slices(batch, size):
    """Microbatches of this size. The last one may be smaller."""
    return [
        jax.tree.map(lambda leaf, start=start: leaf[start : start + size], batch)
        for start in range(0, count(batch), size)
    ]


def stacked(batch, size):
    return jax.tree.map(lambda leaf: leaf.reshape(-1, size, *leaf.shape[1:]), batch)


def zeros(tree):
    return jax.tree.map(jnp.zeros_like, tree)


def add(one, other):
    return jax.tree.map(jnp.add, one, other)


def times(tree, factor):
    return jax.tree.map(lambda leaf: leaf * factor, tree)


def mesh():
    return Mesh(np.asarray(jax.devices()[:4]), ("data",), axis_types=(AxisType.Auto,))


# The bugs.


@bug(
    "sums",
    "transformers before 4.46 (issues 24725, 34191): a mean of means over unequal token counts",
    "MEAN_OF_MEANS",
    central=True,
)
def transformers_mean_of_means():
    @jax.jit
    def candidate(params, batch):
        microbatches = slices(batch, 3)
        value, grads = 0.0, zeros(params)
        for microbatch in microbatches:
            # The model's own loss is a mean over the tokens that it sees.
            loss, new = jax.value_and_grad(token_mean)(params, microbatch)
            value, grads = value + loss / len(microbatches), add(grads, times(new, 1 / len(microbatches)))
        return value, grads

    return Problem(candidate, token_mean, text_params(), sentences())


@bug(
    "sums",
    "optax.microbatching: the default accumulator, SUM, with a mean loss",
    "NUMBER_OF_MICROBATCHES",
    central=True,
)
def optax_sum_of_means():
    candidate = optax.microbatching.microbatch(jax.value_and_grad(mean_loss), argnums=1, microbatch_size=3)
    return Problem(jax.jit(candidate), mean_loss, mlp_params(), examples())


@bug(
    "sums",
    "ms-swift before PR 10116, trl's DAPO loss: divided by the tokens of all steps, and by the steps",
    "NUMBER_OF_MICROBATCHES",
)
def ms_swift_divides_twice():
    @jax.jit
    def candidate(params, batch):
        steps = 4
        tokens = jnp.sum(batch["mask"])  # of the whole accumulation window

        def step(grads, microbatch):
            new = jax.grad(lambda params: token_sum(params, microbatch) / tokens / steps)(params)
            return add(grads, new), None

        return lax.scan(step, zeros(params), stacked(batch, 3))[0]

    return Problem(candidate, token_mean, text_params(), sentences())


@bug(
    "sums",
    "keras issue 20241, optax.MultiSteps: the gradient of a short last microbatch counts as much as a full one",
    "MEAN_OF_MEANS",
    central=True,
)
def multi_steps_short_last():
    optimizer = optax.MultiSteps(optax.sgd(0.1), 3)

    @jax.jit
    def candidate(params, opt_state, batch):
        updates, opt_state = optimizer.update(jax.grad(mean_loss)(params, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    options = {"optimizer": optimizer, "reference_optimizer": optax.sgd(0.1), "calls": "microbatches"}
    return Problem(candidate, mean_loss, mlp_params(), examples(), options={**options, "microbatch_size": 5})


def dropout_loss(params, batch, key):
    hidden = jnp.tanh(batch["x"] @ params["w"])
    hidden = jnp.where(jax.random.bernoulli(key, 0.5, hidden.shape), 2 * hidden, jnp.zeros_like(hidden))
    return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)


@bug(
    "batch",
    "vision_transformer issue 286: accumulate_gradient has one key, so every microbatch has the same dropout mask",
    "SAME_RANDOM_NUMBERS",
    central=True,
)
def vision_transformer_one_key():
    @jax.jit
    def candidate(params, batch, key):
        steps, size = 4, count(batch) // 4

        def microbatch(i):
            return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, i * size, size), batch)

        def step(i, total):
            return add(total, jax.value_and_grad(dropout_loss)(params, microbatch(i), key))

        first = jax.value_and_grad(dropout_loss)(params, microbatch(0), key)
        return times(lax.fori_loop(1, steps, step, first), 1 / steps)

    return Problem(candidate, dropout_loss, mlp_params(), examples(), (jax.random.key(7),))


def projected_loss(params, batch, key):
    """A random matrix that is the same for all examples."""
    hidden = jnp.tanh(batch["x"] @ params["w"])
    projection = jax.random.normal(key, (6, 6), hidden.dtype)
    return jnp.mean((hidden @ projection @ params["v"] - batch["y"]) ** 2)


@bug(
    "batch",
    "alpa issue 592: a random matrix for the whole batch is drawn again for each microbatch",
    "OTHER_RANDOM_NUMBERS",
)
def alpa_draws_again():
    @jax.jit
    def candidate(params, batch, key):
        def step(total, keyed):
            key, microbatch = keyed
            return add(total, jax.value_and_grad(projected_loss)(params, microbatch, key)), None

        zero = (jnp.zeros((), params["w"].dtype), zeros(params))
        total, _ = lax.scan(step, zero, (jax.random.split(key, 4), stacked(batch, 3)))
        return times(total, 1 / 4)

    return Problem(candidate, projected_loss, mlp_params(), examples(), (jax.random.key(8),))


def batch_norm_loss(params, batch):
    hidden = batch["x"] @ params["w"]
    mean, variance = jnp.mean(hidden, axis=0, keepdims=True), jnp.var(hidden, axis=0, keepdims=True)
    hidden = (hidden - mean) * lax.rsqrt(variance + 0.1)
    return jnp.mean((jnp.tanh(hidden) @ params["v"] - batch["y"]) ** 2)


@bug(
    "batch",
    "yolov5 issue 1630, runai issue 14: BatchNorm with the statistics of each microbatch",
    "BATCH_STATISTICS",
    central=True,
)
def yolov5_batch_norm():
    @jax.jit
    def candidate(params, batch):
        def step(total, microbatch):
            return add(total, jax.grad(batch_norm_loss)(params, microbatch)), None

        return times(lax.scan(step, zeros(params), stacked(batch, 4))[0], 1 / 3)

    return Problem(candidate, batch_norm_loss, mlp_params(), examples())


@bug(
    "batch",
    "pylate issue 70, GradCache issue 7: a contrastive loss with the negatives of one microbatch",
    "BATCH_STATISTICS",
    central=True,
)
def contrastive_own_negatives():
    @jax.jit
    def candidate(params, batch):
        parts = [jax.value_and_grad(contrastive_loss)(params, microbatch) for microbatch in slices(batch, 4)]
        return jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *parts)

    return Problem(candidate, contrastive_loss, towers(), pairs())


def balanced_loss(params, batch):
    """The fraction of rows that an expert gets, times its mean probability: a product of two means over the batch."""
    probabilities, chosen = chosen_experts(params, batch["x"])
    return expert_loss(params, batch) + jnp.sum(jnp.mean(chosen, axis=0) * jnp.mean(probabilities, axis=0))


@bug(
    "batch",
    "Megatron-LM aux_loss, torchtitan PR 3000: the load of experts is balanced in each microbatch",
    "BATCH_STATISTICS",
)
def megatron_balance_per_microbatch():
    @jax.jit
    def candidate(params, batch):
        grads = jax.vmap(jax.grad(balanced_loss), in_axes=(None, 0))(params, stacked(batch, 3))
        return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), grads)

    return Problem(candidate, balanced_loss, router_params(), examples())


@bug(
    "steps",
    "DeepSpeed issue 2768: with ZeRO, gradients are accumulated in bfloat16",
    "NARROW_ACCUMULATOR",
    central=True,
)
def deepspeed_bfloat16_buffer():
    @jax.jit
    def candidate(params, batch):
        def step(buffer, microbatch):
            grads = jax.grad(mean_loss)(params, microbatch)
            return jax.tree.map(lambda total, new: total + new.astype(jnp.bfloat16), buffer, grads), None

        buffer = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, dtype=jnp.bfloat16), params)
        buffer, _ = lax.scan(step, buffer, stacked(batch, 1))
        return jax.tree.map(lambda total, leaf: total.astype(leaf.dtype) / count(batch), buffer, params)

    return Problem(candidate, mean_loss, mlp_params(), examples(512))


@bug(
    "steps",
    "jax issue 3970 and shard_map since: the gradient of replicated parameters is summed already, and again",
    "PSUM_TWICE",
    central=True,
)
def jax_psum_twice():
    def shard(params, batch):
        value, grads = jax.value_and_grad(mean_loss)(params, batch)
        # The cotangent of a replicated value is a psum: these gradients are sums over all devices.
        return lax.pmean(value, "data"), lax.pmean(grads, "data")

    candidate = jax.shard_map(shard, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P())
    return Problem(jax.jit(candidate), mean_loss, mlp_params(), examples())


@bug(
    "steps",
    "nanodl issue 12: no pmean, so each device trains on its own part of the batch",
    "PSUM_MISSING",
    central=True,
)
def nanodl_no_pmean():
    def shard(params, batch):
        return jax.value_and_grad(mean_loss)(params, batch)

    candidate = jax.shard_map(shard, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    return Problem(jax.jit(candidate), mean_loss, mlp_params(), examples())


@bug(
    "sums",
    "mlx-lm before PR 1413: what does not fill the accumulation steps is dropped",
    "DROPPED_REMAINDER",
    central=True,
)
def mlx_drops_the_rest():
    @jax.jit
    def candidate(params, batch):
        size = 3
        steps = count(batch) // size
        whole = jax.tree.map(lambda leaf: leaf[: steps * size], batch)
        value, grads = 0.0, zeros(params)
        for microbatch in slices(whole, size):
            new_value, new_grads = jax.value_and_grad(mean_loss)(params, microbatch)
            value, grads = value + new_value / steps, add(grads, times(new_grads, 1 / steps))
        return value, grads

    return Problem(candidate, mean_loss, mlp_params(), examples(11))


@bug(
    "steps",
    "gpt-neox issue 405, OpenPrompt issue 106: step() inside the accumulation loop",
    "OPTIMIZER_PER_MICROBATCH",
    central=True,
)
def gpt_neox_steps_each_time():
    optimizer = optax.adam(0.1)

    @jax.jit
    def candidate(params, opt_state, batch):
        def step(carry, microbatch):
            params, opt_state = carry
            updates, opt_state = optimizer.update(jax.grad(mean_loss)(params, microbatch), opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), None

        (params, opt_state), _ = lax.scan(step, (params, opt_state), stacked(batch, 3))
        return params, opt_state

    return Problem(candidate, mean_loss, mlp_params(), examples(), options={"optimizer": optimizer})


@bug(
    "sums",
    "torchtitan before PR 3575: zero_grad() before each backward pass leaves the last microbatch",
    "LAST_MICROBATCH",
    central=True,
)
def torchtitan_zeroes_each_time():
    from flax.training.train_state import TrainState

    @jax.jit
    def candidate(state, batch):
        tokens = jnp.sum(batch["mask"])
        grads = zeros(state.params)
        for microbatch in slices(batch, 3):
            grads = zeros(state.params)
            grads = add(grads, times(jax.grad(token_sum)(state.params, microbatch), 1 / tokens))
        return state.apply_gradients(grads=grads)

    params = text_params()
    state = TrainState.create(apply_fn=token_mean, params=params, tx=optax.sgd(0.1))
    return Problem(candidate, token_mean, params, sentences(), options={"state": state})


def tiled(head, hidden, labels, mask):
    """The cross entropies of all tokens in tiles, each with its own backward pass. One factor is forgotten."""

    def tile_sum(head, hidden, labels, mask):
        return jnp.sum(mask * cross_entropies(hidden @ head, labels))

    @jax.custom_vjp
    def total(head, hidden):
        def step(value, tile):
            return value + tile_sum(head, *tile), None

        return lax.scan(step, jnp.zeros((), hidden.dtype), (hidden, labels, mask))[0]

    def forward(head, hidden):
        return total(head, hidden), (head, hidden)

    def backward(residuals, cotangent):
        head, hidden = residuals

        def step(of_head, tile):
            hidden, labels, mask = tile
            new, of_hidden = jax.grad(tile_sum, (0, 1))(head, hidden, labels, mask)
            return of_head + new, of_hidden

        of_head, of_hidden = lax.scan(step, jnp.zeros_like(head), (hidden, labels, mask))
        return cotangent * of_head, of_hidden  # the second one lacks the cotangent

    total.defvjp(forward, backward)
    return total(head, hidden)


@bug(
    "sums",
    "MaxText before PR 4699: vocabulary tiling, where all gradients below the head are 65,528 times too large",
    "SCALE",
    central=True,
)
def maxtext_tiles():
    def loss_of_tiles(params, batch):
        hidden = jnp.tanh(params["embedding"][batch["ids"]])
        return tiled(params["head"], hidden, batch["labels"], batch["mask"]) / jnp.sum(batch["mask"])

    return Problem(jax.jit(jax.value_and_grad(loss_of_tiles)), token_mean, text_params(), sentences())


def clipped(tree, most):
    return optax.clip_by_global_norm(most).update(tree, optax.EmptyState())[0]


@bug(
    "steps",
    "transformers before PR 1580 (issues 986, 1563): clip_grad_norm_ after each backward pass",
    "CLIPPED",
    central=True,
)
def transformers_clips_each_time():
    optimizer = optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(0.1))

    @jax.jit
    def candidate(params, opt_state, batch):
        grads = zeros(params)
        for microbatch in slices(batch, 3):
            grads = clipped(add(grads, times(jax.grad(mean_loss)(params, microbatch), 1 / 4)), 0.3)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return Problem(candidate, mean_loss, mlp_params(), examples(), options={"optimizer": optimizer})


@bug(
    "sums",
    "Opacus before PR 707: ghost clipping adds to a sum that is the same buffer as the gradient",
    "MEAN_OF_MEANS",
)
def opacus_one_buffer():
    @jax.jit
    def candidate(params, batch):
        grad = zeros(params)
        for number, microbatch in enumerate(slices(batch, 4)):
            grad = add(grad, jax.grad(sum_loss)(params, microbatch))  # backward() adds to p.grad
            if number > 0:
                grad = add(grad, grad)  # p.summed_grad += p.grad, and both are one buffer
        return times(grad, 1 / count(batch))

    return Problem(candidate, mean_loss, mlp_params(), examples())


@bug(
    "sums",
    "transformers 4.46 (issue 35204): the loss that is logged is not divided by the steps",
    "VALUE_ONLY",
    central=True,
)
def transformers_logs_a_sum():
    @jax.jit
    def candidate(params, batch):
        logged, grads = 0.0, zeros(params)
        for microbatch in slices(batch, 3):
            loss, new = jax.value_and_grad(mean_loss)(params, microbatch)
            logged, grads = logged + loss, add(grads, times(new, 1 / 4))
        return logged, grads

    return Problem(candidate, mean_loss, mlp_params(), examples())


def routed_loss(params, batch):
    """The router is trained by its penalty alone, since a choice has no derivative."""
    penalty = jnp.mean(jax.nn.logsumexp(batch["x"] @ params["router"], axis=-1) ** 2)
    return expert_loss(params, batch) + 0.1 * penalty


@bug(
    "batch",
    "NeMo Automodel issue 1408: the gradient of the auxiliary loss never reaches the router",
    "NOT_TRAINED",
    central=True,
)
def automodel_router():
    def detached(params, batch):
        penalty = jnp.mean(jax.nn.logsumexp(batch["x"] @ params["router"], axis=-1) ** 2)
        return expert_loss(params, batch) + 0.1 * lax.stop_gradient(penalty)

    @jax.jit
    def candidate(params, batch):
        def step(total, microbatch):
            return add(total, jax.value_and_grad(detached)(params, microbatch)), None

        zero = (jnp.zeros((), params["router"].dtype), zeros(params))
        return times(lax.scan(step, zero, stacked(batch, 3))[0], 1 / 4)

    return Problem(candidate, routed_loss, router_params(), examples())


# The right loops.


@right("sums", "a scan that adds up gradients of sums, and one division", central=True)
def scan_of_sums():
    @jax.jit
    def candidate(params, batch):
        def step(total, microbatch):
            return add(total, jax.value_and_grad(sum_loss)(params, microbatch)), None

        zero = (jnp.zeros((), params["w"].dtype), zeros(params))
        return times(lax.scan(step, zero, stacked(batch, 3))[0], 1 / count(batch))

    return Problem(candidate, mean_loss, mlp_params(), examples())


@right("sums", "each microbatch counts by its tokens", central=True)
def weighted_by_tokens():
    @jax.jit
    def candidate(params, batch):
        tokens, value, grads = 0.0, 0.0, zeros(params)
        for microbatch in slices(batch, 5):
            number = jnp.sum(microbatch["mask"])
            loss, new = jax.value_and_grad(token_mean)(params, microbatch)
            tokens, value, grads = tokens + number, value + number * loss, add(grads, times(new, number))
        return value / tokens, jax.tree.map(lambda leaf: leaf / tokens, grads)

    return Problem(candidate, token_mean, text_params(), sentences())


@right("sums", "optax.microbatching with the MEAN accumulator, and equal microbatches")
def optax_mean_of_means():
    mean = optax.microbatching.AccumulationType.MEAN
    grad = jax.value_and_grad(mean_loss)
    candidate = optax.microbatching.microbatch(grad, argnums=1, microbatch_size=3, accumulator=mean)
    return Problem(jax.jit(candidate), mean_loss, mlp_params(), examples())


@right("steps", "optax.MultiSteps with equal microbatches", central=True)
def multi_steps_equal():
    # In float64 the accumulator must not be narrower than the gradients.
    optimizer = optax.MultiSteps(optax.adam(0.1), 3, accumulator_dtype=None)

    @jax.jit
    def candidate(params, opt_state, batch):
        updates, opt_state = optimizer.update(jax.grad(mean_loss)(params, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    options = {"optimizer": optimizer, "reference_optimizer": optax.adam(0.1), "calls": "microbatches"}
    return Problem(candidate, mean_loss, mlp_params(), examples(), options={**options, "microbatch_size": 4})


@right("sums", "a vmap over microbatches, and the mean of their gradients")
def vmap_of_microbatches():
    @jax.jit
    def candidate(params, batch):
        each = jax.vmap(jax.value_and_grad(mean_loss), in_axes=(None, 0))(params, stacked(batch, 4))
        return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), each)

    return Problem(candidate, mean_loss, mlp_params(), examples())


@right("steps", "a scan on each device, and one psum after it", central=True)
def shard_map_one_psum():
    def shard(params, batch):
        params = jax.tree.map(lambda leaf: lax.pcast(leaf, "data", to="varying"), params)

        def step(total, microbatch):
            value, grads = total
            loss, new = jax.value_and_grad(sum_loss)(params, microbatch)
            return (value + loss, add(grads, new)), None

        zero = (0 * jnp.sum(batch["y"]), zeros(params))
        total, _ = lax.scan(step, zero, stacked(batch, 1))
        return times(lax.psum(total, "data"), 1 / 12)

    candidate = jax.shard_map(shard, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P())
    return Problem(jax.jit(candidate), mean_loss, mlp_params(), examples())


@right("steps", "jit with a sharded batch: the compiler adds the collective", central=True)
def jit_of_sharded_batch():
    rows = NamedSharding(mesh(), P("data"))
    everywhere = NamedSharding(mesh(), P())
    compiled = jax.jit(jax.value_and_grad(token_mean), in_shardings=(everywhere, rows), out_shardings=everywhere)

    def candidate(params, batch):
        return compiled(jax.device_put(params, everywhere), jax.device_put(batch, rows))

    return Problem(candidate, token_mean, text_params(), sentences())


@right("batch", "GradCache: embeddings first, then their cotangents, microbatch by microbatch", central=True)
def gradcache_two_passes():
    @jax.jit
    def candidate(params, batch):
        microbatches = stacked(batch, 3)
        embeddings = lax.map(lambda each: encode(params, each), microbatches)
        together = jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), embeddings)
        value, cotangents = jax.value_and_grad(contrast)(together)

        def step(grads, microbatch_and_cotangent):
            microbatch, cotangent = microbatch_and_cotangent
            _, backward = jax.vjp(lambda params: encode(params, microbatch), params)
            return add(grads, backward(cotangent)[0]), None

        grads, _ = lax.scan(step, zeros(params), (microbatches, stacked(cotangents, 3)))
        return value, grads

    return Problem(candidate, contrastive_loss, towers(), pairs())


def keyed_loss(params, batch, key):
    """Each example has its own key, from its number in the batch."""

    def one(number, x, y):
        hidden = jnp.tanh(x @ params["w"])
        keep = jax.random.bernoulli(jax.random.fold_in(key, number), 0.5, hidden.shape)
        return (jnp.where(keep, 2 * hidden, jnp.zeros_like(hidden)) @ params["v"] - y) ** 2

    return jnp.mean(jax.vmap(one)(batch["number"], batch["x"], batch["y"]))


@right("batch", "dropout with a key of each example, which no cut of the batch changes", central=True)
def keys_of_examples():
    @jax.jit
    def candidate(params, batch, key):
        def step(total, microbatch):
            return add(total, jax.value_and_grad(keyed_loss)(params, microbatch, key)), None

        zero = (jnp.zeros((), params["w"].dtype), zeros(params))
        return times(lax.scan(step, zero, stacked(batch, 4))[0], 1 / 3)

    batch = {**examples(), "number": jnp.arange(12)}
    return Problem(candidate, keyed_loss, mlp_params(), batch, (jax.random.key(9),))


@right("steps", "bfloat16 parameters with float32 accumulators", tolerance=2**-6, central=True)
def bfloat16_parameters():
    @jax.jit
    def candidate(params, batch):
        def step(total, microbatch):
            grads = jax.grad(mean_loss)(params, microbatch)
            return jax.tree.map(lambda old, new: old + new.astype(jnp.float32), total, grads), None

        wide = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, dtype=jnp.float32), params)
        return times(lax.scan(step, wide, stacked(batch, 4))[0], 1 / (count(batch) // 4))

    params, batch = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (mlp_params(), examples(512)))
    return Problem(candidate, mean_loss, params, batch)


@right("steps", "Flax Linen with a TrainState, which the step donates", central=True)
def linen_train_state():
    import flax.linen as nn
    from flax.training.train_state import TrainState

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1, param_dtype=x.dtype)(nn.tanh(nn.Dense(5, param_dtype=x.dtype)(x)))[..., 0]

    def loss(params, batch):
        return jnp.mean((model.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)

    @functools.partial(jax.jit, donate_argnums=0)
    def candidate(state, batch):
        def step(grads, microbatch):
            return add(grads, jax.grad(loss)(state.params, microbatch)), None

        grads, _ = lax.scan(step, zeros(state.params), stacked(batch, 3))
        return state.apply_gradients(grads=times(grads, 1 / 4))

    model, batch = Model(), examples()
    params = model.init(jax.random.key(0), batch["x"])["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(0.01))
    return Problem(candidate, loss, params, batch, options={"state": state})


@right("steps", "Flax NNX: a step that changes the model and its optimizer in place")
def nnx_step():
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, dtype, rngs):
            self.first = nnx.Linear(4, 5, param_dtype=dtype, rngs=rngs)
            self.last = nnx.Linear(5, 1, param_dtype=dtype, rngs=rngs)

        def __call__(self, x):
            return self.last(nnx.tanh(self.first(x)))[..., 0]

    def loss(model, batch):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    @nnx.jit
    def candidate(model, optimizer, batch):
        parts = [nnx.value_and_grad(loss)(model, microbatch) for microbatch in slices(batch, 4)]
        value, grads = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *parts)
        optimizer.update(model, grads)
        return value

    batch = examples()
    model = Model(batch["x"].dtype, nnx.Rngs(0))
    return Problem(
        candidate, loss, model, batch, options={"state": nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)}
    )


@right("steps", "Equinox: eqx.filter_value_and_grad of each microbatch")
def equinox_model():
    import equinox as eqx

    def loss(model, batch):
        return jnp.mean((jax.vmap(model)(batch["x"])[:, 0] - batch["y"]) ** 2)

    @eqx.filter_jit
    def candidate(model, batch):
        parts = [eqx.filter_value_and_grad(loss)(model, microbatch) for microbatch in slices(batch, 4)]
        return jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *parts)

    batch = examples()
    model = eqx.nn.MLP(4, 1, 5, 1, activation=jnp.tanh, dtype=batch["x"].dtype, key=jax.random.key(0))
    return Problem(candidate, loss, model, batch)


@right(
    "batch",
    "anybatch.value_and_grad of a loss with BatchNorm, in microbatches that do not divide the batch",
    central=True,
)
def anybatch_value_and_grad():
    return Problem(ab.value_and_grad(batch_norm_loss, microbatch_size=5), batch_norm_loss, mlp_params(), examples())


@right("sums", "a Python loop around a jitted step that donates its accumulator")
def loop_that_donates():
    @jax.jit
    def start(params):
        return jnp.zeros((), params["w"].dtype), zeros(params)

    def step(total, params, microbatch, share):
        return add(total, times(jax.value_and_grad(mean_loss)(params, microbatch), share))

    step = jax.jit(step, donate_argnums=0)

    def candidate(params, batch):
        total = start(params)
        for microbatch in slices(batch, 4):
            total = step(total, params, microbatch, count(microbatch) / count(batch))
        return total

    return Problem(candidate, mean_loss, mlp_params(), examples())


@right("sums", "a remainder that counts by its number of examples", central=True)
def remainder_that_counts():
    @jax.jit
    def candidate(params, batch):
        parts = slices(batch, 4)
        shares = [count(microbatch) / count(batch) for microbatch in parts]
        each = [times(jax.grad(mean_loss)(params, part), share) for part, share in zip(parts, shares, strict=True)]
        return jax.tree.map(lambda *leaves: sum(leaves), *each)

    return Problem(candidate, mean_loss, mlp_params(), examples(11))


@right("steps", "a step of Adam after the scan", central=True)
def adam_step():
    optimizer = optax.adam(0.01)

    @jax.jit
    def candidate(params, opt_state, batch):
        def step(grads, microbatch):
            return add(grads, jax.grad(mean_loss)(params, microbatch)), None

        grads, _ = lax.scan(step, zeros(params), stacked(batch, 2))
        updates, opt_state = optimizer.update(times(grads, 1 / 6), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return Problem(candidate, mean_loss, mlp_params(), examples(), options={"optimizer": optimizer})


@right("steps", "clipping after the loop, as part of the optimizer", central=True)
def clips_once():
    optimizer = optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(0.01))

    @jax.jit
    def candidate(params, opt_state, batch):
        grads = zeros(params)
        for microbatch in slices(batch, 3):
            grads = add(grads, times(jax.grad(mean_loss)(params, microbatch), 1 / 4))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return Problem(candidate, mean_loss, mlp_params(), examples(), options={"optimizer": optimizer})


def penalised_loss(params, batch):
    return mean_loss(params, batch) + 0.05 * jnp.sum(params["w"] ** 2)


@right("sums", "a penalty that is added once, after the loop", central=True)
def penalty_once():
    @jax.jit
    def candidate(params, batch):
        def step(total, microbatch):
            return add(total, times(jax.value_and_grad(mean_loss)(params, microbatch), 1 / 4)), None

        zero = jax.value_and_grad(lambda params: 0.05 * jnp.sum(params["w"] ** 2))(params)
        return lax.scan(step, zero, stacked(batch, 3))[0]

    return Problem(candidate, penalised_loss, mlp_params(), examples())


def root_loss(params, batch):
    return jnp.sqrt(mean_loss(params, batch))


@right("batch", "the root of a mean: totals first, and the derivative of the root at the end", central=True)
def root_of_totals():
    @jax.jit
    def candidate(params, batch):
        def step(total, microbatch):
            return add(total, jax.value_and_grad(sum_loss)(params, microbatch)), None

        zero = (jnp.zeros((), params["w"].dtype), zeros(params))
        total, grads = lax.scan(step, zero, stacked(batch, 3))[0]
        root = jnp.sqrt(total / count(batch))
        return root, jax.tree.map(lambda leaf: leaf / (2 * root * count(batch)), grads)

    return Problem(candidate, root_loss, mlp_params(), examples())
