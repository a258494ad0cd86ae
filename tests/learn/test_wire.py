"""Encoding values for a pipe: they arrive unchanged, and arbitrary bytes only raise an error."""

import os

import jax.numpy as jnp
import numpy as np
import pytest

from anybatch.learn.runner import wire


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, 2.5, True, "text", None, float("inf")],
        {"a": (1, [2, (3,)]), "b": {}, "t": ["t"], "l": ("l", "a")},
        (),
        [],
        2**80,
    ],
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
    for value in (object(), {1: 2}, np.array([object()]), {"f": print}):
        with pytest.raises(TypeError):
            wire.encode(value)


def test_nonsense_is_an_error_and_nothing_else():
    rng = np.random.default_rng(0)
    good = wire.encode({"a": np.arange(5), "b": [1, "x", (None, 2.0)]})
    for _ in range(3000):
        data = bytearray(good)
        for position in rng.integers(0, len(data), 3):
            data[position] = rng.integers(256)
        try:
            wire.decode(bytes(data))
        except wire.BrokenWire:
            pass
    for data in (
        b"",
        b"\x00",
        good[:-1],
        good + b"!",
        rng.bytes(100),
        b"\0\0\0\2[]",
        b"\x00\x00\x10\x00" + b"[" * 4096,
    ):
        with pytest.raises(wire.BrokenWire):
            wire.decode(data)


def test_messages_over_a_pipe():
    reading, writing = os.pipe()
    wire.write_frame(writing, 2**32 - 1, {"x": np.arange(4)})
    token, value = wire.read_frame(reading)
    assert token == 2**32 - 1 and value["x"].tolist() == [0, 1, 2, 3]
    whole = wire.frame(1, [1])
    os.write(writing, whole[:-1])
    os.close(writing)
    with pytest.raises(wire.BrokenWire, match="ends too early"):
        wire.read_frame(reading)
    with pytest.raises(EOFError):
        wire.read_frame(reading)
    os.close(reading)


def test_a_message_that_claims_to_be_huge_is_not_waited_for():
    reading, writing = os.pipe()
    os.write(writing, b"\xff" * wire.HEADER)
    with pytest.raises(wire.BrokenWire, match="not the beginning of a message"):
        wire.read_frame(reading)
    os.close(reading), os.close(writing)
