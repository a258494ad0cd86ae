"""Grading: the order of the stages, what each finds, what the learner reads. Most runners are stand-ins."""

import dataclasses
import json
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from anybatch.errors import AnybatchError, InputError
from anybatch.learn import (
    Case,
    Check,
    Collectives,
    Differences,
    Mistake,
    Raises,
    Same,
    Slope,
    carries,
    computes_in,
    forbids,
    matters,
    needs,
    one_microbatch,
    other_numbers,
    scans,
    stacks_less_than,
)
from anybatch.learn import check as declarations
from anybatch.learn.catalogue import Course, KnownWrong
from anybatch.learn.grading import examine_check, full_batch_costs, grade
from anybatch.learn.runner import submissions
from anybatch.learn.runner.evidence import SubmittedFile, multiplications_of
from anybatch.learn.runner.submissions import Ended
from anybatch.learn.values import EPSILON, expected

IMPORTS = "import jax\nimport jax.numpy as jnp\nimport numpy as np\nfrom jax import lax\n"


class Here:
    """Runs a submission in this process, without any protection."""

    def __init__(self, source, path, devices, anybatch):
        self.evidence = SubmittedFile(source, path, anybatch=True)
        self.loaded = self.evidence.loaded
        self.prints, self.prints_dropped = "", 0

    def ask(self, request):
        return self.evidence.answer(request)

    def end(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *details):
        pass


class Runner:
    def open(self, source, path, *, devices=1, anybatch=False):
        return Here(source, path, devices, anybatch)


def cases(rng):
    yield Case((rng.normal(size=3).astype(np.float32), rng.normal(size=(8, 3)).astype(np.float32), 2), "8 in 2")
    yield Case((rng.normal(size=3).astype(np.float32), rng.normal(size=(8, 3)).astype(np.float32), 4.0), "8 in 4")


def reference(w, x, n):
    """The gradient of the sum of squares of x @ w."""
    return 2 * x.T @ (x @ w)


def with_more(rng, times):
    return rng.normal(size=512).astype(np.float32), rng.normal(size=(16 * times, 512)).astype(np.float32), 4 * times


CHECK = Check(
    function="total",
    parameters=("w", "x", "n"),
    cases=cases,
    reference=reference,
    mistakes=[Mistake("mean", lambda w, x, n: reference(w, x, n) / n, lambda w, x, n: f"Averaged over {n} parts.")],
)
RIGHT = "def total(w, x, n):\n    return jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)\n"
SCAN = """
def total(w, x, n):
    def add(total, part):
        return total + jax.grad(lambda w: jnp.sum(jnp.tanh(part @ w) * 1e-30 + (part @ w) ** 2))(w), None
    return lax.scan(add, jnp.zeros_like(w), x.reshape(int(n), -1, x.shape[-1]))[0]
"""
LOOP = """
def total(w, x, n):
    return sum(jax.grad(lambda w: jnp.sum((part @ w) ** 2))(w) for part in jnp.split(x, int(n)))
"""
DUMMY = """
def total(w, x, n):
    waste = lax.scan(lambda total, part: (total + part.sum(), None), 0.0, x.reshape(int(n), -1))[0]
    return jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w) + 1e-30 * waste
"""
STACK = """
def total(w, x, n):
    def one(_, part):
        return None, jax.grad(lambda w: jnp.sum((part @ w) ** 2))(w)
    return lax.scan(one, None, x.reshape(int(n), -1, x.shape[-1]))[1].sum(0)
"""


def graded(source, check=CHECK, seed=0, **changes):
    exercise = types.SimpleNamespace(
        name="total", file_name="01_total.py", check=dataclasses.replace(check, **changes), solution=IMPORTS + SCAN
    )
    return grade(exercise, IMPORTS + source, Runner(), seed=seed)


def test_a_right_answer_passes():
    verdict = graded(RIGHT)
    assert verdict.passed and verdict.stage == "" and dict(verdict.done)["value"] == "2 cases", verdict


