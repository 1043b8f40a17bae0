"""The operands of a call as the user's code writes them, for messages that name them so."""

import ast
import linecache
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType, ModuleType
from typing import Any, Final

from torch import Tensor

from shardmap_torch.core.functorch import base_of

_LONGEST: Final = 72
"""Maximal number of characters of an operand that a message repeats."""

_COMPUTED: Final = object()
"""The value of what is no name."""


def call_text(users: FrameType) -> str:
    """Returns the text of a frame's current call; empty if it is unknown, or of several lines."""
    source = _source_at(users.f_code, users.f_lasti)
    return "" if "\n" in source else source


def call_at(code: CodeType, at: int) -> str:
    """Returns the call at a position of code, as `ast.unparse` formats it; empty if unknown."""
    _, call = _parsed(_source_at(code, at))
    return "" if call is None else ast.unparse(call)


def first_operand(code: CodeType, at: int) -> str | None:
    """Returns the text of the first argument of a call, at a position of the code."""
    source, call = _parsed(_source_at(code, at))
    match call:
        case ast.Call(args=[ast.Starred(), *_]):
            return None
        case ast.Call(args=[first, *_]) | ast.Call(args=[], keywords=[ast.keyword("x", first), *_]):
            return _text(source, first)
    return None


def operand_texts(users: FrameType, tensors: Sequence[Tensor]) -> list[str | None]:
    """Returns the texts of tensors that a frame's current call gets; None where that is not clear.

    What is a name there is found by its value, and all others by their order. Nothing is evaluated.
    """
    source, call = _parsed(_source_at(users.f_code, users.f_lasti))
    written = dict[int, str | None]()  # by the place of the tensor
    computed = list[ast.expr]()
    for node in _operands(call, users):
        value = _value(node, users)
        same = [at for at, x in enumerate(tensors) if _is_same(value, x)]
        written |= {at: _text(source, node) for at in same if at not in written}
        computed += [node] if value is _COMPUTED else []
    left = [at for at in range(len(tensors)) if at not in written]
    if len(left) == len(computed):
        texts = [_text(source, node) for node in computed]
        written |= dict(zip(left, texts, strict=True))
    return [written.get(at) for at in range(len(tensors))]


def _source_at(code: CodeType, at: int) -> str:
    """Returns the text of the call, or the operator, at a position of code; empty if unknown."""
    line, last, start, end = list(code.co_positions())[at // 2]
    if line is None or last is None or start is None or end is None:
        return ""
    lines = [each.encode() for each in linecache.getlines(code.co_filename)[line - 1 : last]]
    if len(lines) != last - line + 1:
        return ""  # no source, as at a prompt
    lines[-1] = lines[-1][:end]
    before, lines[0] = lines[0][:start], lines[0][start:]
    # Of a chain of methods over several lines Python notes the last name and what follows alone.
    return "" if before.rstrip().endswith(b".") else b"".join(lines).decode()


def _parsed(source: str) -> tuple[str, ast.AST | None]:
    """Returns the syntax of the call, and the text in which it has its place."""
    for text, mode in ((f"({source})", "eval"), (source, "exec")):  # the latter for `x += y`
        try:
            match ast.parse(text, mode=mode):
                case ast.Expression(body=node) | ast.Module(body=[node]):
                    return text, node
        except SyntaxError:
            continue
    return source, None


def _operands(node: ast.AST | None, users: FrameType) -> Iterator[ast.expr]:
    """Yields the operands of a call or an operator, those in a list that stands there included."""
    match node:
        case ast.Call(func=ast.Attribute(value=owner)) if not _is_module(owner, users):
            given = [owner, *node.args, *(each.value for each in node.keywords)]
        case ast.Call():
            given = [*node.args, *(each.value for each in node.keywords)]
        case ast.BinOp(left=first, right=second) | ast.AugAssign(target=first, value=second):
            given = [first, second]
        case ast.Compare(left=first, comparators=others):
            given = [first, *others]
        case ast.UnaryOp(operand=first):
            given = [first]
        case ast.Subscript(value=first, slice=second):
            given = [first, second]
        case _:
            given = []
    for each in given:
        items = each.elts if isinstance(each, ast.List | ast.Tuple) else [each]
        yield from (item for item in items if not _is_number(item))


def _is_number(node: ast.expr) -> bool:
    of = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(of, ast.Constant)


def _is_module(node: ast.expr, users: FrameType) -> bool:
    return isinstance(_value(node, users), ModuleType)


def _value(node: ast.expr, users: FrameType) -> Any:
    """Returns what a name refers to, or an attribute of a module."""
    if isinstance(node, ast.Name):
        return users.f_locals.get(node.id, users.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, users)
        return getattr(owner, node.attr, None) if isinstance(owner, ModuleType) else _COMPUTED
    return _COMPUTED


def _is_same(value: Any, x: Tensor) -> bool:
    return issubclass(type(value), Tensor) and base_of(value) is base_of(x)


def _text(source: str, node: ast.expr) -> str | None:
    text = ast.unparse(node) if "\n" in source else ast.get_source_segment(source, node)
    return text if text is not None and len(text) <= _LONGEST else None
