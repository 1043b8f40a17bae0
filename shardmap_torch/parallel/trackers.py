"""torch's trackers of modules, as `CommDebugMode` has one: a parallelized module is one to them."""

from collections.abc import Iterator
from contextlib import contextmanager

from shardmap_torch.core.torch_private.engine import GLOBAL_MODULE_HOOKS


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
