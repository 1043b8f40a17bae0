"""Every style and layout that torch documents gives what torch gives, on two processes or four."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Placement, Shard

from tests.parallel import models
from tests.parallel.beside_torch import Row, assert_same, by_torch, by_us
from tests.parallel.support.plans import (
    LAST,
    S0,
    S1,
    SUM,
    R,
    embedding,
    encoder_plan,
    linear,
    llama_plan,
    mlp_plan,
    sequence_plan,
    style,
)
from tests.programs.support.harness import worker_mesh
from tests.support.fuzzing import sampled, sized
from tests.support.pool import Gloo

ALL = (R, S0, S1, LAST, SUM)


def shape(layout: Placement) -> tuple[int, ...]:
    """Returns the shape that one of the processes has of a tensor [4, 4, 8]."""
    sizes = [4, 4, 8]
    if isinstance(layout, Shard):
        sizes[layout.dim] //= dist.get_world_size()
    return tuple(sizes)


def ids(layout: Placement) -> list[list[int]]:
    rows = [[0, 7, 11, 3], [5, 5, 6, 1], [2, 9, 2, 8], [10, 4, 3, 0]]
    num_each = 4 // dist.get_world_size()
    if layout == S0:
        return rows[:num_each]
    return [row[:num_each] for row in rows] if layout in (S1, LAST) else rows


def linears() -> Iterator[tuple[str, Row]]:
    for name, have, out, local in product(
        ("ColwiseParallel", "RowwiseParallel"), ALL, ALL, (True, False)
    ):
        if name == "ColwiseParallel" and out == SUM:
            continue  # torch cannot
        plan = style(name, input_layouts=have, output_layouts=out, use_local_output=local)
        row = Row(linear, plan, (shape(have),), is_sum=out == SUM)
        yield f"{name} Linear {have} {out} {local}", row


def embeddings() -> Iterator[tuple[str, Row]]:
    for name, have, out in product(
        ("ColwiseParallel", "RowwiseParallel"), (R, S0, S1, LAST), (R, S0, S1, LAST)
    ):
        plan = style(name, input_layouts=have, output_layouts=out)
        yield f"{name} Embedding {have} {out}", Row(embedding, plan, (ids(have),))


def embeddings_as_dtensors() -> Iterator[tuple[str, Row]]:
    for name, out in product(("ColwiseParallel", "RowwiseParallel"), (R, S0, S1, LAST)):
        plan = style(name, input_layouts=R, output_layouts=out, use_local_output=False)
        yield f"{name} Embedding {out}", Row(embedding, plan, (ids(R),))


def only_one_side() -> Iterator[tuple[str, Row]]:
    for desired, local in product((R, S0, S1), (True, False)):
        before = style(
            "PrepareModuleInput",
            input_layouts=desired,
            desired_input_layouts=R,  # else nothing says how the output is sharded, an error here
            use_local_output=True,
        )
        yield f"input {desired}", Row(lambda: nn.Tanh().double(), before, (shape(desired),))
        after = style(
            "PrepareModuleOutput",
            output_layouts=R,
            desired_output_layouts=desired,
            use_local_output=local,
        )
        yield f"output {desired} {local}", Row(lambda: nn.Tanh().double(), after, (shape(R),))


def sequences() -> Iterator[tuple[str, Row]]:
    for dim, local in product((0, 1), (True, False)):
        plan = style("SequenceParallel", sequence_dim=dim, use_local_output=local)
        given = (shape(Shard(dim)),)
        yield f"norm {dim} {local}", Row(lambda: nn.LayerNorm(8).double(), plan, given)
        yield f"RMS norm {dim} {local}", Row(lambda: models.RMSNorm(8).double(), plan, given)
        yield f"dropout {dim} {local}", Row(lambda: nn.Dropout(0.0), plan, given)


def changes() -> Iterator[tuple[str, Row]]:
    """Inputs and outputs that go from any layout to any that torch can make of it."""
    pairs = [(a, b) for a, b in product(ALL, ALL) if b != SUM or a == SUM]
    for (have, desired), local in product(pairs, (True, False)):
        if desired == SUM:
            continue  # the module would compute with an addend, which only linear ones can
        plan = style(
            "PrepareModuleInputOutput",
            input_layouts=have,
            desired_input_layouts=desired,
            use_local_input=True,
            output_layouts=desired,
            desired_output_layouts=have if have != SUM else R,
            use_local_output=local,
        )
        name = f"prepare {have} {desired} {local}"
        yield name, Row(lambda: nn.Tanh().double(), plan, (shape(have),))


class Two(nn.Module):
    """Two inputs and outputs, one of each by keyword or not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).double()

    def forward(self, x: Any, scale: Any = None, *, y: Any) -> tuple[Any, Any]:
        return self.linear(x) * (1 if scale is None else scale), y.tanh()


def keywords() -> Iterator[tuple[str, Row]]:
    plan = style(
        "PrepareModuleInputOutput",
        input_layouts=(S1, None),
        desired_input_layouts=(R, None),
        input_kwarg_layouts={"y": S0},
        desired_input_kwarg_layouts={"y": S1},
        use_local_input=True,
        output_layouts=(R, S1),
        desired_output_layouts=(S0, R),
    )
    yield "keywords", Row(Two, plan, (shape(S1), shape(R)), {"y": shape(S0)})


def whole_modules() -> Iterator[tuple[str, Row]]:
    x, tokens = (2, 4, 8), [[0, 7, 11, 3], [5, 5, 6, 1]]
    yield "MLP", Row(models.mlp, mlp_plan, (x,))
    yield "encoder layer", Row(models.encoder_layer, encoder_plan, (x,))
    yield "attention", Row(models.SelfAttention, attention_plan, (shape(S1),))
    yield "Llama", Row(models.Llama, llama_plan, (tokens,))
    yield "Llama, sequence parallel", Row(models.Llama, sequence_plan, (tokens,))


def attention_plan(package: Any) -> Any:
    """Returns what torch can do of nn.MultiheadAttention: gather before it, scatter after it."""
    return package.PrepareModuleInputOutput(
        input_layouts=S1,
        desired_input_layouts=R,
        use_local_input=True,
        output_layouts=R,
        desired_output_layouts=S1,
    )


FAMILIES = {
    "linears": linears,
    "embeddings": embeddings,
    "embeddings as DTensors": embeddings_as_dtensors,
    "one side": only_one_side,
    "sequences": sequences,
    "changes": changes,
    "keywords": keywords,
    "modules": whole_modules,
}


# `make test` takes one row in so many; no number of layouts is a multiple of it.
STEPS = {"linears": 7, "embeddings": 3, "changes": 3}


def compare(family: str, step: int) -> int:
    mesh, rank = worker_mesh((dist.get_world_size(),), ("tp",)), dist.get_rank()
    rows = list(FAMILIES[family]())[::step]
    for name, row in rows:
        biases = None if family == "modules" else 1
        assert_same(name, by_us(row, mesh, rank), by_torch(row, mesh, rank), biases)
    return len(rows)


@pytest.mark.parametrize("processes", sampled([2, 4], 2))
@pytest.mark.sample(5)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_style_gives_the_values_and_gradients_that_torch_gives(
    family: str, processes: int, gloo: Gloo
) -> None:
    step = sized(STEPS.get(family, 1), 1)
    assert gloo(processes).run(compare, family, step, timeout=250)[0] > 0
