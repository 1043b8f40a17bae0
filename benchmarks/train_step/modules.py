"""A training step as a module that torch's `parallelize_module` shards into DTensors."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional

from benchmarks.train_step.setting import BETAS, DECAY, MAX_NORM, PEAK, Setting, Step, rate
from shardmap_torch.nn import positions, rotary, rotary_tables

Tables = tuple[Tensor, Tensor]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head = width // heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, tables: Tables) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head)).unbind(-2)
        q, k, v = (y.transpose(1, 2) for y in (rotary(q, tables), rotary(k, tables), v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Layer(nn.Module):
    def __init__(self, setting: Setting) -> None:
        super().__init__()
        config = setting.config
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.attention = Attention(config.width, config.heads)
        self.mlp_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.mlp = Mlp(config.width, config.hidden)

    def forward(self, x: Tensor, tables: Tables) -> Tensor:
        x = x + self.attention(self.attention_norm(x), tables)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Model(nn.Module):
    def __init__(self, setting: Setting) -> None:
        super().__init__()
        config = setting.config
        self.head = config.width // config.heads
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList([Layer(setting) for _ in range(config.layers)])
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        self.unembedding = nn.Linear(config.width, config.vocabulary, bias=False)
        self._load(setting)

    def _load(self, setting: Setting) -> None:
        params = setting.params()
        values = {"embedding.weight": params["embedding"], "norm.weight": params["final_norm"]}
        values["unembedding.weight"] = params["unembedding"].T
        for i, layer in enumerate(params["layers"]):
            gate, up = layer["gate_up"].unbind(1)
            values |= {
                f"layers.{i}.attention_norm.weight": layer["attention_norm"],
                f"layers.{i}.attention.qkv.weight": layer["qkv"].flatten(1).T,
                f"layers.{i}.attention.out.weight": layer["attention_out"].flatten(0, 1).T,
                f"layers.{i}.mlp_norm.weight": layer["mlp_norm"],
                f"layers.{i}.mlp.gate.weight": gate.T,
                f"layers.{i}.mlp.up.weight": up.T,
                f"layers.{i}.mlp.down.weight": layer["down"].T,
            }
        self.load_state_dict({name: value.contiguous() for name, value in values.items()})

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        tables = rotary_tables(positions(tokens.shape[1]), self.head)
        for layer in self.layers:
            x = layer(x, tables)
        logits: Tensor = self.unembedding(self.norm(x))
        return logits


def _plan(num_layers: int) -> dict[str, ParallelStyle]:
    """Tensor and sequence parallelism, as in torch's own tutorial."""
    split, whole = Shard(1), Replicate()
    gathered = PrepareModuleInput(input_layouts=(split,), desired_input_layouts=(whole,))
    with_tables = PrepareModuleInput(
        input_layouts=(split, None), desired_input_layouts=(whole, None)
    )
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=split),
        "norm": SequenceParallel(),
        "unembedding": ColwiseParallel(
            input_layouts=split, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    for i in range(num_layers):
        plan |= {
            f"layers.{i}.attention_norm": SequenceParallel(),
            f"layers.{i}.attention": with_tables,
            f"layers.{i}.attention.qkv": ColwiseParallel(),
            f"layers.{i}.attention.out": RowwiseParallel(output_layouts=split),
            f"layers.{i}.mlp_norm": SequenceParallel(),
            f"layers.{i}.mlp": gathered,
            f"layers.{i}.mlp.gate": ColwiseParallel(),
            f"layers.{i}.mlp.up": ColwiseParallel(),
            f"layers.{i}.mlp.down": RowwiseParallel(output_layouts=split),
        }
    return plan


def make(setting: Setting) -> Step:
    """torch.optim.AdamW and clip_grad_norm_ on the DTensors, foreach."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = parallelize_module(Model(setting), mesh, _plan(setting.layers))
    batch = setting.batch()
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, PEAK, BETAS, foreach=True)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: rate(n + 1) / PEAK)

    def run() -> Tensor:
        optimizer.zero_grad()
        with loss_parallel():
            logits = model(batch[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
        nn.utils.clip_grad_norm_(params, MAX_NORM, foreach=True)
        optimizer.step()
        warm.step()
        value = loss.detach()
        return value.full_tensor() if isinstance(value, DTensor) else value

    return run
