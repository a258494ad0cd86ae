"""`fit`: the loop around a step, with everything that a run of some hours needs."""

import contextlib
import dataclasses
import datetime
import itertools
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax

from anybatch.checks import must_be_path, whole
from anybatch.errors import InputError, user_stacklevel
from anybatch.gradient_noise import NoiseScale
from anybatch.training.arrays import refuse_deleted
from anybatch.training.checkpoints import Checkpoints
from anybatch.training.feed import Feed, to_device
from anybatch.training.kinds import named_arrays
from anybatch.training.log import check_log
from anybatch.training.progress import Silent, display
from anybatch.training.run import Run, Schedule, every
from anybatch.training.sources import beginning_of, check_passes, open_source
from anybatch.training.stopping import Stopper

# How often to say that batches are gone through once more, in seconds.
SAY_EVERY = 5.0


@dataclasses.dataclass(frozen=True)
class Fitted:
    """A training run, finished or stopped.

    Args:
      state: after the last step.
      steps: how many there were in all.
      history: the rows of the log, from the first step if there is a log to read them from.
      stopped_by: "SIGTERM" or "SIGINT" if a signal ended it; None if it came to its end.
      resumed_from: the step of the checkpoint it went on from; None if it began anew.
      noise: of the gradients, averaged over the last steps, if the step tells.
      seconds: that it took, with all its earlier parts.
    """

    state: Any
    steps: int
    history: list[dict[str, Any]] = dataclasses.field(repr=False)
    stopped_by: str | None
    resumed_from: int | None
    noise: NoiseScale | None
    seconds: float

    @property
    def exit_code(self) -> int:
        """For a script that ends with the run: 0; 143 after SIGTERM and 130 after Ctrl-C, as shells have it."""
        return {None: 0, "SIGTERM": 143, "SIGINT": 130}[self.stopped_by]


def fit(
    step: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    batches: Iterable[Any],
    *,
    steps: int | None = None,
    epochs: int | None = None,
    evaluate: Callable[[Any], Any] | None = None,
    evaluate_every: int | None = None,
    log: Any = None,
    log_every: int = 1,
    checkpoints: Any = None,
    checkpoint_every: int | datetime.timedelta | None = None,
    keep: int = 3,
    resume: bool = True,
    progress: bool | str = True,
    prefetch: int = 2,
) -> Fitted:
    """Trains: takes step after step, shows how it goes, saves, stops cleanly, and goes on where it stopped.

    **The same bits.** A run that was stopped or killed and started again ends with the same parameters, bit for bit,
    as one that was not: state, order of the data, random keys and the way the gradient is computed all go on.

    **Nothing lost.** SIGTERM and Ctrl-C end it after the step at hand, with the state saved. Killed outright, it loses
    the steps since its last checkpoint; one that was half written is never loaded. If the data, an evaluation or the
    disk fails, the state after the last good step is saved, and is `error.state`. (A step that fails while it computes
    has used up the state that it was given, if it donates: then the last checkpoint counts.)

    **In the background.** Batches are drawn and transferred while a step computes, checkpoints are written while the
    next ones do, and metrics are read two steps late, so that the device does not wait.

    >>> import jax.numpy as jnp, numpy as np, optax, anybatch as ab
    >>> def loss(w, batch):
    ...     return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)
    >>> data = {"x": np.eye(4, dtype=np.float32).repeat(8, 0), "y": np.ones(32, np.float32)}
    >>> step = ab.train_step(loss, optax.sgd(1.0))
    >>> run = ab.fit(step, step.init(jnp.zeros(4)), ab.Batches(data, 16, seed=0), epochs=20, progress=False)
    >>> run.steps, run.state.params.round(2).tolist()
    (40, [1.0, 1.0, 1.0, 1.0])

    Args:
      step: `step(state, batch)` returns `(state, metrics)`: that of `anybatch.train_step`, or your own.
      state: to begin with. Where a checkpoint is found, that is taken instead; this one tells how it must look.
      batches: `anybatch.Batches`, a dataset or loader of grain, or any iterable of trees of arrays. It must give the
        same batches each time that it is made, or nobody can go on exactly. For `anybatch.privacy.dp_sgd`, the batches
        of `privacy.poisson_batches(...).of(data)`.
      steps: after how many to end, those before a resumption too. What can be iterated over again is, until then.
      epochs: or after how many passes over the batches. By default one.
      evaluate: a function of the state that returns a number, or a mapping of them, for the log.
      evaluate_every: after how many steps it is called. It is called after the last one, too.
      log: a file, "run.csv" or "run.jsonl", or several; each row tells of a step. A resumed run continues it.
      log_every: after how many steps there is a row.
      checkpoints: a folder. If it has checkpoints, the run goes on from the newest.
      checkpoint_every: after how many steps, or after what time, to save. By default every ten minutes. There is one
        at the end, too.
      keep: how many of the newest checkpoints to keep.
      resume: whether to go on from checkpoints. If not, there must be none.
      progress: True for a bar in a terminal and lines elsewhere, on the standard error; "bar", "lines" or False.
      prefetch: how many batches to have on the device in advance; 0 draws each when it is needed.

    Returns:
      The state, the history, and how it ended: a `Fitted`.

    Raises:
      InputError: for arguments that cannot be worked with, no batches, batches that change their form or have no
        examples, a checkpoint or a log of something else, a folder or file that cannot be written or that another run
        has open. Before any work is done, where it can be known.
      CheckpointError: if the last state could not be saved; `error.state` has it. If the checkpoint to go on from is
        damaged, or of another step than its name says.
    """
    _check(step, evaluate)
    schedule = Schedule(
        log_every=every("log_every", log_every),
        evaluate_every=every("evaluate_every", evaluate_every, needs=("evaluate", evaluate)),
        checkpoint_every=every("checkpoint_every", checkpoint_every, needs=("checkpoints", checkpoints)),
    )
    steps, epochs = _length(steps, epochs)
    check_passes(batches, steps, epochs)
    whole("prefetch", prefetch, 0)
    if checkpoints is not None:
        must_be_path("checkpoints", checkpoints, "checkpoints")
    if log is not None:
        check_log(log)
    refuse_deleted(named_arrays(state).values(), "ab.fit(step, state, batches)")
    shown = display(progress, is_first=jax.process_index() == 0)
    with contextlib.ExitStack() as stack:
        folder = None if checkpoints is None else stack.enter_context(Checkpoints(checkpoints, keep=keep))
        total = _total(batches, steps, epochs)
        run = Run(step, state, evaluate, schedule, folder, shown, last_step=total)
        run.position = beginning_of(batches)
        del state  # the run has it, and replaces it
        stack.callback(run.close)
        run.begin(log, resume=resume)
        if steps is not None and run.steps >= steps:
            shown.say(f"There is nothing left to do: {run.steps} of {steps} steps were taken.")
            return _fitted(run, None)
        pulls = open_source(batches, epochs=epochs, position=run.position, notify=_skipping(shown))
        remaining = None if steps is None else steps - run.steps
        # Transfers of several processes are collective: in a thread they might meet those of a step in another order.
        ahead = prefetch if jax.process_count() == 1 else 0
        stopper = stack.enter_context(Stopper(says_so=progress is not False))
        pulls = itertools.islice(pulls, remaining)
        if jax.process_count() > 1:
            pulls = stopper.together(pulls)
        feed = stack.enter_context(Feed(pulls, getattr(step, "put", to_device), ahead=ahead))
        stack.enter_context(shown)
        shown.begin(run.steps, total)
        stopped_by = run.through(feed, stopper)
        if stopped_by is None and steps is not None and run.steps < steps:
            warnings.warn(
                f"The batches ended after {run.steps} of {steps} steps. Pass something that can be iterated over again "
                "(a list, anybatch.Batches, a dataset), or fewer steps.",
                RuntimeWarning,
                stacklevel=user_stacklevel(),
            )
        return _fitted(run, stopped_by)


