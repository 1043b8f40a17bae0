"""Records the operators of one run, on tensors that have a number each.

On processes each movement between them is one step, of a backend of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from shardmap_torch.backends.process_group import ProcessGroupBackend
from shardmap_torch.backends.rank import LOCAL_MOVEMENTS, RankBackend, on_one_rank
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.collectives.scope import current_scope
from shardmap_torch.core.caching import Memo
from shardmap_torch.core.modes import FunctionMode
from shardmap_torch.core.source_location import Site, call_site
from shardmap_torch.core.storage import spare
from shardmap_torch.core.torch_private.engine import (
    OpOverload,
    TorchDispatchMode,
)
from shardmap_torch.core.tree import flatten, map_leaves
from shardmap_torch.errors import TransformError

T = TypeVar("T")

Place: TypeAlias = tuple[object, ...]
"""The memory of a tensor, and its geometry there."""

_READS: Final = torch.Tag.data_dependent_output
_SIZES: Final = torch.Tag.dynamic_output_shape
RANDOM: Final = torch.Tag.nondeterministic_seeded
_RESHAPES: Final = torch.Tag.inplace_view
_INDEX: Final = torch.ops.aten.index.Tensor

_COMMUNICATING: Final = ("c10d", "_c10d_functional")

_NUMBER: Final = (
    "{}: replay=True records operators, and the body takes {} out of a tensor{}, which later calls "
    "would not do again. Compute on the tensor itself, as by torch.where or index_select, or leave "
    "replay=True out."
)
_FOREIGN: Final = (
    "{}: replay=True records operators, and the body takes a {} of shape {}{} that is no argument "
    "with a spec, and to which its code does not refer: later calls would not notice that it is "
    "another one. Pass it as an argument with a spec, or leave replay=True out."
)
_RESIZED: Final = (
    "{}: replay=True records operators, and {} makes the memory of a tensor larger{}. Make a new "
    "tensor, or leave replay=True out."
)
_MOVED: Final = (
    "{}: replay=True records operators, and gives tensors numbers, but one{} gets other memory or "
    "another shape after it was made, as by out= or torch.utils.swap_tensors. Make a new tensor, "
    "or leave replay=True out."
)
_COUNTED: Final = (
    "{}: replay=True records operators, and {} counts its offset from where the memory of an "
    "argument starts{}, and those of later calls may start elsewhere. Take a slice, or leave "
    "replay=True out."
)
_SENT: Final = (
    "{}: replay=True records operators, and the body communicates by {}{}, past the collectives of "
    "shardmap_torch. Call these, or leave replay=True out."
)


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor of a recorded run, by its number."""

    number: int


