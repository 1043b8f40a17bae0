"""Greedy text of a sharded Llama: one call for the prompt, one for each token after it."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from examples.llama import model, plain
from examples.llama.model import Cache, Config, Params
from shardmap_torch import Mesh, P, device_put, full, shard_map

Step = Callable[[Params, Tensor, Cache, Tensor], tuple[Tensor, Cache]]


def sharded_step(mesh: Mesh, config: Config) -> Step:
    """Tokens [b, t] at a position -> logits [b, v] after the last, equal on all ranks; the cache.

    The position is a tensor: a number would be another program for each token.
    """
    return shard_map(
        partial(model.apply, config=config),
        mesh=mesh,
        in_specs=(model.specs(config), P(), model.CACHE, P()),
        out_specs=(P(), model.CACHE),
        check="global",
        replay=True,
    )


def greedy(
    mesh: Mesh, params: Params, config: Config, prompt: list[int], num: int
) -> Iterator[int]:
    """Yields `num` tokens, each the most likely one after those before it."""
    step, dtype = sharded_step(mesh, config), params["final_norm"].dtype
    cache = model.empty_cache(config, 1, len(prompt) + num, dtype)
    cache = device_put(cache, mesh, model.CACHE)
    tokens, position = torch.tensor([prompt]), 0
    with torch.no_grad():
        for _ in range(num):
            logits, cache = step(params, tokens, cache, torch.tensor(position))
            position += tokens.shape[1]
            tokens = full(logits).argmax(1, keepdim=True)
            yield int(tokens)


def greedy_on_one_device(
    params: Params, config: Config, prompt: list[int], num: int
) -> Iterator[int]:
    """Generates greedily by the plain model, whose parameters are global."""
    tokens, cache = torch.tensor([prompt]), None
    with torch.no_grad():
        for _ in range(num):
            logits, cache = plain.apply(params, tokens, cache, config)
            tokens = logits.argmax(1, keepdim=True)
            yield int(tokens)
