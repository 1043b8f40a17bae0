"""Executes a rank's program of a schedule on tensors.

One interpreter for every schedule; what differs is where a chunk's bytes are (`Tiles`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from shardmap_torch.kernels.lanes import Lane
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
)
from shardmap_torch.kernels.transport import Channel, Handle, Steps, Transport

Consume: TypeAlias = Callable[[slice, Tensor], None]
"""Multiplies rows of the gathered matrix, given as their position and their values."""

Produce: TypeAlias = Callable[[slice], Tensor]
"""This rank's addend of some rows of the summed matrix, in memory of its own."""

LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Choice:
    """A schedule, and the number of parts into which each rank's block is split."""

    schedule: str
    num_parts: int

    def __str__(self) -> str:
        """Formats it as `gather/ring/4`."""
        return f"{self.schedule}/{self.num_parts}"


class Tiles(Protocol):
    """Buffers in which an operation keeps its chunks."""

    def outgoing(self, message: Message) -> Tensor:
        """Returns the contiguous tensor to send."""

    def incoming(self, message: Message) -> Tensor:
        """Returns the contiguous buffer to receive into."""

    def multiply(self, chunk: Chunk) -> None:
        """Consumes or produces a chunk."""

    def combine(self, chunk: Chunk) -> None:
        """Adds the addends of a chunk."""


@dataclass(slots=True)
class Exchange:
    """One call of one operation on one rank, in two halves.

    Between `start` and `finish` the caller may compute anything: transfers go on meanwhile.

    The tiles are arguments, not attributes: they own the exchange, and a reference cycle would keep
    their memory until the garbage collector runs.

    Order between the lanes, where the transport has any: transfers begin after what was issued
    before the call, a chunk that was computed here is sent after that, and what awaits a message is
    computed after it. Nothing else delays a lane; a chunk is forwarded while others multiply.
    """

    channel: Channel
    program: Program
    _receives: dict[Message, Handle] = field(default_factory=dict)
    _sends: list[Handle] = field(default_factory=list)
    _computed: set[Chunk] = field(default_factory=set)

    def start(self, tiles: Tiles) -> Steps[None]:
        """Posts every receive and runs the first half."""
        self._post(tiles)
        yield from self._run(self.program.start, tiles)

    def finish(self, tiles: Tiles) -> Steps[None]:
        """Runs the second half, then waits until every buffer sent from may be reused."""
        yield from self._run(self.program.finish, tiles)
        yield from self._sends

    def _post(self, tiles: Tiles) -> None:
        """Posts every receive before anything else in the program.

        One mark orders all of them behind earlier uses of the buffers' memory.
        """
        lanes = self.channel.transport.lanes
        posts = [i.message for i in self.program.start if isinstance(i, Post)]
        buffers = {message: tiles.incoming(message) for message in posts}
        lanes.wait(Lane.TRANSFER, lanes.record(Lane.COMPUTE))
        for message, buffer in buffers.items():
            lanes.keep(Lane.TRANSFER, buffer)
            self._receives[message] = self.channel.receive(buffer, message)

    def _send(self, message: Message, tensor: Tensor) -> None:
        lanes = self.channel.transport.lanes
        if message.chunk in self._computed:
            lanes.wait(Lane.TRANSFER, lanes.record(Lane.COMPUTE))
        lanes.keep(Lane.TRANSFER, tensor)
        self._sends.append(self.channel.send(tensor, message))

    def _run(self, instructions: Iterable[Instruction], tiles: Tiles) -> Steps[None]:
        for instruction in instructions:
            match instruction:
                case Post():
                    pass
                case Send(message):
                    self._send(message, tiles.outgoing(message))
                case Await(message):
                    yield self._receives.pop(message)
                case Multiply(chunk):
                    tiles.multiply(chunk)
                    self._computed.add(chunk)
                case Combine(chunk):
                    tiles.combine(chunk)
                    self._computed.add(chunk)


def _open(transport: Transport, op: str, choice: Choice) -> Exchange:
    program = SCHEDULES[choice.schedule](transport.rank, transport.num_ranks, choice.num_parts)
    return Exchange(Channel.open(transport, op, choice.num_parts), program)


class Gather:
    """All-gathers a matrix by rows and feeds each chunk to `consume` as soon as it is here.

    Args:
        transport: This rank's end of the network.
        op: Name for error messages.
        shard: This rank's rows, contiguous, as many on every rank.
        consume: Called once for each chunk, own chunks first.
        choice: A `gather/` schedule.

    Attributes:
        full: The gathered matrix; complete once `finish` has run.
    """

    def __init__(
        self, transport: Transport, op: str, shard: Tensor, consume: Consume, choice: Choice
    ) -> None:
        """Allocates the gathered matrix; no communication."""
        num_rows = shard.shape[0] * transport.num_ranks
        self.full = shard.new_empty(num_rows, shard.shape[1])
        own = slice(transport.rank * shard.shape[0], (transport.rank + 1) * shard.shape[0])
        self.full[own].copy_(shard)
        self._rows = chunk_rows(num_rows, transport.num_ranks, choice.num_parts)
        self._consume = consume
        self._exchange = _open(transport, op, choice)

    def start(self) -> Steps[None]:
        """Posts the receives and sends the own block; computes nothing."""
        return self._exchange.start(self)

    def finish(self) -> Steps[Tensor]:
        """Forwards and consumes; returns the gathered matrix."""
        yield from self._exchange.finish(self)
        return self.full

    def outgoing(self, message: Message) -> Tensor:
        return self.full[self._rows[message.chunk]]

    def incoming(self, message: Message) -> Tensor:
        """Returns the chunk's rows of the gathered matrix: it is received in place."""
        return self.full[self._rows[message.chunk]]

    def multiply(self, chunk: Chunk) -> None:
        rows = self._rows[chunk]
        self._consume(rows, self.full[rows])

    def combine(self, chunk: Chunk) -> None:
        """Never called: a gather has no addends."""
        raise NotImplementedError


