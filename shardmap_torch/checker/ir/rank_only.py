"""Operations that only single ranks can run: `torch.func.vmap` would drop them or break.

These are hooks on tensors, autograd nodes and modules, autograd Functions without a vmap rule, and
tensors saved for backward through hooks, as by torch's own checkpoint. The checker types them; a
mesh of `simulate="auto"` runs a body that has them as ranks.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.autograd import Function

from shardmap_torch.collectives.scope import current_scope
from shardmap_torch.core.torch_private.engine import SingleLevelFunction, top_saved_tensors_hooks
from shardmap_torch.function import Function as KeepingFunction
from shardmap_torch.function import keeping_scope

_OWN: Final = ("shardmap_torch.", "torch._library.", "torch._functorch.", "torch._dynamo.")
"""Modules of Functions that have a vmap rule, here or elsewhere."""

GRAD_FN: Final = Tensor.grad_fn.__get__  # type: ignore[union-attr]  # torch's stubs: a Node
"""Returns a node, on which hooks can be registered unobserved."""

HOOKS: Final[frozenset[Any]] = frozenset(
    {
        Tensor.register_hook,
        Tensor.register_post_accumulate_grad_hook,
        Tensor.retain_grad,
        GRAD_FN,
    }
)
"""Functions of torch that register hooks on a tensor, or return a node for hooks."""


def has_saving_hooks() -> bool:
    """Returns whether hooks for tensors that autograd saves are active."""
    return top_saved_tensors_hooks(True) is not None


def takes_vmap(function: type) -> bool:
    """Returns whether a batched body can apply an `autograd.Function`."""
    if function.__module__.startswith(_OWN):
        return True
    described: Mapping[str, Any] = {
        name: getattr(function, name) for name in ("setup_context", "vmap", "generate_vmap_rule")
    }
    has_rule = described["generate_vmap_rule"] or described["vmap"] is not Function.vmap
    return has_rule and described["setup_context"] is not Function.setup_context


Made: TypeAlias = Callable[[type[Function], Sequence[Any], Any], Any]


class _Watch(threading.local):
    """Thread-local listener for the functions that this thread applies."""

    def __init__(self) -> None:
        self.stack: list[tuple[Callable[[], None], Made]] = []


_WATCH: Final = _Watch()
_LOCK: Final = threading.Lock()
_BASE: Final[Any] = SingleLevelFunction
_WATCHES: Final[list[int]] = []


_KEEPING: Final[WeakKeyDictionary[type, type[KeepingFunction]]] = WeakKeyDictionary()
"""Plain Functions whose backward communicates, and what bodies apply in their place."""


def keep_scope(function: type[Function]) -> None:
    """Has all bodies apply a plain Function as a `shardmap_torch.Function` from here on."""
    with _LOCK:
        if function not in _KEEPING:
            _KEEPING[function] = keeping_scope(function)
            _WATCHES.append(1)  # never taken away
            _BASE.apply = _WATCHED


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    keeping = _KEEPING.get(cls)
    if keeping is not None and current_scope() is not None:
        return keeping.apply(*args, **kwargs)
    if _WATCH.stack and not takes_vmap(cls):
        _WATCH.stack[-1][0]()
    out = super(SingleLevelFunction, cls).apply(*args, **kwargs)
    return _WATCH.stack[-1][1](cls, args, out) if _WATCH.stack else out


_WATCHED: Final = classmethod(_apply)


@contextmanager
def watching_functions(found: Callable[[], None], made: Made) -> Iterator[None]:
    """Calls `found` for each function without a form for vmap that this thread applies in here.

    `made` gets each function, its arguments and its results, and gives what to return for these.

    `Function.apply` is no function that modes of torch see, and users keep it under names of their
    own; so a method is put between it and what it calls, and taken away again.
    """
    with _LOCK:
        _WATCHES.append(1)
        _BASE.apply = _WATCHED
    _WATCH.stack.append((found, made))
    try:
        yield
    finally:
        _WATCH.stack.pop()
        with _LOCK:
            _WATCHES.pop()
            if not _WATCHES:
                del _BASE.apply
