"""`register_decomposition`: custom operators interpreted as compositions of known operations."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from torch import Tensor

from shardmap_torch.checker.ir.observer import tensors_in
from shardmap_torch.checker.rules.registry import MEANINGS, row_of
from shardmap_torch.core.torch_private.engine import OpOverload
from shardmap_torch.errors import ShardTypeError, show_shape

Context: TypeAlias = AbstractContextManager[object]


def register_decomposition(op: OpOverload, f: Callable[..., Any]) -> None:
    """Defines a custom operator for the checker as a composition of operations that it knows.

    In place of the operator, in a forward or in a backward, the checker interprets `f`, from which
    all types come, including `Partial` and, under global strictness, `S(dim)`. It trusts that `f`
    computes what the operator computes: compare them with `validate_rule`, in a test. Shapes and
    dtypes are compared. Runs use the operator. A single row says less, and is quicker: see
    `register_rule`.

    Args:
        op: one overload, as in `torch.ops.mylib.rope.default`, that writes into no argument.
        f: takes the arguments of the operator, and returns its result.

    Raises:
        ShardTypeError: the operator has a rule already, or writes into an argument. When a body is
            checked: `f` returns another shape or dtype than the operator.

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
    """Runs the decomposition of an operator under the mode `context`, which types its operations.

    Raises:
        ShardTypeError: the operator returns another shape or dtype.
    """
    with context:
        out = MEANINGS[op](*args, **kwargs)
        memory = {_memory(t) for value in (*args, *kwargs.values()) for t in tensors_in(value)}
        out = _own(out, memory)
    actual, expected = _described(out), _described(op(*args, **kwargs))
    if actual != expected:
        raise ShardTypeError(f"{op} gives {expected}, and its decomposition {actual}.")
    return out


def _own(out: Any, memory: set[int]) -> Any:
    """Copies results that share memory, since those of an operator share none."""
    if isinstance(out, tuple | list):
        return type(out)([_own(item, memory) for item in out])
    if isinstance(out, Tensor) and _memory(out) in memory:
        return out.clone()
    memory.update(map(_memory, tensors_in(out)))
    return out


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _described(out: Any) -> str:
    if isinstance(out, tuple | list):
        return f"[{', '.join(map(_described, out))}]"
    if not isinstance(out, Tensor):
        return repr(out)
    return show_shape(out.dtype, out.shape)
