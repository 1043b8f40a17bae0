"""Tensors whose contents in a run a check cannot tell, since it does not see what memory they have.

* `y = x.reshape(-1)` is a copy or a view, as strides decide. Those differ between a check, whose
  tensors are contiguous, and shards, which have the strides of the global tensor.
* `y = x[i]` with a tensor `i` is a view in a run. Interpreted it is a copy: where it begins is
  not known.
* What a call of torch.distributed writes with `async_op=True` is unknown until it is waited for.

A write into one of two tensors that may share memory may change the other: after it the other is
stale, and reading it is refused.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import Tensor

from shardmap_torch.checker.ir.paths import Numbers
from shardmap_torch.checker.ir.program import StorageType
from shardmap_torch.checker.rules.infer import Types, tensors_of
from shardmap_torch.core.autograd_state import NONE as NO_BACKWARD
from shardmap_torch.core.autograd_state import running_backward
from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.source_location import Site
from shardmap_torch.core.torch_private.engine import DisableTorchFunction
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.mesh import Mesh
from shardmap_torch.types import AxisType

_BY_STRIDES: Final = (
    "at {} a tensor is read after a write into one that may share its memory: whether reshape, "
    "flatten and contiguous copy depends on strides, which differ between meshes.\n"
    "Fix: take it again after the write, or clone it before."
)
_OF_COTANGENT: Final = (
    "in the backward at {} a gradient is used after a write into memory that it may share: whether "
    "contiguous, reshape and flatten copy depends on strides, which are those of the caller's use, "
    "and autograd hands the same memory to others.\n"
    "Fix: return the tensor that is written, or clone the gradient before the write."
)
_BY_POSITION: Final = (
    "at {} a tensor is read after a write into one that shares its memory, as x and x[i] do where "
    "i is a tensor.\n"
    "Fix: write with x[i] = ..., x[i] += ... or x[i : i + n] = ...; take x[i] again after a write "
    "into x, or clone it before."
)
_ARRIVING: Final = (
    "{} uses what a call of torch.distributed writes, which has not been waited for.\n"
    "Fix: call wait() first on what async_op=True returns; use what a function of "
    "torch.distributed.nn.functional returns, and not its output argument."
)
_OF_FORWARD: Final = (_BY_STRIDES, _BY_POSITION)
_LENT: Final = "a call of torch.distributed may still read"

MAY_COPY: Final = frozenset(
    (
        *(Tensor.reshape, torch.reshape, Tensor.reshape_as, Tensor.contiguous),
        *(Tensor.flatten, torch.flatten, Tensor.ravel, torch.ravel),
    )
)
"""Functions whose result may have the memory of their operand."""

_CONTIGUOUS: Final = frozenset("mm addmm bmm baddbmm mv embedding empty zeros ones full".split())
"""Operations that make contiguous memory, whatever the strides of their operands."""

_Side: TypeAlias = object
"""Tensors that certainly share memory: a storage's address, or a mark of some of its views."""


class Host(Protocol):
    """An interpreter, as the functions of this package see it."""

    name: str
    mesh: Mesh
    numbers: Numbers
    copies: "Copies"

    def needs_ranks(self, what: str = "") -> None:
        """Records that `torch.func.vmap` cannot run the body as ranks do."""

    def storage_type(self, tensor: Tensor) -> StorageType:
        """Returns the type of a tensor's storage."""

    def by_axis(self, types: Types) -> Mapping[str, AxisType]:
        """Returns types by the names of their axes."""

    def base(self, tensor: Tensor) -> Tensor:
        """Returns the fake of a tensor, without transforms."""

    def paused(self) -> AbstractContextManager[None]:
        """Ignores operations in a context."""

    def flows(self, tensor: Tensor) -> bool:
        """Returns whether a gradient flows through a tensor."""

    def site(self) -> tuple[Site | None, bool]:
        """Returns the user's line, and whether a backward runs."""

    def own_site(self) -> Site | None:
        """Returns the line of the user's own backward or hook that runs; None if none does."""


