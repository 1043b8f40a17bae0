"""Cost model of transfers (latency and bandwidth) and of matmuls (roofline)."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Fabric:
    """Speed of one rank and of its link, in seconds, bytes and flops.

    Attributes:
        latency: Seconds from the start of a message to the arrival of its first byte (alpha).
        bandwidth: Bytes a second in each direction of a rank's link (1 / beta).
        flops: Multiply and add operations a second in a large matmul.
        memory: Bytes a second that element-wise work moves.
        launch: Fixed seconds of every matmul or sum.
        overlap: Share of a transfer that can proceed while this rank computes; 1 where a network
            card moves the bytes, near 0 on loopback, where the same cores do.
    """

    latency: float
    bandwidth: float
    flops: float
    memory: float = float("inf")
    launch: float = 0.0
    overlap: float = 1.0

    def transfer(self, num_bytes: float) -> float:
        """Predicts the seconds from send to arrival of one message on an idle link."""
        return self.latency + num_bytes / self.bandwidth

    def compute(self, flops: float, traffic: float = 0.0) -> float:
        """Predicts the seconds of one kernel: the slower of arithmetic and memory (roofline)."""
        return self.launch + max(flops / self.flops, traffic / self.memory)


ASSUMED_GPU: Final = Fabric(
    latency=5e-6, bandwidth=0.8 * 450e9, flops=0.7 * 989e12, memory=0.8 * 4.8e12, launch=2e-6
)
"""An H200 on NVLink in bfloat16, from data sheets and estimates (docs/overlap.md), not measured."""
