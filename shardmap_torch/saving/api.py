"""`save`, `load` and `latest`: checkpoints of trees of tensors, on any mesh.

Ranks compare what they are called with before they begin; an error of one names it on all.
"""

import os
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
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

from shardmap_torch.core.hashing import hash_text
from shardmap_torch.core.tree import NAMESPACE, Tree, flatten, unflatten
from shardmap_torch.errors import CheckpointError, listing, show_shape
from shardmap_torch.placing import compared, control_of, copies_of, number, shown_shard
from shardmap_torch.saving import folders, manifest
from shardmap_torch.saving.manifest import Entry, Manifest, Value
from shardmap_torch.saving.storage import RankFiles, RankFilesReader

X = TypeVar("X")


def save(tree: Tree, folder: str | os.PathLike[str], step: int, *, keep: int | None = None) -> Path:
    """Saves a tree as a new checkpoint, which appears only when it is complete.

    Every rank writes its shards, each shard by one of the ranks that have it, into a new folder;
    when all have, that folder is renamed to `folder/step-000000012`. A kill at any moment leaves
    either a complete checkpoint or none. Every rank of the run must call it, with the same step
    and folder, which must be on a file system that all ranks share. Returns on all ranks when the
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
        CollectiveMismatchError: a rank calls something else, or with other arguments.
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

    def read() -> _Arguments:
        if not (isinstance(step, int) and step >= 0):
            raise CheckpointError(f"step must be an integer of at least 0, not {step!r}.")
        if keep is not None and not (isinstance(keep, int) and keep >= 1):
            raise CheckpointError(f"keep must be None or an integer of at least 1, not {keep!r}.")
        return _root(folder), *_by_type(tree)

    def describe(arguments: _Arguments) -> list[str]:
        what = f"step {step}, keep {keep}"
        return [*described(what, *arguments[1:], by_value=True), f"folder {arguments[0]}"]

    copies = lambda arguments: copies_of(arguments[1])  # noqa: E731
    root, tensors, values = compared("save", None, read, describe, _itself, copies)
    writer = folders.Writer(root)
    try:
        return _save(writer, root, tensors, values, step, keep)
    finally:
        writer.release()


def _save(
    writer: folders.Writer,
    root: Path,
    tensors: dict[str, Tensor],
    values: dict[str, Value],
    step: int,
    keep: int | None,
) -> Path:
    unfinished = on_first_rank(lambda: writer.begin(step))
    with naming_ranks(f"Saving step {step} to {root}"):
        state_dict_saver.save(
            dict(tensors), storage_writer=RankFiles(unfinished, step, values), no_dist=is_alone()
        )

    def finish() -> Path:
        final = folders.commit(unfinished, root, step)
        if keep is not None:
            folders.prune(root, keep)
        return final

    return on_first_rank(finish)


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
        CollectiveMismatchError: a rank calls something else, or with other arguments.
        CommunicationError: a rank is gone.

    Source: `torch.distributed.checkpoint.load`; orbax's `restore`. Example: in `save`.
    """

    def describe(arguments: _Arguments) -> list[str]:
        return described(f"step {step}, partial {partial}", *arguments[1:], by_value=False)

    arguments = compared("load", None, lambda: (_root(folder), *_by_type(tree)), describe, _itself)
    root, tensors, values = arguments
    chosen = on_first_rank(lambda: _choose(root, step))
    where = manifest.folder_of(root, chosen)

    def describe_saved(saved: Manifest) -> list[str]:
        return [f"a checkpoint of hash {zlib.crc32(saved.to_json().encode()):x}  # in {where}"]

    def find() -> Manifest:
        return _compare(where, manifest.read(where), tensors, values, partial)

    saved = compared("load", None, find, describe_saved, _itself)  # a rank may see another folder
    new = {k: torch.empty_like(x, requires_grad=x.requires_grad) for k, x in tensors.items()}
    with naming_ranks(f"Loading {where}"), torch.no_grad():
        reader = RankFilesReader(where, saved)
        state_dict_loader.load(dict(new), storage_reader=reader, no_dist=is_alone())
    number(new.values())
    leaves: list[Any] = [new.get(path, saved.values.get(path)) for path in _paths(tree)]
    loaded: X = unflatten(flatten(tree)[1], leaves)
    return loaded


