"""A tiny random Llama, sharded, writes what the plain one writes; loading and text as well."""

from collections.abc import Iterator
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

from examples import llama_generate
from examples.llama import model, plain
from examples.llama.generate import greedy, greedy_on_one_device, sharded_step
from examples.llama.model import Config, Params
from examples.llama.pretrained import INSTALL, MissingModelError, find_weights
from examples.llama.tokenizer import Tokenizer
from shardmap_torch import Mesh, SpecError, device_put, explain, full, make_mesh, trace
from tests.support.golden import told

CONFIG = Config(
    vocabulary=24,
    width=36,
    layers=2,
    heads=9,
    key_heads=3,
    hidden=12,
    rotary_base=100.0,
    epsilon=1e-5,
)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def params() -> Params:
    return model.init(CONFIG, seed=3, dtype=torch.float64)


def sharded_text(mesh: Mesh, num: int) -> list[int]:
    placed = device_put(params(), mesh, model.specs(CONFIG))
    return list(greedy(mesh, placed, CONFIG, PROMPT, num))


def logits(mesh: Mesh, chunks: list[list[int]]) -> Tensor:
    """After the last of some tokens that come in several calls."""
    step = sharded_step(mesh, CONFIG)
    placed = device_put(params(), mesh, model.specs(CONFIG))
    cache = device_put(model.empty_cache(CONFIG, 1, 12, torch.float64), mesh, model.CACHE)
    position, found = 0, torch.empty(0)
    with torch.no_grad():
        for chunk in chunks:
            found, cache = step(placed, torch.tensor([chunk]), cache, torch.tensor(position))
            position += len(chunk)
    whole: Tensor = full(found)
    return whole


def plain_logits() -> Tensor:
    return plain.apply(params(), torch.tensor([PROMPT]), None, CONFIG)[0]


@pytest.mark.sample(1, "ranks")
@pytest.mark.parametrize("simulate", ["vmap", "ranks"])
def test_prefill_and_decode_give_the_logits_of_one_device(simulate: Any) -> None:
    mesh = make_mesh((3,), ("tp",), simulate=simulate)
    for chunks in ([PROMPT], [PROMPT[:5], PROMPT[5:]], [PROMPT[:-2], PROMPT[-2:-1], PROMPT[-1:]]):
        torch.testing.assert_close(logits(mesh, chunks), plain_logits(), rtol=1e-10, atol=1e-10)


def test_greedy_text_is_that_of_one_device() -> None:
    wanted = list(greedy_on_one_device(params(), CONFIG, PROMPT, 20))
    assert len(set(wanted)) > 3  # text that repeats one token would show little
    assert sharded_text(make_mesh((3,), ("tp",)), 20) == wanted


def test_a_layer_sends_two_all_reduces_and_the_model_is_one_device_program() -> None:
    mesh = make_mesh((3,), ("tp",), kind="abstract")
    step = sharded_step(mesh, CONFIG)
    cache = model.empty_cache(CONFIG, 1, 12, torch.float64)
    arguments = params(), torch.tensor([PROMPT]), cache, torch.tensor(0)
    with torch.no_grad():
        program = trace(step, *arguments)
        sent = [e.collective.name for e in program.collectives if e.collective and e.sent]
        report = str(explain(step, *arguments))
    # And one for the embedding, and the gathered logits.
    assert sent == ["all_reduce"] * (1 + 2 * CONFIG.layers) + ["all_gather"]
    assert "global: the same program on one device, if these keep what they promise:" in report
    assert report.count("local_region") == 1  # the vocabulary's


def test_two_ranks_cannot_share_three_key_heads_and_the_error_says_so() -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    with told(SpecError):
        device_put(params(), mesh, model.specs(CONFIG))


def test_sizes_that_ranks_cannot_share_are_named_once_with_the_numbers_of_ranks_that_can() -> None:
    with told(SpecError):
        model.check_ranks(CONFIG, 2)
    model.check_ranks(CONFIG, 3)


def test_every_leaf_has_a_spec() -> None:
    shapes = optree.tree_structure(params())
    assert optree.tree_structure(model.specs(CONFIG)) == shapes


def tokenizer() -> Tokenizer:
    words = [
        "<|im_start|>",
        "<|im_end|>",
        *"abcdehilnorst1",
        "Ġ",
        "he",
        "ll",
        "hell",
        "Ġhell",
        "Ã",
        "©",
    ]
    return Tokenizer(words, ["h e", "l l", "he ll", "Ġ hell"], words[:2], 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hello hello", ["hell", "o", "Ġhell", "o"]),
        ("11", ["1", "1"]),
        ("<|im_start|>a<|im_end|>", ["<|im_start|>", "a", "<|im_end|>"]),
        ("é", ["Ã", "©"]),
    ],
)
def test_text_becomes_the_tokens_that_the_merges_say_and_back(text: str, words: list[str]) -> None:
    tokens = tokenizer()
    assert [tokens._words[token] for token in tokens.encode(text)] == words
    if "<" not in text:
        assert "".join(tokens.stream(tokens.encode(text))) == text


def test_a_stream_ends_at_the_end_token_and_waits_for_whole_characters() -> None:
    tokens = tokenizer()
    first, second = tokens.encode("é")
    found: Iterator[str] = tokens.stream([first, second, 1, first])
    assert list(found) == ["", "é"]


def test_without_the_model_the_program_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingModelError) as error:
        llama_generate.main([])
    assert str(error.value) == f"SmolLM2-135M is not installed: {INSTALL}"


def installed() -> bool:
    try:
        find_weights()
    except MissingModelError:
        return False
    return True


@pytest.mark.skipif(not installed(), reason=f"needs the pretrained model: {INSTALL}")
def test_smollm2_writes_50_tokens_as_unsharded(capsys: pytest.CaptureFixture[str]) -> None:
    tokens, wanted = llama_generate.main(["Tell me a long story about a cat.", "--compare"])
    assert len(tokens) == 50
    assert tokens == wanted
    assert "cat" in capsys.readouterr().out
