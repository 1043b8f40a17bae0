"""Fine-tuning over "dp" and "tp" has one device's losses; what is saved loads anywhere."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import optree
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from examples import llama_finetune
from examples.gpt.data import load_text
from examples.llama import hugging_face, model, plain
from examples.llama.finetune import AXES, initial, make_optimizer, train, train_on_one_device
from examples.llama.hugging_face import read_safetensors
from examples.llama.model import Config, Params
from examples.llama_finetune import Results, shorten
from shardmap_torch import SpecError, make_mesh
from tests.examples.llama.support.gguf_writer import Words, write
from tests.support.fuzzing import sized
from tests.support.pool import Gloo

CONFIG = Config(
    vocabulary=24,
    width=16,
    layers=1,
    heads=4,
    key_heads=2,
    hidden=12,
    rotary_base=100.0,
    epsilon=1e-5,
)
RATE = 1e-2
# Ranks add the same float64 numbers in another order, and AdamW divides small ones by small ones.
EXACT = 1e-9


def params(config: Config = CONFIG) -> Params:
    return model.init(config, seed=3, dtype=torch.float64)


def batches(num: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(CONFIG.vocabulary, (4, 7), generator=generator) for _ in range(num)]


def losses_on(sizes: tuple[int, int], simulate: Any = "auto") -> list[float]:
    mesh = make_mesh(sizes, AXES, simulate=simulate)
    optimizer = make_optimizer(mesh, CONFIG, params(), RATE)
    state = initial(mesh, CONFIG, params(), optimizer)
    return train(mesh, CONFIG, optimizer, state, batches(3))[1]


def expected_losses() -> list[float]:
    return train_on_one_device(CONFIG, params(), batches(3), RATE)[1]


def test_losses_on_simulated_ranks_are_those_of_one_device() -> None:
    expected = expected_losses()
    assert losses_on((2, 2), "ranks") == pytest.approx(expected, rel=EXACT)
    assert expected[0] != expected[-1]


def test_losses_on_processes_are_those_of_one_device(gloo: Gloo) -> None:
    sizes = sized((1, 2), (2, 2))
    for losses in gloo(sizes[0] * sizes[1]).run(losses_on, sizes, timeout=240):
        assert losses == pytest.approx(expected_losses(), rel=EXACT)


def finetune(folder: Path, *flags: str) -> Results:
    """Runs the program with a tiny model, which reads bytes."""
    text = load_text().decode()[:1000]
    special = ["<end>"]
    words = sorted({sign for sign in text.replace(" ", "\u0120").replace("\n", "\u010a")})
    words += ["-"] * (-(len(words) + 1) % 6) + special
    config = replace(CONFIG, vocabulary=len(words), heads=6, key_heads=3, width=12, layers=2)
    weights = model.init(config, seed=3)
    path = write(folder / "model.gguf", config, weights, Words(words, [], special))
    sizes = "--text 1000 --length 6 --dtype float64 --rate 1e-2".split()
    with mock.patch.object(llama_finetune, "find_weights", return_value=path):
        return llama_finetune.main([*sizes, *flags, "--out", str(folder / "out")])


def test_the_program_has_the_curve_of_one_device_and_its_files_load_on_other_meshes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = finetune(tmp_path, "--steps", "3", "--layers", "1", "--compare")
    assert len(found.losses) == 3
    assert found.losses == pytest.approx(found.expected, rel=EXACT)
    first, *others = found.held_out
    assert others == pytest.approx([first] * 2, rel=1e-12)
    shown = capsys.readouterr().out
    assert "simulated mesh (dp=2, tp=3), Config(vocabulary=" in shown
    assert "loaded on a simulated mesh (dp=6, tp=1)" in shown
    assert "as on one device: largest difference " in shown
    described = json.loads((tmp_path / "out" / "hugging_face" / "config.json").read_text())
    assert described["num_hidden_layers"] == 1


def test_a_shorter_model_keeps_the_first_layers() -> None:
    long = replace(CONFIG, layers=3)
    config, kept = shorten(long, params(long), 1)
    assert config == CONFIG
    assert len(kept["layers"]) == 1
    assert kept["layers"][0]["down"].equal(params(long)["layers"][0]["down"])
    assert shorten(long, params(long), None)[0] == long


def hugging_face_logits(tensors: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """A Llama as Hugging Face's: weights [output, input], heads turned half by half."""
    head_width, at = CONFIG.head_width, torch.arange(tokens.shape[1], dtype=torch.float64)
    at_even = torch.arange(0, head_width, 2, dtype=torch.float64)
    frequencies = CONFIG.rotary_base ** (-at_even / head_width)
    angles = torch.outer(at, frequencies).repeat(1, 2)

    def turned(x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-high, low], -1) * angles.sin()

    def linear(x: Tensor, name: str) -> Tensor:
        return functional.linear(x, tensors[f"{name}.weight"])

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], tensors[f"{name}.weight"], CONFIG.epsilon)

    x = functional.embedding(tokens, tensors["model.embed_tokens.weight"])
    for number in range(CONFIG.layers):
        at_layer = f"model.layers.{number}"
        h = norm(x, f"{at_layer}.input_layernorm")
        q, k, v = (
            linear(h, f"{at_layer}.self_attn.{n}_proj")
            .unflatten(-1, (-1, head_width))
            .transpose(1, 2)
            for n in "qkv"
        )
        y = functional.scaled_dot_product_attention(
            turned(q), turned(k), v, is_causal=True, enable_gqa=True
        )
        x = x + linear(y.transpose(1, 2).flatten(2), f"{at_layer}.self_attn.o_proj")
        h = norm(x, f"{at_layer}.post_attention_layernorm")
        gate, up = (linear(h, f"{at_layer}.mlp.{part}_proj") for part in ("gate", "up"))
        x = x + linear(functional.silu(gate) * up, f"{at_layer}.mlp.down_proj")
    return linear(norm(x, "model.norm"), "model.embed_tokens")


def test_an_exported_model_is_what_hugging_face_calls_a_llama(tmp_path: Path) -> None:
    hugging_face.export(params(), CONFIG, tmp_path)
    tokens = batches(1)[0]
    found = hugging_face_logits(read_safetensors(tmp_path / "model.safetensors"), tokens)
    expected, _ = plain.apply(params(), tokens, None, CONFIG)
    torch.testing.assert_close(found[:, -1], expected, rtol=1e-12, atol=1e-12)
    config, loaded = hugging_face.load(tmp_path, num_ranks=2)
    assert config == CONFIG
    assert optree.tree_all(optree.tree_map(torch.equal, loaded, params()))


def test_ranks_that_cannot_share_an_exported_model_are_refused(tmp_path: Path) -> None:
    hugging_face.export(params(), CONFIG, tmp_path)
    (tmp_path / "model.safetensors").unlink()  # not even read
    with pytest.raises(SpecError, match="3 ranks of 'tp' cannot share this model evenly"):
        hugging_face.load(tmp_path, num_ranks=3)
