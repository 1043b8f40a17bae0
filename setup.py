"""Makes the description for package indexes of the README, and editable installs that editors read.

All else is in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.editable_wheel import editable_wheel

# Pages and pictures of the repository are not on an index: of such a link the name stays.
LINK = re.compile(r"!?\[([^\]]*)\]\((?!https://)([^)]+)\)")
README = Path(__file__).with_name("README.md").read_text()


class EditableWheel(editable_wheel):
    """An editable install by a path, since mypy and pyright read no hooks of imports.

    Because of `package-dir`, setuptools would write a hook; the symlinks make a path enough.
    """

    def initialize_options(self) -> None:
        super().initialize_options()
        self.mode = "compat"


setup(
    cmdclass={"editable_wheel": EditableWheel},
    long_description=LINK.sub(r"\1 (`\2`)", README),
    long_description_content_type="text/markdown",
)
