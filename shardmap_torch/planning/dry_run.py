"""Runs one rank of a checked call on tensors without data: its operations, messages and memory.

The body is the user's, called as on processes, and so are autograd, the optimizer and checkpoints:
what is alive at a time is what a run would keep alive. Only the backend differs: a collective
returns an empty tensor of the shape that the table of movements gives.
"""

import gc
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any, Final, TypeAlias
from weakref import ref

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from shardmap_torch.backends.rank import RankBackend, on_one_rank
from shardmap_torch.boundary.call import Call, run_body
from shardmap_torch.checker.api import ask_mapped, stand_ins
from shardmap_torch.checker.ir.fake_results import Key, fake_mode, forget_written, look_up, run_fake
from shardmap_torch.checker.rules.infer import draws, may_draw, name_arguments, tensors_of
from shardmap_torch.checker.verify.verdict import Verdict
from shardmap_torch.collectives.moves import MOVEMENTS
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.core.ambient import silently
from shardmap_torch.core.source_location import Site, call_site
from shardmap_torch.core.storage import covers_storage
from shardmap_torch.core.torch_private.engine import (
    DataDependentOutputException,
    OpOverload,
    UncompiledMode,
    UnsupportedOperatorException,
    current_autograd_node,
    sequence_number,
)
from shardmap_torch.core.torch_private.fake_modes import CheckMode, postponing_imports
from shardmap_torch.core.tree import flatten, map_tensors
from shardmap_torch.errors import TransformError
from shardmap_torch.kernels.transport import Transport
from shardmap_torch.mesh import Mesh
from shardmap_torch.planning.overlapped import transport_of
from shardmap_torch.run.drawing import Drawing
from shardmap_torch.run.safety.full_collections import postponing_full_collections
from shardmap_torch.spec import P

ARGUMENT: Final = "arguments"
"""Owner of the storages that the caller holds during the call."""
_Where: TypeAlias = tuple[Site | None, bool]


