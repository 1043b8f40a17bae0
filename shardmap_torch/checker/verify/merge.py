"""Merges the outcomes of all paths through a body, which share inputs' specs and results' types."""

from collections.abc import Sequence

from shardmap_torch.boundary.call import Call
from shardmap_torch.boundary.matching import Match
from shardmap_torch.checker.ir.outcomes import Cast, PathOutcome, Resolved, Where
from shardmap_torch.checker.ir.paths import format_branches
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.spec import P


def resolve(call: Call, outcomes: Sequence[PathOutcome]) -> Resolved:
    """Finds the choices that are right for every path.

    Raises:
        ShardTypeError: two paths need different choices; names both.
    """
    returning = [outcome for outcome in outcomes if outcome.result is not None]
    for outcome in returning[1:]:
        shown = [_describe(each) for each in (returning[0], outcome)]
        if shown[0] != shown[1]:
            raise _conflict(call, "return different results", [returning[0], outcome], shown)
    replicate = {
        where
        for outcome in outcomes
        for where, need in outcome.needs.items()
        if _is_replicate(call, returning, where)
    }
    exits = {where: _common(call, returning, where) for where in returning[0].exits}
    return Resolved(frozenset(replicate), exits)


def differs(outcome: PathOutcome, resolved: Resolved) -> bool:
    """Returns whether a path was verified with other choices than those that all paths share."""
    if outcome.result is None:
        return False
    own = {where for where, need in outcome.needs.items() if need.replicate}
    return own != resolved.replicate or any(
        outcome.exits[where].casts != casts for where, casts in resolved.exits.items()
    )


def with_replicate(call: Call, where: frozenset[Where]) -> Match:
    """Returns the match of the arguments with these axes named in `replicate=`."""
    specs = list(call.match.specs)
    for position, axis in where:
        spec = specs[position]
        assert spec is not None  # what has a gradient crosses
        specs[position] = P(
            *spec.entries,
            replicate=spec.replicate | {axis},
            invariant=spec.invariant - {axis},
            partial=spec.partial,
        )
    return Match(call.match.paths, tuple(specs), call.match.crossing)


def _describe(outcome: PathOutcome) -> str:
    assert outcome.result is not None  # the caller has those that return
    match, words = outcome.result.match, []
    for position, path in enumerate(match.paths):
        shape, dtype, _ = outcome.outputs.get(position, ((), None, ()))
        what = "a Python value" if dtype is None else str(dtype).removeprefix("torch.")
        words.append(f"{path}: {what}" + (str(list(shape)) if dtype is not None else ""))
    return ", ".join(words) or "nothing"


def _is_replicate(call: Call, outcomes: Sequence[PathOutcome], where: Where) -> bool:
    needs = [(outcome, outcome.needs[where]) for outcome in outcomes if where in outcome.needs]
    first = needs[0]
    other = next((each for each in needs if each[1].replicate != first[1].replicate), None)
    if other is None:
        return first[1].replicate
    position, axis = where
    words = {
        True: "a sum over the ranks, as from replicate=, of the gradient from",
        False: "no sum, as from invariant=, of the gradient from",
    }
    raise _conflict(
        call,
        f"need different types of input {call.match.paths[position]} over {axis!r}",
        [first[0], other[0]],
        [f"{words[need.replicate]} {need.origin}" for _, need in (first, other)],
    )


def _common(call: Call, outcomes: Sequence[PathOutcome], where: Where) -> tuple[Cast, ...]:
    exits = [outcome.exits[where] for outcome in outcomes]
    for candidate in exits:
        if all(candidate.casts == e.casts or candidate.casts in e.others for e in exits):
            return candidate.casts
    other = next(i for i, each in enumerate(exits) if each.casts != exits[0].casts)
    position, axis = where
    result = outcomes[0].result
    assert result is not None  # these return
    raise _conflict(
        call,
        f"return {result.match.paths[position]} with types over {axis!r} that need different "
        "conversions",
        [outcomes[0], outcomes[other]],
        [f"{_named(exits[i].casts)} of {exits[i].origin}" for i in (0, other)],
    )


def _named(casts: Sequence[Cast]) -> str:
    words = [f"{name}({src} -> {dst})" for name, src, dst in casts]
    return " and ".join(words) or "as it is, the value"


def _conflict(
    call: Call, what: str, outcomes: Sequence[PathOutcome], lines: Sequence[str]
) -> ShardTypeError:
    text = [f"{call.name}: the paths through the body {what}:"]
    for line, outcome in zip(lines, outcomes, strict=True):
        text += [f"  {line}", *(f"  {each}" for each in format_branches(outcome.program.branches))]
    text.append("Fix: give them one type before they leave the branch, or use torch.where.")
    return ShardTypeError("\n".join(text))
