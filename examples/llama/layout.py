"""A layer's matrices [output, input], as files have them, and side by side, as the model has them.

d model width   g key heads   r query heads for each   k head width   f hidden width
"""

from collections.abc import Callable

import torch
from torch import Tensor

from examples.llama.model import Config


def pack_layer(read: Callable[[str], Tensor], config: Config) -> dict[str, Tensor]:
    """Turns matrices around, and puts what one rank needs side by side.

    `read` gives the parts that `unpack_layer` names.
    """
    d, f, k = config.width, config.hidden, config.head_width
    g, r = config.key_heads, config.heads // config.key_heads
    heads = [read(part).T.reshape(d, g, count, k) for part, count in (("q", r), ("k", 1), ("v", 1))]
    return {
        "attention_norm": read("attention_norm"),
        "qkv": torch.cat(heads, 2),
        "out": read("out").T.reshape(g, r, k, d).contiguous(),
        "mlp_norm": read("mlp_norm"),
        "gate_up": torch.stack([read(part).T.reshape(d, f) for part in ("gate", "up")], 2),
        "down": read("down").T.contiguous(),
    }


def unpack_layer(layer: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undoes `pack_layer`: norms [d] and matrices [output, input] by name."""
    qkv, (gate, up) = layer["qkv"], layer["gate_up"].unbind(2)
    return {
        "attention_norm": layer["attention_norm"],
        "q": qkv[..., :-2, :].flatten(1).T,
        "k": qkv[..., -2, :].flatten(1).T,
        "v": qkv[..., -1, :].flatten(1).T,
        "out": layer["out"].flatten(0, 2).T,
        "mlp_norm": layer["mlp_norm"],
        "gate": gate.T,
        "up": up.T,
        "down": layer["down"].T,
    }
