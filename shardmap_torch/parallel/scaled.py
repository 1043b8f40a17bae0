"""Losses and gradients of parallelized modules that callers scale by the number of ranks."""

import ast
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any, Final

import torch

from shardmap_torch.core.source_location import Site, mark_lines, nodes_of, warn_at
from shardmap_torch.core.source_text import call_at
from shardmap_torch.mesh import Mesh
from shardmap_torch.ops.body import mesh_of_body

_FUNCTION: Final = ast.FunctionDef | ast.AsyncFunctionDef
_SCALES: Final = r"(true_)?div(ide)?_?|mul(tiply)?_?"
_MESH: Final = r"({})\.(size(\(\))?|shape\[[^]]+\])"
_NUMBER: Final = r"\.(item|detach|tolist|data|clone|shape|size)\b|\b(float|int|len|full)\("
"""Found in what makes no loss of a loss, but a number for a log."""

_ROWS: Final = r"/ .*(\.shape|\.size|\.numel|\blen|rows)"
"""Found in a sum that is divided by a rank's own rows first, and by the number of ranks then."""


def warn_of_scaling(mesh: Mesh) -> None:
    """Warns, once a line, where those that called a module scale its loss by the number of ranks.

    Their source tells: the number itself may as well be that of microbatches.
    """
    is_asked = torch.is_grad_enabled() and mesh.size > 1 and mesh_of_body() is None
    if is_asked and mesh.rank == 0:
        for code, at in mark_lines():
            _warn(code, at)


@lru_cache(maxsize=256)
def _warn(code: CodeType, at: int) -> None:
    for line in _scalings(code, at):
        warn_at(
            Site(code.co_filename, line),
            "the loss of a parallelized module, and its gradients, are those of one device, where "
            "a mean is over the rows of all ranks: scaled by the number of ranks they are wrong by "
            "that factor.\nFix: leave the factor out.",
        )


def _scalings(code: CodeType, at: int) -> Iterator[int]:
    """Yields lines that scale what comes of a call; none where the ranks' are added up as well."""
    call, file = call_at(code, at), [*nodes_of(code.co_filename)]
    line = [*code.co_positions()][at // 2][0] or 0
    if not call or not file:
        return
    own = [x for x in file if isinstance(x, _FUNCTION) and x.lineno <= line <= (x.end_lineno or 0)]
    nodes, loss = [*_within([file[0], *own][-1])], r"@|\.grad\b"
    count = r"world_size|num_processes|get_world_size\([^()]*\)|" + _MESH.format(r"\w*mesh\w*")
    for name, value in _bound(file):
        is_mesh = re.match(r"([\w.]+\.)?make_mesh\(", value)
        count += f"|{_MESH.format(name)}" * bool(is_mesh) + f"|{name}" * _is_count(count, value)
    for name, value in 2 * [*_bound(nodes)]:  # a loop ends before it starts again
        loss += rf"|\b{name}\b" * _is_loss(loss, value.replace(call, "@"))
    calls = [ast.unparse(x) for x in nodes if isinstance(x, ast.Call)]
    if any(_is_loss(loss, x) for x in calls if re.match(r"[\w.]*reduce\w*\(", x)):
        return
    for node, *pair in _products(nodes):
        for one, other in (pair, pair[::-1]):
            scaled = ast.unparse(one).replace(call, "@")
            if _is_loss(loss, scaled) and _is_count(count, ast.unparse(other)):
                yield from [node.lineno] * (re.search(_ROWS, scaled) is None)


def _is_loss(loss: str, text: str) -> bool:
    return re.search(loss, text) is not None and re.search(_NUMBER, text) is None


def _is_count(count: str, text: str) -> bool:
    one, micro = rf"(1(\.0)? / )?([\w.]+\.)?({count})", r"\w*(accum|micro)\w*"
    one = rf"({micro} \* )?({one}|[^*]*'WORLD_SIZE'[^*]*)( \* {micro})?"
    one = rf"((int|float|max)\()?{one}(, 1)?\)?"
    return re.fullmatch(rf"{one}( if .*)?|.* else {one}", text, re.I) is not None


def _within(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a function, or of a file, without those of functions in it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _FUNCTION | ast.ClassDef):
            yield child
            yield from _within(child)


def _bound(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yields names that are bound, and the texts of what they are bound to, or are parts of."""
    for node in nodes:
        value: Any = getattr(node, "value", getattr(node, "iter", None))
        for target in [*getattr(node, "targets", ()), getattr(node, "target", None)]:
            is_pairs = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs = zip(target.elts, value.elts, strict=False) if is_pairs else [(target, value)]
            for each, given in pairs if target and value else ():
                names = (x for x in ast.walk(each) if isinstance(x, ast.Name))
                yield from [(x.id, ast.unparse(given)) for x in names if type(x.ctx) is ast.Store]


def _products(nodes: Sequence[ast.AST]) -> Iterator[tuple[Any, ast.expr, ast.expr]]:
    """Yields quotients and products with their operands."""
    for node in nodes:
        match node:
            case (
                ast.BinOp(op=ast.Div() | ast.Mult(), left=first, right=second)
                | ast.AugAssign(op=ast.Div() | ast.Mult(), target=first, value=second)
            ):
                yield node, first, second
            case (
                ast.Call(func=ast.Attribute(attr=name, value=first), args=[second])
                | ast.Call(func=ast.Attribute(attr=name), args=[first, second])
            ) if re.fullmatch(_SCALES, name):
                yield node, first, second
