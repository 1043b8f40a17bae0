"""Libraries whose functions do the same in each process, and names that do not."""

import sys
from typing import Any, Final

_STEADY: Final = frozenset(
    {
        *("builtins", "math", "cmath", "operator", "_operator", "functools", "_functools"),
        *("itertools", "collections", "collections.abc", "_collections", "_collections_abc"),
        *("dataclasses", "typing", "types", "enum", "abc", "_abc", "copy", "string", "numbers"),
        *("fractions", "contextlib", "_contextvars", "contextvars", "heapq", "bisect", "textwrap"),
        *("typing_extensions", "re", "__future__", "copyreg", "array", "warnings", "_warnings"),
        "weakref",
    }
)
"""Modules of Python and of others that ask for nothing but their arguments."""

_STEADY_PACKAGES: Final = ("torch", "shardmap_torch", "optree")

_PROCESS_PACKAGES: Final = (
    *("torch.distributed", "torch.backends", "torch.cuda", "torch.xpu", "torch.mps"),
    "torch.random",
    *("torch.utils.data", "torch.hub", "torch.library", "torch._library", "torch.multiprocessing"),
    *("torch.serialization", "torch.accelerator", "torch.version", "torch.cpu", "torch._dynamo"),
    *("shardmap_torch.control", "shardmap_torch.saving", "shardmap_torch.placing"),
    *("shardmap_torch.postmortem", "shardmap_torch.run", "shardmap_torch.validate"),
)
"""Packages of these with state of a process, or with registries of the user's code."""

PROCESS_NAMES: Final = frozenset(
    {
        *("distributed", "backends", "cuda", "xpu", "mps", "accelerator", "ops", "library"),
        *("environ", "getenv", "open", "input", "load", "read_text", "read_bytes", "getpid"),
        *("initial_seed", "get_rng_state", "default_generator", "getrandbits"),
        *("get_num_threads", "get_num_interop_threads", "is_available", "device_count"),
        *("current_device", "get_rank", "get_world_size", "get_local_rank", "get_coordinate"),
        *("device_mesh", "id", "hash", "globals", "locals", "eval", "exec", "compile"),
        *("__import__", "import_module", "breakpoint", "data_ptr", "_cdata", "_version"),
        *("vars", "dir", "__dict__"),
        *("is_compiling", "is_dynamo_compiling", "current_mesh", "_getframe", "__doc__"),
    }
)
"""Names by which code asks for state of its process, which a hash of the code does not show."""


def require_steady(module: str, name: str) -> None:
    """Requires that a function or class is one of a library that has no state of a process.

    Raises:
        LookupError: it is not; says which.
    """
    root = module.split(".", 1)[0]
    within = root in _STEADY_PACKAGES and not _is_within(module, _PROCESS_PACKAGES)
    if not (within or module in _STEADY) or name in PROCESS_NAMES:
        raise LookupError(f"{module}.{name}".strip("."))


def is_own_state(cls: type) -> bool:
    """Returns whether a class of a library keeps state of its process."""
    module = cls.__module__
    return _is_within(module, _PROCESS_PACKAGES) or cls.__name__ in ("Generator", "ProcessGroup")


def resolved(module: str, qualname: str) -> Any:
    """Returns what a name stands for in an imported module, or None."""
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _is_within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == each or module.startswith(each + ".") for each in packages)
