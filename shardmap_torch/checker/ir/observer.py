"""Observer: callbacks for each step of an interpretation; this base ignores most of them.

Under global strictness the body is interpreted on a mesh whose axes all have one rank, where every
collective is the identity: that is the program with its collectives erased. A `Recorder` records
its steps, and then the ranks' program is compared with them, step by step.
"""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.checker.rules.infer import writes_of
from shardmap_torch.checker.rules.registry import functional
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.core.autograd_state import NONE as NO_BACKWARD
from shardmap_torch.core.autograd_state import running_backward
from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.torch_private.engine import OpOverload
from shardmap_torch.core.tree import Tree
from shardmap_torch.spec import P


class Observer:
    """Observer of every step of an interpretation; this one ignores them.

    Attributes:
        judges: whether the user's assertions about types apply; they do not where all axes have
            one rank.
        compares: whether ranks are compared with one device by it.
    """

    judges = True
    compares = False

    def __init__(self) -> None:
        self.followed: list[int] = []

    @property
    def aside(self) -> "Observer":
        """The observer of steps that are not compared with one device."""
        return UNOBSERVED if self.compares else self

    @property
    def is_ignored(self) -> bool:
        """Returns whether autograd runs its own code, whose steps are checked by types alone."""
        task = running_backward()
        return task != NO_BACKWARD and (not self.followed or self.followed[-1] != task)

    def on_argument(self, tensor: Tensor, spec: P) -> None:
        """Observes an argument that has been sharded by its spec."""

    def on_closure(self, fake: Tensor, real: Tensor) -> None:
        """Observes the first use of a closed-over tensor."""

    def on_step(
        self,
        name: Any,
        arguments: Mapping[str, Any],
        results: Sequence[Tensor],
        literal: Tensor | None = None,
        key: tuple[Any, ...] | None = None,
    ) -> None:
        """Observes any step."""

    def on_literal(self, made: Tensor, numbers: Tensor) -> None:
        """Observes a tensor made of Python numbers."""
        self.on_step(LITERAL, {}, [made], numbers)

    def on_call(
        self,
        op: OpOverload,
        arguments: Mapping[str, Any],
        out: Any,
        key: tuple[Any, ...] | None = None,
    ) -> None:
        """Observes an ATen operation; `key` is as `Call.key`, None where more counts than that."""
        self.on_step(op, arguments, made_by(op, arguments, out), key=key)

    def on_collective(self, move: str, collective: Collective | None, x: Tensor, y: Tensor) -> None:
        """Observes a collective; None if the repair that is tried leaves it out."""
        self.on_step(COLLECTIVE, {"x": x}, [y])

    def on_axis_index(self, index: Tensor, axes: Sequence[str]) -> None:
        """Observes a call of `axis_index`."""
        self.on_step(INDEX, {}, [index])

    def assume_gradients(
        self, interpreter: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> Sequence[Tensor | None] | None:
        """Returns gradients that stand for those of a backward, or None if it is to run."""
        return None

    def on_gradient(
        self,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        operands: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        before: Sequence[Tensor | None] = (),
    ) -> None:
        """Observes the end of a differentiation in the body, which has added to `before`."""
        arguments = {"outputs": outputs, "seeds": seeds, "operands": operands, "before": before}
        self.on_step(GRADIENT, arguments, _present(gradients))

    def on_switch(self, switches: Sequence[bool]) -> None:
        """Observes what gradients have been switched to in the first run of a checkpoint."""
        self.on_step(SWITCH, {"switches": switches}, [])

    def on_function(self, name: str) -> None:
        """Observes that a Function of the user's own is applied."""
        self.on_step(f"{FUNCTION} {name}", {}, [])

    def on_backward_start(
        self, name: str, values: Sequence[Tensor | None], gradients: Sequence[Tensor | None]
    ) -> None:
        """Observes the start of the user's own backward or hook, with gradients of these values."""
        self.followed.append(running_backward())
        self.on_step(f"{BACKWARD} {name}", {"values": values}, _present(gradients))

    def on_backward_end(
        self, name: str, values: Sequence[Tensor | None], gradients: Sequence[Tensor | None]
    ) -> None:
        """Observes its end, with gradients of these values."""
        arguments = {"values": values, "gradients": gradients}
        self.on_step(f"the end of {BACKWARD} {name}", arguments, [])
        self.followed.pop()

    def on_parts(self, gradient: Tensor, axes: Sequence[str]) -> None:
        """Notes that equal values on the ranks of these axes are addends of one device's."""

    def on_python_result(self, path: str, value: object) -> None:
        """Observes a result of the body that is no tensor."""

    def on_python_value(
        self, name: str, tensors: Sequence[Tensor], raising: bool | None = None
    ) -> None:
        """Observes a Python value read from tensors; `raising` is that by which the body raises."""
        self.on_step(f"{VALUE} {name}", {"tensors": tensors}, [])

    def on_region_start(self, name: str, inputs: Sequence[Tensor], specs: Sequence[P]) -> None:
        """Observes the start of per-rank code."""
        self.on_step(f"{REGION} {name}", {"inputs": inputs}, [])

    def on_region_end(self, name: str, outputs: Sequence[Tensor], specs: Sequence[P]) -> None:
        """Observes the end of per-rank code."""
        self.on_step(f"the end of {REGION} {name}", {}, outputs)

    def on_result(self, path: str, value: Tensor, spec: P) -> None:
        """Observes a tensor result of the body, with its spec."""
        self.on_step(f"{RESULT} {path}", {"value": value}, [])

    def spec_of(self, tensor: Tensor) -> P | None:
        """Returns the spec of a tensor, if it is known."""
        return None

    def scale_of(self, tensor: Tensor) -> Fraction:
        """Returns the factor between a tensor and what it is on one device, as far as is known."""
        return _ONE

    def on_start(self, flows: Callable[[Tensor], bool]) -> None:
        """Notes the start of the program; `flows` tells through which tensors gradients flow."""

    def on_return(self, results: Mapping[str, Any]) -> None:
        """Notes the results by path, as their specs promise them."""

    def on_pull_back(self, seeds: Mapping[str, Tensor]) -> None:
        """Notes the start of the derived backward, with the cotangents of results by path."""

    def on_pulled_back(self, gradients: Sequence[Tensor | None]) -> None:
        """Notes its end, with the gradients of the inputs, as their specs promise them."""

    def on_end(self) -> None:
        """Notes that forward and backward have ended."""

    def end(self) -> None:
        """Unties what refers to each other, after the last step."""


LITERAL: Final = "a literal"
COLLECTIVE: Final = "a collective"
INDEX: Final = "axis_index"
GRADIENT: Final = "a gradient"
SWITCH: Final = "a switch of gradients"
FUNCTION: Final = "the Function"
BACKWARD: Final = "the backward of"
REGION: Final = "local_region"
VALUE: Final = "a Python value by"
RESULT: Final = "the result"
"""Names of the steps that are no ATen operations."""

_ONE: Final = Fraction(1)

UNOBSERVED: Final = Observer()


def standing(op: OpOverload, arguments: Mapping[str, Any]) -> tuple[OpOverload, Mapping[str, Any]]:
    """Returns the call for observers; an in-place view is replaced by the out-of-place one."""
    if torch.Tag.inplace_view not in op.tags or not isinstance(arguments["self"], Tensor):
        return op, arguments
    makes = functional(op)[:1]
    if not makes:
        return op, arguments
    return makes[0], {**arguments, "self": torch.ops.aten.alias.default(arguments["self"])}


def made_by(op: OpOverload, arguments: Mapping[str, Any], out: Any) -> Sequence[Tensor]:
    """Returns the results of an operation, or the tensors it writes if it returns nothing."""
    return tensors_in(out) or [
        tensor for name in writes_of(op, arguments) for tensor in tensors_in(arguments[name])
    ]


def _present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [base_of(tensor) for tensor in tensors if tensor is not None]


def tensors_in(value: Tree) -> Sequence[Tensor]:
    """Returns the tensors of a result, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []
