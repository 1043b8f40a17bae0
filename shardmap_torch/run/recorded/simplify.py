"""Leaves out of a recorded run what a later one need not do.

Views become views of the tensor whose memory they see, with their geometry, and take no call unless
they are used. What depends on no input is computed once. What nothing depends on goes.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from shardmap_torch.backends.recorder import RANDOM, OperatorTape, RecordedOp

_LARGEST: Final = 1 << 20
"""Entries of a tensor that is kept between runs, rather than made in each."""

_MOST: Final = 1 << 24
"""Entries of all such tensors of a run."""


@dataclass(frozen=True, eq=False)
class Program:
    """A recorded run without what a later one need not do.

    Attributes:
        tensors: those of the recorded run, by their numbers.
        steps: calls in order.
        inputs: numbers of the tensors that a run is given.
        outputs: numbers of those that it returns.
        captured: numbers of those from outside.
        computed: numbers of those that are the same in each run.
        sources: for each tensor the number of the one whose memory it sees.
    """

    tensors: Sequence[Tensor]
    steps: Sequence[RecordedOp]
    inputs: Sequence[int]
    outputs: Sequence[int]
    captured: Collection[int]
    computed: Collection[int]
    sources: Sequence[int]


def simplify(run: OperatorTape, outputs: Sequence[int]) -> Program:
    """Returns the program of a recorded run with these results."""
    sources = _sources(run)
    steps = [step for step in run.steps if not _is_view(step, sources)]
    computed = _computed(run, steps, sources, outputs)
    steps = [step for step in steps if not any(n in computed for n in step.results)]
    steps = _needed(steps, sources, outputs)
    return Program(run.tensors, steps, run.inputs, outputs, run.captured, computed, sources)


def _sources(run: OperatorTape) -> list[int]:
    """Finds for each tensor the first one in the same memory, of which it is a plain view."""
    sources = list(range(len(run.tensors)))
    for step in run.steps:
        if not step.is_pure:
            continue
        homes = {storage_of(run.tensors[n]): sources[n] for n in step.operands}
        for number in step.results:
            made = run.tensors[number]
            home = homes.get(storage_of(made), number)
            if _is_plain(made) and _is_plain(run.tensors[home]):
                sources[number] = home if made.dtype == run.tensors[home].dtype else number
    return sources


def storage_of(x: Tensor) -> int:
    """Returns a key of the memory of a tensor."""
    found: int = x.untyped_storage()._cdata
    return found


def _is_plain(x: Tensor) -> bool:
    return not (x.is_conj() or x.is_neg())


def _is_view(step: RecordedOp, sources: Sequence[int]) -> bool:
    """Returns whether all that a step makes are views of what was there."""
    results = step.results
    return bool(results) and step.is_pure and all(sources[n] != n for n in results)


def _computed(
    run: OperatorTape, steps: Sequence[RecordedOp], sources: Sequence[int], outputs: Sequence[int]
) -> set[int]:
    """Finds tensors that are the same in each run: they depend on none that may differ.

    Not those into which a step writes, or the caller may.
    """
    tensors, found = run.tensors, set(run.constants)
    operands = (n for step in steps if step.writes for n in step.operands)
    written = {storage_of(tensors[n]) for n in (*operands, *outputs)}
    entries = 0
    for step in steps:
        results = step.results
        length = sum([tensors[n].numel() for n in results])
        if (
            results
            and step.is_pure
            and RANDOM not in getattr(step.function, "tags", ())
            and all(sources[n] in found for n in step.operands)
            and not any(storage_of(tensors[n]) in written for n in results)
            and length <= min(_LARGEST, _MOST - entries)
        ):
            found.update(results)
            entries += length
    return found


def _needed(
    steps: Sequence[RecordedOp], sources: Sequence[int], outputs: Sequence[int]
) -> list[RecordedOp]:
    """Returns the steps without those whose results nothing takes, and that do nothing else."""
    needed = {sources[n] for n in outputs}
    kept = []
    for step in reversed(steps):
        results = {sources[n] for n in step.results}
        if results and step.is_pure and results.isdisjoint(needed):
            continue
        kept.append(step)
        needed.update(sources[n] for n in step.operands)
    return kept[::-1]
