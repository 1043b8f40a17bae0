"""Checkpoints: bit-equal on every mesh, there at once or not at all, and never unpickled."""

import json
import os
import pickle
import re
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardmap_torch as sm
from shardmap_torch import CheckpointError, P, device_put, from_local, full, make_mesh
from shardmap_torch.control import start
from shardmap_torch.saving import folders, latest, load, manifest, save
from shardmap_torch.saving.manifest import Manifest
from tests.support.golden import told
from tests.support.pool import Gloo

Call = Callable[[], object]
AXES = ("dp", "tp")
SPECS = [P("dp"), P(("dp", "tp")), P(("tp", "dp")), P("tp", "dp"), P(None, ("tp", "dp")), P()]
DTYPES = [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool]
DTYPES += [torch.int8, torch.uint16, torch.int64]


def tree() -> dict[str, Any]:
    values = torch.arange(64.0).reshape(8, 8)
    return {
        "tensors": {str(dtype): (values % 2 + values).to(dtype) for dtype in DTYPES},
        "odd": [torch.empty(0, 3), torch.tensor(7), torch.tensor([torch.nan, -0.0])],
        "view": torch.complex(values, values).conj().mT[1:, ::2],
        "numbers": (3, -0.1, float("inf"), True, "text", None),
    }


def blank() -> dict[str, Any]:
    def zero(leaf: Any) -> Any:
        return torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else type(leaf)()

    whole: Any = tree()
    blanked: Any = optree.tree_map(zero, whole)
    return dict(blanked)


