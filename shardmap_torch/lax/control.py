"""Loops, branches and scans with JAX's signatures, as Python runs them.

Each iteration is unrolled, as Python's own loop is: the checker sees it, and its collectives. They
send what the functions send, and give the shapes and types that these give; `init` and `init_val`
are any trees, `xs` and `elems` of tensors. `unroll` and `batch_size` have no effect.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardmap_torch.core.tree import Tree, flatten, unflatten
from shardmap_torch.errors import TransformError, show
from shardmap_torch.ops.arguments import read_dim, read_tensor
from shardmap_torch.ops.body import types_of
from shardmap_torch.types import V

C = TypeVar("C")
X = TypeVar("X")


def fori_loop(
    lower: int, upper: int, body_fun: Callable[[int, C], C], init_val: C, *, unroll: object = None
) -> C:
    """Applies `body_fun(i, value)` for i from `lower` to `upper` - 1, and returns the last value.

    The bounds and `i` are Python integers: the number of iterations must not depend on data.

    Raises:
        TransformError: `body_fun` is no function, or a bound is no integer.

    Example:
        >>> fori_loop(0, 3, lambda i, x: x + i, torch.tensor(1.0))
        tensor(4.)
    """
    for word, bound in (("lower", lower), ("upper", upper)):
        if not isinstance(bound, int):
            raise TransformError(
                f"fori_loop: {word}={show(bound)} is no Python integer: the number of iterations "
                "must not depend on data."
            )
    _require_callable("fori_loop", body_fun=body_fun)
    value = init_val
    for index in range(lower, upper):
        value = body_fun(index, value)
    return value


def while_loop(
    cond_fun: Callable[[C], bool | Tensor], body_fun: Callable[[C], C], init_val: C
) -> C:
    """Applies `body_fun` as long as `cond_fun` of the value holds, and returns the last value.

    A condition on Python numbers is unrolled. One on a tensor is a branch in each iteration: the
    checker follows 64 paths at most, so that a number of iterations that depends on data needs a
    bound in Python numbers, as in `k < 20 and error > 1e-6`.

    Raises:
        ShardTypeError: in the check, if ranks may end differently, or after too many iterations.
        TransformError: the condition is not one value, or an argument is no function.

    Example:
        >>> while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, torch.tensor(1.0)))
        (3, tensor(8.))
    """
    _require_callable("while_loop", cond_fun=cond_fun, body_fun=body_fun)
    value = init_val
    while _holds("while_loop: cond_fun(value)", cond_fun(value)):
        value = body_fun(value)
    return value


def cond(
    pred: bool | Tensor, true_fun: Callable[..., C], false_fun: Callable[..., C], *operands: Any
) -> C:
    """Returns `true_fun(*operands)` where `pred` holds, else `false_fun(*operands)`.

    Where `pred` is equal on all ranks only one of them runs, and the checker takes both ways. Where
    it varies each rank runs both, so that collectives in them meet, and `torch.where` selects.

    Raises:
        TransformError: `pred` is not one value, or a branch is no function; or `pred` varies, and
            the results are no equal trees.

    Example:
        >>> cond(torch.tensor(True), lambda x: 2 * x, lambda x: x, torch.tensor(3.0))
        tensor(6.)
    """
    _require_callable("cond", true_fun=true_fun, false_fun=false_fun)
    if isinstance(pred, Tensor) and pred.numel() == 1 and V in (types_of(pred) or ()):
        return _selected(pred, true_fun(*operands), false_fun(*operands))
    return true_fun(*operands) if _holds("cond: pred", pred) else false_fun(*operands)


def switch(index: int | Tensor, branches: Sequence[Callable[..., C]], *operands: Any) -> C:
    """Returns `branches[index](*operands)`; see `cond` and `lax.control`.

    An index below 0 is read as 0, and one beyond the last branch as the last.

    Raises:
        TransformError: there is no branch, or one is no function, or `index` is no integer.

    Example:
        >>> switch(torch.tensor(1), [lambda x: x, lambda x: 2 * x, lambda x: -x], torch.tensor(3.0))
        tensor(6.)
    """
    if not isinstance(branches, Sequence) or not branches:
        raise TransformError(f"switch: branches={show(branches)} is no sequence of functions.")
    _require_callable("switch", **{f"branches[{k}]": each for k, each in enumerate(branches)})
    whole = isinstance(index, int) or (
        isinstance(index, Tensor) and not index.is_floating_point() and not index.is_complex()
    )
    if not whole:
        raise TransformError(f"switch: index={show(index)} is no integer.")
    chosen = branches[-1]
    for position in reversed(range(len(branches) - 1)):
        chosen = partial(cond, index <= position, branches[position], chosen)
    return chosen(*operands)


def scan(
    f: Callable[[C, Any], tuple[C, Any]],
    init: C,
    xs: Tree = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: object = 1,
) -> tuple[C, Any]:
    """Applies `f(carry, x)` to the entries of `xs` along dim 0, and stacks what it returns beside.

    `f` returns the next carry and a result. `length` is needed without `xs`. With `reverse` it
    begins at the last entry; results stay at the places of their entries.

    Raises:
        TransformError: the leaves have different numbers of entries, or there is no length; or `f`
            is no function, or returns no pair.

    Example:
        >>> scan(lambda total, x: (total + x, total), torch.tensor(0.0), torch.arange(4.0))
        (tensor(6.), tensor([0., 0., 1., 3.]))
    """
    _require_callable("scan", f=f)
    if length is not None and not (isinstance(length, int) and length >= 0):
        raise TransformError(f"scan: length={show(length)} is no number of iterations.")
    leaves, structure = flatten(xs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
    lengths = {len(leaf) for leaf in tensors} | ({length} if length is not None else set())
    if len(lengths) != 1 or len(tensors) != len(leaves):
        raise TransformError(
            f"scan: the leaves of xs must be tensors with one number of entries, which length= "
            f"may say; here they have {sorted(lengths)}."
        )
    order = range(lengths.pop())
    carry, found = init, []
    for at in reversed(order) if reverse else order:
        entry = unflatten(structure, [x[at] for x in tensors])
        pair = f(carry, entry)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TransformError(f"scan: f returns a carry and a result, not {show(pair)}.")
        carry = pair[0]
        found.append(pair[1])
    return carry, _stacked(found[::-1] if reverse else found)


def map(f: Callable[..., Any], xs: Tree, *, batch_size: object = None) -> Any:  # JAX's name
    """Applies `f` to the entries of `xs` along dim 0, and stacks its results.

    Raises:
        TransformError: as `scan`.

    Example:
        >>> map(lambda x: x * 2, torch.arange(3.0))
        tensor([0., 2., 4.])
    """
    _require_callable("map", f=f)
    return scan(lambda carry, x: (carry, f(x)), None, xs)[1]


def associative_scan(fn: Callable[[X, X], X], elems: X, reverse: bool = False, axis: int = 0) -> X:
    """Combines each entry along `axis` with all before it, by an associative function.

    `fn` is called on many entries at once, about log2 n times, and acts on all of them alike. With
    `reverse` each entry is combined with all after it, the last one first.

    Raises:
        TransformError: `fn` is no function, or the leaves have different numbers of entries.
        CollectiveError: a leaf is no tensor, or has no such dim.

    Source: the doubling of Hillis and Steele (1986).

    Example:
        >>> associative_scan(torch.add, torch.arange(5.0))
        tensor([ 0.,  1.,  3.,  6., 10.])
    """
    _require_callable("associative_scan", fn=fn)
    leaves, structure = flatten(elems)
    for leaf in leaves:
        read_tensor("associative_scan", leaf)
    dims = [read_dim("associative_scan", "axis", axis, leaf.ndim) for leaf in leaves]
    lengths = {leaf.shape[dim] for leaf, dim in zip(leaves, dims, strict=True)}
    if len(lengths) != 1:
        raise TransformError(
            "associative_scan: the leaves of elems must have one number of entries along axis; "
            f"here they have {sorted(lengths)}."
        )
    length, step = lengths.pop(), 1
    turned = [x.flip(dim) if reverse else x for x, dim in zip(leaves, dims, strict=True)]
    while step < length:
        parts = [(x, dim, x.narrow(dim, 0, step)) for x, dim in zip(turned, dims, strict=True)]
        before = unflatten(structure, [x.narrow(dim, 0, length - step) for x, dim, _ in parts])
        after = unflatten(structure, [x.narrow(dim, step, length - step) for x, dim, _ in parts])
        combined, returned = flatten(fn(before, after))
        if returned != structure:
            raise TransformError(
                f"associative_scan: fn returns {returned} for entries that are {structure}."
            )
        columns = zip(parts, combined, strict=True)
        turned = [torch.cat((first, y), dim) for (_, dim, first), y in columns]
        step *= 2
    found = [x.flip(dim) if reverse else x for x, dim in zip(turned, dims, strict=True)]
    result: X = unflatten(structure, found)
    return result


def _holds(what: str, pred: object) -> bool:
    """Reads a condition as a bool."""
    is_one = pred.numel() == 1 if isinstance(pred, Tensor) else isinstance(pred, bool | int | float)
    if not is_one:
        raise TransformError(f"{what}={show(pred)} is neither a bool nor a tensor of one.")
    return bool(pred)


def _selected(pred: Tensor, chosen: C, other: C) -> C:
    """Selects each leaf of two equal trees by a condition that varies between ranks."""
    (leaves, structure), (others, other_structure) = flatten(chosen), flatten(other)
    if structure != other_structure:
        raise TransformError(
            f"cond: the branches return {structure} and {other_structure}; where ranks choose "
            "differently they must return equal trees."
        )
    where = pred.reshape(()).bool()
    pairs = zip(leaves, others, strict=True)
    result: C = unflatten(structure, [torch.where(where, one, two) for one, two in pairs])
    return result


def _require_callable(name: str, **functions: object) -> None:
    """Raises an error for the first argument that is no function."""
    for word, function in functions.items():
        if not callable(function):
            raise TransformError(f"{name}: {word}={show(function)} is no function.")


def _stacked(results: list[Any]) -> Any:
    """Stacks the leaves of equal trees along a new dim 0."""
    if not results:
        return None
    columns = zip(*(flatten(result)[0] for result in results), strict=True)
    return unflatten(flatten(results[0])[1], [torch.stack(column) for column in columns])
