"""Buffers that a forward writes into, as running statistics: state that goes in and comes out.

A body writes into copies and returns them, and the module's own are written after the call.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def to_write(
    module: nn.Module, buffers: Mapping[str, Tensor], written: tuple[str, ...] | None
) -> dict[str, Tensor]:
    """Copies the buffers that are written into; while these are not known, all in training."""
    names = written if written is not None else buffers if module.training else ()
    return {name: buffers[name].clone() for name in names}


def written_into(given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the copies that a forward has written into."""
    return {name: x.detach() for name, x in own.items() if x is not given[name] and x._version}


def write_buffers(module: nn.Module, written: Mapping[str, Tensor]) -> None:
    """Writes what a body has returned into the buffers of the module itself."""
    with torch.no_grad():
        for name, value in written.items():
            module.get_buffer(name).copy_(value)
