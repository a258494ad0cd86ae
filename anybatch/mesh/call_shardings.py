"""The arrays of one call on a mesh: how its arguments are sharded, and how its results are."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from anybatch.call import placement
from anybatch.call.arguments import Arguments
from anybatch.call.caches import can_run
from anybatch.call.options import MeshOptions, is_spec
from anybatch.call.placement import axes_of
from anybatch.errors import InputError
from anybatch.jaxprs import avals
from anybatch.mesh.executor import number_of_groups
from anybatch.mesh.sharded import ShardedExecutor


class CallShardings:
    """The mesh of one call, and the shardings of its arguments.

    Outside `jit`, the arguments are put on the mesh: the batch is sharded over the devices, and all other arrays keep
    their sharding on this mesh, or else are replicated. Under `jit`, XLA does that.
    """

    def __init__(self, options: MeshOptions, arguments: Arguments) -> None:
        self.options, self.caller_arguments = options, arguments
        self.mesh = options.mesh
        self.is_eager = can_run(*jax.tree.leaves(arguments.arrays))
        self.specs = self._specs()
        _check_context(options, self.is_eager)

    def _specs(self) -> list[Any]:
        """The PartitionSpec of each differentiated leaf, or None if it is not known."""
        wrt = self.caller_arguments.arrays.wrt
        found = [placement.spec_on(leaf, self.mesh) for leaf in wrt]
        if self.options.param_specs is None:
            return found
        tree = self.caller_arguments.as_gradient(list(range(len(wrt))))
        try:
            broadcast = jax.tree.map(
                lambda spec, subtree: [spec] * len(jax.tree.leaves(subtree)),
                self.options.param_specs,
                tree,
                is_leaf=is_spec,
            )
        except ValueError:
            raise InputError(
                "param_specs must be a PartitionSpec, or a tree of them that is a prefix of the gradient",
                given=f"param_specs={self.options.param_specs!r} for {jax.tree.structure(tree)}",
                remedy="Give each parameter a jax.sharding.PartitionSpec, or None for one that is replicated.",
            ) from None
        by_leaf = dict(zip(jax.tree.leaves(tree), jax.tree.leaves(broadcast, is_leaf=is_spec), strict=True))
        given = [by_leaf[position] for position in range(len(wrt))]
        specs = [spec.spec if isinstance(spec, NamedSharding) else spec for spec in given]
        leaves = [leaf for leaf in self.caller_arguments.leaves if leaf.role == "wrt"]
        for leaf, spec in zip(leaves, specs, strict=True):
            self._check_fits(leaf.name, np.shape(leaf.value), spec)
        return specs

    def _check_fits(self, name: str, shape: tuple[int, ...], spec: Any) -> None:
        num_shards = [math.prod(self.mesh.shape[axis] for axis in names) for names in axes_of(spec)]
        if len(num_shards) > len(shape) or any(size % number for size, number in zip(shape, num_shards, strict=False)):
            raise InputError(
                "param_specs must divide every parameter into equal shards",
                given=f"{spec} for {name} of shape {shape}, on a mesh of {dict(self.mesh.shape)}",
                remedy="Shard another dimension of it, or pass None for it.",
            )

    @functools.cached_property
    def arguments(self) -> Arguments:
        """The arguments; outside `jit`, on the mesh."""
        if not self.is_eager:
            return self.caller_arguments
        specs = iter(self.specs)
        leaves = []
        for leaf in self.caller_arguments.leaves:
            if leaf.role == "batch":
                value = self.put_examples(leaf.value)
            else:
                spec = next(specs) if leaf.role == "wrt" else None
                value = self._put(leaf.value, spec or PartitionSpec())
            leaves.append(leaf._replace(value=value))
        return dataclasses.replace(self.caller_arguments, leaves=leaves)

    def context(self) -> Any:
        """A context for a call outside `jit`: it replaces the mesh that the user has set, if any, by this one."""
        around = jax.sharding.get_abstract_mesh()
        if not self.is_eager or around.empty or around == self.mesh.abstract_mesh:
            return contextlib.nullcontext()
        return jax.set_mesh(self.mesh)

    def with_specs(self, fun: Any, out: list[Any]) -> Any:
        """`fun` for arrays whose types may have explicit shardings, with all axes automatic inside.

        `out` are the specs of its results.
        """
        axes = self.options.user_mesh.axis_names

        def run(*flat: Any) -> list[Any]:
            around = placement.mesh_of(flat)
            if not around.explicit_axes:
                return fun(*flat)
            with jax.sharding.use_abstract_mesh(around):
                return jax.sharding.auto_axes(lambda *flat: fun(*flat), axes=axes, out_sharding=out)(*flat)

        return run

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Explains the error of a loss that runs collectives over the mesh."""
        try:
            yield
        except NameError as error:
            if "axis name" not in str(error):
                raise
            raise InputError(
                "With mesh= the loss must be that of the full batch, without collectives over the mesh",
                given=f"a loss that raises {type(error).__name__}: {error}",
                remedy="Leave lax.psum, lax.pmean and the like out of it: anybatch sums gradients over the devices.",
            ) from error

    def placed(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Arrays, replicated on every device."""
        return [self._put(array, PartitionSpec()) for array in arrays] if self.is_eager else arrays

    def _put(self, leaf: Any, spec: Any) -> Any:
        if isinstance(leaf, jax.core.Tracer) or not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
            return leaf  # a Python number is a constant of the program
        own = placement.spec_on(leaf, self.mesh) if placement.is_placed(leaf) else None
        return placement.put(leaf, self.mesh, spec if own is None else own)

    def put_examples(self, leaf: Any) -> Any:
        """Puts an array with a row for each example on the mesh, sharded as the batch is, padded if that is uneven."""
        executor = self.executor(self.caller_arguments.num_examples)
        by_examples = PartitionSpec(self.options.axes)
        own = placement.spec_on(leaf, self.mesh) if placement.is_placed(leaf) else None
        if own is not None and (own[:1] == by_examples or len(executor.counts) == 1):
            return placement.put(leaf, self.mesh, own)
        if len(executor.counts) == 2:
            leaf = _padded(leaf, executor)
        return placement.put(leaf, self.mesh, by_examples)

    def executor(self, examples: int, *, reduce: str = "once", num_groups: int | None = None) -> ShardedExecutor:
        axes, specs = self.options.axes, self.specs
        executor = ShardedExecutor(examples, num_groups, mesh=self.mesh, axes=axes, specs=specs, reduce=reduce)
        if reduce == "each" and len(executor.counts) == 2:
            raise InputError(
                'With reduce="each" every device needs the same number of examples',
                given=f"{examples} examples for {executor.devices} devices",
                remedy=f"Pass a batch of {examples // executor.devices * executor.devices} or "
                f'{executor.share * executor.devices} examples, or reduce="once".',
            )
        return executor

    def takes_one_more(self, examples: int) -> bool:
        """True if an uneven batch is run as an even one and one more example: see `ShardedExecutor._with_one_more`."""
        return self.mesh.size > self.options.devices and examples % self.options.devices != 0

    @property
    def is_sharded(self) -> bool:
        """True if a parameter is sharded over an axis of the batch."""
        names = {name for spec in self.specs for names in axes_of(spec) for name in names}
        return bool(names & set(self.options.axes))

    def placed_types(self, leaves: Sequence[Any]) -> list[Any]:
        """The types of arrays, with the shardings of the differentiated ones."""
        known = {id(leaf): spec for leaf, spec in zip(self.caller_arguments.arrays.wrt, self.specs, strict=True)}

        specs = [known.get(id(leaf)) for leaf in leaves]
        shardings = [None if spec is None else NamedSharding(self.mesh, spec) for spec in specs]
        return list(map(placement.with_sharding, map(avals.bare, leaves), shardings))

    def shard_bytes(self, wrt: Sequence[Any]) -> int:
        """The bytes of the differentiated arrays on one device, by their specs."""

        def num_shards(spec: Any) -> int:
            return math.prod(self.mesh.shape[name] for names in axes_of(spec) for name in names)

        return sum(placement.local_bytes(leaf) // num_shards(spec) for leaf, spec in zip(wrt, self.specs, strict=True))

    def as_parameters(self, grads: Sequence[Any]) -> list[Any]:
        return [
            grad if spec is None else jax.lax.with_sharding_constraint(grad, NamedSharding(self.mesh, spec))
            for grad, spec in zip(grads, self.specs, strict=True)
        ]

    def returned(self, outputs: Sequence[Any]) -> list[Any]:
        """The results of a call; outside `jit`, on the user's mesh."""
        if not self.is_eager or not self.options.is_explicit:
            return list(outputs)
        return [
            jax.device_put(leaf, NamedSharding(self.options.user_mesh, leaf.sharding.spec))
            if isinstance(leaf.sharding, NamedSharding)
            else leaf
            for leaf in outputs
        ]


def groups_of(examples: int, size: int, devices: int) -> int:
    """The number of groups for sums in a fixed order. No microbatch or group may be divided between devices."""
    microbatches, rest = divmod(examples, size)
    number = number_of_groups(microbatches) if microbatches else 1
    if not rest and microbatches and number % devices == 0:
        return number
    divisors = [each for each in range(1, examples // devices + 1) if examples % each == 0]
    better = [each for each in divisors if number_of_groups(examples // each) % devices == 0]
    advice = f"For {examples} examples: microbatch_size={max(better)}" if better else "Use 2, 4, 8, ... devices"
    raise InputError(
        "reproducible=True needs the same number of complete microbatches on each of 1, 2, 4, ... devices",
        given=f"{examples} examples, microbatch_size={size} and {devices} device{'s' if devices > 1 else ''}",
        remedy=f"{advice}; or a batch whose size is a multiple of {size * devices}.",
    )


def _padded(leaf: Any, executor: ShardedExecutor) -> Any:
    """An uneven batch with the same number of rows for each device. Where one is missing, there is a neighbour's."""
    most = executor.share
    firsts = [device * most - max(0, device - executor.with_more) for device in range(executor.devices)]
    rows = np.minimum(np.asarray([first + row for first in firsts for row in range(most)]), executor.examples - 1)
    host = np.asarray(leaf) if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended) else leaf
    return host[rows]


def _check_context(options: MeshOptions, is_eager: bool) -> None:
    """Raises if another mesh is set under `jit`, or if the call is inside a `shard_map` over the axes of the batch."""
    around = jax.sharding.get_abstract_mesh()
    if not is_eager and not around.empty and dict(around.shape) != dict(options.user_mesh.shape):
        raise InputError(
            "Under jit, mesh= must be the mesh that is set",
            given=f"mesh={options.user_mesh} inside jax.set_mesh({around})",
            remedy="Pass the mesh that is set, or call it outside of jax.set_mesh.",
        )
    taken = [name for name in options.axes if name in around.manual_axes]
    if taken:
        raise InputError(
            "mesh= is for gradients outside of shard_map",
            given=f"a call inside a shard_map over {', '.join(map(repr, taken))}",
            remedy="Leave mesh out there and sum the gradients yourself, or call it outside of the shard_map.",
        )
