"""Values that must be equal on the ranks of a call, compared with its other data before it runs.

A plain tensor that enters a body, or that the body closes over, is a global value: each process has
its own copy. So has each rank that replicates a DTensor. If the copies differ, like the batches of
a DistributedSampler, parameters of other seeds, or weights of which one rank has skipped an update,
the result would be silently wrong. So hashes of their bits travel with the comparison of each call.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final, cast

import torch.distributed as dist
from torch import Tensor

from shardmap_torch.boundary.call import Call
from shardmap_torch.boundary.cotangents import NOTHING, VARIABLE
from shardmap_torch.control.board import Value
from shardmap_torch.control.control import Control
from shardmap_torch.core.closures import name_in
from shardmap_torch.core.dtensors import dtensor_class, is_dtensor
from shardmap_torch.core.functorch import base_of, tangents
from shardmap_torch.core.hashing import Bits, has_bits, in_memory
from shardmap_torch.core.source_location import Site, call_site, site_calling
from shardmap_torch.core.torch_private import engine
from shardmap_torch.errors import show_shape
from shardmap_torch.mesh import Mesh
from shardmap_torch.run.agree import made_by, posting_errors, shown_made
from shardmap_torch.spec import P

WHOLE: Final = 100
"""Every so many calls of a function all bits are compared, and those of DTensors too."""

# What `os.environ` keeps: its `get` makes three calls to decode what is there.
_ENVIRONMENT: Final[Mapping[Any, Any]] = vars(os.environ)["_data"]
_KEY: Final = os.environ.encodekey(VARIABLE)


class EqualValues:
    """Finds the values of one function's calls that must be equal on ranks."""

    def __init__(self, always: bool) -> None:
        """Has all bits compared in each call if `always`."""
        self._always, self._calls = always, 0
        self._known: set[Any] = set()
        self._newest = self._era = cast(object, "none yet")  # Dynamo traces no object()
        self._plain: list[int] = []
        self._replicated: list[int] = []

    def of(
        self, call: Call, control: Control, closures: Sequence[Tensor] = ()
    ) -> "ValuesOfCall | None":
        """Returns those of a call, whose body reads `closures`; None where nothing is compared.

        All bits are compared in the first call of some shapes, and then every so often; a sample of
        plain tensors in each: by all processes alike, whatever one of them has to check again.
        """
        setting = os.environ[VARIABLE] if _KEY in _ENVIRONMENT else None
        # All compare, and slices have data of their own.
        if setting in NOTHING or call.mesh.processes:
            return None
        self._calls += 1
        leaves, dtensor = call.leaves, dtensor_class()
        plain = [at for at in call.match.crossing if type(leaves[at]) is not dtensor]
        made = {at: made_by(leaves[at], at) for at in call.crossing if type(leaves[at]) is dtensor}
        is_new = call.match is not self._newest or plain != self._plain
        if is_new or control.era is not self._era:
            is_new = self._is_new(call, plain, control)
        if is_new or self._always or setting is not None or self._calls % WHOLE == 0:
            return ValuesOfCall(call, call.crossing, closures, made, None)
        has_none = not (plain or closures or made or _is_altered())
        if self._replicated:  # each in its turn: an update that a rank leaves out is of them all
            at = self._replicated[self._calls % len(self._replicated)]
            plain = [*plain, at] if _is_replicated(leaves[at]) else plain
        return None if has_none else ValuesOfCall(call, plain, closures, made, self._calls)

    def _is_new(self, call: Call, plain: list[int], control: Control) -> bool:
        """Returns whether no call had such arguments; by shapes, as a match may be made anew."""
        if control.era is not self._era:  # what each rank has called before may differ
            self._era, self._calls = control.era, 1
            self._known.clear()
        shapes = [(x.shape, x.dtype) for x in call.leaves if isinstance(x, Tensor)]
        # Copies of DTensors are compared where all bits are.
        key = (call.mesh.layout or call.mesh, call.structure, *plain, *shapes)
        is_new = key not in self._known
        self._known.add(key)
        self._newest, self._plain, specs = call.match, plain, call.match.spec
        self._replicated = [
            i for i in call.crossing if i not in plain and not specs(i).sharded_dims
        ]
        return is_new


