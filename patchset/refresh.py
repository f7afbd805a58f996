# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""refresh: carry the series of a pin onto another upstream version, by merging commits, and write the new pin.

The old and the new upstream become two commits, each patch a commit on the old one, and git cherry-picks them onto the
new one: whole package trees, so that renames are found. Nothing lands in patches/ before every patch is decided.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

from patchset import carry, git, lock, mailformat, newpin, pindir, relock, scratch, state, worktree
from patchset.carry import Carried, Job
from patchset.errors import HashMismatch, Interrupted, PatchConflict, SeriesInvalid, UsageError
from patchset.manifest import Manifest, cache_dir
from patchset.report import Report
from patchset.types import Lock, Pin, Target, sha256

_SHOWN = 6  # lines of a hunk in a message


def configure(parser: argparse.ArgumentParser, manifest: Manifest) -> None:
    parser.add_argument("target", metavar="TARGET", help=", ".join(manifest.targets))
    parser.add_argument("--to", required=True, metavar="VERSION", help="the new upstream version, as 0.5.23")
    parser.add_argument("--pin", metavar="VERSION", help="the pin to start from (default: the target's)")
    base = parser.add_mutually_exclusive_group()
    base.add_argument(
        "--from-git",
        nargs="?",
        const="",
        metavar="CLONE",
        help="merge the tags, from CLONE (default: upstream's repository)",
    )
    base.add_argument(
        "--tree", type=Path, metavar="DIR", help="merge onto this pristine tree; writes no pin without --wheel"
    )
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="the new version's wheel (default: pip brings it)")
    step = parser.add_mutually_exclusive_group()
    step.add_argument("--continue", action="store_true", dest="go_on", help="after a conflict was resolved and added")
    step.add_argument("--skip", action="store_true", help="leave the conflicting patch out of the new pin")
    step.add_argument("--abort", action="store_true", help="give the refresh up and remove its worktree")
    step.add_argument("--dry-run", action="store_true", help="report every patch; keep and write nothing")


def execute(args: argparse.Namespace, manifest: Manifest, report: Report) -> int:
    target = manifest.target(args.target)
    version = args.to.removeprefix("v")
    place = directory_of(target, version)
    if args.abort:
        return _abort(target, version, place, report)
    if args.go_on or args.skip:
        job = carry.read_job(place, target, version)
        with state.hold([place], 30.0):
            carry.resume(job, skip=args.skip)
            return _run(manifest, target, job, report)
    pin = manifest.pin(target, args.pin)
    _refuse_known(manifest, target, pin, version)
    if args.dry_run:
        return _dry_run(args, manifest, target, pin, version, report)
    if place.exists():
        _refuse_running(target, version, place)
        shutil.rmtree(place)
    place.mkdir(parents=True)
    with state.hold([place], 30.0):
        try:
            job = _start(args, manifest, target, pin, version, place, report)
            _refuse_overlay(target, job)
            carry.share_resolutions(job, cache_dir() / "rr-cache" / target.id)
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
        return _run(manifest, target, job, report)


def directory_of(target: Target, version: str) -> Path:
    """Where the worktree and the state of a refresh lie."""
    return cache_dir() / "refresh" / f"{target.id}-{version}"


def _refuse_known(manifest: Manifest, target: Target, pin: Pin, version: str) -> None:
    if version == pin.version:
        raise UsageError("the series is made for this version already", target=target.id, found=version)
    place = manifest.patch_dir(target, version)
    if place.exists():
        raise UsageError(
            "patches/ has this version already",
            target=target.id,
            path=str(place),
            next_step=f"python apply.py dev {target.id} --pin {version}; or remove the directory",
        )


