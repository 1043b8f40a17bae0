"""Source locations in the user's code."""

import ast
import contextlib
import linecache
import os
import sys
import sysconfig
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import unwrap
from itertools import count, takewhile
from pathlib import Path
from traceback import walk_tb
from types import CodeType, FrameType, TracebackType
from typing import Any, Final, TypeAlias

import optree
import torch
import typing_extensions

from shardmap_torch.errors import ShardMapError

_HERE: Final = Path(__file__).absolute().parents[2]
"""The path as code objects name it: one with symlinks stays one."""

_OWN: Final = (
    *(str(_HERE / name) + "/" for name in ("shardmap_torch", "ops", "kernels")),
    *(str(Path(package.__file__ or "").parent) + "/" for package in (torch, optree)),
    contextlib.__file__,
    typing_extensions.__file__,  # what torch deprecates is called through it
    "<",
)

_COLLECTIVES: Final = (
    "torch.distributed.distributed_c10d",
    "torch.distributed._functional_collectives",
)
"""Modules of torch whose functions wait for other processes."""

_HELPER: Final = "site-packages/einops/"
"""The package that reshapes in place of the user, whose line has the pattern."""

_VERIFIES: Final = str(_HERE / "shardmap_torch/checker/verify/")
"""The folder of the functions that call bodies in a check, and their backwards."""

_LIBRARY: Final = sysconfig.get_path("stdlib") + "/"
"""Python's own; installed packages lie below it too, but for those in a virtual environment."""


class _Users(dict[str, bool]):
    """Tells by a file's name if it is the user's, without a call where that is known."""

    def __missing__(self, name: str) -> bool:
        self[name] = is_users = not name.startswith(_OWN) and _HELPER not in name
        return is_users


_USERS: Final = _Users()
"""Each operation of a check asks for all frames, and each comparison of processes."""


@dataclass(frozen=True)
class Site:
    """A line of the user's code.

    Attributes:
        file: path of the file.
        line: number of the line.
    """

    file: str
    line: int

    @property
    def source(self) -> str:
        """The text of the line."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def place(self) -> str:
        """Formats it as `model.py:12`."""
        return f"{Path(self.file).name}:{self.line}"

    def __str__(self) -> str:
        """Formats it as `model.py:12: y = x @ w`."""
        source = self.source
        return self.place + (f": {source}" if source else "")


def error_site(error: BaseException) -> Site | None:
    """Finds the innermost line of the user's code in an exception's traceback."""
    lines = [Site(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    return next((site for site in reversed(lines) if not site.file.startswith(_OWN)), None)


def definition_of(function: object) -> Site | None:
    """Returns the line on which a function of the user's starts; None for what has no code."""
    code = getattr(unwrap(function), "__code__", None) if callable(function) else None
    if code is None:
        return None
    lines = (Site(code.co_filename, line) for line in count(code.co_firstlineno))
    return next(site for site in lines if not site.source.startswith("@"))


def is_raised_by_user(error: BaseException) -> bool:
    """Returns whether code of the user's raised it, below the frame that caught it.

    Methods that operators and functions of Python call, such as `__repr__`, are of an argument, and
    do not count.
    """
    below = list(walk_tb(error.__traceback__))[1:]
    return any(
        not frame.f_code.co_filename.startswith((*_OWN, _LIBRARY))
        and not frame.f_code.co_name.startswith("__")
        for frame, _ in below
    )


def is_raised_by_call(error: BaseException) -> bool:
    """Returns whether a call itself failed, as for wrong arguments, before code of its began.

    Functions of this package may stand between the frame that caught the error and the call.
    """
    return all(
        frame.f_code.co_filename.startswith(_OWN) for frame, _ in walk_tb(error.__traceback__)
    )


@lru_cache(maxsize=16384)
def _site(file: str, line: int) -> Site:
    """Returns one object for a line: layers are the same lines, over and over."""
    return Site(file, line)


def call_site() -> Site | None:
    """Finds the innermost line on the stack that is neither in this package nor in torch."""
    frame = _users(sys._getframe(1))
    return None if frame is None else _site(frame.f_code.co_filename, frame.f_lineno)


def warn_at(
    site: Site | None,
    message: str,
    category: type[Warning] = UserWarning,
    registry: dict[Any, Any] | None = None,
) -> None:
    """Warns at a line, or of this package where there is none; once for each `registry`."""
    place = ("shardmap_torch", 0) if site is None else (site.file, site.line)
    warnings.warn_explicit(message, category, *place, registry=registry)


def site_within(code: CodeType) -> Site | None:
    """Finds that line if a function which is running has called it, as autograd calls backwards."""
    inner = takewhile(lambda each: each.f_code is not code, _outwards(sys._getframe(1)))
    frame = next((each for each in inner if _USERS[each.f_code.co_filename]), None)
    return None if frame is None else _site(frame.f_code.co_filename, frame.f_lineno)


def site_calling(code: CodeType) -> Site | None:
    """Finds the innermost line of the user's that has called a function, which is running."""
    frames = (frame for frame in _outwards(sys._getframe(1)) if frame.f_code is code)
    frame = _users(next(frames, None))
    return None if frame is None else _site(frame.f_code.co_filename, frame.f_lineno)


def site_of(frame: FrameType | None) -> Site | None:
    """Finds the innermost line of a stack that is in no library, which the user may have called."""
    users = _users(frame)
    while users is not None and _is_library(users.f_code.co_filename):
        users = _users(users.f_back)
    return None if users is None else Site(users.f_code.co_filename, users.f_lineno)


