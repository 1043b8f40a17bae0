"""Rewrites `torch.einsum` so that its steps are the same whatever the sizes are.

torch leaves dims of one entry out of the matrix product that it makes, and a rank may have one
where one device has several. Here it is the sum of a product whose operands have a dim for each
letter: nothing of that size is ever computed, since the steps are interpreted without data.
"""

from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor

from shardmap_torch.checker.rewrites.copies import Host
from shardmap_torch.core.autocasting import autocast_state

_ELLIPSIS: Final = "..."

_Labels = list[str]
"""A letter for each dim; what an ellipsis stands for is numbered from the last dim on."""


class _InvalidError(Exception):
    """Raised for an equation that torch refuses, and says why."""


def einsum(host: Host, equation: Any, *operands: Any) -> Any:
    """Computes `torch.einsum`; NotImplemented for lists of dims, and where autocast is on."""
    tensors = operands[0] if operands and isinstance(operands[0], list | tuple) else operands
    if not isinstance(equation, str) or not all(isinstance(x, Tensor) for x in tensors):
        return NotImplemented
    if not tensors or any(enabled for _, enabled, _ in autocast_state()):
        return NotImplemented
    try:
        labels, result = _read(equation.replace(" ", ""), [x.ndim for x in tensors])
    except _InvalidError:
        return NotImplemented
    pairs = [_diagonal(*pair) for pair in zip(tensors, labels, strict=True)]
    order = [*result, *sorted({letter for _, each in pairs for letter in each} - {*result})]
    out, *others = [_with_dims(x, letters, order) for x, letters in pairs]
    for other in others:
        out = out * other
    summed = [*range(len(result), len(order))]
    return out.sum(summed, dtype=out.dtype) if summed else out


def _read(equation: str, ranks: Sequence[int]) -> tuple[list[_Labels], _Labels]:
    """Returns the labels of the dims of each operand, and of the result."""
    inputs, arrow, output = equation.partition("->")
    parts = inputs.split(",")
    if len(parts) != len(ranks):
        raise _InvalidError
    labels = [_labels(part, rank) for part, rank in zip(parts, ranks, strict=True)]
    letters = [letter for each in labels for letter in each]
    dotted = sorted({each for each in letters if each.isdecimal()}, key=int, reverse=True)
    once = sorted({each for each in letters if letters.count(each) == 1} - {*dotted})
    before, dots, after = output.partition(_ELLIPSIS)
    result = [*before, *(dotted if dots else ()), *after] if arrow else [*dotted, *once]
    if len({*result}) != len(result) or not {*result} <= {*letters}:
        raise _InvalidError
    return labels, result


def _labels(part: str, rank: int) -> _Labels:
    before, dots, after = part.partition(_ELLIPSIS)
    rest = rank - len(before) - len(after)
    others = [letter for letter in before + after if not letter.isalpha()]
    if others or rest < 0 or (rest and not dots):
        raise _InvalidError
    return [*before, *(str(at) for at in reversed(range(rest))), *after]


def _diagonal(x: Tensor, letters: _Labels) -> tuple[Tensor, _Labels]:
    """Takes the diagonal of dims of the same letter."""
    for letter in dict.fromkeys(letters):
        while letters.count(letter) > 1:
            first = letters.index(letter)
            second = letters.index(letter, first + 1)
            x = x.diagonal(dim1=first, dim2=second)
            others = [each for at, each in enumerate(letters) if at not in (first, second)]
            letters = [*others, letter]
    return x, letters


def _with_dims(x: Tensor, letters: _Labels, order: _Labels) -> Tensor:
    """Returns a view of the operand with one dim for each letter, in order."""
    x = x.permute([letters.index(letter) for letter in order if letter in letters])
    for at, letter in enumerate(order):
        if letter not in letters:
            x = x.unsqueeze(at)
    return x
