"""A plan as a plain record: for people to look at, and for programs to follow."""

import dataclasses
import html
import io
from collections.abc import Sequence
from typing import Any

from anybatch.errors import InputError
from anybatch.memory import readable
from anybatch.planning import picture
from anybatch.planning.measure import Bytes


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
    def style(self) -> str:
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
      device: what it was planned for.
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
    device: str
    compilations: int
    planning_seconds: float
    noun: str = "gradient"
    note: str = ""

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
        return f"<p>{html.escape(self._title)}</p>{table}{self._picture()}{remarks}"

    @property
    def _title(self) -> str:
        budget = "unknown memory" if self.budget is None else f"{readable(self.budget)} ({self.budget_source})"
        each = " each" if " x " in self.device else ""
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
        figure = picture.draw(self)
        if path is not None:
            picture.save(figure, path)
        return figure

    def _picture(self) -> str:
        """The plot as SVG, if matplotlib is there and there is something to see."""
        if sum(candidate.total is not None for candidate in self.candidates) < 2:
            return ""
        try:
            figure = picture.draw(self)
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
