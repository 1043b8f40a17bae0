"""Loops and branches with JAX's signatures, as Python runs them.

Each iteration is unrolled, as Python's own loop is: the checker sees it, and its collectives.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardmap_torch.collectives.scope import current_scope
from shardmap_torch.core.tree import flatten, unflatten
from shardmap_torch.errors import TransformError, show
from shardmap_torch.types import V

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
    require_callable("fori_loop", body_fun=body_fun)
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
    bound in Python numbers, as in `k < 20 and error > 1e-6`. Shape and types: as of `body_fun`.
    Sends what its iterations send.

    Args:
        cond_fun: from a value to a bool, or to a tensor of one that is equal on all ranks.
        body_fun: from a value to the next one.
        init_val: a tensor or a pytree.

    Raises:
        ShardTypeError: in the check, if ranks may end differently, or after too many iterations.
        TransformError: the condition is not one value, or an argument is no function.

    Source: `jax.lax.while_loop`.

    Example:
        >>> while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, torch.tensor(1.0)))
        (3, tensor(8.))
    """
    require_callable("while_loop", cond_fun=cond_fun, body_fun=body_fun)
    value = init_val
    while _holds("while_loop: cond_fun(value)", cond_fun(value)):
        value = body_fun(value)
    return value


def cond(
    pred: bool | Tensor,
    true_fun: Callable[..., C],
    false_fun: Callable[..., C],
    *operands: Any,
) -> C:
    """Returns `true_fun(*operands)` where `pred` holds, else `false_fun(*operands)`.

    Where `pred` is equal on all ranks only one of them runs, and the checker takes both ways. Where
    it varies each rank runs both, so that collectives in them meet, and `torch.where` selects.
    Shape and types: as of the functions. Sends what they send.

    Args:
        pred: a bool, or a tensor of one.
        true_fun: called where it holds.
        false_fun: called where it does not.
        operands: their arguments.

    Raises:
        TransformError: `pred` is not one value, or a branch is no function; or `pred` varies, and
            the results are no equal trees.

    Source: `jax.lax.cond`.

    Example:
        >>> cond(torch.tensor(True), lambda x: 2 * x, lambda x: x, torch.tensor(3.0))
        tensor(6.)
    """
    require_callable("cond", true_fun=true_fun, false_fun=false_fun)
    if isinstance(pred, Tensor) and pred.numel() == 1 and _varies(pred):
        return _selected(pred, true_fun(*operands), false_fun(*operands))
    return true_fun(*operands) if _holds("cond: pred", pred) else false_fun(*operands)


def switch(index: int | Tensor, branches: Sequence[Callable[..., C]], *operands: Any) -> C:
    """Returns `branches[index](*operands)`; see `cond`.

    An index below 0 is read as 0, and one beyond the last branch as the last. Shape, types and
    bytes: as `cond`.

    Args:
        index: an integer, or a tensor of one.
        branches: functions of the operands.
        operands: their arguments.

    Raises:
        TransformError: there is no branch, or one is no function, or `index` is no integer.

    Source: `jax.lax.switch`.

    Example:
        >>> switch(torch.tensor(1), [lambda x: x, lambda x: 2 * x, lambda x: -x], torch.tensor(3.0))
        tensor(6.)
    """
    if not isinstance(branches, Sequence) or not branches:
        raise TransformError(f"switch: branches={show(branches)} is no sequence of functions.")
    require_callable("switch", **{f"branches[{k}]": each for k, each in enumerate(branches)})
    whole = isinstance(index, int) or (
        isinstance(index, Tensor) and not index.is_floating_point() and not index.is_complex()
    )
    if not whole:
        raise TransformError(f"switch: index={show(index)} is no integer.")
    chosen = branches[-1]
    for position in reversed(range(len(branches) - 1)):
        chosen = partial(cond, index <= position, branches[position], chosen)
    return chosen(*operands)


def _holds(what: str, pred: object) -> bool:
    """Reads a condition as a bool."""
    is_one = pred.numel() == 1 if isinstance(pred, Tensor) else isinstance(pred, bool | int | float)
    if not is_one:
        raise TransformError(f"{what}={show(pred)} is neither a bool nor a tensor of one.")
    return bool(pred)


def _varies(pred: Tensor) -> bool:
    """Returns whether the checker found that ranks may have different values."""
    scope = current_scope()
    types = None if scope is None else scope.types_of(tuple(sorted(scope.axes)), pred)
    return types is not None and V in types


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


def require_callable(name: str, **functions: object) -> None:
    """Raises an error for the first argument that is no function."""
    for word, function in functions.items():
        if not callable(function):
            raise TransformError(f"{name}: {word}={show(function)} is no function.")
