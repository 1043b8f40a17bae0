"""torch's own code on parameters of `parallelize`: optimizers, and numbers read of norms."""

import gc
import sys
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.library import register_torch_dispatch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from shardmap_torch.core.hashing import hash_text
from shardmap_torch.core.source_location import call_site, warn_at
from shardmap_torch.errors import OptimizerError, ShardTypeError, listing, show_shape
from shardmap_torch.mesh import as_mesh
from shardmap_torch.placing import compared

_PATHS: Any = WeakIdKeyDictionary()
"""Names of parameters of parallelized modules."""

_MESHES: Any = WeakIdKeyDictionary()
"""Their meshes; DTensors on others are left to torch."""


def warn_of_optimizers(replaced: Sequence[Tensor]) -> None:
    """Warns where an optimizer has been made of parameters that are replaced: it moves nothing.

    Also on meshes of one process, which replace none: a script is tried there for the others.
    """
    alone = torch.nn.PReLU()  # draws no numbers
    own = max(map(sys.getrefcount, [*alone.parameters()]))
    if max(map(sys.getrefcount, replaced), default=0) <= own:
        return  # only their module refers to them, and to search all objects takes a second
    lists = [each for each in gc.get_referrers(*replaced) if isinstance(each, list)]
    groups = gc.get_referrers(*lists) if lists else []
    if any(isinstance(each, dict) and {"params", "lr"} <= each.keys() for each in groups):
        message = (
            "parallelize replaces the parameters of a module on processes, and an optimizer holds "
            "those of before: its steps would change nothing.\nFix: make it afterwards, of "
            "module.parameters()."
        )
        warn_at(call_site(), message)


def note_parameters(module: torch.nn.Module) -> None:
    """Keeps the names of DTensors, of which steps of torch's optimizers place plain states."""
    for name, parameter in module.named_parameters():
        _PATHS[parameter] = _MESHES[cast(DTensor, parameter).device_mesh] = name
    _watch()


@cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_place_states)
    register_torch_dispatch("aten::_local_scalar_dense", DTensor, _number)


def _number(_: object, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Reads a number of a DTensor, as `.item()`, `float()` and `if` do.

    torch 2.13 reads that of this rank's addend where the ranks' have not been reduced yet.

    Raises:
        ShardTypeError: they have not.
    """
    x = args[0]
    sizes = zip(x.placements, x.device_mesh.shape, strict=True)
    is_part = any(placement.is_partial() and size > 1 for placement, size in sizes)
    if not is_part or x.device_mesh not in _MESHES:
        return func(x._local_tensor)
    site = call_site()
    raise ShardTypeError(
        f"a number is read of a DTensor of which each rank has its own part so far, as the norm of "
        f"its shard: {show_shape(x.dtype, x.shape)}, {x.placements}.\n"
        + f"  at {site}\n"
        * (site is not None)
        + "Fix: full(x).item(), which all ranks call; for gradients clip_grad_norm_ of "
        "torch.nn.utils, which returns their norm; x.to_local().item() for this rank's own."
    )


class _Plain(NamedTuple):
    path: str
    like: DTensor
    state: dict[str, Any]
    key: str
    value: Tensor


def _place_states(optimizer: Optimizer, *_: Any) -> None:
    """Makes plain states, as `load_state_dict` gets of one device, DTensors as their parameters.

    Raises:
        OptimizerError: one has not the shape of its whole parameter.
        CollectiveMismatchError: processes have loaded others.
    """
    if torch.compiler.is_compiling():
        return
    # Steps of others than torch may well hold plain tensors of their own.
    of_torch = type(optimizer).step.__module__.startswith("torch.optim.")
    found = [*_plain_states(optimizer)] if of_torch else []
    name = f"{type(optimizer).__name__}.load_state_dict"
    read = partial(_require_whole, name, found)
    if any(each.like.device_mesh.size() < dist.get_world_size() for each in found):
        _place(read())  # of a stage of a pipeline, which other ranks do not have
    elif found:
        compared(name, as_mesh(found[0].like.device_mesh), read, _describe, _place)


def _require_whole(name: str, found: list[_Plain]) -> list[_Plain]:
    odd = [
        f"{path}: {key} is {show_shape(x.dtype, x.shape)}, and the parameter "
        f"{show_shape(like.dtype, like.shape)}"
        for path, like, _, key, x in found
        if x.shape != like.shape
    ]
    if odd:
        head = f"{name}: plain states are not of whole parameters:"
        raise OptimizerError(listing(head, odd) + _FIX)
    return found


_FIX = (
    "\nFix: load states of one device, whole on each process; of another mesh let all ranks call "
    "get_state_dict, and load by set_state_dict(module, optimizer, model_state_dict=..., "
    "optim_state_dict=..., options=StateDictOptions(full_state_dict=True))."
)


def _describe(found: list[_Plain]) -> Iterator[str]:
    for path, _, _, key, x in found:
        yield f"  {path}, {key}: {show_shape(x.dtype, x.shape)}, hash {hash_text(x)}"


def _place(found: list[_Plain]) -> None:
    for _, like, state, key, x in found:
        state[key] = distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None)


def _plain_states(optimizer: Optimizer) -> Iterator[_Plain]:
    every = [x for group in optimizer.param_groups for x in group["params"]]
    for at, like in enumerate(every):
        state = optimizer.state.get(like, {}) if isinstance(like, DTensor) else {}
        for key, x in state.items():
            # A number is a count of steps, or the state of a parameter that is one.
            if type(x) is Tensor and (x.ndim or (like.ndim == 0 and key not in _COUNTS)):
                yield _Plain(_PATHS.get(like, f"parameter {at}"), like, state, key, x)


_COUNTS = ("step", "mu_product", "eta", "mu")
