"""Code of the user's own that autograd runs, or that no batched body can run.

Autograd Functions are followed by replacing their `apply` while a body is interpreted. Operations
that only single ranks can run are hooks on tensors, autograd nodes and modules, Functions without a
vmap rule, and tensors saved for backward through hooks, as by torch's own checkpoint:
`torch.func.vmap` would drop them or break. The checker types them; a mesh of `simulate="auto"` runs
a body that has them as ranks, and one of `"vmap"` refuses it.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import Node

from shardmap_torch.collectives.scope import current_scope
from shardmap_torch.core.ambient import ThreadStack
from shardmap_torch.core.autograd_state import graph_nodes
from shardmap_torch.core.torch_private.engine import (
    CtxWithSavedTensors,
    OpOverload,
    SingleLevelFunction,
    are_transforms_active,
    top_saved_tensors_hooks,
)
from shardmap_torch.errors import CollectiveError
from shardmap_torch.function import Function as KeepingFunction
from shardmap_torch.function import keeping_scope, method_of


def is_own(function: type[Function]) -> bool:
    """Returns whether a Function is the user's, whose backward is no derivative of its forward."""
    return not function.__module__.startswith(_NOT_OWN)


def own_nodes(outputs: Sequence[Any]) -> Iterator[tuple[Node, str]]:
    """Yields the autograd nodes of the user's own Functions, with their names."""
    for node in graph_nodes(x.grad_fn for x in outputs if isinstance(x, Tensor)):
        name = name_of_own(node)
        if name is not None:
            yield node, name


def name_of_own(node: Node | None) -> str | None:
    """Returns the name of the user's own Function whose backward a node is, or None."""
    function = _own(node)
    return None if function is None else function.__name__


def _own(node: object) -> type[Function] | None:
    function = applied(getattr(node, "_forward_cls", None))
    return function if function is not None and is_own(function) else None


def backward_of(node: object) -> Callable[..., Any] | None:
    """Returns the user's own backward that a node runs, or None."""
    function = _own(node)
    if function is None:
        return None
    name = "backward" if function.vjp is Function.vjp else "vjp"  # torch's second name for it
    found: Callable[..., Any] = method_of(function, name)
    return found


def communicating(error: CollectiveError) -> type[Function] | None:
    """Returns the plain Function for want of whose scope a backward has failed, if it is one."""
    function = _own(error.node)
    is_plain = function is not None and not issubclass(function, KeepingFunction)
    return function if is_plain else None


def rejects_transforms(node: Node | None) -> bool:
    """Returns whether a node is of the user's own Function, in the form that torch.func refuses."""
    function = _own(node)
    return function is not None and function.setup_context is Function.setup_context


_NOT_OWN: Final = ("shardmap_torch.", "torch.utils.checkpoint")
"""Modules of Functions whose backward is the derivative of what they call."""


def applied(function: type[Function] | None) -> type[Function] | None:
    """Returns the Function, or the one that a transform's Function wraps."""
    if function is None or function.__module__ != CtxWithSavedTensors.__module__:
        return function
    cells = getattr(function.backward, "__closure__", None) or ()
    found = (cell.cell_contents for cell in cells)
    return next((f for f in found if isinstance(f, type) and issubclass(f, Function)), None)


# ---------------------------------------------------------------------- what only ranks can run

_BATCHED: Final = ("shardmap_torch.", "torch._library.", "torch._functorch.", "torch._dynamo.")
"""Modules of Functions that have a vmap rule, here or elsewhere."""

GRAD_FN: Final = Tensor.grad_fn.__get__  # type: ignore[union-attr]  # torch's stubs: a Node
"""Returns a node, on which hooks can be registered unobserved."""

HOOKS: Final[frozenset[Any]] = frozenset(
    {Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad, GRAD_FN}
)
"""Functions of torch that register hooks on a tensor, or return a node for hooks."""

UNBATCHED: Final[frozenset[Any]] = frozenset(
    {Tensor.data.__get__, Tensor.detach_, torch.detach_}  # type: ignore[attr-defined]  # torch's
)
"""Functions of torch that refuse what `torch.func.vmap` batches."""


def name_of_hook(function: Any) -> str:
    """Returns what a message calls one of `HOOKS`."""
    return "grad_fn" if function == GRAD_FN else str(function.__name__)


