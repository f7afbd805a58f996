# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Apply a series to bytes, in a scratch directory that is in no repository. The target is never touched from here.

git's exit code is a hint only: below an unrelated repository `git apply` skips every file and returns 0. What counts
is the hash of the result, which the caller compares with the lock.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from patchset import git
from patchset.errors import FileSystemError, PatchConflict, SeriesInvalid
from patchset.types import FileDiff, Hunk, PatchMail

# Apache-2.0 section 4(b): modified files carry a prominent notice. A trailing line moves no other line.
_NOTICE = "Modified by fp8-colocate; fp8_colocate.py in this package says how to list the changes."
COMMENT = {".py": "# ", ".pyi": "# ", ".toml": "# ", ".cfg": "# ", ".sh": "# ", ".yaml": "# ", ".yml": "# "}
COMMENT |= dict.fromkeys((".cuh", ".cu", ".cpp", ".h", ".hpp", ".cc"), "// ")


def notice(path: str) -> bytes:
    """The change notice in the comment syntax of `path`.

    Raises:
        SeriesInvalid: no comment syntax is known for the suffix.
    """
    suffix = Path(path).suffix
    if suffix not in COMMENT:
        raise SeriesInvalid(
            "a patched file must be able to carry a change notice", path=path, expected=", ".join(COMMENT)
        )
    return f"{COMMENT[suffix]}{_NOTICE}\n".encode()


def with_notice(path: str, data: bytes) -> bytes:
    """`data` with the change notice as its last line. A missing final newline is refused: it could not be undone."""
    if not data.endswith(b"\n"):
        raise SeriesInvalid("a patched file must end in a newline", path=path, found=repr(data[-20:]))
    return data + notice(path)


def without_notice(path: str, data: bytes) -> bytes:
    """Undo `with_notice`; bytes without the notice come back unchanged."""
    return data.removesuffix(notice(path))


def apply_series(patches: Sequence[PatchMail], files: Mapping[str, bytes], target: str) -> dict[str, bytes]:
    """Apply those parts of `patches` that touch `files`, in order, and add the change notice.

    Args:
        files: upstream path -> bytes before the series.

    Returns:
        upstream path -> bytes after it.

    Raises:
        PatchConflict: one or more patches do not apply; all failing ones are listed.
    """
    result = _run(patches, files, target, reverse=False)
    return {path: with_notice(path, data) for path, data in result.items()}


def revert_series(patches: Sequence[PatchMail], files: Mapping[str, bytes], target: str) -> dict[str, bytes]:
    """The inverse of `apply_series`: bytes after the series in, bytes before it out."""
    stripped = {path: without_notice(path, data) for path, data in files.items()}
    return _run(list(reversed(patches)), stripped, target, reverse=True)


def applies_in_reverse(patch: PatchMail, files: Mapping[str, bytes]) -> bool:
    """Whether `files` already hold the change of `patch`: the sign of a patch that went upstream."""
    wanted = [f.path for f in patch.files if f.path in files]
    if not wanted:
        return False
    with tempfile.TemporaryDirectory(prefix="fp8-colocate-") as name:
        directory = Path(name)
        _write(directory, {path: files[path] for path in wanted})
        before = {path: files[path] for path in wanted}
        done = git.run(directory, "apply", "-R", *_include(wanted), str(patch.path.resolve()), check=False)
        return done.returncode == 0 and _read(directory, wanted) != before


def _run(patches: Sequence[PatchMail], files: Mapping[str, bytes], target: str, reverse: bool) -> dict[str, bytes]:
    if not files:
        return {}
    try:
        with tempfile.TemporaryDirectory(prefix="fp8-colocate-") as name:
            directory = Path(name)
            _write(directory, files)
            _apply_all(
                directory, [p for p in patches if any(f.path in files for f in p.files)], files, target, reverse
            )
            return _read(directory, files)
    except OSError as error:
        raise FileSystemError(
            "the scratch directory cannot be written",
            target=target,
            path=error.filename or tempfile.gettempdir(),
            found=error.strerror or str(error),
            next_step="set TMPDIR to a directory with space",
        ) from error


def _apply_all(directory: Path, patches: list[PatchMail], files: Mapping[str, bytes], target: str, reverse: bool):
    if not patches:
        return
    flags = (["-R"] if reverse else []) + _include(files)
    done = git.run(directory, "apply", *flags, *(str(p.path.resolve()) for p in patches), check=False)
    if done.returncode == 0:
        return
    if b"No space left on device" in done.stderr:  # git's own words, LC_ALL=C
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))
    _write(directory, files)  # one by one now, to name every patch that fails
    failed: list[tuple[PatchMail, list[str]]] = []
    for patch in patches:
        before = _read(directory, files)
        done = git.run(directory, "apply", *flags, str(patch.path.resolve()), check=False)
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            failed.append((patch, [*said, *explain(patch, before)]))
    details = [f"{patch.slug}: {line}" for patch, lines in failed for line in lines]
    raise PatchConflict(
        f"{len(failed)} of {len(patches)} patches do not apply",
        target=target,
        patch=", ".join(patch.slug for patch, _ in failed),
        cause="the patches were made for other bytes than these",
        next_step=f"python apply.py dev {target}",
        details=details,
    )


def explain(patch: PatchMail, files: Mapping[str, bytes]) -> list[str]:
    """For each hunk of `patch` whose old lines are nowhere in the file: where it looked, expected and found lines."""
    lines: list[str] = []
    for diff in patch.files:
        data = files.get(diff.old or "")
        if data is None:
            lines.append(f"{diff.path}: no such file")
            continue
        current = data.decode("utf-8", errors="replace").splitlines()
        for number, hunk in enumerate(diff.hunks, start=1):
            lines += _explain_hunk(diff, number, hunk, current)
    return lines


def _explain_hunk(diff: FileDiff, number: int, hunk: Hunk, current: list[str]) -> list[str]:
    expected = [line[1:] for line in hunk.lines if line[:1] in (" ", "-")]
    if any(current[i : i + len(expected)] == expected for i in range(len(current) - len(expected) + 1)):
        return []
    start = hunk.old_start - 1
    found = current[start : start + len(expected)]
    at = next(
        (i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), min(len(expected), len(found))
    )
    place = f"{diff.path}:{hunk.old_start + at} (hunk {number})"
    want = expected[at] if at < len(expected) else "(end)"
    have = found[at] if at < len(found) else "(end of file)"
    return [f"{place}: expected {want!r}", f"{place}: found    {have!r}"]


def _include(paths: Iterable[str]) -> list[str]:
    # git takes --include as a glob; lint refuses paths with glob characters
    return [f"--include={path}" for path in paths]


def _write(directory: Path, files: Mapping[str, bytes]) -> None:
    for path, data in files.items():
        place = directory / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)


def _read(directory: Path, paths: Iterable[str]) -> dict[str, bytes]:
    return {path: (directory / path).read_bytes() for path in paths}
