"""Two machines that run one program: the mesh, and all ranks at once on one device.

`OnMesh` runs a body as users write it. `AllRanks` is the truth that it is compared with: it keeps
every rank's value in one autograd graph, and a collective is a plain function of all of them, so
that no transpose of the library, no type and no batching takes part in its gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import cos
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from shardmap_torch import Mesh, axis_index, checkpoint
from shardmap_torch.checker.interpreter.interpreter import current_interpreter
from shardmap_torch.checker.rules.infer import Types
from shardmap_torch.types import AxisType, I, K, Partial, R, V, Z
from tests.checker.support.communicate import Communication

LENGTH: Final = 12
"""Both dims of every value: all of 2, 3, 4 and 6 ranks divide it."""


def match(x: Tensor) -> Tensor:
    """Any value as one of LENGTH x LENGTH, by a linear map that forgets as little as it can."""
    flat = x.reshape(-1)
    short = -flat.numel() % LENGTH**2
    if short:
        flat = torch.nn.functional.pad(flat, (0, short))
    parts = flat.reshape(-1, LENGTH, LENGTH).unbind(0)
    total = parts[0]
    for number, part in enumerate(parts[1:], 1):
        total = total + cos(number) * part
    return total


class Machine(Protocol):
    """Operations that a program's steps are made of; a value is opaque to them."""

    def local(self, f: Callable[..., Tensor], *values: Any) -> Any:
        """Every rank's own computation."""
        ...

    def communicate(self, call: Communication, value: Any, again: bool = False) -> Any:
        """A collective or a conversion; `again` computes it once more in backward."""
        ...

    def index(self, axis: str) -> Any:
        """Every rank's position."""
        ...

    def closed_over(self, number: int) -> Any:
        """A tensor from outside of the body."""
        ...

    def gradient(self, how: str, loss: Callable[[Any], Any], value: Any) -> Any:
        """The gradient of a scalar, taken inside the body."""
        ...


@dataclass
class Notes:
    """Types that the checker found in one program while it interpreted it.

    Attributes:
        gradients: types of loss, operand and gradient, for each gradient taken inside.
        inputs: types of each input.
        values: types of each step's value.
        read: types of each input and value as an operation reads them, K where nothing flows.
    """

    gradients: list[tuple[Types, Types, Types]] = field(default_factory=list)
    inputs: list[Types] = field(default_factory=list)
    values: list[Types] = field(default_factory=list)
    read: list[Types] = field(default_factory=list)

    def clear(self) -> None:
        for each in (self.gradients, self.inputs, self.values, self.read):
            each.clear()


def types_of(value: Tensor) -> Types:
    """The types of a value while the body is interpreted."""
    interpreter = current_interpreter()
    assert interpreter is not None
    return interpreter.storage_type(value).types


def types_as_read(value: Tensor) -> Types:
    """Returns types as an operation reads them: I and R are K where no gradient flows."""
    interpreter = current_interpreter()
    assert interpreter is not None
    return interpreter.types_of(value)


@dataclass
class OnMesh:
    """Runs a program as the body of a `shard_map`, and notes types while it is interpreted."""

    closures: Sequence[Tensor]
    notes: Notes

    def local(self, f: Callable[..., Tensor], *values: Any) -> Any:
        return f(*values)

    def communicate(self, call: Communication, value: Any, again: bool = False) -> Any:
        return checkpoint(call.on_mesh, value) if again else call.on_mesh(value)

    def index(self, axis: str) -> Any:
        return axis_index(axis)

    def closed_over(self, number: int) -> Any:
        return self.closures[number]

    def gradient(self, how: str, loss: Callable[[Any], Any], value: Any) -> Any:
        seen: list[Types] = []

        def noted(x: Tensor) -> Tensor:
            out: Tensor = loss(x)
            if current_interpreter() is not None:
                seen.append(types_of(out))
            return out

        gradient = HOW[how](noted, value)
        if current_interpreter() is not None:
            # Rematerialised or not, the loss has the same types each time.
            self.notes.gradients.append((seen[0], types_of(value), types_of(gradient)))
        return gradient


