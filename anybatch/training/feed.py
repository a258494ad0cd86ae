"""Batches on the device before they are asked for: a thread pulls, checks and transfers while the step computes."""

import collections
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import jax
import numpy as np

from anybatch.call.checks import named_leaves, whole_number
from anybatch.jaxprs import versions
from anybatch.training.batches import Outline, Position, check_dtypes, check_same_kind

# How long closing waits for a thread to come back from the source: most do at once, and one that hangs never does.
_PATIENCE = 0.5


def to_device(batch: Any, sharding: Any = None) -> Any:
    """A batch whose arrays of numpy are copied to a device, or to several.

    **Copies.** The arrays that come back share no memory with those of the batch, not even on the CPU, so a loader may
    overwrite its own. (`jax.device_put` shares it where it can, and does so with `may_alias=False` too.)

    What else JAX cannot compute with but numpy can read, such as a tensor of another library on the host, is treated
    like an array of numpy. Arrays of JAX, PRNG keys, Python numbers and strings stay as they are.

    >>> batch = to_device({"x": np.ones(3, np.float32), "name": "train"})
    >>> batch["x"], batch["name"]
    (Array([1., 1., 1.], dtype=float32), 'train')

    Args:
      batch: a tree.
      sharding: a device or a sharding for all its arrays of numpy; by default, JAX's own choice.

    Raises:
      InputError: for an array of a dtype that JAX does not have.
    """
    leaves, structure = jax.tree.flatten(batch)
    leaves = [np.asarray(leaf) if _is_for_numpy(leaf) else leaf for leaf in leaves]
    names = (name for name, _ in named_leaves("batch", batch))
    check_dtypes((name, leaf) for name, leaf in zip(names, leaves, strict=True) if isinstance(leaf, np.ndarray))
    return jax.tree.unflatten(structure, [_copy(leaf, sharding) for leaf in leaves])


def _is_for_numpy(leaf: Any) -> bool:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return not isinstance(leaf, (str, bytes))  # numpy's own scalars of text are strings
    return hasattr(leaf, "__array__") and not isinstance(leaf, jax.Array) and not hasattr(leaf, "__jax_array__")


def _copy(leaf: Any, sharding: Any) -> Any:
    return jax.device_put(np.array(leaf, copy=True), sharding) if isinstance(leaf, np.ndarray) else leaf


class Feed:
    """The batches of an opened source, on the device, with the position after each of them.

    A thread draws batches ahead of the step that uses them. A position belongs to the batch it comes with, so batches
    that were drawn and never used are drawn again by whoever goes on at the last one.

    **In order.** An exception in the source, or in `put`, is raised where the batches are used, after all good ones
    before it, with its own traceback.

    >>> from anybatch.training.batches import open_source
    >>> with Feed(open_source([np.zeros(2), np.ones(2)], epochs=1)) as feed:
    ...     [float(batch.sum()) for batch, position in feed]
    [0.0, 2.0]

    Args:
      pulls: an iterator of `(batch, position)`, from `open_source`.
      put: takes a batch to the device and returns it there. It must copy, since a loader may overwrite its arrays as
        soon as `put` has returned and the transfer is done.
      ahead: how many batches at most are on the device, or on their way, beside the one in use. With 0 there is no
        thread, and everything is done when a batch is asked for: for a source that must run in the thread that made it.

    Raises:
      InputError: if a batch is not of the same kind as the first.
    """

    def __init__(
        self,
        pulls: Iterator[tuple[Any, Position]],
        put: Callable[[Any], Any] = to_device,
        *,
        ahead: int = 2,
    ) -> None:
        self._work = _Work(pulls, put, whole_number("ahead", ahead, 0))
        self._thread: threading.Thread | None = None
        if ahead:
            # The thread knows the work and not the feed: one that is forgotten is collected, and ends its thread.
            self._thread = threading.Thread(target=_work_ahead, args=(self._work,), name="anybatch-feed", daemon=True)
            self._thread.start()
        # Also called when the interpreter ends: JAX must not be in use by a thread while it is taken down.
        self._finish = weakref.finalize(self, _close, self._work, self._thread)

    def __iter__(self) -> Iterator[tuple[Any, Position]]:
        return self

    def __next__(self) -> tuple[Any, Position]:
        return self._work.draw() if self._thread is None else self._work.take()

    def ready(self, timeout: float = 0.0) -> bool:
        """Whether `next` would return or raise at once, waiting up to `timeout` seconds for it.

        With `ahead=0` it is always True: nothing is drawn before it is asked for.
        """
        return self._thread is None or self._work.wait(timeout)

    def close(self) -> None:
        """Ends the thread. One that hangs in the source is left behind after half a second; the process can end."""
        self._finish()

    def __enter__(self) -> "Feed":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _settings_here() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """What sets, in another thread, the settings of JAX that this one has and that decide what becomes of an array."""
    config: Any = jax.config
    double, device = bool(config.jax_enable_x64), versions.default_device()

    @contextlib.contextmanager
    def settings() -> Iterator[None]:
        with jax.enable_x64(double), jax.default_device(device):
            yield

    return settings


