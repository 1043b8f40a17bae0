"""Under autocast simulated ranks compute in the dtypes of processes, whatever vmap casts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import P, TransformError, make_mesh, shard_map

X, W, B = (
    torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    for shape in ((4, 6), (6, 6), (6,))
)
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: functional.linear(x, W, B),
    "linear without a bias": lambda x: functional.linear(x, W),
    "addmm": lambda x: torch.addmm(B, x, W),
    "mv": lambda x: torch.mv(x, B),
    "binary_cross_entropy_with_logits": lambda x: functional.binary_cross_entropy_with_logits(
        x.bfloat16(), torch.ones_like(x).bfloat16(), reduction="none"
    ),
    "prelu": lambda x: functional.prelu(x @ W, B),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_result_has_the_dtype_and_value_of_one_device(name: str) -> None:
    def mapped(simulate: Any) -> Any:
        mesh = make_mesh((2,), ("dp",), kind="simulated", simulate=simulate)
        return shard_map(CALLS[name], mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))

    with torch.autocast("cpu", torch.bfloat16):
        found, expected = mapped("auto")(X), CALLS[name](X)
        torch.testing.assert_close(found, expected)  # the dtype too
        if name == "linear":
            with pytest.raises(TransformError, match="single ranks run: linear under autocast"):
                mapped("vmap")(X)
