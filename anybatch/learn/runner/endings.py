"""Why a learner's process ended before it had answered, in a sentence, and at which of their lines."""

import re
import signal

from anybatch.learn.runner import nursery
from anybatch.learn.runner.isolation import Limits
from anybatch.memory import readable

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in ', re.MULTILINE)
_OUT_OF_MEMORY = re.compile(
    r"bad_alloc|out of memory|RESOURCE_EXHAUSTED|Cannot allocate memory|MemoryError", re.IGNORECASE
)

_CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP")


class Ended(Exception):
    """A learner's code that did not answer: it took too long or too much, or ended its process.

    Args:
      kind: "time", "memory", "exit", "signal", "prints" or "channel".
      message: to the learner, what happened and what the limit is.
      where: the number of the line in their file at which it was, and the line; None if that is not known.
    """

    def __init__(self, kind: str, message: str, where: tuple[int, str] | None = None) -> None:
        super().__init__(message)
        self.kind, self.message, self.where = kind, message, where


def too_long(limits: Limits, trace: str, where: tuple[int, str] | None) -> Ended:
    """It was still at work when its time was over."""
    message = f"Your code was still running after {limits.seconds:g} seconds, and was stopped. That is all a check has."
    if where is None and _FRAME.search(trace):
        message += " It was not in a line of yours: most likely a loop inside of a compiled function never ends."
    return Ended("time", message, where)


def too_much_printed(limits: Limits) -> Ended:
    """It printed and printed."""
    most = readable(limits.print_bytes)
    return Ended("prints", f"Your code printed more than {most}, and was stopped. The beginning is shown.")


def broken(reason: str = "") -> Ended:
    """No answer came through the pipe, though the learner's function may have returned."""
    if reason:
        message = f"The answer of your code could not be sent: {reason}."
        return Ended("channel", f"{message} Something that the file has replaced, or left running, is in its way.")
    message = "The answer of your code did not come through: something else was written to, or read from, its channel."
    return Ended("channel", f"{message} A file that is checked leaves descriptors, `os` and `json` as they are.")


def of_status(status: int | None, limits: Limits, prints: str, trace: str, where: tuple[int, str] | None) -> Ended:
    """Why a process ended that nobody had asked to.

    Args:
      status: its exit status, negative for a signal; None if that is not known.
      limits: what it was held to.
      prints: what it printed.
      trace: what was written when it ended.
      where: the line at which it was.
    """
    memory = f"A check has {readable(limits.memory)} beyond what JAX takes itself."
    if status is None:
        return Ended("signal", "Your code ended the process that had started it, and was ended with it.", where)
    if status == nursery.LOST:
        reason = re.search(rf"^{nursery.REASON} (.*)$", trace, re.MULTILINE)
        return broken(reason[1][:300].rstrip(".") if reason else "")
    if status >= 0:
        return Ended("exit", f"Your code ended its process (exit code {status}) before it had answered.", where)
    name = _name(-status)
    if -status == nursery.TRACE_AND_END:
        computed = f"Your code computed for more than {limits.cpu_seconds} seconds, on all cores together"
        return Ended("time", f"{computed}, and was stopped. That is all a check has.", where)
    if -status == signal.SIGKILL:
        return Ended("memory", f"The system killed your code ({name}), most likely for its memory. {memory}", where)
    if _OUT_OF_MEMORY.search(prints):
        return Ended("memory", f"Your code was aborted when its memory ran out ({name}). {memory}", where)
    verb = "crashed" if name in _CRASHES else "ended"
    message = f"Your code {verb} its process ({name}) before it had answered."
    if -status == signal.SIGSEGV:
        message += " Inside of Python and JAX that is, most often, a recursion that never ends."
    return Ended("signal", message, where)


def line_of(trace: str, path: str, source: str) -> tuple[int, str] | None:
    """The innermost line of a file in the traces of all threads, that of the main thread first."""
    lines = source.splitlines()
    name = path.encode("ascii", "backslashreplace").decode()
    # The newest thread comes first, each with its innermost frame first.
    for section in reversed(re.split(r"^(?:Current thread|Thread) 0x.*$", trace, flags=re.MULTILINE)):
        for file, number in _FRAME.findall(section):
            if file == name and 1 <= int(number) <= len(lines):
                return int(number), lines[int(number) - 1]
    return None


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
