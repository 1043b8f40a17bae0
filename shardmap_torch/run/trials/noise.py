"""Noise: what a body draws by itself, the same numbers for all ranks together as for one device."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.boundary.shards import global_of, locals_of
from shardmap_torch.checker.ir.observer import tensors_in
from shardmap_torch.checker.rules.infer import signature_of
from shardmap_torch.checker.verify.request import global_shape
from shardmap_torch.core.source_location import Site
from shardmap_torch.core.torch_private.engine import OpOverload
from shardmap_torch.mesh import Mesh
from shardmap_torch.spec import P

Drawn = Sequence[tuple[Any, Site | None, P | None]]
"""Operators that draw, with their lines and how what they draw is sharded, if that is known."""


class Noise:
    """The draws of one run.

    Attributes:
        drawn: the operators that have drawn, with the shapes on one device.
    """

    def __init__(self, mesh: Mesh, drawn: Drawn, seed: int) -> None:
        """Starts before the first draw; `drawn` says how a proof has laid each out."""
        self._mesh, self._seed = mesh, seed
        self._specs: dict[Any, list[P | None]] = {}
        for op, site, spec in drawn:
            self._specs.setdefault((op, site), []).append(spec)
        self.drawn: list[tuple[OpOverload, tuple[int, ...]]] = []

    def draw(
        self, op: OpOverload, site: Site | None, arguments: Sequence[dict[str, Any]]
    ) -> list[Any] | None:
        """Draws as one device does, from the arguments of all ranks; returns each rank's part.

        None where it is not known how it is laid out.
        """
        spec, local = self._spec(op, site), _shape(arguments[0])
        if spec is None or spec.partial:
            return None
        shape = global_shape(local, spec, self._mesh)
        self.drawn.append((op, shape))
        whole = {n: self._joined([a[n] for a in arguments], local, spec) for n in arguments[0]}
        if "size" in whole:
            whole["size"] = shape
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed * _DRAWS + len(self.drawn))
            out = op(**whole)
        parts = [locals_of(x, spec, self._mesh) for x in tensors_in(out)]
        made = [[part[rank].clone() for part in parts] for rank in range(self._mesh.size)]
        if signature_of(op).writes:
            return [a["self"].copy_(own) for a, (own,) in zip(arguments, made, strict=True)]
        return [each[0] for each in made] if isinstance(out, Tensor) else made

    def _spec(self, op: OpOverload, site: Site | None) -> P | None:
        """Returns how the next draw of a line is laid out; what recomputes it is no other one."""
        known = self._specs.get((op, site), [None])
        return known.pop(0) if len({*known}) > 1 else known[0]

    def _joined(self, values: Sequence[Any], local: tuple[int, ...], spec: P) -> Any:
        """Returns an argument on one device: that of all ranks, if it has the shape of the draw."""
        first = values[0]
        is_whole = isinstance(first, Tensor) and tuple(first.shape) == local
        return global_of(values, spec, self._mesh) if is_whole else first


_DRAWS: Final = 1009
"""More than the draws of a body that is tried: another run has other seeds."""


def _shape(arguments: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the shape that one rank draws."""
    tensors = (x.shape for x in arguments.values() if isinstance(x, Tensor))
    return tuple(arguments["size"] if "size" in arguments else next(tensors, ()))
