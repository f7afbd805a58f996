# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Read, check and write lock.json: the recorded bytes before and after, for one pin of one target."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from patchset.errors import LockInvalid
from patchset.manifest import Manifest
from patchset.series import load_series
from patchset.types import SHA256, FileLock, Lock, PatchMail, Pin, Target, sha256

SCHEMA = 1


def digest_of(body: Mapping) -> str:
    """sha256 over the canonical JSON of a lock without its digest."""
    content = {k: v for k, v in body.items() if k != "digest"}
    return sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def to_json(lock: Lock) -> bytes:
    """Serialise `lock`; the digest is computed here, whatever `lock.digest` holds."""
    body = {
        "schema": SCHEMA,
        "target": lock.target,
        "version": lock.version,
        "wheel_sha256": lock.wheel_sha256,
        "patches": [{"slug": slug, "sha256": digest} for slug, digest in lock.patches],
        "files": {
            path: {"pre": dict(f.pre), "post": dict(f.post), "mode": f.mode} for path, f in sorted(lock.files.items())
        },
        "overlay": dict(sorted(lock.overlay.items())),
    }
    body["digest"] = digest_of(body)
    return (json.dumps(body, indent=2) + "\n").encode()


def parse(data: bytes, where: Path) -> Lock:
    """Read a lock from its JSON.

    Raises:
        LockInvalid: not JSON, another schema, a missing key, or a digest that does not match the content.
    """
    try:
        body = json.loads(data)
        if body["schema"] != SCHEMA:
            raise LockInvalid("lock of another schema", path=str(where), expected=SCHEMA, found=body["schema"])
        found = digest_of(body)
        lock = Lock(
            target=body["target"],
            version=body["version"],
            wheel_sha256=body["wheel_sha256"],
            patches=tuple((p["slug"], p["sha256"]) for p in body["patches"]),
            files={p: _file_lock(p, f) for p, f in body["files"].items()},
            overlay={p: _hash(h) for p, h in body["overlay"].items()},
            digest=body["digest"],
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LockInvalid(
            "lock.json cannot be read",
            path=str(where),
            found=f"{type(error).__name__}: {error}",
            cause="a merge conflict or a truncated file",
            next_step="git checkout -- the file, or: python apply.py export TARGET",
        ) from error
    if found != lock.digest:
        raise LockInvalid(
            "lock.json was edited by hand or damaged",
            path=str(where),
            expected=f"digest {lock.digest}",
            found=f"digest {found}",
            next_step="git checkout -- the file, or: python apply.py export TARGET",
        )
    return lock


def _file_lock(path: str, entry: Mapping) -> FileLock:
    pre, post = ({source: _hash(h) for source, h in entry[side].items()} for side in ("pre", "post"))
    if not pre or pre.keys() != post.keys():
        raise ValueError(f"{path}: sources before {sorted(pre)}, after {sorted(post)}")
    return FileLock(pre, post, entry["mode"])


def _hash(value: str) -> str:
    if not SHA256.fullmatch(value):
        raise ValueError(f"not a sha256: {value!r}")
    return value


def path_of(manifest: Manifest, target: Target, version: str) -> Path:
    """Where the lock of one pin lies."""
    return manifest.patch_dir(target, version) / "lock.json"


def load(manifest: Manifest, target: Target, pin: Pin) -> tuple[Lock, list[PatchMail]]:
    """The lock of `pin` and the patches it was made from.

    Raises:
        LockInvalid: missing, corrupt, or stale: made from other patches, overlay files or another wheel.
    """
    path = path_of(manifest, target, pin.version)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LockInvalid(
            "no lock for this pin",
            target=target.id,
            path=str(path),
            found=error.strerror,
            next_step=f"python apply.py export {target.id}",
        ) from error
    lock = parse(data, path)
    patches = load_series(path.parent)
    stale = list(_stale(manifest, target, pin, lock, patches))
    if stale:
        raise LockInvalid(
            f"{len(stale)} files differ from what {path.name} was made from",
            target=target.id,
            path=str(path),
            cause="a patch or an overlay file was edited after the lock was written",
            next_step=f"python apply.py export {target.id}",
            details=stale,
        )
    return lock, patches


def _stale(manifest: Manifest, target: Target, pin: Pin, lock: Lock, patches: list[PatchMail]):
    if (lock.target, lock.version) != (target.id, pin.version):
        yield f"made for {lock.target} {lock.version}, used for {target.id} {pin.version}"
    if lock.wheel_sha256 != pin.wheel.sha256:
        yield f"wheel: lock {lock.wheel_sha256}, patchset.toml {pin.wheel.sha256}"
    current = {p.slug: p.sha256 for p in patches}
    if [slug for slug, _ in lock.patches] != [p.slug for p in patches]:
        yield f"series: lock {[slug for slug, _ in lock.patches]}, found {[p.slug for p in patches]}"
    for slug, digest in lock.patches:
        if slug in current and current[slug] != digest:
            yield f"{slug}.patch: lock {digest}, found {current[slug]}"
    overlay = {path: sha256(file.read_bytes()) for path, file in manifest.overlay_files(target).items()}
    for path in sorted(overlay.keys() | lock.overlay.keys()):
        if overlay.get(path) != lock.overlay.get(path):
            yield f"overlay {path}: lock {lock.overlay.get(path, 'none')}, found {overlay.get(path, 'none')}"
