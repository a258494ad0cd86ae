"""The folder of a run: what the run was told, whether one may go on there, and what may be cleared away."""

import dataclasses
import hashlib
import json
import os
import pathlib
import re
import tempfile
from typing import Any

from anybatch.errors import InputError
from anybatch.files import read_regular, write_whole
from anybatch.language.config import RunConfig, written
from anybatch.language.text import Vocabulary
from anybatch.report.page import check_path
from anybatch.training.checkpoint_folder import CheckpointFolder

# With another one of these, what was saved is not of this model.
OF_THE_MODEL = ("level", "layers", "heads", "width", "context", "dtype")

# These do not change what is learned. Another text does, and is told by its sum: its file may have moved.
WITHOUT_EFFECT = {"text", "out", "report", "evaluate_every", "checkpoint_every"}
WITHOUT_EFFECT |= {"verify", "prompt", "sample", "temperature"}

# Of a file that a run wrote, such as a vocabulary of all characters there are.
MOST_BYTES = 2**26

# What a run writes into its folder, beside its checkpoints.
OWN_FILES = ("log.csv", "vocabulary.json", "settings.json")

# In a folder of checkpoints, beside those that are complete and what is hidden.
_LEFTOVER = re.compile(r"\d+\.(replaced|removed|orbax-checkpoint-tmp.*)")