@dataclass(frozen=True)
class Like:
    """A tensor without its values.

    Attributes:
        shape: its shape.
        stride: its strides.
        dtype: its dtype.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> "Like":
        """Describes a tensor."""
        return cls(tuple(x.shape), tuple(x.stride()), x.dtype)


@dataclass(frozen=True)
class Operation:
    """An operator and what it is called with, or a message: enough to run it again.

    Attributes:
        run: the ATen operator; of a message the name of the movement and the collective.
        args: its arguments, with a `Like` for each tensor.
        kwargs: likewise.
    """

    run: OpOverload | tuple[str, Collective]
    args: Any
    kwargs: Any = None


@dataclass(frozen=True)
class Step:
    """One operation, or the start or end of a message, in the order of the program.

    Attributes:
        name: of the ATen operator, or the collective as printed.
        site: the user's line; in a backward that of the forward.
        backward: whether it is in a backward.
        flops: floating-point operations, by the formulas of torch's flop counter; of causal
            attention half of these, as kernels skip what the mask hides.
        traffic: bytes that it reads and writes in memory; 0 of views.
        dtype: of its result.
        axes: the axes of a collective; empty for an operator.
        sent: bytes that the rank sends.
        hops: messages that come after one another.
        number: of a message that goes on while the rank computes; None for all others.
        waits: whether this is the wait for that message.
        after: the number of steps that are done before that message begins; None for all of them.
        calls: operators since the last step, this one and views included.
        frames: Python functions called since the last step, if they are counted.
        operation: what runs it again.
    """

    name: str
    site: Site | None
    backward: bool
    flops: int = 0
    traffic: int = 0
    dtype: torch.dtype = torch.float32
    axes: tuple[str, ...] = ()
    sent: int = 0
    hops: int = 0
    number: int | None = None
    waits: bool = False
    after: int | None = None
    calls: int = 0
    frames: int = field(default=0, compare=False)
    operation: Operation | None = field(default=None, compare=False, repr=False)

    @property
    def is_attention(self) -> bool:
        """Returns whether it is fused attention."""
        return "scaled_dot_product" in self.name


@dataclass
class Block:
    """A storage, from the step that makes it to the one after which nothing refers to it.

    Attributes:
        nbytes: its size.
        owner: name of the operation that makes it, or `ARGUMENT`.
        site: the user's line.
        backward: whether a backward makes it.
        born: the number of the step that makes it.
        died: the number of steps after which it is freed; None if it outlives the call.
        is_message: whether a message arrives in it.
        is_result: whether a result of the call is in it.
    """

    nbytes: int
    owner: str
    site: Site | None
    backward: bool
    born: int
    died: int | None = None
    is_message: bool = False
    is_result: bool = False


@dataclass
class DryRun:
    """The operations, messages and storages of one rank in a call.

    Attributes:
        name: of the function.
        mesh: the mesh.
        steps: in order.
        blocks: every storage.
        results: bytes of the results.
        program: equal for runs of the same operators on the same operands up to their sizes.
        leaves: tensors that cross the boundary, arguments and results.
    """

    name: str
    mesh: Mesh
    steps: list[Step] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    results: int = 0
    program: int = 0
    leaves: int = 0

    def live(self) -> list[int]:
        """Returns the bytes alive after each step, those before the first one in front."""
        change = [0] * (len(self.steps) + 2)
        for block in self.blocks:
            change[block.born] += block.nbytes
            if block.died is not None:
                change[block.died] -= block.nbytes
        total, found = 0, []
        for each in change[:-1]:
            total += each
            found.append(total)
        return found


def dry_run(
    f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], counts: bool = False
) -> DryRun:
    """Runs the first rank of a mapped function on tensors without data, after checking it.

    Results that need a gradient are differentiated, with a cotangent for each of them. With
    `counts` it runs twice, and the second run, which finds all caches filled, counts frames.

    Raises:
        ShardTypeError: the program is not well-typed.
        TransformError: it is no mapped function, or the body asks for the value of a tensor.
    """
    call = checked(f, args, kwargs).call
    return run_dry(call, run_dry(call) is not None) if counts else run_dry(call)


@dataclass(frozen=True, eq=False)
class Dry:
    """A call for a run without data.

    Attributes:
        given: the call as the caller writes it.
        call: with every axis typed.
        verdict: what a check has found, of this call or of one like it.
        resized: whether it was one like it.
    """

    given: Call
    call: Call
    verdict: Verdict
    resized: bool

    def tells(self, other: Call) -> bool:
        """Returns whether another call differs in sizes only, as far as its arguments show.

        Not of a body that asks for its rank: it runs for the first one alone.
        """
        mine, theirs = (
            (x.match.paths, x.match.specs, x.out_specs, x.mesh.axis_names, x.mapped, x.donated)
            for x in (self.given, other)
        )
        return mine == theirs and not self.verdict.traits.asks


def checked(
    f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], alike: Dry | None = None
) -> Dry:
    """Returns a checked call for a run on tensors without data.

    It is not checked if `alike` was, a call of the same specs and other sizes; the run then departs
    where it does something else than that. Strictness "global" asks for sizes and numbers too.
    """
    with silently():
        return ask_mapped("estimate", f, partial(_checked, alike=alike), args, kwargs)


def _checked(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], alike: Dry | None
) -> Dry:
    args, kwargs = stand_ins((args, kwargs))  # once for the three calls below
    given = f._shardmap_shapes(args, kwargs)  # type: ignore[attr-defined]
    resized = alike is not None and f._shardmap_is_local and alike.tells(given)  # type: ignore[attr-defined]
    if alike is not None and resized:
        verdict, call = alike.verdict, given
    else:  # after a check, which may make arguments of tensors that the body closes over
        verdict = f._shardmap_verdict(args, kwargs)  # type: ignore[attr-defined]
        call = f._shardmap_shapes(args, kwargs)  # type: ignore[attr-defined]
    return Dry(given, f._shardmap_dry(call, verdict, resized), verdict, resized)  # type: ignore[attr-defined]


def run_dry(call: Call, counts: bool = False, compares: bool = False) -> DryRun:
    """Runs the first rank of a checked call on tensors without data.

    `counts` Python's frames; `compares` it with other runs, by `DryRun.program`.
    """
    run = DryRun(call.name, call.mesh)
    call = replace(call, takes=True)
    with (
        postponing_full_collections(),
        postponing_imports(),
        fake_mode() as fake,
        Tape(run, fake, compares) as tape,
        tape.counting() if counts else nullcontext(),
    ):
        local = [_shard(call, position) for position in call.crossing]
        tape.hold(local)
        try:
            backend = _Dry(call.mesh, tape)
            drawing = Drawing(call.mesh, backend.place, lambda: 0) if call.draws else None
            result = run_body(call, backend, local, drawing)
        except (DataDependentOutputException, UnsupportedOperatorException) as error:
            raise TransformError(
                f"{call.name}: an estimate runs without data, and the body asks for the value of a "
                f"tensor ({error.func}). Use torch.where, or keep the number out of the body."
            ) from None
        run.results = sum(each.nbytes for each in result.crossing)
        if compares:
            tape.note("results", result.crossing)
        run.leaves = len(local) + len(result.crossing)
        tape.mark_results(result.crossing)
        outs = [each for each in result.crossing if each.requires_grad]
        if outs:
            torch.autograd.backward(outs, [torch.empty_like(each) for each in outs])
    return run


def _shard(call: Call, position: int) -> Tensor:
    """Makes a rank's part of an argument, without data."""
    x, spec = call.leaves[position], call.match.spec(position)
    local = torch.empty(_local_shape(tuple(x.shape), spec, call.mesh), dtype=x.dtype)
    return local.requires_grad_(x.requires_grad)


