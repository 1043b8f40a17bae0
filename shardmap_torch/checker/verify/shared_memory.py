"""Results of a body that share memory with its inputs."""

from typing import Final

from shardmap_torch.checker.ir.program import StorageType

_COPIES: Final = frozenset({"clone"})
"""Operations that copy here and may return their operand at run time: `contiguous`, `reshape`."""


def input_sharing(result: StorageType) -> int | None:
    """Returns the position of the input whose memory a result may have at run time.

    Here each conversion gives a storage of its own, since a storage has one type.
    """
    while result.leaf is None:
        made = result.made
        collective = None if made is None else made.collective
        is_view = collective is not None and collective.movement.shares
        if made is None or not (is_view or made.name in _COPIES):
            return None
        result = made.operands[0].storage_type
    return result.leaf
