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
import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from patchset.errors import FileSystemError, Interrupted, PatchsetError, SymlinkRefused, os_failure
from patchset.types import sha256

JOURNAL = "journal.json"
BACKUP = "journal.d"
_TEMP = ".fc8-{}.tmp"
_MEND = "mend that and run the same command again; nothing was changed"


@dataclass(frozen=True)
class Change:
    """One file of a swap. `before`/`after` None: the file is created/removed.

    `before_sha256` is what must be on disk at the moment of the swap; a difference undoes the whole swap.
    """

    path: Path
    before_sha256: str | None
    after: bytes | None
    mode: int = 0o644  # for created files; a replaced file keeps its own


@dataclass(frozen=True)
class Entry:
    """One file of a journal: hashes on both sides, and where its new and its old bytes wait during the swap."""

    path: Path
    before: str | None
    after: str | None
    temp: Path | None  # None: the file is removed
    backup: Path | None  # None: the file is created


@dataclass(frozen=True)
class Journal:
    """What a swap is about to do. On disk its paths are relative to the tree, so that a copied tree has its own."""

    phase: str  # "prepare" or "commit"
    directories: tuple[Path, ...]  # created by the swap
    entries: tuple[Entry, ...]


def read_optional(path: Path) -> bytes | None:
    """Bytes of `path`, None when there is no such file.

    Raises:
        SymlinkRefused: it is a symbolic link.
        FileSystemError: it is no regular file, or cannot be read.
    """
    try:
        kind = path.lstat().st_mode
        if stat.S_ISLNK(kind):
            raise SymlinkRefused("a file to be changed is a symbolic link", path=str(path), found=os.readlink(path))
        if not stat.S_ISREG(kind):
            raise FileSystemError(
                "not a regular file", path=str(path), expected="a file, or nothing", found=stat.filemode(kind)
            )
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise os_failure("a file cannot be read", error, path=path) from error


def check_places(root: Path, state_dir: Path, changes: Sequence[Change]) -> None:
    """Refuse before anything is written what `Swap` could not write.

    Raises:
        SymlinkRefused: a directory on the way is a symbolic link or leads out of the target.
        FileSystemError: a directory is not writable, or a file stands in its place.
    """
    for change in changes:
        _check_inside(root, state_dir, change.path)
    for directory in sorted({_existing(c.path.parent) for c in changes}):
        if not os.access(directory, os.W_OK | os.X_OK):
            raise FileSystemError(
                "a directory cannot be written",
                path=str(directory),
                found="not writable",
                cause="no permission; the directory belongs to another user or is read-only",
                next_step=_MEND,
            )


class Swap:
    """One target's change. Call `prepare` on all targets before `commit` on any; `undo` works until `finish`."""

    def __init__(self, root: Path, state_dir: Path, changes: Sequence[Change]) -> None:
        self.root = root
        self.state_dir = state_dir
        self.changes = list(changes)
        self._journal = Journal("prepare", (), ())

    def prepare(self) -> None:
        """Write everything that takes space, beside its place; no file of the target changes.

        Raises:
            SymlinkRefused: a directory on the way is a symbolic link or leads out of the target.
            FileSystemError: no space, no permission; what was written is removed again.
        """
        _check_inside(self.root, self.state_dir, self.state_dir / BACKUP / "0")
        for change in self.changes:
            _check_inside(self.root, self.state_dir, change.path)
        written = [self.state_dir / BACKUP, *(c.path.parent for c in self.changes if c.after is not None)]
        entries = tuple(self._entry(number, change) for number, change in enumerate(self.changes))
        self._journal = Journal("prepare", tuple(_missing_directories(written)), entries)
        try:
            _make_directory(self.state_dir / BACKUP)
            self._write_journal()
            for change, entry in zip(self.changes, entries, strict=True):
                _stage(change, entry)
            # in one go: the first fsync pays for all of them
            _sync(p for e in entries for p in (e.temp, e.backup) if p is not None)
            _sync({e.path.parent for e in entries} | {self.state_dir / BACKUP})
        except OSError as error:
            self.undo()
            raise os_failure("a file cannot be written", error, path=self.root, next_step=_MEND) from error
        except BaseException:
            self.undo()
            raise

    def _entry(self, number: int, change: Change) -> Entry:
        return _entry(self.state_dir, number, change.path, change.before_sha256, _digest(change.after))

    def _write_journal(self) -> None:
        new = self.state_dir / (JOURNAL + ".new")
        _write_new(new, _to_json(self.root, self.state_dir, self._journal), 0o644, like=self.state_dir)
        _sync([new])
        os.replace(new, self.state_dir / JOURNAL)
        _sync([self.state_dir])

    def commit(self) -> None:
        """Swap the files in. On any error the files swapped so far are put back and the error is raised."""
        try:
            self._journal = Journal("commit", self._journal.directories, self._journal.entries)
            self._write_journal()
            for entry in self._journal.entries:
                _replace(entry)
            _sync({e.path.parent for e in self._journal.entries})
        except OSError as error:
            self.undo()
            raise os_failure("a file cannot be replaced", error, path=self.root, next_step=_MEND) from error
        except BaseException:
            self.undo()
            raise

    def finish(self) -> None:
        """Remove the journal and the backups; after this there is no `undo`."""
        _clean(self.state_dir, self._journal)

    def undo(self) -> None:
        """Put every file back and remove what `prepare` created."""
        _roll_back(self.state_dir, self._journal)


