"""Shows pages, verdicts and lists: with colours in a terminal, and as plain lines in a file or a pipe."""

import codecs
import io
import re
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from typing import IO, Any, ClassVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Heading, Markdown
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

from anybatch.call.checks import Finding
from anybatch.learn.catalogue import Exercise
from anybatch.learn.check import Verdict
from anybatch.learn.learner_progress import Progress

WIDEST = 100
_STYLES = Theme(
    {
        "markdown.h1": "bold underline",
        "markdown.h2": "bold cyan",
        "markdown.code": "cyan",
        "markdown.code_block": "cyan",
    }
)
_THEME = "monokai"  # it sets its own background, so it is readable in every terminal

# state -> how a list shows it: the text and its style
STATES = {
    "solved": ("solved", "green"),
    "changed": ("solved; changed since", "green"),
    "begun": ("started", "yellow"),
    "open": ("", "dim"),
}
MARKS = {"solved": "✓", "changed": "✓", "begun": "•", "open": "·", "failed": "✗", "here": "▸", "bar": "│"}

# Replacements for a terminal that has only ASCII. Other characters lose their accents, or become question marks.
_SPELLED = str.maketrans(
    {"→": "->", "←": "<-", "×": "x", "·": ".", "•": "*", "…": "...", "−": "-", "–": "-", "—": "-", "’": "'"}  # noqa: RUF001
    | {"“": '"', "”": '"', "≤": "<=", "≥": ">=", "≠": "!=", "≈": "~", "─": "-", "│": "|", "█": "#", "░": "-"}
    | {"✓": "x", "✗": "!", "▸": ">", "Σ": "sum", "∇": "grad ", "²": "^2"}
)


def _spell(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_SPELLED)
    plain = unicodedata.normalize("NFKD", text)
    return "".join(char if char.isascii() else "" if unicodedata.combining(char) else "?" for char in plain), error.end


codecs.register_error("anybatch_spelled", _spell)


def shown(text: str) -> str:
    r"""Escapes control characters in a learner's text, so that it cannot move the cursor or ring the bell.

    >>> shown("a\tb\r\nc\x1b[2J")
    'a       b\nc\\x1b[2J'
    """
    text = re.sub(r"\r\n?", "\n", text).expandtabs()
    return re.sub(
        r"[^\S \n]|[\x00-\x09\x0b-\x1f\x7f-\x9f]|[\u202a-\u202e\u2066-\u2069]",
        lambda match: match[0].encode("unicode_escape").decode("ascii"),
        text,
    )