class ValuesOfCall:
    """The values of one call that must be equal on ranks, and their bits.

    Attributes:
        is_late: whether to read them would wait for the device, so that the next comparison does.
        shards: a hash of this rank's copies of each shard of DTensors, or None.
        is_whole: whether all bits are compared.
    """

    is_late = False
    shards: Sequence[int | None] = ()
    _bits: Bits | None = None
    _copied: Sequence[int] = ()
    _site: Site | None = None

    def __init__(
        self,
        call: Call,
        positions: Sequence[int],
        closures: Sequence[Tensor],
        made: Mapping[int, tuple[int, int]],
        turn: int | None,
    ) -> None:
        """Begins to read the bits at some positions: all without a turn, or else a sample.

        `made` says of each DTensor which one it is; see `made_by`.
        """
        self._made = made
        self._call, self._turn, self._is_altered = call, turn, _is_altered()
        self.is_whole = turn is None
        self._copies: list[_Copy] = []
        found = [*[(at, call.leaves[at]) for at in positions], *[(_CLOSED, x) for x in closures]]
        if turn is not None:
            found = [
                (at, getattr(x, "_local_tensor", x)) if at in made else (at, x) for at, x in found
            ]
        quick = turn if engine.forward_level() < 0 else None
        parts = in_memory([x for _, x in found], quick) if quick else None
        if parts is None:
            found = [each for at, x in found for each in self._readable(at, x)]
        self._values = found
        if found:
            self._bits = Bits([x for _, x in found], turn, parts)
        if self._copies:
            self._copied = Bits([each.local for each in self._copies], turn).digests()
            self.shards = _by_shard(self._copies, self._copied)
        if turn is not None and self._bits is not None and self._bits.is_late:
            self.is_late, self._site = True, call_site()
            self._free()

    def _readable(self, place: int, x: Any) -> Iterator[tuple[int, Tensor]]:
        """Yields what a value has of bits, and tangents of forward mode, which are as global."""
        base: Any = base_of(x)
        if isinstance(base, dtensor_class()) and place != _CLOSED:
            path = self._call.match.paths[place]
            copy = None if self._turn else _copy_of(path, base)
            self._copies += [] if copy is None else [copy]
        elif has_bits(base):
            yield place, base
            for _, tangent in tangents(x) if engine.forward_level() >= 0 and place >= 0 else ():
                yield _TANGENT + place, base_of(tangent)

    def _free(self) -> None:
        """Lets arguments be freed before the next call, which may have new ones in their place."""
        self._values = [(at, x if at == _CLOSED else x.to("meta")) for at, x in self._values]
        self._call = replace(self._call, leaves=())

    def digest(self) -> int:
        """Hashes the bits of plain tensors, and which they are."""
        bits = 0 if self._bits is None else self._bits.digest()
        places = [at for at, _ in self._values]
        return hash((self._turn or 0, self._is_altered, bits, *self._made.values(), *places))

    def kinds(self) -> Iterator[str]:
        which = "all bits" if self._turn is None else f"a sample, {self._turn}"
        yield f"  values: {which}" + ", under saved_tensors_hooks or own modes" * self._is_altered
        places = {at for at, _ in self._values}
        for position in self._call.crossing:
            kind = "a plain tensor" if position in places else "a DTensor, or without data"
            if position in self._made:
                kind = f"a DTensor{shown_made(self._made[position])}"
            yield f"  {self._call.match.paths[position]}: {kind}"

    def rows(self) -> list[Value]:
        site = _shown_site(self._site)
        rows, digests = [], [] if self._bits is None else self._bits.digests()
        for (position, x), digest in zip(self._values, digests, strict=True):
            path, what, repair = self._described(position, x)
            is_copy = position in self._made
            repair = _COPIED if is_copy else repair
            rows.append(Value(path, what, "", f"{digest:x}", repair, site, not is_copy))
        return rows + _copied_rows(self._copies, self._copied, site)

    def _described(self, position: int, x: Tensor) -> tuple[str, str, str]:
        call, shape = self._call, show_shape(x.dtype, x.shape)
        if position == _CLOSED:
            path = name_in(call.function, x) or "a tensor"
            return path, f"{shape}, closed over", _repair(path, P(), call.mesh)
        leaf = position % _TANGENT
        path, spec = call.match.paths[leaf], call.match.spec(leaf)
        what = f"{shape}, {spec!r}"
        if leaf != position:
            fix = f"take the derivative along one tangent of {path} on all processes."
            return f"the tangent of {path}", what, fix
        return path, what, _repair(path, spec, call.mesh)


