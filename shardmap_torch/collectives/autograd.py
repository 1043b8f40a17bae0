"""Autograd Functions that make collectives differentiable under every torch.func transform."""

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from torch import Tensor

from shardmap_torch.collectives.operations import Collective, Operation, Planned
from shardmap_torch.collectives.protocol import Backend, is_checker
from shardmap_torch.collectives.scope import Scope
from shardmap_torch.control.start import call_number
from shardmap_torch.core.caching import constant
from shardmap_torch.core.functorch import reject_batched_gradients
from shardmap_torch.core.torch_private.engine import (
    GradInterpreter,
    SingleLevelFunction,
    TransformType,
    allowing_single_level,
    are_transforms_active,
    forward_level,
    functorch,
    num_function_modes,
    set_forward_mode,
    temporarily_pop_interpreter_stack,
)
from shardmap_torch.errors import TransformError

_has_levels: Final[Callable[[], bool]] = are_transforms_active
_LINEAR: Final = (Collective, Planned)


def bind(backend: Backend, operation: Operation, x: Tensor) -> Tensor:
    """Runs `operation` on `x` so that every derivative of it is right.

    A Function with `setup_context`, which torch.func and Dynamo need, costs three times the
    `forward(ctx, ...)` form, and both cost more than a plain call: take the cheapest that serves.
    """
    traced = torch.compiler.is_dynamo_compiling()
    if type(operation) is Collective:
        plan = None if traced else backend.plan(operation)
        if plan is not None:
            return run_plan(plan, x)
    elif type(operation) is Planned:
        return bind(backend, operation.collective, x) if traced else run_plan(operation, x)
    markers = backend.markers(operation.axes)
    if type(operation) is Collective and operation.movement.still and not markers:
        # A cast does nothing over axes of one rank, or to what is not differentiated.
        if not is_checker(backend) and (
            backend.mesh.num_ranks(operation.axes) == 1
            or not (x.requires_grad or is_transformed() or not operation.keeps_dtype)
        ):
            return x
    if markers:
        batched: Any = backend
        found = batched.trace(operation, x, markers) if traced else batched.at_once(operation, x)
        if found is not None:
            result: Tensor = found
            return result
    # As `is_transformed`, whose call would cost as much again.
    if markers or (is_transformed() if traced else _has_levels() or forward_level() >= 0):
        return apply_transformed(x, operation, backend, *markers)
    if x.requires_grad and torch.is_grad_enabled():
        apply = EagerForm.apply if traced else apply_eager
        out = apply(x, operation, backend)
        return out
    return operation.run(backend, x)


def run_plan(plan: Planned, x: Tensor) -> Tensor:
    """Runs what `bind` runs for the plan's collective, in eager code."""
    if plan.native is not None:
        return plan.native(x)
    if _has_levels() or forward_level() >= 0:
        return apply_transformed(x, plan.collective, plan.backend())
    if x.requires_grad and torch.is_grad_enabled():
        return apply_eager(x, plan, plan.backend())
    return plan.run(plan.backend(), x)


def issue(scope: Scope, operation: Operation, x: Tensor) -> Tensor:
    """Runs an operation that the user's code calls, and reports it to the monitor; see `bind`."""
    if scope.monitor is not None:  # as `Scope.on_operation`
        scope.monitor.on_operation(operation, x)
    return bind(scope.backend, operation, x)


def is_transformed() -> bool:
    """Returns whether a torch.func transform or forward mode is active; not while Dynamo traces."""
    if torch.compiler.is_dynamo_compiling():
        reject_transforms()
        return False
    return _has_levels() or forward_level() >= 0


@constant
def reject_transforms() -> None:
    """Rejects torch.func transforms while Dynamo traces: it would trace the forward only.

    Raises:
        TransformError: a torch.func transform is active.
    """
    if functorch.peek_interpreter_stack() is not None:
        raise TransformError(_CANNOT_COMPILE)


