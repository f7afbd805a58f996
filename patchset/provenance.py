# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""What a patched wheel says of itself: provenance.json, which the guard reads, and a CycloneDX SBOM (PEP 770)."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from patchset import lock as lockfile
from patchset.manifest import Manifest
from patchset.types import Lock, PatchMail, Pin, Requirement, Target, sha256

SCHEMA = 1
RECORD_NAME = "fp8-colocate/provenance.json"
SBOM_NAME = "sboms/fp8-colocate.cdx.json"
_NAMESPACE = uuid.UUID("6f0d3a0e-0a55-5d4c-9f5e-8f2d0f1f4c11")  # of this project's serial numbers, made once


@dataclass(frozen=True)
class Content:
    """All that goes into one patched wheel, as far as it differs from upstream's."""

    manifest: Manifest
    target: Target
    pin: Pin
    lock: Lock
    patches: Sequence[PatchMail]
    version: str  # X+fc8.N
    files: Mapping[str, tuple[str, str]]  # upstream path -> sha256 before, after
    version_files: Mapping[str, tuple[str, str]]
    requirements: Sequence[Requirement]
    source: str  # "wheel" (the official one, repacked) or "build" (from a source tree)


def provenance(content: Content) -> bytes:
    """provenance.json: byte for byte the same for the same content."""
    target, lock = content.target, content.lock
    overlay = {p: h for p, h in lock.overlay.items() if target.installed_path(p) is not None}
    body = {
        "schema": SCHEMA,
        "patch_set": content.manifest.name,
        "target": target.id,
        "dist": target.dist,
        "version": lock.version,
        "wheel_version": content.version,
        "digest": lock.digest,
        "upstream": {
            "source": content.source,
            "wheel": content.pin.wheel.file,
            "sha256": content.pin.wheel.sha256,
            "repository": target.repo,
            "tag": content.pin.tag,
            "commit": content.pin.commit,
        },
        "files": _entries(target, content.files),
        "version_files": _entries(target, content.version_files),
        "overlay": dict(sorted(overlay.items())),
        "places": {path: target.installed_path(path) for path in sorted(overlay)},
        "not_installed": sorted(p for p in (*lock.files, *lock.overlay) if target.installed_path(p) is None),
        "patches": [_patch(p) for p in content.patches],
        "overrides": [
            {"upstream": r.upstream, "replace": r.replace, "reason": r.reason} for r in content.requirements
        ],
        "tool": {"revision": content.manifest.revision, "sha256": tool_sha256(content.manifest.home)},
        "lock": json.loads(lockfile.to_json(lock)),
    }
    return (json.dumps(body, indent=1) + "\n").encode()


def _entries(target: Target, files: Mapping[str, tuple[str, str]]) -> dict:
    return {
        path: {"pre": pre, "post": post, "at": target.installed_path(path)}
        for path, (pre, post) in sorted(files.items())
    }


def _patch(patch: PatchMail) -> dict:
    return {
        "slug": patch.slug,
        "sha256": patch.sha256,
        "subject": patch.subject,
        "author": patch.author,
        "files": [f.path for f in patch.files],
        "status": patch.trailer("Upstream-Status"),
        "drop_when": patch.trailer("Drop-When"),
        "origin": patch.trailer("Origin"),
        "licence": patch.trailer("License"),
    }


def tool_sha256(home: Path) -> str:
    """One hash over the tool's own source, by which a wheel can be traced to the tool that made it."""
    files = [home / "apply.py", home / "patchset.toml", *sorted((home / "patchset").glob("*.py"))]
    return sha256("".join(f"{sha256(f.read_bytes())}  {f.name}\n" for f in files).encode())


# SBOM


def sbom(content: Content) -> bytes:
    """A CycloneDX 1.6 document: the wheel, its upstream ancestor, and each patch with its text as pedigree."""
    target, lock = content.target, content.lock
    serial = uuid.uuid5(_NAMESPACE, f"{target.dist} {content.version} {lock.digest}")
    component = {
        "type": "library",
        "bom-ref": _purl(target.dist, content.version),
        "name": target.dist,
        "version": content.version,
        "licenses": [{"license": {"id": target.licence}}],
        "purl": _purl(target.dist, content.version),
        "pedigree": {
            "ancestors": [_ancestor(content)],
            "patches": [_sbom_patch(p) for p in content.patches],
            "notes": f"{content.manifest.name} digest {lock.digest}",
        },
    }
    new = sorted((place, h) for p, h in lock.overlay.items() if (place := target.installed_path(p)) is not None)
    body = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {
            "tools": {
                "components": [
                    {"type": "application", "name": content.manifest.name, "version": str(content.manifest.revision)}
                ]
            },
            "component": component,
        },
        "components": [
            {
                "type": "file",
                "bom-ref": f"file:{place}",
                "name": place,
                "hashes": [{"alg": "SHA-256", "content": h}],
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            }
            for place, h in new
        ],
    }
    return (json.dumps(body, indent=1) + "\n").encode()


def _ancestor(content: Content) -> dict:
    target, pin = content.target, content.pin
    return {
        "type": "library",
        "name": target.dist,
        "version": pin.version,
        "purl": _purl(target.dist, pin.version),
        "hashes": [{"alg": "SHA-256", "content": pin.wheel.sha256}],
        "externalReferences": [{"type": "vcs", "url": target.repo}],
    }


def _sbom_patch(patch: PatchMail) -> dict:
    text = patch.path.read_bytes().decode("utf-8", errors="replace")
    return {"type": "unofficial", "diff": {"text": {"contentType": "text/x-patch", "content": text}}}


def _purl(dist: str, version: str) -> str:
    return f"pkg:pypi/{dist}@{quote(version, safe='.')}"
