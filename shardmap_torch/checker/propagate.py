"""How the results of an ATen operation are cut, given how its operands are.

Rows of ours for what depends on sizes or is met at every step; torch's own sharding propagation,
that of DTensor, for all else. It is asked about one axis at a time, and only what it answers
without moving data counts.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from shardmap_torch.checker.calls import signature_of, writes_of
from shardmap_torch.checker.sharding import (
    ANY,
    Dim,
    Piece,
    Shape,
    Sizes,
    UnrelatedError,
    agreed,
    axes_of,
    broadcast,
    fill,
    reshape,
    spread,
    uncut,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class Sharded:
    """A result: its cuts, and axes over which the ranks' values still have to be added."""

    dims: tuple[Dim, ...]
    partial: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Step:
    """One operation in both programs.

    Attributes:
        op: the overload.
        arguments: those of the ranks' program by name, tensors replaced by pieces.
        whole: the other arguments on one device, where they differ.
        tensors: the tensors that stand behind the pieces, in order.
        results: shapes of each result in both programs.
        sizes: of the axes.
    """

    op: OpOverload
    arguments: Mapping[str, Any]
    whole: Mapping[str, Any]
    tensors: Sequence[Tensor]
    results: Sequence[tuple[Shape, Shape]]
    sizes: Sizes

    @property
    def pieces(self) -> list[Piece]:
        """All operands."""
        return list(pieces_of(list(self.arguments.values())))


Rule: TypeAlias = Callable[[Step], list[Sharded]]


def pieces_of(value: Any) -> list[Piece]:
    """The pieces in an argument, or in a list of arguments."""
    if isinstance(value, Piece):
        return [value]
    if isinstance(value, list | tuple):
        return [piece for item in value for piece in pieces_of(item)]
    return []


def propagate(step: Step) -> list[Sharded]:
    """One entry per result.

    Raises:
        UnrelatedError: the results are no pieces of those on one device.
    """
    rule = _rule_of(step.op)
    for name, there in step.whole.items():
        if name in _SIZES.get(rule, ()):
            continue
        raise UnrelatedError(
            f"its argument {name} is {step.arguments[name]} on a rank and {there} on one device",
            "a number that depends on local shapes must be right on one device too: multiply "
            "sizes by axis_size(axis).",
        )
    return rule(step)


# ------------------------------------------------------------------------------------- rows


def _pointwise(step: Step) -> list[Sharded]:
    pieces = step.pieces
    return [Sharded(broadcast(pieces, len(whole))) for _, whole in step.results]


def _listed(step: Step) -> list[Sharded]:
    """Lists that are processed position by position."""
    lists = [v for v in step.arguments.values() if isinstance(v, list | tuple) and pieces_of(v)]
    shared = [v for v in step.arguments.values() if isinstance(v, Piece)]
    found = []
    for index, (_, whole) in enumerate(step.results):
        at = index % len(lists[0])
        operands = [*(pieces_of(items)[at] for items in lists), *shared]
        if any(len(x.whole) > len(whole) for x in operands):
            raise UnrelatedError("it reduces each tensor of a list", _WRAP)
        found.append(Sharded(broadcast(operands, len(whole))))
    return found


def _reshaped(step: Step) -> list[Sharded]:
    (x,) = step.pieces
    return [Sharded(reshape(x, whole)) for _, whole in step.results]


def _expanded(step: Step) -> list[Sharded]:
    (x,) = step.pieces
    return [Sharded(spread(x, *shapes)) for shapes in step.results]


def _filled(step: Step) -> list[Sharded]:
    return [Sharded(fill(*shapes)) for shapes in step.results]


def _permuted(step: Step) -> list[Sharded]:
    (x,) = step.pieces
    order = _order(step.op, step.arguments, len(x.dims))
    return [Sharded(tuple(x.dims[dim] for dim in order))]


def _order(op: OpOverload, arguments: Mapping[str, Any], rank: int) -> list[int]:
    order = list(range(rank))
    if op is aten.permute.default:
        return [dim % rank for dim in arguments["dims"]]
    if op is aten.t.default:
        return order[::-1]
    first, second = arguments["dim0"], arguments["dim1"]
    if rank:
        order[first], order[second] = order[second], order[first]
    return order


def _joined(step: Step) -> list[Sharded]:
    """A concatenation: the dim along which it goes must be whole."""
    pieces = [x for x in step.pieces if x.whole != (0,)]
    rank = len(pieces[0].whole)
    dim = step.arguments["dim"] % rank
    if any(x.dims[dim] == ANY or axes_of(x.dims[dim]) for x in pieces):
        raise UnrelatedError(f"it joins along dim {dim}, which is cut", _GATHER)
    others = [other for other in range(rank) if other != dim]
    dims = broadcast([x.part(others) for x in pieces], rank - 1)
    joined = uncut(sum(x.whole[dim] for x in pieces))
    return [Sharded((*dims[:dim], joined, *dims[dim:]))]


