# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""What reaches the user: one message, one exit code, never a traceback, whatever the command line or the machine."""

from __future__ import annotations

import ast
import contextlib
import errno
import importlib
import inspect
import io
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import patchset
from patchset import cli, errors
from patchset.errors import Drift, FileSystemError, PatchsetError, os_failure
from patchset.report import Report
from tests.tool import kit
from tests.tool.kit import Home, accepted, refused

CODES = {0, 1, 2, 3, 4, 5, 6, 7}


def error_classes() -> dict[str, type[PatchsetError]]:
    found = {}
    for info in pkgutil.iter_modules(patchset.__path__):
        module = importlib.import_module(f"patchset.{info.name}")
        found |= {n: c for n, c in vars(module).items() if inspect.isclass(c) and issubclass(c, PatchsetError)}
    return found


def test_every_class_has_a_code_and_a_sentence() -> None:
    for name, kind in error_classes().items():
        assert kind.exit_code in CODES - {0}, name
        assert kind.__doc__ and kind.__doc__.strip().endswith("."), name


def test_message_and_json_form() -> None:
    error = Drift("two files differ", target="alpha", path="a.py", cause="an edit", details=["one", "two"])
    lines = ["  target:       alpha", "  file:         a.py", "  likely cause: an edit", "    one", "    two"]
    assert str(error).splitlines() == ["error: two files differ", *lines]
    assert error.as_dict() == {
        "error": "Drift", "exit_code": 3, "what": "two files differ", "target": "alpha", "file": "a.py",
        "likely_cause": "an edit", "details": ["one", "two"],
    }  # fmt: skip


def test_causes_of_the_operating_system() -> None:
    full = os_failure("x", OSError(errno.ENOSPC, "No space left on device"), path=Path("/a"), next_step="y")
    assert isinstance(full, FileSystemError)
    assert full.as_dict() == {
        "error": "FileSystemError", "exit_code": 1, "what": "x", "file": "/a", "found": "No space left on device",
        "likely_cause": "the disk is full", "next": "y", "details": [],
    }  # fmt: skip
    named = os_failure("x", PermissionError(errno.EACCES, "Permission denied", b"/b\xff"))
    assert "/b" in str(named) and "no permission" in str(named)
    assert "likely cause" not in str(os_failure("x", OSError("odd")))


def test_every_raise_says_what_to_do() -> None:
    """Each error names at least one of: place, expected, found, next. Usage may say it all."""
    bare = []
    for path in (kit.ROOT / "patchset").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
                continue
            name = ast.unparse(node.exc.func).rsplit(".", 1)[-1]
            if name in error_classes().keys() - {"UsageError"} and not node.exc.keywords:
                bare.append(f"{path.name}:{node.lineno}")
    assert bare == []


# The command line

ODD = """
<nothing>
--alpha
--alpha ''
--alpha . --alpha .
--alpha {tree} extra
--alpha {tree} --checked
--alpha={tree} --check=yes
--al {tree}
-alpha {tree}
--alpha {tree} --lock-timeout
--alpha {tree} --lock-timeout soon
--alpha {tree} --lock-timeout -1
--alpha {tree} --lock-timeout nan
--alpha {tree} --pin
--alpha {tree} --pin =
--alpha {tree} --pin alpha=1.0 --pin alpha=9
--alpha {tree} --pin 'alpha=1.0 '
--alpha {tree} --from-git
--alpha {tree} --fetch ''
--alpha {tree}/../..
--alpha /proc/self/mem
--alpha /dev/null
--alpha ~nobody-of-that-name
--alpha '~/nowhere'
--alpha '{tree}/with
newline'
--alpha {long}
--check
--revert
--pin alpha=1.0
--sglang {tree}
status
status {tree}
status --alpha
status --check --alpha {tree}
patched --alpha {tree}
STATUS
list extra
list --target omega
list --status
lint extra
doctor --python
wheel omega
wheel alpha --from
dev
refresh
refresh alpha
upstream
--json
--json --json status
--json --alpha
--
-- --alpha {tree}
''
-q -v -v
"""


def odd_commands() -> list[str]:
    return re.split(r"\n(?!newline)", ODD.strip())


@pytest.mark.parametrize("line", odd_commands())
def test_odd_command_lines(home: Home, tree: Path, line: str) -> None:
    arguments = [a.format(tree=tree, long="/x" * 3000) for a in shlex.split(line) if a != "<nothing>"]
    before = kit.snapshot(tree)
    done = home.run(*arguments, cwd=tree.parent)
    assert "Traceback" not in done.stderr and "unexpected" not in done.stderr, done.stderr
    assert done.returncode in (2, 3) or (done.returncode == 1 and "/x/x" in line), (done.returncode, done.stderr)
    assert done.stderr.startswith("error: ") and done.stderr.count("error: ") == 1
    if "--json" in arguments:
        assert json.loads(done.stdout)["exit_code"] == done.returncode
    assert kit.snapshot(tree) == before


FLAGS = [
    "--alpha",
    "--beta",
    "--check",
    "--revert",
    "--json",
    "-q",
    "-v",
    "--pin",
    "--lock-timeout",
    "--target",
    "--status",
]
VALUES = ["alpha=1.0", "beta=2", "0", "1e9", "-5", ".", "/", "/nonexistent", "gamma", "", "\udcff", "é", "%s", "{}"]
WORDS = st.sampled_from(["status", "list", "apply", "--", "-", *FLAGS, *VALUES])