def same_bits(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return type(one) is type(other) and one == other
    pair = [x.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for x in (one, other)]
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(*pair)


def assert_bit_equal(actual: Any, expected: Any) -> None:
    assert optree.tree_structure(actual) == optree.tree_structure(expected)
    assert optree.tree_all(optree.tree_map(same_bits, actual, expected))


def test_every_dtype_and_number_loads_bit_equal(tmp_path: Path) -> None:
    save(tree(), tmp_path, 0)
    assert_bit_equal(load(blank(), tmp_path), tree())


def sharded(number: int) -> Any:
    mesh = make_mesh((2, 2), AXES)
    return device_put(torch.arange(64.0).reshape(8, 8), mesh, SPECS[number])


def save_each_spec_and_load_in_others(folder: Path) -> int:
    wrong = 0
    for number in range(len(SPECS)):
        save({"x": sharded(number), "n": number}, folder, number)
        for other in {(number + 1) % len(SPECS), (number + 3) % len(SPECS)}:
            loaded = load({"x": sharded(other) * 0, "n": -1}, folder)
            assert type(loaded["x"]) is type(sharded(other))
            wrong += not torch.equal(full(loaded["x"]), full(sharded(0))) or loaded["n"] != number
    return wrong


@pytest.mark.filterwarnings("ignore:While redistributing")
def test_each_placement_loads_bit_equal_into_others(gloo: Gloo, tmp_path: Path) -> None:
    assert gloo(4).run(save_each_spec_and_load_in_others, tmp_path) == [0] * 4


def save_cut(sizes: tuple[int, int], folder: Path) -> None:
    mesh = make_mesh(sizes, AXES)
    save(device_put({"x": torch.arange(64.0).reshape(8, 8)}, mesh, P("tp", "dp")), folder, 5)


def load_cut(sizes: tuple[int, int], folder: Path) -> torch.Tensor:
    mesh = make_mesh(sizes, AXES)
    like = device_put({"x": torch.zeros(8, 8)}, mesh, P(("dp", "tp")))
    found: torch.Tensor = full(load(like, folder))["x"]
    return found


@pytest.mark.parametrize(("saved", "loaded"), [((2, 2), (1, 2)), ((2, 1), (4, 1)), ((1, 2), None)])
def test_a_checkpoint_of_one_mesh_loads_bit_equal_on_another(
    gloo: Gloo, tmp_path: Path, saved: tuple[int, int], loaded: tuple[int, int] | None
) -> None:
    gloo(saved[0] * saved[1]).run(save_cut, saved, tmp_path)
    expected = torch.arange(64.0).reshape(8, 8)
    if loaded is None:
        assert load_cut((2, 4), tmp_path).equal(expected)
    else:
        found = gloo(loaded[0] * loaded[1]).run(load_cut, loaded, tmp_path)
        assert all(x.equal(expected) for x in found)


def save_on_first(folder: Path) -> list[int]:
    """Each rank's bytes on disk, where a value is sharded over tp and repeated over dp."""
    mesh = make_mesh((2, 2), AXES)
    path = save({"x": device_put(torch.zeros(64, 64), mesh, P("tp"))}, folder, 1)
    return sorted(file.stat().st_size for file in path.glob("*.bin"))


def test_each_shard_is_written_once(gloo: Gloo, tmp_path: Path) -> None:
    assert all(sum(sizes) == 64 * 64 * 4 for sizes in gloo(4).run(save_on_first, tmp_path))


def ask_for_the_latest_on_rank_0_alone(folder: Path) -> list[str]:
    """Returns the errors of other calls on rank 1, before there is a mesh and with one."""
    mesh = make_mesh((2,), ("tp",))
    start.stop()
    without = text_of(lambda: latest(folder) if mesh.rank == 0 else load(tree(), folder))
    mesh, x = make_mesh((2,), ("tp",)), torch.ones(2)
    return [
        without,
        text_of(lambda: latest(folder) if mesh.rank == 0 else device_put(x, mesh, P())),
    ]


def text_of(call: Call) -> str:
    with pytest.raises(sm.ShardMapError) as caught:
        call()
    return str(caught.value)


def test_a_function_that_rank_0_alone_calls_is_an_error_on_all(gloo: Gloo, tmp_path: Path) -> None:
    save(tree(), tmp_path, 3)
    for without, within in gloo(2).run(ask_for_the_latest_on_rank_0_alone, tmp_path):
        assert re.search(r"rank 0: latest at .*\n  rank 1: load", without)
        assert re.search(r"rank 0: latest at .*\n  rank 1: device_put", within)


def test_leaves_keep_requiring_gradients(tmp_path: Path) -> None:
    save([torch.ones(2)], tmp_path, 0)
    assert load([torch.zeros(2, requires_grad=True)], tmp_path)[0].requires_grad


def test_latest_is_none_where_nothing_is_saved(tmp_path: Path) -> None:
    assert latest(tmp_path / "nowhere") is None


def test_the_newest_k_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 10, 11):
        save([1], tmp_path, step, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-000000010", "step-000000011"]
    assert latest(tmp_path) == 11
    assert load([0], tmp_path, step=10) == [1]


def truncate(folder: Path) -> None:
    os.truncate(folder / "rank-00000.bin", 3)


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    found = json.loads((folder / manifest.FILE).read_text())
    change(found)
    (folder / manifest.FILE).write_text(json.dumps(signed(found)))


def signed(fields: dict[str, Any]) -> dict[str, Any]:
    """Gives a manifest the digest of what it says now, as somebody who forges one would."""
    rest = {name: value for name, value in fields.items() if name != "digest"}
    return {**rest, "digest": manifest._digest(rest)}


DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: (f / "checkpoint.json").unlink(), "it has no checkpoint.json"),
    (lambda f: (f / "checkpoint.json").write_text("{"), "checkpoint.json is damaged: Expecting"),
    (lambda f: (f / "checkpoint.json").write_bytes(b"\xff"), "checkpoint.json cannot be read:"),
    (lambda f: (f / "checkpoint.json").write_text("[" * 10**5), "checkpoint.json is damaged: "),
    (lambda f: (f / "rank-00000.bin").unlink(), "rank-00000.bin is missing"),
    (truncate, "rank-00000.bin has 3 bytes of 16"),
    (
        lambda f: shutil.copy(f.with_name("step-000000001") / manifest.FILE, f),
        "checkpoint.json is of step 1",
    ),
    (
        lambda f: edit(f, lambda m: m.update(format="other")),
        "checkpoint.json is damaged: its format is 'other', not 'shardmap_torch checkpoint 2'",
    ),
    (
        lambda f: edit(f, lambda m: m["tensors"]["tree[0]"].update(dtype="save")),
        "checkpoint.json is damaged: tree[0] has the unknown dtype 'save'",
    ),
    (
        lambda f: edit(f, lambda m: m["tensors"]["tree[0]"].update(shape=[5])),
        "checkpoint.json is damaged: tree[0] of shape (5,) is not covered once by its chunks",
    ),
    (
        lambda f: edit(f, lambda m: m["tensors"]["tree[0]"].update(shape=[2])),
        "checkpoint.json is damaged: tree[0] of shape (2,) is not covered once by its chunks",
    ),
    (
        lambda f: edit(f, lambda m: m["tensors"]["tree[0]"]["chunks"][0].update(file="../secret")),
        "checkpoint.json is damaged: '../secret' is no name of a data file",
    ),
    (
        lambda f: edit(f, lambda m: m["tensors"]["tree[0]"]["chunks"][0].update(start=-1)),
        "checkpoint.json is damaged: -1 is no size",
    ),
    (
        lambda f: edit(f, lambda m: m["values"].update(x=[1])),
        "checkpoint.json is damaged: x is no number or string",
    ),
]


