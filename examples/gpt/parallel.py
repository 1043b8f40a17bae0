"""The ways in which the ranks share the work: `dp`, `tp+sp`, `fsdp+tp`, ..., a table of specs each.

Every mesh of the example has the axes "dp" and "tp", of size 1 where a choice does without, and
"cp" and "pp" where they are chosen. Over "dp" the sequences of a batch are sharded, over "cp" their
positions, over "pp" the layers, over "tp" the weights. With "ep" the ranks of "dp" are seen as
"edp" and "ep" too. Shapes in the tables:

    d model width   h heads   k head width   f hidden width   v vocabulary   l layers   e experts
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
    "fsdp": "as dp; parameters and moments are sharded too, and gathered layer by layer",
    "zero": "as dp; moments are sharded, and each rank updates its part of the parameters",
    "ep": "as dp; feed-forwards are mixtures of experts, which are sharded over a part of dp",
    "cp": "the positions of a sequence are sharded; keys and values go round in a ring",
    "pp": "layers are sharded; microbatches pass from rank to rank",
    "tp": "heads, hidden width and vocabulary are sharded",
    "sp": "with tp, positions are sharded between the layers",
}

WEIGHTS: Final[Table] = {
    "embedding": P("tp"),  # [v, d]
    "**.qkv": P(None, "tp"),  # [d, h, 3, k]
    "**.attention_out": P("tp"),  # [h, k, d]
    "**.gate_up": P(None, None, "tp"),  # [d, 2, f]
    "**.down": P("tp"),  # [f, d]
    "unembedding": P(None, "tp"),  # [d, v]
}
"""Over "tp", the same on every rank of "dp"."""

EXPERTS: Final[Table] = {
    "**.router": P(invariant={"ep"}),  # [d, e]: the layer sums its gradient over "ep"
    "**.gate_up": P("ep", None, None, "tp"),  # [e, d, 2, f]
    "**.down": P("ep", "tp"),  # [e, f, d]
}
"""Of mixtures of experts, in place of the same in `WEIGHTS`."""

STAGES: Final[Table] = {
    "embedding": P("tp"),  # [v, d]
    "layers.*norm": P("pp"),  # [l, d]
    "layers.qkv": P("pp", None, "tp"),  # [l, d, h, 3, k]
    "layers.attention_out": P("pp", "tp"),  # [l, h, k, d]
    "layers.gate_up": P("pp", None, None, "tp"),  # [l, d, 2, f]
    "layers.down": P("pp", "tp"),  # [l, f, d]
    "final_norm": P(),
    "unembedding": P(None, "tp"),  # [d, v]
}
"""Of a pipeline, whose layers are one pytree of stacked weights, in place of `WEIGHTS`."""

WIDTHS: Final[Table] = {
    "embedding": P("tp", "dp"),
    "**.qkv": P("dp", "tp"),
    "**.attention_out": P("tp", None, "dp"),
    "**.gate_up": P("dp", None, "tp"),
    "**.down": P("tp", "dp"),
    "unembedding": P("dp", "tp"),
}
"""Over "tp" and, along the model width, over "dp": parameters of FSDP, moments of ZeRO."""


@dataclass(frozen=True)
class Parallel:
    """A combination of `CHOICES`, as in `Parallel.of("fsdp+tp")`."""

    chosen: frozenset[str] = frozenset({"dp", "tp", "sp"})

    @staticmethod
    def of(text: str) -> "Parallel":
        """Reads names that are joined by "+".

        Raises:
            ValueError: an unknown name, or names that exclude each other.
        """
        names = text.split("+")
        unknown = [name for name in names if name not in CHOICES]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is none of {', '.join(CHOICES)}")
        if "sp" in names and "tp" not in names:
            raise ValueError("sp needs tp: it shards what tp leaves unsharded between its layers")
        for name, others in _EXCLUDED:
            apart = [other for other in names if other in others and other != name]
            if name in names and apart:
                raise ValueError(f"{name} and {apart[0]} exclude each other")
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

    @property
    def residual(self) -> AxisType:
        """Returns how activations [b, t, d] lie over "tp" between the layers."""
        return S(1) if "sp" in self.chosen else I

    @property
    def activations(self) -> tuple[Entry, ...]:
        """Returns the axes that shard the activations [b, t, d] between the layers, by dim."""
        positions = [axis for axis, name in (("cp", "cp"), ("tp", "sp")) if name in self.chosen]
        return "dp", tuple(positions) or None

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
        if self.has_stages:
            return STAGES
        weights = WIDTHS if self.has_sharded_params else WEIGHTS
        return {**weights, **self._experts, **self._norms("fsdp")}

    @property
    def moments(self) -> Table:
        """Specs of what the optimizer keeps of each parameter."""
        if self.has_stages:
            return STAGES
        is_wide = bool(self.chosen & {"fsdp", "zero"})
        weights = WIDTHS if is_wide else WEIGHTS
        return {**weights, **self._experts, **self._norms("fsdp", "zero")}

    @property
    def _experts(self) -> Table:
        return EXPERTS if self.has_experts else {}

    def _norms(self, *wide: str) -> Table:
        """Shards the uses of a norm's scale [d] where positions are sharded over "tp"."""
        entries = ("dp",) if self.chosen & set(wide) else ()
        return {"**.*norm": P(*entries, replicate={"tp"} if "sp" in self.chosen else ())}


_USES: Final[Mapping[str, set[str]]] = {
    "dp": {"dp", "fsdp", "zero", "ep"},
    "cp": {"cp"},
    "pp": {"pp"},
    "tp": {"tp"},
}

_EXCLUDED: Final = (
    ("ep", {"fsdp", "zero", "sp"}),
    ("pp", {"fsdp", "zero", "ep", "sp"}),
    ("dp", {"fsdp", "zero"}),
    ("fsdp", {"zero"}),
)
"""Choices that do not go together."""

DEFAULT: Final = Parallel()
