"""Fake tensors without importing `torch._dynamo`, which takes a second.

torch's fake tensor mode imports it to read three flags (torch 2.13, `FakeTensorMode.__init__`), and
so does what it wraps in `torch._disable_dynamo`, such as the shapes of many operators, to have
Dynamo not look into it. Here the mode gets these flags as their environment variables have them,
and what is wrapped is called as it is. Where a program has imported `torch._dynamo` anyway, and may
have set the flags or be compiling, torch's own code runs as it is.
"""

import builtins
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FunctionType, SimpleNamespace
from typing import Any, Final, cast

import torch

from shardmap_torch.core.caching import memo
from shardmap_torch.core.torch_private.engine import FakeTensorMode, disable_dynamo

DYNAMO: Final = "torch._dynamo"

_VARIABLES: Final[dict[str, tuple[str, Any]]] = {
    "_custom_ops_profile": ("", None),
    "fake_tensor_cache_enabled": ("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "1"),
    "fake_tensor_cache_crosscheck_enabled": ("TORCH_FAKE_TENSOR_DISPATCH_CACHE_CROSSCHECK", "0"),
}
"""The environment variable of each flag, which is 1 where it is set, and the default."""


def make_fake_mode(
    refuse_thread: Callable[[], object] | None = None, **options: Any
) -> FakeTensorMode:
    """Makes a fake tensor mode with these options of torch's.

    torch enters it for each operation on its tensors where it is not on, as on a thread that did
    not make it; `refuse_thread` is called there, and raises.
    """
    made = FakeTensorMode if DYNAMO in sys.modules else _LightMode
    if refuse_thread is None:
        return made(**options)
    mode: Any = _on_one_thread(made)(**options)
    mode.refusing = threading.get_ident(), refuse_thread
    return cast(FakeTensorMode, mode)


@memo
def _on_one_thread(made: type[FakeTensorMode]) -> type[FakeTensorMode]:
    return type("OneThreadMode", (_OneThread, made), {})


class _OneThread:
    """Part of a mode that other threads than its own cannot enter."""

    refusing: tuple[int, Callable[[], object]]

    def __enter__(self) -> Any:
        if threading.get_ident() != self.refusing[0]:
            self.refusing[1]()
        return super().__enter__()  # type: ignore[misc]  # torch's


def light(method: Any) -> Callable[..., Any]:
    """Returns a function that does not import `torch._dynamo` to read its flags."""
    own = {**vars(builtins), "__import__": _import}
    known = {**method.__globals__, "__builtins__": own, "torch": _TORCH}
    name, defaults = method.__name__, method.__defaults__
    function = FunctionType(method.__code__, known, name, defaults, method.__closure__)
    function.__kwdefaults__ = method.__kwdefaults__
    return function


def _import(
    name: str, names: Any = None, local: Any = None, fromlist: Sequence[str] = (), level: int = 0
) -> Any:
    """Imports a module, but gives what stands for `torch` with the flags of `torch._dynamo`."""
    if name == "torch._dynamo.config" and not fromlist:
        return _TORCH
    module = builtins.__import__(name, names, local, fromlist, level)
    return _TORCH if module is torch else module


class _Flags:
    """The flags of `torch._dynamo.config`; others than those that are known are torch's own."""

    def __getattr__(self, name: str) -> Any:
        if name in _VARIABLES and DYNAMO not in sys.modules:
            variable, default = _VARIABLES[name]
            return os.environ.get(variable, default) == "1" if variable else default
        return getattr(import_module("torch._dynamo.config"), name)


class _Torch:
    """The module `torch`, of which `_dynamo` has the flags alone."""

    _dynamo = SimpleNamespace(config=_Flags())

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_TORCH: Final = _Torch()


class _LightMode(FakeTensorMode):
    """A mode of torch's whose code does not import Dynamo."""

    __init__ = light(FakeTensorMode.__init__)
    _dispatch_impl = light(FakeTensorMode._dispatch_impl)
    # torch wraps it so that Dynamo does not look into it, for which it imports Dynamo.
    __torch_dispatch__ = FakeTensorMode.__torch_dispatch__.__wrapped__  # type: ignore[attr-defined]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


@contextmanager
def postponing_dynamo() -> Iterator[None]:
    """Has functions that Dynamo must not look into called as they are, while it is not there."""
    if DYNAMO in sys.modules:
        yield
        return
    held = [function for function in _disabled() if _HELD not in vars(function)]
    for function in held:
        setattr(function, _HELD, function)
    try:
        yield
    finally:
        for function in held:
            vars(function).pop(_HELD, None)


_HELD: Final = "__dynamo_disable"
"""The attribute in which torch keeps what it calls in place of a function (2.13, `_compile.py`)."""

_PARTS: Final = ("torch._refs", "torch._decomp", "torch._meta_registrations", "torch._prims")
"""Modules that have the shapes of operators."""


@memo
def _disabled() -> tuple[Any, ...]:
    """Finds the functions of these modules that torch wraps so."""
    wrapper = disable_dynamo(_disabled).__code__
    modules = [module for name, module in sys.modules.items() if name.startswith(_PARTS)]
    found: dict[int, FunctionType] = {}
    seen: set[int] = set()
    waiting = [value for module in modules for value in vars(module).values()]
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        around = [cell.cell_contents for cell in function.__closure__ or ()]
        waiting += around
        if function.__code__ is wrapper:
            found |= {id(each): each for each in around if isinstance(each, FunctionType)}
    return tuple(found.values())
