"""Random models with trees of parameters, against `jax.value_and_grad` in float64; and mistakes made on purpose.

`python tests/fuzz_long.py --models 14000` runs as many as one likes.
"""

import functools
import os
import sys

import jax
import jax.numpy as jnp
import pytest
from fuzz.interpreter import results_of
from fuzz.model_programs import ModelProgram, compare_compiled, compare_model, difference

import anybatch as ab
from anybatch.gradients import accumulate, references
from anybatch.jaxprs import in_place, interpreter, tracing, versions

pytestmark = pytest.mark.every_jax

PROGRAMS_PER_TEST = 20
MOST_PROGRAMS = 600

# Every Python tries programs of its own.
FIRST_SEED = 10_000_000 + 1_000_000 * sys.version_info.minor


@pytest.fixture(autouse=True)
def as_users_write(float64):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def check(seeds, compare=compare_model):
    outcomes = {seed: compare(ModelProgram(seed)) for seed in seeds}
    wrong = [f"{one.kind} {one.text}\n{ModelProgram(seed)}" for seed, one in outcomes.items() if is_wrong(one)]
    assert not wrong, "\n\n".join(wrong)
    counts = [outcome.kind for outcome in outcomes.values()]
    assert counts.count("same") + counts.count("narrow") >= 0.9 * len(seeds), counts


def is_wrong(outcome):
    return outcome.kind in ("different", "crashed")


@pytest.mark.full
def test_random_models():
    check(range(FIRST_SEED, FIRST_SEED + PROGRAMS_PER_TEST))


