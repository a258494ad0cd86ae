"""`Report`: a training run as one HTML page, without other files. And the key figures and tables on it."""

import dataclasses
import importlib.resources
import math
import os
import pathlib
import platform
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from anybatch import __version__
from anybatch.call.files import check_target, check_writable, write_atomically
from anybatch.call.memory import memory_limit, readable
from anybatch.errors import InputError
from anybatch.gradient_noise.noise_scale import NoiseScale
from anybatch.jaxprs import versions
from anybatch.planning.plan import Candidate, Plan
from anybatch.reading.report import Reading
from anybatch.report.figures import (
    Figure,
    History,
    Series,
    column,
    column_figure,
    drawable,
    drawn_losses,
    is_rate,
    loss_figure,
    memory_figure,
    noise_figure,
    number,
    other_columns,
    scientific,
    short,
    time_figure,
    visible,
)
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


# A report is recognised by the start of the page. A file that does not match is never overwritten.
_OURS = re.compile(rb'<!DOCTYPE html>.*<meta name="generator" content="anybatch \d', re.DOTALL)

MOST_CHARACTERS = 20_000  # of a sample
MOST_COLUMNS = 12  # plots of evaluations and auxiliary scalars
MOST_NAMES = 24  # of columns without a plot


@dataclasses.dataclass(frozen=True)
class Report:
    """A training run as one HTML page: curves, memory and time, the plan, the verification and samples.

    Sections without content are left out. The page is one file: it loads nothing and runs no script. It follows the
    light or dark scheme of the reader, and can be printed.

    **Safe.** Every text is escaped: markup in a title or a sample is shown as text.
    **Small.** The curves of a long history have about 1,000 points, with all extremes.
    **Reproducible.** The same report gives the same page, byte for byte: it has no date.

    >>> import anybatch as ab
    >>> from anybatch.report import Report
    >>> page = Report("A run", [{"step": step, "loss": 1 / step} for step in (1, 2, 3)]).html()
    >>> page.count("<h2>Training</h2>"), page.count("<h2>Verification</h2>")
    (1, 0)

    Args:
      title: the title of the page.
      history: the rows of a run, as returned by `fit` or read from its log. Columns: `step`, `loss`, `gradient_norm`,
        `skipped`, `noise_scale`, `examples_per_second`, `tokens_per_second`, `seconds` (since the start), `eval` or
        `eval.*`, and `aux.*`. None, NaN and infinite numbers are gaps.
      plan: how the gradient is computed, and the other candidates: `ab.plan`, `ab.explain`.
      reading: how the loss uses its examples: `ab.read`.
      verification: the comparison with the gradient of the full batch: `ab.verify`.
      noise: the gradient noise scale, averaged over the run.
      samples: pairs of a caption and a text, such as a language model's output before and after training.
      settings: the options of the run, by name.
      environment: software and hardware, by name. By default those of this process.
      notes: sentences for the head of the page.
    """

    title: str
    history: Sequence[Mapping[str, Any]]
    plan: Plan | None = None
    reading: Reading | None = None
    verification: Verification | None = None
    noise: NoiseScale | None = None
    samples: Sequence[tuple[str, str]] = ()
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, str] | None = None
    notes: Sequence[str] = ()

    def html(self) -> str:
        """The page as a string.

        Raises:
          InputError: if jinja2 is not installed.
        """
        numbers = key_figures(self.history, self.plan, self.verification, self._examples)
        training, more_columns = self._training_figures()
        return _template().render(
            report=self,
            version=__version__,
            key_figures=numbers,
            # The number of columns that leaves the fewest empty places in the last row.
            columns=min((4, 5, 3), key=lambda columns: -len(numbers) % columns),
            loss=loss_figure(self.history),
            training=training,
            more_columns=more_columns,
            alarm=alarm(self.verification) if self.verification else "",
            history_table=history_table(self.history),
            noise_words=self._noise_words(),
            plan=_plan_section(self.plan) if self.plan else None,
            reading_table=reading_table(self.reading) if self.reading else None,
            verification_table=verification_table(self.verification) if self.verification else None,
            samples=[(caption, _cut(text)) for caption, text in self.samples],
            settings={name: _shown(value) for name, value in self.settings.items()},
            environment=found_environment() if self.environment is None else self.environment,
        )

    def write(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Writes the page to a file, atomically: an earlier report is replaced only when the new one is complete.

        **No other file is replaced**: only an empty file, or an earlier report of anybatch.

        Args:
          path: of the file. `~` is the home folder.

        Returns:
          The path of the file.

        Raises:
          InputError: before anything is drawn, if the folder does not exist or is not writable, or the file is not a
            report; later, if the disk is full.
        """
        target = check_path(path)
        options = {"must": "A report needs a folder that is writable", "given": f"path={str(path)!r}"}
        check_writable(target, **options)
        # A lone surrogate cannot be encoded; it becomes a question mark.
        content = self.html().encode("utf-8", errors="replace")
        write_atomically(check_path(path), content, **options)
        return pathlib.Path(os.path.expanduser(path))

    @property
    def _examples(self) -> int | None:
        """The number of examples in a step. None if no part of the report says it."""
        for part in (self.plan, self.reading):
            if part is not None:
                return part.num_examples
        given = self.settings.get("batch_size")
        return given if isinstance(given, int) and not isinstance(given, bool) else None

    def _batch_in_units(self) -> tuple[float | None, str]:
        """The size of the batch in the units of the noise scale (tokens, for a mean over tokens), and their name."""
        if self.noise is not None and float(self.noise.steps) > 0:
            units = float(self.noise.units) / float(self.noise.steps)
            return units, "examples" if self._examples == units else "units"
        return (None, "units") if self._examples is None else (float(self._examples), "examples")

    def _training_figures(self) -> tuple[list[Figure], str]:
        """The plots below the loss, and a sentence that names the columns without a plot."""
        batch, unit = self._batch_in_units()
        others: list[Figure] = []
        left = other_columns(self.history)
        while left and len(others) < MOST_COLUMNS:
            name = left.pop(0)
            others += _known(column_figure(self.history, name, name, color="orange"))
        figures = _known(
            noise_figure(self.history, batch, unit),
            column_figure(self.history, "gradient_norm", "Gradient norm", color="green"),
            *others,
            column_figure(self.history, "tokens_per_second", "Tokens per second", from_zero=True)
            or column_figure(self.history, "examples_per_second", "Examples per second", from_zero=True),
        )
        return figures, _more(drawn_losses(self.history)[1] + left)

    def _noise_words(self) -> str:
        """Sentences that compare the noise scale with the size of the batch."""
        if self.noise is None:
            return ""
        if not bool(self.noise.is_defined):
            return f"The noise scale is undefined: {self.noise.why_undefined}."
        scale, (batch, unit) = float(self.noise.value), self._batch_in_units()
        text = f"The gradient noise scale of the run is {short(scale)}"
        if batch is None or not batch > 0:
            return text + "."
        now, twice = (size / (size + scale) for size in (batch, 2 * batch))
        return (
            f"{text}; a step has {batch:,.0f} {unit}. To first order, a step makes {now:.0%} of the progress of one "
            f"without noise, and with twice the batch it would make {twice:.0%}."
        )


def check_path(path: str | os.PathLike[str], given: str | None = None) -> pathlib.Path:
    """The file that a report would be written to, links followed.

    Args:
      path: of the report. `~` is the home folder.
      given: how the user named the path, for the error.

    Raises:
      InputError: if the folder does not exist, or the file is neither empty nor a report of anybatch.
    """
    target, given = pathlib.Path(os.path.expanduser(path)), given or f"path={str(path)!r}"
    if not target.name or os.path.isdir(target) or not os.path.isdir(target.parent):
        raise InputError(
            "A report needs the name of a file in a folder that exists",
            given=given,
            remedy=f'For example report.write("report.html"), or first: mkdir -p "{target.parent}"',
        )
    must = "A report replaces no file but a report of anybatch"
    return check_target(path, must=must, given=given, is_ours=lambda content: bool(_OURS.match(content[:2048])))


def _plan_section(plan: Plan) -> dict[str, Any]:
    """What the template needs for the section about a plan."""
    each = " each" if plan.devices.count > 1 else ""
    within = "" if plan.budget is None else f", within {readable(plan.budget)}{each} ({plan.budget_source})"
    predicts = any(candidate.bytes is None and candidate.predicted is not None for candidate in plan.candidates)
    remarks = [
        "~ predicted from the sizes that were compiled." if predicts else "",
        plan.note,
        plan.limits,
        plan.advice,
    ]
    return {
        "text": f"The {plan.noun} of {plan.num_examples:,} examples on {plan.device}{within}. {plan.reason}",
        "figures": _known(memory_figure(plan), time_figure(plan)),
        "table": plan_table(plan),
        "remarks": [remark for remark in remarks if remark],
    }


def _more(names: Sequence[str]) -> str:
    if not names:
        return ""
    listed = ", ".join(names[:MOST_NAMES]) + (", and so on" if len(names) > MOST_NAMES else "")
    return f"{len(names):,} more {'column is' if len(names) == 1 else 'columns are'} in the log: {listed}."


def _known(*found: Figure | None) -> list[Figure]:
    return [figure for figure in found if figure is not None]


def _shown(value: Any) -> str:
    """The value of an option as text."""
    return {True: "yes", False: "no", None: "none"}[value] if isinstance(value, bool | None) else str(value)


def _cut(text: str) -> str:
    left = len(text) - MOST_CHARACTERS
    return text if left <= 0 else f"{text[:MOST_CHARACTERS]}\n[{left:,} more characters]"


def _visible(value: Any) -> Any:
    return visible(value) if type(value) is str else value


def _template() -> Any:
    try:
        import jinja2
    except ImportError:
        raise InputError(
            "A report needs jinja2", given="a Python without it", remedy='pip install "anybatch[cli]"'
        ) from None
    # Escape every value, wherever the template uses it.
    environment = jinja2.Environment(
        autoescape=True, finalize=_visible, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = importlib.resources.files("anybatch.report").joinpath("page.html.jinja").read_text("utf-8")
    return environment.from_string(source)
