"""The typed program as rows, which share tables of their operands, types and lines."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import torch

from shardmap_torch.checker.ir.paths import Branch
from shardmap_torch.checker.ir.program import (
    Equation,
    KernelCollective,
    ProgramPath,
    StorageType,
    Use,
)
from shardmap_torch.checker.stored.encoding import EncodingError, Json, decode, encode

_NONE: Final = -1


@dataclass
class _Table:
    """Distinct values, each written once, and numbers that stand for them."""

    rows: list[Json] = field(default_factory=list)
    numbers: dict[Hashable, int] = field(default_factory=dict)

    def number(self, key: Hashable, write: Any = encode) -> int:
        """Returns the number of a value, which is written if it is new."""
        known = self.numbers.get(key)
        if known is None:
            known = self.numbers[key] = len(self.rows)
            self.rows.append(write(key))
        return known


class _Writer:
    def __init__(self) -> None:
        self.values, self.uses = _Table(), _Table()

    def path(self, path: ProgramPath) -> Json:
        places = {id(equation): at for at, equation in enumerate(path.equations)}
        return {
            "branches": [encode((b.condition, b.holds, b.site)) for b in path.branches],
            "equations": [self._equation(equation, places) for equation in path.equations],
            "end": path.end,
            "gradients": encode(path.gradients),
        }

    def _equation(self, equation: Equation, places: dict[int, int]) -> Json:
        forward = _NONE if equation.forward is None else places.get(id(equation.forward))
        if forward is None or forward >= places[id(equation)]:
            raise EncodingError("the derivative of an operation of another program")
        number = self.values.number
        compared = [(k.collective, k.operand, k.sent, k.backward) for k in equation.compared]
        return [
            equation.name,
            [self._use(use) for use in equation.operands],
            [self._use(use) for use in equation.results],
            number(equation.site),
            int(equation.backward),
            number(equation.collective),
            encode(equation.sent),
            equation.literals,
            forward,
            number(equation.place),
            number(equation.written),
            number(tuple(compared)),
        ]

    def _use(self, use: Use) -> int:
        outside = use.number is None
        storage_type = use.storage_type
        parts = (
            use.name,
            use.types,
            use.dtype,
            tuple(use.shape),
            use.number,
            storage_type.label if outside else "",
            storage_type.numbers if outside else "",
        )
        return self.uses.number(parts, lambda key: [self.values.number(each) for each in key])


def write_program(paths: Sequence[ProgramPath]) -> Json:
    """Writes the typed program of all paths through a body.

    Raises:
        EncodingError: it has values that only this process has.
    """
    writer = _Writer()
    rows = [writer.path(path) for path in paths]
    return {"paths": rows, "uses": writer.uses.rows, "values": writer.values.rows}


def read_program(content: Json) -> tuple[ProgramPath, ...]:
    """Reads what `write_program` wrote."""
    values = [decode(value) for value in content["values"]]
    uses = [_read_use([values[at] for at in row]) for row in content["uses"]]
    return tuple([_read_path(path, values, uses) for path in content["paths"]])


@lru_cache(maxsize=1)
def _no_storage() -> torch.UntypedStorage:
    return torch.UntypedStorage(0)


def _read_use(row: Sequence[Any]) -> Use:
    name, types, dtype, shape, number, label, numbers = row
    storage_type = StorageType(types, None, label, _no_storage(), numbers=numbers)
    return Use(name, storage_type, types, dtype, shape, number)


def _read_path(content: Json, values: Sequence[Any], uses: Sequence[Use]) -> ProgramPath:
    equations: list[Equation] = []
    for row in content["equations"]:
        name, operands, results, site, backward, collective, sent, literals, *rest = row
        forward, place, written, compared = rest
        equations.append(
            Equation(
                name,
                tuple([uses[at] for at in operands]),
                tuple([uses[at] for at in results]),
                values[site],
                bool(backward),
                values[collective],
                decode(sent),
                literals,
                None if forward == _NONE else equations[forward],
                values[place],
                values[written],
                tuple([KernelCollective(*each) for each in values[compared]]),
            )
        )
    return ProgramPath(
        tuple([Branch(*decode(branch)) for branch in content["branches"]]),
        tuple(equations),
        content["end"],
        decode(content["gradients"]),
    )
