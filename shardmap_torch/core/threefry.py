"""One block of Threefry-2x32 with 20 rounds, on Python numbers.

`shardmap_torch/random/blocks.py` has it for tensors, and says what it is for.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011;
`jax.random` uses the same generator.
"""

from typing import Final

WORD: Final = 0xFFFFFFFF
PARITY: Final = 0x1BD11BDA
ROTATIONS: Final = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry_of_ints(key: int, counter: int) -> int:
    """Computes one 64-bit block from a 64-bit key and a 64-bit counter.

    Example:
        >>> hex(threefry_of_ints(0, 0))
        '0x6b20015999ba4efe'
    """
    keys = (key >> 32 & WORD, key & WORD)
    schedule = (*keys, keys[0] ^ keys[1] ^ PARITY)
    high, low = (counter >> 32) + keys[0] & WORD, counter + keys[1] & WORD
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            high = high + low & WORD
            low = (low << rotation & WORD | low >> 32 - rotation) ^ high
        high = high + schedule[(group + 1) % 3] & WORD
        low = low + schedule[(group + 2) % 3] + group + 1 & WORD
    return high << 32 | low
