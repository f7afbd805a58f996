# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""The nouns of the tool: frozen dataclasses and enums, no behaviour that touches a disk."""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

SHA256 = re.compile(r"[0-9a-f]{64}")


def sha256(data: bytes) -> str:
    """Lower-case hex sha256 of `data`: the only identity of a file that the tool trusts."""
    return hashlib.sha256(data).hexdigest()


class Kind(enum.Enum):
    """What a target path turned out to be, found by looking."""

    CHECKOUT = "git checkout"  # has .git: state lives in the git directory
    SOURCE = "source tree"  # upstream layout without .git: an unpacked sdist or archive
    SITE = "site-packages"  # installed by pip or uv: dist-info with INSTALLER
    WHEEL = "unpacked wheel"  # dist-info without INSTALLER
    PACKAGE = "package directory"  # installed layout without any dist-info


class FileState(enum.Enum):
    """State of one touched file, by hash alone."""

    PRISTINE = "pristine"  # the pin's bytes
    PATCHED = "patched"  # the current lock's bytes
    OLD = "patched by another revision"  # bytes that an earlier applied digest recorded
    LOCAL = "changed"  # bytes nobody recorded
    MISSING = "missing"  # the pin has the file, the target does not
    ABSENT = "absent"  # a new file that is not there, as on a pristine tree
    EXTRA = "in the way"  # a new file's place is taken by unrecorded bytes


class TargetState(enum.Enum):
    """State of a whole target, from the states of its files."""

    PRISTINE = "pristine"
    PATCHED = "patched"
    MIXED = "mixed"  # recorded bytes only, but neither all pristine nor all patched
    DRIFTED = "drifted"  # the pin, with at least one unrecorded change
    UNKNOWN = "unknown"  # another version


@dataclass(frozen=True)
class WheelPin:
    """The official wheel of a pin: file name on the index and sha256 of its bytes."""

    file: str
    sha256: str


@dataclass(frozen=True)
class Pin:
    """One upstream version the patch set is made for."""

    version: str
    wheel: WheelPin
    sdist: WheelPin | None = None
    tag: str | None = None
    commit: str | None = None


@dataclass(frozen=True)
class Requirement:
    """One override of a `Requires-Dist` line, used by `wheel` alone.

    `upstream` is the verbatim upstream line ("" adds a line); `replace` is the new one ("" drops it).
    """

    upstream: str
    replace: str
    reason: str


@dataclass(frozen=True)
class Target:
    """One upstream project: where its files lie, in its repository and when installed."""

    id: str
    dist: str  # distribution name on the index
    module: str  # dotted import name
    repo: str
    licence: str  # SPDX id of patches to its files
    pin: str  # default pin
    pins: Mapping[str, Pin]
    layout: Mapping[str, str]  # upstream prefix -> installed prefix
    marker: str  # upstream path of the file that says "this is it"
    version_files: tuple[str, ...]  # upstream paths that carry the version literal
    native: tuple[str, ...] = ()  # upstream prefixes whose change needs `wheel --build`
    requires: tuple[Requirement, ...] = ()
    shared: Mapping[str, str] = field(default_factory=dict)  # upstream path -> file below overlay/shared
    python: str = "3.12"  # what its wheels are built for

    def installed_path(self, upstream_path: str) -> str | None:
        """Where `upstream_path` lies in a site-packages; None when it is not installed (tests, docs)."""
        for prefix, installed in self.layout.items():
            if upstream_path.startswith(prefix):
                return installed + upstream_path[len(prefix) :]
        return None


@dataclass(frozen=True)
class PatchMail:
    """One patch: a git format-patch mail and what its header and trailers say."""

    slug: str
    path: Path
    subject: str
    author: str
    body: str
    trailers: tuple[tuple[str, str], ...]
    files: tuple[FileDiff, ...]
    sha256: str

    def trailer(self, name: str) -> str | None:
        """First value of trailer `name`, None when absent."""
        return next((v for k, v in self.trailers if k == name), None)

    def trailer_values(self, name: str) -> list[str]:
        """All values of trailer `name`, in order."""
        return [v for k, v in self.trailers if k == name]


@dataclass(frozen=True)
class FileDiff:
    """One file's part of a patch. Paths are upstream's, relative; `old` is None for a new file."""

    old: str | None
    new: str | None
    added: int
    removed: int
    hunks: tuple[Hunk, ...]
    old_mode: str | None = None
    new_mode: str | None = None

    @property
    def path(self) -> str:
        return self.new or self.old or ""


@dataclass(frozen=True)
class Hunk:
    """One hunk: 1-based start and length on both sides, and its lines with their ' ', '+', '-' prefix."""

    old_start: int
    old_len: int
    new_start: int
    new_len: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class FileLock:
    """Recorded hashes of one touched file: source name ("wheel", "sdist", "tag") -> sha256 before and after."""

    pre: Mapping[str, str]
    post: Mapping[str, str]
    mode: str = "100644"

    def source_of(self, digest: str, side: str) -> str | None:
        """The source whose `side` ("pre" or "post") hash is `digest`."""
        return next((s for s, h in getattr(self, side).items() if h == digest), None)


@dataclass(frozen=True)
class Lock:
    """patches/<target>/<pin>/lock.json: what the tool will write, and onto what."""

    target: str
    version: str
    wheel_sha256: str
    patches: tuple[tuple[str, str], ...]  # (slug, sha256 of the mail), in series order
    files: Mapping[str, FileLock]  # upstream path -> hashes
    overlay: Mapping[str, str]  # upstream path -> sha256
    digest: str  # sha256 over all of the above: the short identity shown to users


@dataclass(frozen=True)
class Located:
    """A target found on disk. `prefix` maps the upstream layout to this tree."""

    target: Target
    root: Path
    kind: Kind
    state_dir: Path
    dist_info: Path | None = None
    version: str | None = None  # what the tree says of itself; for messages only

    @property
    def installed_layout(self) -> bool:
        return self.kind in (Kind.SITE, Kind.WHEEL, Kind.PACKAGE)

    def place(self, upstream_path: str) -> Path | None:
        """Path on disk of `upstream_path`; None when this kind of tree does not carry it."""
        if self.installed_layout:
            installed = self.target.installed_path(upstream_path)
            return None if installed is None else self.root / installed
        if self.kind is not Kind.CHECKOUT and self.target.installed_path(upstream_path) is None:
            return None  # tests and docs go into git checkouts only
        return self.root / PurePosixPath(upstream_path)


@dataclass(frozen=True)
class Applied:
    """The record of what is applied to a target (state.json): the end state and where it came from."""

    target: str
    version: str
    digest: str
    files: Mapping[str, tuple[str, str]]  # upstream path -> (sha256 before, sha256 after)
    overlay: Mapping[str, str]  # upstream path -> sha256
