"""The repository keeps its promises: commands exist, versions are pinned, gates bite, nothing private is tracked."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CARD = ("torch", "torch.fx", "torch.export", "transformers", "safetensors", "graphviz", "thop", "pytest")
PRIVATE = (
    (re.compile(r"(?<![\w.~/-])/(?:home|Users)/[A-Za-z]"), "somebody's home directory"),
    (
        re.compile(r"py[p]i\.org|python[h]osted\.org|download\.py[t]orch\.org|--(?:extra-)?index-url"),
        "a package registry",
    ),
)


def tracked_files() -> list[Path]:
    """Return the files under version control, or skip where the checkout has no git."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()]


def leaks(text: str) -> list[str]:
    """Return what `text` gives away: private paths, this checkout's path, registry hosts."""
    found = [f"{what}: {match.group()}" for pattern, what in PRIVATE if (match := pattern.search(text))]
    own = (str(ROOT), str(Path.home()))
    return found + [f"a path of this machine: {path}" for path in own if path.count("/") > 1 and path in text]


def requirements(*groups: str) -> list[Requirement]:
    """Return the requirements of the project itself, of the given extras, and of its build."""
    project = PROJECT["project"]
    lines = [*project["dependencies"], *PROJECT["build-system"]["requires"]]
    lines += [line for group in groups for line in project["optional-dependencies"][group]]
    return [Requirement(line) for line in lines]


def pins(text: str) -> dict[str, str]:
    """Return canonical package name -> exact version; fails on a line that is no exact pin."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([\w.-]+)==([\w.]+)", line)
            assert match, f"no exact pin without local suffix: {line}"
            found[canonicalize_name(match[1])] = match[2]
    return found


def closure(wanted: list[Requirement]) -> set[str]:
    """Return canonical names of the requirements and of everything that they need on this machine."""
    names: set[str] = set()
    queue = [(requirement, extra) for requirement in wanted for extra in ("", *requirement.extras)]
    while queue:
        requirement, extra = queue.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        if name in names:
            continue
        names.add(name)
        below = [Requirement(line) for line in metadata.distribution(name).requires or ()]
        queue += [(child, inner) for child in below for inner in ("", *requirement.extras)]
    return names


CONSTRAINTS = pins((ROOT / "constraints.txt").read_text())


def test_every_declared_dependency_is_pinned_within_its_range() -> None:
    for requirement in requirements("dev"):
        version = CONSTRAINTS.get(canonicalize_name(requirement.name))
        assert version, f"{requirement.name} is not in constraints.txt"
        assert requirement.specifier.contains(Version(version)), f"{requirement} excludes the pinned {version}"


def test_everything_that_dependencies_need_is_pinned() -> None:
    accelerators = ("nvidia-", "cuda-", "triton")  # torch itself pins these, where its build has them at all
    missing = sorted(name for name in closure(requirements("dev")) - set(CONSTRAINTS) if name != "pip")
    assert [name for name in missing if not name.startswith(accelerators)] == []


@pytest.mark.parametrize("line", ["torch>=2", "torch==2.13.0+cpu", "torch", "-r other.txt", "torch==2.*"])
def test_a_loose_pin_is_found(line: str) -> None:
    with pytest.raises(AssertionError, match="no exact pin"):
        pins(line)


@cache
def imported_modules(*folders: str) -> set[str]:
    """Return every module that the files in `folders` import, with all its parents."""
    found: set[str] = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                parts = name.split(".")
                found.update(".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return found


@pytest.mark.parametrize("package", CARD)
def test_every_package_of_the_card_is_used(package: str) -> None:
    assert package in imported_modules("collapse", "tests")


def test_no_tracked_file_gives_anything_away() -> None:
    problems: list[str] = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        problems += [f"{path.relative_to(ROOT)}: {leak}" for leak in leaks(text)]
    assert problems == []


@pytest.mark.parametrize(
    "text",
    [
        "see /" + "home/ann/model",
        "open('/" + "Users/ann/model')",
        "pip install --" + "index-url https://example.invalid",
        "https://py" + "pi.org/simple",
        f"built in {ROOT}/out",
    ],
)
def test_a_planted_leak_is_found(text: str) -> None:
    assert leaks(text) != []


@pytest.mark.parametrize(
    "text", ["GET /home HTTP/1.1", "~/.cache/collapse", "api.example.com/home/page", "a pip index"]
)
def test_plain_text_is_no_leak(text: str) -> None:
    assert leaks(text) == []


def commands(text: str) -> list[str]:
    """Return the command lines in the bash blocks of a Markdown text, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def subcommands(text: str) -> set[str]:
    """Return the words that follow `collapse` in the command lines of a Markdown text."""
    return {line.split()[1] for line in commands(text) if line.startswith("collapse ")}


DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/index.md", "docs/ci.md", "docs/audit.md", "docs/schema.md")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_scripts_and_links_in_documents_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    for script in re.findall(r"(?<![\w/])scripts/\w+", text):
        assert (ROOT / script).is_file(), script
        assert os.access(ROOT / script, os.X_OK), f"{script} is not executable"
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert ((ROOT / name).parent / target).exists(), f"{name} links to {target}"


@pytest.mark.skipif(find_spec("collapse.cli") is None, reason="the command line is not part of this checkout")
def test_documented_subcommands_exist() -> None:
    helped = subprocess.run([sys.executable, "-m", "collapse", "-h"], capture_output=True, text=True, cwd=ROOT)
    assert helped.returncode == 0, helped.stderr
    wanted = set().union(*(subcommands((ROOT / name).read_text()) for name in DOCUMENTS))
    assert {"export", "plan", "verify", "probe", "report", "flops"} <= wanted
    assert {name for name in wanted if not re.search(rf"\b{name}\b", helped.stdout)} == set()


def test_the_command_says_its_version() -> None:
    told = subprocess.run([sys.executable, "-m", "collapse", "--version"], capture_output=True, text=True, cwd=ROOT)
    assert (told.returncode, told.stderr, told.stdout) == (0, "", f"collapse {metadata.version('collapse')}\n")


def test_subcommands_are_read_from_the_blocks() -> None:
    text = (
        "collapse nothing\n```bash\ncollapse plan M  # collapse more\nscripts/demo\n```\n```bash\ncollapse export\n```"
    )
    assert subcommands(text) == {"plan", "export"}


def test_the_changelog_knows_this_version() -> None:
    assert f"## {PROJECT['project']['version']}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("script", ["setup", "test", "demo", "bench", "readme_table"])
def test_scripts_stop_at_the_first_error_and_parse(script: str) -> None:
    path = ROOT / "scripts" / script
    assert "\nset -euo pipefail\n" in path.read_text()
    assert subprocess.run(["bash", "-n", path], capture_output=True).returncode == 0


def test_setup_without_a_python_is_one_clear_line(tmp_path: Path) -> None:
    for folder in ("scripts", "bin"):
        (tmp_path / folder).mkdir()
    for name in ("scripts/setup", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for tool in ("bash", "dirname", "cat", "cksum"):
        found = subprocess.run(["bash", "-c", f"command -v {tool}"], capture_output=True, text=True).stdout.strip()
        (tmp_path / "bin" / tool).symlink_to(found)
    environment = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path)}
    result = subprocess.run(
        [tmp_path / "bin" / "bash", tmp_path / "scripts" / "setup"], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 2
    assert result.stderr.startswith("scripts/setup: needs Python 3.11 or newer")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / ".venv").exists()


def gate(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("planted", "rule"),
    [
        ('"""Docs."""\n\nimport os\n', "F401"),
        ("def f(): return 1\n", "D1"),
        ('"""Docs."""\n\nimport os.path\n\nX = os.path.join("a", "b")\n', "PTH"),
    ],
)
def test_the_lint_gate_bites(tmp_path: Path, planted: str, rule: str) -> None:
    (tmp_path / "planted.py").write_text(planted)
    result = gate("ruff", "check", "--config", "pyproject.toml", "--no-cache", str(tmp_path))
    assert result.returncode == 1
    assert rule in result.stdout


