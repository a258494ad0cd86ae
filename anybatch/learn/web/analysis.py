"""Looks at a loss in another process: its reading, its plan, its verification, and a small batch step by step.

`Analyst` is what the server uses. It starts `python -m anybatch.learn.web.analysis`, which imports JAX and waits; sends
it the source; and yields what it answers. Each answer is one line of JSON, a dict with the key "part":

  "reading"       what `anybatch.read` says, and the state of each line of the source
  "plan"          the bytes and the seconds of a gradient at several microbatch sizes
  "verification"  the table of `anybatch.verify`
  "steps"         the gradient of a few examples after each microbatch
  "prints"        what the file printed
  "error"         why a part is missing; `of` names the part, or is "file" if nothing could be done
  "end"           the last one

The process has limits, and its own process group, which is killed when the analysis ends. The functions below
`main` run in it; only they import JAX.
"""

import asyncio
import contextlib
import dataclasses
import faulthandler
import json
import linecache
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import types
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from anybatch.errors import AnybatchError, InputError
from anybatch.learn.runner import isolation

FILE = "loss.py"  # the name of the learner's file, in messages
LARGEST_SOURCE = 100_000  # characters
LARGEST_ANSWER = 2**22  # bytes of one line
MOST_PRINTED = 4000  # characters of the learner's prints that are shown
PATIENCE = 120.0  # seconds until a process must be ready, even on a busy machine
GRACE = 3.0  # seconds after the limit, in which a process says where it was and ends by itself

CONTRACT = (
    "Define loss(params, batch), which returns a number, and example(), which returns (params, batch). Or define "
    "params and batch in the file."
)

# Kinds of lines, from the weakest to the strongest: a line is of the strongest kind among its operations.
KINDS = ("same", "rows", "sum", "once", "full", "couples")

