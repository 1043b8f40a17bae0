"""Reads and checks the arguments that the public collectives share: axes, types, dims, sizes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias, TypeVar

import torch
from torch import Tensor

from shardmap_torch.collectives.operations import Collective, collective_of
from shardmap_torch.collectives.scope import Scope, current_scope, scope_of
from shardmap_torch.core.functorch import can_receive_gradient
from shardmap_torch.core.source_location import user_call
from shardmap_torch.core.source_text import call_text
from shardmap_torch.core.tree import Tree, flatten, map_leaves, unflatten
from shardmap_torch.errors import CollectiveError, show
from shardmap_torch.spec import P, expanded
from shardmap_torch.types import AxisType, I, R, TypeLike, as_type

Axis: TypeAlias = str | Sequence[str]
"""One axis name, or several that act as one, the first of them major."""

X = TypeVar("X")


def read_axes(name: str, axis: Axis) -> tuple[tuple[str, ...], Scope]:
    """Returns the axes, those of views by their parts, and the scope that binds all of them."""
    if isinstance(axis, str):
        axes: tuple[str, ...] = (axis,)
        scope = current_scope()
        if scope is not None and axis in scope.axes and not scope.backend.mesh.aliases:
            return axes, scope
    elif isinstance(axis, Sequence) and all(isinstance(each, str) for each in axis):
        axes = tuple(axis)
    else:
        raise CollectiveError(f"{name}: axis={show(axis)} is no axis name and no sequence of them.")
    parts = finest(axes)
    if axes and not parts:  # axes of one rank, that a view adds: there is nobody to talk to
        return parts, scope_of(name, sorted(_bound())[:1])
    return parts, scope_of(name, parts)


def _bound() -> frozenset[str]:
    scope = current_scope()
    return frozenset() if scope is None else scope.axes


def finest(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Replaces axes of views of the mesh by the finest axes that make them up; see `make_mesh`."""
    scope = current_scope()
    if scope is None or not scope.backend.mesh.aliases:
        return axes
    return scope.backend.mesh.finest(axes)


def finest_spec(spec: P) -> P:
    """Replaces the axes of a spec by those of the finest view."""
    scope = current_scope()
    return spec if scope is None else expanded(spec, scope.backend.mesh.aliases)


def read_type(
    name: str, value: TypeLike | None, word: str, allowed: Sequence[AxisType]
) -> AxisType:
    """Reads `src=` or `dst=`, which must be one of `allowed`."""
    known = ", ".join(map(repr, allowed))
    if value is None and word == "dst" and set(allowed) == {I, R}:
        raise CollectiveError(_what_dst_says(name))
    if value is None:
        raise CollectiveError(f"{name} needs {word}=, one of {known}.")
    axis_type = as_type(value)
    if axis_type not in allowed:
        raise CollectiveError(f"{name}: {word}={axis_type} is none of {known}.")
    return axis_type


def _what_dst_says(name: str) -> str:
    """Explains I and R to whoever calls a collective without `dst=`, as in JAX or torch."""
    found = user_call()
    call = "" if found is None else call_text(found[0])
    fix = f"{call[:-1].rstrip(' ,')}, dst=I)" if call and "dst" not in call else "say dst=I"
    return (
        f"{name} needs dst=: all ranks get the same, and its gradient depends on what they do with "
        "it next.\n"
        "  dst=I: all do the same, as with a loss or a residual stream: each has the whole "
        "gradient, and the backward sends nothing.\n"
        "  dst=R: each does something else, as to multiply it by its own columns of weights: each "
        "has an addend of the gradient, and the backward sums them.\n"
        f"Fix: {fix}, or with dst=R; in a checked body the one that does not fit is refused."
    )


def read_items(name: str, word: str, value: Iterable[Any]) -> tuple[Any, ...]:
    """Reads an iterable argument into a tuple."""
    try:
        return tuple(value)
    except Exception as error:  # whatever an `__iter__` raises
        raise CollectiveError(f"{name}: {word}={show(value)} is no sequence.") from error


def each_leaf(name: str, x: X, function: Callable[[Tensor], Tensor]) -> X:
    """Applies `function` to every leaf of `x`, all of which must be tensors."""
    if isinstance(x, Tensor):
        return function(x)  # type: ignore[return-value]  # X is Tensor here

    def checked(leaf: Any) -> Tensor:
        return function(read_tensor(name, leaf))

    result: Tree = map_leaves(checked, x)
    return result  # type: ignore[no-any-return]


