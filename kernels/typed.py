"""Kernel calls in a body that is checked: the composition runs; kernels are compared with it."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from shardmap_torch.collectives.operations import Collective
from shardmap_torch.collectives.protocol import Backend, Checker, Form
from shardmap_torch.kernels.autograd import KernelCall, Operands, Unfused
from shardmap_torch.kernels.engine import Engine, Typed
from shardmap_torch.kernels.executor import Choice
from shardmap_torch.kernels.network import Collectives
from shardmap_torch.kernels.planner import ASSUMED_GPU, Options, Plan, record
from shardmap_torch.kernels.symmetric import Symmetric


def typed_calls(
    backend: Backend, collective: Collective, options: Options, *, fused: bool
) -> dict[str, KernelCall]:
    """Returns the calls that a run may execute, as typed collectives, by their names in errors.

    `fused` adds the one that uses the operators of symmetric memory.
    """
    collectives = Collectives(backend, collective.axes, collective.dst)
    engines: dict[str, Engine] = {"overlapped": Typed(collectives)}
    if fused:
        engines["on symmetric memory"] = Symmetric(collectives)
    choice = Choice("typed", 1)
    return {
        name: KernelCall(backend, engine, lambda dtype: ASSUMED_GPU, collective, choice, options)
        for name, engine in engines.items()
    }


@dataclass(frozen=True, slots=True)
class Checked:
    """Runner of a call in a body that is checked, and that a run may overlap.

    The composition gives the types of the results and the derived backward, for a run may take
    either. The kernels are checked to be equivalent to it.
    """

    checker: Checker
    kernels: Mapping[str, KernelCall]
    unfused: Unfused
    plan: Plan

    def gather(self, x: Tensor, ws: Sequence[Tensor], biases: Operands) -> tuple[Tensor, ...]:
        """Computes `all_gather(x) @ w + bias` for each w."""
        count = len(ws)
        biased = tuple(bias is not None for bias in biases)

        def form(runner: KernelCall | Unfused) -> Form:
            def run(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
                present = iter(rest[count:])
                addends = [next(present) if has_bias else None for has_bias in biased]
                return runner.gather(x, rest[:count], addends)

            return run

        present = [bias for bias in biases if bias is not None]
        self._check_equivalent(form, (x, *ws, *present), biased)
        return self.unfused.gather(x, ws, biases)

    def reduce(self, x: Tensor, w: Tensor) -> Tensor:
        """Computes the reduce-scatter or all-reduce of `x @ w`."""
        self._check_equivalent(lambda runner: lambda x, w: (runner.reduce(x, w),), (x, w))
        return self.unfused.reduce(x, w)

    def _check_equivalent(
        self,
        form: Callable[[KernelCall | Unfused], Form],
        operands: Sequence[Tensor],
        biased: Hashable = (),
    ) -> None:
        for name, kernel in self.kernels.items():
            what = f"{self.plan.op}, {name}", kernel.collective, kernel.options, biased
            self.checker.check_equivalent(what, form(kernel), form(self.unfused), operands)
        record(self.plan)  # Their backwards have recorded their own.
