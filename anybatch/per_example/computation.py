"""Per-example gradients as a function of flat arrays, for each of the ways to compute them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from anybatch.call.arguments import Arguments
from anybatch.call.checks import describe
from anybatch.call.loss import TracedLoss, trace_loss
from anybatch.call.memory import readable
from anybatch.errors import InputError
from anybatch.gradients import head_budget
from anybatch.gradients.computation import Gradient
from anybatch.jaxprs import avals
from anybatch.per_example.choice import kept_bytes
from anybatch.per_example.each_example import Asked, EachExample, Inputs
from anybatch.per_example.options import PerExampleOptions, Wants
from anybatch.per_example.sums import ExampleProgram
from anybatch.planning.strategy import Computation, Route, Strategy
from anybatch.reading.report import Reading
from anybatch.reading.split import Split


class Results(NamedTuple):
    """What there is of a call: for each example along axis 0, or None where it was not asked for."""

    result: Any  # the gradients, the norms, or the clipped sum
    value: Any = None  # the sum of the losses
    values: Any = None
    norms: Any = None
    aux: Any = None


class ExampleGradient(Gradient):
    """The per-example gradients that one call asks for, to be computed at any microbatch size."""

    def __init__(
        self, fun: Callable[..., Any], options: PerExampleOptions, arguments: Arguments, is_padding: Any | None
    ) -> None:
        arguments.refuse_unnamed_rows("example")
        super().__init__(fun, options, _varying(arguments))
        self.own = options
        self._programs: dict[str, ExampleProgram] = {}
        self.is_padding = _check_padding(is_padding, self.examples)
        _check_keys(arguments)

    def _trace_loss(self, num_examples: int) -> tuple[TracedLoss, Any]:
        """The loss of one example, whatever the number."""
        if not self.own.keep_batch_dim:
            traced = self._traced_at(None, self._say_if_written_for_batches)
        else:
            traced = self._traced_at(1)
            self._refuse_if_coupled()
        _check_keys_of_models(self.arguments, traced[0])
        return traced

    def _traced_at(
        self, number: int | None, failed: Callable[[Exception], None] = lambda error: None
    ) -> tuple[TracedLoss, Any]:
        how: dict[str, Any] = {"weighted": False, "has_aux": self.options.has_aux, "failed": failed}
        if self.shardings is None:
            return trace_loss(self._fun, self.arguments, number, **how)
        with self.shardings.watched():
            on_mesh = (self.shardings.mesh, self.shardings.options.axes)
            traced, consts = trace_loss(self._fun, self.arguments, number, **how, on_mesh=on_mesh)
        return traced, self.shardings.placed(consts)

    def _refuse_if_coupled(self) -> None:
        """Refuses a loss of batches that looks across examples: it is read at the size of the batch.

        A loss that cannot be traced with more than one example is one of a batch of one, and there is nothing to read.
        """

        def give_up(error: Exception) -> None:
            raise _TakesOneExample from error

        try:
            loss, consts = self._traced_at(max(2, self.examples), give_up)
        except _TakesOneExample:
            return
        head_budget.check_examples_separate(loss, consts, fresh_draws=bool(self.arguments.arrays.keys))

    def _say_if_written_for_batches(self, error: Exception) -> None:
        """Raises an error that says more, where a loss fails for one example and does not for a batch of one."""
        try:
            self._traced_at(1)
        except Exception:
            return
        names = [leaf.name for leaf in self.arguments.leaves if leaf.role == "batch"]
        types = self.arguments.types(None).batch
        shapes = [f"{name} = {describe(one)}" for name, one in zip(names, types, strict=True)]
        raise InputError(
            "Without keep_batch_dim the loss must be that of one example, without the axis of the batch",
            given="\n".join([*shapes, f"and a loss that raises {type(error).__name__}: {error}"]),
            remedy="If it is written for batches, pass keep_batch_dim=True: it is then given batches of one example.",
        ) from error

    @property
    def draws_per_microbatch(self) -> bool:
        """Whether random numbers depend on the size of the microbatches: each example has its own."""
        return False

    def bytes_written(self, count: Callable[[Any], int]) -> int:
        """The bytes that the losses of all examples write, and their gradients."""
        gradient = sum(leaf.dtype.itemsize * leaf.size for leaf in map(jnp.asarray, self.arguments.arrays.wrt))
        return self.examples * (count(self.loss.traced.jaxpr) + gradient)

    @property
    def split(self) -> Split:
        raise AssertionError("Examples by themselves are not coupled")

    @property
    def checked_reading(self) -> Reading:
        raise AssertionError("Examples by themselves are not coupled")

    @property
    def is_coupled(self) -> bool:
        """False: each example is computed by itself."""
        return False

    @property
    def methods(self) -> tuple[str | None, ...]:
        """How gradients may be computed: "factored" or "vmap"."""
        if self.own.transform is not None or self.own.wants is Wants.GRADIENTS:
            return ("vmap",)
        if self.own.method != "auto":
            return (self.own.method,)
        return ("vmap",) if self.loss.traced.has_effects else ("factored", "vmap")

    @property
    def program(self) -> ExampleProgram:
        """The gradient of one example, as it is computed if nothing else is planned."""
        return self._program(None)

    def _program(self, method: str | None) -> ExampleProgram:
        method = method or self.methods[0]
        assert method is not None
        if method not in self._programs:
            # What devices of one model do together, they must do as often: nothing may depend on what is found.
            prefer = "cost" if self._has_no_other_axes else "direct"
            self._programs[method] = ExampleProgram(self.loss, method, prefer, self.own.strict)
        return self._programs[method]

    @property
    def noun(self) -> str:
        """What is computed, in words."""
        words = {
            Wants.SUM: "clipped gradient",
            Wants.NORMS: "gradient norms",
            Wants.GRADIENTS: "per-example gradients",
        }
        return words[self.own.wants]

    @property
    def identity(self) -> Sequence[Any]:
        """What decides about bytes and times, beside the loss and its arguments."""
        own = self.own
        transform = None
        if own.transform is not None:
            types = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in self.loss.types.wrt]
            transform = str(jax.make_jaxpr(self._flat_transform)(types))
        flags = [own.keep_batch_dim, own.strict, own.nan_safe, own.return_values, own.return_norms, own.per_leaf]
        return [own.wants.value, own.method, flags, own.normalize_by == 1, self.is_padding is not None, transform]

    @property
    def note(self) -> str:
        """What is kept of every example instead of its gradient."""
        program = self.program
        if program.method == "vmap":
            return ""
        kinds = {
            "gram": "the factors of {} parameters",
            "direct": "the gradients of {}",
            "rows": "rows of {} tables",
            "direct and rows": "the gradients and rows of {} tables",
        }
        counts = {kind: sum(leaf.how == kind for leaf in program.leaves) for kind in kinds}
        kept = [text.format(counts[kind]) for kind, text in kinds.items() if counts[kind]]
        total = sum(kept_bytes(leaf) for leaf in program.leaves)
        return f"Factored, it keeps of every example {', '.join(kept)}: {readable(total)} at most."

    def route(self, strategy: Strategy) -> Route:
        """How a strategy computes per-example gradients."""
        return Route.VMAP if (strategy.method or self.methods[0]) == "vmap" else Route.FACTORED

    @property
    def reduce_modes(self) -> tuple[str, ...]:
        """When gradients are added up over a mesh: after the last microbatch."""
        return ("once",)

    def computation(self, strategy: Strategy) -> Computation:
        """What is to be compiled and run.

        Raises:
          InputError: for a loss that this way cannot compute.
        """
        own, loss, each = self.own, self.loss, self._each(strategy)
        asked = each.asked
        consts = self._trace(self.examples)[1]
        inputs = (consts, self.arguments.arrays, self._padding(), own.clip_norm, own.normalize_by)
        leaves, tree = jax.tree.flatten(inputs)
        place = self._executor(strategy)

        def compute(*flat: Any) -> list[Any]:
            consts, arrays, padding, clip_norm, normalize_by = jax.tree.unflatten(tree, flat)
            sums, rows = each(place, Inputs(consts, arrays, clip_norm, padding))
            if sums:
                types = [*asked.transformed, loss.out_avals[0]]
                # Dividing by 1 would be one more pass over all of them.
                divided = (
                    sums
                    if own.normalize_by == 1
                    else [total / jnp.asarray(normalize_by, total.dtype) for total in sums]
                )
                sums = [total.astype(like.dtype) for total, like in zip(divided, types, strict=True)]
                if self.shardings is not None and own.transform is None:
                    sums = [*self.shardings.as_parameters(sums[:-1]), sums[-1]]
            return jax.tree.leaves(self._asked_for(asked, sums, rows))

        fun: Any = compute
        if self.shardings is not None:
            fun = self.shardings.with_specs(compute, self._specs(asked))
        return Computation(fun, leaves, loss.traced.has_effects)

    def _asked_for(self, asked: Asked, sums: list[Any], rows: list[Any]) -> Results:
        """The results that are returned, of all that there are."""
        own, num_outputs = self.own, len(self.loss.out_avals)
        values, aux, rest = rows[0], rows[1:num_outputs], rows[num_outputs:]
        norms, grads = rest[: asked.num_norms], rest[asked.num_norms :]
        *totals, value = sums or [None]
        return Results(
            result={Wants.SUM: totals, Wants.NORMS: norms, Wants.GRADIENTS: grads}[own.wants],
            value=value,
            values=values if own.return_values else None,
            norms=norms if own.return_norms else None,
            aux=aux,
        )

    def _specs(self, asked: Asked) -> list[Any]:
        """How results are spread over the mesh: sums as the parameters are, rows as the examples."""
        assert self.shardings is not None
        by_examples, whole = jax.sharding.PartitionSpec(self.shardings.options.axes), jax.sharding.PartitionSpec()
        if self.examples % self.shardings.options.devices:
            by_examples = whole
        sums: list[Any] = []
        if asked.sums:
            known = self.shardings.specs if self.own.transform is None else [None] * len(asked.transformed)
            sums = [*(spec or whole for spec in known), whole]
        return jax.tree.leaves(self._asked_for(asked, sums, [by_examples] * asked.num_rows))

    def outcome(self, strategy: Strategy, outputs: list[Any]) -> Results:
        """What was asked for, in the user's trees, from what the computation returned."""
        asked = self._each(strategy).asked
        skeleton = self._asked_for(
            asked, [0] * (len(asked.transformed) + 1) if asked.sums else [], [0] * asked.num_rows
        )
        flat = outputs if self.shardings is None else self.shardings.returned(outputs)
        found: Results = jax.tree.unflatten(jax.tree.structure(skeleton), flat)
        return found._replace(
            result=self._in_tree(found.result),
            norms=None if found.norms is None else self._norms_in_tree(found.norms),
            aux=jax.tree.unflatten(self.loss.aux_tree, found.aux),
        )

    def _in_tree(self, leaves: list[Any]) -> Any:
        if self.own.wants is Wants.NORMS:
            return self._norms_in_tree(leaves)
        if self.own.transform is not None:
            return jax.tree.unflatten(self._transform_tree, leaves)
        return self.arguments.as_gradient(leaves)

    def _norms_in_tree(self, leaves: list[Any]) -> Any:
        if not self.own.per_leaf:
            return leaves[0]
        if self.own.transform is not None:
            return jax.tree.unflatten(self._transform_tree, leaves)
        return self.arguments.as_gradient(leaves)

    def _each(self, strategy: Strategy) -> EachExample:
        own = self.own
        asked = Asked(
            parameters=self.loss.types.wrt,
            outputs=self.loss.out_avals,
            accumulator_dtype=self.options.accumulator_dtype,
            sums=own.wants is Wants.SUM,
            keeps_gradients=own.wants is Wants.GRADIENTS,
            keeps_norms=own.wants is Wants.NORMS or own.return_norms,
            per_leaf=own.per_leaf,
            nan_safe=own.nan_safe,
            transform=None if own.transform is None else self._flat_transform,
        )
        return EachExample(
            program=self._program(strategy.method),
            asked=asked,
            size=self._size(strategy),
            keeps_batch_axis=own.keep_batch_dim,
            skips_padding=not self.loss.traced.has_effects and self._has_no_other_axes,
        )

    def _padding(self) -> Any:
        if self.is_padding is None or self.shardings is None or not self.shardings.is_eager:
            return self.is_padding
        return self.shardings.put_examples(jnp.asarray(self.is_padding))

    @property
    def _has_no_other_axes(self) -> bool:
        """Whether no device waits for others while it computes: those of one model must all do the same."""
        return self.shardings is None or self.shardings.mesh.size == self.shardings.options.devices

    def _flat_transform(self, grads: list[Any]) -> list[Any]:
        assert self.own.transform is not None
        result = self.own.transform(self.arguments.as_gradient(grads))
        self._transform_tree = jax.tree.structure(result)
        leaves = jax.tree.leaves(result)
        for leaf in leaves:
            if not hasattr(leaf, "dtype") or not jax.dtypes.issubdtype(leaf.dtype, jnp.inexact):
                raise InputError(
                    "transform must return arrays of floating-point numbers",
                    given=describe(leaf),
                    remedy="Cast what it returns, e.g. x.astype(jnp.float32).",
                )
        return leaves


