"""Tensors that share memory or do not, as strides decide: `y = x.reshape(-1)`.

Strides differ between a check, whose tensors are contiguous, and shards, which lie as the global
tensor does, and so between meshes. A write into one of the two may change the other, or not: after
it, the other is stale, and reading it is refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from shardmap_torch.checker.rewrites.aliases import Host, memory_of, reject_stale
from shardmap_torch.checker.rules.infer import tensors_of
from shardmap_torch.core.autograd_state import NONE as NO_BACKWARD
from shardmap_torch.core.autograd_state import running_backward
from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.torch_private.engine import DisableTorchFunction

_READ_AGAIN: Final = (
    "is read after a write into one that may share its memory: whether reshape, flatten and "
    "contiguous copy depends on strides, which differ between meshes"
)

MAY_COPY: Final = frozenset(
    (
        *(Tensor.reshape, torch.reshape, Tensor.reshape_as, Tensor.contiguous),
        *(Tensor.flatten, torch.flatten, Tensor.ravel, torch.ravel),
    )
)
"""Functions whose result may have the memory of their operand."""

_Side: TypeAlias = object
"""Tensors that certainly share memory: a storage's address, or a mark of some of its views."""


class Copies:
    """Tensors that may be copies of one another or may share memory."""

    def __init__(self) -> None:
        self._related: dict[_Side, set[_Side]] = {}
        self._stale: set[_Side] = set()

    @property
    def any(self) -> bool:
        """Returns whether there are any."""
        return bool(self._related)

    @property
    def are_stale(self) -> bool:
        """Returns whether some of them may have been written to."""
        return bool(self._stale)

    def reject_stale(self, name: str, read: Iterable[Tensor]) -> None:
        """Refuses tensors whose values in a run are unknown because of a write.

        In a backward it does not: there autograd compares the versions of what it has saved.
        """
        if self._stale and running_backward() == NO_BACKWARD:
            if any(_side(base_of(x)) in self._stale for x in read):
                reject_stale(name, _READ_AGAIN)

    def relate(self, host: Host, source: Tensor, out: Tensor) -> Tensor:
        """Notes that a result of `MAY_COPY` may share memory with its operand; returns it.

        Nothing may be written into inputs and closures, so that it does not matter for them.
        """
        with host.paused(), DisableTorchFunction():
            if host.storage_type(source).read_only is not None or (
                out.is_leaf and out.requires_grad
            ):
                return out
            if out is source:
                out = source.view_as(source)
            base, own = base_of(out), _side(base_of(source))
            if host.storage_type(out) is host.storage_type(source):
                base._shardmap_side = object()  # type: ignore[attr-defined]  # ours
            other = _side(base)
        if own in self._stale:
            self._stale.add(other)
        together = self._related.get(own, {own}) | self._related.get(other, {other})
        self._related.update(dict.fromkeys(together, together))
        return out

    def follow(
        self,
        host: Host,
        arguments: Mapping[str, Any],
        written: Sequence[Tensor],
        out: Any,
        is_view: bool,
    ) -> None:
        """Marks stale what a write may change elsewhere; views are on the side of their operand."""
        if not self._related:
            return
        read = [x for value in arguments.values() for x in tensors_of(value)]
        if not is_view:
            self.reject_stale(host.name, read)
        for side in {_side(x) for x in written}:
            self._stale |= self._related.get(side, {side}) - {side}
        views = {memory_of(x): x.__dict__["_shardmap_side"] for x in read if is_marked(x)}
        for y in tensors_of(out) if views else ():
            if memory_of(y) in views:
                y._shardmap_side = views[memory_of(y)]  # type: ignore[attr-defined]  # ours


def _side(tensor: Tensor) -> _Side:
    return tensor.__dict__.get("_shardmap_side") or memory_of(tensor)


def is_marked(tensor: Tensor) -> bool:
    """Returns whether a tensor is on a side of its own, beside others with its storage."""
    return "_shardmap_side" in tensor.__dict__
