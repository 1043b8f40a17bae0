"""A wrong plan is refused at the module that fails, with a change of the plan that is right."""

import copy
import re
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional

import shardmap_torch
from shardmap_torch import (
    ColwiseParallel,
    LocalAttributes,
    RowwiseParallel,
    ShardMapError,
    full,
    make_mesh,
    parallel,
    parallelize,
)
from tests.parallel import models
from tests.parallel.support.plans import llama_plan
from tests.programs.support.harness import worker_mesh
from tests.support import golden
from tests.support.pool import Gloo


class Block(nn.Module):
    def __init__(self, local: bool) -> None:
        super().__init__()
        self.heads = -1 if local else 4
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (
            each(x).view(b, t, self.heads, 2).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        y = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, -1))
        out: Tensor = x + self.down(functional.gelu(self.up(x)))
        return out


class Model(nn.Module):
    def __init__(self, local: bool = True) -> None:
        super().__init__()
        self.emb, self.pos = nn.Embedding(12, 8), nn.Embedding(4, 8)
        self.blocks = nn.ModuleList([Block(local)])
        self.head = nn.Linear(8, 12)
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.emb(ids) + self.pos(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


PLAN: dict[str, Any] = {
    "emb": RowwiseParallel(input_layouts=Replicate()),
    "blocks.*.q": ColwiseParallel(),
    "blocks.*.k": ColwiseParallel(),
    "blocks.*.v": ColwiseParallel(),
    "blocks.*.o": RowwiseParallel(),
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
IDS = torch.arange(8).view(2, 4)

MISTAKES: dict[str, dict[str, Any]] = {
    "a value projection is missing": {"blocks.*.v": None},
    "an output projection is missing": {"blocks.*.o": None},
    "two styles have changed places": {
        "blocks.*.up": RowwiseParallel(),
        "blocks.*.down": ColwiseParallel(),
    },
    "positions beside shards of a sequence": {
        "emb": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    },
    "logits stay sharded": {"head": ColwiseParallel()},
    "all heads are asked for": {},
}


def plan_with(changes: dict[str, Any]) -> dict[str, Any]:
    return {key: style for key, style in {**PLAN, **changes}.items() if style is not None}


def refused(mistake: str, mesh: Any) -> str:
    torch.manual_seed(0)
    model = Model(local=mistake != "all heads are asked for")
    with pytest.raises(ShardMapError) as caught:
        parallelize(model, mesh, plan_with(MISTAKES[mistake]))(IDS, IDS)
    return str(caught.value)


@pytest.mark.usefixtures("repairs")
@pytest.mark.sample(4)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_plan_is_refused_with_one_that_is_as_on_one_device(mistake: str) -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    text = refused(mistake, mesh)
    golden.hold("wrong_plans.txt", mistake, text)
    changes = text.partition("check='global': {")[2].rpartition("} in the plan")[0]
    known = eval(f"{{{changes}}}", {"LocalAttributes": LocalAttributes})
    own = Model(local=mistake != "all heads are asked for")
    plan = plan_with({**MISTAKES[mistake], **known})
    ours = parallelize(copy.deepcopy(own), mesh, plan)
    results = []
    for model in (ours, own):
        loss = model(IDS, IDS)
        loss.backward()
        results.append([full(loss), *(full(each.grad) for each in model.parameters())])
    torch.testing.assert_close(*results)


@pytest.mark.usefixtures("repairs")
def test_processes_print_what_a_simulated_mesh_does(gloo: Gloo) -> None:
    mistake = "an output projection is missing"
    kept = golden.read(golden.FOLDER / "wrong_plans.txt")[mistake]
    for text in gloo(2).run(on_processes, mistake, timeout=120):
        assert golden.without_lines(text) == kept


class Packed(nn.Module):
    def __init__(self, parts: int, width: int) -> None:
        super().__init__()
        self.parts, self.width = parts, width
        self.up, self.down = nn.Linear(8, 16 * parts), nn.Linear(16, 8)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        first, *others = y.split(self.width, -1) if self.width else y.chunk(self.parts, dim=-1)
        for other in others:
            first = first * torch.sigmoid(other)
        out: Tensor = self.down(first)
        return out


@pytest.mark.usefixtures("repairs")
@pytest.mark.parametrize(
    ("parts", "width", "told"),
    [
        (2, 0, "{'up': 'packed_colwise'}"),
        (3, 0, "{'up': PackedColwiseParallel(parts=3)}"),
        (3, 16, "{'': LocalAttributes('width'), 'up': PackedColwiseParallel(parts=3)}"),
    ],
)
def test_matrices_packed_in_one_weight_are_told_their_style(
    parts: int, width: int, told: str
) -> None:
    mesh, x = make_mesh((2,), ("tp",), kind="simulated"), torch.randn(4, 8).double()
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    one = Packed(parts, width)
    with pytest.raises(ShardMapError) as caught:
        parallelize(copy.deepcopy(one), mesh, plan)(x)
    assert f"{caught.value}".endswith(f"check='global': {told} in the plan")
    plan |= eval(told, vars(shardmap_torch.parallel))
    torch.testing.assert_close(parallelize(copy.deepcopy(one), mesh, plan)(x), one(x))


def test_what_a_repair_names_is_in_the_package() -> None:
    text = (golden.FOLDER / "wrong_plans.txt").read_text() + "PackedColwiseParallel("
    for name in re.findall(r"\b(\w+Parallel|LocalAttributes)\(", text):
        assert hasattr(shardmap_torch, name), name


def on_processes(mistake: str) -> str:
    return refused(mistake, worker_mesh((2,), ("tp",)))


@pytest.mark.usefixtures("repairs")
def test_heads_that_do_not_divide_leave_out_all_of_their_module() -> None:
    module, mesh = models.Llama(width=24, num_heads=3), make_mesh((2,), ("tp",), kind="simulated")
    with pytest.raises(ShardMapError) as caught:
        parallelize(module, mesh, llama_plan(parallel))(torch.arange(8).view(2, 4))
    golden.hold("wrong_plans.txt", "heads that do not divide", str(caught.value))


class FewHeads(nn.Module):
    """Four heads of queries in as many groups as there are heads of keys."""

    def __init__(self, kv_heads: int, expands: bool) -> None:
        super().__init__()
        self.expands = expands
        self.q, self.o = nn.Linear(8, 16), nn.Linear(16, 8)
        self.k, self.v = nn.Linear(8, 4 * kv_heads), nn.Linear(8, 4 * kv_heads)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, -1, 4).transpose(1, 2)
        k = self.k(x).view(b, t, -1, 4).transpose(1, 2)
        v = self.v(x).view(b, t, -1, 4).transpose(1, 2)
        if self.expands:
            k, v = k.expand_as(q), v.expand_as(q)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return out


ATTENTION: Final = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}


