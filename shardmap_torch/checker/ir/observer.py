"""Observers of a program during interpretation, and the record of the one-device program.

Under global strictness the body is interpreted on a mesh whose axes all have one rank, where every
collective is the identity: that is the program with its collectives erased. A `Recorder` notes its
steps, and then the ranks' program is held against them, step by step.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch._ops import OpOverload

from shardmap_torch.checker.rules.infer import writes_of
from shardmap_torch.checker.rules.registry import functional
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.core.tree import Tree
from shardmap_torch.spec import P


class Observer:
    """Hears of every step of an interpretation; this one does nothing with it.

    Attributes:
        judges: whether the types of this program are what the user asserts; they differ where
            all axes have one rank.
    """

    judges = True

    def __init__(self) -> None:
        """Follows no backward yet."""
        self.followed: list[int] = []

    @property
    def is_ignored(self) -> bool:
        """Returns whether autograd runs its own code, whose steps are judged by types alone."""
        task = torch._C._current_graph_task_id()
        return task != -1 and (not self.followed or self.followed[-1] != task)

    def on_argument(self, tensor: Tensor, spec: P) -> None:
        """An argument has been cut by its spec."""

    def on_closure(self, fake: Tensor, real: Tensor) -> None:
        """The body uses a tensor from outside."""

    def on_step(
        self,
        name: Any,
        arguments: Mapping[str, Any],
        results: Sequence[Tensor],
        literal: Tensor | None = None,
    ) -> None:
        """Any step; see `Event`."""

    def on_literal(self, made: Tensor, numbers: Tensor) -> None:
        """A tensor has been made of Python numbers."""
        self.on_step(LITERAL, {}, [made], numbers)

    def on_call(self, op: OpOverload, arguments: Mapping[str, Any], out: Any) -> None:
        """An ATen operation has been done."""
        self.on_step(op, arguments, made_by(op, arguments, out))

    def on_collective(self, move: str, collective: Collective | None, x: Tensor, y: Tensor) -> None:
        """A collective has been done; None: a repair that is tried leaves it out."""
        self.on_step(COLLECTIVE, {"x": x}, [y])

    def on_axis_index(self, index: Tensor, axes: Sequence[str]) -> None:
        """`axis_index` has been called."""
        self.on_step(INDEX, {}, [index])

    def on_gradient(
        self,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        operands: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        before: Sequence[Tensor | None] = (),
    ) -> None:
        """A differentiation in the body has ended; it has added to the gradients of `before`."""
        arguments = {"outputs": outputs, "seeds": seeds, "operands": operands, "before": before}
        self.on_step(GRADIENT, arguments, _given(gradients))

    def on_backward_start(
        self, name: str, values: Sequence[Tensor | None], gradients: Sequence[Tensor | None]
    ) -> None:
        """A backward or a hook of the user's own begins, with the gradients of these values."""
        self.followed.append(torch._C._current_graph_task_id())
        self.on_step(f"{BACKWARD} {name}", {"values": values}, _given(gradients))

    def on_backward_end(
        self, name: str, values: Sequence[Tensor | None], gradients: Sequence[Tensor | None]
    ) -> None:
        """It has ended, with gradients of these values."""
        arguments = {"values": values, "gradients": gradients}
        self.on_step(f"the end of {BACKWARD} {name}", arguments, [])
        self.followed.pop()

    def on_python_result(self, path: str, value: object) -> None:
        """A result that is no tensor is about to leave."""

    def on_python_value(self, name: str, tensors: Sequence[Tensor]) -> None:
        """A Python value has been taken from tensors."""
        self.on_step(f"{VALUE} {name}", {"tensors": tensors}, [])

    def on_region_start(self, name: str, inputs: Sequence[Tensor], specs: Sequence[P]) -> None:
        """Per-rank code begins, which is not followed."""
        self.on_step(f"{REGION} {name}", {"inputs": inputs}, [])

    def on_region_end(self, name: str, outputs: Sequence[Tensor], specs: Sequence[P]) -> None:
        """Per-rank code has ended."""
        self.on_step(f"the end of {REGION} {name}", {}, outputs)

    def on_result(self, path: str, value: Tensor, spec: P) -> None:
        """A result is about to leave by its spec."""
        self.on_step(f"{RESULT} {path}", {"value": value}, [])

    def spec_of(self, tensor: Tensor) -> P | None:
        """Returns the spec of a tensor, if it is known."""
        return None


LITERAL: Final = "a literal"
COLLECTIVE: Final = "a collective"
INDEX: Final = "axis_index"
GRADIENT: Final = "a gradient"
BACKWARD: Final = "the backward of"
REGION: Final = "local_region"
VALUE: Final = "a Python value by"
RESULT: Final = "the result"
"""Names of the steps that are no ATen operations."""

UNOBSERVED: Final = Observer()


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


def _given(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def tensors_in(value: Tree) -> Sequence[Tensor]:
    """The tensors of a result, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []
