"""Results of operations on fake tensors, made again from what is known of them.

torch has such a memory too, which is off: it takes as long as all else in a check, makes a key of
17 fields of every operand, and knows a view at another offset for another call. Here a call is
known by its operation, its arguments that are no tensors, and the shape, strides, dtype and device
of each that is one; the offset of a view is relative to its operand's. All that is remembered of
calls has this key: layers of a network are the same calls, over and over.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor

from shardmap_torch.checker.ir.own_functions import rank_only
from shardmap_torch.checker.ir.program import StorageType
from shardmap_torch.checker.ir.sizes import SYMBOLS
from shardmap_torch.checker.rules.infer import (
    Types,
    draws,
    is_real,
    may_draw,
    name_arguments,
    signature_of,
    tensors_of,
)
from shardmap_torch.core.caching import Memo
from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.source_location import call_site
from shardmap_torch.core.torch_private.engine import (
    DisableTorchDispatch,
    DisableTorchFunction,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    forward_level,
    has_kernel,
    native_layer_norm,
)
from shardmap_torch.core.torch_private.fake_modes import UNTRIED, CheckMode, is_simple, make_fake
from shardmap_torch.errors import TransformError

if TYPE_CHECKING:  # for annotations; it takes a second to import
    from torch.fx.experimental.symbolic_shapes import ShapeEnv


Key: TypeAlias = tuple[Any, ...]
"""Of a call: operations with equal keys have equal results, up to the values."""

Seen: TypeAlias = tuple[FakeTensorMode, int, int, tuple[int, ...], torch.dtype]
"""Of a tensor: its mode, the number of its metadata, the address of its storage, shape, dtype."""

Outcome: TypeAlias = tuple[Sequence[Types], frozenset[int]]
"""Types and batched axes of the results of a call."""

SEEN: Final = "_shardmap_seen"
PLACE: Final = "_shardmap_place"
"""Fields in which tensors keep what is known of their metadata and memory."""

PLAIN: Final = frozenset(
    (int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
)
"""Types of arguments that are values."""
_aten: Final = torch.ops.aten
_OF_DTYPES: Final = _aten.promote_types.default
_ABSOLUTE: Final = frozenset((_aten.as_strided.default, _aten.index.Tensor))
"""The offset that the one gives is not relative, and the shape of the other may be the data's."""