def _local_shape(shape: tuple[int, ...], spec: P, mesh: Mesh) -> tuple[int, ...]:
    ranks = {dim: prod(mesh.shape[axis] for axis in axes) for dim, axes in spec.sharded_dims}
    return tuple(size // ranks.get(dim, 1) for dim, size in enumerate(shape))


class _Dry(RankBackend):
    """The first rank of a mesh, whose messages have no data."""

    bundles = True  # small tensors of a tree go as one message, as on processes

    def __init__(self, mesh: Mesh, tape: "Tape") -> None:
        super().__init__(mesh, 0)
        self._tape = tape

    def communicate(self, move: str, collective: Collective, x: Tensor) -> Tensor:
        num_ranks = self.position(collective.axes)[1]
        if num_ranks == 1:
            return on_one_rank(move, collective, x)
        shape = MOVEMENTS[move].shape(collective, tuple(x.shape), num_ranks)
        return self._tape.message(move, collective, x, shape, num_ranks)

    def start_gather(self, collective: Collective, x: Tensor) -> Callable[[], Tensor] | None:
        num_ranks = self.position(collective.axes)[1]
        if num_ranks == 1:
            return None
        number = len(self._tape.run.steps)
        shape = MOVEMENTS[collective.move].shape(collective, tuple(x.shape), num_ranks)
        y = self._tape.message(collective.move, collective, x, shape, num_ranks, number)
        return partial(self._finish, collective, number, [y])

    def rank_along(self, axes: tuple[str, ...]) -> int | None:
        """Returns the position of the first rank, and notes that the body asks for its own."""
        self._tape.note(axes, ())
        return super().rank_along(axes)

    def transport(self, axes: tuple[str, ...]) -> Transport:
        """Returns what overlapped kernels send on: messages of their own, beside their matmuls."""
        return transport_of(self._tape, axes, self.position(axes)[1])

    def _finish(self, collective: Collective, number: int, result: list[Tensor]) -> Tensor:
        self._tape.step(f"wait for {collective}", axes=collective.axes, number=number, waits=True)
        return result.pop()


class Tape(UncompiledMode):
    """Dispatch mode that records the operations of a run, and the storages that they make."""

    def __init__(self, run: DryRun, fake: CheckMode | None = None, compares: bool = False) -> None:
        """Starts without steps; `fake` is the mode of tensors without data."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._compares = compares
        self.run, self._fake = run, fake
        self._costs: dict[Key, _Cost] = {}
        self._known: dict[int, tuple[ref[torch.UntypedStorage], Block]] = {}
        self._sites: dict[int, Site | None] = {}
        self._calls = self._frames = self._noted = 0
        self._inside = False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE and self._fake is not None:  # autograd asks more often than it computes
            return args[0].fake_device
        self._calls += 1
        inside, self._inside, num_modules = self._inside, True, len(sys.modules)
        try:
            return self._record(func, args, kwargs or {})
        finally:
            self._inside = inside
            if len(sys.modules) != num_modules:
                # `torch.fx.wrap`, as modules of torch call it, leaves a cycle that has its frame:
                # with that those of the body, and their tensors.
                gc.collect(0)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts the Python functions that are called here, but for those of a run without data."""

        def count(frame: Any, event: str, argument: Any) -> None:
            if event == "call" and not self._inside:
                self._frames += _is_counted(frame.f_code.co_filename)

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _record(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        out, cost = self._run(func, args, kwargs)
        if self._compares:
            given = [x for x in flatten((args, kwargs))[0] if isinstance(x, Tensor)]
            fills = [covers_storage(x, x.untyped_storage()) for x in given if cost.writes]
            self.note((func, cost.choices, *fills), [*tensors_of(out)], given)
        where, node = self._where(), sequence_number() - 1
        if node not in self._sites:
            self._sites[node] = call_site() if where[1] else where[0]
        made = self._blocks([*tensors_of(out)], cost.name, where)
        if (made and not cost.is_free) or cost.writes:
            self.step(
                cost.name, where, flops=cost.flops, traffic=cost.traffic, dtype=cost.dtype,
                operation=cost.operation,
            )  # fmt: skip
        return out

    def _run(self, func: OpOverload, args: Any, kwargs: Any) -> tuple[Any, "_Cost"]:
        """Runs an operation, or repeats what is known of an equal one, as layers have many."""
        fake = self._fake
        call = None if fake is None else look_up(fake, func, args, kwargs)
        if fake is None:
            out = func(*args, **kwargs)
        else:
            out = run_fake(fake, call, func, args, kwargs)
            forget_written(func, args, kwargs)
        if call is None:
            return out, _Cost.of(func, args, kwargs, out)
        cost = self._costs.get(call.key)
        if cost is None:
            cost = self._costs[call.key] = _Cost.of(func, args, kwargs, out)
        return out, cost

    def hold(self, arguments: Sequence[Tensor]) -> None:
        """Records what the caller has, and the call cannot free."""
        self.run.steps.clear()
        self._calls = self._frames = self.run.program = 0
        for at, x in enumerate(arguments if self._compares else ()):
            x._shardmap_number = (-1, at)  # type: ignore[attr-defined]
        self._blocks(arguments, ARGUMENT, (None, False))
        for block in self.run.blocks:
            block.owner, block.site, block.born = ARGUMENT, None, 0

    def note(self, what: object, made: Sequence[Tensor], operands: Sequence[Tensor] = ()) -> None:
        """Notes an operator in `DryRun.program`: its line, its operands, and what it makes."""
        read = [(_number(x), _kind(x)) for x in operands]
        known, kinds = [_number(x) for x in made], [*map(_kind, made)]
        here = what, call_site(), torch.is_grad_enabled()
        self.run.program = hash((self.run.program, *here, *read, None, *known, *kinds))
        for at, x in enumerate(made):
            if known[at] is None:
                x._shardmap_number = (self._noted, at)  # type: ignore[attr-defined]
        self._noted += 1

    def mark_results(self, results: Sequence[Tensor]) -> None:
        """Marks the storages that results are in."""
        for x in results:
            self._known[x.untyped_storage()._cdata][1].is_result = True

    def message(
        self,
        move: str,
        collective: Collective,
        x: Tensor,
        shape: Sequence[int],
        num_ranks: int,
        number: int | None = None,
    ) -> Tensor:
        """Records a collective; with a number it goes on while the rank computes."""
        y, row = x.new_empty(shape), collective.row
        self.run.blocks[-1].is_message = True
        sent = round(row.sent_by(num_ranks) * x.nbytes)
        self.send(move, collective, x, sent=sent, hops=_HOPS[row.sent](num_ranks), number=number)
        return y

    def send(self, move: str, collective: Collective, x: Tensor, **what: Any) -> None:
        operation = Operation((move, collective), (Like.of(x),))
        what |= {"axes": collective.axes, "dtype": x.dtype, "operation": operation}
        self.step(str(collective), **what)

    def step(self, name: str, where: _Where | None = None, **what: Any) -> None:
        """Records a step, with the user's line."""
        what |= {"calls": self._calls, "frames": self._frames}
        self.run.steps.append(Step(name, *(where or self._where()), **what))
        self._calls = self._frames = 0

    def _where(self) -> _Where:
        """Returns the user's line, in a backward that of the forward, and whether it is in one."""
        node = current_autograd_node()
        return (
            (call_site(), False) if node is None else (self._sites.get(node._sequence_nr()), True)
        )

    def _blocks(self, tensors: Sequence[Tensor], name: str, where: _Where) -> int:
        """Records the storages that are new; returns their number."""
        before = len(self.run.blocks)
        for x in tensors:
            storage = x.untyped_storage()
            key = storage._cdata
            if key in self._known:
                continue
            block = Block(storage.nbytes(), name, *where, len(self.run.steps) + 1)
            self.run.blocks.append(block)
            self._known[key] = ref(storage, partial(self._freed, key, block)), block
        return len(self.run.blocks) - before

    def _freed(self, key: int, block: Block, _: object) -> None:
        self._known.pop(key, None)
        block.died = len(self.run.steps) + 1


def _number(x: Tensor) -> tuple[int, int] | None:
    """Returns the number of the operator that made a tensor, and the position among its results."""
    return vars(x).get("_shardmap_number")


def _kind(x: Tensor) -> tuple[Any, ...]:
    """Returns what types depend on beside values: the dtype, and which dims have one item."""
    return x.dtype, x.requires_grad, *[size == 1 for size in x.shape]


def _choices(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the arguments of an operator that are no tensors, sizes or numbers: dims, dtypes.

    Of numbers it is whether the operator draws, as dropout does at no probability of 0.
    """
    given: list[Any] = [(at, each) for at, each in enumerate(args) if at in _chosen(func)]
    given += [(name, each) for name, each in kwargs.items() if name in _chosen(func)]
    return repr(given), may_draw(func) and draws(func, name_arguments(func, args, kwargs))


@cache
def _chosen(func: OpOverload) -> frozenset[int | str]:
    """Returns positions and names of the arguments of an operator that choose what it does."""
    chosen = [
        (at, each.name)
        for at, each in enumerate(func._schema.arguments)
        if not _SIZES & {*_WORDS.findall(each.real_type.str())}  # type: ignore[attr-defined]
    ]
    return frozenset(key for keys in chosen for key in keys)


_SIZES: Final = {"SymInt", "Tensor", "number", "Scalar", "float"}
_WORDS: Final = re.compile(r"\w+")

_DEVICE: Final = torch.ops.prim.device.default

_WITHOUT_DATA: Final = ("_compile.py", "_dynamo", "compiler", "_library", "_subclasses")
"""Parts of torch whose functions, by far most of them, only a run without data calls."""


@cache
def _is_counted(file: str) -> bool:
    """Returns whether a run, too, calls the functions of a file."""
    parts = Path(file).relative_to(_TORCH).parts if file.startswith(_TORCH) else ()
    return file != __file__ and (not parts or parts[0] not in _WITHOUT_DATA)


_TORCH: Final = str(Path(torch.__file__).parent)

_HOPS: Final[Mapping[str, Callable[[int], int]]] = {
    "0": lambda n: 0,
    "1": lambda n: 1,
    "n-1": lambda n: n - 1,
    "(n-1)/n": lambda n: n - 1,
    "2(n-1)/n": lambda n: 2 * (n - 1),
}
"""Messages one after the other, of rings, by what a row of the table sends."""


@dataclass(frozen=True, slots=True)
class _Cost:
    """Costs of an operation, which follow from the shapes, strides and dtypes in its call."""

    name: str
    flops: int
    traffic: int
    dtype: torch.dtype
    is_free: bool
    writes: bool
    choices: Any
    operation: Operation

    @classmethod
    def of(cls, func: OpOverload, args: Any, kwargs: Any, out: Any) -> "_Cost":
        """Counts those of one call."""
        results = [*tensors_of(out)]
        operands = [x for x in flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        name = func._schema.name.removeprefix("aten::")
        return cls(
            name,
            _flops(func, args, kwargs, out),
            sum(map(_nbytes, [*operands, *results])),
            results[0].dtype if results else torch.float32,
            is_free="empty" in name,
            writes=func._schema.is_mutable,
            choices=_choices(func, args, kwargs),
            operation=Operation(func, map_tensors(Like.of, args), map_tensors(Like.of, kwargs)),
        )


def _nbytes(x: Tensor) -> int:
    """Counts the bytes of a tensor that are in memory: those of an expanded one only once."""
    sizes = [size for size, step in zip(x.shape, x.stride(), strict=True) if step]
    return prod(sizes) * x.itemsize if x.numel() else 0


_ATTENTION: Final[Mapping[str, Callable[..., int]]] = {
    "_scaled_dot_product_flash_attention_for_cpu": lambda q, k, v, *_, **__: sdpa_flop_count(
        q.shape, k.shape, v.shape
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda g, q, k, v, *_, **__: (
        sdpa_backward_flop_count(g.shape, q.shape, k.shape, v.shape)
    ),
}
"""Formulas of operators that torch's table lacks."""


def _flops(func: OpOverload, args: Any, kwargs: Any, out: Any) -> int:
    packet = func._overloadpacket
    formula = flop_registry.get(packet) or _ATTENTION.get(packet.__name__)
    if formula is None:
        return 0
    count = int(formula(*args, **kwargs, out_val=out))
    return count // 2 if name_arguments(func, args, kwargs).get("is_causal") else count
