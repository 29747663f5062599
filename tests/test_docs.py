"""Documents show what the result files say, and name files that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_documents_are_rendered_from_the_result_files():
    done = subprocess.run(
        [sys.executable, ROOT / "docs/render.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
        assert (document.parent / target).exists(), target


def test_every_result_says_where_it_comes_from():
    import json

    for path in (ROOT / "docs/results").glob("*.json"):
        result = json.loads(path.read_text())
        assert all(result[key] for key in ("command", "commit", "hardware", "date")), path.name
