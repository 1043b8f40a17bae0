"""Pages: one document, lines that are linked, and nothing that colour alone says."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    R,
    ShapeDtype,
    ShardTypeError,
    all_reduce,
    check_program,
    convert,
    explain,
    local_region,
    make_mesh,
    shard_map,
    trace,
    visualize_sharding,
)
from shardmap_torch.run import checked

MESH = make_mesh((2, 4), ("dp", "tp"), kind="abstract")
X, W = ShapeDtype((8, 16)), ShapeDtype((16, 16), requires_grad=True)
B = ShapeDtype((16,), requires_grad=True)


class Parsed(HTMLParser):
    """The parts of a page: open elements are closed, links lead somewhere, text is by row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.rows: list[str] = []
        self.attributes: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        found = dict(attrs)
        self.attributes += found
        self.ids += filter(None, [found.get("id")])
        self.links += filter(None, [found.get("href")])
        if tag == "tr":
            self.rows.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "tr" in self.open:
            self.rows[-1] += data


def bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    partial = x @ w
    return all_reduce(partial + b, "tp", dst=I)


def step(ws: list[tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
    for up, down in ws:
        h = torch.relu(convert(x, "tp", src=I, dst=R) @ up)
        x = all_reduce(h @ down, "tp", dst=I)
    return all_reduce(x.sum(), "dp", dst=I)


SPECS: Any = {"mesh": MESH, "in_specs": (P("dp", "tp"), P("tp"), P()), "out_specs": P("dp")}
LAYERS = 5
STEP: Any = shard_map(
    step, mesh=MESH, in_specs=([(P(None, "tp"), P("tp"))] * LAYERS, P("dp")), out_specs=P()
)
LINE = bias.__code__.co_firstlineno


def refusal() -> ShardTypeError:
    with pytest.raises(ShardTypeError) as caught:
        check_program(shard_map(bias, check="global", **SPECS), X, W, B)
    return caught.value


def row_of(page: Parsed, line: int) -> str:
    return next(row for row in page.rows if re.match(rf"{line}\D", row))


@pytest.fixture
def pages(tmp_path: Path) -> dict[str, str]:
    local: Any = shard_map(bias, **SPECS)
    shown = {
        "explained": explain(local, X, W, B),
        "traced": trace(local, X, W, B),
        "refused": refusal(),
        "shards": visualize_sharding((8, 8), mesh=MESH, spec=P("dp", "tp")),
        "spec": P(("dp", "cp"), None, partial={"tp"}),
        "accepted": check_program(local, X, W, B),
    }
    return {name: each.html(tmp_path / name).read_text() for name, each in shown.items()}


def test_a_page_is_one_document_whose_links_lead_to_its_own_lines(pages: dict[str, str]) -> None:
    for text in pages.values():
        page = Parsed(text)
        assert len(set(page.ids)) == len(page.ids)
        assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
        assert not {"src", "onclick"} & set(page.attributes)
        assert "@import" not in text
        assert "url(" not in text


def test_specs_and_verdicts_say_what_each_axis_holds(pages: dict[str, str]) -> None:
    assert Parsed(pages["spec"]).rows == [
        "ofit holds",
        "dim 0shards over dp, cp",
        "tpan addend of the value",
    ]
    assert Parsed(pages["accepted"]).rows == [
        "argumentspec",
        "xP('dp', 'tp')",
        "wP('tp', replicate={'dp'})",
        "bP(replicate={'dp', 'tp'})",
    ]


def test_the_verdict_of_a_page_says_that_promises_are_believed() -> None:
    vouched = local_region(in_types=P("tp"), out_types=P("tp"), trusted=True)(torch.relu)
    f = shard_map(vouched, mesh=MESH, in_specs=P("tp"), out_specs=P("tp"))
    assert explain(f, X).page().verdict.endswith("if these keep what they promise:")


def test_two_pages_of_one_notebook_have_links_of_their_own() -> None:
    first, second = (Parsed(refusal()._repr_html_()) for _ in range(2))
    assert not set(first.ids) & set(second.ids)


def test_each_line_has_what_it_makes_with_types_and_bytes(pages: dict[str, str]) -> None:
    for name in ("explained", "traced"):
        page = Parsed(pages[name])
        assert row_of(page, LINE + 1).endswith(
            "mm → float32[4, 16] dp: V tp: V"
            "← backward: t → float32[4, 4] dp: V tp: V"
            "← backward: mm → float32[4, 16] dp: V tp: V"
        )
        reduced = row_of(page, LINE + 2)
        assert (
            "⇄ all_reduce('tp', Partial -> I) → float32[4, 16] dp: V tp: I sends 384 B" in reduced
        )
        assert "← backward: convert('tp', I -> R) → float32[4, 16] dp: V tp: V" in reduced


def test_the_refused_line_and_its_causes_say_so_and_are_linked(pages: dict[str, str]) -> None:
    for name in ("refused", "explained"):
        page = Parsed(pages[name])
        assert "✗ refused: bias: check='global': add is not" in row_of(page, LINE + 2)
        assert "↑ cause: self: float32[4, 16], sharded P('dp', None" in row_of(page, LINE + 1)
        jumps = re.search(r"<nav.*?</nav>", pages[name])
        assert jumps is not None
        assert len(re.findall("href", jumps.group())) == 2


def test_a_table_of_shards_has_the_ranks_in_words(pages: dict[str, str]) -> None:
    assert Parsed(pages["shards"]).rows == ["0:22:44:66:8", "0:40123", "4:84567"]


def test_equal_layers_are_one_and_counted() -> None:
    """Of the first layer, whose input needs no gradient, the backward differs."""
    arguments: Any = [(W, W)] * LAYERS, X
    explanation = explain(STEP, *arguments)
    collectives = [row for row in explanation.collectives if not row.is_backward]
    assert [(row.collective, row.times) for row in collectives] == [
        *[("convert", 1), ("all_reduce", 1), ("convert", 4), ("all_reduce", 4), ("all_reduce", 1)]
    ]
    lines = str(explanation).splitlines()
    assert f"  {LAYERS - 1} layers, each:" in lines
    assert "  ws[0][0] to ws[4][0], 5 alike: P(None, 'tp', replicate={'dp'})" in lines
    assert explanation.bytes_sent == trace(STEP, *arguments).bytes_sent()
    counted = sum(row.bytes_sent * row.times for row in explanation.rows)
    assert counted == sum(explanation.bytes_sent.values())


def test_local_and_global_verdicts_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    verify = checked.verify

    def counting(call: Any, strictness: Any) -> Any:
        made.append(strictness)
        return verify(call, strictness)

    monkeypatch.setattr(checked, "verify", counting)
    accepted: Any = shard_map(step, mesh=MESH, in_specs=((), P("dp")), out_specs=P())
    refused: Any = shard_map(bias, **SPECS)
    for f, arguments in ((accepted, ((), X)), (refused, (X, W, B))):
        made.clear()
        first, second = explain(f, *arguments), explain(f, *arguments)
        assert made == ["local", "global"]
        assert str(first) == str(second)


def test_a_row_says_line_shapes_types_and_backward() -> None:
    explanation = explain(shard_map(bias, **SPECS), X, W, B)
    [row] = [row for row in explanation.collectives if not row.is_backward]
    assert (row.collective, row.axes, row.bytes_sent) == ("all_reduce", ("tp",), 384)
    assert row.site is not None
    assert row.site.line == LINE + 2
    assert [back.operation for back in row.backward] == ["convert('tp', I -> R)"]
    assert row.backward[0].is_specified
    assert explanation.one_device == "refused"
    assert explanation.to_json()["bytes_sent"] == {"tp": 384, "dp": 256, "dp,tp": 112}