class _LeftHeading(Heading):
    """A heading without a box, in every version of rich."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = self.text.copy()
        text.justify = "left"
        yield text


class _Page(Markdown):
    elements: ClassVar[dict[str, Any]] = {**Markdown.elements, "heading_open": _LeftHeading}


class Screen:
    """Shows everything on one output.

    Args:
      file: the file to write to; standard output by default.
      console: a rich console to use instead, for example one that records.
    """

    def __init__(self, file: IO[str] | None = None, console: Console | None = None) -> None:
        file = file or sys.stdout or io.StringIO()  # standard output may have been closed
        encoding = (getattr(file, "encoding", None) or "utf-8").lower().replace("-", "")
        self.is_plain = not file.isatty() if console is None else not console.is_terminal
        if not encoding.startswith("utf") and hasattr(file, "reconfigure"):
            file.reconfigure(errors="anybatch_spelled")
        self.console = console or Console(file=file, force_terminal=not self.is_plain, highlight=False, theme=_STYLES)

    @property
    def width(self) -> int:
        """The width of a text: that of the terminal, but not more than is easy to read."""
        return min(self.console.width, WIDEST)

    def say(self, text: str = "", style: str = "") -> None:
        """Shows a text without formatting."""
        self._print(Text(shown(text), style))

    def markdown(self, text: str) -> None:
        """Shows a text in Markdown; its source if the output is plain."""
        self.say(text.strip()) if self.is_plain else self._print(_Page(text, code_theme=_THEME, hyperlinks=False))

    def code(self, source: str) -> None:
        """Shows Python code."""
        if self.is_plain:
            self.say("\n".join(f"    {line}" if line else "" for line in source.rstrip().splitlines()))
        else:
            self._print(Syntax(source.rstrip(), "python", theme=_THEME, word_wrap=True, padding=1))

    def heading(self, text: str) -> None:
        """Shows a heading."""
        self._print(Text(f"\n{text}", "bold"))

    def page(self, exercise: Exercise, progress: Progress) -> None:
        """Shows the page of an exercise, below a line with its number and the learner's progress."""
        if not self.is_plain:
            self.console.rule(style="dim")
        position = f"Exercise {exercise.number} of {progress.course.exercises[-1].number}"
        self._print(Text.assemble((position, "bold"), "   ", *self._bar(progress)))
        self.say()
        self.markdown(exercise.page)
        self.say()

    def verdict(self, verdict: Verdict) -> None:
        """Shows the verdict of a check."""
        mark, style = ("solved", "bold green") if verdict.passed else ("failed", "bold red")
        if not verdict.started:
            mark, style = "open", "bold yellow"
        title = verdict.title or ("Passed." if verdict.passed else "Failed.")
        took = f"{verdict.seconds:.2f} s"
        self._print(Text.assemble((f"{MARKS[mark]} {shown(title)}", style), (f"  {took}", "dim")))
        self._stages(verdict)
        if verdict.line is not None:
            self._line(verdict.line, (verdict.source_line or "").strip(), verdict.text)
        if verdict.text.strip():
            self.say()
            self._indented(Text(shown(verdict.text).strip("\n")))
        self._prints(verdict)

    def solved(self, exercise: Exercise) -> None:
        """Shows why the solution is right, and the same with anybatch."""
        self.heading("Why this is right")
        self.markdown(exercise.why)
        if exercise.one_line:
            self.heading("Now with anybatch")
            self.code(exercise.one_line)

    def hint(self, exercise: Exercise, level: int) -> None:
        """Shows one hint."""
        self.heading(f"Hint {level} of {len(exercise.hints)}")
        self.markdown(exercise.hints[level - 1])

    def solution(self, exercise: Exercise) -> None:
        """Shows the solution, and the same with anybatch."""
        self.heading(f"A solution of {exercise.number}: {exercise.title}")
        self.code(exercise.solution)
        if exercise.other_ways_page:
            self.heading("Other ways")
            self.markdown(exercise.other_ways_page)
        self.heading("The same with anybatch")
        self.code(exercise.with_anybatch)

    def listing(self, progress: Progress, here: Exercise | None = None) -> None:
        """Lists all exercises, and which are solved."""
        self._print(Text.assemble((f"{progress.course.title}\n", "bold"), *self._bar(progress), "\n"))
        is_wide = self.width >= 90 or self.is_plain
        rows = []
        for exercise in progress.course.exercises:
            state = progress.state(exercise)
            about, style = STATES[state]
            pointer = MARKS["here"] if exercise is here else " "
            names = (exercise.name,) if is_wide else ()
            mark = Text(MARKS[state], style)
            rows.append((pointer, mark, f"{exercise.number:02}", *names, exercise.title, Text(about, style)))
        self._table(rows)

    def closing(self, progress: Progress) -> None:
        """Shows the end of the course."""
        left = [exercise for exercise in progress.course.exercises if exercise.name not in progress.solved]
        self._print(Text.assemble(("\nThe end of the course", "bold underline"), "\n\n", *self._bar(progress)))
        if left:
            some = ", ".join(f"{exercise.number} ({exercise.title})" for exercise in left[:4])
            more = f" and {len(left) - 4} more" if len(left) > 4 else ""
            self.say(f"\nStill open: {some}{more}.")
            return
        self.say(f"\nYou have solved all {len(progress.course.exercises)} exercises. The same with anybatch:\n")
        for exercise in progress.course.exercises:
            if exercise.one_line:
                self._print(Text(f"{exercise.number:02}  {exercise.title}", "dim"))
                self.code(exercise.one_line)

    def row(self, exercise: Exercise, row: Mapping[str, Any]) -> None:
        """Shows the result of `check` for one exercise, in a line or two."""
        verdict, is_well = row["verdict"], row["state"] == "passed"
        seconds = f"{verdict['seconds']:.2f} s" if verdict else "solved before" if is_well else ""
        self._result(exercise, is_well, f"{row['state']:<11}", seconds)
        about = row["message"] or (verdict["title"] if verdict and not verdict["passed"] else "")
        if about:
            self._indented(Text(shown(about), "dim"))

    def examined(self, found: Any) -> None:
        """Shows the result of `dev check` for one exercise, an `Examined`."""
        self._result(found.exercise, not found.defects, "", f"{found.checks:>4} checks  {found.seconds:5.1f} s")
        for text, tone in (*((defect, "red") for defect in found.defects), *((note, "yellow") for note in found.notes)):
            self._indented(Text(f"- {shown(text)}", tone))

    def findings(self, findings: Sequence[Finding]) -> None:
        """Shows the findings of the doctor."""
        rows = []
        for each in findings:
            mark, style = ("solved", "green") if each.is_well else ("failed", "red")
            rows.append((Text(MARKS[mark], style), each.subject, each.text))
        self._table(rows)

    # For an interactive session.

    def time(self, text: str) -> None:
        """Shows the name of the checked file and the time, above the verdict."""
        self.console.print()
        self.console.rule(Text(text, "dim"), style="dim", align="left")

    def file(self, path: Any, where: str = "") -> None:
        """Shows which file to edit, and the command that checks it if nothing watches it."""
        how = f"Then check it: {where}" if where else "It is checked whenever you save it."
        self._print(Text.assemble("Edit ", (str(path), "bold"), f". {how}"))

    def keys(self, text: str) -> None:
        """Shows the keys; `text` is like "n next   h hint"."""
        parts = [part for key in text.split("   ") for part in ((key[0], "bold"), (key[1:] + "   ", "dim"))]
        self._print(Text.assemble("\n", *parts))

    def help(self, keys: Mapping[str, str]) -> None:
        """Shows what every key does."""
        self.say()
        self._table([(Text(f" {key} ", "bold"), does) for key, does in keys.items()])

    def checking(self) -> None:
        """Shows that a check has started."""
        if not self.is_plain:
            is_dumb = self.console.is_dumb_terminal
            self.console.print(Text("checking…", "dim"), end="\n" if is_dumb else "\r")

    def erase(self) -> None:
        """Erases the line that `checking` has shown."""
        if not self.is_plain and not self.console.is_dumb_terminal:
            self.console.file.write("\r\x1b[K")

    def flush(self) -> None:
        """Flushes the output."""
        self.console.file.flush()

    # Helpers.

    def _print(self, renderable: Any) -> None:
        if self.is_plain:
            self.console.print(renderable, soft_wrap=True)
        else:
            self.console.print(renderable, width=self.width)

    def _indented(self, renderable: Any) -> None:
        if self.is_plain and isinstance(renderable, Text):
            self.say("\n".join(f"  {line}".rstrip() for line in renderable.plain.splitlines()))
        else:
            self._print(Padding(renderable, (0, 0, 0, 2)))

    def _result(self, exercise: Exercise, is_well: bool, state: str, took: str) -> None:
        mark, style = ("solved", "green") if is_well else ("failed", "red")
        name = f"{exercise.number:02} {exercise.name:<26} "
        self._print(Text.assemble((f"{MARKS[mark]} ", style), name, (state, style), (took, "dim")))

    def _table(self, rows: Sequence[Sequence[str | Text]]) -> None:
        """Shows rows in aligned columns."""
        cells = [[Text(shown(str(cell)), cell.style if isinstance(cell, Text) else "") for cell in row] for row in rows]
        table = Table.grid(padding=(0, 1))
        for row in cells:
            table.add_row(*row)
        if not self.is_plain:
            self._print(table)
            return
        widths = [max(len(cell.plain) for cell in column) for column in zip(*cells, strict=True)]
        for row in cells:
            self.say(" ".join(f"{cell.plain:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())

    def _bar(self, progress: Progress) -> Sequence[tuple[str, str]]:
        total = len(progress.course.exercises)
        done = sum(exercise.name in progress.solved for exercise in progress.course.exercises)
        words = f"{done} of {total} solved"
        if self.is_plain:
            return [(words, "")]
        return [("█" * done, "green"), ("░" * (total - done), "dim"), (f" {words}", "")]

    def _stages(self, verdict: Verdict) -> None:
        """Shows the stages that passed, and the one that failed, with the name of the mistake if it is known."""
        passed, failed = Text(f"  {MARKS['solved']}", "green"), Text(f"  {MARKS['failed']}", "red")
        rows: list[tuple[str | Text, ...]] = [(passed, stage, Text(seen, "dim")) for stage, seen in verdict.done]
        if verdict.stage and verdict.started:
            rows.append((failed, verdict.stage, verdict.mistake or ""))
        self._table(rows)

    def _line(self, number: int, source: str, text: str) -> None:
        """Shows the line number and the source line, unless the text already shows that line."""
        source = "" if source and source in text else shown(source)
        self.say()
        self._indented(
            Text.assemble((f"line {number}" + (f" {MARKS['bar']} " if source else ""), "dim"), (source, "bold"))
        )

    def _prints(self, verdict: Verdict) -> None:
        if not verdict.prints and not verdict.prints_dropped:
            return
        self._print(Text("\n  your prints", "dim"))
        for line in shown(verdict.prints).rstrip("\n").split("\n"):
            self._indented(Text.assemble((f"{MARKS['bar']} ", "dim"), line))
        if verdict.prints_dropped:
            self._indented(Text(f"{verdict.prints_dropped:,} more bytes were printed and are not shown.", "dim"))
