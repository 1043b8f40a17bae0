"""Starts and stops the one `Control` of this process, and torch's default group.

The agents of torchrun keep one store for all attempts of a job that it starts again, and the
workers of each meet in it under the same keys (torch 2.13, `torch.distributed.rendezvous`): one
that comes first may find the address of one that has been killed, and fails or hangs. The number of
restarts is no common key, since the agents of several hosts count each for itself. So each attempt
has keys of its own.
"""

import atexit
import os
import sys
import time
import uuid
from datetime import timedelta
from functools import cache
from types import TracebackType
from typing import Any, Final, NoReturn, cast

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardmap_torch.control.control import Control
from shardmap_torch.control.parting import BY
from shardmap_torch.control.waiting import PeerWatch, within
from shardmap_torch.core.dtensors import is_dtensor
from shardmap_torch.core.source_location import users_part
from shardmap_torch.core.torch_private.engine import Store
from shardmap_torch.errors import MeshError, ShardMapError

AGENT_STORE: Final = "TORCHELASTIC_USE_AGENT_STORE"
"""Set by torchrun's agents to whether they host the store; without it rank 0 makes a new one."""


class _Current:
    def __init__(self) -> None:
        self.control: Control | None = None
        self.peers: PeerWatch | None = None
        self.world: object = None


_CURRENT: Final = _Current()


def current() -> Control | None:
    """Returns the control of the default process group; None before the first mesh over it.

    None too where there is nothing to compare; see `start`.
    """
    return _CURRENT.control


def call_number() -> int:
    """Returns the number of the newest call, which its backward keeps; 0 before the first."""
    control = _CURRENT.control
    return 0 if control is None else control.progress.call[0]


def peers() -> PeerWatch | None:
    """Returns the watch over waits for single peers; None before the first mesh over it."""
    return _CURRENT.peers


def start(timeout: timedelta) -> Control | None:
    """Starts the control, or shortens its deadline; every rank must call it.

    Returns None for one process, which has no other to compare with.
    """
    world = dist.group.WORLD
    if _CURRENT.control is not None and _CURRENT.world is world:
        _CURRENT.control.set_timeout(timeout)
        return _CURRENT.control
    if _CURRENT.control is not None:
        stop()
    # torch's backend "fake" runs a program on one process: the other ranks do not exist.
    if dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return None
    _CURRENT.control = within(timeout, "Starting the control of the run", lambda: Control(timeout))
    _CURRENT.world = world
    _CURRENT.peers = PeerWatch(_CURRENT.control.waiting)
    pass_on_uncaught_errors()
    _note_updates()
    _leave_when_forked()
    # Runs before torch's own handlers: a thread that returns from C++ while the interpreter exits
    # aborts the process.
    atexit.register(stop)
    return _CURRENT.control


def stop() -> None:
    """Posts that this process ends, and ends the threads."""
    control, watch = _CURRENT.control, _CURRENT.peers
    _CURRENT.control = _CURRENT.peers = _CURRENT.world = None
    atexit.unregister(stop)
    if watch is not None:
        watch.close()
    if control is not None:
        control.exit()


def pass_on_uncaught_errors() -> None:
    """Tells other ranks what ends this one, and shows the user's frames of our errors alone."""
    previous = sys.excepthook
    if getattr(previous, "_shardmap_torch", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        if type(_CURRENT.control) is Control:
            _CURRENT.control.exit(error)
        if isinstance(error, ShardMapError):  # autograd and modules add frames on the way
            error.__traceback__ = trace = users_part(error)
        return previous(kind, error, trace)

    hook._shardmap_torch = True  # type: ignore[attr-defined]
    sys.excepthook = hook


class _Forked:
    """Stands for the control in a process that was forked, whose messages would be those of it."""

    def __getattr__(self, name: str) -> NoReturn:
        raise MeshError(
            "a process that was forked, as a worker of a DataLoader, is no rank of a mesh.\n"
            "Fix: call functions of shardmap_torch in the process that made the mesh, as with "
            "device_put(batch, mesh, spec) in the loop, and none in a Dataset or a collate_fn."
        )


@cache
def _leave_when_forked() -> None:
    def leave() -> None:
        if _CURRENT.control is not None:
            atexit.unregister(stop)
            _CURRENT.control = cast(Control, _Forked())

    if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
        os.register_at_fork(after_in_child=leave)


@cache
def _note_updates() -> None:
    """Has steps of torch.optim compared, where all processes have a part of the parameters."""

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        control = None if torch.compiler.is_compiling() else _CURRENT.control
        if type(control) is not Control:
            return
        parameter: Any = next(
            (x for group in optimizer.param_groups for x in group["params"]), None
        )
        if is_dtensor(parameter) and parameter.device_mesh.size() == control.size:
            found = ((k, group.get(k)) for group in optimizer.param_groups for k in _RATES)
            rates = [f"{k}={x}" for k, x in found if x and isinstance(x, float | tuple)]
            by = f"{BY}{', '.join(dict.fromkeys(rates))}" * bool(rates)
            control.note(f"a step of {type(optimizer).__name__}{by}")

    register_optimizer_step_post_hook(note)


_RATES: Final = ("lr", "momentum", "betas", "weight_decay")
_GROUP: Final = "Starting the default process group"


def init_process_group(backend: str, limit: timedelta | None) -> None:
    """Starts the default group from torchrun's environment, under keys of this attempt.

    Raises:
        CommunicationError: not all ranks have come in time.
    """
    timeout = limit or dist.default_pg_timeout
    options: dict[str, Any] = {}
    if os.environ.get(AGENT_STORE) == str(True):
        make = lambda: next(rendezvous("env://", timeout=timeout))  # noqa: E731
        store, rank, size = within(timeout, _GROUP, make)
        name = within(timeout, _GROUP, lambda: meet(store, rank, size, timeout))
        own = dist.PrefixStore(name, store)  # type: ignore[attr-defined]  # torch exports it
        options = {"store": own, "rank": rank, "world_size": size}

    def init() -> None:
        dist.init_process_group(backend, timeout=limit, **options)

    within(timeout, _GROUP, init, on_thread=False)


def meet(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """Returns a name that the ranks of this attempt agree on, and no earlier attempt has had.

    Rank 0 makes the name, and answers requests until each rank has said that it has it. A request
    carries a word of its own, so that no answer to a killed process is taken for one's own.

    Raises:
        RuntimeError: a rank has not come in time.
    """
    if rank > 0:
        return _ask(store, rank)
    name = f"attempt {uuid.uuid4().hex}"
    missing = set(range(1, size))
    end = time.monotonic() + timeout.total_seconds()
    while missing:
        if time.monotonic() > end:
            raise RuntimeError(f"nothing was heard from ranks {sorted(missing)}")
        for other in sorted(missing):
            _answer(store, other, name)
        missing = {other for other in missing if not store.check([f"{name}/{other}"])}
        time.sleep(0.005 * bool(missing))
    return name


def _ask(store: Store, rank: int) -> str:
    word = uuid.uuid4().hex
    store.set(f"attempt of {rank}", word)
    name: str = store.get(f"answer to {word}").decode()
    store.set(f"{name}/{rank}", "")
    return name


def _answer(store: Store, rank: int, name: str) -> None:
    if store.check([f"attempt of {rank}"]):
        store.set(f"answer to {store.get(f'attempt of {rank}').decode()}", name)
