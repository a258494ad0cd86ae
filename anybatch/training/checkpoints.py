"""Checkpoints of named arrays and a JSON record, written in the background: complete or not there at all.

Orbax writes the arrays, each checkpoint into a temporary folder that is renamed when it is complete. This module adds
copies that donation cannot touch, checks of what is saved and restored, and errors that say what to do.
`checkpoint_folder.py` knows which checkpoints a folder holds, and which may go.
"""

import asyncio
import atexit
import contextlib
import functools
import importlib
import json
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from anybatch import __version__
from anybatch.call.checks import must_be_path, whole_number
from anybatch.call.memory import readable
from anybatch.distributed import gather_json
from anybatch.errors import AnybatchError, InputError, install
from anybatch.jaxprs import avals, versions
from anybatch.training.arrays import is_on_host
from anybatch.training.checkpoint_folder import CheckpointFolder, flush

# Bytes of a checkpoint beside its arrays: names, shapes, and the disk blocks that small files fill.
_OVERHEAD = 256 * 1024

# Dtypes that Orbax's storage format has no name for.
_NOT_STORABLE = ("uint2", "uint4", "float8_e4m3")

# The most differences that an error lists.
_MOST_LINES = 10


class CheckpointError(AnybatchError, OSError):
    """A checkpoint that could not be written or read. Older checkpoints are not affected.

    Attributes:
      folder: the folder of checkpoints.
      step: the step of the checkpoint.
      last_good: the step of the newest other checkpoint that is complete, or None.
      state: the state that could not be saved, if the caller of `Checkpoints.save` has stored it here.
    """

    def __init__(self, message: str, *, folder: Path, step: int, last_good: int | None) -> None:
        self.folder, self.step, self.last_good, self.state = folder, step, last_good, None
        super().__init__(message)


