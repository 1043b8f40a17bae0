"""Dependences of blocks of results on blocks of inputs, each of which trials have to tell.

A program whose ranks leave out what comes from far away agrees with one device as long as what
comes from there is lost in rounding, as after many gates of random logits. So each dependence on
one device has to be larger than rounding in some trial that the ranks have passed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.core.functorch import is_smooth
from shardmap_torch.record.evaluation import Evaluation
from shardmap_torch.run.trials.draws import Draw
from shardmap_torch.run.trials.runs import GRADIENT, Program, Values
from shardmap_torch.run.trials.watch import Unwatched

OF_ENTRY: Final = 1e-9
OF_LARGEST: Final = 1e-11
ZERO: Final = 1e-12
"""Rounding of 64-bit numbers: after exponentials of hundreds, in sums of thousands, of zero."""

_MARGIN: Final = 100.0
"""A difference is seen if it is so many times the tolerance."""

_SAME: Final = 1e-13
"""Differences of results, relative to these, which rounding makes of no dependence."""

_OFF: Final = 1e-14
_MOVED: Final = 1e-2
"""The part by which inputs are off, and that from which a gradient that moves is rounding."""

_RUNS: Final = 24
"""Maximal number of blocks that are changed one by one; else the same block of all inputs is."""

Block = tuple[slice, ...]

Pair = tuple[str, int, str, int]
"""A result or gradient and its block, and what it depends on and its block."""


def tolerance(x: Tensor) -> Tensor:
    """Returns by how much each entry of another program's result may differ by rounding."""
    size = x.abs()
    largest = float(size.max()) if x.numel() else 0.0
    return OF_ENTRY * size + max(OF_LARGEST * largest, ZERO)


