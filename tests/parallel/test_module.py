"""`parallelize` on meshes of one process: unmodified modules compute and learn as before."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional

from shardmap_torch import (
    ColwiseParallel,
    P,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    ShapeDtype,
    ShardTypeError,
    SpecError,
    check_program,
    explain,
    make_mesh,
    parallel,
    parallelize,
)
from tests.parallel import models
from tests.parallel.support.plans import encoder_plan, llama_plan, mlp_plan, sequence_plan
from tests.programs.support.harness import random
from tests.support.golden import hold, hold_own, told

TOKENS = torch.tensor([[0, 7, 11, 3], [5, 5, 6, 1]])
X = random((2, 4, 8), 0)

CASES: dict[str, tuple[Callable[[], nn.Module], Any, Tensor]] = {
    "MLP": (models.mlp, mlp_plan(parallel), X),
    "encoder layer": (models.encoder_layer, encoder_plan(parallel), X),
    "attention": (
        models.SelfAttention,
        PrepareModuleInputOutput(
            input_layouts=Shard(1),
            desired_input_layouts=Replicate(),
            output_layouts=Replicate(),
            desired_output_layouts=Shard(1),
        ),
        X,
    ),
    "Llama": (models.Llama, llama_plan(parallel), TOKENS),
    "Llama, sequence parallel": (models.Llama, sequence_plan(parallel), TOKENS),
}


def mesh(size: int = 2, simulate: Any = "vmap") -> Any:
    return make_mesh((size,), ("tp",), kind="simulated", simulate=simulate)


def assert_same_as_one_device(ours: nn.Module, own: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Values and the gradient of every parameter, in float64."""
    actual, expected = ours(*args, **kwargs), own(*args, **kwargs)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    for out in (actual, expected):
        (out * random(out.shape, 9)).sum().backward()
    for name, value in own.named_parameters():
        found = ours.get_parameter(name).grad
        torch.testing.assert_close(found, value.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("simulate", ["vmap", "ranks"])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_one_device(case: str, simulate: Any) -> None:
    make, plan, x = CASES[case]
    own = make()
    ours = parallelize(copy.deepcopy(own), mesh(simulate=simulate), plan)
    assert_same_as_one_device(ours, own, x)
    assert ours.state_dict().keys() == own.state_dict().keys()


def test_more_ranks_other_axes_and_specs_of_inputs() -> None:
    own = models.Llama()
    on = make_mesh((2, 4), ("dp", "tp"), kind="simulated")
    plan, rows = sequence_plan(parallel), P("dp")
    ours = parallelize(copy.deepcopy(own), on, plan, axis="tp", in_specs=rows, out_specs=rows)
    assert_same_as_one_device(ours, own, TOKENS)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).double()

    def forward(self, x: Tensor, scale: Tensor | None = None, *, add: float = 0.0) -> Tensor:
        y: Tensor = self.linear(x)
        return (y if scale is None else y * scale) + add


@pytest.mark.parametrize(
    "in_specs", [None, P(), (P(), P()), {"x": P(), "scale": P(), "add": None}, (P("tp"), P("tp"))]
)
def test_inputs_may_be_missing_named_or_numbers(in_specs: Any) -> None:
    own, out = Scaled(), P("tp") if in_specs == (P("tp"), P("tp")) else P()
    ours = parallelize(copy.deepcopy(own), mesh(), {}, in_specs=in_specs, out_specs=out)
    scale = random((2, 1, 1), 3)
    if not isinstance(in_specs, dict):
        assert_same_as_one_device(ours, own, X)
    if not isinstance(in_specs, tuple):
        assert_same_as_one_device(ours, own, X, scale=scale, add=2.0)
    else:
        assert_same_as_one_device(ours, own, X, scale=scale)
        with pytest.raises(SpecError, match=r"add: in_specs=.* has no spec for this input"):
            ours(X, scale, add=1.0)