_UNKNOWN_TAGS: Final = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
)


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor of a result: new memory, or a view of an operand."""

    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    operand: int | None
    offset: int


@dataclass(slots=True)
class Result:
    """All that is known of the calls with one key.

    What a call without tensors returns, such as a dtype, is `value`; then there are no items.

    Attributes:
        container: the type of the list of results, if any.
        items: the results, up to their values.
        value: the result that is no tensor.
        op: the overload; kept, so that its address stays its own.
        name: the name of their equations.
        literals: the arguments that are no tensors, by name.
        operands: for each operand, in the order of equations, the name and the position.
        number: tells it from others.
        is_view: whether all results are views of operands.
        is_real: whether some results can have gradients.
        repeats: whether operands of equal types have results of equal types.
    """

    container: type | None
    items: tuple[_Made | None, ...]
    value: Any
    op: OpOverload
    name: str
    literals: tuple[tuple[str, Any], ...]
    operands: tuple[tuple[str, int], ...]
    number: int = field(compare=False, repr=False)
    is_view: bool = False
    is_real: bool = False
    repeats: bool = False

    def tensors(self, out: Any) -> list[FakeTensor]:
        """Lists the tensors of a result that was made of this."""
        return [] if not self.items else [out] if self.container is None else [*out]


_RESULTS: Final = Memo[Result](16384)

OUTCOMES: Final = Memo[Outcome](16384)
"""Types of the results of calls, by the call, the number of axes, and all that is read of them."""


@lru_cache(maxsize=4096)
def _is_known(op: OpOverload) -> bool:
    """Returns whether results of an operation depend on its key alone."""
    return op is _OF_DTYPES or (
        op.namespace in ("aten", "prims")
        and not op._schema.is_mutable
        and op not in _ABSOLUTE
        and not any(tag in op.tags for tag in _UNKNOWN_TAGS)
        and not has_kernel(op.name(), "CompositeImplicitAutograd")
    )


@dataclass(slots=True)
class CallLookup:
    """One call, as it is looked up.

    Attributes:
        key: equal for calls that are the same but for the values of their tensors.
        tensors: the operands, in the order of the arguments.
        seen: what is known of the metadata and memory of each.
        known: what is known of such calls; None for the first.
        storage_types: those of the operands, in an interpretation.
        outcome: types and batched axes of its results; None for the first with such operands.
    """

    key: Key
    tensors: list[FakeTensor]
    seen: list[Seen]
    known: Result | None = None
    storage_types: Sequence[StorageType] = ()
    outcome: Outcome | None = None


def look_up(
    mode: FakeTensorMode, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> CallLookup | None:
    """Reads a call on fake tensors of this mode; None where more counts than their metadata."""
    if torch.is_inference_mode_enabled():
        return None
    found = CallLookup((), [], [])
    key: list[Any] = [id(op), torch.get_default_dtype()]
    if not _add(mode, key, args, found):
        return None
    for name, value in kwargs.items() if kwargs else ():
        key.append(name)  # results are views of what is passed by position only
        if isinstance(value, Tensor | list | tuple) or not _add(mode, key, (value,), found):
            return None
    found.key = tuple(key)
    found.known = _RESULTS.find(found.key)
    return found


def _add(mode: FakeTensorMode, key: list[Any], values: Sequence[Any], found: CallLookup) -> bool:
    for value in values:
        cls = type(value)
        if cls is FakeTensor:
            seen = value.__dict__.get(SEEN) or _look_at(mode, value)
            if seen is None or seen[0] is not mode:
                return False
            key.append(seen[1])
            found.tensors.append(value)
            found.seen.append(seen)
        elif value is None:
            key.append(None)
        elif cls in PLAIN:
            key.append(cls)  # 1 and 1.0 are equal, as are 0.0 and -0.0
            key.append(value if cls is not float else value or str(value))
        elif cls is list or cls is tuple:
            key.append(cls)
            key.append(len(value))
            if not _add(mode, key, value, found):
                return False
        else:
            return False
    return True


def _look_at(mode: FakeTensorMode, tensor: FakeTensor) -> Seen | None:
    if tensor.fake_mode is not mode or not is_simple(tensor):
        return None
    shape, stride = tuple(tensor.shape), tensor.stride()
    if mode.shape_env is not None and any(
        isinstance(size, SYMBOLS) for size in (*shape, *stride, tensor.storage_offset())
    ):
        return None
    number = number_of(shape, stride, tensor.dtype, tensor.fake_device)
    seen = mode, number, tensor.untyped_storage()._cdata, shape, tensor.dtype
    tensor.__dict__[SEEN] = seen
    return seen


def number_of(*metadata: Any) -> int:
    """Returns a number for the metadata of a tensor, which is hashed faster than they are."""
    return _NUMBERS.get(metadata, _COUNT.__next__)


_NUMBERS: Final = Memo[int](16384)
_COUNT: Final = count()


def address_of(tensor: Tensor) -> int:
    """Returns the address of a base tensor's storage, without asking torch where it is known."""
    seen = tensor.__dict__.get(SEEN)
    if seen is not None:
        return int(seen[2])
    with DisableTorchFunction():  # which would see a question of the checker's own
        return int(tensor.untyped_storage()._cdata)


