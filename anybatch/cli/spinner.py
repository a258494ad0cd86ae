"""The line in the terminal that shows what a long command is doing."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def spinner(text: str) -> Iterator[Callable[[str], None]]:
    """Shows a text with the elapsed time on stderr. Yields a function that replaces the text.

    It shows nothing if stderr is not a terminal.
    """
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(text, total=None)
        yield lambda text: progress.update(task, description=text)
