"""A folder of files that several processes read and write, one for each key."""

import hashlib
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

try:
    import fcntl
except ImportError:  # not on Windows, where nobody waits
    fcntl = None  # type: ignore[assignment]

_MARK: Final = "shardmap_torch verdict"


@dataclass(frozen=True)
class Folder:
    """Files of a few lines of text, each written at once and checked by its hash.

    Attributes:
        path: of the folder, which is made at the first write.
    """

    path: Path

    def read(self, key: str) -> Sequence[str] | None:
        """Returns the lines kept for a key; None, with a warning, for a file that is damaged."""
        file = self._file(key)
        try:
            head, *lines = file.read_text("ascii").split("\n")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self.ignore(key, f"{type(error).__name__}: {error}")
            return None
        if head != self._head(key, lines):
            self.ignore(key, "it is not what was written")
            return None
        return lines

    def write(self, key: str, lines: Sequence[str]) -> None:
        """Keeps lines for a key; no reader sees a part of them."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path, suffix=".tmp")
            try:
                with os.fdopen(handle, "w", encoding="ascii") as file:
                    file.write("\n".join([self._head(key, lines), *lines]))
                os.replace(name, self._file(key))
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            _warn(f"{self.path}: no verdict can be kept there: {error}")

    def remove(self, key: str) -> None:
        """Drops what is kept for a key."""
        with suppress(OSError):
            self._file(key).unlink(missing_ok=True)

    def ignore(self, key: str, why: str) -> None:
        """Warns of a file that cannot be used, and will be written again."""
        _warn(f"{self._file(key)} is ignored: {why}")

    @contextmanager
    def first(self, key: str) -> Iterator[bool]:
        """Waits while another process on this host checks for the same key.

        Yields whether nobody did, so that this process is the one for which others wait. A process
        that ends, in whatever manner, lets go of the lock.
        """
        lock = self.path / f"{key}.lock"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = lock.open("w")
        except OSError:
            yield False
            return
        with file:
            is_first = _lock(file.fileno())
            try:
                yield is_first
            finally:
                if is_first:
                    with suppress(OSError):
                        lock.unlink()

    def _file(self, key: str) -> Path:
        return self.path / f"{key}.json"

    def _head(self, key: str, lines: Sequence[str]) -> str:
        total = hashlib.sha256("\n".join([key, *lines]).encode()).hexdigest()
        return f"{_MARK} {key} {total}"


def _lock(file: int) -> bool:
    """Locks a file; if another process has it locked, waits and returns False."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_SH)  # all that wait go on together
        return False
    except OSError:  # a file system without locks
        return False
    return True


def _warn(message: str) -> None:
    warnings.warn(f"SHARDMAP_CACHE: {message}", stacklevel=2)
