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
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

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
        if (body["schema"], body["target"]) != (SCHEMA, found.target.id):
            raise ValueError(f"schema {body['schema']} of {body['target']}, expected {SCHEMA} of {found.target.id}")
        files = {p: (f["pre"], f["post"]) for p, f in body["files"].items()}
        return Applied(body["target"], body["version"], body["digest"], files, dict(body["overlay"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StateInvalid(
            "the record of what was applied is damaged",
            target=found.target.id,
            path=str(path),
            found=f"{type(error).__name__}: {error}",
            next_step=f"remove {path} and run again; the files themselves are judged by their hashes",
        ) from error


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
    return [_row_path(line) for line in record.decode("utf-8", errors="surrogateescape").splitlines()]


def _row_path(line: str) -> str:
    return next(csv.reader([line]), [""])[0]


def _is_right(line: str, data: bytes) -> bool:
    """Whether a row's hash, of whatever kind, is that of `data`."""
    kind, _, hashed = (next(csv.reader([line]), []) + ["", ""])[1].partition("=")
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
    for line in record.decode("utf-8", errors="surrogateescape").splitlines():
        path = _row_path(line)
        if path not in left:
            lines.append(line)
            continue
        data = left.pop(path)
        if data is not None:
            lines.append(line if _is_right(line, data) else _csv_line(record_line(path, data)))
    for path, data in left.items():
        if data is not None:
            lines.append(_csv_line(record_line(path, data)))
    return "".join(line + newline for line in lines).encode("utf-8", errors="surrogateescape")


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
