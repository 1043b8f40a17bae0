"""Torch modes under which a body is interpreted, one for ATen operations, one for functions.

At the ATen level every operation is visible, whatever its Python spelling, those of autograd
included; the transforms of torch.func are not, since tensors are unwrapped there. A mode at the
level of torch functions handles those: it checks where a differentiation starts, and marks results
through which no gradient can flow.
"""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from shardmap_torch.checker.interpreter import custom_functions, gradients, proposals, scalars
from shardmap_torch.checker.interpreter.custom_functions import uncommitted, watch
from shardmap_torch.checker.interpreter.interpreter import Interpreter, Setting, running
from shardmap_torch.checker.interpreter.operations import Operations
from shardmap_torch.checker.interpreter.questions import ADDRESSES, guarding_generator_state
from shardmap_torch.checker.ir.rank_only import (
    GRAD_FN,
    HOOKS,
    UNBATCHED,
    name_of_hook,
    watching_functions,
    without_rule,
)
from shardmap_torch.checker.ir.sizes import as_numbers
from shardmap_torch.checker.rewrites import distributed, rank_numbers
from shardmap_torch.checker.rewrites.copies import MAY_COPY
from shardmap_torch.checker.rewrites.functions import METADATA
from shardmap_torch.checker.rules.infer import tensors_of
from shardmap_torch.collectives.autograd import FunctorchForm, apply_transformed
from shardmap_torch.core.autograd_state import graph_nodes
from shardmap_torch.core.functorch import (
    base_of,
    can_receive_gradient,
    levels,
    outer_grad_mode,
    tangents,
)
from shardmap_torch.core.source_location import call_site, is_own
from shardmap_torch.core.torch_private.engine import (
    DisableTorchFunction,
    FakeTensor,
    custom_function_call,
    forward_level,
    function_mode_stack,
    functorch,
    gradient_of_transform,
    make_dual,
    set_grad_enabled,
    temporarily_clear_interpreter_stack,
)
from shardmap_torch.errors import ShardTypeError, TransformError
from shardmap_torch.ops.asking import ANSWERING

_PLAINLY: Final = nullcontext()
_LOGGER: Final = logging.getLogger("torch._subclasses.fake_tensor")
_TAKES_GRADIENT: Final = gradient_of_transform.__code__


@contextmanager
def interpreting(interpreter: Interpreter) -> Iterator[None]:
    """Runs the context under both modes, with an empty functorch stack."""
    with ExitStack() as stack:
        stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        # Its search for NaN reads numbers from cotangents.
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        stack.enter_context(interpreter.fake)
        stack.enter_context(Operations(interpreter))
        stack.enter_context(_Functions(interpreter))
        # torch would log a user's own error, such as mismatching shapes, in addition.
        stack.enter_context(Setting(_LOGGER, disabled=True))
        stack.enter_context(
            watching_functions(
                interpreter.needs_ranks, partial(uncommitted, interpreter), distributed.applied
            )
        )
        stack.enter_context(guarding_generator_state())
        stack.enter_context(ANSWERING)
        interpreter.begin()
        stack.callback(interpreter.forget_nodes)
        stack.enter_context(running(interpreter))
        yield


def _has_learned_mask(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **_: Any
) -> bool:
    """Returns whether a mask of attention needs a gradient.

    torch takes a formula that has one then, but where torch.func.vmap hides that it is needed.
    """
    return attn_mask is not None and can_receive_gradient(attn_mask)


_READ_ONLY: Final = {
    "leaf Variable that requires grad": "an input",
    "mutate a captured Tensor": "a tensor that the function to be differentiated closes over",
}
"""Names what an operation writes, by what torch says where that is refused."""

_RUNNING: Final = " Running statistics, as of BatchNorm: module.eval(), or another norm."


