"""Plans that need not be written: those that models carry, and ours for some that carry none."""

from collections.abc import Mapping
from typing import Any, Final

from torch import nn

from shardmap_torch.errors import SpecError
from shardmap_torch.parallel.plan import Style
from shardmap_torch.parallel.styles import LocalAttributes, PackedColwiseParallel

_GPT2: Final[Mapping[str, Style]] = {
    "wte": "embedding_rowwise",
    "h.*.attn": LocalAttributes("split_size"),
    "h.*.attn.c_attn": PackedColwiseParallel(parts=3),
    "h.*.attn.c_proj": "rowwise",
    "h.*.mlp.c_fc": "colwise",
    "h.*.mlp.c_proj": "rowwise",
}

_BERT: Final[Mapping[str, Style]] = {
    "embeddings.word_embeddings": "embedding_rowwise",
    "encoder.layer.*.attention.self.[qkv]*": "colwise",
    "encoder.layer.*.attention.output.dense": "rowwise",
    "encoder.layer.*.intermediate.dense": "colwise",
    "encoder.layer.*.output.dense": "rowwise",
}

_T5: Final[Mapping[str, Style]] = {
    "shared": "embedding_rowwise",
    "*.embed_tokens": "embedding_rowwise",
    "*.block.*.layer.*.*Attention": LocalAttributes("n_heads"),
    "*.block.*.layer.*.*Attention.[qkv]": "colwise",
    "*.block.*.layer.*.*Attention.o": "rowwise",
    "*.block.*.layer.*.*Attention.relative_attention_bias": "colwise",
    "*.block.*.layer.*.DenseReluDense.wi*": "colwise",
    "*.block.*.layer.*.DenseReluDense.wo": "rowwise",
}

_VIT: Final[Mapping[str, Style]] = {
    "layers.*.attention.[qkv]_proj": "colwise",
    "layers.*.attention.o_proj": "rowwise",
    "layers.*.mlp.fc1": "colwise",
    "layers.*.mlp.fc2": "rowwise",
}

_BART: Final[Mapping[str, Style]] = {
    "shared": "embedding_rowwise",
    "*.embed_tokens": "embedding_rowwise",
    **{
        f"{stack}layers.*.{name}": style
        for stack in ("encoder.", "decoder.", "*.encoder.")
        for name, style in (
            ("*attn", LocalAttributes("num_heads")),
            ("*attn.[qkv]_proj", "colwise"),
            ("*attn.out_proj", "rowwise"),
            ("fc1", "colwise"),
            ("fc2", "rowwise"),
            ("mlp.fc1", "colwise"),
            ("mlp.fc2", "rowwise"),
        )
    },
}
"""Encoders and decoders with the names that fairseq gave their parts."""

_BLOOM: Final[Mapping[str, Style]] = {
    "word_embeddings": "embedding_rowwise",
    "h.*.self_attention": LocalAttributes("num_heads", heads={"alibi": 0}),
    "h.*.self_attention.query_key_value": "colwise",
    "h.*.self_attention.dense": "rowwise",
    "h.*.mlp.dense_h_to_4h": "colwise",
    "h.*.mlp.dense_4h_to_h": "rowwise",
}

_FALCON: Final[Mapping[str, Style]] = {
    **_BLOOM,
    "h.*.self_attention": LocalAttributes(
        "num_heads", "num_kv_heads", heads={"alibi": 0, "attention_mask": 1}
    ),
}

DEFAULTS: Final[Mapping[str, tuple[Mapping[str, Style], Mapping[str, Style]]]] = {
    kind: (base, {head: "colwise_gather_output"} if head else {})
    for kinds, base, head in (
        ("gpt2", _GPT2, "lm_head"),
        ("bert", _BERT, "cls.predictions.decoder"),
        ("roberta xlm-roberta camembert", _BERT, "lm_head.decoder"),
        ("opt bart mbart", _BART, "lm_head"),
        ("whisper", _BART, "proj_out"),
        ("clip", _BART, ""),
        ("bloom", _BLOOM, "lm_head"),
        ("falcon", _FALCON, "lm_head"),
        ("t5", _T5, "lm_head"),
        ("vit", _VIT, ""),
    )
    for kind in kinds.split()
}
"""Plans by the type of a model: of its base, and of heads on it."""


def carried_plan(module: nn.Module) -> dict[str, Style]:
    """Returns the plan that a model of transformers carries, or our own for its type.

    Raises:
        SpecError: there is neither.
    """
    plan: dict[str, Style] = {}
    for path, target in _carriers(module):
        plan |= {f"{path}.{key}" if path else key: style for key, style in _of(target).items()}
    if plan:
        return plan
    raise SpecError(
        f"parallelize: {type(module).__name__} carries no plan, and there is none for its type; "
        f"there is one for {', '.join(map(repr, DEFAULTS))}.\n"
        'Fix: pass a plan, as {"layers.*.up": "colwise", "layers.*.down": "rowwise"}.'
    )


def _carriers(module: nn.Module, path: str = "") -> list[tuple[str, nn.Module]]:
    """Returns the outermost modules that have a plan, with their paths."""
    if _of(module):
        return [(path, module)]
    below = [
        _carriers(child, f"{path}.{name}" if path else name)
        for name, child in module.named_children()
    ]
    return [each for found in below for each in found]


def _of(module: Any) -> Mapping[str, Style]:
    own = {*vars(module), *dir(type(module))}  # peft's wrappers hand on others' attributes
    plan = module._tp_plan if "_tp_plan" in own else None
    if plan:
        return dict(plan)
    config = getattr(module, "config", None)
    base, heads = DEFAULTS.get(getattr(config, "model_type", ""), ({}, {}))
    prefix = getattr(module, "base_model_prefix", "")
    if "base_model_prefix" not in own:
        return {}
    if hasattr(module, prefix):
        base = {f"{prefix}.{key}": style for key, style in base.items()}
    return {**base, **heads}
