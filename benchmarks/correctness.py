"""Which gradients do the usual ways of accumulating get right?

    pip install -e ".[peers]"                         # jax-privacy and torch; without them their cells say so
    python benchmarks/correctness.py                  # CPU, two minutes of its time
    python benchmarks/correctness.py --losses mean dice --ways "optax.microbatch" anybatch
    python benchmarks/correctness.py --save benchmarks/results/correctness.json

Twenty-five losses (`correctness_losses.py`), each through seven ways of computing its gradient in microbatches. The
gradient is compared with `jax.grad` of the full batch, in float64: the relative difference is the norm of the
difference of all leaves, divided by the norm of the gradient of the full batch. Rounding is about 1e-16.

Each way is first given the loss as it is, with the option that its documentation has for such a loss (a sum or a
mean). If that is wrong, and its documentation has the means for a rewriting that is right, the rewriting is run too,
and the note of the row says what it needs. So an outcome is the best that a reader of the documentation can get:

    exact            the gradient of the full batch, up to rounding. With a star: only after the rewriting in the note.
                     With a dagger: GradCache takes a loss as two functions, an encoder and a loss of its output
    wrong            another gradient, without an error
    refused          an error says that it cannot be done; the note has its first line
    not expressible  the way does not claim to compute this; the note says why

The rewritings are: the sum of a microbatch divided by the count of the full batch (Trainer's `num_items_in_batch`,
`use_grad_mean=False` of MultiSteps, the SUM accumulator of Optax); float32 accumulators; padding with
`is_padding_example` (jax_privacy); sums instead of ratios as aux outputs; a cut of the loss at another place
(GradCache). A chain rule by hand, such as that for the root of a mean, is not counted as one.

Found, with JAX 0.10.2, Optax 0.2.8, jax_privacy 2.0.0 and PyTorch 2.13: seven losses are exact in every way: mean,
sum, a mean with L2, keys of examples, two arguments, tied weights, layers in `lax.scan`. Means over tokens, an empty
microbatch, aux outputs, bfloat16 and a mesh need a rewriting in most ways. Ten losses (functions of means, and losses
that look across examples) are wrong without an error in the four loops, and exact with GradCache's method, if the loss
is split by hand at the right place. anybatch takes all 25 as they are.
"""

import argparse
import collections
import dataclasses
import functools
import importlib.util
import json
import math
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import record
from correctness_losses import LOSSES, Loss, Problem, accuracy, mean_and_sums
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import anybatch as ab

