"""Prefetching: a thread draws batches, checks them and copies them to the device while the step computes."""

import collections
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from anybatch.call.checks import is_array, named_leaves, whole_number
from anybatch.errors import InputError
from anybatch.jaxprs import versions
from anybatch.training.sources import SourcePosition, check_dtypes

# Seconds that `close` waits for a thread that is inside the source. Most return at once; one that hangs never does.
_PATIENCE = 0.5


def to_device(batch: Any, sharding: Any = None) -> Any:
    """A batch with its numpy arrays copied to a device, or sharded over several.

    **Copies.** The new arrays share no memory with the batch, not even on the CPU, so a loader may overwrite its
    buffers. (`jax.device_put` shares memory where it can, even with `may_alias=False`.)

    Other objects that numpy can read but JAX cannot, such as a tensor of another library on the host, are treated like
    numpy arrays. JAX arrays, PRNG keys, Python numbers and strings stay as they are.

    >>> batch = to_device({"x": np.ones(3, np.float32), "name": "train"})
    >>> batch["x"], batch["name"]
    (Array([1., 1., 1.], dtype=float32), 'train')

    Args:
      batch: a pytree. It is an InputError if a dtype is one that JAX does not have.
      sharding: a device or a sharding for all its numpy arrays; by default, JAX's choice.
    """
    leaves, structure = jax.tree.flatten(batch)
    leaves = [np.asarray(leaf) if _is_for_numpy(leaf) else leaf for leaf in leaves]
    names = (name for name, _ in named_leaves("batch", batch))
    check_dtypes((name, leaf) for name, leaf in zip(names, leaves, strict=True) if isinstance(leaf, np.ndarray))
    return jax.tree.unflatten(structure, [_copy(leaf, sharding) for leaf in leaves])


def _is_for_numpy(leaf: Any) -> bool:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return not isinstance(leaf, (str, bytes))  # numpy's text scalars are strings
    return hasattr(leaf, "__array__") and not isinstance(leaf, jax.Array) and not hasattr(leaf, "__jax_array__")


def _copy(leaf: Any, sharding: Any) -> Any:
    return jax.device_put(np.array(leaf, copy=True), sharding) if isinstance(leaf, np.ndarray) else leaf


BatchSpec = tuple[Any, dict[str, str]]


def batch_spec(batch: Any) -> BatchSpec:
    """What all batches of a source must share: the pytree structure, and dtype and rank of each leaf."""
    leaves = {
        name: f"{leaf.dtype} of rank {leaf.ndim}" if is_array(leaf) else type(leaf).__name__
        for name, leaf in named_leaves("batch", batch)
    }
    return jax.tree.structure(batch), leaves


def check_spec(first: BatchSpec, actual: BatchSpec, number: int) -> None:
    """Raises an InputError if batch number `number` differs from the first one. Sizes may differ."""
    if actual == first:
        return
    pairs = [(name, first[1].get(name, "absent"), actual[1].get(name, "absent")) for name in first[1] | actual[1]]
    lines = [f"{name}: {there} in the first batch, {here} in this one" for name, there, here in pairs if there != here]
    lines = lines or [f"batch: {first[0]} in the first batch, {actual[0]} in this one"]
    more = [f"and {len(lines) - 10} more"] if len(lines) > 10 else []
    raise InputError(
        "Every batch must have the leaves of the first one, with the same dtypes and ranks",
        given=f"batch {number}, with\n" + "\n".join([*lines[:10], *more]),
        remedy="Make all batches of the source alike, e.g. batch['x'].astype(np.float32).",
    )


