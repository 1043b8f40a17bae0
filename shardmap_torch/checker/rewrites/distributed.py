"""Calls of torch.distributed on the group of an axis, interpreted as typed collectives.

On processes such a call ends in an operator, which is replaced here. On other meshes the group is a
stand-in, which calls the typed collectives itself: see `ops.groups`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from torch import Tensor

from shardmap_torch.checker.ir.own_functions import rejects_transforms
from shardmap_torch.checker.rewrites.aliases import Host
from shardmap_torch.collectives.scope import Scope, current_scope, enter_scope, scope_of
from shardmap_torch.core.torch_private.engine import OpOverload, c10d, current_autograd_node
from shardmap_torch.ops.groups import (
    FUNCTIONAL,
    Arriving,
    AxisGroup,
    group_axes,
    unseen_by_autograd,
)


@dataclass(frozen=True)
class _Read:
    """An operator of torch.distributed, read.

    Attributes:
        group: name of its group.
        tensors: what it reads and writes.
        call: does the same with the group of axes.
    """

    group: str
    tensors: list[Tensor]
    call: Callable[[AxisGroup], Any]


def _name_of(group: Any) -> str:
    return str(c10d.ProcessGroup.unbox(group).group_name)


def _all_reduce(tensors: list[Tensor], group: Any, op: Any, *rest: Any) -> _Read:
    return _Read(_name_of(group), tensors, lambda axes: axes.allreduce(tensors, op.op()))


def _into(name: str, options: Callable[..., Sequence[Any]]) -> Callable[..., _Read]:
    """Makes the reader of an operator that writes into its first tensor."""

    def read(output: Tensor, x: Tensor, group: Any, *rest: Any) -> _Read:
        def call(axes: AxisGroup) -> Any:
            return getattr(axes, name)(output, x, *options(*rest))

        return _Read(_name_of(group), [output, x], call)

    return read


def _functional(name: str) -> tuple[Callable[..., _Read], str]:
    """Returns the reader of a functional collective, whose last argument names its group."""
    functional = FUNCTIONAL[name]

    def read(*args: Any) -> _Read:
        return _Read(args[-1], [args[0]], lambda axes: functional.call(axes, *args[:-1]))

    return read, functional.name


_TYPED: Final[Mapping[str, tuple[Callable[..., _Read], str]]] = MappingProxyType(
    {
        "c10d::allreduce_": (_all_reduce, "all_reduce"),
        "c10d::_allgather_base_": (_into("all_gather_single", lambda *_: ()), "all_gather"),
        "c10d::_reduce_scatter_base_": (
            _into("reduce_scatter_single", lambda op, *_: [op.op()]),
            "reduce_scatter",
        ),
        "c10d::alltoall_base_": (_into("all_to_all_single", lambda *s: s[:2]), "all_to_all"),
        **{f"_c10d_functional::{name}": _functional(name) for name in FUNCTIONAL},
    }
)
"""The reader of each operator, and the name of the typed function."""


def typed_call(
    host: Host, op: OpOverload, args: tuple[Any, ...], context: AbstractContextManager[object]
) -> Any:
    """Interprets an operator of torch.distributed under the mode `context`.

    Returns NotImplemented for other operators, and for groups that are not those of axes.

    Raises:
        CollectiveError: a gradient flows through the tensors; or the backward of a plain Function
            calls it, which then runs as a `Function`.
    """
    called = op._schema.name
    if called == "_c10d_functional::wait_tensor":
        return args[0]  # of a typed call: others have been refused
    if called not in _TYPED:
        return NotImplemented
    read, name = _TYPED[called]
    scope = current_scope()
    if scope is None:  # torch.func would apply a Function that it takes without a scope
        if not rejects_transforms(current_autograd_node()):
            return NotImplemented
        scope = scope_of(name, ())  # raises
    found = read(*args)
    axes = group_axes(scope.backend.mesh, found.group)
    if axes is None:
        return NotImplemented
    if any(map(host.flows, found.tensors)):
        raise unseen_by_autograd(name)
    # Runs do not see the call, so that it is no step of their program.
    with context, enter_scope(Scope(scope.backend, scope.axes)):
        result = found.call(AxisGroup(scope.backend.mesh, axes))
        if isinstance(result, Arriving) and not _is_asynchronous(op, args):
            result.wait()
    if isinstance(result, Tensor):
        return result
    found.tensors[0]._shardmap_work = result  # type: ignore[attr-defined]  # torch's box does not
    work = c10d.Work.boxed(result)
    return work if len(op._schema.returns) == 1 else (args[0], work)


def _is_asynchronous(op: OpOverload, args: tuple[Any, ...]) -> bool:
    at = [argument.name for argument in op._schema.arguments].index("async_op")
    return bool(args[at] if at < len(args) else op._schema.arguments[at].default_value)
