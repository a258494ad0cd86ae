"""The plot of a plan.

A plan as a plain record: for people to look at, and for programs to follow.
"""

import dataclasses
import html
import io
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from anybatch.call.files import check_target, write_atomically
from anybatch.call.memory import readable
from anybatch.errors import InputError
from anybatch.planning.measure import Bytes

BLUE, ORANGE, GRAY = "#1f5fa8", "#d9731a", "#8a8a8a"


# How a picture of a plan is known again: kind -> the field that has the mark, and how such a file begins.
_MARK = "anybatch plan"
_FIELDS = {"png": ("Software", b"\x89PNG"), "svg": ("Creator", b"<?xml"), "pdf": ("Creator", b"%PDF")}


def check_path(path: str | os.PathLike[str], given: str | None = None) -> pathlib.Path:
    """The file that a picture is written to, links followed.

    Raises:
      InputError: if there is a file that is neither empty nor a picture of a plan.
    """

    def is_ours(content: bytes) -> bool:
        return _MARK.encode() in content and any(content.startswith(begin) for _, begin in _FIELDS.values())

    must = "A plot replaces no file but one of a plan of anybatch"
    return check_target(path, must=must, given=given or f"path={str(path)!r}", is_ours=is_ours)


def save(figure: Any, path: str | os.PathLike[str]) -> None:
    """Writes a figure to a file, all of it or nothing.

    Raises:
      InputError: for a name that does not say which kind of picture, or a file that is not to be replaced.
    """
    target, content = check_path(path), io.BytesIO()
    kind = target.suffix.removeprefix(".").lower()
    try:
        if not kind:
            raise ValueError("It has no ending.")
        metadata = {_FIELDS[kind][0]: _MARK} if kind in _FIELDS else None
        figure.savefig(content, format=kind, dpi=144, bbox_inches="tight", metadata=metadata)
    except ValueError as error:
        raise InputError(
            "The name of a picture must end in what kind it is",
            given=f"path={str(path)!r}",
            remedy=f"For example plan.plot('plan.png') or 'plan.svg'. ({error})",
        ) from None
    must = "A plot needs a file that can be written"
    write_atomically(target, content.getvalue(), must=must, given=f"path={str(path)!r}")


