# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""dev: a worktree with the pin's files as its base, one commit a patch on top, and links to the overlay files."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
from pathlib import Path

from patchset import git, mailformat, pindir, state, worktree
from patchset.errors import Drift, PatchsetError, UsageError
from patchset.manifest import Manifest, cache_dir
from patchset.report import Report
from patchset.types import PatchMail, Pin, Target, sha256


def configure(parser: argparse.ArgumentParser, manifest: Manifest) -> None:
    parser.add_argument("target", metavar="TARGET", help=", ".join(manifest.targets))
    parser.add_argument("--pin", metavar="VERSION", help="another recorded pin of the target")
    parser.add_argument("--dir", type=Path, metavar="D", help="make the worktree there instead of in the cache")
    parser.add_argument(
        "--from-git",
        metavar="CLONE",
        nargs="?",
        const="",
        help="base it on the tag, from CLONE (a directory or URL; default: upstream's repository), not on the wheel",
    )


def execute(args: argparse.Namespace, manifest: Manifest, report: Report) -> int:
    target = manifest.target(args.target)
    pin = manifest.pin(target, args.pin)
    directory = (args.dir or default_directory(target, pin)).expanduser().absolute()
    clone = worktree.repository(target) if args.from_git == "" else args.from_git
    record = prepare(manifest, target, pin, directory, clone, report)
    commits = worktree.commits_between(directory, record.base)
    report.progress(
        f"{target.id} {pin.version}: {len(commits)} commits on {record.source[:24]}, {len(record.links)} overlay links"
    )
    report.put(target=target.id, version=pin.version, path=str(directory), base=record.base, commits=commits)
    if not report.as_json:
        print(directory)  # and nothing else: cd "$(python apply.py dev sglang)"
    return 0


def default_directory(target: Target, pin: Pin) -> Path:
    """The cached worktree of a pin."""
    return cache_dir() / "dev" / f"{target.id}-{pin.version}"


def prepare(
    manifest: Manifest, target: Target, pin: Pin, directory: Path, clone: str | None, report: Report
) -> worktree.Record:
    """Make the worktree, or bring an existing one up to patches/.

    Raises:
        Unexported: it holds commits or edits that are not in patches/.
        UsageError: the directory is something else.
    """
    pindir.recover_all(manifest, target)
    if directory.is_dir() and any(directory.iterdir()):
        return _update(manifest, target, pin, directory, clone, report)
    worktree.create(directory)
    with state.hold([directory], 30.0):
        unfinished = worktree.Record(target.id, pin.version, "", "", "", ())
        worktree.write_record(directory, unfinished)
        try:
            return _build(manifest, target, pin, directory, clone, report, unfinished)
        except PatchsetError:
            shutil.rmtree(directory, ignore_errors=True)
            raise


def _update(
    manifest: Manifest, target: Target, pin: Pin, directory: Path, clone: str | None, report: Report
) -> worktree.Record:
    record = worktree.read_record(directory) if git.git_dir(directory) else None
    if record is None or (record.target, record.version) != (target.id, pin.version):
        raise worktree.usage_of_foreign(directory, target)
    with state.hold([directory], 30.0):
        if not record.base:  # a first run was killed: nothing of a user can be in here
            return _build(manifest, target, pin, directory, clone, report, record)
        refuse_unexported(manifest, target, pin, directory, record)
        worktree.refuse_overlay_copies(directory, manifest.overlay_files(target), target)
        if _is_stale(manifest, target, pin, directory, clone, record):
            return _build(manifest, target, pin, directory, clone, report, record)
        links = worktree.link_overlay(manifest, target, directory, record.links)
        record = dataclasses.replace(record, links=links)
        worktree.write_record(directory, record)
        return record


def _is_stale(
    manifest: Manifest, target: Target, pin: Pin, directory: Path, clone: str | None, record: worktree.Record
) -> bool:
    wanted_git = clone is not None and not record.source.startswith("tag ")
    other_wheel = record.source.startswith("wheel ") and record.source != f"wheel sha256:{pin.wheel.sha256}"
    current = tuple(mails_of(manifest, target, pin))
    return wanted_git or other_wheel or current != record.mails or not _on_record(directory, record)


def _on_record(directory: Path, record: worktree.Record) -> bool:
    return git.text(directory, "rev-parse", "HEAD") == record.head


def mails_of(manifest: Manifest, target: Target, pin: Pin) -> list[tuple[str, str]]:
    """(slug, sha256) of the pin's patches, in series order."""
    return [(p.slug, p.sha256) for p in _patches(manifest, target, pin)]


