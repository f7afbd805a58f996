# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""`lint`: check patches, overlay, series, locks and texts; print the size of every patch. Fast: it is a commit hook.

Every check yields findings; all of them are listed. A finding names the file, the rule and what to do about it.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import os
import re
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from patchset import git, lock, scratch
from patchset.errors import LintFailed, PatchsetError, SeriesInvalid
from patchset.manifest import Manifest, cache_dir
from patchset.report import Report
from patchset.series import parse_mail, read_series
from patchset.types import FileDiff, Hunk, PatchMail, Pin, Target

MAX_ADDED = 40  # lines; a wedge that needs more calls for an overlay module
_STATUS = re.compile(r"Pending|(Submitted|Backport|Denied) \[https://[^\s\]]+\]|Inappropriate \[[^\]]+\]")
_ORIGIN = re.compile(r"vendor|(upstream|backport|other) https://\S+")
_ONCE = ("Upstream-Status", "Drop-When", "Origin", "License")
_FAILS = "Fails-Without"
_OVERLAY = "Overlay"  # what `upstream` takes along with the patch
# trailers of people, kept as they came; whether somebody signs off is no business of this tool
_PEOPLE = (
    "Signed-off-by",
    "Co-authored-by",
    "Reviewed-by",
    "Acked-by",
    "Tested-by",
    "Reported-by",
    "Suggested-by",
    "Cc",
)
_PEOPLE += ("Link", "Fixes")
_IMPORT = re.compile(r"\s*(import\s+\w|from\s+\S+\s+import\b)")
_INDEX = re.compile(rb"(?m)^index ([0-9a-f]+)\.\.([0-9a-f]+)(?: \d+)?$")
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_.+@/-]+")
_SUBJECT = re.compile(r"[\w./, -]+: [^\sA-Z].*[^.\s]|[\w./, -]+: [A-Z0-9_]{2,}.*[^.\s]")
# a letter in brackets, so that this file does not find itself
_NOTE = re.compile(r"\[[N]ote: ([^\]\n]*[^\]\n.][^\]\n]*)\]")
_NOTE_START = re.compile(r"\s*(?:[#*/]+|\"\"\"|-)?\s*\[[N]ote: ")
_SPDX = b"SPDX-License-" + b"Identifier: "  # in two parts: a licence checker reads this file too
_MACHINE = re.compile(r"(?<![\w.:/*-])/(?:[r]oot|[w]ork)/|\.[p]yenv/|[P]YENV_VERSION=")
_SESSION = re.compile(
    r"\bthis [w]orkplace\b|\b(?:in|of|by) (?:this|another|an earlier) [s]ession of the project\b", re.I
)


@dataclass(frozen=True)
class Finding:
    """One thing to mend, or with `warning` to think about."""

    place: str
    rule: str
    text: str
    warning: bool = False

    def __str__(self) -> str:
        return f"{self.place}: {self.rule}: {self.text}"

    def as_dict(self) -> dict:
        return {"file": self.place, "rule": self.rule, "text": self.text, "warning": self.warning}


def configure(parser: argparse.ArgumentParser, manifest: Manifest) -> None:
    """`lint` takes no arguments of its own."""


def execute(args: argparse.Namespace, manifest: Manifest, report: Report) -> int:
    findings: list[Finding] = []
    sizes: list[dict] = []
    for target in manifest.targets.values():
        for pin in target.pins.values():
            patches, found = _read_pin(manifest, target, pin)
            findings += [*found, *_pin_findings(manifest, target, pin, patches)]
            sizes += [_size(target, pin, patch) for patch in patches]
        findings += overlay_findings(manifest, target)
    findings += [*_strays(manifest), *_revision(manifest), *text_findings(manifest.home)]
    _say(sizes, findings, report)
    errors = list(dict.fromkeys(str(f) for f in findings if not f.warning))
    if errors:
        raise LintFailed(
            f"{len(errors)} things to mend",
            path=str(manifest.home),
            next_step="mend them and run lint again",
            details=errors,
        )
    return 0


