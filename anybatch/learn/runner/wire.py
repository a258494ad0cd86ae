"""Encodes what a process reports as bytes: plain data and arrays.

It is JSON, so tuples arrive as lists. Unlike unpickling, decoding never runs code.
"""

import base64
import json
from typing import Any

import numpy as np


def encode(value: Any) -> bytes:
    """Encodes a value as bytes.

    >>> decode(encode({"a": (1, 2.5, None), "b": np.arange(3)}))
    {'a': [1, 2.5, None], 'b': array([0, 1, 2])}
    """
    return json.dumps(value, default=_plain).encode()


def decode(data: bytes) -> Any:
    """Returns the value that was encoded. Raises ValueError if `encode` did not make the bytes."""
    return json.loads(data, object_hook=_value)


def _plain(value: Any) -> dict[str, Any]:
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise TypeError(f"{type(value).__name__} is not plain data")
    return {"array": base64.b64encode(array.tobytes()).decode(), "dtype": array.dtype.name, "shape": array.shape}


def _value(plain: dict[str, Any]) -> Any:
    if plain.keys() != {"array", "dtype", "shape"}:
        return plain
    data = np.frombuffer(base64.b64decode(plain["array"]), np.dtype(plain["dtype"]))
    return data.reshape(plain["shape"]).copy()
