"""The frame of every page: the header that leads to the other pages, the style, and code blocks that can be copied."""

import contextlib
import functools
import hashlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from nicegui import ui

from anybatch.learn.web import pictures, playground, text
from anybatch.learn.web.workspace import Workspace

STYLE = "/style.css"  # its address


@functools.cache
def style() -> str:
    """The style of all pages. It is a file of its own: inline scripts, which would add it later, are not allowed."""
    own = (pathlib.Path(__file__).parent / "style.css").read_text("utf-8")
    return "\n".join((own, pictures.CSS, playground.CSS))


@contextlib.contextmanager
def frame(workspace: Workspace, title: str, here: str) -> Iterator[None]:
    """The frame of a page, around its content.

    Args:
      workspace: what all pages share.
      title: the title of the page.
      here: the address of the page among those that the header leads to; "" for others.
    """
    ui.page_title(f"{title} · anybatch learn")
    version = hashlib.sha256(style().encode()).hexdigest()[:16]
    ui.add_head_html(f'<link rel="stylesheet" href="{STYLE}?{version}">')
    ui.query(".nicegui-content").classes("ab-page")
    with ui.header(fixed=False).classes("ab-header"):
        with ui.link(target="/").classes("ab-brand"):
            ui.label("anybatch")
            ui.label("learn").classes("ab-brand-second")
        with ui.element("nav").props('aria-label="Pages"').classes("ab-nav"):
            for address, name in (("/", "Exercises"), ("/playground", "Playground")):
                link = ui.link(name, address)
                if address == here:
                    link.props('aria-current="page"')
        _solved(workspace)
    with ui.element("div").classes("ab-main") as content:
        yield
    ui.skip_link("Skip to the content", target=content)


def _solved(workspace: Workspace) -> None:
    """How many exercises are solved, kept up to date."""
    count = ui.label().classes("ab-solved-count").props('aria-live="polite"')

    def update() -> None:
        course = workspace.course
        solved = sum(exercise.name in workspace.progress.solved for exercise in course.exercises)
        count.set_text(f"{solved} of {len(course.exercises)} solved")

    workspace.solved.subscribe(update)
    update()


def markdown(source: str) -> None:
    """Shows Markdown, with code blocks that can be copied."""
    for language, part in text.segments(source):
        if language is None:
            ui.html(part, sanitize=False).classes("ab-prose")
        else:
            code(part, language)


def code(source: str, language: str = "python") -> None:
    """Shows a code block with a button that copies it."""
    with ui.element("div").classes("ab-codebox"):
        ui.html(text.highlighted(source, language), sanitize=False)
        if language != "text":
            copy = button("", lambda: _copy(source), icon="content_copy", label="Copy the code")
            copy.classes("ab-copy")


def _copy(source: str) -> None:
    ui.clipboard.write(source)
    ui.notify("Copied.", position="bottom", timeout=1200)


def button(
    words: str, on_click: Callable[..., Any], *, icon: str | None = None, label: str = "", kind: str = ""
) -> Any:
    """A button.

    Args:
      words: what is written on it.
      on_click: called when it is pressed.
      icon: the name of an icon; None for none.
      label: its name for screen readers, and its tooltip, if no words are on it.
      kind: "primary" for the main one of a page.
    """
    # Quasar's own colours would win over ours.
    made = ui.button(words, on_click=on_click, icon=icon, color=None).props("no-caps")
    made.props("unelevated" if kind else "flat").classes(f"ab-button ab-{kind or 'plain'}")
    if label:
        made.props(f'aria-label="{label}"').tooltip(label)
    return made