def all_leaves(name: str, x: X, function: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> X:
    """Applies `function` to all leaves of `x` at once, all of which must be tensors."""
    if isinstance(x, Tensor):
        return function([x])[0]  # type: ignore[return-value]  # X is Tensor here
    leaves, structure = flatten(x)
    result: Tree = unflatten(structure, function([read_tensor(name, leaf) for leaf in leaves]))
    return result  # type: ignore[no-any-return]


def read_tensor(name: str, leaf: Any) -> Tensor:
    """Returns a leaf, which must be a tensor."""
    if isinstance(leaf, Tensor):
        return leaf
    raise CollectiveError(
        f"{name} takes tensors, or pytrees of them, not {type(leaf).__name__} ({show(leaf)})."
    )


def read_dim(name: str, word: str, dim: int, ndim: int) -> int:
    """Reads a dim, counted from the front; it must be one of `ndim` dims."""
    if not isinstance(dim, int) or isinstance(dim, bool) or not -ndim <= dim < ndim:
        explanation = f"it has {ndim} dims" if ndim else "it is a scalar; x[None] has a dim"
        raise CollectiveError(
            f"{name}: {word}={show(dim)} is no dim of the operand; {explanation}."
        )
    return dim % ndim


def check_tiled(name: str, tiled: object) -> None:
    """Requires True or False."""
    if not isinstance(tiled, bool):
        raise CollectiveError(f"{name}: tiled={show(tiled)} is neither True nor False.")


def check_divides(name: str, word: str, length: int, axes: tuple[str, ...], num_ranks: int) -> None:
    """Requires that a dim of `length` splits evenly over the ranks."""
    if length % num_ranks:
        raise CollectiveError(
            f"{name}: {word} has size {length}, which does not divide over the {num_ranks} ranks "
            f"of {shown(axes)} ({length} = {length // num_ranks}*{num_ranks} + "
            f"{length % num_ranks}). Pass sizes=, or pad it."
        )


def check_sizes(
    name: str, word: str, sizes: Sequence[int] | None, num_ranks: int
) -> tuple[int, ...] | None:
    """Reads the unpadded lengths, one per rank."""
    if sizes is None:
        return None
    known = read_items(name, word, sizes)
    if len(known) != num_ranks or not all(isinstance(s, int) and s >= 0 for s in known):
        raise CollectiveError(
            f"{name}: {word}={show(known)} must be {num_ranks} non-negative integers, one per rank."
        )
    return known


def check_length(name: str, word: str, length: int, expected: int, why: str) -> None:
    """Requires that a dim has exactly the length that `sizes` imply."""
    if length != expected:
        raise CollectiveError(f"{name}: {word} has size {length}, not {expected}, {why}.")


def collective_in(
    dtypes: Sequence[torch.dtype | None],
    name: str,
    src: AxisType,
    dst: AxisType,
    axes: tuple[str, ...],
    **arguments: Any,
) -> Collective:
    """Makes a collective in `comm_dtype`, `grad_comm_dtype` and `out_dtype`, as far as given."""
    for word, dtype in zip(_DTYPES, dtypes, strict=False):
        if dtype is not None:
            arguments[word] = dtype
    return check_dtypes(collective_of(name, src, dst, axes, **arguments))


_DTYPES: Final = ("comm_dtype", "grad_comm_dtype", "out_dtype")


def check_dtypes(collective: Collective) -> Collective:
    """Requires that the dtypes of a collective are floating ones."""
    for word in _DTYPES:
        dtype = getattr(collective, word)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise CollectiveError(f"{collective.name}: {word}={show(dtype)} is no floating dtype.")
    return collective


def for_operand(collective: Collective, x: Tensor) -> Collective:
    """The collective for an operand, with the dtypes in which that is sent and added.

    Where a gradient flows and the backward adds as well, a reduced precision of the forward asks
    for one of the backward: nobody should have to guess it.
    """
    if collective.comm_dtype is None and collective.out_dtype is None:
        return collective
    reduced = collective.comm_dtype not in (None, x.dtype) and collective.grad_comm_dtype is None
    if reduced and can_receive_gradient(x) and collective.transpose.movement.adds:
        raise CollectiveError(
            f"{collective.name}: with comm_dtype={collective.comm_dtype} its backward, "
            f"{collective.transpose.name}, adds over ranks as well; name its precision with "
            "grad_comm_dtype=."
        )
    if collective.out_dtype is None:
        return collective
    if not x.is_floating_point():
        raise CollectiveError(
            f"{collective.name}: out_dtype={collective.out_dtype} needs a floating operand, not "
            f"{x.dtype}."
        )
    return replace(collective, in_dtype=x.dtype)


def shown(axes: tuple[str, ...]) -> str:
    """Formats axes as the user wrote them: 'tp' or ('dp', 'tp')."""
    return repr(axes[0]) if len(axes) == 1 else repr(axes)
