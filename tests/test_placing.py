"""Whole tensors of shards, in dtypes that gloo does not send."""

import torch
from torch import Tensor

from shardmap_torch import Mesh, P, full, shard_map
from tests.programs.support.everywhere import run_on
from tests.support.pool import Gloo

DTYPES = [
    *(torch.bool, torch.int16, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.complex64),
]


def gathered(mesh: Mesh) -> None:
    for dtype in DTYPES:
        for shape, spec in (((8,), P("tp")), ((3, 4), P(None, "tp")), ((0, 4), P(None, "tp"))):
            x = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
            y = shard_map(Tensor.clone, mesh=mesh, in_specs=spec, out_specs=spec)(x)
            whole = full(y)
            assert (whole.dtype, whole.shape) == (dtype, x.shape)
            assert whole.tolist() == x.tolist()


def test_shards_of_all_dtypes_are_gathered_on_processes(gloo: Gloo) -> None:
    run_on("gloo", gathered, gloo)
