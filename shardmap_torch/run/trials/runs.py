"""Runs a checked call with random numbers on simulated ranks, also at smaller sizes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.boundary.call import Call
from shardmap_torch.boundary.shards import global_of
from shardmap_torch.checker.verify.verdict import Verdict
from shardmap_torch.core.caching import lazy
from shardmap_torch.core.torch_private.engine import OpOverload
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.mesh import Mesh
from shardmap_torch.record.evaluation import Computer, Evaluation
from shardmap_torch.record.program import Record
from shardmap_torch.run.threads import close, unequal
from shardmap_torch.run.trials.draws import Draw, Like
from shardmap_torch.run.trials.noise import Drawn, Noise
from shardmap_torch.run.trials.operators import CLASS_LOSSES, name_of
from shardmap_torch.run.trials.seen import Seen
from shardmap_torch.run.trials.watch import UntriedError, Watched
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
        drawn: how what the body draws is sharded, as a proof has it.
        is_whole: whether it has the sizes of the call; else what depends on these has to be met.
    """

    call: Call
    verdict: Verdict
    likes: Mapping[int, Like]
    parts: int = 1
    drawn: Drawn = ()
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

    @lazy
    def record(self) -> Record:
        """Returns what the call does.

        Raises:
            UntriedError: it cannot be evaluated.
        """
        # None of a path on which the body raises.
        records: list[Record] = [each.record for each in self.verdict.observers if each]
        lacking = [each.lacks for each in records if each.lacks]
        if lacking or len(self.verdict.observers) > 1:
            raise UntriedError(lacking[0] if lacking else "it takes several ways")
        return records[0]

    @lazy
    def operators(self) -> frozenset[str]:
        """The names of all operators."""
        steps = (*self.record.steps, *self.record.backward)
        return frozenset(name_of(each.run) for each in steps if isinstance(each.run, OpOverload))

    @lazy
    def class_losses(self) -> set[tuple[str, str]]:
        """The losses whose targets are classes, with what they are called with beside tensors."""
        return {
            (name_of(each.run), str([x for x in each.arguments.values() if _is_literal(x)]))
            for each in self.record.steps
            if isinstance(each.run, OpOverload) and name_of(each.run) in CLASS_LOSSES
        }

    def run(self, draw: Draw, seen: Seen | None = None) -> tuple[Values, Watched]:
        """Computes results and gradients, in wide dtypes.

        Notes conditions in `seen`, also those before a failure.

        Raises:
            UntriedError: random numbers cannot decide about the body.
        """
        seen = Seen() if seen is None else seen
        own = tuple(self.call.crossing), self.parts, self.is_whole, seen
        watched = Watched(draw, self.noise(draw), *own)
        evaluation = self.evaluation(draw.values(self.likes), watched)
        watched.compare_ranks()
        results = self.results(evaluation)
        watched.fixed = {
            path
            for path, xs in evaluation.results.items()
            if isinstance(results[path], Tensor) and watched.origins.is_fixed(xs[0])
        }
        watched.unordered = {
            path
            for path, xs in evaluation.results.items()
            if isinstance(results[path], Tensor) and any(map(watched.origins.is_unordered, xs))
        }
        cotangents = {
            path: draw.cotangent(at, y)
            for at, (path, y) in enumerate(results.items())
            if path in self.record.seeds
        }
        gradients = self.gradients(evaluation, cotangents) if cotangents else {}
        paths = self.call.match.paths
        for at, like in self.likes.items():
            if like.grad:
                results[GRADIENT + paths[at]] = gradients.get(at)
                if not watched.unordered.isdisjoint(cotangents):
                    watched.unordered.add(GRADIENT + paths[at])
        return results, watched

    def noise(self, draw: Draw) -> Noise:
        """Starts what the body draws by itself in one run."""
        return Noise(self.call.mesh, self.drawn, draw.seed)

    def evaluation(self, inputs: Mapping[int, Tensor], computer: Computer) -> Evaluation:
        """Evaluates the forward on global inputs."""
        call, match = self.call, self.verdict.match
        specs = [match.spec(at) for at in call.crossing]
        return Evaluation(
            self.record, call.mesh, computer, specs, [inputs[at] for at in call.crossing]
        )

    def results(self, evaluation: Evaluation) -> Values:
        """Joins the results of all ranks."""
        match = self.verdict.result.match
        crossing = {match.paths[at]: match.spec(at) for at in match.crossing}
        return {
            path: self._joined(path, crossing[path], value) if path in crossing else value
            for path, value in evaluation.results.items()
        }

    def gradients(
        self, evaluation: Evaluation, cotangents: Mapping[str, Tensor]
    ) -> dict[int, Tensor]:
        """Pulls cotangents of results back; joins the gradients of the ranks, by position."""
        result, match, mesh = self.verdict.result.match, self.verdict.match, self.call.mesh
        specs = {result.paths[at]: result.spec(at) for at in result.crossing}
        pulled = zip(self.call.crossing, evaluation.pull_back(cotangents, specs), strict=True)
        # Along axes that no dim mentions each rank has all of it.
        return {
            at: global_of(xs, P(*match.spec(at).entries), mesh)
            for at, xs in pulled
            if xs is not None
        }

    def _joined(self, path: str, spec: P, xs: Sequence[Tensor]) -> Tensor:
        """Joins a result.

        Raises:
            ShardTypeError: it is not equal on all ranks, as its spec promises.
        """
        mesh = self.call.mesh
        for axis in self.call.mapped:
            if axis in spec.mentioned or axis in spec.partial:
                continue
            for rank, x in enumerate(xs):
                if not close(xs[mesh.rank_at({**mesh.coordinates(rank), axis: 0})], x):
                    raise ShardTypeError(unequal(path, spec, axis))
        return global_of(xs, spec, mesh)


def _is_literal(value: object) -> bool:
    return isinstance(value, bool | int | float | str)


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
