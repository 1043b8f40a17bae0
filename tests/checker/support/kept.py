"""The cases of the global fuzzer that are kept."""

from shardmap_torch.checker.spmd.layout import broadcast
from shardmap_torch.checker.spmd.sharded import Sharded, Step


def kept(step: Step) -> list[Sharded]:
    """Says that any operation keeps the shardings of its operands."""
    return [Sharded(broadcast(step.shards, len(whole))) for _, whole in step.results]