class Checkpoints:
    """A folder with the newest `keep` checkpoints of a run.

    - **Complete or not there.** A process that is killed at any moment leaves earlier checkpoints as they were, and a
      half-written one is never loaded.
    - **A copy.** Arrays may be donated, deleted or overwritten as soon as `save` returns.
    - **No gap.** No checkpoint is deleted before the next one is complete, on disk and under its own name.
    - **As it was saved, or an error.** Each file is compared with its saved size and checksum; with several processes,
      with its size. A checkpoint that was moved or copied to the name of another step is not loaded.
    - **One writer.** A second process that opens the same folder is refused.
    - **Opening deletes no checkpoint.** Those beyond `keep` are deleted after the next save.

    With several processes, each of them calls every method, and all of them must see the same folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, Checkpoints(folder, keep=2) as checkpoints:
    ...     for step in (1, 2, 3):
    ...         checkpoints.save(step, {"w": np.full(2, step)}, {"loss": 1 / step})
    ...     checkpoints.wait()
    ...     step, arrays, record = checkpoints.restore({"w": np.zeros(2, int)})
    >>> step, arrays["w"].tolist(), record
    (3, [3, 3], {'loss': 0.3333333333333333})

    Args:
      folder: created if it does not exist. A new one may hold logs (.csv), and nothing else.
      keep: how many checkpoints to keep. There is one more while the next is being written.

    Raises:
      InputError: if the folder cannot be written to, holds other files, or is in use; or if Orbax is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 3) -> None:
        must_be_path("checkpoints", folder, "checkpoints")
        self._keep = whole_number("keep", keep, 1)
        self._orbax = _orbax()
        self._files = CheckpointFolder(Path(os.path.abspath(folder)))
        self._saving: tuple[int, int] | None = None  # the step that is being written, and its bytes
        if _is_primary():
            self._files.open()
            self._files.tidy()
        self._files.check_shared()
        # Log messages of Orbax are dropped. Its failures are raised as errors.
        self._log_filter = lambda record: f"{os.sep}orbax{os.sep}" not in record.pathname
        logging.getLogger("absl").addFilter(self._log_filter)
        self._writer: Any = self._new_writer()
        _OPEN.add(self)
        _register()

    @property
    def folder(self) -> Path:
        return self._files.path

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint, or None. One that is being written is not complete."""
        newest: int | None = gather_json(max(self._files.steps(), default=None))[0]
        return newest

    def save(self, step: int, arrays: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """Copies the arrays and starts to write them. Waits first if the save before is not complete.

        A checkpoint of the same step is replaced, and stays until the new one is complete.

        Args:
          step: at least that of the newest checkpoint.
          arrays: name -> JAX or numpy array, number, or array of typed PRNG keys.
          record: other data of the checkpoint, as JSON values.

        Raises:
          CheckpointError: if the save before failed in the background, or there is not enough space for this one.
        """
        step = whole_number("step", step, 0)
        descriptions = _described(arrays)
        header = {"anybatch": 1, "step": step, "versions": self.versions()}
        text = json.dumps(header | {"arrays": descriptions, "record": record})  # a copy
        self.wait()
        self._check_order(step)
        types = map(_stored_type, arrays.values())
        size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in types) + _OVERHEAD  # before compression
        stored = {name: _copied(value) for name, value in arrays.items() if 0 not in descriptions[name]["shape"]}
        args = self._orbax.args
        self._saving = step, size
        try:
            if not gather_json(self._files.free_bytes() >= size)[0]:
                raise OSError("the disk has too little space for it")
            if _is_primary():
                self._files.set_aside(step)
            # Orbax stores neither arrays without elements nor a tree without arrays.
            values = args.PyTreeSave(stored or {"nothing": np.zeros(1, np.int8)})
            both = args.Composite(arrays=values, record=args.JsonSave(json.loads(text)))
            _outside_event_loop(lambda: self._writer.save(self._files.of(step), args=both))
        except Exception as error:
            raise self._failed(error) from error

    def wait(self) -> None:
        """Waits until the last save is complete and on disk, then deletes all but the newest `keep` checkpoints."""
        if self._saving is None:
            return
        try:
            self._writer.wait_until_finished()
            if _is_primary():
                flush(self.folder)  # the new name, before older ones go
        except Exception as error:
            raise self._failed(error) from error
        self._saving = None
        if _is_primary():
            self._files.tidy(self._keep)

    def restore(self, like: Mapping[str, Any], step: int | None = None) -> tuple[int, dict[str, Any], dict[str, Any]]:
        """Reads a checkpoint: returns its step, the arrays by name, and the record.

        Args:
          like: name -> array or `jax.ShapeDtypeStruct` with the expected shape and dtype, and the sharding to restore
            to, which need not be the saved one. Where it is a numpy array, a numpy array is returned.
          step: the step to restore; by default the newest.

        Raises:
          InputError: if it has other arrays. Raised before any array is read.
          CheckpointError: if a file is missing or damaged, or the checkpoint is of another step than its name says.
        """
        self.wait()
        wanted = _described(like)
        step = whole_number("step", self.latest() if step is None else step, 0)
        path = self._files.of(step)
        content = self._content(step)
        _compare(content["arrays"], wanted, path)
        self._check_damage(step, "arrays")
        nonempty = {name: value for name, value in like.items() if 0 not in wanted[name]["shape"]}
        restore_args = {name: _restore_args(self._orbax, value) for name, value in nonempty.items()}
        args = self._orbax.args
        chosen = args.Composite(arrays=args.PyTreeRestore(item=dict.fromkeys(nonempty, 0), restore_args=restore_args))
        try:
            arrays = _outside_event_loop(lambda: self._writer.restore(path, args=chosen)["arrays"]) if nonempty else {}
        except Exception as error:
            raise self._damaged(step, _reason(error)) from error
        restored = {name: _placed(arrays.get(name), value) for name, value in like.items()}
        return step, restored, content["record"]

    def versions(self, step: int | None = None) -> dict[str, str]:
        """The versions of anybatch, JAX and Orbax: of this process, or those that a checkpoint was saved with.

        Empty for a checkpoint of anybatch 0.7.0, which did not record them.
        """
        if step is None:
            return {"anybatch": __version__, "jax": versions.versions()[0], "orbax": self._orbax.__version__}
        return dict(self._content(step).get("versions", {}))

    def close(self) -> None:
        """Waits as `wait` does, and unlocks the folder."""
        if self._writer is None:
            return
        try:
            self.wait()
        finally:
            self._writer.close()
            self._writer = None
            _OPEN.discard(self)
            logging.getLogger("absl").removeFilter(self._log_filter)
            self._files.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            error.add_note(f"And meanwhile: {failure}")  # it must not hide the first error

    def _new_writer(self) -> Any:
        ocp = self._orbax
        # `save` creates folders itself: if one cannot be created, Orbax's threads would wait for it for 20 minutes.
        options = ocp.options.AsyncOptions(
            post_finalization_callback=self._files.seal, create_directories_asynchronously=False
        )
        handler = ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(async_options=options),
            arrays=ocp.PyTreeCheckpointHandler(),
            record=ocp.JsonCheckpointHandler(),
        )
        return ocp.AsyncCheckpointer(handler, async_options=options)

    def _check_order(self, step: int) -> None:
        newest = self.latest()
        if newest is not None and step < newest:
            raise InputError(
                "A checkpoint must not be of an earlier step than the newest in its folder, which would be restored "
                "instead",
                given=f"step={step} after {newest} in {self.folder}",
                remedy="Use another folder for another run, or delete the later ones.",
            )

    def _failed(self, error: Exception) -> CheckpointError:
        step, size = self._saving or (-1, 0)
        self._saving = None
        with contextlib.suppress(OSError):
            if _is_primary():
                self._files.tidy(self._keep)  # the half-written checkpoint takes up space
        good = max(self._files.steps(), default=None)
        last = "There is no other in its folder." if good is None else f"The one of step {good} is complete and good."
        return self._error(
            step,
            good,
            f"The checkpoint of step {step} could not be written to {self.folder}: {_reason(error)}.\n"
            f"It needs about {readable(size)}, and {readable(self._files.free_bytes())} are free. {last}\n"
            "Make space, keep fewer, e.g. keep=1, or use a folder on another disk.",
        )

    def _error(self, step: int, last_good: int | None, message: str) -> CheckpointError:
        return CheckpointError(message, folder=self.folder, step=step, last_good=last_good)

    def _content(self, step: int) -> dict[str, Any]:
        """The JSON part of a checkpoint, checked."""
        self._check_damage(step, "record")
        path = self._files.of(step)
        content: dict[str, Any] = json.loads((path / "record" / "metadata").read_text())
        saved = content.get("step", step)  # anybatch 0.7.0 did not write it
        if saved != step:
            home = self._files.of(saved)
            remedy = f"Delete the copy: rm -r {path}" if home.exists() else f"Move it back: mv {path} {home}"
            raise self._error(
                step,
                self._newest_other(step),
                f"The checkpoint {path} must be of step {step}, and is of step {saved}: it was moved or copied to this "
                f"name.\n{remedy}",
            )
        return content

    def _newest_other(self, step: int) -> int | None:
        return max((other for other in self._files.steps() if other != step), default=None)

    def _check_damage(self, step: int, part: str) -> None:
        damage = self._files.damage(step, part)
        if damage is not None:
            raise self._damaged(step, damage)

    def _damaged(self, step: int, reason: str) -> CheckpointError:
        other = self._newest_other(step)
        rest = "there is no other" if other is None else f"the newest other one is of step {other}"
        return self._error(
            step,
            other,
            f"The checkpoint of step {step} in {self.folder} is damaged: {reason}.\n"
            f"Delete {self._files.of(step)} to continue without it; {rest}.",
        )


