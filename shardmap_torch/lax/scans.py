"""Loops over the entries of tensors, by JAX's names.

Each iteration is unrolled, as Python's own loop is: the checker sees it, and its collectives.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardmap_torch.core.tree import Tree, flatten, unflatten
from shardmap_torch.errors import TransformError, show
from shardmap_torch.lax.control import require_callable
from shardmap_torch.ops.arguments import read_dim, read_tensor

C = TypeVar("C")
X = TypeVar("X")


def scan(
    f: Callable[[C, Any], tuple[C, Any]],
    init: C,
    xs: Tree = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: object = 1,
) -> tuple[C, Any]:
    """Applies `f(carry, x)` to the entries of `xs` along dim 0, and stacks what it returns beside.

    Shape: leaves of `xs` have n entries, and those of the second result too. Types: as of `f`.
    Sends what its iterations send.

    Args:
        f: from a carry and an entry to the next carry and a result.
        init: the first carry, a tensor or a pytree.
        xs: a tensor or a pytree of tensors; None where only `length` counts.
        length: number of iterations; needed without `xs`.
        reverse: whether to begin at the last entry; results stay at the places of their entries.
        unroll: without effect; all iterations are unrolled.

    Raises:
        TransformError: the leaves have different numbers of entries, or there is no length; or `f`
            is no function, or returns no pair.

    Source: `jax.lax.scan`.

    Example:
        >>> scan(lambda total, x: (total + x, total), torch.tensor(0.0), torch.arange(4.0))
        (tensor(6.), tensor([0., 0., 1., 3.]))
    """
    require_callable("scan", f=f)
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

    Shape: leaves of `xs` have n entries, and those of the result too. Types: as of `f`. Sends what
    its calls send.

    Args:
        f: from an entry to a result, a tensor or a pytree.
        xs: a tensor or a pytree of tensors.
        batch_size: without effect; all calls are unrolled.

    Raises:
        TransformError: as `scan`.

    Source: `jax.lax.map`.

    Example:
        >>> map(lambda x: x * 2, torch.arange(3.0))
        tensor([0., 2., 4.])
    """
    require_callable("map", f=f)
    return scan(lambda carry, x: (carry, f(x)), None, xs)[1]


def associative_scan(fn: Callable[[X, X], X], elems: X, reverse: bool = False, axis: int = 0) -> X:
    """Combines each entry along `axis` with all before it, by an associative function.

    `fn` is called on many entries at once, about log2 n times. Shape: unchanged. Types: as of `fn`.
    Sends what its calls send.

    Args:
        fn: from two values to one, of their shape; it acts on all entries along `axis` alike.
        elems: a tensor or a pytree of tensors, with one number of entries along `axis`.
        reverse: whether to combine each entry with all after it, the last one first.
        axis: the dim.

    Raises:
        TransformError: `fn` is no function, or the leaves have different numbers of entries.
        CollectiveError: a leaf is no tensor, or has no such dim.

    Source: `jax.lax.associative_scan`; the doubling of Hillis and Steele (1986).

    Example:
        >>> associative_scan(torch.add, torch.arange(5.0))
        tensor([ 0.,  1.,  3.,  6., 10.])
    """
    require_callable("associative_scan", fn=fn)
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


def _stacked(results: list[Any]) -> Any:
    """Stacks the leaves of equal trees along a new dim 0."""
    if not results:
        return None
    columns = zip(*(flatten(result)[0] for result in results), strict=True)
    return unflatten(flatten(results[0])[1], [torch.stack(column) for column in columns])
