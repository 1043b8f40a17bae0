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

_EXPERTS: Final = {
    **{"moe_intermediate_size": 16, "num_experts_per_tok": 2},
    "experts_implementation": "batched_mm",  # by default they compute in 32 bits at most
}
_STACKS: Final = {
    **{"vocab_size": 64, "d_model": 32, "dropout": 0.0, "attention_dropout": 0.0},
    **{f"{stack}_attention_heads": 4 for stack in ("encoder", "decoder")},
    **{f"{stack}_ffn_dim": 64 for stack in ("encoder", "decoder")},
    **{f"{stack}_layers": 1 for stack in ("encoder", "decoder")},
}
OTHERS: Final[Mapping[str, tuple[str, str, dict[str, Any]]]] = {
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**GROUPED, "pad_token_id": 0}),
    "apertus": ("ApertusForCausalLM", "ApertusConfig", {**GROUPED, "pad_token_id": 0}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", GROUPED),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**GROUPED, **_EXPERTS, "head_dim": 8, "num_experts": 4},
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **{**GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
            "experts_implementation": "batched_mm",
        },
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **{**SIZES, **_EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 4},
            **{"n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16},
            **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
            "first_k_dense_replace": 1,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        {
            **{**SIZES, **_EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 4},
            **{"q_lora_rank": 16, "kv_lora_rank": 16, "first_k_dense_replace": 1},
            **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
        },
    ),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            **{"vocab_size": 64, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64},
            **{"num_attention_heads": 4, "max_position_embeddings": 64, "dropout": 0.0},
        },
    ),
    "falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        {
            **{"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_kv_heads": 2},
            **{"new_decoder_architecture": True, "hidden_dropout": 0.0, "attention_dropout": 0.0},
        },
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {
            **{**GROUPED, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
            "tie_word_embeddings": False,
        },
    ),
    "bamba": (
        "BambaForCausalLM",
        "BambaConfig",
        {
            **{**GROUPED, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16},
            **{"mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4},
        },
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", _STACKS),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", {**SIZES, **NO_DROPOUT}),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **{**_STACKS, "num_mel_bins": 8, "max_source_positions": 8},
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
            "decoder_start_token_id": 1,
        },
    ),
}
"""Models that are tried once, with gradients: as those of users that we have not thought of."""

DECODERS: Final = [name for name in CONFIGS if name not in ("bert", "vit")]


def make_model(name: str, num_layers: int = 2, **changes: Any) -> Any:
    model, config, sizes = {**CONFIGS, **OTHERS}[name]
    layers = {"gpt2": "n_layer", "t5": "num_layers"}.get(name, "num_hidden_layers")
    own = {**sizes, **({} if sizes is _STACKS else {layers: num_layers}), **changes}
    torch.manual_seed(0)
    make: Callable[..., Any] = getattr(hf, model)
    return make(getattr(hf, config)(**own))


def make_batch(name: str, seed: int = 0) -> dict[str, Tensor]:
    """Makes inputs with padding in front, and labels."""
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        pixels = torch.randn(2, 3, 16, 16, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels, "labels": torch.tensor([1, 3])}
    ids = torch.randint(3, 64, (2, 8), generator=generator)
    if name == "whisper":
        sounds = torch.randn(2, 8, 16, generator=generator, dtype=torch.float64)
        return {"input_features": sounds, "labels": ids}
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}
