"""The fake tensor mode of checks, and modules of torch's that it imports when it needs them.

torch's mode imports `torch._dynamo`, which takes a second, to read three flags and to have Dynamo
leave functions alone. The shapes of operators import functions on sizes that are symbols, and with
them sympy, which takes 0.4 seconds. While a check runs, and nothing else is asked of these modules,
others answer in their place.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import experimental

from shardmap_torch.core.torch_private.engine import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    has_kernel,
    has_meta,
    in_kernel_invocation,
    is_taken_apart,
    make_subclass,
    op_implementations_checks,
    set_throw_on_data_pointer,
)


class CheckMode(FakeTensorMode):
    """A mode that runs operations by their kernels, where torch does no more than that.

    It takes torch a millisecond to find that out, for each operation anew, and kernels in C++ would
    ask Python for the device of each operand, for which torch imports DTensor.

    Attributes:
        refuse_thread: called on another thread than that which made the mode. torch enters it there
            for each operation on its tensors.
    """

    def __init__(self, refuse_thread: Callable[[], object] = lambda: None, **options: Any) -> None:
        super().__init__(**options)
        self.refuse_thread = refuse_thread
        self._thread = threading.get_ident()

    def __enter__(self) -> Any:
        if threading.get_ident() != self._thread:
            self.refuse_thread()
        return super().__enter__()

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation."""
        made = self.run_kernel(func, args, kwargs or {})
        return super().dispatch(func, types, args, kwargs or {}) if made is UNTRIED else made

    def run_kernel(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs an operation by its kernel for tensors without data, or leaves it to torch."""
        has_more = any(isinstance(each, Tensor | list | tuple) for each in kwargs.values())
        if self.shape_env is not None or has_more or kwargs.get("device") or not _is_by_kernel(op):
            return UNTRIED
        own: dict[int, FakeTensor] = {}
        with suppress(Exception), in_kernel_invocation(self):  # torch's own words are better
            given = [self._bare(each, own) for each in args]
            (device,) = {each.fake_device for each in own.values()}
            return self._wrapped(device, op(*given, **kwargs), own)
        return UNTRIED

    def _bare(self, value: Any, own: dict[int, FakeTensor]) -> Any:
        """Returns an argument for a kernel: for tensors others, whose device C++ reads itself."""
        if type(value) in (list, tuple):
            return [self._bare(each, own) for each in value]
        if not isinstance(value, Tensor):
            return value
        if type(value) is not FakeTensor or value.fake_mode is not self or not is_simple(value):
            raise TypeError("torch treats it otherwise")
        meta = torch.empty(0, dtype=value.dtype, device="meta")
        meta.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())
        bare = make_subclass(FakeTensor, meta, False, device_for_backend_keys=value.fake_device)
        bare.__dict__.update(value.__dict__)
        own[id(bare)] = value
        return bare

    def _wrapped(self, device: torch.device, made: Any, own: Mapping[int, FakeTensor]) -> Any:
        if type(made) in (list, tuple):
            return type(made)([self._wrapped(device, each, own) for each in made])
        return make_fake(self, made, device) if type(made) is Tensor else own.get(id(made), made)


UNTRIED: Final = object()


def is_simple(tensor: FakeTensor) -> bool:
    """Returns whether shape, strides, dtype and device say all about a tensor but its values."""
    return (
        tensor.constant is None
        and tensor.layout is torch.strided
        and not tensor.dtype.is_complex
        and not tensor.is_neg()
        and not tensor._is_zerotensor()  # a tangent that forward mode leaves out
        and not tensor.is_quantized
    )


@lru_cache(maxsize=4096)
def _is_by_kernel(op: OpOverload) -> bool:
    """Returns whether torch has but a kernel for an operation on dense tensors of one device."""
    if not isinstance(op, OpOverload) or op.namespace != "aten":
        return False
    if has_kernel(op.name(), "CompositeImplicitAutograd") or torch.Tag.inplace_view in op.tags:
        return False
    if op in _OF_ONE_DEVICE or op.name().startswith("aten::_foreach_"):
        return True
    is_special = is_taken_apart(op) or any(check(op) for check, _ in op_implementations_checks)
    return has_meta(op) and not is_special


_aten: Final = torch.ops.aten
# Not views: to dims of size 1 their kernel gives other strides than torch's fake tensors do.
_OF_ONE_DEVICE: Final = frozenset((_aten.slice.Tensor, _aten.select.int, _aten.copy_.default))
"""Operations that torch runs otherwise for several devices, and for sizes that are symbols."""


def make_fake(mode: FakeTensorMode, meta: Tensor, device: torch.device) -> FakeTensor:
    """Makes a fake tensor as torch makes it, which takes as long as an operation on it.

    Its fields are those of the first one of the mode, which torch has made.
    """
    fields = mode.__dict__.setdefault("_shardmap_fields", {})
    if device not in fields:
        first = FakeTensor(mode, meta, device)
        fields[device] = dict(first.__dict__)
        return first
    made: FakeTensor = make_subclass(
        FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
    )
    set_throw_on_data_pointer(made)
    made.__dict__.update(fields[device])
    return made


class _StandIn(ModuleType):
    """Stands for a module that takes long to import, and imports it for what it cannot answer.

    It answers functions of torch's alone, while it is where they look for the module; other code,
    and code that keeps what it gets, gets the module's own.
    """

    def __init__(self, name: str, answers: Mapping[str, Any]) -> None:
        super().__init__(name)
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        is_path = name == "__path__" and self.__name__ in ("sympy", DYNAMO)
        if name.startswith("__") and name != "__all__" and not is_path:
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
    is_dense = isinstance(value, Tensor) and not value.is_sparse
    return is_dense and _are(int)(*value.shape, *value.stride(), value.storage_offset())


def _never(*values: Any) -> bool:
    """Returns that torch's own is asked, once what is imported beside other names is called."""
    return False


def _same(value: Any) -> Any:
    return value


class _NeverError(Exception):
    """In place of classes of which there is nothing, and nothing raised, while no symbol exists."""


DYNAMO: Final = "torch._dynamo"
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


def _leave_alone(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands for `torch._dynamo.disable`, whose result torch keeps in a function's fields."""
    _LEFT_ALONE.append(function)
    return function


_LEFT_ALONE: Final[list[Any]] = []
_FLAGS: Final = {  # their defaults; no result depends on them
    "_custom_ops_profile": None,
    "fake_tensor_cache_enabled": True,
    "fake_tensor_cache_crosscheck_enabled": False,
}
_CONFIG: Final = _StandIn(f"{DYNAMO}.config", _FLAGS)
_COMPILED: Final = SimpleNamespace(_disable=nullcontext)
_OF_DYNAMO: Final = {"config": _CONFIG, "disable": _leave_alone, "compiled_autograd": _COMPILED}
_STAND_INS: Final = {
    each.__name__: each
    for each in (
        _StandIn(SYMBOLS, _FUNCTIONS | {"GuardOnDataDependentSymNode": _NeverError}),
        _StandIn("sympy", {"Basic": _NeverError}),
        _StandIn("torch.utils._sympy.functions", {"Max": _NeverError}),
        _StandIn(DYNAMO, _OF_DYNAMO),
        _CONFIG,
    )
}


class _Standing:
    """Counts the checks that run, during which the stand-ins are where no module is yet."""

    def __init__(self) -> None:
        self.lock, self.checks = threading.Lock(), 0

    def change(self, checks: int, stand: bool = True) -> None:
        """Changes how many run, and has what stands in do so, or not."""
        with self.lock:
            self.checks += checks
            if self.checks > 0 and stand:
                for name, module in _STAND_INS.items():
                    sys.modules.setdefault(name, module)
                experimental.symbolic_shapes = sys.modules[SYMBOLS]
                return
            for name, module in _STAND_INS.items():
                if sys.modules.get(name) is module:
                    del sys.modules[name]
            if SYMBOLS not in sys.modules:
                vars(experimental).pop("symbolic_shapes", None)
            while _LEFT_ALONE:
                vars(_LEFT_ALONE.pop()).pop("__dynamo_disable", None)


_STANDING: Final = _Standing()


def _imported(name: str) -> ModuleType:
    """Imports a module itself; who has its stand-in finds all of its names there from now on."""
    _STANDING.change(0, stand=False)
    module = import_module(name)
    vars(_STAND_INS[name]).update(vars(module))
    _STANDING.change(0)
    return module


@contextmanager
def postponing_imports() -> Iterator[None]:
    """Has torch do without Dynamo and sympy, while it needs nothing of them."""
    _STANDING.change(1)
    try:
        yield
    finally:
        _STANDING.change(-1)
