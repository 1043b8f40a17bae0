"""Functions that run otherwise on DTensors over automatic axes, since torch lacks their backward.

The backward of a body may run after it has ended, where nothing can take an operation over. So
these functions run on plain values, whose backward is plain too, with differentiable steps around.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardmap_torch.collectives.autograd import bind
from shardmap_torch.core.dtensors import is_dtensor
from shardmap_torch.core.functorch import base_of, is_batched
from shardmap_torch.core.storage import memory_of
from shardmap_torch.core.tree import flatten, map_tensors
from shardmap_torch.mixing.backend import SharingBackend
from shardmap_torch.mixing.layouts import evenly
from shardmap_torch.mixing.values import Share, Unshare

Handler = Callable[[SharingBackend, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def on_global(
    backend: SharingBackend, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Runs a function on values that are global over the automatic axes."""
    args, kwargs = map_tensors(backend.unshared, (args, kwargs))
    out = func(*args, **kwargs)
    if _memory(out) & _memory((args, kwargs)):  # a view, but of copies
        backend.copied.append(getattr(func, "__name__", "a function"))
    return map_tensors(backend.replicated, out)


def _memory(tree: Any) -> set[int | None]:
    return {memory_of(x) for x in flatten(tree)[0] if isinstance(x, Tensor)} - {None}


def _attention(
    backend: SharingBackend, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Runs attention on shards where these are of batches or heads, which it treats one by one."""
    operands = (*args[:3], *(kwargs.pop(n) for n in ("query", "key", "value") if n in kwargs))
    rest = (*args[3:], *kwargs.values())
    is_plain = not any(isinstance(x, Tensor) for x in rest) and not any(map(is_batched, operands))
    if len(operands) != 3 or not is_plain or not all(is_dtensor(base_of(x)) for x in operands):
        return on_global(backend, func, (*operands, *args[3:]), kwargs)
    placements = _alike([base_of(x) for x in operands], backend)  # type: ignore[misc]  # DTensors
    unshare = Unshare(backend.shared, placements, "scaled_dot_product_attention")
    local = [bind(backend, unshare, x) for x in operands]
    return bind(backend, Share(backend.shared, placements), func(*local, *args[3:], **kwargs))


def _alike(operands: list[DTensor], backend: SharingBackend) -> tuple[Placement, ...]:
    """Returns the shards of batch and head dims that the operands have in common."""
    query, shapes = operands[0], [x.shape for x in operands]

    def stays(at: int, p: Placement) -> bool:
        return (
            type(p) is Shard
            and p.dim < query.ndim - 2
            and all(x.placements[at] == p and x.ndim == query.ndim for x in operands)
            and len({shape[p.dim] for shape in shapes}) == 1
        )

    kept = tuple(p if stays(at, p) else Replicate() for at, p in enumerate(query.placements))
    return evenly(kept, query.shape, tuple(backend.shared.shape))


def _parts(
    backend: SharingBackend, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Takes the parts of a value one by one: torch's backward of all makes plain zeros."""
    if not args or not is_dtensor(base_of(args[0])):
        return on_global(backend, func, args, kwargs)
    x, *rest = args
    dim = kwargs.get("dim", rest[1] if len(rest) > 1 else 0)
    sizes = [part.shape[dim] for part in func(torch.empty(x.shape, device="meta"), *rest, **kwargs)]
    starts = accumulate(sizes, initial=0)
    return tuple(x.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=False))


def _items(
    backend: SharingBackend, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, ...]:
    x = args[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    return tuple(x.select(dim, at) for at in range(x.shape[dim]))


def _iterator(
    backend: SharingBackend, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Tensor]:
    return iter(_items(backend, func, args, kwargs))


HANDLERS: Final[Mapping[str, Handler]] = {
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("chunk", "split", "split_with_sizes", "tensor_split"), _parts),
    "unbind": _items,
    "__iter__": _iterator,
}
"""Handlers by the name of the function."""
