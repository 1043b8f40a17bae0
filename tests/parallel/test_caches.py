"""Caches of keys, values and states, which a forward fills: generation against one device."""

import copy
from typing import Any

import pytest
import torch

from shardmap_torch import Mesh, make_mesh, parallelize
from tests.parallel.support.transformers_models import make_model
from tests.programs.support.harness import worker_mesh
from tests.support.pool import Gloo

SIMULATED = make_mesh((2,), ("tp",), kind="simulated")
TEXT = torch.tensor([[5, 9, 2, 33], [7, 8, 1, 60]])

HYBRIDS = ["lfm2", "bamba"]
"""Models whose layers keep states of convolutions and recurrences in dicts, and write there."""


def scores(model: Any) -> torch.Tensor:
    """Returns the logits of some generated tokens."""
    asked = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found: Any = model.generate(TEXT, **asked, output_logits=True, return_dict_in_generate=True)
    return torch.stack(found.logits)


def generates_alike(name: str, mesh: Mesh) -> None:
    one = make_model(name).double().eval()
    ours = parallelize(copy.deepcopy(one), mesh)
    torch.testing.assert_close(scores(ours), scores(one), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", HYBRIDS)
def test_states_in_dicts_are_carried_from_token_to_token(name: str) -> None:
    generates_alike(name, SIMULATED)


def on_processes(name: str) -> None:
    generates_alike(name, worker_mesh((2,), ("tp",)))


@pytest.mark.parametrize("name", HYBRIDS)
def test_states_in_dicts_are_carried_on_processes_too(name: str, gloo: Gloo) -> None:
    gloo(2).run(on_processes, name, timeout=120)
