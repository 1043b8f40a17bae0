"""Weights of parallelized modules: read from safetensors a shard at a time, and saved whole."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from glob import glob
from os import PathLike
from os.path import isdir, isfile, join
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardmap_torch.errors import SpecError, listing, show
from shardmap_torch.saving.pieces import Ranges, own_ranges

_MISSING: Final = "load_safetensors: the files have no tensor for:"


def load_safetensors(module: nn.Module, path: str | PathLike[str]) -> None:
    """Reads the parameters of a module from safetensors, each rank its shards alone.

    For modules that `parallelize` has changed, or any with DTensors: no rank reads, or has, more
    of a parameter than its shard. A model may be made on the "meta" device before, so that no rank
    ever has all of it; then what files have no tensor for, as buffers that are not saved, is made
    by the model itself (`initialize_weights` of transformers).

    Moves: nothing between ranks; from the files, the bytes of this rank's shards.

    Args:
        module: the module. Its parameters keep their dtypes.
        path: a file, or a folder with files, of names as in `module.state_dict()`. Of a shared
            parameter one of its names is enough.

    Raises:
        SpecError: names all parameters that no file has, or has in another shape; no file.

    Source: `transformers.PreTrainedModel.from_pretrained`.

    Example: in docs/modules_transformers.md.
    """
    from safetensors import safe_open

    folder = str(path)
    files = sorted(glob(join(folder, "*.safetensors"))) if isdir(folder) else [folder]
    if not all(map(isfile, files)):
        raise SpecError(f"load_safetensors: there is no file {show(folder)}.")
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
        sources = {name: file for file in opened for name in file.keys()}
        _load(module, {name: file.get_slice(name) for name, file in sources.items()})


def _load(module: nn.Module, sources: Mapping[str, Any]) -> None:
    names: dict[int, list[str]] = {}
    tensors = {}
    for name, value in [*_named(module)]:
        names.setdefault(id(value), []).append(name)
        tensors[id(value)] = value
    found = {
        key: next((sources[name] for name in own if name in sources), None)
        for key, own in names.items()
    }
    problems = [names[key][0] for key, source in found.items() if source is None]
    problems += [
        f"{names[key][0]}: of shape {[*tensors[key].shape]}, but {[*source.get_shape()]} there"
        for key, source in found.items()
        if source is not None and [*source.get_shape()] != [*tensors[key].shape]
    ]
    if problems:
        raise SpecError(listing(_MISSING, problems))
    new = {key: _read(tensors[key], source) for key, source in found.items()}
    _replace(module, new)
    _initialize(module)


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields parameters and saved buffers under all their names."""
    yield from module.named_parameters(remove_duplicate=False)
    for path, each in module.named_modules(remove_duplicate=False):
        for name, value in each._buffers.items():
            if value is not None and name not in each._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, value


def _read(value: Tensor, source: Any) -> Tensor:
    """Returns a tensor like `value` with what this rank has of it in a file."""
    if isinstance(value, DTensor):
        local = _pieces(source, own_ranges(value), ()).to(value.dtype)
        local = local.to(torch.device(value.device_mesh.device_type))
        found: Tensor = DTensor.from_local(
            local,
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
    else:
        found = _pieces(source, [[range(size)] for size in value.shape], ()).to(value.dtype)
        found = found if value.is_meta else found.to(value.device)
    if isinstance(value, nn.Parameter):
        return nn.Parameter(found, requires_grad=value.requires_grad)
    return found


def _pieces(source: Any, dims: Sequence[Ranges], chosen: tuple[slice, ...]) -> Tensor:
    """Reads the positions of all dims, joined along those that have several ranges."""
    if len(chosen) == len(dims):
        piece: Tensor = source[chosen] if chosen else source[:]
        return piece
    parts = [
        _pieces(source, dims, (*chosen, slice(each.start, each.stop))) for each in dims[len(chosen)]
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, len(chosen))


def _replace(module: nn.Module, new: Mapping[int, Tensor]) -> None:
    for owner in module.modules():
        tables: list[dict[str, Any]] = [owner._parameters, owner._buffers]
        for table in tables:
            table.update({k: new[id(x)] for k, x in table.items() if id(x) in new})


def _initialize(module: Any) -> None:
    """Lets a model of transformers make the buffers that are still on the meta device."""
    if not any(x.is_meta for x in module.buffers()) or not hasattr(module, "initialize_weights"):
        return
    for value in module.parameters():
        value._is_hf_initialized = True
    for owner in module.modules():
        empty = {
            k: torch.empty_like(x, device="cpu") for k, x in owner._buffers.items() if x.is_meta
        }
        owner._buffers.update(empty)
    module.initialize_weights()


def save_pretrained(model: nn.Module, folder: str | PathLike[str], **options: Any) -> None:
    """Saves a parallelized model of transformers as `model.save_pretrained` would have before.

    To be called on all ranks. Parameters are gathered one at a time; the first rank keeps them, in
    the memory of its host, and writes the files. The others have at most one at a time.

    Moves: (r - 1) / r of the bytes of each sharded parameter to each of r ranks.

    Args:
        model: the model.
        folder: where to.
        **options: for `save_pretrained`.

    Raises:
        SpecError: the model has no `save_pretrained`.

    Source: `transformers.PreTrainedModel.save_pretrained`.

    Example: in docs/modules_transformers.md.
    """
    whole: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    for name, value in model.state_dict(keep_vars=True).items():
        full = whole.get(id(value))
        if full is None:
            gathered = value.full_tensor() if isinstance(value, DTensor) else value
            full = gathered.detach().cpu() if is_first else value.detach()
            whole[id(value)] = full
        state[name] = full
    if is_first:
        saves: Any = model.save_pretrained
        saves(folder, state_dict=state, **options)