class _Functions(TorchFunctionMode):
    """Function mode that handles differentiations, and marks values without a gradient."""

    def __init__(self, interpreter: Interpreter) -> None:
        super().__init__()
        self._interpreter = interpreter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        interpreter = self._interpreter
        if func in METADATA and type(base_of(args[0])) is FakeTensor:
            if interpreter.keeps_values:
                custom_functions.remember(interpreter, args)
            out = func(*args, **(kwargs or {}))
            return out if interpreter.fake.shape_env is None else as_numbers(out)
        kwargs = kwargs or {}
        try:
            if interpreter.repair.operands:
                args, kwargs = proposals.repaired(interpreter, func, args, kwargs)
            out = self._call(func, args, kwargs)
            return out if interpreter.fake.shape_env is None else as_numbers(out)
        except (ShardTypeError, TransformError) as error:
            if isinstance(error, ShardTypeError):
                proposals.at_call(interpreter, error, func, args, kwargs)
            interpreter.numbers.branches.refusal = error
            raise

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls a function of torch in the body, step by step.

        1. Values of the user's own Functions are kept, and what batched bodies lack is noted.
        2. Differentiations, Python values and questions for addresses have handlers of their own.
        3. Numbers by rank, positions and einsum are rewritten: after 2, whose handlers would not
           know the calls that come of it.
        4. Numbers taken from tensors get stand-ins: after 3, which takes them apart.
        5. The function runs, on fake tensors.
        6. Results that may share memory, have no gradient or are parts of a tensor are marked.
        """
        if func is custom_function_call:
            custom_functions.meet(self._interpreter, args[0], args)
            self._interpreter.needs_ranks(without_rule(args[0]))
        if self._interpreter.keeps_values:
            custom_functions.remember(self._interpreter, [*args, *kwargs.values()])
        if func in UNBATCHED or (
            func in HOOKS and not (func == GRAD_FN and is_own(sys._getframe(2)))
        ):
            self._interpreter.needs_ranks(name_of_hook(func) if func in HOOKS else "")
        if func is scaled_dot_product_attention and _has_learned_mask(*args, **kwargs):
            self._interpreter.needs_ranks("attention with a mask that needs a gradient")
        special = _SPECIAL.get(func)
        if special is not None:
            return special(self._interpreter, func, args, kwargs)
        self._interpreter.reject_outer(args)
        called, func = func, rank_numbers.rewritten(self._interpreter, func, args, kwargs)
        numbers = self._interpreter.numbers
        given = numbers.stand_ins(func, args, kwargs) if numbers.any else None
        if given is not None:
            args, kwargs = given
        is_applied = func is custom_function_call
        applying = Setting(self._interpreter, applies=outer_grad_mode()) if is_applied else _PLAINLY
        with applying:
            out = self._apply(func, args, kwargs, called)
        if func in MAY_COPY and args:
            out = self._interpreter.copies.relate(self._interpreter, args[0], out)
        if isinstance(out, Tensor | tuple | list):
            self._note(args, out)
        if given is not None:
            _forget([*args, out])
        return rank_numbers.marked(self._interpreter, called, args, kwargs, out)

    def _apply(self, func: Any, args: Any, kwargs: Any, called: Any) -> Any:
        before, self._interpreter.function = self._interpreter.function, called
        try:
            if func is custom_function_call and args[0] is FunctorchForm:
                return apply_transformed(*args[1:])
            return func(*args, **kwargs)
        except RuntimeError as error:
            what = next((what for part, what in _READ_ONLY.items() if part in str(error)), None)
            if what is None:
                raise
            raise ShardTypeError(
                f"{self._interpreter.name}: {func.__name__} at {call_site()} writes into {what}, "
                "which is read-only.\nFix: clone it first; return what is to be kept."
                + _RUNNING
                * ("captured" in str(error))
            ) from None
        finally:
            self._interpreter.function = before

    def _note(self, args: Sequence[Any], out: Any) -> None:
        results = [t for t in tensors_of(out) if not any(x.requires_grad for x in levels(t))]
        if results:
            given = {id(base_of(t)) for value in args for t in tensors_of(value)}
            for tensor in results:
                base = base_of(tensor)
                if id(base) not in given and isinstance(base, FakeTensor):
                    # No gradient flows through it, whatever else its storage has.
                    base.__dict__["_shardmap_tokens"] = frozenset()


def seeing(interpreter: Interpreter) -> AbstractContextManager[object]:
    """Sees functions that a backward runs again: torch starts it outside of the function mode."""
    return _PLAINLY if function_mode_stack() else _Functions(interpreter)


HANDS_ON: Final = (
    _Functions.__torch_function__.__code__,
    _Functions._call.__code__,
    _Functions._apply.__code__,
)
"""Code objects of frames between a body and a function of torch that it calls."""


def _forget(found: Sequence[Any]) -> None:
    """Drops the constants that torch has computed from a literal and a stand-in."""
    for tensor in (t for value in found for t in tensors_of(value)):
        base = base_of(tensor)
        if isinstance(base, FakeTensor) and base.constant is not None:
            converter = base.fake_mode.fake_tensor_converter
            converter.invalidate_constant_aliases(base.constant)


def _requires_grad(interpreter: Interpreter, func: Any, args: Any, kwargs: Any) -> Any:
    out = func(*args, **kwargs)
    if functorch.is_functorch_wrapped_tensor(out):
        interpreter.mark_differentiated(out)
    else:
        interpreter.needs_ranks("requires_grad_")
    return out


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, Tensor) or value is None else tuple(value)


def _grad(interpreter: Interpreter, func: Any, args: Any, kwargs: Any) -> Any:
    names = ("outputs", "inputs", "grad_outputs")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    rest = args[len(names) :]
    outputs = _as_tuple(given["outputs"])
    given_seeds = _as_tuple(given.get("grad_outputs")) or (None,) * len(outputs)
    if len(given_seeds) == 1:
        given_seeds = given_seeds * len(outputs) if given_seeds[0] is None else given_seeds
    _require_gradients(interpreter, "torch.autograd.grad", outputs)
    watch(interpreter, outputs)
    if interpreter.goes_on(given_seeds):
        return func(*args, **kwargs)
    interpreter.traits.takes_gradients = True
    seeds = tuple(map(partial(gradients.seed, interpreter), outputs, given_seeds))
    given["outputs"], given["grad_outputs"] = outputs, seeds
    in_transform = any(map(functorch.is_functorch_wrapped_tensor, outputs))
    interpreter.needs_ranks(None if in_transform else "torch.autograd.grad")
    inputs = _as_tuple(given["inputs"])
    ending = Setting(interpreter, ending_levels=interpreter.ending_levels | _ending(outputs))
    with interpreter.differentiating(seeds), ending:
        grads = interpreter.observer.assume_gradients(interpreter, outputs, inputs)
        grads = grads or func(*[given.pop(name) for name in names], *rest, **given)
    for operand, gradient in zip(inputs, grads, strict=True):
        gradients.check_gradient(interpreter, operand, gradient)
    grads = gradients.hand_over(interpreter, inputs, grads)
    interpreter.observer.on_gradient(outputs, given_seeds, inputs, grads)
    if forward_level() >= 0:
        _note_tangents(interpreter, grads)
    return gradients.sum_by_repair(interpreter, grads)


def _require_gradients(interpreter: Interpreter, name: str, outputs: Sequence[Any]) -> None:
    """Requires that a differentiation in the body has something to differentiate by."""
    if not any(x.requires_grad for x in outputs if isinstance(x, Tensor)):
        raise ShardTypeError(
            f"{interpreter.name}: {name} at {call_site()}: no argument that the value is made of "
            "requires a gradient.\nFix: take it in the body with value, gradients = "
            "shardmap_torch.value_and_grad(loss)(params); or pass tensors that require gradients, "
            "and call backward() on the result, outside."
        )


def _note_tangents(interpreter: Interpreter, grads: Sequence[Tensor | None]) -> None:
    with interpreter.paused(), DisableTorchFunction():
        pairs = [pair for grad in grads if grad is not None for pair in tangents(grad)]
    interpreter.observer.on_tangents([value for value, _ in pairs], [made for _, made in pairs])


def _make_dual(interpreter: Interpreter, func: Any, args: Any, kwargs: Any) -> Any:
    interpreter.observer.on_dual(*args[:2])
    return func(*args, **kwargs)


def _ending(outputs: Sequence[Any]) -> frozenset[int]:
    """Returns the level of the transform that takes its gradient; none if the body does."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not torch.autograd.grad.__code__:
        frame = frame.f_back
    if frame is None or frame.f_back is None or frame.f_back.f_code is not _TAKES_GRADIENT:
        return frozenset()
    return frozenset({max(int(functorch.maybe_get_level(x)) for x in outputs)})


