"""Entries that a mask selects, as in `x[mask].sum()`, interpreted as all of them.

How many there are depends on the data, and a sum of them does not ask: `torch.where(mask, x, 0)`
has the same. So a selection stands for all entries until it is summed up. Functions of single
entries, or of single rows, are applied to all; whatever else it is used for is refused.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final, NoReturn, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch.checker.ir.program import StorageType
from shardmap_torch.checker.rules.infer import tensors_of
from shardmap_torch.core.autograd_state import NONE as NO_BACKWARD
from shardmap_torch.core.autograd_state import running_backward
from shardmap_torch.core.functorch import base_of, is_batched
from shardmap_torch.core.source_location import call_site
from shardmap_torch.errors import ShardTypeError


class Host(Protocol):
    """An interpreter, as selections see it."""

    name: str

    def needs_ranks(self, what: str = "") -> None:
        """Records that `torch.func.vmap` cannot run the body as ranks do."""

    def storage_type(self, tensor: Tensor) -> StorageType:
        """Returns the type of a tensor's storage."""

    def base(self, tensor: Tensor) -> Tensor:
        """Returns the fake of a tensor, without transforms."""


@dataclass(frozen=True)
class _Selected:
    """Entries of `full`, whose first dims are those of a mask, that the mask selects.

    Attributes:
        full: all entries.
        mask: a copy of the mask.
        token: equal for selections by the same mask.
        source: the mask itself, which the token is about.
        dim: of positions, the dim of the mask along which they are; else None.
    """

    full: Tensor
    mask: Tensor
    token: Any
    source: Tensor
    dim: int | None = None

    @property
    def num_rest(self) -> int:
        """The number of dims beside those of the mask."""
        return self.full.ndim - self.mask.ndim

    def zeroed(self) -> Tensor:
        """All entries, and zeros in place of those that are not selected."""
        mask = self.mask.reshape(*self.mask.shape, *(1,) * self.num_rest)
        return torch.where(mask, self.full, torch.zeros((), dtype=self.full.dtype))


