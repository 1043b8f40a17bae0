"""Recorded ATen calls: what op_db's operators, forward and backward, ask of each overload.

`calls.json` maps an overload to a few calls of it. Floating tensors are kept as shape and dtype and
made again from a seed, integer and bool tensors (indices, masks) by value. `record_calls.py` writes
the file; calls of overloads that op_db never reaches are written by hand in `extra_calls.py`.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch._ops import OpOverload

import shardmap_torch.nn.moe
import shardmap_torch.random.blocks  # noqa: F401 - both define operators
from shardmap_torch.checker.rules.operators import OWN
from shardmap_torch.checker.rules.registry import TABLE
from shardmap_torch.checker.rules.rule import Row

PATH: Final = Path(__file__).with_name("calls.json")

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one call."""


class UnrecordableError(Exception):
    """An argument that cannot be written down."""


def encode(value: object) -> Any:
    """Writes one argument as JSON."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return _encode_tensor(value)
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, list | tuple):
        return [encode(each) for each in value]
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    raise UnrecordableError(type(value))


def _encode_tensor(value: Tensor) -> dict[str, Any]:
    if value.layout != torch.strided or value.is_quantized or value.numel() > 2000:
        raise UnrecordableError(value.layout)
    coded = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if not (value.is_floating_point() or value.is_complex()):
        coded["data"] = value.flatten().tolist()
    return coded


def decode(value: Any, generator: torch.Generator) -> Any:
    """The inverse of `encode`; floating tensors are drawn from `generator`."""
    if isinstance(value, list):
        return [decode(each, generator) for each in value]
    if not isinstance(value, dict):
        return value
    if "torch" in value:
        return getattr(torch, value["torch"])
    if "device" in value:
        return torch.device(value["device"])
    if "complex" in value:
        return complex(*value["complex"])
    dtype = getattr(torch, value["dtype"])
    if "data" in value:
        return torch.tensor(value["data"], dtype=dtype).reshape(value["shape"])
    return torch.randn(value["shape"], dtype=dtype, generator=generator)


def overload(name: str) -> OpOverload:
    """The overload called `aten.add.Tensor`."""
    namespace, packet, which = name.split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), packet), which)
    assert isinstance(found, OpOverload)
    return found


def every_row() -> dict[OpOverload, Row]:
    """All rows, those of this package's own operators too."""
    return {**TABLE, **{overload(name): row for name, row in OWN.items()}}


@cache
def recorded() -> dict[str, list[list[Any]]]:
    """Overload names to coded calls."""
    loaded = json.loads(PATH.read_text()) if PATH.exists() else {}
    return dict(loaded)


def calls_of(op: OpOverload, seed: int = 0) -> Sequence[Call]:
    """The recorded calls of `op`, with fresh random floating tensors."""
    generator = torch.Generator().manual_seed(seed)
    coded = recorded().get(str(op), [])
    return [
        (tuple(decode(args, generator)), {k: decode(v, generator) for k, v in kwargs.items()})
        for args, kwargs in coded
    ]
