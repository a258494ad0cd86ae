"""Count, cut and reassemble a batch: the only code that reshapes one."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from anybatch.call.checks import describe, is_array
from anybatch.errors import InputError


@dataclasses.dataclass(frozen=True)
class Microbatches:
    """Some examples as `whole` microbatches of `size` examples, and one of `remainder` at the end.

    >>> cut = Cut(examples=11, size=4)
    >>> cut.whole, cut.remainder, cut.microbatches
    (2, 3, 3)

    In several runs, of which each is a part of every microbatch, a batch that is spread over devices stays where it
    is: a microbatch then has examples from all of them.
    """

    examples: int
    size: int
    runs: int = 1  # of consecutive examples that a microbatch is made of, spread evenly over the batch

    @property
    def step(self) -> int:
        """From the first example of a microbatch to the first of the next one."""
        return self.size // self.runs

    @property
    def last_start(self) -> int:
        """The first example of the ragged last microbatch."""
        return self.whole * self.step

    @property
    def whole(self) -> int:
        return self.examples // self.size

    @property
    def remainder(self) -> int:
        return self.examples % self.size

    @property
    def microbatches(self) -> int:
        return -(-self.examples // self.size)


def count_examples(named_leaves: Sequence[tuple[str, Any]], where: str) -> int:
    """The number of examples that every leaf of the batch has along axis 0.

    Args:
      named_leaves: of the batch.
      where: the options that name the batch, for a message.

    Raises:
      InputError: where there is no array, a leaf without axis 0, or a disagreement; with a table of leaves.
    """
    if not named_leaves:
        raise InputError(
            "The batch needs at least one array",
            given=f"no leaves in the argument at {where}",
            remedy="Point batch_argnums at the argument that holds the examples, e.g. batch_argnums=1.",
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
    is_text = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSUmM"  # which JAX has no arrays of
    return is_array(leaf) and leaf.ndim > 0 and not is_text


def take(batch: Sequence[Any], start: Any, size: int, runs: int = 1) -> list[jax.Array]:
    """`size` consecutive examples of every leaf, from `start`, which may be known at run time only; or that in runs.

    A slice of the batch where it lies: cutting it beforehand by `reshape` would copy a ragged batch.
    """
    # Tied to `start`, the batch changes with each turn of the loop, as far as XLA can see. Otherwise it may cast
    # the whole batch before the loop, instead of these rows in it (on the CPU, bfloat16 to float32).
    batch, start = lax.optimization_barrier((list(batch), start))
    if runs == 1:
        return [lax.dynamic_slice_in_dim(leaf, start, size) for leaf in batch]
    in_runs = [leaf.reshape(runs, leaf.shape[0] // runs, *leaf.shape[1:]) for leaf in batch]
    taken = [lax.dynamic_slice_in_dim(leaf, start, size // runs, axis=1) for leaf in in_runs]
    return [leaf.reshape(size, *leaf.shape[2:]) for leaf in taken]


def first_start(cut: Microbatches, before: Sequence[Any]) -> tuple[jax.Array, list[Any]]:
    """Where the loop over the microbatches starts, and what comes before it: the results of the ragged last one.

    A loop of a single turn is no loop to XLA, which may then hold the activations of both microbatches at a time. So
    its start is made to wait for what comes before.
    """
    start = jnp.zeros((), jnp.int32)
    if cut.whole != 1 or not cut.remainder or not before:
        return start, list(before)
    return lax.optimization_barrier((start, list(before)))


def join_rows(stacked: jax.Array, last: jax.Array | None, axis: int, runs: int = 1) -> jax.Array:
    """Rows of all microbatches in the order of the batch.

    Args:
      stacked: the rows of the whole microbatches, which are numbered along axis 0.
      last: the rows of the ragged last one, if there is one.
      axis: where the rows are, in the array of one microbatch.
      runs: of how many runs of examples a microbatch is made.
    """
    if runs > 1:

        def in_runs(array: jax.Array) -> jax.Array:
            """With an axis of its own for the runs, before those of the microbatches and the rows of one."""
            shape = array.shape
            split = array.reshape(*shape[: axis + 1], runs, shape[axis + 1] // runs, *shape[axis + 2 :])
            moved = jnp.moveaxis(split, 0, axis + 1)
            return moved.reshape(*moved.shape[: axis + 1], -1, *moved.shape[axis + 3 :])

        parts = [in_runs(stacked)] if last is None else [in_runs(stacked), in_runs(last[None])]
        joined = jnp.concatenate(parts, axis + 1)
        return joined.reshape(*joined.shape[:axis], -1, *joined.shape[axis + 2 :])
    number, *shape = stacked.shape
    shape[axis] *= number
    rows = jnp.moveaxis(stacked, 0, axis).reshape(shape)
    return rows if last is None else jnp.concatenate([rows, last], axis)


# Of a batch, in a message: as many lines, and what stands beside a leaf that cannot be one.
MOST_LINES, MARK = 10, "  <- this one"


def _table(rows: Sequence[tuple[str, str]]) -> str:
    lines = [f"{name}: {text}" for name, text in rows]
    if len(lines) > MOST_LINES:
        lines.sort(key=lambda line: not line.endswith(MARK))
        lines[MOST_LINES:] = [f"... and {len(lines) - MOST_LINES} more"]
    return "\n".join(lines) + ("\n" if len(rows) == 1 else "")
