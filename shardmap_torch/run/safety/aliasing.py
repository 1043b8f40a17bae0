"""`apart`: copies results that share memory with plain arguments.

A plain argument is one value on all ranks. Writing into a result that is a view of it, as into a
shard, would change it on this rank alone.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardmap_torch.core.dtensors import is_dtensor
from shardmap_torch.core.storage import memory_of


def apart(results: Sequence[Tensor], arguments: Iterable[Any]) -> list[Tensor]:
    """Returns `results`, with those copied that share memory with one of `arguments`.

    DTensor arguments do not count: a result may be a view of their local tensors.
    """
    if torch.compiler.is_dynamo_compiling():
        return list(results)
    plain = [x for x in arguments if isinstance(x, Tensor) and not is_dtensor(x)]
    used = {memory_of(x) for x in plain} - {None}
    return [y.clone() if used and memory_of(y) in used else y for y in results]