def _refuse_running(target: Target, version: str, place: Path) -> None:
    if not (place / carry.STATE).is_file():
        return  # killed before the first patch
    job = carry.read_job(place, target, version)
    if job.done:
        return
    raise Interrupted(
        f"a refresh to {version} waits for a decision",
        target=target.id,
        patch=job.stopped.slug if job.stopped else None,
        path=str(job.tree),
        next_step=f"python apply.py refresh {target.id} --to {version} --continue | --skip | --abort",
    )


def _abort(target: Target, version: str, place: Path, report: Report) -> int:
    if not place.exists():
        raise UsageError("there is no refresh to give up", target=target.id, path=str(place))
    with state.hold([place], 30.0):
        shutil.rmtree(place)
    report.line(f"{target.id}: the refresh to {version} is given up; patches/ is as it was")
    report.put(target=target.id, to=version, aborted=True)
    return 0


def _dry_run(
    args: argparse.Namespace, manifest: Manifest, target: Target, pin: Pin, version: str, report: Report
) -> int:
    base = cache_dir() / "refresh"
    base.mkdir(parents=True, exist_ok=True)
    place = base / f".dry-run-{target.id}-{version}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    with state.hold([place], 30.0):
        try:
            job = dataclasses.replace(_start(args, manifest, target, pin, version, place, report), dry_run=True)
            carry.carry_all(job)
            _tell(job, report)
            _refuse_overlay(target, job)
            _refuse_stopped(target, job, [c for c in job.patches if c.stops])
            if job.wheel is not None:
                made = _new_lock(manifest, target, job, newpin.pin_of(target, job), _formatted(job))
                report.line(f"  lock: {len(made.files)} files, digest {made.digest[:12]}")
        finally:
            shutil.rmtree(place, ignore_errors=True)
    return 0


# Start: two upstreams and the series as commits


def _start(
    args: argparse.Namespace, manifest: Manifest, target: Target, pin: Pin, version: str, place: Path, report: Report
) -> Job:
    old_lock, patches = lock.load(manifest, target, pin)
    tree = place / "tree"
    worktree.create(tree)
    wheel = _wheel(args, manifest, target, pin, version, report)
    clone = worktree.repository(target) if args.from_git == "" else args.from_git
    tag = pin.tag.replace(pin.version, version) if pin.tag else None
    if clone is not None:
        if pin.tag is None or tag is None:
            raise UsageError("--from-git needs the pin's tag in patchset.toml", target=target.id, found=pin.version)
        report.progress(f"fetching {pin.tag} and {tag} from {clone}")
        old_base, new_base = (worktree.fetch_tag(tree, clone, name) for name in (pin.tag, tag))
    else:
        old_wheel = worktree.wheel_of(manifest, target, pin, report)
        old_base = worktree.import_wheel(tree, target, pin.version, old_wheel, pin.wheel.sha256)
        if args.tree is not None:
            files = worktree.tree_files(target, args.tree)
            new_base = worktree.import_commit(tree, files, f"{target.dist} {version}\n\nFiles of a tree\n", old_base)
        else:
            new_base = worktree.import_wheel(tree, target, version, wheel, None, old_base)
    worktree.show_only(tree, [f.path for p in patches for f in p.files])
    git.run(tree, "checkout", "--quiet", "-B", "old", old_base)
    commits = worktree.apply_mails(tree, patches, target.id)
    _check_old(target, tree, old_lock)
    git.run(tree, "checkout", "--quiet", "-B", worktree.BRANCH, new_base)
    carried = [Carried(p.slug, p.subject, str(p.path), c) for p, c in zip(patches, commits, strict=True)]
    job = Job(
        place=place,
        target=target.id,
        old=pin.version,
        new=version,
        old_base=old_base,
        new_base=new_base,
        tag=tag,
        wheel=None if wheel is None else str(wheel),
        from_git=clone is not None,
        patches=carried,
        overlay=worktree.overlay_upstream(tree, new_base, manifest.overlay_files(target)),
    )
    carry.write_job(job)
    return job