# A program that ends without `close` must not lose its last save, or at least not silently.

_OPEN: set[Checkpoints] = set()


@functools.cache
def _register() -> None:
    """Closes open checkpoints at interpreter exit.

    Orbax writes in threads of an executor, which takes no more work once the interpreter ends; `atexit` runs after
    that, so the private hook of `threading` is used where there is one. From Python 3.12 on, no threads can be started
    even then, and `_close_all` can only print the error.
    """
    getattr(threading, "_register_atexit", atexit.register)(_close_all)


def _close_all() -> None:
    for checkpoints in list(_OPEN):
        try:
            checkpoints.close()
        except CheckpointError as error:
            print(f"{error}\nOr the program ended too early: call checkpoints.close().", file=sys.stderr)


def _is_primary() -> bool:
    return jax.process_index() == 0


def _reason(error: Exception) -> str:
    text = str(error)
    if "No space left" in text or "RESOURCE_EXHAUSTED" in text:
        return "the disk is full"
    return (text.splitlines() or [type(error).__name__])[0].strip().rstrip(".")


# Arrays: described and compared by shape and dtype; copied for Orbax; placed on devices again.


def _described(arrays: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The shape and dtype of each array, as JSON values. Raises an InputError if one cannot be stored.

    >>> _described({"w": np.zeros((2, 3), np.float32)})
    {'w': {'shape': [2, 3], 'dtype': 'float32'}}
    """
    if not isinstance(arrays, Mapping) or not arrays:
        raise InputError(
            "The arrays of a checkpoint must be a dictionary of at least one",
            given=f"arrays={arrays!r}" if isinstance(arrays, Mapping) else f"a {type(arrays).__name__}",
            remedy='Pass them by name, e.g. {"w": w}.',
        )
    return {name: _description(name, value) for name, value in arrays.items()}


def _description(name: str, value: Any) -> dict[str, Any]:
    value = np.asarray(value) if isinstance(value, (bool, int, float, complex)) else value
    shape: Any = getattr(value, "shape", None)
    dtype: Any = getattr(value, "dtype", None)
    if shape is None or dtype is None or not (avals.has_keys(value) or _is_storable(np.dtype(dtype))):
        raise InputError(
            "A checkpoint holds numbers, and arrays of numbers or keys, of a dtype that can be stored",
            given=f"{name}: {type(value).__name__}" + (f" of dtype {dtype}" if dtype is not None else ""),
            remedy="Leave it out, put text into the record, or convert it: array.astype(jnp.uint8).",
        )
    return {"shape": [int(size) for size in shape], "dtype": str(dtype)}


def _is_storable(dtype: Any) -> bool:
    is_number = jax.dtypes.issubdtype(dtype, np.number) or jax.dtypes.issubdtype(dtype, np.bool_)
    return bool(is_number) and str(dtype) not in _NOT_STORABLE


def _compare(saved: dict[str, Any], wanted: dict[str, Any], path: os.PathLike[str]) -> None:
    """Raises an InputError that lists the differences between two results of `_described`, if there are any."""
    lines = []
    for name in wanted | saved:
        there, here = (_type(each[name]) if name in each else None for each in (saved, wanted))
        if there is None:
            lines.append(f"{name}: {here}, which the checkpoint does not have")
        elif here is None:
            lines.append(f"{name}: {there} in the checkpoint, and not in the state")
        elif there != here:
            lines.append(f"{name}: {there} in the checkpoint, {here} in the state")
    if not lines:
        return
    if len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES - 1], f"and {len(lines) - _MOST_LINES + 1} more"]
    raise InputError(
        f"The checkpoint must have the same arrays as the state that it is restored to ({path})",
        given="\n".join([*lines, ""]),
        remedy="Use the model and optimizer that it was saved with; or start again in another folder, e.g. "
        'checkpoints="run2".',
    )


def _type(description: Any) -> str:
    return f"{description['dtype']}[{','.join(map(str, description['shape']))}]"


def _stored_type(value: Any) -> tuple[tuple[int, ...], Any]:
    """The shape and dtype that is stored: for PRNG keys, that of their key data."""
    if not hasattr(value, "dtype"):
        value = np.asarray(value)
    if avals.has_keys(value):
        value = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(value.shape, value.dtype))
    return tuple(value.shape), np.dtype(value.dtype)


def _copied(value: Any) -> Any:
    """A copy of an array for Orbax, which later changes to `value` cannot reach. PRNG keys become key data.

    Arrays on an accelerator are not copied: Orbax fetches them to the host before it returns. Of arrays in the host's
    memory, as all are on the CPU, it would take views. JAX cannot donate a buffer that has a view, so every donating
    call would copy until the write is done.
    """
    if not isinstance(value, jax.Array):
        array = np.array(value)
        return array.astype(array.dtype.newbyteorder("="))
    numbers = jax.random.key_data(value) if avals.has_keys(value) else value
    if numbers.is_fully_addressable and (jax.process_count() > 1 or is_on_host(numbers)):
        return np.array(numbers)  # if each process has its own, Orbax writes that of the first
    sharding: Any = numbers.sharding
    if sharding.memory_kind == "device" and all(device.platform != "cpu" for device in sharding.device_set):
        return numbers
    data = [shard.data for shard in numbers.addressable_shards]
    shards = [jax.device_put(array, array.sharding, may_alias=False) for array in data]
    return jax.make_array_from_single_device_arrays(numbers.shape, sharding, shards)


def _restore_args(ocp: Any, like: Any) -> Any:
    """Orbax's instructions for one array: restore to the sharding of `like`, or to the host."""
    sharding = _sharding(like)
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    shape, dtype = _stored_type(like)
    return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=shape, dtype=dtype)


