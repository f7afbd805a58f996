# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""pytest plugin, loaded by conftest.py: GPU marks, and skips as data.

`--lane NAME` compares every skip with ci/skips/NAME.txt: a skip that no line there expects makes the run red, a line
that nothing used is reported. Tests marked `gpu` or `multigpu(n)` are skipped where the devices are missing; these
skips need no line and are counted apart. `--lane-results FILE` writes the counts as JSON for the summary of ci/run.py.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GPU_REASON = "needs CUDA devices:"
_COUNTED = ("passed", "failed", "error", "skipped", "xfailed", "xpassed", "subtests passed", "subtests failed")


@dataclass
class ExpectedSkip:
    """One line of a skip list: a node id pattern in which `*` stands for anything, and a part of the reason."""

    line: str
    nodeid: re.Pattern[str]
    reason: str
    used: bool = False

    def covers(self, nodeid: str, reason: str) -> bool:
        return self.nodeid.fullmatch(nodeid) is not None and self.reason in reason


def read_skips(path: Path) -> list[ExpectedSkip]:
    """Parse `path`: one `pattern | part of the reason` a line, `#` comments; an absent file expects no skip.

    Raises:
        pytest.UsageError: a line has no reason.
    """
    expected = []
    for number, raw in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else (), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        pattern, separator, reason = (part.strip() for part in line.partition(" | "))
        if not separator or not reason:
            raise pytest.UsageError(
                f"{path}:{number}: expected 'node id pattern | part of the reason', found {line!r}"
            )
        regex = re.compile(".*".join(re.escape(part) for part in pattern.split("*")))
        expected.append(ExpectedSkip(line, regex, reason))
    return expected


@dataclass
class Lane:
    """Counts of one run and what became of its skips."""

    name: str | None
    results: Path | None
    expected: list[ExpectedSkip]
    num_gpu_skips: int = 0
    unexpected: list[tuple[str, str]] = field(default_factory=list)

    def note_skip(self, nodeid: str, reason: str) -> None:
        """Sort one skip into GPU, expected and unexpected."""
        if GPU_REASON in reason:
            self.num_gpu_skips += 1
            return
        covering = [e for e in self.expected if e.covers(nodeid, reason)]
        for entry in covering:
            entry.used = True
        if not covering:
            self.unexpected.append((nodeid, reason))


_LANE = pytest.StashKey[Lane]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lanes", "fp8-colocate lanes")
    group.addoption("--lane", metavar="NAME", help="fail on skips that ci/skips/NAME.txt does not expect")
    group.addoption("--lane-results", metavar="FILE", type=Path, help="write the counts of this run as JSON")


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("lane")
    expected = read_skips(ROOT / "ci" / "skips" / f"{name}.txt") if name else []
    config.stash[_LANE] = Lane(name, config.getoption("lane_results"), expected)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs more CUDA devices than there are; torch is imported only if a test asks for one."""
    wanted = {item: _devices_wanted(item) for item in items}
    if not any(wanted.values()):
        return
    found = _devices_found()
    for item, count in wanted.items():
        if count > found:
            item.add_marker(pytest.mark.skip(reason=f"{GPU_REASON} {count} wanted, {found} found"))


def _devices_wanted(item: pytest.Item) -> int:
    many = item.get_closest_marker("multigpu")
    if many is not None:
        return int(many.args[0])
    return 1 if item.get_closest_marker("gpu") else 0


def _devices_found() -> int:
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Judge the skips, change the exit status if one was not expected, and write the counts."""
    lane = session.config.stash[_LANE]
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    stats = reporter.stats if reporter else {}
    for report in stats.get("skipped", ()):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        lane.note_skip(report.nodeid, reason)
    if (
        lane.name
        and lane.unexpected
        and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if lane.results is not None:
        counts = Counter({key: len(stats[key]) for key in _COUNTED if stats.get(key)})
        body = {"exit": int(session.exitstatus), "gpu_skipped": lane.num_gpu_skips, **counts}
        lane.results.parent.mkdir(parents=True, exist_ok=True)
        lane.results.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lane = config.stash[_LANE]
    if lane.num_gpu_skips:
        terminalreporter.write_line(f"{lane.num_gpu_skips} tests need a GPU: bash ci/gpu.sh runs them where one is")
    if not lane.name:
        return
    if lane.unexpected:
        terminalreporter.section("unexpected skips", sep="=", red=True)
        for nodeid, reason in lane.unexpected:
            terminalreporter.write_line(f"{nodeid} | {reason}")
        terminalreporter.write_line(f"run them, or add a line with the reason to ci/skips/{lane.name}.txt")
    for entry in lane.expected:
        if not entry.used:
            terminalreporter.write_line(f"ci/skips/{lane.name}.txt expects a skip that did not happen: {entry.line}")
