"""Reads regular files, and writes files atomically without overwriting files that anybatch did not write."""

import contextlib
import errno
import os
import pathlib
import shlex
import shutil
import stat
from collections.abc import Callable, Iterator

from anybatch.errors import InputError

# To recognise a file, this many bytes are read from its beginning and from its end.
_ENDS = 2**16


def read_regular(path: str | os.PathLike[str], most: int | None) -> bytes:
    """The bytes of a regular file, at most `most`. Pipes and devices are refused: reading them could never end.

    Raises:
      OSError: if the file does not exist, is not a regular file, is too long or cannot be read. `strerror` says which.
    """
    try:
        about = os.stat(path)
    except ValueError:  # a NUL character in the name
        raise OSError(errno.EINVAL, "no file can have such a name") from None
    if stat.S_ISDIR(about.st_mode):
        raise IsADirectoryError(errno.EISDIR, "a folder")
    if not stat.S_ISREG(about.st_mode):
        raise OSError(errno.EINVAL, "a device, pipe or socket, not a regular file")
    if most is not None and about.st_size > most:
        raise OSError(errno.EFBIG, f"{about.st_size:,} bytes, more than the limit of {most:,}")
    with open(path, "rb") as file:
        return file.read(about.st_size)


def check_target(
    path: str | os.PathLike[str], *, must: str, given: str, is_ours: Callable[[bytes], bool]
) -> pathlib.Path:
    """The file that `path` points to, if it may be written: it does not exist, is empty, or was written by anybatch.

    Links are followed, and `~` is the home folder. `is_ours` takes the first and last bytes of a file, and returns True
    if it may be replaced. For anything else there, the error begins with `must` and `given`, the name of the path.
    """
    target = pathlib.Path(os.path.realpath(os.path.expanduser(path)))
    name = os.fspath(path)
    if os.path.lexists(target) and not (target.is_file() and _may_replace(target, is_ours)):
        raise InputError(
            must,
            given=f"{given}, which is something else",
            remedy=f"Name another file, or first: mv {shlex.quote(name)} {shlex.quote(name + '.kept')}",
        )
    return target


def _may_replace(file: pathlib.Path, is_ours: Callable[[bytes], bool]) -> bool:
    """True if the file is empty or ours. False if it cannot be read."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            content = opened.read(_ENDS)
            if size > _ENDS:
                opened.seek(max(_ENDS, size - _ENDS))
                content += opened.read(_ENDS)
    except OSError:
        return False
    return not content or is_ours(content)


def check_writable(path: pathlib.Path, *, must: str, given: str) -> None:
    """Checks that `write_atomically` can write there, by creating an empty file beside it."""
    with _beside(path, must, given) as beside:
        beside.touch()


def write_atomically(path: pathlib.Path, content: bytes, *, must: str, given: str) -> None:
    """Writes a file atomically: an existing file is replaced in one step, or stays as it was. Links are followed.

    If it cannot be written, e.g. because the disk is full, the error begins with `must` and `given`, as in
    `check_target`.
    """
    target = pathlib.Path(os.path.realpath(path))
    with _beside(target, must, given) as beside:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, beside)
        beside.replace(target)


@contextlib.contextmanager
def _beside(target: pathlib.Path, must: str, given: str) -> Iterator[pathlib.Path]:
    """The path of a temporary file in the folder of `target`. It is removed at the end, even after an error."""
    beside = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        try:
            yield beside
        finally:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            must,
            given=f"{given} ({error.strerror})",
            remedy="Free some space, check the permissions, or name another file.",
        ) from None
