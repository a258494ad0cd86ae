"""Real models: the norm of every example's gradient, and the clipped sum, are those of `vmap(grad)`."""

import jax
import numpy as np
import pytest
from cases.per_example_losses import clipped_sum, norms_of
from cases.zoo import ZOO
from per_example.test_factors import assert_close

import anybatch as ab
from anybatch.per_example import forms

# The models whose gradients take a path that no other model has.
TELLING = {
    "equinox_model",
    *("resnet_with_batch_norm", "nnx_model_with_batch_norm", "two_towers", "q_learning", "proximal_policy"),
}


# Those that look across examples: layers and losses of the whole batch, or data that is normalised over it.
COUPLED = {
    *("resnet_with_batch_norm", "nnx_model_with_batch_norm", "two_towers", "advantage_actor_critic"),
    *("q_learning", "proximal_policy"),
}


def one_by_one(case, loss, args, keyed):
    """The oracle: each example as a batch of one, with its own key."""
    params, batch, *rest = args

    def gradient(number, example):
        mine = [jax.random.fold_in(each, number) if keyed else each for each in rest]
        grads = jax.grad(loss, has_aux=case.has_aux)(params, jax.tree.map(lambda leaf: leaf[None], example), *mine)
        return grads[0] if case.has_aux else grads

    return jax.jit(jax.vmap(gradient))(np.arange(jax.tree.leaves(batch)[0].shape[0]), batch)


def is_key(leaf):
    return jax.dtypes.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key)


@pytest.mark.parametrize(
    "case",
    [pytest.param(each, id=each.name, marks=[] if each.name in TELLING else pytest.mark.slow) for each in ZOO],
)
def test_norms_and_clipped_sums_of_real_models(model_defaults, monkeypatch, case):
    """With factors wherever that is possible, in float64."""
    if case.requires:
        pytest.importorskip(case.requires)
    monkeypatch.setattr(forms, "_prefers_gram", lambda products, lookups, prefer: True)
    loss, args = case.problem(num_examples=4)
    keyed = len(args) == 3 and is_key(args[2])
    if any(is_key(leaf) for leaf in jax.tree.leaves(args[2:])) and not keyed:
        pytest.skip("its keys are arguments among others")
    options = {"has_aux": case.has_aux, "keep_batch_dim": True, "rng_argnums": 2 if keyed else ()}
    if case.name in COUPLED:
        with pytest.raises(ab.CoupledError, match=r"zoo_\w+.py:\d+ in "):
            ab.per_example_norms(loss, **options)(*args)
        return
    grads = one_by_one(case, loss, args, keyed)
    norms = norms_of(grads)
    clip_norm = float(np.median(norms)) or 1.0  # an example cannot be told from others that are not there

    fun = ab.clipped_grad(loss, clip_norm=clip_norm, method="factored", microbatch_size=3, return_norms=True, **options)
    total, beside = jax.jit(fun)(*args)

    np.testing.assert_allclose(beside.norms, norms, rtol=1e-9)
    assert_close(total, clipped_sum(grads, clip_norm), rtol=1e-9)
