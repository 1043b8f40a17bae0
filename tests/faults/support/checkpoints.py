"""Ways in which one rank departs from the others where a checkpoint is saved, found or loaded.

Each is a function of a `Turn`, which every rank calls. What it returns must be right on all ranks,
else each rank has an error.
"""

import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardmap_torch import full
from shardmap_torch.saving import folders, latest, load, manifest, save, storage
from tests.faults.support.cases import Kit, X

ROWS: Final = torch.arange(32.0).reshape(8, 4)
STEP: Final = 4


class Turn:
    """A rank's part in one variant.

    Attributes:
        kit: functions on the mesh, and whether this rank departs.
        root: the folder of checkpoints, which has one of step 4.
    """

    def __init__(self, kit: Kit, root: Path) -> None:
        self.kit, self.root, self.odd = kit, root, kit.odd

    def placed(self, x: Tensor, dim: int | None, mesh: DeviceMesh | None = None) -> DTensor:
        """A DTensor of `x`, split along a dim or replicated, which no call compares."""
        where: Any = mesh or self.kit.mesh.device_mesh
        part = x.clone() if dim is None else x.chunk(self.kit.mesh.size, dim)[self.kit.mesh.rank]
        placements = [Replicate() if dim is None else Shard(dim)]
        return DTensor.from_local(part.contiguous(), where, placements, run_check=False)

    def tree(self, mesh: DeviceMesh | None = None, **others: Any) -> dict[str, Any]:
        """A tree of every kind of leaf, with changes on the odd rank."""
        known = {
            "sharded": self.placed(ROWS, 0, mesh),
            "equal": self.placed(ROWS.sin(), None, mesh),
            "plain": ROWS.cos(),
            "rate": 0.1,
            "count": 3,
            "name": "run",
        }
        return {k: v for k, v in {**known, **(others if self.odd else {})}.items() if v is not None}

    def save(self, step: int = STEP + 1, keep: int | None = None, **others: Any) -> None:
        """Saves, and requires that every rank can load what is right."""
        tree = self.tree(**others)
        save(tree, self.root, step, keep=keep)
        self.load(step)

    def load(self, step: int | None = None, **others: Any) -> None:
        """Loads, and requires the numbers that were saved."""
        self.require(load(self.tree(**others), self.root, step))

    def require(self, found: Mapping[str, Any]) -> None:
        right = {"sharded": ROWS, "equal": ROWS.sin(), "plain": ROWS.cos()}
        for name, value in found.items():
            if isinstance(value, Tensor):
                whole = full(value) if isinstance(value, DTensor) else value
                assert torch.equal(whole, right[name]), name
        assert (found["rate"], found["count"], found["name"]) == (0.1, 3, "run")

    @property
    def saved(self) -> Path:
        return manifest.folder_of(self.root, STEP)

    def alone(self, change: Callable[[], object]) -> None:
        """Has one rank change the files, while the others wait."""
        if self.odd:
            change()
        self.kit.sum(X)

    @contextmanager
    def failing(
        self, owner: Any, name: str, error: BaseException, rank: int = -1
    ) -> Iterator[None]:
        """Has a function fail on the odd rank, or on a rank."""
        fails = self.odd if rank < 0 else self.kit.mesh.rank == rank
        with mock.patch.object(owner, name, _raising(error) if fails else getattr(owner, name)):
            yield

    @contextmanager
    def struck(self, owner: Any, name: str, number: int) -> Iterator[None]:
        """Has the odd rank killed, or frozen, where it calls a function."""

        def strike(*args: Any, **kwargs: Any) -> Any:
            os.kill(os.getpid(), number)

        with mock.patch.object(owner, name, strike if self.odd else getattr(owner, name)):
            yield


def _raising(error: BaseException) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail


def _other_leaf(name: str, make: Callable[[Turn], Any]) -> Callable[[Turn], None]:
    def run(turn: Turn) -> None:
        others: dict[str, Any] = {name: make(turn) if turn.odd else None}
        turn.save(**others)

    return run


