"""The rows that each process holds, put together as one batch on a mesh.

Many processes as one: how they find each other, and how the rows that each of them holds become one batch.

The processes are those of JAX's own runtime. What is added here is that every wait has an end: a process that never
comes, or dies, is an error in all the others and not a hang.
"""

import dataclasses
import errno
import ipaddress
import math
import os
import socket
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from anybatch.call.checks import describe, is_array, named_leaves
from anybatch.errors import AnybatchError, InputError, NotAvailableError
from anybatch.jaxprs import processes as jax_processes

_TEXT_BYTES = 512


def global_batch(batch: Any, mesh: Mesh, axis_name: str = "data") -> Any:
    """The batch of which each process holds some rows: every leaf a `jax.Array`, spread over `axis_name` along axis 0.

    It is `jax.make_array_from_process_local_data`, which gives every process another global shape if they hold
    different numbers of rows, and no error. Here the processes compare first what they hold, and all raise the same.

    Every process calls it, with its own rows. These come to lie on its own devices, so that nothing is sent, and are
    numbered as the devices of the mesh are: on one of `jax.make_mesh` those of process 0 come first. In one process
    alone, it is a `jax.device_put`. The comparison, of a few integers, runs on the devices: it waits for the step that
    they are computing, and takes some milliseconds.

    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> global_batch({"x": np.ones((6, 2), np.float32)}, mesh)["x"].sharding.spec
    P('data',)

    Args:
      batch: a tree of arrays on the host, with the rows of this process along axis 0.
      mesh: with devices of every process, as many of each along the axis.
      axis_name: the axis of the mesh over which rows are spread; over its other axes they are repeated. Processes whose
        devices differ in those other axes only must hold the same rows.

    Raises:
      InputError: in every process, if one of them holds what cannot be put together: other numbers of rows, other
        leaves, or rows that its devices cannot share evenly.
    """
    part: _Part | None = None
    problem: Exception | None = None
    # Whatever is wrong here is told to the other processes before it is raised: they would wait for this one.
    try:
        part = _look(batch, mesh, axis_name)
    except Exception as error:
        problem = error
    if jax.process_count() > 1:
        _agree(part, problem)
    if problem is not None:
        raise problem
    assert part is not None
    sharding, factor = NamedSharding(mesh, PartitionSpec(axis_name)), part.axis_size // part.positions

    def place(leaf: Any) -> jax.Array:
        rows = np.asarray(leaf)
        return jax.make_array_from_process_local_data(sharding, rows, (rows.shape[0] * factor, *rows.shape[1:]))

    return jax.tree.map(place, batch)


@dataclasses.dataclass(frozen=True)
class _Part:
    """What this process holds of a batch."""

    rows: int
    leaves: str  # what must be the same in every process
    positions: int  # along the axis of the mesh
    axis_size: int
    shared_by: tuple[int, ...]  # the processes that must hold the same rows
    content: int  # of these rows, if they are shared


def _look(batch: Any, mesh: Mesh, axis_name: str) -> _Part:
    """What this process holds, or an error: nothing is asked of the others."""
    positions = _positions(mesh, axis_name)
    own = positions[jax.process_index()]
    named = named_leaves("batch", batch)
    if not named or not all(_is_rows(leaf) for _, leaf in named):
        raise InputError(
            "Every leaf of the batch must be an array on the host, with rows along axis 0",
            given="\n".join(f"{name}: {describe(leaf)}" for name, leaf in named) + "\n" if named else "no leaves",
            remedy="Pass the rows of this process as numpy arrays. An array that lies on several processes already "
            "is a global one, and what is not per example needs no global_batch.",
        )
    counts = {leaf.shape[0] for _, leaf in named}
    if len(counts) > 1:
        raise InputError(
            "Every array in the batch needs the same number of rows along axis 0",
            given="\n".join(f"{name}: {leaf.shape[0]}" for name, leaf in named),
            remedy="Take out of the batch what is not per example.",
        )
    (rows,) = counts
    if rows % len(own):
        raise InputError(
            f"The rows of a process must be shared evenly by its devices along {axis_name!r}",
            given=f"{rows} rows for {len(own)} devices",
            remedy=f"Cut them, rows[:{rows - rows % len(own)}], or pad them to {rows + -rows % len(own)} with copies "
            "of a row that weigh nothing in the loss.",
        )
    shared_by = tuple(process for process, theirs in positions.items() if theirs == own)
    content = 0
    if len(shared_by) > 1:
        for _, leaf in named:
            content = zlib.crc32(np.ascontiguousarray(leaf).view(np.uint8).data, content)
    types = [(name, f"{jax.dtypes.canonicalize_dtype(leaf.dtype)}{list(leaf.shape[1:])}") for name, leaf in named]
    leaves = ", ".join(f"{name}: {text}" for name, text in types) + f" over {axis_name!r} of {dict(mesh.shape)}"
    return _Part(rows, leaves, len(own), mesh.shape[axis_name], shared_by, content)


