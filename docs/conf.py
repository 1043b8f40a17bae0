"""Configures the site; `make docs` builds it."""

import os
import re
import tempfile
from pathlib import Path
from typing import Any

from shardmap_torch import __version__

project = "shardmap_torch"
author = "shardmap_torch contributors"
copyright = "2026, shardmap_torch contributors"
release = version = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "pictures/*.py"]
root_doc = "index"

# Docstrings are in Google's style, and put code into single backquotes.
default_role = "code"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Example", "example")]
autodoc_default_options = {"members": True, "member-order": "alphabetical"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 72  # a longer one has a line for each argument
add_module_names = False
python_display_short_literal_types = True

myst_enable_extensions = ["colon_fence", "attrs_inline", "deflist"]
myst_heading_anchors = 4

# A notebook is a page that says so at its top; each runs in a process of its own, from the start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Kernels warn that their ports on this machine are not encrypted.
os.environ["IPYTHONDIR"] = tempfile.mkdtemp()
profile = Path(os.environ["IPYTHONDIR"]) / "profile_default" / "ipython_kernel_config.py"
profile.parent.mkdir()
profile.write_text("c.IPKernelApp.log_level = 40\n")
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True
nb_output_stderr = "remove"  # how long a check took, on a busy machine

html_theme = "sphinx_book_theme"
html_title = "shardmap_torch"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["scroll.js"]
html_favicon = "_static/favicon.svg"
html_context = {"default_mode": "auto"}  # light or dark as the reader's system is
html_show_sourcelink = False
html_theme_options = {
    "use_download_button": True,
    "use_fullscreen_button": False,
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "navbar_persistent": [],  # the search field is in the sidebar
    "logo": {
        "image_light": "_static/logo.svg",
        "image_dark": "_static/logo.svg",
        "text": "shardmap_torch",
        "alt_text": "",
    },
    "pygments_light_style": "friendly",
    "pygments_dark_style": "github-dark",
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
pygments_style = "friendly"


# A letter after the closing backquote, as of a plural, needs a separator in reStructuredText.
CODE = re.compile(r"(?<!`)(`[^`]+`)([a-z]?)")


def _as_rst(lines: list[str]) -> list[str]:
    """Rewrites the tables of docstrings, which are Markdown's, and `code`s with an ending."""
    found: list[str] = []
    for line, before in zip(lines, ["", *lines], strict=False):
        if not line.startswith("|"):
            found.append(CODE.sub(lambda m: m[1] + f"\\ {m[2]}" * bool(m[2]), line))
        elif not set(line) <= set("|-"):
            if not before.startswith("|"):
                found += [".. list-table::", "   :header-rows: 1", ""]
            first, *rest = (cell.strip() for cell in line.strip("|").split("|"))
            found += [f"   * - {first}", *(f"     - {cell}" for cell in rest)]
    return found


def _process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = _as_rst(lines)


def setup(app: Any) -> None:
    """Puts the rewriting before napoleon, which reads its result."""
    app.connect("autodoc-process-docstring", _process, priority=400)
