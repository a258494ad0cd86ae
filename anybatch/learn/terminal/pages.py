"""What a learner sees: pages, verdicts and lists.

With colours in a terminal; as plain lines where they are read by another program, or kept in a file.
"""

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

from anybatch.learn.catalogue import Course, Exercise
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
_THEME = "monokai"  # it brings its background, so that it can be read on any

# state -> what a list says of it, and in which style
STATES = {
    "solved": ("solved", "green"),
    "changed": ("solved; changed since", "green"),
    "begun": ("begun", "yellow"),
    "open": ("", "dim"),
}
_MARKS = {"solved": "✓", "changed": "✓", "begun": "•", "open": "·", "failed": "✗", "here": "▸", "bar": "│"}
_ASCII = {"solved": "x", "changed": "x", "begun": "~", "open": ".", "failed": "!", "here": ">", "bar": "|"}

# What a terminal that knows no more than ASCII shows instead; anything else without its accents, or as a question mark.
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
    r"""A text of the learner's that cannot move the cursor, or ring the bell.

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
    """A heading without a box, whichever version of rich draws it."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = self.text.copy()
        text.justify = "left"
        yield text


class _Page(Markdown):
    elements: ClassVar[dict[str, Any]] = {**Markdown.elements, "heading_open": _LeftHeading}