class Scatter:
    """Sums the rows that every rank produces; keeps the own block, or all of them.

    Addends are added in rank order 0..n-1, so results do not depend on arrival; bfloat16 and
    float16 addends are added in float32 and rounded once.

    Args:
        transport: This rank's end of the network.
        op: Name for error messages.
        produce: Called once for each chunk of the summed matrix.
        out: Receives the sum: the own block of rows (`scatter/`) or all rows (`reduce/`).
        num_rows: Rows of the summed matrix.
        choice: A `scatter/` or `reduce/` schedule.
    """

    def __init__(
        self,
        transport: Transport,
        op: str,
        produce: Produce,
        out: Tensor,
        num_rows: int,
        choice: Choice,
    ) -> None:
        """Allocates nothing yet; no communication."""
        self._transport = transport
        self._produce = produce
        self._out = out
        self._rows = chunk_rows(num_rows, transport.num_ranks, choice.num_parts)
        keeps_all = out.shape[0] == num_rows
        self._first_row = 0 if keeps_all else self._rows[Chunk(transport.rank, 0)].start
        self._tiles: dict[Chunk, Tensor] = {}
        self._addends: dict[Chunk, dict[int, Tensor]] = {}
        self._exchange = _open(transport, op, choice)

    def start(self) -> Steps[None]:
        """Produces every chunk, sending each at once."""
        return self._exchange.start(self)

    def finish(self) -> Steps[Tensor]:
        """Waits for the addends still in flight, adds them and returns the sum."""
        yield from self._exchange.finish(self)
        return self._out

    def outgoing(self, message: Message) -> Tensor:
        """Returns a finished chunk of the own block, or an addend of another rank's."""
        if message.chunk.owner == message.source:
            return self._destination(message.chunk)
        return self._tiles[message.chunk]

    def incoming(self, message: Message) -> Tensor:
        """Returns the place of a finished chunk, or a new buffer for an addend."""
        if message.chunk.owner == message.source:
            return self._destination(message.chunk)
        rows = self._rows[message.chunk]
        buffer = self._out.new_empty(rows.stop - rows.start, self._out.shape[1])
        self._addends.setdefault(message.chunk, {})[message.source] = buffer
        return buffer

    def multiply(self, chunk: Chunk) -> None:
        self._tiles[chunk] = self._produce(self._rows[chunk])

    def combine(self, chunk: Chunk) -> None:
        """Adds an own chunk in rank order."""
        own = self._tiles.pop(chunk)
        addends = self._addends.pop(chunk, {}) | {self._transport.rank: own}
        _sum_into(self._destination(chunk), [addends[rank] for rank in sorted(addends)])
        self._transport.charge(len(addends) * own.numel(), (len(addends) + 1) * own.nbytes)

    def _destination(self, chunk: Chunk) -> Tensor:
        rows = self._rows[chunk]
        return self._out[rows.start - self._first_row : rows.stop - self._first_row]


class Sum(Scatter):
    """Sums a matrix of which every rank has an addend, and feeds each finished chunk to `consume`.

    Args:
        transport: This rank's end of the network.
        op: Name for error messages.
        addend: This rank's addend, contiguous.
        consume: Called once for each chunk of the sum.
        choice: A `sum/` schedule.
    """

    def __init__(
        self, transport: Transport, op: str, addend: Tensor, consume: Consume, choice: Choice
    ) -> None:
        """Allocates the sum; no communication."""
        out = torch.empty_like(addend)
        super().__init__(transport, op, lambda rows: addend[rows], out, addend.shape[0], choice)
        self._consume = consume

    def outgoing(self, message: Message) -> Tensor:
        """Returns a finished chunk, or rows of the addend."""
        if message.chunk.owner == message.source:
            return self._destination(message.chunk)
        return self._produce(self._rows[message.chunk])

    def multiply(self, chunk: Chunk) -> None:
        self._consume(self._rows[chunk], self._destination(chunk))

    def combine(self, chunk: Chunk) -> None:
        self._tiles[chunk] = self._produce(self._rows[chunk])
        super().combine(chunk)


def complete(exchange: Gather | Scatter) -> Steps[Tensor]:
    """Runs both halves, one after the other."""
    yield from exchange.start()
    return (yield from exchange.finish())


def _sum_into(destination: Tensor, addends: list[Tensor]) -> None:
    """Adds left to right, in float32 where the addends are of lower precision."""
    if len(addends) == 1:
        destination.copy_(addends[0])
    elif destination.dtype in LOW_PRECISION:
        total = addends[0].float()
        for addend in addends[1:]:
            total += addend
        destination.copy_(total)
    else:
        torch.add(addends[0], addends[1], out=destination)
        for addend in addends[2:]:
            destination += addend
