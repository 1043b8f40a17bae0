"""`python -m shardmap_torch`: exit codes, what is printed, and what is wrong with bad input."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shardmap_torch
from shardmap_torch.__main__ import main

MODULE = """
import torch
from shardmap_torch import I, P, R, ShapeDtype, all_reduce, convert, make_mesh, shard_map

@shard_map(in_specs=({"up": P(None, "tp"), "down": [P("tp")]}, P("dp"), None), out_specs=P("dp"))
def mlp(params, x, scale=1):
    h = torch.relu(convert(x, "tp", src=I, dst=R) @ params["up"])
    return scale * all_reduce(h @ params["down"][0], "tp", dst=I)

@shard_map(in_specs=(P("dp", "tp"), P("tp"), P()), out_specs=P("dp"))
def biased(x, w, b):
    return all_reduce(x @ w + b, "tp", dst=I)

def arguments():
    return ShapeDtype((8, 16)), ShapeDtype((16, 8)), ShapeDtype((8,))

line = make_mesh((2,), ("i",), kind="abstract")
own = shard_map(lambda x: x, mesh=line, in_specs=P(), out_specs=P())
number = 3
"""
MLP = ["params.up=float32[64,256]", "params['down'][0]=float32[256,64]", "x=float32[2048,64]"]


@pytest.fixture
def called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    (tmp_path / "steps.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def call(command: str, *rest: str, mesh: str = "dp=1024,tp=8") -> tuple[int, str]:
        capsys.readouterr()
        try:
            code = main([*command.split(), *(["--mesh", mesh] if mesh else []), *rest])
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return call


def test_an_accepted_program_prints_its_specs(called: Any) -> None:
    code, text = called("check steps.py:mlp", "--shapes", *MLP, "scale=2", "--grad", "params")
    assert (code, text) == (
        0,
        "mlp on the abstract mesh (dp=1024, tp=8) is accepted\n"
        "  params['down'][0]: P('tp', replicate={'dp'})\n"
        "  params['up']: P(None, 'tp', replicate={'dp'})\n"
        "  x: P('dp', invariant={'tp'})\n",
    )


def test_a_refused_program_ends_with_1_and_has_a_page(called: Any, tmp_path: Path) -> None:
    asked = "check steps.py:biased", "--arguments", "arguments", "--strictness", "global"
    code, text = called(*asked, "--html", "page.html", mesh="dp=2,tp=2")
    assert code == 1
    assert text.startswith("biased: check='global': add is not what it is on one device")
    assert "✗ refused" in (tmp_path / "page.html").read_text()
    code, text = called(*asked, "--json", mesh="dp=2,tp=2")
    found = json.loads(text)
    assert (code, found["accepted"]) == (1, False)
    assert found["error"].startswith("biased: check='global'")


def test_explain_and_trace_print_text_or_json(called: Any) -> None:
    asked = "steps.py:biased", "--arguments", "arguments"
    code, text = called("explain " + asked[0], *asked[1:], mesh="dp=2,tp=2")
    assert code == 0
    assert "global: another program than on one device:" in text
    code, text = called("trace " + asked[0], *asked[1:], mesh="dp=2,tp=2")
    assert code == 0
    assert "  %1: float32[4, 8] {dp: V, tp: V} = mm(" in text
    code, text = called("explain " + asked[0], *asked[1:], "--json", mesh="dp=2,tp=2")
    found = json.loads(text)
    assert (code, found["accepted"], found["one_device"]) == (0, True, "refused")
    assert [row["collective"] for row in found["paths"][0]["rows"]][-1] == "all_reduce"


BAD: list[tuple[list[str], str]] = [
    (["check mlp"], "'mlp' names no function; write FILE:FUNCTION, as train.py:step."),
    (["check gone.py:mlp"], "there is no file gone.py."),
    (["check steps.py:gone"], "steps has no name 'gone'."),
    (["check steps.py:number"], "number is no function, but 3."),
    (["check gone_module:f"], "gone_module cannot be loaded: ModuleNotFoundError: No module named"),
    (
        ["check steps.py:arguments"],
        "check_program takes a shard_mapped function or a parallelized module, not <function",
    ),
    (
        ["check steps.py:own", "--shapes", "x=float32[2]"],
        "<lambda> has a mesh of its own, abstract mesh (i=2): leave out --mesh.",
    ),
    (["check steps.py:mlp", "--shapes", "x"], "--shapes takes ARGUMENT=float32[64,1024], not 'x'."),
    (["check steps.py:mlp", "--shapes", "x=real[3]"], "'real' is no dtype of torch."),
    (
        ["check steps.py:mlp", "--shapes", "x=1+"],
        "'1+' is neither float32[64,1024] nor a value of Python.",
    ),
    (
        ["check steps.py:mlp", "--shapes", "x=int64[]", "x.a=int64[]"],
        "--shapes has x as a tensor, and x.a=int64[] in it.",
    ),
    (["check steps.py:mlp", "--shapes", "x=1", "x=2"], "--shapes has two values for x."),
    (["check steps.py:mlp", "--grad", "w"], "--grad names w, which --shapes lacks."),
]


@pytest.mark.parametrize(("asked", "why"), BAD)
def test_bad_input_ends_with_2_and_says_why(called: Any, asked: list[str], why: str) -> None:
    code, text = called(*asked)
    assert code == 2
    assert text.startswith(f"python -m shardmap_torch check: {why}")
    assert text.count("\n") == 1


def test_a_bad_mesh_or_none_is_told(called: Any) -> None:
    for mesh, why in (
        ("dp", "--mesh takes axes and their sizes, as dp=1024,tp=8, not 'dp'."),
        ("dp=2,dp=2", "--mesh dp=2,dp=2: "),
        ("", "No mesh"),
    ):
        code, text = called("check steps.py:mlp", "--shapes", *MLP, mesh=mesh)
        assert (code, text.count("\n")) == (2, 1), text
        assert text.startswith(f"python -m shardmap_torch check: {why}")


def test_without_a_mesh_the_option_is_named(called: Any) -> None:
    assert called("check steps.py:mlp", "--shapes", *MLP, mesh="") == (
        2,
        "python -m shardmap_torch check: No mesh: pass mesh=..., or enter one with `with "
        "use_mesh(mesh):`. Here: --mesh dp=2,tp=4, with the axes that its specs name.\n",
    )


def test_the_version_is_told(called: Any) -> None:
    code, text = called("--version", mesh="")
    assert code == 0
    assert text.startswith(
        f"shardmap_torch {shardmap_torch.__version__} (torch {torch.__version__}, "
    )


def test_the_flight_recorders_are_compared_from_here_too(called: Any, tmp_path: Path) -> None:
    code, text = called(f"postmortem {tmp_path}", mesh="")
    assert (code, text) == (
        2,
        f"python -m shardmap_torch postmortem: There are no dumps rank-*.json in {tmp_path}.\n",
    )


BUILD = """
def build(mesh):
    specs = P("dp", "tp"), P("tp"), P()
    step = shard_map(repaired, mesh=mesh, in_specs=specs, out_specs=P("dp"))
    return step, arguments()