_START = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from anybatch.learn.web import analysis
analysis.main(sys.argv[2])
"""

Part = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class AnalysisLimits:
    """The limits of one analysis.

    Args:
      seconds: wall-clock time of each part.
      memory: bytes, beyond what JAX takes itself; limited on Linux only.
    """

    seconds: float = 30.0
    memory: int = 2 * 2**30


class Analyst:
    """Analyses sources, each in a process of its own, and keeps one process ready.

    Args:
      limits: the limits of each analysis.
    """

    def __init__(self, limits: AnalysisLimits | None = None) -> None:
        self.limits = AnalysisLimits() if limits is None else limits
        self._spare: asyncio.Task[_Process] | None = None
        self._open: set[_Process] = set()
        self._is_closed = False

    def warm_up(self) -> None:
        """Starts a process that the next analysis will use. Call it where an event loop runs."""
        if self._spare is None and not self._is_closed:
            self._spare = asyncio.get_running_loop().create_task(self._start())

    async def _start(self) -> "_Process":
        process = await _Process.start(self.limits)
        self._open.add(process)
        return process

    async def analyse(self, source: str) -> AsyncGenerator[Part, None]:
        """Yields the parts of an analysis as they become ready. Closing the generator ends the process."""
        if len(source) > LARGEST_SOURCE:
            yield _error("file", f"A file may have {LARGEST_SOURCE:,} characters, and this one has {len(source):,}.")
            yield {"part": "end"}
            return
        process = await self._take()
        try:
            async for part in process.answers(source):
                yield part
        finally:
            await process.end()
            self._open.discard(process)
            self.warm_up()
        yield {"part": "end"}

    async def _take(self) -> "_Process":
        """The spare process, or a new one."""
        waiting, self._spare = self._spare, None
        if waiting is not None:
            process = await waiting
            if process.is_running:
                return process
            await process.end()
            self._open.discard(process)
        return await self._start()

    async def close(self) -> None:
        """Ends all processes, for good."""
        self._is_closed = True
        if self._spare is not None:
            await asyncio.wait([self._spare])
            self._spare = None
        for process in list(self._open):
            await process.end()
        self._open.clear()


class _Process:
    """The server's end of one process."""

    def __init__(self, process: asyncio.subprocess.Process, folder: str, limits: AnalysisLimits) -> None:
        self._process, self._folder, self._limits = process, folder, limits

    @classmethod
    async def start(cls, limits: AnalysisLimits) -> "_Process":
        folder = tempfile.mkdtemp(prefix="anybatch-playground-")
        os.mkdir(os.path.join(folder, "home"))
        places = [place for place in sys.path if place]  # without "", the current folder
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _START, json.dumps(places), folder),
                env=isolation.environment(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                cwd=folder,
                start_new_session=True,  # a group of its own, and out of reach of Ctrl-C
                limit=LARGEST_ANSWER,
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return cls(process, folder, limits)

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.returncode is None

    async def answers(self, source: str) -> AsyncIterator[Part]:
        """Sends the source, and yields the answers, until the process ends or exceeds its limits."""
        stdin = self._process.stdin
        assert stdin is not None
        request = {"source": source, **dataclasses.asdict(self._limits)}
        with contextlib.suppress(OSError):
            stdin.write(json.dumps(request).encode() + b"\n")
            await stdin.drain()
        patience, of = PATIENCE, "file"
        while True:
            try:
                line = await asyncio.wait_for(self._read(), patience)
            except TimeoutError:
                yield self._stopped(of)
                break
            except ValueError:  # asyncio's error for a line above the limit
                yield _error(of, f"An answer was larger than {LARGEST_ANSWER:,} bytes.")
                break
            if not line:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), GRACE)
                yield self._lost(of)
                break
            part = json.loads(line)
            if part["part"] == "end":
                break
            patience, of = self._limits.seconds + GRACE, part.get("next", of)
            if part["part"] != "ready":
                yield part
        if prints := self._text("prints")[:MOST_PRINTED]:
            yield {"part": "prints", "text": prints}

    async def _read(self) -> bytes:
        assert self._process.stdout is not None
        return await self._process.stdout.readline()

    def _lost(self, of: str) -> Part:
        """The error for a process that ended without an answer."""
        if self._text("trace").startswith("Timeout"):
            return self._stopped(of)
        status = self._process.returncode or 0
        if status < 0 and self._text("trace").startswith("Fatal Python error: Segmentation fault"):
            why = "The process crashed, most likely by a recursion that never ends."
        elif status < 0:
            allowed = self._limits.memory / 2**30
            why = f"The process was ended ({signal.Signals(-status).name}), most likely for its memory: {allowed:g} GiB"
            why += " are allowed."
        else:
            why = f"The file ended its process (exit code {status}) before there was an answer."
        return _error(of, why, line=self._line())

    def _stopped(self, of: str) -> Part:
        line = self._line()
        at = "" if line is None else f", and was at line {line}"
        seconds = f"{self._limits.seconds:g} second{'' if self._limits.seconds == 1 else 's'}"
        why = f"Stopped: your code ran for more than {seconds}{at}. Is there an endless loop?"
        return _error(of, why, line=line)

    def _line(self) -> int | None:
        """The innermost line of the learner's file in the trace that the process left."""
        found = re.search(rf'^  File "{re.escape(FILE)}", line (\d+) in ', self._text("trace"), re.MULTILINE)
        return None if found is None else int(found[1])

    def _text(self, name: str) -> str:
        with contextlib.suppress(OSError), open(os.path.join(self._folder, name), "rb") as file:
            return file.read(2**16).decode(errors="replace")
        return ""

    async def end(self) -> None:
        """Kills the process and its group, waits until it has ended, and removes its folder."""
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self._process.pid, signal.SIGKILL)
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.communicate(), GRACE)  # also closes the pipes
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)


def _error(of: str, message: str, *, line: int | None = None, title: str = "") -> Part:
    return {"part": "error", "of": of, "title": title, "message": message, "line": line}


# The process.


