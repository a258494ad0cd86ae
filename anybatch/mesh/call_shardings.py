"""The arrays of one call on a mesh: where they go, and how what comes back is spread."""

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
from anybatch.call.options import MeshOptions, is_spec
from anybatch.call.programs import can_run
from anybatch.errors import InputError
from anybatch.jaxprs import avals
from anybatch.mesh.fixed_order import number_of_groups
from anybatch.mesh.sharded import Spread


class CallShardings:
    """The mesh of one call, and its arguments on it.

    Outside `jit`, arrays are put where they belong: examples over the devices, all else as it is spread already, or
    whole on every device. Inside, that is left to the program.
    """

    def __init__(self, over: MeshOptions, arguments: Arguments) -> None:
        self.over, self.given = over, arguments
        self.mesh = over.mesh
        self.is_eager = can_run(*jax.tree.leaves(arguments.arrays))
        self.specs = self._specs()
        _check_context(over, self.is_eager)

    def _specs(self) -> list[Any]:
        """How each leaf of what is differentiated is spread over the mesh; None where nothing says so."""
        wrt = self.given.arrays.wrt
        found = [placement.spec_on(leaf, self.mesh) for leaf in wrt]
        if self.over.param_specs is None:
            return found
        tree = self.given.as_gradient(list(range(len(wrt))))
        try:
            told = jax.tree.map(
                lambda spec, below: [spec] * len(jax.tree.leaves(below)), self.over.param_specs, tree, is_leaf=is_spec
            )
        except ValueError:
            raise InputError(
                "param_specs must be a PartitionSpec, or a tree of them that is a prefix of the gradient",
                given=f"param_specs={self.over.param_specs!r} for {jax.tree.structure(tree)}",
                remedy="Give each parameter a jax.sharding.PartitionSpec, or None for one that is whole everywhere.",
            ) from None
        flat = jax.tree.leaves(told, is_leaf=is_spec)
        order = jax.tree.leaves(tree)
        by_leaf = dict(zip(order, flat, strict=True))
        specs = [by_leaf[position] for position in range(len(wrt))]
        specs = [spec.spec if isinstance(spec, NamedSharding) else spec for spec in specs]
        for leaf, spec in zip((leaf for leaf in self.given.leaves if leaf.role == "wrt"), specs, strict=True):
            self._check_fits(leaf.name, np.shape(leaf.value), spec)
        return specs

    def _check_fits(self, name: str, shape: tuple[int, ...], spec: Any) -> None:
        parts = [math.prod(self.mesh.shape[axis] for axis in _names(entry)) for entry in spec or ()]
        if len(parts) > len(shape) or any(size % shard for size, shard in zip(shape, parts, strict=False)):
            raise InputError(
                "param_specs must cut every parameter into equal parts",
                given=f"{spec} for {name} of shape {shape}, on a mesh of {dict(self.mesh.shape)}",
                remedy="Spread another dimension of it, or none: None.",
            )

    @functools.cached_property
    def arguments(self) -> Arguments:
        """The arguments, where they belong."""
        if not self.is_eager:
            return self.given
        specs = iter(self.specs)
        leaves = []
        for leaf in self.given.leaves:
            if leaf.role == "wrt":
                value = self._put(leaf.value, next(specs) or PartitionSpec())
            elif leaf.role == "batch":
                value = self.put_examples(leaf.value)
            else:
                value = self._put(leaf.value, PartitionSpec())
            leaves.append(leaf._replace(value=value))
        return dataclasses.replace(self.given, leaves=leaves)

    def context(self) -> Any:
        """Within a call outside `jit`, the mesh around is this one, if there is any."""
        around = jax.sharding.get_abstract_mesh()
        if not self.is_eager or around.empty or around == self.mesh.abstract_mesh:
            return contextlib.nullcontext()
        return jax.set_mesh(self.mesh)

    def without_types(self, fun: Any, num_aux: int) -> Any:
        """A function of arrays whose types may say how they are spread, computed as if they did not say."""
        out = [PartitionSpec()] * (1 + num_aux) + [spec or PartitionSpec() for spec in self.specs]
        return self.with_specs(fun, out)

    def with_specs(self, fun: Any, out: list[Any]) -> Any:
        """The same, with how each of its results is spread."""
        axes = self.over.user_mesh.axis_names

        def run(*flat: Any) -> list[Any]:
            meshes = [jax.typeof(leaf).sharding.mesh for leaf in flat]
            around = next((mesh for mesh in meshes if not mesh.empty), jax.sharding.get_abstract_mesh())
            if not around.explicit_axes:
                return fun(*flat)
            with jax.sharding.use_abstract_mesh(around):
                return jax.sharding.auto_axes(lambda *flat: fun(*flat), axes=axes, out_sharding=out)(*flat)

        return run

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Explains what a loss must not do on a mesh."""
        try:
            yield
        except NameError as error:
            if "axis name" not in str(error):
                raise
            raise InputError(
                "With mesh= the loss must be that of the whole batch, without collectives over the mesh",
                given=f"a loss that raises {type(error).__name__}: {error}",
                remedy="Leave lax.psum, lax.pmean and the like out of it: the gradients are added up for you, once.",
            ) from error

    def placed(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Arrays that every device sees whole."""
        return [self._put(array, PartitionSpec()) for array in arrays] if self.is_eager else arrays

    def _put(self, leaf: Any, spec: Any) -> Any:
        if isinstance(leaf, jax.core.Tracer) or not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
            return leaf  # a Python number is a constant of the program
        own = placement.spec_on(leaf, self.mesh) if placement.is_placed(leaf) else None
        return placement.put(leaf, self.mesh, spec if own is None else own)

    def put_examples(self, leaf: Any) -> Any:
        """An array with a row for each example, where the examples are."""
        spread = self.spread(self.given.num_examples)
        by_examples = PartitionSpec(self.over.axes)
        own = placement.spec_on(leaf, self.mesh) if placement.is_placed(leaf) else None
        if own is not None and (own[:1] == by_examples or len(spread.counts) == 1):
            return placement.put(leaf, self.mesh, own)
        if len(spread.counts) == 2:
            leaf = _laid_out(leaf, spread)
        return placement.put(leaf, self.mesh, by_examples)

    def spread(self, examples: int, *, reduce: str = "once", num_groups: int | None = None) -> Spread:
        """How so many examples are spread over the devices."""
        spread = Spread(self.mesh, self.over.axes, examples, self.specs, reduce, num_groups)
        if reduce == "each" and len(spread.counts) == 2:
            raise InputError(
                'With reduce="each" every device needs the same number of examples',
                given=f"{examples} examples for {spread.devices} devices",
                remedy=f"Pass a batch of {examples // spread.devices * spread.devices} or "
                f'{spread.share * spread.devices} examples, or reduce="once".',
            )
        return spread

    def takes_one_more(self, examples: int) -> bool:
        """Whether uneven examples are taken as an even number of them, and one more."""
        return self.mesh.size > self.over.devices and examples % self.over.devices != 0

    def share(self, examples: int) -> int:
        """The most examples that a device has."""
        return max(1, self.spread(examples).share)

    @property
    def description(self) -> list[str]:
        """All of it that decides about bytes and times."""
        return [str(self.over), str(self.specs)]

    @property
    def is_sharded(self) -> bool:
        """Whether a parameter is spread over the devices that the examples are spread over."""
        names = {name for spec in self.specs for entry in spec or () for name in _names(entry)}
        return bool(names & set(self.over.axes))

    def placed_types(self, leaves: Sequence[Any]) -> list[Any]:
        """The types of arrays that have no values yet, with where those that are differentiated will be."""
        known = {id(leaf): spec for leaf, spec in zip(self.given.arrays.wrt, self.specs, strict=True)}

        def type_of(leaf: Any) -> Any:
            aval, spec = avals.bare(leaf), known.get(id(leaf))
            sharding = None if spec is None else NamedSharding(self.mesh, spec)
            return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding)

        return [type_of(leaf) for leaf in leaves]

    def shard_bytes(self, wrt: Sequence[Any]) -> int:
        """The bytes on one device of what is differentiated, as it is said to be spread."""

        def parts(spec: Any) -> int:
            return math.prod(self.mesh.shape[name] for entry in spec or () for name in _names(entry))

        return sum(placement.local_bytes(leaf) // parts(spec) for leaf, spec in zip(wrt, self.specs, strict=True))

    def as_parameters(self, grads: Sequence[Any]) -> list[Any]:
        """Gradients, spread as what they are gradients of."""
        return [
            grad if spec is None else jax.lax.with_sharding_constraint(grad, NamedSharding(self.mesh, spec))
            for grad, spec in zip(grads, self.specs, strict=True)
        ]

    def returned(self, outputs: Sequence[Any]) -> list[Any]:
        """Results of a call outside `jit`, on the mesh that was given."""
        if not self.is_eager or not self.over.is_explicit:
            return list(outputs)
        return [
            jax.device_put(leaf, NamedSharding(self.over.user_mesh, leaf.sharding.spec))
            if isinstance(leaf.sharding, NamedSharding)
            else leaf
            for leaf in outputs
        ]


def groups_of(examples: int, size: int, devices: int) -> int:
    """The number of groups for sums in a fixed order.

    Raises:
      InputError: where devices would have parts of a microbatch, or of a group.
    """
    microbatches, rest = divmod(examples, size)
    number = number_of_groups(microbatches) if microbatches else 1
    if not rest and microbatches and number % devices == 0:
        return number
    better = [each for each in range(1, examples // devices + 1) if number_of_groups(examples // each) % devices == 0]
    better = [each for each in better if examples % each == 0]
    advice = f"For {examples} examples: microbatch_size={max(better)}" if better else "Use 2, 4, 8, ... devices"
    raise InputError(
        "reproducible=True needs as many microbatches on each of 1, 2, 4, ... devices",
        given=f"{examples} examples, microbatch_size={size} and {devices} device{'s' if devices > 1 else ''}",
        remedy=f"{advice}; or a batch whose size is a multiple of {size * devices}.",
    )


def _laid_out(leaf: Any, spread: Spread) -> Any:
    """Uneven examples with as many rows for each device: those that have one less get a neighbour's, and ignore it."""
    most = spread.share
    firsts = [device * most - max(0, device - spread.with_more) for device in range(spread.devices)]
    rows = np.minimum(np.asarray([first + row for first in firsts for row in range(most)]), spread.examples - 1)
    host = np.asarray(leaf) if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended) else leaf
    return host[rows]


def _names(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _check_context(over: MeshOptions, is_eager: bool) -> None:
    """Inside the user's own `shard_map` over these axes there is nothing left to spread."""
    around = jax.sharding.get_abstract_mesh()
    if not is_eager and not around.empty and dict(around.shape) != dict(over.user_mesh.shape):
        raise InputError(
            "Under jit, mesh= must be the mesh that is set",
            given=f"mesh={over.user_mesh} inside jax.set_mesh({around})",
            remedy="Pass the mesh that is set, or call it outside of jax.set_mesh.",
        )
    taken = [name for name in over.axes if name in around.manual_axes]
    if taken:
        raise InputError(
            "mesh= is for gradients outside of shard_map",
            given=f"a call inside a shard_map over {', '.join(map(repr, taken))}",
            remedy="Leave mesh out there and add the gradients up yourself, or call it outside of the shard_map.",
        )
