"""`Function`: a torch.autograd.Function whose backward may call collectives.

Backward runs after the body has ended, or on another thread, where no mesh is current. A `Function`
records in forward the scope (mesh and axes) that it runs under, and enters it again for backward.
In a batched body the axes are vmap levels, which are closed by then: there the markers of the axes
are operands, and torch's generated vmap rule opens levels for them again.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.backends.vmap import BatchedBackend, markers_of, rebound
from shardmap_torch.collectives.protocol import is_checker
from shardmap_torch.collectives.scope import Scope, current_scope, enter_scope
from shardmap_torch.core.torch_private.engine import CtxWithSavedTensors, are_transforms_active
from shardmap_torch.errors import TransformError
from shardmap_torch.mesh import Mesh

_BACKWARD: Final = ("backward", "vjp", "jvp")


class Function(torch.autograd.Function):
    """A `torch.autograd.Function` whose backward runs on the mesh of the body that called it.

    Write it as one of torch's: `forward` and `backward`, with `setup_context` where functorch
    transforms or a simulated mesh of strategy "vmap" run it. Collectives may be called in all of
    them. It works on every mesh, also when backward runs after the body has ended or on another
    thread. In a batched body (strategy "vmap") its vmap rule is generated, an own `vmap` is not
    used. Outside of any body it is a plain Function.

    On a simulated mesh of strategy "auto" a body that calls it runs as ranks. A batched one cannot
    always differentiate it from outside: there autograd adds the cotangents of an equal value by
    itself, and a collective in backward that would add them again is an error.

    The cotangent that backward returns must have the type that belongs to the input's: invariant
    for an invariant input, partial for a replicate one. One that it makes up, such as that of an
    auxiliary loss, is the whole gradient where the input is invariant; for a replicate input it is
    n times too large, and a check refuses it. Strategy "ranks" shows if that is wrong.

    Shape, types, bytes: those of its methods.

    Raises:
        TransformError: in a batched body, if it has no `setup_context`; in backward after that
            body, if a collective meets a cotangent that is equal on all ranks.

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
            TransformError: without `forward`; without `setup_context`, in a batched body.
        """
        if method_of(cls, "forward") is method_of(torch.autograd.Function, "forward"):
            raise TransformError(f"{cls.__name__} has no forward: write one in a class of its own.")
        scope = current_scope()
        if scope is None or _LEVELS.is_second_apply(cls):
            return super().apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        scope.backend.needs_ranks()
        scope = scope.fork(("Function", cls.__name__))
        markers = markers_of(scope)
        if not markers:
            with enter_scope(scope), _LEVELS.applying(cls):
                return super().apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        if not _has_setup(cls):
            raise TransformError(
                f"{cls.__name__} needs setup_context to run in a batched body: write "
                "forward(*args) and setup_context(ctx, inputs, output) in place of "
                'forward(ctx, *args), or use make_mesh(..., simulate="ranks").'
            )
        return _apply(cls, scope, *markers, *args)


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


class _Batched(torch.autograd.Function):
    """A `Function` in a batched body: the operands are its class, the scope, markers, arguments."""

    generate_vmap_rule = True

    @staticmethod
    def forward(function: Any, scope: Scope, *operands: Any) -> Any:
        num_markers = len(markers_of(scope))
        with enter_scope(rebound(scope, operands[:num_markers])):
            return function.forward(*operands[num_markers:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        function, scope, *operands = inputs
        num_markers = len(markers_of(scope))
        markers, args = operands[:num_markers], operands[num_markers:]
        ctx.shardmap_function, ctx.shardmap_first = function, scope
        ctx.save_for_backward(*markers)
        ctx.save_for_forward(*markers)
        with enter_scope(rebound(scope, markers)):
            function.setup_context(_Context(ctx, scope, markers), tuple(args), output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        own = _reopened(ctx)
        function = ctx.shardmap_function
        other = function.vjp is not torch.autograd.Function.vjp  # torch's second name for backward
        gradients = (function.vjp if other else function.backward)(own, *grads)
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        return (*[None] * own.num_before, *gradients)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        scope = ctx.shardmap_first
        own = _Context(ctx, scope, ctx.saved_tensors[: len(markers_of(scope))])
        return ctx.shardmap_function.jvp(own, *tangents[own.num_before :])


_apply: Callable[..., Any] = _Batched.apply


def _reopened(ctx: Any) -> "_Context":
    scope = ctx.shardmap_first
    markers = ctx.saved_tensors[: len(markers_of(scope))]
    own = _Context(ctx, scope, markers)
    # The type of the context under torch's generated rule, which opens the levels again.
    if isinstance(ctx, CtxWithSavedTensors):
        backend = _AfterBody(scope.backend.mesh, scope.backend.axis_markers, markers)
        backend.function = ctx.shardmap_function.__name__
        bound = Scope(backend, scope.axes, scope.monitor, reruns=scope.reruns)
        object.__setattr__(own, "shardmap_scope", bound)
    return own


class _AfterBody(BatchedBackend):
    """Runs the collectives of a backward from outside of a batched body, which has ended.

    A cotangent that is equal on all ranks may be that of each rank, or already the sum of theirs:
    autograd adds those of a value that was not batched. Moves that depend on which are refused.
    """

    def __init__(self, mesh: Mesh, names: Iterable[str], markers: Sequence[Tensor]) -> None:
        super().__init__(mesh, dict(zip(names, markers, strict=True)))
        self.function = ""

    def resolve(
        self, operation: Any, x: Tensor, x_dim: int | None, markers: Sequence[Tensor], level: int
    ) -> tuple[Tensor, int | None]:
        collective = getattr(operation, "operation", operation)
        if x_dim is None and not (collective.movement.shares or collective.movement.extremum):
            axis = operation.axes[level]
            raise TransformError(
                f"{collective} in the backward of {self.function} meets a value that is equal on "
                f"all ranks of {axis!r}. After a batched body it is not known whether that is "
                "the cotangent of each rank or already their sum. Use make_mesh(..., "
                'simulate="ranks"), which "auto" chooses here.'
            )
        return super().resolve(operation, x, x_dim, markers, level)


class _Context:
    """The ctx that the methods of a `Function` see in a batched body: without the markers."""

    _ctx: Any
    _markers: tuple[Tensor, ...]
    shardmap_scope: Scope | None

    def __init__(self, ctx: Any, scope: Scope, markers: Sequence[Tensor]) -> None:
        object.__setattr__(self, "_ctx", ctx)
        object.__setattr__(self, "_markers", tuple(markers))
        object.__setattr__(self, "shardmap_scope", rebound(scope, markers))

    @property
    def num_before(self) -> int:
        """Counts the operands before the user's: class, scope and markers."""
        return 2 + len(self._markers)

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self._ctx.save_for_backward(*self._markers, *tensors)

    def save_for_forward(self, *tensors: Tensor | None) -> None:
        self._ctx.save_for_forward(*self._markers, *tensors)

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return tuple(self._ctx.saved_tensors[len(self._markers) :])

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        return tuple(self._ctx.needs_input_grad[self.num_before :])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "shardmap_scope":  # that of this level is made from the markers
            setattr(self._ctx, name, value)
