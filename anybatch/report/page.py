"""`Report`: a training run as one HTML page, without other files."""

import dataclasses
import importlib.resources
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from anybatch import __version__
from anybatch.call.files import check_target, check_writable, write_atomically
from anybatch.call.memory import readable
from anybatch.errors import InputError
from anybatch.gradient_noise.noise_scale import NoiseScale
from anybatch.planning.plan import Plan
from anybatch.reading.report import Reading
from anybatch.report.figures import (
    Figure,
    column_figure,
    drawn_losses,
    loss_figure,
    memory_figure,
    noise_figure,
    other_columns,
    time_figure,
)
from anybatch.report.svg import short, visible
from anybatch.report.tables import (
    alarm,
    found_environment,
    history_table,
    key_figures,
    plan_table,
    reading_table,
    verification_table,
)
from anybatch.verification.verify import Verification

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