@pytest.mark.parametrize(
    "source, stage, title",
    [
        ("def total(w, x, n)\n    return 0", "file", "SyntaxError: expected ':'"),
        ("1 / 0", "file", "ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(0)", "file", "The file calls sys.exit(0)."),
        ("np.allclose = lambda *a, **k: True\n" + RIGHT, "file", "The file replaces numpy.allclose"),
        ("def totals(w, x, n): pass", "signature", "no function `total` in the file. Was `totals` meant?"),
        ("total = 3", "signature", "There is no function `total`"),
        ("def total(w, x): pass", "signature", "`total` must take 3 arguments; it takes 2."),
        ("def total(w, x, n): raise NotImplementedError('Write it.')", "run", "Not written yet."),
        ("def total(w, x, n): return x @ x", "run", "TypeError"),
        ("def total(w, x, n): raise SystemExit(0)", "run", "The file calls sys.exit(0)."),
        ("def total(w, x, n): pass", "structure", "The function returns None: is a `return` missing?"),
        ("def total(w, x, n): return [w]", "structure", "The answer has the wrong structure"),
        ("def total(w, x, n): return w[:1]", "shape", "has shape (1,); it must have (3,)"),
        ("def total(w, x, n): return w[None]", "shape", "has shape (1, 3); it must have (3,)"),
        ("def total(w, x, n): return w.astype(jnp.bfloat16)", "shape", "is bfloat16; it must be float32"),
        ("def total(w, x, n): return w * jnp.nan", "value", "is NaN in 3 of 3 places"),
        ("def total(w, x, n): return w * 0", "value", "The answer is wrong."),
        (RIGHT.replace("(w)\n", "(w) / n\n"), "value", "Averaged over 2 parts."),
    ],
)
def test_what_is_wrong_is_said_at_the_first_stage_that_sees_it(source, stage, title):
    saved = np.allclose
    try:
        verdict = graded(source)
    finally:
        np.allclose = saved
    assert not verdict.passed and verdict.stage == stage and title in verdict.title, verdict
    assert verdict.started == (verdict.title != "Not written yet.")


@pytest.mark.parametrize("module, way_out", [("flax", 'pip install ".[learn]"'), ("nowhere", "")])
def test_a_package_of_ours_that_is_missing_is_named_with_its_extra(module, way_out):
    verdict = graded(f"raise ModuleNotFoundError(\"No module named '{module}'\", name='{module}')")
    assert verdict.stage == "file" and module in verdict.title
    assert way_out in verdict.text and bool(verdict.text) == bool(way_out)


def test_a_known_mistake_has_its_name_and_others_a_factor():
    assert graded(RIGHT.replace("(w)\n", "(w) / n\n")).mistake == "mean"
    verdict = graded(RIGHT.replace("(w)\n", "(w) * 3\n"))
    assert verdict.mistake is None and "Every number is 3 times the expected one." in verdict.text


def test_the_line_of_an_exception_is_the_learners():
    verdict = graded("\ndef total(w, x, n):\n    y = x + 1\n    return y @ jnp.ones(7)\n")
    assert (verdict.stage, verdict.line, verdict.source_line) == ("run", 8, "    return y @ jnp.ones(7)")


def test_a_tolerance_follows_from_the_data_and_refuses_bfloat16():
    rng = np.random.default_rng(0)
    for _ in range(20):
        w, x, n = next(iter(cases(rng))).args
        right = expected(reference, (w, x, n), rng)
        (tolerance,) = right.tolerances
        size = np.abs(right.tree).max()
        assert 32 * EPSILON * size <= tolerance <= 1e-3 * size
        in_float32 = 2 * x.T @ (x @ w)
        assert in_float32.dtype == np.float32 and np.abs(in_float32 - right.tree).max() <= tolerance / 2
        assert np.abs(right.tree.astype("bfloat16").astype(float) - right.tree).max() > 4 * tolerance


def test_what_is_wrong_with_a_check_is_found():
    def defects(**changes):
        check = dataclasses.replace(CHECK, **changes)
        return examine_check(types.SimpleNamespace(check=check))

    assert defects() == []
    same = Mistake("none", reference, "")
    assert defects(mistakes=[same]) == ["the mistake 'none' gives the right answer in every case"]
    assert defects(cases=lambda rng: []) == ["check.py has no Case"]
    cancels = lambda w, x, n: (w + 1e6) - 1e6 + (x.sum() * 1e4 - x.sum() * 1e4) + 1e4 * (np.cos(1e6 * w))  # noqa: E731
    assert "bfloat16 would pass" in defects(reference=cancels, mistakes=[])[0]
    assert "not finite" in defects(reference=lambda w, x, n: w * np.inf, mistakes=[])[0]


