# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Answers, at run time and fail-closed, whether a package really carries the fp8-colocate patch set.

    from sglang.fp8_colocate import require
    require("sglang")                      # raises PatchSetError unless every recorded file is there, byte for byte

The record is the wheel's provenance or what `apply.py` wrote beside the tree. Nothing of the package is imported.
This one file is installed into each patched package.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

_STATE = "fp8-colocate"
_RECORDS = ("provenance.json", "state.json")
_PACKAGES = {
    "sglang": ("sglang", "sglang/__init__.py", "python"),
    "megatron-core": ("megatron.core", "megatron/core/__init__.py", "."),
    "megatron-bridge": ("megatron.bridge", "megatron/bridge/__init__.py", "src"),
}


class PatchSetError(RuntimeError):
    """The package is not patched, or its files differ from their record."""


class Provenance(NamedTuple):
    """What a package carries."""

    dist: str  # distribution name
    version: str  # upstream version of the pin
    digest: str  # digest of the patch set's lock
    record: Path  # the record that was checked
    num_files: int  # files checked, patched and new ones


def require(dist: str, digest: str | None = None) -> Provenance:
    """Check that the importable `dist` carries the patch set and that no recorded file differs.

    Args:
        dist: "sglang", "megatron-core" or "megatron-bridge".
        digest: full digest or a prefix of at least 12 digits, when one revision of the patch set is needed.

    Returns:
        What was found. The answer is kept for the life of the process.

    Raises:
        PatchSetError: unknown name, not importable, no record, another digest, or a missing or different file.
    """
    found = _checked(dist)
    if digest is not None and (len(digest) < 12 or not found.digest.startswith(digest)):
        raise PatchSetError(
            f"{dist}: another revision of the patch set: expected digest {digest}, found {found.digest} ({found.record})"
        )
    return found


@lru_cache(maxsize=None)
def _checked(dist: str) -> Provenance:
    if dist not in _PACKAGES:
        raise PatchSetError(f"unknown distribution {dist!r}: expected one of {', '.join(_PACKAGES)}")
    root = _import_root(dist)
    record = _find_record(dist, root)
    try:
        body = json.loads(record.read_text(encoding="utf-8"))
        wanted = {entry["at"]: entry["post"] for entry in body["files"].values()}
        wanted |= {body["places"][path]: digest for path, digest in body["overlay"].items()}
        version, digest = body["version"], body["digest"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PatchSetError(f"{dist}: the record {record} cannot be read: {type(error).__name__}: {error}") from error
    base = _base(record, root, dist)
    for at, expected in wanted.items():
        _check_file(dist, base / at, expected)
    return Provenance(dist, version, digest, record, len(wanted))


def _check_file(dist: str, path: Path, expected: str) -> None:
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise PatchSetError(f"{dist}: {path} cannot be read ({error.strerror}); expected sha256 {expected}") from error
    if found != expected:
        raise PatchSetError(
            f"{dist}: {path} is not the patched file: expected sha256 {expected}, found {found}; apply the patch set again"
        )


def _import_root(dist: str) -> Path:
    """The directory on sys.path from which the package would be imported; the package itself is not run."""
    module, marker, _ = _PACKAGES[dist]
    parent, _, last = module.rpartition(".")
    try:
        places = importlib.util.find_spec(parent).submodule_search_locations if parent else None
        spec = importlib.machinery.PathFinder.find_spec(module, places)
    except (ImportError, AttributeError) as error:
        raise PatchSetError(f"{dist}: {module} cannot be imported: {error}") from error
    if spec is None or spec.origin is None:
        raise PatchSetError(f"{dist}: {module} is not importable; install the patched wheel or apply the patch set")
    return Path(spec.origin).resolve().parents[len(Path(marker).parts) - 1]


def _find_record(dist: str, root: Path) -> Path:
    candidates = [d / _STATE / name for d in _dist_infos(dist, root) for name in _RECORDS]
    target = "megatron" if dist == "megatron-core" else dist
    layout = Path(_PACKAGES[dist][2])
    tops = [root, root.parent] if layout.name and root.name == layout.name else [root]
    for top in tops:
        candidates.append(top / f".{_STATE}" / target / "state.json")
        git_directory = _git_dir(top)
        if git_directory is not None:
            candidates.append(git_directory / _STATE / target / "state.json")
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise PatchSetError(f"{dist}: {root} carries no fp8-colocate record: the package there is not patched")


def _dist_infos(dist: str, root: Path) -> list[Path]:
    name = dist.replace("-", "_")
    return [
        path
        for path in sorted(root.glob("*.dist-info"))
        if path.name.lower().replace("-", "_").startswith(f"{name}_") and path.name.count("-") == 2
    ]


def _git_dir(top: Path) -> Path | None:
    dot_git = top / ".git"
    if dot_git.is_dir():
        return dot_git
    if dot_git.is_file():
        return (top / dot_git.read_text(encoding="utf-8").strip().removeprefix("gitdir:").strip()).resolve()
    return None


def _base(record: Path, root: Path, dist: str) -> Path:
    """The directory that the record's paths are relative to."""
    in_dist_info = record.parent.parent.name.endswith(".dist-info")
    layout = Path(_PACKAGES[dist][2])
    if in_dist_info or not layout.name or root.name != layout.name:
        return root
    return root.parent if not (root / f".{_STATE}").is_dir() else root


def main() -> None:
    """Print what each importable package carries: `python -m sglang.fp8_colocate`."""
    for dist in _PACKAGES:
        try:
            found = require(dist)
        except PatchSetError as error:
            print(f"not patched  {error}")
        else:
            installed = next(iter(importlib.metadata.distributions(name=dist)), None)
            shown = installed.version if installed else found.version
            print(f"patched      {dist} {shown}: digest {found.digest[:12]}, {found.num_files} files, {found.record}")


if __name__ == "__main__":
    main()