def _is_rows(leaf: Any) -> bool:
    if not is_array(leaf) or leaf.ndim == 0 or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        return False
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable


def _positions(mesh: Mesh, axis_name: str) -> dict[int, tuple[int, ...]]:
    """Where along the axis each process has devices."""
    if not isinstance(mesh, Mesh):
        raise InputError(
            "mesh must be a jax.sharding.Mesh",
            given=repr(mesh),
            remedy='jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))',
        )
    if axis_name not in mesh.axis_names:
        raise InputError(
            "axis_name must be an axis of the mesh",
            given=f"axis_name={axis_name!r} for a mesh with {mesh.axis_names}",
            remedy=f"global_batch(batch, mesh, axis_name={mesh.axis_names[0]!r})",
        )
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index(axis_name), 0)
    owners = [{device.process_index for device in each.flat} for each in devices.reshape(devices.shape[0], -1)]
    found = {
        process: tuple(position for position, here in enumerate(owners) if process in here)
        for process in range(jax.process_count())
    }
    sets = set(found.values())
    # Equal in number, and two of them are the same or have nothing in common.
    if len({len(each) for each in sets}) > 1 or () in sets or sum(map(len, sets)) != len(owners):
        raise InputError(
            f"Every process must have as many devices of the mesh along {axis_name!r}",
            given="\n".join(f"process {process}: {len(each)} of {len(owners)}" for process, each in found.items())
            + "\n",
            remedy="Make the mesh of all devices, in their order: "
            'jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))',
        )
    return found


def _agree(part: _Part | None, problem: Exception | None) -> None:
    """Compares what the processes hold, and raises in all of them if it cannot be put together."""
    own = [0, 0, 0, 0, 1] if part is None else [part.rows, _checksum(part.leaves), part.content, min(part.shared_by), 0]
    everyone = multihost_utils.process_allgather(np.asarray(own, np.uint32))
    rows, leaves, content, group, failed = np.asarray(everyone).reshape(-1, len(own)).T.tolist()
    contents = {each: {content[i] for i, other in enumerate(group) if other == each} for each in group}
    are_alike = len(set(rows)) == len(set(leaves)) == 1 and all(len(each) == 1 for each in contents.values())
    if are_alike and not any(failed):
        return
    # All have come to the same conclusion, so all take part in this second exchange.
    texts = _exchange(str(problem) if part is None else f"{part.rows} rows of {part.leaves}")
    if problem is not None:
        return
    if any(failed):
        raise InputError(
            "Every process must pass a batch that it can place",
            given=_table([text if bad else "nothing wrong" for text, bad in zip(texts, failed, strict=True)]),
            remedy="Correct it in the process that is named; it raises the same error in full.",
        )
    if len(set(rows)) > 1:
        raise InputError(
            "Every process must pass the same number of rows",
            given=_table([str(each) for each in rows]),
            remedy=f"Cut them to the fewest, rows[:{min(rows)}], or pad them to {max(rows)} with copies of a row that "
            "weigh nothing in the loss.",
        )
    if len(set(leaves)) > 1:
        raise InputError(
            "Every process must pass the same leaves, with the same dtypes and shapes but for axis 0",
            given=_table(texts),
            remedy="Build the same tree in every process, and cast its leaves alike: rows.astype(np.float32).",
        )
    different = [each for each, found in contents.items() if len(found) > 1]
    raise InputError(
        "Processes that share a part of the axis must pass the same rows",
        given=_table([f"{'other rows than' if each in different else 'as'} process {each}" for each in group]),
        remedy="Let these processes load the same rows, or put the axis over all processes first in the mesh.",
    )


def _checksum(text: str) -> int:
    return zlib.crc32(text.encode())