class Copies:
    """Copies that ranks have of DTensors outside of calls, as `Values` of the control.

    Attributes:
        is_late: never; to read them waits for the device.
        shards: as in `ValuesOfCall`, of those of which ranks have other shards.
    """

    is_late = False

    def __init__(self, copies: Sequence["_Copy"]) -> None:
        self._copies, self._digests = copies, Bits([each.local for each in copies], None).digests()
        pairs = [*zip(copies, self._digests, strict=True)]
        self._whole = tuple([digest for copy, digest in pairs if copy.num_shards == 1])
        parts = [(copy, digest) for copy, digest in pairs if copy.num_shards > 1]
        self.shards = _by_shard([copy for copy, _ in parts], [digest for _, digest in parts])

    def digest(self) -> int:
        return hash((len(self._copies), self._whole))

    def kinds(self) -> Iterator[str]:
        yield from [f"  {copy.path}: all bits of its copies" for copy in self._copies]

    def rows(self) -> list[Value]:
        return _copied_rows(self._copies, self._digests, _shown_site(None))


def copies_of(tensors: Mapping[str, Any]) -> Copies | None:
    """Returns the copies of the DTensors among tensors; None where nothing is compared."""
    shards = {path: base_of(x) for path, x in tensors.items() if isinstance(x, Tensor)}
    found = [_copy_of(path, x) for path, x in shards.items() if isinstance(x, dtensor_class())]
    copies = [copy for copy in found if copy is not None and has_bits(copy.local)]
    return Copies(copies) if copies and os.environ.get(VARIABLE) not in NOTHING else None


def _copied_rows(copies: Sequence["_Copy"], digests: Sequence[int], site: str) -> list[Value]:
    return [
        Value(copy.path, copy.what, copy.shard, f"{digest:x}", _COPIED, site, False)
        for copy, digest in zip(copies, digests, strict=True)
    ]


def _shown_site(known: Site | None) -> str:
    found = site_calling(posting_errors.__code__) if known is None else known
    return "" if found is None else f" at {found}"


def _is_altered() -> bool:
    """Returns whether saved_tensors_hooks or modes of the user's may change what is computed."""
    has_hooks = engine.top_saved_tensors_hooks(True) is not None
    modes = engine.dispatch_mode_stack() if engine.num_dispatch_modes() else ()
    return has_hooks or any([type(x).__module__[:6] != "torch." for x in modes])  # or count, or log


_CLOSED: Final = -1
_TANGENT: Final = 1 << 32
"""The place of the tangent of a leaf is this much higher."""

_COPIED: Final = (
    "make the copies equal, as by a broadcast or a checkpoint; a rank has left an update out, "
    "has another learning rate, or has changed its copy or its gradient alone, as by a clip under "
    "`if mesh.rank == 0:`. Of a batch, ranks that share a shard take the same rows: count the "
    "shards, not the ranks, in a sampler."
)


@dataclass(frozen=True)
class _Copy:
    """This rank's copy of its shard of a DTensor.

    Attributes:
        path: names it.
        local: the data.
        dims: the dims of the mesh over which copies differ.
        index: of the shard.
        num_shards: the number of shards.
        what: describes the DTensor.
        shard: describes the shard.
    """

    path: str
    local: Tensor
    dims: tuple[int, ...]
    index: int
    num_shards: int
    what: str
    shard: str


def _by_shard(copies: Sequence[_Copy], digests: Sequence[int]) -> Sequence[int | None]:
    """Hashes copies, those that are split over the same dims together, shard by shard."""
    found: dict[tuple[int, ...], tuple[_Copy, list[int]]] = {}
    for copy, digest in zip(copies, digests, strict=True):
        found.setdefault(copy.dims, (copy, []))[1].append(digest)
    shards: list[int | None] = []
    for copy, mine in found.values():
        row: list[int | None] = [None] * copy.num_shards
        row[copy.index] = hash(tuple(mine))
        shards += row
    return shards


def _copy_of(path: str, x: Any) -> _Copy | None:
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
    # Its method would differentiate, which transforms of torch.func refuse.
    return _Copy(path, x._local_tensor.detach(), dims, index, num_shards, what, shard)


def _is_replicated(x: Any) -> bool:
    """Returns whether all processes have a copy of a DTensor."""
    if not is_dtensor(x) or x.device_mesh.size() != dist.get_world_size():
        return False
    return all([to.is_replicate() for to in x.placements])


def _repair(path: str, spec: P, mesh: Mesh) -> str:
    if spec.sharded_dims:
        return f"if {path} is this process' own shard, pass from_local({path}, mesh, {spec!r})."
    return (
        f"make {path} equal, by one seed on all processes or a broadcast of rank 0's; parameters "
        "of unlike seeds are unlike models."
    )
