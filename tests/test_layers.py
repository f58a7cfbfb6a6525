"""Imports point one way: a module may import earlier layers only, also lazily within a function."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "collapse"

# Earliest first. `collapse` itself is the package's `__init__`, the interface for Python users.
LAYERS = (
    *("errors", "canonical", "hashing", "disk", "writing", "untrusted", "replace", "config_paths", "free_layout"),
    *("plan", "search_path", "verdict", "memory", "progress", "budget", "certify"),
    *("domain", "schema", "schemas", "textfile", "infer", "corpus"),
    *("quantised", "checkpoint", "bpe", "token_ids", "tokenizer", "chat", "sequences"),
    *("models", "growing_rope", "dtypes", "fingerprint", "naming", "auto", "program", "portable", "trace"),
    *("sources", "dequantise", "source_model"),
    *("analysis", "rewrite", "search", "passes", "manifest", "signing", "staging", "erase"),
    *("verify", "heal", "probe", "audit", "report", "runtime"),
    *(
        "options",
        "pipeline",
        "survey",
        "collapse",
        "testing",
        "cli_args",
        "cli_schema",
        "cli_check",
        "cli_audit",
        "cli_influence",
        "cli_inspect",
        "cli",
        "__main__",
    ),
)


def unit_of(path: Path, package: Path) -> str:
    """Return the layer that a file belongs to: its name, or that of the sub-package right under `package`."""
    first = path.relative_to(package).parts[0].removesuffix(".py")
    return "collapse" if first == "__init__" else first


def imported_units(path: Path, package: Path) -> list[tuple[int, str]]:
    """Return (line, layer) of every import of the package in a file, wherever in the file it stands."""
    here = ("collapse", *path.relative_to(package).parts[:-1])
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            dotted = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(here[: len(here) - node.level + 1]) if node.level else []
            stem = base + (node.module.split(".") if node.module else [])
            dotted = [[*stem, alias.name] for alias in node.names]
        else:
            continue
        found.extend((node.lineno, layer(parts, package)) for parts in dotted if parts[0] == "collapse")
    return found


def layer(parts: list[str], package: Path) -> str:
    """Return the layer of a dotted name; a name that is no module is one of the package's `__init__`."""
    if len(parts) < 2:
        return "collapse"
    known = (package / parts[1]).is_dir() or (package / f"{parts[1]}.py").is_file()
    return parts[1] if known or len(parts) > 2 else "collapse"


def violations(package: Path) -> list[str]:
    """Return one line for each import of a later layer, and for each file that has no place in the order."""
    problems: list[str] = []
    for path in sorted(package.rglob("*.py")):
        name, unit = path.relative_to(package).as_posix(), unit_of(path, package)
        if unit not in LAYERS:
            problems.append(f"{name}: layer {unit} has no place in LAYERS")
            continue
        for line, target in imported_units(path, package):
            if target not in LAYERS or LAYERS.index(target) > LAYERS.index(unit):
                problems.append(f"{name}:{line}: {unit} imports the later layer {target}")
    return problems


def test_every_import_points_to_an_earlier_layer() -> None:
    assert violations(PACKAGE) == []


def test_the_order_names_each_layer_once() -> None:
    assert len(set(LAYERS)) == len(LAYERS)


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """Return a small package with one module of each of three layers, free of violations."""
    package = tmp_path / "collapse"
    (package / "passes").mkdir(parents=True)
    (package / "__init__.py").write_text("from collapse.pipeline import export as export\n")
    (package / "pipeline.py").write_text("from collapse.passes import base\n")
    (package / "plan.py").write_text("import json\nfrom collapse.errors import PlanError\n")
    (package / "errors.py").write_text("")
    (package / "passes" / "__init__.py").write_text("from collapse.passes.base import Context\n")
    (package / "passes" / "base.py").write_text("from . import positions\nfrom ..plan import Plan\n")
    (package / "passes" / "positions.py").write_text("from collapse.plan import Plan\n")
    return package


def test_imports_of_the_same_and_earlier_layers_pass(planted: Path) -> None:
    assert violations(planted) == []


@pytest.mark.parametrize(
    ("statement", "target"),
    [
        ("from collapse.pipeline import run", "pipeline"),
        ("import collapse.pipeline", "pipeline"),
        ("from collapse import pipeline", "pipeline"),
        ("from collapse import export", "collapse"),
        ("import collapse", "collapse"),
        ("from .. import pipeline", "pipeline"),
        ("from ..pipeline import run", "pipeline"),
        ("def f():\n    from collapse.pipeline import run", "pipeline"),
        ("if TYPE_CHECKING:\n    from collapse.pipeline import run", "pipeline"),
        ("from collapse.nowhere import x", "nowhere"),
    ],
)
def test_a_planted_import_of_a_later_layer_is_found(planted: Path, statement: str, target: str) -> None:
    (planted / "passes" / "positions.py").write_text(statement + "\n")
    line = statement.count("\n") + 1
    assert violations(planted) == [f"passes/positions.py:{line}: passes imports the later layer {target}"]


def test_a_file_without_a_layer_is_found(planted: Path) -> None:
    (planted / "helpers.py").write_text("")
    assert violations(planted) == ["helpers.py: layer helpers has no place in LAYERS"]