def _placed(array: Any, like: Any) -> Any:
    """A restored array with the type and the devices of `like`. None stands for an array without elements."""
    shape, dtype = _stored_type(like)
    array = np.zeros(shape, dtype) if array is None else array
    if not isinstance(like, (jax.Array, jax.ShapeDtypeStruct)):
        return np.asarray(array)
    sharding = _sharding(like)
    if not isinstance(array, jax.Array):
        # An uncommitted array must stay uncommitted: else programs would recompile for it, and refuse to combine it
        # with arrays on other devices.
        if sharding is None:
            array = jax.device_put(array, may_alias=False)
        else:
            array = jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
    if avals.has_keys(like):
        return jax.random.wrap_key_data(array, impl=avals.key_impl(like.dtype))
    return avals.as_weak(array, like)


def _sharding(like: Any) -> Any:
    """The sharding of an array that is committed to its devices; else None."""
    if isinstance(like, jax.Array):
        return like.sharding if like.committed else None
    return getattr(like, "sharding", None)


# Orbax.


def _orbax() -> Any:
    """The package, or an InputError that says how to install it."""
    try:
        return importlib.import_module("orbax.checkpoint")
    except ImportError as error:
        raise InputError(
            "Checkpoints need Orbax",
            given=f"no module {error.name}",
            remedy=install("train"),
        ) from error


def _outside_event_loop(fun: Callable[[], Any]) -> Any:
    """Calls a function of Orbax in a thread without an event loop: Orbax would change that of a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return fun()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(fun).result()
