"""Checks of the head of a loss, which is computed from the full batch: is it allowed, and does it fit the memory?"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from anybatch.call.checks import warn
from anybatch.call.loss import TracedLoss
from anybatch.call.memory import readable
from anybatch.errors import CoupledError, HeadTooLargeError, InputError, LargeHeadWarning
from anybatch.jaxprs import versions
from anybatch.reading import blocks, states
from anybatch.reading.read import split_loss
from anybatch.reading.report import Reading, report
from anybatch.reading.split import Split, ancestors
from anybatch.reading.states import Blame

# Heads of up to this many bytes cause no warning: one that compares embeddings, and one that contains layers.
SMALL = 16 * 2**20
SMALL_WITH_LAYERS = 2**20

COMPARED = (
    ", e.g. compare each example with a fixed set that is another argument; compared with itself, its gradient is 0"
)


def check_head(
    split: Split, *, on_coupled: str, left: Callable[[], int | None], block_sizes: Callable[[int], Sequence[int | None]]
) -> Reading:
    """The reading of a loss, after checking its head.

    `left` returns the bytes left for the head, or None if not known. `block_sizes` returns the sizes of blocks that it
    may be computed in, for so many bytes.

    Raises:
      CoupledError: for a loss that looks across examples, with `on_coupled="error"`.
      HeadTooLargeError: if the head does not fit the memory.
    """
    reading = report(split)
    if on_coupled == "error" and not reading.separable:
        of_all = reading.head_bytes + sum(item.bytes for item in reading.frontier)
        kind, result = ("loss", "gradient") if reading.outputs is None else ("function", "result")
        raise CoupledError(
            f"This {kind} looks across examples{_where(reading)}\n"
            f"Its {result} needs values of the full batch. "
            f"Keep the examples separate there{_instead(reading)}, or pass "
            f'on_coupled="exact": the {result} is then exact, and everything after that line runs on the full batch, '
            f"which takes about {readable(of_all)}."
        )
    budget = left() if reading.head_bytes else None
    # The estimate may be too high, since XLA fuses operations. The compiled head decides.
    if budget is not None and reading.full_batch_bytes > budget // 4:
        allowed = block_sizes(budget)
        needed = _compiled_bytes(split, allowed[-1])
        if needed > budget:
            in_blocks = "" if allowed[-1] is not None else _advice_of_blocks(split, budget)
            raise HeadTooLargeError(
                f"The part of this {'function' if split.loss.maps else 'loss'} that runs on the full batch needs "
                f"{readable(needed, at_least=True)}{'' if split.loss.maps else ' with its gradient'}, "
                f"besides the parameters and the batch, and there are {readable(budget)} left for it.\n"
                f"{_begins(reading)}\nAllow more with memory=. {in_blocks or reading.remedy}".rstrip()
            )
    return reading


def check_examples_separate(loss: TracedLoss, consts: Sequence[Any], *, fresh_draws: bool) -> None:
    """Raises for a loss that looks across examples, where it will be called with batches of one (`keep_batch_dim`).

    Statistics of the data of all examples are refused too, such as inputs normalised over the batch: a batch of one has
    others. A function of sums over the examples is allowed, such as a mean over all tokens: one example has its own.
    The loss is traced for more than one example. With `fresh_draws`, each example draws its own random numbers.
    """
    try:
        split = split_loss(loss, consts, fresh_draws=fresh_draws, sums_data_later=True)
    except InputError as error:
        raise InputError(
            error.must,
            given=error.given,
            remedy="Take it out of the loss, or write the loss of one example and leave keep_batch_dim out.",
        ) from error
    reading, of_data = report(split), next(_across_data(split), None)
    if not reading.separable or of_data is not None:
        where = _where(reading) if of_data is None else f" at {of_data}."
        raise CoupledError(
            f"This loss looks across examples{where}\n"
            "keep_batch_dim=True calls it with batches of one, where it is a different loss: there are no other "
            "examples to average over or to compare with. "
            f"Keep the examples separate there{_instead(reading) or COMPARED}. "
            "If you mean batches of one, write that loss of one example and leave keep_batch_dim out: "
            "lambda params, example: loss(params, jax.tree.map(lambda leaf: leaf[None], example))."
        )


def _across_data(split: Split) -> Iterator[Blame]:
    """The lines at which the loss computes something from the data of all examples, to use it for each of them."""
    reader, of_loss = split.reader, ancestors(split.graph.outputs[0])
    for node in split.graph.nodes:
        outcome = reader.outcomes.get(node)
        first = [value for value in node.outputs if value in reader.computed_first]
        first += [] if outcome is None else outcome.in_full
        if node in of_loss and any(reader.uses_batch[value] for value in first):
            yield states.blame_of(node, "each example uses a value that is computed from the data of all examples")


def warn_of_large_head(split: Split, reading: Reading, block_size: int | None) -> None:
    """Warns if microbatches will save little memory, because most of the loss is in the head.

    With blocks, only what the head still computes in full counts.
    """
    small = SMALL_WITH_LAYERS if split.head_has_layers else SMALL
    if block_size is not None and reading.head_bytes > small:
        left = min(reading.head_bytes, blocks.bytes_in_full(split))
        # What is left is what blocks cannot compute.
        reading = dataclasses.replace(reading, head_bytes=left, wide=())
    if reading.full_batch_bytes > max(small, reading.activation_bytes // 2):
        every = max(reading.activation_bytes, reading.full_batch_bytes)
        warn(
            f"Most of this model runs on the full batch: about {readable(reading.full_batch_bytes)} of "
            f"{readable(every)} of activations, so that microbatches save little memory.\n"
            f"{_begins(reading)}\n{reading.advice}".rstrip(),
            LargeHeadWarning,
        )


def _where(reading: Reading) -> str:
    return f" at {reading.blame[0]}." if reading.blame else "."


def _instead(reading: Reading) -> str:
    return " (GroupNorm or LayerNorm instead of BatchNorm)" if reading.is_norm_over_batch else ""


def _begins(reading: Reading) -> str:
    if not reading.blame:
        return "It depends on data that is computed across examples. Compute that data outside the loss."
    return f"It begins at {reading.blame[0]}."


def _advice_of_blocks(split: Split, budget: int) -> str:
    """How to compute the head in blocks, if it then fits; else empty."""
    wide = [value for value in blocks.wide_values(split, 0) if value.axis is not None and not value.per_example]
    if not wide:
        return ""
    largest = max(wide, key=lambda value: value.bytes)
    rows = max(1, budget // 16 // max(1, largest.bytes // largest.num_rows))
    block_size = 1 << (min(rows, largest.num_rows).bit_length() - 1)
    if _compiled_bytes(split, block_size) > budget:
        return ""
    return f"Or pass block_size={block_size}, which computes so many of its rows at a time, and fits."


def _compiled_bytes(split: Split, block_size: int | None) -> int:
    """The bytes of the compiled head and its gradient, as XLA counts them."""
    types = [value.type for value in split.graph.inputs]
    known = [value.type for value in split.known_first]
    frontier = [value.type for value in split.frontier]
    first, last = split.num_consts, split.num_consts + len(split.loss.types.wrt)
    if split.loss.maps:
        whole = jax.jit(lambda inputs, known, frontier: split.head(inputs, known, [], frontier))
        needed = versions.temporaries(whole.lower(types, known, frontier).compile())
        return needed + sum(value.num_bytes for value in split.frontier)

    def head(inputs: list[Any], known: list[Any], frontier: list[Any]) -> Any:
        def of_arrays(inputs: list[Any], known: list[Any], wrt: list[Any], frontier: list[Any]) -> list[Any]:
            return split.head([*inputs[:first], *wrt, *inputs[last:]], known, [], frontier, num_outputs=1)

        if block_size is not None:
            arrays = (inputs, known, inputs[first:last], frontier)
            roles = blocks.head_roles(split, len(known), last - first)
            of_arrays = blocks.blocked(of_arrays, arrays, roles, block_size)

        def loss(wrt: list[Any], moving: list[Any]) -> Any:
            now = dict(zip(split.differentiated, moving, strict=True))
            values = [now.get(position, value) for position, value in enumerate(frontier)]
            return of_arrays(inputs, known, wrt, values)[0]

        moving = [frontier[position] for position in split.differentiated]
        return jax.grad(loss, argnums=(0, 1))(inputs[first:last], moving)

    compiled = jax.jit(head).lower(types, known, frontier).compile()
    return versions.temporaries(compiled) + sum(value.num_bytes for value in split.frontier)
