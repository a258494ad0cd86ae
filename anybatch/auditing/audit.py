"""`audit`: checks that a user's own accumulation loop or training step gives the gradient of the full batch."""

import contextlib
import dataclasses
import functools
import inspect
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anybatch.auditing.bench import (
    FLOAT32,
    Bench,
    LeafAudit,
    Numbers,
    as_float64,
    compared,
    float64_bench,
    gap,
    given_bench,
    largest,
    rounded_constants,
)
from anybatch.auditing.candidates import Candidate, Form, GradientForm, NnxForm, OptimizerForm, StateForm
from anybatch.auditing.causes import Cause, Finding, changing, diagnose, diagnose_rounding
from anybatch.call.arguments import PartlyTrained, Roles
from anybatch.call.checks import one_of, whole_number
from anybatch.call.display import html_table, in_notebook, paragraph
from anybatch.call.loss import trace_loss
from anybatch.call.models import has_nnx, partition_models, trainable
from anybatch.call.tables import WIDTH, Column, text_table, wrapped
from anybatch.errors import InputError
from anybatch.verification.comparison import Trial
from anybatch.verification.verify import DifferentGradientError

MAX_ROWS = 12  # leaves that the table shows: those that differ most


@dataclasses.dataclass(frozen=True, repr=False)
class Audit:
    """The result of `audit`. Prints as a table, and holds no arrays.

    Args:
      same: whether the candidate gives the gradient of the full batch.
      cause: what is wrong, by which evidence, and what to type instead; None if nothing is.
      kind: the kind of mistake; None if there is none. `kinds` has all that were found together.
      leaves: the comparison, leaf by leaf.
      dtype: the precision of the comparison.
      num_examples: examples in the batch.
      microbatch_size: how many examples the candidate takes at a time, as given or found; None if not known.
      notes: about the comparison.
    """

    same: bool
    cause: str | None
    kind: Cause | None
    leaves: tuple[LeafAudit, ...]
    dtype: str
    num_examples: int
    microbatch_size: int | None
    notes: tuple[str, ...] = ()
    kinds: tuple[Cause, ...] = ()

    def raise_if_different(self) -> "Audit":
        """Returns itself if the candidate is right.

        Raises:
          DifferentGradientError: if it is not, with the table and the cause.
        """
        if not self.same:
            raise DifferentGradientError(str(self))
        return self

    def columns(self) -> list[Column]:
        """The columns of the table."""
        rows = self._rows
        return [
            Column("leaf", tuple(leaf.name for leaf in rows), is_left=True, least=24, keeps_end=True),
            Column("difference", tuple(_shown(leaf.difference) for leaf in rows)),
            Column("allowed", tuple(_shown(leaf.allowed) for leaf in rows), drop=1),
            Column("ratio", tuple("" if leaf.ratio is None else f"{leaf.ratio:.6g}" for leaf in rows), drop=0),
            Column("", tuple("same" if leaf.ok else "DIFFERENT" for leaf in rows)),
        ]

    def text(self, width: int | None = WIDTH) -> str:
        """The audit as plain text: the table, notes, and the cause.

        Args:
          width: the most characters of a line. None: all columns, and no line breaks in sentences.
        """
        lines, _ = text_table(self.columns(), width)
        remarks = [text for text in (self._hidden, *self.notes, self._verdict) if text]
        title, *remarks = [wrapped(text, width) for text in (self._title, *remarks)]
        return "\n".join([title, "", *lines, "", *remarks])

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        styles = ["" if leaf.ok else "bad" for leaf in self._rows]
        lead = "lead good" if self.same else "lead wrong"
        first, _, rest = self._verdict.partition("\n")
        parts = [paragraph(first, lead), paragraph(rest), paragraph(self._title, "about")]
        notes = [text for text in (self._hidden, *self.notes) if text]
        return in_notebook(*parts, html_table(self.columns(), styles), *map(paragraph, notes))

    def to_json(self) -> str:
        """The audit as JSON text."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        leaves = [{**dataclasses.asdict(leaf), "ok": leaf.ok} for leaf in self.leaves]
        leaves = [{name: _finite(value) for name, value in leaf.items()} for leaf in leaves]
        return json.dumps({**fields, "leaves": leaves}, indent=2)

    @property
    def _rows(self) -> list[LeafAudit]:
        """The leaves that differ most, up to a number."""
        by_size = sorted(self.leaves, key=lambda leaf: (leaf.ok, -leaf.difference / (leaf.allowed or 1e-300)))
        kept = {id(leaf) for leaf in by_size[:MAX_ROWS]}
        return [leaf for leaf in self.leaves if id(leaf) in kept]

    @property
    def _hidden(self) -> str:
        """A sentence about the leaves that the table leaves out, or an empty one."""
        shown = {id(leaf) for leaf in self._rows}
        same = [leaf.ok for leaf in self.leaves if id(leaf) not in shown]
        counts = [(same.count(False), "differs", "differ"), (same.count(True), "is the same", "are the same")]
        parts = [f"{number} {one if number == 1 else many}" for number, one, many in counts if number]
        return f"Of the leaves that are not shown, {' and '.join(parts)}: see .leaves." if parts else ""

    @property
    def _title(self) -> str:
        return (
            f"{self.num_examples} examples: the candidate compared with jax.value_and_grad of all of them, relative "
            f"differences in {self.dtype}"
        )

    @property
    def _verdict(self) -> str:
        return "The candidate gives the gradient of the full batch." if self.same else self.cause or ""


def audit(
    candidate: Callable[..., Any],
    loss: Callable[..., Any],
    params: Any,
    batch: Any,
    *args: Any,
    has_aux: bool = False,
    optimizer: Any = None,
    state: Any = None,
    microbatch_size: int | None = None,
    calls: str = "once",
    reference_optimizer: Any = None,
) -> Audit:
    """Checks, on your loss and your batch, that your own loop or training step is right, and says what is wrong.

    The reference is `jax.value_and_grad` of the loss for the full batch, and one update of your optimizer with it. If
    the candidate gives something else, known mistakes are computed on your loss and batch. One is named only if it
    gives what the candidate gave. Call it once, before training, outside `jit`.

    **Float64.** The comparison runs in double precision if the candidate can, where a right loop agrees to 1e-12. If
    the candidate casts to narrower dtypes, it is traced, and its operations are computed in float64. Then it runs in
    the given dtypes too, which shows sums in bfloat16 or float16. A candidate for which float64 says nothing is
    compared in the given dtypes, and a note says so.

    **What a candidate returns.** Without `optimizer` and `state`, `candidate(params, batch, *args)` returns `grads`,
    `(value, grads)` or `((value, aux), grads)`.

    >>> import jax, jax.numpy as jnp, anybatch as ab
    >>> def loss(w, x):
    ...     return jnp.mean((x @ w - 1) ** 2)
    >>> def loop(w, x):
    ...     return sum(jax.grad(loss)(w, part) for part in jnp.split(x, 4))
    >>> x = jnp.arange(24.0).reshape(12, 2) % 7
    >>> result = ab.audit(loop, loss, jnp.ones(2), x)
    >>> result.same, str(result.kind)
    (False, 'number_of_microbatches')

    Args:
      candidate: the loop or step to check. It gets copies of the arguments, so it may donate them.
      loss: the loss that the gradient should be of: `loss(params, batch, *args)`.
      params: the parameters: a pytree, an Equinox model, or an NNX model.
      batch: a pytree of arrays with a row for each example. It must fit into memory without microbatches.
      *args: further arguments of the loss and of the candidate, such as a PRNG key.
      has_aux: whether the loss returns `(loss, aux)`.
      optimizer: an optax optimizer. The candidate is then a step, `candidate(params, opt_state, batch, *args)`, that
        returns `(new_params, new_opt_state, ...)`. Of an `optax.MultiSteps` the inner optimizer is the reference.
      state: a training state. The candidate is then a step, `candidate(state, batch, *args)`, that returns the new
        state, or a tuple whose first entry is the new state. It may be a Flax `TrainState`; any object or dict with
        `params` and `opt_state`, together with `optimizer`; a pair `(model, optimizer)` of NNX. For an
        `nnx.Optimizer` the step is `candidate(model, optimizer, batch, *args)`, and changes both in place. Together
        with `optimizer`, a state of that optimizer is where the step starts.
      microbatch_size: how many examples the candidate takes at a time, if you know: it helps to name the cause.
      calls: "once" if one call gets the whole batch. "microbatches" if the candidate is called for each microbatch of
        `microbatch_size` in turn, as with `optax.MultiSteps`. Each call then gets its own PRNG keys, made with
        `jax.random.fold_in`.
      reference_optimizer: the optimizer of the reference, if it is another one than that of the candidate.

    Returns:
      An `Audit`, with `same`, `kind`, `cause` and `raise_if_different()`. It prints as a table of the leaves.

    Raises:
      InputError: for arguments that are not valid, and for a candidate that returns something else.
    """
    size = _check_arguments(candidate, loss, calls, microbatch_size, (params, batch, args, state))
    own_key = _own_key(state, args)
    loss_args = args if own_key is None else (own_key,)
    form, trial, subject = _prepare(
        candidate, loss, params, batch, loss_args, has_aux, optimizer, state, reference_optimizer
    )
    runner = Candidate(form, subject, batch, args, size if calls == "microbatches" else None)
    return _audit(runner, trial, size)


def _check_arguments(candidate: Any, loss: Any, calls: Any, size: Any, arrays: Any) -> int | None:
    """Checks what needs no call. Returns the microbatch size."""
    for name, fun in (("candidate", candidate), ("loss", loss)):
        if not callable(fun):
            raise InputError(
                f"{name} must be a function",
                given=f"{name} of type {type(fun).__name__}",
                remedy="Pass ab.audit(candidate, loss, params, batch): first the loop or step, then the loss.",
            )
    one_of("calls", calls, ("once", "microbatches"))
    if size is not None:
        size = whole_number("microbatch_size", size, 1)
    if calls == "microbatches" and size is None:
        raise InputError(
            'calls="microbatches" needs the size of the microbatches that the candidate is called with',
            given="microbatch_size=None",
            remedy="Pass it, e.g. microbatch_size=8.",
        )
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arrays)):
        raise InputError(
            "audit compares numbers, so its arguments must be concrete arrays",
            given="arguments inside a jit, grad or vmap",
            remedy="Call it outside, once, before training.",
        )
    return size


def _own_key(state: Any, args: tuple[Any, ...]) -> Any:
    """The key that the step of an `anybatch.TrainState` gives its loss; None for other states."""
    if args or not all(hasattr(state, name) for name in ("key", "step", "skipped")) or state.key is None:
        return None
    return jax.random.fold_in(state.key, state.step)


def _prepare(
    candidate: Any, loss: Any, params: Any, batch: Any, args: Any, has_aux: bool, optimizer: Any, state: Any, other: Any
) -> tuple[Form, Trial, Any]:
    """The form of the candidate, the loss and its arguments, and what the candidate is called with and changes."""
    roles = Roles.of(argnums=0, batch_argnums=1, rng_argnums=())
    nnx_optimizer = next((part for part in _parts(state) if hasattr(part, "wrt")), None) if has_nnx(state) else None
    params = _params(params, state, nnx_optimizer)
    if nnx_optimizer is not None:
        roles = dataclasses.replace(roles, filters=(nnx_optimizer.wrt,))
    filters = (optimizer is not None or state is not None) and nnx_optimizer is None
    call = partition_models(loss, roles, has_aux, (params, batch, *args), {}, filters=filters)
    options = {
        "argnums": roles.argnums,
        "has_aux": call.has_aux,
        "batch_argnums": 1,
        "batch_argnames": (),
        "reduction": "infer",
        "aux_reduction": None,
        "rng_argnums": (),
        "accumulator_dtype": jnp.float32,
    }
    trial = Trial(call.fun, call.args, call.kwargs, options)
    with _own_advice():
        trace_loss(call.fun, trial.arguments, trial.num_examples, weighted=False, has_aux=call.has_aux)
    first = call.args[0]
    trained = first.trained if isinstance(first, PartlyTrained) else first
    name = _first_name(loss)
    if nnx_optimizer is not None:
        how = "pair" if isinstance(state, tuple) else "both" if "model" in vars(state) else "model, optimizer"
        subject = (params, nnx_optimizer)
        return NnxForm(candidate, trained, name, subject, how), trial, subject
    if state is not None and _has_parts(state):
        return StateForm(candidate, trained, name, state, optimizer, other), trial, state
    if state is not None and optimizer is None:
        raise InputError(
            "A state must have params and opt_state, as attributes or as keys of a dict",
            given=f"state of type {type(state).__name__}",
            remedy="Pass such a state, or params and optimizer= for candidate(params, opt_state, batch).",
        )
    if optimizer is not None:
        _check_optimizer(optimizer)
        subject = (params, optimizer.init(trainable(params)) if state is None else state)
        return OptimizerForm(candidate, trained, name, subject, optimizer, other), trial, subject
    return GradientForm(candidate, trained, name, has_aux=has_aux), trial, params


@contextlib.contextmanager
def _own_advice() -> Iterator[None]:
    """Replaces advice about options that other functions have and `audit` has not."""
    try:
        yield
    except InputError as error:
        if not any(option in error.remedy for option in ("argnums=", "batch_argnums", "batch_argnames", "reduction=")):
            raise
        remedy = (
            "Pass ab.audit(candidate, loss, params, batch, *args): every array of batch has a row for each example, "
            "and *args are the other arguments of the loss. The loss returns a scalar, or with has_aux=True a pair "
            "(loss, aux)."
        )
        raise InputError(error.must, given=error.given, remedy=remedy) from None


def _parts(state: Any) -> Sequence[Any]:
    return state if isinstance(state, tuple) else (state,)


def _params(params: Any, state: Any, nnx_optimizer: Any) -> Any:
    """The parameters: those given, or those of the state. Raises if they are not the same."""
    if nnx_optimizer is not None:
        if isinstance(state, tuple):
            return state[0]
        return vars(state).get("model", params)
    if state is None or not _has_parts(state):
        return params
    own = state["params"] if isinstance(state, dict) else state.params
    if params is None or params is own:
        return own
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(own), strict=False)
    structure: Any = jax.tree.structure(params)
    same_tree = structure == jax.tree.structure(own)
    if not same_tree or any(np.shape(a) != np.shape(b) or np.any(np.asarray(a) != np.asarray(b)) for a, b in pairs):
        raise InputError(
            "params must be the parameters of the state",
            given="params that are not equal to state.params",
            remedy="Pass ab.audit(step, loss, state.params, batch, state=state).",
        )
    return own


def _has_parts(state: Any) -> bool:
    has = state.__contains__ if isinstance(state, dict) else functools.partial(hasattr, state)
    return has("params") and has("opt_state")


def _check_optimizer(optimizer: Any) -> None:
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise InputError(
            "optimizer must be an optax optimizer, with init and update",
            given=f"optimizer of type {type(optimizer).__name__}",
            remedy="Pass e.g. optimizer=optax.adamw(3e-4).",
        )


def _first_name(loss: Any) -> str:
    try:
        return next(iter(inspect.signature(loss).parameters))
    except (TypeError, ValueError, StopIteration):
        return "params"


def _audit(candidate: Candidate, trial: Trial, size: int | None) -> Audit:
    given = given_bench(candidate, trial)
    first = given.observe()  # in the dtypes of the user, whose errors are raised as they are
    _check_finite(given)
    notes = list(candidate.form.notes)
    again = given.observe()
    if _changes(first, again):
        bench, leaves, findings = given, *_changing(given, first, again, notes)
    else:
        bench, leaves, findings = _compared(given, first, size, notes)
    kinds = tuple(dict.fromkeys(finding.kind for finding in findings))
    found = [finding.microbatch_size for finding in findings if finding.microbatch_size is not None]
    return Audit(
        same=not findings,
        cause="\n".join(finding.text for finding in findings) or None,
        kind=kinds[0] if kinds else None,
        leaves=tuple(leaves),
        dtype=given.trial.dtype.name if findings and Cause.NARROW_ACCUMULATOR in kinds else bench.trial.dtype.name,
        num_examples=trial.num_examples,
        microbatch_size=size or (found[0] if found else None),
        notes=tuple(notes),
        kinds=kinds,
    )


def _changing(given: Bench, first: Numbers, again: Numbers, notes: list[str]) -> tuple[list[LeafAudit], list[Finding]]:
    """The audit of a candidate with a state of its own. It is not traced: it would keep what JAX traces with."""
    notes.append("The candidate gives another result each time, for the same arguments.")
    notes.append(f"Compared in {given.trial.dtype.name}: a candidate that changes is not computed in float64.")
    leaves = _leaves(given, first, notes)
    if not all(leaf.ok for leaf in leaves):
        return leaves, [changing()]
    leaves = _leaves(given, again, notes)
    return leaves, [changing(is_right_at_first=True)] if not all(leaf.ok for leaf in leaves) else []


def _compared(
    given: Bench, first: Numbers, size: int | None, notes: list[str]
) -> tuple[Bench, list[LeafAudit], list[Finding]]:
    """The comparison of a candidate in float64 and in its own dtypes, and what is wrong."""
    bench, reason = float64_bench(given.candidate, given.trial)
    if bench is None:
        notes.append(f"Not compared in float64: {reason}.")
        bench = given
    actual = first if bench is given else bench.observe()
    leaves = _leaves(bench, actual, notes)
    if bench is not given and not all(leaf.ok for leaf in leaves):
        bench, leaves = _allowing_rounded_constants(given, bench, first, leaves, notes)
        if own := _own_dtypes(given, bench, first, notes):
            bench, actual, leaves = given, first, own
    if all(leaf.ok for leaf in leaves):
        return bench, *_more(given, bench, first, leaves, size, notes)
    return bench, leaves, diagnose(bench, actual, leaves, size)


def _more(
    given: Bench, bench: Bench, first: Numbers, leaves: list[LeafAudit], size: int | None, notes: list[str]
) -> tuple[list[LeafAudit], list[Finding]]:
    """What else is tested if the candidate is right for the given batch: rounding, and other batches."""
    if bench is not given:
        rounded = _rounded(given, bench, first)
        if findings := diagnose_rounding(given, bench, first, rounded, notes):
            return rounded, findings
    tolerances = bench.tolerances(bench.gradient_tolerances())
    random, number = np.random.default_rng(0), bench.trial.num_examples
    with contextlib.suppress(Exception):  # the candidate may need the batch as it is
        rows = random.permutation(number)
        if bench.off(rows, tolerances) > 10:
            shuffled = bench.with_rows(rows)
            actual = shuffled.observe()
            other = compared(shuffled, actual, shuffled.tolerances(shuffled.gradient_tolerances()), _names(bench))
            if not all(leaf.ok for leaf in other):
                notes.append("In the given order the candidate is right. It differs once the examples are shuffled.")
                return other, diagnose(shuffled, actual, other, size)
    follows_batch = True
    with contextlib.suppress(Exception):
        follows_batch = bench.off(random.integers(0, number, number), tolerances) <= 10
    if not follows_batch:
        notes.append(
            "For other examples the candidate differs: something that it uses does not come from the batch that it is "
            "given, such as an array that it closes over."
        )
    with contextlib.suppress(Exception):
        scaled = bench.scaled()
        if scaled.off(np.arange(number), scaled.tolerances(scaled.gradient_tolerances())) > 10:
            notes.append(
                "For other parameters the candidate differs: it does not compute the gradient at the parameters that "
                "it is given."
            )
    with contextlib.suppress(Exception):  # it may need a certain number of examples
        has_as_many = bench.candidate.size != 1  # microbatches; if called with single examples, one fewer
        if follows_batch and has_as_many and number > 1 and bench.off(np.arange(number - 1), tolerances) > 10:
            notes.append(
                f"With only {number - 1} of the {number} examples the candidate differs from the full batch: it is "
                "right for batches that its microbatches divide evenly."
            )
    notes += _blind_spots(bench, tolerances)
    return leaves, []


def _names(bench: Bench) -> list[str]:
    return bench.candidate.form.names


def _blind_spots(bench: Bench, tolerances: Sequence[float]) -> list[str]:
    """What this batch or optimizer cannot show."""
    found = []
    if bench.candidate.form.is_step:
        _check_uses_gradient(bench, tolerances)
        twice = bench.predict([2 * leaf for leaf in bench.gradient])
        if all(gap(*pair) <= tol for *pair, tol in zip(twice, bench.expected, tolerances, strict=True)):
            found.append("The optimizer makes the same of twice the gradient, so a wrong factor would not show.")
    leaves = zip(bench.trial.arguments.arrays_of("batch"), bench.trial.arrays.batch, strict=True)
    ones = [leaf.name for leaf, array in leaves if np.ndim(array) and np.all(as_float64(array) == 1)]
    if ones:
        found.append(f"{ones[0]} is 1 everywhere. If it is a mask, a mean of means would not show: pass unequal masks.")
    return found


def _check_uses_gradient(bench: Bench, tolerances: Sequence[float]) -> None:
    without = bench.predict([0 * leaf for leaf in bench.gradient])
    is_same = all(gap(*pair) <= tol for *pair, tol in zip(without, bench.expected, tolerances, strict=True))
    if is_same and any(largest(leaf) for leaf in bench.gradient):
        raise InputError(
            "The step must depend on the gradient, to tell whether the gradient is right",
            given="a step whose result is the same with a gradient of zeros",
            remedy="Pass an optimizer with a learning rate above 0, or a state that is past the start of its schedule.",
        )


def _check_finite(bench: Bench) -> None:
    names = bench.trial.names[: bench.num_gradients + 1]
    wrong = [name for name, leaf in zip(names, bench.trial.expected, strict=False) if not np.isfinite(leaf).all()]
    if wrong:
        raise InputError(
            "The gradient of the full batch must be finite, to compare with it",
            given=f"NaN or infinity in {', '.join(wrong[:3])} of jax.value_and_grad(loss)",
            remedy="Pass parameters and a batch for which the loss is finite.",
        )


def _leaves(bench: Bench, actual: Numbers, notes: list[str]) -> list[LeafAudit]:
    """The comparison of all leaves. A difference as small as the rounding of a float32 constant is allowed."""
    form = bench.candidate.form
    leaves = compared(bench, actual, bench.tolerances(bench.gradient_tolerances()), form.names)
    if actual.aux is not None and len(leaves) < len(form.names) + 1 + max(len(actual.aux), len(bench.aux)):
        notes.append("Leaves of aux with other names or shapes than those of the full batch are not compared.")
    rough = [leaf for leaf in leaves if not leaf.ok]
    if rough and all(leaf.difference <= FLOAT32 for leaf in rough):
        worst = max(rough, key=lambda leaf: leaf.difference)
        notes.append(f"In {worst.name} it agrees to {worst.difference:.1e} only, as with a constant in float32.")
        leaves = [dataclasses.replace(leaf, allowed=max(leaf.allowed, FLOAT32)) for leaf in leaves]
    return leaves


def _allowing_rounded_constants(
    given: Bench, bench: Bench, first: Numbers, leaves: list[LeafAudit], notes: list[str]
) -> tuple[Bench, list[LeafAudit]]:
    """The comparison with the rounding of the candidate's constants in bfloat16 or float16 allowed.

    A constant such as 0.1 is rounded when it meets a bfloat16 array, also where the rest is computed in float64. This
    is allowed if the candidate has such constants, the loss has not, and in its own dtypes the candidate is right.
    """
    constants = bench.program.constants - rounded_constants(given.trial.equations)
    dtype = max((dtype for dtype, _ in constants), key=lambda dtype: float(jnp.finfo(dtype).eps), default=None)
    rough = [leaf for leaf in leaves if not leaf.ok]
    if dtype is None or not all(leaf.difference <= float(jnp.finfo(dtype).eps) for leaf in rough):
        return bench, leaves
    if not all(leaf.ok for leaf in _rounded(given, bench, first)):
        return bench, leaves
    eps, worst = float(jnp.finfo(dtype).eps), max(rough, key=lambda leaf: leaf.difference)
    notes.append(f"In {worst.name} it agrees to {worst.difference:.1e} only, as with a constant in {dtype}.")
    leaves = [dataclasses.replace(leaf, allowed=max(leaf.allowed, eps)) for leaf in leaves]
    return dataclasses.replace(bench, constants_eps=eps), leaves


def _own_dtypes(given: Bench, bench: Bench, first: Numbers, notes: list[str]) -> list[LeafAudit] | None:
    """The comparison in the given dtypes, if one in float64 says nothing and the candidate is right in the given ones.

    That is so for a candidate that cannot be traced, which may cast to narrower dtypes inside. Then it may be as far
    off as the full batch in the same dtypes is from float64. And a right loop that draws its random numbers in float32
    draws others than a loss that draws them in float64.
    """
    if bench.trial.is_random:
        if given.trial.eps > FLOAT32:
            return None
        allowed = given.gradient_tolerances()
        note = "Compared in the given dtypes: in float64 the candidate draws other random numbers than the loss."
    elif not bench.is_traced:
        errors = [gap(a, b) for a, b in zip(given.gradient, bench.gradient, strict=True)]
        allowed = [max(4 * e, 8 * given.trial.eps * s) for e, s in zip(errors, given.scales, strict=True)]
        note = (
            "Compared in the given dtypes: the candidate cannot be traced, so operations that it does in narrower "
            "dtypes cannot be computed in float64."
        )
    else:
        return None
    leaves = compared(given, first, given.tolerances(allowed), _names(given))
    if not all(leaf.ok for leaf in leaves) or not _has_small_error(given, bench, first):
        return None
    notes.append(note)
    return leaves


def _has_small_error(given: Bench, bench: Bench, first: Numbers) -> bool:
    """True unless the root mean square error of a narrow gradient is large. It varies less than the largest error."""
    if bench.trial.is_random or given.candidate.form.is_step or given.trial.eps <= FLOAT32:
        return True

    def norm(one: list[np.ndarray], other: list[np.ndarray]) -> float:
        return math.sqrt(sum(float(np.sum(np.abs(a - b) ** 2)) for a, b in zip(one, other, strict=True)))

    size = norm(bench.gradient, [0 * leaf for leaf in bench.gradient])
    error = max(norm(given.gradient, bench.gradient), given.trial.eps * size)
    return norm(first.leaves, bench.gradient) <= 4 * error


def _changes(first: Numbers, again: Numbers) -> bool:
    """True if the candidate gave something else when it was called again with the same arguments."""
    pairs = zip(first.leaves, again.leaves, strict=True)
    pairs_of_numbers = ((np.nan_to_num(a), np.nan_to_num(b)) for a, b in pairs)
    return any(gap(a, b) > 1e-2 * max(largest(a), largest(b)) for a, b in pairs_of_numbers)


def _rounded(given: Bench, double: Bench, actual: Numbers) -> list[LeafAudit]:
    """The comparison in the given dtypes, of a candidate that agrees in float64.

    A leaf may differ by as much as a change of the inputs in their last digit does, or as the full batch itself does
    from float64.
    """
    errors = [0.0] * given.num_gradients
    if not given.trial.is_random:  # in float64 it may draw other random numbers
        errors = [gap(a, b) for a, b in zip(given.gradient, double.gradient, strict=True)]
    allowed = [max(pair) for pair in zip(given.gradient_tolerances(capped=False), (4 * e for e in errors), strict=True)]
    return compared(given, actual, given.tolerances(allowed), given.candidate.form.names)


def _shown(number: float) -> str:
    return f"{number:.1e}" if number and math.isfinite(number) else f"{number:g}"


def _finite(value: Any) -> Any:
    """Infinity is no JSON."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
