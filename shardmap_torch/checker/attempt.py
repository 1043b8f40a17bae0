"""One attempt on one way through a body: its forward and derived backward against its specs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Final, Literal

import torch
from torch import Tensor

from shardmap_torch.boundary import Call, Result, apply, can_receive_gradient, run_body
from shardmap_torch.checker import raw, report
from shardmap_torch.checker.abstract import AbstractBackend
from shardmap_torch.checker.branches import Branch, Branches, told
from shardmap_torch.checker.calls import Types
from shardmap_torch.checker.follow import Recording, Step
from shardmap_torch.checker.functions import watch
from shardmap_torch.checker.interpret import SEED, Interpreter, is_real
from shardmap_torch.checker.lattice import accepts, plain
from shardmap_torch.checker.modes import interpreting
from shardmap_torch.checker.numbers import SymbolicNumber
from shardmap_torch.checker.observe import UNOBSERVED, Recorder, base_of
from shardmap_torch.checker.program import Way
from shardmap_torch.checker.relate import Relation
from shardmap_torch.checker.repair import NONE, Repair, propose
from shardmap_torch.checker.ways import (
    Cast,
    Exit,
    Need,
    Passage,
    Settled,
    Where,
    is_raised_by_body,
)
from shardmap_torch.errors import ShardMapError, ShardTypeError
from shardmap_torch.mesh import Mesh
from shardmap_torch.rule import Collective
from shardmap_torch.spec import P
from shardmap_torch.types import AxisType, I, K, Partial, R, V, Z

Strictness = Literal["local", "global"]


@dataclass(frozen=True)
class Round:
    """What all ways through a body are verified with.

    Attributes:
        call: the call, some axes of its inputs settled.
        repair: what is tried.
        strictness: whether the forward is held against the program on one device.
        settled: what the ways share as to their results.
        start: takes the notes of all ways.
    """

    call: Call
    repair: Repair
    strictness: Strictness
    settled: Settled = field(default_factory=Settled)
    start: Step = field(default_factory=Step)


def go(this: Round, branches: Branches) -> Passage:
    """Goes one way."""
    is_global = this.strictness == "global"
    one = _OneDevice.of(this.call, branches.again()) if is_global else None
    try:
        try:
            return _Verification(this, branches, K, one).run()
        except _RetryError as retry:
            try:
                # A result that is K is seeded as P where I does not type.
                branches.start()
                return _Verification(this, branches, R, one).run()
            except ShardTypeError:
                raise retry.error from None
    except ShardTypeError as error:
        error.args = ("\n".join([str(error), *told(branches.taken)]),)
        raise
    finally:
        branches.end()


@dataclass(frozen=True)
class _OneDevice:
    """The program on one device: every axis has one rank, and no collective does anything.

    Attributes:
        steps: what it does.
        branches: those that it has taken.
        numbers: those that it has made of values taken from tensors.
        failure: what it raised, where it has not come to its end.
    """

    steps: Recorder
    branches: Sequence[Branch]
    numbers: Sequence[str]
    failure: Exception | None

    @staticmethod
    def of(call: Call, branches: Branches) -> "_OneDevice":
        """Goes the same way."""
        mesh = Mesh(
            call.mesh.axis_names, (1,) * len(call.mesh.axis_sizes), "abstract", call.mesh.device
        )
        steps = Recorder()
        this = Round(replace(call, mesh=mesh), NONE, "local")
        failure: Exception | None = None
        verification = _Verification(this, branches, K, None)
        try:
            verification.record(steps)
        except Exception as error:  # the user's code may raise anything
            failure = error
        return _OneDevice(steps, branches.taken, verification.numbers, failure)

    def require(self, name: str, branches: Sequence[Branch], numbers: Sequence[str]) -> None:
        """Passes on what went wrong on one device only."""
        if self.failure is not None:
            raise ShardTypeError(
                f"{name}: check='global': on one device the body fails: "
                f"{type(self.failure).__name__}: {self.failure}\nFix: write sizes that are right "
                "on one device too: -1, x.shape[...], or a size divided by axis_size(axis)."
            ) from self.failure
        if list(branches) != list(self.branches):
            raise ShardTypeError(
                f"{name}: check='global': on one device the body takes other branches."
            )
        pairs = zip_longest(numbers, self.numbers, fillvalue="none")
        for here, there in pairs:
            if here != there:
                raise ShardTypeError(
                    f"{name}: check='global': a number made of values taken from tensors is {here} "
                    f"on a rank and {there} on one device.\nFix: multiply sizes by "
                    "axis_size(axis)."
                )


class _RetryError(Exception):
    """The gradients do not type, and some result is K, which has a second reading."""

    def __init__(self, error: ShardTypeError) -> None:
        self.error = error


@dataclass(frozen=True)
class _Like:
    """What is kept of an argument."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    grad: bool

    @staticmethod
    def of(leaf: Tensor) -> "_Like":
        grad = can_receive_gradient(leaf) and is_real(leaf.dtype)
        return _Like(tuple(leaf.shape), leaf.dtype, leaf.device, grad)


