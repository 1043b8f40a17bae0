"""Sums of what a mask selects, on ranks, against one device."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    I,
    Mesh,
    P,
    ShardTypeError,
    all_reduce,
    check_program,
    make_mesh,
    shard_map,
)
from tests.checker.support.one_device import numbers
from tests.programs.support.harness import global_value, worker_mesh
from tests.support.pool import Gloo

Body = Callable[..., Any]

MESH: Final = make_mesh((2,), ("dp",), kind="simulated")
ABSTRACT: Final = make_mesh((2,), ("dp",), kind="abstract")
X: Final = numbers(4, 6)
MASK: Final = numbers(4, 6) > 0
LOGITS: Final = numbers(4, 5, 6)
TARGETS: Final = torch.arange(20).reshape(4, 5) % 6
KNOWN: Final = numbers(4, 5) > 0


def total(x: Tensor) -> Tensor:
    return all_reduce(x, "dp", dst=I)


def masked_language_loss(x: Tensor, targets: Tensor, known: Tensor) -> Tensor:
    loss = functional.cross_entropy(x[known], targets[known], reduction="sum")
    return total(loss) / total(known.sum())


def written_later(x: Tensor, m: Tensor) -> Tensor:
    y = x * 2
    selected = y[m]
    y.mul_(3)
    return total(selected.sum())


def doubled_in_place(x: Tensor, m: Tensor) -> Tensor:
    y = x * 1
    y[m] *= 2
    y[m[:, 0]] += x.sin()[m[:, 0]]
    return total((y**2).sum(0))


def written_elsewhere(x: Tensor, m: Tensor) -> Tensor:
    y, kept = torch.zeros_like(x), x[m]
    changed = kept
    changed -= 1
    y[m] = changed.exp() * kept
    return total(y.cumsum(1).sum(0))


RIGHT: Final[dict[str, Body]] = {
    "added in place": lambda x, m: total(x[m].add_(x.cos()[m], alpha=3).sum()),
    "doubled in place": doubled_in_place,
    "written elsewhere": written_elsewhere,
    "entries": lambda x, m: total(x[m].sum()),
    "functions of entries": lambda x, m: total((x[m] ** 2 * 3 - x.abs()[m].log()).sum()),
    "a mean": lambda x, m: total(x[m].sum()) / total(m.sum()),
    "masked_select": lambda x, m: total(x.masked_select(m).exp().sum()),
    "rows": lambda x, m: total(x[m[:, 0]].sin().sum(0, keepdim=True)),
    "in rows": lambda x, m: total(x[m[:, 0]].square().mean(-1).sqrt().sum()),
    "chosen": lambda x, m: total(torch.where(x[m] > 0.5, x[m], 1.0).sum()),
    "a loss": lambda x, m: total(functional.mse_loss(x[m], x.cos()[m], reduction="sum")),
    "nonzero": lambda x, m: total(x[m.nonzero(as_tuple=True)].sum()),
    "positions of rows": lambda x, m: total(x[m[:, 0].nonzero().squeeze(-1)].sum(0)),
    "index_select": lambda x, m: total(x.index_select(0, m[:, 0].nonzero().flatten()).sum(0)),
    "where": lambda x, m: total(x[torch.where(m)].sum()),
    "the number of dims": lambda x, m: total(x[m].sum() * x[m].ndim * x[m[:, 0]].dim()),
    "a gradient": lambda x, m: total(torch.func.grad(lambda x: (x[m] ** 3).sum())(x).sum()),
    "written later": written_later,
    "masked language loss": masked_language_loss,
}

ARGS: Final[dict[str, Sequence[Tensor]]] = {"masked language loss": (LOGITS, TARGETS, KNOWN)}


def outcome(
    body: Body, args: Sequence[Tensor], ranks: int, check: Any, processes: Mesh | None = None
) -> list[Tensor]:
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in args]
    mesh = MESH if ranks > 1 else make_mesh((1,), ("dp",), kind="simulated", simulate="ranks")
    mesh = processes or mesh
    specs: dict[str, Any] = {"in_specs": (P("dp"),) * len(args), "out_specs": P()}
    y = shard_map(body, mesh=mesh, check=check, **specs)(*leaves)
    weights = torch.linspace(0.5, 2, y.numel(), dtype=y.dtype).reshape(y.shape)
    smooth = [x for x in leaves if x.requires_grad]
    gradients = torch.autograd.grad((y * weights).sum(), smooth)
    return [global_value(each) for each in (y, *gradients)]


@pytest.mark.parametrize("check", [True, "global"])
@pytest.mark.parametrize("name", RIGHT)
def test_sums_of_a_selection_are_those_on_one_device(name: str, check: Any) -> None:
    args = ARGS.get(name, (X, MASK))
    found = outcome(RIGHT[name], args, 2, check)
    expected = outcome(RIGHT[name], args, 1, False)  # torch's own, with sizes that depend on data
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted)


def written(of: Callable[[Tensor, Tensor], None]) -> Body:
    def body(x: Tensor, m: Tensor) -> Tensor:
        x = x * 1
        of(x, m)
        return total(x.sum(0))

    return body


def by_a_mask_that_changes(x: Tensor, m: Tensor) -> None:
    m = m.clone()
    selected = x[m]
    m.logical_not_()
    x[m] = selected


def by_two_names(x: Tensor, m: Tensor) -> None:
    one = x[m]
    other = one.double()
    other *= 2
    x[m] = one


ON_PROCESSES: Final = ("entries", "masked_select", "nonzero", "masked language loss")


def outcomes_of_a_process() -> dict[str, list[Tensor]]:
    mesh = worker_mesh((2,), ("dp",))
    return {
        name: outcome(RIGHT[name], ARGS.get(name, (X, MASK)), 2, "global", mesh)
        for name in (*ON_PROCESSES, "doubled in place")
    }


def test_processes_select_as_many_as_each_has_and_give_the_sums_of_one_device(gloo: Gloo) -> None:
    for found in gloo(2).run(outcomes_of_a_process):
        for name, actual in found.items():
            expected = outcome(RIGHT[name], ARGS.get(name, (X, MASK)), 1, False)
            for one, wanted in zip(actual, expected, strict=True):
                torch.testing.assert_close(one, wanted, msg=name)


REFUSED: Final[dict[str, tuple[Body, str]]] = {
    "written by another mask": (
        written(lambda x, m: x.__setitem__(~m, x[m])),
        "written where another mask says",
    ),
    "written by a mask that changes": (
        written(by_a_mask_that_changes),
        "written where another mask says",
    ),
    "written by one of two names": (written(by_two_names), "has another name as well"),
    "written to other rows": (
        written(lambda x, m: x[:1].__setitem__(m[:1], x[m])),
        "written where another mask says",
    ),
    "numel": (lambda x, m: total(x[m].sum() / x[m].numel()), "its size is asked for"),
    "len": (lambda x, m: total(x[m].sum() * len(x[m])), "its size is asked for"),
    "shape": (lambda x, m: total(x[m].sum() * x[m].shape[0]), "its size is asked for"),
    "another mask": (lambda x, m: total((x[m] * x[~m]).sum()), "what another mask selects"),
    "all entries": (lambda x, m: total((x[m[:, 0]] * x).sum()), "all entries of another"),
    "a collective": (lambda x, m: total(x[m]).sum(), "how many entries a mask selects"),
    "a result": (lambda x, m: x[m], "how many entries a mask selects"),
    "a transform": (
        lambda x, m: total(torch.func.grad(lambda y: (y * y).sum())(x[m]).sum()),
        "what it selects is used",
    ),
    "a leaf": (
        lambda x, m: torch.autograd.grad((y := x[m].detach().requires_grad_()).sum(), y)[0].sum(),
        "takes what it selects",
    ),
    "a hook": (
        lambda x, m: (y := x[m], y.register_hook(lambda g: g / len(g)), total(y.sum()))[2],
        "register_hook takes what it selects",
    ),
    "text": (lambda x, m: total(x.sum()) * len(f"{x[m]}"), "__format__ takes what it selects"),
    "a softmax": (lambda x, m: total(x[m].softmax(0).sum()), "softmax takes what it selects"),
    "the largest": (lambda x, m: total(x[m].amax()), "amax takes what it selects"),
    "an entry": (lambda x, m: total(x[m][0]), "__getitem__ takes what it selects"),
    "iteration": (lambda x, m: total(sum(iter(x[m]))), "unbind takes what it selects"),
    "joined": (lambda x, m: total(torch.cat([x[m], x[m]]).sum()), "cat takes what it selects"),
    "drawn": (lambda x, m: total(x[m].normal_().sum()), "normal_ takes what it selects"),
    "ones": (lambda x, m: total((x.sum() * torch.ones_like(x[m])).sum()), "ones_like takes"),
    "positions swapped": (
        lambda x, m: (at := m.nonzero(as_tuple=True), total(x[at[1], at[0]].sum()))[1],
        "what it selects is an index",
    ),
    "positions along one dim": (
        lambda x, m: total(x[m.nonzero(as_tuple=True)[0]].sum()),
        "a tensor of another shape",
    ),
    "class weights": (
        lambda x, m: total(functional.cross_entropy(x[m[:, 0]], x[m[:, 0]].long().sum(1), x[0])),
        "more than a target",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_size_of_a_selection_is_refused(name: str) -> None:
    body, text = REFUSED[name]
    mapped = shard_map(body, mesh=ABSTRACT, in_specs=P("dp"), out_specs=P())
    with pytest.raises(ShardTypeError, match=text):
        check_program(mapped, X, MASK)


def test_the_mean_of_a_rank_s_selection_is_not_that_on_one_device() -> None:
    def body(x: Tensor, mask: Tensor) -> Tensor:
        return all_reduce(x[mask].mean(), "dp", op="mean", dst=I)

    mapped = shard_map(body, mesh=ABSTRACT, in_specs=P("dp"), out_specs=P(), check="global")
    with pytest.raises(ShardTypeError, match="over 'dp' an operand is a pending sum"):
        check_program(mapped, X, MASK)