def without_rule(function: type) -> str | None:
    """Returns what a message calls a Function that no batched body can apply; None if one can."""
    if takes_vmap(function):
        return None
    return f"{function.__name__}, a Function without a rule for vmap"


def has_saving_hooks(of_users: bool = False) -> bool:
    """Returns whether hooks for tensors that autograd saves are active, which are of users'."""
    top = top_saved_tensors_hooks(True)
    module = str(getattr(top[0], "__module__", "")) if top is not None else ""
    return top is not None and not (of_users and module.startswith("torch."))


def rank_only_part(op: OpOverload, arguments: Mapping[str, Any]) -> str | None:
    """Returns what a message calls a call that no batched body can make, or hooks on it."""
    what = rank_only(op, arguments)
    return what or ("saved_tensors_hooks" if has_saving_hooks() else what)


def rank_only(op: OpOverload, arguments: Mapping[str, Any]) -> str | None:
    """Returns what a message calls a call that no batched body can make; None if one can.

    "" for fused lists: torch refuses them itself.
    """
    name, indices = op._schema.name.removeprefix("aten::"), arguments.get("indices")
    masks = indices if isinstance(indices, list | tuple) else ()
    if op in _ALONE or any(
        isinstance(mask, Tensor) and mask.dtype in (torch.bool, torch.uint8) for mask in masks
    ):
        return name
    if op in _ROUNDED and not arguments["self"].dtype.is_floating_point:
        return f"{name} of whole numbers"
    if arguments.get("memory_format") in _ALL_DIMS:
        return f"{name} with a memory format"
    return "" if _is_fused(op) else None


_ALONE: Final = frozenset(
    {  # `_neg_view` is what z.conj().imag calls
        torch.ops.aten._neg_view.default,
        torch.ops.aten._assert_async.default,
        torch.ops.aten._assert_async.msg,
        torch.ops.aten.clamp.Tensor,
        torch.ops.aten.linspace.Tensor_Tensor,
        torch.ops.aten.linspace.Tensor_Scalar,
        torch.ops.aten.linspace.Scalar_Tensor,
    }
)
"""Operators that torch has no batching rule for, or one with another rounding or no gradient."""

_ROUNDED: Final = frozenset(
    (torch.ops.aten.addmv.default, torch.ops.aten.addbmm.default, torch.ops.aten.baddbmm.default)
)
"""Operators of which batched whole numbers times a float are no whole numbers."""

_ALL_DIMS: Final = (torch.channels_last, torch.channels_last_3d)
"""Formats of as many dims as a tensor has on a rank."""


@lru_cache(maxsize=4096)
def _is_fused(op: OpOverload) -> bool:
    """Returns whether an operator works on lists of tensors, or writes by `out=`."""
    is_out = any(argument.is_out for argument in op._schema.arguments)
    return is_out or op._schema.name.startswith("aten::_foreach_")


def takes_vmap(function: type) -> bool:
    """Returns whether a batched body can apply an `autograd.Function`."""
    if function.__module__.startswith(_BATCHED):
        return True
    described: Mapping[str, Any] = {
        name: getattr(function, name) for name in ("setup_context", "vmap", "generate_vmap_rule")
    }
    has_rule = described["generate_vmap_rule"] or described["vmap"] is not Function.vmap
    return has_rule and described["setup_context"] is not Function.setup_context


Made: TypeAlias = Callable[[type[Function], Sequence[Any], Any], Any]


# ----------------------------------------------------------------------- Functions, watched


_WATCH: Final[ThreadStack[tuple[Callable[[str | None], None], Made]]] = ThreadStack()
"""Listeners for the functions that this thread applies."""

_SEEN: Final[ThreadStack[type]] = ThreadStack()
"""Functions whose `apply` has reported."""

_LOCK: Final = threading.Lock()
_WATCHES: Final[list[int]] = []
_FORWARDS: Final[list[int]] = []
_HELD: Final[Any] = vars(Function)["apply"]
"""Torch's value of names of `Function.apply`: until 2.13 in Python, calling that of the base."""

_IS_FINAL: Final = not isinstance(_HELD, classmethod)
"""From torch 2.14 on it is in C and calls no other, so that it has to be replaced itself."""


_KEEPING: Final[WeakKeyDictionary[type, type[KeepingFunction]]] = WeakKeyDictionary()
"""Functions that bodies apply in place of plain ones whose backward communicates."""

