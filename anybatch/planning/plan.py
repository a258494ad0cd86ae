"""`Plan`: the chosen strategy, the candidates it was chosen from, and the reasons. Prints as a table, and as a plot."""

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
from anybatch.planning.strategy import Route, Strategy

# The columns of the table, and those that are aligned to the left. The last one marks the chosen candidate.
_HEADER = ["route", "microbatch", "blocks", "remat", "reduce", "total"]
_HEADER += ["arguments", "gradients", "results", "activations", "time", "fits", ""]
_LEFT = {"route", "remat", "reduce", ""}

# The colours of the plot.
BLUE, ORANGE, GRAY = "#1f5fa8", "#d9731a", "#8a8a8a"

# A plot is recognised by a mark in its metadata. For each format: the field that holds the mark, and the first bytes of
# such a file.
_MARK = "anybatch plan"
_FIELDS = {"png": ("Software", b"\x89PNG"), "svg": ("Creator", b"<?xml"), "pdf": ("Creator", b"%PDF")}


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices that a gradient is planned for: their kind and their number."""

    kind: str
    count: int = 1

    def __str__(self) -> str:
        return f"{self.count} x {self.kind}" if self.count > 1 else self.kind


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One strategy, with what is known of its memory and time."""

    route: Route  # prints as "full batch", "one pass", "two passes", ...
    microbatch_size: int  # for the full batch, the number of examples
    remat: str | None
    reduce: str  # on a mesh, when gradients are added up over devices: "once" at the end, or after "each" microbatch
    method: str | None  # for per-example gradients: "factored" or "vmap"
    block_size: int | None  # the rows of big values that are computed at a time; None: all
    bytes: Bytes | None  # of the compiled program; None if it was not compiled, or could not be
    predicted: int | None  # the total bytes, as predicted from other sizes
    seconds: float | None
    fits: bool | None  # None if unknown
    is_full_batch: bool = False  # True if all examples (of a device) are in one microbatch

    @property
    def total(self) -> int | None:
        """The total bytes: of the compiled program, or else predicted."""
        return self.predicted if self.bytes is None else self.bytes.total

    @property
    def name(self) -> str:
        """The options that choose it, as code."""
        return str(self.strategy)

    @property
    def strategy(self) -> Strategy:
        return Strategy(self.microbatch_size, self.remat, self.reduce, self.method, self.block_size)

    @property
    def variant(self) -> str:
        """Its choices other than the microbatch size, in words; may be empty."""
        reduce = "" if self.reduce == "once" else f"reduce {self.reduce}"
        blocks = "" if self.block_size is None else f"blocks of {self.block_size}"
        return ", ".join(filter(None, [self.method, blocks, self.remat, reduce]))


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """The strategy that was chosen for a gradient, the candidates and the reasons. Prints as a table.

    Args:
      chosen: the chosen candidate; None if none fits.
      candidates: all candidates, the largest microbatch first.
      num_examples: the size of the batch.
      objective: "speed" or "memory".
      budget: the bytes that the program may take, with its arguments; None if unknown.
      budget_source: where the budget comes from.
      reason: why the candidate was chosen.
      limits: what takes the memory, if the budget limits the microbatch size; may be empty.
      advice: what would help; may be empty.
      devices: the devices that it was planned for.
      compilations: how many programs were compiled to plan; 0 if all was known before.
      planning_seconds: how long that took.
      noun: what is computed: "gradient" or "clipped gradient".
      note: a remark about it; may be empty.
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
        """For `value_and_grad(microbatch_size=...)`; None if no candidate fits."""
        return None if self.chosen is None else self.chosen.microbatch_size

    @property
    def remat(self) -> str | None:
        """For `value_and_grad(remat=...)`."""
        return None if self.chosen is None else self.chosen.remat

    @property
    def block_size(self) -> int | None:
        """For `value_and_grad(block_size=...)`."""
        return None if self.chosen is None else self.chosen.block_size

    @property
    def reduce(self) -> str | None:
        """For `value_and_grad(reduce=...)`, on a mesh."""
        return None if self.chosen is None else self.chosen.reduce

    @property
    def method(self) -> str | None:
        """For `clipped_grad(method=...)` and other per-example functions."""
        return None if self.chosen is None else self.chosen.method

    def __str__(self) -> str:
        rows = self._rows
        columns = [(max(map(len, column)), "<" if column[0] in _LEFT else ">") for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(f"{cell:{side}{width}}" for cell, (width, side) in zip(row, columns, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([self._title, "", *lines, "", *self._remarks])

    __repr__ = __str__

    @property
    def _rows(self) -> list[list[str]]:
        """The table with its header, without empty columns."""
        rows = [_HEADER, *map(self._cells, self.candidates)]
        kept = [column for column in range(len(_HEADER)) if column == 0 or any(row[column] for row in rows[1:])]
        return [[row[column] for column in kept] for row in rows]

    def _repr_html_(self) -> str:
        def row(cells: Sequence[str], tag: str, style: str = "") -> str:
            tagged = [f'<{tag} style="white-space: nowrap">{html.escape(cell)}</{tag}>' for cell in cells]
            return f"<tr{style}>{''.join(tagged)}</tr>"

        def style(candidate: Candidate) -> str:
            if candidate == self.chosen:
                return ' style="font-weight: bold"'
            return ' style="color: #888"' if candidate.fits is False else ""

        header, *rows = self._rows
        body = [row(cells, "td", style(each)) for cells, each in zip(rows, self.candidates, strict=True)]
        remarks = "".join(f"<p>{html.escape(text)}</p>" for text in self._remarks).replace("\n", "<br>")
        table = f"<table>{row(header, 'th')}{''.join(body)}</table>"
        return f"<p>{html.escape(self._title)}</p>{table}{self._svg()}{remarks}"

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

    def _cells(self, candidate: Candidate) -> list[str]:
        found, mark = candidate.bytes, "" if candidate.bytes is not None else "~"
        kinds = [] if found is None else [found.arguments, found.gradients, found.results, found.activations]
        milliseconds = 1e3 * (candidate.seconds or 0)
        shows_reduce = any(each.reduce != "once" for each in self.candidates)
        return [
            candidate.route,
            str(candidate.microbatch_size),
            "" if candidate.block_size is None else str(candidate.block_size),
            candidate.remat or "",
            candidate.reduce if shows_reduce else "",
            "" if candidate.total is None else mark + readable(candidate.total),
            *(map(readable, kinds) if kinds else [""] * 4),
            "" if candidate.seconds is None else f"{milliseconds:.{1 if milliseconds >= 1 else 3}f} ms",
            {True: "yes", False: "no", None: ""}[candidate.fits],
            "<- chosen" if candidate == self.chosen else "",
        ]

    def plot(self, path: str | None = None) -> Any:
        """Returns a matplotlib figure of memory and time against the microbatch size.

        Args:
          path: where to save it; by default it is not saved. The name must end in .png, .svg or .pdf. A file of that
            name is replaced only if it is an earlier plot of a plan.

        Raises:
          InputError: if matplotlib is missing, if the name does not end in a format, or if the file is something else.
        """
        figure = draw(self)
        if path is not None:
            save_plot(figure, path)
        return figure

    def _svg(self) -> str:
        """The plot as SVG; empty without matplotlib, or with fewer than two points."""
        if sum(candidate.total is not None for candidate in self.candidates) < 2:
            return ""
        try:
            figure = draw(self)
        except InputError:
            return ""
        text = io.StringIO()
        figure.savefig(text, format="svg", bbox_inches="tight")
        _, tag, rest = text.getvalue().partition("<svg")  # without the XML header, which HTML must not have
        return tag + rest


def draw(plan: Plan) -> Any:
    """A matplotlib figure: memory and time of the candidates against the microbatch size."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(
            "A plot needs matplotlib",
            given="an environment without it",
            remedy='pip install "anybatch[cli]". Or print(plan), which needs nothing.',
        ) from None
    # Without pyplot, which would keep the figure, and might show it.
    figure = Figure(figsize=(7.5, 4), layout="constrained")
    axes = figure.add_subplot()
    lines = _draw_memory(axes, plan)
    if any(each.seconds is not None for each in plan.candidates):
        lines += _draw_time(axes.twinx(), plan)
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


