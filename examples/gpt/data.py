"""Real text that every Python brings along: the help topics, as bytes."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pydoc_data.topics import topics

import torch
from torch import Tensor


def load_text() -> bytes:
    """All help topics, about 466 kB of English and Python; it differs little between versions."""
    return "\n".join(topics[name] for name in sorted(topics)).encode()


def unigram_entropy(text: Sequence[int]) -> float:
    """Nats a byte for a model that knows how often each byte occurs."""
    return _entropy(Counter(text))


def bigram_entropy(text: Sequence[int]) -> float:
    """Nats a byte for a model that also knows the byte before: H(pair) - H(first of pair)."""
    return _entropy(Counter(pairwise(text))) - _entropy(Counter(text[:-1]))


def _entropy(counts: Counter[int] | Counter[tuple[int, int]]) -> float:
    total = counts.total()
    return -sum(n / total * math.log(n / total) for n in counts.values())


def sample_batch(text: Tensor, length: int, size: int, seed: int) -> Tensor:
    """Windows [size, length + 1] at places that depend on the seed alone, so on no rank."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length, (size, 1), generator=generator)
    return text[starts + torch.arange(length + 1)]
