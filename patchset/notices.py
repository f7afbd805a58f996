# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""The licence texts and the NOTICE that a patched wheel carries in dist-info/licenses/ (PEP 639)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from patchset.archive import Wheel
from patchset.errors import ManifestInvalid
from patchset.manifest import Manifest
from patchset.types import Lock, PatchMail, Target

_OURS = "Apache-2.0"  # of the tool, the overlay and the guard
_SOURCES = (".py", ".pyi", ".cpp", ".cc", ".cu", ".cuh", ".h", ".hpp", ".rs")
_COPYRIGHT = re.compile(
    rb"^[ \t]*(?:#|//|\*)[ \t]*(Copyright (?:\(c\) )?\d{4}.*?|Copyright \(c\) .*?)[ \t]*\r?$", re.MULTILINE
)
_PLACEHOLDER = re.compile(r"(?m)^Copyright .*<(?:year|owner).*\n+")


def licence_files(
    manifest: Manifest, target: Target, wheel: Wheel, lock: Lock, patches: Sequence[PatchMail], changed: Sequence[str]
) -> dict[str, bytes]:
    """Files to add below dist-info/licenses/: both licences' texts, a NOTICE, and upstream's where it ships none.

    Args:
        changed: installed paths that differ from upstream's, new files not among them.

    Raises:
        ManifestInvalid: LICENSES/ lacks a text.
    """
    files = {f"fp8-colocate/{name}.txt": _text(manifest, name) for name in {_OURS, target.licence}}
    files["fp8-colocate/NOTICE"] = _notice(manifest, target, lock, patches, changed).encode()
    if not any(name.startswith(f"{wheel.dist_info}/licenses/") for name in wheel.members):
        files["LICENSE"] = _missing_licence(manifest, target, wheel)
    return dict(sorted(files.items()))


def _text(manifest: Manifest, name: str) -> bytes:
    path = manifest.home / "LICENSES" / f"{name}.txt"
    try:
        return path.read_bytes()
    except OSError as error:
        raise ManifestInvalid(
            "a licence text is missing; a wheel must not be passed on without it", path=str(path), found=error.strerror
        ) from error


def _notice(
    manifest: Manifest, target: Target, lock: Lock, patches: Sequence[PatchMail], changed: Sequence[str]
) -> str:
    head = manifest.home / "NOTICE"
    own = head.read_text(encoding="utf-8").rstrip() + "\n\n" if head.is_file() else ""
    new = [p for path in lock.overlay if (p := target.installed_path(path)) is not None]
    parts = [
        f"{own}This wheel is a modified version of {target.dist} {lock.version} ({target.repo}).",
        "It is not made, reviewed or endorsed by the authors of that project.",
        f"Changed by {manifest.name}, digest {lock.digest}; details in fp8-colocate/provenance.json of the dist-info.",
        "\nPatches, with the licence of the files they change:",
        *(f"  {p.slug} ({p.trailer('License') or target.licence}): {p.subject}" for p in patches),
        "\nModified files:",
        *(f"  {path}" for path in sorted(changed)),
        f"\nNew files ({_OURS} unless their header says otherwise):",
        *(f"  {path}" for path in sorted(new)),
    ]
    return "\n".join(parts) + "\n"


def _missing_licence(manifest: Manifest, target: Target, wheel: Wheel) -> bytes:
    """The licence that upstream's wheel leaves out, under the copyright lines of the files themselves."""
    sources = (m.data for n, m in wheel.members.items() if n.endswith(_SOURCES))
    found = {
        " ".join(line.decode("utf-8", errors="replace").split()) for s in sources for line in _COPYRIGHT.findall(s)
    }
    body = _PLACEHOLDER.sub("", _text(manifest, target.licence).decode("utf-8"))
    head = (
        f"{target.dist} {wheel.version} ({target.repo}). Upstream's wheel carries no licence file; the terms below\n"
        "apply to all files unless their own header says otherwise. Copyright lines found in the files:\n"
    )
    return "\n".join([head, *sorted(found), "", target.licence, "", body]).encode()
