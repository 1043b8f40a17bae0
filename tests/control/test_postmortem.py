"""The dumps of the ranks are compared, and the first difference is shown; no link is followed."""

import os
import tempfile
from pathlib import Path

import pytest
import torch

from shardmap_torch import I, Partial, R
from shardmap_torch.collectives.operations import collective_of
from shardmap_torch.control.board import RankGroup
from shardmap_torch.control.recorder import VARIABLE, FlightRecorder, dump_folder, read_dump
from shardmap_torch.core.source_location import Site
from shardmap_torch.postmortem import main

SUM = collective_of("all_reduce", Partial, I, ("tp",))
OTHER = collective_of("all_reduce", Partial, R, ("tp",))
OPERAND = (torch.float32, torch.Size([4, 2]))


def record(*operations: object) -> FlightRecorder:
    recorder = FlightRecorder()
    for number, operation in enumerate(operations, 1):
        site = Site("model.py", 10 + number)
        recorder.new.append(((number, "step"), operation, *OPERAND, site, 0, RankGroup()))
    recorder.is_open = True
    return recorder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "dumps"))
    return tmp_path / "dumps"


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Returns the line with which a call ends that has nothing to compare, and no other output."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    printed = capsys.readouterr()
    assert (stopped.value.code, printed.out, printed.err.count("\n")) == (2, "", 1)
    return printed.err.removeprefix("python -m shardmap_torch postmortem: ").rstrip("\n")


def test_the_first_difference_is_shown_with_the_line_of_each_rank(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 2):
        record(SUM, SUM).write(rank, "timed out\nmore")
    record(SUM, OTHER).write(1, "timed out\nmore")
    record(SUM).write(3, "killed\tsomehow")
    main([str(folder)])
    assert capsys.readouterr().out == (
        "ranks 0, 1, 2, 3: 2 collectives\n"
        "first difference, at #2:\n"
        "  ranks 0, 2: #2 call 2 of step: all_reduce('tp', Partial -> I) of float32[4, 2] at "
        "model.py:12, begun\n"
        "  rank 1: #2 call 2 of step: all_reduce('tp', Partial -> R) of float32[4, 2] at "
        "model.py:12, begun\n"
        "  rank 3: nothing after #1 call 1 of step: all_reduce('tp', Partial -> I) of "
        "float32[4, 2] at model.py:11, begun\n"
        "reasons:\n"
        "  ranks 0, 1, 2: timed out\n"
        "  rank 3: killed\tsomehow\n"
    ).replace("Partial -> ", str(SUM).split("'tp', ")[1].split(" -> ")[0] + " -> ")


def test_ranks_that_agree_are_told_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        record(SUM).write(rank, "")
    main([])
    assert "no difference; the last collective:\n  ranks 0, 1: #1 call 1" in capsys.readouterr().out


def test_the_recorder_keeps_the_newest(folder: Path) -> None:
    path = record(*[SUM] * 300).write(0, "")
    assert path is not None
    entries = read_dump(path).entries
    assert [entry.seq for entry in entries] == list(range(45, 301))
    assert [entry.state for entry in entries[-2:]] == ["done", "begun"]


def test_a_folder_without_dumps_and_a_file_that_is_none_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal([str(tmp_path)], capsys) == f"There are no dumps rank-*.json in {tmp_path}."
    missing = tmp_path / "typo"
    assert refusal([str(missing)], capsys) == f"There is no folder {missing}."
    path = tmp_path / "rank-0.json"
    for text in ("hello", "[]", '{"rank": [], "reason": "", "entries": []}', '{"entries": [[1]]}'):
        path.write_text(text)
        refused = refusal([str(tmp_path)], capsys)
        assert refused == f"{path} is no dump of shardmap_torch's flight recorder."


def test_a_dump_is_written_into_no_file_that_a_link_names(folder: Path) -> None:
    folder.mkdir()
    precious = folder / "precious"
    precious.write_text("years of work")
    (folder / "rank-00000.json").symlink_to(precious)
    assert record(SUM).write(0, "gone") is None
    assert precious.read_text() == "years of work"


def test_a_pipe_in_the_place_of_a_dump_is_not_waited_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.mkdir()
    path = folder / "rank-00000.json"
    os.mkfifo(path)
    assert record(SUM).write(0, "gone") is None
    refused = refusal([str(folder)], capsys)
    assert refused == f"{path} is no dump of shardmap_torch's flight recorder."


def test_a_folder_that_others_may_write_to_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = dump_folder().parent
    own.mkdir()
    own.chmod(0o777)
    assert record(SUM).write(0, "gone") is None
    refused = refusal([], capsys)  # nor read
    assert refused == f"{dump_folder()} is not this user's alone: others may write there."
    own.rmdir()
    own.symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    assert record(SUM).write(0, "gone") is None
    own.unlink()
    path = record(SUM).write(0, "gone")
    assert path == dump_folder() / "rank-00000.json"
    assert own.stat().st_mode & 0o077 == 0


def test_what_a_terminal_would_obey_is_not_printed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(SUM).write(0, "red \x1b[31m text\x07")
    main([])
    assert "rank 0: red ?[31m text?" in capsys.readouterr().out
