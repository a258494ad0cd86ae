"""What all browser tabs share: the learner's files, the running checks, and their verdicts.

**No work is lost.** What is typed is written to the learner's file. A tab that did not know the newest contents of the
file may not overwrite them: `Draft.save` refuses, and the page asks the learner. Files that change on disk, because the
learner edits them with another program, are noticed.

**A check never blocks a page.** Checks run on a thread, one after the other. JAX is imported there, too.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

from nicegui import Event

from anybatch.errors import InputError
from anybatch.learn.catalogue import Course, Exercise
from anybatch.learn.check import Verdict
from anybatch.learn.learner_progress import Progress, Saves, hash_of

LOOK_EVERY = 0.2  # seconds between two looks at the files
JUST_NOW = 3.0  # seconds in which a tab may not have shown yet what another one wrote


@dataclasses.dataclass
class Checked:
    """The last check of an exercise, running or done.

    Args:
      source: the text that is checked.
      stages: the stages that have passed so far, each with what it found.
      verdict: the verdict; None while the check is running.
      failure: why there is no verdict, if the check itself failed; else "".
      full_batch: the bytes that the full batch takes, for each batch size of the memory check; () if not known.
    """

    source: str
    stages: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    verdict: Verdict | None = None
    failure: str = ""
    full_batch: tuple[int, ...] = ()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self.verdict is None and not self.failure


class Draft:
    """The learner's file for one exercise, as the tabs see it.

    Args:
      workspace: what it belongs to.
      exercise: the exercise.
    """

    def __init__(self, workspace: "Workspace", exercise: Exercise) -> None:
        self._workspace, self.exercise = workspace, exercise
        self.text, self.problem = "", ""
        self._writer, self._when = "", 0.0
        self.kept = ""  # the name of the last text that was kept aside
        self.checked: Checked | None = None
        self.changed = Event[[str]]()  # the file has other contents; by whom
        self.progressed = Event[[]]()  # a check has begun, passed a stage, or ended
        progress = workspace.progress
        progress.prepare()
        progress.place(exercise)
        self._saves = Saves(progress.path(exercise), lambda: progress.read(exercise))
        self.look()
        self._writer = ""  # what was there before is nobody's news

    @property
    def version(self) -> str:
        """Changes with the contents of the file."""
        return hash_of(self.text)

    def look(self) -> bool:
        """Reads the file if it has changed on disk. Returns whether its contents are other ones."""
        try:
            found = self._saves.look()
        except InputError as error:
            is_new, self.problem = self.problem != str(error), str(error)
            return is_new
        if self._saves.is_gone:
            path = self._workspace.progress.path(self.exercise)
            is_new, self.problem = not self.problem, f"{path} is gone. Type something, or reset it, to write it again."
            return is_new
        if found is None or (found == self.text and not self.problem):
            return False
        self.text, self.problem = found, ""
        self._writer, self._when = "disk", time.monotonic()
        return True

    def save(self, text: str, based_on: str, by: str) -> bool:
        """Writes the file, and tells the other tabs.

        What somebody else wrote just now is kept aside: the browser may have sent this text before it showed that one.

        Args:
          text: the new contents.
          based_on: the version that was edited.
          by: the tab that saves.

        Returns:
          False if the file has changed in the meantime. It is then left as it is.

        Raises:
          InputError: if it cannot be written.
        """
        self._notice("")
        if text == self.text:
            return True
        if based_on != self.version:
            return False
        if self._writer not in ("", by) and time.monotonic() - self._when < JUST_NOW:
            self.keep_aside(self.text)
        self._workspace.progress.write(self.exercise, text)
        self.text, self.problem = text, ""
        self._writer, self._when = by, time.monotonic()
        with contextlib.suppress(InputError):
            self._saves.look()  # this change is known
        self.changed.emit(by)
        return True

    def _notice(self, by: str) -> None:
        if self.look():
            self.changed.emit(by)

    def keep_aside(self, text: str) -> str:
        """Writes a text beside the file, under a new name, which is returned."""
        self.kept = self._workspace.progress.keep_aside(self.exercise, text).name
        return self.kept

    def reset(self) -> str:
        """Puts the original back. Returns the name that the learner's file now has; "" if it was the original."""
        kept = self._workspace.progress.reset(self.exercise)
        self.checked, self._writer = None, ""
        self._notice("")
        self.progressed.emit()
        return kept.name if kept else ""

    def check(self) -> None:
        """Begins a check of the file as it is. A check of this file that is still waiting is dropped."""
        self._workspace.begin(self)


