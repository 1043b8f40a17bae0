"""Gradients of microbatches, which may be added to one that was there before."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from shardmap_torch.checker.spmd.batches.term_store import ADD_UP, TermStore
from shardmap_torch.checker.spmd.batches.terms import Entry, State, Term, shown, united
from shardmap_torch.checker.spmd.layout import UnrelatedError
from shardmap_torch.core.torch_private.engine import DisableTorchFunction

OPERAND: Final = "operand"


def note_gradient(
    store: TermStore,
    outputs: Sequence[Tensor],
    seeds: Sequence[Tensor | None],
    operand: Tensor,
    gradient: Tensor,
    before: Tensor | None,
    has_custom_backward: bool,
) -> None:
    """Notes a gradient, which may be added to one that was there before.

    Raises:
        UnrelatedError: it is added to another expression, or to that of the same microbatches.
    """
    if not store.is_active:
        return
    old = None if before is None else store.term_of(before)
    terms, own = [store.term_of(x) for x in outputs], store.term_of(operand)
    first = next((term for term in (*terms, own) if term is not None), None)
    if first is not None and has_custom_backward:
        raise UnrelatedError(
            f"it is a gradient of {shown(first)}, and code of your own has worked on it",
            "apply it to the sum of all microbatches.",
        )
    if first is not None and first.is_item:
        raise UnrelatedError(
            f"it is a gradient of, or with respect to, what depends on {shown(first)}",
            "take the gradient of all, with respect to the tensor that has the dim.",
        )
    skeletons = tuple(_skeleton(store, x, operand) for x in outputs)
    values = tuple(map(store.expression_of, outputs))
    if not store.flows(gradient):  # its skeleton says what of the outputs is detached
        values = tuple(map(store.value_of, values))
    expression = store.number(("gradient", values, skeletons))
    term = None
    if first is not None:
        is_seeded = any(seed is not None for seed in seeds)
        term = replace(_term(first, terms, own, is_seeded), expression=expression)
    if before is not None and (old is not None or term is not None):
        term = united(old, term)
        if term is None:
            raise UnrelatedError(
                "it is added to a gradient in .grad that is not the same expression of other "
                "microbatches",
                ADD_UP,
            )
    store.forget_written([gradient])
    store.put(gradient, Entry(expression, None) if term is None else store.sum_entry(term))


def _term(first: Term, terms: Sequence[Term | None], own: Term | None, is_seeded: bool) -> Term:
    """Returns what a gradient is of the microbatches of its loss and of its value."""
    known = all(
        each is not None and each.group == first.group and each.indices == first.indices
        for each in (*terms, own or first)
    )
    if not known or len(first.indices) > 1:
        raise UnrelatedError(
            "it is the gradient of a loss of several microbatches",
            "take the gradient of each by itself, and add these up.",
        )
    additive = all(each is not None and each.state == "additive" for each in terms)
    plain = additive and not is_seeded
    state: State = "additive" if plain else "mixed"
    if own is not None:
        state = "rows" if plain and own.state == "rows" else "mixed"
    return replace(first, state=state)


def _skeleton(store: TermStore, output: Tensor, operand: Tensor) -> int:
    """Returns a number of the paths from an output to an operand, which equal paths share."""
    with store.interpreter.paused(), DisableTorchFunction():
        target = None if operand.grad_fn is None else (operand.grad_fn, operand.output_nr)
        start = get_gradient_edge(output)[:2] if output.requires_grad else (None, 0)
    labels: dict[Node | None, int | None] = {None: None}

    def leading(edge: tuple[Node | None, int]) -> Any:
        """Returns what an edge leads to; None if it is not the operand."""
        label = labels[edge[0]]
        # A leaf is known by its node: a transform that has ended leaves no way from it to that.
        is_leaf = target is None and getattr(edge[0], "variable", None) is operand
        is_operand = is_leaf or edge == target
        return OPERAND if is_operand else None if label is None else (label, edge[1])

    stack = [start[0]]
    while stack:
        node = stack[-1]
        if node is None or node in labels:
            stack.pop()
            continue
        missing = [n for n, _ in node.next_functions if n not in labels]
        if missing:
            stack += missing
            continue
        edges = tuple(map(leading, node.next_functions))
        labels[stack.pop()] = store.number((node.name(), edges)) if any(edges) else None
    return store.number(("paths", leading(start)))
