"""Every schedule, on every rank, for 1 to 16 ranks whole and in parts, with no device."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from shardmap_torch.kernels.schedule import (
    SCHEDULES,
    Await,
    Chunk,
    Combine,
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

FAST = {(ranks, 1) for ranks in range(1, 9)} | {(ranks, 3) for ranks in (2, 3, 4, 7)}
SIZES = [
    pytest.param(*size, id=f"{size[0]}x{size[1]}", marks=() if size in FAST else pytest.mark.slow)
    for size in itertools.product(range(1, 17), (1, 3))
]
every_schedule = pytest.mark.parametrize("name", SCHEDULES)
every_size = pytest.mark.parametrize(("num_ranks", "num_parts"), SIZES)


@functools.cache
def programs(name: str, num_ranks: int, num_parts: int) -> tuple[Program, ...]:
    return tuple(SCHEDULES[name](rank, num_ranks, num_parts) for rank in range(num_ranks))


def messages(program: Program, kind: type[Post] | type[Send] | type[Await]) -> list[Message]:
    return [i.message for i in program.instructions if isinstance(i, kind)]


def all_chunks(num_ranks: int, num_parts: int) -> list[Chunk]:
    return [Chunk(o, p) for o, p in itertools.product(range(num_ranks), range(num_parts))]


@every_schedule
@every_size
def test_every_rank_multiplies_every_chunk_exactly_once(
    name: str, num_ranks: int, num_parts: int
) -> None:
    for program in programs(name, num_ranks, num_parts):
        multiplied = [i.chunk for i in program.instructions if isinstance(i, Multiply)]
        assert sorted(multiplied) == all_chunks(num_ranks, num_parts)


@every_schedule
@every_size
def test_every_message_is_sent_posted_and_awaited_exactly_once(
    name: str, num_ranks: int, num_parts: int
) -> None:
    per_rank = programs(name, num_ranks, num_parts)
    sent = Counter(m for program in per_rank for m in messages(program, Send))
    posted = Counter(m for program in per_rank for m in messages(program, Post))
    awaited = Counter(m for program in per_rank for m in messages(program, Await))
    assert sent == posted == awaited
    assert set(sent.values()) <= {1}
    for rank, program in enumerate(per_rank):
        assert all(m.source == rank != m.target for m in messages(program, Send))
        assert all(m.target == rank for m in messages(program, Post))


@every_schedule
@every_size
def test_tags_are_unique_for_a_pair_of_ranks_and_within_the_reserved_range(
    name: str, num_ranks: int, num_parts: int
) -> None:
    sent = [m for program in programs(name, num_ranks, num_parts) for m in messages(program, Send)]
    tags = [(m.source, m.target, tag(m, num_parts)) for m in sent]
    assert len(set(tags)) == len(tags)
    assert all(0 <= number < num_tags(num_ranks, num_parts) for _, _, number in tags)


@every_schedule
@every_size
def test_all_receives_are_posted_before_the_first_send(
    name: str, num_ranks: int, num_parts: int
) -> None:
    for program in programs(name, num_ranks, num_parts):
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


@every_schedule
@every_size
def test_no_order_of_waits_deadlocks_even_when_sends_block(
    name: str, num_ranks: int, num_parts: int
) -> None:
    per_rank = programs(name, num_ranks, num_parts)
    ran = sum(1 for _ in blocking_order(per_rank))
    assert ran == sum(len(program.instructions) for program in per_rank)


@pytest.mark.parametrize("name", ["gather/ring"])
@every_size
def test_a_gathered_chunk_is_used_only_after_it_arrived(
    name: str, num_ranks: int, num_parts: int
) -> None:
    for rank, program in enumerate(programs(name, num_ranks, num_parts)):
        held = {chunk for chunk in all_chunks(num_ranks, num_parts) if chunk.owner == rank}
        for instruction in program.instructions:
            if isinstance(instruction, Await):
                held.add(instruction.message.chunk)
            if isinstance(instruction, Multiply):
                assert instruction.chunk in held
            if isinstance(instruction, Send):
                assert instruction.message.chunk in held


Addends = dict[Chunk, set[int]]


@pytest.mark.parametrize("name", ["scatter/direct", "reduce/direct"])
@every_size
def test_every_sum_holds_the_addend_of_every_rank_exactly_once(
    name: str, num_ranks: int, num_parts: int
) -> None:
    """Runs the programs on sets of ranks in place of tensors; a repeated addend would overlap."""
    per_rank = programs(name, num_ranks, num_parts)
    sums: list[Addends] = [{} for _ in per_rank]
    arrived: list[dict[Chunk, list[set[int]]]] = [{} for _ in per_rank]
    in_flight: dict[Message, set[int]] = {}
    for rank, instruction in blocking_order(per_rank):
        match instruction:
            case Multiply(chunk):
                sums[rank][chunk] = {rank}
            case Send(message):
                in_flight[message] = set(sums[rank][message.chunk])
            case Await(message):
                arrived[rank].setdefault(message.chunk, []).append(in_flight[message])
            case Combine(chunk):
                for addend in arrived[rank].pop(chunk, []):
                    assert not sums[rank][chunk] & addend
                    sums[rank][chunk] |= addend
    everyone = set(range(num_ranks))
    for rank, own in enumerate(sums):
        assert all(own[chunk] == everyone for chunk in own if chunk.owner == rank)


@pytest.mark.parametrize("name", ["reduce/direct", "sum/direct"])
@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("num_ranks", range(1, 17))
def test_an_all_reduce_delivers_every_finished_chunk_to_every_rank(
    name: str, num_ranks: int, num_parts: int
) -> None:
    for rank, program in enumerate(programs(name, num_ranks, num_parts)):
        finished = {m.chunk for m in messages(program, Await) if m.chunk.owner != rank}
        assert len(finished) == (num_ranks - 1) * num_parts
        combined: set[Chunk] = set()
        for instruction in program.instructions:
            if isinstance(instruction, Combine):
                combined.add(instruction.chunk)
            if isinstance(instruction, Send) and instruction.message.chunk.owner == rank:
                assert instruction.message.chunk in combined


@every_size
def test_a_sum_is_multiplied_only_when_it_holds_every_addend(
    num_ranks: int, num_parts: int
) -> None:
    per_rank = programs("sum/direct", num_ranks, num_parts)
    heard: dict[Chunk, set[int]] = {}
    for rank, instruction in blocking_order(per_rank):
        match instruction:
            case Send(Message(source, _, chunk)) if chunk.owner == source:
                assert heard[chunk] == set(range(num_ranks))  # A sum is sent once it is whole.
            case Await(Message(source, _, chunk)) if chunk.owner == rank:
                heard.setdefault(chunk, {rank}).add(source)
            case Combine(chunk):
                assert chunk.owner == rank
                assert heard.setdefault(chunk, {rank}) == set(range(num_ranks))
            case Multiply(chunk):
                assert heard[chunk] == set(range(num_ranks))


@every_size
def test_a_sum_is_multiplied_only_where_it_has_arrived(num_ranks: int, num_parts: int) -> None:
    for program in programs("sum/direct", num_ranks, num_parts):
        here: set[Chunk] = set()
        for instruction in program.instructions:
            match instruction:
                case Combine(chunk):
                    here.add(chunk)
                case Await(Message(source, _, chunk)) if chunk.owner == source:
                    here.add(chunk)
                case Multiply(chunk):
                    assert chunk in here


Formula = Callable[[int], int]

# Blocks a rank sends, and steps in a row: what a ring or a direct exchange costs.
FORMULAS: dict[str, tuple[Formula, Formula]] = {
    "gather/ring": (lambda n: n - 1, lambda n: n - 1),
    "scatter/direct": (lambda n: n - 1, lambda n: n - 1),
    "reduce/direct": (lambda n: 2 * (n - 1), lambda n: 2 * n - 1 if n > 1 else 0),
    "sum/direct": (lambda n: 2 * (n - 1), lambda n: 2 * n - 1 if n > 1 else 0),
}


@every_schedule
@every_size
def test_messages_and_steps_of_a_rank_equal_the_formula(
    name: str, num_ranks: int, num_parts: int
) -> None:
    num_blocks, num_steps = FORMULAS[name]
    for program in programs(name, num_ranks, num_parts):
        sent = messages(program, Send)
        assert len(sent) == num_blocks(num_ranks) * num_parts
        assert max((m.step for m in sent), default=0) == num_steps(num_ranks)


@pytest.mark.parametrize("name", ["scatter/direct", "reduce/direct", "sum/direct"])
@every_size
def test_a_rank_hears_from_one_other_at_each_step(
    name: str, num_ranks: int, num_parts: int
) -> None:
    """No incast: with every rank at the same step, each target has one source."""
    sent = [m for program in programs(name, num_ranks, num_parts) for m in messages(program, Send)]
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
