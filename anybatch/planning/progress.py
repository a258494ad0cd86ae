"""What a plan does next, as a text and as a progress bar."""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator

from anybatch.errors import InputError

Notify = Callable[[str], None]


class PlanningStep(str):
    """A text that says what a plan does next, with the numbers for a bar.

    >>> step = PlanningStep("Compiling microbatch_size=16", done=1, most=4)
    >>> print(step)
    [1 of at most 4 programs compiled] Compiling microbatch_size=16
    """

    brief: str  # without the numbers
    done: int  # programs that were compiled
    most: int  # programs that will be compiled, at most

    def __new__(cls, brief: str, *, done: int, most: int) -> "PlanningStep":
        most = max(done, most)
        step = super().__new__(cls, f"[{done} of at most {most} programs compiled] {brief}")
        step.brief, step.done, step.most = brief, done, most
        return step


@contextlib.contextmanager
def shown(progress: bool | Notify | None) -> Iterator[Notify]:
    """Yields a function to call with each step of a plan: the one of the user, or one that shows a bar or nothing.

    Without a terminal, or without rich, the bar is a line for each step.
    """
    if not progress:
        yield lambda text: None
    elif callable(progress):
        yield progress
    elif progress is not True:
        raise InputError(
            "progress must be True, False or a function of a text",
            given=f"progress={progress!r}",
            remedy="For example progress=True or progress=print.",
        )
    elif importlib.util.find_spec("rich") is None or not sys.stderr.isatty():
        yield lambda text: print(text, file=sys.stderr, flush=True)
    else:
        with _bar() as update:
            yield update


@contextlib.contextmanager
def _bar() -> Iterator[Notify]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    rest_of_line = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    bar = Progress(
        BarColumn(bar_width=12, table_column=Column(min_width=12)),
        MofNCompleteColumn(table_column=Column(min_width=3)),
        TimeElapsedColumn(table_column=Column(min_width=7)),
        TextColumn("{task.description}", markup=False, table_column=rest_of_line),
        console=Console(stderr=True),
        transient=True,
        expand=True,
    )
    with bar:
        task = bar.add_task("Planning", total=None)

        def update(text: str) -> None:
            if isinstance(text, PlanningStep):
                bar.update(task, description=text.brief, completed=text.done, total=text.most)

        yield update