def _reloaded(name: str, make: Callable[[Turn], Any]) -> Callable[[Turn], None]:
    return lambda turn: turn.load(**{name: make(turn) if turn.odd else None})


def _replica_differs(turn: Turn) -> None:
    save({"equal": turn.placed(ROWS + turn.odd, None)}, turn.root, STEP + 1)


def _shard_of_other_shape(turn: Turn) -> None:
    save({"sharded": turn.placed(ROWS[:: 1 + turn.odd], 0)}, turn.root, STEP + 1)


def _other_call(call: Callable[[Turn], object]) -> Callable[[Turn], object]:
    def run(turn: Turn) -> None:
        tree = turn.tree()
        if turn.odd:
            call(turn)
        else:
            save(tree, turn.root, STEP + 1)
        turn.kit.sum(X)

    return run


def _once_more(turn: Turn) -> None:
    turn.save()
    if turn.odd:
        save(turn.tree(), turn.root, STEP + 2)
    turn.kit.sum(X)


def _left_out(turn: Turn) -> None:
    if not turn.odd:
        save(turn.tree(), turn.root, STEP + 1)
    save(turn.tree(), turn.root, STEP + 2)


def _other_folder(turn: Turn) -> None:
    root = turn.root / "own" if turn.odd else turn.root
    save(turn.tree(), root, STEP + 1)
    assert manifest.folder_of(root, STEP + 1).is_dir(), "this rank's folder has no checkpoint"


def _latest_of_other_folder(turn: Turn) -> None:
    root = turn.root / "own" if turn.odd else turn.root
    found = latest(root)
    assert (found is None) == turn.odd, f"{found} is no step of this rank's folder"


def _not_shared(turn: Turn) -> None:
    """Each host has a folder of this name of its own."""
    made = storage.RankFiles.__init__

    def init(self: Any, folder: Path, *args: Any) -> None:
        if turn.odd:
            folder = turn.root / "local" / folder.name
            folder.mkdir(parents=True)
        made(self, folder, *args)

    with mock.patch.object(storage.RankFiles, "__init__", init):
        turn.save()


def _folder_is_a_file(turn: Turn) -> None:
    turn.alone(lambda: (turn.root / "file").write_text(""))
    save(turn.tree(), turn.root / "file", STEP + 1)


def _file_is_there(turn: Turn) -> None:
    begin = folders.Writer.begin

    def begun(self: Any, step: int) -> Path:
        unfinished = begin(self, step)
        os.mkfifo(unfinished / "rank-00001.bin")
        return unfinished

    with mock.patch.object(folders.Writer, "begin", begun):
        turn.save()


def _pipe(turn: Turn, name: str) -> None:
    path = turn.saved / name

    def replace() -> None:
        path.unlink()
        os.mkfifo(path)

    turn.alone(replace)
    turn.load(STEP)


def _linked_file(turn: Turn) -> None:
    path = turn.saved / "rank-00001.bin"
    turn.alone(lambda: path.symlink_to(path.rename(turn.root / "moved")))
    turn.load(STEP)


def _linked_step(turn: Turn) -> None:
    turn.alone(lambda: turn.saved.with_name("step-000000005").symlink_to(turn.saved.name))
    turn.save()


def _dangling_step(turn: Turn) -> None:
    turn.alone(lambda: turn.saved.with_name("step-000000005").symlink_to("nowhere"))
    turn.save()


def _changed(name: str, change: Callable[[bytes], bytes]) -> Callable[[Turn], None]:
    def run(turn: Turn) -> None:
        path = turn.saved / name
        turn.alone(lambda: path.write_bytes(change(path.read_bytes())))
        turn.load(STEP)

    return run


def _own_copy(change: Callable[[Path], object]) -> Callable[[Turn], None]:
    """The odd rank sees another folder, with a copy of the checkpoint that is changed."""

    def run(turn: Turn) -> None:
        if turn.odd:
            copy = turn.root / "copy" / turn.saved.name
            copy.mkdir(parents=True)
            for file in turn.saved.iterdir():
                (copy / file.name).write_bytes(file.read_bytes())
            change(copy)
            turn.root = copy.parent
        turn.load(STEP)

    return run


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 64
    path.write_bytes(data)


