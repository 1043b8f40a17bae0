"""Data-parallel programs ported from one device pass check="global", and equal that device."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import I, P, R, ShardTypeError, all_reduce, make_mesh, shard_map

X: Final = torch.linspace(-2, 3, 48, dtype=torch.float64).sin().reshape(8, 6)
W: Final = torch.linspace(-1, 4, 36, dtype=torch.float64).cos().reshape(6, 6)
IDS: Final = torch.arange(8) * 5 % 6

Reduce = Callable[[Tensor], Tensor]
Program = Callable[[Reduce, Reduce], Callable[..., Any]]
"""Makes a program of a mean and a sum over all rows: of the ranks, or of one device."""


def over_ranks(op: Any) -> Reduce:
    return lambda x: all_reduce(x, "dp", op=op, dst=I)


def gradient(f: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    found: Tensor = torch.func.grad(f)(w)
    return found


def distillation(mean: Reduce, total: Reduce) -> Callable[..., Any]:
    """Moves a student along its gradient, and its teacher towards it."""

    def step(student: Tensor, teacher: Tensor, x: Tensor) -> Any:
        def loss(w: Tensor) -> Tensor:
            taught = (x @ teacher).softmax(-1).detach()
            return functional.kl_div((x @ w).log_softmax(-1), taught, reduction="batchmean")

        grad, value = torch.func.grad_and_value(loss)(student)
        student = student - 0.1 * mean(grad)
        return student, torch.lerp(teacher, student, 0.01), mean(value)

    return step


def autoencoder(mean: Reduce, total: Reduce) -> Callable[..., Any]:
    """Adds a reconstruction and a divergence from a prior, each summed for a sample."""

    def loss(encoder: Tensor, decoder: Tensor, x: Tensor) -> Tensor:
        code = x @ encoder
        rebuilt = (code.tanh() @ decoder - x).square().sum(-1).mean()
        prior = (code.square() - 1 - (code.square() + 0.1).log()).sum(-1).mean()
        return mean(rebuilt + 0.1 * prior)

    return loss


def metrics(mean: Reduce, total: Reduce) -> Callable[..., Any]:
    def measured(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        losses = functional.cross_entropy(x, y, reduction="none")
        accuracy = mean((x.argmax(-1) == y).double().mean())
        return accuracy, mean(losses.mean()).exp(), total((x.topk(2)[1] == y[:, None]).sum())

    return measured


def policy(mean: Reduce, total: Reduce) -> Callable[..., Any]:
    """Takes the clipped gradient of a policy, with advantages normalized over all rows."""

    def step(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        advantage = x.sum(-1)
        center = mean(advantage.mean())
        spread = (mean(advantage.square().mean()) - center.square()).sqrt()
        advantage = (advantage - center) / (spread + 1e-8)

        def loss(w: Tensor) -> Tensor:
            chosen = (x @ w).log_softmax(-1).gather(1, y[:, None])[:, 0]
            ratio = (chosen - chosen.detach()).exp()
            probabilities = (x @ w).softmax(-1)
            entropy = -(probabilities * probabilities.log()).sum(-1).mean()
            clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            return 1 - clipped.mean() - 0.01 * entropy + 0.1 * w.square().sum()

        return mean(gradient(loss, w))

    return step


def private(mean: Reduce, total: Reduce) -> Callable[..., Any]:
    """Clips the gradient of each sample."""

    def step(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
            return functional.cross_entropy(x @ w, y)

        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(w, x, y)
        norms = each.flatten(1).norm(dim=1)
        return total((each * torch.clamp(0.5 / norms, max=1.0)[:, None, None]).sum(0))

    return step


def balanced(mean: Reduce, total: Reduce) -> Callable[..., Any]:
    """Computes a router's auxiliary losses: the balance of its load, and the z-loss."""

    def loss(w: Tensor, x: Tensor) -> Tensor:
        probabilities = (x @ w).softmax(-1)
        chosen = functional.one_hot(probabilities.argmax(-1), 6).to(x.dtype)
        balance = 6 * (mean(chosen.mean(0)) * mean(probabilities.mean(0))).sum()
        return balance + mean((x @ w).logsumexp(-1).square().mean())

    return loss


WXY: Final = (P(), P("dp"), P("dp"))
PROGRAMS: Final[dict[str, tuple[Program, tuple[Tensor, ...], Any, Any]]] = {
    "distillation": (distillation, (W, W.sin(), X), (P(), P(), P("dp")), (P(), P(), P())),
    "autoencoder": (autoencoder, (W, W.sin(), X), (P(), P(), P("dp")), P()),
    "metrics": (metrics, (X, IDS), (P("dp"), P("dp")), P()),
    "policy gradient": (policy, (W, X, IDS), WXY, P()),
    "private gradient": (private, (W, X, IDS), WXY, P()),
    "router": (balanced, (W, X), (P(), P("dp")), P()),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_ported_program_is_that_of_one_device(name: str) -> None:
    make, args, ins, outs = PROGRAMS[name]
    mesh = make_mesh((2,), ("dp",), kind="simulated", simulate="ranks")
    ranks = make(over_ranks("mean"), over_ranks("sum"))
    mapped = shard_map(ranks, mesh=mesh, in_specs=ins, out_specs=outs, check="global")
    one = make(lambda x: x, lambda x: x)
    torch.testing.assert_close(mapped(*args), one(*args))


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - {"metrics", "private gradient"}))
def test_a_ported_program_that_sums_means_is_refused(name: str) -> None:
    make, args, ins, outs = PROGRAMS[name]
    mesh = make_mesh((2,), ("dp",), kind="simulated")
    ranks = make(over_ranks("sum"), over_ranks("sum"))
    mapped = shard_map(ranks, mesh=mesh, in_specs=ins, out_specs=outs, check="global")
    with pytest.raises(
        ShardTypeError, match=r"the sum of the means of all parts|it is 2 times that"
    ):
        mapped(*args)


def test_batch_norm_over_the_ranks_is_that_of_one_device() -> None:
    def normalized(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        mean = all_reduce(x.mean(0), "dp", op="mean", dst=R)
        square = all_reduce(x.square().mean(0), "dp", op="mean", dst=R)
        return (x - mean) * torch.rsqrt(square - mean.square() + 1e-5) * scale + shift

    mesh = make_mesh((2,), ("dp",), kind="simulated")
    specs: Any = {"in_specs": (P("dp"), P(), P()), "out_specs": P("dp")}
    mapped = shard_map(normalized, mesh=mesh, **specs, check="global")
    want = functional.batch_norm(X, None, None, W[0], W[1], training=True)
    torch.testing.assert_close(mapped(X, W[0], W[1]), want)
