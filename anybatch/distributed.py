"""Several processes, e.g. one for each machine of a cluster.

`initialize` connects the processes, like `jax.distributed.initialize`; if one never joins, or dies, the others raise an
error instead of waiting forever. `global_batch` makes one sharded batch of the rows that each process has loaded.
"""

import contextlib
import dataclasses
import errno
import ipaddress
import json
import math
import os
import socket
import sys
import threading
import zlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from anybatch.call.checks import describe, is_array, named_leaves
from anybatch.errors import AnybatchError, InputError, NotAvailableError
from anybatch.jaxprs import versions

__all__ = ["MissingPeerError", "Processes", "global_batch", "initialize"]

# Environment variables that `anybatch launch` sets for the processes that it starts.
COORDINATOR, NUM_PROCESSES, PROCESS_ID = "ANYBATCH_COORDINATOR", "ANYBATCH_NUM_PROCESSES", "ANYBATCH_PROCESS_ID"

_CLUSTERS = {
    "SlurmCluster": "SLURM",
    "OmpiCluster": "Open MPI",
    "K8sCluster": "Kubernetes",
    "GkeTpuCluster": "Cloud TPU",
    "GceTpuCluster": "Cloud TPU",
}

_BY_HAND = 'initialize(coordinator_address="10.0.0.1:1234", num_processes=2, process_id=0)'

# JAX aborts the process at its own timeout. So that one is never reached, and ours raises an error instead.
_NEVER = 10**8


@dataclasses.dataclass(frozen=True)
class Processes:
    """The index of this process, the number of all processes, and how they were found.

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
    """Not all processes have joined in time. The message says at which address, and how many there should be.

    JAX cannot be initialized again: end this process, and start all of them again.
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
    """`jax.distributed.initialize` with timeouts that raise errors. Make it the first line of a script.

    Arguments that you leave out are found: first in the environment variables of `anybatch launch`, then as JAX finds
    them, for SLURM, Open MPI, Kubernetes and Cloud TPU. If nothing is found, the script is a single process, and
    nothing is done. So the same script runs on one machine and on a cluster.

    - **A process never joins.** The others raise a `MissingPeerError` after `timeout`. (JAX aborts them.)
    - **A process dies**, because it or its machine was killed. All others end with an error within about `heartbeat`
      seconds (28 by default, as measured), or at once if it was process 0.
    - **A process raises an exception.** It prints the traceback and ends without running `atexit` handlers, in which
      JAX would wait for the others. The others then end as if it had died. (`sys.exit(1)` is not an exception: it waits
      for up to `timeout`.)
    - **The coordinator**, process 0, listens only on the loopback interface if its address is a loopback address.
      Otherwise it listens on all interfaces, without a password, as JAX does: keep that port behind a firewall.

    A second call returns the result of the first. In a single process:

    >>> print(initialize())
    one process alone (found by nothing)

    Args:
      coordinator_address: "host:port" where process 0 listens, the same in all processes. The port must be free.
      num_processes: the number of processes. With 1, nothing is done.
      process_id: the index of this process, from 0.
      timeout: seconds to wait until all processes have joined, and at the end until all have finished.
      heartbeat: seconds of silence after which a process counts as dead.
      local_device_ids: the GPUs of the machine that this process uses. By default all of them, except under SLURM and
        Open MPI, where JAX uses one for each process: pass `local_device_ids=range(8)` for one process with eight.

    Raises:
      MissingPeerError: if not all processes have joined within `timeout`.
      InputError: for arguments that are not allowed or differ from those of the first call, or if JAX has already used
        a device.
    """
    global _joined, _missing
    _check(coordinator_address, num_processes, process_id, timeout, heartbeat)
    devices = [local_device_ids] if isinstance(local_device_ids, int) else local_device_ids
    devices = None if devices is None else [int(each) for each in devices]
    if _missing is not None:
        raise _missing
    if _joined is None and jax.distributed.is_initialized():
        _joined = Processes(*versions.joined(), found_by="jax.distributed.initialize"), devices
        _end_at_errors()
    if _joined is not None:
        _compare(_joined, coordinator_address, num_processes, process_id, devices)
        return _joined[0]
    found, devices = _find(coordinator_address, num_processes, process_id, devices, timeout)
    if found.count == 1:
        return found
    if versions.uses_devices():
        raise InputError(
            "Processes must join before JAX uses a device",
            given=f"{found}, after a device was used",
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
    """Completes the arguments, from `anybatch launch` or from what JAX detects."""
    if count == 1:
        return Processes(0, 1, found_by="arguments"), devices
    found_by = "arguments"
    if None in (address, count, index) and any(name in os.environ for name in (COORDINATOR, NUM_PROCESSES, PROCESS_ID)):
        found_by = "anybatch launch"
        ours = _launched()
        address, count, index = address or ours[0], count or ours[1], ours[2] if index is None else index
    address = address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if None in (address, count, index):
        cluster = versions.cluster_name()
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
            remedy=f"anybatch.distributed.{_BY_HAND}, or none of them for a single process.",
        )
    _check(address, count, index, timeout)
    return Processes(index, count, address if count > 1 else None, found_by), devices


