"""The backward derived from a body: gradients of inputs and closures, against their types."""

from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch import Tensor

from shardmap_torch.boundary.call import Call, Result
from shardmap_torch.checker.interpreter import messages
from shardmap_torch.checker.interpreter.collectives import AbstractBackend
from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.ir.program import Need, Where
from shardmap_torch.checker.ir.repairs import rejected
from shardmap_torch.checker.rules.infer import Types
from shardmap_torch.checker.rules.lattice import accepts, plain
from shardmap_torch.checker.verify.request import enters_as, seeded_as
from shardmap_torch.core.closures import name_in
from shardmap_torch.core.torch_private.engine import DisableTorchFunction
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.types import COTANGENT, I, K, R, Z

_SUMMED: Final = (R, "summed", "replicate")
_EQUAL: Final = (I, "equal on all ranks already, and not summed", "invariant")


class PullBack:
    """The derived backward of one path through a body.

    Attributes:
        needs: the types that the gradients of inputs need along open axes.
        gradients: the types that gradients have in the body, by the input's path.
    """

    def __init__(
        self,
        call: Call,
        interpreter: Interpreter,
        backend: AbstractBackend,
        locals_: Mapping[int, Tensor],
    ) -> None:
        """`locals_` are the inputs as the body got them, by position."""
        self._call, self._interpreter, self._backend = call, interpreter, backend
        self._locals = locals_
        self.needs: dict[Where, Need] = {}
        self.gradients: list[tuple[str, Types]] = []

    def run(self, result: Result) -> None:
        """Runs the backward that autograd derives, from cotangents of the results' own types.

        Raises:
            ShardTypeError: a gradient is not what its value needs.
        """
        interpreter, outputs = self._interpreter, []
        for position in result.match.crossing:
            spec = result.match.spec(position)
            types = tuple(seeded_as(spec, axis) for axis in interpreter.axes)
            outputs.append((result.leaves[position], types))
        found = _differentiate(interpreter, outputs, self._locals.values())
        self._commit({position: found.get(id(local)) for position, local in self._locals.items()})
        for closure in interpreter.closures.values():
            self._check_closure(closure, found.get(id(closure)))

    def _commit(self, gradients: Mapping[int, Tensor | None]) -> None:
        """Decides the open axes of the inputs by their gradients."""
        call, interpreter = self._call, self._interpreter
        for position in call.crossing:
            spec, path = call.match.spec(position), call.match.paths[position]
            gradient = gradients.get(position)
            open_axes = [axis for axis in call.mapped if axis not in spec.named]
            if gradient is not None:
                replicate: list[str] = []
                storage_type = interpreter.storage_type(gradient)
                self.gradients.append((path, storage_type.types))
                for axis, have in interpreter.by_axis(storage_type.types).items():
                    at = interpreter.axes.index(axis)
                    axis_type = enters_as(spec, axis, call.mapped)
                    if not accepts(axis_type, have):
                        value = interpreter.storage_type(self._locals[position])
                        what = f"input {path}"
                        raise messages.cotangent(
                            interpreter, at, axis_type, storage_type, what, value
                        )
                    if axis in open_axes and have != Z:
                        need = Need(have.varies, storage_type.origin())
                        self.needs[position, axis] = need
                        replicate += [axis] * need.replicate
                if replicate:
                    self._backend.reduce_gradient(replicate, gradient)
        self._check_asserted()

    def _check_asserted(self) -> None:
        """Compares what the body asserts of inputs with the types that they get in the end."""
        for asserted in self._interpreter.asserted:
            need = self.needs.get((asserted.leaf, asserted.axis))
            if need is None or asserted.expected == (R if need.replicate else I):
                continue
            have, word, keyword = _SUMMED if need.replicate else _EQUAL
            axis, path = asserted.axis, self._call.match.paths[asserted.leaf]
            raise ShardTypeError(
                f"{self._call.name}: assert_type expects {asserted.expected} over {axis!r}, but "
                f"the input {path} is {have}: its gradient is {word} over {axis!r}.\n"
                f"  at {asserted.site}\n"
                f"  the gradient is from {need.origin}\n"
                f"Fix: assert {have}, as {keyword}={{{axis!r}}} in its spec would say."
            )

    def _check_closure(self, closure: Tensor, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        storage_type = self._interpreter.storage_type(gradient)
        name = name_in(self._call.function, closure) or "the tensor"
        for axis, axis_type in self._interpreter.by_axis(storage_type.types).items():
            if axis_type not in (I, K, Z):
                raise rejected(
                    f"{self._call.name}: a closed-over tensor of shape {list(closure.shape)} gets "
                    f"a gradient that is {axis_type} over {axis!r}: "
                    f"{messages.wrong(I, axis_type)}.\n"
                    f"  the gradient is from {storage_type.origin()}\n"
                    f"Fix: pass {name} as an argument{_by_call(closure)}.",
                    types=[axis_type],
                    closure=closure,
                )


def record_backward(
    interpreter: Interpreter, results: Iterable[Tensor], inputs: Iterable[Tensor]
) -> None:
    """Runs the derived backward for its observers, if the user's own code runs in it."""
    outputs = []
    for value in results:
        have = interpreter.types_of(value)
        outputs.append((value, tuple(I if t == K else COTANGENT.get(plain(t), t) for t in have)))
    _differentiate(interpreter, outputs, inputs)


def _differentiate(
    interpreter: Interpreter, outputs: Iterable[tuple[Tensor, Types]], inputs: Iterable[Tensor]
) -> Mapping[int, Tensor | None]:
    """Runs the backward of a body; returns gradients by the identity of inputs and closures.

    Args:
        interpreter: interprets the body.
        outputs: its results, and the types of their cotangents.
        inputs: as the body got them.
    """
    with DisableTorchFunction():
        live = [(value, types) for value, types in outputs if value.requires_grad]
        leaves = [x for x in (*inputs, *interpreter.closures.values()) if x.requires_grad]
    if not live or not leaves:
        return {}
    seeds = [interpreter.bring_like(*output, "the cotangent of a result") for output in live]
    with interpreter.differentiating(seeds):
        values = [value for value, _ in live]
        gradients = torch.autograd.grad(values, leaves, seeds, allow_unused=True)
    return dict(zip(map(id, leaves), gradients, strict=True))


_BY_CALL: Final = (
    ": parameters, apply = shardmap_torch.functional(module), and apply(parameters, x) in the body"
)


def _by_call(closure: Tensor) -> str:
    """Advises how to call a module with its parameters as arguments."""
    is_parameter = isinstance(closure, torch.nn.Parameter)
    return _BY_CALL * is_parameter
