"""`save`, `load` and `latest`: checkpoints of trees of tensors, on any mesh."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import optree
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, Partial

from shardmap_torch.core.tree import NAMESPACE, Tree, flatten, unflatten
from shardmap_torch.errors import CheckpointError, CommunicationError, listing, show_shape
from shardmap_torch.saving import folders, manifest
from shardmap_torch.saving.manifest import Entry, Manifest, Value
from shardmap_torch.saving.storage import RankFiles, RankFilesReader

T = TypeVar("T")
X = TypeVar("X")


def save(tree: Tree, folder: str | os.PathLike[str], step: int, *, keep: int | None = None) -> Path:
    """Saves a tree as a new checkpoint, which appears only when it is complete.

    Every rank writes its shards, each shard by one of the ranks that have it, into a new folder;
    when all have, that folder is renamed to `folder/step-000000012`. A kill at any moment leaves
    either a complete checkpoint or none. Every rank of the run must call it, with the same step,
    and `folder` must be on a file system that all ranks share. Returns on all ranks when the
    checkpoint is durable.

    The files hold raw bytes and JSON, and no pickles: loading a checkpoint runs no code.

    Args:
        tree: a pytree of tensors, DTensors, numbers and strings. Leaves other than DTensors must
            be equal on all ranks.
        folder: folder of all checkpoints of this run; made if it does not exist.
        step: the number of the checkpoint.
        keep: how many checkpoints to keep; older ones are deleted when this one is complete. None
            keeps all.

    Returns:
        The folder of this checkpoint.

    Raises:
        CheckpointError: a leaf cannot be saved, the step has been saved already, or a rank could
            not write; on all ranks.
        CommunicationError: a rank is gone.

    Source: `torch.distributed.checkpoint.save`; `orbax.checkpoint.CheckpointManager.save`.

    Example:
        >>> import tempfile, torch
        >>> from shardmap_torch.saving import latest, load, save
        >>> folder = tempfile.mkdtemp()
        >>> save({"w": torch.arange(3.0), "lr": 0.1}, folder, step=7).name
        'step-000000007'
        >>> latest(folder)
        7
        >>> load({"w": torch.zeros(3), "lr": 0.0}, folder)
        {'w': tensor([0., 1., 2.]), 'lr': 0.1}
    """
    if not (isinstance(step, int) and step >= 0):
        raise CheckpointError(f"step must be an integer of at least 0, not {step!r}.")
    if keep is not None and not (isinstance(keep, int) and keep >= 1):
        raise CheckpointError(f"keep must be None or an integer of at least 1, not {keep!r}.")
    root = Path(folder)
    tensors, values = _by_type(tree)
    unfinished = _on_first_rank("save", lambda: folders.begin(root, step))
    with _errors(f"Saving step {step} to {root} failed"):
        state_dict_saver.save(
            dict(tensors), storage_writer=RankFiles(unfinished, step, values), no_dist=_is_alone()
        )

    def finish() -> Path:
        final = folders.commit(unfinished, root, step)
        if keep is not None:
            folders.prune(root, keep)
        return final

    return _on_first_rank("save", finish)


def load(
    tree: X, folder: str | os.PathLike[str], step: int | None = None, *, partial: bool = False
) -> X:
    """Loads a checkpoint into a new tree, placed like `tree`, on any mesh.

    Every rank reads the bytes that it needs and no others; nothing is gathered. All ranks must call
    it. The result is bit-equal to the saved tree. A checkpoint from others is safe to load: its
    JSON is validated and nothing is unpickled. Its numbers are as trustworthy as its source.

    Args:
        tree: a pytree like the saved one, which gives shapes, dtypes and placements; its values are
            not used.
        folder: as for `save`.
        step: the checkpoint to load; None takes the newest complete one.
        partial: allows the checkpoint to have more leaves than `tree`.

    Raises:
        CheckpointError: there is no such checkpoint, it is incomplete or damaged, or its leaves are
            not those of `tree`; names every one.
        CommunicationError: a rank is gone.

    Source: `torch.distributed.checkpoint.load`; `orbax.checkpoint.CheckpointManager.restore`.
    """
    root = Path(folder)
    chosen = _on_first_rank("load", lambda: _choose(root, step))
    where = folders.folder_of(root, chosen)
    saved = manifest.read(where)
    tensors, values = _by_type(tree)
    _compare(where, saved, tensors, values, partial)
    new = {
        path: torch.empty_like(leaf, requires_grad=leaf.requires_grad)
        for path, leaf in tensors.items()
    }
    with _errors(f"Loading {where} failed"), torch.no_grad():
        reader = RankFilesReader(where, saved)
        state_dict_loader.load(dict(new), storage_reader=reader, no_dist=_is_alone())
    leaves: list[Any] = [new.get(path, saved.values.get(path)) for path in _paths(tree)]
    loaded: X = unflatten(flatten(tree)[1], leaves)
    return loaded


def latest(folder: str | os.PathLike[str]) -> int | None:
    """Returns the step of the newest complete checkpoint, the same on all ranks; None without one.

    Warns of each checkpoint that is newer or older but incomplete. All ranks must call it.

    Source: `orbax.checkpoint.CheckpointManager.latest_step`.

    Example:
        >>> import tempfile
        >>> latest(tempfile.mkdtemp()) is None
        True
    """
    root = Path(folder)
    return _on_first_rank("latest", lambda: max(folders.complete_steps(root), default=None))


def _choose(root: Path, step: int | None) -> int:
    chosen = step if step is not None else max(folders.complete_steps(root), default=None)
    if chosen is None:
        raise CheckpointError(f"There is no complete checkpoint in {root}.")
    if not folders.folder_of(root, chosen).is_dir():
        steps = sorted(folders.complete_steps(root))
        raise CheckpointError(f"There is no checkpoint of step {chosen} in {root}, only {steps}.")
    manifest.read(folders.folder_of(root, chosen))
    return chosen


def _paths(tree: Tree) -> list[str]:
    return [
        accessor.codify("tree") for accessor in optree.tree_accessors(tree, namespace=NAMESPACE)
    ]


def _by_type(tree: Tree) -> tuple[dict[str, Tensor], dict[str, Value]]:
    """Separates the leaves, by path, into tensors and others."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Value] = {}
    problems = []
    for path, leaf in zip(_paths(tree), flatten(tree)[0], strict=True):
        problem = _unsaveable(leaf)
        if problem:
            problems.append(f"{path}: {problem}")
        elif isinstance(leaf, Tensor):
            tensors[path] = leaf
        else:
            values[path] = leaf
    if problems:
        raise CheckpointError(listing("These leaves cannot be in a checkpoint:", problems))
    return tensors, values


