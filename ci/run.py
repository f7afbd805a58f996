#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""The lanes: make the environments, run every lane asked for, say at the end what passed. Start it with ci/test.sh.

lint    pre-commit (ruff, codespell, licence map, series and locks) over all files
tool    the tests of apply.py and of the project frame
wheels  `apply.py --fetch`, then the tests of the three wheels
trees   the patches' own tests on patched trees, and each patch's tests again without that patch (ci/trees.py)

Two environments are made beside the sources and kept between runs: .venv-tool (tests and linters, any Python >= 3.11)
and .venv-cpu (Python 3.12 and what the targets import; 5.7 GB). A red lane does not stop the next one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "ci"
TOOL = ROOT / ".venv-tool"
CPU = ROOT / ".venv-cpu"
LANES = ("lint", "tool", "wheels", "trees")


class LaneFailed(Exception):
    """A step of a lane cannot go on; the message says which and what to do."""


@dataclass
class Result:
    """One lane's line of the summary."""

    lane: str
    passed: bool
    seconds: float
    note: str


# Programs and environments


def answers(command: Sequence[str]) -> bool:
    """Whether a command exists and exits with 0: a version manager's shim may do the first and not the second."""
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def find_uv() -> str:
    """The uv on PATH, else one installed into an environment of its own."""
    if answers(["uv", "--version"]):
        return "uv"
    place = CACHE / "uv"
    uv = place / "bin" / "uv"
    if not answers([str(uv), "--version"]):
        say("no uv on PATH: installing one into .cache/ci/uv")
        run([sys.executable, "-m", "venv", "--clear", place])
        run([place / "bin" / "python", "-m", "pip", "install", "--quiet", "uv"])
    return str(uv)


def find_python312(uv: str) -> str:
    """A Python 3.12: PYTHON312, python3.12 on PATH, one that pyenv keeps, one that uv finds or brings.

    Raises:
        LaneFailed: none of them answers.
    """
    probe = "import sys; sys.exit(sys.version_info[:2] != (3, 12))"
    for candidate in (os.environ.get("PYTHON312"), "python3.12", sys.executable, *_pyenv_pythons("3.12.")):
        if candidate and answers([candidate, "-c", probe]):
            return candidate
    done = subprocess.run([uv, "python", "install", "--quiet", "3.12"], check=False)
    if done.returncode == 0:
        return "3.12"
    raise LaneFailed("no Python 3.12 is found; next: install it, or PYTHON312=/path/to/python3.12 bash ci/test.sh")


def _pyenv_pythons(prefix: str) -> list[str]:
    if shutil.which("pyenv") is None:
        return []
    listed = subprocess.run(["pyenv", "versions", "--bare"], capture_output=True, text=True, check=False).stdout
    versions = [line.strip() for line in listed.splitlines() if line.strip().startswith(prefix)]
    pythons = []
    for version in reversed(versions):
        env = {**os.environ, "PYENV_VERSION": version}
        found = subprocess.run(["pyenv", "which", "python"], capture_output=True, text=True, env=env, check=False)
        pythons += [found.stdout.strip()] if found.returncode == 0 else []
    return pythons


def ensure(place: Path, requirements: Path, flags: Sequence[str], python: str, uv: str) -> None:
    """Make or renew the environment `place`; nothing happens when it was made from these very requirements."""
    stamp = place / "requirements.sha256"
    wanted = hashlib.sha256(requirements.read_bytes() + " ".join(flags).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted and answers([str(place / "bin" / "python"), "-c", ""]):
        return
    say(f"making {place.name} from {requirements.relative_to(ROOT)}")
    started = time.monotonic()
    run([uv, "venv", "--quiet", "--clear", "--python", python, place])
    run([uv, "pip", "install", "--quiet", "--python", place / "bin" / "python", *flags, "-r", requirements])
    stamp.write_text(wanted)
    say(f"{place.name} is ready after {time.monotonic() - started:.0f} s")


def ensure_tool(uv: str) -> None:
    ensure(TOOL, ROOT / "ci" / "requirements-tool.txt", ["--require-hashes"], sys.executable, uv)


def ensure_cpu(uv: str) -> None:
    ensure(CPU, ROOT / "ci" / "requirements-cpu.txt", ["--no-deps"], find_python312(uv), uv)


def run(command: Sequence[str | Path], env: dict[str, str] | None = None) -> None:
    """Run a command in the clone, its output shown.

    Raises:
        LaneFailed: it ended with an error.
    """
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=ROOT, env=env, check=False)
    if done.returncode != 0:
        shown = " ".join(words).replace(f"{ROOT}{os.sep}", "")
        raise LaneFailed(f"exit code {done.returncode}: {shown}")


