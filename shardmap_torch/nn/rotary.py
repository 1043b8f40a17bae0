"""Rotary position embedding, at the global positions of a sequence that may be sharded."""

import torch
from torch import Tensor

from shardmap_torch.errors import LayerError
from shardmap_torch.ops.arguments import Axis
from shardmap_torch.random import iota
from shardmap_torch.spec import P


def positions(
    length: int,
    axis: Axis | None = None,
    *,
    offset: Tensor | int = 0,
    device: torch.device | str | None = None,
) -> Tensor:
    """Returns the global positions of this rank's shard of a sequence.

    Shape: int64 [length], or with `axis` [length/r] on each of r ranks. Types: equal on all ranks,
    or with `axis` S(0). Sends nothing.

    Args:
        length: of the sequence on all ranks together.
        axis: over which the sequence is sharded, in order; None if it is not.
        offset: added to each, an integer tensor or a number; for decoding with a cache.
        device: of the result.

    Raises:
        SpecError: the length does not divide over the ranks.
        CollectiveError: with `axis`, outside a body, or an unknown axis.

    Example:
        >>> from shardmap_torch import P, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("cp",), kind="simulated")
        >>> shard_map(lambda: positions(6, "cp"), mesh=mesh, in_specs=(), out_specs=P("cp"))()
        tensor([0, 1, 2, 3, 4, 5])
    """
    if axis is None:
        return torch.arange(length, device=device) + offset
    spec = P(axis if isinstance(axis, str) else tuple(axis))
    return iota((length,), spec, device=device) + offset


def rotary_tables(
    positions: Tensor,
    width: int,
    *,
    base: float = 10_000.0,
    frequencies: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Computes the cosines and sines of `rotary`'s angles, once for all layers.

    Shape: positions [..., t] gives twice [..., t, 1, width/2]. Types: as positions. Sends nothing.

    Args:
        positions: as in `rotary`.
        width: features of a head, an even number.
        base: of the wave lengths: pair j turns by position * base ** (-2 j / width).
        frequencies: [width/2] in place of `base`, as for scaled rotary positions.
        dtype: of the tables; angles are computed in float32 or better. `rotary` itself computes
            tables of float32, or of float64 for x of that dtype.

    Raises:
        LayerError: an odd width.

    Source: Su et al. 2021, "RoFormer".

    Example:
        >>> cos, sin = rotary_tables(torch.arange(2), 2)
        >>> sin.flatten()
        tensor([0.0000, 0.8415])
    """
    if width % 2:
        raise LayerError(f"rotary_tables: {width} features are no pairs.")
    wide = torch.promote_types(dtype, torch.float32)
    if frequencies is None:
        steps = torch.arange(width // 2, dtype=wide, device=positions.device) * (2 / width)
        frequencies = torch.pow(base, -steps)
    angles = positions.to(wide)[..., None, None] * frequencies.to(wide)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotary(
    x: Tensor, positions: Tensor | tuple[Tensor, Tensor], *, interleaved: bool = False
) -> Tensor:
    """Rotates each pair of features by an angle that grows with the position, in float32 or better.

    Shape: x [..., t, h, d], positions [t] or [..., t] gives [..., t, h, d]; d is even and not
    sharded. Types: those of x; positions are sharded like its dimension t, and get no gradient.
    Sends nothing, forward and backward.

    Args:
        x: queries or keys.
        positions: the global positions, as `positions` returns them; with a sharded or permuted
            sequence those of this rank. Or `rotary_tables` of these, for other wave
            lengths than powers of 10,000.
        interleaved: whether a pair is features 2j and 2j + 1 (Su et al., GGUF) and not j and
            j + d/2 (GPT-NeoX, Hugging Face).

    Raises:
        LayerError: shapes that do not match.

    Source: Su et al. 2021, "RoFormer".

    Example:
        >>> rotary(torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]]), torch.arange(2)).squeeze()
        tensor([[1.0000, 0.0000],
                [0.5403, 0.8415]])
    """
    _check_positions(x, positions)
    wide = torch.promote_types(x.dtype, torch.float32)
    if isinstance(positions, Tensor):
        positions = rotary_tables(positions, x.shape[-1], dtype=wide)
    cos, sin = positions
    pairs = x.to(wide).unflatten(-1, (-1, 2) if interleaved else (2, -1))
    first, second = pairs.unbind(-1 if interleaved else -2)
    rotated = [first * cos - second * sin, first * sin + second * cos]
    return torch.stack(rotated, -1 if interleaved else -2).flatten(-2).to(x.dtype)


def _check_positions(x: Tensor, positions: Tensor | tuple[Tensor, Tensor]) -> None:
    if x.ndim < 3:
        alike = False
    elif isinstance(positions, tuple):
        expected = (*x.shape[-3:-2], 1, x.shape[-1] // 2)
        alike = all(table.shape[-3:] == expected for table in positions)
    else:
        alike = positions.shape[-1:] == x.shape[-3:-2]
    if not alike or x.shape[-1] % 2:
        # Only here: to format a size asks for its value, and a verdict would hold for that alone.
        if isinstance(positions, tuple):
            shapes = f"tables {[list(table.shape) for table in positions]}"
        else:
            shapes = f"positions {list(positions.shape)}"
        raise LayerError(
            "rotary takes x [..., t, h, d] with an even d and positions [..., t], or their tables, "
            f"not x {list(x.shape)} and {shapes}."
        )
