"""Regions that run once without data: equal calls of `checkpoint`, as those of layers are.

An equal region gets the steps of the first, blocks like its blocks, and results without data. What
it prepares, as `nn.fsdp_layers` does gathers that begin a layer ahead, runs each time. Nothing is
remembered of a region after which memory is alive that its results are not in, or that frees memory
of others.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardmap_torch.checker.guards.monitor import StepMonitor
from shardmap_torch.checker.guards.regions import NOTHING, Results, key_of
from shardmap_torch.checker.ir.fake_results import look_at
from shardmap_torch.collectives.protocol import Monitor
from shardmap_torch.core.source_location import Site
from shardmap_torch.core.torch_private.engine import FakeTensor, FakeTensorMode

if TYPE_CHECKING:
    from shardmap_torch.planning.dry_run import Block, Step, Tape


@dataclass
class _Run:
    """One run of a region, from when its argument is prepared.

    Attributes:
        number: of the regions that ran before.
        prepare: prepares its argument; None if nothing does; then whether something did.
        depth: steps of the body on the mesh that there were.
        start: steps and blocks that there were when it was prepared; None before.
        alive: blocks that were alive then.
        prepared: those that hold what was prepared.
        versions: how often each operand had been written.
        steps: its steps.
        blocks: its blocks.
        results: its results.
        memory: numbers of the blocks that these are in.
        site: the line of its first operation.
        last: operators and frames after the last step; `before` before the first.
        out: what the region keeps of its results.
    """

    number: int
    prepare: Any
    depth: int
    versions: Sequence[int]
    start: tuple[int, int] | None = None
    alive: Sequence["Block"] = ()
    prepared: Sequence["Block"] = ()
    steps: Sequence["Step"] = ()
    blocks: Sequence["Block"] = ()
    results: Results = NOTHING
    memory: Sequence[int] = ()
    site: Site | None = None
    before: tuple[int, int] = (0, 0)
    last: tuple[int, int] = (0, 0)
    out: Any = None


class Layers:
    """The regions of one run without data."""

    def __init__(self, tape: "Tape", fake: FakeTensorMode) -> None:
        """Starts without; `fake` is the mode of the run."""
        self._tape, self._fake = tape, fake
        self._known: dict[Hashable, _Run] = {}
        self._running: list[_Run] = []
        self._states: list[Any] = []  # keys have the addresses of what these keep
        self._latest: list[Block] = []

    def recall(
        self,
        region: Any,
        kind: tuple[bool, ...],
        monitor: Monitor | None,
        operands: Sequence[Tensor | None],
        run: Callable[[], Sequence[Tensor | None]],
    ) -> Sequence[Tensor | None]:
        """Runs a part of a region, or repeats what is known of an equal one."""
        tape, given = self._tape, [x for x in operands if x is not None]
        with tape.uncounted():
            key, prepare = None, region.preparation
            if region.scope.drawing is None and not (kind and region.saves):
                key = key_of(region, operands, self._tensor, kind, prepare and prepare.is_begun())
            known = None if key is None else self._known.get(key)
            after = None if known is None else _skipped(known, kind, monitor)
            number = len(self._known)
            versions = [x._version for x in given]
        if known is not None and after is not None:
            return self._repeat(known, region, kind, after, given)
        depth = _depth(monitor)
        started = _Run(number, prepare, depth, versions)
        if started.prepare is None:
            self._begin(started, ())
        self._running.append(started)
        results = run()
        self._running.pop()
        with tape.uncounted():
            if key is not None and self._finish(started, region, given, results):
                started.depth = _depth(monitor) - started.depth
                started.prepare = started.prepare is not None  # it has tensors
                self._known[key] = started
                self._states.append(region.state)
        return results

    def prepared(self, prepare: Any, tensors: Sequence[Tensor]) -> None:
        """Notes that an argument has been prepared, by the region that runs or is repeated."""
        self._latest = [*dict.fromkeys(map(self._tape.block_of, tensors))]
        if self._running and self._running[-1].prepare is prepare:
            self._begin(self._running[-1], self._latest)

    def _begin(self, started: _Run, prepared: Sequence["Block"]) -> None:
        run = self._tape.run
        started.start = len(run.steps), len(run.blocks)
        started.before = self._tape.last
        started.alive = [block for block in run.blocks if block.died is None]
        started.prepared = prepared

    def _tensor(self, x: Tensor) -> Hashable:
        seen = look_at(self._fake, x) if type(x) is FakeTensor else None
        return None if seen is None else (seen[1], x.requires_grad)

    def _finish(
        self, run: _Run, region: Any, operands: Sequence[Tensor], results: Sequence[Tensor | None]
    ) -> bool:
        """Notes what a run has made; returns whether that is all that it has done."""
        tape = self._tape
        versions = [x._version for x in operands]
        if run.start is None or not region.state.holds() or versions != run.versions:
            return False
        run.steps, run.blocks = tape.run.steps[run.start[0] :], tape.run.blocks[run.start[1] :]
        found = Results.of(self._fake, operands, results)
        held = [] if found is None else [tape.block_at(address) for address, *_ in found.memory]
        own = [*map(tape.block_of, operands)]
        is_freed = [each.died is not None or each in own for each in run.prepared]
        others = [each for each in run.alive if each.died and each not in run.prepared]
        left = {each for each in run.blocks if each.died is None}
        if others or found is None or left != {*held} or not all(is_freed) or region.results.of:
            return False
        run.results, run.memory = found, [*map(run.blocks.index, held)]
        run.site, run.last, run.out = tape.site_of_node(), tape.last, region.out
        return True

    def _repeat(
        self,
        known: _Run,
        region: Any,
        kind: tuple[bool, ...],
        skip: Callable[[], None],
        operands: Sequence[Tensor],
    ) -> list[Tensor | None]:
        """Does what an equal region did."""
        tape, run = self._tape, self._tape.run
        assert known.start is not None
        if not kind:
            tape.note_node(known.site)
        if known.prepare:
            prepare = region.prepare_again if kind else region.prepare
            prepare(operands[: len(region.places)])
        with tape.uncounted():
            skip()
            first = known.start[0]
            shift = len(run.steps) - first
            calls, frames = (a - b for a, b in zip(tape.last, known.before, strict=True))
            for old, new in zip(known.prepared, self._latest if known.prepare else (), strict=True):
                if old.died is not None:  # it is freed where the region frees it
                    new.died = old.died + shift
            steps = [each.later(shift, first) for each in known.steps]
            if steps and (calls or frames):
                calls, frames = steps[0].calls + calls, steps[0].frames + frames
                steps[0] = replace(steps[0], calls=calls, frames=frames)
            run.steps += steps
            blocks = [each.later(shift) for each in known.blocks]
            run.blocks += blocks
            results, memory = known.results.make(self._fake, operands)
            for base, at in zip(memory, known.memory, strict=True):
                tape.hold_block(base, blocks[at])
            region.out, tape.last = known.out, known.last
            tape.note_repeated(known.number, [x for x in results if x is not None], operands)
        return results


def _depth(monitor: Monitor | None) -> int:
    return monitor.at.depth if isinstance(monitor, StepMonitor) else 0


def _skipped(
    known: _Run, kind: tuple[bool, ...], monitor: Monitor | None
) -> Callable[[], None] | None:
    """Returns what takes a body's monitor to the end of a region; None where that is not known."""
    if kind or monitor is None:
        return lambda: None
    if not isinstance(monitor, StepMonitor):
        return None
    end = monitor.at
    for _ in range(known.depth):
        if len(end.next) != 1:
            return None
        (end,) = end.next
    return partial(monitor.go_to, end)