class Screen:
    """Where everything is shown.

    Args:
      file: what to write to.
      console: a console of rich's instead, which records, say.
    """

    def __init__(self, file: IO[str] | None = None, console: Console | None = None) -> None:
        file = file or sys.stdout or io.StringIO()  # where the output was closed, nobody reads it
        encoding = (getattr(file, "encoding", None) or "utf-8").lower().replace("-", "")
        self.is_plain = not file.isatty() if console is None else not console.is_terminal
        self.marks = _MARKS if encoding.startswith("utf") else _ASCII
        if not encoding.startswith("utf") and hasattr(file, "reconfigure"):
            file.reconfigure(errors="anybatch_spelled")
        self.console = console or Console(file=file, force_terminal=not self.is_plain, highlight=False, theme=_STYLES)

    @property
    def width(self) -> int:
        """How wide a text may be: a line that is too long is hard to read."""
        return min(self.console.width, WIDEST)

    def say(self, text: str = "", style: str = "") -> None:
        """Shows a text as it is."""
        self._print(Text(shown(text), style))

    def markdown(self, text: str) -> None:
        """Shows a text in markdown: as it was written, where the output is plain."""
        self.say(text.strip()) if self.is_plain else self._print(_Page(text, code_theme=_THEME, hyperlinks=False))

    def code(self, source: str) -> None:
        """Shows Python."""
        if self.is_plain:
            self.say("\n".join(f"    {line}" if line else "" for line in source.rstrip().splitlines()))
        else:
            self._print(Syntax(source.rstrip(), "python", theme=_THEME, word_wrap=True, padding=1))

    def heading(self, text: str) -> None:
        """Shows what comes next."""
        self._print(Text(f"\n{text}", "bold"))

    def page(self, exercise: Exercise, course: Course, progress: Progress) -> None:
        """Shows the page of an exercise, under a line that says where the learner is."""
        if not self.is_plain:
            self.console.rule(style="dim")
        position = f"Exercise {exercise.number} of {course.exercises[-1].number}"
        self._print(Text.assemble((position, "bold"), "   ", *self._bar(course, progress)))
        self.say()
        self.markdown(exercise.page)
        self.say()

    def verdict(self, verdict: Verdict) -> None:
        """Shows what became of a check."""
        mark, style = ("solved", "bold green") if verdict.passed else ("failed", "bold red")
        if not verdict.started:
            mark, style = "open", "bold yellow"
        title = verdict.title or ("Passed." if verdict.passed else "Failed.")
        took = f"{verdict.seconds:.2f} s"
        self._print(Text.assemble((f"{self.marks[mark]} {shown(title)}", style), (f"  {took}", "dim")))
        self._stages(verdict)
        if verdict.line is not None:
            self._line(verdict.line, (verdict.source_line or "").strip(), verdict.text)
        if verdict.text.strip():
            self.say()
            self._indented(Text(shown(verdict.text).strip("\n")))
        self._prints(verdict)

    def solved(self, exercise: Exercise) -> None:
        """Shows why it is right, and the same with the library."""
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
        """Shows the solution, and the same with the library."""
        self.heading(f"A solution of {exercise.number}: {exercise.title}")
        self.code(exercise.solution)
        self.heading("The same with anybatch")
        self.code(exercise.with_anybatch)

    def listing(self, course: Course, progress: Progress, here: Exercise | None = None) -> None:
        """Shows all exercises, and what is solved."""
        self._print(Text.assemble((f"{course.title}\n", "bold"), *self._bar(course, progress), "\n"))
        is_wide = self.width >= 90 or self.is_plain
        table = Table.grid(padding=(0, 1))
        rows = []
        for exercise in course.exercises:
            state = progress.state(exercise)
            about, style = STATES[state]
            pointer = self.marks["here"] if exercise is here else " "
            names = (exercise.name,) if is_wide else ()
            row = (pointer, self.marks[state], f"{exercise.number:02}", *names, exercise.title, about)
            table.add_row(row[0], Text(row[1], style), row[2], *row[3:-1], Text(about, style))
            rows.append(row)
        if self.is_plain:
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            for row in rows:
                self.say(" ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
        else:
            self._print(table)

    def closing(self, course: Course, progress: Progress) -> None:
        """Shows what comes after the last exercise."""
        left = [exercise for exercise in course.exercises if exercise.name not in progress.solved]
        self._print(Text.assemble(("\nThe end of the course", "bold underline"), "\n\n", *self._bar(course, progress)))
        if left:
            some = ", ".join(f"{exercise.number} ({exercise.title})" for exercise in left[:4])
            more = f" and {len(left) - 4} more" if len(left) > 4 else ""
            self.say(f"\nStill open: {some}{more}.")
            return
        self.say(f"\nYou have solved all {len(course.exercises)} of them. Every one ended with a line of anybatch:\n")
        for exercise in course.exercises:
            if exercise.one_line:
                self._print(Text(f"{exercise.number:02}  {exercise.title}", "dim"))
                self.code(exercise.one_line)

    def row(self, exercise: Exercise, row: Mapping[str, Any]) -> None:
        """Shows what `check` found out about one exercise, in a line or two."""
        style = "green" if row["state"] == "passed" else "red"
        mark = self.marks["solved" if row["state"] == "passed" else "failed"]
        verdict = row["verdict"]
        seconds = f"{verdict['seconds']:.2f} s" if verdict else "solved before" if row["state"] == "passed" else ""
        name = f"{exercise.number:02} {exercise.name:<26} "
        self._print(Text.assemble((f"{mark} ", style), name, (f"{row['state']:<11}", style), (seconds, "dim")))
        about = row["message"] or (verdict["title"] if verdict and not verdict["passed"] else "")
        if about:
            self._indented(Text(shown(about), "dim"))

    def examined(
        self, exercise: Exercise, defects: Sequence[str], notes: Sequence[str], checks: int, seconds: float
    ) -> None:
        """Shows what `dev check` found out about one exercise."""
        mark, style = ("failed", "red") if defects else ("solved", "green")
        took = f"{checks:>4} checks  {seconds:5.1f} s"
        name = f"{exercise.number:02} {exercise.name:<26} "
        self._print(Text.assemble((f"{self.marks[mark]} ", style), name, (took, "dim")))
        for text, tone in (*((defect, "red") for defect in defects), *((note, "yellow") for note in notes)):
            self._indented(Text(f"- {shown(text)}", tone))

    def findings(self, findings: Sequence[tuple[str, str, bool, str]]) -> None:
        """Shows what the doctor found: subjects, texts, whether they are well, and remedies."""
        table = Table.grid(padding=(0, 1))
        for subject, text, is_well, remedy in findings:
            mark, style = (self.marks["solved"], "green") if is_well else (self.marks["failed"], "red")
            table.add_row(Text(mark, style), subject, Text(text + (f"\n{remedy}" if remedy else "")))
            if self.is_plain:
                self.say(f"{mark} {subject:<16} {text}" + (f"\n  {remedy}" if remedy else ""))
        if not self.is_plain:
            self._print(table)

    # What the terminal has besides.

    def time(self, text: str) -> None:
        """Shows what was checked, and when, above the verdict."""
        self.console.print()
        self.console.rule(Text(text, "dim"), style="dim", align="left")

    def file(self, path: Any, where: str = "") -> None:
        """Shows which file to edit, and the command that checks it if nothing else does."""
        how = f"Then check it: {where}" if where else "It is checked whenever you save it."
        self._print(Text.assemble("Edit ", (str(path), "bold"), f". {how}"))

    def keys(self, text: str) -> None:
        """Shows the keys, as "n next   h hint"."""
        parts = [part for key in text.split("   ") for part in ((key[0], "bold"), (key[1:] + "   ", "dim"))]
        self._print(Text.assemble("\n", *parts))

    def help(self, keys: Mapping[str, str]) -> None:
        """Shows what every key does."""
        table = Table.grid(padding=(0, 2))
        for key, does in keys.items():
            table.add_row(Text(f" {key}", "bold"), does)
        self.console.print()
        self._print(table)

    def checking(self) -> None:
        """Says at once that a check has begun."""
        if not self.is_plain:
            is_dumb = self.console.is_dumb_terminal
            self.console.print(Text("checking…", "dim"), end="\n" if is_dumb else "\r")

    def erase(self) -> None:
        """Takes back the line that says so."""
        if not self.is_plain and not self.console.is_dumb_terminal:
            self.console.file.write("\r\x1b[K")

    def flush(self) -> None:
        """What was shown is there."""
        self.console.file.flush()

    # The parts.

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

    def _bar(self, course: Course, progress: Progress) -> Sequence[tuple[str, str]]:
        total = len(course.exercises)
        done = sum(exercise.name in progress.solved for exercise in course.exercises)
        words = f"{done} of {total} solved"
        if self.is_plain:
            return [(words, "")]
        return [("█" * done, "green"), ("░" * (total - done), "dim"), (f" {words}", "")]

    def _stages(self, verdict: Verdict) -> None:
        """The stages that were passed, and the one that was not, with the name of the mistake if it has one."""
        rows = [("solved", "green", stage, seen) for stage, seen in verdict.done]
        if verdict.stage and verdict.started:
            rows.append(("failed", "red", verdict.stage, verdict.mistake or ""))
        table = Table.grid(padding=(0, 1))
        for mark, style, stage, seen in rows:
            table.add_row(
                Text(f"  {self.marks[mark]}", style), stage, Text(shown(seen), "dim" if mark == "solved" else "")
            )
            if self.is_plain:
                self.say(f"  {self.marks[mark]} {stage:<11} {seen}".rstrip())
        if rows and not self.is_plain:
            self._print(table)

    def _line(self, number: int, source: str, text: str) -> None:
        """Where it is; and what stands there, unless the text has it with a mark below."""
        source = "" if source and source in text else shown(source)
        self.say()
        self._indented(
            Text.assemble((f"line {number}" + (f" {self.marks['bar']} " if source else ""), "dim"), (source, "bold"))
        )

    def _prints(self, verdict: Verdict) -> None:
        if not verdict.prints and not verdict.prints_dropped:
            return
        self._print(Text("\n  your prints", "dim"))
        for line in shown(verdict.prints).rstrip("\n").split("\n"):
            self._indented(Text.assemble((f"{self.marks['bar']} ", "dim"), line))
        if verdict.prints_dropped:
            self._indented(Text(f"{verdict.prints_dropped:,} more bytes were printed, and are not shown.", "dim"))
