"""What was measured, kept on disk: the second run plans in milliseconds.

A record is advice. It is found by the program, the shapes, the device and the versions; one that cannot be read, or is
of another kind, is as good as none. Where the cache lies is up to `ANYBATCH_CACHE`: a folder, or "off".
"""

import contextlib
import hashlib
import json
import os
import pathlib
import tempfile
from typing import Any

SCHEMA = 1
OFF = ("", "0", "off", "no", "false", "none")


def folder() -> pathlib.Path | None:
    """Where records are kept, or None if they are not to be kept."""
    chosen = os.environ.get("ANYBATCH_CACHE")
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        if chosen is not None:
            return None if chosen.strip().lower() in OFF else pathlib.Path(chosen).expanduser()
        return (pathlib.Path(base) if base else pathlib.Path.home() / ".cache") / "anybatch"
    except RuntimeError:  # nobody's home
        return None


def key_of(*parts: Any) -> str:
    """A name for a record, the same in every process for the same parts."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def load(key: str) -> dict[str, Any]:
    """The record with that key; an empty one if there is none that can be used."""
    where = folder()
    if where is None:
        return {}
    try:
        record = json.loads((where / f"{key}.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    usable = isinstance(record, dict) and record.get("schema") == SCHEMA and record.get("key") == key
    return record if usable else {}


def save(key: str, record: dict[str, Any]) -> None:
    """Keeps a record, or does not: a full or read-only disk is no reason to stop."""
    where = folder()
    if where is None:
        return
    with contextlib.suppress(OSError):
        where.mkdir(parents=True, exist_ok=True)
        # Written beside and moved: another process sees the old record or the new one, never a part.
        handle, name = tempfile.mkstemp(dir=where, suffix=".part")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump({"schema": SCHEMA, "key": key} | record, file)
            os.replace(name, where / f"{key}.json")
        except OSError:
            os.unlink(name)


def forget(key: str) -> None:
    """Removes a record."""
    where = folder()
    if where is not None:
        with contextlib.suppress(OSError):
            (where / f"{key}.json").unlink()
