"""Refuses to catch what an operation raises for some values, which no check gets to see.

A check has no values: an operation that may fail, such as a lookup or a factorization, never does
in it. Where the body catches the error and goes on, a rank would take a way that nobody has typed,
beside ranks that go the other. Python's table of handlers says whether the body could catch it, and
the source whether it does.
"""

import ast
import builtins
import contextlib
import dis
from collections.abc import Iterable, Sequence
from functools import lru_cache
from inspect import getattr_static, getsource
from textwrap import dedent
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

import torch

from shardmap_torch.checker.interpreter import messages
from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.core.source_location import Site, frames_in_body, nodes_of
from shardmap_torch.core.torch_private.engine import OpOverload

_NAMES: Final = (
    "_assert_async _ctc_loss _embedding_bag_forward_only _histogramdd_bin_edges "
    "_linalg_check_errors _linalg_eigh _linalg_svd bernoulli binary_cross_entropy bincount "
    "cholesky cholesky_inverse embedding embedding_bag embedding_renorm floor_divide fmod gather "
    "histc histogram index index_add index_copy index_fill index_put index_reduce index_select "
    "linalg_eig linalg_eigvals linalg_ldl_solve linalg_lstsq linalg_lu_solve linalg_pinv linspace "
    "lu_unpack masked_scatter max_unpool2d max_unpool3d multi_margin_loss "
    "multilabel_margin_loss_forward multinomial nll_loss2d_forward nll_loss_forward normal poisson "
    "put remainder repeat_interleave scatter scatter_add scatter_reduce segment_reduce take"
)
_RAISED: Final = (RuntimeError, IndexError, torch.linalg.LinAlgError)  # type: ignore[attr-defined]

_ALSO: Final = (
    torch.nn.functional.one_hot,
    torch.nn.functional.linear_cross_entropy,
    torch.ops.aten.div.Tensor_mode,
    torch.ops.aten.div_.Tensor_mode,
)
MAY_FAIL: Final[frozenset[Any]] = frozenset(_ALSO) | frozenset(
    getattr(packet, overload)
    for name in _NAMES.split()
    for packet in (getattr(torch.ops.aten, spelled, None) for spelled in (name, name + "_"))
    if packet is not None
    for overload in packet.overloads()
)
"""Operations that raise an error for some values of their operands, and functions that do."""


def refuse_caught(interpreter: Interpreter, called: Any) -> None:
    """Refuses such an operation in a `try` that goes on after its error.

    Raises:
        ShardTypeError: it is in one.
    """
    place = _catching()
    if place is None:
        return
    head = (
        f"{_name(called)} fails for some values, and the body catches that at {place}: a rank "
        "whose values fail would go another way than the one that is checked."
    )
    advice = (
        "let the error end the program, or ask before: branch on a condition taken with "
        ".item(), such as torch.linalg.cholesky_ex(x).info."
    )
    raise messages.error(interpreter, head, [], advice)


def _name(called: Any) -> str:
    return messages.friendly(called) if isinstance(called, OpOverload) else called.__name__


class _Try(NamedTuple):
    """The lines that a statement tries, and what it does with an error raised there."""

    first: int
    last: int
    line: int
    caught: Sequence[ast.expr | None]
    renamed: Sequence[ast.expr | None]
    """Errors that are raised again as others, which any handler around may catch."""
    managers: Sequence[ast.expr]


def _catching() -> str | None:
    """Returns where the body catches what an operation raises at the line that runs, if it does."""
    is_renamed = False
    for frame in frames_in_body():
        code, line = frame.f_code, frame.f_lineno
        if not any(frame.f_lasti in each for each in _guarded(code)):
            continue
        tries = _tries(code.co_filename)
        around = [x for x in tries if code.co_firstlineno <= x.first <= line <= x.last]
        if not around:
            return f"{Site(code.co_filename, line).place}, for all that is known without its source"
        for each in around:
            caught = [*each.caught, *(x for m in each.managers for x in _swallowed(frame, m))]
            if any(is_renamed or _is_raised(frame, x) for x in caught):
                return Site(code.co_filename, each.line).place
            is_renamed |= any(_is_raised(frame, x) for x in each.renamed)
    return None


@lru_cache(maxsize=4096)
def _guarded(code: CodeType) -> Sequence[range]:
    """Returns the instructions whose errors go to a `try` or `with`, and not to clean-up alone."""
    read = dis.Bytecode(code)
    handlers = {each.offset for each in read if each.opname == "PUSH_EXC_INFO"}
    entries: Any = read.exception_entries  # type: ignore[attr-defined]  # typeshed lacks it
    return [range(each.start, each.end) for each in entries if each.target in handlers]


