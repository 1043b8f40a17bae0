"""Symbols that pass for Python numbers in code of the user's.

torch's own code knows its SymInt, and asks it what it has to ask. Other code expects an int, and
would silently do something else where it meets none: so `isinstance(n, int)` holds for a symbol,
and to format one as text asks for its value, which makes a guard. What has no such question, such
as `hash(n)`, raises. Text that this package makes has the symbolic expression in marks.
"""

import builtins
import contextlib
import re
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import optree
import sympy  # type: ignore[import-untyped]
import torch

from shardmap_torch.core.torch_private.symbols import PythonPrinter

MARKED: Final = re.compile("⟦(.*?)⟧")
"""A symbolic expression in a text, in Python."""

_IS_INSTANCE: Final = isinstance
_LOCK: Final = threading.RLock()
_PRINTER: Final = PythonPrinter()
NUMBERS: Final = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
"""Types of symbols, and those of the numbers that they stand for."""

_TORCH: Final = tuple(f"{Path(str(m.__file__)).parent}/" for m in (torch, sympy, optree))
_OWN: Final = tuple(
    f"{Path(__file__).resolve().parents[3] / name}/"
    for name in ("shardmap_torch", "ops", "kernels")
)
_BETWEEN: Final = ("<", sysconfig.get_path("stdlib") + "/")
"""Files whose functions ask in the name of their caller, as those of abc and functools do."""


def expression(symbol: Any) -> str:
    """A symbol's expression, in Python."""
    return str(_PRINTER.doprint(symbol.node.expr))


def is_symbol(value: Any) -> bool:
    """Returns whether a number depends on a symbol."""
    return type(value) in NUMBERS and bool(value.node.expr.free_symbols)


def _asker() -> str:
    """The file of the code that asks, beyond the functions here."""
    frame = sys._getframe(3)
    while frame.f_back is not None and _is_between(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename


def _is_between(file: str) -> bool:
    return file.startswith(_BETWEEN) and "site-packages" not in file


def _text_of(symbol: Any, original: Callable[[Any], str]) -> str:
    asker = _asker()
    if asker.startswith(_TORCH):
        return original(symbol)
    if asker.startswith(_OWN) and is_symbol(symbol):
        return f"⟦{expression(symbol)}⟧"
    return repr(NUMBERS[type(symbol)](symbol))


def _is_number(symbol: Any, kinds: Any) -> bool:
    """Returns what `isinstance` would say of the number."""
    return not _asker().startswith(_TORCH) and _IS_INSTANCE(NUMBERS[type(symbol)](), kinds)


def _is_instance(value: Any, kinds: Any, /) -> bool:
    return _IS_INSTANCE(value, kinds) or (type(value) in NUMBERS and _is_number(value, kinds))


@contextlib.contextmanager
def passing_for_numbers() -> Iterator[None]:
    """In here torch's symbols pass for the numbers that they stand for.

    What is replaced is the process's: threads wait for each other, so that each restores it.
    """
    with _LOCK:
        before = {kind: kind.__repr__ for kind in NUMBERS}
        for kind, original in before.items():
            kind.__repr__ = _asking(original)  # type: ignore[method-assign]
        # A class cannot get a `__class__` of its own after it has been made.
        builtins.isinstance = _is_instance
        try:
            yield
        finally:
            builtins.isinstance = _IS_INSTANCE
            for kind, original in before.items():
                kind.__repr__ = original  # type: ignore[method-assign]


def _asking(original: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda symbol: _text_of(symbol, original)
