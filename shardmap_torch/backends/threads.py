"""Backend of simulated ranks that run as threads, and meet at every collective.

One thread runs at a time, and hands over when it has to wait. So a run is deterministic, random
draws included, and a deadlock is found at once instead of hanging.
"""

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, TypeVar

import torch
from torch import Tensor

from shardmap_torch.backends.rank import RankBackend
from shardmap_torch.backends.reference import REFERENCE, Stack
from shardmap_torch.backends.traffic import pass_door
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.control.messages import by_ranks, ranks_text
from shardmap_torch.core.ambient import ThreadStack
from shardmap_torch.core.modes import AutocastState, autocast_state, with_autocast, without_autocast
from shardmap_torch.core.source_location import call_site
from shardmap_torch.core.torch_private.engine import (
    TransformType,
    current_graph_task_id,
    retrieve_all_functorch_interpreters,
)
from shardmap_torch.errors import CollectiveMismatchError, TransformError, listing, show_shape
from shardmap_torch.mesh import Mesh, current_mesh, use_mesh
from shardmap_torch.types import V

T = TypeVar("T")


@dataclass(frozen=True)
class Post:
    """The contribution of one rank to a collective."""

    members: tuple[int, ...]
    what: str
    site: str
    move: str
    collective: Collective
    value: Tensor

    def __str__(self) -> str:
        """Formats it as `all_reduce('tp', Partial -> I) of float32[4] at model.py:12`."""
        return f"{self.what} at {self.site}"


class _Aborted(BaseException):
    """Unwinds a rank because another one failed; never seen outside."""


Transfer = tuple[int, int, int]
"""The ranks that send and receive a tensor, and its tag."""


