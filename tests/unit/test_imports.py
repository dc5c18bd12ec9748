"""Imports run one way, recipes -> parallel -> models, and checking a config does not wait for torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN = {
    "models": {"parallel", "recipes", "hydra", "omegaconf", "lightning"},
    "parallel": {"recipes", "hydra", "omegaconf", "lightning"},
}
FILES = [path for package in ("models", "parallel", "recipes") for path in sorted((ROOT / package).rglob("*.py"))]


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written in full"
            yield (node.module or "").split(".")[0]


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_given_a_file_when_it_imports_then_only_downwards(path: Path) -> None:
    relative = path.relative_to(ROOT)
    forbidden = set(FORBIDDEN.get(relative.parts[0], ()))
    if relative == Path("parallel/strategy.py"):
        forbidden.remove("lightning")
    assert forbidden & set(_imported(path)) == set()


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("parallel.config, parallel.plan.validate, parallel.layout", ["torch", "lightning", "hydra", "omegaconf"]),
        ("recipes.train, recipes.generate, recipes.evaluate", ["torch", "lightning", "datasets", "wandb"]),
    ],
)
def test_given_modules_when_imported_then_nothing_heavy_comes_along(modules: str, absent: list[str]) -> None:
    code = f"import sys, {modules}; print(*[name for name in {absent} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