def _patches(manifest: Manifest, target: Target, pin: Pin) -> list[PatchMail]:
    return mailformat.existing_mails(manifest.patch_dir(target, pin.version))


def refuse_unexported(manifest: Manifest, target: Target, pin: Pin, directory: Path, record: worktree.Record) -> None:
    """Raise when the worktree holds work that patches/ does not.

    Raises:
        Unexported: names the commits and the files.
        Interrupted: a rebase or am is half done.
    """
    worktree.refuse_operation(directory)
    edited = worktree.edits(directory)
    commits = unexported_commits(directory, record)
    if commits and [h for _, h in mails_of(manifest, target, pin)] == hashes_or_none(directory, record.base):
        commits = []
    if edited or commits:
        raise worktree.Unexported(
            f"the worktree holds {len(commits)} commits and {len(edited)} edited files that are not in patches/",
            target=target.id,
            path=str(directory),
            next_step=f"commit, then: python apply.py export {target.id} --from {directory}; or dev --dir elsewhere",
            details=[*(f"commit {line}" for line in commits), *(f"edited {line}" for line in edited)],
        )


def unexported_commits(directory: Path, record: worktree.Record) -> list[str]:
    """Commits made since worktree and patches/ were last the same, as `<short id> <subject>` lines."""
    if _on_record(directory, record):
        return []
    lines = git.text(directory, "log", "--format=%ce %h %s", f"{record.base}..HEAD").splitlines()
    fresh = [line.split(" ", 1)[1] for line in lines if not line.startswith(worktree.EMAIL + " ")]
    if not fresh and git.run(directory, "symbolic-ref", "--quiet", "HEAD", check=False).returncode == 0:
        return ["(none, but commits were dropped or reordered)"]
    return fresh  # the tool's own commits on a detached HEAD: a run was killed while it built the series


def hashes_or_none(directory: Path, base: str) -> list[str] | None:
    """sha256 of the mail of each commit; None when a commit could not be exported as it is."""
    try:
        commits = worktree.commits_between(directory, base)
        return [sha256(f.data) for f in mailformat.format_commits(directory, commits)]
    except PatchsetError:
        return None


def _build(
    manifest: Manifest,
    target: Target,
    pin: Pin,
    directory: Path,
    clone: str | None,
    report: Report,
    record: worktree.Record,
) -> worktree.Record:
    base, source = base_commit(manifest, target, pin, directory, clone, report)
    patches = _patches(manifest, target, pin)
    worktree.refuse_overlay_upstream(directory, base, manifest.overlay_files(target), target)
    git.run(directory, "checkout", "--quiet", "--detach", base)
    try:
        commits = worktree.apply_mails(directory, patches, target.id)
    except PatchsetError:
        if record.head:
            git.run(directory, "checkout", "--quiet", "-B", worktree.BRANCH, record.head)
        raise
    git.run(directory, "checkout", "--quiet", "-B", worktree.BRANCH)
    mails = tuple((p.slug, p.sha256) for p in patches)
    links = worktree.link_overlay(manifest, target, directory, record.links)
    head = commits[-1] if commits else base
    made = worktree.Record(target.id, pin.version, base, source, head, mails, links)
    worktree.write_record(directory, made)
    return made


def base_commit(
    manifest: Manifest, target: Target, pin: Pin, directory: Path, clone: str | None, report: Report
) -> tuple[str, str]:
    """The pin's files as a commit: the tag from `clone` or from the cached clone, else the wheel.

    Returns:
        The commit, and where it came from: "tag <commit>" or "wheel sha256:<hex>".

    Raises:
        UsageError: a clone is named and the pin has no tag.
        Drift: the tag is not the recorded commit.
    """
    cached = worktree.cached_clone(target)
    if clone is None and worktree.has_tag(cached, pin.tag):
        clone = str(cached)
    if clone is None:
        wheel = worktree.wheel_of(manifest, target, pin, report)
        base = worktree.import_wheel(directory, target, pin.version, wheel, pin.wheel.sha256)
        return base, f"wheel sha256:{pin.wheel.sha256}"
    if pin.tag is None:
        raise UsageError("the pin has no tag in patchset.toml", target=target.id, found=pin.version)
    report.progress(f"fetching {pin.tag} from {clone}")
    base = worktree.fetch_tag(directory, clone, pin.tag)
    if pin.commit is not None and base != pin.commit:
        raise Drift(
            "the tag is not the pinned commit",
            target=target.id,
            path=clone,
            expected=pin.commit,
            found=base,
            cause="the tag was moved",
        )
    return base, f"tag {base}"
