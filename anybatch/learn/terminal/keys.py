"""Keys that are pressed, and files that are saved.

**The terminal is left as it was found**, whatever ends it: a key, Ctrl-C, SIGTERM, an exception; and while it is
stopped by Ctrl-Z.
"""

import contextlib
import os
import pathlib
import re
import signal
import termios
import time
import tty
from collections.abc import Callable
from typing import Any

from anybatch.learn.progress import hash_of, read_source

_SETTLE = 0.01  # seconds after which a file that is being written looks different again
_GONE = 1.0  # seconds for which a file may be missing, or empty, while it is being saved
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|O.|[^\[O])?")


class Keyboard:
    """The keys that are pressed, one by one and not shown.

    Args:
      file: the descriptor of a terminal.
      on_return: what to do when the program goes on after it was stopped.
    """

    def __init__(self, file: int, on_return: Callable[[], None] = lambda: None) -> None:
        self.file, self.on_return = file, on_return
        self._before: Any = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "Keyboard":
        self._before = termios.tcgetattr(self.file)
        for number in (signal.SIGTERM, signal.SIGHUP):
            self._handlers[number] = signal.signal(number, self._end)
        self._handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._stop)
        tty.setcbreak(self.file)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def read(self) -> str | None:
        """The keys that were pressed; None if there will be no more."""
        try:
            data = os.read(self.file, 1024)
        except OSError:
            return None
        return _ESCAPES.sub("", data.decode("utf-8", "ignore")).lower() if data else None

    def _restore(self) -> None:
        with contextlib.suppress(termios.error):  # a terminal that is gone needs nothing
            termios.tcsetattr(self.file, termios.TCSANOW, self._before)

    def _end(self, number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    def _stop(self, number: int, _: Any) -> None:
        self._restore()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        # Here it goes on, some time later.
        signal.signal(signal.SIGTSTP, self._stop)
        tty.setcbreak(self.file)
        self.on_return()


class Saves:
    """Notices when a file has other contents.

    An editor may write it in parts, or write another and rename it: a file that is gone for a moment, empty, or still
    growing is not looked at. A save that changes nothing is none.

    Args:
      path: of the file.
      read: what reads it; it raises InputError if there is no text.
    """

    def __init__(self, path: pathlib.Path, read: Callable[[], str] | None = None) -> None:
        self.path, self._read = path, read or (lambda: read_source(path))
        self._seen: tuple[int, ...] | None = None
        self._hash = ""
        self._gone_since: float | None = None

    @property
    def is_gone(self) -> bool:
        """Whether the file has been missing for longer than a save takes."""
        return self._is_overdue and self._about() is None

    @property
    def _is_overdue(self) -> bool:
        return self._gone_since is not None and time.monotonic() - self._gone_since > _GONE

    def look(self) -> str | None:
        """The contents, if they are others than at the last look.

        Raises:
          InputError: if they changed, and are no text.
        """
        about = self._about()
        if not about or not about[0]:
            self._gone_since = self._gone_since or time.monotonic()
            if not about or not self._is_overdue:
                return None
        else:
            self._gone_since = None
        if about == self._seen:
            return None
        time.sleep(_SETTLE)
        if self._about() != about:
            return None
        self._seen = about
        source = self._read()
        if hash_of(source) == self._hash:
            return None
        self._hash = hash_of(source)
        return source

    def _about(self) -> tuple[int, ...] | None:
        try:
            about = os.stat(self.path)
        except OSError:
            return None
        return about.st_size, about.st_mtime_ns, about.st_ino, about.st_mode
