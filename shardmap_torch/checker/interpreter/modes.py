"""Torch modes under which a body is interpreted, one for ATen operations, one for functions.

At the ATen level every operation is visible, whatever its Python spelling, those of autograd
included; the transforms of torch.func are not, since tensors are unwrapped there. A mode at the
level of torch functions handles those: it checks where a differentiation starts, and marks results
through which no gradient can flow.
"""

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from shardmap_torch.backends.batching import batches_learned_masks
from shardmap_torch.checker.interpreter import custom_functions, gradients, proposals, scalars
from shardmap_torch.checker.interpreter.caught import MAY_FAIL, refuse_caught
from shardmap_torch.checker.interpreter.custom_functions import uncommitted
from shardmap_torch.checker.interpreter.interpreter import (
    INTERPRETERS,
    Interpreter,
    Setting,
    current_interpreter,
)
from shardmap_torch.checker.interpreter.operations import RUNNING, Operations
from shardmap_torch.checker.ir.fake_results import address_of
from shardmap_torch.checker.ir.own_functions import (
    GRAD_FN,
    HOOKS,
    UNBATCHED,
    name_of_hook,
    watching_functions,
    without_rule,
)
from shardmap_torch.checker.ir.sizes import as_numbers
from shardmap_torch.checker.rewrites import rank_numbers
from shardmap_torch.checker.rewrites.copies import MAY_COPY
from shardmap_torch.checker.rewrites.functions import METADATA
from shardmap_torch.checker.rules.infer import tensors_of
from shardmap_torch.collectives.autograd import FunctorchForm, apply_transformed
from shardmap_torch.core.functorch import base_of, can_receive_gradient, levels, outer_grad_mode
from shardmap_torch.core.modes import FunctionMode
from shardmap_torch.core.source_location import call_site, is_own
from shardmap_torch.core.torch_private.engine import (
    FakeTensor,
    custom_function_call,
    function_mode_stack,
    temporarily_clear_interpreter_stack,
)
from shardmap_torch.errors import ShardTypeError, TransformError
from shardmap_torch.mesh.mesh import Count
from shardmap_torch.ops.asking import ANSWERING

_PLAINLY: Final = nullcontext()
_LOGGER: Final = logging.getLogger("torch._subclasses.fake_tensor")


@contextmanager
def interpreting(interpreter: Interpreter) -> Iterator[None]:
    """Runs the context under both modes, with an empty functorch stack."""
    ANSWERING.begin()
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
            watching_functions(interpreter.needs_ranks, partial(uncommitted, interpreter))
        )
        stack.enter_context(guarding_generator_state())
        interpreter.begin()
        interpreter.seeing = partial(_seeing, interpreter)
        stack.callback(interpreter.forget_nodes)
        stack.enter_context(INTERPRETERS.holding(interpreter))
        yield


def _lacks_gradient_of_mask(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **_: Any
) -> bool:
    """Returns whether a mask of attention needs a gradient that no batched body computes.

    torch takes a formula that has one then, but where torch.func.vmap hides that it is needed.
    """
    if attn_mask is None or not can_receive_gradient(attn_mask):
        return False
    return not batches_learned_masks(attn_mask.device)


_READ_ONLY: Final = {
    "leaf Variable that requires grad": "an input",
    "mutate a captured Tensor": "a tensor that the function to be differentiated closes over",
}
"""Names what an operation writes, by what torch says where that is refused."""


_SCALING: Final = ("div", "divide", "true_divide", "rdiv", "mul", "multiply")
"""Names of functions that scale tensors by a number, without underlines around them."""

_UNSEEN: Final = "its data is not allocated yet"
"""In torch's error of a function that reads numbers where a tensor of a check has none."""