def _say(sizes: Sequence[dict], findings: Sequence[Finding], report: Report) -> None:
    for pin in dict.fromkeys((s["target"], s["version"]) for s in sizes):
        mine = [s for s in sizes if (s["target"], s["version"]) == pin]
        for size in mine:
            report.line(
                f"{pin[0]} {pin[1]}  {size['slug']:<44} +{size['added']} -{size['removed']}  {size['files']} files"
            )
        added, removed = (sum(s[side] for s in mine) for side in ("added", "removed"))
        report.line(f"{pin[0]} {pin[1]}  {len(mine)} patches, +{added} -{removed}")
    for finding in findings:
        if finding.warning:
            report.line(f"warning: {finding}")
    report.put(patches=list(sizes), findings=[f.as_dict() for f in findings])


def _size(target: Target, pin: Pin, patch: PatchMail) -> dict:
    added, removed = (sum(getattr(f, side) for f in patch.files) for side in ("added", "removed"))
    names = {"target": target.id, "version": pin.version, "slug": patch.slug}
    return names | {"added": added, "removed": removed, "files": len(patch.files)}


# Series and lock


def _read_pin(manifest: Manifest, target: Target, pin: Pin) -> tuple[list[PatchMail], list[Finding]]:
    """The patches that can be read, in order, and what is wrong with the series, the others, and the lock."""
    directory = manifest.patch_dir(target, pin.version)
    findings: list[Finding] = []
    patches: list[PatchMail] = []
    slugs: list[str] = []
    try:
        slugs = read_series(directory)
    except SeriesInvalid as error:
        findings.append(_of(error, "series", _name(manifest, directory / "series")))
    for slug in slugs:
        try:
            patches.append(parse_mail(directory / f"{slug}.patch"))
        except SeriesInvalid as error:
            findings.append(_of(error, "mail", _name(manifest, directory / f"{slug}.patch")))
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if path.name not in ("series", "lock.json", *(f"{slug}.patch" for slug in slugs)):
            text = "not in the series; add its slug there or remove the file"
            findings.append(Finding(_name(manifest, path), "series", text))
    if not findings:
        try:
            lock.load(manifest, target, pin)
        except (PatchsetError, OSError) as error:
            findings.append(_of(error, "lock", _name(manifest, directory / "lock.json")))
    return patches, findings


def _name(manifest: Manifest, path: Path) -> str:
    return path.relative_to(manifest.home).as_posix()


def _of(error: PatchsetError | OSError, rule: str, place: str) -> Finding:
    """One line of an error of ours."""
    if not isinstance(error, PatchsetError):
        return Finding(place, rule, f"{error.strerror}: {error.filename}")
    more = [f"{name} {error.fields[name]}" for name in ("expected", "found", "next") if error.fields[name]]
    return Finding(place, rule, "; ".join([error.what, *more, *error.details]))


def _strays(manifest: Manifest) -> Iterator[Finding]:
    """Directories below patches/ and overlay/ that no target and no pin owns."""
    owned = {"patches": {t.id for t in manifest.targets.values()}, "overlay": {*manifest.targets, "shared"}}
    for top, names in owned.items():
        for path in sorted((manifest.home / top).glob("*")):
            if path.name not in names:
                yield Finding(_name(manifest, path), "stray", "belongs to no target of patchset.toml")
    for target in manifest.targets.values():
        for path in sorted((manifest.home / "patches" / target.id).glob("*")):
            if path.name not in target.pins:
                yield Finding(_name(manifest, path), "stray", f"{target.id} has no such pin in patchset.toml")


def _revision(manifest: Manifest) -> Iterator[Finding]:
    if manifest.revision < 1:
        yield Finding("patchset.toml", "revision", f"counted from 1, found {manifest.revision}")
    project = manifest.home / "pyproject.toml"
    if project.is_file():
        version = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {}).get("version")
        if version != str(manifest.revision):
            yield Finding(
                "pyproject.toml", "revision", f"version {version!r}, patchset.toml has revision {manifest.revision}"
            )