@pytest.mark.parametrize("seed", [66, 120, 487, 533])
def test_models_whose_gradients_were_swapped(seed):
    """In JAX 0.10, before gradients in place and by value were kept apart in a scan: two loudly, two silently."""
    check([seed])


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_random_models_compiled(devices):
    check(range(FIRST_SEED, FIRST_SEED + 3), lambda program: compare_compiled(program, devices))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(int(os.environ.get("ANYBATCH_FUZZ_PROGRAMS", "2000")) // 100))
def test_many_random_models(part):
    """`ANYBATCH_FUZZ_PROGRAMS=100000 pytest -m slow -n 8 tests/test_references_fuzz.py` for as many."""
    first = 600_000_000 + part * 100
    check(range(first, first + 100))
    jax.clear_caches()


def test_a_model_is_its_seed():
    assert str(ModelProgram(7)) == str(ModelProgram(7)) != str(ModelProgram(8))


# The interpreter.


def all_kinds(w, x, key):
    """Primitives of most families: what is compared is what XLA makes of them."""
    noise = jax.random.normal(key, x.shape) + jax.random.bernoulli(jax.random.fold_in(key, 3), 0.5, x.shape)
    h = jnp.einsum("ni,ij->nj", x + 0.1 * noise, w)
    h = h.at[jnp.array([0, 2, 0])].add(jnp.sort(h, 1)[jnp.array([1, 1, -1])])
    h = jax.lax.scan(lambda c, row: (jnp.tanh(c * row), jnp.cumsum(c, 1)), h, w, reverse=True)[1].sum(0)
    h = jax.lax.fori_loop(0, jnp.argmax(x[0]) + 1, lambda i, h: h * 0.9 + i, h) + jax.lax.pad(h, 0.1, [(-1, 1, 0)] * 2)
    return h, jnp.linalg.solve(w + 4 * jnp.eye(3), h.T), jax.random.permutation(key, 5), h.astype(jnp.int32) // 2


def test_the_interpreter_computes_what_xla_does():
    w, x = jax.random.normal(jax.random.key(0), (3, 3)), jax.random.normal(jax.random.key(1), (4, 3))
    args = (w, x, jax.random.key(2))
    for one, other in zip(results_of(all_kinds, *args), jax.jit(all_kinds)(*args), strict=True):
        assert difference((0.0, one), (0.0, other)) < 1e-13


def test_the_interpreter_rounds_nothing():
    def narrow(w):
        return (w.astype(jnp.bfloat16) * 3).astype(jnp.float64)

    w = jnp.asarray([0.1, 0.2])
    assert difference((0.0, results_of(narrow, w)), (0.0, 3 * w)) < 1e-15
    assert difference((0.0, narrow(w)), (0.0, 3 * w)) > 1e-4


# Mistakes on purpose: each must be noticed within MOST_PROGRAMS programs.

MUTATIONS = {}


def mutation(name, until=None):
    """Adds a function that breaks one thing. From the version `until` on, JAX itself makes it right."""

    def add(function):
        MUTATIONS[name] = (function, until)
        return function

    return add


@mutation("two gradients of equal shape change places")
def swap(monkeypatch):
    right = in_place.call

    def swapped(results):
        types = [(result.shape, result.dtype) for result in results]
        for one, kind in enumerate(types):
            if kind[0] and kind in types[one + 1 :]:
                other = types.index(kind, one + 1)
                results[one], results[other] = results[other], results[one]
                break
        return results

    monkeypatch.setattr(in_place, "call", lambda one, pure, *arrays: right(lambda *a: swapped(one(*a)), pure, *arrays))


@mutation("the ragged last microbatch is forgotten")
def forget(monkeypatch):
    right = accumulate.over_microbatches

    def forgetful(microbatches, step, carry, *, before_loop=None, **more):
        def without_gradient(carry):
            sums, _, noise = carry
            return before_loop((sums, None, noise))

        return right(microbatches, step, carry, before_loop=before_loop and without_gradient, **more)

    monkeypatch.setattr(accumulate, "over_microbatches", forgetful)


@mutation("an accumulator may reach nested functions twice", until=(0, 12))
def _(monkeypatch):
    def is_safe(jaxpr, variable):
        aliases = {variable}
        for equation in jaxpr.eqns:
            positions = [place for place, operand in enumerate(equation.invars) if references._is_in(aliases, operand)]
            if not positions or equation.primitive.name in references.PLAIN:
                continue
            if equation.primitive.name in references.IDENTICAL:
                aliases.update(equation.outvars)
                continue
            inner = [interpreter.nested_input(equation, position) for position in positions]
            if None in inner or not all(is_safe(*one) for one in inner):
                return False
        return not any(references._is_in(aliases, output) for output in jaxpr.outvars)

    monkeypatch.setattr(references, "_is_safe", is_safe)


@mutation("an accumulator of w is none of w + 1", until=(0, 12))
def _(monkeypatch):
    monkeypatch.setattr(references, "PLAIN", references.PLAIN | references.IDENTICAL)
    monkeypatch.setattr(references, "IDENTICAL", frozenset())


@mutation("gradients in place and by value in one scan", until=(0, 11))
def _(monkeypatch):
    monkeypatch.setattr(versions, "TRANSPOSES_MIXED_SCANS", True)


@mutation("every gradient is written in place")
def _(monkeypatch):
    monkeypatch.setattr(references, "written_in_place", lambda traced, is_direct: list(is_direct))


@functools.cache
def traced(seed):
    """The loss of a program, and which of its gradients are written in place. None if it has no trace."""
    program = ModelProgram(seed)
    leaves, tree = jax.tree.flatten(program.arguments())

    def loss(*flat):
        return jax.tree.leaves(program.loss(*jax.tree.unflatten(tree, flat)))

    try:
        trace = tracing.trace(loss, *leaves)[0]
    except (NotImplementedError, TypeError):  # JAX has no such derivative inside.
        return None
    return trace, chosen(trace)


def chosen(trace):
    num_data = len(("label", "mask", "x"))
    return references.written_in_place(trace, [True] * (trace.num_arguments - num_data))


def first_noticed(seeds, only_if_chosen=False):
    """The first program that comes out different, or None. Perhaps only of those where other gradients are in place."""
    for seed in seeds:
        if only_if_chosen and (traced(seed) is None or chosen(traced(seed)[0]) == traced(seed)[1]):
            continue
        if is_wrong(compare_model(ModelProgram(seed))):
            return seed
    return None


def test_gradients_that_change_places_are_noticed(monkeypatch):
    swap(monkeypatch)
    assert first_noticed(range(10)) is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_is_noticed(name):
    mutate, until = MUTATIONS[name]
    if until is not None and jax.__version_info__ >= until:
        pytest.skip("JAX itself makes it right")
    chooses = mutate not in (swap, forget)
    if chooses:
        for seed in range(MOST_PROGRAMS):
            traced(seed)  # while nothing is wrong
    with pytest.MonkeyPatch.context() as monkeypatch:
        mutate(monkeypatch)
        if chooses:  # Where JAX is wrong, comparing terms would be a second line of defence.
            monkeypatch.setattr(references, "with_same_terms", lambda add, totals, written_in_place: written_in_place)
        seed = first_noticed(range(MOST_PROGRAMS), chooses)
    print(f"{name}: noticed by program {seed}")
    assert seed is not None, f"noticed by none of {MOST_PROGRAMS} programs"
    check([seed])  # The control: without the mistake, nothing is different.


def test_a_refusal_is_counted_as_such():
    def refuses(fun, **options):
        return ab.value_and_grad(fun, **{**options, "reduction": "infer", "microbatch_size": 0})

    assert compare_model(ModelProgram(0), refuses).kind == "refused"