def _scaled_as_here(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Replaces numbers of ranks by which a function scales a tensor by those of this program."""
    if getattr(func, "__name__", "").strip("_").removeprefix("foreach_") not in _SCALING:
        return args, kwargs
    here = {n: x.here if type(x) is Count else x for n, x in kwargs.items()}
    return [x.here if type(x) is Count else x for x in args], here


class _Functions(FunctionMode):
    """Function mode that handles differentiations, and marks values without a gradient."""

    def __init__(self, interpreter: Interpreter) -> None:
        super().__init__()
        self._interpreter = interpreter

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        interpreter = self._interpreter
        if func in METADATA and type(base_of(args[0])) is FakeTensor:
            if interpreter.keeps_values:
                custom_functions.remember(interpreter, args)
            out = func(*args, **kwargs)
            return out if interpreter.fake.shape_env is None else as_numbers(out)
        try:
            if interpreter.repair.operands:
                args, kwargs = proposals.repaired(interpreter, func, args, kwargs)
            out = self._call(func, args, kwargs)
            if interpreter.repair.results:
                out = proposals.with_result(interpreter, func, out)
            return out if interpreter.fake.shape_env is None else as_numbers(out)
        except (ShardTypeError, TransformError) as error:
            if isinstance(error, ShardTypeError):
                proposals.at_call(interpreter, error, func, args, kwargs)
            interpreter.numbers.branches.refusal = error
            raise
        except (RuntimeError, IndexError, ValueError) as error:  # of torch, as about shapes
            proposals.note_operands(interpreter, error, func, args, kwargs)
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
        args, kwargs = _scaled_as_here(func, args, kwargs)
        if func is custom_function_call:
            custom_functions.meet(self._interpreter, args[0], args)
            self._interpreter.needs_ranks(without_rule(args[0]))
        if self._interpreter.keeps_values:
            custom_functions.remember(self._interpreter, [*args, *kwargs.values()])
        asks_itself = func == GRAD_FN and is_own(sys._getframe(3))
        lacking = None if asks_itself else _what_only_ranks_run(func, args, kwargs)
        if lacking is not None:
            self._interpreter.needs_ranks(lacking)
        if func in MAY_FAIL:
            refuse_caught(self._interpreter, func)
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
            self._note(func, args, out)
        if given is not None:
            _forget([*args, out])
        return rank_numbers.marked(self._interpreter, called, args, kwargs, out)

    def _apply(self, func: Any, args: Any, kwargs: Any, called: Any) -> Any:
        before, self._interpreter.function = self._interpreter.function, called
        branches = self._interpreter.numbers.branches
        known = len(branches.taken)
        try:
            if func is custom_function_call and args[0] is FunctorchForm:
                return apply_transformed(*args[1:])
            return func(*args, **kwargs)
        except Exception as error:
            if len(branches.taken) > known and len([*walk_tb(error.__traceback__)]) == 1:
                branches.ending = error
            if _UNSEEN in str(error):
                scalars.escape(self._interpreter, f"{func.__name__} takes")
            what = next((what for part, what in _READ_ONLY.items() if part in str(error)), None)
            if what is None:
                raise
            raise ShardTypeError(
                f"{self._interpreter.name}: {func.__name__} at {call_site()} writes into {what}, "
                "which is read-only.\nFix: clone it first; return what is to be kept."
                + RUNNING
                * ("captured" in str(error))
            ) from None
        finally:
            self._interpreter.function = before

    def _note(self, func: Any, args: Sequence[Any], out: Any) -> None:
        if func in UNBATCHED:
            self._interpreter.unversioned.add(address_of(base_of(out)))
        given = {id(base_of(t)) for value in args for t in tensors_of(value)}  # may be thousands
        for tensor in tensors_of(out):
            *_, base = each = [*levels(tensor)]
            is_made = type(base) is FakeTensor and id(base) not in given
            if is_made and not any(x.requires_grad for x in each):
                # No gradient flows through it, whatever else its storage has.
                base.__dict__["_shardmap_tokens"] = frozenset()


def _seeing(interpreter: Interpreter) -> AbstractContextManager[object]:
    """Sees functions that a backward runs: torch starts it outside of the function mode."""
    is_seen = any(isinstance(mode, _Functions) for mode in function_mode_stack())
    return _PLAINLY if is_seen else _Functions(interpreter)


HANDS_ON: Final = (
    FunctionMode.__torch_function__.__code__,
    _Functions.call.__code__,
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


def _what_only_ranks_run(func: Any, args: Any, kwargs: Any) -> str | None:
    """Returns what a message calls what no batched body can call; None if one can."""
    if func in HOOKS:
        return name_of_hook(func)
    if func is scaled_dot_product_attention and _lacks_gradient_of_mask(*args, **kwargs):
        return "attention with a mask that needs a gradient"
    name = getattr(func, "__name__", "")
    if name in _CAST_WHOLE and any(map(torch.is_autocast_enabled, _CAST)):
        is_product = func is linear and len(args) + len(kwargs) < 3  # whose operands are cast
        return None if is_product else f"{name} under autocast"
    return "" if func in UNBATCHED else None


_CAST: Final = ("cpu", "cuda")
_CAST_WHOLE: Final = frozenset(
    "scaled_dot_product_attention conv1d conv2d conv3d conv_transpose1d conv_transpose2d "
    "conv_transpose3d cross_entropy nll_loss l1_loss kl_div cosine_embedding_loss cdist softmax "
    "hinge_embedding_loss poisson_nll_loss margin_ranking_loss triplet_margin_loss log_softmax "
    "layer_norm group_norm quantile nanquantile linear addmm addbmm baddbmm dot inner mv vdot "
    "tensordot prelu trace pinverse max_pool3d adaptive_avg_pool3d linear_cross_entropy "
    "binary_cross_entropy_with_logits multi_head_attention_forward".split()
)
"""Functions whose operands autocast casts, and which torch.func.vmap takes apart before that.

All of torch's operator database whose dtype differs under vmap (torch 2.13; `findings/`).
"""


def _deep_copied(interpreter: Interpreter, func: Any, args: Any, kwargs: Any) -> Any:
    """Copies what has no data, which torch would look for; it says itself what has no copy."""
    interpreter.needs_ranks()
    tensor = args[0]
    if not tensor.is_leaf:
        return func(*args, **kwargs)
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _set_data(interpreter: Interpreter, func: Any, args: Any, kwargs: Any) -> Any:
    """Lets `x.data -= y` be, which sets what `x.data` is already after the write."""
    old, new = [interpreter.base(x) for x in args]
    same = [(x.shape, x.dtype, x.stride(), x.storage_offset()) for x in (old, new)]
    if address_of(old) == address_of(new) and same[0] == same[1]:
        return None
    raise ShardTypeError(
        f"{interpreter.name}: .data of a tensor is set at {call_site()}: it gives the tensor other "
        "memory, which types belong to.\nFix: give the new value a name of its own."
    )


# ---------------------------------------------------------------------------------- questions
#
# Refused are those whose answers differ between ranks, and would count as equal on all of them.
#
# Where and how a tensor lies in memory: a check runs on tensors without data, contiguous and
# unshared. Each rank has its tensor elsewhere and otherwise, a shard for instance behind other
# shards and with their strides.
#
# The state of the default generator: `torch.initial_seed()` and `torch.get_rng_state()` return the
# seed of each process, which may differ between processes, as a Python value.

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
_MOVES: Final = (
    "gives a tensor memory of another kind, which a check, without any, cannot do",
    "do it before the call",
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
    **{getattr(Tensor, name): (f"{name}()", _MOVES) for name in ("share_memory_", "pin_memory")},
    Tensor.untyped_storage: ("untyped_storage()", _HOW),
    _getter("_base"): ("_base", _HOW),
    _getter("_version"): ("_version", _HISTORY),
    Tensor.is_inference: ("is_inference()", _HISTORY),
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
        if interpreter.switches is not None:  # a checkpoint gets another answer the second time
            custom_functions.refuse_uncompared(interpreter, "requires_grad in a checkpoint")
    return func(*args, **kwargs)


def _asker(func: _Question) -> FrameType | None:
    """Returns the frame that calls a function of torch, which may be in Python itself."""
    # The frames here: this function, its caller, and three of the mode that calls that.
    frame: FrameType | None = sys._getframe(5)
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


_SPECIAL: Final[Mapping[Any, Any]] = {
    **dict.fromkeys(
        (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, GRAD_FN),
        custom_functions.follow_hooks,
    ),
    Tensor.__deepcopy__: _deep_copied,
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]  # torch's stubs: a tensor
    **gradients.FUNCTIONS,
    **scalars.FUNCTIONS,
    **ADDRESSES,
}
