"""The problem that one call poses: its loss, its arguments and its mesh. Strategies are different ways to solve it.

`Problem` traces the loss, and knows where its arrays are and how many examples a device has. `Gradient` (in
`gradients/computation.py`) and `ExampleGradient` (in `per_example/computation.py`) add what is computed. The planner
works with any of them.
"""

import abc
import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from anybatch.call import placement
from anybatch.call.arguments import Arguments
from anybatch.call.loss import TracedLoss, trace_loss
from anybatch.call.options import Options
from anybatch.jaxprs import avals
from anybatch.mesh.call_shardings import CallShardings, groups_of
from anybatch.mesh.executor import Executor
from anybatch.planning.strategy import Computation, Route, Strategy
from anybatch.reading import blocks

# A value needs no blocks if it takes less than this part of the memory. Blocks take about these parts of it.
SMALL_SHARE = 64
BLOCK_SHARES = (16, 128)

# The chunks of a batch on the host that are on the device at any time take at most this part of the memory.
CHUNK_SHARE = 8


class Problem(abc.ABC):
    """The loss, the arguments and the mesh of one call."""

    def __init__(self, fun: Callable[..., Any], options: Options, arguments: Arguments) -> None:
        self.examples = arguments.num_examples
        self.shardings = None if options.mesh_options is None else CallShardings(options.mesh_options, arguments)
        self.options = options
        self.arguments = arguments if self.shardings is None else self.shardings.arguments
        self._traced: dict[int, tuple[TracedLoss, Any]] = {}  # by the number of examples
        self._fun = fun

    def trace(self, num_examples: int) -> tuple[TracedLoss, Any]:
        """The loss for this number of examples, and the arrays that it closes over."""
        # functools.cache on a method would make a reference cycle, and keep the batch in memory until it is collected.
        if num_examples not in self._traced:
            self._traced[num_examples] = self._trace_loss(num_examples)
        return self._traced[num_examples]

    def _trace_loss(self, num_examples: int) -> tuple[TracedLoss, Any]:
        return self._traced_at(num_examples)

    def _traced_at(
        self, number: int | None, failed: Callable[[Exception], None] = lambda error: None
    ) -> tuple[TracedLoss, Any]:
        """The arguments and results are those of `trace_loss`."""
        options = self.options
        how: dict[str, Any] = {name: getattr(options, name) for name in ("weighted", "has_aux", "maps")}
        how["failed"] = failed
        if self.shardings is None:
            return trace_loss(self._fun, self.arguments, number, **how)
        with self.shardings.watched():
            on_mesh = (self.shardings.mesh, self.shardings.options.axes)
            traced, consts = trace_loss(self._fun, self.arguments, number, **how, on_mesh=on_mesh)
        return traced, self.shardings.placed(consts)

    def context(self) -> Any:
        """The context in which the gradient must be traced, compiled and run."""
        return contextlib.nullcontext() if self.shardings is None else self.shardings.context()

    @property
    def max_microbatch_size(self) -> int:
        """The largest possible microbatch: all examples; on a mesh, the largest number of examples on a device."""
        return self.examples if self.shardings is None else max(1, -(-self.examples // self.num_batch_shards))

    @property
    def loss(self) -> TracedLoss:
        return self.trace(self.examples)[0]

    # What is computed, and how.

    @abc.abstractmethod
    def route(self, strategy: Strategy) -> Route:
        """What a strategy does with the batch."""

    @abc.abstractmethod
    def computation(self, strategy: Strategy) -> Computation:
        """The function that a strategy compiles and runs, and its arrays."""

    @property
    @abc.abstractmethod
    def reduce_modes(self) -> tuple[str, ...]:
        """The choices for `Variant.reduce`, the one that sends the fewest bytes first."""

    @property
    def methods(self) -> tuple[str | None, ...]:
        """The choices for `Variant.method`, the likely fastest first. Only per-example gradients have any."""
        return (None,)

    def block_sizes(self, allowed: int | None) -> tuple[int | None, ...]:
        """The choices for `Variant.block_size` within a budget, the likely fastest first."""
        if self.options.block_size != "auto":
            return (self.options.block_size,)
        # Values that take a small part of the memory need no blocks, and looking for them takes time.
        least = 0 if allowed is None else allowed // SMALL_SHARE
        if allowed is None or self.loss.traced.has_effects or self._largest_value < least:
            return (None,)
        wide = [value for value in self._wide_values(least) if value.axis is not None]
        if not wide:
            return (None,)
        largest = max(wide, key=lambda value: value.bytes)
        row = max(1, largest.bytes // largest.num_rows)
        sizes = [min(allowed // share // row, largest.num_rows // 2) for share in BLOCK_SHARES]
        return (None, *dict.fromkeys(1 << (size.bit_length() - 1) for size in sizes if size > 0))

    @property
    def _largest_value(self) -> int:
        """The bytes of the largest value that is computed at once. Here, of all that the loss computes from data."""
        loss = self.loss
        roles = blocks.Roles.of_loss(loss).after([*loss.traced.inner, *loss.const_types])
        return blocks.largest_value(loss.traced.jaxpr, roles.of_data)

    def _wide_values(self, least: int) -> list[blocks.WideValue]:
        """The values of at least so many bytes that dwarf what they are computed from. Here, those of one example."""
        loss, _ = self.trace(min(self.examples, 1))
        roles = blocks.Roles.of_loss(loss).after([*loss.traced.inner, *loss.const_types])
        program = blocks.BlockedProgram(loss.traced.jaxpr, roles, 1, range(loss.num_heads))
        return [value for value in program.wide_values(per_example=True) if value.bytes >= least]

    @property
    def checked_reading(self) -> Any:
        """The reading of the loss, refused with an error where the options say so; None for single examples."""
        return None

    @property
    def is_streamed(self) -> bool:
        """True if the batch stays on the host, and is copied to the device in chunks."""
        return False

    @property
    def is_coupled(self) -> bool:
        """True if every strategy computes a part of the loss from the full batch."""
        return False

    @property
    def draws_per_microbatch(self) -> bool:
        """True if random numbers may depend on the microbatch size."""
        return bool(self.arguments.arrays.keys)

    def bytes_written(self, count: Callable[[Any], int]) -> int:
        """The bytes that the loss of the full batch writes. `count` counts those of a jaxpr."""
        return count(self.loss.traced.jaxpr)

    @property
    def noun(self) -> str:
        """What is computed, as a plan calls it."""
        return "gradient"

    def note(self, block_size: int | None) -> str:
        """A remark that a plan prints; may be empty. `block_size` is that of the chosen strategy."""
        return ""

    @property
    def identity(self) -> Sequence[Any]:
        """What bytes and times depend on, besides the loss, its arguments and the options: part of a plan's key."""
        return ()

    # The loss, traced, and its arrays.

    @property
    def ignores_batch(self) -> bool:
        """True if the traced loss does not depend on any array of the batch."""
        for loss, _ in self._traced.values():
            first, count = len(loss.types.wrt), len(loss.types.batch)
            if any(any(loss.traced.inputs_used_by(head)[first : first + count]) for head in range(loss.num_heads)):
                return False
        return bool(self._traced)

    @functools.cached_property
    def vmap_copies(self) -> int:
        """How many gradients are computed at once: one, or as many as the surrounding `vmap`s batch."""
        _, consts = self.trace(self.examples)
        return avals.vmapped_copies(*consts, *jax.tree.leaves(self.arguments.arrays))

    @property
    def devices(self) -> list[Any]:
        """The local devices that it runs on, as far as its arrays show them."""
        if self.shardings is not None:
            return list(self.shardings.mesh.local_devices)
        return placement.devices_of(jax.tree.leaves(self.arguments.arrays))

    @property
    def num_batch_shards(self) -> int:
        """The number of shards of the batch on the mesh of the options; 1 without a mesh."""
        return 1 if self.shardings is None else self.shardings.options.devices

    def local_bytes(self, role: str) -> int:
        """The bytes of the arguments of a role on one device."""
        leaves = getattr(self.arguments.arrays, role)
        known = sum(map(placement.local_bytes, leaves))
        if self.shardings is None or self.shardings.is_eager:
            return known
        if role == "batch":
            return -(-known // self.num_batch_shards)
        return self.shardings.shard_bytes(leaves) if role == "wrt" else known

    @property
    def argument_bytes(self) -> int:
        """The bytes of all arguments on one device."""
        return sum(map(self.local_bytes, self.arguments.arrays._fields))

    @functools.cached_property
    def size_multiple(self) -> int:
        """What microbatch sizes should be a multiple of: without a mesh, the number of shards of the batch."""
        if self.shardings is not None:
            return 1
        shards = max((placement.num_row_shards(leaf) for leaf in self.arguments.arrays.batch), default=1)
        return shards if self.examples % shards == 0 and self.examples else 1

    def is_full_batch(self, strategy: Strategy) -> bool:
        """True if a strategy computes all examples at once."""
        return strategy.microbatch_size is None or self.max_microbatch_size <= strategy.microbatch_size

    def size(self, strategy: Strategy) -> int:
        """The number of examples of a complete microbatch."""
        largest, size = self.max_microbatch_size, strategy.microbatch_size
        return largest if size is None else max(1, min(largest, size))

    def executor(self, strategy: Strategy) -> Executor:
        num_groups = None
        if self.options.reproducible:
            assert strategy.microbatch_size is not None
            num_groups = groups_of(self.examples, strategy.microbatch_size, self.num_batch_shards)
        if self.shardings is not None:
            return self.shardings.executor(self.examples, reduce=strategy.reduce, num_groups=num_groups)
        runs = 1 if self.options.reproducible else self._runs(self.size(strategy))
        return Executor(self.examples, num_groups, runs)

    def _runs(self, size: int) -> int:
        """The number of slices that a microbatch consists of, so that a sharded batch is not moved between devices.

        Under `jit`, the number of devices of an array is not always known, so the number is that of all devices; it
        serves every number of devices that divides it. Outside `jit` it is the same, so that both compute the same
        numbers. It is 1 for a loss with effects. It is also 1 for a declared loss whose batch is not known to be
        sharded, or whose microbatches have keys or aux leaves that depend on how the batch is divided.
        """
        batch, options = self.arguments.arrays.batch, self.options
        mesh = placement.mesh_of(batch)
        is_declared = options.reduction != "infer"
        if is_declared and (mesh.empty or self.arguments.arrays.keys or options.aux_of_microbatches):
            return 1
        if not is_declared and self.loss.traced.has_effects:
            return 1
        if mesh.manual_axes or mesh.explicit_axes:  # inside shard_map, or the rows have an explicit sharding
            return 1
        devices = jax.device_count() if mesh.empty else mesh.size
        return math.gcd(devices, size, self.examples)
