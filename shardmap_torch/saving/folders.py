"""Folders of a run's checkpoints, such as `step-000000012`, which appear and disappear at once."""

import os
import re
import shutil
import time
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Final

from shardmap_torch.errors import CheckpointError
from shardmap_torch.saving import manifest

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows, where nothing tells of another job in the same folder
    fcntl = None

PATIENCE: Final = 10.0
"""Seconds that a save waits for another job, or thread, that writes into the same folder."""

_STEP: Final = re.compile(r"step-(\d{9,})")
_UNFINISHED: Final = re.compile(r"step-\d{9,}\.unfinished-[0-9a-f]+")


class Writer:
    """The one job that writes into a folder of checkpoints; released when it ends or is killed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._descriptor: int | None = None

    def _lock(self) -> None:
        """Locks the folder itself, so that no file is left in it."""
        self._root.mkdir(parents=True, exist_ok=True)
        if fcntl is None:
            return
        self._descriptor = os.open(self._root, os.O_RDONLY)
        end = time.monotonic() + PATIENCE
        while not _is_locked(fcntl, self._descriptor):
            if time.monotonic() > end:
                self.release()
                raise CheckpointError(
                    f"Another job has been writing a checkpoint into {self._root} for {PATIENCE:g} "
                    "s. Give each job a folder of its own."
                )
            time.sleep(0.02)

    def begin(self, step: int) -> Path:
        """Makes a new folder to write a step into, and deletes unfinished ones of killed runs.

        Raises:
            CheckpointError: another job is writing here, the step has been saved already, or an
                incomplete folder has its name.
        """
        self._lock()
        final = manifest.folder_of(self._root, step)
        if final.exists():
            manifest.read(final)
            raise CheckpointError(
                f"Step {step} has been saved already, in {final}. Delete that folder to save it "
                "again."
            )
        for path in self._root.iterdir():
            if _UNFINISHED.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        # A unique name, so that a process of an earlier run that still writes does not write here.
        unfinished = _unfinished(final)
        unfinished.mkdir()
        return unfinished

    def release(self) -> None:
        """Lets other jobs write."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _is_locked(fcntl: ModuleType, descriptor: int) -> bool:
    """Locks a file, unless another process or thread has it; returns whether it did."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unfinished(final: Path) -> Path:
    return final.with_name(f"{final.name}.unfinished-{uuid.uuid4().hex[:8]}")


def commit(unfinished: Path, root: Path, step: int) -> Path:
    """Renames a folder that all ranks have written, after validating its contents.

    Raises:
        CheckpointError: a file is missing, such as when the folder is not on a shared file system.
    """
    try:
        manifest.read(unfinished)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error} All ranks must see the same folder: use a file system that they share."
        ) from error
    _sync(unfinished)
    final = manifest.folder_of(root, step)
    unfinished.rename(final)
    _sync(root)
    return final


def prune(root: Path, keep: int) -> None:
    """Deletes all complete checkpoints but the newest `keep`."""
    folders = [manifest.folder_of(root, step) for step in sorted(complete_steps(root))[:-keep]]
    for folder in folders:
        if folder.is_symlink():
            continue  # somebody keeps that checkpoint elsewhere
        # Renamed first, so that a kill while it is deleted leaves no damaged checkpoint.
        shutil.rmtree(folder.rename(_unfinished(folder)))


def complete_steps(root: Path) -> Iterator[int]:
    """Yields the steps of complete checkpoints; warns of each incomplete one."""
    names = [path.name for path in root.iterdir()] if root.is_dir() else []
    for name in names:
        step = _STEP.fullmatch(name)
        if step is None:
            continue
        try:
            manifest.read(root / name)
        except CheckpointError as error:
            warnings.warn(f"Left out: {error}", UserWarning, stacklevel=2)
        else:
            yield int(step[1])


def _sync(folder: Path) -> None:
    """Makes the names in a folder durable, where the OS can (not on Windows)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
