"""`Function`: a torch.autograd.Function whose backward may call collectives.

Backward runs after the body has ended, or on another thread, where no mesh is current. A `Function`
records in forward the scope (mesh and axes) that it runs under, and enters it again for backward.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, Final

import torch

from shardmap_torch.backends.vmap import BatchedBackend
from shardmap_torch.collectives.protocol import is_checker
from shardmap_torch.collectives.scope import Scope, current_scope, enter_scope
from shardmap_torch.core.torch_private.engine import are_transforms_active
from shardmap_torch.errors import TransformError

_BACKWARD: Final = ("backward", "vjp", "jvp")

_BATCHED: Final = (
    "{}: a Function cannot run in a batched body, after which it is not known whether a cotangent "
    "is that of each rank or already the sum of theirs. Use make_mesh(..., "
    'simulate="auto"), which runs such bodies as ranks, or "ranks".'
)


class Function(torch.autograd.Function):
    """A `torch.autograd.Function` whose backward runs on the mesh of the body that called it.

    Write it as one of torch's: `forward` and `backward`, with `setup_context` where functorch
    transforms run it. Collectives may be called in all of them. It works on every mesh, also when
    backward runs after the body has ended or on another thread. Outside of any body it is a plain
    Function.

    On a simulated mesh of strategy "auto" a body that calls it runs as ranks. One batched program
    cannot differentiate it: there autograd adds the cotangents of an equal value by itself, which a
    collective in backward may add again.

    The cotangent that backward returns must have the type that belongs to the input's: invariant
    for an invariant input, partial for a replicate one. One that it makes up, such as that of an
    auxiliary loss, is the whole gradient where the input is invariant; for a replicate input it is
    n times too large, and a check refuses it. Strategy "ranks" shows if that is wrong.

    Shape, types, bytes: those of its methods.

    Raises:
        TransformError: on a simulated mesh of strategy "vmap".

    Source: `torch.autograd.Function`; `jax.custom_vjp`.

    Example:
        >>> import torch
        >>> from shardmap_torch import Function, I, P, all_reduce, make_mesh, shard_map
        >>> class Copy(Function):
        ...     "Invariant to replicate: the cotangents of all ranks add up."
        ...     @staticmethod
        ...     def forward(x):
        ...         return x.clone()
        ...     @staticmethod
        ...     def setup_context(ctx, inputs, output):
        ...         pass
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return all_reduce(grad, "tp", dst=I)
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> specs = (P(invariant="tp"), P("tp"))
        >>> @shard_map(mesh=mesh, in_specs=specs, out_specs=P())
        ... def loss(w, x):
        ...     return all_reduce((Copy.apply(w) * x).sum(), "tp", dst=I)
        >>> torch.func.grad(loss)(torch.tensor(1.0), torch.arange(4.0))
        tensor(6.)
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Wraps the methods of a subclass so that they record and enter the scope."""
        super().__init_subclass__(**kwargs)
        own = cls.__dict__
        if "setup_context" in own:
            _replace(cls, "setup_context", _recording)
        elif "forward" in own and not _has_setup(cls):
            _replace(cls, "forward", _recording)
        for name in _BACKWARD:
            if name in own:
                _replace(cls, name, _entering)

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Calls the function, as `torch.autograd.Function.apply` does.

        Raises:
            TransformError: without `forward`.
        """
        if method_of(cls, "forward") is method_of(torch.autograd.Function, "forward"):
            raise TransformError(f"{cls.__name__} has no forward: write one in a class of its own.")
        scope = current_scope()
        if scope is None or _LEVELS.is_second_apply(cls):
            return super().apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        if isinstance(scope.backend, BatchedBackend):
            raise TransformError(_BATCHED.format(cls.__name__))
        if is_checker(scope.backend):
            scope.backend.needs_ranks()
        with enter_scope(scope.fork(("Function", cls.__name__))), _LEVELS.applying(cls):
            return super().apply(*args, **kwargs)  # type: ignore[no-untyped-call]


def method_of(cls: type, name: str) -> Any:
    """Returns a method as its class has it, whatever watches the lookup of attributes."""
    method = next(vars(base)[name] for base in cls.__mro__ if name in vars(base))
    return method.__get__(None, cls) if hasattr(method, "__get__") else method


def keeping_scope(function: type[torch.autograd.Function]) -> type[Function]:
    """Makes a `Function` of a plain one of torch's, with the same methods."""
    base = torch.autograd.Function
    own: dict[str, Any] = {
        name: staticmethod(method_of(function, name))
        for name in ("forward", "setup_context", "vmap", *_BACKWARD)
        if method_of(function, name) is not method_of(base, name)
    }
    own["generate_vmap_rule"] = function.generate_vmap_rule
    own.update(__module__=function.__module__, __qualname__=function.__qualname__)
    return type(function.__name__, (Function,), own)


class _Levels(threading.local):
    """Tracks the Function that functorch is about to apply a second time, below its levels.

    Under a transform torch calls `apply` twice: for the user, and then on unwrapped values. The
    second is part of the first, and must not be reported as a step of the program.
    """

    def __init__(self) -> None:
        self._entered: type | None = None

    @contextmanager
    def applying(self, cls: type) -> Iterator[None]:
        """Marks that the user applies `cls`."""
        self._entered = cls if are_transforms_active() else None
        try:
            yield
        finally:
            self._entered = None

    def is_second_apply(self, cls: type) -> bool:
        """Returns whether this is torch's second call; resets the mark, as user code follows."""
        is_second = self._entered is cls and not are_transforms_active()
        if is_second:
            self._entered = None
        return is_second


_LEVELS: Final = _Levels()


def _has_setup(cls: type) -> bool:
    return getattr(cls, "setup_context", None) is not torch.autograd.Function.setup_context


def _replace(cls: type, name: str, wrapper: Callable[[Any], Any]) -> None:
    method = cls.__dict__[name]
    function = method.__func__ if isinstance(method, staticmethod) else method
    setattr(cls, name, staticmethod(wrapper(function)))


def _recording(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def recording(ctx: Any, *args: Any) -> Any:
        ctx.shardmap_scope = current_scope()
        return method(ctx, *args)

    return recording


def _entering(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def entering(ctx: Any, *args: Any) -> Any:
        scope = ctx.shardmap_scope
        if scope is None:
            return method(ctx, *args)
        # The needed gradients may differ from one backward to the next, and so may its operations.
        again = scope.rerun((method.__name__, ctx.needs_input_grad, *[g is None for g in args]))
        with enter_scope(again), _seeing(scope):
            gradients = method(ctx, *args)
        again.end()
        return gradients

    return entering


def _seeing(scope: Scope) -> AbstractContextManager[object]:
    """Has a check see the functions of torch that a backward calls, as those that take a part."""
    return scope.backend.seeing() if is_checker(scope.backend) else nullcontext()
