"""Positions that a body counts from its rank's index, as `torch.arange(n) + axis_index("tp") * n`.

On one device the index is 0, so that the parts of such a sum mean nothing there; the sum may be the
shard of a range. Numbers that are affine in the rank's indices and in the positions of entries are
followed in both programs. They are laid out where the rank's number at each of its entries is that
of the same entry on one device, whatever way they were computed: the digits of a position then have
the weights that the axes and the dim have in the number.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.checker.spmd.layout import (
    ANY,
    Dim,
    Shape,
    Sizes,
    UnrelatedError,
    counted,
    merged,
    step_of,
    unsharded,
)
from shardmap_torch.checker.spmd.recorder import Ref, TensorMap
from shardmap_torch.checker.spmd.sharded import PairedCall, Sharded
from shardmap_torch.checker.spmd.state import Notes
from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.storage import memory_of
from shardmap_torch.core.torch_private.engine import OpOverload
from shardmap_torch.mesh import Mesh

aten = torch.ops.aten


@dataclass(frozen=True)
class Affine:
    """Numbers that are affine in the indices of a rank and in the positions of entries.

    Attributes:
        shape: the shape of the tensor.
        base: the first number, where all indices are 0.
        steps: for each dim what a number grows by from one entry to the next; 0 for one entry.
        axes: for each axis what a number grows by from one rank to the next.
    """

    shape: Shape
    base: int
    steps: tuple[int, ...]
    axes: Mapping[str, int]

    @staticmethod
    def single(base: int, axes: Mapping[str, int] | None = None) -> "Affine":
        """Returns a single number, without the axes along which it is the same."""
        return Affine((), base, (), {axis: by for axis, by in (axes or {}).items() if by != 0})

    def times(self, factor: int) -> "Affine":
        """Multiplies all numbers."""
        steps = tuple(factor * step for step in self.steps)
        axes = {axis: factor * each for axis, each in self.axes.items()}
        return Affine(self.shape, factor * self.base, steps, axes)

    def plus(self, other: "Affine", shape: Shape) -> "Affine":
        """Adds numbers of a shape that both are broadcast to."""
        axes = {
            axis: self.axes.get(axis, 0) + other.axes.get(axis, 0)
            for axis in {**self.axes, **other.axes}
        }
        pairs = zip(self.along(shape), other.along(shape), strict=True)
        return Affine(shape, self.base + other.base, tuple(a + b for a, b in pairs), axes)

    def is_constant(self) -> bool:
        """Returns whether all numbers are the same, on all ranks."""
        return not (any(self.steps) or any(self.axes.values()))

    def along(self, shape: Shape) -> tuple[int, ...]:
        """The steps after these numbers have been broadcast to a shape."""
        return (*(0,) * (len(shape) - len(self.shape)), *self.steps)

    def reshaped(self, shape: Shape) -> "Affine | None":
        """Reads the numbers, in order, into another shape; None if they are not affine there."""
        runs: list[tuple[int, int]] = []
        for size, step in zip(self.shape, self.steps, strict=True):
            if runs and runs[-1][1] == size * step and size != 1:
                runs[-1] = (runs[-1][0] * size, step)
            elif size != 1:
                runs.append((size, step))
        steps = []
        for size in shape:
            if size == 1:
                steps.append(0)
                continue
            if not runs or size == 0 or runs[0][0] % size:
                return None
            length, step = runs.pop(0)
            steps.append(step * (length // size))
            if length != size:
                runs.insert(0, (length // size, step))
        return None if runs else Affine(shape, self.base, tuple(steps), self.axes)


Arguments = Mapping[str, Any]
"""The arguments of an operation in one of the programs, tensors replaced by `Affine`."""


def _counted_from(args: Arguments, shape: Shape) -> Affine | None:
    start, step = args.get("start"), args.get("step")
    start, step = 0 if start is None else start, 1 if step is None else step
    if not (is_whole(start) and is_whole(step)):
        return None
    return Affine(shape, start, (step if shape[0] != 1 else 0,), {})


def _combined(first: str, second: str, sign: int) -> "Rule":
    """Makes the rule of one argument plus, or minus, `alpha` times another."""

    def rule(args: Arguments, shape: Shape) -> Affine | None:
        x, y, alpha = _number(args[first]), _number(args[second]), args.get("alpha", 1)
        if x is None or y is None or not is_whole(alpha):
            return None
        return x.plus(y.times(sign * alpha), shape)

    return rule


def _product(args: Arguments, shape: Shape) -> Affine | None:
    x, y = _number(args["self"]), _number(args["other"])
    if x is None or y is None:
        return None
    for one, other in ((x, y), (y, x)):
        if other.is_constant():
            return one.plus(Affine.single(0), shape).times(other.base)
    return None


def _filled(name: str, default: int = 0) -> "Rule":
    """Makes the rule of a tensor of one number, that of an argument if there is one."""

    def rule(args: Arguments, shape: Shape) -> Affine | None:
        fill = args.get(name, default)
        return Affine.single(fill).plus(Affine.single(0), shape) if is_whole(fill) else None

    return rule


def _number(value: Any) -> Affine | None:
    if isinstance(value, Affine):
        return value
    return Affine.single(value) if is_whole(value) else None


def is_whole(value: Any) -> bool:
    """Returns whether a value is an integer, or a size that is a symbol."""
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


Rule = Callable[[Arguments, Shape], Affine | None]

RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(("arange", "arange.start", "arange.start_step"), _counted_from),
    **dict.fromkeys(("add.Tensor", "add.Scalar"), _combined("self", "other", 1)),
    **dict.fromkeys(("sub.Tensor", "sub.Scalar"), _combined("self", "other", -1)),
    **dict.fromkeys(("rsub.Tensor", "rsub.Scalar"), _combined("other", "self", -1)),
    **dict.fromkeys(("mul.Tensor", "mul.Scalar"), _product),
    "neg": lambda args, _: args["self"].times(-1),
    # A vmap copies numbers into tensors.
    **dict.fromkeys(
        ("_to_copy", "clone", "detach", "alias", "lift_fresh"),
        lambda args, _: _number(args["self"]),
    ),
    **dict.fromkeys(
        ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "squeeze.dim", "squeeze.dims"),
        lambda args, shape: args["self"].reshaped(shape),
    ),
    "expand": lambda args, shape: args["self"].plus(Affine.single(0), shape),
    "zeros": _filled(""),
    "ones": _filled("", 1),
    "full": _filled("fill_value"),
}

_EXACT: Final = (torch.int32, torch.int64, torch.float32, torch.float64)
"""Types in which positions are exact."""


@dataclass(frozen=True)
class Pair:
    """The numbers of a tensor in both programs."""

    here: Affine
    there: Affine


class Positions:
    """Keeps the numbers of each tensor that is affine in indices and positions."""

    def __init__(self, notes: Notes, mesh: Mesh) -> None:
        self._notes, self._mesh = notes, mesh
        self._pairs: TensorMap[Pair] = TensorMap()
        self._written: set[int | None] = set()

    def note_index(self, index: Tensor, axes: Sequence[str]) -> None:
        """Notes a rank's index over axes, the first of them major."""
        here, there, strides = {}, {}, [1, 1]
        for axis in reversed([axis for axis in axes if self._mesh.shape[axis] > 1]):
            here[axis] = strides[0]
            strides[0] *= self._mesh.shape[axis]
            if axis not in self._notes.sizes:  # both programs have its ranks
                there[axis] = strides[1]
                strides[1] *= self._mesh.shape[axis]
        self._pairs.put(index, Pair(Affine.single(0, here), Affine.single(0, there)))

    def lay_out(self, call: PairedCall) -> list[Sharded] | None:
        """Lays out a result that is affine in both programs; None for any other.

        What is no shard of the numbers on one device is laid out as each rank's own.
        """
        if call.written:
            self._written |= set(map(memory_of, call.written))
            return None
        rule = RULES.get(name_of(call.op))
        if rule is None or len(call.results) != 1 or call.results[0].dtype not in _EXACT:
            return None
        args = self._in_both(call)
        if args is None:
            return None
        shapes = tuple(base_of(call.results[0]).shape), call.event.results[0][1]
        here, there = rule(args[0], shapes[0]), rule(args[1], shapes[1])
        if here is None or there is None or len(here.shape) != len(there.shape):
            return None
        pair = Pair(here, there)
        operands = [x for each in args for x in each.values() if isinstance(x, Affine)]
        if all(x.is_constant() for x in (here, there, *operands)):
            self._pairs.put(call.results[0], pair)  # which any sharding suits
            return None
        return self._laid_out(pair, call.results[0])

    def _in_both(self, call: PairedCall) -> tuple[Arguments, Arguments] | None:
        """Returns the arguments in both programs; None where a tensor is not affine."""
        here, there = dict(call.arguments), {**call.event.arguments}
        for name, value in call.arguments.items():
            if not isinstance(value, Tensor):
                continue
            pair, ref = self.pair_of(value), call.event.arguments.get(name)
            if pair is None or not isinstance(ref, Ref):
                return None
            try:
                self._notes.find(value, ref, name)
            except UnrelatedError:
                return None
            here[name], there[name] = pair.here, pair.there
        return here, there

    def pair_of(self, tensor: Tensor) -> Pair | None:
        """Returns the numbers of a tensor; None where they are not known."""
        return None if memory_of(tensor) in self._written else self._pairs.get(tensor)

    def _laid_out(self, pair: Pair, result: Tensor) -> list[Sharded] | None:
        dims = resolved(pair, self._notes.sizes)
        if dims is None:
            dims = _unresolved(pair)
            varies = any(pair.here.axes.get(axis) for axis in self._notes.sizes)
            if self._notes.knows_sums(result):  # a view
                varies = bool(self._notes.sums(result).loose)
            if not varies and all(step_of(dim) is None for dim in dims):
                return None
        self._pairs.put(result, pair)
        return [Sharded(dims)]


