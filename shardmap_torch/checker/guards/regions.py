"""Regions that are interpreted once: equal calls of `checkpoint`, as those of layers are.

A region is two functions of tensors that leave no graph behind: its first run, and its pull-back.
Each is known by what its function is and refers to, as verdicts are (`state`), by the metadata,
types and common memory of its operands, and by the modes that are on. An equal one gets equations,
steps and results like those of the first. Nothing is remembered of a run that did more than make
them: that wrote into an operand, read a tensor that is none, changed what Python code refers to,
drew numbers, took a branch, or called code of a library, whose state nobody sees.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from shardmap_torch.checker.guards.monitor import CheckedStep, StepMonitor
from shardmap_torch.checker.guards.state import State
from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.ir.fake_results import (
    PLACE,
    SEEN,
    Made,
    empty,
    look_at,
    make_one,
    number_of,
)
from shardmap_torch.checker.ir.observer import UNOBSERVED
from shardmap_torch.checker.ir.own_functions import has_saving_hooks
from shardmap_torch.checker.ir.program import Equation, StorageType, Use, is_constant
from shardmap_torch.checker.ir.repairs import NONE
from shardmap_torch.collectives.protocol import Monitor, Readings
from shardmap_torch.core.autocasting import autocast_state
from shardmap_torch.core.autograd_state import NONE as NO_BACKWARD
from shardmap_torch.core.autograd_state import running_backward
from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.source_location import call_sites
from shardmap_torch.core.torch_private.engine import (
    DisableTorchFunction,
    FakeTensor,
    FakeTensorMode,
    dispatch_mode_stack,
    forward_level,
    function_mode_stack,
    functorch,
    temporarily_clear_interpreter_stack,
)

_OWN: Final = ("torch.", "shardmap_torch.")
"""Modules whose modes are on in each check, and count nothing themselves."""

TOKENS: Final = "_shardmap_tokens"
NUMBER: Final = "_shardmap_number"
_MARKS: Final = (SEEN, PLACE, TOKENS, NUMBER)
"""Attributes of tensors that the key has, or that do not count."""


class _Result(NamedTuple):
    """One result, as tensors that are equal but for their memory and values have it.

    Attributes:
        made: its metadata, or the position of an operand that it is. What it counts as `operand`
            are the operands, and after them the new memory.
        level: of the differentiation that wraps it; 0 of none.
        tokens: those that it descends from.
        number: that of the value.
    """

    made: Made | int
    level: int = 0
    tokens: frozenset[Any] | None = None
    number: Any = None


class Results(NamedTuple):
    """The results of a run, and the addresses, bytes and devices of the new memory they are in."""

    items: Sequence[_Result | None]
    memory: Sequence[tuple[int, int, torch.device]]

    @classmethod
    def of(
        cls, mode: FakeTensorMode, operands: Sequence[Tensor], results: Sequence[Tensor | None]
    ) -> "Results | None":
        """Describes results; None if no other ones can be made like them."""
        items, memory = list[_Result | None](), list[tuple[int, int, torch.device]]()
        own: list[Any] = [*map(base_of, operands)]
        positions = {id(x): at for at, x in enumerate(operands)}
        places = {x.untyped_storage()._cdata: at for at, x in enumerate(own)}
        for x in results:
            if x is None or id(x) in positions:
                items.append(None if x is None else _Result(positions[id(x)]))
                continue
            base: Any = base_of(x)
            seen = look_at(mode, base) if type(base) is FakeTensor else None
            if seen is None or base.requires_grad or not _is_plain(x):
                return None
            if seen[2] not in places:
                places[seen[2]] = len(own) + len(memory)
                memory.append((seen[2], base.untyped_storage().nbytes(), base.fake_device))
            at, offset = places[seen[2]], int(base.storage_offset())
            if at < len(own):
                offset -= int(own[at].storage_offset())
                if own[at].dtype != base.dtype:
                    return None
            metadata = tuple(base.shape), base.stride(), base.dtype, base.fake_device
            item = Made(number_of(*metadata), *metadata, at, offset)
            items.append(_Result(item, _level(x), vars(base).get(TOKENS), _number(x)))
        return cls(items, memory)

    def make(
        self, mode: FakeTensorMode, operands: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], list[Any]]:
        """Makes results like these, and tensors that are the new memory."""
        with temporarily_clear_interpreter_stack():
            new = [empty(mode, (size,), torch.uint8, device) for _, size, device in self.memory]
            bases: list[Any] = [*map(base_of, operands), *new]
            made: list[Any] = []
            for item in self.items:
                if item is None:
                    made.append(None)
                elif isinstance(item.made, int):
                    made.append(operands[item.made])
                else:
                    made.append(make_one(mode, item.made, bases))
                    if item.tokens is not None:
                        vars(made[-1])[TOKENS] = item.tokens
        # Without a graph, which only a transform around this one would need.
        levels = [0 if item is None else item.level for item in self.items]
        pairs = zip(made, levels, strict=True)
        return [functorch._wrap_for_grad(x, at) if at else x for x, at in pairs], new


NOTHING: Final = Results((), ())


@dataclass
class _Run:
    """One run of a region: what there was before, and all that it has made.

    Attributes:
        state: what its function refers to.
        monitor: notes what it does on the mesh.
        step: the one before.
        operands: types of the operands' memory.
        numbers: numbers of the operands.
        facts: what it may not change to be remembered.
        storages: ids of the types that there were.
        forward: the equation whose backward runs.
        start: numbers of values and equations that there were.
        count: the number of values that it has made.
        equations: those of it, in order.
        made: the types of memory that it has made.
        steps: what it did on the mesh.
        results: its results.
        memory: types of the new memory that these are in.
        frozen: of each operand, why it is read-only at the end.
        out: what the region keeps of its results.
    """

    state: State
    monitor: StepMonitor
    step: CheckedStep
    operands: Sequence[StorageType]
    numbers: Sequence[int | None]
    facts: Hashable
    storages: frozenset[int]
    forward: Equation | None
    start: tuple[int, int]
    count: int = 0
    equations: Sequence[Equation] = ()
    made: Sequence[StorageType] = ()
    steps: Sequence[CheckedStep] = ()
    results: Results = NOTHING
    memory: Sequence[StorageType] = ()
    frozen: Sequence[str | None] = ()
    out: Any = None


class Regions:
    """The regions of one interpretation."""

    def __init__(self, interpreter: Interpreter, readings: Readings, nested: Sequence[Any]) -> None:
        """Starts without; `nested` grows with the boundaries of functions mapped in the body."""
        self._interpreter, self._readings, self._nested = interpreter, readings, nested
        self._known: dict[Hashable, _Run] = {}

    def recall(
        self,
        region: Any,
        kind: tuple[bool, ...],
        monitor: Monitor | None,
        operands: Sequence[Tensor | None],
        run: Callable[[], Sequence[Tensor | None]],
    ) -> Sequence[Tensor | None]:
        """Runs a part of a region, or repeats what is known of an equal one.

        `kind` is empty for the first run, and what is needed of a pull-back.
        """
        if not isinstance(monitor, StepMonitor):
            return run()
        given, started = [x for x in operands if x is not None], None
        with DisableTorchFunction():  # it asks, and not the body
            key = self._key(region, kind, operands)
            known = None if key is None else self._known.get(key)
            if known is not None:
                found = self.repeat(known, region, monitor, given)
                if kind:
                    monitor.end()
                return found
            if key is not None:
                started = self._start(region, monitor, given)
        results = run()
        with DisableTorchFunction():
            if started is not None and self._finish(started, region, kind, given, results):
                self._known[key] = started
        return results

    # ------------------------------------------------------------------------------ the key

    def _key(
        self, region: Any, kind: tuple[bool, ...], operands: Sequence[Tensor | None]
    ) -> Hashable | None:
        """Returns all that a run depends on; None where more may count."""
        interpreter = self._interpreter
        depth = functorch.get_dynamic_layer_stack_depth()
        is_plain = interpreter.observer is UNOBSERVED and interpreter.repair is NONE
        more = interpreter.is_special, interpreter.traits.draws, interpreter.unversioned
        if not is_plain or any(more) or interpreter.numbers.differ_by_rank or depth > 1:
            return None
        own = interpreter.applies, interpreter.ending_levels, (*interpreter.running,), depth
        return key_of(region, operands, self._tensor, kind, own)

    def _tensor(self, x: Tensor) -> Hashable:
        """Returns all that counts of an operand by itself; None where more may count."""
        base, interpreter = base_of(x), self._interpreter
        seen = look_at(interpreter.fake, base) if type(base) is FakeTensor else None
        known = None if seen is None else interpreter.types_by_storage.get(seen[2])
        fields = base.__dict__
        is_marked = any(n.startswith("_shardmap") and n not in _MARKS for n in fields)
        if seen is None or known is None or is_marked or not _is_plain(x):
            return None
        return (
            *(seen[1], _level(x), x.requires_grad, base.requires_grad, known.types, known.tokens),
            *(known.written, fields.get(TOKENS), interpreter.tokens_of((base,), (known,))),
            *(known.tasks, known.batched_over, base.numel() == 1 and is_constant(known)),
            *(known.read_only is None, known.leaf is None, _number(x) is None),
        )

    # --------------------------------------------------------------------------- remembered

    def _facts(self, operands: Sequence[Tensor]) -> Hashable:
        """Returns what a run may not change to be remembered, writes into operands among it."""
        interpreter, readings = self._interpreter, self._readings
        numbers, traits = interpreter.numbers, interpreter.traits
        kept = (
            *(interpreter.asserted, interpreter.results_of, interpreter.unversioned),
            *(interpreter.closures, traits.closed_over, numbers.sites, numbers.branches.taken),
            *(readings.results, readings.cast, self._nested),
        )
        flags = numbers.any, numbers.differ_by_rank, interpreter.copies.are_stale, traits.draws
        rest = interpreter.num_tasks, autocast_state(), torch.get_default_dtype()
        types = [interpreter.storage_type(base_of(x)) for x in operands]
        written = [(t.types, id(t.made), t.tokens, t.written, t.tasks) for t in types]
        versions = [base_of(x)._version for x in operands]
        return (*map(len, kept), *flags, *rest, *written, *versions)

    def _start(self, region: Any, monitor: StepMonitor, operands: Sequence[Tensor]) -> _Run:
        interpreter = self._interpreter
        assert region.state is not None
        return _Run(
            region.state, monitor, monitor.at,
            [interpreter.storage_type(base_of(x)) for x in operands], [*map(_number, operands)],
            self._facts(operands), frozenset(map(id, interpreter.types_by_storage.values())),
            interpreter.forward_of_current_node(), (interpreter.count, len(interpreter.equations)),
        )  # fmt: skip

    def _finish(
        self,
        run: _Run,
        region: Any,
        kind: tuple[bool, ...],
        operands: Sequence[Tensor],
        results: Sequence[Tensor | None],
    ) -> bool:
        """Notes what a run has made; returns whether that is all that it has done."""
        interpreter = self._interpreter
        if not run.state.holds() or self._facts(operands) != run.facts:
            return False
        run.equations = interpreter.equations[run.start[1] :]
        run.count = interpreter.count - run.start[0]
        run.frozen = [each.read_only for each in run.operands]
        run.out = region.out
        made, steps = _made(run), _steps(run.step, None if kind else run.monitor.at)
        found = Results.of(interpreter.fake, operands, results)
        if made is None or steps is None or found is None or not run.equations:
            return False
        if interpreter.copies.may_share([x for x in results if x is not None], operands):
            return False
        run.made, run.steps, run.results = made, steps, found
        run.memory = [interpreter.types_by_storage[address] for address, *_ in found.memory]
        return run.storages.isdisjoint(map(id, run.memory))

    # ----------------------------------------------------------------------------- repeated

    def repeat(
        self, known: _Run, region: Any, monitor: StepMonitor, operands: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Does what an equal region did."""
        interpreter = self._interpreter
        storage_types = [interpreter.storage_type(base_of(x)) for x in operands]
        types = dict(zip(map(id, known.operands), storage_types, strict=True))
        for storage_type, why in zip(storage_types, known.frozen, strict=True):
            storage_type.read_only = storage_type.read_only or why
        results, memory = known.results.make(interpreter.fake, operands)
        for old, base in zip(known.memory, memory, strict=True):
            storage = base.untyped_storage()
            types[id(old)] = interpreter.types_by_storage[storage._cdata] = _like(old, storage)
        for old in known.made:
            types.setdefault(id(old), _like(old, old.storage))
        numbers = dict(zip(known.numbers, map(_number, operands), strict=True))
        first, shift = known.start[0], interpreter.count - known.start[0]

        def number(old: int | None) -> int | None:
            return old + shift if old is not None and old > first else numbers.get(old)

        def uses(old: Sequence[Use]) -> tuple[Use, ...]:
            return tuple([
                Use(u.name, types.get(id(u.storage_type), u.storage_type), u.types, u.dtype,
                    u.shape, number(u.number))
                for u in old
            ])  # fmt: skip

        equations = {id(known.forward): interpreter.forward_of_current_node()}
        for each in known.equations:
            forward = None if each.forward is None else equations[id(each.forward)]
            equations[id(each)] = new = Equation(
                each.name, uses(each.operands), uses(each.results), each.site, each.backward,
                each.collective, each.sent, each.literals, forward, each.spot, each.written,
            )  # fmt: skip
            interpreter.add(new)
        for old in known.made:
            types[id(old)].made = equations.get(id(old.made), old.made)
        interpreter.count += known.count
        monitor.repeat(known.steps)
        region.out = known.out
        for x, item in zip(results, known.results.items, strict=True):
            if x is not None and item is not None and isinstance(item.made, Made):
                vars(base_of(x))[NUMBER] = number(item.number)
        return results


