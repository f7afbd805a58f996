# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Answers, at run time and fail-closed, whether a package really carries the fp8-colocate patch set.

    from sglang.fp8_colocate import require
    require("sglang")                      # raises PatchSetError unless every recorded file is there, byte for byte

    python -P .../sglang/fp8_colocate.py             what each importable package carries
    python -P .../sglang/fp8_colocate.py --changes   the same with every changed and every new file

The record is the wheel's provenance.json, or the state.json that `apply.py` wrote beside the tree. Nothing of the
package is imported to check it. This one file is installed into each patched package and needs the standard library
alone.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

_STATE = "fp8-colocate"
_WHEEL_RECORD = "provenance.json"
_TREE_RECORD = "state.json"
_SELF = "fp8_colocate.py"


class _Package(NamedTuple):
    module: str
    depth: int  # directories between the root of the installed layout and the module's __init__.py
    target: str  # id in the patch set
    layout: str  # where a source tree keeps the root of the installed layout


_PACKAGES = {
    "sglang": _Package("sglang", 1, "sglang", "python"),
    "megatron-core": _Package("megatron.core", 2, "megatron", ""),
    "megatron-bridge": _Package("megatron.bridge", 2, "megatron-bridge", "src"),
}


class PatchSetError(RuntimeError):
    """The package is not patched, its files differ from their record, or it is not clear which copy is meant."""


class Provenance(NamedTuple):
    """What a package carries."""

    dist: str  # distribution name
    version: str  # upstream version of the pin
    digest: str  # digest of the patch set's lock
    record: Path  # the record that was checked
    num_files: int  # files checked: changed ones, new ones and those that carry the version


def require(dist: str, digest: str | None = None) -> Provenance:
    """Check that the importable `dist` carries the patch set and that no recorded file differs.

    Args:
        dist: "sglang", "megatron-core" or "megatron-bridge".
        digest: full digest or a prefix of at least 12 digits, when one revision of the patch set is needed.

    Returns:
        What was found. The answer is kept for the life of the process; a failure is not, and is checked again.

    Raises:
        PatchSetError: unknown name, not importable, no record, a damaged record, another digest, a missing or
            different file, two dist-info directories, or a patched wheel hidden by another copy of the package.
    """
    found = _checked(dist)
    if digest is not None and (len(digest) < 12 or not found.digest.startswith(digest)):
        raise PatchSetError(
            f"{dist}: another revision of the patch set: expected digest {digest}, "
            f"found {found.digest} ({found.record})"
        )
    return found


