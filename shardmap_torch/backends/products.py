"""Products of the values of all ranks in a batched body, without copies for each rank.

The batching rule of torch's matmul repeats an operand that is equal on all ranks, and writes the
addends of all ranks of what is summed. `einsum` takes stacks in which ranks have length 1: those on
which one operand is equal become rows or columns of the other one, and ranks over which is summed a
part of the contracted dim.
"""

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from shardmap_torch.backends.folding import is_plain, is_sum
from shardmap_torch.backends.traffic import pass_door
from shardmap_torch.backends.vmap import BatchedBackend
from shardmap_torch.collectives.autograd import TypedFunction, bind
from shardmap_torch.collectives.operations import Collective, Planned
from shardmap_torch.collectives.protocol import Backend
from shardmap_torch.types import I, V

_RANKS: Final = "ABCDEFGH"
_ROWS: Final = "abcdefgh"
_COLUMNS: Final = "stuvwxyz"

_Names: TypeAlias = tuple[str, str, str]
"""A letter for each dim of two operands and of their product. Capitals, which all three have, are
ranks: an operand has length 1 there if it is equal on them, a product also if it is their sum."""


def multiply(backend: Backend, x: Tensor, w: Tensor) -> Tensor:
    """Multiplies in a body: x [..., k], w [k, n, ...] -> [..., n, ...]."""
    y = _product_of_all(backend, x, w, ()) if isinstance(backend, BatchedBackend) else None
    if y is not None:
        return y
    return x @ w if w.ndim == 2 else (x @ w.flatten(1)).unflatten(-1, w.shape[1:])


def multiply_and_sum(
    backend: Backend, collective: Collective | Planned, x: Tensor, w: Tensor
) -> Tensor:
    """Applies an all-reduce or a reduce-scatter to `multiply(backend, x, w)`."""
    y = None
    if isinstance(backend, BatchedBackend) and isinstance(collective, Collective):
        y = _product_of_all(backend, x, w, collective.axes) if is_sum(collective) else None
    if y is None or not isinstance(collective, Collective):
        return bind(backend, collective, multiply(backend, x, w))
    pass_door(collective, y.nbytes, backend.mesh.num_ranks(collective.axes))
    if collective.movement.equal:
        return y
    return bind(backend, Collective("convert", I, V, collective.axes, dim=collective.dim), y)


def _product_of_all(
    backend: BatchedBackend, x: Tensor, w: Tensor, summed: Sequence[str]
) -> Tensor | None:
    """Multiplies for all ranks of a batched body, and sums over axes; None where it cannot."""
    if torch.compiler.is_compiling():
        return None

    def product(x: Tensor, w: Tensor, sizes: tuple[int, ...]) -> Tensor | None:
        counts = len(sizes), x.ndim - len(sizes) - 1, w.ndim - len(sizes) - 1
        if max(counts) > len(_RANKS) or not is_plain(x, w):
            return None
        names = zip((_RANKS, _ROWS, _COLUMNS), counts, strict=True)
        ranks, rows, columns = [letters[:count] for letters, count in names]
        of = f"{ranks}{rows}k", f"{ranks}k{columns}", f"{ranks}{rows}{columns}"
        y: Tensor = _Product.apply(x, w, of, sizes)
        return y

    return backend.on_stacks(product, x, w, summed=summed)


class _Product(TypedFunction):
    """Autograd Function of a product of two stacks, whose dims of ranks get the lengths `sizes`.

    Autograd of `einsum` would copy a weight for the ranks that have a gradient of it each.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, of: _Names, sizes: tuple[int, ...]) -> Tensor:
        """Multiplies; autograd would refuse writes into a view."""
        ctx.save_for_backward(a, b)
        ctx.of = of
        return _multiplied(a, b, of, sizes).data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Multiplies in the same way, so that it may be differentiated again."""
        a, b = ctx.saved_tensors
        of_a, of_b, of_y = ctx.of
        needs_a, needs_b, *_ = ctx.needs_input_grad
        count = sum(map(str.isupper, of_y))
        product = _Product.apply if torch.is_grad_enabled() else _multiplied
        da = product(grad, b, (of_y, of_b, of_a), a.shape[:count]) if needs_a else None
        db = product(a, grad, (of_a, of_y, of_b), b.shape[:count]) if needs_b else None
        return da, db, None, None


def _multiplied(a: Tensor, b: Tensor, of: _Names, sizes: tuple[int, ...]) -> Tensor:
    of_a, of_b, of_y = of
    count = len(sizes)
    a = _once(a, b, count)
    b = _once(b, a, count)
    lengths = [max(m, n) for m, n in zip(a.shape[:count], b.shape[:count], strict=True)]
    left = [n > 1 and length > 1 for n, length in zip(sizes, lengths, strict=True)]
    named = "".join([name for name, is_left in zip(of_y, left, strict=False) if is_left])
    y = torch.einsum(f"{of_a},{of_b}->{named}{of_y[count:]}", a, b)
    for at, is_left in enumerate(left):
        y = y if is_left else y.unsqueeze(at)
    return y.expand(*sizes, *y.shape[count:])


def _once(x: Tensor, other: Tensor, count: int) -> Tensor:
    """Takes one of the values that are repeated for ranks on which the other operand differs."""
    repeated = [x.stride(at) == 0 and other.shape[at] > 1 for at in range(count)]
    return x[tuple([slice(1 if each else None) for each in repeated])]