_COMMUNICATING: Final[set[tuple[str, str, bool]]] = set()
"""Names of these: a body may make the class again whenever it runs."""


def _named(cls: type[Function]) -> tuple[str, str, bool]:
    """Returns the module and the name, and whether torch.func would apply it by another way."""
    return cls.__module__, cls.__qualname__, cls.setup_context is not Function.setup_context


def keep_scope(function: type[Function]) -> bool:
    """Has all bodies apply a plain Function as a `shardmap_torch.Function` from here on.

    Returns:
        Whether they did not do so before.
    """
    with _LOCK:
        name = _named(function)
        if name in _COMMUNICATING:
            return False
        _COMMUNICATING.add(name)
        _begin()  # never taken away
        return True


def _keeping(cls: Any) -> type[KeepingFunction] | None:
    if issubclass(cls, KeepingFunction) or current_scope() is None:
        return None
    if not issubclass(cls, Function) or _named(cls) not in _COMMUNICATING:
        return None
    with _LOCK:
        if cls not in _KEEPING:
            _KEEPING[cls] = keeping_scope(cls)
        return _KEEPING[cls]


def _begin() -> None:
    _WATCHES.append(1)
    for host in _HOSTS:
        host.apply = _WATCHED


def _end() -> None:
    _WATCHES.pop()
    if not _WATCHES:
        del _HOSTS[0].apply
        if _IS_FINAL:
            Function.apply = _HELD  # type: ignore[method-assign]  # as it was


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    apply = super(SingleLevelFunction, cls).apply
    if issubclass(cls, Function) and are_transforms_active():
        return apply(*args, **kwargs)  # torch applies another one for each level
    keeping = _keeping(cls) if _COMMUNICATING else None
    if keeping is not None:
        return keeping.apply(*args, **kwargs)
    if _WATCH.top is None:
        return apply(*args, **kwargs)
    found, made = _WATCH.top
    found(without_rule(cls))
    with _SEEN.holding(cls):
        out = apply(*args, **kwargs)
    return made(cls, args, out)


_WATCHED: Final[Any] = classmethod(_apply)
_HOSTS: Final[Sequence[Any]] = (SingleLevelFunction, *([Function] if _IS_FINAL else []))


def _forward_of(cls: Any) -> Callable[..., Any]:
    """Returns `cls.forward`, which reports if torch calls it for an `apply` of a name of its own.

    In C, `Function.apply` of torch 2.14 cannot be replaced under names that users have for it. All
    that it looks up in Python before it has run is `setup_context` and `forward`.
    """
    forward: Callable[..., Any] = method_of(cls, "forward")
    watch = _WATCH.top
    is_reported = cls in _SEEN.items or not issubclass(cls, Function)
    if watch is None or is_reported or are_transforms_active():
        return forward
    found, made = watch
    found(without_rule(cls))
    has_context = cls.setup_context is Function.setup_context

    def reporting(*args: Any) -> Any:
        return made(cls, args[1:] if has_context else args, forward(*args))

    return reporting


def _watch_forward(change: int) -> None:
    """Has all Functions look up `forward` by `_forward_of` while a body is interpreted."""
    if not _IS_FINAL:
        return
    _FORWARDS.extend([1] * change)
    if change < 0:
        _FORWARDS.pop()
    metaclass: Any = type(Function)
    if _FORWARDS:
        metaclass.forward = property(_forward_of, _set_forward)
    else:
        del metaclass.forward


def _set_forward(cls: Any, value: Any) -> None:
    """Sets `cls.forward`, which a class that is made in a body does, behind the property's back."""
    metaclass: Any = type(Function)
    watching = vars(metaclass)["forward"]
    del metaclass.forward
    try:
        cls.forward = value
    finally:
        metaclass.forward = watching


@contextmanager
def watching_functions(found: Callable[[str | None], None], made: Made) -> Iterator[None]:
    """Calls `found` with the name of each function without a form for vmap that is applied in here.

    `made` gets each function, its arguments and its results, and gives what to return for these.

    `Function.apply` is no function that modes of torch see, and users keep it under names of their
    own; so a method is put between it and what it calls, and taken away again.
    """
    with _LOCK:
        _begin()
        _watch_forward(1)
    try:
        with _WATCH.holding((found, made)):
            yield
    finally:
        with _LOCK:
            _end()
            _watch_forward(-1)