def recover(root: Path, state_dir: Path, target: str) -> str | None:
    """Finish or undo what an interrupted run left behind. Returns "finished", "undone", or None: nothing to do.

    Raises:
        Interrupted: a file was changed by somebody else in between; nothing is touched.
    """
    _check_inside(root, state_dir, state_dir / BACKUP / "0")  # first: what follows deletes below it
    journal = interrupted(root, state_dir, target)
    if journal is None:
        _sweep(state_dir)
        return None
    try:
        for entry in journal.entries:
            _check_inside(root, state_dir, entry.path)
        if journal.phase == "commit":
            _refuse_strange(state_dir, target, journal)
            if all(_can_finish(e) for e in journal.entries):
                for entry in journal.entries:
                    _replace(entry)
                _clean(state_dir, journal)
                return "finished"
        _roll_back(state_dir, journal)
        return "undone"
    except OSError as error:
        raise os_failure(
            "an interrupted run cannot be recovered",
            error,
            path=state_dir,
            target=target,
            next_step="mend that and run again",
        ) from error


def _refuse_strange(state_dir: Path, target: str, journal: Journal) -> None:
    strange = [e for e in journal.entries if _current(e.path) not in (e.before, e.after)]
    if strange:
        raise Interrupted(
            "an interrupted run left files that were changed since",
            target=target,
            path=str(strange[0].path),
            expected="the bytes before or after that run",
            next_step="do for each file what is said below, then run again",
            details=[f"remove {e.path}" if e.backup is None else f"copy {e.backup} to {e.path}" for e in strange],
        )


