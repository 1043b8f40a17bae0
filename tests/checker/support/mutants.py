"""Rows, each loosened in one place: what the validator must catch."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch._ops import OpOverload

from shardmap_torch.checker.rules.rule import Row, always, never


def tensor_names(op: OpOverload) -> list[str]:
    return [a.name for a in op._schema.arguments if "Tensor" in str(a.type) and not a.is_out]


def mutants(op: OpOverload, row: Row) -> Iterator[tuple[str, Row]]:
    """Every loosening of one claim, with what it says."""
    if row.results:
        for i, each in enumerate(row.results):
            for what, other in _loosened(op, each):
                yield f"result {i}: {what}", _with_result(row, i, other)
        for i, j in itertools.permutations(range(len(row.results)), 2):
            if row.results[i] != row.results[j]:
                yield f"result {i} as {j}", _with_result(row, i, row.results[j])
        return
    yield from _loosened(op, row)


def _with_result(row: Row, index: int, other: Row) -> Row:
    return replace(row, results=(*row.results[:index], other, *row.results[index + 1 :]))


def _loosened(op: OpOverload, row: Row) -> Iterator[tuple[str, Row]]:
    used = {name for term in row.linear for name in term}
    others = [name for name in tensor_names(op) if name not in used | set(row.unread)]
    yield from _loosened_terms(row, others)
    for name in [*others, *sorted(used & set(tensor_names(op)))]:
        terms = tuple(term for term in row.linear if name not in term)
        yield f"unread {name}", replace(row, linear=terms, unread=(*row.unread, name))
    if not row.zero and not (row.draws is None and torch.Tag.nondeterministic_seeded in op.tags):
        yield "zero", replace(row, zero=True)
    if row.when is not always:
        yield "whenever", replace(row, when=always)
    if row.draws not in (None, never):
        yield "never draws", replace(row, draws=never)


def _loosened_terms(row: Row, others: list[str]) -> Iterator[tuple[str, Row]]:
    for name in others:
        yield f"+ {name}", replace(row, linear=(*row.linear, (name,)))
        for i, term in enumerate(row.linear):
            yield f"{'*'.join(term)} * {name}", _with_term(row, i, ((*term, name),))
    for i, term in enumerate(row.linear):
        if len(term) > 1:
            yield f"{' + '.join(term)}", _with_term(row, i, tuple((name,) for name in term))
    if len(row.linear) > 1:
        yield "all one product", replace(row, linear=(tuple(itertools.chain(*row.linear)),))


def _with_term(row: Row, index: int, terms: tuple[tuple[str, ...], ...]) -> Row:
    return replace(row, linear=(*row.linear[:index], *terms, *row.linear[index + 1 :]))
