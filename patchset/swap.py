# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""The only writer of a target: a journalled change of many files, undone or finished by the next run.

    prepare   journal ("prepare") -> backups -> new contents as temporary files beside their places
    commit    journal ("commit")  -> os.replace, file by file
    finish    backups and journal are removed

A kill before the "commit" journal leaves the tree as it was: recovery removes the temporary files. A kill after it
leaves every new content on disk: recovery finishes. Each file is swapped by `os.replace` of a new inode, so that a
hard link into uv's cache keeps its old bytes and no reader sees half a file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchset.errors import FileSystemError, Interrupted, PatchsetError, SymlinkRefused
from patchset.types import sha256

JOURNAL = "journal.json"
BACKUP = "journal.d"
_TEMP = ".fc8-{}.tmp"


@dataclass(frozen=True)
class Change:
    """One file of a swap. `before`/`after` None: the file is created/removed.

    `before_sha256` is what must be on disk at the moment of the swap; a difference undoes the whole swap.
    """

    path: Path
    before_sha256: str | None
    after: bytes | None
    mode: int = 0o644  # for created files; a replaced file keeps its own


def read_optional(path: Path) -> bytes | None:
    """Bytes of `path`, None when there is no such file.

    Raises:
        SymlinkRefused: it is a symbolic link.
        FileSystemError: it exists and cannot be read.
    """
    try:
        if path.is_symlink():
            raise SymlinkRefused("a file to be changed is a symbolic link", path=str(path), found=os.readlink(path))
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _failure("a file cannot be read", path, error) from error


def _failure(what: str, path: Path | str, error: OSError) -> FileSystemError:
    causes = {
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the disk quota is used up",
        errno.EACCES: "no permission; the directory belongs to another user or is read-only",
        errno.EPERM: "no permission, or the file is immutable",
        errno.EROFS: "the file system is mounted read-only",
    }
    return FileSystemError(
        what,
        path=str(error.filename or path),
        found=error.strerror or str(error),
        cause=causes.get(error.errno or 0),
        next_step="mend that and run the same command again; nothing was changed",
    )


class Swap:
    """One target's change. Call `prepare` on all targets before `commit` on any; `undo` works until `finish`."""

    def __init__(self, root: Path, state_dir: Path, changes: Sequence[Change]) -> None:
        self.root = root
        self.state_dir = state_dir
        self.changes = list(changes)
        self._journal: dict = {}

    def prepare(self) -> None:
        """Write everything that takes space, beside its place; no file of the target changes.

        Raises:
            SymlinkRefused: a directory on the way is a symbolic link or leads out of the target.
            FileSystemError: no space, no permission; what was written is removed again.
        """
        for change in self.changes:
            _check_inside(self.root, self.state_dir, change.path)
        directories = _missing_directories([self.state_dir / BACKUP, *(c.path.parent for c in self.changes if c.after is not None)])
        entries = [self._entry(number, change) for number, change in enumerate(self.changes)]
        self._journal = {"phase": "prepare", "directories": [str(d) for d in directories], "entries": entries}
        try:
            (self.state_dir / BACKUP).mkdir(parents=True, exist_ok=True)
            self._write_journal()
            for change, entry in zip(self.changes, entries, strict=True):
                _stage(change, entry)
        except OSError as error:
            self.undo()
            raise _failure("a file cannot be written", self.root, error) from error
        except BaseException:
            self.undo()
            raise

    def _entry(self, number: int, change: Change) -> dict:
        return {
            "path": str(change.path),
            "temp": str(change.path.with_name(_TEMP.format(change.path.name))) if change.after is not None else None,
            "backup": str(self.state_dir / BACKUP / str(number)) if change.before_sha256 is not None else None,
            "before": change.before_sha256,
            "after": None if change.after is None else sha256(change.after),
        }

    def _write_journal(self) -> None:
        _write_durably(self.state_dir / (JOURNAL + ".new"), json.dumps(self._journal).encode(), 0o644)
        os.replace(self.state_dir / (JOURNAL + ".new"), self.state_dir / JOURNAL)

    def commit(self) -> None:
        """Swap the files in. On any error the files swapped so far are put back and the error is raised."""
        try:
            self._journal["phase"] = "commit"
            self._write_journal()
            for entry in self._journal["entries"]:
                _replace(entry)
        except OSError as error:
            self.undo()
            raise _failure("a file cannot be replaced", self.root, error) from error
        except BaseException:
            self.undo()
            raise
        _sync_directories(self.changes)

    def finish(self) -> None:
        """Remove the journal and the backups; after this there is no `undo`."""
        _clean(self.state_dir, self._journal)

    def undo(self) -> None:
        """Put every file back and remove what `prepare` created."""
        _roll_back(self.state_dir, self._journal)


