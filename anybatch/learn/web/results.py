"""Shows a check on the page: the stages as they pass, then the verdict with its numbers and pictures."""

import dataclasses

from nicegui import ui

from anybatch.learn.check import STAGES, Verdict
from anybatch.learn.web import pictures
from anybatch.learn.web.workspace import Checked

WORDS = {
    "file": "The file can be read",
    "signature": "The function is there",
    "run": "It runs",
    "structure": "Structure of the answer",
    "shape": "Shapes and dtypes",
    "value": "Value",
    "errors": "Bad input is refused",
    "invariance": "What must make no difference",
    "differences": "Gradient against slopes",
    "program": "The traced program",
    "memory": "Memory",
    "collectives": "Collectives",
    "limits": "Limits of a check",
}
assert set(STAGES) <= set(WORDS)


def show(checked: Checked | None) -> None:
    """Shows a check, running or done."""
    if checked is None:
        ui.label("Press Ctrl-Enter in the editor, or Run, to check your file.").classes("ab-muted")
        return
    _heading(checked)
    verdict = checked.verdict
    with ui.element("ol").classes("ab-stages"):
        for stage, seen in verdict.done if verdict else checked.stages:
            _stage("✓", "good", stage, seen)
        if verdict is not None and verdict.stage and verdict.started:
            _stage("✗", "bad", verdict.stage, verdict.mistake or "")
    if checked.failure:
        ui.label(checked.failure).classes("ab-text-block")
    if verdict is not None:
        _details(verdict, checked)


def _heading(checked: Checked) -> None:
    verdict = checked.verdict
    with ui.element("div").classes("ab-verdict"):
        if checked.is_running:
            ui.spinner(size="1.2em").props('aria-hidden="true"')
            ui.label("Checking…")
        elif verdict is None:
            ui.label("The check itself failed. That is not your mistake.").classes("ab-bad")
        else:
            kind = "good" if verdict.passed else "bad" if verdict.started else "warn"
            title = verdict.title or ("Passed." if verdict.passed else "Failed.")
            ui.label(title).classes(f"ab-{kind} ab-verdict-title")
            ui.label(f"{verdict.seconds:.2f} s").classes("ab-muted ab-seconds")


def _stage(mark: str, kind: str, stage: str, seen: str) -> None:
    with ui.element("li").classes(f"ab-stage ab-stage-{kind}"):
        ui.label(mark).classes("ab-mark").props(f'aria-label="{"passed" if kind == "good" else "failed"}"')
        ui.label(WORDS[stage]).classes("ab-stage-name")
        ui.label(seen).classes("ab-muted ab-stage-seen")


def _details(verdict: Verdict, checked: Checked) -> None:
    if verdict.line is not None:
        with ui.element("div").classes("ab-line"):
            ui.label(f"line {verdict.line}").classes("ab-muted")
            ui.label((verdict.source_line or "").strip()).classes("ab-mono")
    if verdict.text.strip():
        ui.label(verdict.text.strip("\n")).classes("ab-text-block")
    _pictures(verdict, checked)
    if verdict.prints or verdict.prints_dropped:
        with ui.element("section").props('aria-label="Your prints"').classes("ab-evidence"):
            ui.html("Your prints", sanitize=False, tag="h3")
            ui.label(verdict.prints.rstrip("\n")).classes("ab-text-block")
            if verdict.prints_dropped:
                ui.label(f"{verdict.prints_dropped:,} more bytes were printed and are not shown.").classes("ab-muted")


def _pictures(verdict: Verdict, checked: Checked) -> None:
    """The pictures. Those of the stage that failed are open; if none failed, those of memory and collectives."""
    evidence = verdict.evidence
    if evidence.memory is not None:
        memory = evidence.memory
        if checked.full_batch:
            memory = dataclasses.replace(memory, full_batch=checked.full_batch)
        with ui.expansion("Memory against batch size", value=verdict.stage in ("", "memory")).classes("ab-evidence"):
            ui.html(pictures.memory(memory), sanitize=False)
    if evidence.collectives is not None:
        with ui.expansion("What the devices send", value=verdict.stage in ("", "collectives")).classes("ab-evidence"):
            ui.html(pictures.collectives(evidence.collectives), sanitize=False)
    if evidence.arrays:
        is_open = verdict.stage in ("value", "invariance", "differences")
        with ui.expansion("Your answer, and the expected one", value=is_open).classes("ab-evidence"):
            ui.html(pictures.arrays(evidence.arrays), sanitize=False)
