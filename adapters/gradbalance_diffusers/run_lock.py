"""One process at a time in the folder of a run."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import warnings
import weakref
from pathlib import Path

from gradbalance.errors import StateError

NAME = ".lock"


class RunLock:
    """Holds the folder until :meth:`release` or the end of the process, however it ends.

    The kernel keeps the lock (``flock``), so that of a killed process is free at once and the file it leaves means
    nothing. A file system that cannot lock gets a warning.

    Args:
        folder: An existing folder.

    Raises:
        StateError: Another process holds it; with its id and host.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     lock = RunLock(Path(folder))
    ...     lock.release()
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                self._acquire(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            if self._is_current(descriptor):
                break
            os.close(descriptor)  # its last holder removed the file in between
        os.truncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        self._finalizer = weakref.finalize(self, _release, descriptor, self._path)

    def release(self) -> None:
        """Let others in; done already is fine."""
        self._finalizer()

    def _acquire(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise in_use(self._path.parent, _written(descriptor)) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS):
                raise
            warnings.warn(
                f"The file system of {self._path.parent} cannot lock files ({error.strerror}): see to it that no other "
                "process uses this run folder.",
                RuntimeWarning,
                stacklevel=4,
            )

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False


def holder(folder: Path) -> str | None:
    """Who holds ``folder`` now, None if nobody does; nothing is written.

    Returns:
        Words for a message, such as ``"process 12 on gpu-3"``.
    """
    try:
        descriptor = os.open(folder / NAME, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _written(descriptor)
    finally:
        os.close(descriptor)
    return None


def in_use(folder: Path, user: str) -> StateError:
    """The error of a folder that ``user`` holds."""
    return StateError(
        f"The run folder {folder} must be used by one process at a time. Found it in use by {user}. Wait for it, stop "
        "it, or choose another folder with --output."
    )


def _written(descriptor: int) -> str:
    return os.read(descriptor, 200).decode(errors="replace") or "another process"


def _release(descriptor: int, path: Path) -> None:
    path.unlink(missing_ok=True)  # first: whoever locks the old file afterwards sees that it is gone
    os.close(descriptor)
