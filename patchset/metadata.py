# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Edits of a distribution's METADATA and of the files that hold its version. Bytes in, bytes out, nothing reflowed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from patchset.errors import ManifestInvalid, WheelInvalid
from patchset.manifest import Manifest
from patchset.types import Requirement, Target

_REQUIRES = "Requires-Dist: "
_EXTRA = "Provides-Extra: "
_LICENCE = "License-File: "
_VCS_SWITCH = "NO_VCS_VERSION"


# METADATA


def overrides(manifest: Manifest, target: Target, versions: Mapping[str, str] | None = None) -> list[Requirement]:
    """The overrides of `target`, each `{target id}` in a replacement filled in with that target's patched version.

    Args:
        versions: target id -> upstream version, where it is not the default pin.
    """
    chosen = {t.id: (versions or {}).get(t.id, t.pin) for t in manifest.targets.values()}
    filled = []
    for entry in target.requires:
        line = entry.replace
        for target_id, version in chosen.items():
            line = line.replace(f"{{{target_id}}}", manifest.local_version(version))
        if re.search(r"\{[a-z-]+\}", line):
            raise ManifestInvalid(
                "an override names an unknown target",
                target=target.id,
                expected=" or ".join(f"{{{t}}}" for t in chosen),
                found=entry.replace,
            )
        filled.append(Requirement(entry.upstream, line, entry.reason))
    return filled


def edit(
    data: bytes, version: str, requirements: Sequence[Requirement], licences: Sequence[str], target: str
) -> bytes:
    """METADATA with another version, overridden requirements and more licence files; every other line as it was.

    Args:
        licences: paths below dist-info/licenses/ to name, beside those already named.

    Raises:
        ManifestInvalid: an override's `upstream` is not a requirement of this METADATA, word for word.
        WheelInvalid: METADATA has no header or not one Version.
    """
    head, separator, body = data.decode("utf-8").partition("\n\n")
    lines = head.split("\n")
    if sum(line.startswith("Version: ") for line in lines) != 1:
        raise WheelInvalid("METADATA has not exactly one Version", target=target, found=f"{len(lines)} header lines")
    lines = [f"Version: {version}" if line.startswith("Version: ") else line for line in lines]
    lines = _override(lines, requirements, target)
    named = {line.removeprefix(_LICENCE) for line in lines if line.startswith(_LICENCE)}
    lines = _insert(
        lines, [f"{_LICENCE}{path}" for path in licences if path not in named], (_LICENCE, "License: ", "Version: ")
    )
    return ("\n".join(lines) + (separator or "\n\n") + body).encode("utf-8")


def _override(lines: list[str], requirements: Sequence[Requirement], target: str) -> list[str]:
    swapped = {r.upstream: r for r in requirements if r.upstream}
    present = {line.removeprefix(_REQUIRES) for line in lines if line.startswith(_REQUIRES)}
    for upstream, entry in swapped.items():
        if upstream not in present:
            raise _no_such_requirement(entry, present, target)
    result: list[str] = []
    for line in lines:
        entry = swapped.get(line.removeprefix(_REQUIRES)) if line.startswith(_REQUIRES) else None
        if entry is None:
            result.append(line)
        elif entry.replace:
            result.append(_REQUIRES + entry.replace)
    added = [_REQUIRES + r.replace for r in requirements if not r.upstream]
    offered = {line.removeprefix(_EXTRA) for line in result if line.startswith(_EXTRA)}
    wanted = dict.fromkeys(
        extra for r in requirements for extra in re.findall(r"""extra == ["']([^"']+)["']""", r.replace)
    )
    added += [_EXTRA + extra for extra in wanted if extra not in offered]
    return _insert(result, added, (_REQUIRES, _EXTRA, "Version: "))


def _insert(lines: list[str], added: list[str], after: Sequence[str]) -> list[str]:
    """`added` behind the last header that starts with the first prefix of `after` that occurs at all."""
    for prefix in after:
        found = [i for i, line in enumerate(lines) if line.startswith(prefix)]
        if found:
            at = found[-1] + 1
            while at < len(lines) and lines[at][:1] in (" ", "\t"):
                at += 1
            return [*lines[:at], *added, *lines[at:]]
    return [*lines, *added]


def _no_such_requirement(entry: Requirement, present: set[str], target: str) -> ManifestInvalid:
    name = normalise(requirement_name(entry.upstream))
    near = sorted(line for line in present if normalise(requirement_name(line)) == name)
    return ManifestInvalid(
        "an override names a requirement that upstream does not have",
        target=target,
        path="patchset.toml",
        expected=f"a line of METADATA: {' or '.join(near) or f'none is for {name}'}",
        found=entry.upstream,
        cause="another upstream version",
        next_step=f"mend [[target.{target}.requires_dist]] in patchset.toml",
    )


