"""`Plan`: the chosen strategy, the candidates it was chosen from, and the reasons. As a table, and as plots."""

import dataclasses
import io
import itertools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from anybatch.call import plots
from anybatch.call.display import html_figure, html_table, in_notebook, paragraph
from anybatch.call.files import check_target, write_atomically
from anybatch.call.memory import readable
from anybatch.call.plots import Figure, Plot, Series
from anybatch.call.tables import WIDTH, Column, text_table, wrapped
from anybatch.errors import InputError, install
from anybatch.planning.measure import Bytes
from anybatch.planning.strategy import Route, Strategy

RESULT = "result"  # the noun of a plan for a function that is no gradient

# The columns for the kinds of memory. If the text of a plan is too wide, they are left out, the highest number first.
_KINDS = {"arguments": 3, "gradients": 2, "results": 4, "activations": 1}
_PREDICTIONS = 5  # what was predicted, beside what was measured, is left out before all of them

_REMAT_CHARACTERS = 16  # characters of a policy that are shown at least, to tell policies apart

SIZE = (400, 240)  # of a plot, in pixels
FAR = 16.0  # a budget this many times above or below all candidates is not drawn: it would flatten the curve
_DASHES = ("", "dashed", "dotted", "mixed")
_READ = 54  # characters of what is told of a point; more do not fit below a plot

# The colours of the plot that matplotlib draws.
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
    remat: str | float | None
    reduce: str  # on a mesh, when gradients are added up over devices: "once" at the end, or after "each" microbatch
    method: str | None  # for per-example gradients: "factored" or "vmap"
    block_size: int | None  # the rows of big values that are computed at a time; None: all
    bytes: Bytes | None  # of the compiled program; None if it was not compiled, or could not be
    predicted: int | None  # the total bytes, as predicted before it was compiled
    seconds: float | None
    fits: bool | None  # None if unknown
    predicted_seconds: float | None = None  # as predicted from the times of others
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
        remat = f"remat {self.remat:g}" if isinstance(self.remat, float) else self.remat
        return ", ".join(filter(None, [self.method, blocks, remat, reduce]))


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
      tuning_bytes: the most bytes that XLA took on a device while it compiled, beside the arrays there, to try out
        kernels; None if nothing was compiled, the device does not report it, or the process had taken more before.
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
    tuning_bytes: int | None = None

    @property
    def device(self) -> str:
        """The devices in words, such as "8 x NVIDIA H100"."""
        return str(self.devices)

    @property
    def microbatch_size(self) -> int | None:
        """For `value_and_grad(microbatch_size=...)`; None if no candidate fits."""
        return None if self.chosen is None else self.chosen.microbatch_size

    @property
    def remat(self) -> str | float | None:
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

    @property
    def memory_saved(self) -> tuple[int, int] | None:
        """The bytes of the full batch and of the chosen candidate. None if one is unknown, or if they are the same."""
        full = [each.total for each in self.candidates if each.is_full_batch and not each.variant and each.total]
        chosen = None if self.chosen is None else self.chosen.total
        return (full[0], chosen) if full and chosen is not None and chosen < full[0] else None

    def text(self, width: int | None = WIDTH) -> str:
        """The plan as plain text: the table, the reason for the choice, and advice.

        Args:
          width: the most characters of a line. Columns of the table are left out to fit it, and a line says which.
            None: all columns, and no line breaks in sentences.
        """
        lines, left_out = text_table(self.columns, width)
        remarks = self._remarks
        if left_out:
            remarks.append(f"Columns left out: {', '.join(left_out)}. plan.text(width=None) shows all.")
        title, *remarks = [wrapped(text, width) for text in (self._title, *remarks)]
        return "\n".join([title, "", *lines, "", *remarks])

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    @property
    def columns(self) -> list[Column]:
        """The columns of the table."""
        candidates = self.candidates
        found = [each.bytes for each in candidates]
        kinds = [
            Column(name, tuple("" if one is None else readable(getattr(one, name)) for one in found), drop=order)
            for name, order in _KINDS.items()
            if name != "gradients" or self.noun != RESULT
        ]
        shows_reduce = any(each.reduce != "once" for each in candidates)
        remats = tuple(str(each.remat or "") for each in candidates)
        predicted = tuple(
            "" if each.bytes is None or each.predicted is None else readable(each.predicted) for each in candidates
        )
        times = tuple(
            "" if each.predicted_seconds is None else _milliseconds(each.predicted_seconds) for each in candidates
        )
        marks = tuple("<- chosen" if each == self.chosen else "" for each in candidates)
        return [
            Column("route", tuple(str(each.route) for each in candidates), is_left=True),
            Column("microbatch", tuple(str(each.microbatch_size) for each in candidates), short={"microbatch": "size"}),
            Column("blocks", tuple(str(each.block_size or "") for each in candidates)),
            Column("remat", remats, is_left=True, least=_REMAT_CHARACTERS),
            Column("reduce", tuple(each.reduce if shows_reduce else "" for each in candidates), is_left=True),
            Column("total", tuple(_total(each) for each in candidates)),
            Column("predicted", predicted, drop=_PREDICTIONS),
            *kinds,
            Column("predicted time", times, drop=_PREDICTIONS + 1),
            Column("time", tuple("" if each.seconds is None else _milliseconds(each.seconds) for each in candidates)),
            Column("fits", tuple({True: "yes", False: "no", None: ""}[each.fits] for each in candidates)),
            Column("", marks, is_left=True, short={"<- chosen": "<-"}),
        ]

    def html_table(self, caption: str = "") -> str:
        """The table in HTML, with the chosen candidate marked."""
        styles = [
            "chosen" if each == self.chosen else "muted" if each.fits is False else "" for each in self.candidates
        ]
        return html_table(self.columns[:-1], styles, caption)  # without the mark, which is for text

    def figures(self) -> list[Figure]:
        """Plots of memory and time against the microbatch size: those that have two points at least."""
        return [figure for figure in (_memory_figure(self), _time_figure(self)) if figure is not None]

    def _repr_html_(self) -> str:
        lead = "Nothing fits" if self.chosen is None else self.chosen.name
        if self.memory_saved is not None:
            lead += f": {in_words(self.memory_saved)}"
        plots = "".join(map(html_figure, self.figures()))
        return in_notebook(
            paragraph(lead, "lead"),
            paragraph(self._title, "about"),
            f'<div class="pair">{plots}</div>\n' if plots else "",
            self.html_table(),
            *map(paragraph, self._remarks),
        )

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