class _Work:
    """What the thread and the one who uses the batches share."""

    def __init__(self, pulls: Iterator[tuple[Any, Position]], put: Callable[[Any], Any], ahead: int) -> None:
        self.pulls, self.put, self.ahead = pulls, put, ahead
        self.settings = _settings_here()
        self.first: Outline | None = None
        self.drawn = 0
        self.is_over = self.is_closed = False
        self.changed = threading.Condition()
        self.queue: collections.deque[tuple[Any, BaseException | None]] = collections.deque()

    def draw(self) -> tuple[Any, Position]:
        """Pulls, checks and puts one batch, in whichever thread this is."""
        if self.is_over:
            raise StopIteration
        try:
            batch, position = next(self.pulls)
            if self.is_closed:  # while the source was at it
                raise StopIteration
            self.drawn += 1
            if self.first is None:
                self.first = Outline.of(batch)
            else:
                check_same_kind(self.first, batch, self.drawn)
            return jax.block_until_ready(self.put(batch)), position
        except BaseException:
            self.is_over = True
            raise

    def take(self) -> tuple[Any, Position]:
        """Waits for what the thread has drawn."""
        with self.changed:
            self.changed.wait_for(lambda: self.queue or self.is_closed)
            if self.is_closed:
                raise StopIteration
            item, error = self.queue[0]
            if error is None:
                self.queue.popleft()
                self.changed.notify_all()
                return item
            # The end stays in the queue; an error is raised once, and then it is the end too.
            self.queue[0] = None, StopIteration()
        raise error

    def wait(self, timeout: float) -> bool:
        with self.changed:
            return bool(self.changed.wait_for(lambda: self.queue or self.is_closed, timeout))

    def has_room(self) -> bool:
        """Waits until another batch may be drawn; False if none is wanted any more."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.queue) < self.ahead or self.is_closed)
            return not self.is_closed

    def hand_over(self, item: Any, error: BaseException | None) -> None:
        with self.changed:
            if not self.is_closed:
                self.queue.append((item, error))
                self.changed.notify_all()


def _work_ahead(work: _Work) -> None:
    with work.settings():
        # Room is asked for before a batch is drawn, so that none waits outside of the queue for room in it.
        while work.has_room():
            try:
                item = work.draw()
            except BaseException as error:
                work.hand_over(None, error)
                break
            work.hand_over(item, None)
            del item
        _close_source(work)


def _close(work: _Work, thread: threading.Thread | None) -> None:
    with work.changed:
        work.is_closed = work.is_over = True
        work.queue.clear()
        work.changed.notify_all()
    if thread is None:
        _close_source(work)
    elif thread is not threading.current_thread():
        thread.join(_PATIENCE)


def _close_source(work: _Work) -> None:
    # In the thread that draws: a generator cannot be closed while another one runs it.
    close = getattr(work.pulls, "close", None)
    if callable(close):
        close()