@dataclass(eq=False, slots=True)
class RecordedOp:
    """One call of a recorded run.

    Attributes:
        function: an operator of ATen, or a function that communicates.
        args: its arguments, with `Slot`s in place of tensors.
        kwargs: the same, by name.
        result: what it returned, in the same way.
        writes: whether it writes into its arguments.
        starts: whether it returns what waits for the result, which may be needed later.
        site: the user's line.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    writes: bool = False
    starts: bool = False
    site: Site | None = None

    @property
    def is_pure(self) -> bool:
        """Returns whether it does nothing but to compute its result."""
        is_torch = isinstance(self.function, OpOverload) or self.function is torch.as_strided
        return is_torch and not self.writes

    @property
    def operands(self) -> list[int]:
        """The numbers of the tensors that it takes."""
        return _numbers((self.args, self.kwargs))

    @property
    def results(self) -> list[int]:
        """The numbers of the tensors that it returns."""
        return _numbers(self.result)


def _numbers(tree: Any) -> list[int]:
    return [leaf.number for leaf in flatten(tree)[0] if type(leaf) is Slot]


class OperatorTape(TorchDispatchMode):
    """Dispatch mode that runs operators and records them.

    It keeps all tensors of the run, so that their identities, and those of their storages, are of
    one tensor each.
    """

    def __init__(self, name: str, inputs: Sequence[Tensor], captured: Sequence[Tensor]) -> None:
        """Starts with the tensors that are known; no input shares memory with another tensor.

        Args:
            name: of the function, for errors.
            inputs: those that a later run has others in place of.
            captured: those that the function's code refers to.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.tensors: list[Tensor] = []
        self.steps: list[RecordedOp] = []
        self.constants: set[int] = set()
        self.name = name
        self._numbers: dict[int, int] = {}
        self._homes: dict[int, int] = {}
        self._places: list[Place] = []
        self._fixed: set[int] = set()  # memory that holds the same in each run
        self._paused = False
        self.inputs = [self._add(x).number for x in inputs]
        self.captured = frozenset([self._add(x).number for x in captured])
        self._given = frozenset(self._homes)  # memory from outside

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        self._require_recordable(func, args, kwargs)
        if _RESHAPES in func.tags:
            return self._reshaped(func, args, kwargs)
        if func is torch.ops.aten.lift_fresh.default:
            self.constants.add(self._add(args[0]).number)  # made by Python, of numbers
            self._fixed.add(_storage(args[0]))
            func = torch.ops.aten.clone.default
        result = func(*args, **kwargs)
        if _READS not in func.tags:
            self._record(func, args, kwargs, result, _writes(func))
        return result

    def _reshaped(self, func: OpOverload, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
        """Runs an operator that makes its operand another view, and records that view."""
        x: Tensor = args[0]
        number, length = self.number(x), x.untyped_storage().nbytes()
        self.tensors[number] = x.detach()  # as it was
        func(*args, **kwargs)
        if x.untyped_storage().nbytes() > length:
            raise TransformError(_RESIZED.format(self.name, func, at()))
        del self._numbers[id(x)]
        self._slot(x)
        return x

    def opaque(
        self, function: Callable[[Tensor], Tensor], x: Tensor, later: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Runs a function whose operators are its own affair, and records `later` in its place."""
        y = self._unseen(partial(function, x))
        self._record(later, (x,), {}, y, False)
        return y

    def opaque_start(
        self,
        function: Callable[[Tensor], Callable[[], Tensor] | None],
        x: Tensor,
        later: Callable[[Tensor], Callable[[], Tensor] | None],
    ) -> Callable[[], Tensor] | None:
        """Does the same with a function that returns what waits for the result; None if it does."""
        finish = self._unseen(partial(function, x))
        if finish is None:
            return None
        step = RecordedOp(later, (self._slot(x),), {}, None, starts=True)
        self.steps.append(step)

        def finished() -> Tensor:
            y = self._unseen(finish)
            step.result = self._made(y)
            return y

        return finished

    def _unseen(self, function: Callable[[], T]) -> T:
        self._paused = True
        try:
            with spare():  # later runs name none either
                return function()
        finally:
            self._paused = False

    def number(self, x: Tensor) -> int:
        """Returns the number of a tensor."""
        return self._slot(x).number

    def require_unmoved(self) -> None:
        """Requires that each tensor lies where it lay when it was made.

        Raises:
            TransformError: one does not, so that its number may stand for another one.
        """
        for number, (x, place) in enumerate(zip(self.tensors, self._places, strict=True)):
            if _place(x) != place:
                sites = [step.site for step in self.steps if number in step.results]
                raise TransformError(_MOVED.format(self.name, at(*sites[:1])))

    def forget(self) -> None:
        """Forgets the run; graphs of its tensors have the backend, and that has this recorder."""
        self.tensors.clear()
        self.steps.clear()

    def _record(
        self, function: Any, args: Any, kwargs: Mapping[str, Any], result: Any, writes: bool
    ) -> None:
        own, named = map_leaves(self._slot_of, (args, kwargs))
        made = map_leaves(self._made, result)
        step = RecordedOp(function, own, named, made, writes, site=call_site())
        self.steps.append(step)
        self._note_fixed(step)

    def _note_fixed(self, step: RecordedOp) -> None:
        """Notes memory of which a step makes, or no longer lets, each run hold the same."""
        operands = {_storage(self.tensors[n]) for n in step.operands}
        is_random = RANDOM in getattr(step.function, "tags", ())
        is_torch = isinstance(step.function, OpOverload)
        if is_torch and not is_random and operands <= self._fixed:
            self._fixed |= {_storage(self.tensors[n]) for n in step.results}
        elif step.writes:
            self._fixed -= operands

    def _require_recordable(self, func: OpOverload, args: Any, kwargs: Mapping[str, Any]) -> None:
        if func.namespace in _COMMUNICATING:
            raise TransformError(_SENT.format(self.name, func, at()))
        if _counts_from_start(func, args, kwargs) and _storage(args[0]) in self._given:
            raise TransformError(_COUNTED.format(self.name, func, at()))
        sizes = _SIZES in func.tags and (func is not _INDEX or any(map(_is_mask, args[1])))
        tensors = [x for x in flatten(args)[0] if isinstance(x, Tensor)]
        reads = _READS in func.tags and not all([_storage(x) in self._fixed for x in tensors])
        what = "a number" if reads else "a size" if sizes else ""
        if what:
            raise TransformError(_NUMBER.format(self.name, what, at()))

    def _slot_of(self, leaf: Any) -> Any:
        return self._slot(leaf) if isinstance(leaf, Tensor) else leaf

    def _slot(self, x: Tensor) -> Slot:
        """Returns the slot of a tensor: one recorded, a view of its memory, or one from outside."""
        known = self._numbers.get(id(x))
        if known is not None:
            return Slot(known)
        home = self._homes.get(_storage(x))
        if home is None or self.tensors[home].dtype != x.dtype:
            dtype = str(x.dtype).removeprefix("torch.")
            raise TransformError(_FOREIGN.format(self.name, dtype, list(x.shape), at()))
        # Autograd has kept another object of the same tensor.
        slot, geometry = self._add(x), (tuple(x.shape), x.stride(), x.storage_offset())
        self.steps.append(RecordedOp(torch.as_strided, (Slot(home), *geometry), {}, slot))
        return slot

    def _made(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        known = self._numbers.get(id(leaf))
        return self._add(leaf) if known is None else Slot(known)

    def _add(self, x: Tensor) -> Slot:
        number = len(self.tensors)
        self.tensors.append(x)
        self._places.append(_place(x))
        self._numbers[id(x)] = number
        self._homes.setdefault(_storage(x), number)
        return Slot(number)


class Looking(FunctionMode):
    """Function mode in which `one_hot` reads no numbers: it only checks them, as `scatter` does."""

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is one_hot:
            return _one_hot(*args, **kwargs)
        return func(*args, **kwargs)


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 0:
        return one_hot(tensor, num_classes)
    zeros = torch.zeros((*tensor.shape, num_classes), dtype=torch.int64, device=tensor.device)
    return zeros.scatter(-1, tensor.unsqueeze(-1), 1)


def _writes(func: OpOverload) -> bool:
    """Returns whether an operator writes into operands; norms over batches do not declare it."""
    schema = func._schema
    return schema.is_mutable or any([arg.name == "running_mean" for arg in schema.arguments])


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def at(made: Site | None = None) -> str:
    """Formats the user's line, or the one where a tensor was made, in parentheses."""
    site = call_site() if made is None else made
    return "" if site is None else f" ({site})"


def _storage(x: Tensor) -> int:
    found: int = x.untyped_storage()._cdata
    return found


def _place(x: Tensor) -> Place:
    return _storage(x), x.shape, x.stride(), x.storage_offset(), x.is_conj(), x.is_neg()


def _counts_from_start(func: OpOverload, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Returns whether an operator is told an offset in memory, as `as_strided` may be."""
    names = [arg.name for arg in func._schema.arguments]
    if "storage_offset" not in names:
        return False
    at = names.index("storage_offset")
    return (args[at] if at < len(args) else kwargs.get("storage_offset")) is not None


_COUNTS: Final = (
    "{}: replay=True records operators, and how many rows {} sends is read from a tensor{}, which "
    "later calls would not do again. Send equally many to each rank by all_to_all, or leave "
    "replay=True out."
)


_BY_RANK: Final = frozenset({"mask", "pad"})
"""Movements within a rank that are copies on one, and zeros on another."""


@dataclass(frozen=True, eq=False)
class Sending:
    """A movement of a recorded run, on the backend of the mesh on which it runs again.

    Attributes:
        move: its name.
        collective: what it is part of.
        site: the user's line, for errors.
        waits: whether it waits for the result; else it returns what does.
        lends: whether nothing else reads the operand, so that a sum may be taken in its memory.
    """

    move: str
    collective: Collective
    site: Site | None
    waits: bool = True
    lends: bool = False

    def __call__(self, x: Tensor) -> Any:
        """Moves the data, or starts to."""
        scope: Any = current_scope()
        scope.monitor.site = self.site
        backend: ProcessGroupBackend = scope.backend
        run = backend.communicate if self.waits else backend.start
        with spare(*[x] * self.lends):
            return run(self.move, self.collective, x)


class RecordingBackend(RankBackend):
    """This process as one rank, whose run is recorded."""

    bundles: Final = True  # see `sends_bundles`

    def __init__(self, backend: ProcessGroupBackend, recorder: OperatorTape) -> None:
        super().__init__(backend.mesh, backend.rank)
        self.readings = Memo[Any]()
        self._backend, self._recorder = backend, recorder

    def run(self, move: str, collective: Collective, x: Tensor) -> Tensor:
        """Runs a movement; one whose operators differ by rank is one step, as on other ranks."""
        if move not in _BY_RANK:
            return super().run(move, collective, x)
        local = partial(LOCAL_MOVEMENTS[move], collective)
        at = self.position(collective.axes)
        return self._recorder.opaque(lambda x: local(x, *at), x, lambda x: local(x, *at))

    def communicate(self, move: str, collective: Collective, x: Tensor) -> Tensor:
        if not collective.axes or self.position(collective.axes)[1] == 1:
            return on_one_rank(move, collective, x)
        if collective.counts:
            raise TransformError(_COUNTS.format(self._recorder.name, collective, at()))
        later = Sending(move, collective, self._backend.site())
        run = partial(self._backend.communicate, move, collective)
        return self._recorder.opaque(run, x, later)

    def start_gather(self, collective: Collective, x: Tensor) -> Callable[[], Tensor] | None:
        """Starts a gather, and records its start; see `ProcessGroupBackend.start_gather`."""
        later = Sending("gather", collective, self._backend.site(), waits=False)
        start = partial(self._backend.start_gather, collective)
        return self._recorder.opaque_start(start, x, later)
