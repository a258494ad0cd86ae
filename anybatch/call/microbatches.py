"""Divides a batch into microbatches and joins their results. No other module reshapes a batch."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from anybatch.call.checks import describe, is_array
from anybatch.call.host_batch import HostBatch
from anybatch.errors import InputError


@dataclasses.dataclass(frozen=True)
class Microbatches:
    """How a batch is divided: `complete` microbatches of `size` examples, then a smaller one of `remainder` examples.

    >>> microbatches = Microbatches(examples=11, size=4)
    >>> microbatches.complete, microbatches.remainder, microbatches.number
    (2, 3, 3)

    With `runs > 1`, a microbatch is not one slice of the batch but `runs` slices, at equal distances. If the batch is
    sharded over that many devices, every microbatch then has examples of every device, and none has to be moved.
    """

    examples: int
    size: int
    runs: int = 1  # the number of slices that a microbatch consists of

    @property
    def step(self) -> int:
        """The distance between the first examples of two consecutive microbatches."""
        return self.size // self.runs

    @property
    def last_start(self) -> int:
        return self.complete * self.step

    @property
    def complete(self) -> int:
        """The number of microbatches of `size` examples."""
        return self.examples // self.size

    @property
    def remainder(self) -> int:
        """The number of examples of the last microbatch, if it is smaller than the others; otherwise 0."""
        return self.examples % self.size

    @property
    def number(self) -> int:
        return -(-self.examples // self.size)


def count_examples(named_leaves: Sequence[tuple[str, Any]], where: str) -> int:
    """The number of examples: the size of axis 0, which all leaves of the batch must share.

    If not, the error lists the leaves, and names the options that point at the batch: `where`.
    """
    if not named_leaves:
        raise InputError(
            "The batch needs at least one array",
            given=f"no leaves in the argument at {where}",
            remedy="Point batch_argnums at the argument that holds the examples, e.g. batch_argnums=1.",
        )
    if any(isinstance(leaf, HostBatch) for _, leaf in named_leaves):
        raise InputError(
            "A HostBatch is for functions of value_and_grad, grad, map_batch, hvp and ggn_product, read and plan",
            given="a HostBatch, or a tree with one inside",
            remedy="Pass arrays here, or the HostBatch as a whole argument: its pieces are trees. For a training step, "
            "take ab.value_and_grad(loss)(params, host_batch), and update the parameters in a function of your own.",
        )
    if not all(_has_rows(leaf) for _, leaf in named_leaves):
        raise InputError(
            "Every leaf of the batch must be an array with examples along axis 0",
            given=_table([(name, describe(leaf) + ("" if _has_rows(leaf) else MARK)) for name, leaf in named_leaves]),
            remedy="Pass what is not per-example data as another argument, or close over it.",
        )
    if len({leaf.shape[0] for _, leaf in named_leaves}) > 1:
        raise InputError(
            "Every array in the batch needs the same number of examples along axis 0",
            given=_table([(name, str(leaf.shape[0])) for name, leaf in named_leaves]),
            remedy="If one of these is not per-example data, take it out of batch_argnums or close over it.",
        )
    return named_leaves[0][1].shape[0]


def _has_rows(leaf: Any) -> bool:
    # JAX has no arrays of objects, strings or dates.
    is_text = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSUmM"
    return is_array(leaf) and leaf.ndim > 0 and not is_text


def slice_examples(batch: Sequence[Any], start: Any, size: int, runs: int = 1) -> list[jax.Array]:
    """The `size` examples of a microbatch, from every leaf of the batch.

    They are sliced in the loop. A `reshape` of the batch before the loop would copy it if its size is no multiple of
    the microbatch size. Each of the `runs` of `Microbatches` begins `start` examples into its part of the batch.
    """
    # The barrier makes the batch depend on `start`, so that XLA cannot hoist work on it out of the loop. Otherwise it
    # may cast the full batch before the loop instead of these rows inside it (on the CPU, bfloat16 to float32).
    batch, start = lax.optimization_barrier((list(batch), start))
    if runs == 1:
        return [lax.dynamic_slice_in_dim(leaf, start, size) for leaf in batch]
    in_runs = [leaf.reshape(runs, leaf.shape[0] // runs, *leaf.shape[1:]) for leaf in batch]
    slices = [lax.dynamic_slice_in_dim(leaf, start, size // runs, axis=1) for leaf in in_runs]
    return [leaf.reshape(size, *leaf.shape[2:]) for leaf in slices]


# In the table of an error message: the largest number of lines, and the mark of a leaf that is wrong.
MOST_LINES, MARK = 10, "  <- this one"


def _table(rows: Sequence[tuple[str, str]]) -> str:
    lines = [f"{name}: {text}" for name, text in rows]
    if len(lines) > MOST_LINES:
        lines.sort(key=lambda line: not line.endswith(MARK))
        lines[MOST_LINES:] = [f"... and {len(lines) - MOST_LINES} more"]
    return "\n".join(lines) + ("\n" if len(rows) == 1 else "")
