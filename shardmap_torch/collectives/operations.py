"""Operations: collective calls with their arguments, pull-backs and push-forwards."""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Final, Protocol, TypeAlias
from weakref import ref

import torch
from torch import Tensor

from shardmap_torch.collectives.moves import MOVEMENTS, Movement
from shardmap_torch.collectives.table import TABLE, TURNS, CollectiveRow
from shardmap_torch.core.caching import Unguarded, lazy, memo
from shardmap_torch.core.functorch import can_receive_gradient
from shardmap_torch.types import AxisType, Partial, R, V

Saved: TypeAlias = tuple[Tensor, ...]

Bind: TypeAlias = Callable[["Operation", Tensor], Tensor]
"""Applies an operation to a tensor so that it is differentiable again."""


class Mover(Protocol):
    """Anything that moves data between ranks, such as a backend."""

    def run(self, move: str, collective: "Collective", x: Tensor) -> Tensor:
        """Moves the data of one collective without autograd; `move` is the movement's name."""
        ...


class Operation(Protocol):
    """A differentiable step: a forward, a pull-back of cotangents, a push-forward of tangents."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes whose ranks it connects."""
        ...

    def run(self, mover: Any, x: Tensor) -> Tensor:
        """Computes the forward, on plain values; `mover` is the backend of the body."""
        ...

    def saved(self, x: Tensor, y: Tensor) -> Saved:
        """Selects the tensors that the derivatives need."""
        ...

    def pull_back(self, bind: Bind, grad: Tensor, saved: Saved) -> Tensor:
        """Turns the cotangent of the output into that of the input."""
        ...

    def push_forward(self, bind: Bind, tangent: Tensor, saved: Saved) -> Tensor:
        """Turns the tangent of the input into that of the output."""
        ...


class Linear:
    """An operation whose derivatives need no saved tensor."""

    def saved(self, x: Tensor, y: Tensor) -> Saved:
        return ()

    def push_forward(self, bind: Bind, tangent: Tensor, saved: Saved) -> Tensor:
        """Applies the operation itself to a tangent of the input."""
        pushed: Operation = self  # type: ignore[assignment]  # a subclass has the rest
        return bind(pushed, tangent)


