"""Interpreter: types every ATen operation of a body, run on fake tensors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import Node

from shardmap_torch.checker.calls.draws import drawn_types
from shardmap_torch.checker.calls.fake_results import Key, key_of, run_fake
from shardmap_torch.checker.calls.remembered import forget_written
from shardmap_torch.checker.interpreter import messages, scalars
from shardmap_torch.checker.interpreter.recall import Found, learn
from shardmap_torch.checker.interpreter.spots import Spots
from shardmap_torch.checker.interpreter.state import Memory
from shardmap_torch.checker.interpreter.user_code import reject_unseen
from shardmap_torch.checker.ir.observer import UNOBSERVED, standing
from shardmap_torch.checker.ir.outcomes import Asserted, Traits
from shardmap_torch.checker.ir.own_functions import name_of_own
from shardmap_torch.checker.ir.paths import Branches, Failing
from shardmap_torch.checker.ir.program import Equation, StorageType, Use, use_of, varying
from shardmap_torch.checker.ir.rank_only import rank_only_part
from shardmap_torch.checker.ir.repairs import NONE, Op, Places, Repair, propose
from shardmap_torch.checker.ir.symbolic import Numbers
from shardmap_torch.checker.rewrites import distributed
from shardmap_torch.checker.rules.builders import overloads
from shardmap_torch.checker.rules.infer import (
    Refusal,
    Types,
    branches,
    each_axis,
    is_in_linear_backward,
    is_real,
    name_arguments,
    named_tensors,
    rounding,
    signature_of,
    tensors_of,
    type_call,
    writes_of,
)
from shardmap_torch.checker.rules.lattice import Outcome, add, join, plain
from shardmap_torch.checker.rules.reasons import SIZED_BY_DATA
from shardmap_torch.checker.rules.registry import row_of
from shardmap_torch.core.autograd_state import NONE as NO_BACKWARD
from shardmap_torch.core.autograd_state import running_backward
from shardmap_torch.core.functorch import Token
from shardmap_torch.core.hashing import numbers_of
from shardmap_torch.core.source_location import Site, call_site
from shardmap_torch.core.storage import covers_storage
from shardmap_torch.core.torch_private.engine import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    OpOverload,
    UnsupportedOperatorException,
    current_autograd_node,
    disable_current_modes,
    sequence_number,
)
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.mesh import Mesh
from shardmap_torch.types import AxisType, I, K, R, V

if TYPE_CHECKING:  # for annotations; it takes a second to import
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

_NOWHERE: Final = frozenset[int]()
_SILENT: Final = ("prim", "profiler")  # they read no values
_SIZES: Final = (
    torch.ops.aten.is_same_size.default,
    torch.ops.aten._has_same_storage_numel.default,
)
"""Questions about sizes alone, as forward mode asks of tangents."""

_LITERAL: Final = torch.ops.aten.lift_fresh.default

_BITS: Final = torch.ops.aten.view.dtype
_SEED: Final = torch.ops.aten.ones_like.default
_ONE_DTYPE: Final = overloads("mm bmm addmm baddbmm mv dot")
"""Operations that reject operands of several dtypes, except on fake tensors."""


class Interpreter(Memory):
    """One interpretation of one body: records its equations, and the types of its tensors."""

    def __init__(
        self, name: str, mesh: Mesh, branches: Branches, repair: Repair, env: "ShapeEnv | None"
    ) -> None:
        """Starts an interpretation of the body `name`, on the path of `branches`.

        `env` has the sizes that are symbols, if any are.
        """
        super().__init__(name, mesh.axis_names, env)
        self.mesh, self.repair = mesh, repair
        self.numbers = Numbers(branches)
        self.spots = None if repair is NONE else Spots(self, repair)
        locate = None if self.spots is None else self.spots.locate
        self.failing = Failing(branches, locate)
        self.equations: list[Equation] = []
        self.asserted: list[Asserted] = []
        self.traits, self.is_decomposing = Traits(), False
        self.function: Any = None
        self._made_by: dict[int, Equation] = {}
        # Of Functions, by node and number, with the axes over which ranks have met in it.
        self.results_of: dict[tuple[int, int], tuple[Use, frozenset[int]]] = {}
        self._sequence = 0
        self._count = 0
        self._places, self.gradient_places = Places(), Places()

    @property
    def is_special(self) -> bool:
        """Returns whether calls depend on more here than their operands: few bodies get there."""
        return self.is_symbolic or self.is_paused or self.copies.are_stale

    @property
    def is_symbolic(self) -> bool:
        """Returns whether sizes are symbols, or stand-ins for numbers: equal, and not the same."""
        return self.fake.shape_env is not None or self.numbers.any

    def located(self, error: ShardTypeError, gradient: StorageType) -> ShardTypeError:
        """Attaches to the error of a gradient what could be inserted where it comes from."""
        if self.spots is not None and gradient.made is not None:
            self.spots.locate(error, gradient.made)
        return error

    @contextmanager
    def decomposing(self) -> Iterator[None]:
        """Marks operations in this context as the decomposition of one operator."""
        before, self.is_decomposing = self.is_decomposing, True
        try:
            yield
        finally:
            self.is_decomposing = before

    def begin(self) -> None:
        """Starts recording autograd nodes; earlier ones are not the body's."""
        self._sequence = sequence_number()

    def forget_nodes(self) -> None:
        """Drops also what a repair was tried on, and an error, whose frames have tensors."""
        super().forget_nodes()
        self.numbers.branches.refusal = None
        if self.spots is not None:
            self.spots.forget_tensors()

    def needs_ranks(self, what: str | None = "") -> None:
        """Records code that `torch.func.vmap` would reject or, if it says `what`, may drop."""
        if what is not None and not self.is_paused:
            where = f"{what}.\n  {messages.place(call_site(), False)}" if what else ""
            self.traits.rank_only = self.traits.rank_only or where

    @contextmanager
    def batching(self) -> Iterator[None]:
        """Types operations in this context in place of those that a batched body has there."""
        before = self.traits.rank_only
        try:
            yield
        finally:
            self.traits.rank_only = before

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Types operations in this context without adding them to the program."""
        branches, traits = self.numbers.branches, replace(self.traits)
        before = self.equations, self.observer, traits, self._count, branches.refusal
        self.equations, self.observer = [], UNOBSERVED
        try:
            yield
        finally:
            self.equations, self.observer, self.traits, self._count, branches.refusal = before

    # -------------------------------------------------------------------------- operations

    def call(
        self,
        op: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        found: Found | None = None,
    ) -> Any:
        """Types one ATen operation, and runs it on fake tensors; `found` is from `recall.find`."""
        forget_written(op, args, kwargs)
        if self.is_paused or op.namespace in _SILENT or op in _SIZES:
            key = None if self.is_symbolic else key_of(op, args, kwargs)
            return run_fake(self.fake, key, op, args, kwargs)
        if op.namespace in distributed.NAMESPACES:
            self.numbers.branches.fail(distributed.refused(self.name, op))
        if not self.running and running_backward() != NO_BACKWARD:
            raise ShardTypeError(
                f"{self.name}: a backward was started that the checker did not see start.\n"
                f"  at {call_site()}\n"
                "Fix: use torch.func.grad, torch.autograd.grad, torch.autograd.backward or "
                "Tensor.backward()."
            )
        if self.observer is not UNOBSERVED and running_backward() != NO_BACKWARD:
            reject_unseen(self, name_of_own)
        if op is _LITERAL and not isinstance(args[0], FakeTensor):
            return self._lift(op, args[0])
        args = [self._fakify_value(value) for value in args]
        kwargs = {name: self._fakify_value(value) for name, value in kwargs.items()}
        arguments = name_arguments(op, args, kwargs)
        if branches(signature_of(op), arguments):
            value = scalars.take_for_torch(self, op, arguments)
            if value is not None:
                return value
        self.needs_ranks(rank_only_part(op, arguments))
        writes = writes_of(op, arguments)
        for name in writes:
            self._reject_read_only(op, arguments[name])
        seen: tuple[OpOverload, Mapping[str, Any]] = op, arguments
        if self.observer is not UNOBSERVED:
            with self.paused():
                seen = standing(op, arguments)
        key = None if self.is_symbolic else key_of(op, args, kwargs)
        out = self._run(op, args, kwargs, key)
        # A view has the type of its storage, and needs no rule; the bits of a sum have no type.
        view = not writes and self._is_known(out) and op is not _BITS
        types = [] if view else self._type(op, arguments, out)
        self._store(op, arguments, out, types)
        self.copies.follow(self, arguments, [*_written(op, arguments)], out, view)
        learn(self, found, op, args, arguments, key)
        self.observer.on_call(*seen, out, found.call.key if found and not writes else None)
        return out

    def _run(
        self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], key: Key | None
    ) -> Any:
        dtypes = {t.dtype for value in args for t in tensors_of(value)} if op in _ONE_DTYPE else ()
        if len(dtypes) > 1:
            names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            head = f"{_name(op)} of {names}: torch multiplies tensors of one dtype only."
            raise messages.error(self, head, [], "cast one of them.")
        try:
            out = run_fake(self.fake, key, op, args, kwargs)
        except DynamicOutputShapeException as error:
            head = f"the shape of what {_name(op)} gives depends on data."
            advice = SIZED_BY_DATA.get(_name(op), "use an operation whose result has a known shape.")
            raise messages.error(self, head, [], advice) from error
        except (DataDependentOutputException, UnsupportedOperatorException) as error:
            head = f"{_name(op)} cannot be interpreted without data ({type(error).__name__})."
            advice = "use an operation that needs none, or check=False."
            raise messages.error(self, head, [], advice) from error
        if any(made.layout is not torch.strided for _, made in _results(out)):
            head = f"{_name(op)} gives a tensor that is not strided, and no other ones are typed."
            raise messages.error(self, head, [], "compute with strided tensors.")
        return out

    def _lift(self, op: OpOverload, literal: Tensor) -> Any:
        """Types a tensor made of Python numbers in the body as K."""
        out = op(literal)
        made = self.bring(out, (K,) * len(self.axes), "a literal")
        with disable_current_modes():  # the numbers are real
            made.numbers = numbers_of(literal)
        self.observer.on_literal(out, literal)
        return out

    def _is_known(self, out: Any) -> bool:
        made = _results(out)
        known = self.types_by_storage
        return bool(made) and all(t.untyped_storage()._cdata in known for _, t in made)

    def make(
        self, tensor: Tensor, types: Types, equation: Equation, operands: Sequence[Tensor]
    ) -> StorageType:
        """Types a new tensor that an equation computes from its operands."""
        read = list(map(self.storage_type, operands))
        tasks, tokens = self.tasks_of(read), self.tokens_of(operands, read)
        storage = tensor.untyped_storage()
        batched_over = frozenset[int]().union(*(each.batched_over for each in read))
        storage_type = StorageType(
            types, equation, "", storage, tasks=tasks, batched_over=batched_over
        )
        self.types_by_storage[storage._cdata] = storage_type
        if is_real(tensor.dtype):
            storage_type.tokens = tokens
            tensor._shardmap_tokens = tokens  # type: ignore[attr-defined]  # ours
        equation.results = (self._result(tensor),)
        return storage_type

    def _type(self, op: OpOverload, arguments: Mapping[str, Any], out: Any) -> list[Types]:
        made = _results(out) or [*enumerate(_written(op, arguments))]
        any_real = any(is_real(tensor.dtype) for _, tensor in made)

        def read(tensor: Tensor) -> Types:
            types = self.types(tensor)
            # A result that is not real has no derivative that could be wrong, but it may select
            # what is differentiated.
            if any_real or self.is_cotangent(self.storage_type(tensor)):
                return types
            return tuple(K if k in (I, R) else k for k in types)

        types = []
        drawn = drawn_types(self, op, arguments)
        for outcome in type_call(op, arguments, read, len(self.axes), drawn):
            if isinstance(outcome, Refusal):
                raise messages.refused(self, op, arguments, outcome)
            types.append(outcome)
        if not is_in_linear_backward():
            rounded = rounding(op, arguments, [tensor for _, tensor in made], types, read)
            if rounded is not None:
                raise messages.refused(self, op, arguments, rounded)
        return self._as_seed(arguments["self"], types) if op is _SEED and self.running else types

    def _as_seed(self, value: Tensor, types: Sequence[Types]) -> list[Types]:
        """Types the cotangent from which a backward inside of a custom backward starts.

        The mode of torch functions, which does that in the body, is not active there; see
        `gradients.seed`.
        """
        pairs = zip(self.storage_type(value).types, types[0], strict=True)
        return [tuple([V if plain(own) == V else axis_type for own, axis_type in pairs])]

    def check_value(self, op: OpOverload, arguments: Mapping[str, Any]) -> Op | None:
        """Requires that a Python value, or a shape, read from tensors is equal on all ranks.

        Returns the op by which the repair that is tried reduces the tensors first, or None.
        """
        place = self._places.next(self.site()[0])
        if place in self.repair.values:
            return self.repair.values[place]
        try:
            self._type(op, arguments, None)
        except ShardTypeError as error:
            raise propose(error, list(scalars.proposals(self, place, arguments))) from None
        return None

    def _reject_read_only(self, op: OpOverload, value: Any) -> None:
        for tensor in tensors_of(value):
            storage_type = self.types_by_storage.get(tensor.untyped_storage()._cdata)
            if storage_type is not None and storage_type.read_only is not None:
                raise ShardTypeError(
                    f"{self.name}: {_name(op)} writes into a tensor that "
                    f"{storage_type.read_only}, at {self.site()[0]}.\n"
                    "Fix: clone it first; return what is to be kept."
                )

    def _store(
        self,
        op: OpOverload,
        arguments: Mapping[str, Any],
        out: Any,
        types: Sequence[Types],
    ) -> None:
        read = named_tensors(arguments)
        operands = [use_of(name, tensor, self.storage_type(tensor)) for name, tensor in read]
        storage_types = [use.storage_type for use in operands]
        tokens = self.tokens_of([tensor for _, tensor in read], storage_types)
        tasks = self.tasks_of(storage_types)
        batched_over = _batched_over(operands, types)
        site, backward = self.site()
        equation = Equation(_name(op), tuple(operands), (), site, backward)
        equation.literals = self._literals(op, arguments)
        written = list(_written(op, arguments))
        types_written = self._types_written(op, arguments, written, types)
        for tensor, axis_type in zip(written, types_written, strict=True):
            self._write(op, arguments, tensor, axis_type, equation, tokens, batched_over)
            self.storage_type(tensor).tasks |= tasks
        made = _results(out)
        for index, tensor in made:
            axis_type = types[index % len(types)] if types else (K,) * len(self.axes)
            storage = tensor.untyped_storage()
            if storage._cdata not in self.types_by_storage:
                storage_type = StorageType(
                    axis_type, equation, "", storage, tasks=tasks, batched_over=batched_over
                )
                self.types_by_storage[storage._cdata] = storage_type
            if is_real(tensor.dtype):
                self.types_by_storage[storage._cdata].tokens |= tokens
                tensor._shardmap_tokens = tokens  # type: ignore[attr-defined]  # ours
        equation.results = tuple([self._result(tensor) for _, tensor in made])
        self.add(equation)

    def _literals(
        self, op: OpOverload, arguments: Mapping[str, Any]
    ) -> tuple[tuple[str, Any], ...]:
        defaults, shown = signature_of(op).defaults, self.numbers.shown
        return tuple(
            (name, shown(value))
            for name, value in arguments.items()
            if not any(True for _ in tensors_of(value))
            and not (name in defaults and _same(value, defaults[name]))
        )

    def count(self, tensor: Tensor) -> int:
        """Numbers a result."""
        self._count += 1
        tensor._shardmap_number = self._count  # type: ignore[attr-defined]  # ours
        return self._count

    def _result(self, tensor: Tensor) -> Use:
        self.count(tensor)
        return use_of("", tensor, self.storage_type(tensor))

    def _types_written(
        self,
        op: OpOverload,
        arguments: Mapping[str, Any],
        written: Sequence[Tensor],
        types: Sequence[Types],
    ) -> Sequence[Types]:
        """Returns the types of the written tensors, which need not be the results."""
        if not written:
            return ()
        row = row_of(op)
        if len(types) == len(written):
            return types
        if len(types) == 1 or (row is not None and row.zipped):
            return [types[index % len(types)] for index in range(len(written))]
        return [self._combined(join, op, arguments, types)] * len(written)

    def _write(
        self,
        op: OpOverload,
        arguments: Mapping[str, Any],
        tensor: Tensor,
        types: Types,
        equation: Equation,
        tokens: frozenset[Token],
        batched_over: frozenset[int],
    ) -> None:
        storage_type = self.storage_type(tensor)
        # Earlier writes of the same operation remain: a list may contain a tensor twice.
        if storage_type.made is equation or not covers_storage(tensor, storage_type.storage):
            types = self._combined(add, op, arguments, [self.types(tensor), types])
        if not batched_over <= storage_type.batched_over:
            self.needs_ranks()  # vmap cannot write a batched value into an unbatched one
        storage_type.batched_over |= batched_over
        storage_type.types, storage_type.made = types, equation
        storage_type.tokens |= tokens
        storage_type.written |= tokens

    def _combined(
        self,
        rule: Callable[[Sequence[AxisType]], Outcome],
        op: OpOverload,
        arguments: Mapping[str, Any],
        types: Sequence[Types],
    ) -> Types:
        """Returns what a rule of the lattice makes of types that are written into one storage."""
        outcome = each_axis(rule, types, len(self.axes))
        if isinstance(outcome, Refusal):
            raise messages.refused(self, op, arguments, outcome)
        return outcome

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
        """Returns the user's line (in a backward the forward's), and whether a backward runs."""
        if running_backward() == NO_BACKWARD:
            return call_site(), False
        forward = self.forward_of_current_node()
        return (forward.site if forward is not None else None), True


def _batched_over(operands: Sequence[Use], results: Sequence[Types]) -> frozenset[int]:
    """Returns the axes over which a batched body has the results of an operation batched.

    They are its operands', and those over which it draws each rank's own numbers.
    """
    before = _NOWHERE.union(*[varying(use.types) for use in operands])
    drawn = _NOWHERE.union(*map(varying, results)) - before
    return drawn.union(*[use.storage_type.batched_over for use in operands])


def _written(op: OpOverload, arguments: Mapping[str, Any]) -> Iterator[Tensor]:
    for name in writes_of(op, arguments):
        yield from tensors_of(arguments[name])


def _results(out: Any) -> list[tuple[int, Tensor]]:
    """Returns the tensors of a result with their positions."""
    if isinstance(out, Tensor):
        return [(0, out)]
    items = enumerate(out if isinstance(out, list | tuple) else ())
    return [(index, tensor) for index, item in items for tensor in tensors_of(item)]


def _name(op: OpOverload) -> str:
    return op._schema.name.split("::")[1]


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)
