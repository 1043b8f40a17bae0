"""Tiny models of transformers with random weights, and batches for them."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import transformers as hf
from torch import Tensor

hf.logging.set_verbosity_error()  # type: ignore[no-untyped-call]

SIZES: Final = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED: Final = {**SIZES, "num_key_value_heads": 2}
NO_DROPOUT: Final = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
NO_GPT2_DROPOUT: Final = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

CONFIGS: Final[Mapping[str, tuple[str, str, dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 8}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 8}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**GROUPED, "head_dim": 8}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SIZES),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 64, "n_embd": 32, "n_head": 4, "n_positions": 64, **NO_GPT2_DROPOUT},
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 4}),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            **{"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4},
            **{"dropout_rate": 0.0, "decoder_start_token_id": 0},
        },
    ),
    "bert": ("BertForMaskedLM", "BertConfig", {**SIZES, **NO_DROPOUT}),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {
            **{"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4},
            **{"image_size": 16, "patch_size": 4, "num_labels": 8, **NO_DROPOUT},
        },
    ),
}
"""The class of a model, that of its configuration, and arguments of this."""

DECODERS: Final = [name for name in CONFIGS if name not in ("bert", "vit")]


def make_model(name: str, num_layers: int = 2, **changes: Any) -> Any:
    model, config, sizes = CONFIGS[name]
    layers = {"gpt2": "n_layer", "t5": "num_layers"}.get(name, "num_hidden_layers")
    torch.manual_seed(0)
    make: Callable[..., Any] = getattr(hf, model)
    return make(getattr(hf, config)(**sizes, **{layers: num_layers}, **changes))


def make_batch(name: str, seed: int = 0) -> dict[str, Tensor]:
    """Makes inputs with padding in front, and labels."""
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        pixels = torch.randn(2, 3, 16, 16, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels, "labels": torch.tensor([1, 3])}
    ids = torch.randint(3, 64, (2, 8), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}
