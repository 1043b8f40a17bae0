"""Random numbers for trials: one choice of them, and the structure that real arguments have.

Independent random numbers miss what people pass: a padding mask that hides whole blocks, ascending
positions, documents longer than a rank's block, gates near 1, labels to ignore. So each choice has
a style, and all styles are drawn.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.core.functorch import is_smooth
from shardmap_torch.run.trials.operators import INFINITE, LARGE, is_integer


@dataclass(frozen=True)
class Like:
    """Properties of an argument that its random values have too."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    grad: bool


@dataclass(frozen=True)
class Style:
    """The distribution of the numbers of one choice.

    Attributes:
        scale: the standard deviation of floating numbers.
        shift: what is added to them; logits of gates are then near 0 or 1.
        signed: whether each argument has a sign of its own for the shift.
        pattern: how booleans and integers lie along a dim, by a name of `PATTERNS`.
        tied: whether floating numbers are few, so that many are equal, and slices of them too.
        rows: between which powers of ten the scale of each row is; None if they have one.
        jitter: by which part of itself each floating number is off.
        levels: how the floating numbers of one block lie, and those of the others, by names of
            `LEVELS`; None if all are alike.
        odd: what one floating number of each argument is; None if it is like the others.
        decades: by how many the arguments' scales differ from 1, from the first to the last one.
    """

    scale: float = 1.0
    shift: float = 0.0
    signed: bool = False
    pattern: str = "random"
    tied: bool = False
    rows: tuple[float, float] | None = None
    jitter: float = 0.0
    levels: tuple[str, str] | None = None
    odd: float | None = None
    decades: float = 0.0

    @property
    def is_varied(self) -> bool:
        """Returns whether numbers are equal by chance alone, on which pieces meet."""
        return not self.tied and "zero" not in (self.levels or ())


PATTERNS: Final = (
    "first",  # booleans: a prefix; integers: ascending
    "last",  # a suffix; up to twice the largest dim
    "all",  # all true; one value
    "none",  # all false; all zero
    "sparse",  # few are true; long runs, as of documents
    "dense",  # few are false; descending
    "blocks",  # constant on each rank
    "limits",  # random; numbers that the program compares with
    "mixed",  # another pattern for each argument
)

PLAIN: Final = (Style(), Style(scale=0.1), Style(scale=10.0))
"""Styles of the first trials, all of which have to be defined on one device."""

STRUCTURED: Final = (
    *(Style(pattern=pattern) for pattern in PATTERNS),
    Style(pattern="mixed", scale=0.5),
    Style(pattern="first", scale=0.5),
)
"""Styles of arguments that are booleans and integers."""

SHIFTED: Final = (
    Style(shift=5.0),
    Style(shift=-5.0),
    Style(scale=0.05, shift=1.0),
    Style(shift=10.0),
    Style(shift=-10.0),
    *[Style(shift=5.0, signed=True)] * 3,
    Style(scale=30.0),
)
"""Styles in which what a program multiplies through many steps does not vanish."""

MEETING: Final = (Style(pattern="limits"),) * 6
"""Styles in which integers are equal once they have fewer bits."""

FARTHER: Final = (
    *MEETING,
    *(Style(scale=scale) for scale in (1.0, 0.3, 3.0, 1.0, 0.03, 30.0, 1e3)),
    *[Style(rows=(-18.0, 1.0))] * 3,
    *(Style(scale=scale) for scale in (1e-2, 1e-3, 1e-4, 1e-5, 1e-7)),
    *(Style(scale=1e-5, shift=1.0, signed=signed) for signed in (False, True, True)),
    *[Style(rows=(-1.5, 1.5)), Style(rows=(-18.0, 1.0))] * 10,
)
"""Styles that meet pieces which the others have missed; the last, those of norms of few rows."""

LEVELS: Final[Mapping[str, tuple[float, float, float]]] = {
    "mixed": (1.0, 0.0, 0.0),
    "small": (0.1, 0.0, 0.0),
    "high": (0.3, 2.0, 2.0),
    "low": (0.3, -2.0, -2.0),
    "one high": (0.3, -2.0, 2.0),
    "one low": (0.3, 2.0, -2.0),
    "zero": (0.0, 0.0, 0.0),
    "tiny": (1e-9, 0.0, 0.0),
    "far": (1.0, 1e3, 1e3),
}
"""For a block: the deviation of its numbers, the mean of all but one in a row, and that one's."""

