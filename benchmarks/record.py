"""Saves the rows that a benchmark found, as JSON with its command, device and versions.

`make bench-report` turns them into the tables and plots of the documentation.
"""

import argparse
import importlib.metadata
import json
import pathlib
import platform
import sys
from typing import Any


def add_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--save FILE` to the options of a benchmark."""
    parser.add_argument("--save", metavar="FILE", help="write the results to this file, as JSON")


class Results:
    """The rows of one run. The file is written anew with every row, so that a run that is stopped keeps what it found.

    Args:
      path: the file; None writes nothing.
      device: the name of the device; by default that of JAX's first device.
      packages: the distributions whose versions are recorded, beside JAX's; those that are missing are left out.
    """

    def __init__(self, path: str | None, *, device: str | None = None, packages: tuple[str, ...] = ()) -> None:
        self.path = None if path is None else pathlib.Path(path)
        self.rows: list[dict[str, Any]] = []
        if device is None:
            import jax

            device = jax.devices()[0].device_kind
        versions = {"python": platform.python_version()}
        for package in ("anybatch", "jax", "jaxlib", *packages):
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        script = f"benchmarks/{pathlib.Path(sys.argv[0]).name}"
        self._head = {"command": " ".join(["python", script, *_shown(sys.argv[1:])]), "device": device}
        self._head["versions"] = versions

    def add(self, **row: Any) -> None:
        """Adds a row: names and numbers, texts, booleans or None."""
        self.rows.append(row)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps({**self._head, "rows": self.rows}, indent=1) + "\n")


def _shown(arguments: list[str]) -> list[str]:
    """The arguments without `--save`, which says where and not what."""
    position = arguments.index("--save") if "--save" in arguments else len(arguments)
    kept = arguments[:position] + arguments[position + 2 :]
    return [argument for argument in kept if not argument.startswith("--save=")]