# Patches


def _pin_findings(manifest: Manifest, target: Target, pin: Pin, patches: Sequence[PatchMail]) -> Iterator[Finding]:
    for patch in patches:
        place = _name(manifest, patch.path)
        for rule, text in (
            *_mail_rules(patch),
            *_trailer_rules(patch, target),
            *_test_rules(manifest, target, patch),
            *(found for diff in patch.files for found in _diff_rules(diff, target)),
        ):
            yield Finding(place, rule, text)
        added = sum(diff.added for diff in patch.files)
        if added > MAX_ADDED:
            text = f"{added} added lines, more than {MAX_ADDED}: move the logic into an overlay module"
            yield Finding(place, "size", text, warning=True)
        native = [d.path for d in patch.files if d.path.startswith(target.native or ("\0",))]
        if native:
            text = f"{', '.join(native)}: only `wheel --build` can bring native code"
            yield Finding(place, "native", text, warning=True)


def _mail_rules(patch: PatchMail) -> Iterator[tuple[str, str]]:
    raw = patch.path.read_bytes()
    head = raw.partition(b"\ndiff --git ")[0]
    if not raw.startswith(b"From " + b"0" * 40 + b" "):
        yield "mail", "the first line names a commit; export with format-patch --zero-commit"
    if re.search(rb"(?m)^Subject: \[PATCH[^\]]+\]", head):
        yield "mail", "the subject is numbered; export with format-patch -N"
    if re.search(rb"(?m)^ .*\| +\d+ [+-]*$", head):
        yield "mail", "a diffstat; export with format-patch --no-stat"
    if re.search(rb"\n-- \n[^\n]*\n*\Z", raw):
        yield "mail", "a signature; export with format-patch --no-signature"
    hashes = [h for pair in _INDEX.findall(raw) for h in pair]
    if len(hashes) < 2 * len(patch.files) or any(len(h) != 40 for h in hashes):
        yield "full-index", "blob ids must have 40 digits; export with format-patch --full-index"
    if not _SUBJECT.fullmatch(patch.subject):
        yield "subject", f"expected '<area>: <imperative, lower case>' without a full stop, found {patch.subject!r}"
    if not patch.body.strip():
        yield "message", "says no reason: why upstream cannot do it, and why an overlay alone is not enough"


def _trailer_rules(patch: PatchMail, target: Target) -> Iterator[tuple[str, str]]:
    if not patch.trailers:
        yield "trailers", f"the last paragraph must be trailers: {', '.join((*_ONCE, _FAILS, _OVERLAY))}"
        return
    for name in _ONCE:
        count = len(patch.trailer_values(name))
        if count != 1:
            yield "trailers", f"{name} must stand once, found {count} times"
    for name in dict.fromkeys(name for name, _ in patch.trailers):
        if name not in (*_ONCE, _FAILS, _OVERLAY, *_PEOPLE):
            yield "trailers", f"unknown trailer {name}; known: {', '.join((*_ONCE, _FAILS, _OVERLAY, *_PEOPLE))}"
    forms = "Pending, Submitted [url], Backport [url], Denied [url] or Inappropriate [reason]"
    wanted = (
        ("Upstream-Status", _STATUS, forms),
        ("Origin", _ORIGIN, "vendor, upstream URL, backport URL or other URL"),
        ("License", re.compile(re.escape(target.licence)), f"{target.licence}, the licence of {target.id}'s files"),
    )
    for name, pattern, expected in wanted:
        for value in patch.trailer_values(name):
            if not pattern.fullmatch(value):
                yield "trailers", f"{name}: expected {expected}; found {value!r}"