@pytest.mark.usefixtures("repairs")
@pytest.mark.parametrize("expands", [True, False])
def test_keys_of_one_head_are_left_out_together_with_the_values(expands: bool) -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    torch.manual_seed(0)
    own, x = FewHeads(1, expands), torch.randn(2, 6, 8).double()
    with pytest.raises(ShardMapError) as caught:
        parallelize(copy.deepcopy(own), mesh, ATTENTION)(x)
    golden.hold("wrong_plans.txt", "one head of keys", str(caught.value))
    ours = parallelize(copy.deepcopy(own), mesh, {"q": "colwise", "o": "rowwise"})
    results = []
    for model in (ours, own):
        y = model(x)
        y.square().sum().backward()
        results.append([full(y), *(full(each.grad) for each in model.parameters())])
    torch.testing.assert_close(*results)


def test_heads_of_keys_that_divide_stay_in_the_plan() -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    own, x = FewHeads(2, False), torch.randn(2, 6, 8).double()
    torch.testing.assert_close(full(parallelize(copy.deepcopy(own), mesh, ATTENTION)(x)), own(x))
    with pytest.raises(ShardMapError, match="heads on a rank do not belong together"):
        parallelize(own, mesh, {"q": "colwise", "o": "rowwise"})(x)


def test_a_module_that_fails_on_one_device_is_told_nothing_of_plans() -> None:
    mesh = make_mesh((1,), ("tp",), kind="simulated")
    with pytest.raises(ValueError, match="batch_size") as caught:
        parallelize(Model(), mesh, PLAN)(IDS[:, :2], IDS)
    assert "plan" not in str(caught.value)


def by_variance(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h: Tensor = m.down(x)
    return h / h.var(0, unbiased=False).sqrt()


def by_means(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h: Tensor = m.down(x)
    return h / (h - h.mean(0)).square().mean(0).sqrt()


def by_rows(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(m.down(x)[y > 1], y[y > 1])


def by_ignoring(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(m.down(x), y.masked_fill(~(y > 1), -100))


def by_weight(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(x + functional.linear(m.up(x), m.down.weight, m.down.bias), y)


def by_call(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(x + m.down(m.up(x)), y)


FORWARDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "a variance of rows": (by_variance, by_means, {"dp": "x"}),
    "a loss of some rows": (by_rows, by_ignoring, {"dp": "x"}),
    "a bias for each rank": (by_weight, by_call, {"plan": {"up": "colwise", "down": "rowwise"}}),
}
"""A forward that ranks cannot run, what its error asks for, and arguments of `parallelize`."""


class Computed(nn.Module):
    def __init__(self, compute: Any) -> None:
        super().__init__()
        self.up, self.down, self.compute = nn.Linear(4, 4), nn.Linear(4, 4), compute
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.compute(self, x, y)
        return out


@pytest.mark.parametrize("name", FORWARDS)
def test_a_forward_is_told_in_the_words_of_modules_what_to_write(name: str) -> None:
    wrong, right, arguments = FORWARDS[name]
    mesh = make_mesh((2,), ("x",), kind="simulated")
    x, y = torch.arange(32.0).view(8, 4).double().sin(), torch.arange(8) % 4
    torch.manual_seed(0)
    own = Computed(right)
    ours = parallelize(copy.deepcopy(own), mesh, **arguments)
    for model in (ours, own):
        model(x, y).square().mean().backward()
    torch.testing.assert_close(ours(x, y), own(x, y))
    for one, other in zip(ours.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(full(one.grad), other.grad)
    with pytest.raises(ShardMapError) as caught:
        parallelize(Computed(wrong), mesh, **arguments)(x, y)
    golden.hold("wrong_plans.txt", name, str(caught.value))
