"""The tables in READMEs are what the code works out today."""

from pathlib import Path

import pytest

from recipes.docs import ROOT, documents, renewed


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_tables_are_up_to_date(path: Path) -> None:
    text = path.read_text()
    assert renewed(text) == text, "write them anew: python -m recipes.docs"