def _unresolved(pair: Pair) -> tuple[Dim, ...]:
    """Lays out numbers that are not those on one device, so that nothing else is done with them."""
    here, there = pair.here, pair.there
    own = not (here.base or there.base or any(here.axes.values()) or any(there.axes.values()))
    # A single entry is the first one, whatever the step to the next would be.
    pairs = zip(here.shape, here.steps, there.steps, strict=True)
    steps = [step if own and (size == 1 or by == step) else 0 for size, by, step in pairs]
    return tuple(
        unsharded(mine) if mine == all_ else counted(step)
        for mine, all_, step in zip(here.shape, there.shape, steps, strict=True)
    )


def resolved(pair: Pair, sizes: Sizes) -> tuple[Dim, ...] | None:
    """Lays out numbers that are a shard of those on one device; None if they are not."""
    here, there = pair.here, pair.there
    others = {*here.axes, *there.axes} - {*sizes}
    if here.base != there.base or any(
        here.axes.get(axis, 0) != there.axes.get(axis, 0) for axis in others
    ):
        return None
    varying = {axis: here.axes[axis] for axis in sizes if here.axes.get(axis, 0) != 0}
    sharded = [at for at, (a, b) in enumerate(zip(here.shape, there.shape, strict=True)) if a != b]
    for over in product(sharded, repeat=len(varying)):
        places = [*zip(varying.items(), over, strict=True)]
        found = [
            _digits(pair, at, {axis: each for (axis, each), to in places if to == at}, sizes)
            for at in range(len(here.shape))
        ]
        dims = [dim for dim in found if dim is not None]
        if len(dims) == len(found):
            return tuple(dims)
    return None