EMPTY, FAR = ("zero", "mixed"), ("far", "mixed")
_USUAL: Final = [name for name in LEVELS if name not in (EMPTY[0], "tiny", FAR[0])]
LEVELLED: Final = (
    *(Style(levels=(odd, usual)) for odd in _USUAL for usual in _USUAL),
    Style(levels=("tiny", "mixed")),  # as zeros, which a `topk` may have in any order
)
"""Styles in which one block is another than the rest, which conditions on many entries tell."""

HIGHEST: Final = Style(levels=("high", "small"))
"""A style in which one block has all that is largest, in each of as many trials another one."""

ODD: Final = (
    *(Style(odd=odd) for odd in (1e2, -1e2, 1e5, -1e5)),
    *(Style(levels=levels) for levels in (EMPTY, FAR)),
)
"""Styles in which one number, or one block, is of another size, as one rank alone may have it."""

APART: Final = tuple(Style(decades=sign * by) for by in (2.0, 5.0) for sign in (1, -1))
"""Styles in which a number that ranks have of their own is not hidden by a large one of all."""

UNDEFINED: Final = tuple(
    Style(odd=odd, scale=scale) for odd in (math.nan, math.inf, -math.inf) for scale in (1.0, 1e3)
)
"""Styles for programs that ask whether numbers are finite; others exceed what stands for them."""

TIED: Final = (
    *(Style(tied=True, scale=scale) for scale in (1.0, 0.3, 0.0)),
    *(Style(tied=True), Style(tied=True, scale=0.5)) * 11,
)
"""Styles in which what is largest is so several times; in the third all numbers are 0."""

_MANY: Final = 1 << 20
"""The range of integers that index nothing."""

_SLICES: Final = 3
"""The number of different slices along a dim of equal numbers."""

_FEW: Final = 4
"""The range of half of all integers."""


