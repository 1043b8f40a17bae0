"""Junk arguments raise errors of this package, and leave nothing behind."""

import os

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from shardmap_torch import current_mesh
from shardmap_torch.collectives.scope import current_scope
from tests.support.bad_input import internal_errors

NUM_SEEDS = 5_000 if "SHARDMAP_FUZZ" in os.environ else 150
FIRST = int(os.environ.get("SHARDMAP_FUZZ_SEED", "0"))


def test_junk_is_refused_by_name_and_leaves_nothing_behind() -> None:
    found = list(internal_errors(range(FIRST, FIRST + NUM_SEEDS)))
    assert not found, "\n".join(found)
    assert current_scope() is None
    assert current_mesh() is None
    assert torch._C._functorch.peek_interpreter_stack() is None
    assert not _get_current_dispatch_mode_stack()
    assert not _get_current_function_mode_stack()