def interrupted(root: Path, state_dir: Path, target: str) -> Journal | None:
    """The journal of an interrupted run, None when there is none. Writes nothing.

    Raises:
        Interrupted: it cannot be read; a person must decide.
    """
    try:
        data = read_optional(state_dir / JOURNAL)
        return None if data is None else _from_json(root, state_dir, json.loads(data))
    except (FileSystemError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Interrupted(
            "the journal of an interrupted run cannot be read",
            target=target,
            path=str(state_dir / JOURNAL),
            found=error.what if isinstance(error, PatchsetError) else f"{type(error).__name__}: {error}",
            next_step=f"restore the files from {state_dir / BACKUP}, then remove {state_dir / JOURNAL}",
        ) from error


# The journal's JSON: every path is [base, path below it], the base "root" or "state"


def _to_json(root: Path, state_dir: Path, journal: Journal) -> bytes:
    def name(path: Path) -> list[str]:
        base = "state" if path.is_relative_to(state_dir) else "root"
        return [base, path.relative_to(state_dir if base == "state" else root).as_posix()]

    entries = [{"path": name(e.path), "before": e.before, "after": e.after} for e in journal.entries]
    # directories above the state directory may lie outside the tree; they are found again by climbing
    directories = [name(d) for d in journal.directories if d.is_relative_to(state_dir) or d.is_relative_to(root)]
    body = {"phase": journal.phase, "root": str(root), "directories": directories, "entries": entries}
    return json.dumps(body).encode()


def _from_json(root: Path, state_dir: Path, body: dict) -> Journal:
    def place(name: list[str]) -> Path:
        base, path = name
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise ValueError(f"{path!r} leads out of the tree")
        return {"root": root, "state": state_dir}[base] / path

    other = body.get("root", str(root))
    # a copied worktree shares the git directory, and so this journal, with the original
    if other != str(root) and not state_dir.is_relative_to(root) and Path(other).is_dir():
        raise Interrupted(
            "an interrupted run of another tree that shares this git directory waits",
            path=str(root),
            found=f"the journal of {other}",
            next_step=f"run the same command on {other} first",
        )
    if body["phase"] not in ("prepare", "commit"):
        raise ValueError(f"phase {body['phase']!r}")
    entries = (
        _entry(state_dir, number, place(entry["path"]), entry["before"], entry["after"])
        for number, entry in enumerate(body["entries"])
    )
    return Journal(body["phase"], tuple(place(name) for name in body["directories"]), tuple(entries))


def _entry(state_dir: Path, number: int, path: Path, before: str | None, after: str | None) -> Entry:
    temp = None if after is None else path.with_name(_TEMP.format(path.name))
    backup = None if before is None else state_dir / BACKUP / str(number)
    return Entry(path, before, after, temp, backup)


def _digest(data: bytes | None) -> str | None:
    return None if data is None else sha256(data)


def _sweep(state_dir: Path) -> None:
    # killed before the first journal was complete, or after the last step but the clearing
    with contextlib.suppress(OSError):
        (state_dir / (JOURNAL + ".new")).unlink(missing_ok=True)
        if (state_dir / BACKUP).is_dir():
            for stray in (state_dir / BACKUP).iterdir():
                if stray.name.isdecimal():  # ours; anything else keeps the directory
                    stray.unlink()
            (state_dir / BACKUP).rmdir()
        _remove_empty({state_dir})


def _current(path: Path) -> str | None:
    return _digest(read_optional(path))


def _can_finish(entry: Entry) -> bool:
    now = _current(entry.path)
    return now == entry.after or entry.temp is None or _current(entry.temp) == entry.after


def _check_inside(root: Path, state_dir: Path, path: Path) -> None:
    # the state directory of a checkout is two levels below the git directory, which may lie anywhere
    base = root if path.is_relative_to(root) else state_dir.parents[1]
    if not (path.is_relative_to(root) or path.is_relative_to(state_dir)) or ".." in path.parts:
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
            raise FileSystemError(
                "a directory is needed where a file is",
                path=str(parent),
                next_step=f"move {parent} away and run again",
            )


def _missing_directories(directories: Sequence[Path]) -> list[Path]:
    """Directories that must be created, parents first."""
    missing: dict[Path, None] = {}
    for directory in directories:
        chain = [d for d in (directory, *directory.parents) if not d.exists()]
        missing |= dict.fromkeys(reversed(chain))
    return list(missing)


def _make_directory(directory: Path) -> None:
    """Create `directory` and its missing parents, each with the owner of the one above it."""
    if directory.is_dir():
        return
    _make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    directory.chmod(_mode(directory.parent))  # whatever the umask: who reads the package reads its new parts
    _give(directory, like=directory.parent)


def _give(place: Path | int, like: Path) -> None:
    """Give a new file or directory the owner of `like`: a run by root must not lock the tree's owner out."""
    owner = like.stat()
    if (owner.st_uid, owner.st_gid) != (os.geteuid(), os.getegid()):
        with contextlib.suppress(PermissionError):  # only root may give files away
            os.chown(place, owner.st_uid, owner.st_gid)


def _stage(change: Change, entry: Entry) -> None:
    if entry.backup is not None:
        data = read_optional(change.path)
        if data is None or sha256(data) != change.before_sha256:
            raise _changed_meanwhile(change.path)
        _write_new(entry.backup, data, _mode(change.path), like=change.path)
    elif change.path.exists():
        raise _changed_meanwhile(change.path)
    if change.after is not None and entry.temp is not None:
        _make_directory(change.path.parent)
        mode = change.mode if entry.backup is None else _mode(change.path)
        like = change.path.parent if entry.backup is None else change.path
        _write_new(entry.temp, change.after, mode, like=like)


def _changed_meanwhile(path: Path) -> PatchsetError:
    return Interrupted("a file changed while the tool was working", path=str(path), next_step="run again")


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _write_new(path: Path, data: bytes, mode: int, like: Path) -> None:
    """Write a new inode with `mode` and the owner of `like`; `_sync` puts it on the disk."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        _give(descriptor, like)
        os.fchmod(descriptor, mode)


def _replace(entry: Entry) -> None:
    now = _current(entry.path)
    if now != entry.after:
        if now != entry.before:
            raise _changed_meanwhile(entry.path)
        if entry.temp is None:
            entry.path.unlink()
        else:
            os.replace(entry.temp, entry.path)
    _drop_bytecode(entry.path)


def _roll_back(state_dir: Path, journal: Journal) -> None:
    for entry in reversed(journal.entries):
        now = _current(entry.path)
        if now == entry.after and now != entry.before:
            if entry.backup is None:
                entry.path.unlink()
            else:
                os.replace(entry.backup, entry.path)
            _drop_bytecode(entry.path)
    _clean(state_dir, journal, undone=True)


def _clean(state_dir: Path, journal: Journal, undone: bool = False) -> None:
    """Remove temporary files, backups and directories left empty; the journal last, so that a kill is noticed."""
    for entry in journal.entries:
        for place in (entry.temp, entry.backup):
            if place is not None:
                place.unlink(missing_ok=True)
    emptied = {e.path.parent for e in journal.entries if undone or e.after is None}
    created = set(journal.directories) if undone else set()
    _remove_empty({state_dir / BACKUP} | emptied | created)
    (state_dir / (JOURNAL + ".new")).unlink(missing_ok=True)
    (state_dir / JOURNAL).unlink(missing_ok=True)
    _remove_empty({state_dir})


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


def _sync(places: Iterable[Path]) -> None:
    """Put the bytes of files, and the names in directories, on the disk; what is gone needs it no more."""
    for place in places:
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(place, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
