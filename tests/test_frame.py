# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""The frame holds what it says: licences, attributes, commands of the README, documents that agree with the code."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import json
import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import patchset
from patchset import cli, manifest
from patchset.errors import PatchsetError

ROOT = Path(__file__).resolve().parents[1]
SPDX = "SPDX-License-" + "Identifier:"  # in two parts: `reuse lint` reads this file too
DOCUMENTS = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("*.md"))


def git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """Every file of the project: tracked, or new and not ignored."""
    if not (ROOT / ".git").exists():
        pytest.fail("these tests need a git checkout: git clone the project")
    listed = git("ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")
    return [path for path in listed if path and (ROOT / path).is_file()]


def texts(paths: list[str]) -> Iterator[tuple[str, str]]:
    """(path, content) of those that are text."""
    for path in paths:
        data = (ROOT / path).read_bytes()
        if b"\0" not in data:
            yield path, data.decode("utf-8")


# Licences


def reuse_map() -> list[dict]:
    return tomllib.loads((ROOT / "REUSE.toml").read_text(encoding="utf-8"))["annotations"]


def mapped_licence(path: str) -> str | None:
    """The licence REUSE.toml gives a path; the last matching entry counts."""
    found = None
    for entry in reuse_map():
        patterns = entry["path"] if isinstance(entry["path"], list) else [entry["path"]]
        if any(re.fullmatch(_regex(pattern), path) for pattern in patterns):
            found = entry[SPDX.removesuffix(":")]
    return found


def _regex(pattern: str) -> str:
    """REUSE's globs: `**` crosses directories, `*` does not."""
    known = {"**": ".*", "*": "[^/]*"}
    return "".join(known.get(part, re.escape(part)) for part in re.split(r"(\*\*|\*)", pattern))


def test_every_file_has_a_licence_with_its_text(tracked: list[str]) -> None:
    unknown, used = [], set()
    for path, text in texts(tracked):
        if path.startswith("LICENSES/") or not text:
            continue
        header = re.search(SPDX + r" ([\w.-]+)", text[:2000])
        licence = header[1] if header and not path.endswith(".patch") else mapped_licence(path)
        if licence is None:
            unknown.append(path)
        else:
            used.add(licence)
    assert not unknown, f"neither an SPDX header nor an entry in REUSE.toml: {unknown}"
    missing = [name for name in used if not (ROOT / "LICENSES" / f"{name}.txt").is_file()]
    assert not missing, f"LICENSES/ lacks {missing}"


def test_patches_carry_the_licence_of_their_target(tracked: list[str]) -> None:
    licences = {t.id: t.licence for t in manifest.load().targets.values()}
    for path in tracked:
        if path.startswith("patches/") and path.endswith(".patch"):
            assert mapped_licence(path) == licences[path.split("/")[1]], path


def test_notice_names_every_target() -> None:
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    for target in manifest.load().targets.values():
        assert target.repo in notice
        assert target.licence in notice
    assert "endorsed" in notice


# Files


@pytest.mark.parametrize(
    ("path", "attribute", "wanted"),
    [
        ("patches/sglang/0.5.17/some-fix.patch", "text", "unset"),  # bytes: a CRLF upstream stays one
        ("patches/sglang/0.5.17/series", "merge", "union"),
        ("patches/sglang/0.5.17/series", "eol", "lf"),
        ("overlay/sglang/python/sglang/x.py", "eol", "lf"),
        ("apply.py", "eol", "lf"),
        ("docs/x.png", "text", "unset"),
    ],
)
def test_gitattributes(path: str, attribute: str, wanted: str) -> None:
    assert git("check-attr", attribute, "--", path).strip() == f"{path}: {attribute}: {wanted}"


def test_text_files_have_unix_line_endings(tracked: list[str]) -> None:
    bad = [path for path, text in texts(tracked) if "\r" in text and not path.startswith("patches/")]
    assert not bad


def test_nothing_names_a_machine(tracked: list[str]) -> None:
    """No absolute path of somebody's home or work directory."""
    places = re.compile(r"(?<![\w.~/-])/(?:" + "|".join(["root", "home", "Users", "work", "mnt", "opt"]) + r")/\w")
    bad = []
    for path, text in texts(tracked):
        if not path.startswith("patches/"):  # context lines are upstream's
            bad += [f"{path}: {m[0]}" for m in places.finditer(text) if path != "tests/test_frame.py"]
    assert not bad


def test_functions_are_short(tracked: list[str]) -> None:
    """At most 60 lines a function, docstring not counted; Triton kernels are exempt."""
    long = []
    for path, text in texts(tracked):
        if not path.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _lines(node) > 60 and not _is_kernel(node):
                long.append(f"{path}:{node.lineno} {node.name}: {_lines(node)}")
    assert not long


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
    return (node.end_lineno or 0) - body[0].lineno + 1


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


# Commands