def test_the_format_gate_bites(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text("x = {  'a':1 }\n")
    arguments = ("ruff", "format", "--check", "--config", "pyproject.toml", "--no-cache", str(tmp_path))
    assert gate(*arguments).returncode == 1


def test_the_type_gate_bites(tmp_path: Path) -> None:
    path = tmp_path / "planted.py"
    path.write_text("def f(x):\n    return x\n\n\ndef g() -> int:\n    return 'one'\n")
    result = gate("mypy", "--config-file", "pyproject.toml", str(path))
    assert result.returncode == 1
    assert "no-untyped-def" in result.stdout
    assert "return-value" in result.stdout


RECORD = re.compile(r"reports/(peers-(?:smollm2|gemma3)[\w-]*\.json)")
ROW = re.compile(r"^\| `([\w-]+)` \| ([\d.]+) \(([\d.]+)\) \| ([\d.]+) \(([\d.]+)\) \| ([\d.]+) \(([\d.]+)\) \|$")


def kl_of(record: str) -> dict[tuple[str, float, str], float]:
    cells = json.loads((ROOT / "reports" / record).read_text())["cells"]
    return {(one["method"], one["share"], one["evaluated_on"]): one["scores"]["kl"] for one in cells}


def test_the_tables_of_other_methods_say_what_the_records_say() -> None:
    """Each table is of the record that was named last before it."""
    record, rows = "", 0
    for line in (ROOT / "docs" / "peers.md").read_text().splitlines():
        if named := RECORD.search(line):
            record = named.group(1)
        if row := ROW.match(line):
            method, figures, kl = row.group(1), row.groups()[1:], kl_of(record)
            for place, share in enumerate((0.1, 0.2, 0.3)):
                pair = (f"{kl[method, share, 'in-domain']:.3f}", f"{kl[method, share, 'other domain']:.2f}")
                assert figures[2 * place : 2 * place + 2] == pair, (record, method, share)
            rows += 1
    assert rows == 14


def test_the_page_of_other_methods_says_what_healing_gives() -> None:
    kl = kl_of("peers-smollm2.json")
    less = [
        100 * (1 - kl["collapse-healed", n, "in-domain"] / kl["collapse-free", n, "in-domain"]) for n in (0.1, 0.2, 0.3)
    ]
    assert abs(less[0]) < 0.5
    said = f"makes nothing better at 10 %, {less[1]:.0f} % at 20 % and {less[2]:.0f} % at 30 %"
    assert said in " ".join((ROOT / "docs" / "peers.md").read_text().split())


def test_the_page_of_other_methods_says_what_text_of_the_domain_gives() -> None:
    lines = (ROOT / "docs" / "peers.md").read_text().splitlines()
    for text, record in (("logs", "peers-smollm2.json"), ("prose", "peers-smollm2-generic.json")):
        cells = record_of(record)["cells"]
        assert {one["calibrated_on"] for one in cells} - {"domain"} == ({"generic"} if text == "prose" else set())
        found = {
            one["share"]: one["scores"]
            for one in cells
            if one["method"] == "collapse-free" and one["evaluated_on"] == "in-domain"
        }
        row = [f"{found[share]['kl']:.3f}" for share in (0.1, 0.2, 0.3)]
        row += [f"{100 * found[share]['confident_flips']:.1f} %" for share in (0.1, 0.2, 0.3)]
        assert f"| {text} | {' | '.join(row)} |" in lines


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ("peers-smollm2.json", "(KL {0}, {1} and {2} nats a token against {3}, {4} and {5})"),
        ("peers-gemma3.json", "({0}, {1} and {2} against {3}, {4} and {5})"),
    ],
)
def test_the_readme_says_what_the_records_of_other_methods_say(record: str, said: str) -> None:
    kl = {key: value for key, value in kl_of(record).items() if key[2] == "in-domain"}
    ours = [f"{kl['collapse-free', share, 'in-domain']:.3f}" for share in (0.1, 0.2, 0.3)]
    others = {key: value for key, value in kl.items() if not key[0].startswith("collapse")}
    best = [f"{min(value for key, value in others.items() if key[1] == share):.3f}" for share in (0.1, 0.2, 0.3)]
    assert said.format(*ours, *best) in " ".join((ROOT / "README.md").read_text().split())


def cells_of(line: str) -> list[str]:
    return [cell.strip().replace("−", "-") for cell in line.strip("|").split("|")]


def record_of(name: str) -> Any:
    return json.loads((ROOT / "reports" / name).read_text())


