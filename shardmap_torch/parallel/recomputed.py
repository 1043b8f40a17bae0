"""torch within a parallelized module: its checkpoint as `shardmap_torch.checkpoint`, no trackers.

torch's own recomputes in a backward, where neither the ranks nor their types are known any more.
What is recomputed here is a function of the tensors of the modules that it reaches.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Final

from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

from shardmap_torch.checkpoint import checkpoint
from shardmap_torch.core.ambient import ThreadStack
from shardmap_torch.core.modes import FunctionMode
from shardmap_torch.core.torch_private.engine import GLOBAL_MODULE_HOOKS
from shardmap_torch.errors import TransformError
from shardmap_torch.parallel.pure import BoundModule
from shardmap_torch.parallel.rebound import Rebinding

_BODIES: Final[ThreadStack[None]] = ThreadStack()
"""Bodies of parallelized modules that run on this thread."""

_DISABLED: Final = "__dynamo_disable"
_TORCH: Final[Any] = torch_checkpoint.checkpoint.__wrapped__  # type: ignore[attr-defined]
_ANY: Final = ("use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop")
"""Options of torch's that ask for nothing else than what is done here."""


@contextmanager
def within_body() -> Iterator[None]:
    """Makes torch.utils.checkpoint ours on this thread."""
    with _BODIES.holding(None):
        yield


def is_within_body() -> bool:
    """Returns whether a body of a parallelized module runs on this thread."""
    return bool(_BODIES.items)


def _dispatch(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not is_within_body():
        return _by_torch()(function, *args, **kwargs)
    if kwargs.pop("context_fn", torch_checkpoint.noop_context_fn) is not (
        torch_checkpoint.noop_context_fn
    ):
        raise TransformError(
            "torch.utils.checkpoint: within a parallelized module all is recomputed, and a "
            "context_fn would choose.\nFix: leave context_fn out."
        )
    others = {name: value for name, value in kwargs.items() if name not in _ANY}
    return _recomputed(partial(function, *args, **others))


@cache
def _by_torch() -> Callable[..., Any]:
    from shardmap_torch.core.torch_private.dynamo import disable  # importing it takes a second

    return disable(_TORCH, wrapping=False)  # type: ignore[no-any-return]


# `torch._disable_dynamo` keeps there what calls of the function run.
setattr(_TORCH, _DISABLED, _dispatch)


def _recomputed(function: "partial[Any]") -> Any:
    modules: dict[int, nn.Module] = {}

    def found(value: Any) -> Any:
        return modules.setdefault(id(value), value) if isinstance(value, nn.Module) else value

    Rebinding(found)(function)
    tensors = [(dict(m.named_parameters()), dict(m.named_buffers())) for m in modules.values()]

    def run(tensors: Any, args: Any, keywords: Any) -> Any:
        pairs = zip(modules.items(), tensors, strict=True)
        copies = {key: BoundModule(module, *own).root for (key, module), own in pairs}
        bound = Rebinding(lambda value: copies.get(id(value), value))(function)
        own = [copies.get(id(arg), arg) for arg in function.args]
        places = (i for i, arg in enumerate(own) if not isinstance(arg, nn.Module))
        for place, arg in zip(places, args, strict=True):
            own[place] = arg
        with within_body(), _NewLeaves():  # in a backward too
            return bound.func(*own, **keywords)

    args = [arg for arg in function.args if not isinstance(arg, nn.Module)]
    return checkpoint(run, tensors, args, function.keywords)


class _NewLeaves(FunctionMode):
    """Lets a function ask in vain for the gradient of a tensor that it makes, as T5 does of zeros.

    Nobody reads it, and a leaf that is no argument would be taken for one that is closed over.
    """

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func == Tensor.requires_grad.__set__ and not isinstance(args[0], nn.Parameter):  # type: ignore[attr-defined]
            return None
        return func(*args, **kwargs)


@contextmanager
def untracked() -> Iterator[None]:
    """Removes the global hooks of torch's trackers while a body runs.

    The modules of a body are copies, which a check runs too, and a tracker would register hooks on
    them and on autograd's nodes, which global strictness refuses.
    """
    found = [
        (hooks, number, hook)
        for hooks in GLOBAL_MODULE_HOOKS
        for number, hook in hooks.items()
        if type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.")
    ]
    for hooks, number, _ in found:
        del hooks[number]
    try:
        yield
    finally:
        for hooks, number, hook in found:
            hooks[number] = hook