def commands() -> list[tuple[str, str]]:
    """(document, command) of every line in a code block that starts a script of the project."""
    found = []
    for document in DOCUMENTS:
        for block in re.findall(r"```(?:bash|sh|console)?\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.splitlines():
                line = line.split("   #")[0].strip().removeprefix("$ ")
                if re.match(r"(?:\w+=\S+ )*(python3?|bash) ", line):
                    found.append((document.name, line))
    return found


def test_readme_gives_its_two_commands() -> None:
    lines = [line for document, line in commands() if document == "README.md"]
    assert "python apply.py --fetch" in lines
    assert "bash ci/test.sh" in lines


@pytest.mark.parametrize(("document", "line"), commands())
def test_documented_commands_parse(document: str, line: str) -> None:
    words = [w for w in shlex.split(line) if not re.fullmatch(r"[A-Z_0-9]+=.*", w)]
    script, arguments = words[1], words[2:]
    if script == "-m":
        return
    assert (ROOT / script).is_file(), f"{document}: {line}"
    if script != "apply.py" or {"--help", "-h"} & set(arguments):
        return
    name, verb, rest = cli._pick(arguments)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            cli._parse(name, verb, rest, manifest.load())
        except (SystemExit, PatchsetError) as error:
            pytest.fail(f"{document}: {line}: {error} {said.getvalue()}")


def test_links_between_documents_resolve() -> None:
    for document in DOCUMENTS:
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
            if "://" not in link:
                assert (document.parent / link).exists(), f"{document.name} links to {link}"


# Exit codes


def error_classes() -> list[type[PatchsetError]]:
    """Every error class of the tool, wherever it is defined."""
    for module in pkgutil.iter_modules(patchset.__path__):
        importlib.import_module(f"patchset.{module.name}")
    found, queue = [], [PatchsetError]
    while queue:
        subclasses = queue.pop().__subclasses__()
        found += subclasses
        queue += subclasses
    return sorted(found, key=lambda c: (c.exit_code, c.__name__))


def test_exit_codes_are_documented() -> None:
    text = (ROOT / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    rows = {m[2]: (int(m[1]), m[3]) for m in re.finditer(r"(?m)^\| (\d) \| `(\w+)` \| ([^|]+) \|", text)}
    classes = {c.__name__: c for c in error_classes()}
    assert set(rows) == set(classes), "a row a class, a class a row"
    for name, found in classes.items():
        summary = (found.__doc__ or "").strip().splitlines()[0]
        assert rows[name] == (found.exit_code, summary), f"expected | {found.exit_code} | `{name}` | {summary} |"


def test_exit_codes_stay_in_the_contract() -> None:
    assert {c.exit_code for c in error_classes()} == {1, 2, 3, 4, 5, 6, 7}


# Configuration


def test_project_is_not_published_and_needs_nothing() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["dependencies"] == []
    assert "Private :: Do Not Upload" in project["classifiers"]
    assert project["version"] == str(manifest.load().revision)


def test_locked_tools_satisfy_the_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    locked = dict(
        re.findall(r"(?m)^([\w.-]+)==(\S+)", (ROOT / "ci" / "requirements-tool.txt").read_text(encoding="utf-8"))
    )
    for requirement in (Requirement(text) for extra in extras.values() for text in extra):
        version = locked.get(requirement.name)
        assert version is not None, (
            f"{requirement.name} is not in ci/requirements-tool.txt; CONTRIBUTING.md says how to lock"
        )
        assert requirement.specifier.contains(version), f"{requirement}: locked at {version}"


def test_targets_are_not_in_the_cpu_environment() -> None:
    """A pristine copy in site-packages could stand in for a file that a patched tree lacks."""
    names = re.findall(r"(?m)^([\w.-]+)==", (ROOT / "ci" / "requirements-cpu.txt").read_text(encoding="utf-8"))
    assert names
    assert not {t.dist for t in manifest.load().targets.values()} & set(names)


def test_hooks_run_what_is_locked() -> None:
    """pre-commit itself checks the schema; here: every hook is local and its program is in the clone or locked."""
    config = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert set(re.findall(r"- repo: (\S+)", config)) == {"local"}
    entries = re.findall(r"(?m)^\s+entry: (\S+)", config)
    assert entries
    assert all((ROOT / entry).is_file() for entry in entries)
    done = subprocess.run(
        [sys.executable, "-m", "pre_commit", "validate-config"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_skip_lists_name_tests_that_exist() -> None:
    for path in sorted((ROOT / "ci" / "skips").glob("*.txt")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line and not line.startswith("#"):
                file = line.split("::")[0]
                assert list(ROOT.glob(file)), f"{path.name}: {line}"


def test_bench_results_say_where_they_come_from() -> None:
    for path in sorted((ROOT / "bench" / "results").glob("*.json")):
        body = json.loads(path.read_text(encoding="utf-8"))
        assert body["machine"], path.name
        assert body["versions"], path.name
