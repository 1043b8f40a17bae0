"""Writes calls.json: runs op_db's samples, forward, backward and twice backward.

Run: .venv/bin/python -m tests.checker.support.record_calls
"""

import json
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves

from tests.checker.support.calls import PATH, UnrecordableError, encode

PER_OVERLOAD = 6
SAMPLES = 12


def variant(coded: Any) -> Any:
    """Returns what tells calls apart: all but the sizes of tensors."""
    if isinstance(coded, list):
        if coded and all(isinstance(each, int | float) for each in coded):
            return len(coded)
        return [variant(each) for each in coded]
    if isinstance(coded, dict):
        return (
            {k: variant(v) for k, v in coded.items()}
            if "shape" not in coded
            else (len(coded["shape"]), coded["dtype"])
        )
    return "number" if isinstance(coded, int | float) and not isinstance(coded, bool) else coded


class Recorder(TorchDispatchMode):
    """Keeps a few calls per overload, as different as they come."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[str, dict[str, Any]] = defaultdict(dict)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if isinstance(func, OpOverload):
            self.keep(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def keep(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept = self.calls[str(func)]
        if len(kept) >= 4 * PER_OVERLOAD:
            return
        try:
            coded = [encode(args), {name: encode(value) for name, value in kwargs.items()}]
        except (UnrecordableError, RuntimeError):
            return
        kept.setdefault(json.dumps(variant(coded)), coded)


def scalars(outputs: Any) -> list[Tensor]:
    return [
        out
        for out in tree_leaves(outputs)
        if isinstance(out, Tensor) and out.requires_grad and out.layout == torch.strided
    ]


def derive(outputs: list[Tensor], inputs: list[Tensor], times: int) -> None:
    """Differentiates `times` times."""
    if not outputs or not times:
        return
    seeds = [torch.randn_like(out).requires_grad_(times > 1) for out in outputs]
    grads = torch.autograd.grad(
        outputs, inputs, seeds, create_graph=times > 1, retain_graph=True, allow_unused=True
    )
    derive(scalars(grads), [*inputs, *seeds], times - 1)


def samples(info: Any, dtype: torch.dtype) -> Iterator[Any]:
    made: Iterable[Any] = info.sample_inputs("cpu", dtype, requires_grad=info.supports_autograd)
    for number, sample in enumerate(made):
        if number >= SAMPLES:
            return
        yield sample


def run(info: Any, dtype: torch.dtype, recorder: Recorder) -> None:
    for sample in samples(info, dtype):
        leaves = tree_flatten((sample.input, sample.args, sample.kwargs))[0]
        inputs = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
        try:
            with recorder:
                out = info.op(sample.input, *sample.args, **sample.kwargs)
                derive(scalars(out), inputs, 1)
                if info.supports_gradgrad:
                    derive(scalars(out), inputs, 2)
        except Exception as problem:  # a sample that this build cannot run
            print(info.name, dtype, str(problem).splitlines()[:1])


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    recorder = Recorder()
    for info in op_db:
        for dtype in (torch.float64, torch.complex128):
            if dtype in info.supported_dtypes("cpu"):
                run(info, dtype, recorder)
    kept = {
        name: sorted(calls.values(), key=lambda call: len(json.dumps(call)))[:PER_OVERLOAD]
        for name, calls in sorted(recorder.calls.items())
    }
    lines = [
        f"{json.dumps(name)}: [\n" + ",\n".join("  " + json.dumps(call) for call in calls) + "\n]"
        for name, calls in kept.items()
        if calls
    ]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(len(kept), "overloads")


if __name__ == "__main__":
    main()
