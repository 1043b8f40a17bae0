"""Weights read from safetensors a shard at a time, and models saved whole."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from shardmap_torch import Mesh, SpecError, make_mesh, parallelize
from shardmap_torch.parallel import load_safetensors, save_pretrained
from tests.parallel.support.transformers_models import make_batch, make_model
from tests.programs.support.harness import global_value, worker_mesh
from tests.support.golden import told
from tests.support.pool import Gloo

SIMULATED = make_mesh((2,), ("tp",), kind="simulated")


def logits(model: Any, name: str) -> Tensor:
    batch = make_batch(name)
    with torch.no_grad():
        out: Tensor = model.eval()(**batch).logits
    return out


class Counted:
    """A file of safetensors that counts the entries that are read, and gives none whole."""

    entries = 0

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> "Counted":
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def keys(self) -> Any:
        return self._file.keys()

    def get_slice(self, name: str) -> "CountedSlice":
        return CountedSlice(self._file.get_slice(name))


class CountedSlice:
    def __init__(self, whole: Any) -> None:
        self._whole = whole

    def get_shape(self) -> Any:
        return self._whole.get_shape()

    def __getitem__(self, at: Any) -> Tensor:
        part: Tensor = self._whole[at]
        Counted.entries += part.numel()
        return part


def reads_and_saves(name: str, mesh: Mesh, folder: str) -> None:
    changes: dict[str, Any] = {"experts_implementation": "batched_mm"} if name == "mixtral" else {}
    one = make_model(name, **changes)
    if not dist.is_initialized() or dist.get_rank() == 0:
        one.save_pretrained(folder, save_original_format=False)
    if dist.is_initialized():
        dist.barrier()
    with torch.device("meta"):
        ours = make_model(name, **changes)
    parallelize(ours, mesh)
    Counted.entries, real = 0, safetensors.safe_open
    with mock.patch.object(safetensors, "safe_open", lambda *a, **k: Counted(real(*a, **k))):
        load_safetensors(ours, folder)
    if dist.is_initialized():  # all that is large is sharded, and read once
        assert Counted.entries < 0.6 * sum(x.numel() for x in one.parameters())
    torch.testing.assert_close(logits(ours, name), logits(one, name), rtol=1e-4, atol=1e-5)
    save_pretrained(ours, folder + "/again", save_original_format=False)
    if dist.is_initialized():
        dist.barrier()
    again = type(one).from_pretrained(folder + "/again", **changes)
    for key, value in again.named_parameters():
        assert torch.equal(value, one.get_parameter(key)), key
        assert torch.equal(value, global_value(ours.get_parameter(key))), key


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "t5"])
def test_a_model_is_read_from_meta_and_saved_on_simulated_ranks(name: str, tmp_path: Path) -> None:
    reads_and_saves(name, SIMULATED, str(tmp_path))


def on_processes(folder: str) -> None:
    for name in ("llama", "gpt2", "mixtral", "t5"):
        reads_and_saves(name, worker_mesh((2,), ("tp",)), f"{folder}/{name}")


def test_on_processes_each_rank_reads_its_shards_alone(gloo: Gloo, tmp_path: Path) -> None:
    gloo(2).run(on_processes, str(tmp_path), timeout=120)


def test_parameters_that_files_lack_or_have_in_another_shape_are_listed(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3, 2)}, tmp_path / "model.safetensors")
    with told(SpecError):
        load_safetensors(nn.Linear(3, 2), tmp_path)
