"""Communication schedules as plain data: what each rank does, instruction by instruction.

A schedule says nothing about tensors, processes or time. It is a program per rank over five
instructions, so the same data drives gloo, the virtual clock and the exhaustive tests.

Vocabulary: a *block* is what one rank owns of a matrix whose rows are sharded over `num_ranks`;
each block is split into `num_parts` *chunks*, the unit that is sent and multiplied.

    gather/ring      blocks travel to the next rank, forwarded before they are multiplied
    scatter/direct   a partial sum goes straight to its owner, which adds all of them in rank order
    reduce/direct    scatter/direct, and each finished chunk is sent to everyone at once
    sum/direct       an all-reduce of addends that exist already; finished chunks are multiplied

Source: ring all-gather from Patarasuk and Yuan 2009; overlapping them with the
matmul from Wang et al. 2023 ("Overlap communication with dependent computation"), section 3.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, order=True)
class Chunk:
    """Part `part` of the block that rank `owner` owns."""

    owner: int
    part: int


@dataclass(frozen=True, slots=True)
class Message:
    """One chunk on its way; `step` counts from 1 and is unique with `part` for a pair of ranks."""

    source: int
    target: int
    chunk: Chunk
    step: int


@dataclass(frozen=True, slots=True)
class Post:
    """Announce the buffer that `message` will arrive in; does not block."""

    message: Message


@dataclass(frozen=True, slots=True)
class Send:
    """Start sending `message`; does not block."""

    message: Message


@dataclass(frozen=True, slots=True)
class Await:
    """Block until `message` has arrived."""

    message: Message


@dataclass(frozen=True, slots=True)
class Multiply:
    """Multiply `chunk`: consume it (gather) or produce this rank's addend of it (scatter)."""

    chunk: Chunk


@dataclass(frozen=True, slots=True)
class Combine:
    """Add every addend of `chunk` that this rank has, in rank order, own addend included."""

    chunk: Chunk


Instruction: TypeAlias = Post | Send | Await | Multiply | Combine


@dataclass(frozen=True, slots=True)
class Program:
    """One rank's instructions; a caller may do work of its own between the two halves."""

    start: tuple[Instruction, ...]
    finish: tuple[Instruction, ...]

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """Both halves in order."""
        return self.start + self.finish


Builder: TypeAlias = Callable[[int, int, int], Program]


