"""Custom operators that are interpreted as the operations that they stand for."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from torch import Tensor
from torch._ops import OpOverload

from shardmap_torch.checker.ir.observer import tensors_in
from shardmap_torch.checker.rules.registry import MEANINGS, row_of
from shardmap_torch.errors import ShardTypeError

Context: TypeAlias = AbstractContextManager[object]


def register_decomposition(op: OpOverload, f: Callable[..., Any]) -> None:
    """Tells the checker what a custom operator does by writing it in operations that it knows.

    Wherever the operator is met, in a forward or in a backward, the checker interprets `f` in its
    place: all types come from that, `Partial` and under global strictness `S(dim)` included. That
    `f` computes what the operator computes is believed: hold it against numbers with
    `validate_rule`, in a test. Shapes and dtypes are compared. Runs use the operator. A single row
    says less, and is quicker: see `register_rule`.

    Args:
        op: one overload, as in `torch.ops.mylib.rope.default`, that writes into no argument.
        f: takes the arguments of the operator, and gives its result.

    Raises:
        ShardTypeError: the operator is known already, or writes into an argument. When a body is
            checked: `f` gives another shape or dtype than the operator.

    Source: `spmd_types.register_decomposition`, which does so for a torch.autograd.Function.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, Partial, ShapeDtype, V, all_reduce, check_program
        >>> from shardmap_torch import I, make_mesh, reinterpret, shard_map
        >>> @torch.library.custom_op("readme_lib::swap", mutates_args=())
        ... def swap(x: torch.Tensor) -> torch.Tensor:
        ...     return torch.cat([-x[1:], x[:1]])
        >>> @swap.register_fake
        ... def _(x):
        ...     return torch.empty_like(x)
        >>> register_decomposition(
        ...     torch.ops.readme_lib.swap.default, lambda x: torch.cat([-x[1:], x[:1]])
        ... )
        >>> mesh = make_mesh((8,), ("tp",), kind="abstract")
        >>> @shard_map(mesh=mesh, in_specs=P("tp"), out_specs=P())
        ... def body(x):
        ...     return all_reduce(swap(reinterpret(x, "tp", src=V, dst=Partial)), "tp", dst=I)
        >>> body(ShapeDtype((16,)))
        ShapeDtype(shape=(2,), dtype=torch.float32, requires_grad=False)
    """
    if op in MEANINGS or row_of(op) is not None:
        raise ShardTypeError(f"register_decomposition: {op} has a rule already.")
    if op._schema.is_mutable:
        raise ShardTypeError(
            f"register_decomposition: {op} writes into an argument, which a function that only "
            "gives a result cannot say. Write it without mutates_args, and copy in the body."
        )
    MEANINGS[op] = f


def interpreted(
    op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], context: Context
) -> Any:
    """Runs the decomposition of an operator under `context`, which sees its operations.

    Raises:
        ShardTypeError: the operator gives another shape or dtype.
    """
    with context:
        out = MEANINGS[op](*args, **kwargs)
        taken = {_memory(t) for value in (*args, *kwargs.values()) for t in tensors_in(value)}
        out = _own(out, taken)
    made, wanted = _described(out), _described(op(*args, **kwargs))
    if made != wanted:
        raise ShardTypeError(f"{op} gives {wanted}, and its decomposition {made}.")
    return out


def _own(out: Any, taken: set[int]) -> Any:
    """Gives results memory of their own, as an operator does, where they share it."""
    if isinstance(out, tuple | list):
        return type(out)([_own(item, taken) for item in out])
    if isinstance(out, Tensor) and _memory(out) in taken:
        return out.clone()
    taken.update(map(_memory, tensors_in(out)))
    return out


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _described(out: Any) -> str:
    if isinstance(out, tuple | list):
        return f"[{', '.join(map(_described, out))}]"
    if not isinstance(out, Tensor):
        return repr(out)
    return f"{str(out.dtype).removeprefix('torch.')}{list(out.shape)}"