@cache
def _checked(dist: str) -> Provenance:
    if dist not in _PACKAGES:
        raise PatchSetError(f"unknown distribution {dist!r}: expected one of {', '.join(_PACKAGES)}")
    root = _import_root(dist)
    record, base = _find_record(dist, root)
    body = _load(dist, record)
    try:
        wanted = _wanted(body)
        if record.name == _WHEEL_RECORD:
            _check_wheel_record(dist, record, body)
        version, digest = str(body["version"]), str(body["digest"])
        if body["dist"] != dist:
            raise ValueError(f"it is for {body['dist']}")
        if not any(at.endswith(f"/{_SELF}") for at in wanted):
            raise ValueError(f"it does not list {_SELF}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PatchSetError(f"{dist}: the record {record} is damaged: {type(error).__name__}: {error}") from error
    for at, expected in wanted.items():
        _check_file(dist, base / at, expected)
    return Provenance(dist, version, digest, record, len(wanted))


def _load(dist: str, record: Path) -> dict:
    try:
        body = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PatchSetError(f"{dist}: the record {record} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(body, dict):
        raise PatchSetError(f"{dist}: the record {record} is not a JSON object")
    return body


def _wanted(body: dict) -> dict[str, str]:
    """Path relative to the record's base -> sha256 that the file must have."""
    entries = [*body["files"].values(), *body.get("version_files", {}).values()]
    return {e["at"]: e["post"] for e in entries} | {body["places"][path]: h for path, h in body["overlay"].items()}


def _check_wheel_record(dist: str, record: Path, body: dict) -> None:
    """A wheel's record holds the lock it was made from: both must say the same, and the lock must match its digest."""
    lock = body["lock"]
    content = {k: v for k, v in lock.items() if k != "digest"}
    found = hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    if not found == lock["digest"] == body["digest"]:
        raise ValueError(f"digest {body['digest']}, its lock says {lock['digest']} and hashes to {found}")
    named = {*body["files"], *body["overlay"], *body["not_installed"]}
    if named != {*lock["files"], *lock["overlay"]}:
        raise ValueError(f"files differ from its lock's: {sorted(named ^ {*lock['files'], *lock['overlay']})}")
    wrong = [p for p, e in body["files"].items() if e["post"] not in lock["files"][p]["post"].values()]
    wrong += [p for p, h in body["overlay"].items() if h != lock["overlay"][p]]
    if wrong:
        raise ValueError(f"hashes differ from its lock's: {wrong}")
    installed = _version_of(record.parent.parent)
    if installed != body["wheel_version"]:
        raise ValueError(f"it is for version {body['wheel_version']}, found in {record.parent.parent.name}")


def _check_file(dist: str, path: Path, expected: str) -> None:
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise PatchSetError(f"{dist}: {path} cannot be read ({error.strerror}); expected sha256 {expected}") from error
    if found != expected:
        raise PatchSetError(
            f"{dist}: {path} is not the patched file: expected sha256 {expected}, found {found}; "
            "install the patched wheel or apply the patch set again"
        )


# Where the package is, and where its record is


def _import_root(dist: str) -> Path:
    """The directory on sys.path from which the package is, or would be, imported; the package itself is not run."""
    package = _PACKAGES[dist]
    loaded = sys.modules.get(package.module)
    spec = getattr(loaded, "__spec__", None) or _find_spec(package.module)
    if spec is None or spec.origin is None:
        raise PatchSetError(
            f"{dist}: {package.module} is not importable; install the patched wheel or apply the patch set"
        )
    return Path(os.path.abspath(spec.origin)).parents[package.depth]


def _find_spec(module: str) -> importlib.machinery.ModuleSpec | None:
    """The spec of a dotted name by way of sys.meta_path, editable finders included, without importing a parent."""
    places: list[str] | None = None
    spec = None
    for at, name in enumerate(module.split(".")):
        full = ".".join(module.split(".")[: at + 1])
        found = (finder.find_spec(full, places) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next((s for s in found if s is not None), None)
        if spec is None:
            return None
        if spec.submodule_search_locations is None and full != module:
            raise PatchSetError(f"{name} is a module, not a package: {spec.origin}")
        places = list(spec.submodule_search_locations or ())
    return spec


def _find_record(dist: str, root: Path) -> tuple[Path, Path]:
    """The record of the package below `root`, and the directory that its paths are relative to."""
    infos = list(_dist_infos(dist, root))
    if len(infos) > 1:
        raise PatchSetError(
            f"{dist}: {len(infos)} dist-info directories in {root}: {', '.join(i.name for i in infos)}"
        )
    _refuse_hidden_wheel(dist, root)
    for record, base in _candidates(dist, root, infos):
        if record.is_file():
            return record, base
    raise PatchSetError(
        f"{dist}: {root} carries no fp8-colocate record: the package there is not patched; "
        "install the patched wheel or apply the patch set"
    )


def _candidates(dist: str, root: Path, infos: list[Path]) -> Iterator[tuple[Path, Path]]:
    package = _PACKAGES[dist]
    for info in infos:
        if _is_editable(info):
            raise PatchSetError(f"{dist}: {info} is of an editable install; its record says nothing of the files here")
        for name in (_WHEEL_RECORD, _TREE_RECORD):
            yield info / _STATE / name, root
    for start in dict.fromkeys((root, root.resolve())):
        tops = [start, start.parent] if package.layout and start.name == package.layout else [start]
        for top in tops:
            yield top / f".{_STATE}" / package.target / _TREE_RECORD, top
            git_directory = _git_dir(top)
            if git_directory is not None:
                yield git_directory / _STATE / package.target / _TREE_RECORD, top


def _refuse_hidden_wheel(dist: str, root: Path) -> None:
    """A patched wheel is installed, yet Python imports another copy: an editable install, or PYTHONPATH."""
    for installed in importlib.metadata.distributions(name=dist):
        info = getattr(installed, "_path", None)
        if info is None or not (Path(info) / _STATE / _WHEEL_RECORD).is_file():
            continue
        if Path(info).parent.resolve() != root.resolve():
            raise PatchSetError(
                f"{dist}: the patched wheel {Path(info).name} is installed in {Path(info).parent}, but Python imports "
                f"{root}: an editable install or PYTHONPATH hides it; remove one of the two"
            )


def _dist_infos(dist: str, root: Path) -> Iterator[Path]:
    name = re.compile(dist.replace("-", "[-_.]") + r"-[^-]+\.dist-info", re.IGNORECASE)
    yield from (path for path in sorted(root.glob("*.dist-info")) if name.fullmatch(path.name))


def _version_of(dist_info: Path) -> str:
    return dist_info.name.removesuffix(".dist-info").rsplit("-", 1)[-1]


def _is_editable(dist_info: Path) -> bool:
    try:
        direct = json.loads((dist_info / "direct_url.json").read_text(encoding="utf-8"))
        return bool(direct["dir_info"]["editable"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _git_dir(top: Path) -> Path | None:
    dot_git = top / ".git"
    if dot_git.is_dir():
        return dot_git
    if dot_git.is_file():
        return (top / dot_git.read_text(encoding="utf-8").strip().removeprefix("gitdir:").strip()).resolve()
    return None


# python -P fp8_colocate.py


def main(arguments: list[str]) -> int:
    """Print what each importable package carries. Returns 0 when all three are patched, else 3."""
    if arguments not in ([], ["--changes"]):
        print("usage: python -P fp8_colocate.py [--changes]", file=sys.stderr)
        return 2
    faults = 0
    for dist in _PACKAGES:
        try:
            found = require(dist)
        except PatchSetError as error:
            faults += 1
            print(f"not patched  {error}")
            continue
        print(
            f"patched      {dist} {found.version}: digest {found.digest[:12]}, {found.num_files} files, {found.record}"
        )
        if arguments:
            print("".join(f"    {line}\n" for line in _changes(_load(dist, found.record))), end="")
    return 3 if faults else 0


def _changes(body: dict) -> Iterator[str]:
    yield from (f"patch    {p['slug']}: {p['subject']}" for p in body.get("patches", ()))
    yield from (f"changed  {e['at']}" for e in [*body["files"].values(), *body.get("version_files", {}).values()])
    yield from (f"new      {at}" for at in body["places"].values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
