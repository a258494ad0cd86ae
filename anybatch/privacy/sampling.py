"""Poisson sampling: each example is in each batch with the same probability, independently. Batches are padded."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from anybatch.call.checks import describe, is_array, named_leaves, whole_number
from anybatch.errors import InputError
from anybatch.privacy.accounting import largest_sample, log_excess_probability, positive, probability
from anybatch.privacy.key_ledger import LEDGER, value_of
from anybatch.privacy.noise import check_key

# The largest probability that some draw of a run has more examples than a batch has rows.
OVERFLOW = 1e-12

# Makes the draws of batches independent of other draws with the same seed.
_PURPOSE = 0x706F6973736F6E


class PaddedBatch(NamedTuple):
    """A batch and the booleans that mark its padding, for `privacy.dp_sgd` and `privacy.private_grad`.

    It is a pytree. The loss gets its examples, one at a time. Rows that are padding count for nothing.

    >>> import numpy as np
    >>> from anybatch import privacy
    >>> batch = privacy.PaddedBatch({"x": np.ones((3, 2))}, is_padding=np.array([False, False, True]))
    >>> batch.examples["x"].shape
    (3, 2)

    Args:
      examples: a tree of arrays with one row for each example along axis 0.
      is_padding: one boolean for each row, True for padding.
    """

    examples: Any
    is_padding: Any


class Draw(NamedTuple):
    """One Poisson sample: the indices of the examples of a batch. It unpacks as `(indices, is_padding)`.

    Args:
      indices: the indices of the examples, in ascending order, and then zeros as padding.
      is_padding: one boolean for each index, True for padding.
    """

    indices: Any
    is_padding: Any

    def take(self, data: Any) -> PaddedBatch:
        """The batch of the examples with these indices.

        >>> import numpy as np
        >>> from anybatch import privacy
        >>> draw = privacy.poisson_batches(4, sampling_rate=1.0, steps=1, seed=0).batch(0)
        >>> draw.take({"x": np.arange(4) * 10}).examples["x"].tolist()
        [0, 10, 20, 30]

        Args:
          data: a tree of arrays with all examples of the dataset along axis 0.

        Raises:
          InputError: if an array has no row for one of the indices, or inside `jit`, where the indices are not known.
        """
        if isinstance(self.indices, jax.core.Tracer):
            raise InputError(
                "The indices of a draw must be known when examples are taken",
                given="a draw inside jit",
                remedy="Take them outside of jit, and pass the batch: draw.take(data).",
            )
        # For an index beyond the last row JAX would take the last row, and that example would count more than once.
        indices = np.asarray(self.indices)
        _check_rows(data, int(np.max(indices, initial=-1)) + 1, exactly=False)
        return PaddedBatch(jax.tree.map(lambda array: array[indices], data), self.is_padding)


@dataclasses.dataclass(frozen=True)
class PoissonBatches:
    """The batches of a run, each a `Draw`, or with `of(data)` a `PaddedBatch`; made by `privacy.poisson_batches`.

    Args:
      num_examples: the number of examples of the dataset.
      sampling_rate: the probability that an example is in a batch.
      steps: the number of batches.
      batch_size: the number of rows of a batch, with padding.
      start: the step at which iteration begins.
      data: the arrays from which `batch` takes examples. If None, `batch` returns a `Draw`.
    """

    num_examples: int
    sampling_rate: float
    steps: int
    batch_size: int
    start: int = 0
    data: Any = dataclasses.field(default=None, repr=False, compare=False)
    _entropy: tuple[int, ...] = dataclasses.field(default=(), repr=False)

    # For `ab.fit`: a second pass would repeat the same draws, which the accounting does not cover.
    single_pass = True

    @property
    def expected_batch_size(self) -> float:
        """The number of examples that a batch has on average. Sums of gradients are divided by it."""
        return self.num_examples * self.sampling_rate

    def of(self, data: Any) -> "PoissonBatches":
        """The same draws as batches of the data: each is a `PaddedBatch`, for `ab.fit` and `privacy.dp_sgd`.

        **Resumable.** A resumed run of `ab.fit` gets the same batches as an uninterrupted one. The checkpoint contains
        the seed, which then replaces the seed that was passed. Keep the checkpoint as secret as the key.

        >>> import numpy as np
        >>> from anybatch import privacy
        >>> batches = privacy.poisson_batches(4, sampling_rate=0.5, steps=2, seed=0).of({"x": np.arange(4)})
        >>> [batch.examples["x"].shape == batch.is_padding.shape for batch in batches]
        [True, True]

        Args:
          data: a tree of arrays with all examples of the dataset along axis 0. They are not copied.

        Raises:
          InputError: if an array does not have `num_examples` rows.
        """
        _check_rows(data, self.num_examples, exactly=True)
        return dataclasses.replace(self, data=data)

    def __len__(self) -> int:
        return self.steps - self.start

    def __iter__(self) -> Iterator[Any]:
        return _Drawing(self)

    def get_state(self) -> dict[str, Any]:
        """The state of the iterator before the first batch, for checkpoints."""
        return _Drawing(self).get_state()

    def batch(self, step: int) -> Any:
        """The batch of one step. It depends only on the seed and the step.

        Args:
          step: the index of the step, from 0 to `steps - 1`.

        Returns:
          A `Draw`, or a `PaddedBatch` if there is data.

        Raises:
          InputError: if the draw has more examples than a batch has rows. With the default `max_batch_size`, the
            probability of that is below 1e-12 for a complete run. Examples are never left out.
        """
        step = whole_number("step", step, example="0")
        if step >= self.steps:
            raise InputError(
                "step must be a step of the run", given=f"step={step} of {self.steps}", remedy="Pass a larger steps=..."
            )
        sequence = np.random.SeedSequence(self._entropy, spawn_key=(step,))
        random = np.random.Generator(np.random.Philox(sequence))
        # First the number of examples, then a uniform set of that size. This has the distribution of an independent
        # toss for each example, without the cost of the tosses.
        chosen = int(random.binomial(self.num_examples, self.sampling_rate))
        if chosen > self.batch_size:
            raise InputError(
                "A batch must have a row for every example that was drawn",
                given=f"{chosen} examples at step {step} and {self.batch_size} rows",
                remedy="Leave max_batch_size out. Leaving examples out instead would void the guarantee.",
            )
        dtype = np.int32 if self.num_examples < 2**31 else np.int64
        indices = np.zeros(self.batch_size, dtype)
        indices[:chosen] = np.sort(random.choice(self.num_examples, chosen, replace=False, shuffle=False))
        draw = Draw(indices, np.arange(self.batch_size) >= chosen)
        return draw if self.data is None else draw.take(self.data)


class _Drawing(Iterator[Any]):
    """An iterator over batches that can save its state in a checkpoint and continue from it."""

    def __init__(self, batches: PoissonBatches) -> None:
        self._batches, self._step = batches, batches.start

    def __next__(self) -> Any:
        if self._step >= self._batches.steps:
            raise StopIteration
        self._step += 1
        return self._batches.batch(self._step - 1)

    def get_state(self) -> dict[str, Any]:
        batches = self._batches
        return {
            "num_examples": batches.num_examples,
            "sampling_rate": batches.sampling_rate,
            "seed": list(batches._entropy),
            "step": self._step,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        # The seed of the checkpoint is used: with other batches, steps that are repeated after an interruption would
        # have the same noise on different data.
        batches = self._batches
        now = {"num_examples": batches.num_examples, "sampling_rate": batches.sampling_rate}
        other = [f"{name}={now[name]!r}, and {state[name]!r} before" for name in now if now[name] != state[name]]
        if other:
            raise InputError(
                "A resumed run must draw its batches as before: all its steps are accounted for at one sampling rate",
                given="\n".join(other),
                remedy="Pass the same data and expected_batch_size as before, or start a new run with another folder "
                "for checkpoints. The epsilons of both runs add up.",
            )
        self._batches = dataclasses.replace(batches, _entropy=tuple(state["seed"]))
        self._step = state["step"]


def poisson_batches(
    num_examples: int,
    *,
    steps: int,
    seed: Any,
    sampling_rate: float | None = None,
    expected_batch_size: float | None = None,
    max_batch_size: int | None = None,
    start: int = 0,
) -> PoissonBatches:
    """Draws batches by Poisson sampling, which `privacy.epsilon` accounts for.

    **Independent.** Each example is in each batch with the probability `sampling_rate`, independently of all other
    examples and of all other batches. Batches have different numbers of examples, and may have none.

    **One size.** Batches are padded to the same number of rows at each step, so that nothing compiles twice, and
    `is_padding` marks the padding. The probability that any draw of the run needs more rows is below 1e-12, and such a
    draw raises an error.

    **Resumable.** The batch of a step depends only on the seed and the step; `start=` continues an earlier run.

    >>> from anybatch import privacy
    >>> batches = privacy.poisson_batches(60_000, expected_batch_size=256, steps=10, seed=privacy.secret_key())
    >>> for indices, is_padding in batches:
    ...     pass
    >>> indices.shape == is_padding.shape == (batches.batch_size,)
    True

    `batches.of(data)` iterates over the batches themselves, for `ab.fit`. In your own loop, `draw.take(data)` is one of
    them:

    >>> import numpy as np
    >>> data = {"x": np.zeros((60_000, 5))}
    >>> for draw in batches:
    ...     batch = draw.take(data)
    >>> batch.examples["x"].shape == (batches.batch_size, 5)
    True

    Args:
      num_examples: the number of examples of the dataset.
      steps: the number of steps of the complete run, including those before `start`.
      seed: a whole number or a PRNG key that is used for nothing else. Keep it secret: it determines which examples are
        in which batch. `privacy.secret_key()` makes one.
      sampling_rate: the probability that an example is in a batch. Pass either this or `expected_batch_size`.
      expected_batch_size: the number of examples that a batch has on average.
      max_batch_size: the number of rows of a batch, with padding. By default the smallest safe number; pass a larger
        one e.g. to have a multiple of the number of devices.
      start: the step to begin with, to continue an earlier run.

    Returns:
      A `PoissonBatches`: an iterable of `Draw`, one for each step.

    Raises:
      InputError: for numbers that are not allowed, or a `max_batch_size` that a draw may well exceed.
    """
    num_examples = whole_number("num_examples", num_examples, 1, example="60_000")
    steps = whole_number("steps", steps, 1, example="1000")
    start = whole_number("start", start, example="0")
    if (sampling_rate is None) == (expected_batch_size is None):
        raise InputError(
            "Either sampling_rate or expected_batch_size must be given",
            given=f"sampling_rate={sampling_rate!r} and expected_batch_size={expected_batch_size!r}",
            remedy="For example expected_batch_size=256.",
        )
    if sampling_rate is not None:
        rate = probability("sampling_rate", sampling_rate, example="256 / 60_000", or_one=True)
    else:
        rate = rate_of(num_examples, expected_batch_size)
    if start > steps:
        raise InputError(
            "start must be a step of the run",
            given=f"start={start} and steps={steps}",
            remedy="steps= also counts the steps that were taken before.",
        )
    smallest = largest_sample(num_examples, rate, failure=OVERFLOW / steps)
    size = smallest if max_batch_size is None else whole_number("max_batch_size", max_batch_size, 1, example="512")
    if size < smallest and log_excess_probability(num_examples, rate, size) > math.log(OVERFLOW / steps):
        raise InputError(
            "max_batch_size must be large enough for every draw: leaving examples out would void the guarantee",
            given=f"max_batch_size={size} for {num_examples * rate:g} examples on average over {steps} steps",
            remedy=f"Leave it out, or pass at least max_batch_size={smallest}; or lower expected_batch_size.",
        )
    return PoissonBatches(num_examples, rate, steps, size, start, None, _entropy(seed))


def _check_rows(data: Any, number: int, *, exactly: bool) -> None:
    """Refuses data whose arrays do not have one row for each example."""
    named = named_leaves("data", data)
    bad = [
        f"{name}: {describe(leaf)}"
        for name, leaf in named
        if not (is_array(leaf) and leaf.ndim) or leaf.shape[0] < number or (exactly and leaf.shape[0] != number)
    ]
    if bad or not named:
        raise InputError(
            f"data must be a tree of arrays with {'' if exactly else 'at least '}{number} rows, one for each example",
            given="\n".join(bad[:10]) or "a tree without arrays",
            remedy='For example draw.take({"x": x, "y": y}) with len(x) == len(y) == num_examples.',
        )


def rate_of(num_examples: int, expected_batch_size: Any) -> float:
    """The sampling rate that gives an expected batch size."""
    expected = positive("expected_batch_size", expected_batch_size, example="256")
    if expected > num_examples:
        raise InputError(
            "expected_batch_size must be at most the number of examples",
            given=f"expected_batch_size={expected_batch_size!r} and num_examples={num_examples}",
            remedy="num_examples counts each example once, not once for each epoch.",
        )
    return expected / num_examples


def _entropy(seed: Any) -> tuple[int, ...]:
    is_number = not is_array(seed) or (seed.ndim == 0 and jax.dtypes.issubdtype(seed.dtype, np.integer))
    if is_number:
        return (_PURPOSE, whole_number("seed", seed, example="privacy.secret_key()"))
    check_key("seed", seed)
    LEDGER.begin_sampling(seed)
    value = value_of(seed)
    if value is None:
        raise InputError(
            "seed must be known when batches are drawn", given="a key under jit", remedy="Draw batches outside jit."
        )
    return (_PURPOSE, *np.frombuffer(value, np.uint32).tolist())
