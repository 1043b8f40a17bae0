"""A convolution over an image whose rows are sharded: ranks exchange the rows beside their shards.

Run it with `python -m examples.spatial_convolution`. The exchange is per-rank code, which a
`local_region` declares: what it gives on one device is the image with rows of zeros around it. It
names the axis of rows alone, so that samples may be sharded over another one.
"""

import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import P, axis_size, local_region, make_mesh, ppermute, shard_map


def convolve_rows(x: Tensor, weight: Tensor, axis: str) -> Tensor:
    """Convolves with zeros around the image; x [n, c, h/r, w] gives [n, d, h/r, w] on r ranks."""
    halo = weight.shape[2] // 2
    count = axis_size(axis)
    down = [(rank, rank + 1) for rank in range(count - 1)]
    up = [(rank + 1, rank) for rank in range(count - 1)]
    above = ppermute(x[:, :, -halo:], axis, down)  # a rank without a neighbour gets zeros
    below = ppermute(x[:, :, :halo], axis, up)
    if count == 1:
        above, below = torch.zeros_like(above), torch.zeros_like(below)
    rows = torch.cat([above, x, below], 2)
    return functional.conv2d(rows, weight, padding=(0, weight.shape[3] // 2))


ROWS = P(None, None, "rows")

convolve = local_region(
    lambda x, weight: convolve_rows(x, weight, "rows"),
    in_types=(ROWS, P(replicate={"rows"})),
    out_types=ROWS,
)


def network(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Applies two convolutions, with a norm over the channels of each position between."""
    h = convolve(x, first)
    h = (h / (1 + h.square().mean(1, keepdim=True))).relu()
    y: Tensor = convolve(h, second)
    return y


def main() -> float:
    """Compares shards of samples and rows with one device; returns the largest difference."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    weights = [torch.randn(4, 3, 3, 3).double(), torch.randn(2, 4, 5, 3).double()]
    mesh = make_mesh((2, 2), ("dp", "rows"), kind="simulated")
    image = P("dp", None, "rows")
    sharded = shard_map(
        network, mesh=mesh, in_specs=(image, P(), P()), out_specs=image, check="global"
    )
    leaves = [leaf.requires_grad_() for leaf in (x, *weights)]

    def one_device(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        h = functional.conv2d(x, first, padding=1)
        h = (h / (1 + h.square().mean(1, keepdim=True))).relu()
        return functional.conv2d(h, second, padding=(2, 1))

    found, expected = sharded(*leaves), one_device(*leaves)
    pairs = [(found, expected)]
    pairs += zip(
        torch.autograd.grad(found.square().sum(), leaves),
        torch.autograd.grad(expected.square().sum(), leaves),
        strict=True,
    )
    difference = max(float((mine - right).detach().abs().max()) for mine, right in pairs)
    print(f"values and gradients of rank shards differ from one device by {difference:.1e}")
    return difference


if __name__ == "__main__":
    main()
