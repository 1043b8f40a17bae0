"""Values that must be equal on the ranks of a call, compared with its other data before it runs.

A plain tensor that enters a body, or that the body closes over, is a global value: each process has
its own copy. So has each rank that replicates a DTensor. If the copies differ, like the batches of
a DistributedSampler, parameters of other seeds, or weights of which one rank has skipped an update,
the result would be silently wrong. So hashes of their bits travel with the comparison of each call.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from shardmap_torch.boundary.call import Call
from shardmap_torch.control.board import Value
from shardmap_torch.control.control import Control
from shardmap_torch.core.caching import lazy
from shardmap_torch.core.closures import name_in
from shardmap_torch.core.dtensors import is_dtensor
from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.hashing import Bits
from shardmap_torch.core.source_location import call_site
from shardmap_torch.errors import show_shape
from shardmap_torch.mesh import Mesh
from shardmap_torch.spec import P

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

VARIABLE: Final = "SHARDMAP_DEBUG"
"""The environment variable that decides for all functions: 1 compares all, 0 nothing."""

WHOLE: Final = 100
"""Every so many calls of a function all bits are compared, and those of DTensors too."""


class EqualValues:
    """Finds the values of one function's calls that must be equal on ranks."""

    def __init__(self, always: bool) -> None:
        """Has all bits compared in each call if `always`."""
        self._always, self._calls = always, 0
        self._known: set[Any] = set()
        self._era: object = None

    def of(
        self, call: Call, control: Control, closures: Sequence[Tensor] = ()
    ) -> "ValuesOfCall | None":
        """Returns those of a call, whose body reads `closures`; None where nothing is compared.

        All bits are compared in the first call of some shapes, and then every so often; a sample of
        the plain tensors is in every call. All processes do the same, whatever a process has to
        check again.
        """
        asked = os.environ.get(VARIABLE)
        if asked in ("", "0"):
            return None
        if control.era is not self._era:  # what each rank has called before may differ
            self._era, self._calls = control.era, 0
            self._known.clear()
        self._calls += 1
        mesh = call.mesh.layout or call.mesh
        shapes = [(x.shape, x.dtype) for x in call.leaves if isinstance(x, Tensor)]
        key = (mesh, call.structure, *shapes)
        is_new = key not in self._known
        self._known.add(key)
        whole = is_new or self._always or asked is not None or self._calls % WHOLE == 0
        return ValuesOfCall(call, closures, None if whole else self._calls)