REFUSAL = "def total(w, x, n):\n    if len(x) % n:\n        raise ValueError(f'{n} of {len(x)}')\n" + "".join(
    RIGHT.splitlines(keepends=True)[1:]
)


@pytest.mark.parametrize(
    "source, title",
    [
        (REFUSAL, None),
        (RIGHT, "It must raise ValueError, and does not."),
        (REFUSAL.replace("ValueError", "KeyError"), "It must raise ValueError; it raises KeyError."),
        (REFUSAL.replace(" of {len(x)}", ""), "The error does not mention 8."),
    ],
)
def test_bad_input_must_be_refused_with_its_numbers(source, title):
    def with_bad(rng):
        args = (np.ones(3, np.float32), np.ones((8, 3), np.float32), 3)
        return [*cases(rng), Raises(args, ("3", "8"), "8 in 3")]

    verdict = graded(source, cases=with_bad)
    assert verdict.title == (title or "") and verdict.stage == ("errors" if title else "")


def test_an_answer_must_not_change_with_what_makes_no_difference():
    permuted = Same("the order of the examples", lambda rng, args: (args[0], rng.permutation(args[1]), args[2]))
    scaled = Same(
        "nothing at all", lambda rng, args: (2 * args[0], *args[1:]), then=lambda answer, old, new: 2 * answer
    )
    assert dict(graded(RIGHT, same=[permuted, scaled]).done)["invariance"].endswith("no difference")
    # The value is right: the reference has the same dependence on the order.
    weighted = "def total(w, x, n):\n    k = jnp.arange(1.0, 9.0)\n    return ((2 * k * (x @ w))[:, None] * x).sum(0)\n"
    of_rows = lambda w, x, n: (np.arange(1, 9)[:, None] * (2 * x * (x @ w)[:, None])).sum(0)  # noqa: E731
    verdict = graded(weighted, reference=of_rows, mistakes=[], same=[permuted])
    assert verdict.stage == "invariance" and "changes with the order of the examples" in verdict.title


@pytest.mark.parametrize("factor, passes", [(1.0, True), (1.03, False)])
def test_a_gradient_must_be_the_slope_of_its_value(factor, passes):
    both = f"def total(w, x, n):\n    f = lambda w: jnp.sum((x @ w) ** 2)\n    return f(w), {factor} * jax.grad(f)(w)\n"
    verdict = graded(
        both,
        # The reference has the same mistake, so only finite differences find it.
        reference=lambda w, x, n: (np.sum((x @ w) ** 2), factor * reference(w, x, n)),
        mistakes=[],
        differences=Differences(lambda answer: answer[0], lambda answer: answer[1]),
    )
    assert verdict.stage == ("" if passes else "differences"), verdict


SCANNED = scans(lambda w, x, n: int(n), "There is no scan over the microbatches.")
INSIDE = computes_in("scan", lambda w, x, n: len(x), "Something is computed from the whole batch.")


@pytest.mark.parametrize(
    "source, rules, says",
    [
        (SCAN, [SCANNED, INSIDE, needs("scan", "x"), forbids("psum", says="x")], ""),
        (LOOP, [SCANNED], "There is no scan over the microbatches."),
        (RIGHT, [SCANNED], "There is no scan over the microbatches."),
        (DUMMY, [SCANNED], ""),
        (DUMMY, [INSIDE], "Something is computed from the whole batch."),
        (STACK, [SCANNED, INSIDE], "Something is computed from the whole batch."),
        (STACK, [stacks_less_than(lambda w, x, n: int(n) * len(w), "It stacks.")], "It stacks."),
        (DUMMY.replace(" + 1e-30 * waste", ""), [needs("scan", "A scan is unused.")], "A scan is unused."),
        (SCAN, [forbids("tanh", says="No tanh.", inside="scan")], "No tanh."),
        (SCAN, [forbids("tanh", says="No tanh.", outside="scan")], ""),
        (SCAN, [needs("dot_general", "Too often.", inside="scan", at_most=1)], "Too often."),
    ],
)
def test_rules_on_the_program(source, rules, says):
    verdict = graded(source, program=rules)
    assert (verdict.stage, verdict.title) == (("program", says) if says else ("", "")), verdict


