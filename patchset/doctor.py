# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""`doctor`: what a given Python would import, from where, in what state, and which combinations are known to be bad.

Nothing heavy is imported: a probe in that Python finds specs and reads metadata, the rest is judged here.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from patchset import engine, metadata, plan
from patchset.errors import PatchsetError, ToolMissing, UsageError
from patchset.manifest import Manifest
from patchset.provenance import RECORD_NAME
from patchset.report import Report
from patchset.target import locate
from patchset.types import Kind, Target, TargetState, sha256

PROBE = Path(__file__).with_name("probe.py")
UNHEALTHY = 3

# Versions that no METADATA pins and the patch set is made for.
EXPECTED = {"transformer-engine": "2.17.1"}


@dataclass(frozen=True)
class Finding:
    """Something to know ("note") or to mend ("problem"), with what to do about it."""

    level: str
    subject: str
    what: str
    next_step: str

    def as_dict(self) -> dict:
        return {"level": self.level, "subject": self.subject, "what": self.what, "next": self.next_step}


@dataclass
class Facts:
    """What was found of one target."""

    target: Target
    origin: Path | None = None
    root: Path | None = None
    metadata_version: str | None = None
    metadata_path: str | None = None
    editable: str | None = None
    runtime_version: str | None = None
    kind: str | None = None
    state: str | None = None
    digest: str | None = None
    links: dict[str, int] = field(default_factory=dict)  # touched files with more than one hard link

    def as_dict(self) -> dict:
        return {"target": self.target.id} | {k: v for k, v in vars(self).items() if k != "target"}


def configure(parser: argparse.ArgumentParser, manifest: Manifest) -> None:
    parser.add_argument(
        "--python", metavar="PY", help="the Python to look at (default: that of the active venv, else this one)"
    )


def execute(args: argparse.Namespace, manifest: Manifest, report: Report) -> int:
    probe = run_probe(_python(args.python), manifest)
    facts, findings = examine(manifest, probe)
    problems = [f for f in findings if f.level == "problem"]
    report.line(f"python {probe['markers']['python_full_version']}  {probe['executable']}  {' '.join(probe['libc'])}")
    for one in facts:
        report.line(_sentence(one))
        for path, count in one.links.items():
            report.detail(f"  {count} links  {path}")
    for name, parts in probe["namespaces"].items():
        report.line(f"namespace {name}: {', '.join(p['path'] for p in parts) or 'nowhere'}")
    for finding in sorted(findings, key=lambda f: f.level != "problem"):
        report.line(f"{finding.level}: {finding.subject}: {finding.what}\n  next: {finding.next_step}")
    report.line(f"{len(problems)} problems, {len(findings) - len(problems)} notes" if findings else "healthy")
    report.put(
        python=probe["executable"],
        libc=probe["libc"],
        targets=[one.as_dict() for one in facts],
        namespaces=probe["namespaces"],
        findings=[f.as_dict() for f in findings],
    )
    return UNHEALTHY if problems else 0


def _sentence(one: Facts) -> str:
    if one.origin is None:
        return f"{one.target.id}: not importable"
    where = f"{one.kind or 'tree'} {one.root}" + (" (editable)" if one.editable else "")
    name = f"{one.target.id} {one.runtime_version or '?'}"
    return f"{name}  {where}: {one.state or 'unknown'}, digest {(one.digest or '-')[:12]}"


# The probe


def _python(named: str | None) -> str:
    if named is not None:
        found = shutil.which(os.path.expanduser(named))
        if found is None and (Path(named) / "bin" / "python").is_file():
            found = str(Path(named) / "bin" / "python")  # the directory of a venv
        if found is None:
            raise UsageError("no such Python", path=named, expected="an executable, or the directory of a venv")
        return found
    venv = os.environ.get("VIRTUAL_ENV")
    python = Path(venv) / "bin" / "python" if venv else None
    return str(python) if python is not None and python.is_file() else sys.executable


def run_probe(python: str, manifest: Manifest) -> dict:
    """What `python` answers to probe.py.

    Raises:
        ToolMissing: it cannot be started, fails, or answers something else.
    """
    packages = {t.module: _version_file(t) for t in manifest.targets.values()}
    namespaces = sorted({t.module.rpartition(".")[0] for t in manifest.targets.values()} - {""})
    wanted = json.dumps({"packages": packages, "namespaces": namespaces})
    try:
        done = subprocess.run([python, str(PROBE), wanted], capture_output=True, text=True, check=False, timeout=120)
        return json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        said = "" if isinstance(error, (OSError, subprocess.TimeoutExpired)) else done.stderr
        raise ToolMissing(
            "this Python does not answer",
            path=python,
            expected="Python 3.8 or newer",
            found=f"{type(error).__name__}: {error}",
            next_step="python apply.py doctor --python PY, with another one",
            details=said.splitlines()[-5:],
        ) from error


