"""The numbers of a report: the key figures at its head, and its tables."""

import dataclasses
import math
import platform
from typing import Any

import jax
import numpy as np

from anybatch import __version__
from anybatch.call.memory import memory_limit, readable
from anybatch.jaxprs import versions
from anybatch.planning.plan import Candidate, Plan
from anybatch.reading.report import Reading
from anybatch.report.figures import History, column, is_rate, number
from anybatch.report.svg import Series, drawable, scientific, short
from anybatch.verification.verify import RouteCheck, Verification

MOST_ROWS = 12  # of the table of the history
MOST_EVALUATIONS = 3  # columns of that table


@dataclasses.dataclass(frozen=True)
class KeyFigure:
    """One of the numbers at the head of the page."""

    label: str
    value: str
    note: str = ""
    style: str = ""  # "wrong" for a failure


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of texts. Columns named in `left` are aligned to the left, all others to the right."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    styles: tuple[str, ...]  # of each row: "", "chosen", "muted" or "bad"
    left: frozenset[str] = frozenset()

    def without_empty_columns(self) -> "Table":
        """The table without columns that are empty in every row."""
        kept = [place for place in range(len(self.header)) if any(row[place] for row in self.rows)]
        rows = tuple(tuple(row[place] for place in kept) for row in self.rows)
        return dataclasses.replace(self, header=tuple(self.header[place] for place in kept), rows=rows)


def key_figures(
    history: History, plan: Plan | None, verification: Verification | None, batch: int | None
) -> list[KeyFigure]:
    """The key figures at the head of the page. Unknown ones are left out."""
    figures = [*_of_history(history)]
    if batch is not None:
        figures.append(KeyFigure("Effective batch", f"{batch:,}", "examples in a step"))
    if plan is not None:
        figures += _of_plan(plan)
    figures += _throughput(history)
    if verification is not None:
        figures.append(_of_verification(verification))
    return figures


def alarm(found: Verification) -> str:
    """A warning for the head of the page if gradients differ, else an empty string."""
    if found.ok:
        return ""
    count, many = sum(not route.ok for route in found.routes), len(found.routes)
    text = f"Routes differ: {count:,} of {many:,} do not give the gradient of the full batch."
    worst = _worst(found)
    if worst is None:
        return text
    name, place, difference = worst
    return f"{text} The worst, {name}, {_differs(difference)} {place}."


def _of_verification(found: Verification) -> KeyFigure:
    worst = _worst(found)
    if not found.ok:
        return KeyFigure("Gradient", "different", "" if worst is None else _differs(worst[2]), "wrong")
    return KeyFigure("Gradient", "verified", "" if worst is None else f"{_differs(worst[2])} at most")


def _worst(found: Verification) -> tuple[str, str, float] | None:
    """The largest difference, as (name of the route, place, difference). NaN counts as larger than any number.

    If routes fail, only those are compared.
    """
    routes = [route for route in found.routes if not route.ok] or found.routes
    places = [(route.name, f"at {route.leaf}", route.gradient) for route in routes]
    # A route with the right gradient may still fail in its value, in aux or by its rounding.
    for route in routes:
        places += [(route.name, f"at {leaf.name}", leaf.difference) for leaf in route.leaves if not leaf.ok]
        if route.rounding is not None and not route.rounding <= (route.expected_rounding or 0.0):
            places.append((route.name, f"in {found.given_dtype}", route.rounding))
    return max(places, key=lambda place: (math.isnan(place[2]), place[2]), default=None)


def _differs(difference: float) -> str:
    return f"differs by {_difference(difference)}" if math.isfinite(difference) else "is not finite"


def _of_history(history: History) -> list[KeyFigure]:
    figures = []
    steps = [number(row.get("step")) for row in history]
    if steps:
        last = max((step for step in steps if math.isfinite(step)), default=float(len(steps)))
        skipped = max((count for row in history if math.isfinite(count := number(row.get("skipped")))), default=0.0)
        seconds = drawable(column(history, "seconds").known.values)
        took = f"in {duration(seconds[-1])}" if len(seconds) else ""
        notes = [took, f"{skipped:,.0f} skipped" if skipped else ""]
        figures.append(KeyFigure("Steps", f"{last:,.0f}", ", ".join(filter(None, notes))))
    figures += _of_loss(column(history, "loss"))
    for name in ("eval.loss", "eval"):
        found = column(history, name).known
        if len(found):
            figures.append(KeyFigure("Evaluation", short(found.values[-1]), f"{name} at step {found.steps[-1]:,.0f}"))
            break
    return figures


def _of_loss(series: Series) -> list[KeyFigure]:
    """The last loss. If it is not finite, the figure is marked as wrong."""
    if not len(series):
        return []
    known = series.known
    if not series.is_known[-1]:
        last = f"last {short(known.values[-1])} at step {known.steps[-1]:,.0f}" if len(known) else ""
        note = last or f"in {f'all {len(series):,} rows' if len(series) > 1 else 'the only row'}"
        return [KeyFigure("Loss", "not finite", note, "wrong")]
    note = f"from {short(known.values[0])} at step {known.steps[0]:,.0f}" if len(known) > 1 else ""
    return [KeyFigure("Loss", short(known.values[-1]), note)]