def key_of(
    region: Any,
    operands: Sequence[Tensor | None],
    describe: Callable[[Tensor], Hashable],
    *own: Hashable,
) -> Hashable | None:
    """Returns what a region is and what it is called with; None where more may count.

    `describe` does so for an operand, by itself.
    """
    modes = [*dispatch_mode_stack(), *function_mode_stack()]
    is_foreign = not all(type(mode).__module__.startswith(_OWN) for mode in modes)
    if is_foreign or forward_level() >= 0 or torch.is_inference_mode_enabled():
        return None
    if region.state is None:
        function, *rest = region.parts
        region.state, region.sites = State(function, (*rest, *region.leaves)), call_sites()
    tensors = [None if x is None else describe(x) for x in operands]
    is_known = all(x is None or each is not None for x, each in zip(operands, tensors, strict=True))
    if has_saving_hooks() or not (is_known and region.state.is_fixed):
        return None
    places: dict[Hashable, int] = {}
    shared = [places.setdefault(each, len(places)) for x in operands for each in _ids(x)]
    offsets = [_offset(x, places) for x in operands]
    settings = torch.is_grad_enabled(), torch.get_default_dtype(), autocast_state(), len(modes)
    code = region.state.found, region.structure, region.sites
    return *code, settings, running_backward() != NO_BACKWARD, own, (*tensors, *shared, *offsets)