class Prefetcher:
    """The batches of an opened source, on the device, each with the position after it.

    A thread draws batches before the step needs them. Since each batch comes with its own position, batches that were
    drawn and not used are drawn again when the run is resumed.

    **In order.** An exception in the source or in `put` is raised by `next`, with its own traceback, after all good
    batches before it.

    >>> from anybatch.training.sources import open_source
    >>> with Prefetcher(open_source([np.zeros(2), np.ones(2)], epochs=1)) as batches:
    ...     [float(batch.sum()) for batch, position in batches]
    [0.0, 2.0]

    Args:
      pairs: an iterator of `(batch, position)`, from `open_source`.
      put: copies a batch to the device and returns it. It must copy, since a loader may overwrite its arrays as soon as
        the transfer is done.
      ahead: the most batches on the device, or on their way, beside the one in use. With 0 there is no thread, and a
        batch is drawn by `next`: for a source that must run in the thread that made it.
    """

    def __init__(
        self, pairs: Iterator[tuple[Any, SourcePosition]], put: Callable[[Any], Any] = to_device, *, ahead: int = 2
    ) -> None:
        self._queue = _BatchQueue(pairs, put, whole_number("ahead", ahead, 0))
        self._thread: threading.Thread | None = None
        if ahead:
            # The thread refers to the queue and not to self, so that a forgotten prefetcher is collected and ends it.
            self._thread = threading.Thread(target=_fill, args=(self._queue,), name="anybatch-prefetch", daemon=True)
            self._thread.start()
        # Also called at interpreter exit: no thread may use JAX while it shuts down.
        self._finish = weakref.finalize(self, _close, self._queue, self._thread)

    def __iter__(self) -> Iterator[tuple[Any, SourcePosition]]:
        return self

    def __next__(self) -> tuple[Any, SourcePosition]:
        return self._queue.draw() if self._thread is None else self._queue.take()

    def ready(self, timeout: float = 0.0) -> bool:
        """Whether `next` would return or raise at once. Waits up to `timeout` seconds until it would.

        Always True with `ahead=0`, where nothing is drawn before `next`.
        """
        return self._thread is None or self._queue.wait(timeout)

    def close(self) -> None:
        """Ends the thread. One that hangs in the source is abandoned after half a second; the process can still end."""
        self._finish()

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


class _BatchQueue:
    """The batches that were drawn and not used yet: shared by the thread and the consumer."""

    def __init__(self, pairs: Iterator[tuple[Any, SourcePosition]], put: Callable[[Any], Any], ahead: int) -> None:
        self.pairs, self.put, self.ahead = pairs, put, ahead
        # The consumer's JAX options for new arrays. The thread has options of its own.
        self.x64, self.device = bool(jax.config.jax_enable_x64), versions.default_device()  # type: ignore[attr-defined]
        self.spec: BatchSpec | None = None  # of the first batch
        self.drawn = 0
        self.is_over = self.is_closed = False
        self.changed = threading.Condition()
        self.items: collections.deque[tuple[Any, BaseException | None]] = collections.deque()

    def draw(self) -> tuple[Any, SourcePosition]:
        """Draws one batch, checks it and copies it to the device, in the calling thread."""
        if self.is_over:
            raise StopIteration
        try:
            batch, position = next(self.pairs)
            if self.is_closed:  # closed while the source was working
                raise StopIteration
            self.drawn += 1
            spec = batch_spec(batch)
            self.spec = self.spec or spec
            check_spec(self.spec, spec, self.drawn)
            return jax.block_until_ready(self.put(batch)), position
        except BaseException:
            self.is_over = True
            raise

    def take(self) -> tuple[Any, SourcePosition]:
        """Waits for a batch from the thread."""
        with self.changed:
            self.changed.wait_for(lambda: self.items or self.is_closed)
            if self.is_closed:
                raise StopIteration
            item, error = self.items[0]
            if error is None:
                self.items.popleft()
                self.changed.notify_all()
                return item
            # An error is raised once. After it, and after the end, every call raises StopIteration.
            self.items[0] = None, StopIteration()
        raise error

    def wait(self, timeout: float) -> bool:
        with self.changed:
            return bool(self.changed.wait_for(lambda: self.items or self.is_closed, timeout))

    def has_room(self) -> bool:
        """Waits until another batch may be drawn. False if the queue was closed."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.items) < self.ahead or self.is_closed)
            return not self.is_closed

    def append(self, item: Any, error: BaseException | None) -> None:
        with self.changed:
            if not self.is_closed:
                self.items.append((item, error))
                self.changed.notify_all()


def _fill(queue: _BatchQueue) -> None:
    with jax.enable_x64(queue.x64), jax.default_device(queue.device):
        # Waits for room before it draws, so that no batch is held outside of the queue.
        while queue.has_room():
            try:
                item = queue.draw()
            except BaseException as error:
                queue.append(None, error)
                break
            queue.append(item, None)
            del item
        _close_source(queue)


def _close(queue: _BatchQueue, thread: threading.Thread | None) -> None:
    with queue.changed:
        queue.is_closed = queue.is_over = True
        queue.items.clear()
        queue.changed.notify_all()
    if thread is None:
        _close_source(queue)
    elif thread is not threading.current_thread():
        thread.join(_PATIENCE)


def _close_source(queue: _BatchQueue) -> None:
    # Called in the thread that draws: a generator cannot be closed while another thread runs it.
    close = getattr(queue.pairs, "close", None)
    if callable(close):
        close()