class Copies:
    """Tensors that may be copies of one another or may share memory."""

    def __init__(self) -> None:
        self._related: dict[_Side, set[_Side]] = {}
        self._stale: dict[_Side, str] = {}
        self._rows: set[_Side] = set()
        self._picked: list[tuple[Tensor, Tensor, Any]] = []
        # One entry for each call that has not been waited for.
        self._arriving: list[_Side] = []
        self._lent: list[StorageType] = []

    @property
    def any(self) -> bool:
        """Returns whether there are any."""
        return bool(self._related or self._stale)

    @property
    def are_stale(self) -> bool:
        """Returns whether some of them may have been written to."""
        return bool(self._stale)

    def reject_stale(self, host: Host, read: Iterable[Tensor], at: Site | None = None) -> None:
        """Refuses tensors whose values in a run are unknown because of a write; `at` is the line.

        Not in autograd's own steps, which compare the versions of what the forward has saved, but
        for gradients.
        """
        if not self._stale:
            return
        in_own_steps = running_backward() != NO_BACKWARD and at is None and not host.own_site()
        for why in (self._stale.get(_side(base_of(x))) for x in read):
            if why is not None and not (in_own_steps and why in _OF_FORWARD):
                raise ShardTypeError(f"{host.name}: {why.format(at or host.site()[0])}")

    def relate(self, host: Host, source: Tensor, out: Tensor) -> Tensor:
        """Notes that a result of `MAY_COPY` may share memory with its operand; returns it.

        Nothing may be written into inputs and closures, so that it does not matter for them; and
        what a product has made is contiguous in runs too.
        """
        with host.paused(), DisableTorchFunction():
            storage_type = host.storage_type(source)
            is_known = storage_type.maker in _CONTIGUOUS and base_of(source).is_contiguous()
            is_known |= storage_type.read_only is not None
            if is_known or (out.is_leaf and out.requires_grad):
                return out
            if out is source:
                out = source.view_as(source)
            base = base_of(out)
            if host.storage_type(out) is host.storage_type(source):
                base._shardmap_side = object()  # type: ignore[attr-defined]  # ours
            self._link(_side(base_of(source)), _side(base))
        return out

    def lend(self, host: Host, gradient: Tensor) -> Tensor:
        """Returns a gradient for code that may write into it, whose memory others may have."""
        return self.relate(host, gradient, gradient)

    def pick(self, host: Host, source: Tensor, dim: int, index: Tensor) -> Tensor:
        """Copies entries along a dim, which in a run are a view of `source`."""
        host.needs_ranks()  # torch.func.vmap takes no number out of a tensor
        row = source.index_select(dim, index)
        with host.paused(), DisableTorchFunction():
            host.storage_type(row).read_only = host.storage_type(source).read_only
            side = _side(host.base(row))
            self._rows.add(side)
            self._link(_side(host.base(source)), side)
        return row

    def remember_pick(self, row: Tensor, source: Tensor, index: Any) -> Tensor:
        """Remembers that `source[index]` is `row`."""
        self._picked.append((row, source, index))
        return row

    @contextmanager
    def writing_back(self, host: Host, x: Tensor, index: Any, value: Any) -> Iterator[None]:
        """Lets `x[index] = value` be written in this context though `value`, a part of x, has been.

        `x[i] += 1` takes x[i], writes into it, and assigns it. As the two share memory in a run,
        they have the same entries afterwards, and the rest of x is what it was.
        """
        is_part = any(
            value is row and index is same and _side(host.base(x)) == _side(host.base(source))
            for row, source, same in self._picked
        )
        pair = [_side(host.base(x)), _side(host.base(value))] if is_part else []
        if is_part and pair[1] not in self._stale:
            self._stale.pop(pair[0], None)
        yield
        for side in pair:
            self._stale.pop(side, None)

    def follow(
        self,
        host: Host,
        arguments: Mapping[str, Any],
        written: Sequence[Tensor],
        out: Any,
        is_view: bool,
    ) -> None:
        """Marks stale what a write may change elsewhere; views are on the side of their operand."""
        if not self.any:
            return
        read = [x for value in arguments.values() for x in tensors_of(value)]
        if not is_view:
            self.reject_stale(host, read)
        for side in {_side(x) for x in written}:
            for other in self._related.get(side, {side}) - {side}:
                by_position = not self._rows.isdisjoint((side, other))
                why = _OF_COTANGENT if running_backward() != NO_BACKWARD else _BY_STRIDES
                self._stale.setdefault(other, _BY_POSITION if by_position else why)
        views = {_memory_of(x): x.__dict__["_shardmap_side"] for x in read if is_marked(x)}
        for y in tensors_of(out) if views else ():
            if _memory_of(y) in views:
                y._shardmap_side = views[_memory_of(y)]  # type: ignore[attr-defined]  # ours

    def begin_call(
        self, host: Host, written: Sequence[Tensor], read: Sequence[Tensor]
    ) -> Callable[[], AbstractContextManager[None]]:
        """Notes that a call of torch.distributed begins; returns a context in which it ends."""
        sides = [_side(host.base(x)) for x in written]
        storage_types = [host.storage_type(x) for x in read]
        lent = [each for each in storage_types if each.read_only in (None, _LENT)]
        self._arriving += sides
        self._lent += lent
        self._stale.update(dict.fromkeys(sides, _ARRIVING))
        for each in lent:
            each.read_only = _LENT

        @contextmanager
        def arriving() -> Iterator[None]:
            for each in lent:
                self._lent.remove(each)
                each.read_only = _LENT if each in self._lent else None
            for side in sides:
                self._arriving.remove(side)
                # Another call may still write the rest of this memory: not this end's matter.
                self._stale.pop(side, None)
            yield
            self._stale.update(dict.fromkeys(self._arriving, _ARRIVING))

        return arriving

    def forget_tensors(self) -> None:
        """Drops tensors, whose graphs would stay alive with them."""
        self._picked.clear()

    def _link(self, own: _Side, other: _Side) -> None:
        if own in self._stale:
            self._stale[other] = self._stale[own]
        together = self._related.get(own, {own}) | self._related.get(other, {other})
        self._related.update(dict.fromkeys(together, together))


def _memory_of(tensor: Tensor) -> int:
    """Returns a number of a tensor's memory, which tensors that share it have in common."""
    with DisableTorchFunction():
        return int(base_of(tensor).untyped_storage()._cdata)


def _side(tensor: Tensor) -> _Side:
    return tensor.__dict__.get("_shardmap_side") or _memory_of(tensor)


def is_marked(tensor: Tensor) -> bool:
    """Returns whether a tensor is on a side of its own, beside others with its storage."""
    return "_shardmap_side" in tensor.__dict__
