# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""One error class for each step that can fail. The class carries the exit code; the message carries the facts.

Every error names the target, the patch and the file where they are known, what was expected, what was found,
the likely cause and the next command. `str(error)` is what the user reads; `error.as_dict()` is its JSON form.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

EXIT_OK = 0


class PatchsetError(Exception):
    """Base class. `exit_code` is the process exit code (docs/exit-codes.md)."""

    exit_code = 1
    title = "failed"

    def __init__(
        self,
        what: str,
        *,
        target: str | None = None,
        patch: str | None = None,
        path: str | None = None,
        expected: str | None = None,
        found: str | None = None,
        cause: str | None = None,
        next_step: str | None = None,
        details: Sequence[str] = (),
    ) -> None:
        super().__init__(what)
        self.what = what
        self.fields = {
            "target": target,
            "patch": patch,
            "file": path,
            "expected": expected,
            "found": found,
            "likely cause": cause,
            "next": next_step,
        }
        self.details = list(details)

    def __str__(self) -> str:
        lines = [f"error: {self.what}"]
        lines += [f"  {name + ':':<13} {value}" for name, value in self.fields.items() if value is not None]
        lines += [f"    {line}" for line in self.details]
        return "\n".join(lines)

    def as_dict(self) -> dict:
        """The JSON form: error class, exit code, message and the named fields that are known."""
        known = {k.replace(" ", "_"): v for k, v in self.fields.items() if v is not None}
        return {
            "error": type(self).__name__,
            "exit_code": self.exit_code,
            "what": self.what,
            **known,
            "details": self.details,
        }


# 1: the machine, not the tree


class FileSystemError(PatchsetError):
    """Reading or writing failed: permissions, a full disk, a vanished directory."""


_OS_CAUSES = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EACCES: "no permission; the directory belongs to another user or is read-only",
    errno.EPERM: "no permission, or the file is immutable",
    errno.EROFS: "the file system is mounted read-only",
}


def os_failure(what: str, error: OSError, *, path: str | os.PathLike | None = None, **fields) -> FileSystemError:
    """The `FileSystemError` for `error`, with its likely cause; `path` is used where the error names no file."""
    where = error.filename if error.filename is not None else path
    return FileSystemError(
        what,
        path=None if where is None else os.fsdecode(where),
        found=error.strerror or str(error),
        cause=_OS_CAUSES.get(error.errno or 0),
        **fields,
    )


class SymlinkRefused(PatchsetError):
    """A path to be written passes through a symbolic link or leaves the target."""


class ToolMissing(PatchsetError):
    """A program or an optional Python package that the verb needs is not installed."""


class DownloadFailed(PatchsetError):
    """pip or git could not bring a pinned distribution."""


# 2: the command line


class UsageError(PatchsetError):
    """The command line or a path on it cannot be used."""

    exit_code = 2


# 3: the target is not the pin


class Drift(PatchsetError):
    """A touched file is neither the pin's nor the patch set's."""

    exit_code = 3


class WrongVersion(Drift):
    """The target is another upstream version than any pin."""


class NotPatched(Drift):
    """`status`: at least one target is not patched."""


# 4 and 5: the series itself


class PatchConflict(PatchsetError):
    """A patch does not apply to the files it is recorded for."""

    exit_code = 4


class HashMismatch(PatchsetError):
    """A patch applied and the result is not the recorded one."""

    exit_code = 5


# 6: somebody else, or an earlier self


class Locked(PatchsetError):
    """Another run holds the target."""

    exit_code = 6


class Interrupted(PatchsetError):
    """An interrupted run left files that were changed since; a person must decide."""

    exit_code = 6


# 7: the patch set's own files


class ManifestInvalid(PatchsetError):
    """patchset.toml cannot be read or does not say what it must."""

    exit_code = 7


class SeriesInvalid(PatchsetError):
    """A series file or a patch mail is malformed."""

    exit_code = 7


class LockInvalid(PatchsetError):
    """lock.json is missing, corrupt, or was made from other patches than those present."""

    exit_code = 7


class WheelInvalid(PatchsetError):
    """A wheel is corrupt or is not the pinned one."""

    exit_code = 7


class LintFailed(PatchsetError):
    """`lint` found something to mend."""

    exit_code = 7


class StateInvalid(PatchsetError):
    """The record of what was applied to a target cannot be read."""

    exit_code = 7


class ProvenanceInvalid(PatchsetError):
    """An installed patched wheel and its provenance record disagree."""

    exit_code = 7