@dataclass(frozen=True)
class Collective(Linear):
    """One collective call: a row of the table with its arguments. Dims are non-negative.

    Of a ragged exchange `lengths` are the rows of the operand and of the result, and
    `counts[s][t]` rows go from rank s to rank t; there are none while a body is checked. They are
    data, of which other groups have other, and so no part of what ranks compare: its repr.
    """

    name: str
    src: AxisType
    dst: AxisType
    axes: tuple[str, ...]
    dim: int = 0
    concat_dim: int = 0
    tiled: bool = True
    sizes: tuple[int, ...] | None = None
    concat_sizes: tuple[int, ...] | None = None
    perm: tuple[tuple[int, int], ...] = ()
    source: int = 0
    lengths: tuple[int, int] = (0, 0)
    counts: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    comm_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None
    out_dtype: torch.dtype | None = None
    in_dtype: torch.dtype | None = None

    @lazy
    def row(self) -> "CollectiveRow":
        """The table's row for this name and these types."""
        return _ROWS.value[self.name, self.src, self.dst]

    @lazy
    def move(self) -> str:
        """The name of the data movement."""
        return self.row.move

    @lazy
    def movement(self) -> Movement:
        """The data movement, with its traits."""
        return _MOVEMENTS.value[self.row.move]

    @lazy
    def keeps_dtype(self) -> bool:
        """True if it moves and returns the dtype of its operand."""
        return self.comm_dtype is None and self.out_dtype is None

    @lazy
    def transpose(self) -> "Collective":
        """The collective that carries a cotangent of the output to the input."""
        name, src, dst = self.row.transpose
        turned = {
            "name": name,
            "src": src,
            "dst": dst,
            "comm_dtype": self.grad_comm_dtype,
            "grad_comm_dtype": self.comm_dtype,
            "out_dtype": self.in_dtype,
            "in_dtype": self.out_dtype,
        }
        # Not dataclasses.replace: Dynamo would guard all that it reads of each field.
        own = {field: getattr(self, field) for field in _FIELDS}
        return Collective(**{**own, **TURNS[self.row.turn](self), **turned})

    def run(self, mover: Mover, x: Tensor) -> Tensor:
        """Moves the data, floating and complex in `comm_dtype` if one is named.

        The result is of `out_dtype`; the cotangent, in the transpose, of `in_dtype`.
        """
        move = self.move
        if self.keeps_dtype:
            return mover.run(move, self, x)
        if self.comm_dtype in (None, x.dtype) or not (x.is_floating_point() or x.is_complex()):
            y = mover.run(move, self, x)
            return y if self.out_dtype is None else y.to(self.out_dtype)
        if x.is_complex():
            # Its parts stand behind all dims, which are counted from the front.
            parts = self.run(mover, torch.view_as_real(x.resolve_conj()))
            return torch.view_as_complex(parts.contiguous())
        return mover.run(move, self, x.to(self.comm_dtype)).to(self.out_dtype or x.dtype)

    def pull_back(self, bind: Bind, grad: Tensor, saved: Saved) -> Tensor:
        return bind(self.transpose, grad)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments beside name, types and axes that are not the defaults, by name."""
        return {
            each.name: value
            for each in fields(self)
            if each.default is not MISSING and (value := getattr(self, each.name)) != each.default
        }

    def __str__(self) -> str:
        """Formats it as `all_reduce('tp', Partial -> R)`."""
        axes = self.axes[0] if len(self.axes) == 1 else self.axes
        return f"{self.name}({axes!r}, {self.src} -> {self.dst})"


_ROWS: Final = Unguarded(TABLE)
_MOVEMENTS: Final = Unguarded(MOVEMENTS)
_FIELDS: Final = tuple(each.name for each in fields(Collective))


class Planned(Linear):
    """A collective on the backend of one process, as an operation: the fast form of the same one.

    Monitors, transforms and compiled code see the collective itself.

    Attributes:
        backend: a weak reference to its backend, which keeps it: so a mesh that is dropped ends its
            process groups at once.
        collective: what it runs.
        run: moves the data, called as `Operation.run`.
        native: does the same by operations of torch, whose derivatives are those of the collective,
            as over axes of one rank; None where a collective needs a derivative of its own.
    """

    def __init__(
        self,
        backend: Any,
        collective: Collective,
        run: Callable[[Any, Tensor], Tensor],
        native: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.backend: Callable[[], Any] = ref(backend)
        self.collective = collective
        self.run, self.native = run, native

    @property
    def axes(self) -> tuple[str, ...]:
        return self.collective.axes

    @lazy
    def transpose(self) -> Operation:
        """The collective that carries a cotangent back, as a plan where it has one."""
        back = self.collective.transpose
        planned: Operation | None = self.backend().plan(back)
        return back if planned is None else planned

    def pull_back(self, bind: Bind, grad: Tensor, saved: Saved) -> Tensor:
        return bind(self.transpose, grad)


@dataclass(frozen=True, eq=False)
class Started(Linear):
    """A collective whose data is under way already; to run it is to wait for it, once.

    Attributes:
        collective: the collective, whose derivatives it has.
        finish: one function, which waits and returns the result. It is taken out to be called: a
            backward keeps the operation, which would keep the result, which keeps the backward.
    """

    collective: Collective
    finish: list[Callable[[], Tensor]]

    @property
    def axes(self) -> tuple[str, ...]:
        return self.collective.axes

    def run(self, mover: Mover, x: Tensor) -> Tensor:
        return self.finish.pop()()

    def pull_back(self, bind: Bind, grad: Tensor, saved: Saved) -> Tensor:
        return self.collective.pull_back(bind, grad, saved)


def collective_of(
    name: str, src: AxisType, dst: AxisType, axes: tuple[str, ...], **arguments: Any
) -> Collective:
    """Makes a collective, the same object for the same arguments: its row is looked up once.

    Monitors compare collectives of a run with those of the checked program by identity.
    """
    return _interned(name, src, dst, axes, tuple(arguments.items()))


@memo
def _interned(
    name: str,
    src: AxisType,
    dst: AxisType,
    axes: tuple[str, ...],
    arguments: tuple[tuple[str, Any], ...],
) -> Collective:
    return Collective(name, src, dst, axes, **dict(arguments))


@dataclass(frozen=True)
class Extremum:
    """All-reduce with max or min: V becomes I or R, ties share the cotangent evenly.

    Not linear, so no row: its derivative is a masked all-reduce. With y the result and
    m = (x == y) / count of ties over the ranks, a tangent t becomes sum(m * t), and a cotangent g
    becomes m * g, where for `dst=R` the g of all ranks are summed first.
    """

    move: str
    total: Collective

    @property
    def movement(self) -> Movement:
        """The data movement, with its traits."""
        return _MOVEMENTS.value[self.move]

    @property
    def axes(self) -> tuple[str, ...]:
        return self.total.axes

    def run(self, mover: Mover, x: Tensor) -> Tensor:
        return mover.run(self.move, self.total, x)

    def saved(self, x: Tensor, y: Tensor) -> Saved:
        """Selects the operand and the result, which show the ranks that have the extremum."""
        return x, y

    def pull_back(self, bind: Bind, grad: Tensor, saved: Saved) -> Tensor:
        """Shares the cotangent among the ranks that hold the extremum."""
        total = bind(self.total.transpose, grad)
        own = bind(Collective("reinterpret", R, V, self.axes), total)
        return own * self._share(bind, saved, own.dtype)

    def push_forward(self, bind: Bind, tangent: Tensor, saved: Saved) -> Tensor:
        """Averages the tangents of the ranks that hold the extremum."""
        return bind(self.total, tangent * self._share(bind, saved, tangent.dtype))

    def _share(self, bind: Bind, saved: Saved, dtype: torch.dtype) -> Tensor:
        x, y = saved
        holds = (x == y).detach().to(dtype)
        count = bind(Collective("all_reduce", Partial, R, self.axes), holds)
        # A NaN equals nothing: no rank holds it, and 0 / 0 would spread it to all of them.
        return holds / count.clamp(min=1)

    def __str__(self) -> str:
        """Formats it as `all_reduce('tp', V -> I, op='max')`."""
        axes = self.axes[0] if len(self.axes) == 1 else self.axes
        return f"all_reduce({axes!r}, V -> {self.total.dst}, op={self.move!r})"


def is_rounded_by(operation: object, x: Tensor) -> bool:
    """Returns whether an operation rounds to travel what is, or gets, a gradient of `x`.

    One batched program differentiates it from outside without: autograd adds over ranks by itself.
    """
    if not isinstance(operation, Collective):
        return False
    named = operation.comm_dtype, operation.grad_comm_dtype
    # A mode of the body may see the question for a gradient: few collectives name a dtype.
    if named == (None, None) or not can_receive_gradient(x):
        return False
    own = torch.finfo(x.dtype).eps
    return any(dtype is not None and torch.finfo(dtype).eps > own for dtype in named)
