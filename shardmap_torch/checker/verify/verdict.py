"""The verdict on a call: all ways through its body, and repairs where one is rejected."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch

from shardmap_torch.boundary.call import Call, Result
from shardmap_torch.boundary.matching import Fit
from shardmap_torch.checker.guards.replay import End, Following, Step
from shardmap_torch.checker.ir.outcomes import Passage, Settled, Where
from shardmap_torch.checker.ir.paths import every_way
from shardmap_torch.checker.ir.program import Equation, Way
from shardmap_torch.checker.ir.repairs import NONE, Repair, both, proposed, with_tried
from shardmap_torch.checker.rules.infer import Types
from shardmap_torch.checker.verify.merge import differs, settle, with_replicate
from shardmap_torch.checker.verify.path import Round, Strictness, go
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.core.caching import lazy
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.mesh import Mesh
from shardmap_torch.spec import P

Casts = tuple[Collective, ...]


@dataclass(frozen=True)
class Verdict:
    """What the checker found out about one signature of a call.

    Attributes:
        name: of the function.
        mesh: the mesh it is checked for.
        paths: of every argument leaf, by the caller's names.
        specs: the spec of every argument leaf, with no axis left open.
        crossing: positions of those that cross.
        exits: for each position of a result that crosses, the conversions that give it the type
            which its spec promises.
        outputs: shape, dtype and types of each of these results, after them.
        ways: the typed program, forward and backward; several where the body branches on numbers
            taken from tensors.
        result: what the body returned, its tensors without data.
        batches: whether a batched body can do it: nothing that `torch.func.vmap` lacks was met.
        start: the notes of what the body asks of its mesh, with which each run is compared.
    """

    name: str
    mesh: Mesh
    paths: tuple[str, ...]
    specs: tuple[P | None, ...]
    crossing: tuple[int, ...]
    exits: dict[int, Casts]
    outputs: dict[int, tuple[tuple[int, ...], torch.dtype, Types]]
    ways: tuple[Way, ...]
    result: Result
    batches: bool
    start: Step

    @property
    def equations(self) -> tuple[Equation, ...]:
        """Those of all ways, one way after the other."""
        return tuple(equation for way in self.ways for equation in way.equations)

    def apply(self, call: Call, late: End) -> Call:
        """The same call with every axis typed, and with results converted as promised.

        Its runs follow the checked program; `late` is called where a backward leaves it.
        """
        # Not dataclasses.replace, which looks every field up, in each call.
        return Call(
            call.function,
            call.name,
            call.mesh,
            call.bound,
            call.mapped,
            call.leaves,
            self.fit,
            call.structure,
            call.out_specs,
            call.out_fits,
            self.exits,
            partial(Following, self.start, late),
        )

    @lazy
    def fit(self) -> Fit:
        """The fit of the arguments, with every axis typed."""
        return Fit(self.paths, self.specs, self.crossing)


def verify(call: Call, strictness: Strictness) -> Verdict:
    """Interprets the body on fakes and its derived backward.

    With strictness "global" the forward must also be that of the same program on one device.

    Raises:
        ShardTypeError: the program is not well-typed, or would compute wrong gradients.
    """
    try:
        return _attempt(call, NONE, strictness)
    except ShardTypeError as error:
        raise with_tried(error, _search(call, error, strictness)) from None


_TRIES: Final = 8
"""How many repairs are tried at most: each costs as much as the check itself."""


def _search(call: Call, error: ShardTypeError, strictness: Strictness) -> list[str]:
    """The repairs that help, or else the pairs of them that do."""
    right: list[str] = []
    pairs: list[Repair] = []
    tries = list(proposed(error))
    for count, repair in enumerate(tries):
        if count == _TRIES or (right and repair in pairs):
            break
        left = _fails(call, repair, strictness)
        if left is None:
            right.append(repair.text)
        elif repair not in pairs:
            more = [both(repair, other) for other in proposed(left)]
            pairs += more
            tries += more
    return right


def _attempt(call: Call, repair: Repair, strictness: Strictness) -> Verdict:
    this = Round(call, repair, strictness)
    for _ in range(_ROUNDS):
        passages = every_way(call.name, partial(go, this))
        if all(passage.result is None for passage in passages):
            raise _error_of(passages[0])
        settled = settle(this.call, passages)
        if not any(differs(passage, settled) for passage in passages):
            return _verdict(this, settled, passages)
        fit = with_replicate(this.call, settled.replicate)
        this = Round(replace(this.call, fit=fit), repair, strictness, settled)
    raise ShardTypeError(
        f"{call.name}: no types of the inputs and results were found that serve all ways through "
        "the body.\nFix: name the axes of inputs in replicate= or invariant=, or use torch.where."
    )


_ROUNDS: Final = 4
"""How often the ways are gone through again with what they share."""


def _error_of(passage: Passage) -> Exception:
    assert passage.error is not None  # it has no result
    return passage.error


def _verdict(this: Round, settled: Settled, passages: Sequence[Passage]) -> Verdict:
    call = this.call
    first = next(passage for passage in passages if passage.result is not None)
    assert first.result is not None  # by the filter
    exits: dict[int, Casts] = {position: () for position in first.result.fit.crossing}
    for (position, axis), casts in settled.exits.items():
        exits[position] += tuple(Collective(name, src, dst, (axis,)) for name, src, dst in casts)
    return Verdict(
        call.name,
        call.mesh,
        call.fit.paths,
        _closed_specs(call, settled.replicate),
        call.crossing,
        exits,
        first.outputs,
        tuple(passage.way for passage in passages),
        first.result,
        all(passage.batches for passage in passages),
        this.start,
    )


def _closed_specs(call: Call, replicate: frozenset[Where]) -> tuple[P | None, ...]:
    """The specs with every open axis named."""
    specs = list(with_replicate(call, replicate).specs)
    for position in call.crossing:
        spec = specs[position]
        assert spec is not None  # it crosses
        open_axes = set(call.mapped) - spec.named
        specs[position] = P(
            *spec.entries,
            replicate=spec.replicate,
            invariant=spec.invariant | open_axes,
            partial=spec.partial,
        )
    return tuple(specs)


def _fails(call: Call, repair: Repair, strictness: Strictness) -> ShardTypeError | None:
    """What is still wrong with the repair; None where nothing is."""
    if not set(repair.replicate.values()) <= set(call.mapped):
        return ShardTypeError(f"{call.name}: its specs cannot name axes that inner functions bind.")
    fit = with_replicate(call, frozenset(repair.replicate.items()))
    try:
        _attempt(replace(call, fit=fit), repair, strictness)
    except ShardTypeError as error:
        return error
    except Exception as problem:  # the body's own, on shapes that the repair has changed, say
        return ShardTypeError(f"{call.name}: {problem}")
    return None
