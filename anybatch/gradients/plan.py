"""`plan` and `explain`: which way a gradient will be computed, and why, before it is."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from anybatch.call.models import partition_models
from anybatch.call.options import Options
from anybatch.errors import InputError
from anybatch.gradients.computation import Gradient
from anybatch.jaxprs import versions
from anybatch.planning.plan import Plan
from anybatch.planning.planner import Planner, report_nothing_fits
from anybatch.planning.strategy import PlannableFunction, PlannableGradient


def plan(
    fun: Callable[..., Any],
    *args: Any,
    timed: bool = True,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Plan:
    """Finds the fastest way of computing a gradient that fits the memory.

    Its bytes come from compiled programs, which are not run for that: two microbatch sizes give a line, a third
    confirms it. Among what fits, candidates are then timed on the device, in turns. `value_and_grad` with
    `microbatch_size="auto"` follows the plan, in this process and, since it is kept on disk, in later ones.

    **Never beyond.** The chosen program takes no more than the budget, as XLA counts its bytes.

    **Kept.** What was measured lies in the folder `ANYBATCH_CACHE` (by default in the user's cache; "off" keeps
    nothing), by program, shapes, device and versions. Planning the same again takes milliseconds.

    >>> import jax.numpy as jnp, anybatch as ab
    >>> def loss(w, batch):
    ...     return jnp.mean(jnp.tanh(batch @ w) ** 2)
    >>> w, batch = jnp.ones((64, 256)), jnp.ones((4096, 64))
    >>> plan = ab.plan(loss, w, batch, memory="3MiB", timed=False)
    >>> plan.chosen.fits, plan.microbatch_size < 4096
    (True, True)
    >>> value, grads = ab.value_and_grad(loss, microbatch_size=plan.microbatch_size)(w, batch)

    Args:
      fun: the loss, as for `value_and_grad`. Or what `clipped_grad`, `per_example_norms` or `per_example_grads` return:
        their method is chosen too, and of what follows only `memory`, `objective`, `timed` and `progress` are for them.
      *args: its arguments: arrays, or `jax.ShapeDtypeStruct` for a batch that is not there yet, which is not timed.
      timed: whether to run candidates. If not, the largest microbatch that fits is taken to be the fastest.
      progress: called with a text before each step that takes long.
      **options: the options of `value_and_grad`, all but `microbatch_size`, which is what is planned. `memory` is what
        the gradient may take, with its arguments; `objective="memory"` looks for the strategy that takes the least;
        `remat="auto"` also tries `jax.checkpoint`; on a `mesh`, bytes are those of one device. All other names are
        keyword arguments of the loss.

    Raises:
      NothingFitsError: if no way fits; the message has the table, and the ways out.
      InputError: for arguments that cannot be worked with.
    """
    made = _plan(fun, args, options, timed=timed, thorough=False, progress=progress)
    if made.chosen is None:
        report_nothing_fits(made, certain=True)
    return made


def explain(fun: Callable[..., Any], *args: Any, progress: Callable[[str], None] | None = None, **options: Any) -> Plan:
    """What `plan` finds, with more of what it did not choose: a table, as a database explains a query.

    It compiles the full batch too, to show what it would take, and it does not raise if nothing fits.

    >>> import jax.numpy as jnp, anybatch as ab
    >>> def loss(w, batch):
    ...     return jnp.mean(jnp.tanh(batch @ w) ** 2)
    >>> print(ab.explain(loss, jnp.ones((64, 256)), jnp.ones((4096, 64)), memory="3MiB", timed=False))
    The gradient of 4096 examples on cpu, within 3.0 MiB (memory='3MiB')
    ...
    Chosen: microbatch_size=..., the largest that fits. It was not timed.
    ...

    Args:
      fun: the loss, as for `plan`.
      *args: its arguments, as for `plan`.
      progress: as for `plan`.
      **options: the other arguments of `plan`, and the keyword arguments of the loss.

    Returns:
      A `Plan`: `print` it, look at it in a notebook, or `plan.plot("plan.png")`.
    """
    timed = options.pop("timed", True)
    return _plan(fun, args, options, timed=timed, thorough=True, progress=progress)


# The options of `value_and_grad` that `plan` takes. `microbatch_size` and `reproducible`, which needs a size, are not.
_OPTIONS = {field.name for field in dataclasses.fields(Options)} - {"microbatch_size", "reproducible", "noise"}


def _gradients_of(
    fun: Callable[..., Any], options: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., PlannableGradient], tuple[Any, ...], dict[str, Any]]:
    """A function that gives the gradient that a call asks for, and what to call it with.

    These are the arguments of the call, and its keyword arguments, with models taken apart.
    """
    if isinstance(fun, PlannableFunction):
        wrong = [name for name in options if name not in ("memory", "objective")]
        if wrong:
            raise InputError(
                "The options of per-example gradients are those of the function that is planned",
                given=", ".join(f"{name}={options[name]!r}" for name in wrong),
                remedy=f"Pass them where the loss is wrapped, e.g. ab.clipped_grad(loss, ..., {wrong[0]}=...).",
            )
        memory, objective = options.get("memory"), options.get("objective", "speed")
        return fun.to_plan(args, kwargs, memory=memory, objective=objective)
    checked = Options.of(fun, **options)
    call = partition_models(fun, checked.roles, checked.has_aux, args, kwargs)

    def gradient(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Gradient:
        return Gradient(call.fun, call.options(checked), checked.roles.sort(call.fun, args, kwargs))

    return gradient, call.args, call.kwargs


def _plan(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    given: dict[str, Any],
    *,
    timed: bool,
    thorough: bool,
    progress: Callable[[str], None] | None,
) -> Plan:
    if versions.is_jit_disabled():
        raise InputError(
            "A plan needs programs that are compiled",
            given="a call under jax.disable_jit()",
            remedy="Plan outside of it.",
        )
    options = {name: value for name, value in given.items() if name in _OPTIONS}
    kwargs = {name: value for name, value in given.items() if name not in _OPTIONS}
    make, args, kwargs = _gradients_of(fun, options, args, kwargs)
    leaves, tree = jax.tree.flatten((args, kwargs))
    abstract = [position for position, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]
    made: list[Plan] = []

    def plan_with(*traced: Any) -> None:
        filled_in = dict(zip(abstract, traced, strict=True))
        filled = [filled_in.get(position, leaf) for position, leaf in enumerate(leaves)]
        gradient = make(*jax.tree.unflatten(tree, filled))
        if not gradient.examples:
            raise InputError(
                "A plan needs a batch with examples",
                given="0 examples",
                remedy="Pass those of a usual step, or their shapes.",
            )
        with gradient.context():
            planner = Planner(gradient, arrays_exist=not abstract, notify=progress or (lambda text: None))
            made.append(planner.plan(timed=timed, thorough=thorough))

    if abstract:
        jax.eval_shape(plan_with, *(leaves[position] for position in abstract))
    else:
        plan_with()
    return made[0]