def main(folder: str) -> None:
    """Analyses the source that comes through standard input, and answers on standard output.

    Args:
      folder: holds the files `prints` and `trace`, and the folder `home`, the only one where files may be changed.
    """
    isolation.die_with_parent(os.getppid())
    replies = os.fdopen(os.dup(1), "wb")
    prints, trace = (open(os.path.join(folder, name), "wb") for name in ("prints", "trace"))
    for target in (1, 2):
        os.dup2(prints.fileno(), target)
    faulthandler.enable(trace)
    home = os.path.join(folder, "home")
    os.chdir(home)
    _warm_up(home)

    def send(part: Part) -> None:
        replies.write(json.dumps(part).encode() + b"\n")
        replies.flush()

    send({"part": "ready"})
    line = sys.stdin.buffer.readline()
    if not line:  # the server has ended
        return
    request = json.loads(line)
    seconds = request["seconds"]
    limits = isolation.Limits(cpu_seconds=int(20 * seconds) + 1, memory=request["memory"])
    isolation.begin(limits, home, hidden=())

    def begin(of: str) -> None:
        send({"part": "ready", "next": of})
        faulthandler.dump_traceback_later(seconds, exit=True, file=trace)

    analyse(request["source"], begin, send)
    faulthandler.cancel_dump_traceback_later()
    send({"part": "end"})
    os._exit(0)  # what the file has left running must not keep the process


def _warm_up(home: str) -> None:
    """Imports what an analysis needs, and compiles a small program, since the first compilation is slow."""
    from anybatch.jaxprs import versions

    os.environ |= {"HOME": home, "TMPDIR": home, "XLA_FLAGS": versions.quick_compilation_flags()}
    tempfile.tempdir = None  # it is found again, in TMPDIR
    import jax
    import numpy as np

    import anybatch as ab

    def loss(w: Any, x: Any) -> Any:
        return jax.numpy.mean((x @ w) ** 2)

    arrays = np.ones(3, np.float32), np.ones((4, 3), np.float32)
    ab.read(loss, *arrays)
    ab.verify(loss, *arrays, microbatch_sizes=2)
    jax.clear_caches()
    ab.clear_caches()


def analyse(source: str, begin: Callable[[str], None], send: Callable[[Part], None]) -> None:
    """Analyses a source in this process.

    Args:
      source: the text of the file.
      begin: called before each part, with its name.
      send: called with each part that is ready.
    """
    begin("file")
    try:
        subject = load(source)
    except BaseException as error:
        send(_problem(error, "file"))
        return
    for name, make in (("reading", reading), ("plan", plan), ("verification", verification), ("steps", steps)):
        begin(name)
        start = time.perf_counter()
        try:
            part = make(subject)
        except BaseException as error:
            send(_problem(error, name))
            if name == "reading":  # a loss that cannot be read cannot be planned or verified, for the same reason
                return
        else:
            send({"part": name, "took": round(time.perf_counter() - start, 3), **part})


