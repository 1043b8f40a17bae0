"""A Llama of transformers as it is: three steps of training and generation, on several ranks.

$ python examples/hf_llama.py                              # two simulated ranks, in this process
$ torchrun --nproc-per-node 2 examples/hf_llama.py         # two processes

Both print the numbers of one device.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from shardmap_torch import Mesh, make_mesh, parallelize
from shardmap_torch.parallel import parallel_summary


def make_model() -> Any:
    """Makes a small Llama with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def train(model: Any, text: Tensor) -> list[float]:
    """Trains on one batch and returns the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=text, labels=text).loss
        loss.backward()
        optimizer.step()
        losses.append(round(loss.item(), 4))
    return losses


def generate(model: Any, text: Tensor) -> list[int]:
    """Goes on with a text, greedily."""
    out = model.eval().generate(text, max_new_tokens=8, do_sample=False)
    found: list[int] = out[0, text.shape[1] :].tolist()
    return found


def run(mesh: Mesh) -> tuple[Any, Any]:
    """Returns losses and tokens of the mesh, and of one device."""
    one = make_model()
    model = parallelize(copy.deepcopy(one), mesh)
    if mesh.rank == 0:
        print(parallel_summary(model))
    text = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(0))
    ours, expected = ((train(each, text), generate(each, text[:1])) for each in (model, one))
    return ours, expected


if __name__ == "__main__":
    mesh = make_mesh((2,), ("tp",))
    ours, expected = run(mesh)
    if mesh.rank == 0:
        print(f"{mesh}: losses {ours[0]}, tokens {ours[1]}")
        print(f"as on one device: {ours == expected}")