@settings(derandomize=True, max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(WORDS, max_size=7))
def test_any_words(home: Home, tmp_path_factory: pytest.TempPathFactory, words: list[str]) -> None:
    """In-process, in a directory that holds no target; `.` and `/` are real paths."""
    place = tmp_path_factory.getbasetemp() / "empty"
    place.mkdir(exist_ok=True)
    out, said = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        patch.chdir(place)
        patch.setattr(cli, "load", lambda: home.manifest)
        try:
            code = cli.main(words)
        except SystemExit as leave:  # --help
            code = int(leave.code or 0)
    assert code in CODES and "unexpected" not in said.getvalue(), said.getvalue()
    assert code == 0 or said.getvalue().startswith("error: ")
    assert not any(place.iterdir())


def test_help(home: Home) -> None:
    out = accepted(home.run("--help"), "--alpha PATH", "--revert", "verbs: apply")
    assert "lint: check patches" in " ".join(out.split())
    accepted(home.run("status", "--help"), "usage: apply.py status")


def test_quiet_verbose_and_json(home: Home, tree: Path) -> None:
    assert home.run("--alpha", tree, "-q").stdout == ""
    accepted(home.run("--alpha", tree, "--revert", "-v"), f"  wrote {tree}/python/alpha/loader.py")
    body = json.loads(accepted(home.run("--alpha", tree, "--check", "--json", "-v")))
    assert body["checked"] and not body["reverted"] and body["exit_code"] == 0
    [target] = body["targets"]
    assert target["state"] == "pristine" and str(tree / "python/alpha/loader.py") in target["written"]
    done = home.run("status", "--alpha", tree, "--json")
    body = json.loads(done.stdout)
    assert done.returncode == body["exit_code"] == 3 and body["error"] == "NotPatched"
    assert body["targets"][0]["files"]["python/alpha/loader.py"] == "pristine"


# Streams and names


def run_into(home: Home, stdout, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(home.directory / "apply.py"), *map(str, args)]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)


def test_nobody_reads(home: Home) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = run_into(home, writing, "list", "-v")
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_standard_output_is_full(home: Home, tree: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    with open("/dev/full", "w") as full:
        for args in (["list"], ["list", "--json"], ["--alpha", tree, "--check"]):
            done = run_into(home, full, *args)
            assert done.returncode == 1 and "No space left on device" in done.stderr
            assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_standard_output_is_closed(home: Home, tree: Path) -> None:
    command = f"{shlex.quote(sys.executable)} {home.directory}/apply.py --alpha {tree} >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert "Traceback" not in done.stderr
    accepted(home.run("status", "--alpha", tree))


@pytest.mark.parametrize("locale", ["C", "C.UTF-8", "POSIX"])
def test_path_that_is_no_utf8(home: Home, tmp_path: Path, locale: str) -> None:
    root = kit.checkout(Path(os.fsdecode(os.fsencode(tmp_path) + b"/tree \xff \n'")), home.upstream["alpha"])
    before = kit.snapshot(root)
    env = {"LC_ALL": locale, "PYTHONUTF8": "0"}
    accepted(home.run("--alpha", root, "-v", env=env), "patched")
    accepted(home.run("status", "--alpha", root, "--json", env=env))
    (root / "python/alpha/loader.py").write_bytes(b"")
    refused(home.run("--alpha", root, env=env), 3, "loader.py")
    kit.git(root, "checkout", "-q", ".")
    accepted(home.run("--alpha", root, "--revert", env=env))
    assert kit.difference(before, kit.snapshot(root) | {".git/index": before[".git/index"]}) == []


def test_home_with_blanks_and_quotes(home: Home, tree: Path, tmp_path: Path) -> None:
    accepted(home.copy(tmp_path / "it's a home; $(x) %s").run("--alpha", tree), "patched")


def test_a_fault_of_ours_is_one_line(home: Home, tree: Path, tmp_path: Path) -> None:
    mine = home.copy(tmp_path / "home")
    (mine.directory / "patchset/plan.py").write_text("raise RuntimeError('broken')\n")
    done = mine.run("--alpha", tree)
    assert done.returncode == 1  # at import nothing can catch it; inside a verb it is one line
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as said:
        patch.setattr(cli, "load", lambda: 1 / 0)
        patch.delenv("FP8_COLOCATE_TRACEBACK", raising=False)
        assert cli.main(["status"]) == 1
        assert said.getvalue().startswith("error: unexpected ZeroDivisionError: division by zero\n  next:")
        patch.setenv("FP8_COLOCATE_TRACEBACK", "1")
        assert cli.main(["status"]) == 1
    assert "Traceback" in said.getvalue()


def test_control_c(home: Home) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as said:
        patch.setattr(cli, "load", interrupt)
        assert cli.main(["status"]) == 1
    assert said.getvalue() == "interrupted; run the same command again\n"


def test_old_python_is_told(tmp_path: Path) -> None:
    launcher = (kit.ROOT / "apply.py").read_text().replace("(3, 11)", "(99, 0)")
    (tmp_path / "apply.py").write_text(launcher)
    done = subprocess.run([sys.executable, tmp_path / "apply.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "needs Python >= 3.11, found 3." in done.stderr and "Traceback" not in done.stderr


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    Report(quiet=True).line("no")
    Report(as_json=True).line("no")
    Report().detail("no")
    Report(quiet=True).progress("no")
    Report(verbose=True).detail("yes")
    Report().progress("working")
    assert capsys.readouterr() == ("yes\n", "working\n")
    assert Report().close(3) == 3
    assert errors.EXIT_OK == 0
