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
from anybatch.call.display import html_figure, style, visible
from anybatch.call.files import check_target, check_writable, write_atomically
from anybatch.call.memory import memory_limit, readable
from anybatch.call.plots import Figure, Series, drawable, short
from anybatch.errors import InputError, install
from anybatch.gradient_noise.noise_scale import NoiseScale
from anybatch.jaxprs import versions
from anybatch.planning.plan import Plan, times
from anybatch.reading.report import Reading
from anybatch.report.figures import (
    STYLES,
    History,
    column,
    column_figure,
    loss_figure,
    noise_figure,
    scalar_columns,
)
from anybatch.verification.verify import Verification


@dataclasses.dataclass(frozen=True)
class KeyFigure:
    """One of the numbers at the head of the page."""

    label: str
    value: str
    note: str = ""
    style: str = ""  # "wrong" for a failure


@dataclasses.dataclass(frozen=True)
class Hero:
    """The first thing on the page: the memory of the full batch, and of the microbatches that replace it."""

    full_batch: str
    chosen: str
    name: str  # of the chosen candidate
    share: float  # of the chosen candidate in the full batch, in percent
    text: str


def worst_difference(found: Verification) -> tuple[str, str, str]:
    """The largest difference: the name of the route, by how much it differs, and where. NaN is larger than any number.

    If routes fail, only those are compared.
    """
    routes = [route for route in found.routes if not route.ok] or found.routes
    places = [(route.name, f"at {route.leaf}", route.gradient) for route in routes]
    # A route with the right gradient may still fail in its value, in aux or by its rounding.
    for route in routes:
        places += [(route.name, f"at {leaf.name}", leaf.difference) for leaf in route.leaves if not leaf.ok]
        if route.rounding is not None and not route.rounding <= (route.expected_rounding or 0.0):
            places.append((route.name, f"in {found.given_dtype}", route.rounding))
    name, place, difference = max(places, key=lambda place: (math.isnan(place[2]), place[2]))
    return name, f"differs by {_two_digits(difference)}" if math.isfinite(difference) else "is not finite", place


def _two_digits(value: float) -> str:
    return short(float(f"{value:.2g}"))


def _of_history(history: History) -> list[KeyFigure]:
    figures = []
    if history:
        steps, skipped, seconds = (column(history, name).known.values for name in ("step", "skipped", "seconds"))
        notes = [f"in {duration(float(drawable(seconds)[-1]))}"] if len(seconds) else []
        notes += [f"{skipped.max():,.0f} skipped"] if skipped.any() else []
        figures.append(KeyFigure("Steps", f"{steps[-1] if len(steps) else len(history):,.0f}", ", ".join(notes)))
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


def _hero(plan: Plan, verification: Verification | None) -> Hero | None:
    """The memory saved. None if the full batch was chosen, or nothing, or if its memory is not known."""
    if plan.memory_saved is None or plan.chosen is None:
        return None
    full, chosen = plan.memory_saved
    text = f"{times(full / chosen)} less memory than the full batch of {plan.num_examples:,} examples"
    if verification is not None and verification.ok:
        _, differs, _ = worst_difference(verification)
        text += f", and the same gradient: it {differs} at most"
    name = "chosen" if plan.chosen.is_full_batch else f"microbatches of {plan.chosen.microbatch_size:,}"
    return Hero(readable(full), readable(chosen), name, round(100 * chosen / full, 2), f"{text}.")


def _of_plan(plan: Plan) -> list[KeyFigure]:
    if plan.chosen is None:
        return [KeyFigure("Microbatch", "none", "nothing fits")]
    figures = [KeyFigure("Microbatch", f"{plan.chosen.microbatch_size:,}", plan.chosen.route)]
    if plan.chosen.total is not None and plan.memory_saved is None:
        note = "" if plan.budget is None else f"of {readable(plan.budget)} allowed"
        figures.append(KeyFigure("Memory", readable(plan.chosen.total), note))
    return figures