class _TakesOneExample(Exception):
    """A loss that cannot be traced with more than one example."""


def _check_padding(is_padding: Any, examples: int) -> Any:
    if is_padding is None:
        return None
    shape, dtype = jnp.shape(is_padding), jax.dtypes.result_type(is_padding)
    if shape != (examples,) or dtype != jnp.bool_:
        raise InputError(
            "is_padding must say of every example whether it is padding",
            given=f"is_padding = {describe(is_padding)} for {examples} examples",
            remedy=f"Pass booleans of shape ({examples},), e.g. is_padding=jnp.arange({examples}) >= number.",
        )
    return jnp.asarray(is_padding)


def _check_keys(arguments: Arguments) -> None:
    """A key that every example sees alike would give all of them the same random numbers."""
    for leaf in arguments.leaves:
        if leaf.role == "keys" and not _draws_for_each(leaf.value):
            raise InputError(
                "Keys must be of a generator that draws for each of several keys by itself",
                given=f"{leaf.name} = {describe(leaf.value)}",
                remedy="Pass one of the default generator, jax.random.key(seed, impl='threefry2x32'): what others draw "
                "for an example depends on those that it is computed together with.",
            )
        if leaf.role == "rest" and _has_keys(leaf.value) and not arguments.is_of_model(leaf):
            _refuse_key(
                leaf,
                f"Pass rng_argnums={leaf.slot}"
                if isinstance(leaf.slot, int)
                else "Pass the key by position, and name that position in rng_argnums",
            )


