"""The rows that each process holds, put together as one batch on a mesh."""

import dataclasses
import zlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from anybatch.errors import InputError
from anybatch.trees import describe, is_array, named_leaves

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
