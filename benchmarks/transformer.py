"""The transformer that `benchmarks/checker.py` checks, over "dp" and "tp"; prints nothing.

Its collectives are arguments, since the same layers are also run without any, and with those of
another library.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor
from torch.nn import functional

from shardmap_torch import P

WIDTH, HEADS, LENGTH, TP = 64, 8, 16, 4
HEAD = WIDTH // HEADS
SHAPES: Final[Mapping[str, tuple[int, ...]]] = {
    "norm_1": (WIDTH,),
    "qkv": (WIDTH, HEADS * 3 * HEAD),
    "out": (WIDTH, WIDTH),
    "norm_2": (WIDTH,),
    "up": (WIDTH, 4 * WIDTH),
    "down": (4 * WIDTH, WIDTH),
}
SPECS: Final[Mapping[str, P]] = {
    "norm_1": P(),
    "qkv": P(None, "tp"),
    "out": P("tp"),
    "norm_2": P(),
    "up": P(None, "tp"),
    "down": P("tp"),
}
SEQUENCES: Final = 2
"""So many each rank has."""

Layer = Mapping[str, Tensor]


def attend(qkv: Tensor) -> Tensor:
    """[b, t, heads * 3 * e] -> [b, t, heads * e], causal, of the heads that this rank has."""
    q, k, v = (each.transpose(1, 2) for each in qkv.unflatten(-1, (-1, 3, HEAD)).unbind(-2))
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(1, 2).flatten(2)


def nothing(x: Any) -> Any:
    return x


@dataclass(frozen=True)
class Parallel:
    """Hooks of a parallel program; by default they do nothing.

    Attributes:
        use: the parameters of a layer, alike on all ranks of "dp", meet other sequences on each.
        enter: a value alike on all ranks of "tp" meets other weights on each.
        leave: adds up the parts that the ranks of "tp" have.
        finish: adds up the losses of the ranks of "dp".
        attend: as above.
    """

    use: Callable[[Layer], Layer] = nothing
    enter: Callable[[Tensor], Tensor] = nothing
    leave: Callable[[Tensor], Tensor] = nothing
    finish: Callable[[Tensor], Tensor] = nothing
    attend: Callable[[Tensor], Tensor] = attend

    def loss(self, layers: Sequence[Layer], x: Tensor) -> Tensor:
        """The sum of the squares of the last residual stream, [b, t, d]."""
        for layer in map(self.use, layers):
            h = self.enter(functional.layer_norm(x, [WIDTH], layer["norm_1"]))
            x = x + self.leave(self.attend(h @ layer["qkv"]) @ layer["out"])
            h = self.enter(functional.layer_norm(x, [WIDTH], layer["norm_2"]))
            x = x + self.leave(functional.gelu(h @ layer["up"]) @ layer["down"])
        return self.finish(x.square().sum())


def shard_of(name: str) -> tuple[int, ...]:
    """The shape of a parameter on one rank."""
    sharded = dict(SPECS[name].sharded_dims)
    return tuple(size // (TP if dim in sharded else 1) for dim, size in enumerate(SHAPES[name]))
