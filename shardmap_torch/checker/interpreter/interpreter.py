"""Interpreter: types every ATen operation of a body, run on fake tensors."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd.graph import Node

from shardmap_torch.checker.interpreter.state import TypeStore
from shardmap_torch.checker.ir.observer import UNOBSERVED
from shardmap_torch.checker.ir.outcomes import Asserted, Traits
from shardmap_torch.checker.ir.paths import Branches, Failing
from shardmap_torch.checker.ir.program import Equation, StorageType, Use, use_of
from shardmap_torch.checker.ir.repairs import Repair, Spot
from shardmap_torch.checker.ir.symbolic import Numbers
from shardmap_torch.checker.rules.infer import (
    Types,
    is_real,
)
from shardmap_torch.core.autograd_state import NONE as NO_BACKWARD
from shardmap_torch.core.autograd_state import running_backward
from shardmap_torch.core.source_location import Site, call_site
from shardmap_torch.core.torch_private.engine import (
    current_autograd_node,
    sequence_number,
)
from shardmap_torch.mesh import Mesh

if TYPE_CHECKING:  # for annotations; it takes a second to import
    from torch.fx.experimental.symbolic_shapes import ShapeEnv


class Interpreter(TypeStore):
    """One interpretation of one body: records its equations, and the types of its tensors."""

    def __init__(
        self, name: str, mesh: Mesh, branches: Branches, repair: Repair, env: "ShapeEnv | None"
    ) -> None:
        """Starts an interpretation of the body `name`, on the path of `branches`.

        `env` has the sizes that are symbols, if any are.
        """
        super().__init__(name, mesh.axis_names, env)
        self.mesh, self.repair = mesh, repair
        self.numbers = Numbers(branches)
        self.failing = Failing(branches)
        self.equations: list[Equation] = []
        self.asserted: list[Asserted] = []
        self.traits, self.is_decomposing = Traits(), False
        self.function: Any = None
        self._made_by: dict[int, Equation] = {}
        # Of Functions, by node and number, with the axes over which ranks have met in it.
        self.results_of: dict[tuple[int, int], tuple[Use, frozenset[int]]] = {}
        self._sequence = 0
        self._count = 0
        self.reductions: dict[Spot, str] = {}

    @property
    def is_special(self) -> bool:
        """Returns whether calls depend on more here than their operands: few bodies get there."""
        return self.is_symbolic or self.is_paused or self.copies.are_stale

    @property
    def is_symbolic(self) -> bool:
        """Returns whether sizes are symbols, or stand-ins for numbers: equal, and not the same."""
        return self.fake.shape_env is not None or self.numbers.any

    @contextmanager
    def decomposing(self) -> Iterator[None]:
        """Marks operations in this context as the decomposition of one operator."""
        before, self.is_decomposing = self.is_decomposing, True
        try:
            yield
        finally:
            self.is_decomposing = before

    def begin(self) -> None:
        """Starts recording autograd nodes; earlier ones are not the body's."""
        self._sequence = sequence_number()

    def forget_nodes(self) -> None:
        """Drops also an error, whose frames have tensors."""
        super().forget_nodes()
        self.numbers.branches.refusal = None

    def needs_ranks(self, what: str | None = "") -> None:
        """Records code that `torch.func.vmap` would reject or, if it says `what`, may drop."""
        if what is not None and not self.is_paused:
            site = call_site()
            at = "in the body" if site is None else f"at {site}"
            where = f"{what}.\n  {at}" if what else ""
            self.traits.rank_only = self.traits.rank_only or where

    @contextmanager
    def batching(self) -> Iterator[None]:
        """Types operations in this context in place of those that a batched body has there."""
        before = self.traits.rank_only
        try:
            yield
        finally:
            self.traits.rank_only = before

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Types operations in this context without adding them to the program."""
        branches, traits = self.numbers.branches, replace(self.traits)
        before = self.equations, self.observer, traits, self._count, branches.refusal
        self.equations, self.observer = [], UNOBSERVED
        try:
            yield
        finally:
            self.equations, self.observer, self.traits, self._count, branches.refusal = before

    def make(
        self, tensor: Tensor, types: Types, equation: Equation, operands: Sequence[Tensor]
    ) -> StorageType:
        """Types a new tensor that an equation computes from its operands."""
        read = list(map(self.storage_type, operands))
        tasks, tokens = self.tasks_of(read), self.tokens_of(operands, read)
        storage = tensor.untyped_storage()
        batched_over = frozenset[int]().union(*(each.batched_over for each in read))
        storage_type = StorageType(
            types, equation, "", storage, tasks=tasks, batched_over=batched_over
        )
        self.types_by_storage[storage._cdata] = storage_type
        if is_real(tensor.dtype):
            storage_type.tokens = tokens
            tensor._shardmap_tokens = tokens  # type: ignore[attr-defined]  # ours
        equation.results = (self.result(tensor),)
        return storage_type

    def count(self, tensor: Tensor) -> int:
        """Numbers a result."""
        self._count += 1
        tensor._shardmap_number = self._count  # type: ignore[attr-defined]  # ours
        return self._count

    def result(self, tensor: Tensor) -> Use:
        """Numbers a result, and returns its use."""
        self.count(tensor)
        return use_of("", tensor, self.storage_type(tensor))

    # --------------------------------------------------------------------------- equations

    def add(self, equation: Equation) -> None:
        """Appends an equation, and links it with the autograd nodes made since the last one."""
        self.equations.append(equation)
        now = sequence_number()
        for number in range(self._sequence, now):
            self._made_by[number] = equation
        self._sequence = now

    def forward_of_current_node(self) -> Equation | None:
        """Returns the equation whose backward runs now, or None."""
        return self.equation_of(current_autograd_node())

    def equation_of(self, node: Node | None) -> Equation | None:
        """Returns the equation whose backward an autograd node is, or None."""
        return None if node is None else self._made_by.get(node._sequence_nr())

    def site(self) -> tuple[Site | None, bool]:
        """Returns the user's line (in a backward the forward's), and whether a backward runs."""
        if running_backward() == NO_BACKWARD:
            return call_site(), False
        forward = self.forward_of_current_node()
        return (forward.site if forward is not None else None), True
