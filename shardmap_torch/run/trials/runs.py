"""Runs a checked call with random numbers on simulated ranks, also at smaller sizes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from shardmap_torch.boundary.call import Call
from shardmap_torch.checker.guards.monitor import CheckedStep, Difference, RunMonitor, copied
from shardmap_torch.checker.verify.verdict import Verdict
from shardmap_torch.core.functorch import is_smooth
from shardmap_torch.core.tree import flatten
from shardmap_torch.mesh import Mesh
from shardmap_torch.run import threads
from shardmap_torch.run.trials.draws import Draw, Like, widened
from shardmap_torch.run.trials.watch import Seen, UntriedError, Unwatched, Watched
from shardmap_torch.spec import P

GRADIENT: Final = "the gradient of "

Values = dict[str, Any]
"""Results by their paths, then gradients of arguments; None for one that is not differentiable."""


@dataclass(frozen=True)
class Program:
    """A call on one mesh, checked there.

    Attributes:
        call: the call; its tensors do not count.
        verdict: the verdict on it.
        likes: what is drawn for each argument, by its position.
        parts: into how many parts the ranks of another program divide what this one has whole.
        steady: whether random numbers that the body draws are all the same.
        is_whole: whether it has the sizes of the call; else what depends on these has to be met.
    """

    call: Call
    verdict: Verdict
    likes: Mapping[int, Like]
    parts: int = 1
    steady: bool = False
    is_whole: bool = True

    @property
    def work(self) -> int:
        """The number of entries that all ranks compute, forward and backward."""
        uses = (use for equation in self.verdict.equations for use in equation.results)
        return self.call.mesh.size * sum(torch.Size(use.shape).numel() for use in uses)

    @property
    def blocks(self) -> dict[int, tuple[int, ...]]:
        """For each argument that is drawn, into how many blocks each dim is sharded."""
        specs = self.verdict.match.specs
        return {at: self._counts(specs[at], len(x.shape)) for at, x in self.likes.items()}

    @property
    def result_blocks(self) -> dict[str, tuple[int, ...]]:
        """For each result, as of `blocks`, without trailing dims that are not sharded."""
        match = self.verdict.result.match
        pairs = zip(match.paths, match.specs, strict=True)
        return {path: self._counts(spec, 0) for path, spec in pairs}

    def _counts(self, spec: P | None, ndim: int) -> tuple[int, ...]:
        counts = dict.fromkeys(range(ndim), 1)
        for dim, axes in () if spec is None else spec.sharded_dims:
            counts[dim] = torch.Size([self.call.mesh.shape[axis] for axis in axes]).numel()
        return tuple(counts.get(dim, 1) for dim in range(max(counts, default=-1) + 1))

    def run(
        self, draw: Draw, wide: bool = True, seen: Seen | None = None
    ) -> tuple[Values, Watched]:
        """Computes results and gradients, in the dtypes of the call or in wide ones.

        Notes conditions in `seen`, also those before a failure.

        Raises:
            UntriedError: random numbers cannot decide about the body.
        """
        seen = Seen() if seen is None else seen
        watched = Watched(
            *(tuple(self.likes), draw, wide, seen),
            parts=self.parts,
            steady=self.steady,
            is_whole=self.is_whole,
        )
        inputs = draw.values(self.likes, wide)
        results = self._results(watched, inputs, wide)
        watched.compare_ranks()
        return self._with_gradients(results, inputs, draw), watched

    def results(self, inputs: Mapping[int, Tensor], draw: Draw) -> Values:
        """Computes results alone, with their graphs, in wide dtypes."""
        results = self._results(Unwatched(draw, self.steady), inputs, wide=True)
        return dict(zip(self.verdict.result.match.paths, results, strict=True))

    def _results(
        self, watched: Watched | Unwatched, inputs: Mapping[int, Tensor], wide: bool
    ) -> list[Any]:
        start = copied(self.verdict.start, _widened) if wide else self.verdict.start
        call = replace(self.call, leaves=self._leaves(inputs))
        monitor = partial(RunMonitor, end=_stop)
        applied = replace(self.verdict, start=start).apply(call, _stop, monitor)
        body = watched.body(applied.function)
        applied = replace(applied, function=body, separate=watched.backward)
        return flatten(threads.run(applied))[0]

    def _leaves(self, inputs: Mapping[int, Tensor]) -> list[Any]:
        return [inputs.get(at, leaf) for at, leaf in enumerate(self.call.leaves)]

    def _with_gradients(
        self, results: Sequence[Any], inputs: Mapping[int, Tensor], draw: Draw
    ) -> Values:
        values: Values = dict(zip(self.verdict.result.match.paths, results, strict=True))
        leaves = {at: x for at, x in inputs.items() if x.requires_grad}
        smooth = [(at, y) for at, y in enumerate(results) if is_smooth(y) and y.requires_grad]
        pairs = [(y, draw.cotangent(at, y)) for at, y in smooth]
        gradients: Sequence[Tensor | None] = [None] * len(leaves)
        if leaves and pairs:
            ys, cotangents = zip(*pairs, strict=True)
            gradients = torch.autograd.grad(ys, [*leaves.values()], cotangents, allow_unused=True)
        paths = self.call.match.paths
        named = {GRADIENT + paths[at]: g for at, g in zip(leaves, gradients, strict=True)}
        both = (values | named).items()
        return {name: x.detach() if isinstance(x, Tensor) else x for name, x in both}


def _stop(difference: Difference) -> NoReturn:
    raise UntriedError(f"its steps are others:\n{difference}")


def _widened(step: CheckedStep) -> CheckedStep:
    """Returns the same step on wide numbers."""
    return replace(step, dtype=None if step.dtype is None else widened(step.dtype))


MAX_RANKS: Final = 64

COUNTS: Final = ((16, 8, 3), (4, 3, 2))
"""Ranks along axes that are made shorter: some of these, and of those, as one number may hide that
a program has it by heart. With two, the ranks before and after are the same."""

_DIVISORS: Final = (1, 4, 16, 64, 256, 1024)


@dataclass(frozen=True)
class Scale:
    """The size of each axis, and by what lengths of dims are divided where all ranks can do so."""

    axes: Mapping[str, int]
    divisor: int

    def of(self, axes: frozenset[str]) -> Mapping[str, int]:
        """Returns the sizes of these axes."""
        return {axis: size for axis, size in self.axes.items() if axis in axes}

    def is_whole(self, mesh: Mesh, axes: frozenset[str]) -> bool:
        """Returns whether these axes are as long as in the mesh."""
        return self.of(axes) == {axis: mesh.shape[axis] for axis in self.of(axes)}

    def shape(self, shape: torch.Size, spec: P | None, mesh: Mesh) -> torch.Size:
        """Returns the shape of an argument: shards stay as long as they are, but for the divisor.

        Example:
            >>> import torch
            >>> from shardmap_torch import P, make_mesh
            >>> mesh = make_mesh((512,), ("tp",), kind="abstract")
            >>> Scale({"tp": 4}, 1).shape(torch.Size([1024, 3]), P("tp"), mesh)
            torch.Size([8, 3])
        """
        sharded = {} if spec is None else dict(spec.sharded_dims)
        return torch.Size(
            [self._length(size, sharded.get(dim, ()), mesh) for dim, size in enumerate(shape)]
        )

    def _length(self, size: int, axes: Sequence[str], mesh: Mesh) -> int:
        most = prod(self.axes.values())
        own = size // prod(mesh.shape[axis] for axis in axes)
        shards = prod(self.axes[axis] for axis in axes)
        unit = self.divisor * most // shards
        return shards * (own // self.divisor if own % unit == 0 else own)


def scales(mesh: Mesh, axes: frozenset[str], counts: Sequence[int]) -> Iterator[Scale]:
    """Yields sizes at which a program with ranks along these axes may be tried, largest first."""
    sizes = {axis: mesh.shape[axis] for axis in mesh.axis_names}
    for few in (max(sizes.values()), *counts):
        found = {axis: min(size, few) if axis in axes else size for axis, size in sizes.items()}
        if prod(size for axis, size in found.items() if axis in axes) <= MAX_RANKS:
            for divisor in _DIVISORS:
                yield Scale(found, divisor)
            return
