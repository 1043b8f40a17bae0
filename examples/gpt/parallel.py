"""The ways in which the ranks share the work: `dp`, `tp+sp`, `fsdp+tp`, ..., a table of specs each.

Every mesh of the example has the axes "dp" and "tp", of size 1 where a choice does without, and
"cp" and "pp" where they are chosen. Over "dp" the sequences of a batch are sharded, over "cp" their
positions, over "pp" the layers, over "tp" the weights. With "ep" the ranks of "dp" are seen as
"edp" and "ep" too. Dimensions of the weights are named by letters:

    d model width   h heads   k head width   f hidden width   v vocabulary   l layers   e experts
    w the model width of experts   . any other
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Final, TypeAlias

from shardmap_torch import I, P, S
from shardmap_torch.spec import Entry
from shardmap_torch.types import AxisType

Table: TypeAlias = Mapping[str, P]

CHOICES: Final[Mapping[str, str]] = {
    "dp": "the sequences of a batch are sharded",
    "fsdp": "as dp; parameters and moments are sharded too, and gathered layer by layer, in a "
    "pipeline once a step",
    "zero": "as dp; moments are sharded, and each rank updates its part of the parameters",
    "ep": "as dp; feed-forwards are mixtures of experts, which are sharded over a part of dp",
    "cp": "the positions of a sequence are sharded; keys and values go round in a ring",
    "pp": "layers are sharded; microbatches pass from rank to rank",
    "tp": "heads, hidden width and vocabulary are sharded",
    "sp": "with tp, positions are sharded between the layers",
}

WIDTHS: Final = {"d": "dp", "w": "edp"}

SHARDS: Final[Mapping[str, Mapping[str, str]]] = {
    "tp": {"h": "tp", "f": "tp", "v": "tp"},
    "pp": {"l": "pp"},
    "ep": {"e": "ep"},
    "fsdp": WIDTHS,
}
"""The axis over which a choice shards a dimension of the parameters, and of their moments."""

MOMENTS: Final[Mapping[str, Mapping[str, str]]] = {"zero": WIDTHS}
"""The same of the moments alone."""

HEADS: Final = {"embedding": "vd", "final_norm": "d", "unembedding": "dv"}
"""Dimensions of the weights before and behind the layers."""

LAYER: Final = {
    "*_norm": "d",
    "qkv": "dh.k",
    "attention_out": "hkd",
    "gate_up": "d.f",
    "down": "fd",
}
"""Dimensions of a layer's weights."""

EXPERTS: Final = {"router": "d.", "gate_up": "ew.f", "down": "efw"}
"""Of mixtures of experts, in place of the same in `LAYER`."""


