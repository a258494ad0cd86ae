"""Whether a loss may look across examples, and whether what it then computes from all of them is small enough."""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from anybatch.call.loss import TracedLoss
from anybatch.call.memory import memory_budget, readable
from anybatch.errors import CoupledError, HeadTooLargeError, InputError, LargeHeadWarning, user_stacklevel
from anybatch.jaxprs import versions
from anybatch.reading import coupling
from anybatch.reading.coupling import Blame
from anybatch.reading.read import split_loss
from anybatch.reading.report import Reading, report
from anybatch.reading.split import Split, ancestors

# Bytes of a head that is nobody's concern: of one that compares embeddings, and of one with layers of the model in it.
SMALL = 16 * 2**20
SMALL_WITH_LAYERS = 2**20

COMPARED = (
    ", e.g. compare each example with a fixed set passed as another argument: with itself alone, its gradient is 0"
)


def check_head(split: Split, *, on_coupled: str, memory: Any = None) -> Reading:
    """Checks a loss before it runs.

    Args:
      split: the loss, as it was read.
      on_coupled: "error" refuses a loss that looks across examples.
      memory: what may be used, as `memory_budget` takes it.

    Raises:
      CoupledError: for a loss that looks across examples, if that is to be an error.
      HeadTooLargeError: if what runs on the whole batch at once does not fit.
    """
    reading = report(split)
    if on_coupled == "error" and not reading.separable:
        of_all = reading.head_bytes + sum(item.bytes for item in reading.frontier)
        raise CoupledError(
            f"This loss looks across examples{_where(reading)}\n"
            f"Its gradient needs values of the whole batch. Keep the examples apart there{_instead(reading)}, or pass "
            'on_coupled="exact": the gradient is then exact, and everything after that line runs on the whole batch at '
            f"once, which takes about {readable(of_all)}."
        )
    budget = memory_budget(memory)
    # The estimate may be too high, since XLA computes much in passing: only the compiled head decides.
    if budget is not None and reading.head_bytes > budget // 4:
        needed = _compiled_bytes(split)
        if needed > budget:
            raise HeadTooLargeError(
                f"What this loss computes from the whole batch at once needs {readable(needed)} with its gradient, "
                f"beside the parameters and the batch, and there are {readable(budget)}.\n"
                f"{_begins(reading)}\nAllow more with memory=. {reading.remedy}".rstrip()
            )
    return reading


def check_examples_apart(loss: TracedLoss, consts: Sequence[Any], *, fresh_draws: bool) -> None:
    """Refuses a loss that looks across examples, and that is going to be given batches of one.

    What it computes from the data of all examples counts, too: in a batch of one it is something else. A function of
    sums over the examples does not, such as a mean over all tokens: of one example, it is that of its own sums.

    Args:
      loss: traced at more than one example.
      consts: what it closes over.
      fresh_draws: whether each example draws its own random numbers.

    Raises:
      CoupledError: if it does, with the line.
      InputError: for a loss that cannot be read.
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
            "keep_batch_dim=True gives it batches of one, in which it is another loss: there are no other examples to "
            f"average over or to compare with. Keep the examples apart there{_instead(reading) or COMPARED}. Or, if "
            "batches of one are meant, write that loss of one example and leave keep_batch_dim out: "
            "lambda params, example: loss(params, jax.tree.map(lambda leaf: leaf[None], example))."
        )


def _across_data(split: Split) -> Iterator[Blame]:
    """Where the loss computes from the data of all examples what it then uses for each of them."""
    reader, mine = split.reader, ancestors(split.graph.outputs[0])
    for node in split.graph.nodes:
        outcome = reader.outcomes.get(node)
        first = [value for value in node.outputs if value in reader.computed_first]
        first += [] if outcome is None else outcome.in_full
        if node in mine and any(reader.uses_batch[value] for value in first):
            yield coupling.blame(node, "each example uses what it computes from the data of all of them")


def warn_of_large_head(split: Split, reading: Reading) -> None:
    """Warns if microbatches will save little memory, since most of the loss runs on the whole batch at once."""
    small = SMALL_WITH_LAYERS if split.head_has_layers else SMALL
    if reading.head_bytes > max(small, reading.activation_bytes // 2):
        warnings.warn(
            f"Most of this model runs on the whole batch at once: about {readable(reading.head_bytes)} of "
            f"{readable(reading.activation_bytes)} of activations, so that microbatches save little memory.\n"
            f"{_begins(reading)}\n{reading.advice}".rstrip(),
            LargeHeadWarning,
            stacklevel=user_stacklevel(),
        )


def _where(reading: Reading) -> str:
    return f" at {reading.blame[0]}." if reading.blame else "."


def _instead(reading: Reading) -> str:
    return " (GroupNorm or LayerNorm instead of BatchNorm)" if reading.is_norm_over_batch else ""


def _begins(reading: Reading) -> str:
    if not reading.blame:
        return "It comes from data that is computed across examples. Compute that outside the loss."
    return f"It begins at {reading.blame[0]}."


def _compiled_bytes(split: Split) -> int:
    """The bytes that the head and its gradient take, as XLA counts them."""
    types = [value.type for value in split.graph.inputs]
    known = [value.type for value in split.known_first]
    frontier = [value.type for value in split.frontier]
    first, last = split.num_consts, split.num_consts + len(split.loss.types.wrt)

    def head(inputs: list[Any], known: list[Any], frontier: list[Any]) -> Any:
        def loss(wrt: list[Any], moving: list[Any]) -> Any:
            now = dict(zip(split.differentiated, moving, strict=True))
            whole = [now.get(position, value) for position, value in enumerate(frontier)]
            return split.head([*inputs[:first], *wrt, *inputs[last:]], known, [], whole, num_outputs=1)[0]

        moving = [frontier[position] for position in split.differentiated]
        return jax.grad(loss, argnums=(0, 1))(inputs[first:last], moving)

    compiled = jax.jit(head).lower(types, known, frontier).compile()
    return versions.temporaries(compiled) + sum(value.num_bytes for value in split.frontier)
