"""The specification of the collectives: one table, and the autograd Functions made from it.

Every row says what a collective does to the type along its axes, how the data moves, and which row
is its transpose. Functions, documentation and tests are driven by this table; nothing else knows
a backward.

Source of the pairs: the types of `jax.shard_map` with `check_vma` and of meta-pytorch/spmd_types.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from shardmap_torch.backend import Backend, Scope
from shardmap_torch.errors import CollectiveError, TransformError
from shardmap_torch.memo import constant, lazy, memo
from shardmap_torch.types import AxisType, I, Partial, R, V

Key = tuple[str, AxisType, AxisType]


@dataclass(frozen=True)
class Collective:
    """One collective call: a row of the table with its arguments. Dims are non-negative."""

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
    comm_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None

    @lazy
    def row(self) -> "Row":
        """The table's row for this name and these types."""
        return TABLE[self.name, self.src, self.dst]

    @property
    def move(self) -> str:
        """What happens to the data."""
        return self.row.move

    @lazy
    def transpose(self) -> "Collective":
        """The collective that carries a cotangent of the output to the input."""
        name, src, dst = self.row.transpose
        turned = self.row.turn(self)
        return replace(
            turned,
            name=name,
            src=src,
            dst=dst,
            comm_dtype=self.grad_comm_dtype,
            grad_comm_dtype=self.comm_dtype,
        )

    def run(self, backend: Backend, x: Tensor) -> Tensor:
        """Moves the data, floating and complex in `comm_dtype` if one is named."""
        move = self.move
        if self.comm_dtype in (None, x.dtype) or not (x.is_floating_point() or x.is_complex()):
            return backend.run(move, self, x)
        if x.is_complex():
            # Its parts stand behind all dims, which are counted from the front.
            parts = self.run(backend, torch.view_as_real(x.resolve_conj()))
            return torch.view_as_complex(parts.contiguous())
        return backend.run(move, self, x.to(self.comm_dtype)).to(x.dtype)

    def pull_back(self, backend: Backend, grad: Tensor, saved: tuple[Tensor, ...]) -> Tensor:
        """Applies the transpose to a cotangent of the output."""
        return bind(backend, self.transpose, grad)

    def push_forward(self, backend: Backend, tangent: Tensor, saved: tuple[Tensor, ...]) -> Tensor:
        """Applies the collective itself, which is linear, to a tangent of the input."""
        return bind(backend, self, tangent)

    def __str__(self) -> str:
        """As in `all_reduce('tp', P -> R)`."""
        axes = self.axes[0] if len(self.axes) == 1 else self.axes
        return f"{self.name}({axes!r}, {self.src} -> {self.dst})"


def collective_of(
    name: str, src: AxisType, dst: AxisType, axes: tuple[str, ...], **arguments: Any
) -> Collective:
    """The same object for the same arguments: its row and transpose are looked up once.

    Where each run is compared with the checked program, it is known by its identity.
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


Turn = Callable[[Collective], Collective]


def _keep(collective: Collective) -> Collective:
    return collective


def _swap(collective: Collective) -> Collective:
    return replace(
        collective,
        dim=collective.concat_dim,
        concat_dim=collective.dim,
        sizes=collective.concat_sizes,
        concat_sizes=collective.sizes,
    )


def _invert(collective: Collective) -> Collective:
    return replace(collective, perm=tuple((dst, src) for src, dst in collective.perm))


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: the function as users call it; `reduce` and `mask` only occur as transposes.
        src: type of the operand along the axes.
        dst: type of the result along the axes.
        move: what happens to the data; the backends' name for it.
        transpose: name and types of the row that carries cotangents back.
        turn: how the arguments change in the transpose.
        sent: bytes that each of n ranks sends, in units of the operand's bytes, as a formula in n.
    """

    name: str
    src: AxisType
    dst: AxisType
    move: str
    transpose: Key
    sent: str = "0"
    turn: Turn = _keep

    @property
    def key(self) -> Key:
        """Name and types, by which the table finds the row."""
        return self.name, self.src, self.dst

    def sent_by(self, num_ranks: int) -> Fraction:
        """The value of `sent` for that many ranks.

        Example:
            >>> TABLE["all_gather", V, R].sent_by(4)
            Fraction(3, 1)
        """
        return _FORMULAS[self.sent](Fraction(num_ranks))


_FORMULAS: Final[Mapping[str, Callable[[Fraction], Fraction]]] = MappingProxyType(
    {
        "0": lambda n: Fraction(0),
        "1": lambda n: Fraction(1),
        "n-1": lambda n: n - 1,
        "(n-1)/n": lambda n: (n - 1) / n,
        "2(n-1)/n": lambda n: 2 * (n - 1) / n,
    }
)

