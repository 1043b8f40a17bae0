"""Makes the description for package indexes of the README; all else is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

# Pages and pictures of the repository are not on an index: of such a link the name stays.
LINK = re.compile(r"!?\[([^\]]*)\]\((?!https://)([^)]+)\)")
README = Path(__file__).with_name("README.md").read_text()

setup(
    long_description=LINK.sub(r"\1 (`\2`)", README),
    long_description_content_type="text/markdown",
)