def _problem(error: BaseException, of: str) -> Part:
    """An exception as plain data, with the line of the learner's file where it happened."""
    if isinstance(error, SyntaxError) and error.filename == FILE:
        return _error(of, str(error.msg), line=error.lineno, title="SyntaxError")
    seen: BaseException | None = error
    line = None
    while seen is not None and line is None:
        frames = traceback.extract_tb(seen.__traceback__)
        line = next((frame.lineno for frame in reversed(frames) if frame.filename == FILE), None)
        seen = seen.__cause__ or seen.__context__
    title = "" if isinstance(error, AnybatchError) else type(error).__name__
    message = str(error) or "The file raised it without a message."
    return _error(of, message if len(message) <= 2000 else f"{message[:2000]} …", line=line, title=title)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A loss and its arguments."""

    loss: Callable[..., Any]
    params: Any
    batch: Any


def load(source: str) -> Subject:
    """Runs a learner's file, and returns the loss and the arguments that it defines.

    Raises:
      InputError: if it does not define them.
    """
    linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
    module = types.ModuleType("loss")
    module.__file__ = FILE
    sys.modules["loss"] = module
    exec(compile(source, FILE, "exec"), module.__dict__)  # in a process of its own, within limits
    names = vars(module)
    if not callable(names.get("loss")):
        raise InputError("The file must define a loss", given=_defined(names, "no function loss"), remedy=CONTRACT)
    if callable(names.get("example")):
        made = names["example"]()
        if not isinstance(made, tuple) or len(made) != 2:
            given = f"example() returned {type(made).__name__}"
            raise InputError("example() must return a pair (params, batch)", given=given, remedy=CONTRACT)
        return Subject(names["loss"], *made)
    if "params" in names and "batch" in names:
        return Subject(names["loss"], names["params"], names["batch"])
    raise InputError(
        "The file must define the arguments of the loss",
        given=_defined(names, "neither example() nor params and batch"),
        remedy=CONTRACT,
    )


def _defined(names: dict[str, Any], missing: str) -> str:
    found = [name for name, value in names.items() if not name.startswith("_") and not isinstance(value, type(sys))]
    return f"{missing}; it defines {', '.join(found[:10])}" if found else f"{missing}; it defines nothing"


# The reading.


def reading(subject: Subject) -> Part:
    """What `anybatch.read` says, and the kind of each line."""
    import anybatch as ab

    found = ab.read(subject.loss, subject.params, subject.batch)
    title, *notes = str(found).splitlines()
    blames = [
        {"line": blame.line, "function": blame.function, "primitive": blame.primitive, "why": blame.why}
        for blame in found.blame
    ]
    frontier = [
        {"how": each.how, "shape": each.shape, "dtype": each.dtype, "bytes": each.bytes, "line": each.line}
        for each in found.frontier
    ]
    return {
        "title": title,
        "kind": found.kind,
        "how": found.how,
        "passes": found.passes,
        "couples": not found.separable,
        "examples": found.num_examples,
        "notes": notes,
        "blames": blames,
        "advice": found.advice,
        "frontier": frontier,
        "marks": marks(_split(subject)),
    }


def _split(subject: Subject) -> Any:
    """The loss, split as `anybatch.read` splits it."""
    from anybatch.call.loss import trace_loss
    from anybatch.reading.read import split_loss

    fun, arguments, has_aux = _sorted(subject)
    loss, consts = trace_loss(fun, arguments, arguments.num_examples, weighted=False, has_aux=has_aux)
    return split_loss(loss, consts, may_select=True)


def _sorted(subject: Subject) -> tuple[Callable[..., Any], Any, bool]:
    """The loss as a function of arrays, its arguments by role, and whether it returns aux."""
    from anybatch.call.arguments import Roles
    from anybatch.call.models import partition_models

    roles = Roles.of(argnums=0, batch_argnums=1, rng_argnums=())
    call = partition_models(subject.loss, roles, False, (subject.params, subject.batch), {})
    return call.fun, roles.sort(call.fun, call.args, call.kwargs), call.has_aux


def marks(split: Any) -> list[Part]:
    """The kind of each line of the learner's file that computes something, from the states of its values.

    Each is a dict with the line, its kind, and its values: for each kind on the line, the type of the last such value.
    """
    from anybatch.jaxprs import source

    lines: dict[int, dict[str, str]] = {}
    blamed = {blame.line for blame in split.reader.blames if blame.file == FILE}
    for node, output, kind in _kinds(split.reader):
        place = source.locate(node)
        if place.file == FILE:
            on_line = "couples" if kind == "full" and place.line in blamed else kind
            lines.setdefault(place.line, {})[on_line] = str(output)
    return [
        {
            "line": line,
            "kind": max(kinds, key=KINDS.index),
            # What is the same for every example says little about a line that does more.
            "values": [{"kind": kind, "type": kinds[kind]} for kind in KINDS if kind in kinds and _tells(kind, kinds)],
        }
        for line, kinds in sorted(lines.items())
    ]


def _tells(kind: str, kinds: dict[str, str]) -> bool:
    return kind != "same" or len(kinds) == 1


def _kinds(reader: Any, outer: str | None = None) -> Iterator[tuple[Any, Any, str]]:
    """Every result of every node, and its kind, also in nested functions."""
    from anybatch.reading.states import INVARIANT

    taken = {
        value
        for node, outcome in reader.outcomes.items()
        for value, rows in zip(node.inputs, outcome.takes or (), strict=False)
        if rows is not None and reader.state(value) == INVARIANT
    }
    for node in reader.graph.nodes:
        kinds = []
        for position, output in enumerate(node.outputs):
            # A microbatch takes its rows of such a value, for example of random numbers.
            kind = outer or ("rows" if output in taken else _kind(reader, node, position))
            kinds.append(kind)
            yield node, output, kind
        yield from _kinds_inside(reader, node, kinds)


def _kind(reader: Any, node: Any, position: int) -> str:
    from anybatch.reading.states import INVARIANT, SUMMED, Batched, Head

    output = node.outputs[position]
    state = reader.state(output)
    if output in reader.computed_first:
        # It is known before the first microbatch, and so the same for all of them. Here it counts what it is.
        outcome = reader.outcomes.get(node)
        state = Head(couples=True) if outcome is None else outcome.states[position]
    elif state == INVARIANT:
        return "once" if reader.depends_on_batch(output) else "same"
    if isinstance(state, Batched):
        return "rows"
    if isinstance(state, Head):
        return "full" if state.couples else "once"
    return "sum" if state == SUMMED else "same"


def _kinds_inside(reader: Any, node: Any, kinds: Sequence[str]) -> Iterator[tuple[Any, Any, str]]:
    """The kinds of the values in the functions inside a node, such as the body of a scan."""
    from anybatch.jaxprs import interpreter
    from anybatch.jaxprs.graph import Graph
    from anybatch.reading.reader import NeedsInlining
    from anybatch.reading.states import NotRowwise

    for jaxpr in interpreter.jaxprs_in(node.equation):
        inner = None
        facts = _facts_inside(reader, node, jaxpr)
        if facts is not None and not {"full", "couples", "once"} & set(kinds):
            with contextlib.suppress(NotRowwise, NeedsInlining):
                inner = reader.nested(node, jaxpr, facts)
        if inner is not None:
            yield from _kinds(inner)
        elif kinds:
            strongest = max(kinds, key=KINDS.index)
            graph = Graph(jaxpr, calls=(*node.calls, node.equation))
            yield from ((each, output, strongest) for each in graph.nodes for output in each.outputs)


def _facts_inside(reader: Any, node: Any, jaxpr: Any) -> list[Any] | None:
    """What is known of the inputs of a function inside a node; None if the operands do not tell."""
    from anybatch.jaxprs import interpreter
    from anybatch.reading.reader import Fact
    from anybatch.reading.states import Batched

    operands = node.inputs[1:] if node.name == "cond" else node.inputs
    if len(jaxpr.invars) != len(operands) or node.name == "while":
        return None
    facts = [reader.fact(value) for value in operands]
    if node.name != "scan":
        return facts
    num_consts, num_carry = interpreter.scan_counts(node.params)
    carried = [
        # A carry that begins as zeros may be a sum or have rows later on: its state is that of the result.
        dataclasses.replace(fact, state=reader.state(result), is_zero=False)
        for fact, result in zip(facts[num_consts : num_consts + num_carry], node.outputs, strict=False)
    ]
    scanned: list[Fact] = []
    for fact in facts[num_consts + num_carry :]:
        if isinstance(fact.state, Batched):
            if fact.state.axis == 0:  # it goes through the examples one by one
                return None
            fact = dataclasses.replace(fact, state=fact.state.at(fact.state.axis - 1))
        scanned.append(fact)
    return [*facts[:num_consts], *carried, *scanned]


# The plan.

MOST_SIZES = 9
_PLAN_SECONDS = 8.0  # after that, no other sizes are compiled


def plan(subject: Subject) -> Part:
    """The bytes and seconds of the gradient at several microbatch sizes, the largest first, from compiled programs."""
    from anybatch.call.models import partition_models
    from anybatch.call.options import Options
    from anybatch.gradients.computation import Gradient
    from anybatch.planning.measure import Measurements
    from anybatch.planning.strategy import Strategy

    options = Options.of(subject.loss)
    call = partition_models(subject.loss, options.roles, False, (subject.params, subject.batch), {})
    gradient = Gradient(call.fun, call.options(options), options.roles.sort(call.fun, call.args, call.kwargs))
    measurements = Measurements(gradient)
    start = time.perf_counter()
    found: dict[Strategy, Any] = {}
    for size in plan_sizes(gradient.examples):
        strategy = Strategy(size)
        if len(found) < 3 or time.perf_counter() - start < _PLAN_SECONDS:
            found[strategy] = measurements.bytes_of(strategy)
    known = {strategy: taken for strategy, taken in found.items() if taken is not None}
    seconds = measurements.race(list(known), rounds=3)
    candidates = [
        {
            "size": strategy.microbatch_size,
            "route": str(measurements.route(strategy)),
            "total": taken.total,
            "arguments": taken.arguments,
            "gradients": taken.gradients,
            "activations": taken.activations + taken.results,
            "seconds": seconds[strategy],
        }
        for strategy, taken in known.items()
    ]
    return {"examples": gradient.examples, "candidates": candidates}


def plan_sizes(examples: int) -> list[int]:
    """The microbatch sizes to compile: all examples, powers of two below, and 1.

    >>> plan_sizes(100)
    [100, 64, 32, 16, 8, 4, 2, 1]
    """
    powers = [2**power for power in range(examples.bit_length() - 1, -1, -1) if 2**power < examples]
    sizes = [examples, *powers]
    return sizes if len(sizes) <= MOST_SIZES else [*sizes[: MOST_SIZES - 1], 1]


# The verification.


def verification(subject: Subject) -> Part:
    """The table of `anybatch.verify`; and what a loop gets that takes the mean of the microbatches' gradients."""
    import anybatch as ab
    from anybatch.reading.report import LossKind

    arguments = (subject.params, subject.batch)
    found = ab.verify(subject.loss, *arguments)
    part = {
        "ok": found.ok,
        "examples": found.num_examples,
        "batch": found.batch_size,
        "dtype": found.dtype,
        "routes": [_route(check) for check in found.routes],
        "notes": list(found.notes),
        "diagnosis": found.diagnosis or "",
        "naive": None,
    }
    if ab.read(subject.loss, *arguments).form.kind is not LossKind.MEAN:
        sizes = [check.name for check in found.routes]
        naive = ab.verify(subject.loss, *arguments, reduction="mean", microbatch_sizes=_ragged(sizes))
        (check,) = naive.routes
        part["naive"] = {**_route(check), "diagnosis": naive.diagnosis or ""}
    return part