def draw(plan: Any) -> Any:
    """A figure of matplotlib: memory and time of the candidates of a `Plan`, against the microbatch size.

    Raises:
      InputError: without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(
            "A plot needs matplotlib",
            given="a Python without it",
            remedy='pip install "anybatch[cli]"; print(plan) needs nothing.',
        ) from None
    # A figure by itself, without pyplot: nothing is shown or kept unless the caller does it.
    figure = Figure(figsize=(7.5, 4), layout="constrained")
    axes = figure.add_subplot()
    lines = _draw_memory(axes, plan)
    timed = [each for each in plan.candidates if each.seconds is not None]
    if timed:
        lines += _draw_time(axes.twinx(), timed)
    if plan.chosen is not None:
        chosen = plan.chosen.microbatch_size
        lines.append(axes.axvline(chosen, color=GRAY, linewidth=7, alpha=0.25, label="chosen", zorder=0))
    axes.set_xscale("log", base=2)
    ticks = _ticks([each.microbatch_size for each in plan.candidates], plan.microbatch_size)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("microbatch size")
    axes.set_title(f"The gradient of {plan.num_examples} examples on {plan.device}", fontsize=10, loc="left")
    figure.legend(handles=lines, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def _draw_memory(axes: Any, plan: Any) -> list[Any]:
    highest = max(each.total or 0 for each in plan.candidates)
    unit, name = next(
        ((2**power, name) for power, name in ((30, "GiB"), (20, "MiB")) if highest >= 2**power), (1024, "KiB")
    )
    lines = []
    for number, name_of in enumerate(dict.fromkeys(each.variant for each in plan.candidates)):
        mine = [each for each in plan.candidates if each.variant == name_of and each.total is not None]
        totals = [each.total / unit for each in mine]
        label = f"memory, {name_of}" if name_of else "memory"
        variant = ("-", "--", "-.", ":")[number % 4]
        lines += axes.plot([each.microbatch_size for each in mine], totals, variant, color=BLUE, label=label, zorder=2)
        for each, total in zip(mine, totals, strict=True):
            face = "white" if each.bytes is None else BLUE  # predicted ones are hollow
            axes.plot(each.microbatch_size, total, "o", color=BLUE, markerfacecolor=face, markersize=5, zorder=3)
    if plan.budget is not None and plan.budget <= 4 * highest:  # else everything would be pressed to the floor
        lines.append(axes.axhline(plan.budget / unit, color=GRAY, linestyle=":", label="budget", zorder=1))
    axes.set_ylabel(f"memory, {name}", color=BLUE)
    axes.set_ylim(bottom=0)
    return lines


def _draw_time(axes: Any, timed: Sequence[Any]) -> list[Any]:
    lines = []
    for number, name_of in enumerate(dict.fromkeys(each.variant for each in timed)):
        mine = [each for each in timed if each.variant == name_of]
        label = f"time, {name_of}" if name_of else "time"
        variant = ("-", "--", "-.", ":")[number % 4]
        sizes, milliseconds = [each.microbatch_size for each in mine], [1e3 * each.seconds for each in mine]
        lines += axes.plot(sizes, milliseconds, variant, marker="s", markersize=4, color=ORANGE, label=label)
    axes.set_ylabel("time, ms", color=ORANGE)
    axes.set_ylim(bottom=0, top=1.15e3 * max(each.seconds for each in timed))
    return lines


def _ticks(sizes: Sequence[int], chosen: int | None) -> list[int]:
    """Sizes to be named on the axis: the chosen one, and others that are not too near to write."""
    ticks = [] if chosen is None else [chosen]
    ends = {min(sizes), max(sizes)}
    for size in sorted(set(sizes), key=lambda size: (size not in ends, size & (size - 1) != 0)):
        if all(max(size / tick, tick / size) > 1.6 for tick in ticks):
            ticks.append(size)
    return sorted(ticks)


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices that a gradient is planned for: what they are, and how many."""

    kind: str
    count: int = 1

    def __str__(self) -> str:
        return f"{self.count} x {self.kind}" if self.count > 1 else self.kind


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way of computing the gradient, as far as it is known."""

    route: str  # "all at once", "one pass", "two passes"
    microbatch_size: int  # the number of examples, for all at once
    remat: str | None
    reduce: str  # on a mesh, when gradients are added up: "once", or in "each" microbatch
    method: str | None  # of per-example gradients: "factored" or "vmap"
    bytes: Bytes | None  # of the compiled program; None if it was not compiled
    predicted: int | None  # the total, before it was compiled or instead
    seconds: float | None
    fits: bool | None  # None if nobody knows
    is_full_batch: bool = False  # whether it has one microbatch, the full batch

    @property
    def total(self) -> int | None:
        """Its bytes in all: compiled, or else predicted."""
        return self.predicted if self.bytes is None else self.bytes.total

    @property
    def name(self) -> str:
        """As code: what to pass to `value_and_grad`."""
        remat = "" if self.remat is None else f', remat="{self.remat}"'
        reduce = "" if self.reduce == "once" else f', reduce="{self.reduce}"'
        method = "" if self.method is None else f', method="{self.method}"'
        return f"microbatch_size={self.microbatch_size}{remat}{reduce}{method}"

    @property
    def variant(self) -> str:
        """What it is beside the size of its microbatches; nothing, if that is all."""
        reduce = "" if self.reduce == "once" else f"reduce {self.reduce}"
        return ", ".join(filter(None, [self.method, self.remat, reduce]))


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """Which way of computing a gradient was chosen, among which, and why. Printed, it is a table.

    Args:
      chosen: the way to go; None if none fits.
      candidates: all that were looked at, the largest microbatch first.
      num_examples: the size of the batch.
      objective: "speed" or "memory".
      budget: the bytes that the program may take, with its arguments; None if nobody knows.
      budget_source: where that figure comes from.
      reason: why it was chosen.
      limits: what takes the memory, where that leaves something to be said.
      advice: what would help.
      devices: what it was planned for.
      compilations: how many programs were compiled to plan; 0 if all was known.
      planning_seconds: how long that took.
      noun: what is computed, in words.
      note: what there is to say about that.
    """

    chosen: Candidate | None
    candidates: tuple[Candidate, ...]
    num_examples: int
    objective: str
    budget: int | None
    budget_source: str
    reason: str
    limits: str
    advice: str
    devices: Devices
    compilations: int
    planning_seconds: float
    noun: str = "gradient"
    note: str = ""

    @property
    def device(self) -> str:
        """The devices in words, such as "8 x NVIDIA H100"."""
        return str(self.devices)

    @property
    def microbatch_size(self) -> int | None:
        """For `value_and_grad(microbatch_size=...)`; None if no way fits."""
        return None if self.chosen is None else self.chosen.microbatch_size

    @property
    def remat(self) -> str | None:
        """For `value_and_grad(remat=...)`."""
        return None if self.chosen is None else self.chosen.remat

    @property
    def reduce(self) -> str | None:
        """For `value_and_grad(reduce=...)`, on a mesh."""
        return None if self.chosen is None else self.chosen.reduce

    @property
    def method(self) -> str | None:
        """For `clipped_grad(method=...)` and its like."""
        return None if self.chosen is None else self.chosen.method

    def __str__(self) -> str:
        columns = list(zip(*self._rows, strict=True))
        widths = [max(map(len, column)) for column in columns]
        lines = []
        for row in self._rows:
            cells = [
                cell.ljust(width) if name in _LEFT else cell.rjust(width)
                for cell, width, name in zip(row, widths, self._rows[0], strict=True)
            ]
            lines.append("  ".join(cells).rstrip())
        return "\n".join([self._title, "", *lines, "", *self._remarks])

    __repr__ = __str__

    @property
    def _rows(self) -> list[list[str]]:
        """The table with its header, without columns in which there is nothing."""
        rows = [_HEADER, *map(self._cells, self.candidates)]
        kept = [column for column in range(len(_HEADER)) if column == 0 or any(row[column] for row in rows[1:])]
        return [[row[column] for column in kept] for row in rows]

    def _repr_html_(self) -> str:
        def row(cells: Sequence[str], tag: str, variant: str = "") -> str:
            tagged = [f'<{tag} style="white-space: nowrap">{html.escape(cell)}</{tag}>' for cell in cells]
            return f"<tr{variant}>{''.join(tagged)}</tr>"

        def variant(candidate: Candidate) -> str:
            if candidate == self.chosen:
                return ' style="font-weight: bold"'
            return ' style="color: #888"' if candidate.fits is False else ""

        header, *rows = self._rows
        body = [row(cells, "td", variant(each)) for cells, each in zip(rows, self.candidates, strict=True)]
        remarks = "".join(f"<p>{html.escape(text)}</p>" for text in self._remarks).replace("\n", "<br>")
        table = f"<table>{row(header, 'th')}{''.join(body)}</table>"
        return f"<p>{html.escape(self._title)}</p>{table}{self._picture()}{remarks}"

    @property
    def _title(self) -> str:
        budget = "unknown memory" if self.budget is None else f"{readable(self.budget)} ({self.budget_source})"
        each = " each" if self.devices.count > 1 else ""
        return f"The {self.noun} of {self.num_examples} examples on {self.device}, within {budget}{each}"

    @property
    def _remarks(self) -> list[str]:
        lines = [self.reason, self.note, self.limits, self.advice]
        if any(candidate.bytes is None and candidate.predicted is not None for candidate in self.candidates):
            lines.append("~ predicted from the sizes that were compiled.")
        return [line for line in lines if line]

    @property
    def _shows_reduce(self) -> bool:
        return any(candidate.reduce != "once" for candidate in self.candidates)

    def _cells(self, candidate: Candidate) -> list[str]:
        found, mark = candidate.bytes, "" if candidate.bytes is not None else "~"
        total = "" if candidate.total is None else mark + readable(candidate.total)
        kinds = ["", "", "", ""]
        if found is not None:
            numbers = (found.arguments, found.gradients, found.results, found.activations)
            kinds = [readable(number) for number in numbers]
        seconds = "" if candidate.seconds is None else _milliseconds(candidate.seconds)
        fits = {True: "yes", False: "no", None: ""}[candidate.fits]
        chosen = "<- chosen" if candidate == self.chosen else ""
        return [
            candidate.route,
            str(candidate.microbatch_size),
            candidate.remat or "",
            candidate.reduce if self._shows_reduce else "",
            total,
            *kinds,
            seconds,
            fits,
            chosen,
        ]

    def plot(self, path: str | None = None) -> Any:
        """Memory and time against the microbatch size, as a figure of matplotlib.

        Args:
          path: where to save it, if anywhere: a name that ends in .png, .svg or .pdf. An earlier plot of a plan is
            replaced, and no other file.

        Raises:
          InputError: without matplotlib, for a name that does not say which kind of picture, or for a file of that name
            which is something else.
        """
        figure = draw(self)
        if path is not None:
            save(figure, path)
        return figure

    def _picture(self) -> str:
        """The plot as SVG, if matplotlib is there and there is something to see."""
        if sum(candidate.total is not None for candidate in self.candidates) < 2:
            return ""
        try:
            figure = draw(self)
        except InputError:
            return ""
        text = io.StringIO()
        figure.savefig(text, format="svg", bbox_inches="tight")
        _, tag, rest = text.getvalue().partition("<svg")  # after what only a file needs
        return tag + rest


_HEADER = [
    *(
        "route",
        "microbatch",
        "remat",
        "reduce",
        "total",
        "arguments",
        "gradients",
        "results",
        "activations",
        "time",
        "fits",
    ),
    "",
]
_LEFT = {"route", "remat", "reduce", ""}


def _milliseconds(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.1f} ms" if milliseconds >= 1 else f"{milliseconds:.3f} ms"