ROWS: Final = (
    Row("all_reduce", Partial, R, "sum", ("all_reduce", Partial, R), "2(n-1)/n"),
    Row("all_reduce", Partial, I, "sum", ("convert", I, R), "2(n-1)/n"),
    Row("all_gather", V, R, "gather", ("reduce_scatter", Partial, V), "n-1"),
    Row("all_gather", V, I, "gather", ("convert", I, V), "n-1"),
    Row("reduce_scatter", Partial, V, "sum_scatter", ("all_gather", V, R), "(n-1)/n"),
    Row("all_to_all", V, V, "exchange", ("all_to_all", V, V), "(n-1)/n", _swap),
    Row("ppermute", V, V, "permute", ("ppermute", V, V), "1", _invert),
    Row("broadcast", V, R, "broadcast", ("reduce", Partial, V), "1"),
    Row("broadcast", V, I, "broadcast", ("mask", I, V), "1"),
    Row("reduce", Partial, V, "sum_mask", ("broadcast", V, R), "2(n-1)/n"),
    Row("mask", I, V, "mask", ("broadcast", V, I)),
    Row("convert", I, R, "same", ("all_reduce", Partial, I)),
    Row("convert", I, V, "slice", ("all_gather", V, I)),
    Row("convert", I, Partial, "mask", ("convert", R, I)),
    Row("convert", R, I, "same", ("convert", I, Partial)),
    Row("convert", R, V, "slice", ("convert", V, Partial)),
    Row("convert", V, Partial, "pad", ("convert", R, V)),
    Row("convert", R, Partial, "mask", ("convert", R, Partial)),
    Row("reinterpret", R, V, "same", ("reinterpret", V, Partial)),
    Row("reinterpret", V, Partial, "same", ("reinterpret", R, V)),
    Row("reinterpret", R, Partial, "same", ("reinterpret", R, Partial)),
)

TABLE: Final[Mapping[Key, Row]] = {row.key: row for row in ROWS}