def standing() -> tuple[Site | None, bool]:
    """Finds the user's line at which the main thread is, and whether a collective of torch's is.

    For another thread, which posts it while this one may wait in C++ for ever.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    inner = [*takewhile(lambda each: not _USERS[each.f_code.co_filename], _outwards(frame))]
    return site_of(frame), is_in_collective(inner)


def is_in_collective(frames: Sequence[FrameType]) -> bool:
    """Returns whether a collective of torch's runs, which nothing of this package has called.

    The innermost frame is the first.
    """
    names = [each.f_globals.get("__name__") for each in frames]
    outer = [at for at, name in enumerate(names) if name in _COLLECTIVES][-1:]
    return any(not any(map(is_own, frames[at:])) for at in outer)


def _is_library(name: str) -> bool:
    return name.startswith(_LIBRARY) or "site-packages" in name


Standing: TypeAlias = tuple[tuple[CodeType, int], ...]
"""Places in the user's code, the innermost first, of which `read_lines` makes lines."""


def mark_lines() -> Standing:
    """Finds eight of the lines that `call_sites` does, for a third of its time."""
    found: Standing = ()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not found[7:]:
        if _USERS[frame.f_code.co_filename]:
            found += ((frame.f_code, frame.f_lasti),)
        frame = frame.f_back
    return found


def read_lines(standing: Standing) -> Iterator[Site]:
    """Yields the lines of places."""
    for code, at in standing:
        lines = (line for start, end, line in code.co_lines() if start <= at < end)
        yield _site(code.co_filename, next(lines, None) or code.co_firstlineno)


def call_sites() -> tuple[Site, ...]:
    """Finds all such lines, the innermost first: they tell the callers of a helper apart."""
    found, frame = [], _users(sys._getframe(1))
    while frame is not None:
        found.append(_site(frame.f_code.co_filename, frame.f_lineno))
        frame = _users(frame.f_back)
    return tuple(found)


def frames_in_body() -> Iterator[FrameType]:
    """Yields the frames of the body that a check runs, and of torch, the innermost first."""
    outwards = _outwards(sys._getframe(1))
    inner = takewhile(lambda each: _VERIFIES not in each.f_code.co_filename, outwards)
    return (each for each in inner if not is_own(each))


def is_called_by(codes: Collection[CodeType]) -> bool:
    """Returns whether one of these runs, called by the innermost line of the user's or without."""
    frame = sys._getframe(1)
    users = _users(frame)
    inner = takewhile(lambda each: each is not users, _outwards(frame))
    return any(each.f_code in codes for each in inner)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields a frame and those around it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _users(frame: FrameType | None) -> FrameType | None:
    """Finds the innermost frame of the user's code, from this one outwards."""
    while frame is not None and not _USERS[frame.f_code.co_filename]:
        frame = frame.f_back
    return frame


def users_part(error: BaseException) -> TracebackType | None:
    """Returns an error's traceback without frames of libraries, and shortens those of causes.

    Errors that are not of this package keep theirs, unless code of the user's raised them, or had
    torch raise them. All of it with SHARDMAP_TRACEBACK=full in the environment.
    """
    if os.environ.get("SHARDMAP_TRACEBACK") == "full":
        return error.__traceback__
    cause = error.__cause__ or error.__context__
    if cause is not None:
        cause.__traceback__ = users_part(cause)
    links: list[TracebackType] = []
    trace = error.__traceback__
    while trace is not None:
        links.append(trace)
        trace = trace.tb_next
    hidden = _OWN[:-1]  # a file "<stdin>" may be the user's
    if not isinstance(error, ShardMapError):
        if not links or is_own(links[-1].tb_frame) or not is_raised_by_user(error):
            return error.__traceback__  # where it went wrong is in this package
        hidden = _OWN
    for each in reversed(links):
        if not each.tb_frame.f_code.co_filename.startswith(hidden):
            trace = TracebackType(trace, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return trace


def is_running(function: object) -> bool:
    """Returns whether a function, if it is one of Python's, is on the stack."""
    code = getattr(function, "__code__", None)
    return any(frame.f_code is code for frame in _outwards(sys._getframe(1)))


def user_call() -> tuple[FrameType, FrameType] | None:
    """Finds the innermost frame of the user's code, and that of what it has called."""
    own = sys._getframe(1)
    users = _users(own)
    if users is None:
        return None
    *_, called = takewhile(lambda each: each is not users, _outwards(own))
    return users, called


def is_own(frame: FrameType) -> bool:
    """Returns whether a frame runs code of this package."""
    return frame.f_code.co_filename.startswith(_OWN[:3])


def answer_that_raises() -> bool | None:
    """Returns the value of the condition that is asked for by which its statement only raises.

    That is `assert condition` or `if condition: raise ...`, in any code but this package's; of all
    other statements None.
    """
    asking = next((each for each in _outwards(sys._getframe(1)) if not is_own(each)), None)
    if asking is None:
        return None
    positions = list(asking.f_code.co_positions())
    return _checks(asking.f_code.co_filename).get(positions[asking.f_lasti // 2])


def nodes_of(file: str) -> Iterator[ast.AST]:
    """Yields the syntax of a file; nothing of one that has none, as of a prompt."""
    with contextlib.suppress(SyntaxError):
        yield from ast.walk(ast.parse("".join(linecache.getlines(file))))


@lru_cache(maxsize=64)
def _checks(file: str) -> Mapping[object, bool]:
    """Returns where statements that only check a condition ask for it, in a file."""
    found: dict[object, bool] = {}
    for node in nodes_of(file):
        match node:
            case ast.Assert(test=test):
                raising = False
            case ast.If(test=test, body=[ast.Raise()]):
                raising = True
            case _:
                continue
        while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            raising, test = not raising, test.operand
        operands = test.values if isinstance(test, ast.BoolOp) else []  # paths show which suffice
        found |= dict.fromkeys(map(_span, (node, test, *operands)), raising)
    return found


def _span(node: ast.stmt | ast.expr) -> object:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