def _launched() -> tuple[str, int, int]:
    """The environment variables that `anybatch launch` has set for this process."""
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
        return versions.ask_cluster(address, count, index, devices, math.ceil(timeout))
    except NotAvailableError:
        raise
    except Exception as error:  # whatever a cluster's own interface raises
        raise InputError(
            f"JAX must be able to find the processes of this job through {found_by}",
            given=f"{type(error).__name__}: {error}\n",
            remedy=f"Pass them: anybatch.distributed.{_BY_HAND}, or initialize(num_processes=1) for a single process.",
        ) from error


def _join(found: Processes, devices: list[int] | None, timeout: float, heartbeat: int) -> None:
    """Connects to the other processes, or raises. JAX waits in a thread, since its wait cannot be interrupted."""
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
        versions.forget_client()  # JAX must not think that this process has joined
        raise MissingPeerError(found, timeout)
    if errors:
        _complain_of_address(found, errors[0])


def _complain_of_address(found: Processes, error: BaseException) -> None:
    raise InputError(
        f"Process {found.index} of {found.count} must be able to meet the others at {found.coordinator}",
        given=f"{type(error).__name__}: {error}\n",
        remedy="Use a port that is free on the machine of process 0, the same in all processes.",
    ) from error


def _end_at_errors() -> None:
    """From now on, an uncaught exception ends this process right after it was printed."""
    show, owner = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        try:
            show(kind, error, traceback)
        finally:
            if os.getpid() == owner:  # not in a forked worker of a data loader
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(Exception):  # a closed pipe must not keep the process alive
                        stream.flush()
                os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = hook


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
            "A process joins once, and a second call must have the arguments of the first",
            given="\n".join(different) + "\n",
            remedy="Call anybatch.distributed.initialize() without arguments to find out which process this is.",
        )


def _check(
    address: str | None, count: int | None, index: int | None, timeout: float | None = None, heartbeat: int = 1
) -> None:
    """Raises for an argument that is not allowed, whatever the others are."""

    def complain(must: str, **given: Any) -> None:
        text = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise InputError(must, given=text, remedy=f"For example: anybatch.distributed.{_BY_HAND}.")

    if address is not None:
        host, port = _host_and_port(address) if isinstance(address, str) else ("", None)
        if not host or port is None:
            complain('coordinator_address must be a string "host:port"', coordinator_address=address)
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
    """The host and port of "host:port" or "[::1]:port". The port is None if it is not valid."""
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
    """The error of listening at an address of this machine, or None if it is free."""
    host, port = _host_and_port(address)
    failures, is_free = [], False
    for each in ["::", "0.0.0.0"] if host == "::" else [host]:
        try:
            for family, kind, protocol, _, target in socket.getaddrinfo(each, port, type=socket.SOCK_STREAM):
                with socket.socket(family, kind, protocol) as probe:
                    # A connection that has ended does not block the port.
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(target)
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


