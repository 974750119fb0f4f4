"""Build step: the long description is the README without the links that work only within the repository."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup


def long_description() -> str:
    """Return the README without images, and with relative links, which PyPI cannot resolve, replaced by their text."""
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"^!\[[^\]]*\]\((?![a-z]+:)[^)]*\)\n\n", "", text, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]+)\]\((?![a-z]+:)[^)]*\)", r"\1", text)


setup(long_description=long_description(), long_description_content_type="text/markdown")
