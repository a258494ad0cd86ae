"""A terminal for the tests of `anybatch learn`: sends keys, and reads what is shown."""

import codecs
import contextlib
import fcntl
import os
import pathlib
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

# Makes it the controlling terminal, so that Ctrl-C and Ctrl-Z send signals.
_BEGIN = """
import os, sys
os.close(os.open(os.ttyname(0), os.O_RDWR))
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Terminal:
    """A program in a new terminal."""

    def __init__(self, *arguments, columns=100, **environment):
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.before = termios.tcgetattr(self.slave)
        variables = os.environ | {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"} | environment
        for name in ("NO_COLOR", "COLUMNS"):
            variables.pop(name, None) if name not in environment else None
        files = dict.fromkeys(("stdin", "stdout", "stderr"), self.slave)
        command = [sys.executable, "-c", _BEGIN, *arguments]
        self.process = subprocess.Popen(command, start_new_session=True, env=variables, **files)
        self.raw = ""
        self._decode = codecs.getincrementaldecoder("utf-8")().decode

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)
        os.close(self.slave)

    @property
    def is_raw(self):
        return not termios.tcgetattr(self.slave)[3] & termios.ICANON

    @property
    def shown(self):
        """What was shown, without colours and line breaks."""
        return " ".join(re.sub(r"\x1b\[[0-9;]*[mK]", "", self.raw).split())

    def wait(self, *texts, timeout=45):
        """Reads until all texts have been shown. Returns everything that was shown, and clears it."""
        end = time.monotonic() + timeout
        while not all(text in self.read(0.02) for text in texts):
            assert time.monotonic() < end and self.process.poll() is None, f"no {texts} in {self.raw}"
        shown, self.raw = self.shown, ""
        return shown

    def read(self, seconds):
        """Reads for some seconds; returns what was shown."""
        end = time.monotonic() + seconds
        while select.select([self.master], [], [], max(0.0, end - time.monotonic()))[0]:
            self.raw += self._decode(os.read(self.master, 2**16))
        return self.shown

    def press(self, keys, *texts):
        """Presses keys; returns what is shown up to the texts, or up to the line of keys at the bottom."""
        self.raw = ""
        os.write(self.master, keys.encode())
        return self.wait(*(texts or ("help",)))

    def end(self):
        """Waits for the end of the program. Returns its exit status."""
        deadline = time.monotonic() + 30
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running: {self.raw}"
            self.read(0.02)
        self.read(0.05)
        return self.process.returncode

    def descendants(self):
        """The ids of all processes that the program has started, directly or not."""
        parents = {}
        for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                parents[int(stat.parent.name)] = int(fields[1])
        found = {self.process.pid}
        while more := {child for child, parent in parents.items() if parent in found} - found:
            found |= more
        return found - {self.process.pid}
