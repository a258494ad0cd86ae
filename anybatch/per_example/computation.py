"""The computation of one per-example call, as a function of flat arrays, for each strategy.

`ExampleGradient` traces the loss of one example, refuses what would make examples depend on each other, and builds the
`ExamplePass` that a strategy runs.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anybatch.call.arguments import Arguments
from anybatch.call.checks import describe
from anybatch.call.loss import TracedLoss
from anybatch.call.memory import readable
from anybatch.errors import InputError
from anybatch.gradients import head_budget
from anybatch.jaxprs import avals, tracing
from anybatch.per_example.example_pass import ExamplePass, varying_as
from anybatch.per_example.forms import kept_bytes
from anybatch.per_example.kept_gradients import ExampleProgram
from anybatch.per_example.options import PerExampleOptions, Wants
from anybatch.planning.problem import Problem
from anybatch.planning.strategy import Computation, Route, Strategy
from anybatch.reading import blocks
from anybatch.reading.reader import warn_of_failed_rule
from anybatch.reading.states import RuleFailed


class PerExample(NamedTuple):
    """Results for every example, along axis 0. A field is None if it was not asked for."""

    values: Any = None  # the losses
    norms: Any = None  # of the gradients, before they are clipped
    aux: Any = None


class ExampleGradient(Problem):
    """The per-example gradients, norms or clipped sum of one call, to be computed with any strategy."""

    options: PerExampleOptions
    # Each example is computed by itself, and draws its own random numbers, whatever the microbatch size.
    checked_reading = None
    is_coupled = False
    draws_per_microbatch = False
    reduce_modes = ("once",)  # gradients are added up over a mesh once, after the last microbatch

    def __init__(
        self, fun: Callable[..., Any], options: PerExampleOptions, arguments: Arguments, is_padding: Any | None
    ) -> None:
        arguments.refuse_unnamed_rows("example")
        super().__init__(fun, options, _varying(arguments))
        self._programs: dict[tuple[str, int | None], ExampleProgram] = {}
        self._in_blocks: dict[int | None, tracing.Traced | None] = {None: None}
        self.is_padding = _check_padding(is_padding, self.examples)
        _check_keys(arguments)

    def trace(self, num_examples: int) -> tuple[TracedLoss, Any]:
        """The loss of one example, whatever the number of examples, and the arrays that it closes over."""
        return super().trace(1)

    def _trace_loss(self, num_examples: int) -> tuple[TracedLoss, Any]:
        if not self.options.keep_batch_dim:
            traced = self._traced_at(None, self._say_if_written_for_batches)
        else:
            traced = self._traced_at(1)
            self._refuse_if_coupled()
        _check_keys_of_models(self.arguments, traced[0])
        return traced

    def _refuse_if_coupled(self) -> None:
        """Refuses a loss of batches that looks across examples. It is traced with the full batch and read.

        A loss that cannot be traced with more than one example is taken as it is, since there is nothing to read.
        """
        errors: list[Exception] = []  # of the loss itself
        try:
            loss, consts = self._traced_at(max(2, self.examples), errors.append)
        except Exception:
            if errors:
                return
            raise
        head_budget.check_examples_separate(loss, consts, fresh_draws=bool(self.arguments.arrays.keys))

    def _say_if_written_for_batches(self, error: Exception) -> None:
        """Raises a clearer error if a loss fails for one example and works for a batch of one."""
        try:
            self._traced_at(1)
        except Exception:
            return
        names = [leaf.name for leaf in self.arguments.leaves if leaf.role == "batch"]
        types = self.arguments.types(None).batch
        shapes = [f"{name} = {describe(one)}" for name, one in zip(names, types, strict=True)]
        raise InputError(
            "Without keep_batch_dim the loss must take one example, without the batch axis",
            given="\n".join([*shapes, f"and a loss that raises {type(error).__name__}: {error}"]),
            remedy="If it is written for batches, pass keep_batch_dim=True: it then gets batches of one example.",
        ) from error

    def bytes_written(self, count: Callable[[Any], int]) -> int:
        """The bytes that the losses of all examples and their gradients write."""
        gradient = sum(leaf.dtype.itemsize * leaf.size for leaf in map(jnp.asarray, self.arguments.arrays.wrt))
        return self.examples * (count(self.loss.traced.jaxpr) + gradient)

    @property
    def methods(self) -> tuple[str | None, ...]:
        """The methods that may compute the gradients, "factored" or "vmap", the preferred one first."""
        if self.options.transform is not None or self.options.wants is Wants.GRADIENTS:
            return ("vmap",)
        if self.options.method != "auto":
            return (self.options.method,)
        return ("vmap",) if self.loss.traced.has_effects else ("factored", "vmap")

    @property
    def program(self) -> ExampleProgram:
        """The program of one example's gradient, with the preferred method, and without blocks unless all have them."""
        return self._program(None, self.options.fixed_block_size)

    def _program(self, method: str | None, block_size: int | None) -> ExampleProgram:
        method = method or self.methods[0]
        assert method is not None
        key = method, block_size
        if key not in self._programs:
            # Devices that share a model run its collectives together, so none may loop more often than another. With
            # factors, doubtful norms are recomputed, which happens as often as the data of a device need it.
            prefer = "cost" if self._has_no_other_axes else "direct"
            transform = None if self.options.transform is None else self._flat_transform
            how = (prefer, self.options.strict, transform, self._loss_in_blocks(block_size))
            self._programs[key] = ExampleProgram(self.loss, method, *how)
        return self._programs[key]

    def _loss_in_blocks(self, block_size: int | None) -> tracing.Traced | None:
        """The loss with its big values in blocks, which takes its cotangent as a further argument; None without."""
        if block_size not in self._in_blocks:
            loss = self.loss
            assert block_size is not None
            try:
                found, _ = blocks.in_blocks(loss.traced, loss.const_types, blocks.Roles.of_loss(loss), block_size, [0])
                self._in_blocks[block_size] = found
            except RuleFailed as failure:
                warn_of_failed_rule(failure.blame)
                self._in_blocks[block_size] = None
        return self._in_blocks[block_size]

    @property
    def noun(self) -> str:
        """The name of the result, for plans and reports."""
        words = {Wants.SUM: "clipped gradient", Wants.NORMS: "gradient norms", Wants.GRADIENTS: "per-example gradients"}
        return words[self.options.wants]

    @property
    def identity(self) -> Sequence[Any]:
        """The options that change bytes and times: part of the key of a stored plan."""
        options = self.options
        transform = None
        if options.transform is not None:
            types = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in self.loss.types.wrt]
            transform = str(jax.make_jaxpr(self._flat_transform)(types))
        names = ("keep_batch_dim", "strict", "nan_safe", "return_values", "return_norms", "per_leaf")
        flags = [getattr(options, name) for name in names]
        flags += [options.normalize_by == 1, self.is_padding is not None]
        return [options.wants.value, options.method, flags, transform]

    def note(self, block_size: int | None) -> str:
        """A sentence that says what is kept of every example instead of its gradient; empty if nothing is."""
        program = self._program(None, block_size)
        if program.method == "vmap":
            return ""
        kinds = {
            "gram": "the factors of {} parameters",
            "direct": "the gradients of {}",
            "rows": "rows of {} tables",
            "direct and rows": "the gradients and rows of {} tables",
        }
        counts = {kind: sum(form.kind == kind for form in program.forms) for kind in kinds}
        kept = [text.format(counts[kind]) for kind, text in kinds.items() if counts[kind]]
        total = sum(kept_bytes(form) for form in program.forms)
        return f"Factored, it keeps of every example {', '.join(kept)}: {readable(total)} at most."

    def route(self, strategy: Strategy) -> Route:
        return Route.VMAP if (strategy.method or self.methods[0]) == "vmap" else Route.FACTORED

    def computation(self, strategy: Strategy) -> Computation:
        """The function to compile and run with a strategy, and its arguments.

        Raises:
          InputError: for a loss that the strategy cannot compute.
        """
        options, loss, example_pass = self.options, self.loss, self._pass(strategy)
        consts = self.trace(self.examples)[1]
        inputs = (consts, self.arguments.arrays, self._padding(), options.clip_norm, options.normalize_by)
        leaves, tree = jax.tree.flatten(inputs)
        executor = self.executor(strategy)

        def compute(*flat: Any) -> list[Any]:
            consts, arrays, padding, clip_norm, normalize_by = jax.tree.unflatten(tree, flat)
            sums, rows = example_pass(executor, consts, arrays, clip_norm, padding)
            if sums:
                types = [*example_pass.program.gradient_types, loss.out_avals[0]]
                if options.normalize_by != 1:  # dividing by 1 would be one more pass over all sums
                    sums = [total / jnp.asarray(normalize_by, total.dtype) for total in sums]
                sums = [total.astype(like.dtype) for total, like in zip(sums, types, strict=True)]
                if self.shardings is not None and options.transform is None:
                    sums = [*self.shardings.as_parameters(sums[:-1]), sums[-1]]
            return [*sums, *rows]

        fun: Any = compute
        if self.shardings is not None:
            fun = self.shardings.with_specs(compute, self._specs(example_pass))
        return Computation(fun, leaves, loss.traced.has_effects)

    def _specs(self, example_pass: ExamplePass) -> list[Any]:
        """The shardings of the outputs: sums as their parameters, and rows over the axes of the examples."""
        assert self.shardings is not None
        by_examples, replicated = jax.sharding.PartitionSpec(self.shardings.options.axes), jax.sharding.PartitionSpec()
        if self.examples % self.shardings.options.devices:
            by_examples = replicated
        sums: list[Any] = []
        if example_pass.sums:
            types = example_pass.program.gradient_types
            known = self.shardings.specs if self.options.transform is None else [None] * len(types)
            sums = [*(spec or replicated for spec in known), replicated]
        return [*sums, *[by_examples] * example_pass.num_rows]

    def outcome(self, strategy: Strategy, outputs: list[Any]) -> tuple[Any, Any, PerExample]:
        """The gradients, norms or clipped sum; the sum of the losses; and what was asked for of every example."""
        options, example_pass, num_outputs = self.options, self._pass(strategy), len(self.loss.out_avals)
        flat = outputs if self.shardings is None else self.shardings.returned(outputs)
        sums, rows = flat[: -example_pass.num_rows], flat[-example_pass.num_rows :]
        aux, kept = rows[1:num_outputs], rows[num_outputs:]
        norms: Any = None
        if options.keeps_norms:
            norms = self._in_tree(kept[: example_pass.num_norms]) if options.per_leaf else kept[0]
        *totals, value = sums or [None]
        result = norms if options.wants is Wants.NORMS else self._in_tree(totals or kept[example_pass.num_norms :])
        examples = PerExample(
            values=rows[0] if options.return_values else None,
            norms=norms if options.return_norms else None,
            aux=jax.tree.unflatten(self.loss.aux_tree, aux) if options.has_aux else None,
        )
        return result, value, examples

    def _in_tree(self, leaves: list[Any]) -> Any:
        if self.options.transform is not None:
            return jax.tree.unflatten(self._transform_tree, leaves)
        return self.arguments.as_gradient(leaves)

    def _pass(self, strategy: Strategy) -> ExamplePass:
        skips_padding = not self.loss.traced.has_effects and self._has_no_other_axes
        program = self._program(strategy.method, strategy.block_size)
        return ExamplePass(program, self.options, self.size(strategy), skips_padding)

    def _padding(self) -> Any:
        if self.is_padding is None or self.shardings is None or not self.shardings.is_eager:
            return self.is_padding
        return self.shardings.put_examples(jnp.asarray(self.is_padding))

    @property
    def _has_no_other_axes(self) -> bool:
        """True if no mesh axis belongs to the model, so that devices run no collectives until the last microbatch."""
        return self.shardings is None or self.shardings.mesh.size == self.shardings.options.devices

    def _flat_transform(self, grads: list[Any]) -> list[Any]:
        assert self.options.transform is not None
        result = self.options.transform(self.arguments.as_gradient(grads))
        self._transform_tree = jax.tree.structure(result)
        leaves = jax.tree.leaves(result)
        for leaf in leaves:
            if not hasattr(leaf, "dtype") or not jax.dtypes.issubdtype(leaf.dtype, jnp.inexact):
                raise InputError(
                    "transform must return arrays of floating-point numbers",
                    given=describe(leaf),
                    remedy="Cast its result, e.g. x.astype(jnp.float32).",
                )
        return leaves


