"""Issues collectives by what their arguments mean, which is read once where they come again.

A line calls the same collective in each step, on a value of the same shape. All that reading and
checking the arguments finds is kept with the backend, or its mesh, by the axes that are bound, the
arguments, and the operand's shape and dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from shardmap_torch.collectives.autograd import issue, run_plan
from shardmap_torch.collectives.operations import Collective, Operation, Planned
from shardmap_torch.collectives.protocol import Backend
from shardmap_torch.collectives.scope import Scope, current_scope
from shardmap_torch.ops.arguments import each_leaf

X = TypeVar("X")

Dtypes: TypeAlias = tuple[torch.dtype | None, ...]
"""`comm_dtype`, `grad_comm_dtype`, and `out_dtype` where a collective has it."""

Finish: TypeAlias = Callable[[Tensor], Tensor]
"""Makes the result of a call of that of its operation."""


@dataclass(slots=True)
class Reading:
    """The meaning of a collective's arguments for one operand.

    Attributes:
        operation: what to issue; None where the operand is the result.
        finish: makes the result of that of the operation, if they differ.
        cast: the dtype in which the operand is sent, if it is sent in another.
    """

    operation: Operation | None
    finish: Finish | None = None
    cast: torch.dtype | None = None

    def issue(self, scope: Scope, x: Tensor) -> Tensor:
        """Issues the operation."""
        operation = self.operation
        if operation is None:
            return x
        if self.cast is not None:
            x = x.to(self.cast)
        if type(operation) is Planned:  # as `issue`, which knows none
            if scope.monitor is not None:
                scope.monitor.on_operation(operation.collective, x)
            y = run_plan(operation, x)
        else:
            y = issue(scope, operation, x)
        return y if self.finish is None else self.finish(y)


Reader: TypeAlias = Callable[[Tensor], Reading]
"""Reads the arguments of a collective for one operand."""


def issue_each(name: str, read: Callable[..., Reader], x: X, *arguments: Any) -> X:
    """Issues what `read` makes of `x` and the arguments, which requires a scope, for each leaf."""
    scope = current_scope()
    readings = None if scope is None else scope.backend.readings
    if readings is None or not isinstance(x, Tensor) or torch.compiler.is_compiling():
        reader = read(x, *arguments)
        return each_leaf(name, x, lambda leaf: reader(leaf).issue(scope, leaf))  # type: ignore[arg-type]
    assert scope is not None  # it has the readings
    key = read, scope.axes, x.shape, x.dtype, arguments, tuple(map(type, arguments))  # True == 1
    reading = readings.find(key)
    if reading is None:
        reading = read(x, *arguments)(x)
        planned = _planned(reading, scope.backend)
        if planned is not None and isinstance(arguments[0], str | tuple):  # the axes
            readings.get(key, lambda: planned)
    return reading.issue(scope, x)  # type: ignore[return-value]  # X is Tensor here


def _planned(reading: Reading, backend: Backend) -> Reading | None:
    """Returns the reading with the plan of its collective; None where it depends on more.

    A collective that rounds asks whether its operand gets a gradient, and sizes may be in a list.
    """
    collective = reading.operation
    if not isinstance(collective, Collective):
        return reading
    has_sizes = collective.sizes is not None or collective.concat_sizes is not None
    if has_sizes or not collective.keeps_dtype or collective.movement.ragged:
        return None
    plan = backend.plan(collective)
    return reading if plan is None else replace(reading, operation=plan)
