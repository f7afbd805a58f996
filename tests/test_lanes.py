# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""The lanes can fail: unexpected skips, tests that pass without their patch, modules from the wrong tree."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from patchset import series
from patchset.types import PatchMail
from tests.plugins.lanes import GPU_REASON, read_skips

ROOT = Path(__file__).resolve().parents[1]

SUITE = """
import unittest
import pytest

def test_passes(): pass
def test_fails(): assert 1 == 2, "one is not two"
def test_skips(): pytest.skip("no such thing here")
@pytest.mark.parametrize("n", [1, 2])
def test_all_parameters_fail(n): assert n == 3
@pytest.mark.parametrize("n", [1, 2])
def test_one_parameter_passes(n): assert n == 1
@pytest.fixture
def broken(): raise RuntimeError("broken fixture")
def test_setup_fails(broken): pass
@pytest.mark.gpu
def test_gpu(): pass
@pytest.mark.multigpu(64)
def test_many_gpus(): pass

class TestCase(unittest.TestCase):
    def test_subtests(self):
        for n in (1, 2, 3):
            with self.subTest(n=n):
                self.assertNotEqual(n, 2)
"""


def run(directory: Path, *words: str, suite: str = SUITE) -> subprocess.CompletedProcess[str]:
    """pytest on `suite` with both plugins, in an empty directory of its own."""
    (directory / "test_suite.py").write_text(suite, encoding="utf-8")
    (directory / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu\n  multigpu(n)\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "tests.plugins.lanes", "-p", "tests.plugins.trees", "-q", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    env.pop("PYTEST_ADDOPTS", None)
    return subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, check=False)


# Skips


def test_a_skip_nobody_expects_is_red(tmp_path: Path) -> None:
    done = run(tmp_path, "--lane", "none-such", "-k", "passes and not one or test_skips")
    assert done.returncode == 1
    assert "test_suite.py::test_skips | Skipped: no such thing here" in done.stdout


def test_without_a_lane_a_skip_is_a_skip(tmp_path: Path) -> None:
    assert run(tmp_path, "-k", "test_skips").returncode == 0


