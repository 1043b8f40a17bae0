"""A first check imports neither Dynamo nor Inductor, and its fake tensors are torch's own."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardmap_torch.core.torch_private import fake_modes

FIRST = """
import sys
import torch
import shardmap_torch as sm
early = {"sympy", "torch.distributed.tensor"} & set(sys.modules)
assert not early, f"imported with the package: {early}"

def block(x, w, v):
    h = torch.nn.functional.layer_norm(x, x.shape[-1:])
    h = torch.nn.functional.gelu(sm.convert(h, "tp", src=sm.I, dst=sm.R) @ w).softmax(-2)
    return x + sm.all_reduce(torch.relu(h) @ v, "tp", dst=sm.I)

mesh = sm.make_mesh((2,), ("tp",), kind="simulated")
specs = sm.P(), sm.P(None, "tp"), sm.P("tp")
x, w, v = (torch.randn(s).requires_grad_() for s in ((3, 4), (4, 8), (8, 4)))
f = sm.shard_map(block, mesh=mesh, in_specs=specs, out_specs=sm.P())
f(x, w, v).sum().backward()
sm.trace(f, sm.ShapeDtype((5, 4)), w, v)
print(sorted({"torch._dynamo", "torch._inductor", "torch.onnx"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_a_first_check_imports_no_compiler() -> None:
    """A global one does: DTensor's propagation makes fake tensors of torch's own."""
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


OPTIONS: list[dict[str, Any]] = [{}, {"allow_non_fake_inputs": True, "static_shapes": True}]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_mode_is_made_as_torch_makes_it(options: dict[str, Any]) -> None:
    light, plain = fake_modes._LightMode(**options), FakeTensorMode(**options)
    own = {"fake_tensor_converter", "_stack_trace"}
    for name, value in vars(plain).items():
        assert name in own or vars(light)[name] == value, name
    assert vars(light).keys() == vars(plain).keys()
    with light:
        x = torch.ones(3, 4)
        assert torch.relu(x @ torch.ones(4, 5)).shape == (3, 5)


def test_flags_are_those_of_the_environment_until_dynamo_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch._dynamo.config as real

    monkeypatch.setenv("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")
    flags = fake_modes._TORCH._dynamo.config
    assert flags.fake_tensor_cache_enabled is real.fake_tensor_cache_enabled
    monkeypatch.setattr(fake_modes, "DYNAMO", "not imported")
    assert flags.fake_tensor_cache_enabled is False
    assert flags.fake_tensor_cache_crosscheck_enabled is False
    assert flags.verbose is real.verbose


def test_nothing_that_is_postponed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_modes, "DYNAMO", "not imported")
    held = [f for f in fake_modes._disabled() if fake_modes._HELD not in vars(f)]
    with fake_modes.postponing_dynamo():
        assert all(vars(f)[fake_modes._HELD] is f for f in held)
    assert not any(fake_modes._HELD in vars(f) for f in held)
    assert len(fake_modes._disabled()) > 100
