"""transformers' Trainer, by the subclass of docs/modules_transformers.md, beside one device."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from shardmap_torch import full, parallelize
from tests.parallel.support.transformers_models import make_model
from tests.programs.support.harness import worker_mesh
from tests.support.pool import Gloo

PAGE = Path(__file__).parent.parent.parent / "docs" / "modules_transformers.md"
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "tp": ("tp", {}),
    "dp": ("dp", {"plan": {}, "dp": "dp"}),
    "fsdp": ("dp", {"plan": {}, "fsdp": "dp"}),
}


class Tokens(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        tokens = torch.randint(64, (8,), generator=torch.Generator().manual_seed(at))
        return {"input_ids": tokens, "labels": tokens}


def by_hand(model: Any) -> list[Tensor]:
    """Takes two steps of two microbatches; returns losses with norms of gradients, and weights."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0)
    rows, logged = [Tokens()[at]["input_ids"] for at in range(16)], []
    for step in range(2):
        losses = []
        for at in (8 * step, 8 * step + 4):
            batch = torch.stack(rows[at : at + 4])
            loss = model(input_ids=batch, labels=batch).loss / 2
            loss.backward()
            losses.append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        logged.append(torch.tensor([sum(losses), norm.item()]))
    return [*logged, *[p.detach() for p in model.parameters()]]


def by_trainer(trainer: Any) -> list[Tensor]:
    trainer.train()
    logged = [x for x in trainer.state.log_history if "grad_norm" in x]
    weights = [full(p.detach()) for p in trainer.model.parameters()]
    return [*[torch.tensor([x["loss"], x["grad_norm"]]) for x in logged], *weights]


def trains_alike(mode: str, folder: str) -> None:
    from transformers import LlamaForCausalLM, TrainingArguments

    (block,) = re.findall(r"```python\n([^`]*class MeshTrainer.*?)```", PAGE.read_text(), re.DOTALL)
    page: dict[str, Any] = {}
    exec(block.replace("seed=self.args.seed", "shuffle=False"), page)  # as the loop by hand
    one = make_model("llama")
    expected = by_hand(copy.deepcopy(one))
    axis, how = MODES[mode]
    mesh = worker_mesh((2,), (axis,))
    options: dict[str, Any] = {
        **{"report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1},
        **{"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "max_steps": 2},
        **{"learning_rate": 1e-2, "lr_scheduler_type": "constant", "use_cpu": True},
        "per_device_train_batch_size": 4 // mesh.shape.get("dp", 1),
    }
    ours, arguments = parallelize(one, mesh, **how), TrainingArguments(folder, **options)
    trainer = page["MeshTrainer"](model=ours, args=arguments, train_dataset=Tokens(), mesh=mesh)
    found = by_trainer(trainer)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    trainer.save_model()
    dist.barrier()
    saved = [p.detach() for p in LlamaForCausalLM.from_pretrained(folder).parameters()]
    torch.testing.assert_close(saved, found[2:])


@pytest.mark.fuzz  # each takes six seconds, most of it for imports
@pytest.mark.parametrize("mode", MODES)
def test_a_trainer_on_processes_is_that_of_one_device(
    mode: str, gloo: Gloo, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    gloo(2).run(trains_alike, mode, f"{tmp_path}", timeout=200)
