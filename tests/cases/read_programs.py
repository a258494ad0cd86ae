"""Losses written with the rest of JAX: random numbers, loops, branches, custom derivatives, gradients inside."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from cases.read_case import Table, labelled_rows, sentences, sequences, with_key
from cases.read_separable import logits_of, predict, squared_errors

PROGRAMS = Table()
rows_and_key = with_key(labelled_rows)

# Random numbers: the full batch's own, in every microbatch.


@PROGRAMS.case(passes=1, make=rows_and_key)
def dropout(params, batch, key):
    hidden = logits_of(params, batch["x"])
    kept = jax.random.bernoulli(key, 0.7, hidden.shape)
    return jnp.mean((jnp.where(kept, hidden / 0.7, 0.0) @ params["out"] - batch["y"]) ** 2)


@PROGRAMS.case(passes=1, make=rows_and_key)
def variational_autoencoder(params, batch, key):
    first, second = jax.random.split(key)
    mean, log_scale = batch["x"] @ params["w"], 0.1 * logits_of(params, batch["x"])
    latent = mean + jnp.exp(log_scale) * jax.random.normal(first, mean.shape)
    kept = jax.random.uniform(second, (batch["x"].shape[0], 1)) < 0.9
    reconstruction = jnp.sum((jnp.tanh(latent @ params["w"].T) - batch["x"]) ** 2, axis=-1, where=kept)
    divergence = 0.5 * jnp.sum(jnp.exp(2 * log_scale) + mean**2 - 1 - 2 * log_scale, axis=-1)
    return jnp.mean(reconstruction + divergence)


@PROGRAMS.case(passes=1, make=rows_and_key)
def a_key_for_every_example(params, batch, key):
    def of_one(x, y, key):
        return (predict(params, x + 0.3 * jax.random.normal(key, x.shape)) - y) ** 2

    keys = jax.random.split(key, batch["x"].shape[0])
    return jnp.mean(jax.vmap(of_one)(batch["x"], batch["y"], keys))


@PROGRAMS.case(passes=1, make=rows_and_key)
def the_index_folded_in(params, batch, key):
    def of_one(index, x, y):
        noise = jax.random.laplace(jax.random.fold_in(key, index), x.shape)
        return (predict(params, x + 0.1 * noise) - y) ** 2

    return jnp.mean(jax.vmap(of_one)(jnp.arange(batch["x"].shape[0]), batch["x"], batch["y"]))


@PROGRAMS.case(passes=1, make=rows_and_key)
def a_choice_for_every_example(params, batch, key):
    def of_one(x, y, key):
        feature = jax.random.choice(key, 4)
        return (predict(params, x.at[feature].set(0.0)) - y) ** 2

    keys = jax.random.split(key, batch["x"].shape[0])
    return jnp.mean(jax.vmap(of_one)(batch["x"], batch["y"], keys))


@PROGRAMS.case(passes=1, make=rows_and_key)
def choices_across_the_batch(params, batch, key):
    chosen = jax.random.choice(key, jnp.asarray([0.5, 1.0, 2.0]), (batch["x"].shape[0],))
    return jnp.mean(chosen * squared_errors(params, batch))


@PROGRAMS.case(passes=1, make=rows_and_key)
def sampled_actions(params, batch, key):
    """REINFORCE: a draw from the model's own distribution, per example."""
    logits = logits_of(params, batch["x"])
    action = jax.random.categorical(key, logits)
    log_probability = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], axis=1)[:, 0]
    return -jnp.mean(log_probability * batch["y"])


@PROGRAMS.case(passes=1, make=rows_and_key)
def gumbel_softmax(params, batch, key):
    logits = logits_of(params, batch["x"])
    soft = jax.nn.softmax((logits + jax.random.gumbel(key, logits.shape)) / 0.5)
    hard = jax.nn.one_hot(jnp.argmax(soft, axis=-1), 3)
    return jnp.mean(((hard + soft - jax.lax.stop_gradient(soft)) @ params["out"] - batch["y"]) ** 2)


@PROGRAMS.case(passes=1, make=rows_and_key)
def features_shuffled_for_every_example(params, batch, key):
    keys = jax.random.split(key, batch["x"].shape[0])
    x = jax.vmap(jax.random.permutation)(keys, batch["x"])
    return jnp.mean((predict(params, x) - batch["y"]) ** 2)


