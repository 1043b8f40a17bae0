"""Functions of libraries that somebody replaced are seen, since no version tells of them."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from shardmap_torch.checker.stored.circumstances import circumstances
from shardmap_torch.checker.stored.content import UnstableError
from shardmap_torch.checker.stored.patches import patches
from tests.checker.support.restarts import as_started


def another(*args: Any) -> Any:
    return args[0]


@pytest.mark.parametrize(
    ("owner", "name"),
    [(torch.nn.functional, "relu"), (torch.Tensor, "sum"), (nn.Tanh, "forward"), (torch, "abs")],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.parametrize("copies_name", [False, True])
def test_a_replaced_function_is_named(
    owner: Any, name: str, copies_name: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(patches()) == []
    theirs = getattr(owner, name)
    new = functools.wraps(theirs)(lambda *args: theirs(*args)) if copies_name else another
    monkeypatch.setattr(owner, name, new)
    assert list(patches()) == [name]
    with as_started(), pytest.raises(UnstableError, match=rf"^{name}, which has been replaced"):
        circumstances()


def test_another_operator_of_tensors_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "__mul__", another)
    assert list(patches()) == ["__mul__"]


def test_what_torch_wraps_when_it_compiles_is_its_own() -> None:
    """Dynamo replaces what makes modules once it has compiled one."""
    torch.compile(nn.Sequential(nn.Tanh()), backend="aot_eager")(torch.ones(2))
    from torch._dynamo import mutation_guard

    mutation_guard.install_generation_tagging_init()
    assert nn.Module.__init__.__module__ == "torch._dynamo.mutation_guard"
    assert list(patches()) == []


def test_a_hook_of_all_modules_has_no_content() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with as_started(), pytest.raises(UnstableError, match=r"^a hook of all modules"):
            circumstances()
    finally:
        handle.remove()
