"""Source locations: the line that an error names."""

from typing import Any

from shardmap_torch.core.source_location import call_site

HELPER = "def reshape(pattern):\n    return call_site()\n"


def test_a_pattern_of_einops_is_the_line_and_not_the_reshape_in_its_code() -> None:
    names: dict[str, Any] = {"call_site": call_site}
    exec(compile(HELPER, "/lib/site-packages/einops/helper.py", "exec"), names)
    assert names["reshape"]("b n (h d) -> b h n d").source.startswith("assert names[")
