"""Grades a learner's file: runs the checks of an exercise in order, up to the first that fails.

The learner's code runs in other processes (`anybatch.learn.runner`), which report what it does; this module judges the
reports. Memory and work per device are compared with the exercise's own solution, measured in the same way.

Most of a check's time goes into tracing and compiling. So `Prefetch` asks for answers before they are needed: two
processes work on them while the first ones are judged.

A file that manipulates its own process can forge the reports. Nothing here tries to detect that: the checks are for
learners, who gain nothing by it.
"""

import concurrent.futures
import contextlib
import dataclasses
import difflib
import functools
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from anybatch.call.memory import readable
from anybatch.errors import AnybatchError, InputError
from anybatch.learn.catalogue import Exercise
from anybatch.learn.check import (
    Arguments,
    Case,
    Check,
    CollectivesShown,
    Evidence,
    MemoryShown,
    Mistake,
    Program,
    Raises,
    Response,
    Same,
    Slope,
    Verdict,
)
from anybatch.learn.rules import computes_elsewhere
from anybatch.learn.runner.evidence import kind_of
from anybatch.learn.runner.submissions import Ended, Runner, Submission
from anybatch.learn.values import (
    EPSILON,
    ROUNDINGS,
    Answer,
    Expected,
    Failed,
    compare,
    counted,
    expected,
    failure,
    in_double,
    lines,
    matches,
    shown,
    title_of,
)


def processes_of(check: Check) -> tuple[int, ...]:
    """The number of devices of each process of a check: one process for each number, or two if there is only one."""
    counts = sorted({*check.devices, *([check.collectives.devices] if check.collectives else [])})
    return tuple(counts * 2 if len(counts) == 1 and check.is_compiled and (os.cpu_count() or 1) > 1 else counts)


def devices_of(exercise: Exercise) -> tuple[int, ...]:
    """The number of devices of each process to keep ready: the check's, and 1, which the next exercise will need."""
    counts = processes_of(exercise.check)
    return counts if 1 in counts else (1, *counts)


class Prefetch:
    """Requests to the processes of one submission, sent before their answers are needed.

    All requests with the same shapes and dtypes go to the same process, which has compiled the program already.

    Args:
      check: the check of the exercise.
      submissions: the processes, each with its number of devices.
    """

    def __init__(self, check: Check, submissions: Sequence[tuple[int, Submission]]) -> None:
        self._check = check
        self._submissions = submissions
        self._pools = [concurrent.futures.ThreadPoolExecutor(1) for _ in submissions]
        self._loading = [
            pool.submit(getattr, submission, "loaded")
            for pool, (_, submission) in zip(self._pools, submissions, strict=True)
        ]
        self._homes: dict[Any, int] = {}  # shapes and dtypes -> the index of the process that has compiled them
        # Each with its arguments, to keep them alive: their id() is part of the key.
        self._asked: dict[Any, tuple[Arguments, concurrent.futures.Future[dict[str, Any]]]] = {}

    def loaded(self) -> Iterator[dict[str, Any]]:
        """Waits for each process to load the file, and yields the results."""
        for loading in self._loading:
            yield loading.result()

    def begin(self, count: int, args: Arguments, *want: str) -> None:
        """Sends a request, without waiting for the answer."""
        key = (count, id(args), want)
        if key not in self._asked:
            self._asked[key] = args, self._submit(count, args, want)

    def answer(self, count: int, args: Arguments, *want: str) -> dict[str, Any]:
        """Waits for an answer, and sends the request first if `begin` has not. Raises what `Submission.ask` raises."""
        self.begin(count, args, *want)
        return self._asked[count, id(args), want][1].result()

    def respond(self, count: int, args: Arguments, more: Mapping[str, Any]) -> dict[str, Any]:
        """The answer while operations are held, or distorted. Arguments of equal shapes share one request."""
        leaves = zip(jax.tree.leaves(args), jax.tree.leaves(more["others"]), strict=True)
        changed = tuple(np.not_equal(one, other).tobytes() for one, other in leaves)
        key = (count, kind_of(args), repr(more["selects"]), more["distorts"], changed)
        if key not in self._asked:
            self._asked[key] = args, self._submit(count, args, ("response",), more)
        return self._asked[key][1].result()

    def _submit(
        self, count: int, args: Arguments, want: tuple[str, ...], more: Mapping[str, Any] | None = None
    ) -> concurrent.futures.Future[dict[str, Any]]:
        home = self._home(count, args)
        request = call(self._check, args, *want) | dict(more or {})
        return self._pools[home].submit(self._submissions[home][1].ask, request)

    def close(self) -> None:
        """Ends the processes, even if they are busy."""
        for _, submission in self._submissions:
            submission.end()
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)

    def _home(self, count: int, args: Arguments) -> int:
        kind = (count, kind_of(args)) if self._check.is_compiled else count
        if kind not in self._homes:
            taken = Counter(self._homes.values())
            able = [index for index, (devices, _) in enumerate(self._submissions) if devices == count]
            self._homes[kind] = min(able, key=lambda index: taken[index])
        return self._homes[kind]


