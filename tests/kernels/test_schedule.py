"""Every schedule, on every rank, for 1 to 16 ranks whole and in parts, with no device."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from shardmap_torch.kernels.schedule import (
    SCHEDULES,
    Await,
    Chunk,
    Instruction,
    Message,
    Multiply,
    Post,
    Program,
    Send,
    chunk_rows,
    num_tags,
    split,
    tag,
)

SIZES = {*itertools.product(range(1, 17), (1, 3))}
FEW = {(ranks, 1) for ranks in range(1, 9)} | {(ranks, 3) for ranks in (2, 3, 4, 7)}


@dataclass(frozen=True)
class Run:
    """A schedule for so many ranks, each block in so many parts."""

    name: str
    num_ranks: int
    num_parts: int

    @functools.cached_property
    def programs(self) -> tuple[Program, ...]:
        ranks = range(self.num_ranks)
        return tuple(SCHEDULES[self.name](n, self.num_ranks, self.num_parts) for n in ranks)

    @property
    def chunks(self) -> list[Chunk]:
        return all_chunks(self.num_ranks, self.num_parts)


RUNS = {name: {size: Run(name, *size) for size in SIZES} for name in SCHEDULES}


def of(*names: str) -> Callable[[Callable[[Run], None]], Callable[..., None]]:
    """Checks all runs of these schedules, most sizes in one slow test: a thousand cost seconds."""
    groups = [
        pytest.param([RUNS[name][size] for size in sorted(sizes)], id=f"{name}, {how}", marks=marks)
        for name in names
        for how, sizes, marks in (("few", FEW, ()), ("many", SIZES - FEW, pytest.mark.slow))
    ]

    def tested(check: Callable[[Run], None]) -> Callable[..., None]:
        @pytest.mark.parametrize("runs", groups)
        def test(runs: list[Run]) -> None:
            for run in runs:
                try:
                    check(run)
                except AssertionError as error:
                    error.add_note(str(run))
                    raise

        return test

    return tested


def messages(program: Program, kind: type[Post] | type[Send] | type[Await]) -> list[Message]:
    return [i.message for i in program.instructions if isinstance(i, kind)]


def all_chunks(num_ranks: int, num_parts: int) -> list[Chunk]:
    return [Chunk(o, p) for o, p in itertools.product(range(num_ranks), range(num_parts))]


@of(*SCHEDULES)
def test_every_rank_multiplies_every_chunk_exactly_once(run: Run) -> None:
    for program in run.programs:
        multiplied = [i.chunk for i in program.instructions if isinstance(i, Multiply)]
        assert sorted(multiplied) == run.chunks


@of(*SCHEDULES)
def test_tags_are_within_the_range_that_a_call_reserves(run: Run) -> None:
    """That two messages of a call have one tag, the virtual network refuses."""
    sent = [m for program in run.programs for m in messages(program, Send)]
    reserved = range(num_tags(run.num_ranks, run.num_parts))
    assert all(tag(m, run.num_parts) in reserved for m in sent)


@of(*SCHEDULES)
def test_all_receives_are_posted_before_the_first_send(run: Run) -> None:
    for program in run.programs:
        kinds = [type(i) for i in program.instructions if isinstance(i, Post | Send)]
        assert kinds == sorted(kinds, key=[Post, Send].index)


def blocking_order(per_rank: tuple[Program, ...]) -> Iterator[tuple[int, Instruction]]:
    """The instructions in an order in which they can run; stops short where ranks deadlock.

    Sends block here until their receive is posted, which is stricter than any transport.
    """
    todo = [list(reversed(program.instructions)) for program in per_rank]
    sent: set[Message] = set()
    posted: set[Message] = set()
    moved = True
    while moved:
        moved = False
        for rank, stack in enumerate(todo):
            while stack and _can_run(stack[-1], sent, posted):
                instruction = stack.pop()
                _record(instruction, sent, posted)
                moved = True
                yield rank, instruction


def _can_run(instruction: Instruction, sent: set[Message], posted: set[Message]) -> bool:
    if isinstance(instruction, Await):
        return instruction.message in sent
    return not isinstance(instruction, Send) or instruction.message in posted


def _record(instruction: Instruction, sent: set[Message], posted: set[Message]) -> None:
    if isinstance(instruction, Send):
        sent.add(instruction.message)
    if isinstance(instruction, Post):
        posted.add(instruction.message)


@of(*SCHEDULES)
def test_no_order_of_waits_deadlocks_even_when_sends_block(run: Run) -> None:
    per_rank = run.programs
    ran = sum(1 for _ in blocking_order(per_rank))
    assert ran == sum(len(program.instructions) for program in per_rank)


Formula = Callable[[int], int]

# Blocks a rank sends, and steps in a row: what a ring or a direct exchange costs.
FORMULAS: dict[str, tuple[Formula, Formula]] = {
    "gather/ring": (lambda n: n - 1, lambda n: n - 1),
    "scatter/direct": (lambda n: n - 1, lambda n: n - 1),
    "reduce/direct": (lambda n: 2 * (n - 1), lambda n: 2 * n - 1 if n > 1 else 0),
    "sum/direct": (lambda n: 2 * (n - 1), lambda n: 2 * n - 1 if n > 1 else 0),
}


@of(*SCHEDULES)
def test_messages_and_steps_of_a_rank_equal_the_formula(run: Run) -> None:
    num_blocks, num_steps = FORMULAS[run.name]
    for program in run.programs:
        sent = messages(program, Send)
        assert len(sent) == num_blocks(run.num_ranks) * run.num_parts
        assert max((m.step for m in sent), default=0) == num_steps(run.num_ranks)


@of("scatter/direct", "reduce/direct", "sum/direct")
def test_a_rank_hears_from_one_other_at_each_step(run: Run) -> None:
    """No incast: with every rank at the same step, each target has one source."""
    sent = [m for program in run.programs for m in messages(program, Send)]
    load = Counter((m.step, m.target, m.chunk.part) for m in sent)
    assert set(load.values()) <= {1}


@pytest.mark.parametrize(
    ("length", "num_blocks"), [(0, 3), (7, 1), (7, 2), (7, 7), (5, 8), (39, 8)]
)
def test_pieces_cover_the_length_in_order_and_differ_by_at_most_one(
    length: int, num_blocks: int
) -> None:
    blocks = split(length, num_blocks)
    assert [row for block in blocks for row in range(block.start, block.stop)] == list(
        range(length)
    )
    sizes = [block.stop - block.start for block in blocks]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("length", "num_ranks", "num_parts"), [(24, 3, 4), (10, 4, 3), (7, 2, 1)])
def test_a_matrix_is_split_into_blocks_first_and_then_into_parts(
    length: int, num_ranks: int, num_parts: int
) -> None:
    rows = chunk_rows(length, num_ranks, num_parts)
    assert list(rows) == all_chunks(num_ranks, num_parts)
    assert [row for block in rows.values() for row in range(block.start, block.stop)] == list(
        range(length)
    )
    for owner, block in enumerate(split(length, num_ranks)):
        assert rows[Chunk(owner, 0)].start == block.start
        assert rows[Chunk(owner, num_parts - 1)].stop == block.stop
