# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""What a new pin needs besides its patches: the official wheel, and its table in patchset.toml."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import tomllib
from pathlib import Path

from patchset import relock
from patchset.carry import Job
from patchset.download import pip_command
from patchset.errors import DownloadFailed, ManifestInvalid, WheelInvalid
from patchset.manifest import Manifest, cache_dir
from patchset.report import Report
from patchset.types import Pin, Target, WheelPin, sha256


def checked_wheel(target: Target, wheel: Path, version: str) -> Path:
    """`wheel`, when it is one of `version` of the target.

    Raises:
        WheelInvalid: it cannot be read, or holds another distribution or version.
    """
    with relock.open_wheel(target, wheel, None) as archive:
        names = {name.split("/", 1)[0] for name in archive.namelist()}
    said = sorted(name.removesuffix(".dist-info") for name in names if name.endswith(".dist-info"))
    wanted = f"{target.dist}-{version}"
    if [_normal(name) for name in said] != [_normal(wanted)]:
        raise WheelInvalid(
            "the wheel is of another version",
            target=target.id,
            path=str(wheel),
            expected=wanted,
            found=", ".join(said),
        )
    return wheel


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def download_wheel(target: Target, version: str, old: Pin, report: Report) -> Path:
    """Bring the wheel of a version that is not pinned yet; its hash is what the index serves today.

    Raises:
        DownloadFailed: pip could not bring it.
    """
    cache = cache_dir() / "dists"
    cache.mkdir(parents=True, exist_ok=True)
    for file in sorted(cache.glob(f"{target.dist.replace('-', '_')}-{version}-*.whl")):
        return checked_wheel(target, file, version)
    report.progress(f"{target.id}: fetching {target.dist} {version}; it is not pinned, so its hash is not checked")
    with tempfile.TemporaryDirectory(prefix=".new-", dir=cache) as name:
        done = subprocess.run(
            [*pip_command(), *_arguments(target, version, old, Path(name))],
            capture_output=True,
            text=True,
            check=False,
        )
        brought = sorted(Path(name).glob("*.whl"))
        if done.returncode != 0 or len(brought) != 1:
            raise DownloadFailed(
                f"pip could not bring {target.dist} {version}",
                target=target.id,
                cause="no network, or the index has no such version",
                next_step=f"python apply.py refresh {target.id} --to {version} --wheel FILE",
                details=done.stderr.strip().splitlines()[-6:],
            )
        os.replace(brought[0], cache / brought[0].name)
    return checked_wheel(target, cache / brought[0].name, version)


def _arguments(target: Target, version: str, old: Pin, directory: Path) -> list[str]:
    platforms = old.wheel.file.removesuffix(".whl").rsplit("-", 1)[1].split(".")
    accepted = dict.fromkeys([*platforms, *_older_manylinux(platforms)])
    return [
        "download",
        "--no-deps",
        "--only-binary=:all:",
        f"--python-version={target.python}",
        *(f"--platform={name}" for name in accepted if name != "any"),
        "--disable-pip-version-check",
        "--no-input",
        f"--dest={directory}",
        f"{target.dist}=={version}",
    ]


def _older_manylinux(platforms: list[str]) -> list[str]:
    """A wheel for an older glibc of the same machine is as good as the old pin's."""
    found = []
    for name in platforms:
        match = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", name)
        if match:
            found += [f"manylinux_2_{minor}_{match[2]}" for minor in range(int(match[1]), 16, -1)]
    return found


def keep_wheel(wheel: Path) -> None:
    """Put the wheel into the cache, where `export` and `wheel` look for it."""
    place = cache_dir() / "dists" / wheel.name
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(wheel, place)


def pin_of(target: Target, job: Job) -> Pin:
    """The new pin, from the wheel of a refresh."""
    if job.new in target.pins:
        return target.pins[job.new]
    wheel = Path(job.wheel or "")
    commit = job.new_base if job.from_git else None
    return Pin(job.new, WheelPin(wheel.name, sha256(wheel.read_bytes())), None, job.tag, commit)


def snippet(target: Target, pin: Pin) -> str:
    """The table of a pin, as it stands in patchset.toml."""
    lines = [f'[target.{target.id}.pins."{pin.version}"]']
    lines += [f'tag = "{pin.tag}"'] if pin.tag else []
    lines += [f'commit = "{pin.commit}"'] if pin.commit else []
    lines.append(f'wheel = {{ file = "{pin.wheel.file}", sha256 = "{pin.wheel.sha256}" }}')
    return "\n".join(lines) + "\n"


def insert(manifest: Manifest, target: Target, pin: Pin) -> bool:
    """Add the pin's table to patchset.toml after the target's last pin; the default pin stays. False: it is there.

    Raises:
        ManifestInvalid: the place for it was not found; the message holds the table to add by hand.
    """
    if pin.version in target.pins:
        return False
    path = manifest.home / "patchset.toml"
    before = path.read_text(encoding="utf-8")
    after = _with_table(before, target, snippet(target, pin))
    if after is None or not _only_adds(before, after, target, pin):
        raise ManifestInvalid(
            "the new pin could not be added to patchset.toml",
            target=target.id,
            path=str(path),
            cause='its pin tables are not written as [target.NAME.pins."VERSION"]',
            next_step="add these lines by hand",
            details=snippet(target, pin).splitlines(),
        )
    new = path.with_name(".patchset.toml.new")
    new.write_text(after, encoding="utf-8")
    os.replace(new, path)
    return True


def _with_table(text: str, target: Target, table: str) -> str | None:
    lines = text.splitlines(keepends=True)
    header = re.compile(rf'\s*\[target\.{re.escape(target.id)}\.pins\."[^"]+"\]')
    starts = [i for i, line in enumerate(lines) if header.match(line)]
    if not starts:
        return None
    end = next((i for i in range(starts[-1] + 1, len(lines)) if lines[i].lstrip().startswith("[")), len(lines))
    while end > 0 and (not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#")):
        end -= 1  # comments before the next table belong to that
    if not lines[end - 1].endswith("\n"):
        lines[end - 1] += "\n"
    return "".join([*lines[:end], table, *lines[end:]])


def _only_adds(before: str, after: str, target: Target, pin: Pin) -> bool:
    try:
        old, new = tomllib.loads(before), tomllib.loads(after)
        new["target"][target.id]["pins"].pop(pin.version)
    except (ValueError, KeyError):
        return False
    return old == new
