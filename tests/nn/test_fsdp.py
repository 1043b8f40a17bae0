"""Sharded parameters are gathered in one message, and their gradients scattered in one."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardmap_torch import I, P, R, SpecError, make_mesh, redistribute, shard_map
from shardmap_torch.backends.communicator import Wire
from shardmap_torch.nn import column_linear, fsdp_gather, fsdp_layer, fsdp_layers, row_linear
from tests.nn.support.cases import Case, budget, integers, random
from tests.support.pool import Gloo

# "tp" is the data axis here: the one that the support of this folder counts and runs.
SPECS = {"up": P("tp"), "bias": P(), "down": P(None, "tp")}
PARAMS = random(8, 6), random(6), random(6, 8)


def mlp(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.tanh(x @ params["up"] + params["bias"]) @ params["down"]


def one_device(x: Tensor, *params: Tensor) -> Tensor:
    return mlp(dict(zip(SPECS, params, strict=True)), x)


def gathered(x: Tensor, *params: Tensor) -> Tensor:
    return mlp(fsdp_gather(dict(zip(SPECS, params, strict=True)), SPECS, "tp"), x)


def layer(x: Tensor, *params: Tensor) -> Tensor:
    return fsdp_layer(mlp, dict(zip(SPECS, params, strict=True)), x, axis="tp", specs=SPECS)


def two_layers(x: Tensor, *params: Tensor) -> Tensor:
    return layer(layer(x, *params[:3]), *params[3:])


def two_on_one_device(x: Tensor, *params: Tensor) -> Tensor:
    return one_device(one_device(x, *params[:3]), *params[3:])


def three_layers(x: Tensor, *params: Tensor, recompute: bool = True) -> Tensor:
    layers = [dict(zip(SPECS, params[i : i + 3], strict=True)) for i in range(0, 9, 3)]
    return fsdp_layers(mlp, layers, x, axis="tp", specs=SPECS, recompute=recompute)


def three_on_one_device(x: Tensor, *params: Tensor) -> Tensor:
    return one_device(two_on_one_device(x, *params[:6]), *params[6:])


def flat_mlp(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Computes with views, which only parameters have whose entries lie in order."""
    return mlp({name: p.view(-1).sin().view(p.shape) for name, p in params.items()}, x)


def flat_on_one_device(x: Tensor, *params: Tensor) -> Tensor:
    return flat_mlp(dict(zip(SPECS, params, strict=True)), x)


def flat(x: Tensor, *params: Tensor) -> Tensor:
    return flat_mlp(fsdp_gather(dict(zip(SPECS, params, strict=True)), SPECS, "tp"), x)


def flat_one_by_one(x: Tensor, *params: Tensor) -> Tensor:
    pairs = zip(SPECS.items(), params, strict=True)
    return flat_mlp({k: fsdp_gather(p, spec, "tp") for (k, spec), p in pairs}, x)


BOTH = {"up": P(None, ("tp", "dp")), "bias": P(("tp", "dp")), "down": P("tp", "dp")}


def with_tensor_parallelism(x: Tensor, *params: Tensor) -> Tensor:
    """Over "dp" gathered, over "tp" used as columns and rows."""
    own = fsdp_gather(dict(zip(BOTH, params, strict=True)), BOTH, "dp")
    h = torch.tanh(column_linear(x, own["up"], "tp", bias=own["bias"]))
    return row_linear(h, own["down"], "tp")


X = random(4, 8)
IN_SPECS = P("tp"), *SPECS.values()
PARAMS_4 = random(8, 8), random(8), random(8, 8, seed=1)
CASES = {
    "gather": Case(gathered, one_device, IN_SPECS, P("tp"), (X, *PARAMS)),
    "layer": Case(layer, one_device, IN_SPECS, P("tp"), (X, *PARAMS)),
    "two layers": Case(
        two_layers,
        two_on_one_device,
        (*IN_SPECS, *SPECS.values()),
        P("tp"),
        (X, *PARAMS, *(p + 1 for p in PARAMS)),
    ),
    **{
        name: Case(
            partial(three_layers, recompute=recompute),
            three_on_one_device,
            (*IN_SPECS, *SPECS.values(), *SPECS.values()),
            P("tp"),
            (X, *PARAMS, *(p + 1 for p in PARAMS), *(p - 1 for p in PARAMS)),
        )
        for name, recompute in (("layers", True), ("layers kept", False))
    },
    **{
        name: Case(body, flat_on_one_device, (P("tp"), *SPECS.values()), P("tp"), (X, *PARAMS))
        for name, body in (("views", flat), ("views one by one", flat_one_by_one))
    },
    "with tensor parallelism": Case(
        with_tensor_parallelism,
        one_device,
        (P("dp"), *BOTH.values()),
        P("dp"),
        (X, *PARAMS_4),
    ),
}


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        # The bias, which is not sharded, has its gradient summed.
        ("gather", {"all_gather": 1}, {"reduce_scatter": 1, "all_reduce": 1}),
        ("layer", {"all_gather": 1}, {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1}),
        ("two layers", {"all_gather": 2}, {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 2}),
        ("layers", {"all_gather": 3}, {"all_gather": 3, "reduce_scatter": 3, "all_reduce": 3}),
        ("layers kept", {"all_gather": 3}, {"reduce_scatter": 3, "all_reduce": 3}),
    ],
)
def test_a_layer_is_gathered_once_forward_and_gathered_and_scattered_once_backward(
    name: str, forward: dict[str, int], backward: dict[str, int]
) -> None:
    assert budget(CASES[name]) == (forward, backward)


