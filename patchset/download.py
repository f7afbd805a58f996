# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Bring the pinned wheels: through pip, with hashes, once. The cache is judged by hash at every use."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from patchset.errors import DownloadFailed, FileSystemError, PatchsetError, ToolMissing, WheelInvalid, os_failure
from patchset.manifest import Manifest, cache_dir
from patchset.report import Report
from patchset.state import hold
from patchset.types import Pin, Target, WheelPin, sha256

_WAIT_S = 3600.0  # for another run that downloads into the same cache
_PARTIAL = ".partial-"
_CUT = ("PIP_CONSTRAINT", "PIP_REQUIREMENT", "PIP_NO_BINARY", "PIP_TARGET", "PIP_PLATFORM", "PIP_PYTHON_VERSION")
_NO_NETWORK = re.compile(
    r"NewConnectionError|Failed to establish|Temporary failure in name resolution|Name or service not known"
    r"|Network is unreachable|Connection refused|ConnectTimeout|ReadTimeout|Max retries exceeded|ProxyError|SSLError"
    r"|No route to host"
)


def wheel_path(manifest: Manifest, target: Target, pin: Pin, report: Report) -> Path:
    """The official wheel of `pin` on this disk, its hash checked; downloaded when it is not in the cache.

    Raises:
        DownloadFailed: no network, or the index does not have it.
        WheelInvalid: the index served other bytes than the pinned ones.
        ToolMissing: there is no pip.
        FileSystemError: the cache cannot be written, or the disk is full.
        Locked: another run has been downloading for an hour.
    """
    cache = cache_dir() / "dists"
    place = cache / pin.wheel.file
    if _is_pinned(place, pin.wheel):
        return place
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with hold([cache], _WAIT_S):
            if not _is_pinned(place, pin.wheel):  # another run may have brought it meanwhile
                _sweep(cache)
                if place.exists():
                    report.progress(f"{target.id}: the cached {pin.wheel.file} is damaged; fetching it again")
                _download(target, pin, cache, report)
    except OSError as error:
        raise _cache_failure(error, cache) from error
    return place


def _is_pinned(path: Path, wheel: WheelPin) -> bool:
    try:
        return sha256(path.read_bytes()) == wheel.sha256
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _cache_failure(error, path) from error


def _sweep(cache: Path) -> None:
    """Remove what killed runs left behind; the lock is held, so nobody else's is among it."""
    for stray in cache.glob(f"{_PARTIAL}*"):
        shutil.rmtree(stray, ignore_errors=True)


def _cache_failure(error: OSError, path: Path) -> FileSystemError:
    return os_failure(
        "the cache cannot be used", error, path=path, next_step="set XDG_CACHE_HOME to a directory with space"
    )


def _download(target: Target, pin: Pin, cache: Path, report: Report) -> None:
    pip = pip_command()
    report.progress(f"{target.id}: fetching {pin.wheel.file} with {' '.join(pip)}")
    with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=cache) as name:
        directory = Path(name)
        wanted = directory / "requirements.txt"
        wanted.write_text(f"{target.dist}=={pin.version} --hash=sha256:{pin.wheel.sha256}\n", encoding="utf-8")
        code, said = _run_pip([*pip, *_arguments(target, pin, directory)], report)
        brought = directory / pin.wheel.file
        if code == 0 and _is_pinned(brought, pin.wheel):
            os.replace(brought, cache / pin.wheel.file)
            return
        raise _failure(target, pin, code, said, sorted(p.name for p in directory.glob("*.whl")))


def _arguments(target: Target, pin: Pin, directory: Path) -> list[str]:
    platforms = pin.wheel.file.removesuffix(".whl").rsplit("-", 1)[1].split(".")
    return [
        "download",
        "--no-deps",
        "--require-hashes",
        "--only-binary=:all:",
        f"--python-version={target.python}",
        *(f"--platform={name}" for name in platforms if name != "any"),
        "--disable-pip-version-check",
        "--no-input",
        f"--dest={directory}",
        f"--requirement={directory / 'requirements.txt'}",
    ]


def _run_pip(command: list[str], report: Report) -> tuple[int, str]:
    """Run pip, its progress on our stderr, and return its exit code and what it said there."""
    env = {k: v for k, v in os.environ.items() if k not in _CUT} | {"PIP_REQUIRE_VIRTUALENV": "0", "LC_ALL": "C.UTF-8"}
    quiet = report.quiet or report.as_json
    said: list[str] = []
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL if quiet else 2,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=env,
    ) as process:
        for line in process.stderr or ():
            said.append(line.rstrip())
            report.progress(f"  pip: {said[-1]}")
    return process.returncode, "\n".join(said)


@lru_cache(maxsize=1)
def pip_command() -> tuple[str, ...]:
    """How to start a pip: this Python's, else that of `python3` on PATH, else the one that uv brings.

    Raises:
        ToolMissing: there is none of them.
    """
    if find_spec("pip") is not None:
        return (sys.executable, "-m", "pip")
    python3 = shutil.which("python3")
    if (
        python3
        and subprocess.run([python3, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0
    ):
        return (python3, "-m", "pip")
    uv = shutil.which("uv")
    if uv:
        return (uv, "tool", "run", "pip")
    raise ToolMissing(
        "there is no pip to download with",
        expected=f"pip for {sys.executable}, or for python3 on PATH, or uv",
        found="none of them",
        next_step=f"{sys.executable} -m ensurepip, or install pip or uv",
    )


def _failure(target: Target, pin: Pin, code: int, said: str, brought: list[str]) -> PatchsetError:
    fields = {"target": target.id, "path": pin.wheel.file, "details": said.splitlines()[-8:]}
    if "DO NOT MATCH THE HASHES" in said or (code == 0 and brought):
        got = re.search(r"Got\s+([0-9a-f]{64})", said)
        return WheelInvalid(
            "the index served another file than the pinned one",
            expected=f"sha256 {pin.wheel.sha256}",
            found=f"sha256 {got[1]}" if got else ", ".join(brought),
            cause="a mirror that rebuilds wheels, a proxy that rewrites them, or a wrong hash in patchset.toml",
            next_step="use another index (PIP_INDEX_URL)",
            **fields,
        )
    if "No space left on device" in said:
        return FileSystemError(
            "the download does not fit",
            cause="the disk is full",
            next_step="make space, or set XDG_CACHE_HOME and TMPDIR",
            **fields,
        )
    cause, next_step = "pip failed for another reason, given below", "run again with -v"
    if _NO_NETWORK.search(said):
        cause = "no network, or a proxy in the way"
        next_step = f"run again when there is one, or put the file into {cache_dir() / 'dists'}"
    elif "No matching distribution" in said:
        cause = "the index does not have this file, or cannot be reached; a private index or PIP_NO_INDEX?"
        next_step = f"set PIP_INDEX_URL=https://pypi.org/simple, or put the file into {cache_dir() / 'dists'}"
    return DownloadFailed(
        f"pip could not bring {target.dist} {pin.version}",
        found=f"exit code {code}",
        cause=cause,
        next_step=next_step,
        **fields,
    )
