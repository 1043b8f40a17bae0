"""Llamas as Hugging Face lays them out: `config.json` and `model.safetensors` in a folder.

A safetensors file is the length of a JSON header, that header, and raw bytes.
"""

import json
import math
import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from examples.llama.layout import pack_layer, unpack_layer
from examples.llama.model import Config, Params, check_ranks

SIZES: Final = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "key_heads": "num_key_value_heads",
    "hidden": "intermediate_size",
    "rotary_base": "rope_theta",
    "epsilon": "rms_norm_eps",
}
"""Our name of each size, and Hugging Face's."""

NAMES: Final = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""The same of the parts of a layer."""

DTYPES: Final = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16}


def export(params: Params, config: Config, folder: Path) -> None:
    """Writes global parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        "model.embed_tokens.weight": params["embedding"],
        "model.norm.weight": params["final_norm"],
    }
    for number, layer in enumerate(params["layers"]):
        for part, matrix in unpack_layer(layer).items():
            name = f"model.layers.{number}.{NAMES[part]}.weight"
            tensors[name] = _half_by_half(matrix, config) if part in ("q", "k") else matrix
    write_safetensors(folder / "model.safetensors", tensors)
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        **{name: getattr(config, ours) for ours, name in SIZES.items()},
    }
    (folder / "config.json").write_text(json.dumps(described, indent=2))


def load(folder: Path, num_ranks: int = 1) -> tuple[Config, Params]:
    """Reads global parameters.

    Raises:
        SpecError: so many ranks cannot share them; said before any weight is read.
    """
    described = json.loads((folder / "config.json").read_text())
    config = Config(**{ours: described[name] for ours, name in SIZES.items()})
    check_ranks(config, num_ranks)
    tensors = read_safetensors(folder / "model.safetensors")

    def read(number: int, part: str) -> Tensor:
        matrix = tensors[f"model.layers.{number}.{NAMES[part]}.weight"]
        return _in_pairs(matrix, config) if part in ("q", "k") else matrix

    return config, {
        "embedding": tensors["model.embed_tokens.weight"],
        "layers": [pack_layer(partial(read, number), config) for number in range(config.layers)],
        "final_norm": tensors["model.norm.weight"],
    }


def _half_by_half(matrix: Tensor, config: Config) -> Tensor:
    """Reorders rows of heads [h*k, d]: rotary turns neighbours here, row i and i + k/2 there."""
    heads = matrix.unflatten(0, (-1, config.head_width // 2, 2))
    rows: Tensor = heads.transpose(1, 2).flatten(0, 2)
    return rows


def _in_pairs(matrix: Tensor, config: Config) -> Tensor:
    """Undoes `_half_by_half`."""
    heads = matrix.unflatten(0, (-1, 2, config.head_width // 2))
    rows: Tensor = heads.transpose(1, 2).flatten(0, 2)
    return rows


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors by name."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        header[name] = {"dtype": names[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(
                tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            )


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Reads tensors by name."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        data = bytearray(file.read())
    tensors = {}
    for name, entry in header.items():
        dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
        count, start = math.prod(shape), entry["data_offsets"][0]
        tensors[name] = torch.frombuffer(data, dtype=dtype, count=count, offset=start).view(shape)
    return tensors