def repaired(x, w, b):
    return all_reduce(x @ w, "tp", dst=I) + b
"""


def test_an_estimate_is_printed_as_text_json_and_a_page(called: Any, tmp_path: Path) -> None:
    asked = "estimate steps.py:biased", "--arguments", "arguments", "--hardware", "H100"
    code, text = called(*asked, mesh="dp=2,tp=2")
    assert code == 0
    assert "biased on the abstract mesh (dp=2, tp=2), each rank on H100 SXM 80 GB:" in text
    code, text = called(*asked, "--json", "--html", "page.html", mesh="dp=2,tp=2")
    found = json.loads(text)
    assert (code, found["sent"], found["fits"]) == (0, {"tp": 128}, True)
    assert "<svg" in (tmp_path / "page.html").read_text()


def test_meshes_are_ranked(called: Any, tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(MODULE + BUILD)
    asked = "best-mesh steps.py:build --axes dp,tp --hardware H100"
    code, text = called(asked, "--ranks", "4", "--json", mesh="")
    assert code == 0
    sizes = [row["mesh"] for row in json.loads(text)]
    assert sorted(size["dp"] for size in sizes) == [1, 2, 4]
    code, text = called(asked, "--ranks", "5", mesh="")
    assert code == 1
    assert "do not match in_specs" in text
    (tmp_path / "steps.py").write_text(MODULE + BUILD.replace("(mesh):", "(mesh, layers, mode):"))
    code, text = called(asked, "--ranks=2", "--layers=1", "--choice=mode=fast,2", "--json", mesh="")
    assert code == 0
    assert {row["options"]["mode"] for row in json.loads(text)} == {"fast", 2}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            "estimate steps.py:own --hardware H900",
            "or a TOML file with the fields of Hardware, not 'H900'.",
        ),
        ("best-mesh steps.py:own --ranks 0 --axes i --hardware H100", "not 0."),
    ],
)
def test_wrong_hardware_and_ranks_are_usage_errors(called: Any, asked: str, said: str) -> None:
    code, text = called(asked, mesh="")
    assert code == 2
    assert said in text