def say(text: str) -> None:
    print(f"ci: {text}", flush=True)


# Lanes


def environment() -> dict[str, str]:
    """PATH with the tool environment first, and nothing of the caller's that changes what is imported or run."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    env["PATH"] = f"{TOOL / 'bin'}{os.pathsep}{env.get('PATH', '')}"
    memory = Path("/dev/shm")
    # the tool syncs every file it swaps; thousands of swaps on a slow disk are most of a test run
    if "PYTEST_DEBUG_TEMPROOT" not in env and memory.is_dir() and shutil.disk_usage(memory).free > 4 * 2**30:
        env["PYTEST_DEBUG_TEMPROOT"] = str(memory)
    return env


def lane_lint(uv: str) -> None:
    python = str(TOOL / "bin" / "python")
    if not (ROOT / ".git").exists():
        raise LaneFailed("pre-commit needs a git checkout")
    run([python, "-m", "pre_commit", "run", "--all-files"], environment())


def lane_tool(uv: str) -> None:
    pytest("tool", "tests/tool", "tests/test_frame.py", "tests/test_lanes.py")


def lane_wheels(uv: str) -> None:
    python = str(TOOL / "bin" / "python")
    run([python, "apply.py", "--fetch", "dist"], environment())
    pytest("wheels", "tests/wheels", extra={"UV": uv, "FP8_COLOCATE_PYTHON312": find_python312(uv)})


def lane_trees(uv: str) -> None:
    ensure_cpu(uv)
    results = CACHE / "trees.json"
    run(
        [TOOL / "bin" / "python", "ci/trees.py", "--python", CPU / "bin" / "python", "--results", results],
        environment(),
    )


def pytest(lane: str, *paths: str, extra: dict[str, str] | None = None) -> None:
    """One pytest run of a lane in .venv-tool."""
    command = [
        TOOL / "bin" / "python",
        "-m",
        "pytest",
        "--lane",
        lane,
        "--lane-results",
        CACHE / f"{lane}.json",
        *paths,
    ]
    run(command, environment() | (extra or {}))


def run_lane(lane: str, uv: str) -> Result:
    """Run one lane to its end, whatever happens in it."""
    results = CACHE / f"{lane}.json"
    results.unlink(missing_ok=True)
    started = time.monotonic()
    try:
        globals()[f"lane_{lane}"](uv)
        problem = ""
    except LaneFailed as failure:
        problem = str(failure)
    counts = json.loads(results.read_text()) if results.exists() else {}
    shown = ", ".join(f"{number} {name}" for name, number in counts.items() if number and name != "exit")
    note = "; ".join(filter(None, (shown, problem)))
    return Result(lane, not problem, time.monotonic() - started, note)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lanes", nargs="*", metavar="LANE", help=f"any of {', '.join(LANES)}; none: all")
    lanes = parser.parse_args().lanes or list(LANES)
    unknown = [lane for lane in lanes if lane not in LANES]
    if unknown:
        parser.error(f"no lane {', '.join(unknown)}; there are {', '.join(LANES)}")
    CACHE.mkdir(parents=True, exist_ok=True)
    try:
        uv = find_uv()
        ensure_tool(uv)
    except LaneFailed as failure:
        say(f"the environment cannot be made: {failure}")
        return 1
    results = []
    for number, lane in enumerate(lanes, start=1):
        say(f"lane {lane} ({number} of {len(lanes)})")
        results.append(run_lane(lane, uv))
        say(f"lane {lane}: {'passed' if results[-1].passed else 'FAILED'} after {results[-1].seconds:.0f} s")
    return summary(results)


def summary(results: Sequence[Result]) -> int:
    """Print one line a lane, and the plain closing line; return the exit code."""
    print("\nlane     result  seconds  what", flush=True)
    for result in results:
        print(f"{result.lane:<8} {'passed' if result.passed else 'FAILED':<7} {result.seconds:>7.0f}  {result.note}")
    failed = sum(not result.passed for result in results)
    print(f"\nlanes: {len(results) - failed} passed, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
