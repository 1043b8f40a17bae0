"""Hardware as data: what a device computes, reads and sends in a second, each figure sourced."""

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final

import torch

from shardmap_torch.core.caching import memo
from shardmap_torch.errors import SpecError, listing, show
from shardmap_torch.mesh import Mesh
from shardmap_torch.planning.dry_run import DryRun, Step


@dataclass(frozen=True)
class Hardware:
    """A cluster of equal hosts with equal devices.

    Attributes:
        name: in reports.
        flops: peak floating-point operations a second, by dtype, without sparsity.
        memory: bytes of memory of one device.
        bandwidth: bytes a second that a device reads and writes in its memory.
        matmul_efficiency: the part of `flops` that large matmuls reach.
        attention_efficiency: likewise of fused attention, of which a causal mask skips half;
            `matmul_efficiency` where it is None.
        launch: seconds that an operator takes at least.
        devices: devices of a host.
        inside: bytes a second that a device sends to others of its host, in one direction.
        between: bytes a second that a device sends to other hosts.
        latency: seconds of one message inside a host.
        latency_between: seconds of one message between hosts.
        source: where the figures are from.
    """

    name: str
    flops: Mapping[torch.dtype, float]
    memory: float
    bandwidth: float
    matmul_efficiency: float = 0.8
    attention_efficiency: float | None = None
    launch: float = 5e-6
    devices: int = 8
    inside: float = math.inf
    between: float = math.inf
    latency: float = 5e-6
    latency_between: float = 10e-6
    source: str = ""

    counts: ClassVar[bool] = False
    """True where Python's own time is part of estimates, so that a dry run counts its frames."""
    hides: ClassVar[bool] = True
    """True where a device computes while messages that it has begun early are on their way."""

    def seconds(self, step: Step) -> float:
        """Computes the time of an operator: its operations or its bytes, whichever take longer."""
        peak = self.flops.get(step.dtype) or self.flops[torch.float32]
        reached = self.attention_efficiency if step.is_attention else None
        computing = step.flops / (peak * (reached or self.matmul_efficiency))
        return max(computing, step.traffic / self.bandwidth, self.launch)

    def on(self, run: DryRun) -> "Hardware":
        """Returns the hardware as the ranks of a run use it."""
        return self

    def overheads(self, run: DryRun) -> Sequence[float]:
        """Returns the time before each step in which the device waits for its host: none.

        An accelerator computes while its host prepares what is next.
        """
        return [0.0] * len(run.steps)

    def sending(self, step: Step, mesh: Mesh) -> float:
        """Computes the time of a collective.

        It is a ring, or a tree for sums so small that its fewer messages count for more. A ring
        that has k ranks of each host crosses to the next host over k links at once, and goes no
        faster than inside one.
        """
        num_ranks, here = mesh.num_ranks(step.axes), ranks_per_host(mesh, step.axes, self.devices)
        is_inside = here == num_ranks
        latency = self.latency if is_inside else self.latency_between
        across = self.between if here == 1 else min(self.inside, here * self.between)
        bandwidth = self.inside if is_inside else across
        ring = step.hops * latency + step.sent / bandwidth
        if step.hops != 2 * (num_ranks - 1):
            return ring
        depth = 2 * math.ceil(math.log2(num_ranks))
        return min(ring, depth * (latency + step.sent / bandwidth))


@memo
def ranks_per_host(mesh: Mesh, axes: Sequence[str], devices: int) -> int:
    """Counts the ranks along `axes` that are on the host of the first one.

    Example:
        >>> from shardmap_torch import make_mesh
        >>> mesh = make_mesh((4, 8), ("dp", "tp"), kind="abstract")
        >>> ranks_per_host(mesh, ("tp",), 8), ranks_per_host(mesh, ("dp",), 8)
        (8, 1)
    """
    along = {*mesh.finest(axes)}
    places = [mesh.coordinates(rank) for rank in range(min(devices, mesh.size))]
    return sum(not any(at for axis, at in place.items() if axis not in along) for place in places)