EXACT, WRONG, REFUSED, NOT_EXPRESSIBLE, NOT_INSTALLED = "exact", "wrong", "refused", "not expressible", "not installed"
DEVICES = 4


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss with its data, and the gradient of its full batch."""

    loss: Loss
    problem: Problem
    expected: Any

    @classmethod
    def of(cls, loss: Loss) -> "Case":
        problem = loss.problem()
        params, batch = problem.params, problem.batch
        if loss.special == "narrow":
            params, batch = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), (params, batch))
        fun = jax.grad(loss, tuple(range(len(params))), has_aux=loss.special == "aux")
        return cls(loss, problem, jax.jit(fun)(*params, batch, *problem.rest))

    @property
    def examples(self) -> int:
        return jax.tree.leaves(self.problem.batch)[0].shape[0]

    @property
    def batch_argnum(self) -> int:
        return len(self.problem.params)

    @property
    def arguments(self) -> tuple[Any, ...]:
        batch = self.problem.batch
        if self.loss.special == "mesh":
            batch = jax.device_put(batch, NamedSharding(mesh(), P("data")))
        return (*self.problem.params, batch, *self.problem.rest)

    @property
    def counts(self) -> Any:
        return self.loss.counts(self.problem.batch)

    def rest(self, index: Any) -> tuple[Any, ...]:
        """The other arguments for one microbatch: a key of its own, as careful loops have it."""
        return tuple(jax.random.fold_in(key, index) for key in self.problem.rest)

    @property
    def divisible(self) -> bool:
        return self.examples % self.problem.size == 0

    def grad(self, fun: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """`jax.grad` of the loss, or of another function: a tuple with the gradient of each of its parameters."""
        argnums = tuple(range(len(self.problem.params)))
        return jax.grad(fun or self.loss, argnums, has_aux=self.loss.special == "aux")

    def part(self) -> Callable[..., Any]:
        """The rewritten loss: what a microbatch contributes to the loss of the full batch. The parts are added up."""
        return functools.partial(self.loss.part, counts=self.counts)

    def microbatches(self) -> Iterator[Any]:
        """Slices of the batch, one after another. The last one may be smaller."""
        size = self.problem.size
        for start in range(0, self.examples, size):
            microbatch = jax.tree.map(lambda leaf: leaf[start : start + size], self.problem.batch)  # noqa: B023
            if self.loss.special == "mesh":
                microbatch = jax.device_put(microbatch, NamedSharding(mesh(), P("data")))
            yield microbatch


@dataclasses.dataclass(frozen=True)
class Attempts:
    """How a way is called with one loss. Each attempt returns what `Case.grad` returns.

    Attributes:
      unchanged: with the loss as it is.
      rewritten: with what the documentation has for such a loss, if that is another function or option.
      needs: what the rewriting is.
      default: with the loss as it is and no options, where that differs from `unchanged`.
      cannot: why the way does not claim to compute this loss.
      note: anything else that a reader must know.
    """

    unchanged: Callable[[], Any] | None = None
    rewritten: Callable[[], Any] | None = None
    needs: str = ""
    default: Callable[[], Any] | None = None
    cannot: str = ""
    note: str = ""


TIMES = " times the gradient"
DENOMINATOR = "sums of microbatches, divided by the counts of the full batch"
SUMS_OF_AUX = "aux as sums, which are divided at the end"


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])


# --- the ways -------------------------------------------------------------------------------------------------------


def plain_scan(case: Case) -> Attempts:
    """The loop that everyone writes: a scan over microbatches that adds up gradients, and a division."""
    loss, size = case.loss, case.problem.size

    def accumulate(fun: Any, reduction: str, dtype: Any = None) -> Any:
        def run(*args: Any) -> Any:
            params, batch = args[: case.batch_argnum], args[case.batch_argnum]
            number = jax.tree.leaves(batch)[0].shape[0] // (size if loss.special != "mesh" else size // DEVICES)
            microbatches = jax.tree.map(lambda leaf: leaf.reshape(number, -1, *leaf.shape[1:]), batch)

            def step(total: Any, indexed: Any) -> Any:
                index, microbatch = indexed
                grads = jax.grad(fun, argnums)(*params, microbatch, *case.rest(index))
                return jax.tree.map(jnp.add, total, grads), None

            argnums = tuple(range(case.batch_argnum))
            zeros = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, dtype=dtype), params)
            total, _ = jax.lax.scan(step, zeros, (jnp.arange(number), microbatches))
            return total if reduction == "sum" else jax.tree.map(lambda leaf: leaf / number, total)

        return run

    def with_aux(fun: Any) -> Any:
        """The same with the mean, or the sum, of the aux outputs of all microbatches."""

        def run(params: Any, batch: Any) -> Any:
            number = case.examples // size
            microbatches = jax.tree.map(lambda leaf: leaf.reshape(number, size, *leaf.shape[1:]), batch)
            outputs = jax.lax.map(lambda microbatch: case.grad(fun)(params, microbatch), microbatches)
            return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), outputs)

        return run

    def on_mesh(fun: Any, reduction: str) -> Any:
        """Each device scans over its own microbatches; at the end there is one collective."""

        def shard(params: Any, batch: Any) -> Any:
            local = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, "data", to="varying"), params)
            grads = accumulate(fun, reduction)(local, batch)
            return jax.lax.psum(grads, "data") if reduction == "sum" else jax.lax.pmean(grads, "data")

        return jax.shard_map(shard, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P())

    def call(fun: Any) -> Callable[[], Any]:
        return lambda: jax.jit(fun)(*case.arguments)

    if loss.special == "mesh":
        needs = "psum of sums divided by the count of all devices, instead of pmean"
        return Attempts(call(on_mesh(loss, "mean")), call(on_mesh(case.part(), "sum")), needs)
    if loss.special == "aux":
        rewritten = call(lambda *args: _finish(with_aux(mean_and_sums)(*args)))
        return Attempts(call(with_aux(loss)), rewritten, SUMS_OF_AUX)
    unchanged = call(accumulate(loss, loss.reduction))
    if loss.special == "narrow":
        return Attempts(unchanged, call(accumulate(loss, "mean", jnp.float32)), "float32 accumulators")
    if loss.special == "key":
        return Attempts(unchanged, cannot=OTHER_MASKS.format("jax.random.fold_in(key, i)"))
    if not case.divisible:
        return Attempts(unchanged, note="the examples must be padded and weighted by hand")
    if loss.per_example:
        return Attempts(unchanged, call(accumulate(case.part(), "sum")), DENOMINATOR)
    return Attempts(unchanged)


OTHER_MASKS = "{} draws a fair sample of masks, but not those of the full batch"


def _finish(outputs: Any) -> Any:
    grads, sums = outputs
    return grads, accuracy(sums)


def optax_microbatch(case: Case) -> Attempts:
    """`optax.microbatching.microbatch(jax.grad(loss), ...)`: MEAN for a mean, SUM (its default) for a sum."""
    kinds = optax.microbatching.AccumulationType
    loss, mean, total = case.loss, kinds.MEAN, kinds.SUM

    def call(grad: Any, accumulator: Any) -> Callable[[], Any]:
        fun = optax.microbatching.microbatch(
            grad, argnums=case.batch_argnum, microbatch_size=case.problem.size, accumulator=accumulator
        )
        return lambda: jax.jit(fun)(*case.arguments)

    unchanged = call(case.grad(), mean if loss.reduction == "mean" else total)
    default = call(case.grad(), total)
    if loss.special == "aux":
        rewritten = call(case.grad(mean_and_sums), (mean, total))
        return Attempts(unchanged, lambda: _finish(rewritten()), SUMS_OF_AUX + ", with an accumulator each", default)
    if loss.special == "narrow":

        def wide(*args: Any) -> Any:
            return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), case.grad()(*args))

        needs = "gradients cast to float32 in the function that is passed"
        return Attempts(unchanged, call(wide, mean), needs, default)
    if loss.special == "key":
        note = "a key that is not part of the batch gives every microbatch the same masks"
        cannot = OTHER_MASKS.format("a key for each example, as part of the batch,")
        return Attempts(unchanged, default=default, cannot=cannot, note=note)
    if loss.per_example:
        rewritten = call(case.grad(case.part()), total)
        return Attempts(unchanged, rewritten if case.divisible else None, DENOMINATOR, default)
    return Attempts(unchanged, default=default)


def multi_steps(case: Case) -> Attempts:
    """`optax.MultiSteps` around SGD with learning rate 1, whose update is minus the gradient."""
    loss = case.loss

    def call(fun: Any, use_grad_mean: bool) -> Callable[[], Any]:
        # The accumulator is in float32 by default, which is exact for what is trained, but not for what is compared.
        dtype = jnp.float32 if loss.special == "narrow" else jnp.float64
        number = -(-case.examples // case.problem.size)
        optimizer = optax.MultiSteps(optax.sgd(1.0), number, use_grad_mean=use_grad_mean, accumulator_dtype=dtype)

        @jax.jit
        def step(state: Any, microbatch: Any, *rest: Any) -> Any:
            grads = jax.grad(fun, tuple(range(case.batch_argnum)))(*params, microbatch, *rest)
            return optimizer.update(grads, state, params)

        params = case.problem.params

        def run() -> Any:
            state = optimizer.init(params)
            for index, microbatch in enumerate(case.microbatches()):
                updates, state = step(state, microbatch, *case.rest(index))
            return jax.tree.map(jnp.negative, updates)

        return run

    if loss.special == "aux":
        return Attempts(cannot="it accumulates gradients; aux outputs are left to the caller")
    unchanged = call(loss, use_grad_mean=loss.reduction == "mean")
    if loss.special == "key":
        return Attempts(unchanged, cannot=OTHER_MASKS.format("a key for each step"))
    if loss.per_example:
        return Attempts(unchanged, call(case.part(), False), DENOMINATOR + ", use_grad_mean=False")
    return Attempts(unchanged)


def jax_privacy(case: Case) -> Attempts:
    """`jax_privacy.clipped_grad` without clipping: the sum of the gradients of single examples, over their number."""
    import jax_privacy
    from jax_privacy import batch_selection

    loss, size = case.loss, case.problem.size

    def call(fun: Any, normalize_by: float, **options: Any) -> Callable[[], Any]:
        grad = jax_privacy.clipped_grad(
            fun,
            tuple(range(case.batch_argnum)),
            has_aux=loss.special == "aux",
            l2_clip_norm=jnp.inf,
            normalize_by=normalize_by,
            batch_argnums=case.batch_argnum,
            microbatch_size=size,
            **options,
        )
        return lambda: jax.jit(grad)(*case.arguments)

    def padded() -> Any:
        indices = batch_selection.pad_to_multiple_of(jnp.arange(case.examples), size)
        batch = jax.tree.map(lambda leaf: leaf[indices], case.problem.batch)
        grad = jax_privacy.clipped_grad(
            loss, (0,), l2_clip_norm=jnp.inf, normalize_by=case.examples, microbatch_size=size
        )
        return jax.jit(grad)(*case.problem.params, batch, is_padding_example=jnp.asarray(indices == -1))

    def aux_of(run: Callable[[], Any], combine: Any) -> Callable[[], Any]:
        def combined() -> Any:
            grads, outputs = run()
            return grads, combine(outputs.aux)

        return combined

    mean = float(case.examples)
    unchanged = call(loss, mean if loss.reduction == "mean" else 1.0)
    if loss.special == "aux":
        unchanged = aux_of(unchanged, lambda aux: jax.tree.map(jnp.mean, aux))
        rewritten = aux_of(
            call(mean_and_sums, mean), lambda sums: accuracy(jax.tree.map(lambda leaf: jnp.sum(leaf), sums))
        )
        return Attempts(unchanged, rewritten, SUMS_OF_AUX + "; they are returned for each example")
    if loss.special == "narrow":
        return Attempts(unchanged, call(loss, mean, dtype=jnp.float32), "dtype=jnp.float32")
    if loss.special == "key":
        keyed = call(loss, mean, prng_argnum=case.batch_argnum + 1)
        return Attempts(keyed, cannot=OTHER_MASKS.format("prng_argnum, a key for each example,"))
    if not case.divisible:
        return Attempts(unchanged, padded, "pad_to_multiple_of and is_padding_example")
    if loss.per_example:
        return Attempts(unchanged, call(case.part(), 1.0), DENOMINATOR)
    return Attempts(unchanged, cannot="it sums gradients of single examples, as its documentation says")


def pytorch(case: Case) -> Attempts:
    """A PyTorch loop as in Hugging Face's documentation; `num_items_in_batch` is the rewriting."""
    import correctness_torch as torch_side

    loss = case.loss
    if loss.special == "aux":
        return Attempts(cannot="it accumulates gradients; aux outputs are left to the caller")
    same = torch_side.Loop(loss.name, case.problem, case.counts)
    if loss.special == "key":
        difference = relative_difference(*same.dropout())
        note = f"with one seed, the loop and the full batch differ by {difference:.0%}"
        return Attempts(cannot=OTHER_MASKS.format("the global generator"), note=note)
    same.check(case.expected, loss.tolerance)
    if loss.special == "narrow":
        needs = "float32 parameters and autocast (bf16=True)"
        return Attempts(same.unchanged, same.autocast, needs)
    if loss.special == "mesh":
        needs = "num_items_in_batch over all devices; the averaging of DistributedDataParallel is emulated"
        return Attempts(same.unchanged_on_devices, same.items_on_devices, needs)
    if loss.reduction == "sum":
        return Attempts(same.items, note="a sum is not divided by the steps, as with compute_loss_func")
    if loss.per_example:
        needs = "num_items_in_batch: " + DENOMINATOR
        if len(case.counts) > 1:
            needs += ", of which Trainer counts one"
        return Attempts(same.unchanged, same.items, needs)
    return Attempts(same.unchanged)