@pytest.mark.parametrize(("damage", "why"), DAMAGE, ids=lambda x: x if type(x) is str else "")
def test_an_incomplete_checkpoint_is_refused_by_name_and_left_out(
    tmp_path: Path, damage: Callable[[Path], object], why: str
) -> None:
    save([torch.arange(4.0)], tmp_path, 1)
    damage(save([torch.arange(4.0)], tmp_path, 2))
    name = re.escape(f"The checkpoint {tmp_path}/step-000000002 is incomplete: {why}")
    with pytest.raises(CheckpointError, match=name):
        load([torch.zeros(4)], tmp_path, step=2)
    with pytest.warns(UserWarning, match=name):
        assert latest(tmp_path) == 1
    with pytest.warns(UserWarning, match=name):
        assert load([torch.zeros(4)], tmp_path)[0].equal(torch.arange(4.0))


def test_bytes_that_have_changed_are_refused(tmp_path: Path) -> None:
    path = save([torch.arange(4.0)], tmp_path, 1) / "rank-00000.bin"
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    with told(CheckpointError):
        load([torch.zeros(4)], tmp_path)


def test_each_flipped_bit_of_a_manifest_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    saved = {"w": torch.arange(4.0), "step": 100, "lr": 0.1, "name": "adam"}
    path = save(saved, tmp_path, 1) / manifest.FILE
    before, expected = path.read_bytes(), manifest.read(path.parent)
    for at in range(8 * len(before)):
        damaged = bytearray(before)
        damaged[at // 8] ^= 1 << at % 8
        path.write_bytes(damaged)
        try:
            assert manifest.read(path.parent) == expected
        except CheckpointError:
            continue


@given(st.data())
def test_chunks_cover_a_tensor_once(data: st.DataObject) -> None:
    """Against a count of how often each entry is covered."""
    shape = data.draw(st.tuples(st.integers(0, 4), st.integers(1, 4)))
    cuts = [sorted(data.draw(st.sets(st.integers(1, max(1, n - 1))))) for n in shape]
    starts = [[0, *(c for c in cut if c < n)] for cut, n in zip(cuts, shape, strict=True)]
    ends = [[*each[1:], n] for each, n in zip(starts, shape, strict=True)]
    cells = [
        ((r, c), (R - r, C - c))
        for r, R in zip(starts[0], ends[0], strict=True)
        for c, C in zip(starts[1], ends[1], strict=True)
        if R > r
    ]
    chunks = [manifest.Chunk(at, size, "rank-00000.bin", 0, 0) for at, size in cells]
    assert manifest._is_grid(manifest.Entry(torch.float32, shape, tuple(chunks)))
    if not chunks:
        return
    places = st.tuples(st.integers(0, 4), st.integers(0, 4))
    wrong = data.draw(st.sampled_from(range(len(chunks))))
    new = manifest.Chunk(data.draw(places), data.draw(places), "rank-00000.bin", 0, 0)
    chunks[wrong] = new
    covered = torch.zeros(10, 10)
    for chunk in chunks:
        (r, c), (h, w) = chunk.offset, chunk.shape
        covered[r : r + h, c : c + w] += 1
    inside = covered[: shape[0], : shape[1]]
    is_once = covered.sum() == inside.sum() and bool((inside == 1).all())
    if manifest._is_grid(manifest.Entry(torch.float32, shape, tuple(chunks))):
        assert is_once


def test_two_jobs_do_not_write_into_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "PATIENCE", 0.1)
    other = folders.Writer(tmp_path)
    living = other.begin(1)
    with told(CheckpointError):
        save([1], tmp_path, 2)
    assert living.is_dir()  # what the other job writes is not taken for what a kill has left
    monkeypatch.setattr(folders, "PATIENCE", 60.0)
    threading.Timer(0.1, other.release).start()
    save([1], tmp_path, 2)