def _ragged(names: Sequence[str]) -> int:
    """The largest microbatch size among routes that is not all examples."""
    sizes = sorted({_size(name) for name in names})
    return sizes[-2] if len(sizes) > 1 else sizes[0]


def _size(name: str) -> int:
    return int(name.partition("=")[2].partition(",")[0])


def _route(check: Any) -> Part:
    return {
        "name": check.name,
        "size": _size(check.name),
        "difference": check.gradient,
        "allowed": check.tolerance,
        "leaf": check.leaf,
        "value": check.value,
        "same": check.ok,
    }


# A few examples, step by step.

EXAMPLES = 12  # of the small batch
SIZES = (1, 2, 3, 4, 5, 6)  # microbatch sizes that it can be divided into
COMPONENTS = 8  # of the gradient that are shown


def steps(subject: Subject) -> Part:
    """The gradient of a few examples after each microbatch, in float64, for several microbatch sizes.

    It is computed as `anybatch.value_and_grad` computes it: each microbatch adds its part to one buffer. If there are
    two passes, a first one computes what the head needs.
    """
    import jax

    number = len(jax.tree.leaves(subject.batch)[0])
    try:
        return _steps(subject, min(EXAMPLES, number))
    except Exception as error:
        if number <= EXAMPLES or isinstance(error, AnybatchError):
            raise
        raise InputError(
            f"The steps are those of the first {EXAMPLES} examples",
            given=f"a loss that raised {type(error).__name__}: {str(error).partition(chr(10))[0]}",
            remedy=f"Write it for any number of examples: it may rely on there being {number}.",
        ) from error