def latest(folder: str | os.PathLike[str]) -> int | None:
    """Returns the step of the newest complete checkpoint, the same on all ranks; None without one.

    Warns of each incomplete one. All ranks must call it; where they differ it raises as `load`.

    Source: `orbax.checkpoint.CheckpointManager.latest_step`.

    Example:
        >>> import tempfile
        >>> latest(tempfile.mkdtemp()) is None
        True
    """
    root = compared("latest", None, lambda: _root(folder), lambda root: [f"folder {root}"], _itself)
    return on_first_rank(lambda: max(folders.complete_steps(root), default=None))


_Arguments = tuple[Path, dict[str, Tensor], dict[str, Value]]


def _itself(arguments: X) -> X:
    return arguments


def _root(folder: str | os.PathLike[str]) -> Path:
    if "\0" in os.fspath(folder):
        raise CheckpointError(f"{os.fspath(folder)!r} is no name of a folder: it has a NUL byte.")
    return Path(folder)


def _choose(root: Path, step: int | None) -> int:
    chosen = step if step is not None else max(folders.complete_steps(root), default=None)
    if chosen is None:
        raise CheckpointError(f"There is no complete checkpoint in {root}.")
    if not manifest.folder_of(root, chosen).is_dir():
        steps = sorted(folders.complete_steps(root))
        raise CheckpointError(f"There is no checkpoint of step {chosen} in {root}, only {steps}.")
    manifest.read(manifest.folder_of(root, chosen))
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
) -> Manifest:
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
    return contents


def _show(leaf: Any) -> str:
    if isinstance(leaf, Tensor | Entry):
        return show_shape(leaf.dtype, leaf.shape)
    return type(leaf).__name__


def is_alone() -> bool:
    """Returns whether there are no other processes."""
    return not (dist.is_available() and dist.is_initialized())


def described(
    what: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any], *, by_value: bool
) -> list[str]:
    """Describes a tree and other arguments by lines, equal on ranks where these are equal."""
    known = {path: repr(x) if by_value else type(x).__name__ for path, x in values.items()}
    shown = {path: _shown(x, by_value, at) for at, (path, x) in enumerate(tensors.items())}
    return [what, *(f"{path}: {text}" for path, text in (known | shown).items())]


def _shown(x: Tensor, by_value: bool, at: int) -> str:
    kind = show_shape(x.dtype, x.shape)
    if isinstance(x, DTensor):
        return shown_shard(x, at) if by_value else f"{kind}, placed {x.placements}"
    return f"{kind}, hash {hash_text(x)}" if by_value else kind


def on_first_rank(compute: Callable[[], X]) -> X:
    """Computes on rank 0 and returns, or raises, the same on all ranks.

    Raises:
        CheckpointError: rank 0 has raised it, or an OSError.
    """
    outcome: list[Any] = [None]
    cause: Exception | None = None
    if is_alone() or dist.get_rank() == 0:
        try:
            outcome[0] = compute()
        except (CheckpointError, OSError) as error:
            where = "" if is_alone() else "On rank 0, for all: "
            outcome[0], cause = CheckpointError(f"{where}{error}"), error
    if not is_alone():
        with naming_ranks("A checkpoint"):
            dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], CheckpointError):
        raise outcome[0] from cause
    result: X = outcome[0]
    return result


@contextmanager
def naming_ranks(head: str) -> Iterator[None]:
    """Turns torch's errors, one of which is a BaseException, into errors that name the ranks."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it may be
            yield
    except CheckpointException as error:
        problems = [f"rank {rank}: {_text(why)}" for rank, (why, _) in error.failures.items()]
        raise CheckpointError(listing(f"{head} failed:", problems)) from error
    except RuntimeError as error:
        if (control := control_of(None)) is None:  # there is one process
            raise
        control.fail(head, error)


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
