# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""`wheel --build`: run the project's own build on a patched copy of a source tree, for patches to compiled code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from patchset import archive, engine, metadata, scratch, wheel
from patchset import lock as lockfile
from patchset.errors import DownloadFailed, PatchsetError, ToolMissing, WheelInvalid, os_failure
from patchset.manifest import Manifest
from patchset.report import Report
from patchset.target import locate
from patchset.types import Lock, Pin, Target, sha256

_IGNORED = shutil.ignore_patterns(".git", "__pycache__", "*.egg-info", "build", "dist", ".fp8-colocate")
_EPOCH = "315532800"  # 1980-01-01


class BuildFailed(PatchsetError):
    """The project's build ended with an error."""


def build(
    manifest: Manifest,
    target: Target,
    versions: Mapping[str, str],
    source: Path,
    out: Path,
    python: str | None,
    report: Report,
) -> wheel.Built:
    """Build the patched wheel of `target` from the tree `source`, which is copied and never written to.

    Args:
        python: the interpreter that builds, which decides the wheel's tags; it needs the `build` package.

    Raises:
        ToolMissing: `build` is not installed there.
        BuildFailed: the build failed; its last lines are in the message.
        WheelInvalid: it came out under another version, or without the patched bytes.
        Drift, WrongVersion, UsageError: `source` is not the pin.
    """
    pin = manifest.pin(target, versions.get(target.id))
    lock, patches = lockfile.load(manifest, target, pin)
    interpreter = python or sys.executable
    _need_build(interpreter)
    with archive.staging(out) as directory, tempfile.TemporaryDirectory(prefix="fp8-colocate-") as scratch_name:
        copy = _patched_copy(manifest, target, pin, source, Path(scratch_name) / target.id)
        version = manifest.local_version(pin.version)
        _write_versions(target, copy, version)
        report.progress(f"{target.id}: building {version} with {interpreter}")
        made = _run_build(target, interpreter, _project(copy), directory / "built", version, report)
        built = archive.read(made, target.id)
        _check(target, built, lock, version)
        files = {p: data for p in lock.files if (data := built.read(target.installed_path(p) or "")) is not None}
        finished = wheel.finish(manifest, target, pin, lock, patches, built, files, versions, "build", directory)
        return wheel.publish(finished, out)


def _need_build(python: str) -> None:
    try:
        done = subprocess.run([python, "-m", "build", "--version"], capture_output=True, check=False)
    except OSError as error:
        raise ToolMissing("this Python cannot be started", path=python, found=error.strerror) from error
    if done.returncode != 0:
        raise ToolMissing(
            "--build needs the `build` package",
            path=python,
            expected="python -m build",
            found=done.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"exit code {done.returncode}",
            next_step=f"{python} -m pip install build",
        )


def _patched_copy(manifest: Manifest, target: Target, pin: Pin, source: Path, copy: Path) -> Path:
    """A copy of the source tree without its history, patched by the same engine as any other tree."""
    root = locate(target, source).root
    try:
        shutil.copytree(root, copy, ignore=_IGNORED, symlinks=True)
    except (OSError, shutil.Error) as error:
        plain = error if isinstance(error, OSError) and error.strerror else OSError(0, str(error))
        raise os_failure("the source tree cannot be copied", plain, path=root, target=target.id) from error
    engine.run(manifest, [engine.Request(target, copy, pin.version)], engine.plan_apply, 0.0, check=False)
    shutil.rmtree(copy / ".fp8-colocate", ignore_errors=True)
    return copy


def _write_versions(target: Target, copy: Path, version: str) -> None:
    for path in target.version_files:
        file = copy / path
        if file.is_file():  # sglang's is written by its build, from SETUPTOOLS_SCM_PRETEND_VERSION_FOR_SGLANG
            plain = scratch.without_notice(path, file.read_bytes())
            file.write_bytes(metadata.set_version(plain, version, path))


def _project(copy: Path) -> Path:
    """The directory with the build's own pyproject.toml: sglang keeps it below python/."""
    found = [d for d in (copy, copy / "python") if (d / "pyproject.toml").is_file() or (d / "setup.py").is_file()]
    inner = [d for d in found if d != copy]
    return inner[0] if inner else copy


def _run_build(target: Target, python: str, project: Path, out: Path, version: str, report: Report) -> Path:
    pretend = f"SETUPTOOLS_SCM_PRETEND_VERSION_FOR_{target.dist.upper().replace('-', '_')}"
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env |= {pretend: version, "NO_VCS_VERSION": "1", "GIT_CEILING_DIRECTORIES": str(project.parent)}
    env.setdefault("SOURCE_DATE_EPOCH", _EPOCH)
    command = [python, "-m", "build", "--wheel", f"--outdir={out}", str(project)]
    done = subprocess.run(command, env=env, cwd=project, capture_output=True, text=True, errors="replace", check=False)
    said = (done.stdout + done.stderr).splitlines()
    for line in said if report.verbose else ():
        report.progress(f"  build: {line}")
    made = sorted(out.glob("*.whl")) if out.is_dir() else []
    if done.returncode == 0 and len(made) == 1:
        return made[0]
    no_network = any("NewConnectionError" in line or "name resolution" in line for line in said)
    kind = DownloadFailed if no_network else BuildFailed
    raise kind(
        f"the build of {target.dist} failed",
        target=target.id,
        path=str(project),
        found=f"exit code {done.returncode}, {len(made)} wheels",
        cause="no network for the build's own requirements"
        if no_network
        else "a compiler or a build requirement is missing",
        next_step=f"python apply.py wheel {target.id} --build --source TREE -v   shows the whole build",
        details=said[-12:],
    )


def _check(target: Target, built: archive.Wheel, lock: Lock, version: str) -> None:
    said = {
        "file name": built.version,
        "METADATA": ", ".join(metadata.header(built.members[f"{built.dist_info}/METADATA"].data, "Version")),
    }
    wrong = [f"{where}: {found}" for where, found in said.items() if found != version]
    for path, entry in lock.files.items():
        installed = target.installed_path(path)
        data = built.read(installed) if installed else None
        if installed and (data is None or sha256(data) not in entry.post.values()):
            wrong.append(f"{installed}: not the patched bytes")
    if wrong:
        raise WheelInvalid(
            "the built wheel is not what it must be",
            target=target.id,
            expected=f"version {version} and the bytes of lock.json",
            found=wrong[0],
            cause="the build takes its version or its files from elsewhere",
            details=wrong[1:],
        )
