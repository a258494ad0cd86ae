"""The computation of one per-example call, as a function of flat arrays, for each strategy.

`ExampleGradient` traces the loss of one example, refuses what would make examples depend on each other, and builds the
`ExamplePass` that a strategy runs.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from anybatch.call.arguments import Arguments
from anybatch.call.checks import describe
from anybatch.call.loss import TracedLoss
from anybatch.call.memory import readable
from anybatch.errors import InputError
from anybatch.gradients import head_budget
from anybatch.gradients.problem import Problem
from anybatch.jaxprs import avals
from anybatch.per_example.example_pass import ExamplePass, PassInputs, Request
from anybatch.per_example.forms import kept_bytes
from anybatch.per_example.kept_gradients import ExampleProgram
from anybatch.per_example.options import PerExampleOptions, Wants
from anybatch.planning.strategy import Computation, Route, Strategy


class Results(NamedTuple):
    """The results of one call. `values`, `norms` and `aux` have the examples along axis 0; None if not asked for."""

    result: Any  # the gradients, the norms, or the clipped sum
    value: Any = None  # the sum of the losses
    values: Any = None
    norms: Any = None
    aux: Any = None


class ExampleGradient(Problem):
    """The per-example gradients, norms or clipped sum of one call, to be computed with any strategy."""

    options: PerExampleOptions

    def __init__(
        self, fun: Callable[..., Any], options: PerExampleOptions, arguments: Arguments, is_padding: Any | None
    ) -> None:
        arguments.refuse_unnamed_rows("example")
        super().__init__(fun, options, _varying(arguments))
        self._programs: dict[str, ExampleProgram] = {}
        self.is_padding = _check_padding(is_padding, self.examples)
        _check_keys(arguments)

    def _trace_loss(self, num_examples: int) -> tuple[TracedLoss, Any]:
        """Traces the loss of one example, whatever the number of examples."""
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

        def give_up(error: Exception) -> None:
            raise _TakesOneExample from error

        try:
            loss, consts = self._traced_at(max(2, self.examples), give_up)
        except _TakesOneExample:
            return
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

    @property
    def draws_per_microbatch(self) -> bool:
        """False: each example draws its own random numbers, whatever the microbatch size."""
        return False

    def bytes_written(self, count: Callable[[Any], int]) -> int:
        """The bytes that the losses of all examples and their gradients write."""
        gradient = sum(leaf.dtype.itemsize * leaf.size for leaf in map(jnp.asarray, self.arguments.arrays.wrt))
        return self.examples * (count(self.loss.traced.jaxpr) + gradient)

    @property
    def checked_reading(self) -> None:
        """None: each example is computed by itself."""
        return None

    @property
    def is_coupled(self) -> bool:
        """False: each example is computed by itself."""
        return False

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
        """The program of one example's gradient, with the preferred method."""
        return self._program(None)

    def _program(self, method: str | None) -> ExampleProgram:
        method = method or self.methods[0]
        assert method is not None
        if method not in self._programs:
            # Devices that share a model run its collectives together, so none may loop more often than another. With
            # factors, doubtful norms are recomputed, which happens as often as the data of a device need it.
            prefer = "cost" if self._has_no_other_axes else "direct"
            self._programs[method] = ExampleProgram(self.loss, method, prefer, self.options.strict)
        return self._programs[method]

    @property
    def noun(self) -> str:
        """The name of the result, for plans and reports."""
        words = {
            Wants.SUM: "clipped gradient",
            Wants.NORMS: "gradient norms",
            Wants.GRADIENTS: "per-example gradients",
        }
        return words[self.options.wants]

    @property
    def identity(self) -> Sequence[Any]:
        """The options that change bytes and times: part of the key of a stored plan."""
        options = self.options
        transform = None
        if options.transform is not None:
            types = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in self.loss.types.wrt]
            transform = str(jax.make_jaxpr(self._flat_transform)(types))
        flags = [
            options.keep_batch_dim,
            options.strict,
            options.nan_safe,
            options.return_values,
            options.return_norms,
            options.per_leaf,
        ]
        return [
            options.wants.value,
            options.method,
            flags,
            options.normalize_by == 1,
            self.is_padding is not None,
            transform,
        ]

    @property
    def note(self) -> str:
        """A sentence that says what is kept of every example instead of its gradient; empty if nothing is."""
        program = self.program
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
        """How a strategy computes per-example gradients."""
        return Route.VMAP if (strategy.method or self.methods[0]) == "vmap" else Route.FACTORED

    @property
    def reduce_modes(self) -> tuple[str, ...]:
        """Gradients are added up over a mesh once, after the last microbatch."""
        return ("once",)

    def computation(self, strategy: Strategy) -> Computation:
        """The function to compile and run with a strategy, and its arguments.

        Raises:
          InputError: for a loss that the strategy cannot compute.
        """
        options, loss, example_pass = self.options, self.loss, self._pass(strategy)
        request = example_pass.request
        consts = self.trace(self.examples)[1]
        inputs = (consts, self.arguments.arrays, self._padding(), options.clip_norm, options.normalize_by)
        leaves, tree = jax.tree.flatten(inputs)
        executor = self.executor(strategy)

        def compute(*flat: Any) -> list[Any]:
            consts, arrays, padding, clip_norm, normalize_by = jax.tree.unflatten(tree, flat)
            sums, rows = example_pass(executor, PassInputs(consts, arrays, clip_norm, padding))
            if sums:
                types = [*request.transformed, loss.out_avals[0]]
                if options.normalize_by != 1:  # dividing by 1 would be one more pass over all sums
                    sums = [total / jnp.asarray(normalize_by, total.dtype) for total in sums]
                sums = [total.astype(like.dtype) for total, like in zip(sums, types, strict=True)]
                if self.shardings is not None and options.transform is None:
                    sums = [*self.shardings.as_parameters(sums[:-1]), sums[-1]]
            return jax.tree.leaves(self._results(request, sums, rows))

        fun: Any = compute
        if self.shardings is not None:
            fun = self.shardings.with_specs(compute, self._specs(request))
        return Computation(fun, leaves, loss.traced.has_effects)

    def _results(self, request: Request, sums: list[Any], rows: list[Any]) -> Results:
        """The sums and rows of a pass by name, without those that the user did not ask for."""
        options, num_outputs = self.options, len(self.loss.out_avals)
        values, aux, rest = rows[0], rows[1:num_outputs], rows[num_outputs:]
        norms, grads = rest[: request.num_norms], rest[request.num_norms :]
        *totals, value = sums or [None]
        return Results(
            result={Wants.SUM: totals, Wants.NORMS: norms, Wants.GRADIENTS: grads}[options.wants],
            value=value,
            values=values if options.return_values else None,
            norms=norms if options.return_norms else None,
            aux=aux,
        )

    def _specs(self, request: Request) -> list[Any]:
        """The shardings of the results: sums as their parameters, and rows over the axes of the examples."""
        assert self.shardings is not None
        by_examples, replicated = jax.sharding.PartitionSpec(self.shardings.options.axes), jax.sharding.PartitionSpec()
        if self.examples % self.shardings.options.devices:
            by_examples = replicated
        sums: list[Any] = []
        if request.sums:
            known = self.shardings.specs if self.options.transform is None else [None] * len(request.transformed)
            sums = [*(spec or replicated for spec in known), replicated]
        return jax.tree.leaves(self._results(request, sums, [by_examples] * request.num_rows))

    def outcome(self, strategy: Strategy, outputs: list[Any]) -> Results:
        """The results in the user's trees, from the flat outputs of the computation."""
        request = self._pass(strategy).request
        sums = [0] * (len(request.transformed) + 1) if request.sums else []
        skeleton = self._results(request, sums, [0] * request.num_rows)
        flat = outputs if self.shardings is None else self.shardings.returned(outputs)
        results: Results = jax.tree.unflatten(jax.tree.structure(skeleton), flat)
        return results._replace(
            result=self._in_tree(results.result),
            norms=None if results.norms is None else self._norms_in_tree(results.norms),
            aux=jax.tree.unflatten(self.loss.aux_tree, results.aux),
        )

    def _in_tree(self, leaves: list[Any]) -> Any:
        if self.options.wants is Wants.NORMS:
            return self._norms_in_tree(leaves)
        if self.options.transform is not None:
            return jax.tree.unflatten(self._transform_tree, leaves)
        return self.arguments.as_gradient(leaves)

    def _norms_in_tree(self, leaves: list[Any]) -> Any:
        if not self.options.per_leaf:
            return leaves[0]
        if self.options.transform is not None:
            return jax.tree.unflatten(self._transform_tree, leaves)
        return self.arguments.as_gradient(leaves)

    def _pass(self, strategy: Strategy) -> ExamplePass:
        options = self.options
        request = Request(
            parameters=self.loss.types.wrt,
            outputs=self.loss.out_avals,
            accumulator_dtype=options.accumulator_dtype,
            sums=options.wants is Wants.SUM,
            keeps_gradients=options.wants is Wants.GRADIENTS,
            keeps_norms=options.wants is Wants.NORMS or options.return_norms,
            per_leaf=options.per_leaf,
            nan_safe=options.nan_safe,
            transform=None if options.transform is None else self._flat_transform,
        )
        return ExamplePass(
            program=self._program(strategy.method),
            request=request,
            size=self.size(strategy),
            keeps_batch_axis=options.keep_batch_dim,
            skips_padding=not self.loss.traced.has_effects and self._has_no_other_axes,
        )

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


class _TakesOneExample(Exception):
    """Raised for a loss that cannot be traced with more than one example."""


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
    axes = frozenset().union(*(avals.varying_axes(jax.typeof(leaf)) for leaf in arguments.arrays.batch))

    def varying(leaf: Any) -> Any:
        missing = tuple(axes - avals.varying_axes(jax.typeof(leaf.value))) if leaf.role == "wrt" else ()
        return leaf._replace(value=lax.pcast(leaf.value, missing, to="varying")) if missing else leaf

    return dataclasses.replace(arguments, leaves=[varying(leaf) for leaf in arguments.leaves])
