"""Files that are read if they are files, and written whole, never in the place of a file that is somebody else's."""

import contextlib
import errno
import os
import pathlib
import shlex
import shutil
import stat
from collections.abc import Callable, Iterator

from anybatch.errors import InputError

# So many bytes at both ends of a file are enough to know it by, however long it is.
_ENDS = 2**16


def read_regular(path: str | os.PathLike[str], most: int | None) -> bytes:
    """The bytes of a regular file. Pipes and devices, which could block or never end, are refused.

    Args:
      path: of the file. Links are followed.
      most: the bytes that it may have; None for as many as there are.

    Raises:
      OSError: if it is not there, is no file, is longer, or cannot be read; `strerror` says which.
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
    """The file behind a path, links followed, that may be written: there is none, an empty one, or one of ours.

    Args:
      path: where to write. `~` is the home folder.
      must: the first part of the error.
      given: how the user named the path.
      is_ours: whether a file is one that may be replaced, from its first and last bytes.

    Raises:
      InputError: if there is anything else, such as a text, a folder or a device.
    """
    target = pathlib.Path(os.path.realpath(os.path.expanduser(path)))
    name = os.fspath(path)
    if os.path.lexists(target) and not (target.is_file() and _may_go(target, is_ours)):
        raise InputError(
            must,
            given=f"{given}, which is something else",
            remedy=f"Name another file, or first: mv {shlex.quote(name)} {shlex.quote(name + '.kept')}",
        )
    return target


def _may_go(file: pathlib.Path, is_ours: Callable[[bytes], bool]) -> bool:
    """Whether the file is empty or ours. False if it cannot be read."""
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
    """Raises if `write_whole` could not write there, as far as can be known before.

    Raises:
      InputError: if it cannot.
    """
    with _beside(path, must, given) as beside:
        beside.touch()


def write_whole(path: pathlib.Path, content: bytes, *, must: str, given: str) -> None:
    """Writes a file, all of it or nothing: what is there is replaced in one moment, or stays as it is.

    Args:
      path: of the file. Links are followed.
      content: of the file.
      must: the first part of the error.
      given: how the user named the path.

    Raises:
      InputError: if it cannot be written, as on a full disk.
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
    """A file with a name of its own, which is gone afterwards, whatever happens."""
    beside = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        try:
            yield beside
        finally:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            must, given=f"{given} ({error.strerror})", remedy="Make space, see to its permissions, or name another."
        ) from None
