"""Holds a call's forward, and the backward derived from it, against its specs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal

import torch
from torch import Tensor

from shardmap_torch.boundary import Call, Fit, Result, apply, can_receive_gradient, run_body
from shardmap_torch.checker import report
from shardmap_torch.checker.abstract import AbstractBackend
from shardmap_torch.checker.calls import Types
from shardmap_torch.checker.follow import End, Following, Recording, Step
from shardmap_torch.checker.interpret import SEED, Interpreter, is_real
from shardmap_torch.checker.lattice import accepts, plain
from shardmap_torch.checker.modes import interpreting
from shardmap_torch.checker.observe import UNOBSERVED, Recorder, base_of
from shardmap_torch.checker.program import Equation
from shardmap_torch.checker.relate import Relation
from shardmap_torch.checker.repair import NONE, Repair, both, propose, proposed, with_tried
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.memo import lazy
from shardmap_torch.mesh import Mesh
from shardmap_torch.rule import Collective
from shardmap_torch.spec import P
from shardmap_torch.types import AxisType, I, K, Partial, R, V, Z

Casts = tuple[Collective, ...]

Strictness = Literal["local", "global"]


@dataclass(frozen=True)
class Verdict:
    """What the checker found out about one signature of a call.

    Attributes:
        name: of the function.
        mesh: the mesh it is checked for.
        paths: of every argument leaf, by the caller's names.
        specs: the spec of every argument leaf, with no axis left open.
        crossing: positions of those that cross.
        exits: for each position of a result that crosses, the conversions that give it the type
            which its spec promises.
        outputs: shape, dtype and types of each of these results, after them.
        equations: the typed program, forward and backward.
        result: what the body returned, its tensors without data.
        batches: whether a batched body can do it: nothing that `torch.func.vmap` lacks was met.
        start: the notes of what the body asks of its mesh, with which each run is compared.
    """

    name: str
    mesh: Mesh
    paths: tuple[str, ...]
    specs: tuple[P | None, ...]
    crossing: tuple[int, ...]
    exits: dict[int, Casts]
    outputs: dict[int, tuple[tuple[int, ...], torch.dtype, Types]]
    equations: tuple[Equation, ...]
    result: Result
    batches: bool
    start: Step

    def apply(self, call: Call, late: End) -> Call:
        """The same call with every axis typed, and with results converted as promised.

        Its runs follow the checked program; `late` is called where a backward leaves it.
        """
        # Not dataclasses.replace, which looks every field up, in each call.
        return Call(
            call.function,
            call.name,
            call.mesh,
            call.bound,
            call.mapped,
            call.leaves,
            self.fit,
            call.structure,
            call.out_specs,
            call.out_fits,
            self.exits,
            partial(Following, self.start, late),
        )

    @lazy
    def fit(self) -> Fit:
        """The fit of the arguments, with every axis typed."""
        return Fit(self.paths, self.specs, self.crossing)


def verify(call: Call, strictness: Strictness) -> Verdict:
    """Interprets the body on fakes and its derived backward.

    With strictness "global" the forward must also be that of the same program on one device.

    Raises:
        ShardTypeError: the program is not well-typed, or would compute wrong gradients.
    """
    one = _OneDevice.of(call) if strictness == "global" else None
    try:
        return _attempt(call, NONE, one)
    except ShardTypeError as error:
        raise with_tried(error, _search(call, error, one)) from None


_TRIES: Final = 8
"""How many repairs are tried at most: each costs as much as the check itself."""


def _search(call: Call, error: ShardTypeError, one: "_OneDevice | None") -> list[str]:
    """The repairs that help, or else the pairs of them that do."""
    right: list[str] = []
    pairs: list[Repair] = []
    tries = list(proposed(error))
    for count, repair in enumerate(tries):
        if count == _TRIES or (right and repair in pairs):
            break
        left = _fails(call, repair, one)
        if left is None:
            right.append(repair.text)
        elif repair not in pairs:
            more = [both(repair, other) for other in proposed(left)]
            pairs += more
            tries += more
    return right


def _attempt(call: Call, repair: Repair, one: "_OneDevice | None") -> Verdict:
    try:
        return _Verification(call, K, repair, one).run()
    except _RetryError as retry:
        try:
            # A result that is K is seeded as P where I does not type.
            return _Verification(call, R, repair, one).run()
        except ShardTypeError:
            raise retry.error from None


def _fails(call: Call, repair: Repair, one: "_OneDevice | None") -> ShardTypeError | None:
    """What is still wrong with the repair; None where nothing is."""
    specs = list(call.fit.specs)
    for position, axis in repair.replicate.items():
        spec = call.fit.spec(position)
        specs[position] = P(
            *spec.entries,
            replicate=spec.replicate | {axis},
            invariant=spec.invariant - {axis},
            partial=spec.partial,
        )
    fit = Fit(call.fit.paths, tuple(specs), call.fit.crossing)
    try:
        _attempt(replace(call, fit=fit), repair, one)
    except ShardTypeError as error:
        return error
    return None


@dataclass(frozen=True)
class _OneDevice:
    """The program on one device: every axis has one rank, and no collective does anything.

    Attributes:
        steps: what it does.
        failure: what it raised, where it has not come to its end.
    """

    steps: Recorder
    failure: Exception | None

    @staticmethod
    def of(call: Call) -> "_OneDevice":
        mesh = Mesh(
            call.mesh.axis_names, (1,) * len(call.mesh.axis_sizes), "abstract", call.mesh.device
        )
        steps = Recorder()
        try:
            _Verification(replace(call, mesh=mesh), K, NONE, None).record(steps)
        except Exception as error:  # the user's code may raise anything
            return _OneDevice(steps, error)
        return _OneDevice(steps, None)

    def require(self, name: str) -> None:
        """Passes on what went wrong on one device only."""
        if self.failure is not None:
            raise ShardTypeError(
                f"{name}: check='global': on one device the body fails: "
                f"{type(self.failure).__name__}: {self.failure}\nFix: write sizes that are right "
                "on one device too: -1, x.shape[...], or a size divided by axis_size(axis)."
            ) from self.failure


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
    """One attempt.

    `uncommitted` is what a result that is K counts as, `repair` what is tried, and `one` the
    program on one device, if the forward is to be held against it.
    """

    def __init__(
        self, call: Call, uncommitted: AxisType, repair: Repair, one: _OneDevice | None
    ) -> None:
        self._call, self._uncommitted, self._repair = call, uncommitted, repair
        self._interpreter = Interpreter(call.name, call.mesh)
        self._one = one
        if one is not None and one.failure is None:
            self._interpreter.observer = Relation(self._interpreter, one.steps)
        self._backend = AbstractBackend(self._interpreter, repair)
        self._exits: dict[int, Casts] = {}
        self._has_uncommitted = False
        self._specs: list[P | None] = list(call.fit.specs)
        self._locals: dict[int, Tensor] = {}
        self._start = Step()

    def run(self) -> Verdict:
        """Interprets forward and backward."""
        with self._entered() as locals_:
            result = self._run_body(locals_)
            self._leave(result)
            try:
                self._pull_back(result, locals_)
            except ShardTypeError as error:
                if self._has_uncommitted and self._uncommitted == K:
                    raise _RetryError(error) from None
                raise
        if self._one is not None:
            self._one.require(self._call.name)
        return self._verdict(result)

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
        return run_body(replace(self._call, follow=lambda: recording), self._backend, locals_)

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
            casts: list[Collective] = []
            for axis, kind in zip(self._interpreter.axes, self._output_kinds(value), strict=True):
                if axis not in self._call.mapped:
                    continue
                found = self._cast(path, spec, axis, kind, value)
                if isinstance(found, str):
                    problems.append(found)
                    open_sums.setdefault(position, []).append(axis)
                else:
                    casts += [Collective(name, src, dst, (axis,)) for name, src, dst in found]
            self._exits[position] = tuple(casts)
        if problems:
            head = f"{self._call.name}: the result does not fit out_specs:"
            error = ShardTypeError("\n".join([head, *problems]))
            raise propose(error, [self._summed(result, open_sums)])
        for position in result.fit.crossing:
            spec, path = result.fit.spec(position), result.fit.paths[position]
            self._interpreter.observer.left(path, result.leaves[position], spec)
        self._interpreter.observer = UNOBSERVED  # conversions of the boundary keep the meaning
        for position in result.fit.crossing:
            value = result.leaves[position]
            result.leaves[position] = apply(  # type: ignore[index]
                self._backend, self._exits[position], value
            )

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
    ) -> "Sequence[tuple[str, AxisType, AxisType]] | str":
        """The conversions from the body's type to the promised one, or what is wrong."""
        promise = spec.types.get(axis, I)
        if promise == R:  # exit_casts has converted it, from R to I
            promise = I
        found = _EXITS.get((plain(kind).kind, promise.kind))
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
            replicate: list[str] = []
            if gradient is not None:
                cell = interpreter.cell(gradient)
                for axis, have in zip(interpreter.axes, cell.kinds, strict=True):
                    at = interpreter.axes.index(axis)
                    kind = _enters_as(spec, axis, call.mapped)
                    if not accepts(kind, have):
                        value = interpreter.cell(self._locals[position])
                        what = f"input {path}"
                        raise report.cotangent(interpreter, at, kind, cell, what, value)
                    if axis in open_axes and plain(have) in (V, Partial):
                        replicate.append(axis)
                if replicate:
                    self._backend.reduce_gradient(replicate, gradient)
            self._specs[position] = P(
                *spec.entries,
                replicate=spec.replicate | set(replicate),
                invariant=spec.invariant | (set(open_axes) - set(replicate)),
                partial=spec.partial,
            )

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

    def _verdict(self, result: Result) -> Verdict:
        interpreter = self._interpreter
        outputs = {}
        leaves = list(result.leaves)
        for position in result.fit.crossing:
            value = result.leaves[position]
            kinds = interpreter.cell(value).kinds
            shape = global_shape(tuple(value.shape), result.fit.spec(position), self._call.mesh)
            outputs[position] = (shape, value.dtype, kinds)
            leaves[position] = None  # its graph would stay alive
        return Verdict(
            self._call.name,
            self._call.mesh,
            self._call.fit.paths,
            tuple(self._specs),
            self._call.crossing,
            self._exits,
            outputs,
            tuple(interpreter.equations),
            replace(result, leaves=leaves),
            interpreter.batches,
            self._start,
        )


_EXITS: dict[tuple[str, str], tuple[tuple[str, AxisType, AxisType], ...]] = {
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