def _backward(interpreter: Interpreter, func: Any, args: Any, kwargs: Any) -> Any:
    """Interprets `Tensor.backward`, which is `torch.autograd.backward` of one value."""
    names = ("tensors", "grad_tensors", "retain_graph", "create_graph", "inputs")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    given |= {name: given.pop(own) for own, name in _RENAMED if own in given}
    _several_backward(interpreter, torch.autograd.backward, (), given)


_RENAMED: Final = (("self", "tensors"), ("gradient", "grad_tensors"))
"""Names of arguments of `Tensor.backward`, and of `torch.autograd.backward`."""


def _several_backward(interpreter: Interpreter, func: Any, args: Any, kwargs: Any) -> Any:
    """Interprets `torch.autograd.backward`, which adds gradients to `.grad`."""
    names = ("tensors", "grad_tensors")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    rest = args[len(names) :]
    outputs = _as_tuple(given.pop("tensors"))
    listed = given.pop("grad_tensors", None)
    given_seeds = (None,) * len(outputs) if listed is None else _as_tuple(listed)
    if len(given_seeds) != len(outputs) or not all(isinstance(x, Tensor) for x in outputs):
        return func(*args, **kwargs)  # torch says what is wrong
    _require_gradients(interpreter, "backward()", outputs)
    inputs = _as_tuple(given.get("inputs"))
    if not all(x.is_leaf for x in inputs if isinstance(x, Tensor)):
        raise ShardTypeError(
            f"{interpreter.name}: backward() at {call_site()} names a tensor in inputs= that is no "
            "leaf.\nFix: take its gradient with torch.autograd.grad."
        )
    nodes = graph_nodes([output.grad_fn for output in reversed(outputs)])  # the first comes first
    reached = [getattr(node, "variable", None) for node in nodes]
    leaves = list({id(leaf): leaf for leaf in reached if isinstance(leaf, Tensor)}.values())
    if any(not isinstance(base_of(leaf), FakeTensor) for leaf in leaves):
        raise ShardTypeError(
            f"{interpreter.name}: backward() at {call_site()} would write into the .grad of a "
            "closed-over tensor.\nFix: pass the tensor as an argument, and return its gradient."
        )
    watch(interpreter, outputs)
    if interpreter.goes_on(given_seeds):
        return func(outputs, given_seeds, *rest, **given)
    seeds = list(map(partial(gradients.seed, interpreter), outputs, given_seeds))
    interpreter.traits.takes_gradients = True
    interpreter.needs_ranks("backward")
    before = _fields(leaves)
    with interpreter.differentiating(seeds):
        func(outputs, seeds, *rest, **given)
    grads = _fields(leaves)
    for leaf, gradient in zip(leaves, grads, strict=True):
        gradients.check_gradient(interpreter, leaf, gradient)
    grads = gradients.hand_over(interpreter, leaves, grads, before)
    _set_fields(interpreter, leaves, grads)
    interpreter.observer.on_gradient(outputs, given_seeds, leaves, grads, before)
    with torch.no_grad():
        _set_fields(interpreter, leaves, gradients.sum_by_repair(interpreter, grads))
    return None


