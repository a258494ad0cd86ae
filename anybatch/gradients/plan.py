"""`plan` and `explain`: which strategy will compute a gradient, and why."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from anybatch.call.host_batch import with_rows
from anybatch.call.models import partition_models
from anybatch.call.options import Options
from anybatch.errors import InputError
from anybatch.gradients.computation import Gradient
from anybatch.gradients.streaming import plan_streamed
from anybatch.jaxprs import versions
from anybatch.planning.plan import Plan
from anybatch.planning.planner import Planner, report_nothing_fits
from anybatch.planning.problem import Problem
from anybatch.planning.progress import shown


def plan(
    fun: Callable[..., Any],
    *args: Any,
    timed: bool = True,
    progress: bool | Callable[[str], None] | None = None,
    **options: Any,
) -> Plan:
    """Finds the fastest strategy for a gradient that fits the memory: its microbatch size, and more if you allow it.

    The bytes and the time of a strategy are predicted from its jaxpr. The one that is predicted to be the fastest is
    compiled, and timed on the device; then others that may be faster. Once a program that fits was timed, at most four
    are compiled in all, and none that would likely be compiled after more than 30 s. `value_and_grad` with
    `microbatch_size="auto"` follows the plan, in this process and later ones.

    **Memory.** The chosen program takes no more than the budget, as XLA counts its bytes. Predictions only decide which
    programs are compiled.

    **Cache.** Measurements are stored in the folder `ANYBATCH_CACHE` (by default in the user's cache folder; "off"
    stores nothing), by program, shapes, device and versions. Planning the same gradient again takes milliseconds.

    >>> import jax.numpy as jnp, anybatch as ab
    >>> def loss(w, batch):
    ...     return jnp.mean(jnp.tanh(batch @ w) ** 2)
    >>> w, batch = jnp.ones((64, 256)), jnp.ones((4096, 64))
    >>> plan = ab.plan(loss, w, batch, memory="3MiB", timed=False)
    >>> plan.chosen.fits, plan.microbatch_size < 4096
    (True, True)
    >>> value, grads = ab.value_and_grad(loss, microbatch_size=plan.microbatch_size)(w, batch)

    Args:
      fun: the loss, as for `value_and_grad`. Or the result of `clipped_grad`, `per_example_norms` or
        `per_example_grads`: then `method` is planned too, `block_size` is that of the function, and the
        only options here are `memory` and `objective`.
      *args: the arguments of the loss. They may be arrays, or `jax.ShapeDtypeStruct` for arrays that do not exist yet;
        then nothing is timed.
      timed: whether to time strategies. If not, the largest microbatch that fits counts as the fastest.
      progress: True shows a bar with what is compiled; or a function that is called with a text before each slow step.
      **options: the options of `value_and_grad` except `microbatch_size`, which is planned. `memory` is the budget for
        the gradient and its arguments; `objective="memory"` chooses the strategy that takes the least memory;
        `remat=None` keeps all activations; on a `mesh`, bytes are those of one device. All other names are
        keyword arguments of the loss.

    Returns:
      A `Plan`. Print it to see the table of strategies.

    Raises:
      NothingFitsError: if no strategy fits. The message has the table, and what you can do.
      InputError: for arguments that are not allowed.
    """
    made = _plan(fun, args, options, timed=timed, thorough=False, progress=progress)
    if made.chosen is None:
        report_nothing_fits(made, certain=True)
    return made


def explain(
    fun: Callable[..., Any], *args: Any, progress: bool | Callable[[str], None] | None = None, **options: Any
) -> Plan:
    """The same as `plan`, with more of the strategies that were not chosen: like EXPLAIN for a database query.

    It compiles the full batch too, to show what it would take. It does not raise if nothing fits.

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
      **options: the other arguments of `plan`, and keyword arguments of the loss.

    Returns:
      A `Plan`: print it, display it in a notebook, or call `plan.plot("plan.png")`.
    """
    timed = options.pop("timed", True)
    return _plan(fun, args, options, timed=timed, thorough=True, progress=progress)


# The options of `value_and_grad` that `plan` accepts. `reproducible` is not among them: it needs a microbatch_size.
_OPTIONS = {field.name for field in dataclasses.fields(Options)} - {"microbatch_size", "reproducible", "noise"}


def _gradients_of(
    fun: Callable[..., Any], options: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Problem], tuple[Any, ...], dict[str, Any]]:
    """A function from arguments to the gradient to plan; and its arguments, in which models are replaced by arrays."""
    if hasattr(fun, "to_plan"):  # such as the result of `clipped_grad`
        wrong = [name for name in options if name not in ("memory", "objective")]
        if wrong:
            raise InputError(
                "The options of per-example gradients belong where the loss is wrapped",
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
    progress: bool | Callable[[str], None] | None,
) -> Plan:
    if versions.is_jit_disabled():
        raise InputError(
            "A plan needs compiled programs",
            given="a call under jax.disable_jit()",
            remedy="Plan outside of it.",
        )
    options = {name: value for name, value in given.items() if name in _OPTIONS}
    kwargs = {name: value for name, value in given.items() if name not in _OPTIONS}
    make, args, kwargs = _gradients_of(fun, options, *with_rows(args, kwargs))
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
                remedy="Pass a batch of the usual size, or its shapes as jax.ShapeDtypeStruct.",
            )
        if gradient.is_streamed:
            made.append(plan_streamed(gradient))
            return
        with gradient.context():
            planner = Planner(gradient, arrays_exist=not abstract, notify=notify)
            made.append(planner.plan(timed=timed, thorough=thorough))

    with shown(progress) as notify:
        if abstract:
            jax.eval_shape(plan_with, *(leaves[position] for position in abstract))
        else:
            plan_with()
    return made[0]
