# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Write patches/<target>/<pin>/ as a whole: staged beside it, then exchanged. Killed at any moment, it is old or new.

.<pin>.staged    the new content; removed by the next run when it never went in
.<pin>.old       only where the kernel cannot exchange two directories: put back by the next run
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from patchset import state
from patchset.errors import FileSystemError
from patchset.lock import to_json
from patchset.mailformat import existing_mails, series_text
from patchset.manifest import Manifest
from patchset.series import parse_mail
from patchset.types import Lock, PatchMail, Pin, Target

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def read_files(directory: Path) -> dict[str, bytes]:
    """Every file below `directory` by relative path; empty when there is no such directory."""
    if not directory.is_dir():
        return {}
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


@contextlib.contextmanager
def staged(manifest: Manifest, target: Target, pin: Pin, mails: Mapping[str, bytes]) -> Iterator[Staged]:
    """A staged directory with `mails` (slug -> bytes, in series order); gone again unless `Staged.install` ran.

    Raises:
        FileSystemError: no space, no permission; patches/ is as it was.
        Locked: another run writes the same directory.
    """
    place = manifest.patch_dir(target, pin.version)
    stage = place.with_name(f".{pin.version}.staged")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with state.hold([place.parent], 30.0):
            recover(place)
            try:
                yield _stage(place, stage, mails)
            finally:
                shutil.rmtree(stage, ignore_errors=True)
    except OSError as error:
        raise FileSystemError(
            "the patch directory cannot be written",
            target=target.id,
            path=str(error.filename or place),
            found=error.strerror or str(error),
            next_step="mend that and run the same command again; nothing was changed",
        ) from error


def recover_all(manifest: Manifest, target: Target) -> None:
    """Undo what killed runs left of any pin of `target`; before anything is read, or a series would look empty."""
    parent = manifest.home / "patches" / target.id
    if parent.is_dir():
        with state.hold([parent], 30.0):
            for pin in target.pins.values():
                recover(manifest.patch_dir(target, pin.version))


def recover(place: Path) -> None:
    """Undo what a killed run left beside `place`."""
    shutil.rmtree(place.with_name(f".{place.name}.staged"), ignore_errors=True)
    old = place.with_name(f".{place.name}.old")
    if old.is_dir() and not place.exists():
        os.rename(old, place)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def parsed(mails: Mapping[str, bytes]) -> Iterator[list[PatchMail]]:
    """`mails` (slug -> bytes) as parsed patches with files of their own, for as long as the context lasts."""
    with tempfile.TemporaryDirectory(prefix="fp8-colocate-") as name:
        for slug, data in mails.items():
            (Path(name) / f"{slug}.patch").write_bytes(data)
        yield [parse_mail(Path(name) / f"{slug}.patch") for slug in mails]


class Staged:
    """The new content of a pin directory, not yet in its place."""

    def __init__(self, place: Path, stage: Path, patches: list[PatchMail]) -> None:
        self.place = place
        self.stage = stage
        self.patches = patches

    def install(self, lock: Lock) -> list[str]:
        """Add the lock and exchange the directories. Returns the files that differ; nothing is written without one."""
        (self.stage / "lock.json").write_bytes(to_json(lock))
        before, after = read_files(self.place), read_files(self.stage)
        changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        if changed:
            _sync(self.stage)
            _put(self.stage, self.place)
        return changed


def _stage(place: Path, stage: Path, mails: Mapping[str, bytes]) -> Staged:
    before = read_files(place)
    old_series = before.get("series", b"").decode()
    known = {f"{p.slug}.patch" for p in existing_mails(place)}
    kept = {name: data for name, data in before.items() if name not in known and name != "lock.json"}
    new = {**kept, **{f"{slug}.patch": data for slug, data in mails.items()}}
    new["series"] = series_text(list(mails), old_series).encode()
    for name, data in new.items():
        (stage / name).parent.mkdir(parents=True, exist_ok=True)
        (stage / name).write_bytes(data)
    return Staged(place, stage, [parse_mail(stage / f"{slug}.patch") for slug in mails])


def _sync(stage: Path) -> None:
    for path in [*stage.rglob("*"), stage]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _put(stage: Path, place: Path) -> None:
    if not place.exists():
        os.rename(stage, place)
    elif not _exchange(stage, place):
        old = place.with_name(f".{place.name}.old")
        os.rename(place, old)
        try:
            os.rename(stage, place)
        except OSError:
            os.rename(old, place)
            raise
        shutil.rmtree(old)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two directories in one step; False where the kernel or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))