@pytest.mark.parametrize("source, passes", [(SCAN, True), (RIGHT, True), (LOOP, False), (STACK, False)])
def test_memory_must_be_flat_in_the_batch(source, passes):
    check = dataclasses.replace(CHECK, memory=Slope(with_more, "Add into a carry.", floor=1000))
    verdict = graded(source, check)
    assert verdict.stage == ("" if passes else "memory"), verdict
    assert passes or verdict.text.endswith("Add into a carry.")


PSUM = """
from jax.sharding import PartitionSpec as P
def total(w, x, n):
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    def local(w, x):
        def add(total, row):
            return total + AROUND(2 * row * (row @ w)), None
        return BEHIND(lax.scan(add, jnp.zeros_like(w), x)[0])
    rows = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    return rows(w, x)
"""


@pytest.mark.parametrize("where, counted", [("BEHIND", 1), ("AROUND", 2)])
def test_collectives_are_counted_as_often_as_they_run(where, counted):
    source = PSUM.replace(where, "(lambda x: lax.psum(x, 'data'))").replace("AROUND", "").replace("BEHIND", "")
    rule = Collectives({"all-reduce": 1}, lambda counts: f"{counts['all-reduce']} of them.")
    sixteen = lambda rng: [Case((np.ones(3, np.float32), rng.normal(size=(16, 3)).astype(np.float32), 2))]  # noqa: E731
    verdict = graded(source, cases=sixteen, collectives=rule, devices=(8,))
    assert verdict.stage == ("" if counted == 1 else "collectives"), verdict
    assert counted == 1 or verdict.text == "2 of them."


def test_an_answer_that_comes_from_the_first_trace_alone_is_no_way_out():
    """Constants that are right for one seed are wrong for the next."""
    w, x, n = next(iter(cases(np.random.default_rng(0)))).args
    right = reference(w.astype(float), x.astype(float), n)
    source = f"def total(w, x, n): return jnp.array({right.tolist()}, jnp.float32)\n"
    one = lambda rng: [next(iter(cases(rng)))]  # noqa: E731
    assert graded(source, cases=one).passed
    assert graded(source, cases=one, seed=1).stage == "value"