def _deleted_meanwhile(turn: Turn) -> None:
    found = latest(turn.root)
    turn.alone(lambda: shutil.rmtree(turn.saved))
    turn.load(found)


def _late(turn: Turn, seconds: float) -> None:
    if turn.odd:
        time.sleep(seconds)
    turn.save()


def _in_a_thread(turn: Turn) -> None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            turn.save()
        except BaseException as error:
            raised.append(error)

    if not turn.odd:
        return turn.save()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return None


def _within(context: Callable[[], Any]) -> Callable[[Turn], None]:
    def run(turn: Turn) -> None:
        tree = turn.tree()
        if not turn.odd:
            save(tree, turn.root, STEP + 1)
            return turn.require(load(tree, turn.root, STEP + 1))
        with context():
            save(tree, turn.root, STEP + 1)
            found = load(tree, turn.root, STEP + 1)
        return turn.require(found)

    return run


def _another_job(turn: Turn) -> None:
    """Another job writes into the folder, and does not end."""
    other = folders.Writer(turn.root)
    if turn.kit.mesh.rank == 0:
        other._lock()
    try:
        with mock.patch.object(folders, "PATIENCE", 2.0):
            turn.save()
    finally:
        other.release()


def _another_mesh(turn: Turn) -> DeviceMesh:
    names = ("x",) if turn.odd else ("y",)
    return init_device_mesh("cpu", (turn.kit.mesh.size,), mesh_dim_names=names)


def _fails(owner: Any, name: str, error: BaseException, rank: int = -1) -> Callable[[Turn], None]:
    def run(turn: Turn) -> None:
        with turn.failing(owner, name, error, rank):
            turn.save(keep=1)

    return run


def _read_fails(error: BaseException) -> Callable[[Turn], None]:
    def run(turn: Turn) -> None:
        with turn.failing(storage.RankFilesReader, "_read", error):
            turn.load()

    return run


FULL: Final = OSError(errno.ENOSPC, "No space left on device")
READ_ONLY: Final = OSError(errno.EROFS, "Read-only file system")

