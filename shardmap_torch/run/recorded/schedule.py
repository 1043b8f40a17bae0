"""Orders a recorded run so that messages are under way while operators compute.

A list schedule without a model of time, so that ranks that have recorded the same come to the same
order: a collective starts once only cheap operators are left before it, an operator that reads the
result of one comes after all that need not wait, and what must wait does so for the oldest first.
Operators that depend on each other, by values or by writes into memory, stay in their order, so the
results are the same bit for bit.

What is done earlier than the body does it takes memory earlier. At any time that is at most a given
number of bytes, and messages under way keep operands of at most as many: the peak is then at most
twice so much higher than that of the body's own order.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Final, Literal, TypeAlias

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from shardmap_torch.backends.process_group import STARTS
from shardmap_torch.backends.recorder import RANDOM, RecordedOp, Sending, Slot
from shardmap_torch.run.recorded.simplify import Program, storage_of

Schedule: TypeAlias = Literal["overlap", "program"]
"""Orders of a recorded run: messages behind other work, or the order of the body."""

_LEAST: Final = 64 * 2**20
"""Bytes that may always be taken earlier."""


def overlapped(program: Program) -> tuple[Program, bool]:
    """Returns a program in whose order its messages are hidden behind what need not wait for them.

    Returns also whether its collectives start in another order than those of the body.

    It takes memory earlier for at most as many bytes as its inputs have, or 64 MiB, and what is
    under way keeps at most as many.
    """
    most = _bound(program)
    order = _Scheduler(program, most).order()
    steps = [program.steps[at] for at in order]
    sent = [at for at in order if isinstance(program.steps[at].function, Sending)]
    return replace(program, steps=[*_started(program, steps, most)]), sent != sorted(sent)


def _bound(program: Program) -> int:
    return max(_LEAST, sum([program.tensors[n].nbytes for n in program.inputs]))


def has_messages(program: Program) -> bool:
    """Returns whether a program communicates, as on processes."""
    return any([isinstance(step.function, Sending) for step in program.steps])


def order_of(program: Program) -> list[str]:
    """Returns the collectives in the order in which a program starts them."""
    sent = [step.function for step in program.steps if isinstance(step.function, Sending)]
    return [f"  replays {each.collective}  # {each.site}" for each in sent]


def _lent(program: Program) -> set[int]:
    """Finds tensors that one step alone makes, and one alone reads."""
    tensors = program.tensors
    outside = [*program.inputs, *program.captured, *program.computed, *program.outputs]
    uses = Counter(storage_of(tensors[n]) for step in program.steps for n in step.operands)
    made = Counter(storage_of(tensors[n]) for step in program.steps for n in step.results)
    uses.update(storage_of(tensors[n]) for n in outside)
    return {n for n, x in enumerate(tensors) if uses[storage_of(x)] == made[storage_of(x)] == 1}


def _started(program: Program, steps: Sequence[RecordedOp], most: int) -> Iterator[RecordedOp]:
    """Yields the steps; a collective whose result the next one does not read is only started.

    The oldest are waited for before what is under way keeps more than `most` bytes.
    """
    lent, kept = _lent(program), dict[int, int]()
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        for number in step.operands:
            kept.pop(program.sources[number], None)
        sending = step.function
        if not isinstance(sending, Sending):
            yield step
            continue
        size = _kept(program, sending, step)
        is_read = following is None or not {*step.results}.isdisjoint(following.operands)
        waits = sending.waits and (is_read or sending.move not in STARTS or size > most)
        while not waits and kept and sum(kept.values()) + size > most:
            oldest = next(iter(kept))
            del kept[oldest]
            yield RecordedOp(_arrived, (Slot(oldest),), {}, None)
        kept |= {} if waits else dict.fromkeys(step.results, size)
        run = replace(sending, waits=waits, lends=lent.issuperset(step.operands))
        yield replace(step, function=run, starts=not waits)


def _kept(program: Program, sending: Sending, step: RecordedOp) -> int:
    """Returns the bytes, beside those of its result, that a collective keeps while under way.

    They are its operand, and one more of that size where ranks add what they have exchanged.
    """
    (x,) = [program.tensors[n] for n in step.operands]
    is_in_place = sending.move == "sum" and x.element_size() != 2  # halves are exchanged
    return 0 if is_in_place else x.nbytes * (1 if sending.move == "gather" else 2)


def _arrived(_: Tensor) -> None:
    """Reads the result of a collective, which is waited for before."""


@dataclass(frozen=True, slots=True)
class _Node:
    """A step in the order of the body.

    Attributes:
        needs: the steps that come before it in any order.
        users: those that come after it.
        size: bytes of what it makes; of a collective, the copy of its operand too.
        sends: whether it is a collective.
        is_light: whether it may be done for the sake of a collective that needs it.
    """

    needs: frozenset[int]
    users: list[int]
    size: int
    sends: bool
    is_light: bool


def _nodes(program: Program) -> list[_Node]:
    tensors, nodes = program.tensors, list[_Node]()
    written, read = dict[object, int](), defaultdict[object, list[int]](list)
    for at, step in enumerate(program.steps):
        operands: set[object] = {storage_of(tensors[n]) for n in step.operands}
        made: set[object] = {storage_of(tensors[n]) for n in step.results}
        new = [tensors[n] for n in step.results if storage_of(tensors[n]) not in operands]
        size = sum([x.nbytes for x in new])
        kept = made | (operands if step.writes else set())
        if RANDOM in getattr(step.function, "tags", ()):
            kept.add(RANDOM)  # the state of a generator
        needs = {written[each] for each in operands | kept if each in written}
        for each in kept:
            needs.update(read.pop(each, ()))
            written[each] = at
        for each in operands - kept:
            read[each].append(at)
        sends = isinstance(step.function, Sending)
        packet = getattr(step.function, "overloadpacket", None)
        is_light = not sends and packet not in flop_registry
        nodes.append(_Node(frozenset(needs), [], size * (1 + sends), sends, is_light))
        for each in needs:
            nodes[each].users.append(at)
    return nodes


class _Scheduler:
    """The state of one list schedule: what is done, what may be next, and what is on its way."""

    def __init__(self, program: Program, most: int) -> None:
        self._nodes, self._most = _nodes(program), most
        self._order: list[int] = []
        self._done = [False] * len(self._nodes)
        self._first = 0  # the first step of the body's order that is not done
        self._ahead = 0  # bytes of what was done before it
        self._left = [len(node.needs) for node in self._nodes]  # not done yet
        self._far = [len(node.needs) for node in self._nodes]  # neither there nor cheap to make
        self._started: dict[int, int] = {}  # collectives on their way, by their turn
        self._free: list[int] = []
        self._waiting: set[int] = set()
        self._near: list[int] = []
        for at, node in enumerate(self._nodes):
            if not node.needs:
                heappush(self._free, at)
                self._come_near(at)

    def order(self) -> list[int]:
        """Returns all steps in their new order."""
        while self._first < len(self._nodes):
            if not self._send():
                self._do(self._next())
        return self._order

    def _send(self) -> bool:
        """Does the first collective before which only cheap steps are left, if that is allowed."""
        while self._near and self._done[self._near[0]]:
            heappop(self._near)
        if not self._near:
            return False
        steps = sorted(self._missing(self._near[0]))
        if not self._is_allowed(steps):
            return False
        for at in steps:
            self._do(at)
        return True

    def _missing(self, at: int) -> set[int]:
        """Finds a step and those before it that are not done."""
        found, open_ = set[int](), [at]
        while open_:
            each = open_.pop()
            if each not in found:
                found.add(each)
                open_ += [need for need in self._nodes[each].needs if not self._done[need]]
        return found

    def _is_allowed(self, steps: Sequence[int]) -> bool:
        ahead = sum([self._nodes[at].size for at in steps if at != self._first])
        return self._ahead + ahead <= self._most

    def _next(self) -> int:
        """Returns the first step that need not wait, or else the one that waits for the oldest."""
        while self._free and self._done[self._free[0]]:
            heappop(self._free)
        candidates = self._free[:1] or sorted(self._waiting, key=self._turn)[:1]
        allowed = [at for at in candidates if self._is_allowed([at])]
        return allowed[0] if allowed else self._first

    def _turn(self, at: int) -> tuple[int, int]:
        """Returns when the last collective that a step waits for has started, and its place."""
        return max([self._started[each] for each in self._in_flight(at)], default=-1), at

    def _in_flight(self, at: int) -> list[int]:
        return [each for each in self._nodes[at].needs if each in self._started]

    def _do(self, at: int) -> None:
        for each in self._in_flight(at):
            self._arrive(each)
        node = self._nodes[at]
        self._done[at] = True
        self._order.append(at)
        self._ahead += node.size
        self._waiting.discard(at)
        if node.sends:
            self._started[at] = len(self._order)
        elif not node.is_light:
            self._bring_near(at)
        for user in node.users:
            self._left[user] -= 1
            if not self._left[user]:
                self._add(user)
        while self._first < len(self._nodes) and self._done[self._first]:
            self._ahead -= self._nodes[self._first].size
            self._first += 1

    def _add(self, at: int) -> None:
        """Adds a step before which all is done or on its way."""
        if self._in_flight(at):
            self._waiting.add(at)
        else:
            heappush(self._free, at)

    def _arrive(self, at: int) -> None:
        """Notes that the result of a collective is there."""
        del self._started[at]
        for user in self._nodes[at].users:
            if user in self._waiting and not self._in_flight(user):
                self._waiting.remove(user)
                heappush(self._free, user)
        self._bring_near(at)

    def _bring_near(self, at: int) -> None:
        """Notes that what a step makes is there, or cheap to make."""
        for user in self._nodes[at].users:
            self._far[user] -= 1
            if not self._far[user]:
                self._come_near(user)

    def _come_near(self, at: int) -> None:
        """Notes that only cheap steps are left before a step."""
        node = self._nodes[at]
        if node.sends:
            heappush(self._near, at)
        elif node.is_light:
            self._bring_near(at)
