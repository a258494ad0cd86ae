"""The page of an exercise: its text beside an editor, the results of checks, hints, and the solution in the end."""

import asyncio
import secrets
from typing import Any

from nicegui import background_tasks, ui

from anybatch.errors import InputError
from anybatch.learn.catalogue import Exercise
from anybatch.learn.web import results
from anybatch.learn.web.frame import button, code, frame, markdown
from anybatch.learn.web.list_page import DIFFICULTIES, address
from anybatch.learn.web.workspace import Draft, Workspace

SAVE_AFTER = 0.3  # seconds after the last key


def page(workspace: Workspace, exercise: Exercise) -> None:
    """Builds the page."""
    draft = workspace.draft(exercise)
    workspace.progress.go_to(exercise)
    workspace.prepare(exercise)
    with frame(workspace, f"{exercise.number}. {exercise.title}", ""), ui.element("div").classes("ab-exercise"):
        with ui.element("article").classes("ab-article"):
            _about(workspace, exercise)
            markdown(exercise.page)
        with ui.element("section").classes("ab-work").props('aria-label="Your answer"'):
            editor = _Editor(workspace, draft)
            _result_section(draft, editor)
            _hints(workspace, exercise)
            _solution(workspace, draft)
            _ways_on(workspace, exercise)


def _about(workspace: Workspace, exercise: Exercise) -> None:
    parts = [f"Exercise {exercise.number} of {len(workspace.course.exercises)}", exercise.topic]
    with ui.element("div").classes("ab-about"):
        ui.label(" · ".join(part for part in parts if part)).classes("ab-muted")
        ui.label(DIFFICULTIES[exercise.difficulty]).classes(f"ab-chip ab-level-{exercise.difficulty}")
        for name in exercise.needs:
            needed = workspace.course.find(name)
            if name not in workspace.progress.solved:
                ui.link(f"builds on {needed.number}", address(needed)).classes("ab-muted")


class _Editor:
    """The editor of one browser tab, and its buttons.

    What is typed is saved shortly after the last key. If the file has changed in the meantime, nothing is overwritten,
    and the learner is asked which of the two to keep. The other one is kept under another name.
    """

    def __init__(self, workspace: Workspace, draft: Draft) -> None:
        self._workspace, self._draft, self._tab = workspace, draft, secrets.token_hex(8)
        self._base = draft.version
        self._saving: asyncio.TimerHandle | None = None
        path = workspace.progress.path(draft.exercise)
        with ui.element("div").classes("ab-toolbar"):
            button("Run", self.run, icon="play_arrow", kind="primary").tooltip("Ctrl-Enter in the editor")
            self._state = ui.label().classes("ab-muted ab-save-state").props('aria-live="polite"')
            button("Reset", self._ask_to_reset, icon="restart_alt")
        keys = ui.codemirror.KeyBinding(lambda _: self.run(), mac="Cmd-Enter")
        self.editor = ui.codemirror(
            draft.text, language="Python", theme="githubLight", on_change=self._typed, keymap={"Ctrl-Enter": keys}
        ).classes("ab-editor")
        with ui.element("div").classes("ab-below"):
            ui.label(f"Saved as you type in {path}").classes("ab-muted ab-mono-small")
            ui.label("Esc, then Tab, leaves the editor.").classes("ab-muted")
        self._conflict = ui.element("div").classes("ab-conflict").props('role="alert"')
        self._conflict.set_visibility(False)
        draft.changed.subscribe(self._changed)
        self._say(draft.problem)
        background_tasks.create(self._dress(ui.context.client))

    async def _dress(self, client: Any) -> None:
        """Gives the editor the theme of the system, and a name for screen readers."""
        await client.connected(timeout=30)
        with client:
            if await ui.run_javascript('matchMedia("(prefers-color-scheme: dark)").matches', timeout=10):
                self.editor.set_theme("githubDark")
            label = f"Your code for exercise {self._draft.exercise.number}"
            ui.run_javascript(
                f"const element = getElement({self.editor.id});"
                f'element.$el.querySelector(".cm-content").setAttribute("aria-label", "{label}");'
                "element.editor.requestMeasure();"  # the lines of the new theme may have another height
            )

    def _say(self, words: str) -> None:
        self._state.set_text(words)

    # Saving.

    def _typed(self) -> None:
        if self._saving is not None:
            self._saving.cancel()
        if self.editor.value != self._draft.text:
            self._say("…")
            self._saving = asyncio.get_running_loop().call_later(SAVE_AFTER, self.save)

    def save(self) -> bool:
        """Saves what was typed. Returns whether the file now has the contents of the editor."""
        if self._saving is not None:
            self._saving.cancel()
            self._saving = None
        kept = self._draft.kept
        try:
            is_saved = self._draft.save(self.editor.value, self._base, self._tab)
        except InputError as error:
            self._say(str(error))
            return False
        if is_saved:
            self._base = self._draft.version
            self._conflict.set_visibility(False)
            self._say("Saved" if self._draft.kept == kept else f"Saved. The other version is {self._draft.kept}.")
        else:
            self._ask_which()
        return is_saved

    def _changed(self, by: str) -> None:
        """Another tab, or another program, has changed the file."""
        if by == self._tab:
            return
        if self._draft.problem:
            self._say(self._draft.problem)
        elif self._saving is not None or self._conflict.visible:
            self.save()  # which asks, if the two differ
        else:
            self._take()
            self._say("Changed on disk" if by == "disk" else "Changed in another tab")
        if by == "disk" and not self._draft.problem and not self._conflict.visible:
            self._draft.check()

    def _take(self) -> None:
        self._base = self._draft.version
        if self.editor.value != self._draft.text:
            self.editor.set_value(self._draft.text)

    def _ask_which(self) -> None:
        self._say("Not saved")
        self._conflict.clear()
        with self._conflict:
            ui.label("The file has changed elsewhere while you typed. Which one should it be? The other one is kept.")
            with ui.element("div").classes("ab-actions"):
                button("Keep mine", self._keep_mine, kind="primary")
                button("Take the file's", self._take_other)
        self._conflict.set_visibility(True)

    def _keep_mine(self) -> None:
        kept = self._draft.keep_aside(self._draft.text)
        self._base = self._draft.version
        if self.save():
            self._say(f"Saved. The other one is {kept}.")

    def _take_other(self) -> None:
        kept = self._draft.keep_aside(self.editor.value)
        self._conflict.set_visibility(False)
        self._take()
        self._say(f"Yours is kept as {kept}.")

    # The buttons.

    def run(self) -> None:
        """Saves, and begins a check."""
        if self.save():
            self._draft.check()

    def mark(self, line: int | None) -> None:
        """Marks a line of the file; None for no line."""
        lines = self.editor.value.count("\n") + 1
        if line is not None and 1 <= line <= lines:
            self.editor.decorations = [{"kind": "line", "line": line, "class": "ab-marked-line"}]
            self.editor.reveal_line(line)
        elif self.editor.decorations:
            self.editor.decorations = []

    def _ask_to_reset(self) -> None:
        def reset() -> None:
            dialog.close()
            self._reset()

        with ui.dialog(value=True) as dialog, ui.card().classes("ab-dialog"):
            ui.html("Start over?", sanitize=False, tag="h2")
            ui.label("The original file is put back. Yours is kept under another name in the same folder.")
            with ui.element("div").classes("ab-actions"):
                button("Put the original back", reset, kind="primary")
                button("Keep my file", dialog.close)
        dialog.on("hide", dialog.delete)

    def _reset(self) -> None:
        self.save()
        kept = self._draft.reset()
        self._conflict.set_visibility(False)
        self._take()
        self._say(f"The original. Yours is kept as {kept}." if kept else "This is the original.")
        self._workspace.solved.emit()


