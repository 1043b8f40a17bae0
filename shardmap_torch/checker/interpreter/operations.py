"""The life of one ATen operation of a body, from torch's dispatch to its equation.

The file reads from top to bottom as an operation passes through it:

1. `Operations.__torch_dispatch__` is called by torch. It repeats calls like an equal one that came
   before, as layers of a network are, and takes operators apart that have a decomposition.
2. `_interpret` refuses what has no place in a body, replaces closures by fakes, takes Python values
   (`scalars`), and refuses writes into what is read-only.
3. `_run` makes the results, on fake tensors.
4. `result_types` types them, by the operator's row.
5. `_store` writes the types into the store, and adds the equation to the program.
6. Back in `_interpret`, those are called who follow operations: copies, the memory of calls, the
   observer.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.checker.interpreter import messages, scalars
from shardmap_torch.checker.interpreter.caught import MAY_FAIL, refuse_caught
from shardmap_torch.checker.interpreter.custom_functions import refuse_saving_hooks, reject_unseen
from shardmap_torch.checker.interpreter.interpreter import Interpreter, Setting
from shardmap_torch.checker.interpreter.result_types import combined, name_of, result_types
from shardmap_torch.checker.ir.fake_results import (
    OUTCOMES,
    CallLookup,
    Result,
    forget_written,
    literals_of,
    look_up,
    make,
    run_fake,
)
from shardmap_torch.checker.ir.observer import UNOBSERVED, standing
from shardmap_torch.checker.ir.own_functions import has_saving_hooks, name_of_own, rank_only_part
from shardmap_torch.checker.ir.program import Equation, Use, use_of, varying
from shardmap_torch.checker.rewrites import distributed
from shardmap_torch.checker.rewrites.copies import is_marked
from shardmap_torch.checker.rules.infer import (
    Types,
    branches,
    is_in_linear_backward,
    name_arguments,
    named_tensors,
    signature_of,
    tensors_of,
    writes_of,
)
from shardmap_torch.checker.rules.lattice import SIZED_BY_DATA, add, join
from shardmap_torch.checker.rules.registry import MEANINGS, interpreted, row_of
from shardmap_torch.checker.rules.rule import overloads
from shardmap_torch.core.autograd_state import NONE as NO_BACKWARD
from shardmap_torch.core.autograd_state import running_backward
from shardmap_torch.core.hashing import numbers_of
from shardmap_torch.core.source_location import call_site
from shardmap_torch.core.storage import covers_storage
from shardmap_torch.core.torch_private.engine import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    HigherOrderOperator,
    OpOverload,
    UncompiledMode,
    UnsupportedOperatorException,
    current_autograd_node,
    disable_current_modes,
)
from shardmap_torch.errors import ShardTypeError, TransformError
from shardmap_torch.types import K

_DEVICE: Final = torch.ops.prim.device.default
_SILENT: Final = ("prim", "profiler")  # they read no values
_SIZES: Final = (
    torch.ops.aten.is_same_size.default,
    torch.ops.aten._has_same_storage_numel.default,
)
"""Questions about sizes alone, as forward mode asks of tangents."""

_LITERAL: Final = torch.ops.aten.lift_fresh.default
_BITS: Final = torch.ops.aten.view.dtype
_WITHOUT_DATA: Final = (
    DataDependentOutputException,
    UnsupportedOperatorException,
    AssertionError,
    NotImplementedError,
)
"""Exceptions by which torch says that an operation lacks fake tensors, and not what is wrong."""

_ONE_DTYPE: Final = overloads("mm bmm addmm baddbmm mv dot")
"""Operations that reject operands of several dtypes, except on fake tensors."""


# ----------------------------------------------------------------------------------- dispatched


class Operations(UncompiledMode):
    """Dispatch mode that interprets every ATen operation."""

    supports_higher_order_operators = True  # so that they get an error of ours

    def __init__(self, interpreter: Interpreter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._interpreter = interpreter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Autograd asks for devices three times as often as it runs operations.
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        interpreter = self._interpreter
        try:
            if func in MAY_FAIL:
                refuse_caught(interpreter, func)
            found = find(interpreter, func, args, kwargs)
            if found is not None and found.outcome is not None:
                out = repeat(interpreter, func, args, kwargs, found)
                if out is not NotImplemented:
                    return out
            if func not in MEANINGS:
                return self._call(func, args, kwargs or {}, found)
        except (ShardTypeError, TransformError) as error:
            interpreter.numbers.branches.refusal = error
            raise
        # Not under `try`: its operations come back to this mode, which records their errors.
        with Setting(interpreter, is_decomposing=True):
            return interpreted(func, args, kwargs or {}, self)

    def _call(self, func: Any, args: Any, kwargs: Any, found: CallLookup | None) -> Any:
        if isinstance(func, HigherOrderOperator):
            raise ShardTypeError(
                f"{self._interpreter.name}: {func} is called at {call_site()}, and operators that "
                "call functions are not interpreted.\nFix: branch on x.item(), of which both "
                "branches are checked, write the loop in Python, or use torch.where."
            )
        return _interpret(self._interpreter, func, args, kwargs, found)


# ------------------------------------------------------------------------------------- repeated

_NONE: Final = frozenset[Any]()


def find(
    interpreter: Interpreter, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> CallLookup | None:
    """Looks a call up; None where it cannot be remembered."""
    # Hooks run the user's code at each tensor that autograd saves, equal calls included.
    if interpreter.is_special or has_saving_hooks():
        return None
    call = look_up(interpreter.fake, op, args, kwargs)
    if call is None:
        return None
    types = interpreter.types_by_storage
    try:
        call.storage_types = [types[seen[2]] for seen in call.seen]
    except KeyError:  # a tensor without a type, which the full road reports
        return None
    known = call.known
    if known is not None and known.repeats:
        view = ((), _NONE) if known.is_view else None
        call.outcome = view or OUTCOMES.find(_situation(interpreter, call, known))
    return call


def _situation(interpreter: Interpreter, call: CallLookup, known: Result) -> tuple[Any, ...]:
    """Returns the call, the types of its operands as they are read, and what batches them."""
    situation: list[Any] = [known.number, len(interpreter.axes)]
    numbers_of = interpreter.numbers_of
    for tensor, storage_type in zip(call.tensors, call.storage_types, strict=True):
        _, number, freed = numbers_of(storage_type.types)
        read = number
        if number != freed and not (storage_type.tasks and interpreter.is_cotangent(storage_type)):
            # As `TypeStore.types` and `result_types` have it.
            if not known.is_real or not interpreter.flows(tensor):
                read = freed
        situation += (number, read, storage_type.batched_over)
    return tuple(situation)


def learn(interpreter: Interpreter, call: CallLookup | None) -> None:
    """Remembers the call that has just been typed, if all that matters is known of it."""
    known = None if call is None else call.known
    # The node decides the rule in a linear backward, and the key does not say which runs; in one of
    # the user's own, products may take a whole cotangent as each rank's factor (`result_types`).
    if call is None or known is None or not known.repeats or is_in_linear_backward():
        return
    if interpreter.running and name_of_own(current_autograd_node()) is not None:
        return
    if not known.is_view:
        made = [use.storage_type for use in interpreter.equations[-1].results]
        outcome = [each.types for each in made], made[0].batched_over if made else _NONE
        OUTCOMES.put(_situation(interpreter, call, known), outcome)


def repeat(
    interpreter: Interpreter, op: OpOverload, args: Sequence[Any], kwargs: Any, call: CallLookup
) -> Any:
    """Types a call as before, and makes its result; NotImplemented where it must be typed again."""
    known, outcome = call.known, call.outcome
    if known is None or outcome is None:
        return NotImplemented
    if running_backward() != NO_BACKWARD:
        if not interpreter.running or is_in_linear_backward():
            return NotImplemented
        reject_unseen(interpreter)
    site, backward = interpreter.site()
    out = make(interpreter.fake, known, call.tensors)
    uses = []
    for name, at in known.operands:
        storage_type, (*_, shape, dtype) = call.storage_types[at], call.seen[at]
        number = call.tensors[at].__dict__.get("_shardmap_number")
        uses.append(Use(name, storage_type, storage_type.types, dtype, shape, number))
    equation = Equation(known.name, tuple(uses), (), site, backward)
    equation.literals = known.literals
    types, batched_over = outcome
    tokens = interpreter.tokens_of(call.tensors, call.storage_types)
    descent = tokens, interpreter.tasks_of(call.storage_types), batched_over
    interpreter.type_results(equation, enumerate(known.tensors(out)), types, *descent)
    interpreter.add(equation)
    if interpreter.copies.any and known.is_view and any(map(is_marked, call.tensors)):
        interpreter.copies.follow(interpreter, {"": call.tensors}, [], out, True)
    if not (interpreter.observer is UNOBSERVED or interpreter.observer.is_ignored):
        arguments = name_arguments(op, args, kwargs or {})
        interpreter.observer.on_call(op, arguments, out, call.key)
    return out


# ---------------------------------------------------------------------------------- interpreted


def _interpret(
    interpreter: Interpreter,
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    found: CallLookup | None,
) -> Any:
    """Types one ATen operation, and runs it on fake tensors; `found` is from `find`."""
    # Before all else: also a write while the interpreter is paused ends what is known of a tensor.
    forget_written(op, args, kwargs)
    if interpreter.is_paused or op.namespace in _SILENT or op in _SIZES:
        asked = _look_up(interpreter, None, op, args, kwargs)
        return run_fake(interpreter.fake, asked, op, args, kwargs)
    _reject_misplaced(interpreter, op)
    if op is _LITERAL and not isinstance(args[0], FakeTensor):
        return _lift(interpreter, op, args[0])
    args = [interpreter.fakify_value(value) for value in args]
    kwargs = {name: interpreter.fakify_value(value) for name, value in kwargs.items()}
    arguments = name_arguments(op, args, kwargs)
    # Python values have no fake: they are symbols, or branches of which both ways are taken.
    if branches(signature_of(op), arguments):
        value = scalars.take_for_torch(interpreter, op, arguments)
        if value is not None:
            return value
    refuse_saving_hooks(interpreter)
    interpreter.needs_ranks(rank_only_part(op, arguments))
    writes = writes_of(op, arguments)
    for name in writes:
        _reject_read_only(interpreter, op, arguments[name])
    # Taken before the run, which may write into the operands.
    seen: tuple[OpOverload, Mapping[str, Any]] = op, arguments
    if interpreter.observer is not UNOBSERVED:
        with interpreter.paused():
            seen = standing(op, arguments)
    asked = _look_up(interpreter, found, op, args, kwargs)
    out = _run(interpreter, op, args, kwargs, asked)
    # A view has the type of its storage, and needs no rule; the bits of a sum have no type.
    is_view = not writes and _is_known(interpreter, out) and op is not _BITS
    types = [] if is_view else result_types(interpreter, op, arguments, _results_of(out))
    _store(interpreter, op, arguments, out, types)
    interpreter.copies.follow(interpreter, arguments, [*_written(op, arguments)], out, is_view)
    learn(interpreter, found)
    # The last, since it may ask for the types of the results.
    interpreter.observer.on_call(*seen, out, found.key if found and not writes else None)
    return out


def _reject_misplaced(interpreter: Interpreter, op: OpOverload) -> None:
    """Refuses raw torch.distributed, and operations of backwards that nobody has seen start."""
    if op.namespace in distributed.NAMESPACES:
        interpreter.numbers.branches.fail(distributed.refused(interpreter.name, op))
    if running_backward() == NO_BACKWARD:
        return
    if not interpreter.running:
        raise ShardTypeError(
            f"{interpreter.name}: a backward was started that the checker did not see start.\n"
            f"  at {call_site()}\n"
            "Fix: use torch.func.grad, torch.autograd.grad, torch.autograd.backward or "
            "Tensor.backward()."
        )
    reject_unseen(interpreter)


def _lift(interpreter: Interpreter, op: OpOverload, literal: Tensor) -> Any:
    """Types a tensor made of Python numbers in the body as K."""
    out = op(literal)
    made = interpreter.bring(out, (K,) * len(interpreter.axes), "a literal")
    with disable_current_modes():  # the numbers are real
        made.numbers = numbers_of(literal)
    interpreter.observer.on_literal(out, literal)
    return out


RUNNING: Final = (
    " Running statistics, as of BatchNorm: shardmap_torch.nn.batch_norm returns the new ones, "
    "parallelize(module) keeps them, and module.eval() writes none."
)
"""Advice where a norm counts its calls, or writes its statistics."""

KEPT: Final = "clone it first; return what is to be kept."
WEIGHTS: Final = (
    "compute with the new value, as weight.clamp(low, high), which leaves the parameter as it is; "
    "write into parameters after the optimizer's step, outside of the forward."
)
"""Advice for writes into other tensors, and into parameters of a module."""


def _reject_read_only(interpreter: Interpreter, op: OpOverload, value: Any) -> None:
    for tensor in tensors_of(value):
        storage_type = interpreter.types_by_storage.get(tensor.untyped_storage()._cdata)
        if storage_type is not None and storage_type.read_only is not None:
            is_count = not tensor.ndim and not tensor.is_floating_point()
            is_statistic = is_count or "batch_norm" in name_of(op)
            is_parameter = storage_type.label.startswith("input parameters[")
            advice = WEIGHTS if is_parameter else f"{KEPT}{RUNNING * is_statistic}"
            raise ShardTypeError(
                f"{interpreter.name}: {name_of(op)} writes into a tensor that "
                f"{storage_type.read_only}, at {interpreter.site()[0]}.\nFix: {advice}"
            )


# ------------------------------------------------------------------------------------------ run


def _look_up(
    interpreter: Interpreter,
    found: CallLookup | None,
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> CallLookup | None:
    """Returns by what the result of a call is known; None with stand-ins, and of writes.

    What a write has changed of a tensor's metadata must not be remembered from before it.
    """
    if found is not None:
        return found
    is_known = not (interpreter.numbers.any or op._schema.is_mutable)
    return look_up(interpreter.fake, op, args, kwargs) if is_known else None


def _run(
    interpreter: Interpreter,
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    call: CallLookup | None,
) -> Any:
    dtypes = {t.dtype for value in args for t in tensors_of(value)} if op in _ONE_DTYPE else ()
    if len(dtypes) > 1:
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        head = f"{name_of(op)} of {names}: torch multiplies tensors of one dtype only."
        raise messages.error(interpreter, head, [], "cast one of them.")
    try:
        out = run_fake(interpreter.fake, call, op, args, kwargs)
    except DynamicOutputShapeException as error:
        head = f"the shape of what {name_of(op)} gives depends on data."
        advice = SIZED_BY_DATA.get(name_of(op), "use an operation whose result has a known shape.")
        raise messages.error(interpreter, head, [], advice) from error
    except _WITHOUT_DATA as error:
        head = f"{name_of(op)} cannot be interpreted without data ({type(error).__name__})."
        advice = "use an operation that needs none, or check=False."
        raise messages.error(interpreter, head, [], advice) from error
    if any(made.layout is not torch.strided for _, made in _results_of(out)):
        head = f"{name_of(op)} gives a tensor that is not strided, and no other ones are typed."
        raise messages.error(interpreter, head, [], "compute with strided tensors.")
    return out


def _is_known(interpreter: Interpreter, out: Any) -> bool:
    made = _results_of(out)
    known = interpreter.types_by_storage
    return bool(made) and all(t.untyped_storage()._cdata in known for _, t in made)


def _results_of(out: Any) -> list[tuple[int, Tensor]]:
    """Returns the tensors of a result with their positions."""
    if isinstance(out, Tensor):
        return [(0, out)]
    items = enumerate(out if isinstance(out, list | tuple) else ())
    return [(index, tensor) for index, item in items for tensor in tensors_of(item)]


# --------------------------------------------------------------------------------------- stored


def _store(
    interpreter: Interpreter,
    op: OpOverload,
    arguments: Mapping[str, Any],
    out: Any,
    types: Sequence[Types],
) -> None:
    """Types what an operation has written and made, and adds its equation."""
    read = named_tensors(arguments)
    operands = [use_of(name, tensor, interpreter.storage_type(tensor)) for name, tensor in read]
    storage_types = [use.storage_type for use in operands]
    tokens = interpreter.tokens_of([tensor for _, tensor in read], storage_types)
    tasks = interpreter.tasks_of(storage_types)
    batched_over = _batched_over(operands, types)
    site, backward = interpreter.site()
    equation = Equation(name_of(op), tuple(operands), (), site, backward)
    shown = interpreter.numbers.shown
    equation.literals = tuple((name, shown(x)) for name, x in literals_of(op, arguments))
    written = list(_written(op, arguments))
    types_written = _types_written(interpreter, op, arguments, written, types)
    for tensor, its_types in zip(written, types_written, strict=True):
        storage_type = interpreter.storage_type(tensor)
        # Earlier writes of the same operation remain: a list may contain a tensor twice.
        if storage_type.made is equation or not covers_storage(tensor, storage_type.storage):
            both = [interpreter.types(tensor), its_types]
            its_types = combined(interpreter, add, op, arguments, both)
        storage_type.types, storage_type.made = its_types, equation
        if not batched_over <= storage_type.batched_over:
            interpreter.needs_ranks()  # vmap cannot write a batched value into an unbatched one
        storage_type.batched_over |= batched_over
        storage_type.tokens |= tokens
        storage_type.written |= tokens
        storage_type.tasks |= tasks
    interpreter.type_results(equation, _results_of(out), types, tokens, tasks, batched_over)
    interpreter.add(equation)


def _types_written(
    interpreter: Interpreter,
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
    return [combined(interpreter, join, op, arguments, types)] * len(written)


def _batched_over(operands: Sequence[Use], results: Sequence[Types]) -> frozenset[int]:
    """Returns the axes over which a batched body has the results of an operation batched.

    They are its operands', and those over which it draws each rank's own numbers.
    """
    nowhere = frozenset[int]()
    before = nowhere.union(*[varying(use.types) for use in operands])
    drawn = nowhere.union(*map(varying, results)) - before
    return drawn.union(*[use.storage_type.batched_over for use in operands])


def _written(op: OpOverload, arguments: Mapping[str, Any]) -> Iterator[Tensor]:
    for name in writes_of(op, arguments):
        yield from tensors_of(arguments[name])