def _exchange(text: str) -> list[str]:
    """The text of every process, as much of it as is exchanged."""
    own = np.frombuffer(text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"), np.uint8)
    everyone = np.asarray(multihost_utils.process_allgather(own)).reshape(-1, _TEXT_BYTES)
    return [bytes(each).rstrip(b"\0").decode(errors="replace") for each in everyone]


def _table(texts: list[str]) -> str:
    lines = [text.replace("\n", " ") for text in texts]
    return "\n".join(f"process {process}: {line}" for process, line in enumerate(lines)) + "\n"


__all__ = ["MissingPeerError", "Processes", "global_batch", "initialize"]

# What `anybatch launch` tells the processes that it starts.
COORDINATOR, NUM_PROCESSES, PROCESS_ID = "ANYBATCH_COORDINATOR", "ANYBATCH_NUM_PROCESSES", "ANYBATCH_PROCESS_ID"

_CLUSTERS = {
    "SlurmCluster": "SLURM",
    "OmpiCluster": "Open MPI",
    "K8sCluster": "Kubernetes",
    "GkeTpuCluster": "Cloud TPU",
    "GceTpuCluster": "Cloud TPU",
}

_BY_HAND = 'initialize(coordinator_address="10.0.0.1:1234", num_processes=2, process_id=0)'

# JAX aborts the process when its own time to join is over, so that is never: ours ends with an error instead.
_NEVER = 10**8


@dataclasses.dataclass(frozen=True)
class Processes:
    """Which of how many processes this one is, and how that was found.

    >>> print(Processes(index=0, count=4, coordinator="10.0.0.1:1234", found_by="SLURM"))
    process 0 of 4, which met at 10.0.0.1:1234 (found by SLURM)
    """

    index: int
    count: int
    coordinator: str | None = None
    found_by: str = "nothing"

    def __str__(self) -> str:
        if self.count == 1:
            return f"one process alone (found by {self.found_by})"
        return f"process {self.index} of {self.count}, which met at {self.coordinator} (found by {self.found_by})"


class MissingPeerError(AnybatchError, TimeoutError):
    """Not all processes have joined in time; the message says where they were awaited, and how many.

    JAX cannot take back what it began: end this process, and start all of them again.
    """

    def __init__(self, processes: Processes, timeout: float) -> None:
        self.processes, self.timeout = processes, timeout
        address, last = processes.coordinator, processes.count - 1
        if processes.index == 0:
            seen = "it listens there"
        elif _answers(str(address)):
            seen = "process 0 answers there, so another one is missing"
        else:
            seen = "nobody answers there, so process 0 is missing or cannot be reached"
        super().__init__(
            f"All {processes.count} processes must join within {timeout:g} seconds, got only some of them.\n"
            f"This is process {processes.index}, and the address is {address}: {seen}.\n"
            f"Start every process_id from 0 to {last}, each with coordinator_address={address!r}; see that no firewall "
            "or proxy variable stands between the machines; or wait longer: "
            f"anybatch.distributed.initialize(timeout={2 * timeout:g})."
        )


_joined: tuple[Processes, Any] | None = None  # with the devices that were asked for
_missing: MissingPeerError | None = None


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float = 300.0,
    heartbeat: int = 30,
    local_device_ids: int | Sequence[int] | None = None,
) -> Processes:
    """`jax.distributed.initialize`, where every wait has an end. The first line of a script for many processes.

    What is not given is looked for: first in what `anybatch launch` sets, then where JAX looks, which is SLURM, Open
    MPI, Kubernetes and Cloud TPU. If there is nothing, this is one process alone, and nothing is done: the same script
    runs on one machine and on a cluster.

    - **A process that never comes** is a `MissingPeerError` in the others after `timeout`. (JAX alone aborts.)
    - **A process that dies**, killed or with its machine, ends all others with an error: about `heartbeat` seconds
      later at the latest, 28 by default where it was measured, and at once if it was process 0.
    - **An exception** in one process ends it after its traceback, without the handlers of `atexit`, among which JAX
      would wait for the others. These then end as if it had died. (`sys.exit(1)` is no exception: it waits `timeout`.)
    - **The coordinator**, process 0, listens on the loopback interface alone if its address is one of that. Otherwise
      it listens on all, without a password, as JAX does: keep that port behind a firewall.

    A second call returns what the first did. Alone, `print` shows:

    >>> print(initialize())
    one process alone (found by nothing)

    Args:
      coordinator_address: "host:port" where process 0 listens, the same for all; the port must be free there.
      num_processes: how many there are. With 1, nothing is looked for.
      process_id: which of them this is, from 0.
      timeout: seconds to wait for all processes when they join, and again for the last when they leave.
      heartbeat: seconds of silence after which a process counts as dead.
      local_device_ids: which GPUs of its machine this process uses; all of them by default, but for SLURM and Open
        MPI, where JAX takes one for each process: `local_device_ids=range(8)` for one process with eight.

    Raises:
      MissingPeerError: if not all processes have joined within `timeout`.
      InputError: for settings that cannot be, that differ from those of the first call, or that come too late: JAX
        must not have used a device before.
    """
    global _joined, _missing
    _check(coordinator_address, num_processes, process_id, timeout, heartbeat)
    devices = [local_device_ids] if isinstance(local_device_ids, int) else local_device_ids
    devices = None if devices is None else [int(each) for each in devices]
    if _missing is not None:
        raise _missing
    if _joined is None and jax.distributed.is_initialized():
        _joined = _already(), devices
        _end_at_errors()
    if _joined is not None:
        _compare(_joined, coordinator_address, num_processes, process_id, devices)
        return _joined[0]
    found, devices = _find(coordinator_address, num_processes, process_id, devices, timeout)
    if found.count == 1:
        return found
    if jax_processes.uses_devices():
        raise InputError(
            "Processes must join before JAX uses a device",
            given=f"{found}, after a first use",
            remedy="Make anybatch.distributed.initialize() the first line of the script, before any array, "
            "jax.devices() or jax.device_count().",
        )
    _end_at_errors()
    try:
        _join(found, devices, timeout, heartbeat)
    except MissingPeerError as error:
        _missing = error
        raise
    _joined = found, devices
    return found