class ValuesOfCall:
    """The values of one call that must be equal on ranks, and their bits.

    Attributes:
        is_late: whether to read them would wait for the device, so that the next comparison does.
    """

    def __init__(self, call: Call, closures: Sequence[Tensor], turn: int | None) -> None:
        """Begins to read their bits: all without a turn, or else a sample."""
        self._call, self._turn, self._site = call, turn, call_site()
        self._plain: list[tuple[int, Tensor]] = []
        self._copies: list[_Copy] = []
        for position in call.crossing:
            x = base_of(call.leaves[position])
            if not is_dtensor(x):
                self._plain.append((position, x))
            elif turn is None and (copy := _copy_of(position, x)) is not None:
                self._copies.append(copy)
        self._plain += [(_CLOSED_OVER, x) for x in closures]
        self._plain = [(position, x) for position, x in self._plain if _has_bits(x)]
        self._bits = Bits([x for _, x in self._plain], turn) if self._plain else None
        self._copied = Bits([each.local for each in self._copies], turn) if self._copies else None
        self.is_late = turn is not None and self._bits is not None and self._bits.is_late

    def digest(self) -> int:
        """Hashes the bits of plain tensors, and which they are."""
        bits = 0 if self._bits is None else self._bits.digest()
        return hash((self._turn or 0, bits, *[position for position, _ in self._plain]))

    @lazy
    def shards(self) -> Sequence[int | None]:
        """Hashes the copies of DTensors: for each shard what this rank has of it, or None.

        All DTensors that are sharded over the same axes are one.
        """
        digests = [] if self._copied is None else self._copied.digests()
        found: dict[tuple[int, ...], tuple[_Copy, list[int]]] = {}
        for copy, digest in zip(self._copies, digests, strict=True):
            found.setdefault(copy.dims, (copy, []))[1].append(digest)
        shards: list[int | None] = []
        for copy, mine in found.values():
            shards += [None] * copy.num_shards
            shards[len(shards) - copy.num_shards + copy.index] = hash(tuple(mine))
        return shards

    def kinds(self) -> Iterator[str]:
        """Yields lines that say how each value is compared."""
        plain = {position for position, _ in self._plain}
        yield "  values: " + ("all bits" if self._turn is None else f"a sample, {self._turn}")
        for position in self._call.crossing:
            kind = "a plain tensor" if position in plain else "a DTensor, or without data"
            yield f"  {self._call.match.paths[position]}: {kind}"

    def rows(self) -> list[Value]:
        """Describes each value for errors."""
        site = "" if self._site is None else f" at {self._site}"
        digests = [] if self._bits is None else self._bits.digests()
        rows = []
        for (position, x), digest in zip(self._plain, digests, strict=True):
            path, what, repair = self._described(position, x)
            rows.append(Value(path, what, "", f"{digest:x}", repair, site, True))
        digests = [] if self._copied is None else self._copied.digests()
        for copy, digest in zip(self._copies, digests, strict=True):
            path = self._call.match.paths[copy.position]
            rows.append(Value(path, copy.what, copy.shard, f"{digest:x}", _COPIED, site, False))
        return rows

    def _described(self, position: int, x: Tensor) -> tuple[str, str, str]:
        call, shape = self._call, show_shape(x.dtype, x.shape)
        if position == _CLOSED_OVER:
            path = name_in(call.function, x) or "a tensor"
            return path, f"{shape}, closed over", _repair(path, P(), call.mesh)
        path, spec = call.match.paths[position], call.match.spec(position)
        return path, f"{shape}, {spec!r}", _repair(path, spec, call.mesh)


_CLOSED_OVER: Final = -1

_COPIED: Final = (
    "make the copies equal, as by a broadcast or a checkpoint; a rank has left an update out, or "
    "has changed its copy alone."
)


@dataclass(frozen=True)
class _Copy:
    """This rank's copy of its shard of a DTensor.

    Attributes:
        position: of the leaf.
        local: the data.
        dims: the dims of the mesh over which copies differ.
        index: of the shard.
        num_shards: the number of shards.
        what: describes the DTensor.
        shard: describes the shard.
    """

    position: int
    local: Tensor
    dims: tuple[int, ...]
    index: int
    num_shards: int
    what: str
    shard: str


def _copy_of(position: int, x: "DTensor") -> _Copy | None:
    """Returns this rank's copy of a DTensor; None where no other rank has one."""
    on, place = x.device_mesh, x.device_mesh.get_coordinate()
    dims = tuple([dim for dim, to in enumerate(x.placements) if not to.is_replicate()])
    num_shards = prod([on.size(dim) for dim in dims])
    # The ranks beside it could not take part.
    if place is None or num_shards == on.size() or on.size() != dist.get_world_size():
        return None
    index = 0
    for dim in dims:
        index = index * on.size(dim) + place[dim]
    names = on.mesh_dim_names or range(on.ndim)
    shard = ", ".join(f"{names[dim]}={place[dim]}" for dim in dims)
    what = f"{show_shape(x.dtype, x.shape)}, placed {x.placements}"
    return _Copy(position, x._local_tensor, dims, index, num_shards, what, shard)


def _has_bits(x: Tensor) -> bool:
    """Returns whether it has data that can be read."""
    is_dense = x.layout == torch.strided and not (x.is_nested or x.is_quantized or x.is_meta)
    return is_dense and type(x).__torch_dispatch__ is Tensor.__torch_dispatch__


def _repair(path: str, spec: P, mesh: Mesh) -> str:
    if spec.sharded_dims:
        return f"if {path} is this process' own shard, pass from_local({path}, mesh, {spec!r})."
    return (
        f"make {path} equal, by one seed on all processes or a broadcast of rank 0's; parameters "
        "of unlike seeds are unlike models."
    )