@constant
def reject_second_derivative() -> NoReturn:
    """Rejects a derivative of what `grad` or `vjp` have computed, while Dynamo traces.

    Raises:
        TransformError: always.
    """
    raise TransformError(_CANNOT_COMPILE)


_CANNOT_COMPILE: Final = (
    "A collective, or the boundary of a shard_mapped function, cannot be compiled under a "
    "torch.func transform: torch.compile does not differentiate or batch autograd Functions there. "
    "Compile with .backward() outside; or take first derivatives in a checked body, with respect "
    "to what does not require gradients, by grad, value_and_grad or vjp of shardmap_torch; or do "
    "not compile."
)


class TypedFunction(torch.autograd.Function):
    """An autograd Function whose `apply` type checkers accept; torch leaves it untyped."""

    if TYPE_CHECKING:

        @classmethod
        def apply(cls, *args: Any) -> Any: ...


class EagerForm(TypedFunction):
    """An operation under plain reverse-mode autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, operation: Operation, backend: Backend) -> Tensor:
        """Runs the operation; keeps the backend, as backward may run later on another thread."""
        ctx.set_materialize_grads(False)
        ctx.operation, ctx.backend = operation, backend
        if not torch.compiler.is_dynamo_compiling():
            ctx.call = call_number()
        y = operation.run(backend, x)
        # A collective is linear, so that no derivative of it needs a tensor.
        if type(operation) not in _LINEAR and (saved := operation.saved(x, y)):
            ctx.save_for_backward(*saved)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        """Pulls the cotangent back; a missing one stays missing, with no communication."""
        if grad is None:
            return None, None, None
        operation, backend = ctx.operation, ctx.backend
        if not torch.compiler.is_dynamo_compiling():
            reject_batched_gradients()
            if type(operation) is Planned and type(back := operation.transpose) is Planned:
                return run_plan(back, grad), None, None
        if type(operation) in _LINEAR:
            return bind(backend, operation.transpose, grad), None, None
        return operation.pull_back(partial(bind, backend), grad, ctx.saved_tensors), None, None


def unshared(y: Tensor) -> Tensor:
    """Copies in forward mode: torch needs a view of the tangent there, which nested levels lose."""
    return y.clone() if forward_level() >= 0 else y


apply_eager: Final[Callable[..., Tensor]] = super(torch.autograd.Function, EagerForm).apply
"""Applies `EagerForm` where no transform is active, and no code is compiled.

It is what Function.apply ends in, after it has looked for transforms, which costs 2 us.
"""


class FunctorchForm(TypedFunction):
    """An operation under torch.func transforms, forward mode, or a batched body.

    The trailing operands are the backend's markers: one per axis, batched at that axis' vmap level
    alone, so that a level at which one is batched is known as the mesh's own.
    """

    @staticmethod
    def forward(x: Tensor, operation: Operation, backend: Backend, *markers: Tensor) -> Tensor:
        """Runs it on values that no transform wraps any more."""
        return unshared(operation.run(backend, x))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Saves the tensors that backward and forward mode need."""
        x, operation, backend, *markers = inputs
        ctx.set_materialize_grads(False)
        ctx.operation, ctx.backend, ctx.num_markers = operation, backend, len(markers)
        ctx.call = call_number()
        saved = operation.saved(x, output)
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """Pulls the cotangent back, as in `EagerForm`."""
        rest = (None,) * (2 + ctx.num_markers)
        if grad is None:
            return None, *rest
        return ctx.operation.pull_back(partial(bind, ctx.backend), grad, ctx.saved_tensors), *rest

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, *_: None) -> Tensor | None:
        """Pushes a tangent forward."""
        if tangent is None:
            return None
        pushed: Tensor = ctx.operation.push_forward(
            partial(bind, ctx.backend), tangent, ctx.saved_tensors
        )
        return pushed

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        x: Tensor,
        operation: Any,
        backend: Any,
        *markers: Tensor,
    ) -> tuple[Tensor, int | None]:
        """Resolves a level of the mesh, or passes another vmap's batch dim through."""
        x_dim, _, _, *marker_dims = in_dims
        own = [level for level, dim in enumerate(marker_dims) if dim is not None]
        if own:
            y, y_dim = backend.resolve(operation, x, x_dim, markers, own[0])
            # An operand that is returned as it is loses, at the levels below, how it was made:
            # torch.func's levels of gradients take a view of it without a graph.
            return (x.view_as(x) if y is x else y), y_dim
        if x_dim is None:
            return apply_transformed(x, operation, backend, *markers), None
        # Dims are counted from the front, so a batch dim at the end disturbs none of them.
        out = apply_transformed(x.movedim(x_dim, -1), operation, backend, *markers)
        return out, out.ndim - 1


