"""Encodes values as bytes, for a pipe to a process that is not trusted.

Only plain data can be encoded: numbers, strings, lists, tuples, dicts and arrays. Decoding either returns a value or
raises `BrokenWire`. Unlike unpickling, it never runs code.
"""

import json
import math
import os
import struct
from typing import Any

import numpy as np

_LENGTH = struct.Struct(">QI")


class BrokenWire(Exception):
    """The bytes were not made by `encode`."""


def encode(value: Any) -> bytes:
    """Encodes a value as bytes.

    >>> decode(encode({"a": (1, 2.5, None), "b": np.arange(3)}))
    {'a': (1, 2.5, None), 'b': array([0, 1, 2])}
    """
    buffers: list[bytes] = []
    text = json.dumps(_plain(value, buffers)).encode()
    return b"".join((struct.pack(">I", len(text)), text, *buffers))


def decode(data: bytes) -> Any:
    """Returns the value that was encoded. Raises `BrokenWire` if `encode` did not make the bytes."""
    try:
        (length,) = struct.unpack_from(">I", data)
        plain = json.loads(data[4 : 4 + length].decode())
        value, end = _value(plain, data, 4 + length)
    except Exception as error:  # arbitrary bytes can fail in many ways
        raise BrokenWire(f"{type(error).__name__}: {error}") from None
    if end != len(data):
        raise BrokenWire(f"{len(data) - end} bytes too many")
    return value


def frame(token: int, value: Any) -> bytes:
    """Returns a message: its length, a token that identifies the sender, and the value."""
    data = encode(value)
    return _LENGTH.pack(len(data), token) + data


def header(data: bytes) -> tuple[int, int] | None:
    """The length and the token at the beginning of a message; None if there are too few bytes."""
    return _LENGTH.unpack_from(data) if len(data) >= HEADER else None


HEADER = _LENGTH.size


def write_frame(fd: int, token: int, value: Any) -> None:
    """Writes a message to a pipe."""
    data = memoryview(frame(token, value))
    while data:
        data = data[os.write(fd, data) :]


def read_frame(fd: int, limit: int = 2**30) -> tuple[int, Any]:
    """Reads a message from a pipe, and returns its token and its value. Raises EOFError at the end of the pipe."""
    start = _read(fd, HEADER)
    if not start:
        raise EOFError
    found = header(start)
    if found is None or found[0] > limit:
        raise BrokenWire("this is not the beginning of a message")
    data = _read(fd, found[0])
    if len(data) != found[0]:
        raise BrokenWire("the message ends too early")
    return found[1], decode(data)


def _read(fd: int, length: int) -> bytes:
    parts = []
    while length and (part := os.read(fd, min(length, 2**20))):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


# In JSON, a list begins with a letter that says whether it was a list, a tuple or an array.


def _plain(value: Any, buffers: list[bytes]) -> Any:
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, np.generic)):
        return value
    if isinstance(value, dict):
        return {_text(key): _plain(each, buffers) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return ["l" if isinstance(value, list) else "t", *(_plain(each, buffers) for each in value)]
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise TypeError(f"{type(value).__name__} is not plain data")
    buffers.append(array.tobytes())
    return ["a", array.dtype.name, list(array.shape)]


def _text(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"the keys of a dict must be strings, got {key!r}")
    return key


def _value(plain: Any, data: bytes, offset: int) -> tuple[Any, int]:
    if isinstance(plain, dict):
        result = {}
        for key, each in plain.items():
            result[key], offset = _value(each, data, offset)
        return result, offset
    if not isinstance(plain, list):
        return plain, offset
    kind, *rest = plain
    if kind == "a":
        dtype, shape = np.dtype(rest[0]), tuple(int(size) for size in rest[1])
        if dtype.hasobject or min(shape, default=0) < 0:
            raise ValueError("not an array")
        length = dtype.itemsize * math.prod(shape)
        if offset + length > len(data):
            raise ValueError("an array ends too early")
        array = np.frombuffer(data, dtype, math.prod(shape), offset).reshape(shape).copy()
        return array, offset + length
    if kind not in ("l", "t"):
        raise ValueError(f"unknown kind {kind!r}")
    values = []
    for each in rest:
        value, offset = _value(each, data, offset)
        values.append(value)
    return (values if kind == "l" else tuple(values)), offset