def grad_cache(case: Case) -> Attempts:
    """GradCache: representations first, then the gradient of the loss to them, then back through each microbatch."""
    loss, number = case.loss, case.batch_argnum

    def call(encode: Any, head: Any, params: Any) -> Callable[[], Any]:
        @jax.jit
        def forward(microbatch: Any, *rest: Any) -> Any:
            return encode(*params, microbatch, *rest)

        @jax.jit
        def backward(total: Any, microbatch: Any, cotangent: Any, *rest: Any) -> Any:
            _, pull = jax.vjp(lambda *params: encode(*params, microbatch, *rest), *params)
            return jax.tree.map(jnp.add, total, pull(cotangent))

        def run() -> Any:
            batch = case.arguments[number]
            rows = [forward(microbatch, *case.rest(index)) for index, microbatch in enumerate(case.microbatches())]
            cache = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *rows)

            def of_rows(params: Any, rows: Any) -> Any:
                return head(*params, rows, batch, loss.counts(batch))

            total, cotangents = jax.jit(jax.grad(of_rows, argnums=(0, 1)))(params, cache)
            start = 0
            for index, (microbatch, part) in enumerate(zip(case.microbatches(), rows, strict=True)):
                stop = start + jax.tree.leaves(part)[0].shape[0]
                cotangent = jax.tree.map(lambda leaf: leaf[start:stop], cotangents)  # noqa: B023
                total, start = backward(total, microbatch, cotangent, *case.rest(index)), stop
            return total

        return run

    if loss.special == "aux":
        return Attempts(cannot="it returns a loss and gradients, no aux outputs")
    split = "the loss as an encoder and a loss of its representations"
    unchanged = call(loss.encode, loss.head, case.problem.params)
    if loss.special == "key":
        return Attempts(unchanged, cannot=OTHER_MASKS.format("the generator, replayed in the second pass,"))
    if loss.special == "narrow":
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), case.problem.params)
        needs = split + ", and float32 parameters"
        return Attempts(unchanged, call(loss.encode, loss.head, params), needs)
    if loss.cut is not None:
        needs = split + ", cut before the BatchNorm, with all that follows in the second"
        return Attempts(unchanged, call(*loss.cut, case.problem.params), needs)
    return Attempts(None, unchanged, split)


