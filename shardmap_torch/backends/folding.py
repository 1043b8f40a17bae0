"""Products of shards on many simulated ranks as one matmul, in place of one for each rank.

vmap repeats an operand that is equal on all ranks, and makes the addends of all ranks before a
collective adds them. Here the ranks become columns of one operand, or a part of the dim that a
product contracts: its sum over the ranks is one matmul of the unsharded size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch.backends.reference import REFERENCE, Stack
from shardmap_torch.backends.traffic import pass_door
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.collectives.scope import current_scope
from shardmap_torch.core.ambient import ThreadStack
from shardmap_torch.core.modes import FunctionMode
from shardmap_torch.core.torch_private.engine import (
    TransformType,
    forward_level,
    functorch,
    temporarily_clear_interpreter_stack,
    use_count,
)

_PRODUCTS: Final[Mapping[Any, bool]] = MappingProxyType(
    {
        torch.matmul: False,
        Tensor.matmul: False,
        Tensor.__matmul__: False,
        torch.mm: False,
        Tensor.mm: False,
        functional.linear: True,
    }
)
"""Functions of two operands, and whether they transpose a rank's second one."""

_METADATA: Final = frozenset(
    {
        Tensor.dim,
        Tensor.size,
        Tensor.is_floating_point,
        Tensor.is_complex,
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
    }
)
"""Functions that read no data."""

_DTYPES: Final = (torch.float32, torch.float64)
"""Sums in other dtypes round after each rank's addend."""


@dataclass(eq=False)
class _Product:
    """A product of all ranks' operands that is not computed yet.

    Attributes:
        out: the memory of the result, stacked over the ranks, in which nothing is written.
        a: left operands, stacked.
        b: right operands, stacked.
        has_grad: whether it was called where gradients are enabled.
        is_summed: whether its sum was taken: others may still hold it.
    """

    out: Tensor
    a: Tensor
    b: Tensor
    has_grad: bool
    is_summed: bool = False


class Folding(FunctionMode):
    """Function mode of a checked batched body over one axis.

    A product that the checked program sums next waits for that sum. All other functions of torch
    find it computed.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self._num_ranks = num_ranks
        self._waiting: _Product | None = None

    def __enter__(self) -> Self:
        _ACTIVE.items.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _ACTIVE.items.pop()

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._waiting is not None and func not in _METADATA:
            self.finish()
        if len(args) == 2 and not kwargs and func in _PRODUCTS:
            found = self._multiply(args[0], args[1], _PRODUCTS[func])
            if found is not None:
                return found
        return func(*args, **kwargs)

    def finish(self) -> None:
        """Computes the product that waits, unless nobody holds it any more."""
        product, self._waiting = self._waiting, None
        # One reference is this one's, others are those of tensors that wrap it.
        if product is None or (product.is_summed and use_count(product.out) == 1):
            return
        with temporarily_clear_interpreter_stack(), torch.set_grad_enabled(product.has_grad):
            product.out.copy_(product.a @ product.b)

    def sum_of(self, operation: Any, x: Tensor) -> Tensor | None:
        """Returns what a collective makes of a product that waits for it; None of other values."""
        product = self._waiting
        if product is None:
            return None
        if x is not product.out or not is_sum(operation):
            self.finish()
            return None
        self._waiting = None
        pass_door(operation, x.nbytes / self._num_ranks, self._num_ranks)
        with torch.set_grad_enabled(product.has_grad):
            y: Tensor = product.a.movedim(0, 1).flatten(1) @ product.b.flatten(0, 1)
        if not operation.movement.equal:
            y = REFERENCE["slice"](operation, Stack(y, False, self._num_ranks)).value
        product.is_summed, self._waiting = True, product
        return y

    def _multiply(self, a: Any, b: Any, is_transposed: bool) -> Tensor | None:
        top = functorch.peek_interpreter_stack()
        if top is None or top.level() != 1 or top.key() != TransformType.Vmap:
            return None
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or forward_level() >= 0:
            return None
        (a, a_dim), (b, b_dim) = (functorch._unwrap_batched(each, 1) for each in (a, b))
        if b_dim is None or b.ndim != 3 or b.shape[b_dim] != self._num_ranks or not is_plain(a, b):
            return None
        with temporarily_clear_interpreter_stack():
            b = b.movedim(b_dim, 0)
            b = b.mT if is_transposed else b
            if a_dim is None:
                return self._by_columns(a, b)
            return self._later(a.movedim(a_dim, 0), b) if a.ndim == 3 else None

    def _by_columns(self, a: Tensor, b: Tensor) -> Tensor | None:
        """Multiplies an operand that is equal on all ranks by the columns of all ranks."""
        if a.ndim < 2 or a.shape[-1] != b.shape[1]:
            return None
        y = (a @ b.movedim(0, 1).flatten(1)).unflatten(-1, (self._num_ranks, b.shape[2]))
        found: Tensor = functorch._add_batch_dim(y, y.ndim - 2, 1)
        return found

    def _later(self, a: Tensor, b: Tensor) -> Tensor | None:
        """Postpones a product that the checked program sums next."""
        if a.shape[2] != b.shape[1] or not _is_summed_next((a.shape[1], b.shape[2]), a.dtype):
            return None
        out = a.new_empty((self._num_ranks, a.shape[1], b.shape[2]))
        self._waiting = _Product(out, a, b, torch.is_grad_enabled())
        found: Tensor = functorch._add_batch_dim(out, 0, 1)
        return found


_ACTIVE: Final[ThreadStack[Folding]] = ThreadStack()


def sum_of(operation: Any, x: Tensor) -> Tensor | None:
    """Returns what a collective makes of a product that waits for it, on this thread."""
    return _ACTIVE.items[-1].sum_of(operation, x) if _ACTIVE.items else None


def finish() -> None:
    """Computes the product that waits on this thread, if one does."""
    if _ACTIVE.items:
        _ACTIVE.items[-1].finish()


def is_plain(a: Tensor, b: Tensor) -> bool:
    """Returns whether a product of these tensors may add up in another order than torch's."""
    return (
        a.dtype == b.dtype
        and a.dtype in _DTYPES
        and a.layout == b.layout == torch.strided
        and type(a) in _TYPES
        and type(b) in _TYPES
        and not torch.is_autocast_enabled(a.device.type)
    )


_TYPES: Final = (Tensor, torch.nn.Parameter)


def is_sum(operation: Any) -> bool:
    """Returns whether an operation sums over ranks, in the dtype of its operand."""
    return (
        type(operation) is Collective
        and operation.name in ("all_reduce", "reduce_scatter")
        and operation.keeps_dtype
        and len(operation.axes) > 0
    )


def _is_summed_next(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Returns whether the checked program sums a value of this shape over the ranks next."""
    scope = current_scope()
    if scope is None or scope.reruns is not None:  # at once in code that runs again
        return False
    upcoming = getattr(scope.monitor, "upcoming", ())
    return any(
        is_sum(step.what) and step.shape == shape and step.dtype is dtype for step in upcoming
    )