def test_nothing_is_asked_of_a_process_while_another_thread_waits_for_it(monkeypatch):
    """Prints are read after all threads have ended: two threads on the same pipes would close them twice."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    is_waiting, is_ended = threading.Event(), threading.Event()
    read_meanwhile = []

    class Waits(Here):
        is_asked = False

        def ask(self, request):
            if request["args"][2] == 2:  # the first case: a wrong answer, while the other process is busy
                assert is_waiting.wait(10)
                return super().ask(request)
            self.is_asked = True
            is_waiting.set()
            is_ended.wait(10)
            self.is_asked = False
            raise Ended("signal", "It was ended.")

        def end(self):
            is_ended.set()

        @property
        def prints(self):
            read_meanwhile.append(self.is_asked)
            return ""

        @prints.setter
        def prints(self, value):
            pass

    runner = types.SimpleNamespace(open=lambda source, path, *, devices=1, anybatch=False: Waits(source, path, 1, True))
    exercise = types.SimpleNamespace(name="total", file_name="01_total.py", check=CHECK, solution=SCAN)
    verdict = grade(exercise, IMPORTS + "def total(w, x, n): return w\n", runner, seed=0)
    assert verdict.stage == "value" and read_meanwhile == [False, False], verdict


def test_a_verdict_is_plain_data():
    assert json.loads(json.dumps(graded(RIGHT).as_json()))["passed"] is True


DECOY = "    nothing, _ = lax.scan(lambda c, i: (c + i, None), 0.0, jnp.arange(float(int(n))))\n"
FULL_BATCH = "jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)"
PRETENDS = {
    "0 * scan": f"{DECOY}    return {FULL_BATCH} + 0 * nothing\n",
    "zeros * scan": f"{DECOY}    return {FULL_BATCH} + jnp.zeros(3) * nothing\n",
    "inside a call": f"{DECOY}    return jax.jit(lambda a, b: a + 0 * b)({FULL_BATCH}, nothing)\n",
}


@pytest.mark.parametrize("body", PRETENDS.values(), ids=PRETENDS)
def test_what_is_multiplied_by_zero_is_not_in_the_program(body):
    check = dataclasses.replace(CHECK, program=[scans(lambda w, x, n: n, says="No scan.")])
    source = "def total(w, x, n):\n" + body
    assert graded(source, check).title == "No scan."
    assert graded(source.replace("0 *", "1e-30 *").replace("zeros(3)", "full(3, 1e-30)"), check).passed


CARRIES = carries("scan", (1,), "Return what it carried.", turns=lambda w, x, n: (int(n),))
IGNORES = {
    "1e-30 *": "true + 1e-30 * scanned",
    "a zero of the arguments": "true + jnp.minimum(jnp.abs(w), 0) * scanned",
    "where": "jnp.where(jnp.isnan(w), scanned, true)",
    "cond": "lax.cond(w[0] > 1e30, lambda: scanned, lambda: true)",
}


def scanned(result):
    body = SCAN.replace("def total(", "def scan(")
    return f"{body}\ndef total(w, x, n):\n    scanned, true = scan(w, x, n), {FULL_BATCH}\n    return {result}\n"


@pytest.mark.parametrize("result", IGNORES.values(), ids=IGNORES)
def test_what_must_be_used_must_matter(result):
    check = dataclasses.replace(CHECK, program=[scans(lambda w, x, n: n, says="No scan.")])
    assert graded(scanned(result), check).passed  # the scan is in the program
    verdict = graded(scanned(result), check, program=[*check.program, CARRIES])
    assert verdict.stage == "program" and verdict.title.startswith("The scan has no influence on the answer")
    assert verdict.text.endswith("Return what it carried.")


def test_all_of_the_answer_must_come_through():
    assert graded(scanned("scanned"), program=[CARRIES]).passed
    assert graded(scanned("jnp.where(jnp.isnan(scanned), 0.0, 2 * scanned) / 2"), program=[CARRIES]).passed
    verdict = graded(scanned("0.75 * scanned + 0.25 * true"), program=[CARRIES])
    assert verdict.title == "Part of the answer does not come from the scan: up to 25% of it is computed without it."
    verdict = graded(scanned("scanned.at[1].set(true[1])"), program=[CARRIES])
    assert verdict.title.startswith("Part of the answer does not come from the scan")
    other_turns = carries("scan", (1,), "", turns=lambda w, x, n: (7,))
    assert not graded(scanned("scanned"), program=[other_turns]).passed
    some_rows = carries("scan", lambda args: other_numbers(args, 1, rows=slice(0, 0)), "")
    assert graded(RIGHT, program=[some_rows]).passed  # nothing differs, so nothing can bypass it


def test_nothing_is_held_against_a_program_that_cannot_be_run_so(monkeypatch):
    def unknown(*args, **options):
        raise NotImplementedError("an operation that nobody knows")

    monkeypatch.setattr("anybatch.learn.runner.influence.responses", unknown)
    assert graded(scanned("true + 1e-30 * scanned"), program=[CARRIES]).passed
    rules = [CARRIES, scans(lambda w, x, n: 7, "No scan of 7.")]  # the other rules hold
    assert graded(scanned("true + 1e-30 * scanned"), program=rules).title == "No scan of 7."


def test_an_operation_must_have_an_influence():
    rule = matters("tanh", "Use it.")
    with_tanh = (
        "def total(w, x, n):\n    t = jnp.tanh(w[0])\n    return {} * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)\n"
    )
    assert graded(with_tanh.format("t / lax.stop_gradient(jnp.sinh(w[0]) / jnp.cosh(w[0]))"), program=[rule]).passed
    for idle in ("(1 + 1e-30 * t)", "(1 + jnp.minimum(jnp.abs(w[0]), 0) * t)", "(t / t)", "jnp.where(t > 2, t, 1.0)"):
        verdict = graded(with_tanh.format(idle), program=[rule])
        assert verdict.title.startswith("The tanh has no influence on the answer") and verdict.text == "Use it.", idle
    assert graded(RIGHT, program=[rule]).title.startswith("The tanh has no influence")


def test_one_microbatch_at_once():
    rule = one_microbatch(lambda w, x, n: x.size // int(n), "Too much.")
    assert graded(SCAN, program=[rule]).passed and graded(LOOP, program=[rule]).passed
    verdict = graded(RIGHT, program=[rule])
    assert verdict.title == "Too much." and "has 24 numbers; one microbatch has 12 at most" in verdict.text
    assert graded(RIGHT, program=[one_microbatch(lambda w, x, n: 1, "", names=["tanh"])]).passed


WASTE = (
    SCAN
    + """
