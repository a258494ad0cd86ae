"""Losses with auxiliary outputs of every kind: each leaf must be the full batch's, in order."""

import jax
import jax.numpy as jnp
from cases.read_case import Table, labelled_rows, sentences, with_key
from cases.read_coupled import clip, views
from cases.read_programs import rows_and_key
from cases.read_separable import cross_entropies, logits_of, predict, squared_errors, token_losses

AUX = Table()


@AUX.case(passes=1, has_aux=True)
def predictions_in_order(params, batch):
    prediction = predict(params, batch["x"])
    return jnp.mean((prediction - batch["y"]) ** 2), {"prediction": prediction, "hidden": logits_of(params, batch["x"])}


@AUX.case(passes=1, has_aux=True)
def metrics(params, batch):
    """A mean, a sum, a count, an accuracy, and a ratio of counts."""
    losses = cross_entropies(params, batch)
    hit = jnp.argmax(logits_of(params, batch["x"]) * params["out"], axis=-1) == batch["label"]
    return jnp.sum(losses * batch["mask"]) / batch["mask"].sum(), {
        "mean": losses.mean(),
        "sum": losses.sum(),
        "count": batch["mask"].sum(),
        "accuracy": hit.mean(),
        "masked accuracy": jnp.sum(hit & batch["mask"]) / jnp.sum(batch["mask"]),
        "examples": losses.shape[0],
    }


@AUX.case(passes=1, has_aux=True)
def confusion_matrix(params, batch):
    guess = jnp.argmax(logits_of(params, batch["x"]), axis=-1)
    matrix = jnp.zeros((3, 3), jnp.int32).at[batch["label"], guess].add(1)
    return cross_entropies(params, batch).mean(), matrix


@AUX.case(passes=1, has_aux=True)
def coupled_values(params, batch):
    """Ranks, extremes and a deviation: the loss needs one pass, and its outputs look at the whole batch."""
    losses = squared_errors(params, batch)
    return losses.mean(), {
        "rank": jnp.argsort(jnp.argsort(losses)),
        "worst": losses.max(),
        "where": jnp.argmax(losses),
        "deviation": losses.std(),
        "sorted": jnp.sort(losses),
    }


@AUX.case(passes=1, has_aux=True)
def invariants_and_nothing(params, batch):
    losses = squared_errors(params, batch)
    return losses.sum(), (jnp.sum(params["w"] ** 2), None, {"constant": 3.5, "none": None}, jnp.eye(2), batch["label"])


@AUX.case(passes=1, has_aux=True, make=rows_and_key)
def keys_and_masks(params, batch, key):
    key, use = jax.random.split(key)
    mask = jax.random.bernoulli(use, 0.6, batch["y"].shape)
    return jnp.mean(squared_errors(params, batch) * mask), (key, mask, mask.sum())


@AUX.case(passes=1, has_aux=True)
def statistics_of_the_model(params, batch):
    """Running averages as batch normalisation keeps them, of a layer that does not use them."""
    hidden = logits_of(params, batch["x"])
    state = {"mean": 0.9 * params["b"] + 0.1 * hidden.mean(axis=0), "variance": hidden.var(axis=0)}
    return squared_errors(params, batch).mean(), state


@AUX.case(passes=1, has_aux=True)
def other_layouts(params, batch):
    hidden = logits_of(params, batch["x"])
    return squared_errors(params, batch).mean(), {
        "transposed": hidden.T,
        "flattened": hidden.reshape(-1),
        "flattened the other way": hidden.T.reshape(-1),
        "reversed": hidden[::-1, 0],
        "first": hidden[0],
        "all pairs": hidden @ hidden.T,
        "moment": hidden.T @ hidden,
        "twice": jnp.concatenate([hidden, hidden]),
        "interleaved": jnp.repeat(hidden[:, 0], 2),
        "positions": jnp.arange(hidden.shape[0]),
    }


@AUX.case(passes=1, has_aux=True, make=with_key(sentences))
def losses_of_tokens(params, batch, key):
    losses, mask = token_losses(params, batch)
    kept = mask & jax.random.bernoulli(key, 0.9, mask.shape)
    value = jnp.sum(losses * kept) / jnp.maximum(kept.sum(), 1)
    return value, {
        "losses": losses,
        "lengths": mask.sum(axis=1),
        "histogram": jnp.bincount(batch["tokens"].reshape(-1), length=7),
    }


@AUX.case(passes=2, has_aux=True, make=views)
def contrastive_with_outputs(params, batch):
    image = jnp.tanh(batch["image"] @ params["image"])
    return clip(params, batch), {"embedding": image, "norm": jnp.linalg.norm(image, axis=1).mean(), "best": image.max()}


@AUX.case(passes=1, has_aux=True, moves=False, make=labelled_rows)
def no_gradient_but_outputs(params, batch):
    return jnp.zeros(()), predict(params, batch["x"])
