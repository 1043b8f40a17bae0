"""Tensors' memory: keys of storages, buffers that may be overwritten, and parts of entries."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.core.dtensors import dtensor_class, is_dtensor
from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.torch_private.engine import functorch


class _Spare(threading.local):
    tensors: tuple[Tensor, ...] = ()


_SPARE = _Spare()


@contextmanager
def spare(*buffers: Tensor) -> Iterator[None]:
    """Allows a collective in this context to overwrite `buffers`, which are not read again.

    Over axes of one rank it overwrites nothing, and returns its operand as the result.
    """
    if torch.compiler.is_compiling():  # functional collectives overwrite nothing
        yield
        return
    _SPARE.tensors = buffers
    try:
        yield
    finally:
        _SPARE.tensors = ()


def is_spare(x: Tensor) -> bool:
    """Returns whether `x` is the buffer of `spare`, and autograd does not need it."""
    if torch.compiler.is_dynamo_compiling():  # and `spare` names none while code is exported
        return False
    # Most operands are compared with none.
    named = any([x is each for each in _SPARE.tensors]) if _SPARE.tensors else False
    return named and not x.requires_grad and x.is_contiguous()


def all_spare(xs: Sequence[Tensor]) -> bool:
    """Returns whether `is_spare` holds for each of several tensors."""
    buffers = _SPARE.tensors
    return (
        len(xs) == len(buffers)
        and all(map(is_, xs, buffers))
        and not any([x.requires_grad or not x.is_contiguous() for x in xs])
    )


def memory_of(x: Tensor) -> int | None:
    """Returns a key that tensors sharing memory have in common; None where unknown."""
    (storage,) = _storages_of((x,))
    return None if storage is None else storage._cdata


def _storages_of(xs: Sequence[Tensor]) -> list[torch.UntypedStorage | None]:
    if any(map(functorch.is_functorch_wrapped_tensor, xs)):
        xs = [*map(base_of, xs)]
    return [x.untyped_storage() if x.layout is torch.strided else None for x in xs]


def apart(
    results: Sequence[Tensor], arguments: Sequence[Any], sharing: Mapping[int, int] | None = None
) -> list[Tensor]:
    """Returns `results`, with those copied that share memory with one of `arguments`.

    A plain argument is one value on all ranks: writing into a result that is a view of it, as into
    a shard, would change it on this rank alone. DTensor arguments do not count: a result may be a
    view of their local tensors. Memory that numpy or dlpack give is copied, whosever it is. While
    Dynamo traces, `sharing` maps results to arguments whose memory they may have; None is any.
    """
    if torch.compiler.is_dynamo_compiling():
        return _traced_apart(results, arguments, sharing)
    kind = dtensor_class()
    plain = [x for x in arguments if type(x) is not kind and (type(x) is Tensor or _is_plain(x))]
    if not plain:
        return list(results)
    storages = _storages_of([*plain, *results])
    used = {s._cdata for s in storages[: len(plain)] if s is not None}
    pairs = zip(results, storages[len(plain) :], strict=True)
    return [y.clone() if s and (s._cdata in used or not s.resizable()) else y for y, s in pairs]


def _is_plain(x: Any) -> bool:
    return isinstance(x, Tensor) and not is_dtensor(x)


def _traced_apart(
    results: Sequence[Tensor], arguments: Sequence[Any], sharing: Mapping[int, int] | None
) -> list[Tensor]:
    plain = [_is_plain(x) for x in arguments]
    if sharing is None:
        return [y.clone() for y in results] if any(plain) else list(results)
    return [y.clone() if n in sharing and plain[sharing[n]] else y for n, y in enumerate(results)]


def unviewed(x: Tensor) -> Tensor:
    """Returns a view of an unshared buffer as a tensor that is no view.

    Autograd forbids to write into a view that a Function returns.
    """
    return x.data if x._is_view() else x


def covers_storage(tensor: Tensor, storage: torch.UntypedStorage) -> bool:
    """Returns whether a tensor covers every entry of its storage exactly once."""
    if tensor.numel() * tensor.element_size() != storage.nbytes():
        return False
    expected = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


SENT: Final = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int8, torch.uint8),
    }
)
"""Dtypes that gloo and NCCL send as they are; others go as their parts."""


def parts_of(x: Tensor) -> Tensor:
    """Views entries as their bytes, or as real and imaginary part, along a trailing dim.

    No movement touches that one: dims count from the front.
    """
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    return x.unsqueeze(-1).view(torch.uint8)


def of_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Makes entries of their parts."""
    if dtype.is_complex:
        return torch.view_as_complex(parts.contiguous())
    return parts.contiguous().view(dtype).squeeze(-1)