scan = total
def total(w, x, n):
    waste = lax.fori_loop(0, 3, lambda i, v: jnp.sort(v * 1.5 + i), jnp.arange(2.0**16) * w[0])
    return scan(w, x, n) + jnp.minimum(jnp.abs(waste[7]), 0)
"""
)


def test_memory_is_bounded_beside_the_solution():
    """Waste that does not depend on the batch size does not grow, but is found."""
    assert graded(WASTE, memory=Slope(with_more, "Do not.", slack=1e9)).passed
    verdict = graded(WASTE, memory=Slope(with_more, "Do not."))
    assert verdict.stage == "memory" and "for temporaries, where" in verdict.title and verdict.text.endswith("Do not.")
    assert graded(WASTE, memory=Slope(with_more, "", room=2**22)).passed
    assert graded(SCAN, memory=Slope(with_more, "")).passed


def test_a_solution_that_cannot_be_measured_is_an_error():
    check = dataclasses.replace(CHECK, memory=Slope(with_more, ""))
    exercise = types.SimpleNamespace(name="total", file_name="01_total.py", check=check, solution="def total(): 1 / 0")
    with pytest.raises(AnybatchError, match=r"The solution of the exercise total must run.*TypeError"):
        grade(exercise, IMPORTS + SCAN, Runner(), seed=0)


def test_multiplications_are_counted_as_often_as_loops_run_them():
    def counted(function):
        return multiplications_of(jax.jit(function).lower(jnp.ones((4, 6)), jnp.ones((6, 5))).compile())

    once = counted(lambda x, w: x @ w)
    assert once == 4 * 6 * 5
    assert counted(lambda x, w: lax.scan(lambda t, _: (jnp.tanh(t @ w @ w.T), None), x, None, length=7)[0]) == 14 * once
    assert counted(lambda x, w: lax.while_loop(lambda c: c.sum() < 9, lambda c: c @ w @ w.T, x)) == -1
    assert counted(lambda x, w: lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, x) @ w) == once


def test_numbers_that_come_from_a_callback_are_refused_and_prints_are_not():
    body = "jax.pure_callback(lambda w, x: 2 * np.asarray(x).T @ (np.asarray(x) @ np.asarray(w)), w, w, x)"
    verdict = graded(f"def total(w, x, n):\n    return {body}\n")
    assert verdict.stage == "program" and "jax.debug.print" in verdict.text
    assert graded(f"def total(w, x, n):\n    jax.debug.print('{{}}', w)\n    return {FULL_BATCH}\n").passed


@pytest.mark.parametrize(
    "body, says",
    [
        ("return w if w[0] > 0 else -w", "jnp.where"),
        ("return np.sum(x, axis=0) * np.asarray(w)", "argument w"),
        ("return 'a text'", "a str where an array should be"),
        ("yield w", "because it uses `yield`"),
        ("return jax.grad(lambda w: w)", "Call it, and return its result."),
        (
            "lax.scan(lambda c, row: (c, kept.append(row)), 0.0, x); return kept[0]",
            "a value that was traced in another function",
        ),
    ],
)
def test_errors_of_jax_speak_of_the_learners_function(body, says):
    verdict = graded(f"kept = []\ndef total(w, x, n):\n    {body}\n")
    text = f"{verdict.title}\n{verdict.text}"
    assert verdict.stage == "run" and says in text and "evidence.py" not in text, text


# The evidence of a verdict.

NONE = declarations.Evidence()


@pytest.fixture(scope="module")
def graded_file():
    """A function that grades the solution of an exercise of the course, or one of its mistakes, in other processes."""
    course = Course.builtin()

    def graded_file(name, wrong=None):
        exercise = course.find(name)
        sources = {None: exercise.solution} | {each.name: each.source for each in exercise.mistakes}
        return grade(exercise, sources[wrong], runner, seed=0)

    with submissions.Runner() as runner:
        yield graded_file


def test_a_wrong_value_comes_with_the_numbers_that_the_learner_reads():
    verdict = graded(RIGHT.replace("(w)\n", "(w).at[1].add(0.5)\n"))
    (array,) = verdict.evidence.arrays
    assert (verdict.stage, array.path, array.shape, array.left_out) == ("value", "", (3,), 0)
    assert array.is_off == (False, True, False)
    assert f"{array.yours[1]:13.7g} {array.expected[1]:13.7g} {array.tolerance:11.1g}" in verdict.text
    np.testing.assert_allclose(np.subtract(array.yours, array.expected), [0, 0.5, 0], atol=1e-4)
    w, x, n = next(iter(cases(np.random.default_rng(0)))).args
    np.testing.assert_allclose(array.expected, reference(w.astype(float), x.astype(float), n), rtol=1e-12)


def test_a_right_answer_comes_with_the_first_case():
    (array,) = graded(RIGHT).evidence.arrays
    w, x, n = next(iter(cases(np.random.default_rng(0)))).args
    np.testing.assert_allclose(array.expected, reference(w.astype(float), x.astype(float), n), rtol=1e-12)
    assert array.is_off == (False, False, False)


@pytest.mark.parametrize("wrong, shown", [("1.5 * g", [True]), ("g[None]", [])])
def test_the_arrays_are_those_of_the_case_that_fails(wrong, shown):
    """A wrong number in the second case is shown, and nothing for a wrong shape: not the first case, which is right."""
    verdict = graded(RIGHT.replace("return", "g =") + f"    return g if n == 2 else {wrong}\n")
    assert verdict.stage == ("value" if shown else "shape") and "8 in 4" in verdict.text
    assert [all(array.is_off) for array in verdict.evidence.arrays] == shown


@pytest.mark.parametrize("source", ["def total(w, x, n): return [w]", "def total(w, x, n): return w[:1]", "1 / 0"])
def test_without_numbers_to_compare_there_is_no_evidence(source):
    assert graded(source).evidence == NONE


def test_an_answer_that_must_not_change_is_shown_before_and_after():
    scaled = Same("the size of w", lambda rng, args: (2 * args[0], *args[1:]))
    verdict = graded(RIGHT, same=[scaled])
    (array,) = verdict.evidence.arrays
    assert verdict.stage == "invariance" and all(array.is_off)
    np.testing.assert_allclose(array.yours, np.multiply(2, array.expected), rtol=1e-4)


def test_numbers_that_are_not_finite_survive_json():
    made = "jnp.stack([w[0] * jnp.nan, jnp.inf + w[1], w[2] - jnp.inf])"
    verdict = graded(f"def total(w, x, n): return {made}")
    text = json.dumps(verdict.as_json(), allow_nan=False)  # raises for NaN
    (array,) = json.loads(text)["evidence"]["arrays"]
    assert array["yours"] == ["NaN", "Infinity", "-Infinity"]
    assert [float(each) for each in array["yours"]][1:] == [np.inf, -np.inf]
    assert array["expected"] == list(verdict.evidence.arrays[0].expected)
    assert verdict.evidence.arrays[0].is_off == (True, True, True)


def test_a_verdict_in_json_keeps_its_keys_and_gains_the_evidence():
    found = graded(RIGHT).as_json()
    before = "exercise passed stage title text mistake line source_line prints prints_dropped seconds seed done started"
    assert list(found) == [*before.split(), "evidence"]
    assert found["done"][1] == ["value", "2 cases"] and found == json.loads(json.dumps(found))


def test_a_large_answer_is_cut():
    def made(rng):
        return [Case((rng.normal(size=(60, 40)).astype(np.float32), np.float32(1), 0))]

    source = "def total(w, x, n): return {'w': w + 1, 'x': x}"
    tree = lambda w, x, n: {"w": w + (np.arange(40) != 7), "x": x}  # noqa: E731
    verdict = graded(source, cases=made, reference=tree, mistakes=[])
    w, x = verdict.evidence.arrays
    assert (w.path, w.shape, len(w.yours), len(w.expected), w.left_out) == ("['w']", (60, 40), 1024, 1024, 2400 - 1024)
    assert sum(w.is_off) == len(range(7, 1024, 40)) and "60 of 2401 numbers are off" in verdict.title
    assert (x.path, x.shape, x.yours, x.left_out) == ("['x']", (), (1.0,), 0)


@pytest.mark.parametrize("source, failed", [(SCAN, ""), (LOOP, "memory"), ("1 / 0", "file")])
def test_stages_are_told_as_they_pass(source, failed):
    told = []
    check = dataclasses.replace(CHECK, memory=Slope(with_more, "", floor=1000))
    exercise = types.SimpleNamespace(name="total", file_name="01_total.py", check=check, solution=IMPORTS + SCAN)
    note = lambda stage, seen: told.append((stage, seen, threading.get_ident()))  # noqa: E731
    verdict = grade(exercise, IMPORTS + source, Runner(), seed=0, on_stage=note)
    assert verdict.stage == failed
    assert told == [(*each, threading.get_ident()) for each in verdict.done]
    assert len(told) == {"": 3, "memory": 2, "file": 0}[failed]


def test_memory_that_grows_is_shown_beside_the_solution(graded_file):
    grows, flat = graded_file("accumulate_a_tree", "full_batch"), graded_file("accumulate_a_tree")
    assert (grows.stage, flat.stage) == ("memory", "")
    mine, solution = grows.evidence.memory, flat.evidence.memory
    assert mine.times == (1, 4) and mine.yours[1] > 3 * mine.yours[0]
    assert mine.reference == solution.reference == solution.yours and solution.yours[1] == solution.yours[0]
    assert grows.evidence.arrays and grows.evidence.collectives is None


class Counting(Runner):
    opened = 0

    def open(self, *args, **options):
        self.opened += 1
        return super().open(*args, **options)


def with_full_batch(name, source=STACK):
    """An exercise with one mistake, whose memory grows with the batch."""
    check = dataclasses.replace(CHECK, memory=Slope(with_more, "", floor=1000, full_batch=name))
    wrong = KnownWrong("full_batch", IMPORTS + source, "memory", "")
    return types.SimpleNamespace(
        name="total", file_name="01_total.py", check=check, solution=IMPORTS + SCAN, mistakes=(wrong,)
    )


def test_the_memory_of_the_full_batch_is_measured_on_request_and_remembered():
    exercise, runner = with_full_batch("full_batch"), Counting()
    before = grade(exercise, IMPORTS + SCAN, runner, seed=0).evidence.memory
    assert before.full_batch == () and before.reference
    opened = runner.opened
    small, large = full_batch_costs(exercise, runner)
    assert large > 2 * small > 0 and runner.opened == opened + 1
    assert full_batch_costs(exercise, runner, seed=7) == (small, large) and runner.opened == opened + 1
    assert grade(exercise, IMPORTS + SCAN, runner, seed=1).evidence.memory.full_batch == (small, large)
    assert examine_check(exercise) == []


def test_a_full_batch_that_is_not_declared_is_empty_and_one_that_is_missing_is_an_error():
    assert full_batch_costs(with_full_batch(""), Runner()) == ()
    missing = with_full_batch("fullbatch")
    with pytest.raises(InputError, match=r"full_batch='fullbatch' in the exercise total(.|\n)*full_batch"):
        full_batch_costs(missing, Runner())
    assert grade(missing, IMPORTS + SCAN, Runner(), seed=0).passed  # a learner can do nothing about it
    assert examine_check(missing) == ["there is no mistakes/fullbatch.py, which Slope.full_batch names"]
    with pytest.raises(
        AnybatchError, match=r"mistakes/full_batch.py of the exercise total must run(.|\n)*ZeroDivision"
    ):
        full_batch_costs(with_full_batch("full_batch", "def total(w, x, n): 1 / 0"), Runner())


@pytest.mark.parametrize(
    "wrong, executed",
    [(None, (("all-reduce", 1, 448),)), ("reduced_in_the_loop", (("all-reduce", 4, 448),)), ("no_mesh", ())],
)
def test_collectives_are_shown_with_those_that_are_wanted(wrong, executed, graded_file):
    verdict = graded_file("one_all_reduce", wrong)
    assert verdict.stage == ("collectives" if wrong else "")
    assert verdict.evidence.collectives == declarations.CollectivesShown(8, executed, (("all-reduce", 1),))
    assert json.loads(json.dumps(verdict.as_json()))["evidence"]["collectives"]["wanted"] == [["all-reduce", 1]]