def _draw_memory(axes: Any, plan: Plan) -> list[Any]:
    highest = max(each.total or 0 for each in plan.candidates)
    units = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
    name = next((name for name, unit in units.items() if highest >= unit), "KiB")
    unit = units[name]
    known = [(each, each.total / unit) for each in plan.candidates if each.total is not None]
    lines = _draw_lines(axes, "memory", known, color=BLUE, zorder=2)
    for each, total in known:
        face = "white" if each.bytes is None else BLUE  # predicted totals are hollow circles
        axes.plot(each.microbatch_size, total, "o", color=BLUE, markerfacecolor=face, markersize=5, zorder=3)
    if plan.budget is not None and plan.budget <= 4 * highest:  # a far larger budget would squeeze the curves
        lines.append(axes.axhline(plan.budget / unit, color=GRAY, linestyle=":", label="budget", zorder=1))
    axes.set_ylabel(f"memory, {name}", color=BLUE)
    axes.set_ylim(bottom=0)
    return lines


def _draw_lines(axes: Any, name: str, points: Sequence[tuple[Candidate, float]], **style: Any) -> list[Any]:
    lines = []
    for number, variant in enumerate(dict.fromkeys(each.variant for each, _ in points)):
        mine = [(each.microbatch_size, value) for each, value in points if each.variant == variant]
        label = f"{name}, {variant}" if variant else name
        lines += axes.plot(*zip(*mine, strict=True), ("-", "--", "-.", ":")[number % 4], label=label, **style)
    return lines