def anybatch(case: Case) -> Attempts:
    """`anybatch.value_and_grad`, with the loss of the full batch."""
    size, loss, options = case.problem.size, case.loss, {}
    if loss.special == "mesh":
        size, options = size // DEVICES, {"mesh": mesh()}
    fun = ab.value_and_grad(
        loss,
        tuple(range(case.batch_argnum)),
        has_aux=loss.special == "aux",
        batch_argnums=case.batch_argnum,
        microbatch_size=size,
        **options,
    )

    def run() -> Any:
        value, grads = jax.jit(fun)(*case.arguments)
        return (grads, value[1]) if loss.special == "aux" else grads

    return Attempts(run)


WAYS: dict[str, Callable[[Case], Attempts]] = {
    "plain scan": plain_scan,
    "optax.microbatch": optax_microbatch,
    "optax.MultiSteps": multi_steps,
    "jax_privacy": jax_privacy,
    "PyTorch loop": pytorch,
    "GradCache's method": grad_cache,
    "anybatch": anybatch,
}
NEEDED = {"jax_privacy": "jax_privacy", "PyTorch loop": "torch"}


# --- one cell of the table ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Measured:
    """The outcome of one attempt, its relative difference, and what there is to say about it."""

    outcome: str
    difference: float | None = None
    note: str = ""