class Rendezvous:
    """Lets the ranks of one mesh run in turn and meet at collectives."""

    def __init__(self, mesh: Mesh) -> None:
        """One instance serves one run of all ranks."""
        self.mesh = mesh
        self._turns = [threading.Semaphore(0) for _ in range(mesh.size)]
        self._ready = set(range(mesh.size))
        self._waiting: dict[int, Post] = {}
        self._inbox: dict[int, Tensor] = {}
        self._sent: dict[Transfer, list[Tensor]] = {}
        self._awaited: dict[int, Transfer] = {}
        self._failure: BaseException | None = None
        self.at_end: list[Callable[[], None]] = []

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Runs `work(rank)` for every rank and returns the results in rank order.

        Raises:
            CollectiveMismatchError: the ranks did not call the same collectives.
            Exception: whatever `work` raised first, with a note that names the rank.
        """
        results: dict[int, T] = {}
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._run_rank, rank, work, results, thread_state()),
                name=f"rank {rank}",
                daemon=True,
            )
            for rank in range(self.mesh.size)
        ]
        try:
            for thread in threads:
                thread.start()
            self._turns[0].release()
            for thread in threads:
                thread.join()
        except BaseException as error:  # such as KeyboardInterrupt
            self._failure = self._failure or error
            for turn in self._turns:  # so that no rank waits for a turn that never comes
                turn.release()
            raise
        finally:
            for callback in self.at_end:
                callback()
        if self._failure is not None:
            raise self._failure
        return [results[rank] for rank in range(self.mesh.size)]

    def _run_rank(
        self,
        rank: int,
        work: Callable[[int], T],
        results: dict[int, T],
        state: "ThreadState",
    ) -> None:
        self._turns[rank].acquire()
        try:
            if self._failure is None:
                with state.entered():
                    results[rank] = work(rank)
        except _Aborted:
            pass
        except BaseException as error:
            self._fail(error, rank)
        finally:
            self._ready.discard(rank)
            self._waiting.pop(rank, None)  # of a collective that has failed on this thread
            self._hand_over()

    def _fail(self, error: BaseException, rank: int) -> None:
        if self._failure is None:
            place = ", ".join(f"{a}={i}" for a, i in self.mesh.coordinates(rank).items())
            error.add_note(f"Raised on rank {rank} ({place}) of the {self.mesh}.")
            self._failure = error

    def on_operation(self, rank: int, post: Post) -> Tensor:
        """Contributes `post`, waits for the other members, and returns this rank's result."""
        if self._failure is not None:
            raise _Aborted
        self._waiting[rank] = post
        posts = [self._waiting.get(member) for member in post.members]
        if all(p is not None and p.members == post.members for p in posts):
            self._resolve(post.members, [p for p in posts if p is not None])
        else:
            self._ready.discard(rank)
            self._hand_over()
            self._turns[rank].acquire()
            if self._failure is not None:
                raise _Aborted
        return self._inbox.pop(rank)

    def send(self, transfer: Transfer, x: Tensor) -> None:
        """Leaves a tensor for the rank that receives it, which goes on if it waits."""
        self._sent.setdefault(transfer, []).append(x)
        target = transfer[1]
        if self._awaited.get(target) == transfer:
            del self._awaited[target], self._waiting[target]
            self._ready.add(target)

    def receive(self, transfer: Transfer, post: Post) -> Tensor:
        """Waits for a tensor; `post` describes it."""
        rank = transfer[1]
        if not self._sent.get(transfer):
            self._awaited[rank], self._waiting[rank] = transfer, post
            self._ready.discard(rank)
            self._hand_over()
            self._turns[rank].acquire()
            if self._failure is not None:
                raise _Aborted
        return self._sent[transfer].pop(0)

    def _resolve(self, members: tuple[int, ...], posts: list[Post]) -> None:
        if len({post.what for post in posts}) > 1:
            raise self._mismatch("The ranks of one axis called different collectives:")
        first = posts[0]
        with without_autocast():
            stacked = torch.stack([post.value for post in posts])
            result = REFERENCE[first.move](first.collective, Stack(stacked, True, len(posts)))
        for member, value in zip(members, result.every().unbind(0), strict=True):
            # Ranks share no memory: a copy of what is equal, and for what varies a tensor with a
            # version counter of its own.
            self._inbox[member] = value.data if result.varies else value.clone()
            del self._waiting[member]
            self._ready.add(member)

    def _hand_over(self) -> None:
        if not self._ready and self._waiting and self._failure is None:
            self._failure = self._mismatch(
                "No rank can go on: each waits for ranks that have returned or wait elsewhere."
            )
        if self._failure is not None:
            self._ready |= set(self._waiting)
            self._waiting.clear()
        if self._ready:
            self._turns[min(self._ready)].release()

    def _mismatch(self, head: str) -> CollectiveMismatchError:
        waiting = {rank: f"in {post}" for rank, post in self._waiting.items()}
        return CollectiveMismatchError(listing(head, [*by_ranks(waiting), *self._returned()]))

    def _returned(self) -> Iterator[str]:
        gone = sorted(set(range(self.mesh.size)) - set(self._waiting) - self._ready)
        if gone:
            yield f"{ranks_text(gone)} {'has' if len(gone) == 1 else 'have'} returned"


_NO_FORWARD_MODE: Final = (
    "Forward mode (jvp, jacfwd, hessian) of a collective cannot begin in the body on simulated "
    "ranks that run as threads, which share torch's forward-mode levels. Check the function, on a "
    'mesh of make_mesh(..., simulate="vmap"), which says why a body cannot run as one batched '
    "program."
)


PAUSES: Final[ThreadStack[tuple[Callable[[], None], Callable[[], None]]]] = ThreadStack()
"""Calls to make before and after every meeting of this thread's rank.

Meanwhile other ranks run, with which it shares the state that torch keeps per process, such as the
random generators.
"""