def metadata_of(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """Returns shape and dtype of a base tensor, without asking torch where they are known."""
    seen = tensor.__dict__.get(SEEN)
    return (tuple(tensor.shape), tensor.dtype) if seen is None else seen[3:]


def forget_written(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Forgets the metadata of tensors that an operation may change in place."""
    if op._schema.is_mutable:
        for value in (*args, *kwargs.values()):
            for tensor in tensors_of(value):
                fields = base_of(tensor).__dict__
                fields.pop(SEEN, None)
                fields.pop(PLACE, None)


def run_fake(
    mode: CheckMode, call: CallLookup | None, op: OpOverload, args: Sequence[Any], kwargs: Any
) -> Any:
    """Runs an operation on fake tensors of this mode, or makes its result from what is known.

    Raises:
        TransformError: torch cannot find shapes through the transforms that are active.
    """
    try:
        if op in _BY_TENSORS:
            with mode:
                return _BY_TENSORS[op](*args, **kwargs)
        if call is None or not _is_known(op):
            return _run(mode, op, args, kwargs)
        if call.known is not None:
            return make(mode, call.known, call.tensors)
        out = _run_distinct(mode, op, args, kwargs)
        call.known = _describe(op, args, kwargs, out, call.tensors)
        if call.known is not None:
            _RESULTS.put(call.key, call.known)
        return out
    except RuntimeError as error:
        if forward_level() < 0 or "devices, meta and" not in str(error):
            raise
        raise TransformError(
            f"torch finds no shapes through these transforms at {call_site()}. Take derivatives "
            "in reverse mode in place of forward mode, as jacrev(grad(f)) for hessian(f)."
        ) from error


def _run(mode: CheckMode, op: OpOverload, args: Sequence[Any], kwargs: Any) -> Any:
    made = mode.run_kernel(op, args, kwargs or {})
    return op(*args, **kwargs) if made is UNTRIED else made


def _run_distinct(mode: CheckMode, op: OpOverload, args: Sequence[Any], kwargs: Any) -> Any:
    """Runs an operation that can be looked up; on lists, on one of all items with equal operands.

    An optimizer has a thousand tensors in its lists, of as few shapes as one layer has.
    """
    lists = [each for each in args if type(each) in (list, tuple)]
    if not op.name().startswith("aten::_foreach_") or len({*map(len, lists)}) != 1:
        return _run(mode, op, args, kwargs)
    kinds = [tuple(map(_kind, items)) for items in zip(*lists, strict=True)]
    first = {kind: at for at, kind in [*enumerate(kinds)][::-1]}
    chosen = [[x[at] for at in first.values()] if type(x) in (list, tuple) else x for x in args]
    items = _describe_tensors(_run(mode, op, chosen, kwargs), ()) or ()
    made = {kind: item for kind, item in zip(first, items, strict=False) if item is not None}
    if len(made) < len(first):
        return _run(mode, op, args, kwargs)
    return [_make_one(mode, made[kind], ()) for kind in kinds]


def _kind(value: Any) -> Any:
    """Returns the number of a tensor's metadata, which `look_up` has noted, or a scalar's type."""
    return value.__dict__[SEEN][1] if type(value) is FakeTensor else type(value)


def _grouped_result(
    x: Tensor,
    weights: Tensor,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Makes the result of `grouped_mm`, whose meta kernel takes bfloat16 alone.

    The kernels of devices take other dtypes too (aten/src/ATen/native/GroupedMMUtils.h).
    """
    shape = [x.shape[-2], weights.shape[-1]]
    if x.ndim == weights.ndim == 3:
        shape = [x.shape[0], *shape]
    elif x.ndim == weights.ndim and offsets is not None:  # the groups are parts of what is summed
        shape = [offsets.shape[0], *shape]
    return x.new_empty(shape, dtype=out_dtype or x.dtype)


_BY_TENSORS: Final[dict[OpOverload, Callable[..., Any]]] = {
    _aten._grouped_mm.default: _grouped_result,
    _aten.native_layer_norm.default: native_layer_norm,  # torch runs it outside of its mode
}


def empty(
    mode: FakeTensorMode, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Makes a fake tensor of this mode: `torch.empty` without what it takes to get there."""
    if mode.shape_env is not None:
        return torch.empty(shape, dtype=dtype, device=device)
    with DisableTorchFunction(), DisableTorchDispatch():
        return make_fake(mode, torch.empty(shape, dtype=dtype, device="meta"), device)


def _describe(
    op: OpOverload, args: Sequence[Any], kwargs: Any, out: Any, operands: Sequence[Tensor]
) -> Result | None:
    """Describes a call; None if its result is not made of new memory and views alone."""
    container = type(out) if isinstance(out, list | tuple) else None
    if container not in (None, list, tuple):
        return None
    is_value = type(out) in PLAIN and not operands
    outs = () if is_value else [out] if container is None else out
    items = _describe_tensors(outs, operands)
    if items is None:
        return None
    arguments = name_arguments(op, args, kwargs or {})
    name, literals = op._schema.name.split("::")[1], literals_of(op, arguments)
    made = container, items, out if is_value else None
    found = Result(*made, op, name, literals, tuple(_named(op, args)), next(_COUNT))
    views = {item is not None and item.operand is not None for item in items}
    found.is_view = True in views
    found.is_real = any(item is not None and is_real(item.dtype) for item in items)
    # Typed anew each time is what has results of several kinds, or depends on more than types.
    is_plain = None not in items and len(views) <= 1 and (bool(items) or is_value)
    is_drawn = may_draw(op) and draws(op, arguments)
    is_unlike = op in _UNLIKE or rank_only(op, arguments) is not None or signature_of(op).branches
    found.repeats = is_plain and not is_drawn and not is_unlike
    return found


_UNLIKE: Final = frozenset((_aten.view.dtype, _aten.ones_like.default))
"""Calls whose results depend on more: bits have no type, and backwards start from ones."""


def _describe_tensors(
    outs: Sequence[Any], operands: Sequence[Tensor]
) -> tuple[_Made | None, ...] | None:
    """Describes results, which may be None; None if one is more than new memory or a view."""
    places = {tensor.untyped_storage()._cdata: at for at, tensor in enumerate(reversed(operands))}
    known = {id(operand) for operand in operands}
    made: list[_Made | None] = []
    new: set[int] = set()
    for item in outs:
        if item is None:
            made.append(None)
            continue
        if type(item) is not FakeTensor or not is_simple(item) or item.requires_grad:
            return None
        if id(item) in known:
            return None
        storage = item.untyped_storage()
        place = places.get(storage._cdata)
        at = None if place is None else len(operands) - 1 - place
        if at is None and (storage._cdata in new or not _fills(item, storage)):
            return None
        if at is not None and operands[at].dtype != item.dtype:
            return None  # offsets are in units of a dtype
        new.add(storage._cdata)
        offset = 0 if at is None else int(item.storage_offset() - operands[at].storage_offset())
        metadata = tuple(item.shape), item.stride(), item.dtype, item.fake_device
        made.append(_Made(number_of(*metadata), *metadata, at, offset))
    return tuple(made)


def literals_of(op: OpOverload, arguments: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Returns the arguments that are no tensors, by name, without those that are as by default."""
    defaults = signature_of(op).defaults
    return tuple(
        (name, value)
        for name, value in arguments.items()
        if not any(True for _ in tensors_of(value))
        and not (name in defaults and _same(value, defaults[name]))
    )


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def _fills(tensor: Tensor, storage: torch.UntypedStorage) -> bool:
    """Returns whether memory is what `torch.empty_strided` makes for a tensor."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    num_entries = last + 1 if tensor.numel() else 0
    return tensor.storage_offset() == 0 and storage.nbytes() == num_entries * tensor.itemsize


def _named(op: OpOverload, args: Sequence[Any]) -> list[tuple[str, int]]:
    """Returns name and position of each operand, in the order of `name_arguments`."""
    signature, at = signature_of(op), 0
    found: dict[str, list[tuple[str, int]]] = {name: [] for name in signature.defaults}
    for name, value in zip(signature.names, args, strict=False):
        places = range(at, at + len([*tensors_of(value)]))
        found[name] = [(name, place) for place in places]
        at += len(places)
    return [each for places in found.values() for each in places]


def make(mode: FakeTensorMode, result: Result, operands: Sequence[FakeTensor]) -> Any:
    """Makes the result of a call on these operands, which may be views of them."""
    if not result.items and result.container is None:
        return result.value
    if result.container is None:
        item = result.items[0]
        return None if item is None else _make_one(mode, item, operands)
    return result.container(
        [None if item is None else _make_one(mode, item, operands) for item in result.items]
    )


def _make_one(mode: FakeTensorMode, item: _Made, operands: Sequence[FakeTensor]) -> FakeTensor:
    operand = None if item.operand is None else operands[item.operand]
    with DisableTorchDispatch():
        made = torch.empty_strided(item.shape, item.stride, dtype=item.dtype, device="meta")
        if operand is not None:  # a view would ask for its device, for which torch imports DTensor
            offset = item.offset + operand.storage_offset()
            made.set_(operand.untyped_storage(), offset, item.shape, item.stride)
        fake = make_fake(mode, made, item.device)
        address = fake.untyped_storage()._cdata
    fake.__dict__[SEEN] = mode, item.number, address, item.shape, item.dtype
    return fake


def fake_mode(
    env: "ShapeEnv | None" = None, refuse_thread: Callable[[], object] = lambda: None
) -> CheckMode:
    """Makes a mode for one check; `env` has the sizes that are symbols.

    `refuse_thread` is called by operations on threads that the body has started. torch's memory
    would keep the shapes of every operation, a kilobyte each, and forget none.
    """
    # What a body closes over has the sizes that it has.
    mode = CheckMode(refuse_thread, allow_non_fake_inputs=True, shape_env=env, static_shapes=True)
    mode.cache_enabled = False
    return mode