def call(check: Check, args: Arguments, *want: str) -> dict[str, Any]:
    """The request to call a check's function."""
    return {"function": check.function, "args": args, "want": want, "compiled": check.is_compiled}


def grade(
    exercise: Exercise,
    source: str,
    runner: Runner,
    *,
    path: str | None = None,
    seed: int | None = None,
    anybatch: bool = False,
    on_stage: Callable[[str, str], None] | None = None,
) -> Verdict:
    """Checks a learner's file, and returns a verdict, whatever the file does.

    Args:
      exercise: the exercise.
      source: the text of the file.
      runner: runs the file.
      path: the path of the file, for messages.
      seed: the seed of the cases. By default a new one each time, so that nobody can know the answers beforehand.
      anybatch: whether the file may import anybatch.
      on_stage: called as each stage passes, with its name and what it found: the entries of `Verdict.done`, in order.
        The thread that called `grade` calls it.
    """
    begin = time.perf_counter()
    seed = secrets.randbelow(10**6) if seed is None else seed
    check, done = exercise.check, []
    submissions: list[tuple[int, Submission]] = []
    with contextlib.ExitStack() as stack:
        result: dict[str, Any] = {}
        evidence = Evidence()
        try:
            for count in processes_of(check):
                submission = runner.open(source, path or exercise.file_name, devices=count, anybatch=anybatch)
                submissions.append((count, stack.enter_context(submission)))
            # Closed before the submissions are used below, since only one thread at a time may use them.
            with contextlib.closing(Prefetch(check, submissions)) as prefetch:
                grading = _Grading(exercise, runner, prefetch, seed)
                try:
                    for stage, seen in grading.stages():
                        done.append((stage, seen))
                        if on_stage is not None:
                            on_stage(stage, seen)
                finally:
                    evidence = grading.evidence
        except Failed as failed:
            result = failed.verdict
        except Ended as ended:
            result = {"stage": "limits", "title": ended.message}
            if ended.where:
                result |= dict(zip(("line", "source_line"), ended.where, strict=True))
        prints = next((each for _, each in submissions if each.prints), None)
        if prints:
            result |= {"prints": prints.prints, "prints_dropped": prints.prints_dropped}
    return Verdict(
        exercise=exercise.name,
        passed="stage" not in result,
        done=tuple(done),
        seed=seed,
        seconds=time.perf_counter() - begin,
        evidence=evidence,
        **result,
    )


def examine_check(exercise: Exercise, seed: int = 0) -> list[str]:
    """Returns what is wrong with an exercise's check itself: one sentence for each defect."""
    check, defects = exercise.check, []
    rng = np.random.default_rng(seed)
    cases = [case for case in check.cases(rng) if isinstance(case, Case)]
    if not cases:
        return ["check.py has no Case"]
    is_strict, told_apart = False, dict.fromkeys((mistake.name for mistake in check.mistakes), False)
    for case in cases:
        right = expected(check.reference, case.args, rng)
        if not all(np.all(np.isfinite(leaf)) for leaf in right.answer.leaves):
            defects.append(f"the reference is not finite for {case.note or 'a case'}")
            continue
        for leaf, tolerance in zip(right.answer.leaves, right.tolerances, strict=True):
            narrow = leaf.astype("bfloat16").astype(np.float64)
            is_strict |= not np.issubdtype(leaf.dtype, np.inexact) or bool(np.any(np.abs(narrow - leaf) > tolerance))
        for mistake in check.mistakes:
            wrong = _wrong(mistake, case)
            if wrong is not None:
                told_apart[mistake.name] |= not matches(right.answer, wrong, right.tolerances)
    if not is_strict:
        defects.append("the tolerance is so wide that an answer in bfloat16 would pass")
    if check.memory and check.memory.full_batch and not _full_batch(exercise):
        defects.append(f"there is no mistakes/{check.memory.full_batch}.py, which Slope.full_batch names")
    unseen = [name for name, apart in told_apart.items() if not apart]
    return defects + [f"the mistake {name!r} gives the right answer in every case" for name in unseen]


