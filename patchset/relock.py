# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Write lock.json: run the series over the pin's own bytes, from each known source, and record what comes out."""

from __future__ import annotations

import dataclasses
import io
import os
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from patchset import git, lock, scratch
from patchset.errors import LockInvalid, SeriesInvalid, WheelInvalid
from patchset.manifest import Manifest
from patchset.series import load_series
from patchset.types import FileLock, Lock, PatchMail, Pin, Target, sha256

# A source gives the bytes of an upstream path, None where it has no such file.
Source = Callable[[str], bytes | None]


def open_wheel(target: Target, wheel: Path, expected_sha256: str | None) -> zipfile.ZipFile:
    """The official wheel, checked.

    Raises:
        WheelInvalid: its bytes are not the pinned ones, or it is no zip.
    """
    try:
        data = wheel.read_bytes()
    except OSError as error:
        raise WheelInvalid(
            "the wheel cannot be read", target=target.id, path=str(wheel), found=error.strerror
        ) from error
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
        return zipfile.ZipFile(io.BytesIO(data))
    except zipfile.BadZipFile as error:
        raise WheelInvalid("not a wheel", target=target.id, path=str(wheel), found=str(error)) from error


def wheel_source(target: Target, wheel: Path, expected_sha256: str | None) -> Source:
    """The official wheel.

    Raises:
        WheelInvalid: its bytes are not the pinned ones, or it is no zip.
    """
    archive = open_wheel(target, wheel, expected_sha256)
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


def make_lock(
    manifest: Manifest,
    target: Target,
    pin: Pin,
    sources: Mapping[str, Source],
    patches: Sequence[PatchMail] | None = None,
    before: Lock | None = None,
) -> Lock:
    """Compute the lock of `pin` from its patches, its overlay and the bytes of each source.

    Args:
        patches: the series, when it is not (yet) the one in the pin's directory.
        before: the lock so far. What it knows of a source that is not at hand is kept where it is certain: a file that
            had the same bytes in a source that is at hand gets the same bytes after the series.

    Raises:
        SeriesInvalid: a patch does more than modify files, or touches one that no source has.
        PatchConflict: a patch does not apply to a source.
    """
    if patches is None:
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
        _carry(path, pre[path], post[path], before)
    files = {path: FileLock(_sorted(pre[path]), _sorted(post[path])) for path in paths}
    named = tuple((p.slug, p.sha256) for p in patches)
    unsigned = Lock(target.id, pin.version, pin.wheel.sha256, named, files, overlay_hashes(manifest, target), "")
    return lock.parse(lock.to_json(unsigned), lock.path_of(manifest, target, pin.version))


def _carry(path: str, pre: dict[str, str], post: dict[str, str], before: Lock | None) -> None:
    if before is None or path not in before.files:
        return
    for name, digest in before.files[path].pre.items():
        twin = next((source for source, known in pre.items() if known == digest), None)
        if name not in pre and twin is not None:
            pre[name], post[name] = digest, post[twin]


def _sorted(hashes: Mapping[str, str]) -> dict[str, str]:
    return dict(sorted(hashes.items(), key=lambda item: (item[0] != "wheel", item[0])))


def overlay_hashes(manifest: Manifest, target: Target) -> dict[str, str]:
    """Upstream path -> sha256 of every overlay file."""
    return {path: sha256(file.read_bytes()) for path, file in manifest.overlay_files(target).items()}


def with_overlay(
    manifest: Manifest, target: Target, pin: Pin, before: Lock, patches: Sequence[PatchMail]
) -> Lock | None:
    """`before` with the overlay of today; None when the patches or the wheel changed, so that sources are needed."""
    named = tuple((p.slug, p.sha256) for p in patches)
    if (before.target, before.version, before.wheel_sha256, before.patches) != (
        target.id,
        pin.version,
        pin.wheel.sha256,
        named,
    ):
        return None
    made = dataclasses.replace(before, overlay=overlay_hashes(manifest, target))
    return lock.parse(lock.to_json(made), lock.path_of(manifest, target, pin.version))


def read_or_none(manifest: Manifest, target: Target, pin: Pin) -> Lock | None:
    """The lock as it lies there, stale or not; None when it is missing or damaged."""
    path = lock.path_of(manifest, target, pin.version)
    try:
        return lock.parse(path.read_bytes(), path)
    except (OSError, LockInvalid):
        return None


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
    """Write lock.json in one step; False when it holds these bytes already."""
    path = lock.path_of(manifest, target, made.version)
    data = lock.to_json(made)
    if path.exists() and path.read_bytes() == data:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(".lock.json.new")
    new.write_bytes(data)
    os.replace(new, path)
    return True
