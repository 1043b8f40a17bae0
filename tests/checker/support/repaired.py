"""Applies repairs that the checker prints, at the level of what the user calls.

Nothing here knows how the checker tries them: collectives are exchanged where they are issued,
gradients summed where `torch.func.grad` returns them, results before they leave.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardmap_torch import I, Mesh, P, Partial, ShardMapError, shard_map, typeof
from shardmap_torch.checker.interpreter import modes
from shardmap_torch.checker.interpreter.proposals import distinct
from shardmap_torch.checker.ir.repairs import Repair, collective_call, function_call
from shardmap_torch.checker.ir.repairs import applied as applied_to
from shardmap_torch.collectives import autograd
from shardmap_torch.collectives.scope import Scope
from shardmap_torch.core import source_location
from shardmap_torch.core.autograd_state import NONE as NO_BACKWARD
from shardmap_torch.core.autograd_state import running_backward
from shardmap_torch.core.source_location import call_site
from shardmap_torch.core.tree import flatten, unflatten

Body = Callable[..., Any]


class _PerRank(threading.local):
    def __init__(self) -> None:
        self.is_inside = False

    def summed(self, at: Any, gradient: Tensor | None, insert: Any) -> Tensor | None:
        """Sums a gradient over the axis over which it is pending, as the check has found."""
        if gradient is None or insert is None:
            return gradient
        with suppress(ShardMapError):  # in a run there are no types
            _PENDING[at] = typeof(gradient)[insert.axis] == Partial
        summed: Tensor = insert.apply(gradient) if _PENDING[at] else gradient
        return summed


_AT = _PerRank()
_PENDING: Final[dict[Any, bool]] = {}
"""Gradients that are pending sums over an axis, and others, by line and number."""


@contextmanager
def _replaced(function: Callable[..., Any], by: Callable[..., Any]) -> Iterator[None]:
    """All modules but its own have another function in place of this one."""
    name = function.__name__
    with ExitStack() as stack:
        for module in list(sys.modules.values()):
            if vars(module).get(name) is function and module.__name__ != function.__module__:
                stack.enter_context(mock.patch.object(module, name, by))
        yield


@contextmanager
def applied(repair: Repair) -> Iterator[None]:
    """Programs that run in here are repaired."""
    issue, grad = autograd.issue, torch.autograd.grad

    def repaired_issue(scope: Any, operation: Any, x: Tensor) -> Tensor:
        other = repair.collectives.get(collective_call(), operation)
        return x if other is None else issue(scope, other, x)

    def repaired_reduction(scope: Scope, op: str, axes: Any, x: object) -> tuple[str, int]:
        spot = collective_call()
        other = repair.collectives.get(spot)
        return repair.op_at(spot, op), scope.backend.mesh.num_ranks(other.axes if other else axes)

    def repaired_grad(*args: Any, **kwargs: Any) -> Any:
        if not _AT.is_inside:  # the test's own, or the checker's call of what it has seen
            return grad(*args, **kwargs)
        _AT.is_inside = False
        try:
            found = grad(*args, **kwargs)
        finally:
            _AT.is_inside = True
        line = call_site()
        insert = repair.gradients.get(line)
        return tuple(_AT.summed((line, at), g, insert) for at, g in enumerate(found))

    with ExitStack() as stack:
        own = (*source_location._OWN, __file__)  # the user's lines are those of the programs
        stack.enter_context(mock.patch.object(source_location, "_OWN", own))
        stack.enter_context(mock.patch.object(source_location, "_USERS", source_location._Users()))
        stack.enter_context(_replaced(issue, repaired_issue))
        stack.enter_context(mock.patch.object(Scope, "reduction", repaired_reduction))
        stack.enter_context(mock.patch.object(torch.autograd, "grad", repaired_grad))
        stack.enter_context(mock.patch.dict(modes._SPECIAL, {repaired_grad: modes._SPECIAL[grad]}))
        yield


class _Inserting(TorchFunctionMode):
    """Applies to what calls get what a repair inserts there."""

    def __init__(self, repair: Repair) -> None:
        super().__init__()
        self._operands, self._results = repair.operands, repair.results

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, own = kwargs or {}, None
        if running_backward() == NO_BACKWARD:
            spot = function_call(func)
            own = None if spot is None else self._results.get(spot)
            for number, x in enumerate(distinct(args, kwargs)):
                insert = None if spot is None else self._operands.get((spot, number))
                if insert is not None:
                    args, kwargs = _with(insert.apply(x), x, args, kwargs)
        out = func(*args, **kwargs)
        leaves, structure = flatten(out)
        return out if own is None else unflatten(structure, [own.apply(x) for x in leaves])


def _with(y: Tensor, x: Tensor, args: Any, kwargs: Any) -> Any:
    leaves, structure = flatten((tuple(args), kwargs))
    return unflatten(structure, [y if leaf is x else leaf for leaf in leaves])


def repaired_specs(specs: Sequence[P], repair: Repair) -> tuple[P, ...]:
    """The specs, with others, and what is to be named in `replicate=`."""
    found = [repair.in_specs.get(at, spec) for at, spec in enumerate(specs)]
    for position, axis in repair.replicate.items():
        spec = found[position]
        found[position] = P(
            *spec.entries,
            replicate=spec.replicate | {axis},
            invariant=spec.invariant - {axis},
            partial=spec.partial,
        )
    return tuple(found)


def named(spec: P, axes: Sequence[str]) -> P:
    """The spec with every axis named, as `check=False` needs it."""
    return P(*spec.entries, replicate={axis for axis in axes if spec.types.get(axis, I) == I})


def outcome(
    body: Body,
    mesh: Mesh,
    in_specs: Sequence[P],
    out_specs: Any,
    repair: Repair | None,
    args: Sequence[Tensor],
    differentiated: bool,
    check: Any = "local",
) -> list[Tensor]:
    """The results of a program, and the gradients of their weighted sum.

    Without a repair it is not checked: on one device, where collectives do nothing.
    """
    if repair is None:
        specs = tuple(named(spec, mesh.axis_names) for spec in in_specs)
        mapped = shard_map(body, mesh=mesh, in_specs=specs, out_specs=out_specs, check=False)
        return _with_gradients(mapped, args, differentiated)

    def counted(*inputs: Any) -> Any:
        _AT.is_inside = True
        try:
            with _Inserting(repair):
                leaves, structure = flatten(body(*inputs))
        finally:
            _AT.is_inside = False
        for position, chain in repair.exits.items():
            leaves[position] = applied_to(chain, leaves[position])
        return unflatten(structure, leaves)

    specs = repaired_specs(in_specs, repair)
    with applied(repair):
        mapped = shard_map(counted, mesh=mesh, in_specs=specs, out_specs=out_specs, check=check)
        return _with_gradients(mapped, args, differentiated)


def _with_gradients(f: Body, args: Sequence[Tensor], differentiated: bool) -> list[Tensor]:
    inputs = [x.detach().clone().requires_grad_(differentiated) for x in args]
    values = flatten(f(*inputs))[0]
    smooth = [y for y in values if y.requires_grad]
    if not smooth:
        return values
    weights = [torch.linspace(1, 2, y.numel()).to(y).reshape(y.shape) for y in smooth]
    gradients = torch.autograd.grad(smooth, inputs, weights, materialize_grads=True)
    return [y.detach() for y in values] + list(gradients)
