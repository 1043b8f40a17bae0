"""Rows of the batch over data axes, and parameters sharded over one, against one device."""

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional

import shardmap_torch.nn.fsdp as gathers
from shardmap_torch import Mesh, P, SpecError, explain, from_local, make_mesh, parallel, parallelize
from tests.parallel import models
from tests.parallel.support.plans import llama_plan, mlp_plan
from tests.parallel.support.training import both
from tests.parallel.support.transformers_models import make_batch, make_model
from tests.programs.support.harness import global_value, worker_mesh
from tests.support.fuzzing import FUZZ, sampled, sized
from tests.support.golden import told
from tests.support.pool import Gloo

# vmap computes torch's fused attention rank by rank where it runs without a graph, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

MODES: dict[str, dict[str, Any]] = {
    "replicas": {"dp": "dp"},
    "shards, gathered again in the backward": {"fsdp": "dp"},
    "shards, kept for the backward": {"fsdp": "dp", "reshard_after_forward": False},
}


def grid(*sizes: int, simulate: Any = "auto") -> Mesh:
    names = ("replica", "dp", "tp")[-len(sizes) :]
    return make_mesh(sizes, names, kind="simulated", simulate=simulate)


@pytest.mark.sample(2, "shards, kept for the backward")
@pytest.mark.parametrize("mode", MODES)
def test_three_steps_on_simulated_ranks_are_those_of_one_device(mode: str) -> None:
    both("Llama", grid(2, 2), **MODES[mode])


def test_ranks_of_their_own_shards_of_replicas_and_meshes_without_styles() -> None:
    both("Llama", grid(2, 2, simulate="ranks"), fsdp="dp")
    both("Llama", grid(2, 1, 2), dp="replica", fsdp="dp")
    both("MLP", grid(2, 1, 2), dp=("replica", "dp"))
    own = models.Llama(num_layers=2)
    ours = parallelize(copy.deepcopy(own), make_mesh((2,), ("dp",), kind="simulated"), fsdp="dp")
    tokens = torch.randint(12, (4, 5))
    torch.testing.assert_close(ours(tokens), own(tokens))


