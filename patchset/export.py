# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""export: the commits of a `dev` worktree back to mails, series and lock; or the lock only, after an overlay edit."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from patchset import dev, git, mailformat, pindir, relock, scratch, worktree
from patchset.errors import Drift, HashMismatch, UsageError
from patchset.mailformat import Formatted
from patchset.manifest import Manifest, cache_dir
from patchset.report import Report
from patchset.types import Lock, PatchMail, Pin, Target, sha256


@dataclass(frozen=True)
class Source:
    """Where the commits come from."""

    directory: Path
    base: str
    head: str
    record: worktree.Record | None  # None: a repository that `dev` did not make


def configure(parser: argparse.ArgumentParser, manifest: Manifest) -> None:
    parser.add_argument(
        "target", metavar="TARGET", nargs="*", help=f"{', '.join(manifest.targets)}; none: all of them"
    )
    parser.add_argument("--pin", metavar="VERSION", help="another recorded pin of the target")
    parser.add_argument(
        "--from", type=Path, dest="directory", metavar="DIR", help="the worktree (default: the cached one)"
    )
    parser.add_argument(
        "--base", metavar="REV", help="with --from a repository that dev did not make: the pin's commit"
    )
    parser.add_argument(
        "--lock-only", action="store_true", help="leave the patches alone; write the locks of all pins again"
    )


def execute(args: argparse.Namespace, manifest: Manifest, report: Report) -> int:
    targets = [manifest.target(name) for name in dict.fromkeys(args.target)] or list(manifest.targets.values())
    if len(targets) > 1 and (args.pin or args.directory or args.base):
        raise UsageError("--pin, --from and --base go with one target", found=", ".join(t.id for t in targets))
    results = []
    for target in targets:
        pin = manifest.pin(target, args.pin)
        source = None if args.lock_only else find_source(target, pin, args.directory, args.base)
        results.append(export(manifest, target, pin, source, report))
    for result in results:
        _tell(result, report)
    report.put(exported=results)
    return 0


def _tell(result: dict, report: Report) -> None:
    where = f" from {result['worktree']}" if result["worktree"] else " (lock only)"
    written = f"{len(result['written'])} files written" if result["written"] else "nothing to write"
    report.line(f"{result['target']} {result['version']}  {result['patches']} patches{where}: {written}")
    for path in result["written"]:
        report.line(f"  {path}")


def find_source(target: Target, pin: Pin, directory: Path | None, base: str | None) -> Source | None:
    """The worktree to export, None when there is none and none was named: then only the lock is written.

    Raises:
        UsageError: the named directory is no repository, or dev did not make it and no --base is given.
    """
    place = (directory or dev.default_directory(target, pin)).expanduser().absolute()
    if directory is None and not worktree.record_path(place).is_file():
        return None
    if git.git_dir(place) is None:
        raise UsageError(
            "no repository there", target=target.id, path=str(place), next_step=f"apply.py dev {target.id}"
        )
    record = worktree.read_record(place)
    if record is None and base is None:
        raise UsageError(
            "dev did not make this repository, so the base is not known",
            target=target.id,
            path=str(place),
            next_step="add --base REV, the commit that holds the pin's files",
        )
    if record is not None and (record.target, record.version) != (target.id, pin.version):
        raise worktree.usage_of_foreign(place, target)
    if record is not None and not record.base:
        raise UsageError("the worktree is half made", path=str(place), next_step=f"python apply.py dev {target.id}")
    commit = git.text(place, "rev-parse", f"{base}^{{commit}}") if base else record.base if record else ""
    return Source(place, commit, git.text(place, "rev-parse", "HEAD"), record)


def export(manifest: Manifest, target: Target, pin: Pin, source: Source | None, report: Report) -> dict:
    """Write the pin's directory from `source` (None: lock only), and the locks of the target's other pins.

    Returns:
        What was done, for the report; "written" names the files that changed.

    Raises:
        Drift: the base is not the pin, there are uncommitted edits, or patches/ changed since the worktree was made.
        SeriesInvalid: a commit cannot become a patch.
        HashMismatch: the patches do not give the files of the worktree's HEAD.
    """
    pindir.recover_all(manifest, target)
    place = manifest.patch_dir(target, pin.version)
    if source is None:
        mails = {p.slug: p.path.read_bytes() for p in mailformat.existing_mails(place)}
    else:
        mails = _mails_of(manifest, target, pin, source, report)
    sources = lock_sources(manifest, target, pin, report, source)
    with pindir.staged(manifest, target, pin, mails) as stage:
        made = relock.make_lock(
            manifest, target, pin, sources, stage.patches, relock.read_or_none(manifest, target, pin)
        )
        if source is not None:
            _check_result(target, source, made)
        others = _other_locks(manifest, target, pin, report)
        changed = stage.install(made)
    written = [f"patches/{target.id}/{pin.version}/{name}" for name in changed]
    for other in others:
        if relock.write(manifest, target, other):
            written.append(f"patches/{target.id}/{other.version}/lock.json")
    if source is not None and source.record is not None:
        _remember(source, source.record, stage.patches)
    return {
        "target": target.id,
        "version": pin.version,
        "patches": len(mails),
        "worktree": None if source is None else str(source.directory),
        "written": written,
        "digest": made.digest,
    }


def _remember(source: Source, record: worktree.Record, patches: list[PatchMail]) -> None:
    mails = tuple((p.slug, p.sha256) for p in patches)
    worktree.write_record(source.directory, dataclasses.replace(record, head=source.head, mails=mails))