def _check_keys_of_models(arguments: Arguments, loss: TracedLoss) -> None:
    """Likewise for the keys in a model, which may not be used: a Dropout that is switched off has one."""
    rest = arguments.arrays_of("rest")
    if not any(_has_keys(leaf.value) and arguments.is_of_model(leaf) for leaf in rest):
        return
    outputs = [loss.traced.inputs_used_by(output) for output in range(len(loss.out_avals))]
    for leaf, *used in zip(rest, *(inputs[len(inputs) - len(rest) :] for inputs in outputs), strict=True):
        if _has_keys(leaf.value) and any(used):
            _refuse_key(leaf, "Let the loss draw from an argument of its own, e.g. rng_argnums=2")


def _has_keys(value: Any) -> bool:
    return hasattr(value, "dtype") and avals.has_keys(value)


def _refuse_key(leaf: Any, remedy: str) -> None:
    raise InputError(
        "PRNG keys must be named in rng_argnums, so that every example draws numbers of its own",
        given=f"{leaf.name} = {describe(leaf.value)}",
        remedy=f"{remedy}. To give all examples the same random numbers, close over the key instead.",
    )


def _draws_for_each(key: Any) -> bool:
    if avals.has_keys(key):
        return avals.is_threefry(key.dtype)
    config: Any = jax.config
    return config.jax_default_prng_impl == "threefry2x32"


def _varying(arguments: Arguments) -> Arguments:
    """Inside the user's `shard_map`, parameters as different on every device as the examples are.

    Otherwise JAX would add up gradients of different examples over the devices before they are clipped.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return arguments
    axes = frozenset().union(*(avals.varying_axes(jax.typeof(leaf)) for leaf in arguments.arrays.batch))

    def spread(leaf: Any) -> Any:
        missing = tuple(axes - avals.varying_axes(jax.typeof(leaf.value))) if leaf.role == "wrt" else ()
        return leaf._replace(value=lax.pcast(leaf.value, missing, to="varying")) if missing else leaf

    return dataclasses.replace(arguments, leaves=[spread(leaf) for leaf in arguments.leaves])