def _test_rules(manifest: Manifest, target: Target, patch: PatchMail) -> Iterator[tuple[str, str]]:
    """Each Fails-Without names a test that is there."""
    tests = patch.trailer_values(_FAILS)
    if not tests:
        yield "fails-without", f"no {_FAILS} trailer: name a test that fails without this patch"
    for test in tests:
        path, _, inside = test.partition("::")
        file = manifest.home / "overlay" / target.id / path
        if not inside:
            yield "fails-without", f"expected path::test, found {test!r}"
        elif not _PLAIN_PATH.fullmatch(path) or ".." in path or not file.is_file():
            yield "fails-without", f"no such file in overlay/{target.id}: {path}"
        elif not _has_test(file, inside.partition("[")[0].split("::")):
            yield "fails-without", f"overlay/{target.id}/{path} has no {inside}"


def _has_test(file: Path, names: Sequence[str]) -> bool:
    try:
        body: list[ast.stmt] = ast.parse(file.read_bytes()).body
    except (SyntaxError, ValueError):
        return False
    for name in names:
        defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = next((node for node in body if isinstance(node, defined) and node.name == name), None)
        if found is None:
            return False
        body = found.body
    return True


def _diff_rules(diff: FileDiff, target: Target) -> Iterator[tuple[str, str]]:
    path = diff.path
    if diff.old != diff.new or diff.new_mode is not None:
        yield "modify-only", f"{path}: a patch only modifies files; new files go into overlay/"
    if not _PLAIN_PATH.fullmatch(path):
        yield "path", f"{path!r}: blanks, quotes and glob characters are not for paths of patches"
    if path in _namespace_files(target):
        yield "namespace", f"{path} would hide the other parts of the namespace package"
    elif target.installed_path(path) is None:
        yield "uninstalled", f"{path} is in no wheel and cannot be patched; put a new file into overlay/ instead"
    else:
        try:
            scratch.notice(path)
        except SeriesInvalid as error:
            yield "notice", f"{path}: {error.what}"
    for number, hunk in enumerate(diff.hunks, start=1):
        yield from ((rule, f"{path}, hunk {number}: {text}") for rule, text in _hunk_rules(hunk))
    if path.endswith((".py", ".pyi")):
        yield from (("import-churn", f"{path}: {text}") for text in _import_churn(diff))


def _hunk_rules(hunk: Hunk) -> Iterator[tuple[str, str]]:
    if not any(line[1:].strip() for line in hunk.lines if line[:1] in "+-"):
        yield "reformatting", "only blank lines change"
    for removed, added in _blocks(hunk):
        dense = ["".join("".join(side).split()) for side in (removed, added)]
        if dense[0] and dense[0] == dense[1]:
            yield "reformatting", f"only blanks and line breaks change: {removed[0].strip()!r}"
            continue
        ends = {line.rstrip(): line for line in added}
        for line in removed:
            if line.strip() and ends.get(line.rstrip(), line) != line:
                yield "reformatting", f"only the blanks at the end change: {line.strip()!r}"


def _blocks(hunk: Hunk) -> Iterator[tuple[list[str], list[str]]]:
    """Removed and added lines of each run of changes between context lines."""
    for changed, run in itertools.groupby(hunk.lines, key=lambda line: line[:1] in "+-"):
        lines = list(run)
        if changed:
            yield [line[1:] for line in lines if line[0] == "-"], [line[1:] for line in lines if line[0] == "+"]


def _import_churn(diff: FileDiff) -> Iterator[str]:
    lines = [line for hunk in diff.hunks for line in hunk.lines]
    removed, added = (
        [line[1:].strip() for line in lines if line[:1] == sign and _IMPORT.match(line[1:])] for sign in "-+"
    )
    if len(removed) > 1:
        yield f"{len(removed)} import lines removed; leave them and add the new one at the end or next to its use"
    moved = sorted(set(removed) & set(added))
    if moved:
        yield f"moved only: {'; '.join(moved)}"


# Overlay


def _namespace_files(target: Target) -> set[str]:
    """Upstream paths of `__init__.py` in the parents of the target's module: one of them hides the other parts."""
    parts = target.module.split(".")
    leads = {up.removesuffix(down) for up, down in target.layout.items() if up.endswith(down)} | {""}
    parents = ["/".join(parts[:depth]) for depth in range(1, len(parts))]
    return {f"{lead}{parent}/__init__.py" for lead in leads for parent in parents}