def test_gpu_tests_are_skipped_and_counted(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    done = run(tmp_path, "--lane", "none-such", "--lane-results", str(results), "-k", "gpu or test_passes")
    assert done.returncode == 0, done.stdout
    assert "2 tests need a GPU" in done.stdout
    assert json.loads(results.read_text()) == {"exit": 0, "gpu_skipped": 2, "passed": 1, "skipped": 2}


def test_results_tell_a_failure(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    assert run(tmp_path, "--lane-results", str(results), "-k", "test_fails or test_passes").returncode == 1
    assert json.loads(results.read_text()) == {"exit": 1, "gpu_skipped": 0, "passed": 1, "failed": 1}


def test_skip_lines(tmp_path: Path) -> None:
    path = tmp_path / "lane.txt"
    path.write_text("# comment\n\ntests/a.py::test_x[*] | needs root\n", encoding="utf-8")
    (line,) = read_skips(path)
    assert line.covers("tests/a.py::test_x[1-2]", "Skipped: needs root for tmpfs")
    assert not line.covers("tests/a.py::test_x[1-2]", "Skipped: needs a network")
    assert not line.covers("tests/a.py::test_xy", "needs root")
    path.write_text("tests/a.py::test_x\n", encoding="utf-8")
    with pytest.raises(pytest.UsageError, match="lane.txt:1"):
        read_skips(path)


# Fails without the patch


def verdicts(directory: Path, *names: str) -> tuple[int, dict[str, list[str]]]:
    """(exit code, node id -> [outcome, reason]) of the named tests of SUITE, each of which should fail."""
    wanted, found = directory / "wanted.json", directory / "verdicts.json"
    wanted.write_text(json.dumps([f"test_suite.py::{name}" for name in names]), encoding="utf-8")
    done = run(directory, "--fails-without", str(wanted), "--verdicts", str(found))
    assert found.exists(), done.stdout + done.stderr
    return done.returncode, {k.removeprefix("test_suite.py::"): v for k, v in json.loads(found.read_text()).items()}


def test_failing_tests_are_evidence(tmp_path: Path) -> None:
    code, found = verdicts(
        tmp_path, "test_fails", "test_all_parameters_fail", "test_setup_fails", "TestCase::test_subtests"
    )
    assert code == 0
    assert {name: outcome for name, (outcome, _) in found.items()} == {
        "test_fails": "fails",
        "test_all_parameters_fail[1]": "fails",
        "test_all_parameters_fail[2]": "fails",
        "test_setup_fails": "fails",
        "TestCase::test_subtests": "fails",
    }
    assert found["test_fails"][1] == "AssertionError: one is not two"
    assert found["test_setup_fails"][1] == "RuntimeError: broken fixture"


@pytest.mark.parametrize(
    ("name", "nodeid", "outcome"),
    [
        ("test_passes", "test_passes", "passes"),
        ("test_skips", "test_skips", "skipped"),
        ("test_gpu", "test_gpu", "skipped"),
        ("test_one_parameter_passes", "test_one_parameter_passes[1]", "passes"),
        ("test_no_such", "test_no_such", "not collected"),
    ],
)
def test_what_is_no_evidence_is_red(tmp_path: Path, name: str, nodeid: str, outcome: str) -> None:
    code, found = verdicts(tmp_path, "test_fails", name)
    assert code == 1
    assert found[nodeid][0] == outcome
    assert found["test_fails"][0] == "fails"
    if name == "test_gpu":
        assert GPU_REASON in found[nodeid][1]


def test_modules_must_come_from_their_tree(tmp_path: Path) -> None:
    stdlib = Path(json.__file__).resolve().parents[1]
    assert run(tmp_path, "--tree", f"json={stdlib}", "-k", "test_passes").returncode == 0
    done = run(tmp_path, "--tree", f"json={tmp_path}", "-k", "test_passes")
    assert done.returncode != 0
    assert "json would be imported from" in done.stdout + done.stderr


# A series without one patch


@pytest.fixture(scope="module")
def trees() -> ModuleType:
    """ci/trees.py as a module."""
    spec = importlib.util.spec_from_file_location("ci_trees", ROOT / "ci" / "trees.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ci_trees"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


BASE = {"a.py": b"".join(b"line %d\n" % n for n in range(40))}


@pytest.fixture
def mails(tmp_path: Path) -> list[PatchMail]:
    """Three patches to a.py: `first` and `far` touch lines apart, `second` changes the line that `first` made."""
    for slug, at, old, new in (
        ("first", 5, "line 5", "five"),
        ("second", 5, "five", "FIVE"),
        ("far", 30, "line 30", "thirty"),
    ):
        around = [f" line {n}" for n in range(at - 3, at)], [f" line {n}" for n in range(at + 1, at + 4)]
        hunk = [f"@@ -{at - 2},7 +{at - 2},7 @@", *around[0], f"-{old}", f"+{new}", *around[1], ""]
        text = [
            "From " + "0" * 40 + " Mon Sep 17 00:00:00 2001",
            "From: A <a@example.org>",
            f"Subject: [PATCH] x: {slug}",
        ]
        text += ["", "Why.", "", "diff --git a/a.py b/a.py", "--- a/a.py", "+++ b/a.py", *hunk]
        (tmp_path / f"{slug}.patch").write_text("\n".join(text), encoding="utf-8")
    (tmp_path / "series").write_text("first\nsecond\nfar\n", encoding="utf-8")
    return series.load_series(tmp_path)


@pytest.mark.parametrize(
    ("left_out", "rest", "fallen"),
    [("first", ["far"], ["second"]), ("second", ["first", "far"], []), ("far", ["first", "second"], [])],
)
def test_a_series_without_one_patch(
    trees: ModuleType, mails: list[PatchMail], left_out: str, rest: list[str], fallen: list[str]
) -> None:
    patch = next(mail for mail in mails if mail.slug == left_out)
    found = trees.without(mails, patch, BASE, "sglang")
    assert [[mail.slug for mail in part] for part in found] == [rest, fallen]
