# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Wheels as bytes: read one with every row of RECORD checked, write one that comes out the same every time."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import re
import shutil
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from patchset.errors import UsageError, WheelInvalid, os_failure
from patchset.state import RECORD, record_line

_NAME = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)(-(?P<build>\d[^-]*))?-(?P<tags>[^-]+-[^-]+-[^-]+)\.whl")
_FILE_MODE = 0o100644 << 16
_UNSIGNED = ("RECORD", "RECORD.jws", "RECORD.p7s")  # the files that RECORD cannot hash
_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, UnicodeDecodeError)


@dataclass(frozen=True)
class Member:
    """One entry of the archive; a directory entry has a name that ends in '/' and no data."""

    name: str
    data: bytes
    compress_type: int = zipfile.ZIP_DEFLATED
    external_attr: int = _FILE_MODE


@dataclass(frozen=True)
class Wheel:
    """A wheel in memory, members in archive order."""

    name: str  # as the file name spells it: sglang, megatron_core
    version: str
    tags: str  # "cp312-cp312-manylinux_2_34_x86_64"
    members: Mapping[str, Member]

    @property
    def dist_info(self) -> str:
        """Name of the dist-info directory."""
        return f"{self.name}-{self.version}.dist-info"

    @property
    def file_name(self) -> str:
        """Name of the wheel's file."""
        return f"{self.name}-{self.version}-{self.tags}.whl"

    def read(self, name: str) -> bytes | None:
        """Bytes of a member, None where there is none."""
        member = self.members.get(name)
        return None if member is None else member.data

    def with_version(self, version: str) -> Wheel:
        """The same wheel under another version: its dist-info directory renamed, its contents untouched."""
        old, new = f"{self.dist_info}/", f"{self.name}-{version}.dist-info/"
        renamed = {new + n.removeprefix(old) if n.startswith(old) else n: m for n, m in self.members.items()}
        return replace(self, version=version, members={n: replace(m, name=n) for n, m in renamed.items()})

    def with_files(self, files: Mapping[str, bytes]) -> Wheel:
        """Members replaced in their places; new ones before the dist-info, those of the dist-info at its end."""
        members = {n: replace(m, data=files[n]) if n in files else m for n, m in self.members.items()}
        new = [Member(name, data) for name, data in sorted(files.items()) if name not in members]
        inside = f"{self.dist_info}/"
        body = [m for m in members.values() if not m.name.startswith(inside)]
        info = [m for m in members.values() if m.name.startswith(inside)]
        ordered = [
            *body,
            *(m for m in new if not m.name.startswith(inside)),
            *info,
            *(m for m in new if m.name.startswith(inside)),
        ]
        return replace(self, members={m.name: m for m in ordered})


def parse_name(file_name: str, where: Path) -> re.Match[str]:
    """The parts of a wheel's file name: groups name, version, build, tags.

    Raises:
        WheelInvalid: it is not NAME-VERSION-PYTHON-ABI-PLATFORM.whl.
    """
    match = _NAME.fullmatch(file_name)
    if match is None:
        raise WheelInvalid(
            "the file name is not a wheel's",
            path=str(where),
            expected="NAME-VERSION-PYTHON-ABI-PLATFORM.whl",
            found=file_name,
        )
    return match