def relative_difference(found: Any, expected: Any) -> float:
    """The norm of the difference of all leaves, divided by the norm of what is expected."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    squares = [
        (jnp.sum((jnp.asarray(one, jnp.float64) - two) ** 2), jnp.sum(jnp.asarray(two, jnp.float64) ** 2))
        for one, two in pairs
    ]
    return math.sqrt(sum(float(one) for one, _ in squares) / sum(float(two) for _, two in squares))


def multiple(found: Any, expected: Any) -> float | None:
    """The factor by which a gradient is too large, if that is all that is wrong with it."""
    products = [
        (float(jnp.vdot(jnp.asarray(one, jnp.float64), two)), float(jnp.vdot(two, two)))
        for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    ]
    factor = sum(one for one, _ in products) / sum(two for _, two in products)
    scaled = jax.tree.map(lambda leaf: leaf * factor, expected)
    return factor if factor != 0 and relative_difference(found, scaled) < 1e-9 else None


def measure(attempt: Callable[[], Any], case: Case) -> Measured:
    """Runs one attempt and compares its gradient, and aux, with those of the full batch."""
    try:
        found = attempt()
    except (ValueError, TypeError, NotImplementedError) as error:  # anything else is no refusal, and is raised
        return Measured(REFUSED, None, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
    found, expected = jax.device_get((found, case.expected))
    # Gradient and aux each by their own size: an accuracy is not to hide behind a large gradient.
    parts = [(found, expected)] if case.loss.special != "aux" else list(zip(found, expected, strict=True))
    difference = max(relative_difference(*part) for part in parts)
    if math.isnan(difference):
        return Measured(WRONG, None, "NaN")
    if difference <= case.loss.tolerance:
        return Measured(EXACT, difference)
    factor = multiple(found, expected) if case.loss.special != "aux" else None
    return Measured(WRONG, difference, "" if factor is None else f"{factor:.3g}{TIMES}")


def cell(case: Case, way: str) -> dict[str, Any]:
    """One row of the results: a loss through a way."""
    row: dict[str, Any] = {"loss": case.loss.name, "group": case.loss.group, "way": way}
    if way in NEEDED and importlib.util.find_spec(NEEDED[way]) is None:
        return row | _columns(Measured(NOT_INSTALLED, note=f"{NEEDED[way]} is not installed"))
    attempts = WAYS[way](case)
    unchanged = None if attempts.unchanged is None else measure(attempts.unchanged, case)
    best, needs = unchanged, ""
    if best is None or best.outcome != EXACT:
        if attempts.cannot:
            best = Measured(NOT_EXPRESSIBLE, None, attempts.cannot)
        elif attempts.rewritten is not None:
            best, needs = measure(attempts.rewritten, case), attempts.needs
    assert best is not None
    default = None if attempts.default is None else measure(attempts.default, case)
    notes = [f"needs {needs}" if needs else "", best.note, attempts.note]
    best = dataclasses.replace(best, note="; ".join(note for note in notes if note))
    return row | _columns(best, unchanged, default)


def _columns(best: Measured, unchanged: Measured | None = None, default: Measured | None = None) -> dict[str, Any]:
    columns: dict[str, Any] = {"outcome": best.outcome, "difference": best.difference, "note": best.note}
    for name, measured in (("unchanged", unchanged), ("default", default)):
        columns[name] = None if measured is None else measured.outcome
        columns[f"{name}_difference"] = None if measured is None else measured.difference
        columns[f"{name}_note"] = None if measured is None else measured.note
    return columns


# --- the table in a terminal ----------------------------------------------------------------------------------------


def amount(difference: float | None, note: str | None) -> str:
    """How wrong a gradient is, in a few characters."""
    if note and note.endswith(TIMES):
        return f"{note.removesuffix(TIMES)}x"
    if difference is None:
        return "NaN"
    return f"{difference:.0%}" if difference >= 0.01 else f"{difference:.1%}"


def shown(row: dict[str, Any]) -> str:
    """A cell as text: a star for a rewriting, a dagger for a loss in two functions."""
    if row["outcome"] == EXACT and row["unchanged"] in (EXACT, None):
        return EXACT if row["unchanged"] else "exact†"
    if row["outcome"] == EXACT:
        before = row["unchanged"]
        return f"exact* ({amount(row['unchanged_difference'], row['unchanged_note']) if before == WRONG else before})"
    if row["outcome"] == WRONG:
        return f"wrong ({amount(row['difference'], row['unchanged_note'])})"
    return {REFUSED: REFUSED, NOT_EXPRESSIBLE: "-", NOT_INSTALLED: "missing"}[row["outcome"]]


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the table, then its notes."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    cells = {(row["loss"], row["way"]): shown(row) for row in rows}
    widths = {way: max(len(way), *(len(cells[key]) for key in cells if key[1] == way)) for way in ways}
    print(f"\n{'':31} " + "  ".join(f"{way:{widths[way]}}" for way in ways))
    group = None
    for loss in dict.fromkeys(row["loss"] for row in rows):
        current = next(row["group"] for row in rows if row["loss"] == loss)
        if current != group:
            print(f"-- {current}")
            group = current
        print(f"{loss:31} " + "  ".join(f"{cells[loss, way]:{widths[way]}}" for way in ways))
    print(
        "\nexact*: exact only after a rewriting; in brackets, what the loss as it is gives."
        "\nexact†: the loss is given as two functions, an encoder and a loss of its representations."
        "\n-: the way does not claim to compute it. 15%: the relative difference. 8x: eight times the gradient.\n"
    )
    notes: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for row in rows:
        if row["note"]:
            notes[row["way"], f"{row['outcome']}: {row['note']}"].append(row["loss"])
    for (way, note), losses in sorted(notes.items(), key=lambda item: ways.index(item[0][0])):
        where = f"{len(losses)} losses" if len(losses) > 9 else "; ".join(losses)
        print(textwrap.fill(f"{way}, {note} [{where}]", 118, subsequent_indent="    "))
    totals = collections.Counter((row["way"], shown(row).partition(" ")[0]) for row in rows)
    kinds = [("exact", "exact"), ("exact†", "in two functions"), ("exact*", "after a rewriting"), ("wrong", "wrong")]
    kinds += [("refused", "refused"), ("-", "not expressible")]
    print(f"\n{'':18} " + "  ".join(name for _, name in kinds))
    for way in ways:
        print(f"{way:18} " + "  ".join(f"{totals[way, mark]:{len(name)}}" for mark, name in kinds))
    default = collections.Counter(row["default"] for row in rows if row["default"])
    print(f"optax.microbatch with its default, SUM, and the loss as it is: {json.dumps(default)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", nargs="*", help="only the losses whose names contain one of these")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS), help="only these ways")
    record.add_option(parser)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_enable_x64", True)
    results = record.Results(options.save, packages=("optax", "jax-privacy", "torch"))
    for loss in LOSSES:
        if options.losses is None or any(name in loss.name for name in options.losses):
            case = Case.of(loss)
            for way in options.ways:
                results.add(**cell(case, way))
            print(f"{loss.name:31} " + ", ".join(shown(row) for row in results.rows[-len(options.ways) :]), flush=True)
    show(results.rows)


if __name__ == "__main__":
    main()
