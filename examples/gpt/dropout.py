"""Dropout in the residual stream: one mask for the global activations, whatever shards them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardmap_torch import P, random
from shardmap_torch.spec import Entry


@dataclass(frozen=True)
class Dropout:
    """With probability `p` sets entries to zero; the key decides which, on any mesh the same."""

    p: float = 0.0
    key: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))

    def shards(self, axes: Sequence[Entry]) -> Callable[[Tensor], Tensor]:
        """Returns what drops entries of x [b, t, d]; `axes` shard b and t. A key for each call."""
        return self._with(P(*axes))

    def unsharded(self) -> Callable[[Tensor], Tensor]:
        """Returns the same for one device."""
        return self._with(None)

    def _with(self, spec: P | None) -> Callable[[Tensor], Tensor]:
        keys = iter(range(1 << 30))

        def drop(x: Tensor) -> Tensor:
            if self.p == 0.0:
                return x
            return random.dropout(random.fold_in(self.key, next(keys)), x, self.p, spec=spec)

        return drop