def test_frozen_parameters_stay_frozen_and_shared_ones_shared() -> None:
    own = models.Llama()
    own.output.weight = own.tok_embeddings.weight
    own.norm.weight.requires_grad_(False)
    ours = parallelize(copy.deepcopy(own), mesh(), sequence_plan(parallel))
    assert_same_as_one_device(ours, own, TOKENS)
    assert ours.norm.weight.grad is None


def test_the_fused_path_of_an_encoder_layer_in_evaluation_is_not_taken() -> None:
    own = models.encoder_layer().eval()
    ours = parallelize(copy.deepcopy(own), mesh(), encoder_plan(parallel))
    with torch.no_grad():
        torch.testing.assert_close(ours(X), own(X))
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_collectives_are_those_of_the_literature_and_no_more() -> None:
    on = make_mesh((2,), ("tp",), kind="abstract")
    x = ShapeDtype((2, 4, 8), dtype=torch.float64)

    def moves(module: nn.Module, plan: Any, *args: Any) -> list[str]:
        lines = str(explain(parallelize(module, on, plan), *args)).splitlines()
        found = (line.strip() for line in lines)
        # convert(I -> R) sends nothing, and its backward is an all_reduce.
        return [line.split("(")[0] for line in found if line.startswith(_COLLECTIVES)]

    # Megatron: one all-reduce forward, and one backward (of the input, which here needs none).
    assert moves(models.mlp(), mlp_plan(parallel), x) == ["all_reduce"]
    tokens = ShapeDtype((2, 4), dtype=torch.int64)
    block = ["all_gather", "reduce_scatter"] * 2
    assert moves(models.Llama(), sequence_plan(parallel), tokens)[:6] == [
        "reduce_scatter",  # the embedding
        *block,
        "all_gather",  # before the last layer
    ]


_COLLECTIVES = ("all_gather(", "all_reduce(", "reduce_scatter(", "all_to_all(")


def test_an_abstract_mesh_gives_shapes() -> None:
    on = make_mesh((2048,), ("tp",), kind="abstract")
    module = nn.Sequential(nn.Linear(8, 4096), nn.ReLU(), nn.Linear(4096, 8))
    module = parallelize(module, on, mlp_plan(parallel))
    assert module(ShapeDtype((16, 8))) == ShapeDtype((16, 8))
    check_program(module, ShapeDtype((16, 8)))


# ------------------------------------------------------------------ where torch is silent


def error_of(kind: type[Exception], module: nn.Module, plan: Any, *args: Any, **kw: Any) -> str:
    with pytest.raises(kind) as caught:
        parallelize(module, mesh(), plan, **kw)(*args)
    return str(caught.value)


def test_uneven_heads_are_an_error_that_says_where() -> None:
    module = models.Llama(width=24, num_heads=3)
    text = error_of(SpecError, module, llama_plan(parallel), TOKENS)
    hold_own(text.splitlines()[0])
    assert text.splitlines()[1].startswith("  at models.py:")
    assert text.endswith(
        "\nFix: take a multiple of 2 of them, or leave this layer whole on each rank, without 'tp' "
        "for its weights."
    )


def test_what_a_loss_refuses_is_an_error_that_says_how_to_gather_logits() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 8)

        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            if targets.ndim != 2:
                raise ValueError("targets have two dims")
            return functional.binary_cross_entropy(self.head(x).sigmoid(), targets)

    x, plan = torch.ones(4, 8), {"head": "colwise"}
    hold_own(error_of(SpecError, Model(), plan, x, x))
    assert error_of(ValueError, Model(), plan, x, x[0]) == "targets have two dims"