def _digits(pair: Pair, at: int, axes: Mapping[str, int], sizes: Sizes) -> Dim | None:
    """Writes positions along a dim in digits: the axes' and the rank's own; None if they are none.

    The weight of a digit is what a number grows by with it, in steps of the numbers on one device.
    """
    size, all_ = pair.here.shape[at], pair.there.shape[at]
    step, own = pair.there.steps[at], pair.here.steps[at]
    if size == all_ and not axes:
        return unsharded(size) if step == own else None
    if step == own == 0 and size != 0 and not axes:
        return ANY
    if step == 0 or size == 0:
        return None
    grows: list[tuple[int, int, str | None]]
    grows = [(each, sizes[axis], axis) for axis, each in axes.items()]
    grows += [(own, size, None)] if size != 1 else []
    digits = []
    for each, base, axis in grows:
        if each % step or each // step < 1:
            return None
        digits.append((each // step, base, axis))
    digits.sort(key=lambda digit: digit[0])
    weight = 1
    for each, base, _ in digits:
        if each != weight:
            return None
        weight *= base
    if weight != all_:
        return None
    return tuple(merged([(axis, base) for _, base, axis in digits[::-1]]))


@cache
def name_of(op: OpOverload) -> str:
    """Returns the name of an ATen overload, as in "add.Tensor", without "default"."""
    packet, _, overload = str(op).removeprefix("aten.").partition(".")
    return packet if overload == "default" else f"{packet}.{overload}"