# torch binds the arguments of each application, and looks for the signature each time.
FunctorchForm.forward.__signature__ = signature(FunctorchForm.forward)  # type: ignore[attr-defined]


class GradientForm(SingleLevelFunction):
    """`FunctorchForm` at one level of a transform that takes gradients.

    torch makes such a class for each application, and gets to it through signatures, pytrees and
    the dispatcher: that costs several times the collective of a body that is checked.
    """

    @staticmethod
    def forward(x: Tensor, operation: Operation, backend: Backend, *markers: Tensor) -> Tensor:
        """Runs it on the values under this level, as torch does."""
        transform = _gradient_transform()
        level = transform.level()
        own, *rest = [functorch._unwrap_for_grad(operand, level) for operand in (x, *markers)]
        with torch.enable_grad(), set_forward_mode(True), transform.lower():
            y = apply_transformed(own, operation, backend, *rest)
        wrapped: Tensor = x if y is own else functorch._wrap_for_grad(y, level)
        return wrapped

    setup_context = staticmethod(FunctorchForm.setup_context)
    backward = staticmethod(FunctorchForm.backward)
    jvp = staticmethod(FunctorchForm.jvp)


def _gradient_transform() -> GradInterpreter:
    return GradInterpreter(functorch.peek_interpreter_stack())


def _apply_at_gradient(operands: Sequence[Tensor], operation: Any, backend: Any) -> Tensor:
    transform = _gradient_transform()  # what it lifts by lives no longer than this does
    lift = transform._cptr.lift
    x, *markers = [lift(functorch.unwrap_if_dead(operand)) for operand in operands]
    with allowing_single_level():
        out: Tensor = GradientForm.apply(x, operation, backend, *markers)  # type: ignore[attr-defined]  # the base's
    return out


def apply_transformed(x: Tensor, operation: Any, backend: Any, *markers: Tensor) -> Tensor:
    """Applies `FunctorchForm`, at a level of vmap by calling its rule at once.

    A level of vmap records nothing for a backward: `FunctorchForm.apply` would only look for the
    same rule, through signatures, pytrees and the dispatcher, which costs ten times the rule.
    """
    top = None if torch.compiler.is_dynamo_compiling() else functorch.peek_interpreter_stack()
    key = None if top is None else top.key()
    if key == TransformType.Grad and not num_function_modes():  # which see `FunctorchForm`
        return _apply_at_gradient((x, *markers), operation, backend)
    if top is None or key != TransformType.Vmap:
        out: Tensor = FunctorchForm.apply(x, operation, backend, *markers)
        return out
    level = top.level()
    operands = [functorch.unwrap_if_dead(operand) for operand in (x, *markers)]
    pairs = [functorch._unwrap_batched(operand, level) for operand in operands]
    (x, x_dim), *rest = pairs
    markers, dims = tuple(m for m, _ in rest), tuple(dim for _, dim in rest)
    with temporarily_pop_interpreter_stack():
        if all(dim is None for dim in (x_dim, *dims)):
            return apply_transformed(x, operation, backend, *markers)
        in_dims = x_dim, None, None, *dims
        y, y_dim = FunctorchForm.vmap(None, in_dims, x, operation, backend, *markers)
    wrapped: Tensor = y if y_dim is None else functorch._add_batch_dim(y, y_dim, level)
    return wrapped