def in_words(saved: tuple[int, int]) -> str:
    """The bytes of the full batch and of the chosen candidate, compared.

    >>> in_words((183 * 2**20, 12 * 2**20))
    '12.0 MiB instead of 183.0 MiB, 15 times less'
    """
    full, chosen = saved
    return f"{readable(chosen)} instead of {readable(full)}, {times(full / chosen)} less"


def times(factor: float) -> str:
    """A factor in words, rounded down: "15 times", "2.4 times"."""
    return f"{int(factor):,} times" if factor >= 10 else f"{int(10 * factor) / 10:g} times"


def _total(each: Candidate) -> str:
    return "" if each.total is None else ("~" if each.bytes is None else "") + readable(each.total)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.{1 if seconds >= 1e-3 else 3}f} ms"


# Plots.


def _memory_figure(plan: Plan) -> Figure | None:
    totals = {each: each.total for each in plan.candidates if each.total is not None}
    if len(totals) < 2:
        return None
    level, caption = plan.budget, ""
    if level is not None and not min(totals.values()) / FAR <= level <= FAR * max(totals.values()):
        caption, level = f"The budget is {readable(level)}, far outside the plot.", None
    y = plots.memory_axis([*totals.values(), *([] if level is None else [level])], "logarithmic")
    return _candidates_figure(plan, "Memory", "blue", y, totals, level, caption)


def _time_figure(plan: Plan) -> Figure | None:
    milliseconds = {each: 1e3 * each.seconds for each in plan.candidates if each.seconds is not None}
    if len(milliseconds) < 2:
        return None
    y = plots.axis_of(np.array([*milliseconds.values(), 0.0]), "ms", from_zero=True, padding=0.1)
    return _candidates_figure(plan, "Time", "orange", y, milliseconds)


