"""What the tests of the reading share: a quick compiler, and a comparison of every leaf."""

import functools

import jax
import numpy as np

# Most of the time of these tests is XLA's. Without its optimisations a program compiles in half of the time, and
# where XLA still has a choice of emitters (until JAX 0.10), in a third.
QUICKLY = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):
    QUICKLY["xla_cpu_use_fusion_emitters"] = False

quick_jit = functools.partial(jax.jit, compiler_options=QUICKLY)


def assert_same(actual, expected, rtol=1e-10, atol=1e-12):
    """Every leaf has the structure, shape and dtype of the other, and its numbers to the last digits."""
    got, want = (jax.tree_util.tree_leaves_with_path(tree) for tree in (actual, expected))
    assert [path for path, _ in got] == [path for path, _ in want]
    for (path, one), (_, other) in zip(got, want, strict=True):
        where = jax.tree_util.keystr(path)
        assert one.shape == other.shape and one.dtype == other.dtype, f"{where}: {one.aval} and {other.aval}"
        if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol, err_msg=where)