def _result_section(draft: Draft, editor: _Editor) -> None:
    section = ui.element("section").classes("ab-results").props('aria-live="polite" aria-label="Results"')

    def update() -> None:
        section.clear()
        with section:
            results.show(draft.checked)
        checked = draft.checked
        is_current = checked is not None and checked.source == editor.editor.value
        editor.mark(checked.verdict.line if is_current and checked and checked.verdict else None)

    draft.progressed.subscribe(update)
    update()


def _hints(workspace: Workspace, exercise: Exercise) -> None:
    progress, total = workspace.progress, len(exercise.hints)
    with ui.element("section").classes("ab-hints").props('aria-label="Hints"'):

        @ui.refreshable
        def shown() -> None:
            seen = progress.hints_seen(exercise)
            for level in range(1, seen + 1):
                with ui.expansion(f"Hint {level} of {total}", value=level == seen).classes("ab-evidence"):
                    markdown(exercise.hints[level - 1])
            if seen < total:
                words = "Show a hint" if seen == 0 else "Show the next hint"
                button(f"{words} ({seen} of {total} seen)", lambda: see(seen + 1), icon="lightbulb")

        def see(level: int) -> None:
            progress.see_hint(exercise, level)
            shown.refresh()

        shown()
        workspace.solved.subscribe(shown.refresh)


def _solution(workspace: Workspace, draft: Draft) -> None:
    """What is shown once the exercise is solved."""
    exercise = draft.exercise

    @ui.refreshable
    def shown() -> None:
        if exercise.name not in workspace.progress.solved:
            return
        with ui.element("section").classes("ab-solution").props('aria-label="The solution"'):
            ui.html("Solved", sanitize=False, tag="h2")
            ui.html("Why this is right", sanitize=False, tag="h3")
            markdown(exercise.why)
            with ui.element("div").classes("ab-side-by-side"):
                for title, source in (("Yours", draft.text), ("A solution", exercise.solution)):
                    with ui.element("div"):
                        ui.html(title, sanitize=False, tag="h3")
                        code(source)
            if exercise.other_ways_page:
                ui.html("Other ways", sanitize=False, tag="h3")
                markdown(exercise.other_ways_page)
            if exercise.one_line:
                ui.html("Now with anybatch", sanitize=False, tag="h3")
                code(exercise.one_line)

    shown()
    workspace.solved.subscribe(shown.refresh)


def _ways_on(workspace: Workspace, exercise: Exercise) -> None:
    before, after = workspace.course.before(exercise), workspace.course.after(exercise)
    with ui.element("nav").classes("ab-ways-on").props('aria-label="Other exercises"'):
        if before is not None:
            ui.link(f"← {before.number}. {before.title}", address(before))
        if after is not None:
            ui.link(f"Next: {after.number}. {after.title} →", address(after)).classes("ab-next")
        else:
            ui.link("All exercises →", "/").classes("ab-next")