VARIANTS: Final[Mapping[str, Callable[[Turn], object]]] = {
    "another step": lambda turn: turn.save(STEP + 1 + turn.odd),
    "a step that is a bool": lambda turn: save(turn.tree(), turn.root, True if turn.odd else 1),
    "another number to keep": lambda turn: turn.save(keep=1 + turn.odd),
    "a leaf more": _other_leaf("more", lambda _: 1),
    "a leaf less": lambda turn: turn.save(rate=None),
    "another dtype": _other_leaf("plain", lambda _: ROWS.cos().double()),
    "another shape": _other_leaf("plain", lambda _: ROWS.cos()[:4]),
    "another number": _other_leaf("plain", lambda _: ROWS.cos() + 1),
    "another bit": _other_leaf("plain", lambda _: ROWS.cos().nextafter(ROWS)),
    "another rate": lambda turn: turn.save(rate=0.2),
    "a bool": lambda turn: turn.save(count=True),
    "another name": lambda turn: turn.save(name="walk"),
    "a shard of another dtype": _other_leaf("sharded", lambda t: t.placed(ROWS.double(), 0)),
    "another placement": _other_leaf("sharded", lambda t: t.placed(ROWS, 1)),
    "a plain tensor": _other_leaf("sharded", lambda _: ROWS),
    "a DTensor": _other_leaf("plain", lambda t: t.placed(ROWS.cos(), None)),
    "a shard of another shape": _shard_of_other_shape,
    "a replica that differs": _replica_differs,
    "a DTensor on another mesh": lambda turn: save(
        turn.tree(_another_mesh(turn)), turn.root, STEP + 1
    ),
    "an object": lambda turn: turn.save(count=object() if turn.odd else None),
    "a load": _other_call(lambda turn: turn.load()),
    "a search": _other_call(lambda turn: latest(turn.root)),
    "a call": _other_call(lambda turn: turn.kit.sum(X)),
    "once more": _once_more,
    "left out": _left_out,
    "another folder": _other_folder,
    "latest of another folder": _latest_of_other_folder,
    "a folder that is not shared": _not_shared,
    "a file in place of the folder": _folder_is_a_file,
    "a pipe in place of a rank's file": _file_is_there,
    "a pipe in place of the manifest": lambda turn: _pipe(turn, manifest.FILE),
    "a pipe in place of saved bytes": lambda turn: _pipe(turn, "rank-00001.bin"),
    "a link in place of saved bytes": _linked_file,
    "a link in place of the step": _linked_step,
    "a dangling link in place of the step": _dangling_step,
    "fewer bytes": _changed("rank-00001.bin", lambda data: data[:-4]),
    "other bytes": _changed("rank-00001.bin", lambda data: data[:-1] + b"\1"),
    "other bytes of the other rank": _changed("rank-00000.bin", lambda data: b"\1" + data[1:]),
    "another manifest": _changed(manifest.FILE, lambda data: data.replace(b"0.1", b"0.2")),
    "no manifest": _changed(manifest.FILE, lambda data: b""),
    "a copy": _own_copy(lambda copy: None),
    "a copy with other bytes": _own_copy(lambda copy: [*map(_flip, copy.glob("*.bin"))]),
    "a copy without bytes": _own_copy(lambda copy: (copy / "rank-00001.bin").unlink()),
    "another step loaded": lambda turn: turn.load(STEP if turn.odd else None),
    "a part loaded": lambda turn: turn.require(
        load(turn.tree(), turn.root, STEP, partial=turn.odd)
    ),
    "another dtype loaded": _reloaded("plain", lambda _: ROWS.double()),
    "another shape loaded": _reloaded("plain", lambda _: ROWS[:4]),
    "another placement loaded": _reloaded("sharded", lambda t: t.placed(ROWS, 1)),
    "another mesh loaded": lambda turn: turn.require(
        load(turn.tree(_another_mesh(turn)), turn.root)
    ),
    "a gradient loaded": _reloaded("plain", lambda _: ROWS.clone().requires_grad_()),
    "deleted meanwhile": _deleted_meanwhile,
    "a full disk": _fails(storage.RankFiles, "_write", FULL),
    "a full disk at the first": _fails(storage.RankFiles, "_write", FULL, 0),
    "a full disk at the manifest": _fails(storage.RankFiles, "finish", FULL, 0),
    "a read-only folder": _fails(storage.RankFiles, "write_data", READ_ONLY),
    "a read-only root": _fails(folders.Writer, "begin", READ_ONLY, 0),
    "a rename that fails": _fails(Path, "rename", READ_ONLY, 0),
    "old ones that stay": _fails(folders, "prune", READ_ONLY, 0),
    "too little memory": _fails(storage.RankFiles, "_write", MemoryError("out of memory")),
    "a mistake half way": _fails(storage.RankFiles, "_write", KeyError("mode")),
    "a read that fails": _read_fails(READ_ONLY),
    "a mistake in a read": _read_fails(KeyError("mode")),
    "late": lambda turn: _late(turn, 2),
    "in a thread": _in_a_thread,
    "in inference": _within(torch.inference_mode),
    "without gradients": _within(torch.no_grad),
    "on another default device": _within(lambda: torch.device("meta")),
    "another job": _another_job,
}

ENDS: Final[Mapping[str, Callable[[Turn], Any]]] = {
    "before it begins": lambda turn: turn.struck(folders.Writer, "__init__", signal.SIGKILL),
    "while it writes": lambda turn: turn.struck(storage.RankFiles, "_write", signal.SIGKILL),
    "after it has written": lambda turn: turn.struck(os, "fsync", signal.SIGKILL),
    "while it is read": lambda turn: turn.struck(storage.RankFilesReader, "_read", signal.SIGKILL),
    "frozen while it writes": lambda turn: turn.struck(storage.RankFiles, "_write", signal.SIGSTOP),
    "frozen while it is read": lambda turn: turn.struck(
        storage.RankFilesReader, "_read", signal.SIGSTOP
    ),
}
"""Moments at which the odd rank is killed, or frozen."""