def _fields(leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
    with DisableTorchFunction():  # the body does not ask
        return [leaf.grad for leaf in leaves]


def _set_fields(
    interpreter: Interpreter, leaves: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> None:
    with interpreter.paused(), DisableTorchFunction():
        for leaf, gradient in zip(leaves, grads, strict=True):
            leaf.grad = gradient


def _set_data(interpreter: Interpreter, func: Any, args: Any, kwargs: Any) -> Any:
    raise ShardTypeError(
        f"{interpreter.name}: .data of a tensor is set at {call_site()}: it gives the tensor other "
        "memory, which types belong to.\nFix: give the new value a name of its own."
    )


def _grad_field(interpreter: Interpreter, func: Any, args: Any, kwargs: Any) -> Any:
    if not isinstance(base_of(args[0]), FakeTensor):
        raise ShardTypeError(
            f"{interpreter.name}: .grad of a closed-over tensor is used at {call_site()}.\n"
            "Fix: pass the tensor, or its gradient, as an argument."
        )
    return func(*args, **kwargs)


def _switch_gradients(interpreter: Interpreter, func: Any, args: Any, kwargs: Any) -> Any:
    if interpreter.switches is not None and not interpreter.is_paused:
        interpreter.switches += args
        interpreter.observer.on_switch(interpreter.switches)
    return func(*args, **kwargs)


_SPECIAL: Final[Mapping[Any, Any]] = {
    set_grad_enabled: _switch_gradients,
    Tensor.requires_grad_: _requires_grad,
    make_dual: _make_dual,
    torch.autograd.grad: _grad,
    Tensor.backward: _backward,
    torch.autograd.backward: _several_backward,
    **dict.fromkeys(
        (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, GRAD_FN),
        custom_functions.refuse_hooks,
    ),
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]  # torch's stubs: a tensor
    Tensor.grad.__get__: _grad_field,  # type: ignore[union-attr]
    Tensor.grad.__set__: _grad_field,  # type: ignore[union-attr]
    **scalars.FUNCTIONS,
    **ADDRESSES,
}