class Hidden(nn.Module):
    """Two layers, and what is computed between them."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.between = between
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.between(self, self.up(x)))
        return y


COLUMNS, ROWS = ColwiseParallel(), RowwiseParallel()
WHOLE_COLUMNS = ColwiseParallel(output_layouts=Replicate())
BOTH: dict[str, ParallelStyle] = {"up": COLUMNS, "down": ROWS}
GATHERED: dict[str, ParallelStyle] = {
    "up": WHOLE_COLUMNS,
    "down": RowwiseParallel(input_layouts=Replicate()),
}


def prepared(layout: Any) -> ParallelStyle:
    return PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=layout)


MISTAKES: dict[str, tuple[Callable[..., Tensor], Any, Any]] = {
    "a norm of shards": (lambda m, h: m.norm(h), BOTH, GATHERED),
    "a norm of local sizes": (
        lambda m, h: functional.layer_norm(h, h.shape[-1:]),
        BOTH,
        GATHERED,
    ),
    "a bias of all entries": (lambda m, h: h + m.norm.weight, BOTH, GATHERED),
    "a softmax of shards": (lambda m, h: h.softmax(-1), BOTH, GATHERED),
    "halves of shards": (lambda m, h: torch.cat([h.chunk(2, -1)[1]] * 2, -1), BOTH, GATHERED),
    "columns alone": (lambda m, h: h.tanh(), {"up": COLUMNS}, {"up": WHOLE_COLUMNS}),
    "columns twice": (
        lambda m, h: h.tanh(),
        {"up": COLUMNS, "down": WHOLE_COLUMNS},
        {"up": WHOLE_COLUMNS, "down": WHOLE_COLUMNS},
    ),
    "columns twice, of shards": (
        lambda m, h: h.tanh(),
        {"up": COLUMNS, "down": WHOLE_COLUMNS},
        {
            "up": COLUMNS,
            "down": ColwiseParallel(input_layouts=Shard(2), output_layouts=Replicate()),
        },
    ),
    "columns of a norm's shards of the sequence": (
        lambda m, h: m.norm(h),
        {"up": WHOLE_COLUMNS, "norm": SequenceParallel(), "down": WHOLE_COLUMNS},
        {
            **{"up": WHOLE_COLUMNS, "norm": SequenceParallel()},
            "down": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    ),
    "columns of a result that was sharded": (
        lambda m, h: m.norm(h),
        {"up": WHOLE_COLUMNS, "norm": prepared(Shard(1)), "down": WHOLE_COLUMNS},
        {"up": WHOLE_COLUMNS, "norm": prepared(Replicate()), "down": WHOLE_COLUMNS},
    ),
    "rows alone": (lambda m, h: h.tanh(), {"down": ROWS}, {"down": GATHERED["down"]}),
}
"""Code between two layers, a plan that does not fit it, and the plan that its error asks for."""


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_plan_that_does_not_fit_is_told_with_one_that_does(name: str) -> None:
    between, plan, repaired = MISTAKES[name]
    torch.manual_seed(0)
    one = Hidden(between)
    with pytest.raises((SpecError, ShardTypeError)) as caught:
        parallelize(copy.deepcopy(one), mesh(), plan)(X)
    hold("plans.txt", name, f"{caught.value}")
    ours = parallelize(copy.deepcopy(one), mesh(), repaired)
    for module in (one, ours):
        module(X).square().sum().backward()
    torch.testing.assert_close(ours(X), one(X))
    for found, expected in zip(ours.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


@pytest.mark.parametrize("name", ["a view of the whole batch", "labels of the whole batch"])
def test_a_size_of_the_whole_batch_is_told_with_the_rows_of_a_rank(name: str) -> None:
    class Sized(nn.Module):
        def __init__(self, size: Callable[[Tensor], int], labels: Tensor | None) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8).double()
            self.size, self.labels = size, labels

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            y: Tensor = self.linear(x).view(self.size(x), 8, -1).sum(2)
            return functional.cross_entropy(y, labels if self.labels is None else self.labels)

    on, x, labels = make_mesh((2,), ("dp",), kind="simulated"), X.flatten(0, 1), torch.arange(8)
    is_view = name.startswith("a view")
    wrong = Sized(lambda x: 8 if is_view else x.shape[0], None if is_view else labels)
    with pytest.raises(SpecError) as caught:
        parallelize(wrong, on, dp="dp")(x, labels)
    hold("plans.txt", name, f"{caught.value}")
    repaired = Sized(lambda x: x.shape[0], None)
    expected = repaired(x, labels)
    torch.testing.assert_close(parallelize(repaired, on, dp="dp")(x, labels), expected)


def test_a_sequence_that_does_not_divide_is_told_with_its_module_and_sizes() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    text = error_of(SpecError, module, {"1": SequenceParallel()}, torch.randn(2, 17, 8))
    hold("plans.txt", "a sequence of 17", text)


def test_a_result_that_is_not_what_the_root_says_is_an_error() -> None:
    hold_own(error_of(SpecError, models.mlp(), {"2": ColwiseParallel()}, X))


class Norm(nn.Module):
    """Divides hidden values by a number of all of them."""

    def __init__(self, by: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.by = nn.Linear(8, 8).double(), nn.Linear(8, 8).double(), by

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        y: Tensor = self.down(h / self.by(h))
        return y


def test_a_mean_over_shards_is_that_of_one_device() -> None:
    one = Norm(lambda h: h.square().mean(-1, keepdim=True).sqrt())
    ours = parallelize(copy.deepcopy(one), mesh(), {"up": "colwise", "down": "rowwise"})
    for module in (one, ours):
        module(X).square().sum().backward()
    torch.testing.assert_close(ours(X), one(X))
    for found, expected in zip(ours.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


def test_shapes_that_only_agree_locally_are_an_error() -> None:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    by = lambda h: h.std(-1, keepdim=True)  # noqa: E731
    assert "check='global'" in error_of(ShardTypeError, Norm(by), plan, X)
    parallelize(Norm(by), mesh(), plan, check="local")(X)  # each rank's own norm: it only types


CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    ({"linear": ColwiseParallel()}, ("x",), {}),
    (PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()), (X, X), {}),
    (
        PrepareModuleInput(
            input_kwarg_layouts={"scale": Replicate()},
            desired_input_kwarg_layouts={"scale": Replicate()},
        ),
        (X,),
        {},
    ),
    (
        PrepareModuleOutput(
            output_layouts=(Replicate(), Replicate()),
            desired_output_layouts=(Replicate(), Replicate()),
        ),
        (X,),
        {},
    ),
    (SequenceParallel(), (), {"x": X}),
    (ColwiseParallel(input_layouts=Shard(3)), (X,), {}),
]


@pytest.mark.parametrize(("plan", "args", "kwargs"), CALLS)
def test_inputs_and_outputs_that_a_style_cannot_be_about_are_an_error(
    plan: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    module = nn.Linear(8, 8) if isinstance(plan, ColwiseParallel) else Scaled()
    with told(SpecError):
        parallelize(module.double(), mesh(), plan)(*args, **kwargs)


def test_a_forward_that_keeps_values_is_an_error() -> None:
    class Keeps(models.FeedForward):
        def forward(self, x: Tensor) -> Tensor:
            self.last = super().forward(x)
            return self.last

    text = error_of(SpecError, Keeps(8, 16).double(), {}, X)
    assert "  last at test_module.py:" in text
    assert ": self.last = super().forward(x)\n" in text


class Dropped(nn.Module):
    """A layer that is left out at random in training, as in BART and Wav2Vec2."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = models.mlp()

    def forward(self, x: Tensor) -> Tensor:
        chance = torch.rand([])
        if chance < 0.5:
            return x
        y: Tensor = x + self.layer(x)
        return y


def test_a_layer_that_ranks_would_drop_by_their_own_numbers_is_told_to_drop_none() -> None:
    plan = {f"layer.{name}": style for name, style in mlp_plan(parallel).items()}
    ours = parallelize(Dropped(), mesh(), plan)
    with pytest.raises(ShardTypeError) as caught:
        ours(X)
    hold_own(str(caught.value))


class Clamped(nn.Linear):
    """Writes into its weight in training, as Gemma 3n does."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-1.0, 1.0)
        return super().forward(x)


def test_a_forward_that_writes_into_a_parameter_is_told_to_use_the_value() -> None:
    hold_own(error_of(ShardTypeError, nn.Sequential(Clamped(8, 8)).double(), {}, X))
