"""Values that are known before anything runs: built from constants and counters alone."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from anybatch.reading.graph import ELEMENTWISE, Value
from anybatch.reading.reader import Reader

_MOVES_ELEMENTS = frozenset("broadcast_in_dim reshape transpose squeeze concatenate slice rev pad iota".split())
_MAX_SIZE = 1 << 22
_MAX_DEPTH = 60


def constant_value(
    reader: Reader, value: Value, given: Mapping[Value, Any] | None = None
) -> np.ndarray[Any, Any] | None:
    """The value, if it depends on neither the batch nor the parameters but on what is `given`; or None."""
    known: dict[Value, Any] = dict(given or {})

    def evaluate(value: Value, depth: int) -> Any:
        if value.is_constant:
            return None if isinstance(value.known, jax.core.Tracer) else value.known
        if value in known:
            return known[value]
        node = value.node
        if value.hint is not None:
            return value.hint
        if node is None or depth > _MAX_DEPTH or value.size > _MAX_SIZE:
            return None
        if node.name not in ELEMENTWISE and node.name not in _MOVES_ELEMENTS:
            return None
        operands = [evaluate(operand, depth + 1) for operand in node.inputs]
        if any(operand is None for operand in operands):
            return None
        with jax.ensure_compile_time_eval():
            known.update(zip(node.outputs, node(operands), strict=True))
        return known[value]

    if value.size > _MAX_SIZE or value.is_key:
        return None
    try:
        found = evaluate(value, 0)
        return None if found is None else np.asarray(found)
    except Exception:  # what cannot be evaluated ahead of time, as in a shard_map without jit, is simply not known
        return None
