"""State of the ranks' program: the layout of each of its tensors."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, Final

from torch import Tensor

from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.ir.fake_results import address_of
from shardmap_torch.checker.ir.program import StorageType, draws
from shardmap_torch.checker.ir.sizes import hashable_size
from shardmap_torch.checker.rules.infer import tensors_of
from shardmap_torch.checker.spmd.align import Alignment
from shardmap_torch.checker.spmd.layout import (
    ANY,
    Dim,
    Shape,
    ShardedTensor,
    UnrelatedError,
    axes_of,
    fitted,
    in_words,
    sharded_dim,
    size_of_one_rank,
)
from shardmap_torch.checker.spmd.ops.advice import DECIDED, OTHER, PER_RANK, UNSEEN, spec_advice
from shardmap_torch.checker.spmd.recorder import Ref, TensorMap
from shardmap_torch.checker.spmd.sums import FINISHED, NO_AXES, Axes, Sums, reject_scaled
from shardmap_torch.core.torch_private.engine import FakeTensor
from shardmap_torch.errors import SpecError
from shardmap_torch.spec import P
from shardmap_torch.types import AxisType, V, Z

_COPY: Final = "is a copy in one of the ranks' and the one-device program"


class Notes:
    """The layout of each tensor, and the pending sums of each storage, which views share."""

    def __init__(self, interpreter: Interpreter, alignment: Alignment, without: Axes) -> None:
        """Starts with nothing known; the axes `without` are left out."""
        self._interpreter, self._alignment, self._without = interpreter, alignment, without
        self.sizes: Mapping[str, int] = {
            axis: interpreter.mesh.shape[axis]
            for axis in interpreter.mesh.axis_names
            if interpreter.mesh.shape[axis] > 1 and axis not in without
        }
        self._on = frozenset(self.sizes)
        self._sharding: list[tuple[str, ...]] = []  # axes that shard a dim of an input together
        # Of each tensor its layout as a shard of one-device tensors, all equal, by their numbers.
        self._known: TensorMap[dict[int, ShardedTensor]] = TensorMap()
        self._sums: dict[int, Sums] = {}
        # Cells and not tensors: torch copies a new tensor that has another reference already.
        self._where: dict[int, StorageType] = {}

    def note(self, tensor: Tensor, number: int, shard: ShardedTensor) -> None:
        """Notes that a tensor is that shard of the one-device tensor of that number."""
        number = self._alignment.canonical(Ref(number))
        known = self._known.get(tensor)
        known = self._known.put(tensor, {}) if known is None else known
        known[number] = shard
        self._where[number] = self._interpreter.storage_type(tensor)

    def overwrite(self, tensor: Tensor, number: int, shard: ShardedTensor) -> None:
        """Notes what a tensor is that has all of its memory; nothing is known of other views."""
        for _, note in self._known.of_storage(tensor):
            note.clear()
        self.note(tensor, number, shard)

    def place(self, tensor: Tensor, number: int, global_shape: Shape, spec: P) -> None:
        """Notes that a tensor is sharded by a spec."""
        self._require_leading(spec)
        dims = self.dims(spec, global_shape)
        self._sharding += [axes for axes in map(axes_of, dims) if axes not in ((), *self._sharding)]
        self.note(tensor, number, fitted(dims, tuple(tensor.shape), global_shape))
        self.set_sums(tensor, Sums(spec.partial))

    def sharding_of_draws(self, drawn: Tensor) -> list[tuple[str, ...]]:
        """Returns the axes that may shard a dim of draws, of which any order is as good.

        Those of dims of inputs come first, which are what they meet.
        """
        own = [axis for axis, axis_type in self.types(drawn) if axis_type == V]
        known = [axes for axes in self._sharding if {*axes} <= {*own}]
        return known + [axes for count in range(len(own)) for axes in combinations(own, count + 1)]

    def find(self, tensor: Tensor, ref: Ref, what: str) -> ShardedTensor:
        """Returns how this tensor shards that one-device tensor.

        Raises:
            UnrelatedError: it is no shard of it.
        """
        known = self._known.get(self._interpreter.fakify(tensor))
        if known is None:
            raise UnrelatedError(f"nothing is known about how {what} is sharded", UNSEEN)
        shard = known.get(self._alignment.canonical(ref))
        if shard is None:
            raise UnrelatedError(f"{what} is another value than on one device", OTHER)
        if shard.of_zeros and not self.sums(tensor).zero:
            raise size_of_one_rank(f"the size of {what}")
        return shard

    def layouts(self, value: Any, there: Any, name: str) -> Any:
        """Returns an argument with layouts in place of its tensors.

        Raises:
            UnrelatedError: one is no shard of what stands there on one device.
        """
        if isinstance(value, Tensor):
            if not isinstance(there, Ref):
                raise UnrelatedError(f"{name} is no tensor on one device")
            return self.find(value, there, name)
        if isinstance(value, list | tuple) and any(True for _ in tensors_of(value)):
            if not isinstance(there, tuple) or len(there) != len(value):
                raise UnrelatedError(f"{name} has another length on one device")
            pairs = zip(value, there, strict=True)
            return [self.layouts(item, ref, name) for item, ref in pairs]
        return value

    def shard_of(self, tensor: Tensor, ref: Ref) -> ShardedTensor | None:
        """Returns how this tensor shards that one-device tensor; None if it does not."""
        known = self._known.get(self._interpreter.fakify(tensor))
        return None if known is None else known.get(self._alignment.canonical(ref))

    def find_any(self, tensor: Tensor) -> ShardedTensor | None:
        """Returns the layout of a tensor as a shard of any one-device tensor, or None."""
        known = self._known.get(self._interpreter.fakify(tensor))
        return None if known is None else next(iter(known.values()), None)

    def require(self, tensor: Tensor, ref: Ref, spec: P) -> None:
        """Requires that a tensor is sharded and summed as a spec says.

        Raises:
            UnrelatedError: it is not.
        """
        self._require_leading(spec)
        shard = self.find(tensor, ref, "it")
        self.reject_unfinished(tensor)
        self._require_sums(tensor, spec)
        wanted = self.dims(spec, shard.global_shape)
        for dim, (have, want) in enumerate(zip(shard.dims, wanted, strict=True)):
            if have not in (want, ANY):
                own = shard.spec(self.sums(tensor).partial)
                raise UnrelatedError(
                    f"dim {dim} is {in_words(have)}, and {spec!r} promises {in_words(want)}",
                    spec_advice(own, self.dims(own, shard.global_shape) == shard.dims),
                )
        fitted(wanted, shard.local, shard.global_shape)

    def _require_sums(self, tensor: Tensor, spec: P) -> None:
        have, want = self.sums(tensor).partial, spec.partial & self._on
        if have - want:
            axis = min(have - want)
            raise UnrelatedError(
                f"over {axis!r} it is a pending sum, which {spec!r} does not say",
                f"all_reduce or reduce_scatter it over {axis!r} first, or name {axis!r} in "
                "partial=.",
            )
        if want - have and not self.sums(tensor).zero:  # zeros are addends of any sum
            raise UnrelatedError(
                f"over {min(want - have)!r} it is not a pending sum, as {spec!r} promises"
            )

    def _require_leading(self, spec: P) -> None:
        """Requires that axes which are left out come first where several shard one dim.

        Raises:
            SpecError: shards over the others would be no shards of a rank's part.
        """
        for dim, entry in spec.sharded_dims:
            is_free = [axis in self._without for axis in entry]
            if is_free != sorted(is_free, reverse=True):
                raise SpecError(
                    f"{self._interpreter.name}: {spec!r} shards dim {dim} over "
                    f"{', '.join(map(repr, entry))}: with check= by axis, those that are 'local' "
                    "come first."
                )

    def dims(self, spec: P, global_shape: Shape) -> tuple[Dim, ...]:
        """Returns how a spec shards each dim, without axes of one rank."""
        sharded_dims = dict(spec.sharded_dims)
        return tuple(
            sharded_dim(
                size, [axis for axis in sharded_dims.get(dim, ()) if axis in self.sizes], self.sizes
            )
            for dim, size in enumerate(global_shape)
        )

    def spec_of(self, tensor: Tensor) -> P | None:
        """Returns a tensor's spec, or None if its layout is not known."""
        shard = self.find_any(tensor)
        return None if shard is None else shard.spec(self.sums(tensor).partial)

    def lay_out_memory(self, tensor: Tensor, before: ShardedTensor, after: ShardedTensor) -> None:
        """Lays out memory of equal entries, which any sharding suits, as a write into it is.

        No part of such a dim has been taken, so that views have it with its stride and sizes.
        """
        strides = tensor.stride()
        found: dict[Any, Dim | None] = {}
        for at, dim in enumerate(before.dims):
            if dim == ANY:
                key = _place(strides, before, at)
                found[key] = None if key in found else after.dims[at]
        for other, note in self._known.of_storage(tensor):
            for number, shard in [*note.items()]:
                dims = [
                    found.get(_place(other[3], shard, at)) if dim == ANY else dim
                    for at, dim in enumerate(shard.dims)
                ]
                laid_out = [dim for dim in dims if dim is not None]
                del note[number]
                if len(laid_out) == len(dims):
                    note[number] = replace(shard, dims=tuple(laid_out))

    def is_sharded(self, tensor: Tensor, axes: Axes) -> bool:
        """Returns whether one of the axes shards a dim of it."""
        known = self._known.get(tensor)
        return known is not None and any(not axes.isdisjoint(p.axes) for p in known.values())

    def copy(self, source: Tensor, copy: Tensor) -> None:
        """Notes a copy that the one-device program does not make."""
        known = self._known.get(source)
        if known is None:
            raise UnrelatedError("nothing is known about how its operand is sharded", UNSEEN)
        self._known.put(copy, dict(known))
        self._sums[self._storage(copy)] = self.sums(source)
        for tensor in (source, copy):
            self._interpreter.storage_type(tensor).freeze(_COPY)

    def make_copies_read_only(self) -> None:
        """Makes tensors read-only that one program alone has copied: writes would differ."""
        for number in self._alignment.newly_same():
            if number in self._where:
                self._where[number].freeze(_COPY)

    # ------------------------------------------------------------------------------- sums

    def sums(self, tensor: Tensor) -> Sums:
        """Returns the pending sums and the factor of a tensor's storage."""
        return self._sums.get(self._storage(tensor), FINISHED)

    def knows_sums(self, tensor: Tensor) -> bool:
        """Returns whether the sums of a tensor's storage have been set."""
        return self._storage(tensor) in self._sums

    def set_sums(self, tensor: Tensor, sums: Sums) -> None:
        """Sets the pending sums and the factor of a tensor's storage."""
        partial, loose = sums.partial & self._on, sums.loose & self._on
        zero = set(self._interpreter.storage_type(tensor).types) == {Z}
        self.keep_sums(tensor, replace(sums, partial=partial, loose=loose, zero=zero))

    def keep_sums(self, tensor: Tensor, sums: Sums) -> None:
        """Sets them to those that a tensor of these types has had."""
        self._sums[self._storage(tensor)] = sums

    def reject_unfinished(self, tensor: Tensor) -> None:
        """Raises UnrelatedError unless a value, after its sums, is the value on one device."""
        self.reject_loose(tensor)
        reject_scaled(self.sums(tensor))

    def reject_loose(self, tensor: Tensor, but: Axes = NO_AXES, advice: str = PER_RANK) -> None:
        """Raises UnrelatedError unless a value means something on one device; not over `but`."""
        sums = self.sums(tensor)
        loose = sums.loose - but
        for axis, axis_type in sorted(sums.pending):
            if axis in loose:
                raise UnrelatedError(
                    f"over {axis!r} it is the {axis_type} of a rank's part, from "
                    f"{self._interpreter.storage_type(tensor).origin()}",
                    f"all_reduce it over {axis!r} with op={axis_type!r} first.",
                )
        if loose:
            storage_type = self._interpreter.storage_type(tensor)
            is_drawn = storage_type.made is not None and draws(storage_type.made.name)
            raise UnrelatedError(
                f"over {min(loose)!r} every rank has a value of its own, from "
                f"{storage_type.origin()}, which means nothing on one device",
                DECIDED if is_drawn and advice is PER_RANK else advice,
            )

    def types(self, tensor: Tensor) -> Iterator[tuple[str, AxisType]]:
        """Yields the types of a tensor over the axes of more than one rank."""
        types = self._interpreter.by_axis(self._interpreter.storage_type(tensor).types)
        return ((axis, axis_type) for axis, axis_type in types.items() if axis in self.sizes)

    def _storage(self, tensor: Tensor) -> int:
        if type(tensor) is FakeTensor:
            return address_of(tensor)  # what follows finds the same, at several times the cost
        return int(self._interpreter.storage_type(tensor).storage._cdata)


def _place(strides: Sequence[int], shard: ShardedTensor, at: int) -> Hashable:
    return tuple(map(hashable_size, (strides[at], shard.local[at], shard.global_shape[at])))
