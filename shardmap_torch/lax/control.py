"""Loops and branches with JAX's signatures, as Python runs them.

Each iteration is unrolled, as Python's own loop is: the checker sees it, and its collectives.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardmap_torch.core.tree import Tree, flatten, unflatten
from shardmap_torch.errors import TransformError, show

C = TypeVar("C")


def fori_loop(
    lower: int, upper: int, body_fun: Callable[[int, C], C], init_val: C, *, unroll: object = None
) -> C:
    """Applies `body_fun(i, value)` for i from `lower` to `upper` - 1, and returns the last value.

    Shape and types: as of `body_fun`. Sends what its iterations send. `i` is a Python integer.

    Args:
        lower: the first index, a Python integer.
        upper: one past the last index, a Python integer.
        body_fun: from an index and a value to the next value.
        init_val: a tensor or a pytree.
        unroll: without effect; all iterations are unrolled.

    Raises:
        TransformError: `body_fun` is no function; or a bound is no integer, as where it is a
            tensor: the number of iterations must not depend on data.

    Source: `jax.lax.fori_loop`.

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


def _require_callable(name: str, **functions: object) -> None:
    for word, function in functions.items():
        if not callable(function):
            raise TransformError(f"{name}: {word}={show(function)} is no function.")


def _stacked(results: list[Any]) -> Any:
    """Stacks the leaves of equal trees along a new dim 0."""
    if not results:
        return None
    columns = zip(*(flatten(result)[0] for result in results), strict=True)
    return unflatten(flatten(results[0])[1], map(torch.stack, columns))


def cond(
    pred: bool | Tensor,
    true_fun: Callable[..., C],
    false_fun: Callable[..., C],
    *operands: Any,
) -> C:
    """Returns `true_fun(*operands)` where `pred` holds, else `false_fun(*operands)`.

    Only one of them runs. The checker takes both ways, and requires that `pred` is equal on all
    ranks; `torch.where` selects where ranks differ. Shape and types: as of the functions. Sends
    what the chosen one sends.

    Args:
        pred: a bool, or a tensor of one.
        true_fun: called where it holds.
        false_fun: called where it does not.
        operands: their arguments.

    Raises:
        ShardTypeError: in the check, if ranks may branch differently.
        TransformError: `pred` is not one value, or a branch is no function.

    Source: `jax.lax.cond`.

    Example:
        >>> cond(torch.tensor(True), lambda x: 2 * x, lambda x: x, torch.tensor(3.0))
        tensor(6.)
    """
    _require_callable("cond", true_fun=true_fun, false_fun=false_fun)
    is_one = pred.numel() == 1 if isinstance(pred, Tensor) else isinstance(pred, bool | int | float)
    if not is_one:
        raise TransformError(f"cond: pred={show(pred)} is neither a bool nor a tensor of one.")
    return true_fun(*operands) if bool(pred) else false_fun(*operands)
