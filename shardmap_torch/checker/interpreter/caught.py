"""Refuses to catch what an operation raises for some values, which no check gets to see.

A check has no values: an operation that may fail, such as a lookup or a factorization, never does
in it. Where the body catches the error and goes on, a rank would take a way that nobody has typed,
beside ranks that go the other.
"""

import ast
import builtins
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import FrameType
from typing import Any, Final

import torch

from shardmap_torch.checker.interpreter import messages
from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.core.source_location import Site, frames_in_body, nodes_of
from shardmap_torch.core.torch_private.engine import OpOverload

_NAMES: Final = (
    "_assert_async _linalg_check_errors _linalg_eigh _linalg_svd bernoulli embedding embedding_bag "
    "fmod floor_divide gather index index_add index_copy index_fill index_put index_select "
    "linalg_eig linalg_eigvals linalg_lstsq masked_scatter multinomial nll_loss2d_forward "
    "nll_loss_forward normal poisson put remainder scatter scatter_add scatter_reduce "
    "take"
)
_RAISED: Final = (RuntimeError, IndexError, torch.linalg.LinAlgError)  # type: ignore[attr-defined]

MAY_FAIL: Final[frozenset[Any]] = frozenset((torch.nn.functional.one_hot,)) | frozenset(
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
    for frame in frames_in_body():
        for line in _catching(frame):
            head = (
                f"{_name(called)} fails for some values, and the body catches that at "
                f"{Site(frame.f_code.co_filename, line).place}: a rank whose values fail would go "
                "another way than the one that is checked."
            )
            advice = (
                "let the error end the program, or ask before: branch on a condition taken with "
                ".item(), such as torch.linalg.cholesky_ex(x).info."
            )
            raise messages.error(interpreter, head, [], advice)


def _name(called: Any) -> str:
    return messages.friendly(called) if isinstance(called, OpOverload) else called.__name__


def _catching(frame: FrameType) -> Iterator[int]:
    """Yields the lines at which a frame, where it is now, catches what operations raise."""
    code = frame.f_code
    for first, last, caught, line in _tries(code.co_filename):
        is_inside = code.co_firstlineno <= first <= frame.f_lineno <= last
        if is_inside and any(_is_raised(frame, each) for each in caught):
            yield line


_Try = tuple[int, int, Sequence[ast.expr | None], int]


@lru_cache(maxsize=256)
def _tries(file: str) -> Sequence[_Try]:
    """Returns the lines that are tried in a file, what is caught there, and the line of the `try`.

    Handlers that end in a `raise`, and leave by nothing else, catch nothing.
    """
    found: list[_Try] = []
    for node in nodes_of(file):
        match node:
            case ast.Try(body=body) | ast.TryStar(body=body):
                ends = [(x, isinstance(x.body[-1], ast.Raise)) for x in node.handlers]
                caught = [x.type for x, raises in ends if _leaves(x) or not raises]
                caught += [None for each in node.finalbody if _leaves(each)]
            case ast.With(body=body, items=items):
                calls = [x.context_expr for x in items if isinstance(x.context_expr, ast.Call)]
                caught = [
                    each
                    for x in calls
                    if ast.unparse(x.func).endswith("suppress")
                    for each in x.args
                ]
            case _:
                continue
        if caught:
            found.append((body[0].lineno, body[-1].end_lineno or 0, caught, node.lineno))
    return found


def _leaves(statement: ast.AST) -> bool:
    return any(isinstance(x, ast.Return | ast.Break | ast.Continue) for x in ast.walk(statement))


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
            return getattr(_value_of(frame, owner), name, None)
    return None
