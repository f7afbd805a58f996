# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""The imports are the architecture: read from the sources, without running them."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tool import kit

PACKAGE = kit.ROOT / "patchset"
MODULES = {path.stem: path for path in sorted(PACKAGE.glob("*.py")) if path.stem != "__init__"}
OPTIONAL = {"packaging", "unidiff", "rich"}  # never at the top of a module


def core_order() -> list[str]:
    """The order that patchset/__init__.py states."""
    text = " ".join((ast.get_docstring(ast.parse((PACKAGE / "__init__.py").read_text())) or "").split())
    match = re.search(r"upward import\): ([a-z_, ]+), then one module a verb, (?:then )?cli\.", text)
    assert match, text
    return match[1].split(", ")


def imports(path: Path, top_only: bool) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of the imports of a file; `top_only` leaves out those inside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = _outside_functions(tree) if top_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            yield node.lineno, node.module or ""
            yield from ((node.lineno, f"{node.module}.{name.name}") for name in node.names)


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _outside_functions(child)


def own_imports(module: str, top_only: bool = True) -> set[str]:
    named = (name.split(".") for _, name in imports(MODULES[module], top_only))
    return {parts[1] for parts in named if parts[0] == "patchset" and len(parts) > 1 and parts[1] in MODULES}


def test_the_core_imports_downwards_only() -> None:
    order = core_order()
    assert set(order) <= MODULES.keys()
    upward = [(a, b) for i, a in enumerate(order) for b in own_imports(a) if b not in order[:i]]
    assert upward == []


def test_no_cycle_and_cli_on_top() -> None:
    graph = {module: own_imports(module) for module in MODULES}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError
    assert [module for module, used in graph.items() if "cli" in used] == []


def test_only_the_standard_library_at_the_top() -> None:
    foreign = [
        f"{path.name}:{line}: {name}"
        for path in [*MODULES.values(), kit.ROOT / "apply.py"]
        for line, name in imports(path, top_only=True)
        if name.split(".")[0] not in sys.stdlib_module_names | {"patchset"}
    ]
    assert foreign == []


def test_nothing_but_named_extras_inside_functions() -> None:
    foreign = [
        f"{path.name}:{line}: {name}"
        for path in MODULES.values()
        for line, name in imports(path, top_only=False)
        if name.split(".")[0] not in sys.stdlib_module_names | {"patchset"} | OPTIONAL
    ]
    assert foreign == []


def test_the_overlay_never_imports_the_tool() -> None:
    used = [
        f"{path}:{line}: {name}"
        for path in (kit.ROOT / "overlay").rglob("*.py")
        for line, name in imports_of_any_level(path)
        if name.split(".")[0] in ("patchset", "tests", "examples")
        and not (name.startswith("tests.") and "tests" in path.parts)
    ]
    assert used == []


def imports_of_any_level(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, node.module or ""


@pytest.mark.parametrize("module", MODULES)
def test_public_functions_have_docstrings(module: str) -> None:
    """Functions, classes and their methods; `configure` and `execute` say it by their name."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    nodes = [*tree.body, *(inner for outer in classes for inner in outer.body)]
    bare = [
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and node.name.split("_")[0] not in ("", "configure", "execute")
        and not any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list)
        and node.name != "as_dict"
        and ast.get_docstring(node) is None
    ]
    assert bare == []


def test_the_tool_starts_without_site_packages() -> None:
    """-I -S: nothing but the standard library is to be had, and torch is never imported."""
    code = (
        f"import sys; sys.path.insert(0, {str(kit.ROOT)!r}); import patchset.cli, patchset.verbs; "
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'packaging', 'numpy')])"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