def weighted(out: Tensor) -> Tensor:
    return (out * torch.linspace(0, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum()


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["gemma", "gpt2", "t5"])
def test_tied_packed_and_repeated_parameters_of_transformers(name: str) -> None:
    one = make_model(name, num_layers=1 if name == "t5" else 2).double()
    ours = parallelize(copy.deepcopy(one), grid(2, 2), fsdp="dp")
    batch = make_batch(name)
    inputs = {"input_ids": batch["input_ids"]}
    if name == "t5":
        inputs["decoder_input_ids"] = batch["labels"]
    for model in (one, ours):
        weighted(model(**inputs).logits).backward()
    for key, value in one.named_parameters():
        found = ours.get_parameter(key).grad
        torch.testing.assert_close(found, value.grad, rtol=1e-8, atol=1e-8, msg=key)


def on_processes(mode: str) -> list[Any]:
    """Steps with each process' rows; returns the placements of three parameters."""
    mesh = worker_mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    own = models.Llama(num_layers=2)
    ours = parallelize(copy.deepcopy(own), mesh, llama_plan(parallel), **MODES[mode])
    at = dist.get_rank() // 2 * 2  # the first of its rows

    def train(model: nn.Module, rows: slice, place: Callable[[Tensor], Tensor]) -> list[Tensor]:
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for step in range(sized(2, 3)):
            tokens = torch.randint(12, (4, 5), generator=torch.Generator().manual_seed(step))[rows]
            optimizer.zero_grad()
            logits = model(tokens[:, :-1]).transpose(1, 2)
            loss = functional.cross_entropy(logits, place(tokens[:, 1:]))
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            found += [global_value(loss.detach()), global_value(norm)]
        return found + [global_value(value) for value in model.parameters()]

    found = train(ours, slice(at, at + 2), lambda x: from_local(x, mesh, P("dp")))
    expected = train(own, slice(None), lambda x: x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    names = ("layers.0.feed_forward.w1.weight", "layers.1.attention.wo.weight", "norm.weight")
    placed: list[Any] = [ours.get_parameter(name) for name in names]
    return [value.placements for value in placed]


@pytest.mark.parametrize("mode", sampled(MODES, "shards, gathered again in the backward"))
def test_steps_on_processes_are_those_of_one_device(mode: str, gloo: Gloo) -> None:
    tp = [Shard(0), Shard(1), Replicate()]
    dp = [Replicate()] * 3 if mode == "replicas" else [Shard(1), Shard(0), Shard(0)]
    for found in gloo(4).run(on_processes, mode, timeout=120):
        assert found == [*zip(dp, tp, strict=True)]


def packed_and_ahead() -> list[int]:
    """GPT-2, whose c_attn has three parts; returns which layers are gathered early."""
    mesh = worker_mesh((2, 2), ("dp", "tp"))
    one = make_model("gpt2", num_layers=3).double()
    ours = parallelize(copy.deepcopy(one), mesh, fsdp="dp")
    ids = make_batch("gpt2")["input_ids"]
    at = dist.get_rank() // 2
    out = ours(input_ids=ids[at : at + 1]).logits
    assert isinstance(out, DTensor)
    begun: list[int] = []
    real = gathers.LayerGathers._begin

    def begin(self: Any, index: int) -> None:
        begun.append(index)
        real(self, index)

    with mock.patch.object(gathers.LayerGathers, "_begin", begin):
        ours(input_ids=ids[at : at + 1]).logits.square().sum().backward()
    one(input_ids=ids).logits.square().sum().backward()
    for key, value in one.named_parameters():
        found = ours.get_parameter(key)
        torch.testing.assert_close(global_value(found), value)
        torch.testing.assert_close(global_value(found.grad), value.grad, msg=key)
    with pytest.raises(SpecError) as caught:
        ours.generate(input_ids=ids, max_new_tokens=2)
    assert str(caught.value) == (
        "parallelize: a cache of keys and values is passed, and 'dp' has other rows on each rank, "
        "which generate() does not know.\n"
        "Fix: parallelize without dp= and fsdp= for generation."
    )
    return begun


def test_each_layer_is_gathered_while_the_one_before_computes(gloo: Gloo) -> None:
    for begun in gloo(4).run(packed_and_ahead, timeout=120):
        assert begun == [1, 2, 1, 0]


def test_generation_on_simulated_ranks_of_shards() -> None:
    one = make_model("llama", num_layers=1).eval()
    ours = parallelize(copy.deepcopy(one), grid(2, 2), fsdp="dp")
    ids = make_batch("llama")["input_ids"]
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    found = ours.generate(input_ids=ids, **options)
    assert found.tolist() == one.generate(input_ids=ids, **options).tolist()
    with torch.no_grad():
        cache = ours(input_ids=ids).past_key_values
    with told(SpecError):
        ours(input_ids=ids, past_key_values=cache)


def of_rows(name: str, mesh: Mesh, rows: slice, **options: Any) -> None:
    """Compares the loss of masked rows, of which ranks ignore other numbers, and its gradients."""
    one = make_model(name, num_layers=1).double()
    ours = parallelize(copy.deepcopy(one), mesh, **options)
    batch = make_batch(name)
    batch = {key: torch.cat([value, value.flip(1)]) for key, value in batch.items()}
    batch["attention_mask"][2:] = 1
    batch["labels"][batch["attention_mask"] == 0] = -100
    count = (batch["labels"] != -100).sum()
    for more in ({}, {"num_items_in_batch": count}) if name == "llama" else ({},):
        found = ours(**{key: value[rows] for key, value in batch.items()}, **more)
        expected = one(**batch, **more)
        for model, out in ((ours, found), (one, expected)):
            model.zero_grad()
            out.loss.backward()
        assert not isinstance(found.loss, DTensor)  # as a Trainer adds it to plain numbers
        torch.testing.assert_close(found.loss.detach(), expected.loss, rtol=1e-6, atol=1e-6)
        for key, value in one.named_parameters():
            grad = global_value(ours.get_parameter(key).grad)
            # Models of transformers compute losses in 32 bits.
            torch.testing.assert_close(grad, value.grad, rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5"])
def test_losses_by_labels_and_masks_of_transformers_are_those_of_the_batch(name: str) -> None:
    of_rows(name, grid(2, 2), slice(None), **{"dp": "dp"} if name == "bert" else {"fsdp": "dp"})


@pytest.mark.sample(2, "llama-replicas")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "mistral", "bert"])
def test_a_row_for_each_rank_with_padding_and_no_plan(name: str, mode: str) -> None:
    one = make_model(name).double()
    mesh = make_mesh((2,), ("dp",), kind="simulated")
    ours = parallelize(copy.deepcopy(one), mesh, {}, **MODES[mode])
    found, expected = ours(**make_batch(name)), one(**make_batch(name))
    for out in (found, expected):
        out.loss.backward()
    for key, value in one.named_parameters():
        grad = ours.get_parameter(key).grad
        torch.testing.assert_close(grad, value.grad, rtol=1e-6, atol=1e-7, msg=key)
    if name != "bert" and mode != "shards, gathered again in the backward":  # which keeps nothing
        for layer, other in zip(
            found.past_key_values.layers, expected.past_key_values.layers, strict=True
        ):
            torch.testing.assert_close((layer.keys, layer.values), (other.keys, other.values))


@pytest.mark.parametrize("mode", sampled(MODES, "replicas"))
def test_rows_may_become_another_dim_of_a_result(mode: str) -> None:
    """States of an RNN are [layers, rows, features]."""
    one = nn.LSTM(4, 3, 2, batch_first=True).double()
    mesh = make_mesh((2,), ("dp",), kind="simulated")
    ours = parallelize(copy.deepcopy(one), mesh, {}, **MODES[mode])
    x = torch.randn(4, 5, 4, dtype=torch.float64)
    (y, states), (expected, others) = ours(x), one(x)
    torch.testing.assert_close((y, *states), (expected, *others))


def states_on_processes() -> None:
    mesh = worker_mesh((2,), ("dp",))
    torch.manual_seed(0)
    one = nn.LSTM(4, 3, 2, batch_first=True).double()
    ours = parallelize(copy.deepcopy(one), mesh, {}, dp="dp")
    x, at = torch.randn(4, 5, 4, dtype=torch.float64), 2 * dist.get_rank()
    (y, states), (expected, others) = ours(x[at : at + 2]), one(x)
    found = [global_value(each) for each in (y, *states)]
    torch.testing.assert_close(found, [expected, *others])


def test_on_processes_rows_may_become_another_dim_of_a_result(gloo: Gloo) -> None:
    gloo(2).run(states_on_processes)


class Turned(nn.Module):
    """A layer that layouts do not follow: it turns the rows round, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        turned: Tensor = self.up(x).tanh().flip(0)
        return x + turned.flip(0)


class Masked(nn.Module):
    """Such layers, then a mask of integers, and the loss of all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Turned(), Turned()])

    def forward(self, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x = torch.where(mask.to(torch.bool)[..., None], x, 0.0)
        loss: Tensor = functional.cross_entropy(x.flatten(0, 1), labels.flatten())
        return loss


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", MODES)
def test_what_layouts_do_not_follow_is_tried_with_the_loss_of_all_rows(mode: str) -> None:
    one = Masked().double()
    mesh = make_mesh((2,), ("dp",), kind="simulated")
    ours = parallelize(copy.deepcopy(one), mesh, {}, **MODES[mode])
    x, mask = torch.randn(4, 3, 4).double(), torch.tensor([[1, 1, 0]] * 2 + [[1] * 3] * 2)
    labels = torch.randint(4, (4, 3))
    assert "tried with numbers over 'dp'" in str(explain(ours, x, mask, labels))
    found, expected = ours(x, mask, labels), one(x, mask, labels)
    torch.testing.assert_close(found, expected)
    for loss in (found, expected):
        loss.backward()
    for key, value in one.named_parameters():
        torch.testing.assert_close(ours.get_parameter(key).grad, value.grad, msg=key)


def rows_of_processes() -> None:
    mesh, at = worker_mesh((2, 2), ("dp", "tp")), dist.get_rank() // 2 * 2
    of_rows("llama", mesh, slice(at, at + 2), fsdp="dp")
    if FUZZ:
        of_rows("llama", mesh, slice(at, at + 2), dp="dp")
        of_rows("t5", mesh, slice(at, at + 2), fsdp="dp")


def test_losses_of_rows_of_processes_are_those_of_the_batch(gloo: Gloo) -> None:
    gloo(4).run(rows_of_processes, timeout=120)


def test_a_search_for_packed_sequences_takes_rows() -> None:
    one = make_model("llama", num_layers=1).double()
    ours = parallelize(copy.deepcopy(one), grid(2, 2), dp="dp")
    ids = make_batch("llama")["input_ids"].repeat(2, 1)
    found, expected = (model(input_ids=ids, use_cache=False).logits for model in (ours, one))
    torch.testing.assert_close(found, expected)


class Nested(nn.Module):
    """The structure of nanoGPT: blocks in a list, in a dict that has layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 8, bias=False)
        made = ({name: nn.Linear(4, 4) for name in ("up", "down")} for _ in range(2))
        blocks = nn.ModuleList(map(nn.ModuleDict, made))
        own = {"wte": nn.Embedding(8, 4), "wpe": nn.Embedding(2, 4), "h": blocks}
        self.transformer = nn.ModuleDict({**own, "ln_f": nn.LayerNorm(4)})
        self.transformer["wte"].weight = self.head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        layers: Any = self.transformer
        x = layers.wte(tokens) + layers.wpe(torch.arange(2))
        for block in layers.h:
            x = x + block.down(block.up(x).tanh())
        logits: Tensor = self.head(layers.ln_f(x))
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", MODES)
def test_lists_of_layers_in_dicts_are_no_layers_but_their_elements(mode: str) -> None:
    one = Nested().double()
    ours = parallelize(
        copy.deepcopy(one), make_mesh((2,), ("dp",), kind="simulated"), {}, **MODES[mode]
    )
    tokens = torch.arange(8).view(4, 2)
    for model in (one, ours):
        model(tokens).backward()
    for key, value in one.named_parameters():
        torch.testing.assert_close(ours.get_parameter(key).grad, value.grad, msg=key)
    plan: Any = ours.forward
    parts = [f"h.{at}.{name}" for at in range(2) for name in ("up", "down")]
    units = [f"transformer.{name}" for name in ("wpe", *parts, "ln_f")]
    assert [*plan.plan.units] == (units if "fsdp" in MODES[mode] else [])


WRONG: list[dict[str, Any]] = [
    {"dp": 3},
    {"fsdp": ("dp", "tp")},
    {"fsdp": "data"},
    {"fsdp": "dp", "dp": "dp"},
    {"fsdp": "tp", "axis": "tp"},
    {"fsdp": "dp", "reshard_after_forward": 2},
    {"fsdp": "dp", "dp": "tp"},
]


@pytest.mark.parametrize("options", WRONG)
def test_axes_that_cannot_be_are_an_error(options: dict[str, Any]) -> None:
    with told(SpecError):
        parallelize(models.mlp(), grid(2, 2), mlp_plan(parallel), **options)