def _check_padding(is_padding: Any, examples: int) -> Any:
    if is_padding is None:
        return None
    shape, dtype = jnp.shape(is_padding), jax.dtypes.result_type(is_padding)
    if shape != (examples,) or dtype != jnp.bool_:
        raise InputError(
            "is_padding must have one boolean for each example",
            given=f"is_padding = {describe(is_padding)} for {examples} examples",
            remedy=f"Pass booleans of shape ({examples},), e.g. is_padding=jnp.arange({examples}) >= number.",
        )
    return jnp.asarray(is_padding)


def _check_keys(arguments: Arguments) -> None:
    """Refuses keys that would give all examples the same random numbers, or numbers that depend on other examples."""
    for leaf in arguments.leaves:
        if leaf.role == "keys" and not _draws_for_each(leaf.value):
            raise InputError(
                "Keys must belong to a generator whose numbers for one key do not depend on the other keys under vmap",
                given=f"{leaf.name} = {describe(leaf.value)}",
                remedy="Pass a key of the default generator, jax.random.key(seed, impl='threefry2x32'). With others, "
                "the numbers of an example would depend on the examples that it is computed together with.",
            )
        if leaf.role == "rest" and _has_keys(leaf.value) and not arguments.is_of_model(leaf):
            _refuse_key(
                leaf,
                f"Pass rng_argnums={leaf.slot}"
                if isinstance(leaf.slot, int)
                else "Pass the key by position, and name that position in rng_argnums",
            )


