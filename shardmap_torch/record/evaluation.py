"""Evaluation: the values of a record on numbers, for all ranks of a mesh in one loop."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shardmap_torch.backends.reference import REFERENCE, Stack
from shardmap_torch.boundary.shards import locals_of
from shardmap_torch.checker.ir.observer import made_by
from shardmap_torch.collectives.moves import MOVEMENTS
from shardmap_torch.core.source_location import Site
from shardmap_torch.core.torch_private.engine import OpOverload
from shardmap_torch.mesh import Mesh
from shardmap_torch.record.program import Index, Move, Record, Slot, Step
from shardmap_torch.spec import P

Ranks: TypeAlias = list[Tensor]
"""The values of one slot, by rank."""


class Computer:
    """Computes the steps of an evaluation as they are; it is told where values come from."""

    def compute(self, step: Step, arguments: Sequence[dict[str, Any]]) -> Sequence[Any]:
        """Returns what an operator makes on each rank of these arguments."""
        run: Any = step.run
        return [run(**each) for each in arguments]

    def closure(self, real: Tensor, site: Site | None) -> Tensor:
        """Returns what stands for a tensor that the body closes over."""
        return real

    def note_inputs(self, inputs: Sequence[Ranks]) -> None:
        """Notes the inputs, on all ranks."""

    def note_cotangents(self, xs: Ranks) -> None:
        """Notes the cotangents of a result."""

    def note_moved(self, made: Ranks, operands: Ranks, adds: bool, copies: bool) -> None:
        """Notes what a collective makes: whether sums, or copies, where there is one rank."""


class Evaluation:
    """The values of a record on numbers.

    Attributes:
        results: each rank's results by path; a value that is no tensor as it is.
    """

    def __init__(
        self,
        record: Record,
        mesh: Mesh,
        computer: Computer,
        specs: Sequence[P],
        inputs: Sequence[Tensor],
    ) -> None:
        """Evaluates the forward on global inputs, sharded by their specs."""
        self._record, self._mesh, self._computer = record, mesh, computer
        self._values: dict[Slot, Ranks] = {}
        for slot, x, spec in zip(record.inputs, inputs, specs, strict=True):
            self._values[slot] = self._shards(x, spec)
        computer.note_inputs([self._values[slot] for slot in record.inputs])
        for slot, (real, site) in record.closures.items():
            self._values[slot] = [computer.closure(real, site) for _ in range(mesh.size)]
        self._run(record.steps)
        self.results = {
            path: self._values[value] if isinstance(value, Slot) else value
            for path, value in record.results.items()
        }

    def pull_back(
        self, cotangents: Mapping[str, Tensor], specs: Mapping[str, P]
    ) -> list[Ranks | None]:
        """Evaluates the derived backward; returns the gradients of inputs, of each rank."""
        forward = dict(self._values)
        for path, slot in self._record.seeds.items():
            # The cotangent of a pending sum is that of each addend.
            self._values[slot] = self._shards(cotangents[path], P(*specs[path].entries))
            self._computer.note_cotangents(self._values[slot])
        self._run(self._record.backward)
        gradients = self._record.gradients
        found = [None if slot is None else self._values[slot] for slot in gradients]
        self._values = forward
        return found

    def _shards(self, x: Tensor, spec: P) -> Ranks:
        """Shards a tensor; each lies as in a check, where inputs are contiguous."""
        shards = locals_of(x.detach(), spec, self._mesh)
        return [each.clone(memory_format=torch.contiguous_format) for each in shards]

    def _run(self, steps: Iterable[Step]) -> None:
        with torch.no_grad():
            for step in steps:
                made = self._made(step)
                for at, slot in enumerate(step.results):
                    self._values[slot] = [each[at] for each in made]

    def _made(self, step: Step) -> list[Sequence[Tensor]]:
        """Returns the results of a step, by rank."""
        mesh, run, given = self._mesh, step.run, step.arguments
        if isinstance(run, OpOverload):
            by_rank = [
                {name: self._of(value, rank) for name, value in given.items()}
                for rank in range(mesh.size)
            ]
            found = self._computer.compute(step, by_rank)
            return [made_by(run, a, out) for a, out in zip(by_rank, found, strict=True)]
        if isinstance(run, Index):
            places = (mesh.coordinates(rank) for rank in range(mesh.size))
            moved, operands = [torch.tensor(mesh.index(run.axes, place)) for place in places], []
        else:
            operands = self._values[given["x"]]
            moved = move(mesh, run, operands)
        movement = MOVEMENTS[run.name] if isinstance(run, Move) else None
        adds = movement is not None and movement.adds
        copies = movement is not None and movement.copies and mesh.size == 1
        self._computer.note_moved(moved, operands, adds, copies)
        return [(x,) for x in moved]

    def _of(self, value: Any, rank: int) -> Any:
        if isinstance(value, Slot):
            return self._values[value][rank]
        return [self._of(each, rank) for each in value] if isinstance(value, list) else value


def move(mesh: Mesh, run: Move, xs: Ranks) -> Ranks:
    """Moves data between the ranks of a mesh."""
    if MOVEMENTS[run.name].still:
        return [x.view_as(x) for x in xs]
    found: dict[int, Tensor] = {}
    for rank in range(mesh.size):
        if rank not in found:
            peers = mesh.peers(run.collective.axes, mesh.coordinates(rank))
            stack = Stack(torch.stack([xs[peer] for peer in peers]), True, len(peers))
            moved = REFERENCE[run.name](run.collective, stack).every()
            for peer, x in zip(peers, moved, strict=True):
                found[peer] = x.clone(memory_format=torch.contiguous_format)
    return [found[rank] for rank in range(mesh.size)]