def _of_plan(plan: Plan) -> list[KeyFigure]:
    if plan.chosen is None:
        return [KeyFigure("Microbatch", "none", "nothing fits")]
    figures = [KeyFigure("Microbatch", f"{plan.chosen.microbatch_size:,}", plan.chosen.route)]
    total = plan.chosen.total
    full_batch = [each for each in plan.candidates if each.is_full_batch and each.method is None]
    full_total = next((each.total for each in full_batch if each.total), None)
    if total is not None:
        note = "" if plan.budget is None else f"of {readable(plan.budget)} allowed"
        if full_total is not None and full_total != total:
            note = f"{readable(full_total)} for the full batch"
        figures.append(KeyFigure("Memory", readable(total), note))
    return figures


def _throughput(history: History) -> list[KeyFigure]:
    """The median throughput, which ignores the slow steps that compile."""
    rates = {
        unit: np.median(drawable(found.values))
        for unit in ("examples", "tokens")
        if len(found := column(history, f"{unit}_per_second").known)
    }
    if not rates:
        return []
    (unit, rate), *others = rates.items()
    note = f"{unit} per second" + "".join(f", {short(float(more))} {name}" for name, more in others)
    return [KeyFigure("Throughput", short(float(rate)), note)]


def history_table(history: History) -> Table | None:
    """Some rows of the history, evenly apart, with the first and the last. None if there is nothing to show."""
    names = [
        name
        for name in ("loss", "gradient_norm", "noise_scale", "examples_per_second", "tokens_per_second")
        if any(name in row for row in history)
    ]
    evaluated = list(dict.fromkeys(name for row in history for name in row if name.split(".")[0] == "eval"))
    evaluations = evaluated[:MOST_EVALUATIONS]
    names += evaluations
    if not history or not names:
        return None
    # Prefer rows with an evaluation.
    places = [place for place, row in enumerate(history) if any(math.isfinite(number(row.get(e))) for e in evaluations)]
    places = sorted({0, *places, len(history) - 1}) if len(places) > 1 else list(range(len(history)))
    chosen = np.unique(np.linspace(0, len(places) - 1, min(MOST_ROWS, len(places))).round().astype(int))
    rows = []
    for place in (places[int(each)] for each in chosen):
        row, step = history[place], number(history[place].get("step"))
        # A log that was read from its file has NaN where there was no evaluation. The first step has no rate.
        may_miss = [*evaluations, *filter(is_rate, names)]
        missing = {name for name in may_miss if not math.isfinite(number(row.get(name)))}
        cells = [_cell(row[name]) if name in row and name not in missing else "" for name in names]
        rows.append((f"{step:,.0f}" if math.isfinite(step) else str(place + 1), *cells))
    caption = f"{len(rows)} of {len(history):,} rows" if len(rows) < len(history) else "All rows"
    caption += f", {len(evaluations)} of {len(evaluated)} evaluations" if len(evaluations) < len(evaluated) else ""
    header = ("step", *(name.replace("_", " ") for name in names))
    return Table(caption, header, tuple(rows), ("",) * len(rows)).without_empty_columns()


def _cell(value: Any) -> str:
    """A number with exactly four digits where possible, so that the numbers of a column are aligned."""
    found = number(value)
    return f"{found:#.4g}" if 1e-3 <= abs(found) < 1000 else "" if value is None else short(found)


def plan_table(plan: Plan) -> Table:
    """All candidates of a plan. The chosen one is marked."""
    header = (
        *("route", "microbatch", "method", "remat", "reduce", "total", "arguments", "gradients", "results"),
        *("activations", "time", "fits"),
    )
    styles = tuple(
        "chosen" if each == plan.chosen else "muted" if each.fits is False else "" for each in plan.candidates
    )
    rows = tuple(_plan_cells(each) for each in plan.candidates)
    left = frozenset({"route", "method", "remat", "reduce", "fits"})
    return Table("Candidates", header, rows, styles, left).without_empty_columns()


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
    """The values that are summed over the microbatches or gathered from them. None if there are none."""
    if not reading.frontier:
        return None
    rows = tuple(
        (
            "summed" if item.how == "sum" else "gathered",
            f"{item.dtype}[{','.join(map(str, item.shape))}]",
            readable(item.bytes),
            f"{item.file}:{item.line}" if item.file else "",
        )
        for item in reading.frontier
    )
    header, left = ("how", "array", "size", "where"), frozenset({"how", "array", "where"})
    return Table("What is kept of each microbatch", header, rows, ("",) * len(rows), left).without_empty_columns()


def verification_table(found: Verification) -> Table:
    """Every route with its differences, and the differences that rounding explains."""
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
    """A time in the largest fitting units.

    >>> duration(0.0312), duration(75), duration(7322)
    ('0.031 s', '1 min 15 s', '2 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"


def found_environment() -> dict[str, str]:
    """The software and hardware of this process, by name."""
    version, runtime = versions.versions()
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
