"""A GGUF file becomes parameters; its sizes are looked at before its weights are read."""

import contextlib
import io
from dataclasses import replace
from pathlib import Path
from unittest import mock

import optree
import pytest
import torch

from examples import llama_generate
from examples.llama import model
from examples.llama.gguf_file import GgufFile
from examples.llama.model import Config
from examples.llama.pretrained import load
from shardmap_torch import SpecError
from tests.examples.llama.support.gguf_writer import Words, write
from tests.support.golden import told
from tests.support.pool import Gloo

CONFIG = Config(
    vocabulary=6,
    width=12,
    layers=2,
    heads=6,
    key_heads=3,
    hidden=9,
    rotary_base=100.0,
    epsilon=0.25,
)
WORDS = Words(["a", "b", "c", "d", "ab", "<end>"], ["a b"], ["<end>"])


def test_every_weight_goes_where_the_model_wants_it(tmp_path: Path) -> None:
    params = model.init(CONFIG, seed=1)
    path = write(tmp_path / "model.gguf", CONFIG, params, WORDS)
    config, loaded, tokenizer = load(path, num_ranks=3)
    assert config.rotary_base == CONFIG.rotary_base
    assert config == CONFIG
    assert optree.tree_all(optree.tree_map(torch.equal, loaded, params))
    assert tokenizer.encode("ab<end>") == [4, 5]
    assert tokenizer.end == 5


def test_ranks_that_cannot_share_are_refused_before_any_weight_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", CONFIG, model.init(CONFIG), WORDS, has_data=False)
    with told(SpecError):
        load(path, num_ranks=2)


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(b"PK\x03\x04" + bytes(20))
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text is compared
        GgufFile(path)
    assert str(error.value) == f"{path} is not a GGUF file of version 2 or 3"


def ask(path: Path) -> tuple[list[int], list[int], str]:
    with (
        mock.patch.object(llama_generate, "find_weights", return_value=path),
        contextlib.redirect_stdout(io.StringIO()) as shown,
    ):
        tokens, expected = llama_generate.main(["Hm?", "--tokens", "6", "--compare"])
    return tokens, expected, shown.getvalue()


def test_three_processes_write_the_unsharded_text_and_rank_0_alone_prints(
    gloo: Gloo, tmp_path: Path
) -> None:
    letters = [chr(code) for code in range(33, 127)]
    special = ["<|im_start|>", "<|im_end|>", "<end>"]
    words = Words([*letters, "\u0120", "\u010a", *special], ["a b"], special)
    config = replace(CONFIG, vocabulary=len(words.words))
    path = write(tmp_path / "model.gguf", config, model.init(config, seed=3), words)
    results = gloo(3).run(ask, path, timeout=200)
    (tokens, expected, shown), *others = results
    assert tokens == expected
    assert "\n\nHm?\n" in shown
    assert "6 of 6 equal" in shown
    assert others == [(tokens, [], "")] * 2