def _posts(finish: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    """Posts a receive for every awaited message, in the order of need.

    All of them before the first send: gloo holds a message back until its receive is posted, and
    posting late doubled the time of an exchange (31.8 ms against 65.0 ms).
    """
    return tuple(Post(i.message) for i in finish if isinstance(i, Await))


def _chunks(owner: int, num_parts: int) -> Iterator[Chunk]:
    return (Chunk(owner, part) for part in range(num_parts))


def gather_ring(rank: int, num_ranks: int, num_parts: int) -> Program:
    """Builds a ring all-gather: own chunks first; each arrival is forwarded, then multiplied."""
    before, after = (rank - 1) % num_ranks, (rank + 1) % num_ranks

    def forwarded(distance: int, part: int) -> Send:
        return Send(Message(rank, after, Chunk((after - distance) % num_ranks, part), distance))

    def arrival(distance: int, part: int) -> Iterator[Instruction]:
        chunk = Chunk((rank - distance) % num_ranks, part)
        yield Await(Message(before, rank, chunk, distance))
        if distance < num_ranks - 1:
            yield forwarded(distance + 1, part)
        yield Multiply(chunk)

    own_sends = tuple(forwarded(1, part) for part in range(num_parts) if num_ranks > 1)
    arrivals = tuple(
        instruction
        for distance in range(1, num_ranks)
        for part in range(num_parts)
        for instruction in arrival(distance, part)
    )
    own = tuple(Multiply(chunk) for chunk in _chunks(rank, num_parts))
    return Program(_posts(arrivals) + own_sends, own + arrivals)


def _addend(source: int, target: int, num_ranks: int, part: int) -> Message:
    """Returns the message of an addend to its owner; the step is the distance between the two."""
    return Message(source, target, Chunk(target, part), (target - source) % num_ranks)


def _others(rank: int, num_ranks: int) -> Iterator[int]:
    """Yields peers by distance, so that at each step every rank receives from exactly one other."""
    return ((rank + distance) % num_ranks for distance in range(1, num_ranks))


def _collect(rank: int, num_ranks: int, part: int) -> Iterator[Instruction]:
    """Wait for every addend of one own chunk, nearest first as they were sent, and add them."""
    for distance in range(1, num_ranks):
        yield Await(_addend((rank - distance) % num_ranks, rank, num_ranks, part))
    yield Combine(Chunk(rank, part))


def scatter_direct(rank: int, num_ranks: int, num_parts: int) -> Program:
    """Builds a direct reduce-scatter: each addend is sent once; the owner sums in rank order."""
    start: list[Instruction] = []
    for target in _others(rank, num_ranks):
        for part in range(num_parts):
            start += [
                Multiply(Chunk(target, part)),
                Send(_addend(rank, target, num_ranks, part)),
            ]
    start += [Multiply(chunk) for chunk in _chunks(rank, num_parts)]
    finish = tuple(i for part in range(num_parts) for i in _collect(rank, num_ranks, part))
    return Program(_posts(finish) + tuple(start), finish)


def _finished(source: int, target: int, num_ranks: int, part: int) -> Message:
    """Returns the message of a finished chunk; its step follows the addends', for unique tags."""
    step = num_ranks + (target - source) % num_ranks
    return Message(source, target, Chunk(source, part), step)


def _finished_arrivals(rank: int, num_ranks: int, part: int) -> Iterator[Message]:
    """Yields the messages of one part of all other blocks, nearest first as they were sent."""
    for distance in range(1, num_ranks):
        yield _finished((rank - distance) % num_ranks, rank, num_ranks, part)


def _publish(rank: int, num_ranks: int, part: int) -> Iterator[Instruction]:
    """Adds one own chunk and sends it to everyone."""
    yield from _collect(rank, num_ranks, part)
    for target in _others(rank, num_ranks):
        yield Send(_finished(rank, target, num_ranks, part))


def reduce_direct(rank: int, num_ranks: int, num_parts: int) -> Program:
    """Builds a direct all-reduce, one part of all blocks at a time.

    While part p is multiplied, part p - 1 is added and sent to everyone: both halves of the
    all-reduce hide behind the products, which block by block only the first half would.
    """

    def products(part: int) -> Iterator[Instruction]:
        for target in _others(rank, num_ranks):
            yield Multiply(Chunk(target, part))
            yield Send(_addend(rank, target, num_ranks, part))
        yield Multiply(Chunk(rank, part))

    start: list[Instruction] = []
    for part in range(num_parts):
        start += products(part)
        if part:
            start += _publish(rank, num_ranks, part - 1)
    arrivals = (
        Await(message)
        for part in range(num_parts)
        for message in _finished_arrivals(rank, num_ranks, part)
    )
    finish = (*_publish(rank, num_ranks, num_parts - 1), *arrivals)
    return Program(_posts((*start, *finish)) + tuple(start), finish)


def sum_direct(rank: int, num_ranks: int, num_parts: int) -> Program:
    """Builds a direct all-reduce of existing addends, one part of all blocks at a time.

    While the finished chunks of part p are multiplied, those of part p + 1 are added and sent. Two
    parts of addends travel at a time, so that finished chunks do not queue behind all of them.
    """

    def addends(part: int) -> Iterator[Instruction]:
        if part < num_parts:
            for target in _others(rank, num_ranks):
                yield Send(_addend(rank, target, num_ranks, part))

    def consume(part: int) -> Iterator[Instruction]:
        for message in _finished_arrivals(rank, num_ranks, part):
            yield Await(message)
            yield Multiply(message.chunk)

    start = (*addends(0), *addends(1))
    finish: list[Instruction] = []
    for part in range(num_parts):
        finish += _publish(rank, num_ranks, part)
        finish += addends(part + 2)
        finish.append(Multiply(Chunk(rank, part)))
        if part:
            finish += consume(part - 1)
    finish += consume(num_parts - 1)
    return Program(_posts(tuple(finish)) + start, tuple(finish))


SCHEDULES: Mapping[str, Builder] = {
    "gather/ring": gather_ring,
    "scatter/direct": scatter_direct,
    "reduce/direct": reduce_direct,
    "sum/direct": sum_direct,
}


def num_tags(num_ranks: int, num_parts: int) -> int:
    """Counts the tags that one call needs: steps reach 2 * num_ranks - 1, each with every part."""
    return 2 * num_ranks * num_parts


def tag(message: Message, num_parts: int) -> int:
    """Returns a number that no other message between the same two ranks has within one call."""
    return message.step * num_parts + message.chunk.part


def split(length: int, num_blocks: int) -> tuple[slice, ...]:
    """Splits `length` rows into consecutive blocks whose sizes differ by at most one.

    Longer blocks first: what remains to be multiplied after the last arrival is the shortest.
    """
    size, longer = divmod(length, num_blocks)
    starts = [size * index + min(index, longer) for index in range(num_blocks + 1)]
    return tuple(slice(a, b) for a, b in itertools.pairwise(starts))


def chunk_rows(length: int, num_ranks: int, num_parts: int) -> dict[Chunk, slice]:
    """Returns the rows of every chunk of a matrix of `length` rows: blocks, each split in parts."""
    return {
        Chunk(owner, part): slice(block.start + rows.start, block.start + rows.stop)
        for owner, block in enumerate(split(length, num_ranks))
        for part, rows in enumerate(split(block.stop - block.start, num_parts))
    }
