"""Donated arguments: a call may write into their memory, and nobody may use them afterwards."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardmap_torch.boundary.call import Call
from shardmap_torch.collectives.autograd import is_transformed
from shardmap_torch.core.dtensors import is_dtensor
from shardmap_torch.core.torch_private.engine import DisableTorchFunction
from shardmap_torch.core.tree import Tree
from shardmap_torch.errors import SpecError, TransformError, listing
from shardmap_torch.mesh.mesh import PROCESS_KINDS


def _local(x: Tensor) -> Tensor:
    local: Tensor = x._local_tensor if is_dtensor(x) else x
    return local


def require_donatable(call: Call, captured: Sequence[Tensor]) -> None:
    """Requires that nothing else that a call reads has the memory of what is donated to it.

    Raises:
        SpecError: some has; names all.
        TransformError: derivatives of the call are taken.
    """
    tensors = {at: x for at, x in enumerate(call.leaves) if isinstance(x, Tensor)}
    donated = [at for at in tensors if at in call.donated]
    if is_transformed() or any(tensors[at].requires_grad for at in donated):
        raise TransformError(
            f"{call.name}: what is donated cannot be differentiated, as its backward would read "
            "it. Take gradients in the body, by value_and_grad, or do not donate."
        )
    spans = [_Span.of(_local(x), call.match.paths[at], at in donated) for at, x in tensors.items()]
    spans += [_Span.of(_local(x), "a tensor that the body closes over", False) for x in captured]
    problems = [*_overlaps([span for span in spans if span.start < span.end])]
    if problems:
        head = f"{call.name}: the call may write into what is donated to it; clone these:"
        raise SpecError(listing(head, problems))


@dataclass(frozen=True, order=True)
class _Span:
    """The memory of a tensor, by the addresses of its first byte and of that after its last."""

    start: int
    end: int
    name: str
    is_donated: bool

    @classmethod
    def of(cls, x: Tensor, name: str, is_donated: bool) -> "_Span":
        last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
        size = (last + 1) * x.itemsize if x.numel() else 0
        return cls(x.data_ptr(), x.data_ptr() + size, name, is_donated)


def _overlaps(spans: Sequence[_Span]) -> Iterator[str]:
    """Yields what is donated and shares memory."""
    last: _Span | None = None
    for span in sorted(spans):
        if last is not None and span.start < last.end and (span.is_donated or last.is_donated):
            mine, other = (span, last) if span.is_donated else (last, span)
            yield f"{mine.name} shares memory with {other.name}"
        last = span if last is None or span.end > last.end else last


def taking(call: Call) -> Call:
    """Returns a call that writes into what is donated, where each rank has its own."""
    return replace(call, takes=call.mesh.kind in PROCESS_KINDS or call.mesh.size == 1)


def versions_of(call: Call) -> list[int]:
    """Returns how often each donated tensor has been written into."""
    donated = [_local(call.leaves[at]) for at in sorted(call.donated)]
    return [0 if x.is_inference() else x._version for x in donated]


def donating(call: Call, run: Callable[[], Tree]) -> Tree:
    """Runs a call, and frees what was donated to it: any use of it raises from now on.

    A run that fails before it has written into anything leaves it to the caller.
    """
    versions = versions_of(call)
    is_over = False
    try:
        result = run()
        is_over = True
    finally:
        if is_over or versions_of(call) != versions:
            for at in call.donated:
                _end(call.leaves[at], f"{call.match.paths[at]} was donated to {call.name}")
    return result


def _end(x: Tensor, what: str) -> None:
    gone = torch.empty(0, dtype=x.dtype)
    if is_dtensor(x):
        x._local_tensor = gone
    else:
        x.data = gone
    x._donated_to = what  # type: ignore[attr-defined]
    x.__class__ = _gone_class(type(x))


@cache
def _gone_class(kind: type) -> type:
    """Returns the class of donated tensors of a kind, whose layout in memory is the same."""
    return type("DonatedTensor", (kind,), {"__torch_function__": _refuse})


def _donated(values: Any) -> Iterator[Tensor]:
    for x in values:
        if isinstance(x, Tensor) and "_donated_to" in vars(x):
            yield x
        elif isinstance(x, list | tuple):
            yield from _donated(x)


@classmethod  # type: ignore[misc]
def _refuse(
    cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> NoReturn:
    with DisableTorchFunction():
        given = [*args, *(kwargs or {}).values()]
        what = next((vars(x)["_donated_to"] for x in _donated(given)), "It was donated")
    raise SpecError(
        f"{what}, which may have written into its memory. Use what the call has returned, or do "
        "not donate it."
    )
