"""Interpreter: types every ATen operation of a body, run on fake tensors."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import Node

from shardmap_torch.checker.ir.fake_results import address_of, fake_mode, metadata_of, number_of
from shardmap_torch.checker.ir.observer import UNOBSERVED, Observer
from shardmap_torch.checker.ir.paths import Branches, Numbers
from shardmap_torch.checker.ir.program import (
    CLOSED_OVER,
    Asserted,
    Equation,
    StorageType,
    Traits,
    Use,
    varying,
)
from shardmap_torch.checker.ir.repairs import Insert, Repair
from shardmap_torch.checker.rewrites.copies import Copies
from shardmap_torch.checker.rules.infer import Types, is_real, tensors_of
from shardmap_torch.control.start import current
from shardmap_torch.core.ambient import ThreadStack
from shardmap_torch.core.autograd_state import NONE as NO_BACKWARD
from shardmap_torch.core.autograd_state import running_backward
from shardmap_torch.core.closures import name_in
from shardmap_torch.core.functorch import Token, base_of
from shardmap_torch.core.hashing import values_of
from shardmap_torch.core.source_location import Site, call_site, site_within
from shardmap_torch.core.torch_private.engine import (
    DisableTorchFunction,
    FakeTensor,
    current_autograd_node,
    disable_current_modes,
    functorch,
    run_engine,
    sequence_number,
)
from shardmap_torch.core.torch_private.fake_modes import CheckMode
from shardmap_torch.errors import ShardTypeError, TransformError
from shardmap_torch.mesh import Mesh
from shardmap_torch.types import AxisType, I, K, R

if TYPE_CHECKING:  # for annotations; it takes a second to import
    from torch.fx.experimental.symbolic_shapes import ShapeEnv


def closed_over_outer(name: str, does: str, tensor: str | None = None) -> TransformError:
    """Makes the error of closing over a tensor of a transform around the call."""
    site = call_site()
    at = "" if site is None else f", at {site}"
    return TransformError(
        f"{name}: the body closes over {tensor or 'a tensor'}, which a torch.func transform "
        f"outside {does}{at}. Pass it as an argument, with a spec of its own."
    )


def used_after_check(does: str) -> ShardTypeError:
    """Makes the error of a fake tensor that is used after its check has ended."""
    return ShardTypeError(
        f"{does} a tensor that has no data: it was kept when the body was checked, as in a cache "
        "that is filled in it.\n"
        "Fix: compute it in each call, without functools.cache or what else keeps it; only where "
        "all ranks have the same, before the first call."
    )


class Setting:
    """Context in which attributes of an object have other values.

    Example:
        >>> from types import SimpleNamespace
        >>> state = SimpleNamespace(is_paused=False)
        >>> with Setting(state, is_paused=True):
        ...     state.is_paused
        True
        >>> state.is_paused
        False
    """

    __slots__ = ("_owner", "_values")

    def __init__(self, owner: object, **values: Any) -> None:
        self._owner, self._values = owner, values

    def __enter__(self) -> None:
        for name, value in self._values.items():
            self._values[name] = getattr(self._owner, name)
            setattr(self._owner, name, value)

    def __exit__(self, *_: object) -> None:
        self.__enter__()  # swaps back


class TypeStore:
    """The types of all tensors of one interpretation, which views of one storage share.

    Attributes:
        is_paused: whether the code that runs now is not the body's.
        applies: whether a Function is applied under torch.func transforms. Its forward runs below
            them all, with grad mode off. Other code that transforms call, such as the Function's
            `vmap`, runs in the mode that was on outside of the first of them; where that was off,
            the two cannot be told apart, and this is False.
        ending_levels: those of transforms that take their gradients, and do not differentiate the
            backwards by which they do.
        running: the backwards that the checker has started, and that run.
        asks_nodes: whether the body has had nodes of autograd, on which hooks may be registered.
        has_hooks: whether it has registered hooks on tensors.
        hooked: the tensors on which it has, as long as the check runs.
        own: by their nodes, contexts in which the user's own backwards run.
        seeing: makes a context in which functions of torch are seen, also in a backward.
        unversioned: storages of which the body has `.data`: writes that autograd does not see.
        switches: in code that a checkpoint runs for the first time, and no gradients are recorded,
            what gradients have been switched to in it; else None.
    """

    def __init__(self, name: str, axes: Sequence[str], fake: CheckMode) -> None:
        """Starts without tensors; `name` is that of the body in errors."""
        self.name, self.axes, self.fake = name, axes, fake
        self.observer: Observer = UNOBSERVED
        self.body: Callable[..., Any] | None = None
        self.closures: dict[int, Tensor] = {}
        self.traits = Traits()
        self.copies = Copies()
        self.types_by_storage: dict[int, StorageType] = {}
        self._numbers: dict[int, tuple[Types, int, int]] = {}
        self.is_paused = False
        self.applies = False
        self.ending_levels: frozenset[int] = frozenset()
        self._differentiated: set[int] = set()
        self._by_level: dict[int, Token] = {}
        self.running: list[int] = []
        self.unversioned: set[int] = set()
        self.switches: tuple[bool, ...] | None = None
        # State of the user's own code that autograd runs; see `user_code`.
        self.keeps_values = False
        self.values: dict[tuple[Node, int], Tensor] = {}
        self.watched: set[Node] = set()
        self.asks_nodes = self.has_hooks = False
        self.hooked: list[Tensor] = []
        self.own: dict[Node, ExitStack] = {}
        self.seeing: Callable[[], AbstractContextManager[object]] = nullcontext
        self.regions: list[range] = []
        self.is_apart = False  # in the code of a region
        self._num_tasks = 0

    def forget_nodes(self) -> None:
        """Drops what has a graph of autograd's, at the end: contexts and hooks in it have this.

        Python's collector does not see through the graph, which would stay alive.
        """
        self.values.clear()
        self.watched.clear()
        self.hooked.clear()
        self.own.clear()
        self.seeing = nullcontext
        self.copies.forget_tensors()

    def end(self) -> None:
        """Unties what refers to each other, when all is verified: it is freed without a collector.

        That would go through the equations of a check in the next one.
        """
        self.observer.end()
        self.observer = UNOBSERVED
        for storage_type in self.types_by_storage.values():
            storage_type.made = None

    @property
    def may_be_addends(self) -> bool:
        """Returns whether the user's own code may have made gradients, equal addends among them."""
        return bool(self.watched) or self.has_hooks

    def paused(self) -> Setting:
        """Ignores operations in this context: they are not the body's."""
        return Setting(self, is_paused=True)

    def numbers_of(self, types: Types) -> tuple[Types, int, int]:
        """Returns the types, a number for them, and one for them with K in place of I and R."""
        known = self._numbers.get(id(types))
        if known is None:
            free = tuple(K if each in (I, R) else each for each in types)
            # Kept with what it is known by, so that no other tuple gets its address.
            known = self._numbers[id(types)] = types, number_of(types), number_of(free)
        return known

    def bring(
        self, tensor: Tensor, types: Types, label: str, read_only: str | None = None
    ) -> StorageType:
        """Types a tensor from outside of the body."""
        storage = base_of(tensor).untyped_storage()
        storage_type = StorageType(
            types, None, label, storage, read_only, batched_over=varying(types)
        )
        self.types_by_storage[storage._cdata] = storage_type
        return storage_type

    def bring_like(self, value: Tensor, types: Types, label: str) -> Tensor:
        """Makes a tensor from outside of the body with the metadata of another."""
        with self.paused():
            made = torch.empty_like(value)
        self.bring(made, types, label)
        return made

    def retyped(self, tensor: Tensor, rule: Callable[[int, AxisType], AxisType]) -> Tensor:
        """Returns a tensor with the type that `rule` gives along each axis, for the one it has.

        That is the tensor itself, or a copy: others may share its memory, and so its types.
        """
        types = self.storage_type(tensor).types
        own = tuple(rule(at, have) for at, have in enumerate(types))
        if own == types:
            return tensor
        copy = tensor.clone()
        self.storage_type(copy).types = own
        return copy

    def known_storage_type(self, tensor: Tensor) -> StorageType | None:
        """Returns the storage type of a tensor, whatever it may be used for; None for closures."""
        return self.types_by_storage.get(base_of(tensor).untyped_storage()._cdata)

    def storage_type(self, tensor: Tensor) -> StorageType:
        if type(tensor) is FakeTensor:
            # What follows finds the same, at several times the cost.
            known = self.types_by_storage.get(address_of(tensor))
            if known is not None:
                return known
        storage = self.fakify(base_of(tensor)).untyped_storage()
        found = self.types_by_storage.get(storage._cdata)
        if found is None:
            raise AssertionError(
                f"{self.name}: a tensor without a type reached {call_site()}; this is a defect of "
                "shardmap_torch's checker, please report it."
            )
        return found

    def flows(self, tensor: Tensor) -> bool:
        if not is_real(tensor.dtype):
            return False
        if torch.is_grad_enabled():
            if tensor.requires_grad:
                return True
        elif self.applies:
            return False  # the forward of a Function, whose backward is checked instead
        return any(t.alive and t.level not in self.ending_levels for t in self._tokens(tensor))

    def flows_through(self, tensor: Tensor) -> bool:
        """Returns whether gradients flow through a tensor, whatever is recorded now."""
        base = self.base(tensor)
        with DisableTorchFunction():
            return base.requires_grad or self.flows(base)

    def levels(self, tensor: Tensor) -> frozenset[int]:
        """Returns the levels whose gradient flows through a base tensor; 0 is autograd's own."""
        if not self.flows(tensor):
            return frozenset()
        alive = frozenset(t.level for t in self._tokens(tensor) if t.alive) - self.ending_levels
        return alive | {0} if torch.is_grad_enabled() and tensor.requires_grad else alive

    def _tokens(self, tensor: Tensor) -> frozenset[Token]:
        storage_type = self.types_by_storage.get(address_of(tensor))
        # A copy made by autograd has no tokens of its own; then those of the storage count.
        own: frozenset[Token] | None = tensor.__dict__.get("_shardmap_tokens")
        if storage_type is None:
            return own or frozenset()
        return storage_type.tokens if own is None else own | storage_type.written

    def tokens_of(
        self, tensors: Sequence[Tensor], storage_types: Sequence[StorageType]
    ) -> frozenset[Token]:
        """Returns the differentiations that go on and that one of these tensors descends from."""
        found = _NO_TOKENS
        for tensor, storage_type in zip(tensors, storage_types, strict=True):
            own = tensor.__dict__.get("_shardmap_tokens")
            for tokens in (storage_type.tokens,) if own is None else (own, storage_type.written):
                if tokens is not found and tokens:
                    found = found | tokens if found else tokens
        # The same object, where it can be: what descends from one differentiation shares it.
        ended = [token for token in found if not token.alive]
        return found.difference(ended) if ended else found

    def _token(self, wrapped: Tensor) -> Token:
        """Returns the token of the transform that an operand belongs to.

        All its operands share one, so that what descends from hundreds of them has one.
        """
        level = int(functorch.maybe_get_level(wrapped))
        known = self._by_level.get(level)
        # Of two transforms at one level the first has ended.
        if known is None or known.level != level:
            known = self._by_level[level] = Token(level)
        return known

    def mark_differentiated(self, wrapped: Tensor) -> None:
        """Records an operand of a torch.func transform."""
        real = base_of(wrapped)
        self._differentiated.add(id(real))
        base = self.fakify(real)
        tokens = self._tokens(base) | {self._token(wrapped)}
        base._shardmap_tokens = tokens  # type: ignore[attr-defined]  # ours
        self.storage_type(base).tokens |= tokens

    def reject_outer(self, args: Sequence[Any]) -> None:
        """Refuses tensors that a transform outside the body differentiates or batches."""
        for tensor in (t for value in args for t in tensors_of(value)):
            if not functorch.is_functorch_wrapped_tensor(tensor):
                continue
            base = base_of(tensor)
            if isinstance(base, FakeTensor) or id(base) in self._differentiated:
                continue
            # Transforms in the body may batch a closed-over tensor, at levels of their own.
            depth = functorch.get_dynamic_layer_stack_depth()
            differentiates = functorch.is_gradtrackingtensor(tensor)
            if differentiates or functorch.maybe_get_level(tensor) > depth:
                raise closed_over_outer(
                    self.name,
                    "differentiates" if differentiates else "batches",
                    name_in(self.body, tensor),
                )

    def types(self, tensor: Tensor) -> Types:
        """Returns the types of a base tensor as an operand: I and R are K without a gradient."""
        storage_type = self.storage_type(tensor)
        if (I in storage_type.types or R in storage_type.types) and not self.is_cotangent(
            storage_type
        ):
            if not self.flows(tensor):
                return tuple(
                    K if axis_type in (I, R) else axis_type for axis_type in storage_type.types
                )
        return storage_type.types

    def types_of(self, tensor: Tensor) -> Types:
        """Returns the types of any tensor in the body as an operand."""
        return self.types(base_of(self.fakify(tensor)))

    def by_axis(self, types: Types) -> dict[str, AxisType]:
        return dict(zip(self.axes, types, strict=True))

    # ------------------------------------------------------------------------ cotangents

    @contextmanager
    def differentiating(self, seeds: Sequence[Tensor | None]) -> Iterator[None]:
        """Runs a backward in this context from cotangents that have been checked.

        Values that depend on them keep I and R, also in backwards that custom ones start.
        """
        self._num_tasks += 1
        task = self._num_tasks
        storage_types = [self.storage_type(seed) for seed in seeds if seed is not None]
        for storage_type in storage_types:
            storage_type.tasks |= {task}
        self.running.append(task)
        try:
            yield
        finally:
            self.running.remove(task)
            for storage_type in storage_types:
                storage_type.tasks -= {task}

    def goes_on(self, seeds: Sequence[Tensor | None]) -> bool:
        """Returns whether a backward from these cotangents is part of one that runs.

        It is in a custom backward that recomputes its forward, and for the derived backward of the
        body, whose seeds the checker makes.
        """
        return bool(seeds) and all(
            seed is not None and self.is_cotangent(self.storage_type(seed)) for seed in seeds
        )

    def is_cotangent(self, storage_type: StorageType) -> bool:
        """Returns whether a value descends from the cotangents of a backward that runs."""
        return not storage_type.tasks.isdisjoint(self.running)

    def tasks_of(self, storage_types: Iterable[StorageType]) -> frozenset[int]:
        """Returns the running differentiations from whose cotangents the storages descend."""
        if not self.running:
            return frozenset()
        return frozenset(
            task
            for storage_type in storage_types
            for task in storage_type.tasks
            if task in self.running
        )

    # -------------------------------------------------------------------- fakes of closures

    def base(self, tensor: Tensor) -> Tensor:
        """Returns the fake of a tensor, without transforms."""
        return base_of(self.fakify(tensor))

    def fakify(self, tensor: Tensor) -> Tensor:
        """Returns the fake of a tensor, which may be closed over."""
        fake: Tensor = self.fakify_value(tensor)
        return fake

    def fakify_value(self, value: Any) -> Any:
        """Replaces closed-over tensors by fakes of type K, also in lists."""
        if type(value) is FakeTensor and value.fake_mode is self.fake:
            return value
        if isinstance(value, Tensor):
            # A transform's tensor wraps a fake, or a closed-over tensor.
            base = base_of(value)
            if not isinstance(base, FakeTensor):
                return self._fakify_tensor(value)
            if base.fake_mode is not self.fake:
                raise used_after_check(f"{self.name}: at {call_site()} the body uses")
            return value
        if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
            return [self.fakify_value(item) for item in value]
        return value

    def _fakify_tensor(self, real: Tensor) -> Tensor:
        if type(real) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise ShardTypeError(
                f"{self.name}: the body closes over a {type(real).__name__} at {call_site()}.\n"
                "Fix: pass it as an argument."
            )
        if real.is_nested or real.is_quantized or real.layout != torch.strided:
            raise ShardTypeError(
                f"{self.name}: the body closes over a nested, quantized or sparse tensor at "
                f"{call_site()}.\nFix: pass it as an argument, as a dense tensor."
            )
        # torch reads `.grad`, which is refused in a body.
        with self.paused(), DisableTorchFunction():
            fake = self.fake.from_tensor(real)
        if fake.untyped_storage()._cdata not in self.types_by_storage:
            label = f"{CLOSED_OVER} {type(real).__name__} of shape {list(real.shape)}"
            self.bring(fake, (K,) * len(self.axes), label, f"is {label}")
            self.observer.on_closure(fake, real)
        else:  # it, or another tensor in its memory
            self.observer.aside.on_closure(fake, real)
        values = ""
        if current() is not None:  # processes compare those of tensors that are made in the body
            with disable_current_modes():
                values = values_of(base_of(real))
        self.traits.closed_over.add((id(real), values))
        if real.requires_grad:
            self.closures[id(real)] = real
        return fake


