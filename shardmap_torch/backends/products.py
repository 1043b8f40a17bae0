"""Products of the values of all ranks in a batched body, without copies for each rank.

The batching rule of torch's matmul repeats an operand that is equal on all ranks, and writes the
addends of all ranks of what is summed. Here ranks on which one operand is equal become rows or
columns of the other one, and ranks over which is summed a part of the contracted dim.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from shardmap_torch.backends.folding import is_plain, is_sum
from shardmap_torch.backends.vmap import BatchedBackend
from shardmap_torch.collectives.autograd import TypedFunction, bind
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.collectives.plan import Plan
from shardmap_torch.collectives.protocol import Backend
from shardmap_torch.core.caching import memo
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
    backend: Backend, collective: Collective | Plan, x: Tensor, w: Tensor
) -> Tensor:
    """Applies an all-reduce or a reduce-scatter to `multiply(backend, x, w)`."""
    y = None
    if isinstance(backend, BatchedBackend) and isinstance(collective, Collective):
        y = _product_of_all(backend, x, w, collective.axes) if is_sum(collective) else None
    if y is None or not isinstance(collective, Collective):
        return bind(backend, collective, multiply(backend, x, w))
    if collective.move == "sum":
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
    """Autograd Function of a product of two stacks, whose dims of ranks get the lengths `sizes`."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, of: _Names, sizes: tuple[int, ...]) -> Tensor:
        """Multiplies; autograd would refuse writes into a view."""
        ctx.save_for_backward(a, b)
        ctx.of, ctx.form = of, _form_of(a, b, of, sizes)
        y: Tensor = ctx.form.multiply(a, b)
        return y.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Multiplies in the same way, so that it may be differentiated again."""
        a, b = ctx.saved_tensors
        of_a, of_b, of_y = ctx.of
        needs_a, needs_b, *_ = ctx.needs_input_grad
        if needs_a and needs_b and 0 not in grad.stride():  # else both would copy it
            grad = grad.permute(ctx.form.order).contiguous().permute(ctx.form.places)
        count = sum(map(str.isupper, of_y))
        product = _Product.apply if torch.is_grad_enabled() else _multiplied
        da = product(grad, b, (of_y, of_b, of_a), a.shape[:count]) if needs_a else None
        db = product(a, grad, (of_a, of_y, of_b), b.shape[:count]) if needs_b else None
        return da, db, None, None


def _multiplied(a: Tensor, b: Tensor, of: _Names, sizes: tuple[int, ...]) -> Tensor:
    return _form_of(a, b, of, sizes).multiply(a, b)


@dataclass(frozen=True)
class _Side:
    """Way in which an operand becomes a matrix, or one for each of some ranks.

    Attributes:
        first: index of the first of the values that it repeats; None if it repeats none.
        summed: dims over which it is summed then.
        order: of the dims that it has then.
        shape: of the matrices.
    """

    first: tuple[slice, ...] | None
    summed: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]

    def matrix(self, x: Tensor) -> Tensor:
        """Returns the matrices, a view where the dims lie one after the other."""
        x = x if self.first is None else x[self.first]
        x = x.sum(self.summed, keepdim=True) if self.summed else x
        return x.permute(self.order).reshape(self.shape)


@dataclass(frozen=True)
class _Form:
    """Way in which operands are multiplied that lie in memory in some way.

    Attributes:
        left: makes matrices of the first one.
        right: of the second one.
        shape: of the product, its dims as they lie in memory.
        order: these dims.
        places: where they belong.
        repeated: the shape of a product that is equal on some ranks; else None.
    """

    left: _Side
    right: _Side
    shape: tuple[int, ...]
    order: tuple[int, ...]
    places: tuple[int, ...]
    repeated: tuple[int, ...] | None

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """Computes the product."""
        y = (self.left.matrix(a) @ self.right.matrix(b)).view(self.shape).permute(self.places)
        return y if self.repeated is None else y.expand(self.repeated)


def _form_of(a: Tensor, b: Tensor, of: _Names, sizes: tuple[int, ...]) -> _Form:
    return _form(of, a.shape, b.shape, a.stride(), b.stride(), sizes)


@memo
def _form(
    of: _Names,
    a_shape: tuple[int, ...],
    b_shape: tuple[int, ...],
    a_stride: tuple[int, ...],
    b_stride: tuple[int, ...],
    sizes: tuple[int, ...],
) -> _Form:
    """Orders dims as they lie in memory, so that most matrices are views."""
    of_a, of_b, of_y = of
    long_a, long_b = _long(of_a, a_shape, a_stride), _long(of_b, b_shape, b_stride)
    a = _without_repeated(long_a, long_b)
    b = _without_repeated(long_b, a)
    sums = ({*of_a, *of_b} - {*of_y}) | {
        name for name, n in zip(of_y, sizes, strict=False) if n == 1
    }
    batch = _as_they_lie(a, (a.keys() & b) - sums)
    inner = _as_they_lie(a, a.keys() & b & sums)
    rows = _as_they_lie(a, a.keys() - b - sums)
    columns = _as_they_lie(b, b.keys() - a - sums)
    length = {**dict(zip(of_b, b_shape, strict=True)), **dict(zip(of_a, a_shape, strict=True))}
    length |= {name: n for name, n in zip(of_b, b_shape, strict=True) if n != 1}
    made = [*batch, *rows, *columns]
    order = sorted(
        range(len(of_y)), key=lambda at: made.index(of_y[at]) if of_y[at] in made else -1
    )
    full = (*sizes, *[length[name] for name in of_y[len(sizes) :]])
    shape = tuple([length[of_y[at]] if of_y[at] in made else 1 for at in order])
    return _Form(
        _side(of_a, long_a.keys() - a, (a.keys() - b) & sums, (batch, rows, inner), length),
        _side(of_b, long_b.keys() - b, (b.keys() - a) & sums, (batch, inner, columns), length),
        shape,
        tuple(order),
        tuple([order.index(at) for at in range(len(order))]),
        None if tuple([full[at] for at in order]) == shape else full,
    )


def _long(of: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> dict[str, int]:
    """Returns the steps in memory of the dims that are not of length 1."""
    return {name: step for name, n, step in zip(of, shape, stride, strict=True) if n != 1}


def _without_repeated(steps: dict[str, int], other: Collection[str]) -> dict[str, int]:
    """Leaves out ranks on which a value is repeated, where the other operand has them."""
    return {
        name: step for name, step in steps.items() if step or name.islower() or name not in other
    }


def _as_they_lie(steps: dict[str, int], names: Collection[str]) -> list[str]:
    return sorted(names, key=lambda name: (-steps[name], name))


def _side(
    of: str,
    repeated: Collection[str],
    alone: Collection[str],
    groups: Sequence[Sequence[str]],
    length: dict[str, int],
) -> _Side:
    used = [name for group in groups for name in group]
    rest = [name for name in of if name not in used]
    shape = [prod([length[name] for name in group]) for group in groups]
    return _Side(
        tuple([slice(1 if name in repeated else None) for name in of]) if repeated else None,
        tuple([of.index(name) for name in alone]),
        tuple(map(of.index, [*rest, *used])),
        tuple(shape if groups[0] else shape[1:]),
    )
