"""Calls of torch.distributed in a body that are not typed, which `ops.groups` does by itself.

What they do to types and gradients nobody can tell: their error names the function to use.
"""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from traceback import walk_tb
from types import MappingProxyType
from typing import Final

import torch

from shardmap_torch.core.source_location import Site, call_site
from shardmap_torch.core.torch_private.engine import OpOverload, current_autograd_node
from shardmap_torch.errors import ShardMapError, ShardTypeError

NAMESPACES: Final = frozenset(
    {"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"}
)
"""Namespaces of the operators that torch.distributed's functions call."""

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
