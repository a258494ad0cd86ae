"""Is the fuzzer good enough? Every rule is made wrong on purpose, and the tests of the reading must notice it.

A mutation is a function that breaks one thing and returns a `Use`, which tells what may need it: the rest need not be
computed.
"""

import dataclasses
import functools

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import pytest
from cases.comparing import assert_same, quick_jit
from cases.read_losses import INFERRED, NUM_EXAMPLES
from fuzz.programs import Program, compare_interpreted

import anybatch as ab
from anybatch.reading import evaluation, positions, states
from anybatch.reading.reader import Reader, RuleResult
from anybatch.reading.rules import RULES, control, derivatives, elementwise, indexing
from anybatch.reading.split import Split
from anybatch.reading.states import INVARIANT, SUMMED, Batched, NotRowwise

pytestmark = pytest.mark.slow

MOST_PROGRAMS = 600
MUTATIONS = {}


@dataclasses.dataclass
class Use:
    """The primitives of which one must be there for it to matter, and where it mattered, if that can be told."""

    primitives: set[str]
    nodes: list | None = dataclasses.field(default_factory=list)


def mutation(name):
    return lambda function: MUTATIONS.setdefault(name, function)


@pytest.fixture(autouse=True)
def as_their_authors_write(float64):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def believe(monkeypatch, names, answer):
    """Where the rules of these primitives refuse, `answer(reader, node, states)` is believed, unless it is None."""
    use = Use(set(names.split()))
    for name in use.primitives:
        rule = RULES[name]

        def believing(reader, node, found, rule=rule):
            try:
                return rule(reader, node, found)
            except NotRowwise:
                outcome = answer(reader, node, found)
                if outcome is None:
                    raise
                use.nodes.append(node)
                return outcome

        monkeypatch.setitem(RULES, name, believing)
    return use


def same_rows(reader, node, found):
    fits = isinstance(found[0], Batched) and node.outputs[0].shape == node.inputs[0].shape
    return RuleResult([found[0]] * len(node.outputs)) if fits else None


def a_sum_if(condition):
    return lambda reader, node, found: RuleResult([SUMMED] * len(node.outputs)) if condition(found) else None


def kinds(found):
    return {type(state).__name__ for state in found}


REFUSALS = {
    "reversing the examples": ("rev", same_rows),
    "a cumulative sum over the examples": ("cumsum cumprod cummax cumlogsumexp", same_rows),
    "sorting the examples": ("sort", same_rows),
    "looking up other examples": ("gather", same_rows),
    "a window over the examples": ("reduce_window_sum reduce_window_max", same_rows),
    "writing into other examples": ("scatter scatter-add", same_rows),
    "the largest example is a sum": ("reduce_max reduce_min", a_sum_if(lambda found: kinds(found) == {"Batched"})),
    "the product of the examples is a sum": ("reduce_prod", a_sum_if(lambda found: kinds(found) == {"Batched"})),
    "a product of sums is a sum": ("mul", a_sum_if(lambda found: kinds(found) == {"Summed"})),
    "a sum plus an invariant value is a sum": (
        "add sub",
        a_sum_if(lambda found: kinds(found) == {"Summed", "Invariant"}),
    ),
    "an invariant value over a sum is a sum": ("div", a_sum_if(lambda found: kinds(found) == {"Summed", "Invariant"})),
    "any function of a sum is a sum": (
        "tanh sin cos exp log sqrt abs max integer_pow square logistic",
        a_sum_if(lambda found: kinds(found) <= {"Summed", "Invariant"}),
    ),
    "a padded sum is a sum": ("pad", a_sum_if(lambda found: found[0] == SUMMED)),
    "a sum beside an invariant value is a sum": (
        "concatenate",
        a_sum_if(lambda found: kinds(found) == {"Summed", "Invariant"}),
    ),
    "a sum or an invariant value is a sum": (
        "select_n",
        a_sum_if(lambda found: kinds(found) == {"Summed", "Invariant"}),
    ),
    "a sum fed back to the rows": (
        "add sub mul div",
        lambda reader, node, found: (
            RuleResult([next(state for state in found if isinstance(state, Batched))])
            if kinds(found) == {"Batched", "Summed"}
            else None
        ),
    ),
    "rows along different axes": (
        "add sub mul div",
        lambda reader, node, found: RuleResult([found[0]]) if kinds(found) == {"Batched"} else None,
    ),
    "all pairs are rows": (
        "dot_general",
        lambda reader, node, found: (
            RuleResult([Batched(0)])
            if kinds(found) == {"Batched"} and node.outputs[0].shape[:1] == (reader.num_examples,)
            else None
        ),
    ),
}


