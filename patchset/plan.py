# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Decide from hashes alone: what state each file is in, what the target's state is, what must change. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from patchset.types import Applied, FileState, Lock, TargetState

RECORDED = (FileState.PRISTINE, FileState.PATCHED, FileState.OLD, FileState.ABSENT)


def classify(found: Mapping[str, str | None], lock: Lock, applied: Applied | None) -> dict[str, FileState]:
    """State of every touched and overlay file.

    Args:
        found: upstream path -> sha256 on disk, None when there is no file. Must cover `touched(lock, applied)`.
        applied: what an earlier run recorded for this tree, if any.
    """
    return {path: _classify_one(path, digest, lock, applied) for path, digest in found.items()}


def touched(lock: Lock, applied: Applied | None) -> list[str]:
    """Every upstream path that the lock or an earlier run concerns, files first, then overlay, without repeats."""
    old = [*applied.files, *applied.overlay] if applied else []
    return list(dict.fromkeys([*lock.files, *lock.overlay, *old]))


def _classify_one(path: str, digest: str | None, lock: Lock, applied: Applied | None) -> FileState:
    if path in lock.files:
        return _classify_file(path, digest, lock, applied)
    if digest is not None and digest == lock.overlay.get(path):
        return FileState.PATCHED
    if applied is not None and path not in lock.overlay and applied.version != lock.version:
        return _classify_left(path, digest, applied)
    old_file = applied.files.get(path) if applied else None
    if old_file is not None and path not in lock.overlay:  # patched by an earlier revision, by this one no more
        states = {None: FileState.MISSING, old_file[0]: FileState.PRISTINE, old_file[1]: FileState.OLD}
        return states.get(digest, FileState.LOCAL)
    if digest is None:
        return FileState.ABSENT
    if applied is not None and digest == applied.overlay.get(path):
        return FileState.OLD
    return FileState.EXTRA


def _classify_left(path: str, digest: str | None, applied: Applied) -> FileState:
    """A path that only a run on another upstream version touched: ours where its bytes are, else the new version's."""
    if digest is not None and digest in (applied.files.get(path, ("", ""))[1], applied.overlay.get(path)):
        return FileState.OLD
    return FileState.ABSENT if path in applied.overlay else FileState.PRISTINE


def _classify_file(path: str, digest: str | None, lock: Lock, applied: Applied | None) -> FileState:
    if digest is None:
        return FileState.MISSING
    if lock.files[path].source_of(digest, "post"):
        return FileState.PATCHED
    if lock.files[path].source_of(digest, "pre"):
        return FileState.PRISTINE
    if applied is not None and path in applied.files and digest == applied.files[path][1]:
        return FileState.OLD
    return FileState.LOCAL


def refused(states: Mapping[str, FileState]) -> dict[str, FileState]:
    """Those files that stop an apply or revert: bytes nobody recorded, or a file that should be there and is not."""
    return {path: state for path, state in states.items() if state not in RECORDED}


def summarise(states: Mapping[str, FileState], lock: Lock) -> TargetState:
    """State of the whole target. A file that only an earlier revision knew counts as pristine when it is gone."""
    values = {_effective(path, state, lock) for path, state in states.items()}
    if values & {FileState.LOCAL, FileState.MISSING, FileState.EXTRA}:
        return TargetState.DRIFTED
    if values <= {FileState.PATCHED}:
        return TargetState.PATCHED
    if values <= {FileState.PRISTINE, FileState.ABSENT}:
        return TargetState.PRISTINE
    return TargetState.MIXED


def _effective(path: str, state: FileState, lock: Lock) -> FileState:
    known = path in lock.files or path in lock.overlay
    gone = state in (FileState.ABSENT, FileState.PRISTINE)
    return FileState.PATCHED if gone and not known else state


def matching(states: Iterable[FileState]) -> float:
    """Share of files with recorded bytes: which of several pins fits a tree best."""
    listed = list(states)
    return sum(s in RECORDED for s in listed) / len(listed) if listed else 0.0
