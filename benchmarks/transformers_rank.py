"""One of two processes that train a model of transformers, by us and by torch."""

import copy
import json
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from benchmarks.quiet import joined
from benchmarks.timing import compare
from shardmap_torch import make_mesh, parallelize
from shardmap_torch.parallel.carried import carried_plan
from shardmap_torch.parallel.plan import Style
from shardmap_torch.parallel.styles import LocalAttributes, ReplicatedParallel
from shardmap_torch.parallel.words import WORDS
from tests.parallel.support.transformers_models import CONFIGS, make_batch

ROUNDS: Final = 15
_WIDTH: Final = 256
_SIZES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), _WIDTH),
    **dict.fromkeys(("intermediate_size", "d_ff"), 4 * _WIDTH),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    **{"num_key_value_heads": 4, "head_dim": 32, "d_kv": 32, "vocab_size": 1024},
    **{"sliding_window": 64, "image_size": 48},
}
"""Sizes in place of those that tests have, where a configuration has them."""


def make(name: str) -> tuple[Any, dict[str, Tensor]]:
    """Makes a model and its inputs."""
    model, config, sizes = CONFIGS[name]
    own = {key: _SIZES.get(key, value) for key, value in sizes.items()}
    layers = {"gpt2": "n_layer", "t5": "num_layers"}.get(name, "num_hidden_layers")
    torch.manual_seed(0)
    found: Any = getattr(hf, model)(getattr(hf, config)(**own, **{layers: 2}))
    if name == "vit":
        return found, {"pixel_values": torch.randn(4, 3, 48, 48), "labels": torch.arange(4)}
    ids = torch.randint(3, 1024, (4, 128), generator=torch.Generator().manual_seed(0))
    mask = make_batch(name)["attention_mask"].new_ones(4, 128)
    mask[0, :16] = 0
    return found, {"input_ids": ids, "attention_mask": mask, "labels": ids}


def training(model: Any, batch: Mapping[str, Tensor]) -> Callable[[], object]:
    """Returns a call of the model with its backward."""

    def call() -> Tensor:
        loss: Tensor = model(**batch).loss
        loss.backward()
        return loss.detach()

    return call


def by_torch(model: Any, mesh: Any) -> None:
    """Parallelizes a model by the plan that it carries.

    Raises:
        NotImplementedError: it has a style that torch does not have.
    """
    plan: dict[str, ParallelStyle] = {}
    for key, style in carried_plan(model).items():
        found = _as_torchs(model, key, style, mesh.size())
        if found is not None:
            plan[key] = found
    parallelize_module(model, mesh, plan)


def _as_torchs(model: nn.Module, key: str, style: Style, num_ranks: int) -> ParallelStyle | None:
    found = style if isinstance(style, ParallelStyle) else WORDS[style].style
    if isinstance(found, LocalAttributes):  # what the user of torch divides by hand
        for path, module in model.named_modules():
            if path.endswith("Attention"):
                for name in found.names:
                    setattr(module, name, getattr(module, name) // num_ranks)
        return None
    if type(found) in (ColwiseParallel, RowwiseParallel):
        return found
    if isinstance(found, ReplicatedParallel):
        return None
    raise NotImplementedError(f"no {type(found).__name__}")


def memory(model: nn.Module) -> int:
    """Returns the bytes of this rank's parameters."""
    own = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return sum(x.numel() * x.element_size() for x in own)


def main() -> None:
    warnings.simplefilter("ignore")
    with joined() as (rank, options):
        mesh = make_mesh((2,), ("tp",))
        one, batch = make(options["name"])
        models = {"ours": parallelize(copy.deepcopy(one), mesh)}
        why = ""
        try:
            theirs = copy.deepcopy(one)
            by_torch(theirs, mesh.device_mesh)
            loss, expected = training(theirs, batch)(), training(one, batch)()
            torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
            models["torch"] = theirs
        except (NotImplementedError, RuntimeError, AssertionError, ValueError) as error:
            why = f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
        calls = {key: training(model, batch) for key, model in models.items()}
        seconds = compare(calls, ROUNDS)
        held = {key: memory(model) for key, model in {"one": one, **models}.items()}
        if rank == 0:
            print(json.dumps({"seconds": seconds, "memory": held, "why": why}), flush=True)
        dist.barrier()


if __name__ == "__main__":
    main()