def _wheel(
    args: argparse.Namespace, manifest: Manifest, target: Target, pin: Pin, version: str, report: Report
) -> Path | None:
    if args.wheel is not None:
        return newpin.checked_wheel(target, args.wheel.expanduser().absolute(), version)
    if args.tree is not None:
        return None
    known = target.pins.get(version)
    if known is not None:
        return worktree.wheel_of(manifest, target, known, report)
    return newpin.download_wheel(target, version, pin, report)


def _check_old(target: Target, tree: Path, old: Lock) -> None:
    for path, file in old.files.items():
        data = worktree.blob(tree, "HEAD", path)
        if data is None or file.source_of(sha256(scratch.with_notice(path, data)), "post") is None:
            raise HashMismatch(
                "the series on the old pin does not give the recorded files",
                target=target.id,
                path=path,
                expected=", ".join(file.post.values()),
                found=f"sha256 {sha256(data or b'')} (without the change notice)",
                next_step=f"python apply.py export {target.id} --pin {old.version}",
            )


# Run: to the end or to the first patch that needs a person


def _run(manifest: Manifest, target: Target, job: Job, report: Report) -> int:
    carry.carry_all(job)
    worktree.show_all(job.tree)
    _tell(job, report)
    _refuse_stopped(target, job, [job.stopped] if job.stopped else [])
    formatted = _formatted(job)
    if job.wheel is None:
        report.line(
            f"no pin is written: --tree gives no wheel to pin; the series is on {worktree.BRANCH} in {job.tree}"
        )
        return 0
    pin = newpin.pin_of(target, job)
    made = _write(manifest, target, job, pin, formatted, report)
    carry.write_job(dataclasses.replace(job, done=True))
    report.put(written=made)
    for name in made:
        report.line(f"  wrote {name}")
    report.line(f"next: python apply.py dev {target.id} --pin {job.new}, and run the tests of the patches;")
    report.line(f'then set pin = "{job.new}" in patchset.toml')
    return 0


def _refuse_overlay(target: Target, job: Job) -> None:
    if job.overlay:
        raise PatchConflict(
            f"{len(job.overlay)} overlay files exist in {target.dist} {job.new}",
            target=target.id,
            path=job.overlay[0],
            expected="new files only",
            found="a file of upstream at the same path",
            cause="it went upstream, or upstream chose the same name",
            next_step="rename the overlay file; or drop it, and the old pin with it, when upstream's does its work",
            details=job.overlay,
        )


def _refuse_stopped(target: Target, job: Job, stopped: Sequence[Carried]) -> None:
    if not stopped:
        return
    first = stopped[0]
    command = f"python apply.py refresh {target.id} --to {job.new}"
    hunks = first.hunks[0] if first.hunks else None
    raise PatchConflict(
        f"{len(stopped)} of {len(job.patches)} patches need a decision",
        target=target.id,
        patch=first.slug,
        path=hunks["file"] if hunks else None,
        expected=_first(hunks, "expected"),
        found=_first(hunks, "found"),
        cause=first.state + (f": {first.note}" if first.note else ""),
        next_step=f"{command}   (without --dry-run)"
        if job.dry_run
        else f"{_how(first, job.tree)}, then: {command} --continue | --skip",
        details=[line for c in stopped for line in _explain(c)],
    )


def _first(hunk: dict | None, side: str) -> str | None:
    if hunk is None:
        return None
    return repr(hunk[side][0]) if hunk[side] else "no line here"


def _how(stopped: Carried, tree: Path) -> str:
    if stopped.state == carry.MOVED:
        return f"look at: git -C {tree} show; amend it where it is wrong"
    return f"resolve in {tree}, git add"


def _explain(carried: Carried) -> list[str]:
    lines = [f"{carried.slug}: {carried.state}" + (f", {carried.note}" if carried.note else "")]
    for hunk in carried.hunks:
        lines.append(f"  {hunk['file']}:{hunk['line']} (hunk {hunk['hunk']})")
        lines += [f"    {hunk['note']}"] if "note" in hunk else []
        lines += _shown("expected", hunk["expected"]) + _shown("found   ", hunk["found"])
    return lines


