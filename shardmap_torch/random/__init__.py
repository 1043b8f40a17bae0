"""Random numbers from explicit keys: equal on every mesh, and typed like other values.

A key is an int64 scalar tensor. Draws from a key of type K are equal on all ranks; from one that
`fold_axis` has folded over an axis they vary over it; with `spec=` each rank draws its own shard of
the global draw, which is bit-equal to the draw of one device.

Source: `jax.random`, with partitionable Threefry; keys, bits and uniform numbers are equal to its.
"""

from shardmap_torch.contracts import export
from shardmap_torch.errors import SpecError
from shardmap_torch.random.draws import bernoulli, bits, dropout, iota, normal, randint, uniform
from shardmap_torch.random.keys import Key, fold_axis, fold_in, key, split

__all__ = [
    "Key",
    "bernoulli",
    "bits",
    "dropout",
    "fold_axis",
    "fold_in",
    "iota",
    "key",
    "normal",
    "randint",
    "split",
    "uniform",
]

export(globals(), __all__, SpecError)
