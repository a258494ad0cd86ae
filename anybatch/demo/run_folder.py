"""The folder of a run: which files it has, whether a run can continue there, and which files may be deleted.

checkpoints/        the checkpoints of `anybatch.fit`
log.csv             the log of `anybatch.fit`
settings.json       the options of the run, and a hash of its text
vocabulary.json     the characters that the model knows
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import re
import tempfile
from typing import Any

from anybatch.call.files import read_regular, write_atomically
from anybatch.demo.config import RunConfig, as_toml
from anybatch.demo.text import Vocabulary
from anybatch.errors import InputError
from anybatch.report.page import check_path
from anybatch.training.checkpoint_folder import CheckpointFolder

# Options that define the model. A saved model cannot continue if one of them has changed.
OF_THE_MODEL = ("level", "layers", "heads", "width", "context", "dtype")

# Options that do not change what the model learns. `text` is here because the text is compared by its hash: its file
# may have moved.
WITHOUT_EFFECT = {"text", "out", "report", "evaluate_every", "checkpoint_every"}
WITHOUT_EFFECT |= {"verify", "prompt", "sample", "temperature"}

# The largest file to read back. A vocabulary of all Unicode characters is smaller.
MOST_BYTES = 2**26

# The files that a run writes into its folder, besides its checkpoints.
OWN_FILES = ("log.csv", "vocabulary.json", "settings.json")

# Names that `CheckpointFolder` gives to unfinished or deleted checkpoints.
_LEFTOVER = re.compile(r"\d+\.(replaced|removed|orbax-checkpoint-tmp.*)")


class RunFolder:
    """The folder of a run. Creating this object checks that a run can start or continue there.

    **Nothing is lost.** Creating it deletes nothing, and writes nothing but the empty folder. `begin` deletes only the
    files of an earlier demo.

    Args:
      config: the options of the run.
      text: the text it learns.
      vocabulary: of the text.
      name: of the text, for messages.
      resume: True to continue a run that is in the folder.
      is_demo: True for `anybatch demo`, which replaces an earlier demo if that is complete or `resume` is False.

    Raises:
      InputError: if the folder is not writable, or has other files in it.
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
        self.path = expand_user(config.out)
        self._checkpoints = CheckpointFolder(self.path / "checkpoints")
        self._kind = "demo" if is_demo else "train"
        self._text_hash = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
        self._check_writable()
        self._stored = _read_object(self.path / "settings.json")
        saved = self.steps_on_disk()
        self.is_replaced = is_demo and saved is not None and (not resume or saved >= config.steps)
        self.continues = saved is not None and not self.is_replaced
        if saved is None:
            self._check_no_other_files()
        elif is_demo and self._stored.get("run") != "demo":
            raise InputError(
                "The demo needs a folder without another run",
                given=f"{self.path}, with a run of {saved} steps that is not a demo",
                remedy="Name another folder, e.g. --out anybatch-demo-2",
            )
        elif self.is_replaced:
            self._check_checkpoints_only()
        elif not resume:
            raise InputError(
                "A new run needs a folder without a run",
                given=f"{self.path}, with a run of {saved} steps",
                remedy=f"Leave out --no-resume to continue that run. Or name another folder; or: rm -r '{self.path}'",
            )
        else:
            self._check_same_run()

    def steps_on_disk(self) -> int | None:
        """The step of the newest checkpoint in the folder, or None."""
        return max(self._checkpoints.steps(), default=None)

    def steps_saved(self) -> int | None:
        """The step of the newest checkpoint of this run, or None. A run that will be replaced does not count."""
        return None if self.is_replaced else self.steps_on_disk()

    def changes(self) -> list[str]:
        """For a run that continues: a sentence for each option that has changed since it was saved."""
        if not self.continues:
            return []
        now = dataclasses.asdict(self.config)
        return [
            f"It continues with {name} = {as_toml(now[name])}, was {as_toml(self._stored[name])}."
            for name in now
            if name not in WITHOUT_EFFECT and name in self._stored and self._stored[name] != now[name]
        ]

    def begin(self) -> None:
        """Deletes the demo that this run replaces, and writes the options of a new run. Call it right before training.

        Raises:
          InputError: if another process is writing checkpoints there; its options must not be overwritten.
        """
        if self.is_replaced:
            self._clear()
        if not self.continues:
            self._checkpoints.open()
            try:
                self.write_settings()
            finally:
                self._checkpoints.close()

    def write_settings(self) -> None:
        """Writes `vocabulary.json`, without which the parameters cannot be used, and `settings.json`."""
        vocabulary = {"level": self.config.level, "characters": self.vocabulary.characters}
        settings = {"run": self._kind, "text_sha256": self._text_hash, **dataclasses.asdict(self.config)}
        for name, content in (("vocabulary", json.dumps(vocabulary)), ("settings", json.dumps(settings, indent=2))):
            must = "The folder of a run must be writable"
            write_atomically(
                self.path / f"{name}.json", f"{content}\n".encode(), must=must, given=f"out = {str(self.path)!r}"
            )

    def _check_writable(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise InputError(
                "The folder of a run must be writable",
                given=f"out = {str(self.path)!r} ({error.strerror})",
                remedy='Name another folder, e.g. out = "runs/first".',
            ) from None

    def _check_no_other_files(self) -> None:
        """Without a checkpoint there is no run to continue, and a new one would overwrite files with the same names."""
        is_ours = self._stored.get("run") in ("demo", "train") and "text_sha256" in self._stored
        names = ["log.csv"] if is_ours else ["log.csv", "settings.json", "vocabulary.json"]
        found = [name for name in names if (self.path / name).exists()]
        found += [f"checkpoints/{name}" for name in self._other_files()]
        if found:
            raise InputError(
                "The folder of a run must be new, or have a run in it",
                given=f"{self.path} with {', '.join(found[:3])}, and without a checkpoint",
                remedy='Name another folder, e.g. out = "runs/first", or move these files.',
            )

    def _check_checkpoints_only(self) -> None:
        found = self._other_files()
        if found:
            raise InputError(
                "To start again, the demo's folder of checkpoints must have nothing else in it",
                given=f"{self._checkpoints.path} with {', '.join(found[:3])}",
                remedy="Move these files, or name another folder, e.g. --out anybatch-demo-2",
            )

    def _other_files(self) -> list[str]:
        """The names in the folder of checkpoints that are not checkpoints."""
        folder = self._checkpoints.path
        if not folder.exists():
            return []
        if not folder.is_dir():
            return ["(a file)"]
        steps = {str(step) for step in self._checkpoints.steps()}
        names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
        return [name for name in names if name not in steps and not _LEFTOVER.fullmatch(name)]

    def _check_same_run(self) -> None:
        """Raises unless the run in the folder has the same model and the same text."""
        now, before = dataclasses.asdict(self.config), self._stored
        ways_out = f"or use another folder, e.g. out = \"runs/second\"; or start again: rm -r '{self.path}'"
        for name in (*OF_THE_MODEL, "dropout"):
            same = now[name] == before.get(name, now[name])
            if name == "dropout" and name in before:
                same = bool(now[name]) == bool(before[name])  # a run without dropout has saved no PRNG key
            if not same:
                raise InputError(
                    "A run that continues must have the same model as before",
                    given=f"{name} = {as_toml(now[name])}, and {name} = {as_toml(before[name])} in {self.path}",
                    remedy=f"Continue with {name} = {as_toml(before[name])}, {ways_out}",
                )
        stored = _stored_vocabulary(self.path / "vocabulary.json")
        if before.get("text_sha256", self._text_hash) != self._text_hash or stored not in (None, self.vocabulary):
            is_other = stored not in (None, self.vocabulary)
            sizes = f" of {self.vocabulary.size} tokens, and one of {stored.size}" if stored and is_other else ""
            named = f" (text = {as_toml(before['text'])})" if before.get("text") else ""
            raise InputError(
                "A run that continues must have the same text as before",
                given=f"{self.name}{sizes or ', and another text'} in {self.path}",
                remedy=f"Name the text of that run{named}, {ways_out}",
            )

    def _clear(self) -> None:
        """Deletes the files that an earlier demo wrote, and no others. Raises while another process writes there."""
        self._checkpoints.open()
        try:
            self._checkpoints.tidy(keep=1)
            self._checkpoints.remove(self._checkpoints.steps())
            for name in OWN_FILES:
                (self.path / name).unlink(missing_ok=True)
        finally:
            self._checkpoints.close()
        self.is_replaced = False


def expand_user(path: str) -> pathlib.Path:
    """A path with `~` replaced by the home folder. `~name` stays as it is if there is no such user."""
    return pathlib.Path(os.path.expanduser(path))


def check_report(path: pathlib.Path, folder: pathlib.Path, text: str) -> None:
    """Raises unless the report can be written without overwriting another file.

    Args:
      path: of the report.
      folder: of the run.
      text: the path of the text; empty for the text that comes with anybatch.

    Raises:
      InputError: if the path is the text, a file of the run, in a folder that does not exist, or another file.
    """
    report, home = _comparable(path), _comparable(folder)
    is_text = bool(text) and report == _comparable(expand_user(text))
    if is_text or report in {home / name for name in OWN_FILES} or report.is_relative_to(home / "checkpoints"):
        raise InputError(
            "The report must not overwrite the text or a file of the run",
            given=f"report = {str(path)!r}, which {'is the text' if is_text else 'the run itself writes'}",
            remedy='For example: report = "anybatch-report.html"',
        )
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise InputError(
            "The report must be a file in a folder that exists and is writable",
            given=f"report = {str(path)!r}",
            remedy=f'For example report = "anybatch-report.html", or first: mkdir -p "{path.parent}"',
        )
    check_path(path, given=f"report = {str(path)!r}")


def _comparable(path: pathlib.Path) -> pathlib.Path:
    """A path with links followed and in lower case, since some file systems ignore case."""
    return pathlib.Path(os.path.realpath(path).casefold())


def _read_object(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file cannot be read or has something else in it."""
    try:
        found = json.loads(read_regular(path, MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _stored_vocabulary(path: pathlib.Path) -> Vocabulary | None:
    found = _read_object(path).get("characters", 0)
    return Vocabulary(found) if found is None or isinstance(found, str) else None
