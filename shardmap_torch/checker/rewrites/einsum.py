"""Rewrites `torch.einsum` so that its steps are the same whatever the sizes are.

torch leaves dims of one entry out of the matrix product that it makes, and a rank may have one
where one device has several. Here a letter that two operands have is one of both at any size.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import torch
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
        labels, kept = _read(equation.replace(" ", ""), [x.ndim for x in tensors])
    except _InvalidError:
        return NotImplemented
    (out, letters), *others = [_diagonal(*pair) for pair in zip(tensors, labels, strict=True)]
    for at, other in enumerate(others):
        later = {*kept, *(letter for _, each in others[at + 1 :] for letter in each)}
        out, letters = _product(out, letters, *other, later)
    out, letters = _sum(out, letters, {*kept})
    return _laid_out(out, letters, kept)


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
    kept = [*before, *(dotted if dots else ()), *after] if arrow else [*dotted, *once]
    if len({*kept}) != len(kept) or not {*kept} <= {*letters}:
        raise _InvalidError
    return labels, kept


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


def _sum(x: Tensor, letters: _Labels, later: set[str]) -> tuple[Tensor, _Labels]:
    """Sums over dims whose letters do not come later."""
    over = [at for at, letter in enumerate(letters) if letter not in later]
    kept = [letter for letter in letters if letter in later]
    return (x.sum(over, dtype=x.dtype) if over else x), kept


def _product(
    x: Tensor, x_letters: _Labels, y: Tensor, y_letters: _Labels, later: set[str]
) -> tuple[Tensor, _Labels]:
    """Multiplies two operands, and sums over what both have and does not come later."""
    x, x_letters = _sum(x, x_letters, later | {*y_letters})
    y, y_letters = _sum(y, y_letters, later | {*x_letters})
    sizes = dict(zip(y_letters, y.shape, strict=True)) | dict(zip(x_letters, x.shape, strict=True))
    both = [letter for letter in x_letters if letter in y_letters]
    summed = [letter for letter in both if letter not in later]
    expanded = any(sizes[each] != y.shape[y_letters.index(each)] for each in both)
    if expanded or not summed:
        order = [*dict.fromkeys([*x_letters, *y_letters])]
        made = _laid_out(x, x_letters, order) * _laid_out(y, y_letters, order)
        return _sum(made, order, later)
    batch = [letter for letter in both if letter in later]
    left = [letter for letter in x_letters if letter not in both]
    right = [letter for letter in y_letters if letter not in both]
    made = torch.bmm(
        _grouped(x, x_letters, (batch, left, summed)),
        _grouped(y, y_letters, (batch, summed, right)),
    )
    letters = [*batch, *left, *right]
    if not len(batch) == len(left) == len(right) == 1:
        made = made.reshape([sizes[letter] for letter in letters])
    return made, letters


def _grouped(x: Tensor, letters: _Labels, groups: Sequence[_Labels]) -> Tensor:
    """Returns the operand with one dim for each group of letters."""
    x = x.permute([letters.index(letter) for group in groups for letter in group])
    if all(len(group) == 1 for group in groups):
        return x
    sizes = iter(x.shape)
    return x.reshape([prod(next(sizes) for _ in group) for group in groups])


def _laid_out(x: Tensor, letters: _Labels, order: _Labels) -> Tensor:
    """Returns a view of the operand with one dim for each letter, in order."""
    x = x.permute([letters.index(letter) for letter in order if letter in letters])
    for at, letter in enumerate(order):
        if letter not in letters:
            x = x.unsqueeze(at)
    return x