def _stacked(step: Step) -> list[Sharded]:
    pieces = step.pieces
    rank = len(pieces[0].whole)
    dim = step.arguments["dim"] % (rank + 1)
    dims = broadcast(pieces, rank)
    return [Sharded((*dims[:dim], uncut(len(pieces)), *dims[dim:]))]


def _sliced(step: Step) -> list[Sharded]:
    (x,) = step.pieces
    dim = step.arguments["dim"] % len(x.dims)
    here = _range(step.arguments, x.local[dim])
    there = _range({**step.arguments, **step.whole}, x.whole[dim])
    full = here == range(x.local[dim]) and there == range(x.whole[dim])
    if full:
        return [Sharded(x.dims)]
    if axes_of(x.dims[dim]) or x.dims[dim] == ANY or here != there:
        raise UnrelatedError(f"it takes a part of dim {dim}, which is cut", _GATHER)
    return [Sharded((*x.dims[:dim], uncut(len(here)), *x.dims[dim + 1 :]))]


def _range(arguments: Mapping[str, Any], size: int) -> range:
    bounds = slice(arguments["start"], arguments["end"], arguments["step"])
    return range(*bounds.indices(size))


def _indexed(step: Step) -> list[Sharded]:
    """`x[:, ids]`: dims that are indexed must be whole; those of the indices take their place."""
    x, indices = step.arguments["self"], step.arguments["indices"]
    places = [dim for dim, index in enumerate(indices) if isinstance(index, Piece)]
    if any(x.dims[dim] == ANY or axes_of(x.dims[dim]) for dim in places):
        raise UnrelatedError("it picks entries along a dim that is cut", _WRAP)
    found = pieces_of(indices)
    rank = max(len(index.whole) for index in found)
    kept = [dim for dim in range(len(x.dims)) if dim not in places]
    adjacent = places == list(range(places[0], places[0] + len(places)))
    front = places[0] if adjacent else 0
    dims = [x.dims[dim] for dim in kept]
    return [Sharded((*dims[:front], *broadcast(found, rank), *dims[front:]))]


_GATHER: Final = "gather it first, with all_gather."


def einsum(equation: str) -> Rule:
    """A rule from letters for dims, as in "bmk,bkn->bmn".

    Dims of one letter must be cut alike; a letter that the result lacks is summed over, so that
    cutting it leaves a sum still to be taken. Dims of a capital letter are mixed otherwise, and
    must be whole. Operands beyond the letters are spread over the result, as in `addmm`.
    """
    inputs, output = equation.split("->")
    operands, results = inputs.split(","), output.split(",")

    def rule(step: Step) -> list[Sharded]:
        pieces = step.pieces[-len(operands) :]
        dims = {
            letter: agreed(
                [x.dims[at] for x, at in _places(letter, operands, pieces)], f"dim {letter}"
            )
            for letter in dict.fromkeys("".join(operands))
        }
        mixed = [letter for letter in dims if letter.isupper() and axes_of(dims[letter])]
        if mixed or any(dims[letter] == ANY for letter in dims if letter not in output):
            raise UnrelatedError("it mixes all entries along a dim that is cut", _WRAP)
        found = [tuple(dims[letter] for letter in result) for result in results]
        summed = [dims[letter] for letter in dims if letter.islower() and letter not in output]
        partial = frozenset(axis for dim in summed for axis in axes_of(dim))
        beside = step.pieces[: -len(operands)]
        if beside and ANY in found[0]:
            raise UnrelatedError("the size of an operand is that of a rank, and fits no cut yet")
        if beside and broadcast([*beside, _like(found[0])], len(found[0])) != found[0]:
            raise UnrelatedError("what is added is cut in another way than the product")
        if beside and partial:
            raise UnrelatedError(
                f"it adds a bias to a sum over {min(partial)!r} still to be taken: "
                "the bias would be counted once per rank",
                f"add the bias after the all_reduce over {min(partial)!r}.",
            )
        return [Sharded(dims_, partial) for dims_ in found]

    return rule


def _like(dims: Sequence[Dim]) -> Piece:
    whole = tuple(prod(base for _, base in dim) for dim in dims)
    local = tuple(prod(base for axis, base in dim if axis is None) for dim in dims)
    return Piece(tuple(dims), local, whole)


def _places(
    letter: str, operands: Sequence[str], pieces: Sequence[Piece]
) -> list[tuple[Piece, int]]:
    """The operands' dims of that letter; dims of size 1 are spread."""
    return [
        (x, at)
        for letters, x in zip(operands, pieces, strict=True)
        for at, other in enumerate(letters)
        if other == letter
    ]