class _Verification:
    """One attempt on one way.

    `uncommitted` is what a result that is K counts as, and `one` the program on one device, if the
    forward is to be held against it.
    """

    def __init__(
        self, this: Round, branches: Branches, uncommitted: AxisType, one: "_OneDevice | None"
    ) -> None:
        call = self._call = this.call
        self._settled, self._repair, self._start = this.settled, this.repair, this.start
        self._branches, self._uncommitted, self._one = branches, uncommitted, one
        self._interpreter = Interpreter(call.name, call.mesh, branches, this.repair)
        if one is not None and one.failure is None:
            self._interpreter.observer = Relation(self._interpreter, one.steps)
        self._backend = AbstractBackend(self._interpreter, this.repair)
        self._exits: dict[Where, Exit] = {}
        self._needs: dict[Where, Need] = {}
        self._gradients: list[tuple[str, Types]] = []
        self._has_uncommitted = False
        self._locals: dict[int, Tensor] = {}

    @property
    def numbers(self) -> Sequence[str]:
        """The numbers made of values taken from tensors."""
        return self._interpreter.numbers.texts

    def run(self) -> Passage:
        """Interprets forward and backward."""
        with self._entered() as locals_:
            try:
                result = self._run_body(locals_)
            except Exception as error:
                return self._raised(error)
            self._leave(result)
            try:
                self._pull_back(result, locals_)
            except ShardTypeError as error:
                if self._has_uncommitted and self._uncommitted == K:
                    raise _RetryError(error) from None
                raise
        if self._one is not None:
            self._one.require(self._call.name, self._branches.taken, self.numbers)
        return self._passage(result)

    def record(self, steps: Recorder) -> None:
        """Interprets the forward, and notes its steps."""
        self._interpreter.observer = steps
        with self._entered() as locals_:
            result = self._run_body(locals_)
            for position in result.fit.crossing:
                value = self._interpreter.adopt(result.leaves[position])
                steps.left(result.fit.paths[position], value, result.fit.spec(position))

    def _run_body(self, locals_: Sequence[Tensor]) -> Result:
        recording = Recording(self._interpreter, self._start)
        call = replace(self._call, follow=lambda: recording)
        result = run_body(call, self._backend, locals_)
        if self._branches.refusal is not None:
            raise self._branches.refusal
        return result

    @contextmanager
    def _entered(self) -> Iterator[list[Tensor]]:
        call, interpreter = self._call, self._interpreter
        # Outside of the modes: arguments may be those of a transform.
        fakes = [_Like.of(call.leaves[position]) for position in call.crossing]
        grad = any(like.grad for like in fakes) or torch.is_grad_enabled()
        with torch.set_grad_enabled(grad), interpreting(interpreter):
            locals_ = [
                self._enter(position, like)
                for position, like in zip(call.crossing, fakes, strict=True)
            ]
            self._locals = dict(zip(call.crossing, locals_, strict=True))
            yield locals_

    def _raised(self, error: Exception) -> Passage:
        """The end of a way that raises; what the body cannot help is an error of the check."""
        branches, name = self._branches, SymbolicNumber.__name__
        called = raw.named_in(self._call.name, error)
        if called is not None:
            raise called from error
        if branches.refusal is not None:
            raise branches.refusal from None
        in_words = str(error)
        if isinstance(error, ShardMapError) or not (branches.taken or name in in_words):
            raise error
        if not is_raised_by_body(error) or name in in_words:
            raise ShardTypeError(f"{self._call.name}: {type(error).__name__}: {error}") from error
        way = Way(
            tuple(branches.taken),
            tuple(self._interpreter.equations),
            f"raises {type(error).__name__}",
        )
        return Passage(way, None, error)

    # ------------------------------------------------------------------------------- inputs

    def _enter(self, position: int, like: "_Like") -> Tensor:
        call, interpreter = self._call, self._interpreter
        spec = call.fit.spec(position)
        shape = local_shape(like.shape, spec, call.mesh)
        with interpreter.paused():
            fake = torch.empty(shape, dtype=like.dtype, device=like.device)
        kinds = tuple(_enters_as(spec, axis, call.mapped) for axis in interpreter.axes)
        path = call.fit.paths[position]
        cell = interpreter.bring(fake, kinds, f"input {path} ({spec!r})", f"is the input {path}")
        cell.leaf = position
        interpreter.observer.entered(fake, spec)
        with interpreter.paused():
            return fake.requires_grad_(like.grad)

    # ------------------------------------------------------------------------------ outputs

    def _leave(self, result: Result) -> None:
        problems: list[str] = []
        open_sums: dict[int, list[str]] = {}
        for position in result.fit.crossing:
            self._sum_result(result, position)
            spec, path = result.fit.spec(position), result.fit.paths[position]
            value = result.leaves[position]
            # A real tensor that the body returns as it is was closed over.
            result.leaves[position] = value = self._interpreter.adopt(value)  # type: ignore[index]
            for axis, kind in zip(self._interpreter.axes, self._output_kinds(value), strict=True):
                if axis not in self._call.mapped:
                    continue
                found = self._cast(path, spec, axis, kind, value)
                if isinstance(found, str):
                    problems.append(found)
                    open_sums.setdefault(position, []).append(axis)
                else:
                    self._exits[position, axis] = self._exit((position, axis), found, spec, value)
        if problems:
            head = f"{self._call.name}: the result does not fit out_specs:"
            error = ShardTypeError("\n".join([head, *problems]))
            raise propose(error, [self._summed(result, open_sums)])
        for position in result.fit.crossing:
            spec, path = result.fit.spec(position), result.fit.paths[position]
            self._interpreter.observer.left(path, result.leaves[position], spec)
        self._interpreter.observer = UNOBSERVED  # conversions of the boundary keep the meaning
        for (position, axis), way_out in self._exits.items():
            casts = [Collective(name, src, dst, (axis,)) for name, src, dst in way_out.casts]
            value = apply(self._backend, casts, result.leaves[position])
            result.leaves[position] = value  # type: ignore[index]

    def _exit(self, where: Where, found: tuple[Cast, ...], spec: P, value: Tensor) -> Exit:
        """The conversions found, or those that all ways share where they are right as well."""
        _, axis = where
        cell = self._interpreter.cell(value)
        kind = self._interpreter.kinds(base_of(value))[self._interpreter.axes.index(axis)]
        promise = _promised(spec, axis).kind
        # What does not type as I is known by the retry as R.
        is_free = self._uncommitted == K or not self._interpreter.flows(base_of(value))
        readings = _READINGS.get((kind.kind, promise), "") if is_free else ""
        others = frozenset(_EXITS[reading, promise] for reading in readings)
        shared = self._settled.exits.get(where, found)
        return Exit(shared if shared in others else found, others, cell.origin())

    def _sum_result(self, result: Result, position: int) -> None:
        for axis in self._repair.exits.get(position, ()):
            total = Collective("all_reduce", Partial, I, (axis,))
            value = apply(self._backend, [total], result.leaves[position])
            result.leaves[position] = value  # type: ignore[index]

    def _summed(self, result: Result, axes: dict[int, list[str]]) -> Repair:
        """The repair that sums every result that is not whole."""
        what = " and ".join(
            f"{result.fit.paths[position]} over {', '.join(map(repr, names))}"
            for position, names in axes.items()
        )
        return Repair(f"all_reduce {what} with dst=I before the return", exits=axes)

    def _output_kinds(self, value: Tensor) -> Types:
        kinds = self._interpreter.kinds(base_of(value))
        if K in kinds and self._interpreter.flows(base_of(value)):
            self._has_uncommitted = True
            return tuple(self._uncommitted if kind == K else kind for kind in kinds)
        return kinds

    def _cast(
        self, path: str, spec: P, axis: str, kind: AxisType, value: Tensor
    ) -> tuple[Cast, ...] | str:
        """The conversions from the body's type to the promised one, or what is wrong."""
        found = _EXITS.get((plain(kind).kind, _promised(spec, axis).kind))
        if found is not None:
            return found
        at = self._interpreter.axes.index(axis)
        cell = self._interpreter.cell(value)
        chain = " <- ".join(report.chain_of(cell, at))
        if kind == Partial:
            return (
                f"  {path}: {spec!r} promises a finished value over {axis!r}, but the result is a "
                f"sum over {axis!r} still to be taken\n    it comes from {chain}\n"
                f"    Fix: all_reduce it over {axis!r}, or name {axis!r} in partial=."
            )
        return (
            f"  {path}: {spec!r} promises one value on all ranks of {axis!r}, but the result "
            f"varies over it\n    it comes from {chain}\n"
            f"    Fix: reduce or gather it over {axis!r}, or name {axis!r} in the spec."
        )

    # ---------------------------------------------------------------------------- gradients

    def _pull_back(self, result: Result, locals_: Sequence[Tensor]) -> None:
        interpreter = self._interpreter
        outputs = [
            (result.leaves[i], result.fit.spec(i))
            for i in result.fit.crossing
            if result.leaves[i].requires_grad
        ]
        leaves = [x for x in locals_ if x.requires_grad]
        closures = [x for x in interpreter.closures.values() if x.requires_grad]
        if not outputs or not (leaves or closures):
            self._commit({})
            return
        seeds = [self._seed(value, spec) for value, spec in outputs]
        watch(interpreter, [value for value, _ in outputs])
        with interpreter.differentiating():
            gradients = torch.autograd.grad(
                [value for value, _ in outputs], [*leaves, *closures], seeds, allow_unused=True
            )
        found = dict(zip(map(id, leaves), gradients, strict=False))
        self._commit(
            {
                position: found.get(id(local))
                for position, local in zip(self._call.crossing, locals_, strict=True)
            }
        )
        for closure, gradient in zip(closures, gradients[len(leaves) :], strict=True):
            self._check_closure(closure, gradient)

    def _seed(self, value: Tensor, spec: P) -> Tensor:
        interpreter = self._interpreter
        with interpreter.paused():
            seed = torch.empty_like(value)
        kinds = tuple(_seeded_as(spec, axis) for axis in interpreter.axes)
        cell = interpreter.bring(seed, kinds, "the cotangent of a result")
        cell.task = SEED
        return seed

    def _commit(self, gradients: dict[int, Tensor | None]) -> None:
        """Decides the open axes of the inputs by their gradients."""
        call, interpreter = self._call, self._interpreter
        for position in call.crossing:
            spec, path = call.fit.spec(position), call.fit.paths[position]
            gradient = gradients.get(position)
            open_axes = [axis for axis in call.mapped if axis not in spec.named]
            if gradient is not None:
                replicate: list[str] = []
                cell = interpreter.cell(gradient)
                self._gradients.append((path, cell.kinds))
                for axis, have in zip(interpreter.axes, cell.kinds, strict=True):
                    at = interpreter.axes.index(axis)
                    kind = _enters_as(spec, axis, call.mapped)
                    if not accepts(kind, have):
                        value = interpreter.cell(self._locals[position])
                        what = f"input {path}"
                        raise report.cotangent(interpreter, at, kind, cell, what, value)
                    if axis in open_axes and have != Z:
                        need = Need(plain(have) in (V, Partial), cell.origin())
                        self._needs[position, axis] = need
                        replicate += [axis] * need.replicate
                if replicate:
                    self._backend.reduce_gradient(replicate, gradient)

    def _check_closure(self, closure: Tensor, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        cell = self._interpreter.cell(gradient)
        for axis, kind in zip(self._interpreter.axes, cell.kinds, strict=True):
            if kind not in (I, K, Z):
                raise ShardTypeError(
                    f"{self._call.name}: a closed-over tensor of shape {list(closure.shape)} gets "
                    f"a gradient that is {kind} over {axis!r}: {report.wrong(I, kind)}.\n"
                    f"  the gradient is from {cell.origin()}\n"
                    "Fix: pass the tensor as an argument."
                )

    def _passage(self, result: Result) -> Passage:
        interpreter = self._interpreter
        outputs = {}
        leaves = list(result.leaves)
        for position in result.fit.crossing:
            value = result.leaves[position]
            kinds = interpreter.cell(value).kinds
            shape = global_shape(tuple(value.shape), result.fit.spec(position), self._call.mesh)
            outputs[position] = (shape, value.dtype, kinds)
            leaves[position] = None  # its graph would stay alive
        return Passage(
            Way(
                tuple(self._branches.taken),
                tuple(interpreter.equations),
                gradients=tuple(self._gradients),
            ),
            replace(result, leaves=leaves),
            None,
            outputs,
            self._exits,
            self._needs,
            interpreter.batches,
        )


_EXITS: dict[tuple[str, str], tuple[Cast, ...]] = {
    ("I", "I"): (),
    ("K", "I"): (),
    ("Z", "I"): (),
    ("R", "I"): (("convert", R, I),),
    ("V", "S"): (),
    ("I", "S"): (("convert", I, R), ("reinterpret", R, V)),
    ("R", "S"): (("reinterpret", R, V),),
    ("K", "S"): (("reinterpret", R, V),),
    ("Z", "S"): (),
    ("I", "P"): (("convert", I, Partial),),
    ("R", "P"): (("convert", R, Partial),),
    ("K", "P"): (("convert", R, Partial),),
    ("V", "P"): (("reinterpret", V, Partial),),
    ("P", "P"): (),
    ("Z", "P"): (),
}
"""From the type in the body to the promised one; what is missing is an error."""


_READINGS: Final = {
    **{("K", promise): "KIR" for promise in "IP"},
    ("K", "S"): "KIRV",
    **{("Z", promise): "ZKIR" for promise in "I"},
    **{("Z", promise): "ZKIRVP" for promise in "P"},
    ("Z", "S"): "ZKIRV",
}
"""What a result may be taken for, by its type and the promise: what leaves it right."""


def _promised(spec: P, axis: str) -> AxisType:
    promise = spec.types.get(axis, I)
    return I if promise == R else promise  # exit_casts has converted R to I


def _enters_as(spec: P, axis: str, mapped: Sequence[str]) -> AxisType:
    """The type before the conversions that the boundary has been told to make."""
    kind = spec.types.get(axis)
    if kind is None:
        return K if axis in mapped else I
    return {"S": V, "P": Partial}.get(kind.kind, I)


def _seeded_as(spec: P, axis: str) -> AxisType:
    """The cotangent of what a result's spec promises: global, cut like the result."""
    kind = spec.types.get(axis, I)
    return {"S": V, "P": R}.get(kind.kind, I)


def local_shape(shape: tuple[int, ...], spec: P, mesh: Mesh) -> tuple[int, ...]:
    """The shape of a rank's piece."""
    found = list(shape)
    for dim, axes in spec.cuts:
        found[dim] //= mesh.num_ranks(axes)
    return tuple(found)


def global_shape(shape: tuple[int, ...], spec: P, mesh: Mesh) -> tuple[int, ...]:
    """The shape of the whole."""
    found = list(shape)
    for dim, axes in spec.cuts:
        found[dim] *= mesh.num_ranks(axes)
    return tuple(found)
