"""`debug_print` shows the values of every rank on every mesh, and changes nothing."""

import contextlib
import io
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    Mesh,
    P,
    R,
    ShapeDtype,
    ShardMapError,
    all_gather,
    all_reduce,
    axis_index,
    check_program,
    convert,
    debug_print,
    make_mesh,
    shard_map,
    shift,
)
from tests.support.pool import Gloo

X, W = torch.arange(8.0).reshape(4, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def simulated(simulate: Literal["vmap", "ranks"]) -> Mesh:
    return make_mesh((2, 2), ("dp", "tp"), kind="simulated", simulate=simulate)


def loss(w: Tensor, x: Tensor) -> Tensor:
    w = debug_print("w", w, grad=True)
    h = debug_print("h", convert(x, "tp", src=I, dst=R) @ w, grad=True)
    return debug_print("loss", all_reduce(h.square().sum(), ("dp", "tp"), dst=I))


def silent(w: Tensor, x: Tensor) -> Tensor:
    h = convert(x, "tp", src=I, dst=R) @ w
    return all_reduce(h.square().sum(), ("dp", "tp"), dst=I)


SPECS: Any = {"in_specs": (P(None, "tp"), P("dp")), "out_specs": P()}
FORWARD = """\
w: float32[2, 1] {dp: K, tp: V}
  ranks 0, 2: [1, 3]
  ranks 1, 3: [2, 4]
h: float32[2, 1] {dp: V, tp: V}
  rank 0: [3, 11]
  rank 1: [4, 16]
  rank 2: [19, 27]
  rank 3: [28, 40]
loss: float32[] {dp: I, tp: I}
  ranks 0, 1, 2, 3: 3876
"""
BACKWARD = """\
gradient of h: float32[2, 1]
  rank 0: [6, 22]
  rank 1: [8, 32]
  rank 2: [38, 54]
  rank 3: [56, 80]
"""
OF_EQUAL = {
    "vmap": """\
gradient of w: float32[2, 1]
  ranks 0, 2: [520, 640]
  ranks 1, 3: [768, 944]
""",
    "ranks": """\
gradient of w: float32[2, 1]
  rank 0: [44, 72]
  rank 1: [64, 104]
  rank 2: [476, 568]
  rank 3: [704, 840]
""",
}
"""Each rank has an addend, and one batched program their sum."""


@pytest.mark.parametrize("simulate", ["vmap", "ranks"])
@pytest.mark.parametrize("outside", [True, False])
def test_values_and_gradients_of_all_ranks_and_no_other_number(
    simulate: Literal["vmap", "ranks"], outside: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Differentiates by `backward` from outside, and by torch.func around the call."""
    f, plain = (shard_map(body, mesh=simulated(simulate), **SPECS) for body in (loss, silent))
    w = W.clone().requires_grad_(outside)
    if outside:
        found = torch.autograd.grad(f(w, X), [w])[0]
    else:
        found = torch.func.grad(f)(w, X)
    assert torch.equal(found, torch.func.grad(plain)(W, X))
    assert capsys.readouterr().out == FORWARD + BACKWARD + OF_EQUAL[simulate]


@pytest.mark.parametrize("simulate", ["vmap", "ranks"])
def test_gradients_that_the_body_takes(
    simulate: Literal["vmap", "ranks"], capsys: pytest.CaptureFixture[str]
) -> None:
    def body(x: Tensor) -> Tensor:
        of: Any = lambda x: debug_print("x", x, grad=True).square().sum()  # noqa: E731
        gradient: Tensor = torch.func.grad(of)(x)
        return gradient

    f = shard_map(body, mesh=simulated(simulate), in_specs=P("dp"), out_specs=P("dp"))
    assert torch.equal(f(X), 2 * X)
    text = capsys.readouterr().out
    assert "x: float32[2, 2]" in text
    assert text.endswith("  ranks 0, 1: [0, 2, 4, 6]\n  ranks 2, 3: [8, 10, 12, 14]\n")


def test_under_a_vmap_of_the_body_all_items_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def body(x: Tensor) -> Tensor:
        rows: Tensor = torch.func.vmap(lambda row: debug_print("row", 2 * row))(x)
        return rows

    f = shard_map(body, mesh=simulated("vmap"), in_specs=P("dp"), out_specs=P("dp"))
    f(X)
    assert capsys.readouterr().out == (
        "row: float32[2] {dp: V, tp: K}\n"
        "  ranks 0, 1: [0, 2, 4, 6]\n  ranks 2, 3: [8, 10, 12, 14]\n"
    )


def test_an_abstract_mesh_shows_types_once(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = make_mesh((1024, 8), ("dp", "tp"), kind="abstract")
    for check in ("local", "global"):
        f: Any = shard_map(loss, mesh=mesh, check=check, **SPECS)
        check_program(f, ShapeDtype((2, 64), requires_grad=True), ShapeDtype((2048, 2)))
        shard = ", tp: S(1)" if check == "global" else ", tp: V"
        assert f"h: float32[2, 8] {{dp: {'S(0)' if check == 'global' else 'V'}{shard}}}" in (
            text := capsys.readouterr().out
        )
        assert text.count("\n") == 3


def test_trials_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def ring(x: Tensor) -> Tensor:
        return all_gather(shift(debug_print("x", x), "dp", 1), "dp", dst=I).sum()

    f = shard_map(ring, mesh=simulated("ranks"), in_specs=P("dp"), out_specs=P(), check="global")
    f(X)
    assert capsys.readouterr().out.count("x: float32[2, 2]") == 1


def test_long_values_are_summarised(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.arange(100.0)
    x[3] = torch.inf
    assert debug_print("x", x) is x
    debug_print("ids", torch.arange(10))
    debug_print("mask", torch.arange(10) > 3)
    debug_print("none", torch.empty(0, 3))
    assert capsys.readouterr().out == (
        "x: float32[100]\n"
        "  rank 0: [0, 1, 2, inf, 4, 5, ...], 1 not finite, mean 49.97, std 28.63, from 0 to 99\n"
        "ids: int64[10]\n  rank 0: [0, 1, 2, 3, 4, 5, ...], mean 4.5, std 2.872, from 0 to 9\n"
        "mask: bool[10]\n"
        "  rank 0: [False, False, False, False, True, True, ...], 6 of 10 are not zero\n"
        "none: float32[0, 3]\n  rank 0: []\n"
    )


def test_what_the_ranks_before_a_failure_have_shown_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def body(x: Tensor) -> Tensor:
        if axis_index("dp").item() == 1:
            raise ValueError("rank 1 fails")
        return debug_print("x", x)

    mesh = make_mesh((2,), ("dp",), kind="simulated", simulate="ranks")
    with pytest.raises(ValueError, match="rank 1 fails"):
        shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), check=False)(X)
    assert capsys.readouterr().out == "x: float32[2, 2]\n  rank 0: [0, 1, 2, 3]\n"


def test_only_tensors_have_values_on_ranks() -> None:
    with pytest.raises(ShardMapError) as caught:
        debug_print("x", 3)  # type: ignore[type-var]
    assert str(caught.value) == "debug_print takes a tensor, not 3."


def printed_on_processes() -> tuple[str, Tensor]:
    out = io.StringIO()
    f = shard_map(loss, mesh=make_mesh((2, 2), ("dp", "tp")), **SPECS)
    w = W.clone().requires_grad_()
    with contextlib.redirect_stdout(out):
        f(w, X).backward()
    assert w.grad is not None
    return out.getvalue(), w.grad


def test_rank_0_of_processes_prints_for_all(gloo: Gloo) -> None:
    (text, grad), *others = gloo(4).run(printed_on_processes)
    assert [other for other, _ in others] == [""] * 3
    assert text == FORWARD + BACKWARD + OF_EQUAL["ranks"]
    f = shard_map(silent, mesh=simulated("vmap"), **SPECS)
    assert torch.equal(grad, torch.func.grad(f)(W, X))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantized_values_are_shown_as_the_numbers_they_stand_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    debug_print("q", torch.quantize_per_tensor(torch.arange(8.0), 0.5, 0, torch.qint8))
    assert capsys.readouterr().out == (
        "q: qint8[8]\n  rank 0: [0, 1, 2, 3, 4, 5, ...], mean 3.5, std 2.291, from 0 to 7\n"
    )
