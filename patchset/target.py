# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Find out what a path on the command line is: a checkout, a source tree, a site-packages, an unpacked wheel."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote, urlparse

from patchset import git
from patchset.errors import UsageError, os_failure
from patchset.types import Kind, Located, Target

STATE_NAME = "fp8-colocate"


def locate(target: Target, path: Path) -> Located:
    """Look at `path` and say what it is.

    Accepts the root of a checkout or source tree, a site-packages, a virtual environment, an unpacked wheel, or the
    package directory inside any of them.

    Raises:
        UsageError: nothing of `target` is there, or it is a wheel file or an editable install.
    """
    try:
        root = path.expanduser().resolve(strict=True)
    except (FileNotFoundError, NotADirectoryError, RuntimeError) as error:  # RuntimeError: a symlink loop, ~nobody
        raise UsageError("no such path", target=target.id, path=str(path), found=str(error)) from error
    except OSError as error:
        raise os_failure("a path cannot be looked at", error, path=path, target=target.id) from error
    if root.is_file():
        raise UsageError(
            "the path is a file; a tree is patched, a wheel is repacked",
            target=target.id,
            path=str(path),
            next_step=f"python apply.py wheel {target.id} --from {path}",
        )
    if not root.is_dir():
        raise UsageError("neither a file nor a directory", target=target.id, path=str(path), expected="a directory")
    candidates = list(dict.fromkeys(_candidates(target, root)))
    _refuse_two_pythons(target, root)
    package: Located | None = None
    for candidate in candidates:
        found = _look(target, candidate)
        if found is not None and found.kind is not Kind.PACKAGE:
            return found
        # the python/ or src/ directory of a checkout looks like a package directory: the tree around it is meant
        package = package or found
    if package is None:
        raise _not_found(target, root, candidates)
    return package


def _refuse_two_pythons(target: Target, root: Path) -> None:
    places = sorted(root.glob("lib/python*/site-packages")) if (root / "pyvenv.cfg").is_file() else []
    holding = [str(place) for place in places if _look(target, place) is not None]
    if len(holding) > 1:
        raise UsageError(
            f"{len(holding)} Pythons of this virtual environment hold {target.dist}",
            target=target.id,
            path=str(root),
            found=", ".join(holding),
            next_step=f"name one: python apply.py --{target.id} {holding[0]}",
        )


def _candidates(target: Target, root: Path) -> Iterator[Path]:
    yield root
    if (root / "pyvenv.cfg").is_file():
        yield from sorted(root.glob("lib/python*/site-packages"))
    # a package directory: climb as far as the longest prefix of the marker is deep
    for marker in (target.marker, target.installed_path(target.marker) or target.marker):
        parts = Path(marker).parent.parts
        for depth in range(len(parts), 0, -1):
            if root.parts[-depth:] == parts[:depth]:
                yield root.parents[depth - 1]


def _look(target: Target, root: Path) -> Located | None:
    installed = target.installed_path(target.marker) or target.marker
    upstream_here, installed_here = (root / target.marker).is_file(), (root / installed).is_file()
    dist_info = _dist_info(target, root) if installed_here else None
    if dist_info is not None:
        kind = Kind.SITE if (dist_info / "INSTALLER").is_file() else Kind.WHEEL
        state = dist_info / STATE_NAME if kind is Kind.SITE else _plain_state(target, root)
        return Located(target, root, kind, state, dist_info, _dist_version(dist_info))
    if upstream_here:
        git_directory = git.git_dir(root)
        if git_directory is not None:
            return Located(target, root, Kind.CHECKOUT, git_directory / STATE_NAME / target.id, None, None)
        if target.marker != installed or _is_source(root):
            return Located(target, root, Kind.SOURCE, _plain_state(target, root), None, _pkg_info_version(root))
    if installed_here:
        return Located(target, root, Kind.PACKAGE, _plain_state(target, root), None, _pkg_info_version(root))
    return None


def _plain_state(target: Target, root: Path) -> Path:
    return root / f".{STATE_NAME}" / target.id


def _is_source(root: Path) -> bool:
    return any((root / name).is_file() for name in ("PKG-INFO", "pyproject.toml", "setup.py"))


def _dist_info(target: Target, root: Path) -> Path | None:
    name = re.sub(r"[-_.]+", "[-_.]", re.escape(target.dist).replace(r"\-", "-"))
    pattern = re.compile(rf"{name}-[^-]+\.dist-info", re.IGNORECASE)
    try:
        found = sorted(p for p in root.iterdir() if pattern.fullmatch(p.name) and p.is_dir())
    except OSError as error:
        raise os_failure("a directory cannot be listed", error, path=root, target=target.id) from error
    if len(found) > 1:
        raise UsageError(
            f"{len(found)} dist-info directories of {target.dist} in one site-packages",
            target=target.id,
            path=str(root),
            found=", ".join(p.name for p in found),
            cause="a broken uninstall",
            next_step=f"pip install --force-reinstall {target.dist}=={target.pin}",
        )
    return found[0] if found else None


def _dist_version(dist_info: Path) -> str:
    return dist_info.name.removesuffix(".dist-info").rsplit("-", 1)[1]


def _pkg_info_version(root: Path) -> str | None:
    for name in ("PKG-INFO", "python/PKG-INFO"):
        if (root / name).is_file():
            match = re.search(r"(?m)^Version: (\S+)", (root / name).read_text(encoding="utf-8", errors="replace"))
            if match:
                return match[1]
    return None


def tree_version(found: Located) -> str | None:
    """What the tree says its version is, from dist-info, PKG-INFO or a version file; for messages only."""
    if found.version:
        return found.version
    for upstream_path in (*found.target.version_files, found.target.marker):
        file = found.place(upstream_path)
        if file is None or not file.is_file():
            continue
        content = file.read_text(encoding="utf-8", errors="replace")
        numbers = [re.search(rf"(?m)^{word} = (\d+)", content) for word in ("MAJOR", "MINOR", "PATCH")]
        if all(numbers):
            return ".".join(n[1] for n in numbers if n)
        match = re.search(r"""(?m)^__version__ = (?:version = )?["']([^"']+)["']""", content)
        if match:
            return match[1]
    return None


def editable_origin(dist_info: Path) -> Path | None:
    """Source directory of an editable install, from direct_url.json; None for a normal one."""
    try:
        direct = json.loads((dist_info / "direct_url.json").read_text(encoding="utf-8"))
        editable = direct.get("dir_info", {}).get("editable")
        return Path(unquote(urlparse(direct["url"]).path)) if editable else None
    except (OSError, ValueError, KeyError, AttributeError):  # absent, or not what the standard says
        return None


def _not_found(target: Target, root: Path, candidates: Sequence[Path]) -> UsageError:
    dist_infos = [d for d in (_dist_info(target, candidate) for candidate in candidates) if d is not None]
    origin = next((o for o in map(editable_origin, dist_infos) if o is not None), None)
    if origin is not None:
        return UsageError(
            f"{target.dist} is an editable install here; its files lie elsewhere",
            target=target.id,
            path=str(root),
            found=str(origin),
            next_step=f"python apply.py --{target.id} {origin}",
        )
    installed = target.installed_path(target.marker)
    return UsageError(
        f"no {target.dist} here",
        target=target.id,
        path=str(root),
        expected=f"{target.marker} (checkout, sdist) or {installed} (site-packages, unpacked wheel)",
        found="neither",
    )
