"""Positions of extrema of a sharded dim: each rank's own, then the best of all ranks' candidates.

`max(dim)` or `topk(k)` of a rank's part gives candidates: values, and their positions in the part,
to which `axis_index(axis) * n` is added. Gathered along one dim, in the order of the ranks, those
of one device are among them. The same reduction of the values gives the values on one device, and
where they lie among the candidates; the positions that are taken from there are those on one
device. Nothing else is done with candidates. Of equal entries `max` and `argmax` take the first.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from shardmap_torch.checker.spmd.layout import (
    CANDIDATES,
    Dim,
    ShardedTensor,
    UnrelatedError,
    axes_of,
    fitted,
    is_stacked,
    unsharded,
)
from shardmap_torch.checker.spmd.recorder import Event, Ref, TensorMap
from shardmap_torch.checker.spmd.sharded import PairedCall
from shardmap_torch.checker.spmd.state import Notes
from shardmap_torch.checker.spmd.sums import NO_AXES, Sums
from shardmap_torch.checker.spmd.values.maxima import Maxima
from shardmap_torch.checker.spmd.values.positions import Positions
from shardmap_torch.collectives.operations import Collective

aten = torch.ops.aten

VALUES: Final = "values"
LOCAL: Final = "positions in a rank's part"
FOUND: Final = "positions"
CHOSEN: Final = "positions among candidates"


@dataclass(frozen=True)
class Candidate:
    """Candidates for extrema.

    Attributes:
        form: VALUES, LOCAL, FOUND or CHOSEN.
        number: of the values that a rank's reduction gives, on one device.
        largest: whether maxima are meant.
        axis: the axis that shards the dim.
        size: how many entries of the dim a rank has.
        count: how many candidates a rank has.
        dim: along which they lie; None before `unsqueeze`.
        is_gathered: whether those of all ranks do.
    """

    form: str
    number: int
    largest: bool
    axis: str
    size: int
    count: int
    dim: int | None
    is_gathered: bool = False


_EXTREMA: Final[Mapping[object, bool]] = {
    aten.max.dim: True,
    aten.argmax.default: True,
    aten.amax.default: True,
    aten.min.dim: False,
    aten.argmin.default: False,
    aten.amin.default: False,
}


class Candidates:
    """The candidates for extrema over a sharded dim, followed until the best are chosen."""

    def __init__(self, notes: Notes, positions: Positions, maxima: Maxima) -> None:
        """Knows of none; offsets are among `positions`, and `maxima` follows gradients."""
        self._notes, self._positions, self._maxima = notes, positions, maxima
        self._known: TensorMap[Candidate] = TensorMap()

    def begin(self, call: PairedCall, layout: ShardedTensor) -> None:
        """Notes what `max(dim)` of a rank's part of `layout` gives, whose layouts are noted."""
        dim = call.arguments.get("dim")
        if call.op not in (aten.max.dim, aten.min.dim) or not isinstance(dim, int):
            return
        dim %= len(layout.dims)
        axes = axes_of(layout.dims[dim])
        if len(axes) == 1 and layout.dims[dim][0][0] == axes[0]:
            at = dim if call.arguments.get("keepdim") else None
            number, largest = call.event.results[0][0], _EXTREMA[call.op]
            found = Candidate(VALUES, number, largest, axes[0], layout.local[dim], 1, at)
            self._known.put(call.results[0], found)
            self._known.put(call.results[1], replace(found, form=LOCAL))

    def lay_out(self, call: PairedCall) -> bool:
        """Notes the results of a step with candidates; False for other steps.

        Raises:
            UnrelatedError: it takes positions, or candidates of all ranks, in another way.
        """
        rule = _RULES.get(call.op)
        if rule is not None and rule(self, call):
            return True
        for tensor in call.read if self._known else ():
            known = self._known.get(tensor)
            if known is not None and (known.form != VALUES or known.is_gathered):
                raise UnrelatedError(
                    f"an operand is candidates of ranks for an extremum: {known.form}", _ADVICE
                )
        for tensor in call.written:
            self._known.drop(tensor)
        return False

    def gather(self, collective: Collective | None, event: Event, x: Tensor, y: Tensor) -> bool:
        """Notes candidates of all ranks; False for other collectives."""
        known = self._known.get(x) if self._known else None
        if known is None or collective is None or known.is_gathered or known.form == CHOSEN:
            return False
        axes = [axis for axis in collective.axes if axis in self._notes.sizes]
        at = collective.dim
        if collective.sizes is not None or axes != [known.axis] or known.form == LOCAL:
            return False
        shard = self._notes.find(x, event.arguments["x"], "its operand")
        dims, digit = [*shard.dims], (CANDIDATES, self._notes.sizes[known.axis])
        if collective.tiled and known.dim == at:
            dims[at] = (digit, *dims[at])
        elif not collective.tiled and known.dim is None:
            dims.insert(at, (digit,))
        else:
            return False
        self._note(y, event, 0, dims, replace(known, dim=at, is_gathered=True))
        return True

    # ------------------------------------------------------------------------------- rules

    def _begin_several(self, call: PairedCall) -> bool:
        x, ref = call.arguments["self"], call.event.arguments["self"]
        shard = self._notes.shard_of(x, ref)
        if shard is None or not shard.dims or call.differing:
            return False
        dim = call.arguments["dim"] % len(shard.dims)
        axes, k = axes_of(shard.dims[dim]), call.arguments["k"]
        if len(axes) != 1 or shard.dims[dim][0][0] != axes[0] or self._notes.sums(x) != Sums():
            return False
        dims = [*shard.dims[:dim], unsharded(k), *shard.dims[dim + 1 :]]
        number, largest = call.event.results[0][0], call.arguments["largest"]
        found = Candidate(VALUES, number, largest, axes[0], shard.local[dim], k, dim)
        self._maxima.begin(call, 0)
        self._note(call.results[0], call.event, 0, dims, found)
        self._note(call.results[1], call.event, 1, dims, replace(found, form=LOCAL))
        return True

    def _add_offset(self, call: PairedCall) -> bool:
        """Adds the position of a rank's first entry."""
        for name, other in (("self", "other"), ("other", "self")):
            known, offset = self._of(call, name), call.arguments[other]
            if known is None or known.form != LOCAL or not isinstance(offset, Tensor):
                continue
            pair = self._positions.pair_of(offset)
            sizes = None if pair is None else (*pair.here.shape, *pair.there.shape)
            if pair is None or call.arguments["alpha"] != 1 or any(n != 1 for n in sizes or ()):
                return False
            here = {axis: by for axis, by in pair.here.axes.items() if by}
            if pair.here.base or pair.there.base or any(pair.there.axes.values()):
                return False
            if here != {known.axis: known.size} or call.results[0].dtype != torch.int64:
                return False
            if offset.ndim > call.arguments[name].ndim:
                return False
            shard = self._find(call, name)
            self._known.drop(call.results[0])
            self._note(call.results[0], call.event, 0, shard.dims, replace(known, form=FOUND))
            return True
        return False

    def _unsqueeze(self, call: PairedCall) -> bool:
        known = self._of(call, "self")
        if known is None:
            return False
        shard = self._find(call, "self")
        dim = call.arguments["dim"] % (len(shard.dims) + 1)
        if known.dim is not None or (known.is_gathered and known.form != CHOSEN):
            return False
        dims = [*shard.dims[:dim], (), *shard.dims[dim:]]
        self._note(call.results[0], call.event, 0, dims, replace(known, dim=dim))
        return True

    def _copy(self, call: PairedCall) -> bool:
        known = self._of(call, "self")
        if known is None or call.results[0].shape != call.arguments["self"].shape:
            return False
        if known.form != VALUES and call.results[0].dtype != torch.int64:
            return False
        if known.form == VALUES and call.results[0].dtype != call.arguments["self"].dtype:
            return False
        if known.form == VALUES and not known.is_gathered and call.op is not aten.slice.Tensor:
            return False  # of which an extremum may be pending
        shard = self._find(call, "self")
        if shard.global_shape != call.event.results[0][1]:
            return False
        self._note(call.results[0], call.event, 0, shard.dims, known)
        return True

    def _choose(self, call: PairedCall) -> bool:
        """Reduces gathered values to those on one device, and to where they lie."""
        known, args = self._of(call, "self"), call.arguments
        if known is None or known.dim is None or known.form != VALUES or not known.is_gathered:
            return self._reject_positions(call)
        shard = self._find(call, "self")
        dim, k, rank = args.get("dim"), args.get("k"), len(shard.dims)
        listed = dim if isinstance(dim, list | tuple) else [dim]
        if len(listed) != 1 or listed[0] is None or listed[0] % rank != known.dim:
            return False
        largest = args["largest"] if k is not None else _EXTREMA[call.op]
        if largest != known.largest or (k or 1) > known.count or args.get("sorted") is False:
            raise UnrelatedError(
                f"of the {known.count} candidates that each rank has it chooses others",
                _ADVICE,
            )
        kept: list[Dim] = [unsharded(k or 1)] if k is not None or args.get("keepdim") else []
        dims = [*shard.dims[: known.dim], *kept, *shard.dims[known.dim + 1 :]]
        chosen = replace(known, form=CHOSEN, dim=known.dim if kept else None)
        for number, result in enumerate(call.results):
            is_value = result.dtype == args["self"].dtype and number == 0
            is_value = is_value and call.op not in (aten.argmax.default, aten.argmin.default)
            self._note(result, call.event, number, dims, None if is_value else chosen)
        return True

    def _reject_positions(self, call: PairedCall) -> bool:
        """Refuses positions of extrema over a sharded dim that come without the values."""
        x, ref = call.arguments["self"], call.event.arguments["self"]
        shard, dim = self._notes.shard_of(x, ref), call.arguments.get("dim")
        if call.op not in (aten.argmax.default, aten.argmin.default) or shard is None:
            return False
        if is_stacked(shard.dims):
            return False
        dims = shard.dims if dim is None else [shard.dims[dim]] if shard.dims else []
        if any(map(axes_of, dims)):
            raise UnrelatedError("it gives positions in a rank's part of a sharded dim", _ADVICE)
        return False

    def _choose_several(self, call: PairedCall) -> bool:
        return self._choose(call) or self._begin_several(call)

    def _take(self, call: PairedCall) -> bool:
        """Takes the positions, or values, of the chosen candidates."""
        known, chosen = self._of(call, "self"), self._of(call, "index")
        if known is None or chosen is None or known.form == LOCAL or chosen.form != CHOSEN:
            return False
        index, rank = self._find(call, "index"), len(call.arguments["self"].shape)
        is_one = (known.number, known.is_gathered, known.dim) == (chosen.number, True, chosen.dim)
        if not is_one or call.arguments["dim"] % rank != known.dim:
            return False
        rest = [n for at, n in enumerate(index.local) if at != known.dim]
        if rest != [n for at, n in enumerate(call.arguments["self"].shape) if at != known.dim]:
            return False
        self._note(call.results[0], call.event, 0, index.dims, None)
        return True

    # ------------------------------------------------------------------------------- notes

    def _of(self, call: PairedCall, name: str) -> Candidate | None:
        value = call.arguments.get(name)
        return self._known.get(value) if isinstance(value, Tensor) else None

    def _find(self, call: PairedCall, name: str) -> ShardedTensor:
        ref = call.event.arguments[name]
        assert isinstance(ref, Ref)
        return self._notes.find(call.arguments[name], ref, name, takes_stacks=True)

    def _note(
        self,
        result: Tensor,
        event: Event,
        at: int,
        dims: list[Dim] | tuple[Dim, ...],
        known: Candidate | None,
    ) -> None:
        """Notes a result, which means nothing on one device as long as it is of candidates."""
        number, shape = event.results[at]
        self._notes.note(result, number, fitted(dims, tuple(result.shape), shape))
        if known is not None:
            self._known.put(result, known)
        if not self._notes.knows_sums(result):  # else it is a view
            loose = NO_AXES if known is None else frozenset({known.axis})
            self._notes.set_sums(result, Sums(loose=loose))


_ADVICE: Final = (
    "choose among all ranks' candidates: v, i = x.topk(k), gathered = all_gather(v, axis, dim=-1, "
    "dst=I), values, at = gathered.topk(k), positions = all_gather(i + axis_index(axis) * "
    "x.shape[-1], axis, dim=-1, dst=I).gather(-1, at)."
)
"""Advice where positions of extrema over a sharded dim are needed."""

_RULES: Final[Mapping[object, Callable[[Candidates, PairedCall], bool]]] = {
    aten.add.Tensor: Candidates._add_offset,
    aten.add_.Tensor: Candidates._add_offset,
    aten.topk.default: Candidates._choose_several,
    aten.unsqueeze.default: Candidates._unsqueeze,
    **dict.fromkeys((aten.slice.Tensor, aten.clone.default, aten.detach.default), Candidates._copy),
    **dict.fromkeys(_EXTREMA, Candidates._choose),
    aten.gather.default: Candidates._take,
}
