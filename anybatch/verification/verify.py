"""`verify`: checks that microbatches give the full-batch gradient of a user's loss.

A *route* is one way to compute the gradient: a microbatch size, on one device or over a mesh.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from anybatch.call.arguments import Arguments
from anybatch.call.display import escape, html_table, in_notebook, paragraph
from anybatch.call.loss import trace_loss
from anybatch.call.models import partition_models
from anybatch.call.options import Options
from anybatch.call.tables import WIDTH, Column, text_table, wrapped
from anybatch.errors import AnybatchError, InputError
from anybatch.reading.blocks import wide_values
from anybatch.reading.read import LEAST_WIDE, split_loss
from anybatch.verification import diagnosis
from anybatch.verification.comparison import LeafDifference, RouteOptions, Trial

SAMPLE = 64  # examples, by default
NOTABLE = 0.02  # a rounding error of the full-batch gradient itself above which a note tells the user

Leaves: TypeAlias = tuple[LeafDifference, ...]


class DifferentGradientError(AnybatchError, AssertionError):
    """A route gives another gradient than the full batch. The message has the table and the diagnosis."""


@dataclasses.dataclass(frozen=True)
class RouteCheck:
    """One route, compared with the full batch."""

    name: str  # "microbatch_size=3"
    ok: bool
    gradient: float  # the relative difference of the worst leaf of the gradient, for its tolerance
    leaf: str  # the name of that leaf
    tolerance: float  # the rounding expected at that leaf
    value: float | None  # the relative difference of the value; None for a function that is mapped
    aux: float | None  # the relative difference of the worst leaf of aux; None without aux
    leaves: Leaves  # all leaves: of the gradient, then the value, then of aux
    rounding: float | None = None  # the difference of the gradient in the given dtypes, if the others are in float64
    expected_rounding: float | None = None  # the rounding expected in the given dtypes


@dataclasses.dataclass(frozen=True, repr=False)
class Verification:
    """The result of `verify`. Prints as a table, and holds no arrays."""

    ok: bool
    routes: tuple[RouteCheck, ...]
    num_examples: int  # used for the comparison
    batch_size: int  # examples in the given batch
    dtype: str  # the precision of the comparison
    given_dtype: str | None  # the given dtype, if its rounding was measured as well
    notes: tuple[str, ...] = ()
    diagnosis: str | None = None
    noun: str = "gradient"  # what was compared; of a function of `map_batch`, its "result"

    def raise_if_different(self) -> "Verification":
        """Returns itself if all routes agree.

        Raises:
          DifferentGradientError: if any route differs, with the table and the diagnosis.
        """
        if not self.ok:
            raise DifferentGradientError(str(self))
        return self

    def columns(self, shown: Callable[[float], str]) -> list[Column]:
        """The columns of the table, with numbers as `shown` shows them. Some may be empty."""

        def numbers(values: Sequence[float | None]) -> tuple[str, ...]:
            return tuple("" if value is None else shown(value) for value in values)

        routes = self.routes
        # A column in which a route fails is not left out.
        is_wrong = [any(not leaf.ok for leaf in route.leaves if leaf.name == "value") for route in routes]
        has_wrong_aux = [any(not leaf.ok for leaf in route.leaves if leaf.name.startswith("aux")) for route in routes]
        is_coarse = [not _is_allowed(route.rounding, route.expected_rounding) for route in routes]
        drop = None if any(is_coarse) else 1
        allowed = numbers([route.expected_rounding for route in routes])
        given = str(self.given_dtype)
        short = {route.name: route.name.replace("_size=", "=") for route in routes}
        return [
            Column("route", tuple(route.name for route in routes), is_left=True, least=76, short=short),
            Column(self.noun, numbers([route.gradient for route in routes])),
            Column("worst at", tuple(route.leaf for route in routes), is_left=True, least=16, keeps_end=True),
            Column("allowed", numbers([route.tolerance for route in routes]), drop=0),
            Column("value", numbers([route.value for route in routes]), drop=None if any(is_wrong) else 3),
            Column("aux", numbers([route.aux for route in routes]), drop=None if any(has_wrong_aux) else 2),
            Column(
                f"in {given}", numbers([route.rounding for route in routes]), drop=drop, short={f"in {given}": given}
            ),
            Column("allowed", allowed, drop=4, full_name=f"allowed in {given}"),
            Column("", tuple("same" if route.ok else "DIFFERENT" for route in routes)),
        ]

    def text(self, width: int | None = WIDTH) -> str:
        """The verification as plain text: the table, notes, and the diagnosis.

        Args:
          width: the most characters of a line. Columns of the table are left out to fit it, and a line says which.
            None: all columns, and no line breaks in sentences.
        """
        lines, left_out = text_table(self.columns(_shown), width)
        remarks = self._remarks
        if left_out:
            remarks.insert(-1, f"Columns left out: {', '.join(left_out)}. result.text(width=None) shows all.")
        title, *remarks = [wrapped(text, width) for text in (self._title, *remarks)]
        return "\n".join([title, "", *lines, "", *remarks])

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def html_table(self, shown: Callable[[float], str], caption: str = "") -> str:
        """The table in HTML, with numbers as `shown` shows them, and a drawing of each difference."""
        styles = ["" if route.ok else "bad" for route in self.routes]
        route, *others, verdict = self.columns(shown)
        drawings = (3, _scale(), [_lane(route) for route in self.routes])
        return html_table([route, verdict, *others], styles, caption, drawings)

    def _repr_html_(self) -> str:
        *notes, verdict = self._remarks
        wrong = sum(not route.ok for route in self.routes)
        lead = f"{wrong} of {len(self.routes)} routes give another {self.noun} than the full batch."
        return in_notebook(
            paragraph(verdict, "lead good") if self.ok else paragraph(lead, "lead wrong") + paragraph(verdict),
            paragraph(self._title, "about"),
            self.html_table(_shown),
            *map(paragraph, notes),
        )

    @property
    def _title(self) -> str:
        some = f"the first {self.num_examples} of {self.batch_size}" if self.num_examples < self.batch_size else "all"
        return (
            f"{self.num_examples} examples ({some}): microbatches compared with "
            f"{'jax.value_and_grad of' if self.noun == 'gradient' else 'the function for'} all {self.num_examples}, "
            f"relative differences in {self.dtype}"
        )

    @property
    def _remarks(self) -> list[str]:
        same = f"All routes give the {self.noun} of the full batch."
        return [*self.notes, same if self.ok else self.diagnosis or ""]


def verify(
    fun: Callable[..., Any],
    *args: Any,
    microbatch_sizes: int | Sequence[int] | None = None,
    block_sizes: int | Sequence[int] | None = None,
    meshes: Any = (),
    axis_name: str | tuple[str, ...] = "data",
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    batch_argnums: int | tuple[int, ...] = 1,
    batch_argnames: str | tuple[str, ...] = (),
    reduction: str = "infer",
    aux_reduction: Any = None,
    rng_argnums: int | tuple[int, ...] = (),
    accumulator_dtype: Any = jnp.float32,
    sample: int | None = None,
    **kwargs: Any,
) -> Verification:
    """Checks, on your loss and your batch, that microbatches give the gradient of the full batch.

    It takes a sample of the batch and computes its gradient with `jax.value_and_grad`, and with
    `anybatch.value_and_grad` at several microbatch sizes. It compares them leaf by leaf. Where they differ, it names
    the cause and what to type instead. Call it once, before training, outside `jit`.

    **Float64.** The comparison runs in double precision, whatever the given dtypes, so that it can tell rounding
    (1e-15) from an error (1e-3). The routes then run in the given dtypes too, to show the rounding there. If part of
    the loss cannot be computed in float64, the given dtypes are compared instead, and a note says so.

    **Tolerance.** The rounding that is allowed is measured: it is how far the gradient moves if the inputs change in
    their last digit.

    **Time.** Two compilations for each microbatch size, and two for the full batch.

    >>> import jax.numpy as jnp, anybatch as ab
    >>> def loss(w, x):
    ...     return jnp.mean((w * x - 1) ** 2)
    >>> x = jnp.array([0.5, 1.5, 2.5, 3.5])
    >>> ab.verify(loss, 2.0, x, reduction="mean", microbatch_sizes=3).ok
    True
    >>> wrong = ab.verify(loss, 2.0, x, reduction="sum", microbatch_sizes=(1, 3))
    >>> print(wrong.diagnosis)
    The loss is a mean over its examples, and reduction="sum" was declared. With microbatch_size=1 the gradient is 4
    times too large, for 4 microbatches. With reduction="mean" it agrees.
    Pass reduction="mean", or leave reduction out: then anybatch reads the loss itself.

    Args:
      fun: the loss, as for `value_and_grad`. Or the result of `map_batch`, which has its own options: then its outputs
        are compared. Or that of `hvp` or `ggn_product`.
      *args: the arguments of the loss, as arrays with values.
      microbatch_sizes: which sizes to try. By default 1, a size that divides the sample, one that does not, and all.
      block_sizes: which sizes of blocks to try as well, with the largest microbatch; see `block_size` of
        `value_and_grad`. By default one, if the loss has values that blocks can compute. `()` for none.
      meshes: one or several meshes to try as well, at the smallest and the largest size, with the batch sharded over
        the axis `axis_name`. By default only one device is tried.
      axis_name: as for `value_and_grad`.
      argnums: as for `value_and_grad`.
      has_aux: as for `value_and_grad`.
      batch_argnums: as for `value_and_grad`.
      batch_argnames: as for `value_and_grad`.
      reduction: as for `value_and_grad`.
      aux_reduction: as for `value_and_grad`. Leaves declared "stack" or "last" are not compared.
      rng_argnums: as for `value_and_grad`.
      accumulator_dtype: as for `value_and_grad`.
      sample: how many examples to use, from the start of the batch. By default 64, or enough for two microbatches of
        the largest size and one of a single example. All of them must fit into memory together, in double precision.
      **kwargs: the keyword arguments of the loss.

    Returns:
      A `Verification`, with `ok` and `raise_if_different()`. It prints as a table of the routes.

    Raises:
      InputError: for arguments that are not valid.
    """
    if hasattr(fun, "to_read"):  # such as the result of `map_batch`
        fun, own = fun.to_read()
        argnums, batch_argnums = own.argnums, own.batch_argnums
        batch_argnames, rng_argnums, accumulator_dtype = own.batch_argnames, own.rng_argnums, own.accumulator_dtype
        maps = own.maps
    else:
        maps = False
    sizes = None if microbatch_sizes is None else _sizes("microbatch_sizes", microbatch_sizes)
    in_blocks = None if block_sizes is None else _sizes("block_sizes", block_sizes) if block_sizes != () else []
    options = {
        "argnums": argnums,
        "has_aux": has_aux,
        "batch_argnums": batch_argnums,
        "batch_argnames": batch_argnames,
        "reduction": reduction,
        "aux_reduction": aux_reduction,
        "rng_argnums": rng_argnums,
        "accumulator_dtype": accumulator_dtype,
    }
    several = tuple(meshes) if isinstance(meshes, (tuple, list)) else (meshes,)
    for mesh in (None, *several):  # checks the options
        checked = Options.of(fun, **options, microbatch_size=1, mesh=mesh, axis_name=axis_name, maps=maps)
    roles = checked.roles
    call = partition_models(fun, roles, has_aux, args, kwargs)
    fun, has_aux, args, kwargs = call.fun, call.has_aux, call.args, call.kwargs
    options |= {
        "argnums": roles.argnums,
        "has_aux": has_aux,
        "aux_reduction": call.aux_reduction(reduction, aux_reduction),
    }
    all_examples = roles.sort(fun, args, kwargs)
    for leaf in all_examples.leaves:
        if isinstance(leaf.value, jax.core.Tracer):
            raise InputError(
                "verify compares numbers, so its arguments must be concrete arrays",
                given=f"{leaf.name} inside a jit, grad or vmap",
                remedy="Call it outside, once, before training: ab.verify(loss, params, batch).raise_if_different().",
            )
    num_examples = _sample(sample, all_examples.num_examples, sizes)
    some_args, some_kwargs = _first_examples(all_examples, num_examples)
    trial = Trial(fun, some_args, some_kwargs, options, maps=maps)
    try:
        trace_loss(fun, trial.arguments, num_examples, weighted=trial.weighted, has_aux=has_aux, maps=maps)
        sizes = sizes or _default_sizes(num_examples)
        routes = [RouteOptions(size) for size in sizes]
        in_blocks = _default_block_sizes(trial) if in_blocks is None else in_blocks
        routes += [RouteOptions(max(sizes), block_size=block_size) for block_size in in_blocks]
        for mesh in several:
            routes += [RouteOptions(size, mesh, axis_name) for size in sorted({min(sizes), max(sizes)})]
        return _verify(trial, routes, all_examples.num_examples)
    except Exception as error:
        if num_examples < all_examples.num_examples and not isinstance(error, AnybatchError):
            error.add_note(
                f"verify computed the loss for the first {num_examples} of the {all_examples.num_examples} examples. "
                f"If it takes no fewer, pass sample={all_examples.num_examples}."
            )
        raise


def _verify(given: Trial, routes: Sequence[RouteOptions], batch_size: int) -> Verification:
    noun = "result" if given.maps else "gradient"
    trial, differences, notes = _compared(given, routes)
    roundings: dict[RouteOptions, Leaves] = {}
    if trial is not given and all(map(_all_ok, differences.values())):
        errors = [0.0] * given.num_gradients
        if not given.is_random:  # in float64 it may draw other random numbers
            errors = given.differences(given.expected, trial.expected)[: given.num_gradients]
        roundings = {route: _roundings(given, route, errors) for route in routes}
        worst = int(np.argmax(errors))
        if errors[worst] > NOTABLE:
            notes.append(
                f"In {given.dtype.name} the {noun} of the full batch itself is off by {_shown(errors[worst])}, "
                f"at {given.names[worst]}."
            )
    if not all(np.isfinite(leaf).all() for leaf in trial.expected[: trial.num_gradients]):
        notes.append(f"The {noun} of the full batch itself is not finite. Where it is NaN, a route must be NaN, too.")
    failed = {route: leaves for route, leaves in differences.items() if not _all_ok(leaves)}
    rounded = {route: leaves for route, leaves in roundings.items() if not _all_ok(leaves)}
    why = None
    plain = [route for route in failed if route.mesh is None and route.block_size is None]
    if plain and given.maps:
        why = (
            "If the function is the same in every call (no host callback, no state), this is a bug in anybatch: please "
            "report it with this table. microbatch_size=None computes the full batch without microbatches."
        )
    elif plain:
        why = diagnosis.diagnose(trial, {route.size: failed[route] for route in plain}, given)
    elif any(route.block_size is not None for route in failed):
        why = (
            "Microbatches agree, and blocks do not. If the loss is the same in every call (no host callback, no "
            "state), this is a bug in anybatch: please report it with this table. block_size=None computes no blocks."
        )
    elif failed:
        why = (
            "On one device the routes agree, and over the mesh they do not. If the loss is the same on every device "
            "(no host callback, no state), this is a bug in anybatch: please report it with this table."
        )
    elif rounded:
        why = diagnosis.diagnose_rounding(given, rounded)
    return Verification(
        ok=not failed and not rounded,
        routes=tuple(_route_check(trial, route, differences[route], roundings.get(route, ())) for route in routes),
        num_examples=trial.num_examples,
        batch_size=batch_size,
        dtype=trial.dtype.name,
        given_dtype=given.dtype.name if roundings else None,
        notes=tuple(notes),
        diagnosis=why,
        noun=noun,
    )


def _compared(given: Trial, routes: Sequence[RouteOptions]) -> tuple[Trial, dict[RouteOptions, Leaves], list[str]]:
    """Compares the routes in float64 if possible, and otherwise in the given dtypes.

    Returns the trial that was compared, the differences of each route, and notes about the precision.
    """
    notes = []
    if given.eps > np.finfo(np.float64).eps:
        try:
            double = given.to_float64()
            differences = {route: double.compare(route) for route in routes}
        except Exception as error:  # an error of the loss itself is raised again below
            reason = f"it raised {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        else:
            if all(map(_all_ok, differences.values())) or not double.fun.narrow:
                dtype = given.dtype.name
                kind = "function" if given.maps else "loss"
                narrow = f"The {kind} computes in {dtype}; to compare the routes, all of it was computed in float64."
                return double, differences, [narrow] if double.fun.recomputed else []
            # The difference may be rounding in the primitives that stay narrow.
            reason = f"the loss uses {', '.join(sorted(double.fun.narrow))}, which cannot be computed in float64"
        notes = [f"Not compared in float64: {reason}."]
    return given, {route: given.compare(route) for route in routes}, notes


def _roundings(given: Trial, route: RouteOptions, errors: Sequence[float]) -> Leaves:
    """The differences of the gradient in the given dtypes, for a route that agrees in float64.

    They may be as large as the effect of a change in the last digit, or as the error of the full batch: a loss may sum
    in bfloat16, and a GPU may multiply float32 matrices with fewer digits than the dtype has.
    """
    leaves = given.compare(route, capped=False)[: given.num_gradients]
    return tuple(
        dataclasses.replace(leaf, tolerance=max(leaf.tolerance, 4 * error))
        for leaf, error in zip(leaves, errors, strict=True)
    )


def _route_check(trial: Trial, route: RouteOptions, leaves: Leaves, rounded: Leaves) -> RouteCheck:
    number = trial.num_gradients
    worst = max(leaves[:number], key=lambda leaf: leaf.difference / leaf.tolerance)
    worst_rounded = max(rounded, key=lambda leaf: leaf.difference / leaf.tolerance, default=None)
    return RouteCheck(
        name=str(route),
        ok=_all_ok(leaves) and _all_ok(rounded),
        gradient=worst.difference,
        leaf=worst.name,
        tolerance=worst.tolerance,
        value=None if trial.maps else leaves[number].difference,
        aux=max((leaf.difference for leaf in leaves[number + 1 :]), default=0.0) if trial.options["has_aux"] else None,
        leaves=leaves,
        rounding=worst_rounded.difference if worst_rounded else None,
        expected_rounding=worst_rounded.tolerance if worst_rounded else None,
    )


def _all_ok(leaves: Leaves) -> bool:
    return all(leaf.ok for leaf in leaves)


def _sizes(name: str, given: Any) -> list[int]:
    sizes = [_whole(size) for size in (given if isinstance(given, (tuple, list, range)) else [given])]
    if not sizes or min(sizes) < 1:
        raise InputError(
            f"{name} must be whole numbers of at least 1",
            given=f"{name}={given!r}",
            remedy=f"Pass the sizes to try, e.g. {name}=(1, 8, 24), or leave it out.",
        )
    return list(dict.fromkeys(sizes))


def _whole(number: Any) -> int:
    """The number as an int; 0 if it is not a whole number."""
    try:
        return 0 if isinstance(number, bool) else operator.index(number)
    except TypeError:
        return 0


def _default_sizes(num_examples: int) -> list[int]:
    """1, a size near a third that divides the sample, one that does not, and all."""
    between = range(2, num_examples)
    divides = [size for size in between if num_examples % size == 0]
    ragged = [size for size in between if num_examples % size]
    near = [min(sizes, key=lambda size: abs(size - num_examples / 3)) for sizes in (divides, ragged) if sizes]
    return sorted({1, *near, num_examples})


def _default_block_sizes(trial: Trial) -> list[int]:
    """A size that leaves a smaller last block, if the loss has values that blocks can compute."""
    if trial.options["reduction"] != "infer" or not trial.num_examples or trial.maps:
        return []
    loss, consts = trace_loss(
        trial.fun, trial.arguments, trial.num_examples, weighted=False, has_aux=trial.options["has_aux"]
    )
    if loss.traced.has_effects:
        return []
    wide = [value for value in wide_values(split_loss(loss, consts), LEAST_WIDE) if value.axis is not None]
    rows = max(wide, key=lambda value: value.bytes).num_rows if wide else 0
    size = -(-rows // 3)
    return [size + (rows % size == 0)] if rows > 2 else []


def _sample(given: Any, batch_size: int, sizes: list[int] | None) -> int:
    if batch_size == 0:
        raise InputError(
            "The batch needs at least one example",
            given="arrays of 0 examples",
            remedy="Pass a batch that you would train on.",
        )
    if given is None:
        return min(batch_size, max(SAMPLE, 2 * max(sizes or [0]) + 1))
    sample = _whole(given)
    if sample < 1:
        raise InputError(
            "sample must be a whole number of at least 1, or None",
            given=f"sample={given!r}",
            remedy="Pass how many examples of the batch to use, e.g. sample=32, or leave it out.",
        )
    return min(batch_size, sample)


def _first_examples(arguments: Arguments, num_examples: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    arrays = arguments.arrays
    batch = [leaf if isinstance(leaf, (jax.Array, np.ndarray)) else jnp.asarray(leaf) for leaf in arrays.batch]
    batch = [leaf[:num_examples] for leaf in batch]
    return arguments.call(lambda *args, **kwargs: (args, kwargs), arrays._replace(batch=batch))


def _shown(number: float) -> str:
    return f"{number:.1e}" if number and math.isfinite(number) else f"{number:g}"


def _is_allowed(difference: float | None, tolerance: float | None) -> bool:
    return difference is None or difference <= (tolerance or 0.0)


# The drawing of a difference: a point on a logarithmic scale, and a band from its left end to what is allowed.
_SCALE, _LANE = (1e-17, 1.0), 160  # the ends of the scale, and its width in pixels


def _place(number: float) -> float:
    """Where a number is drawn, in pixels. What is off the scale, or not finite, is drawn at its end."""
    low, high = map(math.log10, _SCALE)
    power = high if not math.isfinite(number) else low if number <= 0 else min(max(math.log10(number), low), high)
    return round(_LANE * (power - low) / (high - low), 1)


def _lane(route: RouteCheck) -> str:
    failed = [] if route.ok else [leaf.difference for leaf in route.leaves if not leaf.ok]
    worst = max([route.gradient, *failed], key=_place)
    text = escape(f"{_shown(route.gradient)} at {route.leaf}, {_shown(route.tolerance)} allowed")
    allowed, color = _place(route.tolerance), "green" if route.ok else "red"
    return (
        f'<svg class="lane" viewBox="0 0 {_LANE} 20" role="img" aria-label="{text}"><title>{text}</title>'
        f'<path class="base" d="M0 10H{_LANE}"/><path class="allowed" d="M0 10H{allowed}"/>'
        f'<path class="limit" d="M{allowed} 4v12"/>'
        f'<circle class="point {color}" cx="{_place(worst)}" cy="10" r="4"/></svg>'
    )


def _scale() -> str:
    ticks = ((1e-16, "10⁻¹⁶"), (1e-8, "10⁻⁸"), (1.0, "1"))
    words = [f'<text text-anchor="middle" x="{_place(value)}" y="14">{name}</text>' for value, name in ticks]
    return f'<svg class="lane" viewBox="0 0 {_LANE} 20" aria-hidden="true">{"".join(words)}</svg>'
