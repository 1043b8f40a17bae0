"""Caches of keys, values and states, which a forward fills: generation against one device."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch

from shardmap_torch import Mesh, make_mesh, parallelize
from shardmap_torch.checker.verify import verdict
from tests.parallel.support.transformers_models import make_model
from tests.programs.support.harness import global_value, worker_mesh
from tests.support.fuzzing import sampled
from tests.support.pool import Gloo

SIMULATED = make_mesh((2,), ("tp",), kind="simulated")
TEXT = [[5, 9, 2, 33], [7, 8, 1, 60]]

HYBRIDS = ["lfm2", "bamba"]
"""Models whose layers keep states of convolutions and recurrences in dicts, and write there."""


def scores(model: Any, prompt: list[Any], count: int = 4) -> torch.Tensor:
    """Returns the logits of some generated tokens."""
    found: Any = model.generate(
        torch.tensor(prompt),
        **{"max_new_tokens": count, "do_sample": False, "pad_token_id": 0, "eos_token_id": None},
        **{"output_logits": True, "return_dict_in_generate": True},
    )
    return torch.stack(found.logits)


def generates_alike(name: str, mesh: Mesh) -> None:
    one = make_model(name).double().eval()
    ours = parallelize(copy.deepcopy(one), mesh)
    torch.testing.assert_close(scores(ours, TEXT), scores(one, TEXT), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", HYBRIDS)
def test_states_in_dicts_are_carried_from_token_to_token(name: str) -> None:
    generates_alike(name, SIMULATED)


def on_processes(name: str) -> None:
    generates_alike(name, worker_mesh((2,), ("tp",)))


@pytest.mark.parametrize("name", sampled(HYBRIDS, "lfm2"))
def test_states_in_dicts_are_carried_on_processes_too(name: str, gloo: Gloo) -> None:
    gloo(2).run(on_processes, name, timeout=120)


GROWING: dict[str, Any] = {
    "llama": {},
    "mixtral": {"experts_implementation": "batched_mm"},
    "mistral": {"sliding_window": 16},  # its caches count tokens in integers
}


def checks_of(mesh: Mesh, name: str) -> list[int]:
    """Returns how many bodies are interpreted for a dozen tokens of each of some prompts."""
    one = make_model(name, **GROWING[name]).double().eval()
    ours: Any = parallelize(copy.deepcopy(one), mesh)
    found = []
    for prompt in ([5, 9, 2], [5, 9, 2, 33], [7, 8]):
        with mock.patch.object(verdict, "_verify_paths", wraps=verdict._verify_paths) as counted:
            actual, expected = (
                model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
                for model in (ours, one)
            )
        assert actual.tolist() == expected.tolist()
        found.append(counted.call_count)
    return found


def at_most(found: list[int]) -> None:
    first, *others = found
    assert first <= 4  # of which one finds how results are sharded
    assert max(others) <= 2  # of prompts of other lengths


@pytest.mark.sample(2, "llama")
@pytest.mark.parametrize("name", GROWING)
def test_a_cache_that_grows_is_one_verdict(name: str) -> None:
    at_most(checks_of(SIMULATED, name))


def checks_on_processes() -> list[int]:
    return checks_of(worker_mesh((2,), ("tp",)), "llama")


def test_a_cache_that_grows_is_one_verdict_on_processes(gloo: Gloo) -> None:
    for found in gloo(2).run(checks_on_processes, timeout=120):
        at_most(found)


def test_tokens_are_those_of_one_device_where_a_window_is_full() -> None:
    one = make_model("mistral", sliding_window=6).double().eval()
    ours: Any = parallelize(copy.deepcopy(one), SIMULATED)
    for prompt in ([5, 9, 2], [7, 8, 1, 60], [5, 9, 2, 33, 7, 8, 1]):
        torch.testing.assert_close(scores(ours, [prompt], 8), scores(one, [prompt], 8))


def layers_train_and_generate(mesh: Mesh) -> None:
    """Each layer is a program of its own, which finds in a cache the heads of those before."""
    one = make_model("llama").double()
    ours = copy.deepcopy(one)
    plan = {k.removeprefix("layers.*."): v for k, v in one.config.base_model_tp_plan.items()}
    for layer in ours.model.layers:
        parallelize(layer, mesh, {key: plan[key] for key in plan if "." in key})
    ids = torch.tensor(TEXT)
    for model in (one, ours):
        model(ids, labels=ids).loss.backward()
    for name, value in one.named_parameters():
        found = global_value(ours.get_parameter(name).grad)
        torch.testing.assert_close(found, value.grad, msg=name)
    torch.testing.assert_close(scores(ours.eval(), TEXT), scores(one.eval(), TEXT))


def test_layers_that_are_parallelized_one_by_one_share_a_cache() -> None:
    layers_train_and_generate(SIMULATED)


def layers_on_processes() -> None:
    layers_train_and_generate(worker_mesh((2,), ("tp",)))


@pytest.mark.fuzz  # simulated above
def test_layers_share_a_cache_on_processes(gloo: Gloo) -> None:
    gloo(2).run(layers_on_processes, timeout=120)