REDUCING: Final = frozenset({"sum", "sum_scatter", "sum_mask"})
"""Moves that add values of different ranks, where the precision of the addition matters."""


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
    def axes(self) -> tuple[str, ...]:
        """The axes over which it reduces."""
        return self.total.axes

    def run(self, backend: Backend, x: Tensor) -> Tensor:
        """Takes the maximum or minimum over the ranks."""
        return backend.run(self.move, self.total, x)

    def pull_back(self, backend: Backend, grad: Tensor, saved: tuple[Tensor, ...]) -> Tensor:
        """Shares the cotangent among the ranks that hold the extremum."""
        whole = bind(backend, self.total.transpose, grad)
        own = bind(backend, Collective("reinterpret", R, V, self.axes), whole)
        return own * self._share(backend, saved, own.dtype)

    def push_forward(self, backend: Backend, tangent: Tensor, saved: tuple[Tensor, ...]) -> Tensor:
        """Averages the tangents of the ranks that hold the extremum."""
        return bind(backend, self.total, tangent * self._share(backend, saved, tangent.dtype))

    def _share(self, backend: Backend, saved: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        x, y = saved
        holds = (x == y).detach().to(dtype)
        count = bind(backend, Collective("all_reduce", Partial, R, self.axes), holds)
        # A NaN equals nothing: no rank holds it, and 0 / 0 would spread it to all of them.
        return holds / count.clamp(min=1)

    def __str__(self) -> str:
        """As in `all_reduce('tp', V -> I, op='max')`."""
        axes = self.axes[0] if len(self.axes) == 1 else self.axes
        return f"all_reduce({axes!r}, V -> {self.total.dst}, op={self.move!r})"


class Operation(Protocol):
    """What `bind` makes differentiable: a forward, and how cotangents and tangents pass it.

    The axes are those whose ranks it connects.
    """

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes over which it communicates or whose index it needs."""
        ...

    def run(self, backend: Backend, x: Tensor) -> Tensor:
        """The forward, on plain values."""
        ...

    def pull_back(self, backend: Backend, grad: Tensor, saved: tuple[Tensor, ...]) -> Tensor:
        """Cotangent of the output to cotangent of the input."""
        ...

    def push_forward(self, backend: Backend, tangent: Tensor, saved: tuple[Tensor, ...]) -> Tensor:
        """Tangent of the input to tangent of the output."""
        ...


def bind(backend: Backend, operation: Operation, x: Tensor) -> Tensor:
    """Runs `operation` on `x` so that every derivative of it is right.

    A Function with `setup_context`, which torch.func and Dynamo need, costs three times the
    `forward(ctx, ...)` form, and both cost more than a plain call: take the cheapest that serves.
    """
    markers = backend.markers(operation.axes)
    if markers or is_transformed():
        out: Tensor = FunctorchForm.apply(x, operation, backend, *markers)
        return out
    if x.requires_grad and torch.is_grad_enabled():
        apply = EagerForm.apply if torch.compiler.is_dynamo_compiling() else _apply_eager
        out = apply(x, operation, backend)
        return out
    return operation.run(backend, x)


def issue(scope: Scope, operation: Operation, x: Tensor) -> Tensor:
    """Runs an operation that the code of a body asks for; `bind` runs those that follow from it."""
    scope.meet(operation, x)
    return bind(scope.backend, operation, x)


def is_transformed() -> bool:
    """Whether a torch.func transform or forward mode is active; not while Dynamo traces."""
    if torch.compiler.is_dynamo_compiling():
        _reject_transforms()
        return False
    functorch = torch._C._functorch.peek_interpreter_stack() is not None
    return functorch or forward_ad._current_level >= 0


@constant
def _reject_transforms() -> None:
    """Dynamo calls it while it traces, since it would trace the forward of a Function only.

    Raises:
        TransformError: a torch.func transform is active.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise TransformError(
            "A collective, or the boundary of a shard_mapped function, cannot be compiled under a "
            "torch.func transform: torch.compile does not differentiate or batch autograd "
            "Functions there. Compile with .backward() outside, or do not compile."
        )


def _saved_of(operation: Operation, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (x, y) if isinstance(operation, Extremum) else ()


class TypedFunction(torch.autograd.Function):
    """An autograd Function whose `apply` type checkers accept; torch leaves it untyped."""

    if TYPE_CHECKING:

        @classmethod
        def apply(cls, *args: Any) -> Any:
            """As in torch."""


class EagerForm(TypedFunction):
    """An operation under plain reverse-mode autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, operation: Operation, backend: Backend) -> Tensor:
        """Runs it, and keeps the backend: backward may come after the body or on another thread."""
        ctx.set_materialize_grads(False)
        ctx.operation, ctx.backend = operation, backend
        y = operation.run(backend, x)
        if saved := _saved_of(operation, x, y):
            ctx.save_for_backward(*saved)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        """Pulls the cotangent back; a missing one stays missing, with no communication."""
        if grad is None:
            return None, None, None
        return ctx.operation.pull_back(ctx.backend, grad, ctx.saved_tensors), None, None


def unshared(y: Tensor) -> Tensor:
    """A copy in forward mode: torch wants a view of the tangent there, which nested levels lose."""
    return y.clone() if forward_ad._current_level >= 0 else y


# What Function.apply ends in, after it has looked for transforms, which costs 2 us: `bind` has seen
# that there are none.
_apply_eager: Final[Callable[..., Tensor]] = super(torch.autograd.Function, EagerForm).apply


class FunctorchForm(TypedFunction):
    """An operation under torch.func transforms, forward mode, or a batched body.

    The trailing operands are the backend's markers: one per axis, batched at that axis' vmap level
    alone, so that a level at which one is batched is known as the mesh's own.
    """

    @staticmethod
    def forward(x: Tensor, operation: Operation, backend: Backend, *markers: Tensor) -> Tensor:
        """Runs it on values that no transform wraps any more."""
        return unshared(operation.run(backend, x))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keeps what backward and forward mode need."""
        x, operation, backend, *markers = inputs
        ctx.set_materialize_grads(False)
        ctx.operation, ctx.backend, ctx.num_markers = operation, backend, len(markers)
        saved = _saved_of(operation, x, output)
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """Pulls the cotangent back, as in `EagerForm`."""
        rest = (None,) * (2 + ctx.num_markers)
        if grad is None:
            return None, *rest
        return ctx.operation.pull_back(ctx.backend, grad, ctx.saved_tensors), *rest

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, *_: None) -> Tensor | None:
        """Pushes a tangent forward."""
        if tangent is None:
            return None
        pushed: Tensor = ctx.operation.push_forward(ctx.backend, tangent, ctx.saved_tensors)
        return pushed

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        x: Tensor,
        operation: Any,
        backend: Any,
        *markers: Tensor,
    ) -> tuple[Tensor, int | None]:
        """Resolves the mesh's own level, or passes somebody else's batching through."""
        x_dim, _, _, *marker_dims = in_dims
        own = [level for level, dim in enumerate(marker_dims) if dim is not None]
        if own:
            y, y_dim = backend.resolve(operation, x, x_dim, markers, own[0])
            # An operand that is returned as it is loses, at the levels below, how it was made:
            # torch.func's levels of gradients take a view of it without a graph.
            return (x.view_as(x) if y is x else y), y_dim
        if x_dim is None:
            return FunctorchForm.apply(x, operation, backend, *markers), None
        # Dims are counted from the front, so a batch dim at the end disturbs none of them.
        out = FunctorchForm.apply(x.movedim(x_dim, -1), operation, backend, *markers)
        return out, out.ndim - 1


def lookup(name: str, src: AxisType, dst: AxisType) -> Row:
    """The row of that name and types.

    Raises:
        CollectiveError: there is none; the message lists those that there are.
    """
    row = TABLE.get((name, src, dst))
    if row is None:
        known = ", ".join(f"{r.src} -> {r.dst}" for r in ROWS if r.name == name)
        raise CollectiveError(
            f"{name} does not go from {src} to {dst}; it goes {known}. "
            "redistribute(x, axis, src=, dst=) finds the collective for any two types."
        )
    return row