def overlay_findings(manifest: Manifest, target: Target) -> Iterator[Finding]:
    """What is wrong with the new files of `target`, against its pinned wheels where the cache has them."""
    root = manifest.home / "overlay" / target.id
    for path in sorted(root.rglob("*")):
        if path.is_symlink():
            yield Finding(_name(manifest, path), "symlink", "overlay files are copied; a link is not")
    upstream = {pin.version: _wheel_names(pin) for pin in target.pins.values()}
    for upstream_path, file in manifest.overlay_files(target).items():
        place = _name(manifest, file)
        for rule, text in _overlay_rules(target, upstream_path, file):
            yield Finding(place, rule, text)
        installed = target.installed_path(upstream_path)
        for version, names in upstream.items():
            if installed in names:
                yield Finding(place, "exists-upstream", f"{target.dist} {version} has {installed}; make it a patch")


def _overlay_rules(target: Target, upstream_path: str, file: Path) -> Iterator[tuple[str, str]]:
    if not file.is_file():
        yield "missing", "named as shared in patchset.toml and not there"
        return
    if upstream_path in _namespace_files(target):
        yield "namespace", f"{upstream_path} would hide the other parts of the namespace package"
    if not _PLAIN_PATH.fullmatch(upstream_path):
        yield "path", f"{upstream_path!r}: blanks, quotes and glob characters are not for paths of the overlay"
    if any(part.startswith(".") for part in PurePosixPath(upstream_path).parts):
        yield "hidden", "a hidden file or directory: a tool's leftovers?"
    if file.suffix in scratch.COMMENT:
        first = file.read_bytes().split(b"\n", 3)[:3]
        if not any(_SPDX in line for line in first):
            yield "spdx", "no SPDX-License-Identifier in the first 3 lines"


def _wheel_names(pin: Pin) -> frozenset[str]:
    """Members of the pinned wheel, where it is in the cache; empty otherwise."""
    path = cache_dir() / "dists" / pin.wheel.file
    try:
        with zipfile.ZipFile(path) as archive:
            return frozenset(archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return frozenset()


# Texts


def text_findings(home: Path) -> Iterator[Finding]:
    """Machine paths, and notes that are cited and nowhere written, in every text file of the project."""
    defined: set[str] = set()
    cited: dict[str, str] = {}
    for path in _texts(home):
        place = path.relative_to(home).as_posix()
        lines = path.read_bytes().decode("utf-8", errors="replace").split("\n")
        for number, line in enumerate(lines, start=1):
            if path.suffix == ".patch" and line[:1] in (" ", "-"):
                continue  # upstream's words
            if _MACHINE.search(line) or _SESSION.search(line):
                yield Finding(
                    f"{place}:{number}", "machine", f"a path or a word of one machine: {line.strip()[:100]!r}"
                )
            for match in _NOTE.finditer(line):
                if match.start() <= (begin.end() if (begin := _NOTE_START.match(line)) else -1):
                    defined.add(match[1])
                else:
                    cited.setdefault(match[1], f"{place}:{number}")
    for name, place in cited.items():
        if name not in defined:
            yield Finding(place, "note", f"the note {name!r} is cited and nowhere written")


def _texts(home: Path) -> Iterator[Path]:
    """Files git tracks, or would; without git every file that is not hidden and in no build directory."""
    listed: list[Path] = []
    if git.git_dir(home) is not None:
        names = git.run(home, "ls-files", "-z", "--cached", "--others", "--exclude-standard").stdout
        listed = [home / os.fsdecode(name) for name in names.split(b"\0") if name]
    else:
        listed = [p for p in home.rglob("*") if _is_source(p.relative_to(home))]
    for path in sorted(set(listed)):
        if path.is_file() and not path.is_symlink() and b"\0" not in _beginning(path):
            yield path


def _is_source(path: Path) -> bool:
    return not any(part.startswith(".") or part in ("__pycache__", "dist", "build") for part in path.parts)


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(8192)
