"""Experts of transformers: modules of 3-d weights, with rows and their routes as inputs."""

import copy
from collections.abc import Sequence
from string import ascii_lowercase
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from shardmap_torch.errors import SpecError
from shardmap_torch.nn.region import PerRank, Types, region_types
from shardmap_torch.ops import axis_index, axis_size
from shardmap_torch.spec import P


def computable(module: nn.Module) -> None:
    """Gives the bound copy of experts an implementation whose shapes do not depend on data.

    The eager one of transformers takes the rows of one expert after another.
    """
    config = getattr(module, "config", None)
    if getattr(config, "_experts_implementation", None) == "eager":
        config = copy.copy(config)
        vars(config)["_experts_implementation_internal"] = "batched_mm"
        vars(module)["config"] = config


def dispatched(
    module: nn.Module,
    forward: MethodType,
    name: str,
    axis: str,
    args: tuple[Any, ...],
) -> Tensor:
    """Runs the experts of this rank on the rows that go to them; returns an addend of the output.

    A row that goes to another rank's expert has a number that no expert has, and no weight, as in
    the all-reduce form of transformers. That experts treat their weights one by one is a promise
    (a `local_region`).

    Args:
        module: the bound copy of the experts, with this rank's weights.
        forward: its own forward.
        name: its name in errors.
        axis: the mesh axis over which experts are sharded.
        args: rows [t, d], numbers of experts [t, k] and their weights [t, k], equal on all ranks.

    Raises:
        SpecError: the module has other inputs, or does not say how many experts it has.
    """
    count: Any = getattr(module, "num_experts", None)
    if type(count) is not int or [getattr(arg, "ndim", 0) for arg in args] != [2, 2, 2]:
        raise SpecError(
            f"{name}: ep_dispatch_experts is for a module with an integer num_experts that takes "
            "rows [t, d], numbers of experts [t, k] and their weights [t, k], by position."
        )
    weights = dict(module.named_parameters(recurse=False))

    def experts(rows: Tensor, routes: Tensor, shares: Tensor, *own: Tensor) -> Tensor:
        num_own = count // axis_size(axis)
        is_other = routes // num_own != axis_index(axis)
        routes = torch.where(is_other, num_own, routes % num_own)
        mine = copy.copy(module)
        vars(mine).update(
            num_experts=num_own,
            _is_expert_parallel=num_own != count,  # what routes without an expert need there
            _parameters=dict(zip(weights, own, strict=True)),
        )
        out: Tensor = forward.__func__(mine, rows, routes, shares.masked_fill(is_other, 0.0))
        return out

    def types(layouts: Sequence[P], ranks: Sequence[int]) -> Types:
        others = iter(ascii_lowercase)
        terms = ["t" + next(others), "tk", "tk"]
        letters = (each for each in others if each not in "ekt")
        terms += ["e" + "".join(next(letters) for _ in range(rank - 1)) for rank in ranks[3:]]
        equation = f"{','.join(terms)}->ta"
        return region_types(equation, {"e": axis}, axis, layouts, ranks)

    out: Tensor = PerRank(experts, types)(*args, *weights.values())
    return out
