"""Models of transformers as they are: training and generation, against one device."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import Mesh, SpecError, make_mesh, parallelize
from shardmap_torch.parallel.carried import carried_plan
from tests.parallel.support.transformers_models import (
    CONFIGS,
    DECODERS,
    OTHERS,
    make_batch,
    make_model,
)
from tests.programs.support.harness import global_value, worker_mesh
from tests.support.fuzzing import sampled, sized
from tests.support.golden import hold_own, told
from tests.support.pool import Gloo

SIMULATED = make_mesh((2,), ("tp",), kind="simulated")


def train(name: str, model: Any) -> dict[str, Tensor]:
    """Returns outputs and gradients of the first of some steps, and the parameters after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    found: dict[str, Tensor] = {}
    for step in range(sized(2, 5)):
        optimizer.zero_grad()
        out: Any = model(**make_batch(name, step))
        assert type(out).__name__.endswith(("Output", "OutputWithPast", "Attentions"))
        out.loss.backward()
        found[f"loss {step}"], found[f"logits {step}"] = out.loss.detach(), out.logits.detach()
        if step == 0:
            gradients = ((key, p.grad) for key, p in model.named_parameters())
            found |= {f"grad of {k}": global_value(grad) for k, grad in gradients}
        optimizer.step()
    return found | {key: global_value(p) for key, p in model.named_parameters()}


def trains_alike(name: str, mesh: Mesh, **changes: Any) -> None:
    one = make_model(name, **changes).double()
    ours = parallelize(copy.deepcopy(one), mesh)
    actual, expected = train(name, ours), train(name, one)
    assert actual.keys() == expected.keys()
    for key, value in actual.items():
        # Mixtral's router computes in 32 bits, and AdamW divides gradients by their own size.
        exact = 1e-7 if name == "mixtral" else 1e-9
        close = exact if key.startswith(("loss 0", "logits 0", "grad")) else 1e-5
        note = f"{name}: {key}"
        torch.testing.assert_close(value, expected[key], rtol=close, atol=close, msg=note)


EXPERTS = {"experts_implementation": "batched_mm"}  # that by default computes in 32 bits at most


@pytest.mark.sample(2, "bert")
@pytest.mark.parametrize("name", CONFIGS)
def test_steps_on_simulated_ranks_are_those_of_one_device(name: str) -> None:
    trains_alike(name, SIMULATED, **EXPERTS if name == "mixtral" else {})


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_those_of_one_device_too(name: str) -> None:
    one = make_model(name).double()
    ours = parallelize(copy.deepcopy(one), SIMULATED)
    for model in (ours, one):
        model(**make_batch(name)).loss.backward()
    for (key, p), q in zip(ours.named_parameters(), one.parameters(), strict=True):
        # Routers compute in 32 bits.
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-7, atol=1e-7, msg=f"{name}: {key}")


def on_processes(name: str) -> None:
    trains_alike(name, worker_mesh((2,), ("tp",)), **EXPERTS if name == "mixtral" else {})


# One model that is plain, one with packed weights, one with experts, one with two stacks.
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", sampled(CONFIGS, "llama", "gpt2", "mixtral", "t5"))
def test_steps_on_processes_are_those_of_one_device(name: str, gloo: Gloo) -> None:
    gloo(2).run(on_processes, name, timeout=120)


def accumulate_on_processes(name: str) -> None:
    one = make_model(name).double()
    ours = parallelize(copy.deepcopy(one), worker_mesh((2,), ("tp",)))
    for model in (ours, one):
        for seed in range(2):
            model(**make_batch(name, seed)).loss.backward()
    for (key, p), q in zip(ours.named_parameters(), one.parameters(), strict=True):
        found = global_value(p.grad)
        # Routers and Apertus' activations compute in 32 bits.
        torch.testing.assert_close(found, q.grad, rtol=1e-6, atol=1e-6, msg=f"{name}: {key}")


