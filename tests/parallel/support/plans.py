"""Plans that several tests of parallel modules share."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

R, S0, S1, LAST, SUM = Replicate(), Shard(0), Shard(1), Shard(-1), Partial()


def linear() -> nn.Module:
    return nn.Linear(8, 16).double()


def embedding() -> nn.Module:
    return nn.Embedding(12, 8).double()


def style(name: str, **arguments: Any) -> Callable[[Any], Any]:
    """Makes the plan of one style, of the package that is passed to it."""
    return lambda package: getattr(package, name)(**arguments)


def mlp_plan(package: Any) -> Any:
    return {"0": package.ColwiseParallel(), "2": package.RowwiseParallel()}


def encoder_plan(package: Any) -> Any:
    return {"linear1": package.ColwiseParallel(), "linear2": package.RowwiseParallel()}


def llama_plan(package: Any) -> Any:
    column, row = package.ColwiseParallel, package.RowwiseParallel
    return {
        "tok_embeddings": row(input_layouts=R),
        "layers.*.attention.w[qkv]": column(),
        "layers.*.attention.wo": row(),
        "layers.*.feed_forward.w[13]": column(),
        "layers.*.feed_forward.w2": row(),
        "output": column(output_layouts=R),
    }


def sequence_plan(package: Any) -> Any:
    """Returns the plan that torchtitan has."""
    column, row = package.ColwiseParallel, package.RowwiseParallel
    norm, prepare = package.SequenceParallel, package.PrepareModuleInput
    return {
        "tok_embeddings": row(input_layouts=R, output_layouts=S1),
        "layers.*.attention_norm": norm(),
        "layers.*.attention": prepare(input_layouts=(S1, None), desired_input_layouts=(R, None)),
        "layers.*.attention.w[qkv]": column(),
        "layers.*.attention.wo": row(output_layouts=S1),
        "layers.*.ffn_norm": norm(),
        "layers.*.feed_forward": prepare(input_layouts=S1, desired_input_layouts=R),
        "layers.*.feed_forward.w[13]": column(),
        "layers.*.feed_forward.w2": row(output_layouts=S1),
        "norm": norm(),
        "output": column(input_layouts=S1, output_layouts=R),
    }
