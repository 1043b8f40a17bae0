"""check="global" with per-rank code: what a `local_region` promises is tried."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional

from shardmap_torch import (
    I,
    P,
    R,
    ShardTypeError,
    all_reduce,
    axis_size,
    check_program,
    checkpoint,
    explain,
    local_region,
    make_mesh,
    shard_map,
)
from tests.run.trials.support.regions import TABLE, TOKENS, Region, lookup, random, ring, weigh
from tests.support.golden import hold_own

TP: Final = make_mesh((2, 2), ("dp", "tp"), kind="simulated")
CP: Final = make_mesh((3,), ("cp",), kind="simulated")


def embedded(rows: Region) -> Callable[..., Any]:
    def embed(table: Tensor, ids: Tensor) -> Tensor:
        y: Tensor = rows(table, ids)
        return all_reduce(y, "tp", dst=I)

    return shard_map(embed, mesh=TP, in_specs=(P("tp"), P()), out_specs=P(), check="global")


def weighed(region: Region) -> Callable[..., Any]:
    return shard_map(region, mesh=CP, in_specs=P("cp"), out_specs=P("cp"), check="global")


def multiplied(direction: int) -> Callable[..., Any]:
    specs = (P("tp"), P(None, "tp"))
    region = ring(direction)
    mesh = make_mesh((3,), ("tp",), kind="simulated")
    return shard_map(region, mesh=mesh, in_specs=specs, out_specs=P(None, "tp"), check="global")


RIGHT: Final[list[tuple[Callable[..., Any], tuple[Tensor, ...]]]] = [
    (embedded(lookup()), (TABLE, TOKENS)),
    (multiplied(-1), (random(6, 4), random(4, 6))),
]
WRONG: Final[list[tuple[Callable[..., Any], tuple[Tensor, ...]]]] = [
    (embedded(lookup(mask=False)), (TABLE, TOKENS)),
    (embedded(lookup(offset=False)), (TABLE, TOKENS)),
    (multiplied(1), (random(6, 4), random(4, 6))),
    (weighed(weigh), (random(6).requires_grad_(),)),
]


@pytest.mark.parametrize(("f", "args"), RIGHT)
def test_a_promise_that_is_kept_is_tried_and_no_longer_assumed(f: Any, args: Any) -> None:
    found = explain(f, *args)
    assert (found.one_device, found.assumed) == ("tried", ())


@pytest.mark.parametrize(("f", "args"), WRONG)
def test_a_promise_that_is_not_kept_is_refused(f: Any, args: Any) -> None:
    with pytest.raises(ShardTypeError, match="a region is not what it promises: "):
        check_program(f, *args)


def test_the_refusal_names_the_region_and_its_line() -> None:
    @local_region(in_types=(P("cp"),), out_types=P("cp"))
    def centred(x: Tensor) -> Tensor:
        return x - x.mean()

    with pytest.raises(ShardTypeError) as caught:
        weighed(lambda x: centred(x))(random(6))
    head, reason, line, fix = str(caught.value).splitlines()
    start = "<lambda>: check='global': tried with numbers over 'cp', a region is not what it "
    assert head.startswith(start + "promises: out is ")
    assert reason == "The program rests on:"
    assert line.startswith("  local_region centred  # test_promises.py:")
    hold_own(fix)


def test_an_unknown_operator_does_not_hide_what_differs() -> None:
    @local_region(in_types=(P("cp"),), out_types=P("cp"))
    def flipped(x: Tensor) -> Tensor:
        y: Tensor = torch.special.bessel_j0(x)
        return y.flip(0)

    with pytest.raises(ShardTypeError, match="a region is not what it promises: "):
        weighed(lambda x: flipped(x))(random(6))


def halved(x: Tensor) -> Tensor:
    """Halves where there are several ranks, so that no promise of it is kept."""
    return x / 2 if axis_size("cp") > 1 else x


def test_a_trusted_promise_is_believed_and_listed() -> None:
    region = local_region(halved, in_types=(P("cp"),), out_types=P("cp"), trusted=True)
    found = explain(weighed(lambda x: region(x)), random(6))
    (line,) = found.assumed
    assert found.one_device == "proven"
    assert line.startswith("  local_region halved  # test_promises.py:")


@pytest.mark.parametrize("draw", [functional.dropout, torch.rand_like, lambda w: w + w.normal_()])
def test_random_numbers_beside_a_region_do_not_keep_it_from_being_tried(draw: Any) -> None:
    def body(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return region(x), draw(w * 1)

    specs = P("cp"), P()
    mapped = shard_map(body, mesh=CP, in_specs=specs, out_specs=specs, check="global")
    declared: Any = local_region(in_types=(P("cp"),), out_types=P("cp"))
    region = declared(Tensor.sin)
    assert explain(mapped, random(6), random(4)).one_device == "tried"
    region = declared(halved)
    with pytest.raises(ShardTypeError, match="a region is not what it promises: "):
        check_program(mapped, random(6), random(4))


ROWS: Final = make_mesh((2, 2), ("dp", "tp"), kind="simulated")
NOISE: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "noise": torch.randn_like,
    "noise by shape": lambda x: torch.rand(x.shape, dtype=x.dtype),
    "noise in place": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "numbers": lambda x: torch.randint(0, 9, x.shape).to(x.dtype),
    "a mask by numbers": lambda x: torch.bernoulli(x.sigmoid()),
    "a mask by comparison": lambda x: torch.where(torch.rand_like(x) < 0.5, x, 0),
    "two draws on a line": lambda x: torch.rand_like(x) + torch.randn_like(x) * x,
    "dropout": functional.dropout,
    "recomputed": lambda x: checkpoint(lambda x: functional.dropout(x.sin()), x),
    "in a gradient": lambda x: grad(lambda x: functional.dropout(x).square().sum())(x),
}


def less_mean(is_wrong: bool) -> Region:
    """Subtracts the mean over all rows, or over those of a rank."""

    @local_region(in_types=(P("dp", "tp"),), out_types=P("dp", "tp"))
    def centred(z: Tensor) -> Tensor:
        if is_wrong:
            return z - z.mean(0)
        rows = z.shape[0] * axis_size("dp")
        return z - all_reduce(z.sum(0), "dp", dst=R) / rows

    return centred


@pytest.mark.sample(3, "recomputed")
@pytest.mark.parametrize("name", NOISE)
def test_a_region_of_what_the_body_draws_is_tried_with_it(name: str) -> None:
    def mapped(is_wrong: bool) -> Callable[..., Any]:
        region = less_mean(is_wrong)
        return shard_map(
            lambda x: x + region(NOISE[name](x)),
            mesh=ROWS,
            in_specs=P("dp", "tp"),
            out_specs=P("dp", "tp"),
            check="global",
        )

    x = random(8, 4).requires_grad_()
    assert explain(mapped(is_wrong=False), x).one_device == "tried"
    with pytest.raises(ShardTypeError, match="a region is not what it promises: out is "):
        check_program(mapped(is_wrong=True), x)


def test_a_region_that_draws_by_itself_is_believed_and_listed() -> None:
    @local_region(in_types=(P("cp"),), out_types=P("cp"))
    def shaken(x: Tensor) -> Tensor:
        return x + torch.rand_like(x[:1])  # one number for all rows of a rank

    found = explain(weighed(lambda x: shaken(x)), random(6))
    _, why = found.assumed
    assert found.one_device == "proven"
    assert why.startswith("    could not be tried: rand_like draws random numbers, at test_prom")


def test_a_promise_that_numbers_cannot_decide_is_believed_and_listed() -> None:
    region: Region = local_region(Tensor.round, in_types=(P("cp"),), out_types=P("cp"))
    found = explain(weighed(lambda x: region(x)), random(6))
    _, why = found.assumed
    assert found.one_device == "proven"
    assert why.startswith("    could not be tried: round may have pieces that random inputs do not")


def test_each_size_is_tried() -> None:
    @local_region(in_types=(P("cp"),), out_types=P("cp"))
    def short(x: Tensor) -> Tensor:
        return x * min(x.shape[0] * axis_size("cp"), 8) / min(x.shape[0], 8) / axis_size("cp")

    f = weighed(lambda x: short(x))
    for size in (3, 6):
        f(random(size))
    with pytest.raises(ShardTypeError, match="a region is not what it promises: "):
        f(random(27))


def test_local_strictness_believes_what_a_region_promises() -> None:
    region = local_region(halved, in_types=(P("cp"),), out_types=P("cp"))
    mapped = shard_map(lambda x: region(x), mesh=CP, in_specs=P("cp"), out_specs=P("cp"))
    check_program(mapped, random(6))


@pytest.mark.sample(1)
@pytest.mark.parametrize("out", [P("dp"), P(None, "dp")])
def test_a_lookup_serves_programs_in_which_another_axis_shards_ids(out: P) -> None:
    mapped = shard_map(
        lambda table, ids: all_reduce(lookup()(table, ids), "tp", dst=I),
        mesh=TP,
        in_specs=(P("tp"), out),
        out_specs=out,
        check="global",
    )
    torch.testing.assert_close(mapped(TABLE, TOKENS), TABLE[TOKENS])
