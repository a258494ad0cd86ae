"""Losses by what they are given: layouts, shapes that coincide, closures, positions, several batches, whole layers."""

import jax
import jax.numpy as jnp
import numpy as np
from cases.read_case import NUM_EXAMPLES, Table, images, labelled_rows, mlp, normal, sequences, square
from cases.read_separable import logits_of, predict, squared_errors

LAYOUTS = Table()


@LAYOUTS.case(passes=1, make=square)
def as_many_features_as_examples(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"])
    return jnp.mean((hidden.sum(axis=1) - batch["y"]) ** 2) + jnp.mean(hidden @ params["b"])


@LAYOUTS.case(passes=1, make=square)
def transposed_and_back(params, batch):
    hidden = jnp.tanh(params["w"].T @ batch["x"].T).T
    return jnp.mean(jnp.sum(hidden * hidden[:, ::-1], axis=1))


@LAYOUTS.case(passes=1)
def einsums(params, batch):
    outer = jnp.einsum("ni,nj->nij", batch["x"], batch["x"])
    bilinear = jnp.einsum("nij,ik,jk->n", outer, params["w"], params["w"])
    moment = jnp.einsum("ni,n->i", batch["x"], batch["y"])
    trace = jnp.einsum("nii->", outer)
    return jnp.mean(jnp.sin(bilinear)) + jnp.einsum("i,ik->", moment, params["w"]) / 12 + 0.01 * trace * params["b"][0]


@LAYOUTS.case(passes=1)
def second_moments(params, batch):
    """The sum over examples hides in a matrix product."""
    hidden = logits_of(params, batch["x"])
    return jnp.sum((hidden.T @ batch["x"]) * params["w"].T) / hidden.shape[0]


@LAYOUTS.case(passes=1)
def integers(params, batch):
    counts = jax.nn.one_hot(batch["label"], 4) * (1 + batch["label"] % 2)[:, None]
    return jnp.mean(jnp.exp(-0.1 * counts @ params["w"]).sum(axis=1))


@LAYOUTS.case(passes=1, moves=False)
def params_unused(params, batch):
    return jnp.mean(batch["x"] ** 2)


@LAYOUTS.case(passes=1)
def only_the_regulariser_moves(params, batch):
    return jnp.mean(batch["x"] ** 2) * 2 + jnp.sum(params["w"] ** 2)


def two_batches(num_examples):
    params, batch = labelled_rows(num_examples)
    return params, batch["x"], {"y": batch["y"], "weight": batch["weight"]}


@LAYOUTS.case(passes=1, make=two_batches, batch_argnums=(1, 2))
def two_batch_arguments(params, x, targets):
    errors = (predict(params, x) - targets["y"]) ** 2
    return jnp.sum(errors * targets["weight"]) / targets["weight"].sum()


def batch_last(num_examples):
    params, batch = labelled_rows(num_examples)
    return params, np.asarray(0.3), batch


@LAYOUTS.case(passes=1, make=batch_last, batch_argnums=2)
def an_argument_between(params, strength, batch):
    return jnp.mean(squared_errors(params, batch)) + strength * jnp.sum(jnp.abs(params["w"]))


WEIGHTS_OF_THE_EXAMPLES = np.linspace(0.5, 2.0, NUM_EXAMPLES)


@LAYOUTS.case(passes=1, num_examples=NUM_EXAMPLES)
def weights_closed_over(params, batch):
    return jnp.mean(squared_errors(params, batch) * WEIGHTS_OF_THE_EXAMPLES)


@LAYOUTS.case(passes=1)
def numpy_positions(params, batch):
    positions = np.arange(batch["x"].shape[0])
    return jnp.mean(squared_errors(params, batch) / (1 + positions))


@LAYOUTS.case(passes=1)
def positions(params, batch):
    """Every other example counts double, by its place in the batch."""
    place = jnp.arange(batch["x"].shape[0])
    return jnp.sum(jnp.where(place % 2 == 0, 2.0, 1.0) * squared_errors(params, batch))


@LAYOUTS.case(passes=1, num_examples=NUM_EXAMPLES)
def params_of_the_batch_shape(params, batch):
    """A parameter of as many entries as examples is no row of the batch."""
    hidden = batch["x"] @ jnp.tile(params["w"], (1, 4)) + jnp.tile(params["b"], 4)
    return jnp.mean(jnp.tanh(hidden) @ jnp.tile(params["out"], 4))


def memory_of_examples(num_examples):
    _, batch = labelled_rows(num_examples)
    generator = np.random.default_rng(1)
    return {**mlp(generator), "memory": normal(generator, num_examples)}, batch


@LAYOUTS.case(passes=1, make=memory_of_examples)
def one_parameter_for_every_example(params, batch):
    """Example i moves entry i of a parameter, as in generalised latent optimisation."""
    return jnp.mean((predict(params, batch["x"]) - params["memory"]) ** 2)


@LAYOUTS.case(passes=1, make=images)
def convolution(params, batch):
    hidden = jax.lax.conv_general_dilated(
        batch["x"], params["kernel"], (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    pooled = jax.lax.reduce_window(jax.nn.relu(hidden), -np.inf, jax.lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "VALID")
    return jnp.mean((pooled.mean(axis=(1, 2)) @ params["out"] - batch["y"]) ** 2)


@LAYOUTS.case(passes=1, make=sequences)
def attention(params, batch):
    hidden = batch["x"] @ params["in"]
    scores = jnp.einsum("nsd,de,nte->nst", hidden, params["step"], hidden)
    causal = jnp.tril(jnp.ones(scores.shape[1:], bool))
    probabilities = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    return jnp.mean(((probabilities @ hidden)[:, -1] @ params["out"] - batch["y"]) ** 2)


@LAYOUTS.case(passes=1, make=sequences)
def recurrent(params, batch):
    def step(hidden, x):
        hidden = jnp.tanh(hidden @ params["step"] + x @ params["in"])
        return hidden, hidden @ params["out"]

    start = jnp.zeros((batch["x"].shape[0], 4))
    _, outputs = jax.lax.scan(step, start, jnp.swapaxes(batch["x"], 0, 1))
    return jnp.mean((outputs - batch["y"]) ** 2)


# Other networks beside the one that learns.


@LAYOUTS.case(passes=1)
def teacher_without_gradient(params, batch):
    teacher = jax.lax.stop_gradient(predict(params, batch["x"][:, ::-1]))
    return jnp.mean((predict(params, batch["x"]) - teacher) ** 2)


def rows_and_average(num_examples):
    params, batch = labelled_rows(num_examples)
    return params, batch, jax.tree.map(lambda leaf: 0.9 * leaf, params)


@LAYOUTS.case(passes=1, make=rows_and_average)
def averaged_targets(params, batch, average):
    """BYOL, mean teachers, Q-learning: the targets come from another argument."""
    target = predict(average, batch["x"])
    return jnp.mean((predict(params, batch["x"]) - batch["weight"] - 0.9 * target) ** 2)


@LAYOUTS.case(passes=1)
def sorted_features(params, batch):
    """Sorting and choosing inside an example couples nothing."""
    hidden = jnp.sort(logits_of(params, batch["x"]), axis=-1)
    largest, _ = jax.lax.top_k(batch["x"] @ params["w"], 2)
    return jnp.mean(hidden @ params["out"] + largest.sum(axis=-1) * jnp.median(batch["x"], axis=-1))


# Diagonals, and other elements that each example finds by its own number.


@LAYOUTS.case(passes=1, make=square)
def diagonal_by_number(params, batch):
    """The axis of the examples is looked up, and the other one is a batching axis of the same lookup."""
    scores = jnp.tanh(batch["x"] @ params["w"]).T
    own = jnp.take_along_axis(scores, jnp.arange(scores.shape[0])[:, None], axis=1)
    return jnp.mean((own[:, 0] - batch["y"]) ** 2)


@LAYOUTS.case(passes=1, make=square)
def diagonal_of_layers_by_number(params, batch):
    scores = jnp.stack([batch["x"] @ params["w"], jnp.sin(batch["x"] @ params["w"])]).transpose(2, 0, 1)
    own = jnp.take_along_axis(scores, (jnp.arange(scores.shape[0]) - scores.shape[0])[:, None, None], axis=-1)
    return jnp.mean((own[..., 0].sum(1) - batch["y"]) ** 2)


@LAYOUTS.case(passes=1, make=square)
def diagonal_of_a_square(params, batch):
    return jnp.mean((jnp.diag(batch["x"] @ params["w"]) - batch["y"]) ** 2)


@LAYOUTS.case(passes=1, make=square)
def diagonal_of_a_transposed_square(params, batch):
    return jnp.mean((jnp.diagonal(jnp.tanh(batch["x"] @ params["w"]).T) - batch["y"]) ** 2)


@LAYOUTS.case(passes=1, make=square)
def diagonal_beside_the_first(params, batch):
    wide = jnp.concatenate([batch["x"] @ params["w"], batch["y"][:, None]], axis=1)
    return jnp.mean(jnp.sin(jnp.diagonal(wide, offset=1)))


@LAYOUTS.case(passes=1, make=square)
def diagonal_of_pairs_with_data(params, batch):
    """Every example is multiplied with the data of every other one, and one of these products is used."""
    return jnp.mean(jnp.sin(jnp.diag(batch["x"] @ params["w"] @ batch["x"].T)))


@LAYOUTS.case(passes=1, make=square)
def trace_of_a_square(params, batch):
    return jnp.trace(batch["x"] @ params["w"]) ** 2


@LAYOUTS.case(passes=1, make=square)
def diagonal_of_every_example(params, batch):
    outer = batch["x"][:, :, None] * params["w"]
    return jnp.mean((jnp.diagonal(outer, axis1=1, axis2=2).sum(-1) - batch["y"]) ** 2)


@LAYOUTS.case(passes=1, make=square)
def one_branch_for_each_platform(params, batch):
    """The branches bring examples together in different ways, and only one of them runs on a machine."""
    values = jnp.tanh(batch["x"] @ params["w"])
    mask = jnp.eye(values.shape[0], dtype=values.dtype)

    def masked(values):
        return jnp.sum(values * mask, axis=0)

    own = jax.lax.platform_dependent(values, tpu=masked, rocm=masked, default=jnp.diagonal)
    return jnp.mean((own - batch["y"]) ** 2)
