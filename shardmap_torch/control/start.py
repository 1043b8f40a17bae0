"""Starts and stops the one `Control` of this process."""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, TypeVar

import torch.distributed as dist

from shardmap_torch.control.control import Control
from shardmap_torch.control.peers import PeerWatch
from shardmap_torch.errors import CommunicationError

T = TypeVar("T")


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
    return 0 if control is None else control.call


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
    _pass_on_uncaught_errors()
    # Runs before torch's own handlers: a thread that returns from C++ while the interpreter exits
    # aborts the process.
    atexit.register(stop)
    return _CURRENT.control


def within(limit: timedelta | None, what: str, make: Callable[[], T]) -> T:
    """Runs a function that may block in torch's store on its own thread, for a limited time.

    Raises:
        CommunicationError: it has not ended in time: the store is frozen or unreachable, or a rank
            has not called it.
    """
    done: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            done.append(make())
        except BaseException as error:  # raised where the caller waits
            errors.append(error)

    thread = threading.Thread(target=run, name=f"shardmap {what}", daemon=True)
    thread.start()
    thread.join(None if limit is None else limit.total_seconds() + 1)
    if errors and not isinstance(errors[0], RuntimeError):
        raise errors[0]
    if not done:
        why = f"{errors[0]}".splitlines()[0] if errors else "the store or a rank does not answer"
        rank = dist.get_rank() if dist.is_initialized() else os.environ["RANK"]
        raise CommunicationError(
            f"{what} has not ended within {limit} on rank {rank}: {why}. Every process "
            "must make the same meshes in the same order, and the process that hosts the store "
            "must be alive."
        ) from (errors[0] if errors else None)
    return done[0]


def stop() -> None:
    """Posts that this process ends, and ends the threads."""
    control, watch = _CURRENT.control, _CURRENT.peers
    _CURRENT.control = _CURRENT.peers = _CURRENT.world = None
    atexit.unregister(stop)
    if watch is not None:
        watch.close()
    if control is not None:
        control.exit()


def _pass_on_uncaught_errors() -> None:
    previous = sys.excepthook
    if getattr(previous, "_shardmap_torch", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        if _CURRENT.control is not None:
            _CURRENT.control.exit(error)
        return previous(kind, error, trace)

    hook._shardmap_torch = True  # type: ignore[attr-defined]
    sys.excepthook = hook
