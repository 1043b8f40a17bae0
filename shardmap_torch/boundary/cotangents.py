"""Cotangents of plain results, compared on all ranks: a result that is one value has one cotangent.

A loss that one rank scales otherwise, or a hook of one rank, would give all ranks another gradient.
They are compared before the first collective of the backward, or in the next call where the
backward has none.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Final

from torch import Tensor

from shardmap_torch.control.board import Value
from shardmap_torch.control.start import current
from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.hashing import Bits, has_bits
from shardmap_torch.core.source_location import Site, call_site
from shardmap_torch.core.torch_private.engine import current_autograd_node
from shardmap_torch.errors import show_shape
from shardmap_torch.mesh import PROCESS_KINDS, Mesh

VARIABLE: Final = "SHARDMAP_DEBUG"
"""The environment variable that decides for all functions: 1 compares all, 0 nothing."""

NOTHING: Final = "", "0"

_WHAT: Final = "the gradient of a result"

_REPAIR: Final = (
    "compute the loss alike on all processes, scale and hooks included; what differs by rank "
    "belongs in the body."
)


def compare_cotangent(mesh: Mesh, grad: Tensor) -> None:
    """Has the next comparison of processes compare the cotangent of a plain result."""
    control, setting, grad = current(), os.environ.get(VARIABLE), base_of(grad)
    if control is None or setting in NOTHING or mesh.kind not in PROCESS_KINDS or mesh.processes:
        return
    if has_bits(grad):
        turn = None if setting is not None else max(1, getattr(current_autograd_node(), "call", 0))
        control.compare_later(_Cotangent(grad, turn, call_site()))


class _Cotangent:
    """The cotangent of one plain result, as `Values` of the control.

    Attributes:
        is_late: never; to read it waits for the device where it has not got so far.
        shards: none, as it is whole on each rank.
    """

    is_late = False
    shards: Sequence[int | None] = ()

    def __init__(self, grad: Tensor, turn: int | None, site: Site | None) -> None:
        self._bits, self._site = Bits([grad], turn), "" if site is None else f" at {site}"
        self._shape = show_shape(grad.dtype, grad.shape)

    def digest(self) -> int:
        """Hashes its bits."""
        return self._bits.digest()

    def kinds(self) -> Iterator[str]:
        """Yields a line that is equal where it is compared in the same way."""
        yield f"  {_WHAT}: {self._shape}"

    def rows(self) -> list[Value]:
        """Describes it for errors."""
        bits = f"{self.digest():x}"
        return [Value(_WHAT, self._shape, "", bits, _REPAIR, self._site, True)]
