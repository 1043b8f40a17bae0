"""Fake tensors without importing `torch._dynamo`, which takes a second, and sympy, 0.4 seconds.

torch's fake tensor mode imports it to read three flags (torch 2.13, `FakeTensorMode.__init__`), and
so does what it wraps in `torch._disable_dynamo`, such as the shapes of many operators, to have
Dynamo not look into it. Here the mode gets these flags as their environment variables have them,
and what is wrapped is called as it is. Where a program has imported `torch._dynamo` anyway, and may
have set the flags or be compiling, torch's own code runs as it is.

sympy comes with `torch.fx.experimental.symbolic_shapes`, from which the shapes of operators import
functions when they run. While a check runs, and no symbol exists, others answer in its place.
"""

import builtins
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, Final, cast

import torch
from torch.fx import experimental

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


class _StandIn(ModuleType):
    """Stands for a module that takes long to import, and imports it for what it cannot answer.

    It answers functions of torch's alone, while it is where they look for the module; other code,
    and code that keeps what it gets, gets the module's own.
    """

    def __init__(self, name: str, answers: Mapping[str, Any]) -> None:
        super().__init__(name)
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        is_package = "." not in self.__name__
        if name.startswith("__") and name != "__all__" and not (is_package and name == "__path__"):
            raise AttributeError(name)
        asking = sys._getframe(1)
        is_torch = asking.f_globals.get("__name__", "").partition(".")[0] == "torch"
        is_kept = asking.f_code.co_name == "<module>"
        if is_torch and not is_kept and sys.modules.get(self.__name__) is self:
            if name in self._answers:
                return self._answers[name]
        return getattr(_imported(self.__name__), name)


def _plain(name: str, are_plain: Callable[..., bool], answer: Callable[..., Any]) -> Any:
    """Returns a function that answers for plain values, and asks torch's for others."""

    def function(*args: Any, **kwargs: Any) -> Any:
        is_plain = not kwargs and are_plain(*args)
        return (answer if is_plain else getattr(_imported(SYMBOLS), name))(*args, **kwargs)

    return function


def _are(kind: type, most: int = sys.maxsize) -> Callable[..., bool]:
    """Returns what tells whether arguments are of one type; symbols have types of their own."""
    return lambda *args: 0 < len(args) <= most and all(type(each) is kind for each in args)


def _are_sizes(*values: Any) -> bool:
    return all(isinstance(each, tuple | list) and _are(int)(0, *each) for each in values)


def _has_sizes(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.is_sparse:
        return False
    return _are(int)(*value.shape, *value.stride(), value.storage_offset())


def _never(*values: Any) -> bool:
    """Returns that torch's own is asked, once what is imported beside other names is called."""
    return False


def _same(value: Any) -> Any:
    return value


class _NeverError(Exception):
    """In place of classes of which there is nothing, and nothing raised, while no symbol exists."""


SYMBOLS: Final = "torch.fx.experimental.symbolic_shapes"
_FUNCTIONS: Final = {
    name: _plain(name, are_plain, answer)
    for names, are_plain, answer in (
        ("expect_true guard_or_false guard_or_true", _are(bool, 1), _same),
        ("statically_known_true", _are(bool, 1), _same),
        ("guard_int guarding_hint_or_throw optimization_hint", _are(int, 1), _same),
        ("has_guarding_hint", _are(int, 1), lambda size: True),
        ("is_nested_int", _are(int, 1), lambda size: False),
        ("sym_and", _are(bool), lambda *values: all(values)),
        ("sym_or", _are(bool), lambda *values: any(values)),
        ("sym_eq", _are_sizes, lambda sizes, others: list(sizes) == list(others)),
        ("_iterate_exprs _iterate_nodes", _has_sizes, lambda tensor: iter(())),
        ("compute_unbacked_bindings free_unbacked_symbols", _never, _same),
        ("guard_size_oblivious has_free_symbols has_free_unbacked_symbols", _never, _same),
    )
    for name in names.split()
}
_STAND_INS: Final = {
    SYMBOLS: _StandIn(SYMBOLS, _FUNCTIONS | {"GuardOnDataDependentSymNode": _NeverError}),
    "sympy": _StandIn("sympy", {"Basic": _NeverError}),
}


class _Standing:
    """Counts the checks that run, during which the stand-ins are there until a module is needed."""

    def __init__(self) -> None:
        self.lock, self.checks, self.is_over = threading.Lock(), 0, False

    def change(self, checks: int, is_over: bool = False) -> None:
        """Changes how many run, and whether none may stand in any more."""
        with self.lock:
            self.checks += checks
            self.is_over |= is_over
            wanted = self.checks > 0 and not self.is_over
            if wanted and not _STAND_INS.keys() & sys.modules.keys():
                sys.modules.update(_STAND_INS)
                experimental.symbolic_shapes = _STAND_INS[SYMBOLS]
            elif not wanted and sys.modules.get(SYMBOLS) is _STAND_INS[SYMBOLS]:
                for name in _STAND_INS:
                    sys.modules.pop(name)
                del experimental.symbolic_shapes


_STANDING: Final = _Standing()


def _imported(name: str) -> ModuleType:
    """Imports a module itself; who has its stand-in finds all of its names there from now on."""
    _STANDING.change(0, is_over=True)
    module = import_module(name)
    vars(_STAND_INS[name]).update(vars(module))
    return module


@contextmanager
def postponing_symbols() -> Iterator[None]:
    """Has torch do without symbols for sizes, for which it imports sympy, while there are none."""
    _STANDING.change(1)
    try:
        yield
    finally:
        _STANDING.change(-1)


@contextmanager
def postponing_imports() -> Iterator[None]:
    """Does both, around a check."""
    with postponing_dynamo(), postponing_symbols():
        yield
