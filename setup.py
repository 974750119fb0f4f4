"""Build step: the long description is the README without links into the repository; the wheel gets `configs/`."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


def long_description() -> str:
    """Return the README without images, and with relative links, which PyPI cannot resolve, replaced by their text."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"^!\[[^\]]*\]\((?![a-z]+:)[^)]*\)\n\n", "", text, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]+)\]\((?![a-z]+:)[^)]*\)", r"\1", text)


class BuildWithConfigs(build_py):
    """Copy the repository's `configs/` into the built package as `tierstore/configs/`."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        into = Path(self.build_lib) / "tierstore" / "configs"
        self.mkpath(str(into))
        for file in sorted((ROOT / "configs").glob("*.yaml")):
            self.copy_file(str(file), str(into / file.name))


setup(
    cmdclass={"build_py": BuildWithConfigs},
    long_description=long_description(),
    long_description_content_type="text/markdown",
)
