"""Groups of meshes that are closed leave torch's table of groups in order."""

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from shardmap_torch import make_mesh


def test_torch_ends_its_process_group_after_a_mesh_was_closed() -> None:
    for _ in range(2):
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        for _ in range(2):
            with make_mesh((1, 1), ("i", "j"), kind="process_group") as mesh:
                assert mesh.group(("i", "j")).size() == 1
        dist.destroy_process_group()
        assert not dist.is_initialized()
