# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Write lock.json: run the series over the pin's own bytes, from each known source, and record what comes out."""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from patchset import git, lock, scratch
from patchset.errors import SeriesInvalid, WheelInvalid
from patchset.manifest import Manifest
from patchset.series import load_series
from patchset.types import FileLock, Lock, PatchMail, Pin, Target, sha256

# A source gives the bytes of an upstream path, None where it has no such file.
Source = Callable[[str], bytes | None]


def wheel_source(target: Target, wheel: Path, expected_sha256: str | None) -> Source:
    """The official wheel.

    Raises:
        WheelInvalid: its bytes are not the pinned ones, or it is no zip.
    """
    data = wheel.read_bytes()
    if expected_sha256 is not None and sha256(data) != expected_sha256:
        raise WheelInvalid(
            "this is not the pinned wheel",
            target=target.id,
            path=str(wheel),
            expected=f"sha256 {expected_sha256}",
            found=f"sha256 {sha256(data)}",
            next_step="remove it and run: python apply.py --fetch",
        )
    try:
        archive = zipfile.ZipFile(wheel)
    except zipfile.BadZipFile as error:
        raise WheelInvalid("not a wheel", target=target.id, path=str(wheel), found=str(error)) from error
    names = set(archive.namelist())

    def read(upstream_path: str) -> bytes | None:
        installed = target.installed_path(upstream_path)
        return archive.read(installed) if installed in names else None

    return read


def sdist_source(target: Target, sdist: Path) -> Source:
    """An sdist, whose files lie at upstream's or at the installed paths below one top directory."""
    archive = tarfile.open(sdist)  # noqa: SIM115  (kept open for the life of the source)
    members = {m.name.split("/", 1)[1]: m for m in archive.getmembers() if m.isfile() and "/" in m.name}

    def read(upstream_path: str) -> bytes | None:
        member = members.get(upstream_path) or members.get(target.installed_path(upstream_path) or "")
        file = archive.extractfile(member) if member else None
        return file.read() if file else None

    return read


def git_source(repository: Path, commit: str) -> Source:
    """A commit of a clone."""

    def read(upstream_path: str) -> bytes | None:
        done = git.run(repository, "cat-file", "blob", f"{commit}:{upstream_path}", check=False)
        return done.stdout if done.returncode == 0 else None

    return read


def make_lock(manifest: Manifest, target: Target, pin: Pin, sources: Mapping[str, Source]) -> Lock:
    """Compute the lock of `pin` from its patches, its overlay and the bytes of each source.

    Raises:
        SeriesInvalid: a patch creates, deletes, renames or changes the mode of a file, or touches one that no source has.
        PatchConflict: a patch does not apply to a source.
    """
    patches = load_series(manifest.patch_dir(target, pin.version))
    paths = touched_paths(patches)
    pre: dict[str, dict[str, str]] = {path: {} for path in paths}
    post: dict[str, dict[str, str]] = {path: {} for path in paths}
    for name, source in sources.items():
        found = {path: data for path in paths if (data := source(path)) is not None}
        for path, data in scratch.apply_series(patches, found, target.id).items():
            pre[path][name], post[path][name] = sha256(found[path]), sha256(data)
    for path in paths:
        if not pre[path]:
            raise SeriesInvalid("no source of the pin has a file that a patch touches", target=target.id, path=path)
    files = {path: FileLock(pre[path], post[path]) for path in paths}
    overlay = {path: sha256(file.read_bytes()) for path, file in manifest.overlay_files(target).items()}
    unsigned = Lock(target.id, pin.version, pin.wheel.sha256, tuple((p.slug, p.sha256) for p in patches), files, overlay, "")
    return lock.parse(lock.to_json(unsigned), lock.path_of(manifest, target, pin.version))


def touched_paths(patches: Sequence[PatchMail]) -> list[str]:
    """Upstream paths that the series modifies, in order of first touch."""
    for patch in patches:
        for diff in patch.files:
            if diff.old != diff.new or diff.new_mode is not None:
                raise SeriesInvalid(
                    "a patch may only modify files",
                    patch=patch.slug,
                    path=diff.path,
                    found="a new, deleted or renamed file, or a mode change",
                    next_step="put new files into overlay/",
                )
    return list(dict.fromkeys(diff.path for patch in patches for diff in patch.files))


def write(manifest: Manifest, target: Target, made: Lock) -> bool:
    """Write lock.json; False when it holds these bytes already."""
    path = lock.path_of(manifest, target, made.version)
    data = lock.to_json(made)
    if path.exists() and path.read_bytes() == data:
        return False
    path.write_bytes(data)
    return True