def _mails_of(manifest: Manifest, target: Target, pin: Pin, source: Source, report: Report) -> Mapping[str, bytes]:
    directory = source.directory
    worktree.refuse_operation(directory)
    edited = worktree.edits(directory)
    if edited:
        raise worktree.Unexported(
            f"{len(edited)} tracked files have uncommitted changes",
            target=target.id,
            path=str(directory),
            next_step=f"git -C {directory} commit --amend -a   (or commit --fixup, or restore)",
            details=edited,
        )
    worktree.refuse_overlay_copies(directory, manifest.overlay_files(target), target)
    for path in worktree.untracked(directory):
        report.progress(f"note: {path} is neither committed nor overlay; a new file belongs into overlay/{target.id}/")
    existing = mailformat.existing_mails(manifest.patch_dir(target, pin.version))
    if source.record is not None:
        _refuse_stale(target, source, source.record, existing)
    formatted = mailformat.format_commits(directory, worktree.commits_between(directory, source.base))
    _refuse_other_base(manifest, target, pin, source, formatted, report)
    slugs = mailformat.assign_slugs(directory, formatted, existing)
    return {slug: entry.data for slug, entry in zip(slugs, formatted, strict=True)}


def _refuse_stale(target: Target, source: Source, record: worktree.Record, existing: list[PatchMail]) -> None:
    current = {p.slug: p.sha256 for p in existing}
    before = dict(record.mails)
    if list(current.items()) == list(before.items()):
        return
    base = source.base
    if list(current.values()) == dev.hashes_or_none(source.directory, base):
        return
    differ = sorted(s for s in current.keys() | before.keys() if current.get(s) != before.get(s))
    raise Drift(
        "patches/ changed since the worktree was made; exporting would undo that",
        target=target.id,
        path=str(source.directory),
        cause="a git pull, or an edit of a mail by hand",
        next_step=f"python apply.py export {target.id} --lock-only keeps patches/; to keep the commits too: "
        f"python apply.py dev {target.id} --dir NEW, and cherry-pick them there",
        details=differ or ["the order of the series"],
    )


def _refuse_other_base(
    manifest: Manifest, target: Target, pin: Pin, source: Source, formatted: list[Formatted], report: Report
) -> None:
    sources = lock_sources(manifest, target, pin, report, source)
    for path in dict.fromkeys(path for entry in formatted for path in entry.paths):
        there = worktree.blob(source.directory, source.base, path)
        known = {name: data for name, read in sources.items() if (data := read(path)) is not None}
        if there not in known.values():
            raise Drift(
                "the base of the commits is not the pin",
                target=target.id,
                path=path,
                expected=f"the bytes of {target.dist} {pin.version} ({', '.join(known) or 'no source has this file'})",
                found="no such file" if there is None else f"sha256 {sha256(there)[:16]}... in {source.base[:12]}",
                next_step=f"rebase onto the worktree of: python apply.py dev {target.id} --pin {pin.version}",
            )


def lock_sources(
    manifest: Manifest, target: Target, pin: Pin, report: Report, source: Source | None = None
) -> dict[str, relock.Source]:
    """Every source of the pin that is at hand: always the wheel; the sdist and the tag when they are in the cache.

    Raises:
        DownloadFailed: the wheel is not cached and cannot be fetched.
    """
    wheel = worktree.wheel_of(manifest, target, pin, report)
    sources = {"wheel": relock.wheel_source(target, wheel, pin.wheel.sha256)}
    sdist = cache_dir() / "dists" / pin.sdist.file if pin.sdist else None
    if sdist is not None and pin.sdist is not None and sdist.is_file():
        if sha256(sdist.read_bytes()) == pin.sdist.sha256:
            sources["sdist"] = relock.sdist_source(target, sdist)
        else:
            report.progress(f"note: {sdist} is not the pinned sdist and is not used")
    clone = worktree.cached_clone(target)
    if source is not None and source.record is not None and source.record.source.startswith("tag "):
        sources["tag"] = relock.git_source(source.directory, source.base)
    elif worktree.has_tag(clone, pin.tag):
        sources["tag"] = relock.git_source(clone, git.text(clone, "rev-parse", f"refs/tags/{pin.tag}^{{commit}}"))
    return sources


def _check_result(target: Target, source: Source, made: Lock) -> None:
    for path, file in made.files.items():
        data = worktree.blob(source.directory, source.head, path)
        if data is None or file.source_of(sha256(scratch.with_notice(path, data)), "post") is None:
            raise HashMismatch(
                "the patches do not give the file of the worktree",
                target=target.id,
                path=path,
                expected=f"sha256 {sha256(data or b'')} at HEAD",
                found=f"after the series: {', '.join(f'{k} {v[:16]}...' for k, v in file.post.items())}",
                cause="the base differs from the pin in lines that the patches do not show",
                next_step=f"python apply.py dev {target.id} --dir elsewhere, and move the commits there",
            )


def _other_locks(manifest: Manifest, target: Target, done: Pin, report: Report) -> list[Lock]:
    """The locks of the other pins with the overlay of today; computed anew where their patches changed too."""
    made = []
    for pin in target.pins.values():
        if pin.version == done.version:
            continue
        before = relock.read_or_none(manifest, target, pin)
        patches = mailformat.existing_mails(manifest.patch_dir(target, pin.version))
        again = relock.with_overlay(manifest, target, pin, before, patches) if before else None
        if again is None:
            sources = lock_sources(manifest, target, pin, report)
            again = relock.make_lock(manifest, target, pin, sources, patches, before)
        made.append(again)
    return made
