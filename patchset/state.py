# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""The record of what is applied to a tree (state.json and the pristine files), RECORD, and the tree's lock."""

from __future__ import annotations

import base64
import contextlib
import csv
import errno
import fcntl
import hashlib
import io
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from patchset.errors import FileSystemError, Locked, StateInvalid
from patchset.swap import read_optional
from patchset.types import Applied, Located

SCHEMA = 1
STATE = "state.json"
PRISTINE = "pristine"
RECORD = "RECORD"


def load(found: Located) -> Applied | None:
    """What an earlier run recorded for this tree; None when nothing is applied.

    Raises:
        StateInvalid: the record is damaged.
    """
    path = found.state_dir / STATE
    data = read_optional(path)
    if data is None:
        return None
    try:
        body = json.loads(data)
        _refuse_newer(body["schema"], found, path)
        if (body["schema"], body["target"]) != (SCHEMA, found.target.id):
            raise ValueError(f"schema {body['schema']} of {body['target']}, expected {SCHEMA} of {found.target.id}")
        files = {_inner(p): (_hex(f["pre"]), _hex(f["post"])) for p, f in body["files"].items()}
        overlay = {_inner(p): _hex(h) for p, h in body["overlay"].items()}
        return Applied(body["target"], body["version"], body["digest"], files, overlay)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StateInvalid(
            "the record of what was applied is damaged",
            target=found.target.id,
            path=str(path),
            found=f"{type(error).__name__}: {error}",
            next_step=f"remove {path} and run again; the files themselves are judged by their hashes",
        ) from error


def _refuse_newer(schema: object, found: Located, path: Path) -> None:
    if isinstance(schema, int) and schema > SCHEMA:
        raise StateInvalid(
            "the record of what was applied was written by a newer revision of this tool",
            target=found.target.id,
            path=str(path),
            expected=f"schema {SCHEMA}",
            found=f"schema {schema}",
            next_step="use that revision, or a later one",
        )


def _inner(path: str) -> str:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or "\0" in path:
        raise ValueError(f"{path!r} leads out of the tree")
    return path


def _hex(digest: object) -> str:
    if not isinstance(digest, str) or re.fullmatch(r"[0-9a-f]{64}", digest) is None:
        raise ValueError(f"{digest!r} is no sha256")
    return digest


def to_json(applied: Applied, found: Located) -> bytes:
    """Serialise `applied`; the guard in each overlay reads the same file."""
    body = {
        "schema": SCHEMA,
        "target": applied.target,
        "dist": found.target.dist,
        "version": applied.version,
        "digest": applied.digest,
        "files": {
            path: {"pre": pre, "post": post, "at": _at(found, path)}
            for path, (pre, post) in sorted(applied.files.items())
        },
        "overlay": dict(sorted(applied.overlay.items())),
        "places": {path: _at(found, path) for path in sorted(applied.overlay)},
    }
    return (json.dumps(body, indent=1) + "\n").encode()


def _at(found: Located, upstream_path: str) -> str:
    place = found.place(upstream_path)
    return upstream_path if place is None else place.relative_to(found.root).as_posix()


def pristine_path(found: Located, upstream_path: str) -> Path:
    """Where the bytes before the series are kept."""
    return found.state_dir / PRISTINE / upstream_path


# RECORD: the installer's list of files, `path,sha256=<urlsafe base64>,size`


def record_line(path: str, data: bytes | None) -> list[str]:
    """One RECORD row; `data` None leaves hash and size empty, as for RECORD itself."""
    if data is None:
        return [path, "", ""]
    hashed = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return [path, f"sha256={hashed}", str(len(data))]


def record_paths(record: bytes) -> list[str]:
    """The path of every row, in order."""
    return [_row_path(line) for line in record_rows(record)]


def record_rows(record: bytes) -> list[str]:
    """The rows with their own line ends. Only a line feed ends one: a file name may hold any other separator."""
    return [row + "\n" for row in record.decode("utf-8", errors="surrogateescape").split("\n")[:-1]] + [
        row for row in [record.decode("utf-8", errors="surrogateescape").rpartition("\n")[2]] if row
    ]


def _fields(line: str) -> list[str]:
    return (next(csv.reader([line.rstrip("\r\n")]), None) or []) + ["", "", ""]


def _row_path(line: str) -> str:
    return _fields(line)[0].removeprefix("./")


def _is_right(line: str, data: bytes) -> bool:
    """Whether a row's hash, of whatever kind, is that of `data`."""
    kind, _, hashed = _fields(line)[1].partition("=")
    if kind not in hashlib.algorithms_guaranteed or kind.startswith("shake"):
        return False
    return hashed.rstrip("=") == base64.urlsafe_b64encode(hashlib.new(kind, data).digest()).rstrip(b"=").decode()


def rewrite_record(record: bytes, changes: Mapping[str, bytes | None]) -> bytes:
    """RECORD with the rows of `changes` replaced, appended (new path) or dropped (None).

    Rows keep their order, and every other row its bytes, as does a row that is right already.
    """
    newline = "\r\n" if b"\r\n" in record else "\n"
    left = dict(changes)
    lines: list[str] = []
    for line in record_rows(record):
        path = _row_path(line)
        if path not in changes:
            lines.append(line)
            continue
        data = left.pop(path, None)
        if data is not None:
            lines.append(line if _is_right(line, data) else _csv_line(record_line(path, data)) + newline)
    if lines and not lines[-1].endswith("\n") and any(data is not None for data in left.values()):
        lines[-1] += newline
    for path, data in left.items():
        if data is not None:
            lines.append(_csv_line(record_line(path, data)) + newline)
    return "".join(lines).encode("utf-8", errors="surrogateescape")


def _csv_line(row: list[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="").writerow(row)
    return buffer.getvalue()


# The lock of a tree


@contextlib.contextmanager
def hold(roots: list[Path], wait_s: float) -> Iterator[None]:
    """Hold every tree of `roots` for this process, waiting up to `wait_s` seconds in all. Writes nothing.

    The lock is flock() on the directory itself, so it ends with the process, however that dies.

    Raises:
        Locked: another run still holds one of them after the wait.
    """
    with contextlib.ExitStack() as stack:
        deadline = time.monotonic() + wait_s
        for root in sorted(set(roots)):  # one order for all runs: no deadlock
            try:
                descriptor = os.open(root, os.O_RDONLY)
            except OSError as error:
                raise FileSystemError("a directory cannot be opened", path=str(root), found=error.strerror) from error
            stack.callback(os.close, descriptor)
            _flock(descriptor, root, deadline, wait_s)
        yield


def _flock(descriptor: int, root: Path, deadline: float, wait_s: float) -> None:
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise FileSystemError(
                    "the tree cannot be locked",
                    path=str(root),
                    found=error.strerror,
                    cause="a network file system without flock",
                    next_step="work on a local copy",
                ) from error
        if time.monotonic() >= deadline:
            raise Locked(
                "another run holds this tree",
                path=str(root),
                found=f"still held after {wait_s:g} s",
                next_step="wait for it, or raise --lock-timeout",
            )
        if not told:
            print(f"waiting for another run to leave {root}", file=sys.stderr)
            told = True
        time.sleep(0.05)
