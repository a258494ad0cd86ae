"""The list of exercises, by topic, with the learner's progress, and three questions that say where to start."""

import html
from typing import Any

from nicegui import ui

from anybatch.learn.catalogue import Course, Exercise
from anybatch.learn.web import text
from anybatch.learn.web.frame import button, frame
from anybatch.learn.web.workspace import Workspace

DIFFICULTIES = {1: "easy", 2: "medium", 3: "hard"}
STATES = {"solved": "✓ solved", "changed": "✓ solved, changed since", "begun": "started", "open": ""}


def page(workspace: Workspace) -> None:
    """Builds the page."""
    course, progress = workspace.course, workspace.progress
    with frame(workspace, course.title, "/"):
        with ui.element("section").classes("ab-intro"):
            ui.html(html.escape(course.title), sanitize=False, tag="h1")
            ui.label(course.description).classes("ab-lead")
            with ui.element("div").classes("ab-actions"):
                _continue(workspace)
                if course.placement:
                    button("Where should I start?", _placement(course).open, icon="quiz")

        @ui.refreshable
        def topics() -> None:
            solved = sum(exercise.name in progress.solved for exercise in course.exercises)
            share = solved / len(course.exercises)
            with (
                ui.element("div")
                .classes("ab-bar")
                .props(
                    f'role="progressbar" aria-valuemin=0 aria-valuemax={len(course.exercises)} aria-valuenow={solved} '
                    'aria-label="solved exercises"'
                )
            ):
                ui.element("div").classes("ab-bar-done").style(f"width: {100 * share:.1f}%")
            for topic, exercises in course.topics:
                with ui.element("section").classes("ab-topic"):
                    if topic:
                        ui.html(html.escape(topic), sanitize=False, tag="h2")
                    with ui.element("ol").classes("ab-cards"):
                        for exercise in exercises:
                            _card(workspace, exercise)

        topics()
        workspace.solved.subscribe(topics.refresh)


def _continue(workspace: Workspace) -> None:
    progress = workspace.progress
    current = progress.current
    is_new = not progress.solved and progress.state(current) == "open"
    words = f"{'Start' if is_new else 'Continue'} with {current.number}: {current.title}"
    button(words, lambda: ui.navigate.to(address(current)), icon="play_arrow", kind="primary")


def _card(workspace: Workspace, exercise: Exercise) -> None:
    progress = workspace.progress
    state = progress.state(exercise)
    words = STATES[state]
    missing = [name for name in exercise.needs if name not in progress.solved]
    with ui.element("li"), ui.link(target=address(exercise)).classes(f"ab-card ab-is-{state}"):
        with ui.element("span").classes("ab-card-number"):
            ui.label(str(exercise.number))
        with ui.element("span").classes("ab-card-text"):
            ui.label(exercise.title).classes("ab-card-title")
            with ui.element("span").classes("ab-card-about"):
                ui.label(DIFFICULTIES[exercise.difficulty]).classes(f"ab-chip ab-level-{exercise.difficulty}")
                if words:
                    ui.label(words).classes("ab-chip ab-state")
                if missing:
                    numbers = ", ".join(str(workspace.course.find(name).number) for name in missing)
                    ui.label(f"builds on {numbers}").classes("ab-muted")


def address(exercise: Exercise) -> str:
    """The address of an exercise's page."""
    return f"/exercise/{exercise.name}"


# Where to start.


def _placement(course: Course) -> Any:
    """The dialog with a few questions; the first that is not answered rightly says where to start."""
    with ui.dialog() as dialog, ui.card().classes("ab-dialog"):
        body = ui.element("div").classes("ab-placement")

    def ask(number: int) -> None:
        body.clear()
        with body:
            if number == len(course.placement):
                return advise(course.find(course.placement_end), "You know this already.")
            question = course.placement[number]
            ui.html(f"Question {number + 1} of {len(course.placement)}", sanitize=False, tag="h2")
            ui.html(text.html_of(question.text), sanitize=False).classes("ab-prose")
            start = course.find(question.start)
            for index, answer in enumerate(question.answers):
                is_right = index == question.right
                follow = (lambda: ask(number + 1)) if is_right else (lambda: advise(start, "Not quite."))
                with button("", follow).classes("ab-answer"):
                    ui.html(text.html_of(answer), sanitize=False)
            button("I do not know", lambda: advise(start, "Good to know.")).classes("ab-answer")

    def advise(start: Exercise, words: str) -> None:
        body.clear()
        with body:
            ui.html("Where to start", sanitize=False, tag="h2")
            ui.label(f"{words} Start with exercise {start.number}: {start.title}.").classes("ab-lead")
            with ui.element("div").classes("ab-actions"):
                button("Go there", lambda: ui.navigate.to(address(start)), icon="play_arrow", kind="primary")
                button("Close", dialog.close)

    dialog.on("before-show", lambda: ask(0))
    ask(0)
    return dialog