@dataclass(frozen=True)
class Draw:
    """One choice of random numbers, the same for ranks and for one device.

    Attributes:
        seed: of the generator.
        style: their distribution.
        blocks: for each argument into how many blocks each dim is sharded.
        positive: positions of arguments whose floating numbers are their absolute values.
        lengths: for integers the length of what they index; None if that is not known yet.
        limits: for integers others that some of them are, by which conditions change.
        closures: what tensors that the body closes over are replaced by, by their storages.
        limited: by line and operator, the numbers with which a condition compares others, and what
            replaces them, None until it is chosen; and what replaces those that mean infinity.
    """

    seed: int
    style: Style = PLAIN[0]
    blocks: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    positive: frozenset[int] = frozenset()
    lengths: Mapping[int, int] | None = None
    limits: Mapping[int, frozenset[int]] = field(default_factory=dict)
    closures: dict[Any, Tensor] = field(default_factory=dict)
    limited: dict[Any, Any] = field(default_factory=dict)

    def values(self, likes: Mapping[int, Like]) -> dict[int, Tensor]:
        """Draws the arguments by position, in wide dtypes."""
        generator = torch.Generator().manual_seed(self.seed)
        drawn = {at: self._draw(at, like, generator) for at, like in likes.items()}
        if self.style.decades:
            drawn = self._apart(drawn)
        if self.style.jitter:
            drawn = {at: self._jittered(x, generator) for at, x in drawn.items()}
        return {at: x.to(likes[at].device) for at, x in drawn.items()}

    def _apart(self, drawn: dict[int, Tensor]) -> dict[int, Tensor]:
        smooth, by = [at for at, x in drawn.items() if is_smooth(x)], self.style.decades
        order = torch.randperm(len(smooth), generator=torch.Generator().manual_seed(int(abs(by))))
        powers = torch.linspace(-by, by, max(2, len(smooth))).tolist()
        scales = {smooth[place]: 10.0**power for place, power in zip(order, powers, strict=False)}
        return {at: x * scales[at] if at in scales else x for at, x in drawn.items()}

    def _jittered(self, x: Tensor, generator: torch.Generator) -> Tensor:
        if not (x.is_floating_point() or x.is_complex()):
            return x
        off = torch.randn(x.shape, dtype=torch.float64, generator=generator)
        return x * (1 + self.style.jitter * off)

    def another(self) -> "Draw":
        """Returns a choice of other numbers of the same style; booleans and integers random."""
        return replace(self, seed=self.seed + 7907, style=replace(self.style, pattern="random"))

    def cotangent(self, position: int, y: Tensor) -> Tensor:
        """Draws the cotangent of a result."""
        generator = torch.Generator().manual_seed(self.seed + 7919 * (position + 1))
        return torch.randn(y.shape, dtype=widened(y.dtype), generator=generator).to(y)

    def stand_in(self, value: Any) -> Any:
        """Returns a usual number in place of one, or a tensor of one, that stands for infinity."""
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if not isinstance(number, float) or not LARGE <= abs(number) < INFINITE:
            return value
        generator = torch.Generator().manual_seed(self.seed + len(self.limited))
        other = self.limited.setdefault(number, float(torch.randn((), generator=generator)))
        return torch.full_like(value, other) if isinstance(value, Tensor) else other

    def closure(self, key: Any, x: Tensor) -> Tensor:
        """Draws what stands for a tensor that the body closes over.

        Integers stay in the range of those that it has, as they may be indices.
        """
        if key not in self.closures:
            generator = torch.Generator().manual_seed(self.seed + 104729 * (1 + len(self.closures)))
            if is_integer(x.dtype):
                self.closures[key] = _in_range(x, generator)
            else:
                like = Like(x.shape, x.dtype, x.device, False)
                self.closures[key] = self._draw(-1, like, generator).to(x.device)
        return self.closures[key]

    def _draw(self, at: int, like: Like, generator: torch.Generator) -> Tensor:
        dtype, style = widened(like.dtype), self.style
        if dtype == torch.bool:
            return self._emptied(at, self._along(at, like, generator).flags())
        if is_integer(dtype):
            return self._emptied(at, self._integers(at, like, generator).to(dtype))
        drawn = style.scale * torch.randn(like.shape, dtype=dtype, generator=generator)
        if style.tied:
            drawn = (2 * drawn).real.round() / 2 if dtype.is_complex else (2 * drawn).round() / 2
            drawn = _repeated(drawn, generator)
        if style.rows is not None and drawn.ndim:
            powers = torch.empty(drawn.shape[:-1]).uniform_(*style.rows, generator=generator)
            drawn = drawn * (10.0 ** powers.double()).unsqueeze(-1)
        if style.levels is not None and drawn.ndim:
            drawn = self._levelled(at, drawn, style.levels, generator)
        if style.odd is not None and drawn.numel():
            drawn.view(-1)[torch.randint(drawn.numel(), (), generator=generator)] = style.odd
        sign = 1.0
        if style.signed:
            sign = 1.0 - 2.0 * float(torch.rand((), generator=generator) < 0.5)
        drawn = drawn + sign * style.shift
        return drawn.abs().to(dtype) if at in self.positive else drawn.to(dtype)

    def _emptied(self, at: int, drawn: Tensor) -> Tensor:
        """Returns booleans or integers, those of one block 0 where its floating numbers are."""
        if self.style.levels == EMPTY and drawn.ndim:
            _, blocks = self._split(at, drawn)
            blocks[self.seed % len(blocks)].zero_()
        return drawn

    def _split(self, at: int, drawn: Tensor) -> tuple[int, list[Tensor]]:
        """Returns the last dim that is sharded, and the blocks along it."""
        counts = self.blocks.get(at, (1,) * drawn.ndim)
        dim = max((d for d, count in enumerate(counts) if count > 1), default=drawn.ndim - 1)
        return dim, [*drawn.tensor_split(counts[dim], dim)]

    def _levelled(
        self, at: int, drawn: Tensor, levels: tuple[str, str], generator: torch.Generator
    ) -> Tensor:
        """Draws the numbers of one block, and those of the others, at levels of their own."""
        dim, blocks = self._split(at, drawn)
        odd = self.seed % len(blocks)
        for place, block in enumerate(blocks):
            deviation, usual, single = LEVELS[levels[place != odd]]
            one = torch.rand(block.shape, generator=generator).argmax(dim, keepdim=True)
            means = torch.full_like(block, usual).scatter(dim, one, single)
            blocks[place] = means + deviation * block
        return torch.cat(blocks, dim)

    def _integers(self, at: int, like: Like, generator: torch.Generator) -> Tensor:
        length = 1 if self.lengths is None else self.lengths.get(at, _MANY)
        length = max(1, min(length, torch.iinfo(like.dtype).max))
        along = self._along(at, like, generator)
        drawn = along.integers(length)
        limits = sorted(self.limits.get(at, ()))
        share = {"random": 0.2, "limits": 0.6}.get(along.pattern, 0.0)
        if share and limits and length == _MANY:  # about as many below as above the largest
            low = torch.randint(max(limits[-1], 1) + 1, like.shape, generator=generator)
            drawn = torch.where(torch.rand(like.shape, generator=generator) < 0.5, low, drawn)
        for limit in limits if share else ():
            chosen = torch.rand(like.shape, generator=generator) < share / max(1, len(limits) / 3)
            drawn[chosen] = limit
        if along.pattern == "limits" and limits:  # each in some draw, also where entries are few
            turns = self.seed, self.seed + (len(limits) + 1) // 2
            sure = torch.tensor([limits[turn % len(limits)] for turn in turns])
            places = torch.randperm(drawn.numel(), generator=generator)[:2]
            drawn.view(-1)[places] = sure[: len(places)]
        return drawn

    def _along(self, at: int, like: Like, generator: torch.Generator) -> "_Along":
        counts = self.blocks.get(at, (1,) * len(like.shape))
        sharded = [dim for dim, count in enumerate(counts) if count > 1]
        dim = sharded[-1] if sharded else len(like.shape) - 1
        pattern = self.style.pattern
        if pattern == "mixed":
            choice = int(torch.randint(len(PATTERNS) - 1, (), generator=generator))
            pattern = PATTERNS[choice]
        if not like.shape:
            pattern = "random"
        return _Along(like.shape, dim, counts[dim] if like.shape else 1, pattern, generator)


