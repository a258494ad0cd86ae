"""What a report says in numbers: the key figures at its head, and its tables."""

import dataclasses
import math
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from anybatch import compat
from anybatch.memory import memory_limit, readable
from anybatch.planning.report import Candidate, Plan
from anybatch.reading.report import Reading
from anybatch.report.drawing import scientific, short
from anybatch.report.series import column, number
from anybatch.verify import RouteCheck, Verification
from anybatch.version import __version__

MOST_ROWS = 12

History = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class KeyFigure:
    """One number of the head of the page."""

    label: str
    value: str
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """Cells as text. Numbers stand to the right, what is named in `left` to the left."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    styles: tuple[str, ...]  # of each row: "", "chosen", "muted" or "bad"
    left: frozenset[str] = frozenset()

    def without_empty_columns(self) -> "Table":
        """The same without columns in which there is nothing."""
        kept = [place for place in range(len(self.header)) if any(row[place] for row in self.rows)]
        rows = tuple(tuple(row[place] for place in kept) for row in self.rows)
        return dataclasses.replace(self, header=tuple(self.header[place] for place in kept), rows=rows)


def key_figures(
    history: History, plan: Plan | None, verification: Verification | None, batch: int | None
) -> list[KeyFigure]:
    """The numbers at the head of the page; those that nobody knows are left out."""
    figures = [*_of_history(history)]
    if batch is not None:
        figures.append(KeyFigure("Effective batch", f"{batch:,}", "examples in a step"))
    if plan is not None:
        figures += _of_plan(plan)
    figures += _throughput(history)
    if verification is not None:
        worst = max(verification.routes, key=lambda route: route.gradient, default=None)
        note = "" if worst is None else f"differs by {_difference(worst.gradient)} at most"
        figures.append(KeyFigure("Gradient", "verified" if verification.ok else "different", note))
    return figures


def _of_history(history: History) -> list[KeyFigure]:
    figures = []
    steps = [number(row.get("step")) for row in history]
    if steps:
        last = max((step for step in steps if math.isfinite(step)), default=float(len(steps)))
        skipped = max((count for row in history if math.isfinite(count := number(row.get("skipped")))), default=0.0)
        seconds = column(history, "seconds").known.values
        took = f"in {duration(seconds[-1])}" if len(seconds) else ""
        notes = [took, f"{skipped:,.0f} skipped" if skipped else ""]
        figures.append(KeyFigure("Steps", f"{last:,.0f}", ", ".join(filter(None, notes))))
    loss = column(history, "loss").known
    if len(loss):
        note = f"from {short(loss.values[0])} at step {loss.steps[0]:,.0f}" if len(loss) > 1 else ""
        figures.append(KeyFigure("Loss", short(loss.values[-1]), note))
    for name in ("eval.loss", "eval"):
        found = column(history, name).known
        if len(found):
            figures.append(KeyFigure("Evaluation", short(found.values[-1]), f"{name} at step {found.steps[-1]:,.0f}"))
            break
    return figures


def _of_plan(plan: Plan) -> list[KeyFigure]:
    if plan.chosen is None:
        return [KeyFigure("Microbatch", "none", "nothing fits")]
    figures = [KeyFigure("Microbatch", f"{plan.chosen.microbatch_size:,}", plan.chosen.route)]
    total = plan.chosen.total
    whole = next((each.total for each in plan.candidates if each.route == "all at once" and each.total), None)
    if total is not None:
        note = "" if plan.budget is None else f"of {readable(plan.budget)} allowed"
        if whole is not None and whole != total:
            note = f"{readable(whole)} for the full batch"
        figures.append(KeyFigure("Memory", readable(total), note))
    return figures


def _throughput(history: History) -> list[KeyFigure]:
    """The median, which does not see the steps that compile."""
    rates = {
        unit: np.median(found.values)
        for unit in ("examples", "tokens")
        if len(found := column(history, f"{unit}_per_second").known)
    }
    if not rates:
        return []
    (unit, rate), *others = rates.items()
    note = f"{unit} per second" + "".join(f", {short(float(more))} {name}" for name, more in others)
    return [KeyFigure("Throughput", short(float(rate)), note)]


def history_table(history: History) -> Table | None:
    """Some rows of the history, evenly apart, the first and the last among them."""
    names = [
        name
        for name in ("loss", "gradient_norm", "noise_scale", "examples_per_second", "tokens_per_second")
        if any(name in row for row in history)
    ]
    evaluations = list(dict.fromkeys(name for row in history for name in row if name.split(".")[0] == "eval"))[:3]
    names += evaluations
    if not history or not names:
        return None
    # Those with an evaluation tell more.
    telling = [
        place for place, row in enumerate(history) if any(math.isfinite(number(row.get(e))) for e in evaluations)
    ]
    telling = sorted({0, *telling, len(history) - 1}) if len(telling) > 1 else list(range(len(history)))
    chosen = np.unique(np.linspace(0, len(telling) - 1, min(MOST_ROWS, len(telling))).round().astype(int))
    rows = []
    for place in (telling[int(each)] for each in chosen):
        row, step = history[place], number(history[place].get("step"))
        # A log that was read back has NaN where there was no evaluation.
        missing = {name for name in evaluations if not math.isfinite(number(row.get(name)))}
        cells = [_cell(row[name]) if name in row and name not in missing else "" for name in names]
        rows.append((f"{step:,.0f}" if math.isfinite(step) else str(place + 1), *cells))
    some = f"{len(rows)} of {len(history):,} rows" if len(rows) < len(history) else "All rows"
    header = ("step", *(name.replace("_", " ") for name in names))
    return Table(some, header, tuple(rows), ("",) * len(rows)).without_empty_columns()


def _cell(value: Any) -> str:
    """Four digits always, so that those of a column stand below each other."""
    found = number(value)
    return f"{found:#.4g}" if 1e-3 <= abs(found) < 1000 else "" if value is None else short(found)


def plan_table(plan: Plan) -> Table:
    """All candidates, the chosen one marked."""
    header = (
        *("route", "microbatch", "method", "remat", "reduce", "total", "arguments", "gradients", "results"),
        *("activations", "time", "fits"),
    )
    styles = tuple(
        "chosen" if each == plan.chosen else "muted" if each.fits is False else "" for each in plan.candidates
    )
    rows = tuple(_plan_cells(each) for each in plan.candidates)
    left = frozenset({"route", "method", "remat", "reduce", "fits"})
    return Table("Ways of computing the gradient", header, rows, styles, left).without_empty_columns()


def _plan_cells(each: Candidate) -> tuple[str, ...]:
    found = each.bytes
    total = "" if each.total is None else ("~" if found is None else "") + readable(each.total)
    kinds = (
        ("", "", "", "")
        if found is None
        else tuple(map(readable, (found.arguments, found.gradients, found.results, found.activations)))
    )
    return (
        *(each.route, f"{each.microbatch_size:,}", each.method or "", each.remat or ""),
        *("" if each.reduce == "once" else each.reduce, total, *kinds),
        "" if each.seconds is None else f"{1e3 * each.seconds:.{1 if each.seconds >= 1e-3 else 3}f} ms",
        {True: "yes", False: "no", None: ""}[each.fits],
    )


def reading_table(reading: Reading) -> Table | None:
    """What microbatches add up or gather; None if nothing."""
    if not reading.frontier:
        return None
    rows = tuple(
        (
            "adds up" if item.how == "sum" else "gathers",
            f"{item.dtype}[{','.join(map(str, item.shape))}]",
            readable(item.bytes),
            f"{item.file}:{item.line}" if item.file else "",
        )
        for item in reading.frontier
    )
    header, left = ("does", "what", "size", "where"), frozenset({"does", "what", "where"})
    return Table("What is kept of each microbatch", header, rows, ("",) * len(rows), left).without_empty_columns()


def verification_table(found: Verification) -> Table:
    """Every route with its differences and what rounding explains."""
    given = f"in {found.given_dtype}" if found.given_dtype is not None else ""
    header = ("route", "gradient", "allowed", "worst at", "value", "aux", given, "allowed there", "")

    def cells(route: RouteCheck) -> tuple[str, ...]:
        numbers = [route.gradient, route.tolerance, route.value, route.aux, route.rounding, route.expected_rounding]
        gradient, allowed, value, aux, rounding, allowed_there = map(_difference, numbers)
        verdict = "same" if route.ok else "different"
        return (route.name, gradient, allowed, route.leaf, value, aux, rounding, allowed_there, verdict)

    rows, styles = tuple(map(cells, found.routes)), tuple("" if route.ok else "bad" for route in found.routes)
    caption = f"Relative differences in {found.dtype}"
    return Table(caption, header, rows, styles, frozenset({"route", "worst at", ""})).without_empty_columns()


def _difference(value: float | None) -> str:
    if value is None or value == 0:
        return "" if value is None else "0"
    if not math.isfinite(value) or 0.01 <= value < 1000:
        return short(float(f"{value:.2g}"))
    return scientific(value, 1)


def duration(seconds: float) -> str:
    """A time for people.

    >>> duration(0.0312), duration(75), duration(7322)
    ('0.031 s', '1 min 15 s', '2 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"


def found_environment() -> dict[str, str]:
    """What the page was made on."""
    version, runtime = compat.versions()
    devices = jax.local_devices()
    found = {
        "anybatch": __version__,
        "Python": platform.python_version(),
        "JAX": version,
        "jaxlib": runtime,
        "Devices": f"{jax.device_count()} x {devices[0].device_kind} ({devices[0].platform})",
        "Platform": platform.platform(),
    }
    limit = memory_limit(devices)
    if limit is not None:
        found["Memory"] = readable(limit) + (" each" if len(devices) > 1 and devices[0].platform != "cpu" else "")
    return found