def _fitted(run: Run, stopped_by: str | None) -> Fitted:
    return Fitted(run.state, run.steps, run.history, stopped_by, run.resumed_from, run.rows.noise, run.rows.seconds)


def _check(step: Any, evaluate: Any) -> None:
    if not callable(step):
        raise InputError(
            "A step must be a function of a state and a batch",
            given=f"step={step!r}",
            remedy="step = ab.train_step(loss, optimizer), then ab.fit(step, step.init(params), batches).",
        )
    if evaluate is not None and not callable(evaluate):
        raise InputError(
            "evaluate must be a function of the state",
            given=f"evaluate={evaluate!r}",
            remedy='For example evaluate=lambda state: {"accuracy": accuracy(state.params)}.',
        )


def _length(steps: Any, epochs: Any) -> tuple[int | None, int | None]:
    if steps is not None and epochs is not None:
        raise InputError(
            "A run ends after so many steps or after so many epochs",
            given=f"steps={steps!r} and epochs={epochs!r}",
            remedy="Pass one of them.",
        )
    return None if steps is None else whole("steps", steps, 0), 1 if steps is None and epochs is None else epochs


def _total(batches: Any, steps: int | None, epochs: int | None) -> int | None:
    """How many steps there will be, if that can be known."""
    if steps is not None or epochs is None:
        return steps
    try:
        return epochs * len(batches)
    except (TypeError, OverflowError):  # it does not tell, or has no end
        return None


def _skipping(shown: Silent) -> Callable[[int, int], None]:
    """Says that batches are drawn once more, if that takes a while."""
    begun, told = time.monotonic(), [0.0]

    def notify(done: int, total: int) -> None:
        now = time.monotonic()
        if now - max(begun, told[0]) > SAY_EVERY:
            told[0] = now
            shown.say(f"Going through the batches of earlier steps: {done} of {total}")

    return notify