def _ids(x: Tensor | None) -> Sequence[Hashable]:
    """Returns what tells an operand, its value and its memory from others."""
    if x is None:
        return ()
    base = base_of(x)
    return ("", id(x)), ("base", id(base)), ("number", _number(x)), base.untyped_storage()._cdata


def _offset(x: Tensor | None, first: dict[Hashable, int]) -> int | None:
    """Returns where an operand begins, after the first operand that has the same memory."""
    if x is None:
        return None
    base = base_of(x)
    at = int(base.storage_offset())
    return at - first.setdefault(("offset", base.untyped_storage()._cdata), at)


def _number(x: Tensor) -> int | None:
    return vars(base_of(x)).get(NUMBER)


def _level(x: Tensor) -> int:
    return int(functorch.maybe_get_level(x)) if functorch.is_functorch_wrapped_tensor(x) else 0


def _is_plain(x: Tensor) -> bool:
    """Returns whether a tensor is under no transform but the one differentiation that is open."""
    if not functorch.is_functorch_wrapped_tensor(x):
        return True
    is_one = not functorch.is_functorch_wrapped_tensor(functorch.get_unwrapped(x))
    return (
        is_one
        and functorch.is_gradtrackingtensor(x)
        and _level(x) == functorch.get_dynamic_layer_stack_depth()
    )


