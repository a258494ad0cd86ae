"""The plot of a plan."""

import io
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from anybatch.errors import InputError
from anybatch.files import check_target, write_whole

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
    write_whole(target, content.getvalue(), must=must, given=f"path={str(path)!r}")


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
    for number, name_of in enumerate(dict.fromkeys(each.style for each in plan.candidates)):
        mine = [each for each in plan.candidates if each.style == name_of and each.total is not None]
        totals = [each.total / unit for each in mine]
        label = f"memory, {name_of}" if name_of else "memory"
        style = ("-", "--", "-.", ":")[number % 4]
        lines += axes.plot([each.microbatch_size for each in mine], totals, style, color=BLUE, label=label, zorder=2)
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
    for number, name_of in enumerate(dict.fromkeys(each.style for each in timed)):
        mine = [each for each in timed if each.style == name_of]
        label = f"time, {name_of}" if name_of else "time"
        style = ("-", "--", "-.", ":")[number % 4]
        sizes, milliseconds = [each.microbatch_size for each in mine], [1e3 * each.seconds for each in mine]
        lines += axes.plot(sizes, milliseconds, style, marker="s", markersize=4, color=ORANGE, label=label)
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