@dataclass
class Dependence:
    """The dependences of one device's program that were found, and those that were seen.

    Attributes:
        one: the program on one device.
        blocks: for each argument into how many blocks each dim is sharded on the ranks.
        result_blocks: the same for each result.
    """

    one: Program
    blocks: Mapping[int, tuple[int, ...]]
    result_blocks: Mapping[str, tuple[int, ...]]
    _found: dict[Pair, Draw] = field(default_factory=dict)
    _seen: set[Pair] = field(default_factory=set)
    _lost: Set[str] = frozenset()

    @property
    def unseen(self) -> dict[Pair, Draw]:
        """The dependences that no trial could tell, each with the choice where it was found."""
        return {pair: draw for pair, draw in self._found.items() if pair not in self._seen}

    def explain(self) -> str:
        """Describes one of those."""
        result, block, origin, other = next(iter(self.unseen))
        return (
            f"block {block} of {result} depends on block {other} of {origin} by less than rounding "
            "tells, for all random inputs: what passes this value on may have blocks left out"
        )

    def look(self, draw: Draw, lost: Set[str]) -> None:
        """Finds dependences for one choice of numbers, for which the ranks have been compared.

        Args:
            draw: the numbers.
            lost: the results and gradients that are lost in rounding for these.
        """
        self._lost = lost
        inputs = draw.values(self.one.likes)
        evaluation, results = self._evaluate(inputs, draw)
        covered = self._differentiate(inputs, evaluation, results, draw)
        blocks = [(at, number) for at, x in inputs.items() for number, _ in self._blocks(at, x)]
        todo = [
            each
            for each in blocks
            if any(
                (*each, name, number) not in covered
                for name, y in results.items()
                for number, _ in self._result_blocks(name, y)
            )
        ]
        for group in _grouped(todo):
            self._change(group, inputs, results, draw)

    def _evaluate(self, inputs: Mapping[int, Tensor], draw: Draw) -> tuple[Evaluation, Values]:
        evaluation = self.one.evaluation(inputs, Unwatched(draw, self.one.noise(draw)))
        found = self.one.results(evaluation)
        return evaluation, {name: y for name, y in found.items() if _is_compared(y)}

    def _blocks(self, at: int, x: Tensor) -> Iterator[tuple[int, Block]]:
        return enumerate(_slices(x.shape, self.blocks[at]))

    def _result_blocks(self, name: str, y: Tensor) -> Iterator[tuple[int, Block]]:
        return enumerate(_slices(y.shape, self.result_blocks[name]))

    def _path(self, at: int) -> str:
        return self.one.call.match.paths[at]

    def _pulled(
        self, evaluation: Evaluation, results: Values, draw: Draw
    ) -> Iterator[tuple[str, int, dict[int, Tensor]]]:
        """Pulls a random cotangent of each block of each result back."""
        seeded = self.one.record.seeds.keys() & results.keys()
        zeros = {name: torch.zeros_like(results[name]) for name in seeded}
        for position, (name, y) in enumerate(results.items()):
            if name not in seeded:
                continue
            cotangent = draw.cotangent(position, y)
            for number, block in self._result_blocks(name, y):
                masked = torch.zeros_like(cotangent)
                masked[block] = cotangent[block]
                yield name, number, self.one.gradients(evaluation, {**zeros, name: masked})

    def _differentiate(
        self, inputs: Mapping[int, Tensor], evaluation: Evaluation, results: Values, draw: Draw
    ) -> set[tuple[int, int, str, int]]:
        """Looks at gradients of each block; returns the pairs that depend.

        Where inputs are off by rounding, what it leaves of a gradient that is zero, as of a key's
        bias, is another one. What is small, as a product of many gates, is about the same.
        """
        covered: set[tuple[int, int, str, int]] = set()
        pulled = [*self._pulled(evaluation, results, draw)]
        totals = {at: torch.zeros_like(x) for at, x in inputs.items()}
        for at, g in ((at, g) for *_, found in pulled for at, g in found.items()):
            totals[at] += g
        near = self._near(draw)
        for name, number, found in pulled:
            y = results[name]
            part = y[dict(self._result_blocks(name, y))[number]]
            floor = _MARGIN * OF_ENTRY * float(y.abs().max()) * part.numel() ** 0.5
            for at, g in found.items():
                allowed = _MARGIN * tolerance(totals[at])
                for other, block in self._blocks(at, g):
                    if not bool((g[block] != 0).any()):
                        continue
                    moved = float((g[block] * inputs[at][block]).abs().max())
                    if moved <= floor:
                        apart = (near(name, number)[at][block] - g[block]).abs().max()
                        if bool(apart > _MOVED * g[block].abs().max()):
                            continue
                    covered.add((at, other, name, number))
                    self._note((name, number, self._path(at), other), draw, moved > floor)
                    if self.one.likes[at].grad:
                        seen = bool((g[block].abs() > allowed[block]).any())
                        gradient = GRADIENT + self._path(at), other, name, number
                        self._note(gradient, draw, seen)
        return covered

    def _near(self, draw: Draw) -> Callable[[str, int], Mapping[int, Tensor]]:
        """Returns what gives the gradients of a block where inputs are off by rounding."""

        @cache
        def gradients() -> Mapping[tuple[str, int], Mapping[int, Tensor]]:
            near = replace(draw, style=replace(draw.style, jitter=_OFF))
            pulled = self._pulled(*self._evaluate(near.values(self.one.likes), near), near)
            return {(name, number): found for name, number, found in pulled}

        return lambda name, number: gradients()[name, number]

    def _change(
        self,
        group: Sequence[tuple[int, int]],
        inputs: Mapping[int, Tensor],
        results: Values,
        draw: Draw,
    ) -> None:
        """Draws blocks of inputs again, and looks which blocks of results change."""
        others = draw.another().values(self.one.likes)
        changed = {at: x.clone() for at, x in inputs.items()}
        for at, number in group:
            block = dict(self._blocks(at, inputs[at]))[number]
            changed[at][block] = others[at][block]
        try:
            _, found = self._evaluate(changed, draw)
        except Exception:  # these numbers are out of the program's domain
            return
        label = " and ".join(dict.fromkeys(self._path(at) for at, _ in group))
        for name, y in results.items():
            apart = _apart(found[name], y)
            if not bool(apart.isfinite().all()):
                continue
            size = float(y.abs().max()) if is_smooth(y) and y.numel() else 0.0
            allowed = tolerance(y) if is_smooth(y) else torch.zeros_like(apart)
            for number, block in self._result_blocks(name, y):
                if bool((apart[block] > _SAME * size).any()):
                    seen = bool((apart[block] > _MARGIN * allowed[block]).any())
                    self._note((name, number, label, group[0][1]), draw, seen)

    def _note(self, pair: Pair, draw: Draw, seen: bool) -> None:
        self._found.setdefault(pair, draw)
        if seen and pair[0] not in self._lost:
            self._seen.add(pair)


def _is_compared(y: Any) -> bool:
    return isinstance(y, Tensor) and y.numel() > 0


def _apart(mine: Tensor, other: Tensor) -> Tensor:
    return (mine - other).abs() if is_smooth(other) else (mine != other).double()


def _slices(shape: torch.Size, counts: Sequence[int]) -> Iterable[Block]:
    """Yields the blocks of a tensor, by their places."""
    sizes = [size // count for size, count in zip(shape, counts, strict=False)]
    for places in product(*map(range, counts)):
        yield tuple(
            slice(place * size, (place + 1) * size)
            for place, size in zip(places, sizes, strict=True)
        )


def _grouped(blocks: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    if len(blocks) <= _RUNS:
        return [[each] for each in blocks]
    numbers = dict.fromkeys(number for _, number in blocks)
    return [[each for each in blocks if each[1] == number] for number in numbers]
