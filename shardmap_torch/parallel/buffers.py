"""Buffers that a forward writes into, as running statistics: state that goes in and comes out.

A body writes into copies and returns them, and the module's own are written after the call.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def copied(module: nn.Module, buffers: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Copies the buffers of a module in training, which are small beside its activations."""
    return {name: x.clone() for name, x in buffers.items()} if module.training else buffers


def written_into(given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the copies that a forward has written into; all where inference counts no writes."""
    copies = {name: x.detach() for name, x in own.items() if x is not given[name]}
    return {name: x for name, x in copies.items() if x.is_inference() or own[name]._version}


def write_buffers(module: nn.Module, written: Mapping[str, Tensor]) -> None:
    """Writes what a body has returned into the buffers of the module itself."""
    with torch.no_grad():
        for name, value in written.items():
            module.get_buffer(name).copy_(value)