def test_a_pipe_in_place_of_a_manifest_is_refused(tmp_path: Path) -> None:
    path = save([1], tmp_path, 1) / manifest.FILE
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=r"checkpoint\.json is no regular file"):
        load([0], tmp_path, 1)


def test_a_step_that_is_a_link_is_loaded_and_not_deleted(tmp_path: Path) -> None:
    folder = save([1], tmp_path, 1)
    folder.rename(tmp_path / "elsewhere").resolve()
    folder.symlink_to(tmp_path / "elsewhere")
    save([2], tmp_path, 2, keep=1)
    assert load([0], tmp_path, 1) == [1]


def calls_differ(folder: Path) -> list[str]:
    """Calls with something else on rank 1, and returns the errors on this rank."""
    rank = make_mesh((2,), ("tp",)).rank
    x = torch.arange(4.0)
    calls: list[Call] = [
        lambda: save({"x": x}, folder, 1 + rank),
        lambda: save({"layers.0": x + rank}, folder, 1),  # numbered by each stage of a pipeline
        lambda: save({"x": x, "lr": 0.1 * (1 + rank)}, folder, 1),
        lambda: save({"x": x if rank == 0 else object()}, folder, 1),
        lambda: save({"x": x}, str(folder) + "\0" * rank, 1),
        lambda: load({"x": x}, folder / str(rank)),
    ]
    return [text_of(call).replace(str(folder), "FOLDER") for call in calls]


def test_calls_that_differ_between_ranks_are_named_on_all(gloo: Gloo, tmp_path: Path) -> None:
    for rank in range(2):
        save({"x": torch.full([4], float(rank))}, tmp_path / str(rank), 7)
    first, second = gloo(2).run(calls_differ, tmp_path)
    differs = ": processes (run different programs|pass other data). The first difference:\n"
    expected = [
        "step 1, keep None\n  rank 1: step 2, keep None",
        "tree['layers.0']: float32[4], hash 25961d57\n  rank 1: tree['layers.0']: float",
        "tree['lr']: 0.1\n  rank 1: tree['lr']: 0.2",
        "object()}, folder, 1),\n  rank 1: save is rejected: These leaves cannot be in a",
        "1),\n  rank 1: save is rejected: 'FOLDER\\x00' is no name of a folder: it has a NUL byte.",
        "# in FOLDER/0/step-000000007\n  rank 1: a checkpoint of hash ",
    ]
    for errors in (first, second):
        for error, text in zip(errors, expected, strict=True):
            assert re.match(f"(load|save){differs}  rank 0: ", error)
            assert text in error
    assert latest(tmp_path) is None


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (tmp_path / "ran").touch, ()

    folder = tmp_path / "step-000000001"
    folder.mkdir()
    for name in (".metadata", manifest.FILE, "rank-00000.bin"):
        (folder / name).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"is incomplete: checkpoint\.json"):
        load([torch.zeros(4)], tmp_path, step=1)
    assert not (tmp_path / "ran").exists()


@settings(max_examples=40)
@given(
    st.sampled_from(["format", "byte_order", "step", "values", "tensors", "dtype", "shape"])
    | st.sampled_from(["chunks", "offset", "file", "start", "crc"]),
    st.recursive(
        st.none() | st.booleans() | st.integers(-2, 9) | st.text(max_size=3),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    ),
)
def test_any_json_in_place_of_a_part_of_the_manifest_is_refused_or_has_its_type(
    part: str, junk: Any
) -> None:
    chunk = {"offset": [0], "shape": [4], "file": "rank-00000.bin", "start": 0, "crc": 0}
    entry: dict[str, Any] = {"dtype": "float32", "shape": [4], "chunks": [chunk]}
    whole: dict[str, Any] = {"format": "shardmap_torch checkpoint 2", "byte_order": sys.byteorder}
    whole.update(step=1, tensors={"x": entry}, values={})
    assert manifest._parse(signed(whole)).sizes() == {"rank-00000.bin": 16}
    for level in (whole, entry, chunk):
        if part in level:
            level[part] = junk
    try:
        found = manifest._parse(signed(whole))
    except (KeyError, TypeError, ValueError):
        return
    assert part in ("step", "values", "tensors", "offset", "file", "start", "crc", "shape")
    assert all(type(size) is int and size >= 0 for size in found.sizes().values())


