"""Folders of a run's checkpoints, such as `step-000000012`, which appear and disappear at once."""

import os
import re
import shutil
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from shardmap_torch.errors import CheckpointError
from shardmap_torch.saving import manifest

_STEP: Final = re.compile(r"step-(\d{9,})")
_UNFINISHED: Final = re.compile(r"step-\d{9,}\.unfinished-[0-9a-f]+")


def folder_of(root: Path, step: int) -> Path:
    """Returns the folder of a step."""
    return root / f"step-{step:09}"


def begin(root: Path, step: int) -> Path:
    """Makes a new folder to write a step into, and deletes unfinished ones of killed runs.

    Raises:
        CheckpointError: the step has been saved already, or an incomplete folder has its name.
    """
    final = folder_of(root, step)
    if final.exists():
        manifest.read(final)
        raise CheckpointError(
            f"Step {step} has been saved already, in {final}. Delete that folder to save it again."
        )
    root.mkdir(parents=True, exist_ok=True)
    for path in root.iterdir():
        if _UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
    # A unique name, so that a process of an earlier run that still writes does not write here.
    unfinished = _unfinished(final)
    unfinished.mkdir()
    return unfinished


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
    final = folder_of(root, step)
    unfinished.rename(final)
    _sync(root)
    return final


def prune(root: Path, keep: int) -> None:
    """Deletes all complete checkpoints but the newest `keep`."""
    for step in sorted(complete_steps(root))[:-keep]:
        folder = folder_of(root, step)
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