def _throughput(history: History) -> list[KeyFigure]:
    """The median throughput, which ignores the slow steps that compile."""
    found = {unit: column(history, f"{unit}_per_second").known.values for unit in ("examples", "tokens")}
    rates = [(short(float(np.median(drawable(rates)))), unit) for unit, rates in found.items() if len(rates)]
    if not rates:
        return []
    (rate, unit), *others = rates
    note = f"{unit} per second" + "".join(f", {more} {name}" for more, name in others)
    return [KeyFigure("Throughput", rate, note)]


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
    limit = memory_limit(devices)
    each = " each" if len(devices) > 1 and devices[0].platform != "cpu" else ""
    return {
        "anybatch": __version__,
        "Python": platform.python_version(),
        "JAX": version,
        "jaxlib": runtime,
        "Devices": f"{jax.device_count()} x {devices[0].device_kind} ({devices[0].platform})",
        "Platform": platform.platform(),
        **({} if limit is None else {"Memory": readable(limit) + each}),
    }


# A report is recognised by the start of the page. A file that does not match is never overwritten.
_OURS = re.compile(rb'<!DOCTYPE html>.*<meta name="generator" content="anybatch \d', re.DOTALL)

MOST_CHARACTERS = 20_000  # of a sample
MOST_COLUMNS = 12  # plots of evaluations and auxiliary scalars


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
        numbers = self._key_figures()
        batch, unit = self._batch_in_units()
        training, more_columns = self._training_figures(batch, unit)
        return _template().render(
            report=self,
            version=__version__,
            hero=_hero(self.plan, self.verification) if self.plan else None,
            key_figures=numbers,
            # The number of columns that leaves the fewest empty places in the last row.
            columns=min((4, 5, 3), key=lambda columns: -len(numbers) % columns),
            loss=loss_figure(self.history),
            training=training,
            more_columns=more_columns,
            readable=readable,
            worst=worst_difference(self.verification) if self.verification else None,
            batch=batch,
            unit=unit,
            short=short,
            **self._markup(),
            samples=[(caption, _cut(text)) for caption, text in self.samples],
            settings={name: _shown(value) for name, value in self.settings.items()},
            environment=found_environment() if self.environment is None else self.environment,
        )

    def _markup(self) -> dict[str, Any]:
        """The parts of the page that are HTML already: tables, and a function for figures."""
        from markupsafe import Markup

        reading, plan, found = self.reading, self.plan, self.verification
        caption = "" if found is None else f"Relative differences in {found.dtype}"
        tables = {
            "plan_table": plan.html_table("Candidates") if plan else "",
            "reading_table": reading.html_table("What is kept of each microbatch") if reading else "",
            "verification_table": found.html_table(_two_digits, caption) if found else "",
            "style": style("display"),
        }
        return {name: Markup(table) for name, table in tables.items()} | {
            "figure": lambda figure: Markup(html_figure(figure)),
            "plan_figures": plan.figures() if plan else [],
        }

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

    def _key_figures(self) -> list[KeyFigure]:
        """The key figures at the head of the page. Unknown ones are left out."""
        figures = _of_history(self.history)
        if self._examples is not None:
            figures.append(KeyFigure("Effective batch", f"{self._examples:,}", "examples in a step"))
        figures += _of_plan(self.plan) if self.plan else []
        figures += _throughput(self.history)
        if self.verification is not None:
            _, differs, _ = worst_difference(self.verification)
            right, wrong = ("verified", f"{differs} at most"), ("different", differs, "wrong")
            figures.append(KeyFigure("Gradient", *(right if self.verification.ok else wrong)))
        return figures

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

    def _training_figures(self, batch: float | None, unit: str) -> tuple[list[Figure], list[str]]:
        """The plots below the loss, and the names of columns without a plot."""
        others: list[Figure] = []
        losses, left = scalar_columns(self.history)
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
        return figures, losses[len(STYLES) :] + left


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
        raise InputError("A report needs jinja2", given="a Python without it", remedy=install("cli")) from None
    # Escape every value, wherever the template uses it.
    environment = jinja2.Environment(
        autoescape=True, finalize=_visible, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = importlib.resources.files("anybatch.report").joinpath("page.html.jinja").read_text("utf-8")
    return environment.from_string(source)