def test_each_dtype_has_a_buffer_of_its_own() -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated")

    def body(tree: Any) -> Any:
        gathered = fsdp_gather(tree, P("tp"), "tp")
        return [redistribute(x, "tp", src="R", dst=I) for x in gathered]

    tree = [random(4, 3), random(2).float(), integers(9, 4), random(2)]
    f = shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P())
    for found, given in zip(f(tree), tree, strict=True):
        assert found.dtype == given.dtype
        assert found.equal(given)


def test_what_is_equal_over_another_axis_stays_so_beside_what_is_not() -> None:
    mesh = make_mesh((2, 2), ("dp", "tp"), kind="simulated")
    specs = {"w": P("dp", "tp"), "scale": P("dp")}
    out = {"w": P(None, "tp"), "scale": P()}

    def body(params: dict[str, Tensor]) -> dict[str, Tensor]:
        return redistribute(fsdp_gather(params, specs, "dp"), "dp", src=R, dst=I)

    params = {"w": torch.arange(16.0).reshape(4, 4), "scale": torch.arange(4.0)}
    for check in ("local", "global"):
        gathered = shard_map(body, mesh=mesh, in_specs=(specs,), out_specs=out, check=check)(params)
        assert all(gathered[name].equal(value) for name, value in params.items())


OUTSIDE = "shards by 'tp' from the outside; gathered alone it must be the last of its entry"


@pytest.mark.parametrize(
    ("specs", "problems"),
    [
        (
            {"a": P(("tp", "dp")), "b": P("dp"), "c": P(("tp", "dp"))},
            [f"params[{name!r}]: P(('tp', 'dp')) {OUTSIDE}" for name in "ac"],
        ),
        (
            {"a": P("tp"), "b": P("dp"), "c": None},
            ["params['c']: None is no spec; use P(...), or None for a static value"],
        ),
    ],
)
def test_specs_that_do_not_match_are_refused(specs: Any, problems: list[str]) -> None:
    params = {"a": random(4), "b": [random(4)], "c": random(4)}
    with pytest.raises(SpecError) as error:
        fsdp_gather(params, specs, "tp")
    head, *found = str(error.value).splitlines()
    assert head == "fsdp_gather over 'tp': the specs do not match:"
    assert [each.strip() for each in found] == problems


def log_of_layers(frozen: int) -> tuple[list[str], list[str]]:
    """Logs three layers on a process, forward and backward; the first ones may need no gradient."""
    mesh = make_mesh((2,), ("tp",))
    log: list[str] = []
    used: list[StorageWeakRef] = []
    gather = Wire.start_gather

    def start_gather(wire: Wire, x: Tensor) -> Callable[[], Tensor]:
        log.append("start")
        finish = gather(wire, x)

        def finished() -> Tensor:
            y = finish()
            log.append("finish")
            used.append(StorageWeakRef(y.untyped_storage()))
            return y

        return finished

    def layer(params: dict[str, Tensor], x: Tensor) -> Tensor:
        log.append("compute")
        own = [StorageWeakRef(each.untyped_storage()) for each in params.values()]
        others = [each for each in used if each not in own and not each.expired()]
        assert len(others) <= 1, "of earlier layers nothing is kept but the buffer of this one"
        used.extend(own)
        return torch.tanh(x @ params["w"] @ params["v"])

    def body(layers: list[dict[str, Tensor]], x: Tensor) -> Tensor:
        return fsdp_layers(layer, layers, x, axis="tp", specs=P("tp"))

    f = shard_map(body, mesh=mesh, in_specs=(P("tp"), P("tp")), out_specs=P("tp"), check=False)
    layers = [
        {"w": random(4, 4, seed=i).requires_grad_(i >= frozen), "v": random(4, 4, seed=-i)}
        for i in range(3)
    ]
    with mock.patch.object(Wire, "start_gather", start_gather):
        y: Any = f(layers, X[:, :4])
        forward = list(log)
        log.clear()
        y.to_local().sum().backward()
    return forward, log


AHEAD = "start finish start compute finish start compute finish compute"


@pytest.mark.parametrize(
    ("frozen", "backward"), [(0, AHEAD), (1, "start finish start compute finish compute")]
)
def test_on_processes_a_layer_is_gathered_while_the_one_before_it_computes(
    gloo: Gloo, frozen: int, backward: str
) -> None:
    for found in gloo(2).run(log_of_layers, frozen):
        assert found == (AHEAD.split(), backward.split())
