"""Storage for torch.distributed.checkpoint without pickle: a file of raw bytes per rank, and JSON.

`torch.distributed.checkpoint` plans what each rank writes and reads. Its own file format keeps the
plan in a pickle, `.metadata`, which runs code when it is loaded.
"""

import ctypes
import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from shardmap_torch.errors import CheckpointError
from shardmap_torch.saving import manifest
from shardmap_torch.saving.manifest import Chunk, Entry, Manifest, Value


class _Fixed:
    """The part of torch's storage interfaces that is for folders chosen later, and for local plans.

    The folder of each of the two storages below is fixed when it is made.
    """

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Keeps the folder."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """Returns the plan."""
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accepts any folder."""
        return True


class RankFiles(_Fixed, StorageWriter):
    """Writes this rank's chunks into a file of its own, and on rank 0 the manifest."""

    def __init__(self, folder: Path, step: int, values: Mapping[str, Value]) -> None:
        """Keeps the folder, which exists; `values` are the leaves that are no tensors."""
        self._folder, self._step, self._values = folder, step, values

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Names the file of each rank."""
        return [replace(plan, storage_data=f"rank-{r:05}.bin") for r, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the chunks that are planned for this rank."""
        done: Future[list[WriteResult]] = Future()
        results: list[WriteResult] = []
        if plan.items:
            with (self._folder / plan.storage_data).open("xb") as stream:
                results = [self._write(stream, plan, planner, item) for item in plan.items]
                stream.flush()
                os.fsync(stream.fileno())
        done.set_result(results)
        return done

    def _write(
        self, stream: IO[bytes], plan: SavePlan, planner: SavePlanner, item: WriteItem
    ) -> WriteResult:
        assert item.tensor_data is not None  # only tensors are given to the planner
        value, start = planner.resolve_data(item), stream.tell()
        assert isinstance(value, Tensor)
        data = _bytes_of(value)
        stream.write(data)
        block = item.tensor_data.chunk
        crc = zlib.crc32(data)
        chunk = Chunk(tuple(block.offsets), tuple(block.sizes), plan.storage_data, start, crc)
        return WriteResult(item.index, len(data), chunk)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the manifest, after all ranks have written their files."""
        chunks: dict[str, list[Chunk]] = {}
        for result in (result for of_rank in results for result in of_rank):
            if math.prod(result.storage_data.shape):  # of uneven shards some are empty
                chunks.setdefault(result.index.fqn, []).append(result.storage_data)
        tensors = {}
        for path, known in metadata.state_dict_metadata.items():
            assert isinstance(known, TensorStorageMetadata)  # only tensors are saved
            shape = tuple(known.size)
            tensors[path] = Entry(known.properties.dtype, shape, tuple(chunks.get(path, ())))
        text = Manifest(self._step, tensors, self._values).to_json()
        with (self._folder / manifest.FILE).open("x", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""


class RankFilesReader(_Fixed, StorageReader):
    """Reads the chunks that a rank needs, from a checkpoint of any mesh."""

    def __init__(self, folder: Path, contents: Manifest) -> None:
        self._folder, self._manifest = folder, contents

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Converts the manifest to the planner's metadata."""
        tensors: dict[str, Any] = {
            path: TensorStorageMetadata(
                TensorProperties(dtype=entry.dtype),
                torch.Size(entry.shape),
                [
                    ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape))
                    for chunk in entry.chunks
                ],
            )
            for path, entry in self._manifest.tensors.items()
        }
        return Metadata(tensors, storage_meta=StorageMeta())

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the chunks that are planned for this rank, into the planner's tensors."""
        chunks = {
            (path, chunk.offset): (entry, chunk)
            for path, entry in self._manifest.tensors.items()
            for chunk in entry.chunks
        }
        read: dict[MetadataIndex, Tensor] = {}
        for item in plan.items:
            index = item.storage_index
            if index not in read:
                # Items come tensor by tensor; one chunk is in memory at a time.
                entry, chunk = chunks[index.fqn, tuple(index.offset or ())]
                read = {index: self._read(index.fqn, entry, chunk)}
            block = read[index]
            for dim, (start, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                block = block.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(block)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, path: str, entry: Entry, chunk: Chunk) -> Tensor:
        with (self._folder / chunk.file).open("rb") as stream:
            stream.seek(chunk.start)
            data = bytearray(stream.read(entry.num_bytes(chunk)))
        if zlib.crc32(data) != chunk.crc:
            raise CheckpointError(
                f"{path}: its bytes in {self._folder / chunk.file} from {chunk.start} on are not "
                "those that were saved (CRC). The file is damaged; load another step."
            )
        if not data:  # which torch.frombuffer refuses
            return torch.empty(chunk.shape, dtype=entry.dtype)
        return torch.frombuffer(data, dtype=torch.uint8).view(entry.dtype).reshape(chunk.shape)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Does nothing."""

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans."""
        return plans


def _bytes_of(x: Tensor) -> bytes:
    """Returns the values as row-major bytes, without NumPy, which may not be installed."""
    x = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(x.data_ptr(), x.nbytes) if x.nbytes else b""
