"""Refuses questions whose answers differ between ranks, and would count as equal on all of them.

Where and how a tensor lies in memory: a check runs on tensors without data, contiguous and
unshared. Each rank has its tensor elsewhere and otherwise, a shard for instance behind other shards
and with their strides.

The state of the default generator: `torch.initial_seed()` and `torch.get_rng_state()` return the
seed of each process, which may differ between processes, as a Python value.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.checker.interpreter.interpreter import Interpreter, current_interpreter
from shardmap_torch.core.source_location import call_site, is_own
from shardmap_torch.errors import ShardTypeError

_ASKS: Final = {"initial_seed": "initial_seed", "get_state": "get_rng_state", "seed": "seed"}
"""Methods of a generator, and the functions of torch that call them."""

_TORCH: Final = str(Path(torch.__file__).parent)
_MODULE: Final[Any] = torch.random
_LOCK: Final = threading.Lock()


class _Guarded:
    """Replaces the generator in the module `torch.random` while bodies are interpreted."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator, self.users = generator, 0

    def __getattr__(self, name: str) -> Any:
        interpreter = current_interpreter()
        if name in _ASKS and interpreter and is_user(sys._getframe(1).f_back):
            raise ShardTypeError(
                f"{interpreter.name}: torch.{_ASKS[name]}() at {call_site()} gives what each "
                "process has of its own, and it would count as equal on all ranks.\n"
                "Fix: pass it as an argument, or draw from a key of shardmap_torch.random."
            )
        return getattr(self.generator, name)


def is_user(frame: FrameType | None) -> bool:
    """Returns whether the frame runs the user's own code, and not torch's or ours."""
    return frame is not None and not (is_own(frame) or frame.f_code.co_filename.startswith(_TORCH))


@contextmanager
def guarding_generator_state() -> Iterator[None]:
    """Refuses reads of the default generator's state by interpreted code in this context.

    Raises:
        ShardTypeError: it reads it.
    """
    with _LOCK:
        guard = _MODULE.default_generator
        if not isinstance(guard, _Guarded):
            guard = _MODULE.default_generator = _Guarded(guard)
        guard.users += 1
    try:
        yield
    finally:
        with _LOCK:
            guard.users -= 1
            if guard.users == 0:
                _MODULE.default_generator = guard.generator


_Question = Callable[..., Any]

_WHERE: Final = (
    "tells where a tensor lies in memory, which differs between ranks, and it would count as equal "
    "on all ranks",
    "leave it out of the body; to compare tensors, use `is`",
)
_HOW: Final = (
    "tells how a tensor lies in memory, which differs between shards and the global tensor, and "
    "between meshes, and it would count as equal everywhere",
    "leave it out of the body: contiguous() and reshape() copy only where they must",
)
_HISTORY: Final = (
    "tells what autograd keeps of a tensor, which differs between meshes, and it would count as "
    "equal everywhere",
    "ask x.requires_grad, or pass what is known before the call as a static argument",
)


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


_QUESTIONS: Final[Mapping[_Question, tuple[str, tuple[str, str]]]] = {
    **{getattr(Tensor, name): (f"{name}()", _WHERE) for name in ("data_ptr", "storage_offset")},
    **{
        getattr(Tensor, name): (f"{name}()", _HOW)
        for name in ("stride", "is_contiguous", "dim_order", "is_set_to", "_is_view", "storage")
    },
    Tensor.untyped_storage: ("untyped_storage()", _HOW),
    _getter("_base"): ("_base", _HOW),
    _getter("_version"): ("_version", _HISTORY),
    _getter("is_leaf"): ("is_leaf", _HISTORY),
}
"""Functions of torch that ask: their names, and the end of the message with its repair."""


def reject_address(
    interpreter: Interpreter, func: _Question, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Answers torch's own code only.

    Raises:
        ShardTypeError: the user's code asks.
    """
    if is_user(_asker(func)):
        name, (tells, instead) = _QUESTIONS[func]
        raise ShardTypeError(
            f"{interpreter.name}: {name} at {call_site()} {tells}.\nFix: {instead}."
        )
    return func(*args, **kwargs)


def _ask_for_gradients(
    interpreter: Interpreter, func: _Question, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Answers, but has ranks run a body of which the user's code asks: vmap answers otherwise."""
    if is_user(_asker(func)):
        interpreter.needs_ranks("a question for requires_grad")
    return func(*args, **kwargs)


def _asker(func: _Question) -> FrameType | None:
    """Returns the frame that calls a function of torch, which may be in Python itself."""
    # The frames here: this function, its caller, and two of the mode that calls that.
    frame: FrameType | None = sys._getframe(4)
    code = getattr(func, "__code__", None)
    while code is not None and frame is not None:
        found, frame = frame.f_code is code, frame.f_back
        if found:
            break
    return _behind_modes(frame, func)


def _behind_modes(frame: FrameType | None, func: _Question) -> FrameType | None:
    """Skips modes of the user's, which pass on what another has asked."""
    outer = frame
    while outer is not None and is_user(outer):
        code, passed = outer.f_code, outer.f_locals
        names = code.co_varnames[1 : code.co_argcount]  # without self
        outer = outer.f_back
        if code.co_name == "__torch_function__" and any(passed.get(n) is func for n in names):
            return _behind_modes(outer, func)
    return frame


ADDRESSES: Final[Mapping[_Question, _Question]] = {
    **dict.fromkeys(_QUESTIONS, reject_address),
    _getter("requires_grad"): _ask_for_gradients,
}
"""Functions of torch that ask, with what handles them."""