def _draw_time(axes: Any, plan: Plan) -> list[Any]:
    timed = [(each, 1e3 * each.seconds) for each in plan.candidates if each.seconds is not None]
    lines = _draw_lines(axes, "time", timed, color=ORANGE, marker="s", markersize=4)
    axes.set_ylabel("time, ms", color=ORANGE)
    axes.set_ylim(bottom=0, top=1.15 * max(milliseconds for _, milliseconds in timed))
    return lines


def _ticks(sizes: Sequence[int], chosen: int | None) -> list[int]:
    """The sizes to label on the axis: the chosen one, and others that are not too close to it or to each other."""
    ticks = [] if chosen is None else [chosen]
    ends = {min(sizes), max(sizes)}
    for size in sorted(set(sizes), key=lambda size: (size not in ends, size & (size - 1) != 0)):
        if all(max(size / tick, tick / size) > 1.6 for tick in ticks):
            ticks.append(size)
    return sorted(ticks)


def check_plot_path(path: str | os.PathLike[str], given: str | None = None) -> pathlib.Path:
    """The file that a plot is written to, links followed: none, an empty one or an earlier plot.

    Otherwise the error shows the path as it was `given`.
    """

    def is_ours(content: bytes) -> bool:
        return _MARK.encode() in content and any(content.startswith(begin) for _, begin in _FIELDS.values())

    must = "A plot replaces no file but one of a plan of anybatch"
    return check_target(path, must=must, given=given or f"path={str(path)!r}", is_ours=is_ours)


def save_plot(figure: Any, path: str | os.PathLike[str]) -> None:
    """Writes a figure to a file, completely or not at all. The name ends in the format."""
    target, content = check_plot_path(path), io.BytesIO()
    kind = target.suffix.removeprefix(".").lower()
    try:
        if not kind:
            raise ValueError("It has no ending.")
        metadata = {_FIELDS[kind][0]: _MARK} if kind in _FIELDS else None
        figure.savefig(content, format=kind, dpi=144, bbox_inches="tight", metadata=metadata)
    except ValueError as error:
        raise InputError(
            "The file name of a plot must end in its format",
            given=f"path={str(path)!r}",
            remedy=f"For example plan.plot('plan.png') or 'plan.svg'. ({error})",
        ) from None
    must = "A plot needs a file that can be written"
    write_atomically(target, content.getvalue(), must=must, given=f"path={str(path)!r}")