@PROGRAMS.case(passes=2, make=rows_and_key)
def negatives_by_permutation(params, batch, key):
    hidden = logits_of(params, batch["x"])
    negatives = jax.random.permutation(key, hidden)
    return jnp.mean(jax.nn.softplus(jnp.sum(hidden * negatives, axis=-1)))


@PROGRAMS.case(passes=1, make=rows_and_key)
def mixup_with_a_permutation(params, batch, key):
    first, second = jax.random.split(key)
    share = jax.random.beta(first, 0.4, 0.4)
    order = jax.random.permutation(second, batch["x"].shape[0])
    x = share * batch["x"] + (1 - share) * batch["x"][order]
    y = share * batch["y"] + (1 - share) * batch["y"][order]
    return jnp.mean((predict(params, x) - y) ** 2)


@PROGRAMS.case(passes=1)
def mixup_with_the_batch_reversed(params, batch):
    x = 0.6 * batch["x"] + 0.4 * batch["x"][::-1]
    return jnp.mean((predict(params, x) - 0.6 * batch["y"] - 0.4 * batch["y"][::-1]) ** 2)


@PROGRAMS.case(passes=1)
def mixup_with_the_batch_rolled(params, batch):
    x = 0.6 * batch["x"] + 0.4 * jnp.roll(batch["x"], 1, axis=0)
    return jnp.mean((predict(params, x) - 0.6 * batch["y"] - 0.4 * jnp.roll(batch["y"], 1)) ** 2)


@PROGRAMS.case(passes=2)
def manifold_mixup(params, batch):
    hidden = logits_of(params, batch["x"])
    return jnp.mean(((0.6 * hidden + 0.4 * hidden[::-1]) @ params["out"] - batch["y"]) ** 2)


@PROGRAMS.case(passes=1, make=with_key(sentences))
def tokens_dropped_time_first(params, batch, key):
    """The draw has the examples on its second axis."""
    kept = jax.random.bernoulli(key, 0.8, (5, batch["tokens"].shape[0]))
    hidden = params["embedding"][batch["tokens"].T] * kept[..., None]
    return jnp.mean(jnp.tanh(hidden @ params["mix"]).sum(axis=0) ** 2)


def rows_with_keys(num_examples):
    params, batch = labelled_rows(num_examples)
    return params, {**batch, "key": jax.random.split(jax.random.key(3), num_examples)}


@PROGRAMS.case(passes=1, make=rows_with_keys)
def keys_in_the_batch(params, batch):
    noise = jax.vmap(lambda key: jax.random.exponential(key, (4,)))(batch["key"])
    return jnp.mean((predict(params, batch["x"] * noise) - batch["y"]) ** 2)


def rows_and_raw_key(num_examples):
    return *labelled_rows(num_examples), jax.random.PRNGKey(num_examples)


@PROGRAMS.case(passes=1, make=rows_and_raw_key)
def a_key_of_plain_integers(params, batch, key):
    first, second = jax.random.split(key)
    dropped = jax.random.randint(first, batch["x"].shape, 0, 5) == 0
    noise = jax.random.truncated_normal(second, -1.0, 1.0, batch["y"].shape)
    prediction = predict(params, jnp.where(dropped, 0.0, batch["x"]))
    return jnp.mean((prediction - batch["y"] - noise) ** 2)


# Custom derivatives, and derivatives inside the loss.


@jax.custom_vjp
def clip_the_gradient(x):
    return x


clip_the_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.05, 0.05),))


@PROGRAMS.case(passes=1)
def gradients_clipped_by_element(params, batch):
    return jnp.mean((clip_the_gradient(logits_of(params, batch["x"])) @ params["out"] - batch["y"]) ** 2)


@jax.custom_vjp
def clip_the_norm(x):
    return x


clip_the_norm.defvjp(
    lambda x: (x, None), lambda _, g: (g / jnp.maximum(1.0, 20 * jnp.linalg.norm(g, axis=-1, keepdims=True)),)
)


@PROGRAMS.case(passes=1)
def gradients_clipped_by_example(params, batch):
    hidden = clip_the_norm(logits_of(params, batch["x"]))
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)


