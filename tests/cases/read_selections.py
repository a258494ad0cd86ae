"""Losses that select, pad, repeat or shift rows of the batch before the model sees them."""

import jax
import jax.numpy as jnp
import numpy as np
from cases.read_case import NUM_EXAMPLES, Table
from cases.read_separable import logits_of, predict, squared_errors
from jax import lax

SELECTIONS = Table()


def rows_of(batch, rows):
    return jax.tree.map(lambda leaf: leaf[rows], batch)


@SELECTIONS.case(passes=1)
def a_multiple_of_five(params, batch):
    whole = len(batch["x"]) // 5 * 5
    return jnp.mean(squared_errors(params, rows_of(batch, slice(whole))))


@SELECTIONS.case(passes=1)
def every_second_example(params, batch):
    return jnp.mean(squared_errors(params, rows_of(batch, slice(1, None, 2))))


@SELECTIONS.case(passes=1)
def differences_of_neighbours(params, batch):
    return jnp.sum(predict(params, batch["x"][1:] - batch["x"][:-1]) ** 2)


@SELECTIONS.case(passes=1)
def labelled_and_unlabelled_halves(params, batch):
    half = len(batch["x"]) // 2
    consistency = (predict(params, batch["x"][:half]) - predict(params, batch["x"][half : 2 * half])) ** 2
    return jnp.mean(squared_errors(params, rows_of(batch, slice(half)))) + 0.3 * jnp.mean(consistency)


@SELECTIONS.case(passes=1)
def a_third_is_labelled(params, batch):
    third = len(batch["x"]) // 3
    entropies = jax.nn.logsumexp(logits_of(params, batch["x"][third:]), axis=1)
    return jnp.mean(squared_errors(params, rows_of(batch, slice(third)))) + 0.1 * jnp.mean(entropies)


@SELECTIONS.case(passes=1)
def some_rows_beside_all(params, batch):
    return jnp.mean(squared_errors(params, batch)) + jnp.mean(predict(params, batch["x"][2:-1]) ** 2)


@SELECTIONS.case(passes=2)
def a_ratio_of_two_selections(params, batch):
    half = len(batch["x"]) // 2
    return jnp.mean(predict(params, batch["x"][:half]) ** 2) / (1 + jnp.mean(predict(params, batch["x"][half:]) ** 2))


@SELECTIONS.case(passes=1)
def root_mean_square_of_a_selection(params, batch):
    return jnp.sqrt(jnp.mean(predict(params, batch["x"][3:]) ** 2))


@SELECTIONS.case(passes=1)
def padded_with_rows(params, batch):
    padded = jnp.pad(batch["x"], ((2, 3), (0, 0)), constant_values=0.5)
    return jnp.sum(predict(params, padded) ** 2)


@SELECTIONS.case(passes=1)
def padded_between_rows_and_cut(params, batch):
    padded = lax.pad(batch["x"], jnp.asarray(0.7, batch["x"].dtype), [(1, -2, 1), (0, 0, 0)])
    return jnp.sum(predict(params, padded) ** 2)


@SELECTIONS.case(passes=1)
def augmented_copies(params, batch):
    copies = jnp.repeat(batch["x"], 3, axis=0)
    noise = jax.random.normal(jax.random.key(7), copies.shape, copies.dtype)
    return jnp.mean(predict(params, copies + 0.1 * noise) ** 2)


@SELECTIONS.case(passes=1)
def beside_the_example_before(params, batch):
    return jnp.mean(predict(params, jnp.roll(batch["x"], 1, axis=0)) * predict(params, batch["x"]))


@SELECTIONS.case(passes=1)
def backwards(params, batch):
    return jnp.mean(predict(params, batch["x"][::-1]) * predict(params, batch["x"]))


@SELECTIONS.case(passes=1, num_examples=NUM_EXAMPLES)
def rows_by_a_constant(params, batch):
    return jnp.mean(squared_errors(params, rows_of(batch, np.array([3, 1, 4, 1, 5, 9, 2, 6]))))