@mutation("the reshape that spreads an example over rows")
def _(monkeypatch):
    def answer(reader, node, found):
        new = node.params["new_sizes"]
        axis = next((axis for axis, size in enumerate(new) if size % reader.num_examples == 0), None)
        if axis is None or not isinstance(found[0], Batched):
            return None
        rows = Batched(axis, 1, new[axis] // reader.num_examples)
        return RuleResult(
            [rows], params=lambda size: {**node.params, "new_sizes": states.replaced(new, axis, rows.length(size))}
        )

    return believe(monkeypatch, "reshape", answer)


@mutation("a reshape takes inner for outer")
def _(monkeypatch):
    use, right = Use({"reshape"}), positions.reshaped

    def swapped(*args):
        rows = right(*args)
        if rows is not None and rows.inner != rows.outer:
            use.nodes.append(rows)
        return rows and Batched(rows.axis, rows.inner, rows.outer)

    monkeypatch.setattr(elementwise, "reshaped", swapped)
    return use


def wrap(monkeypatch, name, change):
    """The rule with its outcome changed."""
    use, rule = Use({name}), RULES[name]

    def changed(reader, node, found):
        outcome = rule(reader, node, found)
        different = change(outcome, node, found)
        if different is not None:
            use.nodes.append(node)
        return different or outcome

    monkeypatch.setitem(RULES, name, changed)
    return use


@mutation("tiles lie within an example")
def _(monkeypatch):
    def change(outcome, node, found):
        if not isinstance(found[0], Batched) or node.params["reps"][found[0].axis] == 1:
            return None
        rows = dataclasses.replace(found[0], inner=found[0].inner * node.params["reps"][found[0].axis])
        return dataclasses.replace(outcome, states=[rows])

    return wrap(monkeypatch, "tile", change)


@mutation("what is concatenated lies within an example")
def _(monkeypatch):
    def change(outcome, node, found):
        rows = outcome.states[0]
        if not isinstance(rows, Batched) or rows.outer == 1 or rows.axis != node.params["dimension"]:
            return None
        return dataclasses.replace(outcome, states=[Batched(rows.axis, 1, rows.outer * rows.inner)])

    return wrap(monkeypatch, "concatenate", change)


def test_the_table_of_refusals_names_primitives_that_have_rules():
    assert {name for names, _ in REFUSALS.values() for name in names.split()} <= set(RULES)


def replace(primitives, owner, name, make):
    """A mutation that replaces an attribute."""

    def apply(monkeypatch):
        monkeypatch.setattr(owner, name, make(getattr(owner, name)))
        return Use(set(primitives.split()), None)

    return apply


def positions_from_zero(right):
    def without_start(microbatch, node, rows):
        counted = right(microbatch, node, rows)
        if counted is None or node.params["dimension"] != rows.axis:
            return counted
        return counted - jnp.asarray(microbatch.start * rows.inner).astype(counted.dtype)

    return without_start


def drawn_as_if_alone(right):
    def local(microbatch, node, value, rows):
        if node.name != "random_bits":
            return right(microbatch, node, value, rows)
        axis = rows.axis - node.inputs[0].ndim
        shape = states.replaced(node.params["shape"], axis, rows.length(microbatch.size))
        return node([microbatch.full_batch[node.inputs[0]]], {**node.params, "shape": shape})[0]

    return local


def first_axis_of_the_length(right):
    def guess(reader, indices, column, length):
        return next((axis for axis in range(indices.ndim - 1) if indices.shape[axis] == length), None)

    return guess


CUSTOM = "custom_vjp_call"
ANY = "mul add"
REPLACEMENTS = {
    "a custom backward pass is not checked": replace(CUSTOM, derivatives, "_must_have", lambda right: lambda *_: None),
    "every backward pass is linear": replace(CUSTOM, derivatives._Passes, "is_linear", lambda right: lambda *_: True),
    "nothing is hoisted": replace(CUSTOM, Reader, "_hoist_if_needed", lambda right: lambda *_: None),
    "one pass is always enough": replace(ANY, Split, "_seeds_depend_on_frontier", lambda right: lambda self: False),
    "positions count from zero": replace("iota", positions, "_iota", positions_from_zero),
    "random bits of every microbatch alike": replace("random_bits", positions, "_drawn_by_counter", drawn_as_if_alone),
    "the first rows for every microbatch": replace(
        ANY, evaluation, "take_rows", lambda right: lambda x, rows, n, start, *sizes: right(x, rows, n, 0, *sizes)
    ),
    "a branch or a loop keeps its first state": replace(
        "scan cond while", control, "join", lambda right: lambda one, *_: one
    ),
    "everything starts from zero": replace(
        ANY, Reader, "is_zero", lambda right: lambda self, value: self.state(value) == INVARIANT
    ),
    "whatever is carried is a sum": replace("scan", control, "_carried_over_examples", lambda right: lambda *_: SUMMED),
    "indices are those of the own row": replace(
        "gather scatter scatter-add", indexing, "own_row_axis", first_axis_of_the_length
    ),
    "own rows are not counted from here": replace(
        "gather scatter scatter-add", indexing, "_counted_from_here", lambda right: lambda indices, *_: indices
    ),
}
MUTATIONS |= {name: functools.partial(believe, names=a, answer=b) for name, (a, b) in REFUSALS.items()}
MUTATIONS |= REPLACEMENTS


def goes_wrong(case):
    """Whether a loss of the table comes out different, or not at all."""
    full = jax.value_and_grad(case.loss, has_aux=case.has_aux)
    options = {"has_aux": case.has_aux, "batch_argnums": case.batch_argnums, "microbatch_size": 5}
    both = quick_jit(lambda *args: (full(*args), ab.value_and_grad(case.loss, **options)(*args)))
    try:
        expected, actual = both(*case.make(NUM_EXAMPLES))
        assert_same(actual, expected)
    except Exception:
        return True
    return False


def primitives_in(jaxpr):
    inner = [nested for equation in jaxpr.eqns for nested in jex_core.jaxprs_in_params(equation.params)]
    names = {equation.primitive.name for equation in jaxpr.eqns}
    return names.union(*(primitives_in(getattr(nested, "jaxpr", nested)) for nested in inner))


@functools.cache
def program(seed):
    made = Program(seed)
    traced = jax.make_jaxpr(made.loss)(*made.arguments())
    return made, primitives_in(getattr(traced, "jaxpr", traced))


def is_used(use, loss, args, **options):
    if use.nodes is None:
        return True
    use.nodes.clear()
    try:
        ab.read(loss, *args, **options)
    except Exception:
        return True
    return bool(use.nodes)


def noticed_by(use):
    """Everything that goes wrong, one after the other: random programs first, then the losses of the table."""
    for seed in range(MOST_PROGRAMS):
        made, primitives = program(seed)
        if not use.primitives & primitives:
            continue
        if is_used(use, made.loss, made.arguments(), has_aux=made.has_aux):
            if compare_interpreted(made).kind in ("different", "crashed"):
                yield f"program {seed}", functools.partial(lambda made: compare_interpreted(made).kind != "same", made)
    for case in INFERRED:
        options = {"has_aux": case.has_aux, "batch_argnums": case.batch_argnums}
        if is_used(use, case.loss, case.make(NUM_EXAMPLES), **options) and goes_wrong(case):
            yield case.name, functools.partial(goes_wrong, case)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_rule_is_noticed(name):
    with pytest.MonkeyPatch.context() as monkeypatch:
        by, repeat = next(noticed_by(MUTATIONS[name](monkeypatch)), (None, None))
    print(f"{name}: noticed by {by}")
    assert by is not None, f"noticed by none of {MOST_PROGRAMS} programs and {len(INFERRED)} losses"
    assert not repeat()  # The control: with the right rule, nothing goes wrong.
