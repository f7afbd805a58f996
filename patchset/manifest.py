# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Read patchset.toml into types. Says what is wrong with it by key, never by traceback."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchset.errors import ManifestInvalid, UsageError
from patchset.types import SHA256, Pin, Requirement, Target, WheelPin

SCHEMA = 1
HOME = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Manifest:
    """The whole of patchset.toml, and where the patch set lies."""

    home: Path
    name: str
    tag: str
    revision: int
    targets: Mapping[str, Target]

    def target(self, target_id: str) -> Target:
        """The target of that id.

        Raises:
            UsageError: no such target; the message lists those there are.
        """
        if target_id not in self.targets:
            raise UsageError(f"no target {target_id!r}", expected=", ".join(self.targets), found=target_id)
        return self.targets[target_id]

    def pin(self, target: Target, version: str | None = None) -> Pin:
        """The pin of `target` for `version` (None: its default pin).

        Raises:
            UsageError: the version is not pinned; the message lists the pins.
        """
        wanted = version or target.pin
        if wanted not in target.pins:
            raise UsageError(
                f"{target.id} {wanted} is not pinned",
                target=target.id,
                expected=" or ".join(target.pins),
                found=wanted,
                next_step=f"python apply.py refresh {target.id} --to {wanted}",
            )
        return target.pins[wanted]

    def patch_dir(self, target: Target, version: str) -> Path:
        """Directory of the series, the mails and the lock of one pin."""
        return self.home / "patches" / target.id / version

    def overlay_files(self, target: Target) -> dict[str, Path]:
        """Upstream path -> file on disk, for every overlay file of `target`, sorted by path."""
        root = self.home / "overlay" / target.id
        files = {p.relative_to(root).as_posix(): p for p in root.rglob("*") if _is_overlay_file(p)}
        for upstream_path, name in target.shared.items():
            files[upstream_path] = self.home / "overlay" / "shared" / name
        return dict(sorted(files.items()))

    def local_version(self, version: str) -> str:
        """PEP 440 local version of a patched wheel: X+fc8.N."""
        return f"{version}+{self.tag}.{self.revision}"


def _is_overlay_file(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"


def cache_dir() -> Path:
    """Where downloads and worktrees are kept: $XDG_CACHE_HOME/fp8-colocate, else ~/.cache/fp8-colocate."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fp8-colocate"


def load(home: Path = HOME) -> Manifest:
    """Read `home`/patchset.toml.

    Raises:
        ManifestInvalid: the file is missing, is not TOML, or lacks or misspells a key.
    """
    path = home / "patchset.toml"
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ManifestInvalid("patchset.toml cannot be read", path=str(path), found=str(error)) from error
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError are both ValueErrors
        raise ManifestInvalid("patchset.toml is not valid TOML", path=str(path), found=str(error)) from error
    try:
        if raw["schema"] != SCHEMA:
            raise ValueError(f"schema = {raw['schema']!r}, this tool reads {SCHEMA}")
        _refuse_unknown("the top level", raw, ("schema", "name", "tag", "revision", "target"))
        targets = {target_id: _target(target_id, table) for target_id, table in raw["target"].items()}
        return Manifest(home, raw["name"], raw["tag"], int(raw["revision"]), targets)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ManifestInvalid(
            "patchset.toml does not say what it must", path=str(path), found=f"{type(error).__name__}: {error}"
        ) from error


_TARGET_KEYS = (
    "dist module repo licence pin pins layout marker version_files native requires_dist shared python".split()
)


def _refuse_unknown(where: str, table: Mapping, known: Sequence[str]) -> None:
    unknown = [key for key in table if key not in known]
    if unknown:
        raise ValueError(f"{where} has {', '.join(unknown)}, which nothing reads; known: {', '.join(known)}")


def _target(target_id: str, table: Mapping) -> Target:
    _refuse_unknown(f"target.{target_id}", table, _TARGET_KEYS)
    pins = {version: _pin(version, entry) for version, entry in table["pins"].items()}
    if table["pin"] not in pins:
        raise ValueError(f"target.{target_id}.pin = {table['pin']!r} has no [target.{target_id}.pins] entry")
    return Target(
        id=target_id,
        dist=table["dist"],
        module=table["module"],
        repo=table["repo"],
        licence=table["licence"],
        pin=table["pin"],
        pins=pins,
        layout=dict(table["layout"]),
        marker=table["marker"],
        version_files=tuple(table["version_files"]),
        native=tuple(table.get("native", ())),
        requires=tuple(_requirement(entry) for entry in table.get("requires_dist", ())),
        shared=dict(table.get("shared", {})),
        python=table.get("python", "3.12"),
    )


def _pin(version: str, entry: Mapping) -> Pin:
    _refuse_unknown(f"pin {version}", entry, ("wheel", "sdist", "tag", "commit"))
    sdist = entry.get("sdist")
    return Pin(
        version, _wheel(entry["wheel"]), _wheel(sdist) if sdist else None, entry.get("tag"), entry.get("commit")
    )


def _wheel(entry: Mapping) -> WheelPin:
    if not SHA256.fullmatch(entry["sha256"]):
        raise ValueError(f"sha256 of {entry['file']} is not 64 hex digits: {entry['sha256']!r}")
    return WheelPin(entry["file"], entry["sha256"])


def _requirement(entry: Mapping) -> Requirement:
    if not entry["reason"].strip():
        raise ValueError(f"requires_dist {entry['upstream']!r} gives no reason")
    return Requirement(entry["upstream"], entry["replace"], entry["reason"])
