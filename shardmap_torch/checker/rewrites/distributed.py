"""Calls of torch.distributed in a body.

On the group of an axis they are interpreted as typed collectives: on processes such a call ends in
an operator, which is replaced here; on other meshes the group's object calls the typed collectives
itself, see `ops.groups`. What other calls do to types and gradients nobody can tell: their error
names the function to use.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from traceback import walk_tb
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.checker.ir.own_functions import rejects_transforms
from shardmap_torch.checker.rewrites.copies import Host
from shardmap_torch.collectives.scope import Scope, current_scope, enter_scope, scope_of
from shardmap_torch.core.source_location import Site, call_site
from shardmap_torch.core.torch_private.engine import OpOverload, c10d, current_autograd_node
from shardmap_torch.errors import ShardMapError, ShardTypeError
from shardmap_torch.ops.groups import (
    FUNCTIONAL,
    Arriving,
    AxisGroup,
    group_axes,
    unseen_by_autograd,
)

NAMESPACES: Final = frozenset(
    {"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"}
)
"""Namespaces of the operators that torch.distributed's functions call."""


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


# ------------------------------------------------------------------------------- refused

_GROUP: Final = ", or pass it group=axis_group(mesh, axis), with which it is typed"
_FUNCTION: Final = ", and derive {} from shardmap_torch.Function, whose backward is typed"
_FUNCTIONAL: Final = "_functional_collectives.py"
_TAKES_GROUP: Final = frozenset(
    "all_reduce allreduce all_gather_into_tensor all_gather_single _allgather_base"
    " reduce_scatter_tensor reduce_scatter_single _reduce_scatter_base all_to_all_single"
    " alltoall_base".split()
)
_WAITING: Final = "leave it out: typed collectives wait for one another"
_POINT: Final = "use shardmap_torch.ppermute or shift, which all ranks of an axis call"

_INSTEAD: Final[Mapping[str, str]] = MappingProxyType(
    {
        name: advice
        for advice, names in (
            ("use shardmap_torch.all_reduce", "all_reduce allreduce reduce"),
            ("use shardmap_torch.all_gather", "all_gather allgather _allgather_base gather"),
            ("use shardmap_torch.reduce_scatter", "reduce_scatter _reduce_scatter_base"),
            ("use shardmap_torch.all_to_all", "all_to_all alltoall"),
            ("use shardmap_torch.broadcast", "broadcast"),
            ("use shardmap_torch.broadcast, and convert(x, axis, src=R, dst=V, dim=0)", "scatter"),
            (_POINT, "send recv isend irecv batch_isend_irecv P2POp permute"),
            (_WAITING, "barrier monitored_barrier wait_tensor"),
            ("use shardmap_torch.axis_index", "get_rank"),
            ("use shardmap_torch.axis_size", "get_world_size"),
        )
        for name in names.split()
    }
)
"""Advice by a prefix of the function's or operator's name; the longest match counts."""

_DISTRIBUTED: Final = str(Path(torch.__file__).parent / "distributed") + "/"
_TORCH: Final = str(Path(torch.__file__).parent) + "/"


def refused(name: str, op: OpOverload) -> ShardTypeError:
    """Returns the error for an operator of one of `NAMESPACES`."""
    called = op._schema.name.split("::")[1].rstrip("_")
    function = getattr(current_autograd_node(), "_forward_cls", None)
    if function is None:
        return _error(name, called, call_site(), _GROUP)
    return _error(name, called, call_site(), _FUNCTION.format(function.__name__))


def named_in(name: str, error: BaseException) -> ShardTypeError | None:
    """Returns the error for a call that failed before its operator, as without process groups."""
    if isinstance(error, ShardMapError):
        return None  # of a typed call
    frames = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]
    for (caller, line), (callee, _) in pairwise(frames):
        enters = callee.co_filename.startswith(_DISTRIBUTED)
        if enters and not caller.co_filename.startswith(_TORCH):
            inner = [code for code, _ in frames if code.co_filename.startswith(_DISTRIBUTED)]
            called = next((c.co_qualname for c in inner if _instead(c.co_qualname)), None)
            if called is not None:
                functional = any(code.co_filename.endswith(_FUNCTIONAL) for code in inner)
                site = Site(caller.co_filename, line)
                return _error(name, called.split(".")[0], site, "" if functional else _GROUP)
    return None


def _error(name: str, called: str, site: Site | None, otherwise: str) -> ShardTypeError:
    advice = _instead(called) or "use the typed functions of shardmap_torch"
    advice += otherwise if called in _TAKES_GROUP else ""
    return ShardTypeError(
        f"{name}: {called} of torch.distributed is called in the body, and the checker cannot tell "
        f"what that does to types and gradients.\n  at {site}\nFix: {advice}."
    )


def _instead(called: str) -> str | None:
    prefixes = [prefix for prefix in _INSTEAD if called.startswith(prefix)]
    return _INSTEAD[max(prefixes, key=len)] if prefixes else None
