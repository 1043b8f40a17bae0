"""Per-rank code beside axes that it does not know of, as a lookup over "tp" in a "dp" program.

A `local_region` promises something over the axes that its types name. Over the others nothing is
promised, and its steps are compared with those of a program in which only the named axes have
several ranks: each value must be a shard, or a pending sum, of its value there. So code that was
written for one axis serves programs with more, if it treats their shards as it would treat all.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from torch import Tensor

from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.ir.observer import COLLECTIVE, UNOBSERVED, Observer
from shardmap_torch.checker.ir.paths import AgainError
from shardmap_torch.checker.spmd.equivalence import Relation
from shardmap_torch.checker.spmd.layout import (
    ANY,
    Dim,
    Shape,
    ShardedTensor,
    UnrelatedError,
    axes_of,
    fitted,
    in_words,
    merged,
    size_of_one_rank,
    step_of,
)
from shardmap_torch.checker.spmd.ops.movements import moved
from shardmap_torch.checker.spmd.recorder import Recorder, Ref
from shardmap_torch.checker.spmd.state import Notes
from shardmap_torch.checker.spmd.sums import Sums, reject_scaled
from shardmap_torch.collectives.moves import EXTREMA
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.spec import P

Axes = frozenset[str]

_END: Final = "the results of a region"


class RegionRecorder(Observer):
    """Notes the steps in each region, and none outside."""

    judges = False

    def __init__(self) -> None:
        super().__init__()
        self.regions: list[Recorder] = []
        self.flows: Callable[[Tensor], bool] = lambda tensor: False

    def on_start(self, flows: Callable[[Tensor], bool]) -> None:
        self.flows = flows

    def on_region_start(
        self, name: str, inputs: Sequence[Tensor], specs: Sequence[P], axes: Axes
    ) -> Observer:
        """Begins a record of the region."""
        if self.is_ignored:
            return UNOBSERVED
        recorder = Recorder()
        recorder.on_start(self.flows)
        for tensor in inputs:
            recorder.on_argument(tensor, P())
        self.regions.append(recorder)
        return recorder

    def on_region_end(self, name: str, outputs: Sequence[Tensor], specs: Sequence[P]) -> None:
        """Notes which tensors are its results."""
        if not self.is_ignored:
            self.regions[-1].on_step(_END, {"outputs": outputs}, [])


class Records:
    """The steps of regions, by the axes along which there are several ranks."""

    def __init__(self, record: Callable[[Axes], tuple[RegionRecorder, Exception | None]]) -> None:
        """Takes `record`, which interprets the body where only its axes have several ranks."""
        self._record = record
        self._known: dict[Axes, tuple[RegionRecorder, Exception | None]] = {}

    def add(self, axes: Axes) -> None:
        """Makes the record for a set of axes."""
        self._known[axes] = self._record(axes)

    def of(self, axes: Axes, index: int) -> Recorder:
        """Returns the steps of one region.

        Raises:
            AgainError: there is no such record yet.
            UnrelatedError: the body does not come so far there.
        """
        if axes not in self._known:
            raise AgainError(axes)
        recorder, failure = self._known[axes]
        if index >= len(recorder.regions):
            over = ", ".join(map(repr, sorted(axes)))
            why = "" if failure is None else f": {type(failure).__name__}: {failure}"
            raise UnrelatedError(f"where only {over} has several ranks the body ends before{why}")
        return recorder.regions[index]


class ProgramRelation(Relation):
    """Follows the ranks' program, and its regions over the axes that they do not name."""

    def __init__(self, interpreter: Interpreter, one: Recorder, records: Records) -> None:
        """Follows `one`, the record of the body on one device, and `records` of its regions."""
        super().__init__(interpreter, one)
        self._records = records
        self._num_regions = 0

    def _follow_region(
        self, inputs: Sequence[Tensor], refs: Sequence[Ref], specs: Sequence[P], axes: Axes
    ) -> Observer:
        self._num_regions += 1
        shards = [
            self._notes.find(x, ref, "its argument") for x, ref in zip(inputs, refs, strict=True)
        ]
        found = {axis for shard in shards for axis in shard.axes}
        found |= {axis for x in inputs for axis in self._notes.sums(x).partial}
        if found <= axes:
            return super()._follow_region(inputs, refs, specs, axes)
        steps = self._records.of(axes & set(self._notes.sizes), self._num_regions - 1)
        inner = RegionRelation(self._interpreter, steps, axes, self._notes)
        for tensor, shard, spec in zip(inputs, shards, specs, strict=True):
            self._notes.reject_unfinished(tensor)
            inner.enter(tensor, shard, spec)
        return inner

    def _place_results(
        self, inside: Observer, places: Sequence[tuple[Tensor, tuple[int, Shape], P]]
    ) -> None:
        if not isinstance(inside, RegionRelation):
            super()._place_results(inside, places)
            return
        layouts = inside.leave([tensor for tensor, _, _ in places])
        for (tensor, (number, shape), spec), inner in zip(places, layouts, strict=True):
            sums = Sums(spec.partial | inside.partial(tensor))
            self._notes.note(tensor, number, inside.joined(tensor, inner, spec, shape))
            self._notes.set_sums(tensor, sums)