def _candidates_figure(
    plan: Plan,
    title: str,
    color: str,
    y: plots.Axis,
    heights: Mapping[Candidate, float],
    level: int | None = None,
    caption: str = "",
) -> Figure:
    sizes = [each.microbatch_size for each in plan.candidates]  # of all, so that both plots have the same axis
    x = plots.size_axis(sizes, plan.microbatch_size, "microbatch size")
    words = {each: _total(each) if title == "Memory" else _milliseconds(each.seconds or 0) for each in heights}
    spoken = "; ".join(f"{each.microbatch_size}: {text}" for each, text in words.items())
    plot = Plot(x, y, SIZE, f"{title} against microbatch size: {spoken}")
    styles: dict[str, str] = {}
    for variant, dash in zip(dict.fromkeys(each.variant for each in heights), itertools.cycle(_DASHES), strict=False):
        styles[variant] = f"{color} {dash}".strip()
        same = sorted((each.microbatch_size, height) for each, height in heights.items() if each.variant == variant)
        plot.curve(Series(*np.array(same, float).T), styles[variant])
    if level is not None:
        everything = np.array([(each.microbatch_size, height) for each, height in heights.items()], float)
        plot.level(level, f"budget {readable(level)}", Series(*everything.T))
    predicted = [each for each in heights if title == "Memory" and each.bytes is None]
    for each, height in sorted(heights.items(), key=lambda pair: pair[0] == plan.chosen):  # the chosen one on top
        is_chosen = each == plan.chosen
        look = f"{color} {'hollow' if each in predicted else ''} {'chosen' if is_chosen else ''}".strip()
        plot.point(each.microbatch_size, height, look, _read(each), radius=6 if is_chosen else 4)
        if is_chosen:
            plot.band(each.microbatch_size, "chosen")
    legend = [(style, variant or "plain") for variant, style in styles.items()] if len(styles) > 1 else []
    if predicted:
        legend += [(f"{color} disc", "compiled"), (f"{color} disc hollow", "predicted")]
    return Figure(title.lower(), title, (plot,), tuple(legend), caption)


def _read(each: Candidate) -> str:
    """What is told of a candidate when the pointer is on it."""
    time = "" if each.seconds is None else _milliseconds(each.seconds)
    fits = "does not fit" if each.fits is False else ""
    text = plots.joined(f"{each.microbatch_size:,}", _total(each), time, fits, each.variant)
    return text if len(text) <= _READ else f"{text[: _READ - 1]}\N{HORIZONTAL ELLIPSIS}"


def draw(plan: Plan) -> Any:
    """A matplotlib figure: memory and time of the candidates against the microbatch size."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(
            "A plot needs matplotlib",
            given="an environment without it",
            remedy=f"{install('cli')}\nOr print(plan), which needs nothing.",
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
    sizes = [each.microbatch_size for each in plan.candidates]
    x = plots.size_axis(sizes, plan.microbatch_size, "microbatch size")
    axes.set_xscale("log", base=2)
    axes.set_xticks(*zip(*x.ticks, strict=True))
    axes.set_xticks([], minor=True)
    axes.set_xlabel(x.label)
    axes.set_title(f"The {plan.noun} of {plan.num_examples} examples on {plan.device}", fontsize=10, loc="left")
    figure.legend(handles=lines, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def _draw_memory(axes: Any, plan: Plan) -> list[Any]:
    known = [(each, each.total) for each in plan.candidates if each.total is not None]
    totals = [total for _, total in known]
    lines = _draw_lines(axes, "memory", known, color=BLUE, zorder=2)
    for each, total in known:
        face = "white" if each.bytes is None else BLUE  # predicted totals are hollow circles
        axes.plot(each.microbatch_size, total, "o", color=BLUE, markerfacecolor=face, markersize=5, zorder=3)
    if totals and plan.budget is not None and min(totals) / FAR <= plan.budget <= FAR * max(totals):
        lines.append(axes.axhline(plan.budget, color=GRAY, linestyle=":", label="budget", zorder=1))
        totals.append(plan.budget)
    axes.set_ylabel("memory, logarithmic", color=BLUE)
    if totals:
        y = plots.memory_axis(totals, "")
        axes.set_yscale("log")
        axes.set_ylim(y.low, y.high)
        axes.set_yticks(*zip(*y.ticks, strict=True))
        axes.set_yticks([], minor=True)
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
