"""What observes a program while it is interpreted, and the record of the one-device program.

Under global strictness the body is interpreted on a mesh whose axes all have one rank, where every
collective is the identity: that is the program with its collectives erased. A `Recorder` notes its
steps, and then the ranks' program is held against them, step by step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload

from shardmap_torch.checker.calls import writes_of
from shardmap_torch.checker.sharding import Shape
from shardmap_torch.checker.table import functional
from shardmap_torch.rule import Collective
from shardmap_torch.spec import P
from shardmap_torch.tree import Tree
from shardmap_torch.where import Site, call_site

X = TypeVar("X")
Key: TypeAlias = tuple[Any, ...]


def base_of(tensor: Tensor) -> Tensor:
    """The tensor under all torch.func transforms."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


class Book(Generic[X]):
    """Notes on tensors. What shows the same entries of the same memory is the same tensor."""

    def __init__(self) -> None:
        """Nothing is noted."""
        self._notes: dict[Key, X] = {}

    def get(self, tensor: Tensor) -> X | None:
        """The note on a tensor, or None."""
        return self._notes.get(self._key(tensor))

    def put(self, tensor: Tensor, note: X) -> X:
        """Notes something on a tensor, in place of what was noted."""
        self._notes[self._key(tensor)] = note
        return note

    @staticmethod
    def _key(tensor: Tensor) -> Key:
        with torch._C.DisableTorchFunction():  # which would see each of these
            base = base_of(tensor)
            return (
                base.untyped_storage()._cdata,
                base.storage_offset(),
                tuple(base.shape),
                base.stride(),
                base.dtype,
                base.is_neg(),
                base.is_conj(),
            )


@dataclass(frozen=True)
class Ref:
    """A tensor of the one-device program, by number."""

    number: int


@dataclass(frozen=True)
class Event:
    """One step of the one-device program.

    Attributes:
        name: the overload, or what else it is.
        arguments: by name, tensors replaced by `Ref`.
        results: the tensors that it makes, and their shapes.
        site: the user's line.
        literal: the tensor that a literal makes.
    """

    name: Any
    arguments: Mapping[str, Any]
    results: tuple[tuple[int, Shape], ...]
    site: Site | None
    literal: Tensor | None = None


def in_backward() -> bool:
    """Whether autograd runs: its steps are judged by the types alone."""
    return bool(torch._C._current_graph_task_id() != -1)


class Observer:
    """Hears of every step of an interpretation; this one does nothing with it.

    Attributes:
        judges: whether the types of this program are what the user asserts; they differ where
            all axes have one rank.
    """

    judges = True

    def entered(self, tensor: Tensor, spec: P) -> None:
        """An argument has been cut by its spec."""

    def closed_over(self, fake: Tensor, real: Tensor) -> None:
        """The body uses a tensor from outside."""

    def step(
        self,
        name: Any,
        arguments: Mapping[str, Any],
        results: Sequence[Tensor],
        literal: Tensor | None = None,
    ) -> None:
        """Any step; see `Event`."""

    def literal(self, made: Tensor, numbers: Tensor) -> None:
        """A tensor has been made of Python numbers."""
        self.step(LITERAL, {}, [made], numbers)

    def called(self, op: OpOverload, arguments: Mapping[str, Any], out: Any) -> None:
        """An ATen operation has been done."""
        self.step(op, arguments, made_by(op, arguments, out))

    def moved(self, move: str, collective: Collective | None, x: Tensor, y: Tensor) -> None:
        """A collective has been done; None: a repair that is tried leaves it out."""
        self.step(COLLECTIVE, {"x": x}, [y])

    def indexed(self, index: Tensor, axes: Sequence[str]) -> None:
        """`axis_index` has been called."""
        self.step(INDEX, {}, [index])

    def differentiated(
        self,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        operands: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
    ) -> None:
        """A differentiation in the body has ended."""
        arguments = {"outputs": outputs, "seeds": seeds, "operands": operands}
        self.step(GRADIENT, arguments, [g for g in gradients if g is not None])

    def taken(self, name: str, tensors: Sequence[Tensor]) -> None:
        """A Python value has been taken from tensors."""
        self.step(f"{VALUE} {name}", {"tensors": tensors}, [])

    def region(self, name: str, inputs: Sequence[Tensor], specs: Sequence[P]) -> None:
        """Per-rank code begins, which is not followed."""
        self.step(f"{REGION} {name}", {"inputs": inputs}, [])

    def region_ended(self, name: str, outputs: Sequence[Tensor], specs: Sequence[P]) -> None:
        """Per-rank code has ended."""
        self.step(f"the end of {REGION} {name}", {}, outputs)

    def left(self, path: str, value: Tensor, spec: P) -> None:
        """A result is about to leave by its spec."""
        self.step(f"{RESULT} {path}", {"value": value}, [])

    def spec_of(self, tensor: Tensor) -> P | None:
        """How a tensor is cut, if that is known."""
        return None


LITERAL: Final = "a literal"
COLLECTIVE: Final = "a collective"
INDEX: Final = "axis_index"
GRADIENT: Final = "a gradient"
REGION: Final = "local_region"
VALUE: Final = "a Python value by"
RESULT: Final = "the result"
"""Names of the steps that are no ATen operations."""

UNOBSERVED: Final = Observer()


class Recorder(Observer):
    """Notes the steps of the one-device program."""

    judges = False

    def __init__(self) -> None:
        """Nothing has happened yet."""
        self.events: list[Event] = []
        self.inputs: list[tuple[int, Shape]] = []
        self.closures: dict[int, int] = {}
        self._book: Book[int] = Book()
        self._count = 0

    def entered(self, tensor: Tensor, spec: P) -> None:
        """Numbers an argument."""
        self.inputs.append((self._number(tensor), tuple(tensor.shape)))

    def closed_over(self, fake: Tensor, real: Tensor) -> None:
        """Numbers a tensor from outside, of which the other program makes another fake."""
        self.closures[id(real)] = self._number(fake)

    def step(
        self,
        name: Any,
        arguments: Mapping[str, Any],
        results: Sequence[Tensor],
        literal: Tensor | None = None,
    ) -> None:
        """Notes a step that is not autograd's."""
        if not in_backward():
            read = {key: self._refer(value) for key, value in arguments.items()}
            made = tuple((self._number(tensor), tuple(tensor.shape)) for tensor in results)
            self.events.append(Event(name, read, made, call_site(), literal))

    def _refer(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return Ref(self._number(value))
        if isinstance(value, list | tuple):
            return tuple(map(self._refer, value))
        return value

    def _number(self, tensor: Tensor) -> int:
        known = self._book.get(tensor)
        if known is None:
            self._count += 1
            known = self._book.put(tensor, self._count)
        return known


def standing(op: OpOverload, arguments: Mapping[str, Any]) -> tuple[OpOverload, Mapping[str, Any]]:
    """The call for observers: one that turns a tensor into a view of itself makes the view."""
    if torch.Tag.inplace_view not in op.tags or not isinstance(arguments["self"], Tensor):
        return op, arguments
    makes = functional(op)[:1]
    if not makes:
        return op, arguments
    return makes[0], {**arguments, "self": torch.ops.aten.alias.default(arguments["self"])}


def made_by(op: OpOverload, arguments: Mapping[str, Any], out: Any) -> Sequence[Tensor]:
    """The results of an operation, or what it writes if it returns nothing."""
    return tensors_in(out) or [
        tensor for name in writes_of(op, arguments) for tensor in tensors_in(arguments[name])
    ]


def tensors_in(value: Tree) -> Sequence[Tensor]:
    """The tensors of a result, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []
