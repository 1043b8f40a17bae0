"""The problem that every peer solves, in numpy arrays."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float32]]

NUM_RANKS: Final = 8
LEAVES: Final = (1, 2, 40)
FORWARD: Final = f"MLP, {NUM_RANKS} ranks: forward"
GRADIENTS: Final = f"MLP, {NUM_RANKS} ranks: forward and gradients"


def call_of(num_leaves: int) -> str:
    """Names the call of an identity."""
    return f"a call, {num_leaves} leaves"


def leaf() -> Array:
    """Describes each leaf of a call."""
    return np.arange(8, dtype=np.float32)


@dataclass(frozen=True)
class MLP:
    """x [64, 512], w1 [512, 2048], w2 [2048, 512]: relu(x @ w1) @ w2."""

    x: Array
    w1: Array
    w2: Array

    def __iter__(self) -> Any:
        """Iterates over the three."""
        return iter((self.x, self.w1, self.w2))


def mlp() -> MLP:
    """The operands, from one seed."""
    draw = np.random.default_rng(0).standard_normal
    x, w1, w2 = draw((64, 512)), draw((512, 2048)) / 22, draw((2048, 512)) / 45
    return MLP(*(each.astype(np.float32) for each in (x, w1, w2)))
