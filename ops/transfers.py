"""Messages between single ranks, as `send` and `recv` of torch.distributed exchange them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor

from shardmap_torch.collectives.protocol import is_checker
from shardmap_torch.collectives.scope import current_scope
from shardmap_torch.core.source_location import Site, call_site
from shardmap_torch.errors import CollectiveError
from shardmap_torch.ops.permute import ppermute


class Transfers(Protocol):
    """Sends and receives tensors along axes; a peer is a position in the group of these."""

    def send(self, axes: tuple[str, ...], peer: Any, tag: int, x: Tensor) -> None:
        """Sends a tensor to a peer."""
        ...

    def receive(
        self, axes: tuple[str, ...], peer: Any, tag: int, like: Tensor
    ) -> Callable[[], Tensor]:
        """Returns what waits for the next tensor of a peer, which is `like` one."""
        ...


@dataclass(frozen=True)
class _Sent:
    """A tensor that each rank has sent to one other."""

    axes: tuple[str, ...]
    perm: tuple[tuple[int, int], ...]
    tag: int
    x: Tensor
    site: Site | None


@dataclass
class _Typed:
    """Pairs what all ranks send with what all receive, which together is a permutation."""

    sent: list[_Sent] = field(default_factory=list)

    def send(self, axes: tuple[str, ...], peer: Any, tag: int, x: Tensor) -> None:
        """Notes what all ranks send.

        Raises:
            CollectiveError: two of them send to one rank.
        """
        targets = peers_of(axes, peer)
        if sorted(targets) != [*range(len(targets))]:
            raise CollectiveError(_RING.format("send", "to", targets))
        self.sent.append(_Sent(axes, tuple(enumerate(targets)), tag, x, call_site()))

    def receive(
        self, axes: tuple[str, ...], peer: Any, tag: int, like: Tensor
    ) -> Callable[[], Tensor]:
        """Returns what finds the first tensor that has been sent so.

        Raises:
            CollectiveError: two ranks receive from one.
        """
        sources = peers_of(axes, peer)
        perm = tuple(sorted((source, target) for target, source in enumerate(sources)))

        def find() -> Tensor:
            found = next(
                (s for s in self.sent if (s.axes, s.perm, s.tag) == (axes, perm, tag)), None
            )
            if found is None:
                raise CollectiveError(
                    "recv of torch.distributed is waited for, and no rank has sent such a tensor: "
                    f"ranks receive from {sources} with tag {tag}, and "
                    f"{[[*s.perm] for s in self.sent] or 'nothing'} is on its way."
                )
            self.sent.remove(found)
            if (found.x.shape, found.x.dtype) != (like.shape, like.dtype):
                raise CollectiveError(
                    f"recv of torch.distributed gets {found.x.dtype} {[*found.x.shape]}, and its "
                    f"tensor is {like.dtype} {[*like.shape]}."
                )
            return ppermute(found.x, axes, found.perm)

        return find


_RING: Final = (
    "{} of torch.distributed is called with the same peer on several ranks: ranks 0, 1, ... {} "
    "{}, and each has to have one of its own, as (rank + 1) % size."
)


def peers_of(axes: tuple[str, ...], peer: Any) -> list[int]:
    """Returns the peer of each position along axes, of a number that differs by rank."""
    scope = current_scope()
    assert scope is not None  # a body runs
    spread: Any = getattr(peer, "along", None)
    size = scope.backend.mesh.num_ranks(axes)
    return [peer] * size if spread is None else spread(axes)


_TYPED: Final[WeakKeyDictionary[Any, _Typed]] = WeakKeyDictionary()
"""Messages on their way, by the backend of a check."""


def require_received(backend: Any) -> None:
    """Requires, at the end of a body that is checked, that all it has sent has been received.

    Raises:
        CollectiveError: it has not.
    """
    typed = _TYPED.pop(backend, None)
    if typed is not None and typed.sent:
        raise CollectiveError(
            "send of torch.distributed is called in the body, and nothing receives what it sends, "
            f"or what receives is not waited for.\n  at {typed.sent[0].site}"
        )


def transfers_of(backend: Any) -> Transfers:
    """Returns what sends and receives for the body of a backend."""
    if is_checker(backend):
        return _TYPED.setdefault(backend, _Typed())
    sender: Transfers | None = getattr(backend, "transfers", None)
    if sender is None:
        raise CollectiveError(
            "send and recv of torch.distributed need ranks that run by themselves."
        )
    return sender