class AxesRelation(Relation):
    """Follows the ranks' program over some axes: the other program has the same ranks on others."""

    def __init__(self, interpreter: Interpreter, steps: Recorder, axes: Axes) -> None:
        """Takes the `axes` over which nothing is compared, along which `steps` has ranks too."""
        super().__init__(interpreter, steps, without=axes)
        self._axes = axes

    def on_collective(self, move: str, collective: Collective | None, x: Tensor, y: Tensor) -> None:
        """Moves data over the axes that are not compared, which leaves others' shards together."""
        others = collective is not None and not self._axes.issuperset(collective.axes)
        if (
            collective is None
            or self._axes.isdisjoint(collective.axes)
            or (others and move == "sum")
        ):
            super().on_collective(move, collective, x, y)
            return
        with self._judged(str(collective), [("x", x)]) as live:
            if live:
                event = self._take(COLLECTIVE)
                ((number, shape),) = event.results
                sums = self._notes.sums(x)
                if not self._axes.issuperset(collective.axes):
                    raise UnrelatedError("it goes over axes that the region names, and others")
                if move in EXTREMA and sums.partial:
                    raise UnrelatedError("its operand is a pending sum over another axis")
                if move in EXTREMA:
                    reject_scaled(sums)
                shard = self._notes.find(x, event.arguments["x"], "its operand")
                dims = moved(move, collective, shard, shape)
                self._notes.note(y, number, fitted(dims, tuple(y.shape), shape))
                self._notes.set_sums(y, sums)


class RegionRelation(AxesRelation):
    """Follows per-rank code over the axes that its types do not name."""

    def __init__(self, interpreter: Interpreter, steps: Recorder, axes: Axes, outer: Notes) -> None:
        """Takes the `axes` that the types name, and the `outer` notes of the program around it."""
        super().__init__(interpreter, steps, axes)
        self._outer = outer

    def enter(self, tensor: Tensor, shard: ShardedTensor, spec: P) -> None:
        """Places an argument, which must be sharded over the named axes as its type says."""
        number, shape = next(self._inputs)
        wanted = self._outer.dims(spec, shard.global_shape)
        dims = [
            _rest(number, have, want, self._axes, spec)
            for number, (have, want) in enumerate(zip(shard.dims, wanted, strict=True))
        ]
        sums = self._outer.sums(tensor)
        if sums.partial & self._axes != spec.partial & set(self._outer.sizes):
            raise UnrelatedError(f"it is not the pending sum that {spec!r} promises")
        self._notes.note(tensor, number, fitted(dims, tuple(tensor.shape), shape))
        self._notes.set_sums(tensor, replace(sums, partial=sums.partial - self._axes))

    def leave(self, outputs: Sequence[Tensor]) -> list[ShardedTensor]:
        """Returns the layouts of the results over the axes that the types do not name."""
        refs = self._take(_END).arguments["outputs"]
        for tensor in outputs:
            self._notes.reject_unfinished(tensor)
        return [self._notes.find(y, r, "its result") for y, r in zip(outputs, refs, strict=True)]

    def joined(self, tensor: Tensor, inner: ShardedTensor, spec: P, shape: Shape) -> ShardedTensor:
        """Returns the layout over all axes of a result that its type says is `spec`."""
        dims = []
        for have, want in zip(inner.dims, self._outer.dims(spec, shape), strict=True):
            own = [digit for digit in want if digit[0] is not None]
            if have == ANY and own:
                raise size_of_one_rank("its size")
            dims.append(ANY if have == ANY else tuple(merged([*own, *have])))
        return fitted(dims, tuple(tensor.shape), shape)

    def partial(self, tensor: Tensor) -> Axes:
        """Returns the axes over which a result is a pending sum that its type does not name."""
        return self._notes.sums(tensor).partial


def _rest(number: int, have: Dim, want: Dim, axes: Axes, spec: P) -> Dim:
    """Returns the digits of a dim that are left to axes that a region does not name."""
    own = tuple(digit for digit in want if digit[0] is not None)
    left = have[len(own) :]
    if have == ANY and not own:
        return ANY
    if (
        have == ANY
        or step_of(have) is not None
        or have[: len(own)] != own
        or not axes.isdisjoint(axes_of(left))
    ):
        raise UnrelatedError(
            f"dim {number} is {in_words(have)}, and {spec!r} promises {in_words(want)}"
        )
    return left