def _version_file(target: Target) -> str:
    installed = target.installed_path(target.version_files[0]) or target.version_files[0]
    return installed.removeprefix(target.module.replace(".", "/") + "/")


# The judgement


def examine(manifest: Manifest, probe: Mapping) -> tuple[list[Facts], list[Finding]]:
    """Facts of every target and everything found about them."""
    facts, findings = [], []
    for target in manifest.targets.values():
        one, found = _target(manifest, target, probe)
        facts.append(one)
        findings += found
    findings += _namespaces(manifest, probe)
    findings += _requirements(manifest, probe)
    findings += _expected_versions(probe)
    findings += _old_libc(manifest, probe)
    return facts, findings


def _installed(probe: Mapping, dist: str) -> list[Mapping]:
    wanted = metadata.normalise(dist)
    return [d for d in probe["distributions"] if d.get("name") and metadata.normalise(d["name"]) == wanted]


def _target(manifest: Manifest, target: Target, probe: Mapping) -> tuple[Facts, list[Finding]]:
    one = Facts(target)
    dists = _installed(probe, target.dist)
    if dists:
        one.metadata_version, one.metadata_path = dists[0]["version"], dists[0]["path"]
        one.editable = dists[0]["url"] if dists[0]["editable"] else None
    found = probe["modules"][target.module]
    if not found or not found.get("origin"):
        why = (found or {}).get("error") or "not on sys.path"
        return one, [Finding("problem", target.id, f"{target.module} is not importable: {why}", _install(target))]
    one.origin = Path(found["origin"])
    findings = [*_dist_infos(target, dists), *_runtime_version(target, one, probe)]
    try:
        findings += _state(manifest, target, one)
    except PatchsetError as error:
        findings.append(
            Finding("problem", target.id, error.what, str(error.fields["next"] or "see `python apply.py status`"))
        )
    return one, [*findings, *_wheel(target, one, dists)]


def _install(target: Target) -> str:
    return f"python apply.py --fetch, then install the {target.dist} wheel from dist/"


def _dist_infos(target: Target, dists: Sequence[Mapping]) -> Iterator[Finding]:
    if len(dists) > 1:
        listed = ", ".join(d["path"] for d in dists)
        yield Finding(
            "problem",
            target.id,
            f"{len(dists)} dist-info directories on sys.path: {listed}",
            f"pip uninstall {target.dist} until none is left, then install once",
        )


def _state(manifest: Manifest, target: Target, one: Facts) -> Iterator[Finding]:
    """Judge the files, and count hard links: one shared by uv changes in every venv when edited in place."""
    inspection = engine.inspect(manifest, locate(target, (one.origin or Path()).parent))
    one.root, one.kind = inspection.found.root, inspection.found.kind.value
    one.state, one.digest = inspection.state.value, inspection.lock.digest
    for path in inspection.files:
        place = inspection.found.place(path)
        if place is not None and place.exists() and place.stat().st_nlink > 1:
            one.links[str(place)] = place.stat().st_nlink
    status = f"python apply.py status --{target.id} {one.root}"
    apply = f"python apply.py --{target.id} {one.root}"
    if inspection.interrupted:
        yield Finding("problem", target.id, "an interrupted run waits for recovery", apply)
    elif inspection.state is TargetState.PATCHED:
        pass
    elif inspection.state in (TargetState.PRISTINE, TargetState.MIXED):
        yield Finding("problem", target.id, f"{inspection.state.value}: the patch set is not on it", apply)
    else:
        bad = plan.refused(inspection.files)
        yield Finding(
            "problem",
            target.id,
            f"{inspection.state.value}: {len(bad)} files are nobody's, as {next(iter(bad))}",
            status,
        )
    if one.links:
        yield Finding(
            "note",
            target.id,
            f"{len(one.links)} touched files are hard links, shared with uv's cache or another venv ({one.state})",
            "nothing, as long as nobody edits them in place; `apply.py` writes new files",
        )


