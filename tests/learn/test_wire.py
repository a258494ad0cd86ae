"""Encoding values: they arrive unchanged, and what cannot be encoded or decoded raises an error."""

import jax.numpy as jnp
import numpy as np
import pytest

from anybatch.learn.runner import wire


@pytest.mark.parametrize(
    "value", [None, [1, 2.5, True, "text", None, float("inf")], {"a": [1, [2, [3]]], "b": {}}, [], 2**80]
)
def test_plain_data_comes_back_as_it_was(value):
    assert wire.decode(wire.encode(value)) == value


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int8", "uint32", "bool", "complex64"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 2), (2, 0, 3)])
def test_arrays_come_back_as_they_were(dtype, shape):
    array = np.asarray(jnp.ones(shape, dtype)) if dtype == "bfloat16" else np.ones(shape, dtype)
    back = wire.decode(wire.encode({"x": array, "y": np.float32(1.5)}))
    assert back["x"].dtype == array.dtype and back["x"].shape == shape and np.array_equal(back["x"], array)
    assert back["y"].shape == () and back["y"] == 1.5


def test_what_is_no_plain_data_is_refused():
    for value in (object(), np.array([object()]), {"f": print}):
        with pytest.raises(TypeError):
            wire.encode(value)


def test_nonsense_is_an_error():
    rng = np.random.default_rng(0)
    good = wire.encode({"a": np.arange(5), "b": [1, "x", [None, 2.0]]})
    for data in (b"", b"\x00", good[:-1], good + b"!", rng.bytes(100)):
        with pytest.raises(ValueError):
            wire.decode(data)
