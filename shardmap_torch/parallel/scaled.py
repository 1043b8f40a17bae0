"""Losses and gradients of parallelized modules that callers scale by the number of ranks."""

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import CodeType
from typing import Final

import torch

from shardmap_torch.core.source_location import mark_lines, nodes_of
from shardmap_torch.core.source_text import call_at
from shardmap_torch.mesh import Mesh

_METHODS: Final = frozenset(("div", "div_", "divide", "true_divide", "mul", "mul_", "multiply"))
_NUMBER: Final = r"\.(item|detach|tolist|data|clone|shape|size)\b|\b(float|int|len|full)\("
"""Found in what makes no loss of a loss, but a number for a log."""

_ROWS: Final = r"/ .*(\.shape|\.size|\.numel|\blen|rows)"
"""Found in a sum that is divided by a rank's own rows first, and by the number of ranks then."""


def warn_of_scaling(mesh: Mesh) -> None:
    """Warns, once a line, where those that called a module scale its loss by the number of ranks.

    Their source tells: the number itself may as well be that of microbatches.
    """
    if torch.is_grad_enabled() and mesh.size > 1 and mesh.rank == 0:
        for code, at in mark_lines():
            _warn(code, at)


@lru_cache(maxsize=256)
def _warn(code: CodeType, at: int) -> None:
    for line in _scalings(code, at):
        message = (
            "the loss of a parallelized module, and its gradients, are those of one device, where "
            "a mean is over the rows of all ranks: scaled by the number of ranks they are wrong by "
            "that factor.\nFix: leave the factor out."
        )
        warnings.warn_explicit(message, UserWarning, code.co_filename, line, registry={})


def _scalings(code: CodeType, at: int) -> Iterator[int]:
    """Yields lines that scale what comes of a call; none where the ranks' are added up as well."""
    call, file = call_at(code, at), [*nodes_of(code.co_filename)]
    line = [*code.co_positions()][at // 2][0]
    if not call or not file or line is None:
        return
    defs = [x for x in file if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)]
    own = [file[0], *(x for x in defs if x.lineno <= line <= (x.end_lineno or 0))]  # inwards
    nodes, seen = [*_within(own[-1])], [x for each in own for x in _within(each)]
    count = r"world_size|num_processes|get_world_size\([^()]*\)|\w*mesh\w*\.size(\(\))?"
    count += r"|\w*mesh\w*\.shape\[[^]]+\]"
    for name, value in _bound(seen):
        made = re.match(r"([\w.]+\.)?make_mesh\(", value)
        count += rf"|{name}\.size|{name}\.shape\[[^]]+\]" if made else ""
        count += f"|{name}" if _is_count(count, value) else ""
    loss = r"@|\.grad\b"
    for name, value in 2 * [*_bound(nodes)]:  # a loop ends before it starts again
        loss += rf"|\b{name}\b" if _is_loss(loss, value.replace(call, "@")) else ""
    products = [[x.replace(call, "@") for x in each] for each in _products(nodes)]
    sums = [x for *_, x in products if re.match(r"[\w.]*reduce\w*\(", x) and _is_loss(loss, x)]
    for at_line, first, second, _ in () if sums else products:
        if _is_loss(loss, first) and _is_count(count, second) and not re.search(_ROWS, first):
            yield int(at_line)


def _is_loss(loss: str, text: str) -> bool:
    return re.search(loss, text) is not None and re.search(_NUMBER, text) is None


def _is_count(count: str, text: str) -> bool:
    one, micro = rf"(1(\.0)? / )?([\w.]+\.)?({count})", r"\w*(accum|micro)\w*"
    one = (
        rf"((int|float|max)\()?({micro} \* )?({one}|[^*]*'WORLD_SIZE'[^*]*)( \* {micro})?(, 1)?\)?"
    )
    return re.fullmatch(rf"{one}( if .*)?|.* else {one}", text, re.I) is not None


def _within(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a function, or of a file, without those of functions in it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child
            yield from _within(child)


def _bound(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yields names that are bound, and the texts of what they are bound to, or are parts of."""
    for node in nodes:
        value = getattr(node, "value", getattr(node, "iter", None))
        for target in [*getattr(node, "targets", ()), getattr(node, "target", None)]:
            if target is None or value is None:
                continue
            parts = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                parts = [*zip(target.elts, value.elts, strict=False)]
            for each, given in parts:
                names = [x for x in ast.walk(each) if isinstance(x, ast.Name)]
                yield from (
                    (x.id, ast.unparse(given)) for x in names if isinstance(x.ctx, ast.Store)
                )


def _products(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, str, str, str]]:
    """Yields lines, operands and texts of quotients and products, and texts of other calls."""
    for node in nodes:
        match node:
            case ast.BinOp(op=ast.Div() | ast.Mult(), left=first, right=second):
                pairs = [(first, second), *[(second, first)] * isinstance(node.op, ast.Mult)]
            case ast.AugAssign(op=ast.Div() | ast.Mult(), target=first, value=second):
                pairs = [(first, second)]
            case (
                ast.Call(func=ast.Attribute(attr=name, value=first), args=[second])
                | ast.Call(func=ast.Attribute(attr=name), args=[first, second])
            ) if name in _METHODS:
                pairs = [(first, second)]
            case ast.Call():
                pairs = [(node, node)]
            case _:
                continue
        for first, second in pairs:
            yield f"{node.lineno}", ast.unparse(first), ast.unparse(second), ast.unparse(node)