def global_batch(batch: Any, mesh: Mesh, axis_name: str = "data") -> Any:
    """Makes one batch of the rows of all processes: every leaf a `jax.Array`, sharded over `axis_name` along axis 0.

    Every process calls it with its own rows. They are put on its own devices, so that nothing is sent. Their order in
    the batch is that of the devices in the mesh: with `jax.make_mesh`, those of process 0 come first. With a single
    process, it is a `jax.device_put`.

    It differs from `jax.make_array_from_process_local_data` in one respect. If the processes have different numbers of
    rows, that function silently gives each process a different global shape. This one first compares the rows of all
    processes, and raises the same error in each. The comparison of a few integers runs on the devices: it waits for the
    step that they are computing, and takes some milliseconds.

    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> global_batch({"x": np.ones((6, 2), np.float32)}, mesh)["x"].sharding.spec
    P('data',)

    Args:
      batch: a pytree of arrays on the host, with the rows of this process along axis 0.
      mesh: a mesh with devices of every process, the same number of each along the axis.
      axis_name: the axis of the mesh over which rows are sharded. Over other axes they are replicated: processes whose
        devices differ only in other axes must pass the same rows.

    Raises:
      InputError: in every process, if the numbers of rows or the leaves differ between processes, or the devices of a
        process cannot share its rows evenly.
    """
    try:
        local = _local_rows(batch, mesh, axis_name)
    except Exception as problem:
        # The other processes must hear of an error before it is raised. Otherwise they would wait for this process.
        if jax.process_count() > 1:
            _compare_rows(None, str(problem))
        raise
    if jax.process_count() > 1:
        _compare_rows(local, f"{local.rows} rows of {local.leaves}")
    sharding, factor = NamedSharding(mesh, PartitionSpec(axis_name)), local.axis_size // local.positions

    def global_array(leaf: Any) -> jax.Array:
        rows = np.asarray(leaf)
        return jax.make_array_from_process_local_data(sharding, rows, (rows.shape[0] * factor, *rows.shape[1:]))

    return jax.tree.map(global_array, batch)


@dataclasses.dataclass(frozen=True)
class _LocalRows:
    """A description of the rows of this process, to be compared with those of others."""

    rows: int
    leaves: str  # the names and types of the leaves, which must be the same in every process
    positions: int  # the number of indices along the mesh axis at which this process has devices
    axis_size: int
    shared_by: tuple[int, ...]  # the processes that must have the same rows
    content: int  # a checksum of these rows, if several processes have them


def _local_rows(batch: Any, mesh: Mesh, axis_name: str) -> _LocalRows:
    """The description of the rows of this process. Raises an InputError for a mistake in this process."""
    positions = _positions(mesh, axis_name)
    own = positions[jax.process_index()]
    named = named_leaves("batch", batch)
    if not named or not all(_is_rows(leaf) for _, leaf in named):
        raise InputError(
            "Every leaf of the batch must be an array on the host, with rows along axis 0",
            given="\n".join(f"{name}: {describe(leaf)}" for name, leaf in named) + "\n" if named else "no leaves",
            remedy="Pass the rows of this process as numpy arrays. An array that is on several processes already is a "
            "global one. Arrays without an axis of examples need no global_batch.",
        )
    counts = {leaf.shape[0] for _, leaf in named}
    if len(counts) > 1:
        raise InputError(
            "Every array in the batch needs the same number of rows along axis 0",
            given="\n".join(f"{name}: {leaf.shape[0]}" for name, leaf in named),
            remedy="Take arrays that are not per-example data out of the batch.",
        )
    (rows,) = counts
    if rows % len(own):
        raise InputError(
            f"The rows of a process must be shared evenly by its devices along {axis_name!r}",
            given=f"{rows} rows for {len(own)} devices",
            remedy=f"Drop some, rows[:{rows - rows % len(own)}], or pad them to {rows + -rows % len(own)} with copies "
            "of a row that have weight 0 in the loss.",
        )
    shared_by = tuple(process for process, theirs in positions.items() if theirs == own)
    content = 0
    if len(shared_by) > 1:
        for _, leaf in named:
            content = zlib.crc32(np.ascontiguousarray(leaf).view(np.uint8).data, content)
    types = [(name, f"{jax.dtypes.canonicalize_dtype(leaf.dtype)}{list(leaf.shape[1:])}") for name, leaf in named]
    leaves = ", ".join(f"{name}: {text}" for name, text in types) + f" over {axis_name!r} of {dict(mesh.shape)}"
    return _LocalRows(rows, leaves, len(own), mesh.shape[axis_name], shared_by, content)


