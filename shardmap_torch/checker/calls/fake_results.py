"""Results of operations on fake tensors, made again from what is known of them.

torch has such a memory too, which takes as long as all else in a check: it makes a key of 17 fields
of every operand, and knows a view at another offset of its storage for another call. Here the key
is shapes, strides, dtypes and devices, and the offset of a view is relative to its operand's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor

from shardmap_torch.core.caching import Memo
from shardmap_torch.core.source_location import call_site
from shardmap_torch.core.torch_private.engine import (
    DisableTorchDispatch,
    DisableTorchFunction,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    forward_level,
    has_kernel,
    make_subclass,
    set_throw_on_data_pointer,
)
from shardmap_torch.errors import TransformError

if TYPE_CHECKING:  # for annotations; it takes a second to import
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

Key: TypeAlias = tuple[Any, ...]
"""Of a call: operations with equal keys have equal results, up to the values."""

REMEMBERED: Final = 4096
"""Number of calls of which torch may keep the shapes."""

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

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    operand: int | None
    offset: int


@dataclass(frozen=True, slots=True)
class Result:
    """The results of a call, up to their values; `container` is the type of their list, if any.

    What a call without tensors returns, such as a dtype, is `value`; then there are no items.
    """

    container: type | None
    items: tuple[_Made | None, ...]
    value: Any = None


_RESULTS: Final = Memo[Result](16384)


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


def key_of(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Key | None:
    """Returns the key of a call on fake tensors; None where more counts than shapes and dtypes."""
    if not _is_known(op) or torch.is_inference_mode_enabled():
        return None
    key: list[Any] = [op, torch.get_default_dtype()]
    for value in args:
        if not _add(key, value):
            return None
    for name, value in kwargs.items():
        key.append(name)
        if isinstance(value, Tensor | list) or not _add(key, value):
            return None  # results are views of what is passed by position only
    return tuple(key)


def _add(key: list[Any], value: Any) -> bool:
    cls = type(value)
    if cls is FakeTensor:
        if not is_simple(value):
            return False
        key.append((value.dtype, value.shape, value.stride(), value.fake_device))
    elif value is None:
        key.append(None)
    elif cls in PLAIN:
        key.append(cls)  # 1 and 1.0 are equal
        key.append(value)
    elif cls in (list, tuple):
        key.append(len(value))
        return all(_add(key, item) for item in value)
    else:
        return False
    return True


def is_simple(tensor: FakeTensor) -> bool:
    """Returns whether shape, strides, dtype and device say all about a tensor but its values."""
    return (
        tensor.constant is None
        and tensor.layout is torch.strided
        and not tensor.dtype.is_complex
        and not tensor.is_neg()
        and not tensor._is_zerotensor()  # a tangent that forward mode leaves out
        and not tensor.is_quantized
    )


def run_fake(
    mode: FakeTensorMode, key: Key | None, op: OpOverload, args: Sequence[Any], kwargs: Any
) -> Any:
    """Runs an operation on fake tensors of this mode, or makes its result from what is known.

    Raises:
        TransformError: torch cannot find shapes through the transforms that are active.
    """
    try:
        if op is _GROUPED_MM:
            with mode:
                return _grouped_result(*args, **kwargs)
        return _result(mode, key, op, args, kwargs)
    except RuntimeError as error:
        if forward_level() < 0 or "devices, meta and" not in str(error):
            raise
        raise TransformError(
            f"torch finds no shapes through these transforms at {call_site()}. Take derivatives "
            "in reverse mode in place of forward mode, as jacrev(grad(f)) for hessian(f)."
        ) from error


_GROUPED_MM: Final = torch.ops.aten._grouped_mm.default


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


def _result(
    mode: FakeTensorMode, key: Key | None, op: OpOverload, args: Sequence[Any], kwargs: Any
) -> Any:
    if key is None:
        if mode.shape_env is None and _is_in_place_on_lists(op):
            args, _ = _distinct(args, kwargs) or (args, ())
        # torch remembers calls by operands of which it does not see whether they are zeros.
        before, mode.cache_enabled = mode.cache_enabled, forward_level() < 0
        try:
            return op(*args, **kwargs)
        finally:
            mode.cache_enabled = before
    known = _RESULTS.find(key)
    if known is not None:
        return make(mode, known, _operands(args))
    of_lists = _describe_lists(op, args, kwargs) if _is_on_lists(op) else None
    if of_lists is not None:
        _RESULTS.put(key, of_lists)
        return make(mode, of_lists, _operands(args))
    out = op(*args, **kwargs)
    result = _describe(out, args)
    if result is not None:
        _RESULTS.put(key, result)
    return out


def _describe_lists(op: OpOverload, args: Sequence[Any], kwargs: Any) -> Result | None:
    """Describes new results for lists by one of all equal positions; None if some are not new."""
    found = _distinct(args, kwargs)
    if found is None:
        return None
    few, places = found
    result = _describe(op(*few, **kwargs), few)
    if result is None or any(item is None or item.operand is not None for item in result.items):
        return None
    return Result(result.container, tuple([result.items[place] for place in places]))


@lru_cache(maxsize=4096)
def _is_on_lists(op: OpOverload) -> bool:
    """Returns whether an operation maps lists of tensors to a list, position by position."""
    return op._schema.name.startswith("aten::_foreach_") and len(op._schema.returns) == 1


@lru_cache(maxsize=4096)
def _is_in_place_on_lists(op: OpOverload) -> bool:
    """Returns whether an operation does so in the memory of the first list."""
    name = op._schema.name
    return name.startswith("aten::_foreach_") and name.endswith("_")


def _distinct(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Sequence[int]] | None:
    """Returns the arguments with one of all positions at which lists have equal tensors.

    That is one for each kind of parameter, where an optimizer has one for each layer. Returns in
    addition the place among these of every position; None where they are not tensors alone.
    """
    lists = [value for value in args if type(value) in (list, tuple)]
    named = any(isinstance(value, Tensor | list | tuple) for value in kwargs.values())
    if named or len({len(value) for value in lists}) != 1:
        return None
    known: dict[Key, int] = {}
    firsts: list[int] = []
    places: list[int] = []
    for at, items in enumerate(zip(*lists, strict=True)):
        key: list[Any] = []
        if not all(type(item) is FakeTensor and _add(key, item) for item in items):
            return None
        place = known.setdefault(tuple(key), len(known))
        if place == len(firsts):
            firsts.append(at)
        places.append(place)
    few = [
        [value[at] for at in firsts] if type(value) in (list, tuple) else value for value in args
    ]
    return few, places


def empty(
    mode: FakeTensorMode, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Makes a fake tensor of this mode: `torch.empty` without what it takes to get there."""
    if mode.shape_env is not None:
        return torch.empty(shape, dtype=dtype, device=device)
    with DisableTorchFunction(), DisableTorchDispatch():
        return _make_fake(mode, torch.empty(shape, dtype=dtype, device="meta"), device)


