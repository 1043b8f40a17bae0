"""ProgramRecorder: writes the record of a body while a check interprets it."""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.ir.observer import Observer, made_by
from shardmap_torch.checker.spmd.recorder import TensorMap
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.core.autograd_state import NONE, running_backward
from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.source_location import call_site, is_called_by
from shardmap_torch.core.torch_private.engine import (
    DisableTorchFunction,
    OpOverload,
    disable_current_modes,
)
from shardmap_torch.record.program import Index, Move, Record, Slot, Step
from shardmap_torch.spec import P

_DERIVATIVES: Final = (torch.autograd.grad.__code__, torch.autograd.backward.__code__)
"""Code that calls what autograd derives, unless code of the user's is between them."""


class ProgramRecorder(Observer):
    """Observer that writes a record of what a body does on all ranks.

    Attributes:
        record: what it has written.
    """

    def __init__(self, interpreter: Interpreter) -> None:
        super().__init__()
        self.record = Record()
        self._interpreter = interpreter
        self._steps, self._numbers, self._regions = self.record.steps, count(), 0
        self._slots: TensorMap[Slot] = TensorMap()

    def end(self) -> None:
        """Lets go of the interpretation, whose tensors it has numbered."""
        del self._slots, self._interpreter

    @property
    def is_ignored(self) -> bool:
        """Returns False: steps of autograd's own code are steps too."""
        return False

    def on_argument(self, tensor: Tensor, spec: P) -> None:
        self.record.inputs.append(self._new(tensor))

    def on_closure(self, fake: Tensor, real: Tensor) -> None:
        if self._slots.get(fake) is None:
            self.record.closures[self._new(fake)] = real, call_site()

    def on_literal(self, made: Tensor, numbers: Tensor) -> None:
        with disable_current_modes():  # the numbers are real
            kept = numbers.clone()
        self._add(torch.ops.aten.lift_fresh_copy.default, {}, [made], {"self": kept})

    def on_call(
        self, op: OpOverload, arguments: Mapping[str, Any], out: Any, key: Any = None
    ) -> None:
        self._add(op, arguments, made_by(op, arguments, out))

    def on_collective(self, move: str, collective: Collective | None, x: Tensor, y: Tensor) -> None:
        if collective is not None and collective.movement.ragged:
            self._lack("it sends as many rows as data says")
        if collective is None:  # a repair leaves it out
            self._slots.put(y, self._read(x))
        else:
            self._add(Move(move, collective), {"x": x}, [y])

    def on_axis_index(self, index: Tensor, axes: Sequence[str]) -> None:
        self._add(Index(tuple(axes)), {}, [index])

    def on_python_value(
        self, name: str, tensors: Sequence[Tensor], raising: bool | None = None
    ) -> None:
        self._lack(f"{name} may have pieces that random inputs do not reach, at {call_site()}")

    def on_step(self, *step: Any) -> None:
        """Leaves out steps that no rank computes, as the start of a backward."""

    def on_region_start(self, *region: Any) -> None:
        self._regions += 1

    def on_region_end(self, *region: Any) -> None:
        self._regions -= 1

    def on_return(self, results: Mapping[str, Any]) -> None:
        self.record.results = {path: self._read(value) for path, value in results.items()}

    def on_pull_back(self, seeds: Mapping[str, Tensor]) -> None:
        self.record.seeds = {path: self._new(seed) for path, seed in seeds.items()}
        self._steps = self.record.backward

    def on_pulled_back(self, gradients: Sequence[Tensor | None]) -> None:
        self.record.gradients = [None if g is None else self._read(g) for g in gradients]

    def _add(
        self,
        run: OpOverload | Move | Index,
        arguments: Mapping[str, Any],
        made: Sequence[Tensor],
        numbers: Mapping[str, Tensor] | None = None,
    ) -> None:
        given = {name: self._read(value) for name, value in arguments.items()}
        results = tuple(map(self._new, made))
        is_derived = running_backward() != NONE and is_called_by(_DERIVATIVES)
        with DisableTorchFunction():  # the body does not ask
            dtype = made[0].dtype if made else None
        how = is_derived, self._interpreter.function, self._regions > 0, dtype
        self._steps.append(Step(run, numbers or given, results, call_site(), *how))

    def _lack(self, why: str) -> None:
        self.record.lacks = self.record.lacks or why

    def _read(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            slot = self._slots.get(base_of(self._interpreter.fakify(value)))
            if slot is None:
                self._lack(f"a tensor of unknown origin is used at {call_site()}")
            return slot
        if isinstance(value, list | tuple):
            return [self._read(each) for each in value]
        return value

    def _new(self, x: Tensor) -> Slot:
        return self._slots.put(x, Slot(next(self._numbers)))