# The measured costs of files of a course: (source, what, number of devices, kind of arguments) -> bytes or
# multiplications.
_MEASURED: dict[Any, int] = {}


def full_batch_costs(exercise: Exercise, runner: Runner, seed: int = 0) -> tuple[int, ...]:
    """The temporaries of computing the full batch at once, for the batch sizes of the exercise's `Slope`.

    `grade` does not measure them, since that takes about as long as a small check. Once this function has, they are
    remembered, and later verdicts for the exercise have them in `evidence.memory.full_batch`.

    Args:
      exercise: the exercise.
      runner: runs the file that the exercise's `Slope.full_batch` names.
      seed: the seed of the arguments; only their shapes matter.

    Returns:
      The bytes for each batch size, or an empty tuple if the exercise declares no such file.

    Raises:
      InputError: if there is no such file.
      AnybatchError: if it cannot be run.
    """
    slope = exercise.check.memory
    if slope is None or not slope.full_batch:
        return ()
    source, who = _full_batch(exercise), f"mistakes/{slope.full_batch}.py"
    if source is None:
        raise InputError(
            "Slope.full_batch must be the name of a file in mistakes/, without .py",
            given=f"full_batch={slope.full_batch!r} in the exercise {exercise.name}",
            remedy=f"The files are: {', '.join(each.name for each in exercise.mistakes) or 'none'}.",
        )
    sizes = _sizes(slope, np.random.default_rng(seed))
    return tuple(_costs(exercise, runner, source, who, "temporaries", exercise.check.devices[0], sizes))


def _full_batch(exercise: Exercise) -> str | None:
    """The file that computes the full batch at once; None if none is declared, or there is no such file."""
    name = exercise.check.memory.full_batch if exercise.check.memory else ""
    return next((each.source for each in exercise.mistakes if each.name == name), None) if name else None


def _sizes(slope: Slope | None, rng: np.random.Generator) -> list[Arguments]:
    """The arguments for which memory is measured."""
    return [slope.args(rng, times) for times in (1, slope.times)] if slope else []


def _known_costs(source: str | None, what: str, devices: int, sizes: Sequence[Arguments]) -> list[int]:
    """The costs of a file for each of several arguments, if all of them were measured before; else an empty list."""
    keys = [(source, what, devices, kind_of(args)) for args in sizes]
    return [_MEASURED[key] for key in keys] if all(key in _MEASURED for key in keys) else []


def _costs(
    exercise: Exercise, runner: Runner, source: str, who: str, what: str, devices: int, sizes: Sequence[Arguments]
) -> list[int]:
    """The temporaries, or the work, of a file for each of several arguments, measured as those of a submission."""
    if known := _known_costs(source, what, devices, sizes):
        return known
    with runner.open(source, exercise.file_name, devices=devices) as submission:
        for args in sizes:
            try:
                reply = submission.ask(call(exercise.check, args, what))
                problem = "{type}: {message}".format_map(reply["error"]) if "error" in reply else ""
            except Ended as ended:
                problem = ended.message
            if problem:
                raise AnybatchError(
                    f"The {who} of the exercise {exercise.name} must run, since answers are compared with its "
                    f"costs; it ends with {problem}\nFor details: anybatch learn dev check"
                )
            _MEASURED[source, what, devices, kind_of(args)] = reply[what]
    return _known_costs(source, what, devices, sizes)


