"""`apart`: copies results that share memory with plain arguments.

A plain argument is one value on all ranks. Writing into a result that is a view of it, as into a
shard, would change it on this rank alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardmap_torch.core.dtensors import dtensor_class, is_dtensor
from shardmap_torch.core.storage import memories_of


def apart(
    results: Sequence[Tensor], arguments: Sequence[Any], sharing: Mapping[int, int] | None = None
) -> list[Tensor]:
    """Returns `results`, with those copied that share memory with one of `arguments`.

    DTensor arguments do not count: a result may be a view of their local tensors. While Dynamo
    traces, memory cannot be compared: `sharing` gives, by their positions, the argument whose
    memory a result may have; None is any.
    """
    if torch.compiler.is_dynamo_compiling():
        return _traced_apart(results, arguments, sharing)
    kind = dtensor_class()
    others = [x for x in arguments if type(x) is not kind]
    plain = [x for x in others if type(x) is Tensor or _is_plain(x)]
    used = {*memories_of(plain)} - {None} if plain else set()
    if not used:
        return list(results)
    pairs = zip(results, memories_of(results), strict=True)
    return [y.clone() if memory in used else y for y, memory in pairs]


def _is_plain(x: Any) -> bool:
    return isinstance(x, Tensor) and not is_dtensor(x)


def _traced_apart(
    results: Sequence[Tensor], arguments: Sequence[Any], sharing: Mapping[int, int] | None
) -> list[Tensor]:
    plain = [_is_plain(x) for x in arguments]
    if sharing is None:
        return [y.clone() for y in results] if any(plain) else list(results)
    return [y.clone() if n in sharing and plain[sharing[n]] else y for n, y in enumerate(results)]