def test_a_manifest_reads_back_as_it_was_written(tmp_path: Path) -> None:
    found = manifest.read(save(tree(), tmp_path, 3))
    assert manifest._parse(json.loads(found.to_json())) == found
    assert isinstance(found, Manifest)


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    folder = save([1], tmp_path, 4)
    with pytest.raises(CheckpointError) as error:
        save([2], tmp_path, 4)
    text = f"Step 4 has been saved already, in {folder}. Delete that folder to save it again."
    assert str(error.value) == text
    assert load([0], tmp_path) == [1]


def test_an_incomplete_folder_is_no_step_that_has_been_saved(tmp_path: Path) -> None:
    folder = tmp_path / "step-000000004"
    folder.mkdir()
    with told(CheckpointError):
        save([1], tmp_path, 4)
    folder.rmdir()
    save([1], tmp_path, 4)


def test_what_a_kill_has_left_is_deleted_by_the_next_save(tmp_path: Path) -> None:
    (tmp_path / "step-000000001.unfinished-ab12").mkdir()
    (tmp_path / "mine").touch()
    save([1], tmp_path, 1)
    assert sorted(os.listdir(tmp_path)) == ["mine", "step-000000001"]


def test_another_tree_is_refused_with_every_leaf(tmp_path: Path) -> None:
    save({"a": torch.ones(2), "b": 1, "c": torch.ones(3), "d": "x"}, tmp_path, 0)
    like = {"a": torch.ones(2, 1), "b": 1.0, "c": torch.ones(3).double(), "e": 1}
    with told(CheckpointError):
        load(like, tmp_path)


def test_a_part_of_a_tree_loads_where_that_is_asked_for(tmp_path: Path) -> None:
    save({"params": torch.ones(2), "moments": torch.ones(2)}, tmp_path, 0)
    assert load({"params": torch.zeros(2)}, tmp_path, partial=True)["params"].equal(torch.ones(2))


def test_leaves_that_cannot_be_saved_are_refused_by_path(tmp_path: Path) -> None:
    with told(CheckpointError):
        save({"f": print, "s": torch.eye(2).to_sparse()}, tmp_path, 0)
    assert not list(tmp_path.iterdir())


def save_pending(folder: Path) -> str:
    mesh = make_mesh((2,), ("tp",))
    with pytest.raises(CheckpointError) as error:
        save(from_local([torch.ones(2)], mesh, P(partial={"tp"})), folder, 0)
    return str(error.value)


def test_a_pending_sum_is_refused(gloo: Gloo, tmp_path: Path) -> None:
    first, second = gloo(2).run(save_pending, tmp_path)
    assert (
        first
        == second
        == (
            "These leaves cannot be in a checkpoint:\n"
            "  tree[0]: a pending sum (Partial); reduce it, or redistribute the DTensor"
        )
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda f: save([1], f, -1),
        lambda f: save([1], f, 1, keep=0),
        lambda f: load([1], f),
        lambda f: load([1], f, 3),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, call: Callable[[Path], object]) -> None:
    with told(CheckpointError):
        call(tmp_path)


def save_where_one_rank_cannot(folder: Path) -> str:
    mesh = make_mesh((2,), ("tp",))
    x = device_put([torch.zeros(4)], mesh, P("tp"))
    if mesh.rank == 1:
        os.open = None  # type: ignore[assignment]
        Path.open = _full_disk  # type: ignore[method-assign,assignment]
    with pytest.raises(CheckpointError) as error:
        save(x, folder, 0)
    assert latest(folder) is None
    return str(error.value)


def _full_disk(*args: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_a_rank_that_cannot_write_is_named_on_all_ranks(gloo: Gloo, tmp_path: Path) -> None:
    try:
        texts = gloo(2).run(save_where_one_rank_cannot, tmp_path)
    finally:
        gloo(2).close()  # one of them has no files any more
    why = "OSError: [Errno 28] No space left on device"
    assert texts == [f"Saving step 0 to {tmp_path} failed:\n  rank 1: {why}"] * 2