def _overloads(names: str) -> list[OpOverload]:
    found = []
    for name in names.split():
        packet, _, which = name.partition(".")
        overload = getattr(getattr(aten, packet, None), which or "default", None)
        found += [overload] if overload is not None else []
    return found


RULES: Final[Mapping[OpOverload, Rule]] = {
    op: rule
    for rule, names in (
        (_pointwise, "copy_ copy _to_copy clone detach alias lift_fresh masked_fill.Scalar"),
        (_pointwise, "to.dtype to.dtype_layout to.device to.other"),
        (_pointwise, "masked_fill_.Scalar where.self where.ScalarOther where.ScalarSelf"),
        (_pointwise, "fill_.Scalar fill_.Tensor zero_ zeros_like ones_like full_like empty_like"),
        (_pointwise, "native_dropout bernoulli_.float bernoulli rand_like randn_like uniform_"),
        (_pointwise, "normal_ _conj _neg_view _conj_physical real imag masked_fill.Tensor"),
        (_reshaped, "view _unsafe_view reshape _reshape_alias unsqueeze squeeze squeeze.dim"),
        (_reshaped, "squeeze.dims view_copy"),
        (_expanded, "expand"),
        (
            _filled,
            "zeros ones full empty.memory_format scalar_tensor new_zeros new_ones",
        ),
        (_filled, "new_full new_empty _efficientzerotensor"),
        (_permuted, "permute t transpose.int"),
        (_joined, "cat"),
        (_stacked, "stack"),
        (_sliced, "slice.Tensor"),
        (_indexed, "index.Tensor"),
        (einsum("mk,kn->mn"), "mm addmm"),
        (einsum("bmk,bkn->bmn"), "bmm baddbmm"),
        (einsum("mk,k->m"), "mv addmv"),
        (einsum("k,k->"), "dot vdot"),
        (einsum("bhQD,bhKD,bhKE->bhQE,bhQ"), "_scaled_dot_product_flash_attention_for_cpu"),
    )
    for op in _overloads(names)
}

_SIZES: Final[Mapping[Rule, Collection[str]]] = {
    _reshaped: ("size", "shape", "stride"),
    _expanded: ("size",),
    _filled: ("size",),
    _sliced: ("start", "end"),
}
"""Arguments that are sizes, or positions held against them, and may differ in the two programs."""


# What torch's reference formulas are written in has no tags.
_POINTWISE_PRIMS: Final = frozenset(
    "abs add convert_element_type cos div eq exp ge gt le log lt maximum minimum mul ne neg pow"
    " rsqrt sin sqrt sub tanh where".split()
)


def _rule_of(op: OpOverload) -> Rule:
    found = RULES.get(op)
    if found is not None:
        return found
    namespace, name = op._schema.name.split("::")
    if torch.Tag.pointwise in op.tags or (namespace == "prims" and name in _POINTWISE_PRIMS):
        return _pointwise
    if op._schema.name.startswith(("aten::_foreach_", "aten::_fused_")):
        return _listed
    return _by_dtensor


# ---------------------------------------------------------------------------------- DTensor


@dataclass(frozen=True)
class _Slot:
    """Stands for one operand in the arguments of an operation."""

    shape: Shape
    dtype: torch.dtype
    dim: int | None


_EXTREMUM: Final = "wrap it and the all_reduce with op='max' or 'min' in one local_region."

_PENDING: Final = {
    "avg": (
        "it averages over a cut dim, and the mean of a part is not the mean",
        "take the sum, all_reduce it, and divide by the size on one device: x.shape[dim] * "
        "axis_size(axis).",
    ),
    "max": ("it takes the maximum over a cut dim", _EXTREMUM),
    "min": ("it takes the minimum over a cut dim", _EXTREMUM),
}


def _by_dtensor(step: Step) -> list[Sharded]:
    """Asks about each axis, and puts the answers together."""
    pieces = step.pieces
    axes = sorted({axis for x in pieces for axis in x.axes}, key=list(step.sizes).index)
    if any(ANY in x.dims for x in pieces):
        raise UnrelatedError("the size of an operand is that of a rank, and fits no cut yet")
    if writes_of(step.op, step.arguments) and axes:
        raise UnrelatedError("nothing is known about what it writes where operands are cut", _WRAP)
    dims: list[list[Dim]] = [list(map(uncut, whole)) for _, whole in step.results]
    partial: list[set[str]] = [set() for _ in step.results]
    for axis in axes:
        answers = _ask(step.op, _arguments_for(step, axis), step.sizes[axis])
        if len(answers) < len(step.results):
            raise UnrelatedError("torch does not know how its results are cut", _WRAP)
        for result, answer in enumerate(answers):
            if isinstance(answer, int):
                dims[result][answer] = _passed_on(axis, step, result, answer)
            elif answer == "sum":
                partial[result].add(axis)
            elif answer is not None:
                raise UnrelatedError(*_PENDING.get(answer, _UNKNOWN))
    return [
        Sharded(tuple(found), frozenset(sums)) for found, sums in zip(dims, partial, strict=True)
    ]