def _shown(word: str, lines: list[str]) -> list[str]:
    shown = [f"    {word} {line!r}" for line in lines[:_SHOWN]]
    return shown + (
        [f"    {word} ... {len(lines) - _SHOWN} more lines (--json has them)"] if len(lines) > _SHOWN else []
    )


def _tell(job: Job, report: Report) -> None:
    report.line(f"{job.target} {job.old} -> {job.new}  {len(job.patches)} patches")
    for one in job.patches:
        report.line(f"  {one.state:<18} {one.slug}" + (f"   {one.note}" if one.note else ""))
    ranges = carry.range_diff(job)
    for line in ranges.splitlines():
        report.detail(f"  {line}")
    report.put(
        target=job.target,
        old=job.old,
        new=job.new,
        worktree=None if job.dry_run else str(job.tree),
        patches=[one.as_dict() for one in job.patches],
        overlay_upstream=job.overlay,
        range_diff=ranges,
        next=None if job.stopped is None else f"python apply.py refresh {job.target} --to {job.new} --continue",
    )


# Finish: the new pin


def _formatted(job: Job) -> dict[str, bytes]:
    """slug -> mail of every patch that is carried, in order.

    Raises:
        SeriesInvalid: commits were added or removed by hand, or one cannot become a patch.
    """
    kept = [one for one in job.patches if one.result is not None]
    commits = worktree.commits_between(job.tree, job.new_base)
    if len(commits) != len(kept):
        raise SeriesInvalid(
            "commits were added or removed in the worktree",
            target=job.target,
            path=str(job.tree),
            expected=f"{len(kept)} commits, one a patch",
            found=f"{len(commits)} commits",
            next_step="squash what belongs together; add new patches with `dev` after the refresh",
        )
    formatted = mailformat.format_commits(job.tree, commits)
    return {one.slug: entry.data for one, entry in zip(kept, formatted, strict=True)}


def _sources(target: Target, job: Job, pin: Pin) -> dict[str, relock.Source]:
    sources = {"wheel": relock.wheel_source(target, Path(job.wheel or ""), pin.wheel.sha256)}
    if job.from_git:
        sources["tag"] = relock.git_source(job.tree, job.new_base)
    return sources


def _new_lock(manifest: Manifest, target: Target, job: Job, pin: Pin, mails: dict[str, bytes], patches=None) -> Lock:
    if patches is None:
        with pindir.parsed(mails) as parsed:
            return _new_lock(manifest, target, job, pin, mails, parsed)
    made = relock.make_lock(manifest, target, pin, _sources(target, job, pin), patches)
    for path, file in made.files.items():
        data = worktree.blob(job.tree, "HEAD", path) or b""
        if file.source_of(sha256(scratch.with_notice(path, data)), "post") is None:
            raise HashMismatch(
                "the carried patches do not give the merged file on the new wheel",
                target=target.id,
                path=path,
                expected=f"sha256 {sha256(data)} in {job.tree}",
                found=", ".join(f"{k} {v[:16]}..." for k, v in file.post.items()),
                cause="the tree that was merged differs from the wheel",
                next_step="refresh from the wheel, without --tree or --from-git",
            )
    return made


def _write(
    manifest: Manifest, target: Target, job: Job, pin: Pin, mails: dict[str, bytes], report: Report
) -> list[str]:
    with pindir.staged(manifest, target, pin, mails) as stage:
        made = _new_lock(manifest, target, job, pin, mails, stage.patches)
        names = stage.install(made)
    written = [f"patches/{target.id}/{pin.version}/{name}" for name in names]
    if newpin.insert(manifest, target, pin):
        written.append("patchset.toml")
    report.detail(newpin.snippet(target, pin))
    newpin.keep_wheel(Path(job.wheel or ""))
    return written