def recover(state_dir: Path, target: str) -> str | None:
    """Finish or undo what an interrupted run left behind. Returns "finished", "undone", or None: nothing to do.

    Raises:
        Interrupted: a file was changed by somebody else in between; nothing is touched.
    """
    journal = interrupted(state_dir)
    if journal is None:
        _sweep(state_dir)
        return None
    try:
        if journal["phase"] == "prepare":
            _roll_back(state_dir, journal)
            return "undone"
        strange = [e["path"] for e in journal["entries"] if not _known(e)]
        if strange:
            raise Interrupted(
                "an interrupted run left files that were changed since",
                target=target,
                path=strange[0],
                expected="the bytes before or after that run",
                next_step=f"put the file back from {state_dir / BACKUP} or remove it, then run again",
                details=strange,
            )
        if all(_can_finish(e) for e in journal["entries"]):
            for entry in journal["entries"]:
                _replace(entry)
            _clean(state_dir, journal)
            return "finished"
        _roll_back(state_dir, journal)
        return "undone"
    except OSError as error:
        raise _failure("an interrupted run cannot be recovered", state_dir, error) from error


def interrupted(state_dir: Path) -> dict | None:
    """The journal of an interrupted run, None when there is none. Writes nothing."""
    try:
        return json.loads((state_dir / JOURNAL).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise Interrupted(
            "the journal of an interrupted run cannot be read",
            path=str(state_dir / JOURNAL),
            found=str(error),
            next_step=f"restore the files from {state_dir / BACKUP}, then remove {state_dir / JOURNAL}",
        ) from error


def _sweep(state_dir: Path) -> None:
    # killed before the first journal was complete, or after the last step but the clearing
    with contextlib.suppress(OSError):
        (state_dir / (JOURNAL + ".new")).unlink(missing_ok=True)
        for stray in (state_dir / BACKUP).iterdir():
            stray.unlink()
        (state_dir / BACKUP).rmdir()


def _current(path: str | Path) -> str | None:
    data = read_optional(Path(path))
    return None if data is None else sha256(data)


def _known(entry: dict) -> bool:
    return _current(entry["path"]) in (entry["before"], entry["after"])


def _can_finish(entry: dict) -> bool:
    now = _current(entry["path"])
    return now == entry["after"] or entry["temp"] is None or _current(entry["temp"]) == entry["after"]


def _check_inside(root: Path, state_dir: Path, path: Path) -> None:
    base = state_dir if path.is_relative_to(state_dir) else root
    if not path.is_relative_to(base) or ".." in path.parts:
        raise SymlinkRefused("a path leads out of the target", path=str(path), expected=f"a path below {base}")
    for parent in path.parents:
        if parent == base:
            break
        if parent.is_symlink():
            raise SymlinkRefused(
                "a directory on the way is a symbolic link",
                path=str(parent),
                found=os.readlink(parent),
                cause="the tree is linked together from several places",
                next_step="name the tree that the link points to",
            )
        if parent.exists() and not parent.is_dir():
            raise FileSystemError("a directory is needed where a file is", path=str(parent))


def _missing_directories(directories: Sequence[Path]) -> list[Path]:
    """Directories that must be created, parents first."""
    missing: dict[Path, None] = {}
    for directory in directories:
        chain = [d for d in (directory, *directory.parents) if not d.exists()]
        missing |= dict.fromkeys(reversed(chain))
    return list(missing)


def _stage(change: Change, entry: dict) -> None:
    if change.before_sha256 is not None:
        data = read_optional(change.path)
        if data is None or sha256(data) != change.before_sha256:
            raise _changed_meanwhile(change.path)
        _write_durably(Path(entry["backup"]), data, _mode(change.path), like=change.path)
    elif change.path.exists():
        raise _changed_meanwhile(change.path)
    if change.after is not None:
        change.path.parent.mkdir(parents=True, exist_ok=True)
        mode = _mode(change.path) if change.before_sha256 is not None else change.mode
        like = change.path if change.before_sha256 is not None else _existing(change.path.parent)
        _write_durably(Path(entry["temp"]), change.after, mode, like=like)


def _changed_meanwhile(path: Path) -> PatchsetError:
    return Interrupted("a file changed while the tool was working", path=str(path), next_step="run again")


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _write_durably(path: Path, data: bytes, mode: int, like: Path | None = None) -> None:
    """Write a new inode with `mode`, the owner of `like`, and its bytes on the disk."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fchmod(descriptor, mode)
        if like is not None:
            owner = like.stat()
            if (owner.st_uid, owner.st_gid) != (os.geteuid(), os.getegid()):
                with contextlib.suppress(PermissionError):  # only root may give files away
                    os.fchown(descriptor, owner.st_uid, owner.st_gid)
        os.fsync(descriptor)


def _replace(entry: dict) -> None:
    path = Path(entry["path"])
    now = _current(path)
    if now != entry["after"]:
        if now != entry["before"]:
            raise _changed_meanwhile(path)
        if entry["after"] is None:
            path.unlink()
        else:
            os.replace(entry["temp"], path)
    _drop_bytecode(path)


def _roll_back(state_dir: Path, journal: dict) -> None:
    for entry in reversed(journal.get("entries", ())):
        path, backup = Path(entry["path"]), entry["backup"]
        now = _current(path)
        if now == entry["after"] and now != entry["before"]:
            if backup is None:
                path.unlink()
            else:
                os.replace(backup, path)
            _drop_bytecode(path)
    _clean(state_dir, journal, undone=True)


def _clean(state_dir: Path, journal: dict, undone: bool = False) -> None:
    """Remove temporary files, backups and the journal last, then directories left empty."""
    for entry in journal.get("entries", ()):
        for name in (entry["temp"], entry["backup"]):
            if name is not None:
                Path(name).unlink(missing_ok=True)
    _remove_empty({state_dir / BACKUP})
    (state_dir / (JOURNAL + ".new")).unlink(missing_ok=True)
    (state_dir / JOURNAL).unlink(missing_ok=True)
    emptied = {Path(e["path"]).parent for e in journal.get("entries", ()) if undone or e["after"] is None}
    created = {Path(d) for d in journal.get("directories", ())} if undone else set()
    _remove_empty(emptied | created | {state_dir})


def _remove_empty(directories: set[Path]) -> None:
    """Remove those directories that are empty, deepest first, and their parents that become so."""
    for directory in sorted(directories, key=lambda d: len(d.parts), reverse=True):
        with contextlib.suppress(OSError):
            if (directory / "__pycache__").is_dir() and not any(p.suffix == ".py" for p in directory.iterdir()):
                (directory / "__pycache__").rmdir()
        for level in (directory, *directory.parents):
            try:
                level.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                break


def _bytecode(path: Path) -> Iterator[Path]:
    if path.suffix == ".py" and (path.parent / "__pycache__").is_dir():
        yield from (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc")


def _drop_bytecode(path: Path) -> None:
    for cached in _bytecode(path):
        cached.unlink(missing_ok=True)


def _sync_directories(changes: Sequence[Change]) -> None:
    for directory in {c.path.parent for c in changes}:
        if directory.is_dir():
            descriptor = os.open(directory, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
