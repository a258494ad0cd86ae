"""Parameters and data for the zoo, drawn by NumPy: with JAX it would take longer to draw them than to train on them."""

import jax
import jax.numpy as jnp
import numpy as np


def generator(seed=1):
    return np.random.default_rng(seed)


def filled(tree, seed=0):
    """Values for a tree of shapes. Nothing is zero, as no gradient should be zero merely at the first step.

    Weights are scaled by what comes into them; what multiplies (a scale, a variance) is near one.
    """
    random = generator(seed)

    def fill(path, leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(seed)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.zeros(leaf.shape, leaf.dtype)
        deviation = np.prod(leaf.shape[:-1]) ** -0.5 if len(leaf.shape) > 1 else 0.1
        centre = any(f"{word}'" in jax.tree_util.keystr(path) for word in ("scale", "var"))
        return jnp.asarray(centre + deviation * random.normal(size=leaf.shape), jnp.float64)

    return jax.tree_util.tree_map_with_path(fill, tree)


def variables_of(model, *inputs, seed=0):
    """What `model.init` of a Linen or Haiku model gives, in shape."""
    return filled(jax.eval_shape(model.init, jax.random.key(0), *inputs), seed)


def params_of(model, *inputs, seed=0):
    return variables_of(model, *inputs, seed=seed)["params"]


def labels(num_examples, num_classes, seed=2):
    return generator(seed).integers(0, num_classes, num_examples)
