"""Record: one path through a body, and its derived backward, as a list of steps.

A step is an ATen operator or a collective, and each tensor that it reads or makes a number. So the
program can run again without its code, autograd or threads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardmap_torch.core.source_location import Site
from shardmap_torch.core.torch_private.engine import OpOverload


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor of a record: entries of some memory, by number."""

    number: int


@dataclass(frozen=True, slots=True)
class Move:
    """A collective: the movement of data that a mesh makes for it.

    Attributes:
        name: of the movement.
        collective: what it is called with.
    """

    name: str
    collective: Any


@dataclass(frozen=True, slots=True)
class Index:
    """The position of a rank along axes."""

    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One step.

    Attributes:
        run: an operator, a collective, or an index.
        arguments: by name, with slots in place of tensors.
        results: what it makes, or writes if it returns nothing.
        site: the user's line.
        is_derived: whether autograd runs it, in a formula of its own.
        function: the function of torch in which the body calls it.
        in_region: whether it is of a `local_region`.
        dtype: that of its first result, None if it has none.
    """

    run: OpOverload | Move | Index
    arguments: Mapping[str, Any]
    results: tuple[Slot, ...]
    site: Site | None
    is_derived: bool
    function: Any
    in_region: bool
    dtype: torch.dtype | None


@dataclass
class Record:
    """The steps of a path, with what enters and leaves.

    Attributes:
        steps: of the forward, up to the conversions of its results.
        backward: of the derived backward, up to the sums of gradients that specs imply.
        inputs: the arguments that cross, in order.
        closures: the tensors that the body closes over, with the lines that use them first.
        results: by path; a value that is no tensor as it is.
        seeds: the cotangents of results, by path.
        gradients: those of the inputs; None where there is none.
        lacks: why it cannot be evaluated; empty if it can.
    """

    steps: list[Step] = field(default_factory=list)
    backward: list[Step] = field(default_factory=list)
    inputs: list[Slot] = field(default_factory=list)
    closures: dict[Slot, tuple[Tensor, Site | None]] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    seeds: dict[str, Slot] = field(default_factory=dict)
    gradients: list[Slot | None] = field(default_factory=list)
    lacks: str = ""