def _check_keys_of_models(arguments: Arguments, loss: TracedLoss) -> None:
    """Refuses keys inside a model that the loss draws from. A Dropout that is switched off has one and is allowed."""
    rest = arguments.arrays_of("rest")
    if not any(_has_keys(leaf.value) and arguments.is_of_model(leaf) for leaf in rest):
        return
    outputs = [loss.traced.inputs_used_by(output) for output in range(len(loss.out_avals))]
    for leaf, *used in zip(rest, *(inputs[len(inputs) - len(rest) :] for inputs in outputs), strict=True):
        if _has_keys(leaf.value) and any(used):
            _refuse_key(leaf, "Let the loss draw from a key that is an argument, e.g. rng_argnums=2")


def _has_keys(value: Any) -> bool:
    return hasattr(value, "dtype") and avals.has_keys(value)


def _refuse_key(leaf: Any, remedy: str) -> None:
    raise InputError(
        "PRNG keys must be named in rng_argnums, so that every example draws its own numbers",
        given=f"{leaf.name} = {describe(leaf.value)}",
        remedy=f"{remedy}. To give all examples the same random numbers, close over the key instead.",
    )


def _draws_for_each(key: Any) -> bool:
    if avals.has_keys(key):
        return avals.is_threefry(key.dtype)
    config: Any = jax.config
    return config.jax_default_prng_impl == "threefry2x32"


def _varying(arguments: Arguments) -> Arguments:
    """The arguments, with parameters that vary over the same axes as the batch inside the user's `shard_map`.

    Otherwise JAX would add up the gradients of different devices' examples before they are clipped.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return arguments
    batch = arguments.arrays.batch
    leaves = [
        leaf._replace(value=varying_as(leaf.value, batch)) if leaf.role == "wrt" else leaf for leaf in arguments.leaves
    ]
    return dataclasses.replace(arguments, leaves=leaves)