def _steps(subject: Subject, examples: int) -> Part:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from anybatch.verification.comparison import widened

    with jax.enable_x64(True):
        params, batch = jax.tree.map(widened, (subject.params, subject.batch))
        few = Subject(subject.loss, params, jax.tree.map(lambda leaf: leaf[:examples], batch))
        fun, arguments, _ = _sorted(few)
        buffer = _Buffer(fun, arguments)
        expected = _flat(jax.jit(jax.grad(lambda params: jnp.sum(subject.loss(params, few.batch))))(params))
        shown = np.sort(np.argsort(-np.abs(expected), kind="stable")[:COMPONENTS])
        sizes = {}
        for size in dict.fromkeys(min(size, examples) for size in SIZES):
            partial = buffer.partial_sums(size)
            result = buffer.finished(partial[-1])
            sizes[size] = {
                "partial": [total[shown].tolist() for total in partial],
                "norms": [float(np.linalg.norm(total)) for total in partial],
                "difference": float(np.linalg.norm(result - expected) / (np.linalg.norm(expected) or 1.0)),
            }
    names = _component_names(subject.params)
    direct = buffer.direct
    return {
        "examples": examples,
        "passes": buffer.passes,
        "components": [names[position] for position in shown],
        "entries": expected.size,
        "expected": expected[shown].tolist(),
        "norm": float(np.linalg.norm(expected)),
        "factor": buffer.factor,
        "direct": direct[shown].tolist() if np.any(direct) else None,
        "first_pass": buffer.gathered if buffer.passes == 2 else [],
        "sizes": sizes,
    }