@lru_cache(maxsize=256)
def _tries(file: str) -> Sequence[_Try]:
    """Returns the statements of a file that may catch something, the inner ones first."""
    found: list[_Try] = []
    for node in nodes_of(file):
        if isinstance(node, ast.Try | ast.TryStar):
            caught, renamed, managers = *_handled(node), []
        elif isinstance(node, ast.With):
            caught, renamed, managers = [], [], [x.context_expr for x in node.items]
        else:
            continue
        lines = node.body[0].lineno, node.body[-1].end_lineno or 0
        found.append(_Try(*lines, node.lineno, caught, renamed, managers))
    return sorted(found, reverse=True, key=lambda each: (each.first, -each.last))


_Handled = tuple[list[ast.expr | None], list[ast.expr | None]]


def _handled(node: ast.Try | ast.TryStar) -> _Handled:
    """Returns what a `try` catches and goes on, and what it raises again as another error.

    Handlers that only raise what they caught, at their end, do neither.
    """
    caught: list[ast.expr | None] = [None for each in node.finalbody if _leaves(each)]
    renamed: list[ast.expr | None] = []
    for handler in node.handlers:
        raised = [x.exc for x in ast.walk(handler) if isinstance(x, ast.Raise) and x.exc]
        if _leaves(handler) or not isinstance(handler.body[-1], ast.Raise):
            caught.append(handler.type)
        elif any(ast.unparse(each) != handler.name for each in raised):
            renamed.append(handler.type)
    return caught, renamed


def _leaves(statement: ast.AST, in_loop: bool = False) -> bool:
    """Returns whether a statement may go on elsewhere, by its own `return`, `break`, `continue`."""
    match statement:
        case ast.Return():
            return True
        case ast.Break() | ast.Continue():
            return not in_loop
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
            return False
    looped = statement.body if isinstance(statement, ast.For | ast.AsyncFor | ast.While) else []
    return any(_leaves(x, in_loop or x in looped) for x in ast.iter_child_nodes(statement))


def _swallowed(frame: FrameType, manager: ast.expr) -> Sequence[ast.expr | None]:
    """Returns what `with manager:` keeps from being raised, as far as its source tells.

    That is the arguments of `suppress`; else all, where `__exit__` returns a value or the generator
    of a `contextmanager` catches at its `yield`.
    """
    made = _value_of(frame, manager.func if isinstance(manager, ast.Call) else manager)
    if made is contextlib.suppress and isinstance(manager, ast.Call):
        return manager.args
    kind = made if isinstance(made, type) else type(made)
    generator = made.gen.gi_code if kind is contextlib._GeneratorContextManager else None
    exits = generator or getattr(made, "__wrapped__", None) or getattr(kind, "__exit__", None)
    return [None] if any(map(_keeps, _source(exits))) else []


def _keeps(node: ast.AST) -> bool:
    match node:
        case ast.Return(value=value):
            return value is not None and ast.unparse(value) not in ("None", "False")
        case ast.Try():
            yields = any(isinstance(x, ast.Yield) for each in node.body for x in ast.walk(each))
            return yields and any(_handled(node))
    return False


def _source(function: Any) -> Iterable[ast.AST]:
    """Returns the syntax of a function; nothing of one that is not written in Python."""
    with contextlib.suppress(OSError, TypeError, SyntaxError):
        return ast.walk(ast.parse(dedent(getsource(function))))
    return ()


def _is_raised(frame: FrameType, expression: ast.expr | None) -> bool:
    """Returns whether what a handler names is, or may be, what an operation raises."""
    if isinstance(expression, ast.Tuple):
        return any(_is_raised(frame, each) for each in expression.elts)
    named = None if expression is None else _value_of(frame, expression)
    if not isinstance(named, type):
        return True
    return any(issubclass(each, named) for each in _RAISED)


def _value_of(frame: FrameType, expression: ast.expr) -> Any:
    """Looks up `name` or `module.name` as the frame would; None for what is neither."""
    match expression:
        case ast.Name(id=name):
            places = frame.f_locals, frame.f_globals, vars(builtins)
            return next((place[name] for place in places if name in place), None)
        case ast.Attribute(value=owner, attr=name):
            return getattr_static(_value_of(frame, owner), name, None)
    return None