def _make_fake(mode: FakeTensorMode, meta: Tensor, device: torch.device) -> FakeTensor:
    """Makes a fake tensor as torch makes it, which takes as long as an operation on it.

    Its fields are those of the first one of the mode, which torch has made.
    """
    fields = mode.__dict__.setdefault("_shardmap_fields", {})
    if device not in fields:
        first = FakeTensor(mode, meta, device)
        fields[device] = dict(first.__dict__)
        return first
    made: FakeTensor = make_subclass(
        FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
    )
    set_throw_on_data_pointer(made)
    made.__dict__.update(fields[device])
    return made


def _operands(args: Sequence[Any]) -> list[FakeTensor]:
    """Returns the tensors among arguments by position; views are never those of a named one."""
    found = []
    for value in args:
        items = value if isinstance(value, list | tuple) else (value,)
        found += [item for item in items if isinstance(item, FakeTensor)]
    return found


def _describe(out: Any, args: Sequence[Any]) -> Result | None:
    """Describes a result; None if it is not made of new memory and views alone."""
    container = type(out) if isinstance(out, list | tuple) else None
    if container not in (None, list, tuple):
        return None
    items = [out] if container is None else out
    operands = _operands(args)
    if type(out) in PLAIN and not operands:
        return Result(None, (), out)
    places = {tensor.untyped_storage()._cdata: at for at, tensor in enumerate(reversed(operands))}
    made: list[_Made | None] = []
    new: set[int] = set()
    for item in items:
        if item is None:
            made.append(None)
            continue
        if type(item) is not FakeTensor or not is_simple(item) or item.requires_grad:
            return None
        if any(item is operand for operand in operands):
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
        shape, stride = tuple(item.shape), item.stride()
        made.append(_Made(shape, stride, item.dtype, item.fake_device, at, offset))
    return Result(container, tuple(made))


def _fills(tensor: Tensor, storage: torch.UntypedStorage) -> bool:
    """Returns whether memory is what `torch.empty_strided` makes for a tensor."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    num_entries = last + 1 if tensor.numel() else 0
    return tensor.storage_offset() == 0 and storage.nbytes() == num_entries * tensor.itemsize


def described(key: Key | None) -> Result | None:
    """Returns what is known of the result of calls with this key."""
    return None if key is None else _RESULTS.find(key)


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
        if operand is not None:
            offset = item.offset + operand.storage_offset()
            made.set_(operand.untyped_storage(), offset, item.shape, item.stride)
        return _make_fake(mode, made, item.device)


def fake_mode(env: "ShapeEnv | None" = None) -> FakeTensorMode:
    """Makes a mode for one check; `env` has the sizes that are symbols.

    torch remembers the shapes of every operation that any mode has seen, a kilobyte each, and
    forgets none, also those of signatures that were evicted long ago; beyond `REMEMBERED` it has to
    begin again.
    """
    if len(FakeTensorMode.cache) > REMEMBERED:
        FakeTensorMode.cache_clear()
    # What a body closes over has the sizes that it has.
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=env, static_shapes=True)