def _is_rows(leaf: Any) -> bool:
    if not is_array(leaf) or leaf.ndim == 0 or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        return False
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable


def _positions(mesh: Mesh, axis_name: str) -> dict[int, tuple[int, ...]]:
    """For each process, the indices along the mesh axis at which it has devices."""
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
    # All processes must have the same number of indices, and two processes either the same indices or disjoint ones.
    if len({len(each) for each in sets}) > 1 or () in sets or sum(map(len, sets)) != len(owners):
        raise InputError(
            f"Every process must have the same number of devices of the mesh along {axis_name!r}",
            given="\n".join(f"process {process}: {len(each)} of {len(owners)}" for process, each in found.items())
            + "\n",
            remedy="Make the mesh of all devices, in their order: "
            'jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))',
        )
    return found


def _compare_rows(local: _LocalRows | None, text: str) -> None:
    """Compares the rows of all processes, and raises if they do not make one batch.

    Args:
      local: the rows of this process. None if something is wrong with them: then the caller raises.
      text: describes them, or what is wrong, to the others.
    """
    own = [0, 0, 0, 0, 1]
    if local is not None:
        own = [local.rows, zlib.crc32(local.leaves.encode()), local.content, min(local.shared_by), 0]
    everyone = multihost_utils.process_allgather(np.asarray(own, np.uint32))
    rows, leaves, content, group, failed = np.asarray(everyone).reshape(-1, len(own)).T.tolist()
    contents = {each: {content[i] for i, other in enumerate(group) if other == each} for each in group}
    are_alike = len(set(rows)) == len(set(leaves)) == 1 and all(len(each) == 1 for each in contents.values())
    if are_alike and not any(failed):
        return
    # All processes have seen the same numbers, so all take part in this second exchange.
    texts = gather_json(text)
    if local is None:
        return
    if any(failed):
        raise InputError(
            "Every process must pass a valid batch",
            given=_table([text if bad else "nothing wrong" for text, bad in zip(texts, failed, strict=True)]),
            remedy="Correct it in the process that is named, which raises the full error.",
        )
    if len(set(rows)) > 1:
        raise InputError(
            "Every process must pass the same number of rows",
            given=_table([str(each) for each in rows]),
            remedy=f"Drop some, rows[:{min(rows)}], or pad them to {max(rows)} with copies of a row that have weight 0 "
            "in the loss.",
        )
    if len(set(leaves)) > 1:
        raise InputError(
            "Every process must pass the same leaves, with the same dtypes and shapes except for axis 0",
            given=_table(texts),
            remedy="Build the same tree in every process, with the same dtypes: rows.astype(np.float32).",
        )
    different = [each for each, found in contents.items() if len(found) > 1]
    raise InputError(
        "Processes with the same indices along the axis must pass the same rows",
        given=_table([f"{'other rows than' if each in different else 'as'} process {each}" for each in group]),
        remedy="Load the same rows in these processes, or make the axis over all processes the first of the mesh.",
    )


def gather_json(value: Any) -> list[Any]:
    """The JSON values of all processes, in their order. All processes must call it."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = np.asarray(multihost_utils.process_allgather(np.asarray(len(text), np.int32))).reshape(-1)
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: len(text)] = text
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(lengths), -1)
    return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]


def _table(texts: list[str]) -> str:
    lines = [text.replace("\n", " ") for text in texts]
    return "\n".join(f"process {process}: {line}" for process, line in enumerate(lines)) + "\n"
