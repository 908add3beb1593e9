"""What docs/adding-a-model.md says, done to a copy of the tree: the model that it adds is transformers', alone and split."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "adding-a-model.md"
BLOCK = re.compile(r"^```python\n# (?P<file>[\w./]+)(?:, in (?P<table>\w+))?\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [match.groupdict() for match in BLOCK.finditer(PAGE.read_text())]
SUITES = ("tests/contract/test_models_oracle.py", "tests/contract/test_models_disk.py", "tests/cluster/test_split_tiny.py",
          "tests/cluster/test_split_tiny_ranks.py", "tests/unit/test_bench.py")
COPIED = ("slipstream", "cache_transfer", "worker", "prefill", "decode", "launch", "bench", "tests/support",
          "tests/conftest.py", "pyproject.toml", *SUITES)


def test_the_product_grows_by_one_file_and_one_line() -> None:
    product = [block for block in BLOCKS if block["file"].split("/")[0] not in ("tests", "bench")]
    whole, line = product
    assert re.fullmatch(r"slipstream/models/\w+\.py", whole["file"])
    assert not (ROOT / whole["file"]).exists()
    assert (line["file"], line["code"].count("\n")) == ("slipstream/models/registry.py", 1)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The copy, with the page's blocks in their places."""
    tree = tmp_path_factory.mktemp("tree")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    for block in BLOCKS:
        path = tree / block["file"]
        if block["table"] is None:
            path.write_text(block["code"])
            continue
        before, start, after = re.split(rf"(^{block['table']}\b[^\n]*? = {{)", path.read_text(), maxsplit=1, flags=re.MULTILINE)
        path.write_text(f"{before}{start}\n{block['code']}{after}")
    return tree


@pytest.mark.timeout(240)
@pytest.mark.long
def test_the_model_of_the_page_is_transformers_own(tree: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-vv", "-k", "llama or tiny_configuration",
                           *SUITES], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert set(re.findall(r"^(\S+)::.* PASSED", done.stdout, re.MULTILINE)) == set(SUITES), done.stdout
