"""The style of a page: light and dark, by letters and borders as well as by colours."""

from typing import Final

STYLE: Final = """
.smt { --fg: #1b1f24; --bg: #ffffff; --line: #d0d7de; --soft: #57606a; --head: #f3f5f7;
  --i: #116329; --r: #0a4d9c; --v: #8a3b00; --p: #6f1d9b; --bad: #a40e26; --link: #0550ae;
  color: var(--fg); background: var(--bg); font: 15px/1.5 system-ui, sans-serif; }
@media (prefers-color-scheme: dark) {
  .smt { --fg: #e6edf3; --bg: #0d1117; --line: #3d444d; --soft: #9aa4af; --head: #161b22;
    --i: #56d364; --r: #79c0ff; --v: #ffa657; --p: #d2a8ff; --bad: #ff7b72; --link: #79c0ff; }
  body.smt-page { background: #0d1117; } }
body.smt-page { margin: 0; }
body.smt-page main { max-width: 1180px; margin: 0 auto; padding: 0 16px 48px; }
.smt h2 { font-size: 1.25em; }
.smt a { color: var(--link); }
.smt a:focus-visible, .smt [tabindex]:focus-visible { outline: 3px solid var(--link); }
.smt .scroll { overflow-x: auto; margin: 16px 0; }
.smt table { border-collapse: collapse; width: 100%; font-size: 14px; }
.smt caption { text-align: left; font-weight: 600; padding: 4px 0; }
.smt th, .smt td { text-align: left; vertical-align: top; padding: 2px 10px;
  border-bottom: 1px solid var(--line); background: none; color: inherit; }
.smt thead th { background: var(--head); }
.smt tbody th { font-weight: 400; color: var(--soft); white-space: nowrap; }
.smt code, .smt pre { font: 13px/1.5 ui-monospace, monospace; color: inherit;
  background: none; padding: 0; }
.smt td code { white-space: pre-wrap; }
.smt .notes { width: 52%; min-width: 24em; }
.smt pre { white-space: pre-wrap; border: 1px solid var(--line); padding: 10px; }
.smt ul { margin: 0; padding-left: 18px; list-style: none; }
.smt td > ul { padding-left: 0; }
.smt li.collective { font-weight: 600; }
.smt li.backward { font-weight: 400; color: var(--soft); }
.smt li.refused { font-weight: 600; color: var(--bad); }
.smt tr.refused > th { border-left: 4px solid var(--bad); }
.smt tr.cause > th { border-left: 4px double var(--v); }
.smt .more { color: var(--soft); font-weight: 400; }
.smt .gap td { text-align: center; color: var(--soft); }
.smt .type { font: 12px/1.4 ui-monospace, monospace; padding: 0 5px; border-radius: 4px;
  white-space: nowrap; border: 1px solid var(--soft); color: var(--soft); }
.smt .I { border-color: var(--i); color: var(--i); }
.smt .R { border: 3px double var(--r); color: var(--r); }
.smt .V, .smt .S { border: 1px dashed var(--v); color: var(--v); }
.smt .P { border: 2px dotted var(--p); color: var(--p); }
.smt td[class^=c] { color: #fff; font-weight: 600; border: 1px solid var(--bg); }
.smt .c0 { background: #a40e26; } .smt .c1 { background: #116329; }
.smt .c2 { background: #7a5200; } .smt .c3 { background: #0a4d9c; }
.smt .c4 { background: #6f1d9b; } .smt .c5 { background: #0b5a66; }
.smt .c6 { background: #4b535c; } .smt .c7 { background: #9a3400; }
.smt figure { margin: 16px 0; }
.smt svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; fill: var(--fg); }
.smt svg .area { fill: var(--head); stroke: var(--fg); }
.smt svg .compute { stroke: var(--i); } .smt svg .messages { stroke: var(--v); }
.smt svg .peak { stroke: var(--bad); stroke-dasharray: 4 3; }
@media (max-width: 640px) { .smt th, .smt td { padding: 2px 4px; overflow-wrap: anywhere; }
  .smt table:has(.notes) { table-layout: fixed; font-size: 12px; }
  .smt thead th:has(~ .notes):first-child { width: 2.5em; }
  .smt .notes { min-width: 0; } .smt td code { font-size: 11px; }
  .smt figure { overflow-x: auto; } .smt svg { min-width: 640px; } }
@media print { .smt { --fg: #000; --bg: #fff; } }
"""

LEGEND: Final = (
    "<h3>Types along an axis of the mesh</h3><ul>"
    "<li><span class='type I'>I</span> equal on all ranks, one computation repeated</li>"
    "<li><span class='type R'>R</span> equal on all ranks, used differently by each</li>"
    "<li><span class='type V'>V</span> <span class='type S'>S(i)</span> "
    "may differ between ranks; a shard of dim i</li>"
    "<li><span class='type P'>Partial</span> a pending sum over the ranks</li>"
    "<li><span class='type K'>K</span> <span class='type Z'>Z</span> "
    "equal on all ranks, neither I nor R yet; zero</li></ul>"
)
