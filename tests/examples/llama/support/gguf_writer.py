"""Writes GGUF files of random Llamas, float32, as the pretrained model's is laid out."""

import struct
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from examples.llama.model import Config, Params


@dataclass(frozen=True)
class Words:
    """Words that the tokenizer of a file knows; the last one ends a text."""

    words: list[str]
    merges: list[str]
    special: list[str]


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def field(name: str, code: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", code) + value


def strings(texts: list[str]) -> bytes:
    return struct.pack("<IQ", 8, len(texts)) + b"".join(map(string, texts))


def header_fields(config: Config, words: Words) -> list[bytes]:
    types = [3 if word in words.special else 1 for word in words.words]
    packed = struct.pack(f"<IQ{len(types)}i", 5, len(types), *types)
    numbers = {
        "llama.embedding_length": config.width,
        "llama.block_count": config.layers,
        "llama.attention.head_count": config.heads,
        "llama.attention.head_count_kv": config.key_heads,
        "llama.feed_forward_length": config.hidden,
        "tokenizer.ggml.eos_token_id": len(words.words) - 1,
    }
    return [
        *(field(name, 4, struct.pack("<I", number)) for name, number in numbers.items()),
        field("llama.rope.freq_base", 6, struct.pack("<f", config.rotary_base)),
        field("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", config.epsilon)),
        field("tokenizer.ggml.tokens", 9, strings(words.words)),
        field("tokenizer.ggml.merges", 9, strings(words.merges)),
        field("tokenizer.ggml.token_type", 9, packed),
    ]


def weights(params: Params) -> dict[str, Tensor]:
    """Matrices [output, input], as files have them."""
    found = {"token_embd": params["embedding"], "output_norm": params["final_norm"]}
    for number, layer in enumerate(params["layers"]):
        qkv, (gate, up) = layer["qkv"], layer["gate_up"].unbind(2)
        matrices = {
            "attn_q": qkv[..., :-2, :].flatten(1).T,
            "attn_k": qkv[..., -2, :].flatten(1).T,
            "attn_v": qkv[..., -1, :].flatten(1).T,
            "attn_output": layer["out"].flatten(0, 2).T,
            "ffn_gate": gate.T,
            "ffn_up": up.T,
            "ffn_down": layer["down"].T,
            "attn_norm": layer["attention_norm"],
            "ffn_norm": layer["mlp_norm"],
        }
        found |= {f"blk.{number}.{name}": matrix for name, matrix in matrices.items()}
    return found


def write(
    path: Path, config: Config, params: Params, words: Words, *, has_data: bool = True
) -> Path:
    """Writes a file of float32 tensors; without data it ends where they would begin."""
    entries, data = b"", b""
    for name, tensor in weights(params).items():
        sizes = tuple(reversed(tensor.shape))
        entries += string(f"{name}.weight") + struct.pack("<I", len(sizes))
        entries += struct.pack(f"<{len(sizes)}QIQ", *sizes, 0, len(data))
        data += tensor.contiguous().numpy().tobytes()
        data += bytes(-len(data) % 32)
    fields = header_fields(config, words)
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(weights(params)), len(fields))
    header += b"".join(fields) + entries
    header += bytes(-len(header) % 32)
    path.write_bytes(header + data if has_data else header)
    return path
