"""A ResNet with batch norms, its rows over "dp", beside the same model on one device.

Run it with `python -m examples.resnet`, or on processes with
`torchrun --nproc-per-node 2 -m examples.resnet`. The module is as for one device: `parallelize`
takes means and variances over all rows of the batch, and keeps the running statistics.
"""

import copy
import os

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardmap_torch import P, device_put, full, make_mesh, parallelize


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int, made: int, stride: int) -> None:
        """Makes `made` channels of `channels`."""
        super().__init__()
        self.first = nn.Conv2d(channels, made, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(made)
        self.second = nn.Conv2d(made, made, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(made)
        shortcut = nn.Conv2d(channels, made, 1, stride, bias=False), nn.BatchNorm2d(made)
        self.shortcut = nn.Identity() if channels == made else nn.Sequential(*shortcut)

    def forward(self, x: Tensor) -> Tensor:
        """Takes [n, c, h, w], gives [n, d, h/s, w/s]."""
        y = functional.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y)) + self.shortcut(x)
        return functional.relu(y)


class ResNet(nn.Module):
    """Three stages of blocks, and a linear layer of the means over positions."""

    def __init__(self, num_classes: int = 4) -> None:
        """Makes it for images of three channels."""
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.layers = nn.ModuleList([Block(8, 8, 1), Block(8, 16, 2), Block(16, 32, 2)])
        self.head = nn.Linear(32, num_classes)

    def forward(self, images: Tensor, classes: Tensor | None = None) -> Tensor:
        """Gives logits [n, classes], or with `classes` the loss of the batch."""
        x = functional.relu(self.stem(images))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits if classes is None else functional.cross_entropy(logits, classes)


def batch(seed: int, rows: int = 16) -> tuple[Tensor, Tensor]:
    """Draws images whose class is the direction of a wave."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(4, (rows,), generator=generator)
    angle, place = classes * (torch.pi / 4), torch.arange(8.0)
    along = angle.cos()[:, None, None] * place + angle.sin()[:, None, None] * place[:, None]
    noise = torch.randn(rows, 3, 8, 8, generator=generator)
    return (along.sin()[:, None] + noise / 2).double(), classes


def main(steps: int = 20) -> float:
    """Trains both; returns the largest difference of parameters and running statistics."""
    launched = "RANK" in os.environ
    mesh = make_mesh((2,), ("dp",), kind=None if launched else "simulated")
    torch.manual_seed(0)
    one = ResNet().double()
    ours = parallelize(copy.deepcopy(one), mesh, dp="dp")
    losses: list[list[float]] = []
    for model in (one, ours):
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        losses.append([])
        for step in range(steps):
            # All ranks draw the same batch, and each takes its own rows of it.
            rows = device_put(batch(step), mesh, P("dp")) if model is ours else batch(step)
            optimizer.zero_grad()
            loss = model(*rows)
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    differences: list[float] = [
        (full(x.detach()) - y).abs().max().item()
        for table in ("parameters", "buffers")
        for x, y in zip(getattr(ours, table)(), getattr(one, table)(), strict=True)
    ]
    if not launched or mesh.rank == 0:
        print(f"loss {losses[1][0]:.3f} to {losses[1][-1]:.3f}, one device {losses[0][-1]:.3f}")
        print(f"parameters and running statistics equal: {max(differences) < 1e-12}")
    return max(differences)


if __name__ == "__main__":
    main()