def _made(run: _Run) -> list[StorageType] | None:
    """Lists the types of memory that a run has made; None if it read other than its operands."""
    operands, found = {*map(id, run.operands)}, dict[int, StorageType]()
    forwards = {id(None), id(run.forward), *map(id, run.equations)}
    for equation in run.equations:
        if id(equation.forward) not in forwards:
            return None
        for use in (*equation.operands, *equation.results):
            key, number = id(use.storage_type), use.number
            is_new = number is None or number > run.start[0] or number in run.numbers
            if key in operands and is_new:
                continue
            if key in run.storages or not is_new:
                return None
            found[key] = use.storage_type
    return [*found.values()]


def _steps(before: CheckedStep, last: CheckedStep | None) -> list[CheckedStep] | None:
    """Lists the steps after one, to the last; None where there are several ways to go on."""
    found = []
    while before is not last and before.next:
        if len(before.next) > 1:
            return None
        (before,) = before.next
        found.append(before)
    is_one = last in (None, before) and not any(step.last for step in found[:-1])
    return found if is_one else None


def _like(old: StorageType, storage: torch.UntypedStorage) -> StorageType:
    return StorageType(
        old.types, old.made, old.label, storage, old.read_only, old.leaf, old.tasks, old.tokens,
        old.written, old.batched_over, old.numbers,
    )  # fmt: skip