class ThreadBackend(RankBackend):
    """One rank of a rendezvous; it sends and receives for `torch.distributed` too."""

    def __init__(self, mesh: Mesh, rank: int, rendezvous: Rendezvous) -> None:
        """Places `rank`; `rendezvous` is replaced for the backward run."""
        super().__init__(mesh, rank)
        self.rendezvous = rendezvous

    @property
    def transfers(self) -> "ThreadBackend":
        """Itself: see `ops.transfers`."""
        return self

    def send(self, axes: tuple[str, ...], peer: int, tag: int, x: Tensor) -> None:
        """Sends a copy of a tensor to a peer along axes."""
        target = self.mesh.peers(axes, self.place)[peer]
        self.rendezvous.send((self.rank, target, tag), x.detach().clone())

    def receive(
        self, axes: tuple[str, ...], peer: int, tag: int, like: Tensor
    ) -> Callable[[], Tensor]:
        """Returns what waits for a tensor of a peer."""
        source = self.mesh.peers(axes, self.place)[peer]
        what = f"recv of {show_tensor(like)} from rank {source}"
        post = Post((), what, _place(), "", Collective("recv", V, V, axes), like)
        return lambda: self._meet(lambda: self.rendezvous.receive((source, self.rank, tag), post))

    def _meet(self, meeting: Callable[[], Tensor]) -> Tensor:
        """Lets other ranks run meanwhile, with which this one shares torch's state."""
        pauses = list(PAUSES.items)
        for leave, _ in reversed(pauses):
            leave()
        received = meeting()
        for _, back in pauses:
            back()
        return received

    def markers(self, axes: Sequence[str]) -> tuple[Tensor, ...]:
        """Returns none: each rank runs the body by itself.

        Raises:
            TransformError: in forward mode begun in the body, whose levels all threads share.
        """
        # Of this thread: a level may be that of an independent one, whose transforms it alone has.
        if any(t.key() == TransformType.Jvp for t in retrieve_all_functorch_interpreters()):
            raise TransformError(_NO_FORWARD_MODE)
        return ()

    def communicate(self, move: str, collective: Collective, x: Tensor) -> Tensor:
        members = self.mesh.peers(collective.axes, self.place)
        pass_door(collective, x.nbytes, len(members))
        # The source of a broadcast and the pairs of a permutation must agree as well.
        what = f"{collective}{_arguments(collective, move)} of {show_tensor(x)}"
        post = Post(members, what, _place(), move, collective, x.detach())
        return self._meet(lambda: self.rendezvous.on_operation(self.rank, post))


def show_tensor(x: Tensor) -> str:
    """Formats it as `float32[4, 2]`."""
    return show_shape(x.dtype, [] if x.is_nested else x.shape)


def _place() -> str:
    """Returns the user's line; for collectives that autograd runs, "the backward pass"."""
    if current_graph_task_id() != -1:
        return "the backward pass"
    site = call_site()
    return f"{Path(site.file).name}:{site.line}" if site is not None else "an unknown line"


_SHOWN: Final = ("dim", "concat_dim", "tiled", "sizes", "concat_sizes", "perm", "source", "lengths")
_DEFAULTS: Final = {field.name: field.default for field in fields(Collective)}


def _arguments(collective: Collective, move: str) -> str:
    texts = [f"op={move!r}"] * (move != collective.move)
    texts += [
        f"{name}={getattr(collective, name)}"
        for name in _SHOWN
        if getattr(collective, name) != _DEFAULTS[name]
    ]
    return f" with {', '.join(texts)}" if texts else ""


@dataclass(frozen=True)
class ThreadState:
    """Thread-local state that a new thread must copy: torch's modes and `use_mesh`."""

    grad: bool
    inference: bool
    autocast: AutocastState
    device: torch.device
    mesh: Mesh | None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Gives this thread the state for a while."""
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(with_autocast(self.autocast))
            if self.device.type != "cpu":
                stack.enter_context(self.device)
            if self.mesh is not None:
                stack.enter_context(use_mesh(self.mesh))
            yield


def thread_state() -> ThreadState:
    """Returns the state of this thread."""
    return ThreadState(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast_state(),
        torch.get_default_device(),
        current_mesh(),
    )