class Selections:
    """The tensors that stand for selections."""

    def __init__(self, on_made: Callable[[], None]) -> None:
        """There are none yet; `on_made` is called with each that is made."""
        self._on_made = on_made
        self._known: dict[int, tuple[Tensor, _Selected]] = {}
        self._memory: set[int] = set()
        self._shared: set[int] = set()
        self._reads = False

    @property
    def any(self) -> bool:
        """Returns whether there are any."""
        return bool(self._known)

    def reject(self, name: str, base: Tensor) -> None:
        """Refuses to read a selection as all entries, but in a backward that autograd derives."""
        if self._reads or running_backward() != NO_BACKWARD:
            return
        if base.untyped_storage()._cdata in self._memory:
            refuse(name, "what it selects is used")

    def select(self, host: Host, x: Tensor, mask: Tensor, dim: int | None = None) -> Any:
        """Selects what a mask says; NotImplemented where torch is to say what is wrong."""
        if not 0 < mask.ndim <= x.ndim or x.shape[: mask.ndim] != mask.shape:
            return NotImplemented
        if any(map(is_batched, (x, mask))):
            return NotImplemented
        host.needs_ranks()  # torch.func.vmap has no sizes that differ
        return self._stand(_Selected(x, mask.clone(), _token(host, mask), mask, dim))

    def positions(self, host: Host, mask: Tensor, as_tuple: bool = False) -> Any:
        """Returns the positions of a mask's entries, as `nonzero` does."""
        if mask.dtype != torch.bool or not mask.ndim or not (as_tuple or mask.ndim == 1):
            return NotImplemented
        counts = [_counted(mask, dim) for dim in range(mask.ndim)]
        found = tuple(self.select(host, x, mask, dim) for dim, x in enumerate(counts))
        own = self._of(found[0])
        if as_tuple or own is None:
            return found if own is not None else NotImplemented
        with self._reading():
            return self._stand(replace(own, full=own.full.unsqueeze(-1)))

    def are_in(self, args: Sequence[Any]) -> bool:
        """Returns whether some of these arguments stand for selections."""
        return self.any and any(id(x) in self._known for value in args for x in tensors_of(value))

    def replacing(self, host: Host, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns what to call in place of a function; itself if it gets no selection."""
        if not (self.any and self.are_in((*args, *kwargs.values()))):
            return func

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._reading():
                return self._call(host, func, args, kwargs)

        return call

    def _call(self, host: Host, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if func is Tensor.__setitem__:
            return self._written(host, *args)
        own = self._of(args[0]) if args and isinstance(args[0], Tensor) else None
        if func in (Tensor.__getitem__, Tensor.index_select, torch.index_select) and own is None:
            return self._indexed(host, args[0], args[1:])
        known = NotImplemented if own is None else self._of_one(host, own, func, args, kwargs)
        if known is not NotImplemented:
            return known
        if func in _LOSSES:
            return self._loss(host, func, args, kwargs)
        if name not in _POINTWISE:
            size = name in ("__get__", "numel", "size", "__len__", "nelement")
            refuse(host.name, "its size is asked for" if size else f"{name} takes what it selects")
        one, (given, named) = self._given(host, name, args, kwargs)
        out = func(*given, **named)
        if not isinstance(out, Tensor) or out.shape != one.full.shape:
            refuse(host.name, f"{name} combines what it selects with a tensor of another shape")
        found = self._stand(replace(one, full=out, dim=None))
        if name in _SHARING:
            self._shared |= {id(found), *(id(x) for x in tensors_of(list(args)))}
        return found

    def _of_one(
        self, host: Host, own: _Selected, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Calls what is about a selection itself; NotImplemented for other functions."""
        name = getattr(func, "__name__", "")
        if func in _PLAIN:
            return func(*args, **kwargs)
        if func in _DIMS:
            return own.num_rest + 1
        if name in ("sum", "mean"):
            return self._summed(own, name, *args[1:], **kwargs)
        if own.dim is None:
            return self._changed(host, func, args, kwargs) if name in _IN_PLACE else NotImplemented
        if name in ("squeeze", "flatten"):
            return self._stand(replace(own, full=own.full.reshape(own.mask.shape)))
        return NotImplemented

    def _changed(
        self, host: Host, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Changes what a mask selects in place, as `x[mask] *= 2` does before it writes it."""
        name = func.__name__
        if id(args[0]) in self._shared:
            refuse(host.name, f"{name} may change what has another name as well")
        one, (given, named) = self._given(host, name, args, kwargs)
        for x in tensors_of([*given, *named.values()]):
            if torch.broadcast_shapes(x.shape, one.full.shape) != one.full.shape:
                refuse(host.name, f"{name} combines what it selects with a tensor of another shape")
        func(*given, **named)  # the memory is its own
        return args[0]

    def _written(self, host: Host, x: Tensor, index: Any, value: Any) -> None:
        """Does `y[mask] = f(x[mask])`: where the mask is true."""
        own = self._of(value) if isinstance(value, Tensor) else None
        if own is None or not isinstance(index, Tensor) or self._of(x) or self._of(index):
            refuse(host.name, "it is written to, or an index")
        if index.dtype != torch.bool or own.token != _token(host, index) or own.dim is not None:
            refuse(host.name, "what it selects is written where another mask says")
        if x.shape != own.full.shape or x.dtype != own.full.dtype:
            refuse(host.name, "what it selects is written to a tensor of another shape or dtype")
        mask = own.mask.reshape(*own.mask.shape, *(1,) * own.num_rest)
        x.copy_(torch.where(mask, own.full, x))

    def _given(
        self, host: Host, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[_Selected, tuple[list[Any], dict[str, Any]]]:
        """Returns a selection among arguments, and the arguments with all entries in its place."""
        values = [*args, *kwargs.values()]
        found = [own for x in values if isinstance(x, Tensor) and (own := self._of(x))]
        if any(own.token != found[0].token for own in found):
            refuse(host.name, f"{name} combines what it selects with what another mask selects")
        for x in values:
            if isinstance(x, Tensor) and self._of(x) is None and x.ndim > found[0].num_rest:
                refuse(host.name, f"{name} combines what it selects with all entries of another")
        named = {key: self._all(x) for key, x in kwargs.items()}
        return found[0], ([self._all(x) for x in args], named)

    def _all(self, value: Any) -> Any:
        own = self._of(value) if isinstance(value, Tensor) else None
        return value if own is None else own.full

    def _summed(
        self, own: _Selected, name: str, dim: Any = None, keepdim: bool = False, **kwargs: Any
    ) -> Tensor:
        """Sums or averages: over the entries that are selected, or in each row."""
        over = () if dim is None else dim if isinstance(dim, tuple | list) else (dim,)
        size, num = own.num_rest + 1, own.mask.ndim
        dims = {each % size for each in over} or {*range(size)}
        rest = sorted(each + num - 1 for each in dims - {0})
        if 0 not in dims:
            full = getattr(own.full, name)(rest, keepdim, **kwargs)
            return self._stand(replace(own, full=full, dim=None))
        total = own.zeroed().sum([*range(num), *rest], **kwargs)
        if keepdim:
            for each in sorted(dims):
                total = total.unsqueeze(each)
        if name == "sum":
            return total
        count = own.mask.sum() * prod(own.full.shape[each] for each in rest)
        return torch.div(total, count)

    def _loss(self, host: Host, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Computes a loss of all entries, and reduces that of the selected ones."""
        name = func.__name__
        given = {**dict(zip(("input", "target"), args, strict=False)), **kwargs}
        reduction, ignored = given.pop("reduction", "mean"), given.get("ignore_index", -100)
        others = [given.pop(each, None) for each in _OTHERS]
        if len(args) > 2 or any(isinstance(each, Tensor) or each for each in others):
            refuse(host.name, f"{name} takes what it selects, and more than a target")
        one, (_, given) = self._given(host, name, (), given)
        x, target, counted = given.pop("input"), given.pop("target"), one.mask
        if func is functional.cross_entropy:
            if one.num_rest > 1 or target.shape != one.mask.shape:
                refuse(host.name, f"{name} takes what it selects, with dims beside the classes")
            x = x.movedim(one.mask.ndim, 1)
            counted = one.mask & (target != ignored)
        loss = func(x, target, reduction="none", **given)
        own = replace(one, full=loss, dim=None)
        if reduction == "none":
            return self._stand(own)
        total = own.zeroed().sum()
        if reduction == "sum":
            return total
        return total / (counted.sum() * prod(loss.shape[one.mask.ndim :]))

    def _indexed(self, host: Host, x: Tensor, given: Sequence[Any]) -> Any:
        """Selects entries at the positions that `nonzero` has found."""
        parts = given[0] if isinstance(given[0], tuple) else given[0:1]
        if len(given) == 2 and given[0] == 0:  # index_select
            parts = given[1:]
        found = [self._of(part) for part in parts if isinstance(part, Tensor)]
        one = found[0] if found else None
        same = one is not None and all(
            own is not None and own.token == one.token and own.num_rest == 0 for own in found
        )
        if one is None or not same or [each.dim for each in found if each] != [*range(len(parts))]:
            refuse(host.name, "what it selects is an index")
        if len(parts) != one.mask.ndim or x.shape[: len(parts)] != one.mask.shape:
            refuse(host.name, "what it selects is an index of a tensor of another shape")
        return self._stand(replace(one, full=x, dim=None))

    # ------------------------------------------------------------------------------- notes

    def _of(self, x: Tensor) -> _Selected | None:
        known = self._known.get(id(x))
        return None if known is None else known[1]

    def _stand(self, own: _Selected) -> Tensor:
        """Makes a tensor that stands for a selection."""
        made = own.full.clone()
        self._on_made()
        self._known[id(made)] = made, replace(own, full=made)
        self._memory.add(base_of(made).untyped_storage()._cdata)
        return made

    @contextmanager
    def _reading(self) -> Iterator[None]:
        before, self._reads = self._reads, True
        try:
            yield
        finally:
            self._reads = before


def refuse(name: str, what: str) -> NoReturn:
    """Refuses a use of a selection that asks how much has been selected."""
    raise ShardTypeError(
        f"{name}: how many entries a mask selects depends on data, and {what}.\n"
        f"  at {call_site()}\n"
        "Fix: sum it up, as x[mask].sum() does, or keep the shape, with torch.where(mask, x, 0); "
        "count with mask.sum(), or give a bound, with torch.nonzero_static(mask, size=n)."
    )


def _token(host: Host, mask: Tensor) -> Any:
    """Returns what equal masks share: the same entries of memory that nothing was written to."""
    base = host.base(mask)
    made = host.storage_type(base)
    return id(made), id(made.made), base.storage_offset(), tuple(base.shape), base.stride()


def _counted(mask: Tensor, dim: int) -> Tensor:
    shape = [-1 if each == dim else 1 for each in range(mask.ndim)]
    counted = torch.arange(mask.shape[dim], device=mask.device).reshape(shape)
    return counted.expand(mask.shape)


_PLAIN: Final = frozenset(
    (
        *(getattr(Tensor, name).__get__ for name in ("dtype", "device", "layout", "itemsize")),
        *(Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex),
        *(torch.is_complex, Tensor.element_size),
    )
)
_DIMS: Final = (Tensor.ndim.__get__, Tensor.dim, Tensor.ndimension)  # type: ignore[attr-defined]
_LOSSES: Final = (
    *(functional.cross_entropy, functional.mse_loss, functional.l1_loss),
    *(functional.smooth_l1_loss, functional.binary_cross_entropy_with_logits),
)
_OTHERS: Final = ("weight", "pos_weight", "size_average", "reduce", "label_smoothing")
_POINTWISE: Final = frozenset(
    "abs neg exp log log2 log1p expm1 sqrt rsqrt square sin cos tanh sigmoid relu gelu silu erf"
    " softplus logsigmoid reciprocal sign float double half bfloat16 long int bool to type_as"
    " detach clone contiguous isnan isfinite logical_not logical_and logical_or clamp clamp_min"
    " clamp_max add sub subtract mul multiply div divide true_divide pow eq ne lt le gt ge maximum"
    " minimum where __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__"
    " __pow__ __rpow__ __rdiv__ rsub __neg__ __abs__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__"
    " __and__ __or__ __invert__".split()
)
"""Names of functions of single entries."""

_IN_PLACE: Final = frozenset(
    "add_ sub_ mul_ div_ pow_ __iadd__ __isub__ __imul__ __itruediv__".split()
)
_SHARING: Final = frozenset(
    "float double half bfloat16 long int bool to type_as detach contiguous".split()
)
"""Names of functions whose result may be their operand, or share its memory."""