@SELECTIONS.case(passes=1)
def rows_by_chance(params, batch):
    count = len(batch["x"])
    chosen = jax.random.permutation(jax.random.key(3), count)[: count - 2]
    return jnp.mean(squared_errors(params, rows_of(batch, chosen)))


@SELECTIONS.case(passes=1)
def rows_by_a_column_of_the_batch(params, batch):
    order = jnp.argsort(batch["y"])[len(batch["y"]) // 4 :]
    return jnp.mean(squared_errors(params, rows_of(batch, order)))


@SELECTIONS.case(passes=1)
def scaled_and_then_selected(params, batch):
    pixels = jnp.round(batch["x"] * 16.0) / 16.0
    return jnp.mean(predict(params, pixels[1::2]) ** 2)


@SELECTIONS.case(passes=1)
def a_dynamic_slice(params, batch):
    rows = lax.dynamic_slice_in_dim(batch["x"], 2, len(batch["x"]) - 4)
    return jnp.mean(predict(params, rows) ** 2)


@SELECTIONS.case(passes=1)
def a_slice_that_starts_beyond_the_last_row(params, batch):
    """The start is clamped, and does not fit the integers that count rows."""
    start = jnp.where(batch["y"][0] < jnp.inf, jnp.uint32(2**31), jnp.uint32(0))
    rows = lax.dynamic_slice(batch["x"], (start, jnp.uint32(0)), (len(batch["x"]) - 3, 4))
    return jnp.mean(predict(params, rows) ** 2)


@SELECTIONS.case(passes=1)
def differences_of_differences(params, batch):
    """Each level looks up two neighbours: followed back without end, that would be a thousand rows for each."""
    return jnp.mean(predict(params, jnp.diff(jnp.sin(batch["x"]), n=10, axis=0)) ** 2)


@SELECTIONS.case(passes=1)
def running_sums(params, batch):
    return jnp.mean(predict(params, lax.associative_scan(jnp.add, batch["x"])[1:]) ** 2)


@SELECTIONS.case(passes=1)
def joined_pieces(params, batch):
    x = batch["x"]
    return jnp.sum(jnp.sin(predict(params, jnp.concatenate([x[:2], x[1:], x]))))


@SELECTIONS.case(passes=1)
def windows_of_three(params, batch):
    count = len(batch["x"]) - 2
    windows = jnp.stack([batch["x"][first : first + count] for first in range(3)], axis=1)
    return jnp.mean(logits_of(params, jnp.sum(jnp.sin(windows), axis=1)) ** 2)


@SELECTIONS.case(passes=1)
def dropout_of_a_selection(params, batch):
    rows = batch["x"][:-1]
    kept = jax.random.bernoulli(jax.random.key(5), 0.7, rows.shape)
    return jnp.mean(predict(params, jnp.where(kept, rows, jnp.zeros_like(rows))) ** 2)


@SELECTIONS.case(passes=1)
def layers_of_a_selection(params, batch):
    def layer(h, _):
        return jnp.tanh(h @ params["w"]) @ params["w"].T, None

    return jnp.mean(lax.scan(layer, batch["x"][2:], None, length=3)[0] ** 2)


@SELECTIONS.case(passes=1)
def selected_along_another_axis(params, batch):
    return jnp.mean(predict(params, batch["x"].T[:, 2:].T) ** 2)


@SELECTIONS.case(passes=2)
def every_row_of_one_with_every_row_of_the_other(params, batch):
    half = len(batch["x"]) // 2 + 1
    return jnp.mean((logits_of(params, batch["x"][:half]) @ logits_of(params, batch["x"][half:]).T) ** 2)


@SELECTIONS.case(passes=2)
def selected_before_and_after_the_model(params, batch):
    return jnp.mean(predict(params, batch["x"][:-2])[1:] ** 2)


@SELECTIONS.case(passes=1, has_aux=True)
def aux_of_a_selection(params, batch):
    rows = rows_of(batch, slice(2, None))
    predictions = predict(params, rows["x"])
    return jnp.mean((predictions - rows["y"]) ** 2), {"predictions": predictions, "largest": jnp.max(rows["y"])}