class _Buffer:
    """The gradient buffer of one loss and a few examples, and the parts that microbatches add to it."""

    def __init__(self, fun: Callable[..., Any], arguments: Any) -> None:
        import jax
        import jax.numpy as jnp

        from anybatch.call.loss import trace_loss
        from anybatch.reading.evaluation import Examples
        from anybatch.reading.read import split_loss
        from anybatch.reading.split import Seeds

        self.examples = arguments.num_examples
        self._programs: dict[int, Callable[[int], list[Any]]] = {}
        loss, consts = trace_loss(fun, arguments, self.examples, weighted=False, has_aux=False)
        split = self.split = split_loss(loss, consts)
        if split.hoisted:
            raise InputError(
                "The steps are those of a loss without custom derivatives of its parameters alone",
                given="a loss that has one",
                remedy="Look at the plan and the verification: these have no such limit.",
            )
        self.inputs = [jnp.asarray(leaf) for leaf in split.inputs(consts, arguments.arrays)]
        self.wrt = self.inputs[split.num_consts : split.num_consts + len(loss.types.wrt)]
        self.known: list[Any] | None = None
        everything = Examples(0, self.examples)
        rows = jax.jit(lambda: self._prefix(self.wrt, everything, split.gathered_first))()
        self.known = jax.jit(lambda: split.compute_first(self.inputs, rows))()
        frontier = jax.jit(lambda: self._prefix(self.wrt, everything, split.frontier))()
        _, pullback = jax.jit(lambda wrt, moving: jax.vjp(self._head(frontier), wrt, moving))(
            self.wrt, [frontier[position] for position in split.differentiated]
        )
        direct, seeds = pullback(jnp.ones((), jnp.float64))
        self.passes = 2 if split.seeds is Seeds.BETWEEN else 1
        self.factor: float | None = None
        if split.seeds is Seeds.AFTER:  # the factor is known at the end, and applied then
            self.factor = float(seeds[0].reshape(()))
            seeds = [jnp.ones_like(seeds[0])]
        self.seeds, self.direct = seeds, _flat(direct)
        self.gathered = [_gathered(value, state) for value, state in zip(split.frontier, split.states, strict=True)]

    def _with_wrt(self, wrt: Sequence[Any]) -> list[Any]:
        first = self.split.num_consts
        return [*self.inputs[:first], *wrt, *self.inputs[first + len(wrt) :]]

    def _prefix(self, wrt: Sequence[Any], examples: Any, wanted: Sequence[Any]) -> list[Any]:
        from anybatch.reading.split import PrefixInputs

        given = PrefixInputs(list(wrt), self._with_wrt(wrt), self.known, [], [])
        return self.split.prefix(given, examples, wanted)

    def _head(self, frontier: Sequence[Any]) -> Callable[..., Any]:
        """The loss as a function of the parameters and of those values of the frontier that have a gradient."""

        def head(wrt: Sequence[Any], moving: Sequence[Any]) -> Any:
            now = dict(zip(self.split.differentiated, moving, strict=True))
            values = [now.get(position, value) for position, value in enumerate(frontier)]
            return self.split.head(self._with_wrt(wrt), self.known, [], values, num_outputs=1)[0].astype("float64")

        return head

    def partial_sums(self, size: int) -> list[Any]:
        """The buffer after each microbatch of that size. The last one may be smaller."""
        total = 0.0 * self.direct
        sums = []
        for start in range(0, self.examples, size):
            total = total + self._part(start, min(size, self.examples - start))
            sums.append(total)
        return sums

    def finished(self, total: Any) -> Any:
        """The gradient, from the buffer after the last microbatch."""
        return total * (1.0 if self.factor is None else self.factor) + self.direct

    def _part(self, start: int, size: int) -> Any:
        """What the microbatch from `start` on adds to the buffer."""
        if not self.split.differentiated:
            return 0.0 * self.direct
        return _flat(self._program(size)(start))

    def _program(self, size: int) -> Callable[[int], list[Any]]:
        import jax

        from anybatch.reading.evaluation import Examples
        from anybatch.reading.states import Batched, take_rows

        split = self.split
        wanted = [split.frontier[position] for position in split.differentiated]
        states = [split.states[position] for position in split.differentiated]

        def part(start: Any) -> list[Any]:
            _, pullback = jax.vjp(lambda wrt: self._prefix(wrt, Examples(start, size), wanted), self.wrt)
            seeds = [
                take_rows(seed, state, self.examples, start, size) if isinstance(state, Batched) else seed
                for seed, state in zip(self.seeds, states, strict=True)
            ]
            return pullback(seeds)[0]

        if size not in self._programs:
            self._programs[size] = jax.jit(part)
        return self._programs[size]


def _gathered(value: Any, state: Any) -> Part:
    """What the first pass computes for the head: rows of all examples, or a sum."""
    from anybatch.jaxprs import source
    from anybatch.reading.states import Batched

    place = source.SourceLine() if value.node is None else source.locate(value.node)
    how = "rows" if isinstance(state, Batched) else "sum"
    return {"how": how, "shape": value.shape, "line": place.line if place.file == FILE else None}


def _flat(leaves: Any) -> Any:
    """All entries of a gradient in one vector."""
    import jax
    import numpy as np

    return np.concatenate([np.asarray(leaf, np.float64).reshape(-1) for leaf in jax.tree.leaves(leaves)])


def _component_names(params: Any) -> list[str]:
    """The name of every entry of the parameters, in order."""
    import jax
    import numpy as np

    from anybatch.call.checks import named_leaves

    names = []
    for name, leaf in named_leaves("params", params):
        if jax.dtypes.issubdtype(np.result_type(leaf), np.inexact):
            indices = np.ndindex(*np.shape(leaf))
            names += [f"{name}[{', '.join(map(str, index))}]" if index else name for index in indices]
    return names
