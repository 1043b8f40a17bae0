"""Trains a small GPT on one device, in nanoGPT's way; parallel.py is the same script on a mesh.

It has what such scripts have: bf16, accumulation of gradients, clipping, a schedule, evaluation,
checkpoints and resuming. It learns the text of Python's own documentation.

    python examples/nanogpt/plain.py --steps 50
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional

Log = list[dict[str, float]]


@dataclass
class Config:
    vocabulary: int = 256  # bytes
    block: int = 64
    layers: int = 2
    heads: int = 4
    width: int = 64


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.width = config.heads, config.width
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).split(self.width, dim=2)
        q = q.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        k = k.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        v = v.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.width, bias=False)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.width, bias=False)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        x = x + self.down(functional.gelu(self.up(self.norm_2(x))))
        return x


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.block, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.tokens.weight = self.head.weight  # tied
        for name, weight in self.named_parameters():
            ends_a_path = name.endswith(("out.weight", "down.weight"))
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02 / (2 * config.layers) ** (ends_a_path / 2))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.tokens(inputs) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_optimizer(model: nn.Module, rate: float) -> torch.optim.AdamW:
    weights = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))


def rate_at(step: int, options: argparse.Namespace) -> float:
    highest: float = options.rate
    if step < options.warmup:
        return highest * (step + 1) / int(options.warmup)
    done: float = (step - options.warmup) / max(1, options.steps - options.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return highest * (0.1 + 0.9 * cosine)


def get_batch(data: Tensor, number: int, options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)  # a run that resumes draws the same rows
    high, block = len(data) - Config.block, Config.block
    starts = torch.randint(high, (options.batch, 1), generator=generator)
    rows = data[starts + torch.arange(block + 1)]
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def evaluate(model: nn.Module, data: Tensor, options: argparse.Namespace) -> float:
    model.eval()
    total: float = sum(model(*get_batch(data, number, options)).item() for number in range(2))
    model.train()
    return total / 2


def read_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("out/nanogpt"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32", "float64"])
    parser.add_argument("--rate", type=float, default=3e-3)
    counts = {"steps": 100, "until": 0, "warmup": 10, "every": 20, "batch": 8, "accumulate": 2}
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> tuple[Log, nn.Module]:
    """Trains, and returns the log and the model, with the gradients of the last step."""
    options = read_options(arguments)
    text = torch.tensor(list("".join(topics.values()).encode()))
    train, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    torch.manual_seed(0)
    model = GPT(Config()).to(torch.float64 if options.dtype == "float64" else torch.float32)
    optimizer = make_optimizer(model, options.rate)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=options.dtype == "bfloat16")
    checkpoint, first = options.folder / "checkpoint.pt", 0
    if options.resume:
        parts = torch.load(checkpoint)
        first = parts.pop("step")
        set_state_dict(model, optimizer, **parts)

    log: Log = []
    for step in range(first, options.until or options.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, options)
        optimizer.zero_grad()
        total = 0.0
        for part in range(options.accumulate):
            inputs, targets = get_batch(train, step * options.accumulate + part, options)
            with autocast:
                loss = model(inputs, targets) / options.accumulate
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        log.append({"step": step + 1, "loss": total, "norm": norm.item()})
        if (step + 1) % options.every == 0:
            with autocast:
                log[-1]["held_out"] = evaluate(model, held_out, options)
            weights, moments = get_state_dict(model, optimizer)
            parts = {"model_state_dict": weights, "optim_state_dict": moments, "step": step + 1}
            options.folder.mkdir(parents=True, exist_ok=True)
            torch.save(parts, checkpoint)
            print(" ".join(f"{name} {value:.4g}" for name, value in log[-1].items()))
    return log, model


if __name__ == "__main__":
    main()