class Workspace:
    """The learner's files and checks.

    Args:
      progress: the learner's progress and files.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.solved = Event[[]]()  # something was solved, or reset
        self._drafts: dict[str, Draft] = {}
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "anybatch-check")
        self._waiting: dict[str, concurrent.futures.Future[None]] = {}
        self._runner: Any = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def course(self) -> Course:
        """The course."""
        return self.progress.course

    def draft(self, exercise: Exercise) -> Draft:
        """The learner's file for an exercise. The starter is copied into the folder if there is none."""
        if exercise.name not in self._drafts:
            self._drafts[exercise.name] = Draft(self, exercise)
        return self._drafts[exercise.name]

    # While the server runs.

    def start(self) -> None:
        """Begins to look at the files, and to import JAX. Called on the event loop."""
        self._watching = asyncio.get_running_loop().create_task(self._watch())
        self._pool.submit(self._prepare, None)

    def close(self) -> None:
        """Ends everything; a running check ends with its process."""
        if self._watching is not None:
            self._watching.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._runner is not None:
            self._runner.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY)
            for draft in list(self._drafts.values()):
                if draft.look():
                    draft.changed.emit("disk")

    # Checks.

    def prepare(self, exercise: Exercise) -> None:
        """Keeps processes ready for the checks of an exercise."""
        self._pool.submit(self._prepare, exercise)

    def begin(self, draft: Draft) -> None:
        """Begins a check of a draft; see `Draft.check`."""
        name, loop = draft.exercise.name, asyncio.get_running_loop()
        checked = draft.checked = Checked(draft.text)

        def tell(change: Callable[[], None]) -> None:
            def on_loop() -> None:
                change()
                if draft.checked is checked:
                    draft.progressed.emit()

            with contextlib.suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(on_loop)

        def passed(stage: str, seen: str) -> None:
            tell(lambda: checked.stages.append((stage, seen)))

        def run() -> None:
            try:
                verdict = self._grade(draft.exercise, checked.source, passed)
                tell(lambda: self._found(draft, checked, verdict))
                full_batch = self._full_batch(draft.exercise, verdict)
                if full_batch:
                    tell(lambda: setattr(checked, "full_batch", full_batch))
            except Exception as error:  # the learner should know, and go on
                about = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
                tell(lambda: setattr(checked, "failure", about))

        if name in self._waiting:
            self._waiting[name].cancel()
        self._waiting[name] = self._pool.submit(run)
        draft.progressed.emit()

    def _found(self, draft: Draft, checked: Checked, verdict: Verdict) -> None:
        checked.verdict = verdict
        if verdict.passed:
            self.progress.solve(draft.exercise, checked.source, verdict.seconds)
            self.solved.emit()

    # On the thread of the checks.

    def _prepare(self, exercise: Exercise | None) -> None:
        import jax

        import anybatch.call.plots  # noqa: F401 - the pictures need it, and a page should not wait for it
        from anybatch.learn.grading import devices_of
        from anybatch.learn.runner.submissions import Runner

        # A course's references may use JAX in this process, and checks run on the CPU.
        jax.config.update("jax_platforms", "cpu")
        if self._runner is None:
            self._runner = Runner(hidden=[self.course.folder])
        self._runner.keep_warm((1,) if exercise is None else devices_of(exercise))

    def _grade(self, exercise: Exercise, source: str, passed: Callable[[str, str], None]) -> Verdict:
        self._prepare(exercise)
        from anybatch.learn.grading import grade

        path = str(self.progress.path(exercise))
        return grade(exercise, source, self._runner, path=path, on_stage=passed)

    def _full_batch(self, exercise: Exercise, verdict: Verdict) -> tuple[int, ...]:
        """What the full batch takes, measured after the verdict, so that nobody waits for it."""
        if verdict.evidence.memory is None:
            return ()
        from anybatch.learn.grading import full_batch_costs

        return full_batch_costs(exercise, self._runner)