def read(path: Path, target: str | None = None) -> Wheel:
    """Read a wheel and check every member against RECORD.

    Raises:
        WheelInvalid: not a zip, damaged, an unsafe or repeated name, no dist-info, or RECORD does not match.
        FileSystemError: the file cannot be read.
    """
    match = parse_name(path.name, path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = [_member(archive, info) for info in archive.infolist()]
    except _BROKEN as error:
        raise WheelInvalid(
            "the wheel is damaged",
            target=target,
            path=str(path),
            found=f"{type(error).__name__}: {error}",
            cause="a cut-off download or a disk fault",
            next_step="remove it and run: python apply.py --fetch",
        ) from error
    except OSError as error:
        raise os_failure("a wheel cannot be read", error, path=path, target=target) from error
    wheel = Wheel(match["name"], match["version"], match["tags"], {m.name: m for m in members})
    problems = [*_name_problems(members), *record_problems(wheel)]
    if problems:
        raise WheelInvalid(
            f"the wheel and its RECORD disagree in {len(problems)} places",
            target=target,
            path=str(path),
            cause="edited after it was built, or damaged",
            next_step="remove it and run: python apply.py --fetch",
            details=problems[:20],
        )
    return wheel


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Member:
    return Member(info.filename, archive.read(info), info.compress_type, info.external_attr)


def _name_problems(members: Sequence[Member]) -> Iterator[str]:
    seen: set[str] = set()
    for member in members:
        parts = PurePosixPath(member.name)
        if parts.is_absolute() or ".." in parts.parts or "\\" in member.name:
            yield f"{member.name}: unsafe path"
        if member.name in seen:
            yield f"{member.name}: stands twice in the archive"
        seen.add(member.name)


def record_problems(wheel: Wheel) -> list[str]:
    """Every way in which RECORD and the members differ; empty for a sound wheel."""
    name = f"{wheel.dist_info}/{RECORD}"
    raw = wheel.read(name)
    if raw is None:
        return [f"{name}: missing"]
    rows: dict[str, tuple[str, str]] = {}
    problems: list[str] = []
    for row in csv.reader(io.StringIO(raw.decode("utf-8", errors="replace"))):
        if len(row) != 3 or row[0] in rows:
            problems.append(f"RECORD: malformed or repeated row {row}")
            continue
        rows[row[0]] = (row[1], row[2])
    files = {n: m.data for n, m in wheel.members.items() if not n.endswith("/")}
    problems += [f"{n}: in RECORD, not in the archive" for n in rows if n not in files]
    problems += [f"{n}: in the archive, not in RECORD" for n in files if n not in rows and not _unsigned(wheel, n)]
    for path, (hashed, size) in rows.items():
        if path in files and not _unsigned(wheel, path):
            problems += _row_problems(path, hashed, size, files[path])
    return problems


def _unsigned(wheel: Wheel, name: str) -> bool:
    return name in {f"{wheel.dist_info}/{unsigned}" for unsigned in _UNSIGNED}


def _row_problems(path: str, hashed: str, size: str, data: bytes) -> Iterator[str]:
    algorithm, _, expected = hashed.partition("=")
    if algorithm not in ("sha256", "sha384", "sha512"):
        yield f"{path}: RECORD gives no sha256 or stronger: {hashed!r}"
        return
    found = base64.urlsafe_b64encode(hashlib.new(algorithm, data).digest()).rstrip(b"=").decode()
    if found != expected:
        yield f"{path}: RECORD says {hashed}, found {algorithm}={found}"
    if size and size != str(len(data)):
        yield f"{path}: RECORD says {size} bytes, found {len(data)}"


def with_record(wheel: Wheel) -> Wheel:
    """The wheel with RECORD made anew, as its last member."""
    name = f"{wheel.dist_info}/{RECORD}"
    members = {n: m for n, m in wheel.members.items() if n != name}
    buffer = io.StringIO()
    rows = [record_line(n, m.data) for n, m in members.items() if not n.endswith("/")]
    csv.writer(buffer, lineterminator="\n").writerows([*rows, record_line(name, None)])
    old = wheel.members.get(name, Member(name, b""))
    return replace(wheel, members=members | {name: replace(old, data=buffer.getvalue().encode())})


def timestamp() -> tuple[int, int, int, int, int, int]:
    """The one time that all members carry: SOURCE_DATE_EPOCH (UTC), else 1980-01-01, the earliest a zip can hold.

    Raises:
        UsageError: SOURCE_DATE_EPOCH is not a whole number of seconds in 1980..2107.
    """
    text = os.environ.get("SOURCE_DATE_EPOCH", "")
    if not text:
        return (1980, 1, 1, 0, 0, 0)
    try:
        moment = time.gmtime(int(text))
        if not 1980 <= moment.tm_year <= 2107:
            raise ValueError("a zip holds years from 1980 to 2107")
    except (ValueError, OverflowError, OSError) as error:
        raise UsageError(
            "SOURCE_DATE_EPOCH cannot be used", expected="seconds since 1970", found=f"{text!r}: {error}"
        ) from error
    return moment[:6]


def write(wheel: Wheel, path: Path) -> None:
    """Write `wheel` to `path`: same members, same bytes, whatever the clock, the user or the umask.

    Compressed members depend on the zlib in use; their contents and RECORD do not.
    """
    moment = timestamp()
    with path.open("xb") as file:
        with zipfile.ZipFile(file, "w") as archive:
            for member in wheel.members.values():
                info = zipfile.ZipInfo(member.name, moment)
                info.create_system = 3  # unix, wherever it is built
                info.external_attr = member.external_attr
                info.compress_type = member.compress_type
                archive.writestr(info, member.data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def staging(out: Path) -> Iterator[Path]:
    """A directory inside `out` for files that are moved to their places when they are finished.

    Raises:
        FileSystemError: `out` cannot be written, or the disk is full.
    """
    directory: Path | None = None
    try:
        out.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix=".fc8-", dir=out))
        yield directory
    except OSError as error:
        raise os_failure(
            "the wheels cannot be written",
            error,
            path=out,
            next_step="make space or name another directory with --out",
        ) from error
    finally:
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
