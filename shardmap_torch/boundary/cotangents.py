"""Plain values outside, compared on all ranks: the cotangents of results, operands beside shards.

A loss that one rank scales otherwise, or a hook of one rank, would give all ranks another gradient.
They are compared before the first collective of the backward, or in the next call where the
backward has none.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from shardmap_torch.control.board import Value
from shardmap_torch.control.start import call_number, current
from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.hashing import Bits, has_bits
from shardmap_torch.core.source_location import Site, call_site
from shardmap_torch.core.torch_private.engine import current_autograd_node
from shardmap_torch.errors import show_shape
from shardmap_torch.mesh import PROCESS_KINDS, Mesh

VARIABLE: Final = "SHARDMAP_DEBUG"
"""The environment variable that decides for all functions: 1 compares all, 0 nothing."""

NOTHING: Final = "", "0"


@dataclass(frozen=True)
class _Kind:
    """A kind of tensors that are compared, with a repair where they differ."""

    what: str
    repair: str


_COTANGENT: Final = _Kind(
    "the gradient of a result",
    "compute the loss alike on all processes, scale and hooks included; what differs by rank "
    "belongs in the body.",
)
_OPERAND: Final = _Kind(
    "a plain tensor beside a sharded result",
    "a plain tensor is a global value, equal on all processes; make each rank's own rows one by "
    "from_local(x, mesh, P(axis)), or compute the loss in the module.",
)


def compare_cotangent(mesh: Mesh, grad: Tensor) -> None:
    """Has the next comparison of processes compare the cotangent of a plain result."""
    _compare(mesh, grad, _COTANGENT, getattr(current_autograd_node(), "call", 0))


def compare_operand(mesh: Mesh, x: Tensor) -> None:
    """Has the next comparison of processes compare a plain operand of a result that is sharded."""
    _compare(mesh, x, _OPERAND, call_number())


def _compare(mesh: Mesh, x: Tensor, kind: _Kind, call: int) -> None:
    control, setting, x = current(), os.environ.get(VARIABLE), base_of(x)
    if control is None or setting in NOTHING or mesh.kind not in PROCESS_KINDS or mesh.processes:
        return
    if has_bits(x):
        turn = None if setting is not None else max(1, call)
        control.compare_later(_Compared(x, turn, kind, call_site()))


class _Compared:
    """A plain tensor that all ranks have, as `Values` of the control.

    Attributes:
        is_late: never; to read it waits for the device where it has not got so far.
        shards: none, as it is whole on each rank.
    """

    is_late = False
    shards: Sequence[int | None] = ()

    def __init__(self, x: Tensor, turn: int | None, kind: _Kind, site: Site | None) -> None:
        self._bits, self._site = Bits([x], turn), "" if site is None else f" at {site}"
        self._shape, self._kind = show_shape(x.dtype, x.shape), kind

    def digest(self) -> int:
        return self._bits.digest()

    def kinds(self) -> Iterator[str]:
        yield f"  {self._kind.what}: {self._shape}"

    def rows(self) -> list[Value]:
        bits = f"{self.digest():x}"
        return [Value(self._kind.what, self._shape, "", bits, self._kind.repair, self._site, True)]
