# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""pytest plugin of ci/trees.py: which tree is tested, and "does this test fail without the patch?".

`--tree MODULE=DIR` (repeatable) demands that MODULE, and everything below it that a test imported, comes from DIR.
`--fails-without FILE` reads a JSON list of node ids, runs those alone and turns the verdict round: a test that fails
is reported as xfailed, one that passes or skips is a failure, since it says nothing about the patch.
`--verdicts FILE` writes {node id: [outcome, reason]} as JSON.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Generator
from pathlib import Path

import pytest


class FailsWithout:
    """Runs the named tests alone and demands that each fails."""

    def __init__(self, wanted: list[str]) -> None:
        self.wanted = wanted
        self.failures: dict[str, str] = {}  # node id -> why it failed
        self.skips: dict[str, str] = {}
        self.verdicts: dict[str, tuple[str, str]] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept = [item for item in items if any(_names(wanted, item.nodeid) for wanted in self.wanted)]
        for wanted in self.wanted:
            if not any(_names(wanted, item.nodeid) for item in kept):
                self.verdicts[wanted] = ("not collected", "no such test, or its file cannot be imported")
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and report.when != "teardown":  # a fixture, the test, or one of its subtests
            self.failures.setdefault(item.nodeid, _why(call, report))
            report.outcome = "skipped"
            report.wasxfail = self.failures[item.nodeid]
        elif report.skipped:
            self.skips.setdefault(item.nodeid, _reason_of_skip(report))
        if report.when == "teardown":
            self._settle(item.nodeid, report)
        return report

    def _settle(self, nodeid: str, report: pytest.TestReport) -> None:
        """All reports of a test are in: its verdict, and an error in place of a teardown that has nothing to say."""
        if nodeid in self.failures:
            self.verdicts[nodeid] = ("fails", self.failures[nodeid])
            return
        if nodeid in self.skips:
            self.verdicts[nodeid] = ("skipped", self.skips[nodeid])
        else:
            self.verdicts[nodeid] = ("passes", "it passes without the patch, so it does not test the patch")
        report.outcome = "failed"
        report.longrepr = self.verdicts[nodeid][1]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if any(outcome != "fails" for outcome, _ in self.verdicts.values()) or not self.verdicts:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _names(wanted: str, nodeid: str) -> bool:
    """A node id without parameters names all of them."""
    return nodeid == wanted or nodeid.startswith(f"{wanted}[")


def _why(call: pytest.CallInfo, report: pytest.TestReport) -> str:
    """Class and first line of the error, and of the one behind it: a retry wrapper says little."""
    if call.excinfo is None:
        return str(report.longrepr).strip().splitlines()[-1]
    error = call.excinfo.value
    shown = _first_line(error)
    behind = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return f"{shown} <- {_first_line(behind)}" if behind is not None else shown


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _reason_of_skip(report: pytest.TestReport) -> str:
    return str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)


class Trees:
    """Checks before and after the tests that the modules come from the trees under test."""

    def __init__(self, roots: dict[str, Path]) -> None:
        self.roots = roots
        self.strangers: list[str] = []

    def pytest_sessionstart(self) -> None:
        for module, root in self.roots.items():
            try:
                spec = importlib.util.find_spec(module)
            except ImportError as error:
                raise pytest.UsageError(f"{module} cannot be found: {error}") from error
            origin = spec.origin if spec else None
            if origin is None or not Path(origin).resolve().is_relative_to(root):
                raise pytest.UsageError(f"{module} would be imported from {origin}, expected below {root}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        for name, module in list(sys.modules.items()):
            root = next((r for m, r in self.roots.items() if name == m or name.startswith(f"{m}.")), None)
            file = getattr(module, "__file__", None) if module is not None else None
            if root is not None and isinstance(file, str) and not Path(file).resolve().is_relative_to(root):
                self.strangers.append(f"{name} came from {file}, expected below {root}")
        if self.strangers:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for module, root in self.roots.items():
            terminalreporter.write_line(f"{module} from {root}")
        for stranger in self.strangers:
            terminalreporter.write_line(f"ERROR {stranger}", red=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("trees", "fp8-colocate trees")
    group.addoption("--tree", action="append", default=[], metavar="MODULE=DIR", help="MODULE must come from DIR")
    group.addoption("--fails-without", type=Path, metavar="FILE", help="JSON list of tests that must fail")
    group.addoption("--verdicts", type=Path, metavar="FILE", help="write the outcome of each --fails-without test")


def pytest_configure(config: pytest.Config) -> None:
    pairs = [value.partition("=") for value in config.getoption("tree")]
    config.pluginmanager.register(Trees({module: Path(root).resolve() for module, _, root in pairs}))
    file = config.getoption("fails_without")
    if file is not None:
        config.stash[_JUDGE] = FailsWithout(json.loads(file.read_text(encoding="utf-8")))
        config.pluginmanager.register(config.stash[_JUDGE])


_JUDGE = pytest.StashKey[FailsWithout]()


def pytest_unconfigure(config: pytest.Config) -> None:
    judge, file = config.stash.get(_JUDGE, None), config.getoption("verdicts", None)
    if judge is not None and file is not None:
        file.write_text(json.dumps(judge.verdicts, indent=2) + "\n", encoding="utf-8")
