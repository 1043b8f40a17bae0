"""Writes in bodies with automatic axes: views that have become copies, and would miss them."""

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.multiprocessing.reductions import StorageWeakRef

from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.source_location import call_site
from shardmap_torch.core.torch_private.engine import OpOverload, finish_inplace_view
from shardmap_torch.core.tree import flatten, map_tensors
from shardmap_torch.errors import ShardMapError
from shardmap_torch.mixing.layouts import replicated, settled
from shardmap_torch.mixing.values import local_of, moved


def here() -> str:
    """Returns where the body is."""
    site = call_site()
    return f"at {site}" if site is not None else "in the body"


def refused_write(name: str, what: str = "a value") -> ShardMapError:
    """Makes the error of a write that shards cannot do."""
    return ShardMapError(
        f"{name} writes into {what} that is a sharded DTensor, {here()}; it cannot "
        "run on shards. Use an operation that returns a new value, as torch.where or torch.cat."
    )


class RedistributedViews:
    """The views of one run of a body that had to be redistributed, and so are copies.

    After a write the value and those of its copies that are still there would differ.
    """

    def __init__(self) -> None:
        self._groups: list[tuple[str, list[StorageWeakRef]]] = []

    def clear(self) -> None:
        """Forgets those of the run before."""
        self._groups.clear()

    def add(self, what: str, x: Tensor, view: Tensor, *, autograd: bool = False) -> None:
        """Records that `view`, by `what`, has its own memory, unless it shares that of `x`.

        Where only `autograd` takes them for different values, they are recorded all the same.
        """
        self._groups = [group for group in self._groups if _num_alive(group[1]) > 1]
        memory = [_local(each).untyped_storage() for each in (x, view)]
        if autograd or memory[0]._cdata != memory[1]._cdata:
            refs = [StorageWeakRef(each) for each in memory]
            group = next((g for _, g in self._groups if _holds(g, memory[0]._cdata)), None)
            if group is None:
                self._groups.append((what, refs))
            else:
                group.append(refs[1])

    def has(self, x: Tensor) -> bool:
        """Returns whether `x` is one of them, or what one of them was a view of."""
        memory = _local(x).untyped_storage()._cdata if self._groups else 0
        return any(_holds(group, memory) for _, group in self._groups)

    def check_write(self, func: Any, x: Tensor) -> None:
        """Checks that a write into `x` reaches all that the body can still read.

        Raises:
            ShardMapError: it does not: there is a copy of it, or it is one.
        """
        memory = _local(x).untyped_storage()._cdata if self._groups else 0
        for what, group in self._groups:
            if _holds(group, memory) and _num_alive(group) > 1:
                raise ShardMapError(_explain(func, what))


def _holds(group: list[StorageWeakRef], memory: int) -> bool:
    return any(each.cdata == memory and not each.expired() for each in group)


def _num_alive(group: list[StorageWeakRef]) -> int:
    return sum(not each.expired() for each in group)


def _local(x: Tensor) -> Tensor:
    base = base_of(x)
    return base._local_tensor if isinstance(base, DTensor) else base


def _explain(func: Any, copied: str) -> str:
    return (
        f"{func} writes into a sharded DTensor, {here()}.\n"
        f"Before, {copied}, a view had to be redistributed and is a copy, so that the value and "
        "the view could differ after a write. Use the operation that returns a new value, as "
        "torch.where or torch.cat."
    )


def written(func: OpOverload, args: Any, kwargs: Any) -> Iterator[DTensor]:
    """Yields the DTensors into which an operation writes."""
    if not func._schema.is_mutable:
        return
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            operand = args[at] if at < len(args) else kwargs.get(argument.name)
            yield from (x for x in flatten(operand)[0] if isinstance(x, DTensor))


def write_global(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """Runs a write that torch cannot run on shards: on global values, of which each keeps its part.

    Functions that run on shards do so inside, as rms_norm adds to its mean. What is written keeps
    its placements, pending sums too.
    """
    originals = list(written(func, args, kwargs))
    of: dict[int, Tensor] = {}

    def unshard(x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            return x
        if id(x) not in of:
            of[id(x)] = local_of(moved(x, replicated(x.device_mesh.ndim), func._schema.name))
            if any(x is original for original in originals):
                of[id(x)] = of[id(x)].clone()
        return of[id(x)]

    func(*map_tensors(unshard, args), **map_tensors(unshard, kwargs))
    for x in originals:
        x._local_tensor.copy_(_part(of[id(x)], x))
    return args[0] if len(func._schema.returns) == 1 else None


def _part(value: Tensor, x: DTensor) -> Tensor:
    """Returns this rank's part of a global value, placed like `x`; of a sum, the first rank's."""
    mesh = x.device_mesh
    placements = tuple(p if type(p) is Shard else settled((p,))[0] for p in x.placements)
    whole = DTensor.from_local(value, mesh, replicated(mesh.ndim), run_check=False)
    local = local_of(moved(whole, placements))
    coordinate = mesh.get_coordinate() or ()
    is_addend = any(
        isinstance(p, Partial) and p.reduce_op == "sum" and at
        for p, at in zip(x.placements, coordinate, strict=True)
    )
    return torch.zeros_like(local) if is_addend else local


_RESHAPES: Final = frozenset({"squeeze_", "unsqueeze_", "t_", "transpose_", "swapdims_"})


def _name(func: OpOverload) -> str:
    return str(func._schema.name).removeprefix("aten::")


def is_reshape_in_place(func: OpOverload) -> bool:
    """Returns whether an operation changes the dims of its operand itself."""
    return func._schema.is_mutable and _name(func) in _RESHAPES


def reshape_in_place(func: OpOverload, args: Any, kwargs: Any) -> DTensor:
    """Runs an operation that changes the dims of a DTensor itself, such as `squeeze_`.

    torch leaves its shape as it was where the placements stay, and calls it in a vector's matmul.
    """
    x: DTensor = args[0]
    packet = getattr(torch.ops.aten, _name(func).removesuffix("_"))
    new = getattr(packet, func._overloadname)(*args, **kwargs)
    x._local_tensor, x._spec = new._local_tensor, new._spec
    result: DTensor = finish_inplace_view(func, args, kwargs, x)
    return result
