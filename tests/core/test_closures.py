"""`name_in`: the name by which a function has a tensor that it closes over."""

import torch
from torch import Tensor

from shardmap_torch.core.closures import name_in

GLOBAL = torch.ones(2)


def test_a_tensor_is_named_as_the_function_writes_it() -> None:
    local, listed, module = torch.ones(2), [torch.ones(2)], torch.nn.Linear(2, 2)
    params = {"w": torch.ones(2)}

    def f(x: Tensor) -> Tensor:
        y: Tensor = module(x) * local + listed[0] + params["w"] + GLOBAL
        return y

    tensors = (local, listed[0], params["w"], module.weight, GLOBAL)
    names = ["local", "listed[0]", "params['w']", "module.weight", "GLOBAL"]
    assert [name_in(f, x) for x in tensors] == names


def test_what_a_function_does_not_close_over_has_no_name() -> None:
    assert name_in(lambda x: x, torch.ones(2)) is None
    assert name_in(torch.relu, torch.ones(2)) is None
    assert name_in(None, torch.ones(2)) is None