def test_the_tables_of_finished_models_say_what_the_records_say() -> None:
    """The headline's, that of JSON and that of decode speed, in docs/benchmarks.md."""
    lines = (ROOT / "docs" / "benchmarks.md").read_text().splitlines()
    rows = [cells_of(line) for line in lines]
    headline, told, decode = (record_of(f"{name}-smollm2.json") for name in ("headline", "json", "decode"))
    whole = headline["source"]["parameters"]
    for point in headline["points"]:
        sizes, losses = point["sizes"], point["losses"]
        said = [f"{sizes['parameters'] / whole:.1%}", f"{losses['kl']:.3f}"]
        said += [f"{losses['regret']:.1%}", f"{losses['confident_flips']:.1%}"]
        assert [one.replace("%", " %") for one in said] in [row[1:] for row in rows]
    later = [entry for entry in record_of("json-smollm2-20.json")["entries"] if entry["losses"]]
    for entry in (*told["entries"], *later):
        shares = [
            f"{entry['shares'][name]:.1%}".replace("100.0%", "100%") for name in ("grammar", "matched", "balanced")
        ]
        lost, judged = entry["losses"], entry["judgement"]
        said = [f"{lost['kl']:.3f}", f"{lost['regret']:.1%}"] if lost else ["", ""]
        said = [one.replace("%", " %") for one in (*said, *shares)]
        assert [*said, judged["verdict"] if judged else ""] in [row[2:] for row in rows]
    timings = [one for one in decode["timings"] if one["name"] != "source"]
    for name in ("free-10", "free-18"):
        eager, compiled = (one["ratio"] for one in timings if one["name"] == name)
        predicted = next(one["predicted_ratio"] for one in timings if one["name"] == name)
        said = [f"{one['median']:.2f} ({one['low']:.2f} to {one['high']:.2f})" for one in (eager, compiled)]
        assert [*said, f"{predicted:.2f}"] in [row[2:] for row in rows]
    gemma, text = record_of("headline-gemma3.json"), " ".join(lines)
    for said, metric in (("parameters", None), ("regret", "regret"), ("flips", "confident_flips")):
        values = [
            one["losses"][metric] if metric else one["sizes"]["parameters"] / gemma["source"]["parameters"]
            for one in gemma["points"]
        ]
        first, second = (f"{100 * value:.1f}" for value in values)
        assert (
            f"{first} and {second} %" in text
            or f"{first} % of the {said} with the vocabulary alone, {second} %" in text
        )
    (point,) = record_of("headline-smollm2-ascii.json")["points"]
    upper = {one["metric"]: f"{100 * one['upper']:.1f} %" for one in point["bounds"]["bounds"]}
    losses = point["losses"]
    assert (
        f"{100 * point['sizes']['parameters'] / whole:.1f} % of the parameters, KL {losses['kl']:.3f}, regret "
        f"{100 * losses['regret']:.1f} % and at most {upper['regret']}, confident flips "
        f"{100 * losses['confident_flips']:.2f} % and at most {upper['confident-flips']}. "
        "**Both budgets are certified.**"
    ) in text and point["certified"]
    record = record_of("headline-gemma3-ascii.json")
    (point,), source = record["points"], record["source"]
    regret, flips = point["bounds"]["bounds"]
    sizes = {name: point["sizes"][name] / source[name] for name in source.keys() - {"name"}}
    assert {f"{share:.1%}" for name, share in sizes.items() if name != "kv_bytes_per_token"} == {"73.4%"}
    assert sizes["kv_bytes_per_token"] == 1 and point["certified"] and record["sequences"] == 1792
    assert (
        f"regret {100 * regret['estimate']:.1f} % and at most {100 * regret['upper']:.1f} %, confident flips "
        f"{100 * flips['estimate']:.2f} % and at most {100 * flips['upper']:.2f} %. **Both budgets are certified.**"
    ) in text
    for point in record_of("headline-smollm2-ascii-curve.json")["points"]:
        upper = {one["metric"]: f"{one['upper']:.1%}" for one in point["bounds"]["bounds"]}
        losses = point["losses"]
        said = [f"{point['sizes']['parameters'] / whole:.1%}", f"{losses['kl']:.3f}"]
        said += [f"{losses['regret']:.1%} ({upper['regret']})"]
        said += [f"{losses['confident_flips']:.1%} ({upper['confident-flips']})"]
        assert [one.replace("%", " %") for one in said] in [row[1:] for row in rows] and not point["certified"]
    eager, compiled = (one for one in record_of("decode-gemma3.json")["timings"] if one["name"] != "source")
    said = [
        f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
        for ratio in (eager["ratio"], compiled["ratio"])
    ]
    assert f"{said[0]} eager, {said[1]} compiled, {eager['predicted_ratio']:.2f} predicted" in text
    scaling = record_of("scaling.json")["points"]
    seconds = [f"{one['cpu_seconds']:.0f}" for one in scaling if one["tokens"] == 32768]
    assert f"{seconds[0]}, {seconds[1]} and {seconds[2]} with 4, 8 and 16 layers" in text