# findings/transformers_tp_*.sh: on these the tensor parallelism of transformers gives others.
@pytest.mark.parametrize("name", ["apertus", "qwen3"])
def test_gradients_of_two_microbatches_on_processes_are_those_of_one_device(
    name: str, gloo: Gloo
) -> None:
    gloo(2).run(accumulate_on_processes, name, timeout=120)


@pytest.mark.parametrize("left_out", ["model.embed_tokens", "lm_head"])
def test_a_plan_that_shards_a_tied_weight_in_two_ways_is_refused_by_its_name(left_out: str) -> None:
    model = make_model("gemma")
    plan = {key: style for key, style in carried_plan(model).items() if key != left_out}
    with pytest.raises(SpecError) as caught:
        parallelize(model, SIMULATED, plan)
    hold_own(str(caught.value))


def generate(model: Any, name: str, cache: str | None) -> Tensor:
    batch = make_batch(name)
    del batch["labels"]
    ids: Tensor = model.generate(
        **batch,
        max_new_tokens=6,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        cache_implementation=cache,
    )
    return ids


def generates_alike(name: str, mesh: Mesh, cache: str | None = None) -> None:
    one = make_model(name, num_layers=1).eval()
    ours = parallelize(copy.deepcopy(one), mesh)
    assert generate(ours, name, cache).tolist() == generate(one, name, cache).tolist()


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", DECODERS)
def test_generation_on_simulated_ranks_gives_the_tokens_of_one_device(name: str) -> None:
    generates_alike(name, SIMULATED)


FEW = sampled(DECODERS, "llama", "t5")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", FEW)
def test_generation_into_a_static_cache_gives_the_tokens_of_one_device(name: str) -> None:
    generates_alike(name, SIMULATED, "static")


def generate_on_processes(name: str) -> None:
    mesh = worker_mesh((2,), ("tp",))
    for cache in sized(("static",), (None, "static")):
        generates_alike(name, mesh, cache)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", FEW)
def test_generation_on_processes_gives_the_tokens_of_one_device(name: str, gloo: Gloo) -> None:
    gloo(2).run(generate_on_processes, name, timeout=120)


def states_alike(name: str, mesh: Mesh) -> None:
    one = make_model(name, attn_implementation="eager").double()
    ours = parallelize(copy.deepcopy(one), mesh)
    asked = {"output_hidden_states": True, "output_attentions": True, "use_cache": False}
    outs: Any = [model(**make_batch(name), **asked) for model in (ours, one)]
    for key in ("hidden_states", "attentions"):
        for value, expected in zip(outs[0][key], outs[1][key], strict=True):
            torch.testing.assert_close(global_value(value), expected.detach(), equal_nan=True)


def test_a_model_that_was_called_before_records_each_layer_once() -> None:
    one = make_model("llama").double()
    asked: Any = {**make_batch("llama"), "output_hidden_states": True}
    expected = one(**asked).hidden_states
    head, inner = copy.deepcopy(one), copy.deepcopy(one)
    inner.model(asked["input_ids"], output_hidden_states=True)
    for called in (one, head, inner):
        hooks = [len(each._forward_hooks) for each in called.modules()]
        ours = parallelize(called, SIMULATED)
        assert [len(each._forward_hooks) for each in ours.modules()] == hooks
        found = ours(**asked).hidden_states
        torch.testing.assert_close([*found], [*expected])


def states_alike_on_processes() -> None:
    states_alike("llama", worker_mesh((2,), ("tp",)))


# Hooks record those of one model, and the other's layers return them.
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_hidden_states_and_attentions_are_those_of_one_device(name: str) -> None:
    states_alike(name, SIMULATED)


@pytest.mark.fuzz
def test_on_processes_attentions_are_dtensors_of_all_heads(gloo: Gloo) -> None:
    gloo(2).run(states_alike_on_processes, timeout=120)


def test_an_abstract_mesh_says_that_it_generates_nothing() -> None:
    model = make_model("llama", num_layers=1).eval()
    parallelize(model, make_mesh((2,), ("tp",), kind="abstract"))
    with told(SpecError):
        generate(model, "llama", None)
