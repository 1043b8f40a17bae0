"""Results that stay sharded, on which torch computes what one device computes.

Outside of a body nothing checks the sharding rules of DTensor, and some of them are wrong
(docs/dtensor_rules.md). A function of torch that takes such a result therefore runs as in a body
with automatic axes: on shards where torch's rule was compared with one device, else on the global
value.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmap_torch.boundary.cotangents import compare_operand
from shardmap_torch.collectives.autograd import bind
from shardmap_torch.core.torch_private.engine import DisableTorchFunctionSubclass
from shardmap_torch.core.tree import Tree, flatten, map_tensors
from shardmap_torch.errors import SpecError, TransformError
from shardmap_torch.mesh import Mesh, as_mesh
from shardmap_torch.mixing.backend import SharingBackend
from shardmap_torch.mixing.layouts import settled
from shardmap_torch.mixing.modes import Outside
from shardmap_torch.mixing.values import Place
from shardmap_torch.mixing.writes import here

_AS_THEY_ARE: Final = frozenset(
    "__get__ __set__ __repr__ backward register_hook retain_grad requires_grad_".split()
)
"""Names of functions that compute no values."""

_CANNOT_COMPILE: Final = (
    "torch.compile cannot take a result that is sharded into a graph: torch's rules for DTensors "
    "would be compiled, and some are wrong. Compile the module with its loss, or pass full(x)."
)


class ShardedResult(DTensor):
    """A DTensor that has left a call; functions of torch take it as the global value that it is.

    What they give is a `ShardedResult` where it is sharded, and else a plain tensor, equal on all
    ranks: a condition, an f-string and a log have one number everywhere. A plain operand is a
    global value. Writes that shards cannot do are refused.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Runs a function of torch.

        Raises:
            ShardMapError: it writes what shards cannot write.
            SpecError: a plain operand has the rows of this rank only.
            TransformError: Dynamo takes the tensor into a graph.
        """
        if torch.compiler.is_compiling():
            raise TransformError(_CANNOT_COMPILE)
        with DisableTorchFunctionSubclass():
            if getattr(func, "__name__", "") in _AS_THEY_ARE:
                return guarded(func(*args, **(kwargs or {})))
            leaves = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
            result = next(leaf for leaf in leaves if isinstance(leaf, ShardedResult))
            mesh = as_mesh(result.device_mesh)
            backend = _backend(mesh)
            plain = [leaf for leaf in leaves if not isinstance(leaf, DTensor) and leaf.ndim]
            try:
                out = Outside(backend).__torch_function__(func, types, args, kwargs)
            except (RuntimeError, ValueError):
                _reject_rows(result, plain)
                raise
            for leaf in plain:
                compare_operand(mesh, leaf)
            if isinstance(out, Iterator):
                return iter([_left(backend, x) for x in out])
            return map_tensors(lambda x: _left(backend, x), out)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """Redistributes it, as DTensor does."""
        moved: DTensor = guarded(super().redistribute(*args, **kwargs))
        return moved

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        copied: DTensor = guarded(deepcopy(_as_dtensor(self), memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles it as a DTensor."""
        return _as_dtensor(self).__reduce_ex__(protocol)


def guarded(x: Tree) -> Tree:
    """Makes the sharded DTensors among results `ShardedResult`s."""
    return map_tensors(guard, x)


def guard(x: Tensor) -> Tensor:
    """Makes a DTensor with shards a `ShardedResult`."""
    if type(x) is DTensor and any(p.is_shard() for p in x.placements):
        x.__class__ = ShardedResult
    return x


def _as_dtensor(x: DTensor) -> DTensor:
    return DTensor.__new__(DTensor, x._local_tensor, x._spec, requires_grad=x.requires_grad)


def _backend(mesh: Mesh) -> SharingBackend:
    made: SharingBackend = mesh._state.sharing.get(
        "results", lambda: SharingBackend(mesh, mesh.axis_names)
    )
    return made


def _left(backend: SharingBackend, x: Tensor) -> Tensor:
    """Makes what a function gives plain where it is no shard; pending sums are added up.

    Not a view that had to be gathered: a write into it would be lost, and is refused.
    """
    if not isinstance(x, DTensor):
        return x
    placements = settled(x.placements)
    if all(p.is_replicate() for p in placements) and not backend.copies.has(x):
        return backend.unshared(x)
    if placements != x.placements:
        x = bind(backend, Place(placements), x)
    x.__class__ = ShardedResult
    return x


def _reject_rows(result: ShardedResult, plain: Sequence[Tensor]) -> None:
    """Rejects plain operands, which torch has refused, with the rows that this rank has.

    Raises:
        SpecError: one is.
    """
    rows, own = result.shape[:1], result._local_tensor.shape[:1]
    for x in plain:
        if own != rows and x.shape[:1] == own:
            raise SpecError(
                f"a plain tensor {list(x.shape)} beside a result {list(result.shape)}, of which "
                f"this rank has {own[0]} rows, {here()}: a plain tensor is a global value, equal "
                "on all ranks.\n"
                "Fix: from_local(x, mesh, P(axis)) for each rank's own rows; or compute the loss "
                "in the module."
            ) from None  # torch's own, about shapes of which the user knows nothing, would be first
