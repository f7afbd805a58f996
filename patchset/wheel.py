# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""`wheel`: the hash-pinned official wheel, patched and packed again as X+fc8.N; `--build` for native changes.

read (pin's sha256, every RECORD row) -> series + overlay, hashes from the lock -> version literals -> METADATA
-> licences, provenance, SBOM -> RECORD -> a temporary file -> read back and checked -> moved into place
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchset import archive, download, metadata, notices, scratch
from patchset import lock as lockfile
from patchset import provenance as record
from patchset.archive import Wheel
from patchset.errors import HashMismatch, SeriesInvalid, UsageError, WheelInvalid
from patchset.manifest import Manifest
from patchset.report import Report
from patchset.types import Lock, PatchMail, Pin, Target, sha256
from patchset.verbs import pins_of


@dataclass(frozen=True)
class Built:
    """A finished wheel."""

    target: Target
    version: str
    path: Path
    sha256: str
    digest: str
    patches: int
    overlay: int
    overrides: int

    def as_dict(self) -> dict:
        fields = ("version", "path", "sha256", "digest", "patches", "overlay", "overrides")
        return {"target": self.target.id} | {name: getattr(self, name) for name in fields}


def configure(parser: argparse.ArgumentParser, manifest: Manifest) -> None:
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"{', '.join(manifest.targets)} (default: all)")
    parser.add_argument(
        "--out", type=Path, default=Path("dist"), metavar="DIR", help="where wheels go (default dist/)"
    )
    parser.add_argument(
        "--from",
        dest="source_wheel",
        type=Path,
        metavar="WHEEL",
        help="the official wheel (default: the cache, else pip)",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--repack", action="store_true", help="patch the official wheel (the default)")
    how.add_argument("--build", action="store_true", help="build from a source tree: for patches to native code")
    parser.add_argument(
        "--source", type=Path, metavar="TREE", help="with --build: checkout or unpacked sdist of the pin"
    )
    parser.add_argument("--python", metavar="PY", help="with --build: the Python that builds (default: this one)")
    parser.add_argument(
        "--pin", action="append", default=[], metavar="TARGET=VERSION", help="use another recorded pin"
    )


def execute(args: argparse.Namespace, manifest: Manifest, report: Report) -> int:
    targets = [manifest.target(t) for t in dict.fromkeys(args.targets)] or list(manifest.targets.values())
    _refuse_flags(args, targets)
    versions = pins_of(args.pin, manifest)
    if args.build:
        from patchset.build import build  # starts the project's own build, which needs more than this tool does

        built = [build(manifest, targets[0], versions, args.source, args.out, args.python, report)]
    else:
        built = repack_all(manifest, targets, versions, args.source_wheel, args.out, report)
    say(built, report)
    return 0


def _refuse_flags(args: argparse.Namespace, targets: Sequence[Target]) -> None:
    single = "--build" if args.build else "--from" if args.source_wheel is not None else None
    if single and len(targets) != 1:
        raise UsageError(f"{single} is for one target", expected="one TARGET", found=", ".join(t.id for t in targets))
    if args.build and args.source is None:
        raise UsageError("--build needs a source tree", expected="--source TREE", next_step="git clone the pin's tag")
    if args.build and args.source_wheel is not None:
        raise UsageError("--from is for --repack; --build takes --source TREE")
    if not args.build and (args.source is not None or args.python is not None):
        raise UsageError("--source and --python go with --build")


def repack_all(
    manifest: Manifest,
    targets: Sequence[Target],
    versions: Mapping[str, str],
    source: Path | None,
    out: Path,
    report: Report,
) -> list[Built]:
    """Repack `targets` into `out`; every one is built and checked before the first is moved into its place.

    Args:
        versions: target id -> pin, where it is not the default one.
        source: the official wheel of the one target; None takes it from the cache or the index.

    Raises:
        WheelInvalid: a wheel is not the pinned one, is damaged, or does not come out as it must.
        SeriesInvalid, LockInvalid, PatchConflict, HashMismatch, ManifestInvalid, FileSystemError: see there.
    """
    with archive.staging(out) as directory:
        built = [_repack(manifest, t, versions, source, directory, report) for t in targets]
        return [publish(one, out) for one in built]


def _repack(
    manifest: Manifest,
    target: Target,
    versions: Mapping[str, str],
    source: Path | None,
    directory: Path,
    report: Report,
) -> Built:
    pin = manifest.pin(target, versions.get(target.id))
    lock, patches = lockfile.load(manifest, target, pin)
    refuse_native(target, lock)
    path = source or download.wheel_path(manifest, target, pin, report)
    wheel = _pinned(target, pin, path)
    report.progress(f"{target.id}: repacking {path.name}")
    files = _series(target, lock, patches, wheel)
    return finish(manifest, target, pin, lock, patches, wheel, files, versions, "wheel", directory)


def publish(built: Built, out: Path) -> Built:
    """Move a finished wheel from the staging directory to its place."""
    place = out / built.path.name
    os.replace(built.path, place)
    return Built(**{**vars(built), "path": place})


def say(built: Sequence[Built], report: Report) -> None:
    """The result lines of finished wheels."""
    for one in built:
        changes = f"{one.patches} patches, {one.overlay} new files, {one.overrides} requirements"
        report.line(f"{one.target.id} {one.version}  {one.path}: {changes}, digest {one.digest[:12]}")
        report.detail(f"  sha256 {one.sha256}")
    report.put(wheels=[one.as_dict() for one in built], next=install_command(built))


def install_command(built: Sequence[Built]) -> str:
    """The one line that installs finished wheels."""
    names = " ".join(shlex.quote(str(one.path)) for one in built)
    return f"python{built[0].target.python} -m pip install {names}"


# The steps


def refuse_native(target: Target, lock: Lock) -> None:
    """Raise when the series changes sources of code that the official wheel ships compiled.

    Raises:
        UsageError: it does; `--build` is the way.
    """
    native = [p for p in (*lock.files, *lock.overlay) if p.startswith(tuple(target.native))]
    if native:
        raise UsageError(
            "the series changes native code, which the official wheel ships compiled",
            target=target.id,
            path=native[0],
            found=f"{len(native)} native files",
            next_step=f"python apply.py wheel {target.id} --build --source TREE",
            details=native[1:],
        )


def _pinned(target: Target, pin: Pin, path: Path) -> Wheel:
    """Read the official wheel, refusing any other file.

    Raises:
        WheelInvalid: the sha256 is not the pin's; the cause says whether it is damaged, edited or another version.
        UsageError: there is no such file.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError("no such wheel", target=target.id, path=str(path), found=error.strerror) from error
    if sha256(data) == pin.wheel.sha256:
        return archive.read(path, target.id)
    cause, details = _why_other(target, pin, path)
    raise WheelInvalid(
        "this is not the pinned wheel",
        target=target.id,
        path=str(path),
        expected=f"{pin.wheel.file}, sha256 {pin.wheel.sha256}",
        found=f"{path.name}, sha256 {sha256(data)}",
        cause=cause,
        next_step=f"python apply.py wheel {target.id}   brings the right one",
        details=details,
    )


def _why_other(target: Target, pin: Pin, path: Path) -> tuple[str, list[str]]:
    try:
        wheel = archive.read(path, target.id)
    except WheelInvalid as error:
        return error.what, error.details or [str(error.fields["found"])]
    if metadata.normalise(wheel.name) != metadata.normalise(target.dist):
        return f"a wheel of {wheel.name}", []
    if "+" in wheel.version:
        return "it is patched already", []
    if wheel.version != pin.version:
        return f"version {wheel.version}", []
    return "another build of the same version", []


def _series(target: Target, lock: Lock, patches: Sequence[PatchMail], wheel: Wheel) -> dict[str, bytes]:
    """Upstream path -> patched bytes of every touched file that is installed: those that `apply` makes.

    Raises:
        WheelInvalid: a touched file is missing or is not the recorded one.
        HashMismatch: the series does not give the recorded bytes.
    """
    base: dict[str, bytes] = {}
    for path, entry in lock.files.items():
        installed = target.installed_path(path)
        if installed is None:
            continue
        data = wheel.read(installed)
        if data is None or entry.source_of(sha256(data), "pre") is None:
            raise WheelInvalid(
                "a file to be patched is not the recorded one",
                target=target.id,
                path=installed,
                expected="sha256 " + " or ".join(dict.fromkeys(entry.pre.values())),
                found="no file" if data is None else f"sha256 {sha256(data)}",
                cause="lock.json was made from another wheel",
                next_step=f"python apply.py export {target.id}",
            )
        base[path] = data
    patched = scratch.apply_series(patches, base, target.id)
    for path, data in patched.items():
        expected = lock.files[path].post[lock.files[path].source_of(sha256(base[path]), "pre") or ""]
        if sha256(data) != expected:
            raise HashMismatch(
                "a patched file is not the recorded one",
                target=target.id,
                path=path,
                expected=f"sha256 {expected}",
                found=f"sha256 {sha256(data)}",
                next_step=f"python apply.py export {target.id}",
            )
    return patched


def finish(
    manifest: Manifest,
    target: Target,
    pin: Pin,
    lock: Lock,
    patches: Sequence[PatchMail],
    wheel: Wheel,
    files: Mapping[str, bytes],
    versions: Mapping[str, str],
    source: str,
    directory: Path,
) -> Built:
    """Put `files`, the overlay and all that names the change into `wheel`, write it to `directory`, read it back.

    Args:
        files: upstream path -> patched bytes; for a built wheel they are in it already and must be these.
        source: "wheel" or "build", for the provenance.
    """
    version = manifest.local_version(pin.version)
    literals = _version_files(target, wheel, lock, version)
    requirements = metadata.overrides(manifest, target, versions)
    content = record.Content(
        manifest=manifest,
        target=target,
        pin=pin,
        lock=lock,
        patches=patches,
        version=version,
        files={p: (_pre(lock, p, sha256(d)), sha256(d)) for p, d in files.items()},
        version_files={p: (sha256(_member(target, wheel, p)), sha256(d)) for p, d in literals.items()},
        requirements=requirements,
        source=source,
    )
    changed = {str(target.installed_path(p)): d for p, d in {**files, **literals}.items()}
    new = _overlay(manifest, target, wheel, lock, source)
    licences = notices.licence_files(manifest, target, wheel, lock, patches, list(changed))
    wheel = wheel.with_version(version)
    info = wheel.dist_info
    described = metadata.edit(wheel.members[f"{info}/METADATA"].data, version, requirements, list(licences), target.id)
    wheel = wheel.with_files(
        changed
        | new
        | {f"{info}/METADATA": described}
        | {f"{info}/licenses/{name}": data for name, data in licences.items()}
        | {
            f"{info}/{record.RECORD_NAME}": record.provenance(content),
            f"{info}/{record.SBOM_NAME}": record.sbom(content),
        }
    )
    path = directory / wheel.file_name
    archive.write(archive.with_record(wheel), path)
    verify(path, content)
    overlay = len(new) if source == "wheel" else len(_installed_overlay(target, lock))
    return Built(
        target, version, path, sha256(path.read_bytes()), lock.digest, len(patches), overlay, len(requirements)
    )


def _pre(lock: Lock, path: str, post: str) -> str:
    entry = lock.files[path]
    return entry.pre[entry.source_of(post, "post") or next(iter(entry.pre))]


def _member(target: Target, wheel: Wheel, upstream_path: str) -> bytes:
    installed = target.installed_path(upstream_path) or upstream_path
    data = wheel.read(installed)
    if data is None:
        raise WheelInvalid("the wheel lacks a file that carries its version", target=target.id, path=installed)
    return data


def _version_files(target: Target, wheel: Wheel, lock: Lock, version: str) -> dict[str, bytes]:
    """Upstream path -> bytes with the version literal and the change notice."""
    result = {}
    for path in target.version_files:
        if path in lock.files:
            raise SeriesInvalid(
                "a patch may not touch a file that carries the version; `wheel` writes it", target=target.id, path=path
            )
        plain = scratch.without_notice(path, _member(target, wheel, path))
        result[path] = scratch.with_notice(path, metadata.set_version(plain, version, path))
    return result


def _installed_overlay(target: Target, lock: Lock) -> dict[str, str]:
    return {p: place for p in lock.overlay if (place := target.installed_path(p)) is not None}


def _overlay(manifest: Manifest, target: Target, wheel: Wheel, lock: Lock, source: str) -> dict[str, bytes]:
    """Installed path -> bytes of the new files.

    Raises:
        SeriesInvalid: upstream has a file of that name.
    """
    sources = manifest.overlay_files(target)
    new = {place: sources[path].read_bytes() for path, place in _installed_overlay(target, lock).items()}
    for place, data in new.items():
        there = wheel.read(place)
        if there is not None and not (source == "build" and there == data):
            raise SeriesInvalid(
                "an overlay file exists upstream", target=target.id, path=place, next_step="make it a patch"
            )
    return new


def verify(path: Path, content: record.Content) -> None:
    """Read a finished wheel back: RECORD, its version in all places, and the bytes that the lock promises.

    Raises:
        WheelInvalid: any of them differs; the file is then not published.
    """
    target, version = content.target, content.version
    wheel = archive.read(path, target.id)
    described = wheel.read(f"{wheel.dist_info}/METADATA") or b""
    said = {"file name": wheel.version, "METADATA": ", ".join(metadata.header(described, "Version"))}
    for upstream_path in target.version_files:
        said[upstream_path] = metadata.literals(_member(target, wheel, upstream_path), upstream_path).version
    wrong = [f"{where}: {found}" for where, found in said.items() if found != version]
    promised = {p: set(f.post.values()) for p, f in content.lock.files.items() if target.installed_path(p)}
    promised |= {p: {h} for p, h in content.lock.overlay.items() if target.installed_path(p)}
    for upstream_path, hashes in promised.items():
        data = wheel.read(target.installed_path(upstream_path) or "")
        if data is None or sha256(data) not in hashes:
            wrong.append(f"{upstream_path}: not the bytes that the lock records")
    for name in metadata.header(described, "License-File"):
        if f"{wheel.dist_info}/licenses/{name}" not in wheel.members:
            wrong.append(f"License-File {name}: not in the wheel")
    if wrong:
        raise WheelInvalid(
            "the finished wheel is not what it must be",
            target=target.id,
            path=path.name,
            expected=f"version {version} everywhere, and the bytes of lock.json",
            found=wrong[0],
            details=wrong[1:],
        )