@jax.custom_vjp
def centre_the_gradient(x):
    return x


centre_the_gradient.defvjp(lambda x: (x, None), lambda _, g: (g - g.mean(axis=0),))


@PROGRAMS.case(passes=2)
def gradients_centred_over_the_batch(params, batch):
    """The backward pass looks across the examples where the forward pass does not."""
    hidden = centre_the_gradient(logits_of(params, batch["x"]))
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)


@jax.custom_vjp
def share_the_gradient(x):
    return x


share_the_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.broadcast_to(g.mean(axis=0), g.shape),))


@PROGRAMS.case(passes=2)
def gradients_shared_by_the_batch(params, batch):
    """Every example gets the mean of all gradients: a sum where there must be rows."""
    hidden = share_the_gradient(logits_of(params, batch["x"]))
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)


@PROGRAMS.case(passes=1)
def params_with_a_clipped_gradient(params, batch):
    """Not linear in the cotangent, and applied to a parameter: it must see the gradient of the whole batch."""
    params = {**params, "out": clip_the_gradient(params["out"])}
    return jnp.mean(squared_errors(params, batch))


@PROGRAMS.case(passes=2)
def a_solver_with_a_clipped_gradient(params, batch):
    """Not linear in the cotangent, inside the functions of a solver: the gradient of the sum must not be scaled."""
    diagonal = 2 + logits_of(params, batch["x"])

    def multiply(vector):
        return clip_the_gradient(diagonal) * vector

    sides = jnp.ones_like(diagonal)
    solution = jax.lax.custom_linear_solve(multiply, sides, lambda _, side: side / diagonal, symmetric=True)
    return jnp.sqrt(jnp.sum((solution @ params["out"] - batch["y"]) ** 2))


@jax.custom_jvp
def round_straight_through(x):
    return jnp.round(x)


round_straight_through.defjvps(lambda tangent, _, x: tangent * 0.9)


@PROGRAMS.case(passes=1)
def rounded_with_a_custom_jvp(params, batch):
    return jnp.mean((round_straight_through(4 * logits_of(params, batch["x"])) @ params["out"] - batch["y"]) ** 2)


@PROGRAMS.case(passes=1)
def straight_through(params, batch):
    hidden = logits_of(params, batch["x"])
    hidden = hidden + jax.lax.stop_gradient(jnp.sign(hidden) - hidden)
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)


@PROGRAMS.case(passes=1)
def gradient_penalty(params, batch):
    slopes = jax.vmap(jax.grad(predict, argnums=1), in_axes=(None, 0))(params, batch["x"])
    return jnp.mean(squared_errors(params, batch)) + jnp.mean((jnp.linalg.norm(slopes, axis=-1) - 1) ** 2)


@PROGRAMS.case(passes=1)
def gradient_penalty_of_the_sum(params, batch):
    """The other way to write it: the gradient of the sum over the batch has the examples' gradients as rows."""
    slopes = jax.grad(lambda x: jnp.sum(predict(params, x)))(batch["x"])
    return jnp.mean(jnp.sum(slopes**2, axis=-1))


@PROGRAMS.case(passes=1)
def sobolev(params, batch):
    """A directional derivative, forward."""
    _, slopes = jax.jvp(lambda x: predict(params, x), (batch["x"],), (jnp.cos(batch["x"]),))
    return jnp.mean((slopes - batch["y"]) ** 2)


@PROGRAMS.case(passes=2)
def one_inner_step(params, batch):
    """MAML: the loss after a step of gradient descent on the same batch."""
    gradient = jax.grad(lambda params: jnp.mean(squared_errors(params, batch)))(params)
    adapted = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
    return jnp.mean(squared_errors(adapted, batch))


# Loops and branches.


@PROGRAMS.case(passes=1)
def mapped_over_examples(params, batch):
    return jnp.mean(jax.lax.map(lambda row: squared_errors(params, jax.tree.map(lambda x: x[None], row))[0], batch))


@PROGRAMS.case(passes=1)
def summed_by_a_scan(params, batch):
    def add(total, row):
        x, y = row
        return total + (predict(params, x) - y) ** 2, None

    total, _ = jax.lax.scan(add, jnp.zeros(()), (batch["x"], batch["y"]))
    return total / batch["x"].shape[0]