_WRAP: Final = "gather the operands first, or wrap per-rank code in local_region."
_UNKNOWN: Final = ("its result would still have to be combined over the ranks", _WRAP)


def _passed_on(axis: str, step: Step, result: int, dim: int) -> Dim:
    """The cut of a result's dim, which is that of the operands' dim that it comes from."""
    found = {x.dims[at] for x in step.pieces if (at := x.cut_by(axis)) is not None}
    whole = step.results[result][1][dim]
    if len(found) != 1 or prod(base for _, base in min(found)) != whole:
        raise UnrelatedError("it does not keep the dim that is cut as it is", _WRAP)
    return found.pop()


def _arguments_for(step: Step, axis: str) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    """Positional and keyword arguments as seen by one axis, over which tensors are whole."""
    tensors = iter(step.tensors)

    def seen(value: Any) -> Any:
        if isinstance(value, Piece):
            dim, shape = value.cut_by(axis), list(value.local)
            if dim is not None:
                shape[dim] *= step.sizes[axis]
            return _Slot(tuple(shape), next(tensors).dtype, dim)
        if isinstance(value, list | tuple):
            return tuple(map(seen, value))
        return value

    arguments = {name: seen(value) for name, value in step.arguments.items()}
    defaults = signature_of(step.op).defaults
    given = [a for a in step.op._schema.arguments if a.name in arguments]
    is_default = [
        a.name in defaults and arguments[a.name] == _hashable(defaults[a.name]) for a in given
    ]
    positional = [i for i, a in enumerate(given) if not a.kwarg_only]
    last = max((i for i in positional if not is_default[i]), default=-1)
    args = tuple(arguments[given[i].name] for i in positional if i <= last)
    kwargs = tuple(
        (a.name, arguments[a.name])
        for i, a in enumerate(given)
        if a.kwarg_only and not is_default[i]
    )
    return args, kwargs


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@lru_cache(maxsize=8192)
def _ask(op: OpOverload, arguments: Any, size: int) -> tuple[int | str | None, ...]:
    """For each result the dim that is cut, what is left to do ("sum"), or None where it is whole.

    Raises:
        UnrelatedError: torch would move data first, or does not know the operation.
    """
    args, kwargs = arguments
    # Outside of the interpreter's modes: what torch computes here is not the body's.
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        try:
            found = _propagator().propagate_op_sharding_non_cached(
                _schema(op, args, dict(kwargs), _mesh(size))
            )
        except Exception as error:
            raise UnrelatedError("torch does not know how its results are cut", _WRAP) from error
    if found.needs_redistribute:
        raise UnrelatedError("on cut operands it does not give parts of the result", _WRAP)
    specs = found.output_spec
    return tuple(map(_answer, specs if isinstance(specs, list | tuple) else [specs]))


def _answer(spec: Any) -> int | str | None:
    if spec is None:
        return None
    (placement,) = spec.placements
    if placement.is_replicate():
        return None
    if type(placement).__name__ == "Shard":
        return int(placement.dim)
    # A sum is one only if it is the plain kind: norms and masked lookups are subclasses.
    return str(placement.reduce_op) if type(placement).__name__ == "Partial" else "?"


@cache
def _propagator() -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor._op_dispatcher.sharding_propagator


@cache
def _mesh(size: int) -> Any:
    """A mesh without processes."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", torch.arange(size), _init_backend=False, _rank=0)


def _schema(op: OpOverload, args: Any, kwargs: Mapping[str, Any], mesh: Any) -> Any:
    from torch.distributed.tensor._op_schema import OpSchema

    def spec(value: Any) -> Any:
        if isinstance(value, _Slot):
            return _spec(value, mesh)
        # torch writes lists as lists.
        return [spec(item) for item in value] if isinstance(value, tuple) else value

    info = _propagator().op_to_schema_info.get(op)
    return OpSchema(
        op,
        tuple(map(spec, args)),
        {name: spec(value) for name, value in kwargs.items()},
        schema_info=info,
    )


def _spec(slot: _Slot, mesh: Any) -> Any:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    like = torch.empty(slot.shape, dtype=slot.dtype, device="meta")
    placement = Replicate() if slot.dim is None else Shard(slot.dim)
    meta = TensorMeta(like.shape, like.stride(), slot.dtype)
    return DTensorSpec(mesh, (placement,), tensor_meta=meta)
