"""Random softmaxes of sharded logits with gradients through the maximum, most of them nearly right.

The logits are whole numbers, so that ranks tie for the maximum, and share its gradient.
"""

import random
from collections.abc import Callable

import torch
from torch import Tensor

from shardmap_torch import I, Mesh, P, R, ShardTypeError, all_reduce, shard_map
from tests.checker.support.one_device import ONE, RANKS
from tests.checker.support.outcomes import outcome

SPEC = P(None, "a")


def largest(x: Tensor) -> Tensor:
    """The maximum of each row, over all shards."""
    return all_reduce(x.amax(-1, keepdim=True), "a", op="max", dst=R)


def total(x: Tensor) -> Tensor:
    """The sum of each row, over all shards."""
    return all_reduce(x.sum(-1, keepdim=True), "a", dst=R)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    setup_context = staticmethod(lambda ctx, inputs, output: None)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return 2 * grad


def _doubled(x: Tensor) -> Tensor:
    y: Tensor = _Double.apply(x)  # type: ignore[no-untyped-call]
    return y


def _hooked(x: Tensor) -> Tensor:
    x = x.clone()
    if x.requires_grad:
        x.register_hook(lambda grad: 2 * grad)
    return x


CHANGES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x.detach(),
    lambda x: x.detach().requires_grad_(),
    lambda x: x.flip(0),
    lambda x: x.roll(1, 0),
    lambda x: x + 0.25,
    lambda x: x * x,
    lambda x: x.clone().mul_(x),
    lambda x: x[:1].expand_as(x),
    lambda x: x.cumsum(0),
    lambda x: 2 * x,
    _doubled,
    _hooked,
    lambda x: x.clone().unsqueeze(1).squeeze(1),
    lambda x: x.t().contiguous().t(),
    lambda x: x.to(torch.float32).to(torch.float64),
)
"""Some of them keep a softmax right."""


def program(seed: int) -> Callable[[Tensor], Tensor]:
    """Returns the body of that number, the same in each interpretation."""

    def body(x: Tensor) -> Tensor:
        draws = random.Random(seed)

        def seen(value: Tensor) -> Tensor:
            return draws.choice(CHANGES)(value) if draws.random() < 0.12 else value

        m, scale = largest(x), draws.choice((1, 1, 0.5, 2.0))
        z = (seen(x) - seen(m)) * scale
        e = torch.exp(seen(z))
        s = total(seen(e))
        results: tuple[Callable[[], Tensor], ...] = (
            lambda: seen(e) / seen(s),
            lambda: seen(e) * seen(s).reciprocal(),
            lambda: seen(z) - seen(s).log(),
            lambda: (seen(s).log() + scale * seen(m)) * x.cos(),
            lambda: (total(seen(e) * x.cos()) / seen(s)) * x,
            lambda: torch.exp(seen(z) - seen(s).log()),
            lambda: (e / s) * (seen(e) / s) * x,
            lambda: (e * e) / (s * seen(s)),
            lambda: (e * x.sin()).masked_fill(x > 1, 0) / seen(s),
        )
        return draws.choice(results)()

    def inner(x: Tensor) -> Tensor:
        def loss(x: Tensor) -> Tensor:
            return all_reduce((body(x) * x.sin()).sum(), "a", dst=I)

        grad: Tensor = torch.func.grad(loss)(x)
        return grad

    return inner if seed % 4 == 3 else body


def outcome_of(seed: int) -> str:
    """Checks a random program, and runs it if it is accepted: "refused", "right" or "wrong"."""
    body, generator = program(seed), torch.Generator().manual_seed(seed)
    x = torch.randint(0, 3, (4, 4), generator=generator).double()

    def on(mesh: Mesh) -> list[Tensor]:
        mapped = shard_map(body, mesh=mesh, in_specs=SPEC, out_specs=SPEC, check="global")
        return outcome(mapped, (x,))

    try:
        found = on(RANKS)
    except (ShardTypeError, RuntimeError):  # torch.func has no requires_grad_()
        return "refused"
    expected = on(ONE)
    pairs = zip(found, expected, strict=True)
    # One change rounds to float32, gradients too, of which some are 0.
    return "right" if all(torch.allclose(a, b, atol=1e-6) for a, b in pairs) else "wrong"