class RunFolder:
    """The folder of a run, checked: it can be written, and what is in it is of the same run, or nothing.

    **Nothing is lost.** To be made, it writes and deletes nothing. What `begin` clears away is a demonstration's.

    Args:
      config: what the run was told.
      text: that it learns.
      vocabulary: of the text.
      name: of the text, for messages.
      resume: whether to go on with a run that is there.
      is_demo: whether it is the demonstration, which replaces one that came to its end, or is not to be gone on with.

    Raises:
      InputError: if the folder cannot be written, or has something else in it.
    """

    def __init__(
        self,
        config: RunConfig,
        text: str,
        vocabulary: Vocabulary,
        *,
        name: str,
        resume: bool = True,
        is_demo: bool = False,
    ) -> None:
        self.config, self.vocabulary, self.name = config, vocabulary, name
        self.path = expanded(config.out)
        self._checkpoints = CheckpointFolder(self.path / "checkpoints")
        self._kind = "demo" if is_demo else "train"
        self._sum = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
        self._check_writable()
        self._stored = _read_object(self.path / "settings.json")
        saved = self.steps_on_disk()
        self.is_replaced = is_demo and saved is not None and (not resume or saved >= config.steps)
        self.goes_on = saved is not None and not self.is_replaced
        if saved is None:
            self._check_nothing_else()
        elif is_demo and self._stored.get("run") != "demo":
            raise InputError(
                "The demo must have a folder of its own",
                given=f"{self.path}, with a run of {saved} steps that is not the demo's",
                remedy="Name another one, e.g. --out anybatch-demo-2",
            )
        elif self.is_replaced:
            self._check_checkpoints_only()
        elif not resume:
            raise InputError(
                "A run that begins anew needs a folder without one",
                given=f"{self.path}, with a run of {saved} steps",
                remedy=f"Leave --no-resume out to go on with it. Or name another folder; or: rm -r '{self.path}'",
            )
        else:
            self._check_same()

    def steps_on_disk(self) -> int | None:
        """The newest step that is saved there, if any."""
        return max(self._checkpoints.steps(), default=None)

    def steps_saved(self) -> int | None:
        """The newest step of this run that is saved, if any."""
        return None if self.is_replaced else self.steps_on_disk()

    def changes(self) -> list[str]:
        """What a run that goes on was told otherwise before."""
        if not self.goes_on:
            return []
        now = dataclasses.asdict(self.config)
        return [
            f"It goes on with {name} = {written(now[name])}, was {written(self._stored[name])}."
            for name in now
            if name not in WITHOUT_EFFECT and name in self._stored and self._stored[name] != now[name]
        ]

    def begin(self) -> None:
        """Right before a run: clears away the demonstration that it replaces, and writes what a new one was told.

        Raises:
          InputError: if another process is at it: what that one was told is not to be replaced.
        """
        if self.is_replaced:
            self._clear()
        if not self.goes_on:
            self._checkpoints.open()
            try:
                self.write_settings()
            finally:
                self._checkpoints.close()

    def write_settings(self) -> None:
        """The vocabulary, without which the parameters would mean nothing, and what the run was told."""
        vocabulary = {"level": self.config.level, "characters": self.vocabulary.characters}
        settings = {"run": self._kind, "text_sha256": self._sum, **dataclasses.asdict(self.config)}
        for name, content in (("vocabulary", json.dumps(vocabulary)), ("settings", json.dumps(settings, indent=2))):
            must = "The folder of a run must be one that can be written"
            write_whole(
                self.path / f"{name}.json", f"{content}\n".encode(), must=must, given=f"out = {str(self.path)!r}"
            )

    def _check_writable(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise InputError(
                "The folder of a run must be one that can be written",
                given=f"out = {str(self.path)!r} ({error.strerror})",
                remedy='Name another one, e.g. out = "runs/first".',
            ) from None

    def _check_nothing_else(self) -> None:
        """Without a checkpoint there is no run to go on with: what has the names of one's files is not to be lost."""
        is_ours = self._stored.get("run") in ("demo", "train") and "text_sha256" in self._stored
        names = ["log.csv"] if is_ours else ["log.csv", "settings.json", "vocabulary.json"]
        found = [name for name in names if (self.path / name).exists()]
        found += [f"checkpoints/{name}" for name in self._foreign()]
        if found:
            raise InputError(
                "The folder of a run must be new, or one of a run",
                given=f"{self.path} with {', '.join(found[:3])}, and without a checkpoint",
                remedy='Name another one, e.g. out = "runs/first", or move what is there.',
            )

    def _check_checkpoints_only(self) -> None:
        found = self._foreign()
        if found:
            raise InputError(
                "To begin anew, the demo must find nothing but checkpoints among its own",
                given=f"{self._checkpoints.path} with {', '.join(found[:3])}",
                remedy="Move that, or name another folder, e.g. --out anybatch-demo-2",
            )

    def _foreign(self) -> list[str]:
        """What lies among the checkpoints and is none."""
        folder = self._checkpoints.path
        if not folder.exists():
            return []
        if not folder.is_dir():
            return ["(a file)"]
        own = {str(step) for step in self._checkpoints.steps()}
        names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
        return [name for name in names if name not in own and not _LEFTOVER.fullmatch(name)]

    def _check_same(self) -> None:
        """Whether what is there is a run of the same model, on the same text."""
        now, before = dataclasses.asdict(self.config), self._stored
        ways_out = f"or take another folder, e.g. out = \"runs/second\"; or begin anew: rm -r '{self.path}'"
        for name in (*OF_THE_MODEL, "dropout"):
            same = now[name] == before.get(name, now[name])
            if name == "dropout" and name in before:
                same = bool(now[name]) == bool(before[name])  # without it, a run has no key to go on with
            if not same:
                raise InputError(
                    "A run that goes on must have the model it had before",
                    given=f"{name} = {written(now[name])}, and {name} = {written(before[name])} in {self.path}",
                    remedy=f"Go on with {name} = {written(before[name])}, {ways_out}",
                )
        stored = _stored_vocabulary(self.path / "vocabulary.json")
        if before.get("text_sha256", self._sum) != self._sum or stored not in (None, self.vocabulary):
            is_other = stored not in (None, self.vocabulary)
            sizes = f" of {self.vocabulary.size} tokens, and one of {stored.size}" if stored and is_other else ""
            raise InputError(
                "A run that goes on must have the text it had before",
                given=f"{self.name}{sizes or ', and another text'} in {self.path}",
                remedy=f"Name the text of that run{_named(before.get('text'))}, {ways_out}",
            )

    def _clear(self) -> None:
        """Removes an earlier demonstration: what the job wrote, and nothing else; not while another process writes."""
        self._checkpoints.open()
        try:
            self._checkpoints.tidy(keep=1)
            self._checkpoints.remove(self._checkpoints.steps())
            for name in OWN_FILES:
                (self.path / name).unlink(missing_ok=True)
        finally:
            self._checkpoints.close()
        self.is_replaced = False


def expanded(path: str) -> pathlib.Path:
    """A path whose ~ is the user's folder; where nobody knows of such a user, it stays."""
    return pathlib.Path(os.path.expanduser(path))


def check_report(path: pathlib.Path, folder: pathlib.Path, text: str) -> None:
    """Whether a report can be written, and takes the place of nothing else.

    Args:
      path: of the report.
      folder: of the run.
      text: the path of what is learned; empty for what comes with anybatch.

    Raises:
      InputError: if it cannot.
    """
    report, home = _folded(path), _folded(folder)
    is_text = bool(text) and report == _folded(expanded(text))
    if is_text or report in {home / name for name in OWN_FILES} or report.is_relative_to(home / "checkpoints"):
        raise InputError(
            "The report must be a file of its own",
            given=f"report = {str(path)!r}, which {'is the text' if is_text else 'the run writes itself'}",
            remedy='For example: report = "anybatch-report.html"',
        )
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise InputError(
            "The report must be a file in a folder that is there and can be written",
            given=f"report = {str(path)!r}",
            remedy=f'For example report = "anybatch-report.html", or first: mkdir -p "{path.parent}"',
        )
    check_path(path, given=f"report = {str(path)!r}")


def _folded(path: pathlib.Path) -> pathlib.Path:
    """A path to compare with others: links followed, and without case, which some file systems do not tell."""
    return pathlib.Path(os.path.realpath(path).casefold())


def _named(text: Any) -> str:
    return f" (text = {written(text)})" if text else ""


def _read_object(path: pathlib.Path) -> dict[str, Any]:
    """What a file of JSON has, by its names; nothing if it cannot be read."""
    try:
        found = json.loads(read_regular(path, MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _stored_vocabulary(path: pathlib.Path) -> Vocabulary | None:
    found = _read_object(path).get("characters", 0)
    return Vocabulary(found) if found is None or isinstance(found, str) else None