def _by_func(loss: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    gradient: Tensor = torch.func.grad(loss)(x)
    return gradient


def _by_vjp(loss: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    value, pull_back, *_ = torch.func.vjp(loss, x)
    found: tuple[Tensor, ...] = pull_back(torch.ones_like(value))
    return found[0]


def _by_autograd(loss: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    total = loss(leaf)
    if not total.requires_grad:
        return torch.zeros_like(leaf)
    (gradient,) = torch.autograd.grad(total, leaf, materialize_grads=True)
    return gradient


def _by_backward(loss: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    total = loss(leaf)
    if total.requires_grad:
        total.backward()
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


HOW: Final = {
    "torch.func.grad": _by_func,
    "torch.func.vjp": _by_vjp,
    "torch.autograd.grad": _by_autograd,
    "backward": _by_backward,
}
DETACHING: Final = ("torch.autograd.grad", "backward")
"""Nothing flows through these gradients."""

Column = list[Tensor]
"""One value on all ranks, in mesh order."""


@dataclass
class AllRanks:
    """Runs every rank on one device in one autograd graph."""

    mesh: Mesh
    closures: Sequence[Tensor]
    notes: Notes
    _gradients: int = 0

    @property
    def places(self) -> list[tuple[int, ...]]:
        return list(product(*(range(size) for size in self.mesh.axis_sizes)))

    def groups(self, axes: Sequence[str]) -> Iterator[list[int]]:
        """The ranks of each group along `axes`, the first axis major."""
        names = self.mesh.axis_names
        others = [axis for axis in names if axis not in axes]
        sizes = dict(zip(names, self.mesh.axis_sizes, strict=True))
        index = {place: number for number, place in enumerate(self.places)}
        for fixed in product(*(range(sizes[axis]) for axis in others)):
            group = []
            for moving in product(*(range(sizes[axis]) for axis in axes)):
                at = dict(zip((*others, *axes), (*fixed, *moving), strict=True))
                group.append(index[tuple(at[axis] for axis in names)])
            yield group

    def local(self, f: Callable[..., Tensor], *values: Any) -> Any:
        return [f(*each) for each in zip(*values, strict=True)]

    def communicate(self, call: Communication, value: Any, again: bool = False) -> Any:
        out: list[Any] = [None] * len(value)
        for group in self.groups(call.axes):
            moved = call.on_one_device([value[rank] for rank in group])
            for rank, each in zip(group, moved, strict=True):
                out[rank] = each
        return out

    def index(self, axis: str) -> Any:
        at = self.mesh.axis_names.index(axis)
        return [torch.tensor(place[at]) for place in self.places]

    def closed_over(self, number: int) -> Any:
        return [self.closures[number]] * len(self.places)

    def gradient(self, how: str, loss: Callable[[Any], Any], value: Any) -> Any:
        """Returns the gradient that the types of loss and operand promise.

        A loss that is I is one number, one that is V or P is the ranks' sum. The gradient of an
        operand that is I is of the one value that it is; else each rank gets that of its own.
        """
        detaching = how in DETACHING
        operands = [_fresh(x, detaching) for x in value]
        losses: Column = loss(operands)
        of_loss, of_operand, of_gradient = self.notes.gradients[self._gradients]
        self._gradients += 1
        added = [axis_type in (V, Partial) for axis_type in of_loss]
        total = sum(
            one
            for one, place in zip(losses, self.places, strict=True)
            if all(sums or at == 0 for sums, at in zip(added, place, strict=True))
        )
        assert isinstance(total, Tensor)
        found = _derive(total, operands, not detaching)
        for axis, axis_type, gradient in zip(
            self.mesh.axis_names, of_operand, of_gradient, strict=True
        ):
            if _is_one(axis_type, gradient):
                found = self._summed(found, axis)
        return [each.detach() for each in found] if detaching else found

    def _summed(self, column: Column, axis: str) -> Column:
        out = list(column)
        for group in self.groups([axis]):
            total = torch.stack([column[rank] for rank in group]).sum(0)
            for rank in group:
                out[rank] = total
        return out


def _is_one(axis_type: AxisType, gradient: AxisType) -> bool:
    """Returns whether an operand is one value, whose gradient is the sum over its copies."""
    return axis_type == I or (axis_type in (K, Z) and gradient in (I, K, Z))


def _fresh(x: Tensor, detaching: bool) -> Tensor:
    """Makes the value an operand of its own."""
    return x.view_as(x) if x.requires_grad and not detaching else x.detach().requires_grad_()


def _derive(total: Tensor, operands: Column, create_graph: bool) -> Column:
    if not total.requires_grad:
        return [torch.zeros_like(x) for x in operands]
    found = torch.autograd.grad(
        total, operands, create_graph=create_graph, retain_graph=True, allow_unused=True
    )
    return [torch.zeros_like(x) if g is None else g for x, g in zip(operands, found, strict=True)]


EQUAL: Final = (I, R, K, Z)
"""Types that say that the ranks agree."""
