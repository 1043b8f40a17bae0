"""A race detector for kernels: their lanes as vector clocks, every access to memory held to them.

`RaceDetector` stands for the streams of one rank (`kernels/lanes.py`). The kernels run
as they are, on CPU tensors and in Python's order; the detector sees each operation and asks whether
the lanes' marks alone would have ordered it after every access it conflicts with. Memory is watched
element by element, so chunks of one matrix are different memory. What it refuses:

* a read or write that no mark orders after another lane's write, or a write after a read;
* memory that is freed while a lane may still use it, as the caching allocator sees it: freed memory
  is used again in the order of the lane that allocated it, or after a lane that was told to `keep`;
* a tensor used on the transfer lane that was never kept there;
* an end at which the caller's lane does not know of all that was issued;
* the host waiting, asking for a value, or copying to or from its own memory at once.

`watch` runs a kernel on the virtual network with one detector a rank. Each verb's place in the
source is noted; one place can be made to do nothing, to see that the tests miss it.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from shardmap_torch.kernels.lanes import Lane
from shardmap_torch.kernels.planner import Fabric
from shardmap_torch.kernels.schedule import Chunk, Message
from shardmap_torch.kernels.transport import (
    Envelope,
    NcclTransport,
    StagedTransport,
    Steps,
    Transport,
)
from tests.kernels.support.virtual_network import VirtualHandle, VirtualNetwork, VirtualTransport

T = TypeVar("T")
Place: TypeAlias = tuple[str, str, int]
"""A verb, and the file and line that says it."""

Clock: TypeAlias = list[int]

COMPUTE, TRANSFER, HOST, NETWORK = range(4)
NAMES = ("compute", "transfer", "host", "network")
LANES = {Lane.COMPUTE: COMPUTE, Lane.TRANSFER: TRANSFER, Lane.HOST: HOST}

READS_NO_DATA = {
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.zeros_like.default,
}
ASKS_FOR_A_VALUE = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.is_nonzero.default,
}


class RaceError(AssertionError):
    """An error that would be a race on a GPU."""


class AbandonedError(Exception):
    """Ends a kernel in the middle, as an error of its own would."""


@dataclass
class Memory:
    """A storage, and when each lane last read and wrote each of its elements."""

    alive: StorageWeakRef
    owner: int
    made_by: str
    reads: list[Tensor]
    writes: list[Tensor]
    kept: set[int] = field(default_factory=set)
    users: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, tensor: Tensor, owner: int, made_by: str) -> "Memory":
        storage = tensor.untyped_storage()
        count = storage.nbytes() // tensor.element_size()
        reads, writes = ([torch.zeros(count, dtype=torch.int64) for _ in NAMES] for _ in range(2))
        return cls(StorageWeakRef(storage), owner, made_by, reads, writes)

    @property
    def is_freed(self) -> bool:
        # `StorageWeakRef.expired` asks the same, and looks a class up by `eval` each time.
        return bool(torch.UntypedStorage._expired(self.alive.cdata))

    def last(self, lane: int) -> int:
        latest = torch.stack([self.reads[lane], self.writes[lane]])
        return int(latest.max()) if latest.numel() else 0


def same_elements(shadow: Tensor, tensor: Tensor) -> Tensor:
    """The part of a storage's shadow that `tensor` shows, each element once."""
    sizes = [
        min(size, 1) if stride == 0 else size
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    return shadow.as_strided(sizes, tensor.stride(), tensor.storage_offset())


class RaceDetector(TorchDispatchMode):
    """The lanes of one rank (a `Lanes`), and all memory that they touch."""

    def __init__(
        self,
        rank: int = 0,
        *,
        host_may_wait: bool = False,
        skipped: Place | None = None,
        stop_after: int | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rank = rank
        self.places: set[Place] = set()
        self.operations: list[tuple[str, int, Clock]] = []
        self.permutations: list[int] = []
        self._host_may_wait = host_may_wait
        self._skipped = skipped
        self._stop_after = stop_after
        self._current = COMPUTE
        self._memory: dict[int, Memory] = {}
        # The caller has worked before: its tensors were written at time 1 of its lane.
        self._clocks: list[Clock] = [
            [int(lane == other == COMPUTE) for other in range(4)] for lane in range(4)
        ]

    # The verbs.

    def record(self, lane: Lane) -> Clock:
        return [0] * 4 if self.is_skipped("record") else self.clock(self._resolve(lane))

    def wait(self, lane: Lane, mark: Clock) -> None:
        if self.is_skipped("wait"):
            return
        if lane is Lane.HOST and not self._host_may_wait:
            self._refuse("the host waits, which holds up what it would issue and breaks a capture")
        self.join(self._resolve(lane), mark)

    def keep(self, lane: Lane, tensor: Tensor) -> None:
        if not self.is_skipped("keep"):
            with _disable_current_modes():
                self._find(tensor).kept.add(self._resolve(lane))

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        with self.issuing_to(self._resolve(lane)):
            yield

    def is_skipped(self, verb: str) -> bool:
        """Notes where a verb was said: by the caller of this method's caller."""
        self._sweep()
        frame = sys._getframe(2)
        place = (verb, os.path.basename(frame.f_code.co_filename), frame.f_lineno)
        self.places.add(place)
        return place == self._skipped

    # What the networks below need.

    @contextmanager
    def issuing_to(self, lane: int) -> Iterator[None]:
        before, self._current = self._current, lane
        try:
            yield
        finally:
            self._current = before

    def clock(self, lane: int) -> Clock:
        return list(self._clocks[lane])

    def join(self, lane: int, mark: Clock) -> None:
        self._clocks[lane] = [max(pair) for pair in zip(self._clocks[lane], mark, strict=True)]

    @property
    def current(self) -> int:
        """The lane that torch issues to; in the place of `torch.cuda.current_stream()`."""
        return self._current

    # Accesses.

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self._sweep()
        kwargs = kwargs or {}
        if func in ASKS_FOR_A_VALUE and self._current != HOST:
            self._refuse(f"{func} makes the host wait")
        reads, writes = operands(func, args, kwargs)
        if func is torch.ops.aten.copy_.default:
            self._check_copy(args, kwargs)
        for tensor in reads:
            self._find(tensor)  # Known before the output is: it may be the same storage.
        out = func(*args, **kwargs)
        outs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        known = {id_of(tensor) for tensor in (*reads, *writes)}
        made = [tensor for tensor in outs if id_of(tensor) not in known]
        if not made and not writes:
            return out  # A view.
        self._issue(str(func), [] if func in READS_NO_DATA else reads, [*writes, *made], made)
        return out

    def _issue(
        self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor], made: Sequence[Tensor]
    ) -> None:
        lane = self._current
        self.join(lane, self._clocks[HOST])  # Issued after all that the host waited for.
        self._clocks[lane][lane] += 1
        for tensor in made:
            self._memory[id_of(tensor)] = Memory.of(tensor, lane, what)
        for tensor in reads:
            self._access(what, tensor, is_write=False)
        for tensor in writes:
            self._access(what, tensor, is_write=True)
        self.operations.append((what, lane, self.clock(lane)))
        if len(self.operations) == self._stop_after and lane != NETWORK:
            raise AbandonedError

    def _access(self, what: str, tensor: Tensor, *, is_write: bool) -> None:
        memory, lane = self._find(tensor), self._current
        for other in memory.users - {lane}:
            seen = self._clocks[lane][other]
            conflicts = (
                {"write": memory.writes, "read": memory.reads}
                if is_write
                else {"write": memory.writes}
            )
            for access, clocks in conflicts.items():
                if bool((same_elements(clocks[other], tensor) > seen).any()):
                    self._refuse(
                        f"{what} on the {NAMES[lane]} lane {'writes' if is_write else 'reads'} "
                        f"{list(tensor.shape)} of the memory of {memory.made_by}, unordered after "
                        f"a {access} on the {NAMES[other]} lane"
                    )
        memory.users.add(lane)
        clocks = memory.writes if is_write else memory.reads
        same_elements(clocks[lane], tensor).fill_(self._clocks[lane][lane])

    def _check_copy(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        to, source = (self._find(tensor) for tensor in args[:2])
        at_once = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if at_once and (to.owner == HOST) != (source.owner == HOST):
            self._refuse("a copy between host and GPU without non_blocking makes the host wait")

    def _find(self, tensor: Tensor) -> Memory:
        key = id_of(tensor)
        if key not in self._memory:
            memory = self._memory[key] = Memory.of(tensor, COMPUTE, "the caller")
            memory.writes[COMPUTE].fill_(1)
            memory.users.add(COMPUTE)
        return self._memory[key]

    def _resolve(self, lane: Lane) -> int:
        """Resolves lanes as CUDA does: the compute lane is whatever stream is current."""
        return self._current if lane is Lane.COMPUTE else LANES[lane]

    # What is freed, and the end.

    def _sweep(self) -> None:
        freed = [key for key, memory in self._memory.items() if memory.is_freed]
        if freed:
            with _disable_current_modes():
                for key in freed:
                    self._check_freed(self._memory.pop(key))

    def _check_freed(self, memory: Memory) -> None:
        if memory.owner in (HOST, NETWORK):
            return  # torch's pinned allocator and gloo look after their own.
        safe = self.clock(memory.owner)
        for lane in memory.kept:
            safe = [max(pair) for pair in zip(safe, self._clocks[lane], strict=True)]
        for lane in range(4):
            if lane != memory.owner and memory.last(lane) > safe[lane]:
                where = f"while the {NAMES[lane]} lane may use it"
                self._refuse(f"the memory of {memory.made_by} is freed {where}")
        self._check_kept(memory)

    def _check_kept(self, memory: Memory) -> None:
        used = memory.last(TRANSFER) > 0 or memory.last(NETWORK) > 0
        if used and memory.owner == COMPUTE and TRANSFER not in memory.kept:
            self._refuse(f"the memory of {memory.made_by} is used on the transfer lane, not kept")

    def finish(self) -> None:
        """The kernel has returned: its caller may use and free whatever it likes."""
        self._sweep()
        self.join(COMPUTE, self._clocks[HOST])  # What the caller issues comes after what it saw.
        for lane in range(4):
            if self._clocks[lane][lane] > self._clocks[COMPUTE][lane]:
                self._refuse(f"the caller does not wait for the {NAMES[lane]} lane")
        for memory in self._memory.values():
            self._check_kept(memory)

    def alive(self) -> list[str]:
        """Returns the places that made the memory that is still held."""
        self._sweep()
        return [memory.made_by for memory in self._memory.values()]

    def abandoned(self) -> None:
        """The kernel has ended in an error: what it held is freed now."""
        self._sweep()

    def _refuse(self, why: str) -> None:
        raise RaceError(f"rank {self.rank}: {why}")


def id_of(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def operands(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operation reads, and those that it writes."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for position, (name, is_write) in enumerate(parameters(func)):
        value = args[position] if position < len(args) else kwargs.get(name)
        if isinstance(value, Tensor | list | tuple):
            (writes if is_write else reads).extend(
                leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)
            )
    return reads, writes


@cache
def parameters(func: Any) -> list[tuple[str, bool]]:
    """The names of an operation's arguments, and which it writes."""
    return [
        (argument.name, argument.alias_info is not None and argument.alias_info.is_write)
        for argument in func._schema.arguments
    ]


@dataclass
class VirtualWork:
    """A transfer on the virtual network, on a lane of its own."""

    detector: RaceDetector
    done: Clock
    parts: list[VirtualHandle]
    landing: tuple[Tensor, Tensor] | None
    blocks_host: bool

    def wait(self) -> None:
        """Orders what is issued next; the network has delivered already."""
        if not self.detector.is_skipped("wait"):
            self.detector.join(HOST if self.blocks_host else self.detector.current, self.done)

    def land(self) -> None:
        """Puts what has arrived in place; the write itself was seen when it was issued."""
        if self.landing is not None:
            received, scratch = self.landing
            received.copy_(scratch)
            self.landing = None  # Once: a send and the receive beside it are one work.


def on_network(
    detector: RaceDetector, issued_from: int, sent: Tensor | None, received: Tensor | None
) -> tuple[Clock, Tensor | None, Tensor | None]:
    """Reads what is sent and spoils what will be received, after what was issued before."""
    detector.join(NETWORK, detector.clock(issued_from))
    with detector.issuing_to(NETWORK):
        copy = None if sent is None else sent.clone()
        if received is not None:
            received.fill_(float("nan"))
        done = detector.clock(NETWORK)
    with _disable_current_modes():
        return done, copy, None if received is None else torch.empty_like(received)


@dataclass
class VirtualNccl:
    """Stands for NCCL: operations on a stream of its own, matched by their order."""

    below: VirtualTransport
    detector: RaceDetector
    counts: dict[tuple[int, int], int] = field(default_factory=dict)

    def __call__(
        self, sent: Tensor, target: int, received: Tensor, source: int
    ) -> list[VirtualWork]:
        detector, rank = self.detector, self.below.rank
        detector.permutations.append((target - rank) % self.below.num_ranks)
        done, copy, scratch = on_network(detector, detector.current, sent, received)
        assert copy is not None
        assert scratch is not None
        with _disable_current_modes():
            parts = [
                self.below.receive(scratch, self._numbered(source, rank)),
                self.below.send(copy, self._numbered(rank, target)),
            ]
        return [VirtualWork(detector, done, parts, (received, scratch), blocks_host=False)]

    def _numbered(self, source: int, target: int) -> Envelope:
        number = self.counts[source, target] = self.counts.get((source, target), 0) + 1
        return Envelope("virtual NCCL", Message(source, target, Chunk(0, 0), number), number)


@dataclass
class VirtualGloo:
    """Stands for gloo: a thread that reads and writes the host's memory."""

    below: VirtualTransport
    detector: RaceDetector

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)

    def send(self, tensor: Tensor, envelope: Envelope) -> VirtualWork:
        done, copy, _ = on_network(self.detector, HOST, tensor, None)
        assert copy is not None
        with _disable_current_modes():
            part = self.below.send(copy, envelope)
        return VirtualWork(self.detector, done, [part], None, blocks_host=True)

    def receive(self, tensor: Tensor, envelope: Envelope) -> VirtualWork:
        done, _, scratch = on_network(self.detector, HOST, None, tensor)
        assert scratch is not None
        with _disable_current_modes():
            part = self.below.receive(scratch, envelope)
        return VirtualWork(self.detector, done, [part], (tensor, scratch), blocks_host=True)


def nccl_on(below: VirtualTransport, detector: RaceDetector) -> Transport:
    permute = VirtualNccl(below, detector)
    return NcclTransport(below.rank, below.num_ranks, "tp", detector, permute)


def on_host(detector: RaceDetector) -> Callable[[Tensor], Tensor]:
    """Stands for `transport_staged.pinned`."""

    def allocate(like: Tensor) -> Tensor:
        with detector.issuing_to(HOST):
            return torch.empty_like(like)

    return allocate


def staged_on(below: VirtualTransport, detector: RaceDetector) -> Transport:
    network: Any = VirtualGloo(below, detector)
    return StagedTransport(network, detector, on_host(detector))


TRANSPORTS = {"nccl": nccl_on, "staged": staged_on}
INSTANT = Fabric(latency=1e-6, bandwidth=1e9, flops=1e9)


@dataclass
class Watched:
    """Findings of the detectors about one kernel."""

    results: list[Any]
    detectors: list[RaceDetector]

    @property
    def places(self) -> set[Place]:
        return {place for detector in self.detectors for place in detector.places}


def watch(
    num_ranks: int,
    transport: str,
    kernel: Callable[[Transport], Steps[T]],
    *,
    skipped: Place | None = None,
    stop_after: int | None = None,
) -> Watched:
    """Runs `kernel` on every rank.

    Args:
        num_ranks: Ranks on the network.
        transport: "nccl" or "staged".
        kernel: As the kernels are written: a generator over a transport.
        skipped: A place whose verb does nothing.
        stop_after: Rank 0 ends in an error at this operation, counted from 1, unless it is the
            network's own: NCCL keeps what it was given until it is waited for.

    Raises:
        RaceError: What would go wrong on GPUs.
        AbandonedError: `stop_after` was reached.
    """
    network = VirtualNetwork(num_ranks, INSTANT)
    detectors = [
        RaceDetector(
            rank,
            host_may_wait=transport == "staged",
            skipped=skipped,
            stop_after=None if rank else stop_after,
        )
        for rank in range(num_ranks)
    ]

    def watched(below: VirtualTransport) -> Steps[T]:
        detector = detectors[below.rank]
        return drive(kernel(TRANSPORTS[transport](below, detector)), detector)

    return Watched(network.run(watched), detectors)


def drive(steps: Steps[T], detector: RaceDetector) -> Steps[T]:
    """Runs a kernel under its detector, and lets the network deliver what it awaits."""
    while True:
        stopped = False
        try:
            with detector:
                handle: Any = next(steps)
        except StopIteration as done:
            detector.finish()
            value: T = done.value
            return value
        except AbandonedError:
            stopped = True
        if stopped:  # Outside of the clause above, whose traceback holds what the kernel held.
            detector.abandoned()
            raise AbandonedError
        for work in works_of(handle):
            yield from work.parts
            work.land()
        with detector:
            handle.wait()
        del handle, work


def works_of(handle: Any) -> list[VirtualWork]:
    """The virtual work under a handle of a transport."""
    while not isinstance(handle, VirtualWork):
        if hasattr(handle, "works"):
            return list(handle.works)
        handle = handle.issued if hasattr(handle, "issued") else handle.work
    return [handle]