def read_hardware(path: str | Path) -> Hardware:
    r"""Reads a cluster from the TOML file `path`, whose keys are the fields of `Hardware`.

    Raises:
        SpecError: it is no such file; names all keys that are wrong.

    Example:
        >>> import tempfile
        >>> text = 'name = "mine"\nmemory = 80e9\nbandwidth = 2e12\n[flops]\nfloat32 = 6e13\n'
        >>> with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        ...     _ = file.write(text), file.flush()
        ...     read_hardware(file.name).flops
        {torch.float32: 60000000000000.0}
    """
    try:
        known: dict[str, Any] = tomllib.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise SpecError(f"read_hardware: {path} is no TOML file: {error}.") from None
    problems = [*_wrong_keys(known), *_wrong_values(known)]
    if problems:
        raise SpecError(listing(f"read_hardware: {path}:", sorted(problems)))
    flops = {getattr(torch, name): value for name, value in known["flops"].items()}
    return Hardware(**known | {"flops": flops})


def _wrong_keys(known: Mapping[str, Any]) -> Iterator[str]:
    words = {each.name for each in fields(Hardware)}
    for key in known.keys() - words:
        yield f"{key} is none of {', '.join(sorted(words))}"
    for key in ("name", "flops", "memory", "bandwidth"):
        if key not in known:
            yield f"{key} is missing"


def _wrong_values(known: Mapping[str, Any]) -> Iterator[str]:
    flops = known.get("flops", {})
    is_table = isinstance(flops, dict) and all(
        isinstance(getattr(torch, name, None), torch.dtype) and _is_positive(value)
        for name, value in flops.items()
    )
    if not is_table:
        yield "flops is a table of numbers by dtype, such as bfloat16 = 989e12"
    for each in fields(Hardware):
        value = known.get(each.name, 1)
        if each.name not in ("name", "source", "flops") and not _is_positive(value):
            yield f"{each.name}={show(value)} is no positive number"


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _nvidia(bf16: float, tf32: float, fp32: float, fp64: float) -> Mapping[torch.dtype, float]:
    return MappingProxyType({
        torch.bfloat16: bf16 * 1e12, torch.float16: bf16 * 1e12,
        torch.float32: (fp32 or tf32) * 1e12, torch.float64: fp64 * 1e12,
    })  # fmt: skip


_MATMULS: Final = "matmul efficiency: S. Bekman, Machine Learning Engineering, table of MAMF"
_A100_ATTENTION: Final = "attention: 50 to 73% of the peak, T. Dao 2023, FlashAttention-2"
_H100_ATTENTION: Final = "attention: 370 TFLOP/s of FlashAttention-2, Shah et al. 2024, figure 5"

A100: Final = Hardware(
    "A100 SXM 80 GB", _nvidia(312, 156, 19.5, 19.5), 80 * 10**9, 2.039e12, 0.859, 0.615,
    inside=300e9, between=25e9,
    source=f"NVIDIA A100 data sheet; DGX A100 (200 Gb/s a device); {_MATMULS}; {_A100_ATTENTION}",
)  # fmt: skip
H100: Final = Hardware(
    "H100 SXM 80 GB", _nvidia(989.4, 494.7, 66.9, 66.9), 80 * 10**9, 3.35e12, 0.801, 0.374,
    inside=450e9, between=50e9,
    source=f"NVIDIA H100 data sheet; DGX H100 (400 Gb/s a device); {_MATMULS}; {_H100_ATTENTION}",
)  # fmt: skip
H200: Final = Hardware(
    "H200 SXM 141 GB", _nvidia(989.4, 494.7, 66.9, 66.9), 141 * 10**9, 4.8e12, 0.803, 0.374,
    inside=450e9, between=50e9,
    source=f"NVIDIA H200 data sheet; DGX H200 (400 Gb/s a device); {_MATMULS}; {_H100_ATTENTION}",
)  # fmt: skip
B200: Final = Hardware(
    "B200 SXM 180 GB", _nvidia(2250, 1125, 75, 37), 180 * 10**9, 8e12, 0.776,
    inside=900e9, between=50e9,
    source=f"NVIDIA HGX B200 data sheet; DGX B200 (400 Gb/s a device); {_MATMULS}",
)  # fmt: skip
