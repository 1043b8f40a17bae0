"""The record of the one-device program, with which the ranks' program is compared step by step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from torch import Tensor

from shardmap_torch.checker.ir.fake_results import PLACE
from shardmap_torch.checker.ir.observer import Observer
from shardmap_torch.checker.ir.sizes import hashable_size
from shardmap_torch.checker.spmd.layout import Shape
from shardmap_torch.core.autograd_state import grad_mode
from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.source_location import Site, call_site
from shardmap_torch.core.torch_private.engine import DisableTorchFunction, FakeTensor
from shardmap_torch.spec import P

X = TypeVar("X")

Key: TypeAlias = tuple[Any, ...]

Assume: TypeAlias = Callable[..., Sequence[Tensor | None] | None]


class TensorMap(Generic[X]):
    """A mapping keyed by tensors; views of the same entries of the same memory are one key."""

    def __init__(self) -> None:
        self._notes: dict[Key, X] = {}

    def get(self, tensor: Tensor) -> X | None:
        """Returns the value noted for a tensor, or None."""
        return self._notes.get(self._key(tensor))

    def put(self, tensor: Tensor, note: X) -> X:
        """Notes a value for a tensor, in place of the previous one, and returns it."""
        self._notes[self._key(tensor)] = note
        return note

    def of_storage(self, tensor: Tensor) -> list[tuple[Key, X]]:
        """Returns what is noted for tensors in the memory of this one, with their keys."""
        storage = self._key(tensor)[0]
        return [(key, note) for key, note in self._notes.items() if key[0] == storage]

    @staticmethod
    def _key(tensor: Tensor) -> Key:
        base = tensor if type(tensor) is FakeTensor else base_of(tensor)
        known: Key | None = base.__dict__.get(PLACE)
        if known is not None:
            return known
        with DisableTorchFunction():  # which would see each of these
            shape: tuple[object, ...] = base.shape
            stride: tuple[object, ...] = base.stride()
            offset: object = base.storage_offset()
            if base._has_symbolic_sizes_strides:
                shape, stride = (
                    tuple(map(hashable_size, base.shape)),
                    tuple(map(hashable_size, base.stride())),
                )
                offset = hashable_size(base.storage_offset())
            key = (
                base.untyped_storage()._cdata,
                offset,
                shape,
                stride,
                base.dtype,
                base.is_neg(),
                base.is_conj(),
            )
        if type(base) is FakeTensor:
            base.__dict__[PLACE] = key
        return key


@dataclass(slots=True, unsafe_hash=True)
class Ref:
    """A reference to a tensor of the one-device program, by number.

    Nothing changes one, as with `Use`.

    Attributes:
        number: that of its entries of memory.
        flows: whether gradients flow through it where it is referred to.
    """

    number: int
    flows: bool = field(default=False, compare=False)


@dataclass(slots=True)
class Event:
    """One step of the one-device program, which nothing changes.

    Attributes:
        name: the overload, or the name of another kind of step.
        arguments: by name, tensors replaced by `Ref`.
        results: the tensors that it makes, and their shapes.
        site: the user's line.
        literal: the tensor that a literal makes.
        key: equal for calls that are the same but for the values of their tensors; None if unknown.
        grad_mode: whether gradients are recorded there, as `grad_mode` says.
    """

    name: Any
    arguments: Mapping[str, Any]
    results: tuple[tuple[int, Shape], ...]
    site: Site | None
    literal: Tensor | None = None
    key: Key | None = None
    grad_mode: int = 0


class Recorder(Observer):
    """Records the steps of the one-device program.

    Attributes:
        has_assumed: whether gradients stand for those of a backward that has not run.
    """

    judges, compares = False, True

    def __init__(self, assume: Assume = lambda *_: None) -> None:
        """Has no steps; `assume` makes gradients that stand for those of a backward, or None."""
        super().__init__()
        self._assume, self.has_assumed = assume, False
        self.returns: dict[str, object] = {}
        self.events: list[Event] = []
        self.inputs: list[tuple[int, Shape]] = []
        self.closures: dict[int, int] = {}
        self._book: TensorMap[int] = TensorMap()
        self._count = 0
        self.flows: Callable[[Tensor], bool] = lambda tensor: False

    def on_start(self, flows: Callable[[Tensor], bool]) -> None:
        self.flows = flows

    def on_argument(self, tensor: Tensor, spec: P) -> None:
        self.inputs.append((self._number(tensor), tuple(tensor.shape)))

    def on_closure(self, fake: Tensor, real: Tensor) -> None:
        """Numbers a closed-over tensor, of which the other program makes another fake."""
        self.closures[id(real)] = self._number(fake)

    def assume_gradients(
        self, interpreter: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> Sequence[Tensor | None] | None:
        assumed = self._assume(interpreter, outputs, inputs)
        self.has_assumed |= assumed is not None
        return assumed

    def on_step(
        self,
        name: Any,
        arguments: Mapping[str, Any],
        results: Sequence[Tensor],
        literal: Tensor | None = None,
        key: Key | None = None,
    ) -> None:
        """Notes a step that is not autograd's, and what an operation is known by."""
        if not self.is_ignored:
            read = {name: self._refer(value) for name, value in arguments.items()}
            made = tuple((self._number(tensor), tuple(tensor.shape)) for tensor in results)
            self.events.append(Event(name, read, made, call_site(), literal, key, grad_mode()))

    def on_python_result(self, path: str, value: object) -> None:
        self.returns[path] = value

    def _refer(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return Ref(self._number(value), self.flows(value))
        if isinstance(value, list | tuple):
            return tuple(map(self._refer, value))
        return value

    def _number(self, tensor: Tensor) -> int:
        known = self._book.get(tensor)
        if known is None:
            self._count += 1
            known = self._book.put(tensor, self._count)
        return known