def _find(
    address: str | None, count: int | None, index: int | None, devices: list[int] | None, timeout: float
) -> tuple[Processes, list[int] | None]:
    """Completes what was given: from our launcher, or from what JAX detects."""
    if count == 1:
        return Processes(0, 1, found_by="arguments"), devices
    found_by = "arguments"
    if None in (address, count, index) and any(name in os.environ for name in (COORDINATOR, NUM_PROCESSES, PROCESS_ID)):
        found_by = "anybatch launch"
        ours = _launched()
        address, count, index = address or ours[0], count or ours[1], ours[2] if index is None else index
    address = address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if None in (address, count, index):
        cluster = jax_processes.cluster_name()
        if cluster is None and (address, count, index) == (None, None, None):
            return Processes(0, 1), devices
        if cluster is not None:
            found_by = _CLUSTERS.get(cluster, cluster)
            address, count, index, devices = _ask(found_by, address, count, index, devices, timeout)
    if address is None or count is None or index is None:
        given = {"coordinator_address": address, "num_processes": count, "process_id": index}
        raise InputError(
            "coordinator_address, num_processes and process_id belong together where no cluster is found",
            given=", ".join(f"{name}={value!r}" for name, value in given.items()),
            remedy=f"anybatch.distributed.{_BY_HAND}, or none of them for one process alone.",
        )
    _check(address, count, index, timeout)
    return Processes(index, count, address if count > 1 else None, found_by), devices


def _launched() -> tuple[str, int, int]:
    """What `anybatch launch` has set for this process."""
    try:
        return os.environ[COORDINATOR], int(os.environ[NUM_PROCESSES]), int(os.environ[PROCESS_ID])
    except (KeyError, ValueError) as error:
        names = (COORDINATOR, NUM_PROCESSES, PROCESS_ID)
        raise InputError(
            "The variables of `anybatch launch` belong together, an address and two integers",
            given="\n".join(f"{name}: {os.environ.get(name)!r}" for name in names),
            remedy=f"unset {' '.join(names)}, or start the script with `anybatch launch --processes 2 script.py`.",
        ) from error


def _ask(
    found_by: str, address: str | None, count: int | None, index: int | None, devices: list[int] | None, timeout: float
) -> tuple[Any, ...]:
    try:
        return jax_processes.ask_cluster(address, count, index, devices, math.ceil(timeout))
    except NotAvailableError:
        raise
    except Exception as error:  # whatever a cluster's own interface raises
        raise InputError(
            f"JAX must find the processes of this job in what {found_by} says",
            given=f"{type(error).__name__}: {error}\n",
            remedy=f"Say it yourself: anybatch.distributed.{_BY_HAND}, or initialize(num_processes=1) for one alone.",
        ) from error


def _join(found: Processes, devices: list[int] | None, timeout: float, heartbeat: int) -> None:
    """Meets the others, or raises; in a thread, since JAX's wait cannot be ended, not even by Ctrl-C."""
    done, errors = threading.Event(), []
    address = str(found.coordinator)
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or (address if _is_loopback(address) else None)
    if found.index == 0 and (taken := _taken(bind or f"[::]:{_host_and_port(address)[1]}")):
        _complain_of_address(found, taken)  # JAX would end in a segmentation fault

    def connect() -> None:
        try:
            jax.distributed.initialize(
                address,
                found.count,
                found.index,
                local_device_ids=devices,
                cluster_detection_method="deactivate",
                initialization_timeout=_NEVER,
                heartbeat_timeout_seconds=heartbeat,
                shutdown_timeout_seconds=math.ceil(timeout),
                coordinator_bind_address=bind,
            )
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=connect, name="anybatch.distributed", daemon=True).start()
    if not done.wait(timeout):
        jax_processes.forget_client()  # nothing in this process may take it for one that has joined
        raise MissingPeerError(found, timeout)
    if errors:
        _complain_of_address(found, errors[0])


def _complain_of_address(found: Processes, error: BaseException) -> None:
    raise InputError(
        f"Process {found.index} of {found.count} must be able to meet the others at {found.coordinator}",
        given=f"{type(error).__name__}: {error}\n",
        remedy="Take a port that is free on the machine of process 0, the same for all processes.",
    ) from error


def _end_at_errors() -> None:
    """From now on an exception that nobody catches ends this process, right after whatever shows it."""
    show, owner = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        try:
            show(kind, error, traceback)
        finally:
            if os.getpid() == owner:  # a forked worker of a data loader ends as it likes
                _flush(sys.stdout.flush)
                _flush(sys.stderr.flush)
                os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = hook


def _flush(flush: Callable[[], None]) -> None:
    try:
        flush()
    except Exception:  # a closed pipe must not keep the process alive
        pass


def _already() -> Processes:
    return Processes(*jax_processes.joined(), found_by="jax.distributed.initialize")


def _compare(
    joined: tuple[Processes, Any], address: str | None, count: int | None, index: int | None, devices: Any
) -> None:
    first, first_devices = joined
    pairs = [
        ("coordinator_address", address, first.coordinator),
        ("num_processes", count, first.count),
        ("process_id", index, first.index),
        ("local_device_ids", devices, first_devices),
    ]
    different = [f"{name}={now!r}, was {before!r}" for name, now, before in pairs if now is not None and now != before]
    if different:
        raise InputError(
            "A process joins once, and a second call must say the same as the first",
            given="\n".join(different) + "\n",
            remedy="Call anybatch.distributed.initialize() without arguments to ask which process this is.",
        )


def _check(
    address: str | None, count: int | None, index: int | None, timeout: float | None = None, heartbeat: int = 1
) -> None:
    """Raises for a setting that cannot be, whatever the others are."""

    def complain(must: str, **given: Any) -> None:
        text = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise InputError(must, given=text, remedy=f"For example: anybatch.distributed.{_BY_HAND}.")

    if address is not None:
        host, port = _host_and_port(address) if isinstance(address, str) else ("", None)
        if not host or port is None:
            complain('coordinator_address must be a text "host:port"', coordinator_address=address)
    if count is not None and (not _is_integer(count) or count < 1):
        complain("num_processes must be an integer of 1 or more", num_processes=count)
    if index is not None and (not _is_integer(index) or index < 0 or (count is not None and index >= count)):
        complain("process_id must be an integer from 0 to num_processes - 1", process_id=index, num_processes=count)
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not 0 < timeout < _NEVER:
        complain("timeout must be a number of seconds", timeout=timeout)
    if not _is_integer(heartbeat) or heartbeat < 1:
        complain("heartbeat must be an integer number of seconds", heartbeat=heartbeat)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _host_and_port(address: str) -> tuple[str, int | None]:
    """Host and port of "host:port" or "[::1]:port"; no port where there is none that can be."""
    host, _, port = address.rpartition(":")
    valid = port.isascii() and port.isdigit() and 0 < int(port) < 65536
    return host.removeprefix("[").removesuffix("]"), int(port) if valid else None


def _is_loopback(address: str) -> bool:
    host, _ = _host_and_port(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _taken(address: str) -> OSError | None:
    """Why nobody can listen at an address of this machine, if so."""
    host, port = _host_and_port(address)
    failures, is_free = [], False
    for each in ["::", "0.0.0.0"] if host == "::" else [host]:
        try:
            for family, kind, protocol, _, place in socket.getaddrinfo(each, port, type=socket.SOCK_STREAM):
                with socket.socket(family, kind, protocol) as probe:
                    # What is left of a connection that has ended does not keep the port.
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(place)
                    is_free = True
        except OSError as error:
            failures.append(error)
    in_use = [error for error in failures if error.errno == errno.EADDRINUSE]
    return in_use[0] if in_use else None if is_free else failures[0]  # there may be no IPv6


def _answers(address: str) -> bool:
    try:
        with socket.create_connection(_host_and_port(address), timeout=2):
            return True
    except OSError:
        return False