_NO_TOKENS: Final[frozenset[Token]] = frozenset()


class Interpreter(TypeStore):
    """One interpretation of one body: records its equations, and the types of its tensors."""

    def __init__(
        self, name: str, mesh: Mesh, branches: Branches, repair: Repair, env: "ShapeEnv | None"
    ) -> None:
        """Starts an interpretation on the path of `branches`; `env` has symbols for sizes."""
        super().__init__(name, mesh.axis_names, fake_mode(env, partial(_refuse_thread, ref(self))))
        self.mesh, self.repair = mesh, repair
        self.numbers = Numbers(branches)
        self.equations: list[Equation] = []
        self.asserted: list[Asserted] = []
        self.is_decomposing = False
        self.function: Any = None
        self._made_by: dict[int, Equation] = {}
        # Of Functions, by node and number, with the axes over which ranks have met in it.
        self.results_of: dict[tuple[int, int], tuple[Use, frozenset[int]]] = {}
        self._sequence = 0
        self._count = 0
        self.means: dict[Site, Insert] = {}
        self.losses: dict[Equation, Sequence[Types]] = {}  # by their gradients

    @property
    def is_special(self) -> bool:
        """Returns whether calls depend on more here than their operands: few bodies get there."""
        return self.numbers.any or self.is_paused or self.copies.are_stale

    def begin(self) -> None:
        """Starts recording autograd nodes; earlier ones are not the body's."""
        self._sequence = sequence_number()

    def forget_nodes(self) -> None:
        """Drops also an error, whose frames have tensors."""
        super().forget_nodes()
        self.numbers.branches.refusal = None

    def needs_ranks(self, what: str | None = "") -> None:
        """Records code that `torch.func.vmap` would reject or, if it says `what`, may drop."""
        if what is not None and not self.is_paused:
            site = call_site()
            at = "in the body" if site is None else f"at {site}"
            where = f"{what}.\n  {at}" if what else ""
            self.traits.rank_only = self.traits.rank_only or where

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Types operations in this context without adding them to the program."""
        branches, traits = self.numbers.branches, replace(self.traits)
        before = self.equations, self.observer, traits, self._count, branches.refusal
        self.equations, self.observer = [], self.observer.aside
        try:
            yield
        finally:
            self.equations, self.observer, self.traits, self._count, branches.refusal = before

    def note_types(self, note: Any, types: Types, what: str, advice: str) -> None:
        """Notes for runs, whose values have no types, those that the body gets at a step.

        Raises:
            ShardTypeError: they differ on another path that looks the same to a run.
        """
        if note.types not in ((), types):
            self.numbers.branches.refuse(
                f"{what} {list(types)} on one path through the body and {list(note.types)} on "
                "another, and a run cannot tell which path it takes.",
                advice,
            )
        note.types = types

    def make(
        self, tensor: Tensor, types: Types, equation: Equation, operands: Sequence[Tensor]
    ) -> StorageType:
        """Types a new tensor that an equation computes from its operands."""
        read = list(map(self.storage_type, operands))
        batched_over = frozenset[int]().union(*(each.batched_over for each in read))
        descent = self.tokens_of(operands, read), self.tasks_of(read), batched_over
        self.types_by_storage.pop(address_of(tensor), None)  # a copy may have been typed before
        self.type_results(equation, [(0, tensor)], [types], *descent)
        return equation.results[0].storage_type

    def type_results(
        self,
        equation: Equation,
        made: Iterable[tuple[int, Tensor]],
        types: Sequence[Types],
        tokens: frozenset[Token],
        tasks: frozenset[int],
        batched_over: frozenset[int],
    ) -> None:
        """Types and numbers what an equation has made; a view has the type of its storage.

        Args:
            equation: gets its results.
            made: the results, with their positions.
            types: those of each position, in turn; K if there are none.
            tokens: the differentiations that the results descend from.
            tasks: those whose cotangents they descend from.
            batched_over: the axes over which a batched body has them batched.
        """
        results = []
        for index, tensor in made:
            address = address_of(tensor)
            storage_type = self.types_by_storage.get(address)
            if storage_type is None:
                own = types[index % len(types)] if types else (K,) * len(self.axes)
                storage_type = StorageType(own, equation, "", tensor.untyped_storage(), tasks=tasks)
                storage_type.maker = equation.name
                storage_type.batched_over = batched_over
                self.types_by_storage[address] = storage_type
            shape, dtype = metadata_of(tensor)
            if is_real(dtype):
                known = storage_type.tokens
                # One object, where it can be: what descends from one differentiation shares it.
                storage_type.tokens = known | tokens if known and known is not tokens else tokens
                tensor.__dict__["_shardmap_tokens"] = tokens
            self._count += 1
            tensor.__dict__["_shardmap_number"] = number = self._count
            results.append(Use("", storage_type, storage_type.types, dtype, shape, number))
        equation.results = tuple(results)

    # --------------------------------------------------------------------------- equations

    def add(self, equation: Equation) -> None:
        """Appends an equation, and links it with the autograd nodes made since the last one."""
        self.equations.append(equation)
        now = sequence_number()
        for number in range(self._sequence, now):
            self._made_by[number] = equation
        self._sequence = now

    def forward_of_current_node(self) -> Equation | None:
        """Returns the equation whose backward runs now, or None."""
        return self.equation_of(current_autograd_node())

    def equation_of(self, node: Node | None) -> Equation | None:
        """Returns the equation whose backward an autograd node is, or None."""
        return None if node is None else self._made_by.get(node._sequence_nr())

    def site(self) -> tuple[Site | None, bool]:
        """Returns the user's line, and whether a backward runs.

        In autograd's own steps that is the line of the forward, in the user's own code theirs.
        """
        if running_backward() == NO_BACKWARD:
            return call_site(), False
        forward = self.forward_of_current_node()
        return self.own_site() or (forward.site if forward is not None else None), True

    def own_site(self) -> Site | None:
        return site_within(run_engine.__code__)


INTERPRETERS: Final[ThreadStack[Interpreter]] = ThreadStack()
"""The interpreters of the code that this thread runs now."""


def current_interpreter() -> Interpreter | None:
    """Returns the interpreter of the code that this thread runs now, or None."""
    return INTERPRETERS.top


def _refuse_thread(checking: ref[Interpreter]) -> None:
    """Refuses an operation on another thread, of which no mode here sees more.

    Not after the check, whose tensors a cache may have kept: runs have an error for that.
    """
    interpreter = checking()
    if interpreter is not None:
        thread = threading.current_thread().name
        interpreter.numbers.branches.fail(
            TransformError(
                f"{interpreter.name}: {call_site()} runs on the thread {thread!r} that the body "
                "has started. What a body does on other threads cannot be checked; do it on the "
                "thread that runs the body."
            )
        )
