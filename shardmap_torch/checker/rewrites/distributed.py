"""Calls of torch.distributed in a body.

On the group of an axis they are interpreted as typed collectives, by the methods of `AxisGroup`: on
processes functional ones end in an operator, which is replaced here. What other calls do to types
and gradients nobody can tell: their error names the function to use.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from traceback import walk_tb
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Function

from shardmap_torch.checker.ir.own_functions import rejects_transforms
from shardmap_torch.collectives.scope import current_scope, scope_of
from shardmap_torch.core.source_location import Site, call_site
from shardmap_torch.core.torch_private.engine import OpOverload, current_autograd_node
from shardmap_torch.core.torch_private.engine import differentiable_collectives as differentiable
from shardmap_torch.errors import ShardMapError, ShardTypeError
from shardmap_torch.ops.groups import FUNCTIONAL, AxisGroup, group_axes

NAMESPACES: Final = frozenset(
    {"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"}
)
"""Namespaces of the operators that torch.distributed's functions call."""


OPERATORS: Final = (
    *(getattr(torch.ops._c10d_functional, name) for name in FUNCTIONAL),
    torch.ops._c10d_functional_autograd.all_gather_into_tensor,
    torch.ops._c10d_functional_autograd.reduce_scatter_tensor,
    torch.ops._c10d_functional_autograd.all_to_all_single,
)
"""Functional collectives, as torch's functions call them."""


def typed_call(
    op: OpOverload, args: tuple[Any, ...], context: AbstractContextManager[object]
) -> Any:
    """Interprets a functional collective of torch.distributed under the mode `context`.

    Returns NotImplemented for other operators, and for groups that are not those of axes.

    Raises:
        CollectiveError: a gradient flows through the tensors; or the backward of a plain Function
            calls it, which then runs as a `Function`.
    """
    called = op._schema.name
    if called == "_c10d_functional::wait_tensor":
        return args[0]  # of a typed call: others have been refused
    if not called.startswith("_c10d_functional::") or called.split("::")[1] not in FUNCTIONAL:
        return NotImplemented
    with context:
        return functional(called, *args)


def functional(called: str, x: Tensor, *rest: Any) -> Any:
    """Calls a functional collective, by its operator's name; the last argument names its group."""
    scope = current_scope()
    if scope is None:  # torch.func would apply a Function that it takes without a scope
        if not rejects_transforms(current_autograd_node()):
            return NotImplemented
        scope = scope_of(called.split("::")[1], ())  # raises
    axes = group_axes(scope.backend.mesh, rest[-1])
    if axes is None:
        return NotImplemented
    return AxisGroup(scope.backend.mesh, axes).functional(called, x, *rest[:-1])


# -------------------------------------------------------------------------------- differentiable


def _group_of(group: Any) -> AxisGroup | None:
    """Returns the group of axes that a Function gets; None is that of all."""
    scope = current_scope()
    if scope is None or isinstance(group, AxisGroup):
        return group if scope is not None else None
    mesh = scope.backend.mesh
    if group is None:
        return AxisGroup(mesh, mesh.axis_names)
    axes = group_axes(mesh, str(group.group_name))
    return None if axes is None else AxisGroup(mesh, axes)


Call = tuple[str, Any, Tensor, tuple[Any, ...]]
"""The name of the collective, the group, the operand and what else there is."""

_FUNCTIONS: Final[Mapping[Any, Callable[..., Call]]] = MappingProxyType(
    {
        differentiable._AllReduce: lambda op, group, x: ("all_reduce", group, x, (op,)),
        differentiable._AllGather: lambda group, x: ("all_gather", group, x, ()),
        differentiable._AlltoAll: lambda group, out, *xs: (
            *("all_to_all", group, torch.stack(xs)),
            (),
        ),
        differentiable._Reduce_Scatter: lambda op, group, out, *xs: (
            *("reduce_scatter", group, torch.stack(xs)),
            (op,),
        ),
        differentiable._AlltoAllSingle: lambda group, out, received, sent, x: (
            *("all_to_all_single", group, x),
            (received or [], sent or []),
        ),
    }
)
"""Functions of `torch.distributed.nn.functional`, which run torch's own code outside of checks."""


def applied(function: type[Function], args: tuple[Any, ...]) -> Any:
    """Interprets a Function of `torch.distributed.nn.functional`; NotImplemented for others."""
    read = _FUNCTIONS.get(function)
    if read is None:
        return NotImplemented
    name, given, x, rest = read(*args)
    group = _group_of(given)
    return NotImplemented if group is None else group.differentiable(name, x, *rest)


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