@dataclass(frozen=True)
class Parallel:
    """A combination of `CHOICES`, as in `Parallel.of("fsdp+tp")`."""

    chosen: frozenset[str] = frozenset({"dp", "tp", "sp"})

    @staticmethod
    def of(text: str) -> "Parallel":
        """Reads names that are joined by "+".

        Raises:
            ValueError: an unknown name, or names that make no sense together.
        """
        names = text.split("+")
        unknown = [name for name in names if name not in CHOICES]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is none of {', '.join(CHOICES)}")
        if "sp" in names and "tp" not in names:
            raise ValueError("sp needs tp: it shards what tp leaves unsharded between its layers")
        for (name, other), reason in _EXCLUDED.items():
            if name in names and other in names:
                raise ValueError(f"{name} and {other} exclude each other: {reason}")
        return Parallel(frozenset(names))

    def __str__(self) -> str:
        """Writes the choice as users do: `fsdp+tp`."""
        return "+".join(name for name in CHOICES if name in self.chosen)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes whose sizes one chooses, in the order of the mesh."""
        return tuple(axis for axis in self.mesh_axes if self.chosen & _USES[axis])

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """All axes of the mesh."""
        inner = tuple(axis for axis in ("cp", "pp") if axis in self.chosen)
        return "dp", *inner, "tp"

    def mesh_sizes(self, sizes: Iterable[int]) -> tuple[int, ...]:
        """The sizes of all axes of the mesh, given those of `axes`."""
        known = dict(zip(self.axes, sizes, strict=True))
        return tuple(known.get(axis, 1) for axis in self.mesh_axes)

    def views(self, sizes: Iterable[int], experts: int) -> list[dict[str, int]]:
        """The other grids of the same ranks, given the sizes of all axes of the mesh."""
        if not self.has_experts:
            return []
        dp, *others = sizes
        ep = gcd(dp, experts)
        inner = dict(zip(self.mesh_axes[1:], others, strict=True))
        return [{"edp": dp // ep, "ep": ep, **inner}]

    @property
    def has_experts(self) -> bool:
        """Returns whether feed-forwards are mixtures of experts."""
        return "ep" in self.chosen

    @property
    def has_sharded_params(self) -> bool:
        """Returns whether a rank of "dp" holds only a shard of the parameters."""
        return "fsdp" in self.chosen

    @property
    def has_stages(self) -> bool:
        """Returns whether the layers are sharded, as the stages of a pipeline."""
        return "pp" in self.chosen

    @property
    def context(self) -> str | None:
        """The axis over which positions are sharded within the layers."""
        return "cp" if "cp" in self.chosen else None

    def between_layers(self, dim: int = 1) -> AxisType:
        """Returns how activations lie over "tp" between the layers; `dim` is that of positions."""
        return S(dim) if "sp" in self.chosen else I

    @property
    def positions(self) -> tuple[str, ...]:
        """The axes that shard the positions of activations between the layers."""
        return tuple(axis for axis, name in (("cp", "cp"), ("tp", "sp")) if name in self.chosen)

    @property
    def activations(self) -> tuple[Entry, ...]:
        """Returns the axes that shard the activations [b, t, d] between the layers, by dim."""
        return "dp", self.positions or None

    @property
    def data(self) -> tuple[str, ...]:
        """The axes whose ranks see other tokens."""
        return ("dp", "cp") if "cp" in self.chosen else ("dp",)

    @property
    def pending(self) -> tuple[str, ...]:
        """The axes over which the gradients are pending sums; FSDP's backward sums them."""
        return tuple(axis for axis in self.data if axis == "cp" or not self.has_sharded_params)

    @property
    def params(self) -> Table:
        """Specs of the parameters by patterns over their paths."""
        return self._specs(SHARDS)

    @property
    def moments(self) -> Table:
        """Specs of what the optimizer keeps of each parameter."""
        return self._specs(SHARDS, MOMENTS)

    def _specs(self, *tables: Mapping[str, Mapping[str, str]]) -> Table:
        """Shards the dimensions of each weight as the choices do; "tp" has a size always."""
        axes: dict[str, str] = {}
        for table in tables:
            for name in (*self.chosen, "tp"):
                axes |= table.get(name, {})
        layer = LAYER | EXPERTS if self.has_experts else LAYER
        stacked = "l" if self.has_stages else ""
        dims = HEADS | {f"layers.**.{name}": stacked + each for name, each in layer.items()}
        return {name: self._spec([*map(axes.get, each)]) for name, each in dims.items()}

    def _spec(self, entries: list[str | None]) -> P:
        """Makes a spec; with "sp" the ranks of "tp" use what it does not shard on own positions."""
        while entries and entries[-1] is None:
            entries.pop()
        is_used_apart = "sp" in self.chosen and "tp" not in entries
        return P(*entries, replicate={"tp"} if is_used_apart else ())


_USES: Final[Mapping[str, set[str]]] = {
    "dp": {"dp", "fsdp", "zero", "ep"},
    "cp": {"cp"},
    "pp": {"pp"},
    "tp": {"tp"},
}

_EXCLUDED: Final = {
    ("dp", "fsdp"): "fsdp shards the batch as dp does",
    ("dp", "zero"): "zero shards the batch as dp does",
    ("fsdp", "zero"): "fsdp shards the moments too",
}
"""Choices that do not go together, and why."""

DEFAULT: Final = Parallel()