class _Grading:
    """One run of a check: its cases, and its stages in order."""

    def __init__(self, exercise: Exercise, runner: Runner, prefetch: Prefetch, seed: int) -> None:
        self.check = check = exercise.check
        self.prefetch = prefetch
        self.exercise = exercise
        self.costs_of_solution = functools.partial(_costs, exercise, runner, exercise.solution, "solution")
        self.rng = np.random.default_rng(seed)
        self.cases = list(check.cases(self.rng))
        self.inputs = [case for case in self.cases if isinstance(case, Case)]
        self.refused = [case for case in self.cases if isinstance(case, Raises)]
        self.same = [(same, same.change(self.rng, self.inputs[0].args)) for same in check.same]
        self.sizes = _sizes(check.memory, self.rng)
        self.programs: list[tuple[Program, Arguments]] = []
        self.first: tuple[Case, Answer, Expected] | None = None
        self.evidence = Evidence()

    def stages(self) -> Any:  # noqa: C901 - the stages of a check, one after the other
        """Runs the stages in order; yields the name of each that passed, and what it found. Raises `Failed`."""
        self._file()
        self._look_ahead()
        yield "signature", f"{self.check.function}({', '.join(self.check.parameters)})"
        yield "value", self._values()
        for case in self.refused:
            self._refusal(case)
        if self.refused:
            yield "errors", counted(len(self.refused), "bad input", "bad inputs") + " refused"
        for same, args in self.same:
            self._same(same, args)
        if self.check.same:
            yield "invariance", ", ".join(same.what for same in self.check.same) + ": no difference"
        if self.check.differences:
            self._differences()
            yield "differences", "the gradient is the slope of the value"
        for program, args in self.programs:
            for rule in (computes_elsewhere, *self.check.program):
                with contextlib.suppress(_Unknown):
                    if says := rule(program, args):
                        raise Failed("program", *title_of(says))
        if self.check.program:
            yield "program", counted(len(self.check.program), "rule", "rules") + " on the jaxpr"
        if self.check.memory:
            yield "memory", self._memory()
        if self.check.collectives:
            yield "collectives", self._collectives()

    def _file(self) -> None:
        for loaded in self.prefetch.loaded():
            if error := loaded.get("error"):
                raise failure("file", error)
            self._untouched(loaded)
            name, needed = self.check.function, len(self.check.parameters)
            wanted = f"def {name}({', '.join(self.check.parameters)}):"
            if name not in loaded["functions"]:
                near = difflib.get_close_matches(name, list(loaded["functions"]), n=1)
                hint = f" Was `{near[0]}` meant?" if near else ""
                title = f"There is no function `{name}` in the file.{hint}"
                raise Failed("signature", title, f"It begins with\n{wanted}")
            arity = loaded["functions"][name]
            if arity is not None and not arity[0] <= needed <= arity[1]:
                takes = str(arity[0]) if arity[0] == arity[1] else f"{arity[0]} to {arity[1]}"
                title = f"`{name}` must take {counted(needed, 'argument', 'arguments')}; it takes {takes}."
                raise Failed("signature", title, f"It begins with\n{wanted}")

    def _untouched(self, reply: Mapping[str, Any]) -> None:
        if reply.get("replaced"):
            name = reply["replaced"][0]
            text = "Answers are compared in another process, so this changes nothing there. Remove it from the file."
            raise Failed("file", f"The file replaces {name}.", text)

    def _ask(self, count: int, args: Arguments, *want: str, note: str = "") -> dict[str, Any]:
        reply = self.prefetch.answer(count, args, *want)
        if error := reply.get("error"):
            raise failure("run", error, note)
        self._untouched(reply)
        return reply

    def _respond(
        self, count: int, selects: list[Any], args: Arguments, others: Arguments, distorts: bool
    ) -> Response | None:
        reply = self.prefetch.respond(count, args, {"selects": selects, "others": others, "distorts": distorts})
        if error := reply.get("error"):
            raise failure("run", error)
        self._untouched(reply)
        return _response(reply["response"])

    def _values(self) -> str:
        rights = [expected(self.check.reference, case.args, self.rng) for case in self.inputs]
        for count in self.check.devices:
            for case, right in zip(self.inputs, rights, strict=True):
                if count not in (case.devices or self.check.devices):
                    continue
                where = f" on {counted(count, 'device', 'devices')}" if len(self.check.devices) > 1 else ""
                reply = self._ask(count, case.args, *self.wanted, note=case.note + where)
                answer = Answer.read(reply["value"])
                if difference := self._difference(answer, right):
                    raise self._named(difference, case, answer, right, count)
                self.first = self.first or (case, answer, right)
                if "program" in self.wanted:
                    respond = functools.partial(self._respond, count)
                    self.programs.append((Program.read(reply["program"], count, (), respond), case.args))
        if self.first:
            self._show(arrays=shown(*self.first[1:]))
        devices = f" on {' and '.join(str(count) for count in self.check.devices)} devices"
        return counted(len(self.inputs), "case", "cases") + (devices if len(self.check.devices) > 1 else "")

    def _show(self, **more: Any) -> None:
        self.evidence = dataclasses.replace(self.evidence, **more)

    def _difference(self, answer: Answer, right: Expected) -> Failed | None:
        """The first difference from the right answer. If it is in the numbers, they are added to the evidence."""
        difference = compare(answer, right, self.check.dtypes)
        if difference and difference.stage == "value":
            self._show(arrays=shown(answer, right))
        return difference

    @property
    def wanted(self) -> tuple[str, ...]:
        return ("value", "program") if self.check.is_compiled else ("value",)

    def _look_ahead(self) -> None:
        """Requests everything that the stages will need if none of them fails, in their order."""
        first = self.check.devices[0]
        for count in self.check.devices:
            for case in self.inputs:
                if count in (case.devices or self.check.devices):
                    self.prefetch.begin(count, case.args, *self.wanted)
        for refused in self.refused:
            self.prefetch.begin(first, refused.args, *self.wanted[-1:])
        for _, args in self.same:
            self.prefetch.begin(first, args, "value")
        for args in self.sizes:
            self.prefetch.begin(first, args, "temporaries", "value")

    def _named(self, difference: Failed, case: Case, answer: Answer, right: Expected, count: int) -> Failed:
        """The failure for a wrong answer, with its name if it is a known mistake."""
        where = f"{case.note}\n" if case.note else ""
        if len(self.check.devices) > 1:
            where += f"on {counted(count, 'device', 'devices')}\n"
        text = where + difference.text
        for mistake in self.check.mistakes:
            wrong = _wrong(mistake, case)
            if wrong is None or not matches(answer, wrong, right.tolerances):
                continue
            if not matches(right.answer, wrong, right.tolerances):
                title, rest = title_of(mistake.says if isinstance(mistake.says, str) else mistake.says(*case.args))
                # At the value stage, the table in the text says everything.
                seen = "" if difference.stage == "value" else difference.title
                return Failed(difference.stage, title, lines(rest, seen, text), mistake=mistake.name)
        return Failed(difference.stage, difference.title, text)

    def _refusal(self, case: Raises) -> None:
        try:
            self._ask(self.check.devices[0], case.args, *self.wanted[-1:])
        except Failed as failed:
            error = failed.error
            if error is None:
                raise
            if case.error not in error["bases"]:
                title = f"It must raise {case.error}; it raises {error['type']}."
                raise Failed("errors", title, f"for {case.note}\n{error['message']}") from None
            missing = [text for text in case.mentions if text not in error["message"]]
            if missing:
                title = f"The error does not mention {' and '.join(missing)}."
                raise Failed("errors", title, f"for {case.note}\nyours: {error['message']}") from None
            return
        raise Failed("errors", f"It must raise {case.error}, and does not.", f"for {case.note}")

    def _same(self, same: Same, args: Arguments) -> None:
        assert self.first is not None
        case, answer, right = self.first
        other = Answer.read(self._ask(self.check.devices[0], args, "value", note=same.what)["value"])
        wanted = answer
        if same.then:
            tree = jax.tree.unflatten(jax.tree.structure(right.tree), answer.leaves)
            wanted = Answer.of(same.then(tree, case.args, args))
        doubled = tuple(2 * each for each in right.tolerances)
        double = Expected(right.tree, wanted, doubled)
        if difference := self._difference(other, double):
            text = lines(same.says, "('expected' is your answer before the change)", difference.text)
            raise Failed("invariance", f"The answer changes with {same.what}, and must not.", text)

    def _differences(self) -> None:
        assert self.first is not None and self.check.differences is not None
        (case, answer, right), rule, step = self.first, self.check.differences, 2.0**-7
        structure = jax.tree.structure(right.tree)
        at = rule.argument

        def moved(steps: int) -> Arguments:
            other = jax.tree.map(
                lambda leaf, along: (leaf + steps * step * along).astype(leaf.dtype), case.args[at], direction
            )
            return (*case.args[:at], other, *case.args[at + 1 :])

        def value(steps: int) -> float:
            reply = Answer.read(self._ask(self.check.devices[0], moved(steps), "value")["value"])
            return float(rule.value(jax.tree.unflatten(structure, reply.leaves)))

        def exact(steps: int) -> float:
            up, down = (rule.value(self.check.reference(*in_double(moved(each)))) for each in (steps, -steps))
            return float(up - down) / (2 * steps * step)

        direction = jax.tree.map(lambda leaf: self.rng.choice((-1.0, 1.0), leaf.shape), case.args[at])
        up, down = value(1), value(-1)
        slope = (up - down) / (2 * step)
        gradient = rule.gradient(jax.tree.unflatten(structure, answer.leaves))
        along = zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True)
        mine = sum(float(np.vdot(one, other)) for one, other in along)
        # The error of a finite difference with this step, and of values in float32.
        allowed = abs(exact(2) - exact(1)) + ROUNDINGS * EPSILON * max(abs(up), abs(down)) / step
        if not abs(mine - slope) <= allowed:
            text = f"along a random direction: gradient {mine:.6g}, slope {slope:.6g}, allowed off {allowed:.2g}"
            raise Failed("differences", "The gradient is not the slope of the value.", text)

    def _memory(self) -> str:
        slope, count = self.check.memory, self.check.devices[0]
        assert slope is not None
        found = []
        for times, args in zip((1, slope.times), self.sizes, strict=True):
            reply = self._ask(count, args, "temporaries", "value", note=f"a batch {times} times as large")
            found.append(reply["temporaries"])
        right = expected(self.check.reference, args, self.rng, draws=1)
        answer = Answer.read(reply["value"])
        if difference := self._difference(answer, right):
            note = f"a batch {slope.times} times as large"
            raise self._named(difference, Case(args, note), answer, right, count)
        solutions = self.costs_of_solution("temporaries", count, self.sizes)
        full = _known_costs(_full_batch(self.exercise), "temporaries", count, self.sizes)
        self._show(memory=MemoryShown((1, slope.times), tuple(found), tuple(solutions), tuple(full)))
        small, large = found
        seen = f"{readable(small)} to {readable(large)} for a batch {slope.times} times as large"
        if large > slope.limit * small and large - small > slope.floor:
            title = f"Memory grows with the batch: {seen}."
            raise Failed("memory", title, f"With microbatches of the same size, it should not grow.\n{slope.says}")
        for mine, solution in zip(found, solutions, strict=True):
            if mine > slope.slack * solution + (slope.floor if slope.room is None else slope.room):
                title = f"It needs {readable(mine)} for temporaries, where {readable(solution)} are enough."
                text = f"One microbatch does not need more than {slope.slack:g} times as much.\n{slope.says}"
                raise Failed("memory", title, text)
        return seen

    def _collectives(self) -> str:
        rule = self.check.collectives
        assert rule is not None
        case = next(case for case in self.cases if isinstance(case, Case))
        args = rule.args(self.rng) if rule.args else case.args
        reply = self._ask(rule.devices, args, "collectives", "work")
        executed = tuple((str(kind), int(times), int(size)) for kind, times, size in reply["collectives"])
        required = tuple((kind, times) for kind, times in rule.exactly.items() if times)
        self._show(collectives=CollectivesShown(rule.devices, executed, required))
        counts: dict[str, int] = {}
        for kind, times, _ in executed:
            # A loop of unknown length counts as a very long one.
            counts[kind] = counts.get(kind, 0) + (times if times >= 0 else 10**6)
        seen = ", ".join(counted(times, kind, kind + "s") for kind, times in sorted(counts.items())) or "none"
        total = sum(times * size for _, times, size in executed)
        is_other = counts != dict(required)
        if is_other or (rule.largest is not None and total > rule.largest):
            wanted = ", ".join(counted(times, kind, kind + "s") for kind, times in rule.exactly.items()) or "none"
            title = f"Executed on {rule.devices} devices: {seen}; it must be {wanted}."
            if not is_other:
                enough = readable(rule.largest or 0)
                title = f"The collectives carry {readable(total)} on each device; {enough} are enough."
            raise Failed("collectives", title, rule.says if isinstance(rule.says, str) else rule.says(counts))
        if rule.slack is not None:
            (solution,) = self.costs_of_solution("work", rule.devices, [args])
            if not 0 <= reply["work"] <= rule.slack * solution:
                much = f"{reply['work']} multiplications" if reply["work"] >= 0 else "loops of unknown length"
                title = f"A device does more than its share of the work: {much}, where {solution} are enough."
                text = f"The answer is right, but some of the {rule.devices} devices also do the work of others."
                raise Failed("collectives", title, f"{text}\nEach device should process its own rows, once.")
        return f"{seen} executed on {rule.devices} devices"


class _Unknown(Exception):
    """The program cannot be run with operations held. The rule is then skipped."""


def _response(record: Any) -> Response | None:
    if record is None:
        return None
    if "unknown" in record:
        raise _Unknown(record["unknown"])
    return Response(*(tuple(record[name]) for name in ("before", "after", "held")))


def _wrong(mistake: Mistake, case: Case) -> Any:
    with np.errstate(all="ignore"):  # a division by zero may be the mistake
        return mistake.answer(*in_double(case.args))