def _unsaveable(leaf: Any) -> str:
    if isinstance(leaf, DTensor) and any(isinstance(p, Partial) for p in leaf.placements):
        return "a pending sum (Partial); reduce it, or redistribute the DTensor"
    if isinstance(leaf, Tensor):
        plain = leaf.layout == torch.strided and not leaf.is_quantized and not leaf.is_meta
        return "" if plain else "a tensor that is sparse, quantized or on the meta device"
    if type(leaf) in (bool, int, float, str):
        return ""
    return f"a {type(leaf).__name__}; a checkpoint takes tensors, numbers and strings"


def _compare(
    where: Path,
    contents: Manifest,
    tensors: dict[str, Tensor],
    values: dict[str, Value],
    partial: bool,
) -> None:
    saved = {**contents.tensors, **contents.values}
    problems = [
        f"{path}: not in the checkpoint" for path in [*tensors, *values] if path not in saved
    ]
    problems += [
        f"{path}: {_show(saved[path])} in the checkpoint, {_show(leaf)} in the tree"
        for path, leaf in [*tensors.items(), *values.items()]
        if path in saved and _show(saved[path]) != _show(leaf)
    ]
    if not partial:
        extra = [path for path in saved if path not in tensors and path not in values]
        problems += [f"{path}: not in the tree (partial=True allows this)" for path in extra]
    if problems:
        raise CheckpointError(listing(f"{where} holds another tree:", problems))


def _show(leaf: Any) -> str:
    if isinstance(leaf, Tensor | Entry):
        return show_shape(leaf.dtype, leaf.shape)
    return type(leaf).__name__


def _is_alone() -> bool:
    return not (dist.is_available() and dist.is_initialized())


def _on_first_rank(caller: str, compute: Callable[[], T]) -> T:
    """Computes on rank 0 and returns, or raises, the same on all ranks.

    Raises:
        CheckpointError: rank 0 has raised it, or is in another function than this rank.
    """
    if _is_alone():
        return compute()
    outcome: list[Any] = [caller, None]
    if dist.get_rank() == 0:
        try:
            outcome[1] = compute()
        except (CheckpointError, OSError) as error:
            outcome[1] = CheckpointError(f"{error}")
    with _errors("A checkpoint failed"):
        dist.broadcast_object_list(outcome, src=0)
    called, result = outcome
    if called != caller:
        raise CheckpointError(
            f"{caller} was called on rank {dist.get_rank()}, and {called} on rank 0. Call save, "
            "load and latest on all ranks, in one order, and not under `if mesh.rank == 0`."
        )
    if isinstance(result, CheckpointError):
        raise result
    returned: T = result
    return returned


@contextmanager
def _errors(head: str) -> Iterator[None]:
    """Turns torch's errors, one of which is a BaseException, into errors that name the ranks."""
    try:
        with warnings.catch_warnings():
            # A run without processes is supported.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        problems = [f"rank {rank}: {_text(why)}" for rank, (why, _) in error.failures.items()]
        raise CheckpointError(listing(f"{head}:", problems)) from error
    except RuntimeError as error:
        raise CommunicationError(f"{head} on rank {dist.get_rank()}: {error}") from error


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