def _wheel(target: Target, one: Facts, dists: Sequence[Mapping]) -> Iterator[Finding]:
    """Patched wheels: their record against the files, and whether Python imports them at all."""
    for dist in dists:
        record = Path(dist["path"]) / RECORD_NAME
        if not record.is_file():
            continue
        site = Path(dist["path"]).parent
        if one.root is not None and site.resolve() != one.root.resolve():
            yield Finding(
                "problem",
                target.id,
                f"the patched wheel {dist['version']} in {site} is hidden by {one.root} (editable or PYTHONPATH)",
                f"remove one of the two, as: pip uninstall {target.dist}",
            )
        yield from _record(target, record, site)


def _record(target: Target, record: Path, site: Path) -> Iterator[Finding]:
    again = f"pip install --no-deps --force-reinstall the {target.dist} wheel"
    try:
        body = json.loads(record.read_text(encoding="utf-8"))
        entries = [*body["files"].values(), *body["version_files"].values()]
        wanted = {e["at"]: e["post"] for e in entries} | {body["places"][p]: h for p, h in body["overlay"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        yield Finding("problem", target.id, f"the wheel's record {record} is damaged: {error}", again)
        return
    wrong = [
        at for at, digest in wanted.items() if not (site / at).is_file() or sha256((site / at).read_bytes()) != digest
    ]
    if wrong:
        yield Finding("problem", target.id, f"{len(wrong)} files differ from the wheel's record, as {wrong[0]}", again)


def _runtime_version(target: Target, one: Facts, probe: Mapping) -> Iterator[Finding]:
    """`__version__` as it would come out, against METADATA: it lies in a foreign repo and without _version.py."""
    read = probe["versions"][target.module]
    one.runtime_version = (read["version"] if read else one.metadata_version) or "0.0.0.dev0"
    if one.runtime_version == one.metadata_version:
        return
    wheel = f"install the patched {target.dist} wheel, whose version is a literal"
    if one.runtime_version == "0.0.0.dev0":
        what = "__version__ will be 0.0.0.dev0: there is neither _version.py nor metadata"
        yield Finding("problem", target.id, what, f"{wheel}, or pip install --no-deps -e the checkout")
    elif one.metadata_version is None:
        yield Finding("note", target.id, f"no metadata: importlib.metadata does not know {target.dist}", wheel)
    elif _appended(one.runtime_version, one.metadata_version) and not _in_checkout(target, one):
        what = f"__version__ is {one.runtime_version}: the hash is that of an unrelated repository around {one.origin}"
        yield Finding("problem", target.id, what, f"export NO_VCS_VERSION=1, or {wheel}")
    else:
        what = f"__version__ is {one.runtime_version}, METADATA says {one.metadata_version} ({one.metadata_path})"
        own = _appended(one.runtime_version, one.metadata_version)
        yield Finding("note" if own else "problem", target.id, what, "export NO_VCS_VERSION=1" if own else wheel)


def _appended(runtime: str, said: str) -> bool:
    return re.fullmatch(re.escape(said) + r"\+[0-9a-f]{4,40}", runtime) is not None


def _in_checkout(target: Target, one: Facts) -> bool:
    try:
        return one.origin is not None and locate(target, one.origin.parent).kind is Kind.CHECKOUT
    except PatchsetError:
        return False


def _namespaces(manifest: Manifest, probe: Mapping) -> Iterator[Finding]:
    for name, parts in probe["namespaces"].items():
        hiding = [p["path"] for p in parts if p["init"]]
        if hiding:
            what = f"{hiding[0]}/__init__.py makes {name} one package and hides {len(parts) - 1} other parts of it"
            yield Finding(
                "problem", name, what, f"remove {hiding[0]}/__init__.py, or the distribution that brought it"
            )


# Requirements


def _packaging() -> Callable | None:
    """`Requirement` of the packaging library, or of pip's copy of it, or None."""
    for package in ("packaging", "pip._vendor.packaging"):
        try:
            return importlib.import_module(f"{package}.requirements").Requirement
        except ImportError:
            continue
    return None


def _requirements(manifest: Manifest, probe: Mapping) -> Iterator[Finding]:
    """Each target's requirements against what is installed, with the overrides of patchset.toml."""
    library = _packaging()
    if library is None:
        what = f"requirements were not compared: {sys.executable} has neither packaging nor pip"
        yield Finding("note", "requirements", what, "pip install packaging, then run doctor again")
        return
    parsed = {t.id: [library(line) for line in _lines(manifest, t, probe)] for t in manifest.targets.values()}
    missing: dict[str, list[str]] = {}
    for target_id, requirement in _applying(manifest, parsed, probe["markers"]):
        found = _installed(probe, requirement.name)
        plain = str(requirement).split(";")[0].strip()
        if not found:
            missing.setdefault(target_id, []).append(plain)
        elif not requirement.specifier.contains(found[0]["version"], prereleases=True):
            what = f"needs {plain}, installed is {found[0]['version']}"
            yield Finding("problem", target_id, what, f"pip install '{requirement.name}{requirement.specifier}'")
    level = "problem" if has_gpu() else "note"
    for target_id, names in missing.items():
        shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
        what = f"{len(names)} requirements are not installed: {shown}"
        yield Finding(level, target_id, what, "pip check names them all; a CPU-only environment can do without some")


def _applying(
    manifest: Manifest, parsed: Mapping[str, list], environment: Mapping[str, str]
) -> list[tuple[str, object]]:
    """(target id, requirement) of those that hold here, with the extras that the targets ask of each other."""
    by_dist = {metadata.normalise(t.dist): t.id for t in manifest.targets.values()}
    extras: dict[str, set[str]] = {target_id: set() for target_id in parsed}
    while True:
        applying = [(t, r) for t, found in parsed.items() for r in found if _applies(r, environment, extras[t])]
        wanted = {t: set(asked) for t, asked in extras.items()}
        for _, requirement in applying:
            target_id = by_dist.get(metadata.normalise(requirement.name))
            if target_id is not None:
                wanted[target_id] |= requirement.extras
        if wanted == extras:
            return applying
        extras = wanted


def _lines(manifest: Manifest, target: Target, probe: Mapping) -> list[str]:
    """Requires-Dist lines of the installed target; those of an official wheel with our overrides."""
    found = _installed(probe, target.dist)
    if not found:
        return []
    lines = list(found[0]["requires"])
    if "+" in found[0]["version"]:
        return lines
    ours = {metadata.normalise(t.dist) for t in manifest.targets.values()}
    for entry in metadata.overrides(manifest, target):
        about_us = metadata.normalise(metadata.requirement_name(entry.upstream or entry.replace)) in ours
        if not about_us:  # an official wheel may ask for the official version of another target
            lines = [entry.replace if line == entry.upstream else line for line in lines]
    return [line for line in lines if line]


def _applies(requirement, environment: Mapping[str, str], extras: set[str]) -> bool:
    if requirement.marker is None:
        return True
    return any(requirement.marker.evaluate({**environment, "extra": extra}) for extra in ("", *extras))


def _expected_versions(probe: Mapping) -> Iterator[Finding]:
    for name, version in EXPECTED.items():
        found = _installed(probe, name)
        if not found and has_gpu():
            yield Finding(
                "problem", name, f"not installed; expected {version}", f"pip install '{name}[pytorch]=={version}'"
            )
        elif not found:
            yield Finding(
                "note", name, f"not installed: FP8 training needs {version} and a GPU", "nothing on a CPU machine"
            )
        elif found[0]["version"].split("+")[0] != version:
            what = f"{found[0]['version']} is installed; the patch set is made for {version}"
            yield Finding("problem", name, what, f"pip install '{name}[pytorch]=={version}'")


def has_gpu() -> bool:
    """Whether an NVIDIA driver is loaded on this machine."""
    return Path("/proc/driver/nvidia/version").exists()


def _old_libc(manifest: Manifest, probe: Mapping) -> Iterator[Finding]:
    """Distributions whose compiled code needs a newer glibc than this machine's: forced in, they fail later."""
    name, version = probe["libc"]
    if name != "glibc":
        return
    here = tuple(int(part) for part in version.split(".")[:2])
    for dist in probe["distributions"]:
        needs = [
            tuple(map(int, m)) for tag in dist.get("tags", ()) for m in re.findall(r"manylinux_(\d+)_(\d+)_", tag)
        ]
        others = [tag for tag in dist.get("tags", ()) if not re.search(r"manylinux_\d+_\d+_", tag)]
        if needs and not others and min(needs) > here:
            wanted = ".".join(map(str, min(needs)))
            what = f"{dist['version']} needs glibc {wanted}, this machine has {version}"
            yield Finding("problem", dist["name"], what, f"pip uninstall {dist['name']}, or use a newer system image")
