"""Circumstances of a check that are neither code nor arguments: versions, and switches of torch."""

import functools
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import optree
import torch

from shardmap_torch.checker.guards.switches import switches
from shardmap_torch.checker.ir.rank_only import is_keeping
from shardmap_torch.checker.rules.registry import table_version
from shardmap_torch.checker.stored.content import UnstableError
from shardmap_torch.checker.stored.patches import patches
from shardmap_torch.collectives.scope import current_scope
from shardmap_torch.core.torch_private.engine import (
    dispatch_mode_stack,
    eval_frame_callback,
    forward_level,
    function_mode_stack,
    functorch,
    top_saved_tensors_hooks,
)

FORMAT: Final = 3
"""Number of the format of files."""


def circumstances() -> list[str]:
    """Describes them.

    Raises:
        UnstableError: something is active that has no description.
    """
    for is_active, what in _active():
        if is_active:
            raise UnstableError(what)
    return [f"format {FORMAT}", *versions(), f"{switches()} {_machine()}", *_variables()]


def _active() -> Iterator[tuple[bool, str]]:
    yield current_scope() is not None, "another body around the call"
    yield functorch.peek_interpreter_stack() is not None, "a transform around the call"
    yield forward_level() >= 0, "forward-mode differentiation"
    yield bool(dispatch_mode_stack()), "a mode of torch around the call"
    yield bool(function_mode_stack()), "a mode of torch around the call"
    yield top_saved_tensors_hooks(True) is not None, "hooks for saved tensors"
    yield eval_frame_callback() is not None, "torch.compile"
    yield torch.compiler.is_compiling(), "torch.compile"
    yield table_version() > 0, "a rule or a decomposition that was registered"
    patched = next(patches(), None)
    yield patched is not None, f"{patched}, which has been replaced in a library"
    yield bool(_hooks()), "a hook of all modules"
    yield is_keeping(), "an autograd Function whose backward communicates"


def _hooks() -> list[object]:
    modules = vars(torch.nn.modules.module)
    return [x for name, x in modules.items() if name.startswith("_global_") and x]


def versions() -> tuple[str, ...]:
    """Returns the versions on which the meaning of code depends."""
    return (
        f"python {sys.version} {sys.implementation.cache_tag} {sys.flags.optimize} {sys.platform}",
        f"torch {torch.__version__} {torch.version.git_version}",
        f"optree {optree.__version__}",
        f"shardmap_torch {_own_source()}",
    )


@functools.lru_cache(maxsize=1)
def _own_source() -> str:
    """Hashes the source of this package, which may be edited without another version."""
    total = hashlib.sha256()
    root = Path(__file__).parents[2]
    for folder, folders, files in os.walk(root, followlinks=True):
        folders.sort()
        for name in sorted(files):
            if name.endswith(".py"):
                path = Path(folder) / name
                total.update(f"{path.relative_to(root)}\n".encode())
                total.update(path.read_bytes())
    return total.hexdigest()


def _machine() -> tuple[Any, ...]:
    """Returns what is there to compute with, and how precisely it does."""
    cuda, backends = torch.cuda, torch.backends
    tf32 = backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32
    return cuda.is_available(), cuda.device_count(), *tf32, backends.mkldnn.enabled


def _variables() -> Iterator[str]:
    """Yields the environment variables that the library reads."""
    for name, value in sorted(os.environ.items()):
        if name.startswith("SHARDMAP_") and name not in _OTHER:
            yield f"{name}={value}"


_OTHER: Final = ("SHARDMAP_CACHE", "SHARDMAP_DEBUG", "SHARDMAP_TORCH_DUMPS")
"""Variables of which no verdict depends."""