def requirement_name(line: str) -> str:
    """The distribution that a requirement line is for, as it is spelt there."""
    match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", line)
    return match[0] if match else line


def normalise(name: str) -> str:
    """The PEP 503 form of a distribution name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def header(data: bytes, name: str) -> list[str]:
    """Values of one METADATA header field, unfolded lines only, in order."""
    head = data.decode("utf-8", errors="replace").partition("\n\n")[0]
    return [line.removeprefix(f"{name}: ").rstrip("\r") for line in head.split("\n") if line.startswith(f"{name}: ")]


# Version files


class Literals(NamedTuple):
    """What a version file assigns, read without running it."""

    version: str
    version_tuple: tuple[int | str, ...] | None


def version_tuple(version: str) -> tuple[int | str, ...]:
    """The tuple form that setuptools_scm writes: release numbers, then the other parts as words.

    "0.5.17+fc8.1" -> (0, 5, 17, "fc8.1")
    """
    public, _, local = version.partition("+")
    parts: list[int | str] = [int(part) if part.isdigit() else part for part in public.split(".")]
    return (*parts, local) if local else tuple(parts)


def set_version(data: bytes, version: str, path: str) -> bytes:
    """A `_version.py` or `package_info.py` whose `__version__` is the literal `version` wherever it is imported.

    The code that asks git for a hash and appends it is taken out: it would answer for whatever repository encloses the
    installation, and make an invalid version of X+Y+Z.

    Raises:
        WheelInvalid: the file is of another shape than this knows.
    """
    tree = _parse(data, path)
    lines: list[bytes | None] = list(data.splitlines(keepends=True))
    asks = [node for node in tree.body if isinstance(node, ast.If) and _VCS_SWITCH in ast.unparse(node.test)]
    helpers = {alias for node in tree.body for alias in _private_import(node)} if asks else set()
    for node in tree.body:
        if node in asks or helpers & set(_private_import(node)):
            _replace(lines, node, None)
        names = _assigned(node)
        if "__version__" in names:
            _replace(lines, node, " = ".join(names) + f" = {version!r}")
        if "__version_tuple__" in names:
            _replace(lines, node, " = ".join(names) + f" = {version_tuple(version)!r}")
    edited = b"".join(line for line in lines if line is not None)
    _check_literals(edited, version, path, helpers)
    return edited


def literals(data: bytes, path: str) -> Literals:
    """`__version__` and `__version_tuple__` of a version file.

    Raises:
        WheelInvalid: `__version__` is not assigned exactly once, by a literal.
    """
    tree = _parse(data, path)
    found: dict[str, list] = {"__version__": [], "__version_tuple__": []}
    for node in ast.walk(tree):
        for name in _assigned(node):
            if name in found:
                try:
                    found[name].append(ast.literal_eval(node.value))  # type: ignore[attr-defined]
                except ValueError:
                    found[name].append(None)
    stamps = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.AugAssign) and ast.unparse(node.target) == "__version__"
    ]
    if stamps or len(found["__version__"]) != 1 or not isinstance(found["__version__"][0], str):
        raise WheelInvalid(
            "a version file does not assign __version__ once, as a literal",
            path=path,
            found=f"{found['__version__']}, {len(stamps)} times added to",
        )
    tuples = found["__version_tuple__"]
    return Literals(found["__version__"][0], tuples[0] if tuples else None)


def _parse(data: bytes, path: str) -> ast.Module:
    try:
        return ast.parse(data)
    except (SyntaxError, ValueError) as error:
        raise WheelInvalid("a version file is not Python", path=path, found=str(error)) from error


def _assigned(node: ast.AST) -> list[str]:
    if not isinstance(node, ast.Assign) or not all(isinstance(t, ast.Name) for t in node.targets):
        return []
    return [target.id for target in node.targets if isinstance(target, ast.Name)]


def _private_import(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (a.asname for a in node.names if a.asname and a.asname.startswith("_"))


def _replace(lines: list[bytes | None], node: ast.stmt, text: str | None) -> None:
    end = node.end_lineno or node.lineno
    for at in range(node.lineno - 1, end):
        lines[at] = None
    if text is not None:
        lines[node.lineno - 1] = f"{text}\n".encode()
        return
    while end < len(lines) and (lines[end] or b"x").isspace():  # the blank lines that set it apart
        lines[end] = None
        end += 1


def _check_literals(data: bytes, version: str, path: str, gone: set[str]) -> None:
    found = literals(data, path)
    left = sorted({n.id for n in ast.walk(ast.parse(data)) if isinstance(n, ast.Name)} & gone)
    if found.version != version or found.version_tuple not in (None, version_tuple(version)) or left:
        raise WheelInvalid(
            "the version cannot be written into this file",
            path=path,
            expected=f"__version__ = {version!r}",
            found=f"{found}, still used: {left}",
            cause="upstream changed how it states its version",
        )