@PROGRAMS.case(passes=2)
def carried_from_example_to_example(params, batch):
    """A recurrence along the batch: an exponential average of the predictions so far."""

    def step(average, prediction):
        average = 0.8 * average + 0.2 * prediction
        return average, average

    _, averages = jax.lax.scan(step, jnp.zeros(()), predict(params, batch["x"]))
    return jnp.mean((averages - batch["y"]) ** 2)


@PROGRAMS.case(passes=1)
def python_loop_over_examples(params, batch):
    """Every example by its index: nothing but the data is gathered, so that one pass is enough."""
    num_examples = batch["x"].shape[0]
    return sum((predict(params, batch["x"][i]) - batch["y"][i]) ** 2 for i in range(num_examples)) / num_examples


@PROGRAMS.case(passes=1, make=lambda n: (*labelled_rows(n), np.asarray(True)))
def branch_on_a_flag(params, batch, robust):
    errors = predict(params, batch["x"]) - batch["y"]
    return jnp.mean(jax.lax.cond(robust, jnp.abs, jnp.square, errors))


@PROGRAMS.case(passes=1)
def branch_for_every_example(params, batch):
    def of_one(x, y, label):
        error = predict(params, x) - y
        return jax.lax.switch(label, [jnp.abs, jnp.square, jnp.cosh], error)

    return jnp.mean(jax.vmap(of_one)(batch["x"], batch["y"], batch["label"]))


@PROGRAMS.case(passes=1)
def cleaned_by_a_while_loop(params, batch):
    """Preprocessing of every row until it is small enough."""

    def shrink(x):
        return jax.lax.while_loop(lambda x: jnp.sum(x**2) > 1.0, lambda x: 0.7 * x, x)

    return jnp.mean((predict(params, jax.vmap(shrink)(batch["x"])) - batch["y"]) ** 2)


@PROGRAMS.case(passes=1)
def cleaned_by_a_fori_loop(params, batch):
    x = jax.lax.fori_loop(0, 3, lambda step, x: x - 0.1 * step * jnp.sin(x), batch["x"])
    return jnp.mean((predict(params, x) - batch["y"]) ** 2)


@PROGRAMS.case(passes=1)
def layers_in_a_scan_with_remat(params, batch):
    @jax.checkpoint
    def layer(hidden, bias):
        return jnp.tanh(hidden @ params["w"] @ params["w"].T + bias), None

    hidden, _ = jax.lax.scan(layer, batch["x"], params["b"])
    return jnp.mean((hidden @ params["w"][:, 0] - batch["y"]) ** 2)


@PROGRAMS.case(passes=1)
def nested_jit_vmap_and_remat(params, batch):
    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, 0, 0))
    @jax.checkpoint
    def of_one(params, x, y):
        return jax.jit(predict)(params, x) * y

    return jnp.mean(jax.jit(jnp.sin)(of_one(params, batch["x"], batch["y"])))


@PROGRAMS.case(passes=1, make=sequences)
def associative_scan_over_time(params, batch):
    decay = jax.nn.sigmoid(batch["x"] @ params["in"])
    update = jnp.tanh(batch["x"] @ params["in"] @ params["step"])

    def combine(a, b):
        return a[0] * b[0], b[0] * a[1] + b[1]

    _, hidden = jax.lax.associative_scan(combine, (decay, update), axis=1)
    return jnp.mean((hidden[:, -1] @ params["out"] - batch["y"]) ** 2)


@PROGRAMS.case(passes=1, make=sequences)
def linear_algebra_for_every_example(params, batch):
    gram = jnp.einsum("nti,ntj->nij", batch["x"], batch["x"]) + 2 * jnp.eye(3)
    factor = jnp.linalg.cholesky(gram * jnp.exp(0.1 * params["in"].sum()))
    solved = jnp.linalg.solve(gram, jnp.broadcast_to(params["in"], (batch["y"].shape[0], 3, 4)))
    spectrum = jnp.abs(jnp.fft.rfft(batch["x"] @ params["in"], axis=1)) ** 2
    return jnp.mean(jnp.sum(solved**2, axis=(1, 2))) + jnp.mean(factor) + 0.01 * jnp.mean(spectrum)