@dataclass(frozen=True)
class _Along:
    """Booleans or integers of a pattern along a dim, which `count` blocks divide."""

    shape: torch.Size
    dim: int
    count: int
    pattern: str
    generator: torch.Generator

    def flags(self) -> Tensor:
        """Draws booleans."""
        match self.pattern:
            case "first":
                return self._places() < self._ends()
            case "last":
                return self._places() >= self._ends() - 1
            case "all" | "none":
                return torch.full(self.shape, self.pattern == "all")
            case "sparse":
                return self._few()
            case "dense":
                return ~self._few()
            case "blocks":
                return self._by_block(2) == 1
        return self._rand() < 0.5

    def integers(self, length: int) -> Tensor:
        """Draws integers from 0 to a length."""
        match self.pattern:
            case "first":
                return self._places().expand(self.shape) % length
            case "dense":
                return (self.shape[self.dim] - 1 - self._places()).expand(self.shape) % length
            case "last":
                return self._below(min(length, 2 * max(self.shape)))
            case "all":
                return self._below(length).flatten()[:1].expand(self.shape).clone()
            case "none":
                return torch.zeros(self.shape, dtype=torch.int64)
            case "sparse":
                return self._few().cumsum(self.dim) % length
            case "blocks":
                return self._by_block(length)
        drawn = self._below(length)
        often = self._rand() < 0.5
        drawn[often] %= _FEW  # several are equal, and small
        return drawn

    def _rand(self) -> Tensor:
        return torch.rand(self.shape, generator=self.generator)

    def _below(self, length: int) -> Tensor:
        return torch.randint(length, self.shape, generator=self.generator)

    def _places(self) -> Tensor:
        places = torch.arange(self.shape[self.dim])
        return places.reshape([-1 if d == self.dim else 1 for d in range(len(self.shape))])

    def _ends(self) -> Tensor:
        """Draws ends, more of them in the first blocks."""
        rows = self._rand().narrow(self.dim, 0, 1).square()
        return (1 + rows * self.shape[self.dim]).long()

    def _few(self) -> Tensor:
        return self._rand() < 2.0 / self.shape[self.dim]

    def _by_block(self, length: int) -> Tensor:
        size = self.shape[self.dim]
        block = (self._places() * self.count // max(size, 1)).expand(self.shape)
        return self._below(length).gather(self.dim, block)


def _repeated(x: Tensor, generator: torch.Generator) -> Tensor:
    """Makes a tensor of few of its slices, so that what is computed of them is often equal too."""
    for dim, size in enumerate(x.shape):
        x = x.index_select(dim, torch.randint(min(size, _SLICES), (size,), generator=generator))
    return x


def widened(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which numbers of a dtype are tried: 64 bits for each real one."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def random_like(like: Tensor, generator: torch.Generator) -> Tensor:
    """Draws random values like a tensor; integers stay in range, so that indices stay valid."""
    if like.dtype == torch.bool or is_integer(like.dtype):
        return _in_range(like, generator)
    return 2 * torch.randn(like.shape, dtype=like.dtype, generator=generator).to(like.device)


def _in_range(like: Tensor, generator: torch.Generator) -> Tensor:
    low, high = (int(like.min()), int(like.max())) if like.numel() else (0, 0)
    if low == high:  # 1: some indices count from one
        low, high = (0, 1) if like.dtype == torch.bool else (min(1, low), high)
    drawn = torch.randint(low, high + 1, like.shape, generator=generator)
    return drawn.to(like.dtype).to(like.device)
