# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""upstream: one patch as a branch on upstream's main, and a draft of the pull request. Never pushes, never signs off.

The work is done in a repository of ours that borrows the clone's objects. The clone itself gets one new branch and
nothing else: its worktree, index, HEAD and remotes stay as they are.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass
from pathlib import Path

from patchset import git, mailformat, scratch, worktree
from patchset.errors import DownloadFailed, PatchConflict, SeriesInvalid, UsageError
from patchset.manifest import Manifest, cache_dir
from patchset.report import Report
from patchset.types import PatchMail, Pin, Target

_MAINS = ("refs/remotes/origin/main", "refs/remotes/origin/master", "refs/heads/main", "refs/heads/master")


@dataclass(frozen=True)
class Work:
    """What is put onto what."""

    target: Target
    pin: Pin
    patch: PatchMail
    series: tuple[PatchMail, ...]  # up to and with the patch
    files: dict[str, Path]  # overlay files that go with it
    clone: Path
    main: str  # commit
    tree: Path  # the repository of ours
    branch: str

    @property
    def earlier(self) -> list[str]:
        """Patches before it in the series that touch the same files: it may need them, though git does not say so."""
        touched = {f.path for f in self.patch.files}
        return [p.slug for p in self.series[:-1] if touched & {f.path for f in p.files}]


def configure(parser: argparse.ArgumentParser, manifest: Manifest) -> None:
    parser.add_argument("slug", metavar="SLUG", help="the patch")
    parser.add_argument("--target", choices=list(manifest.targets), help="where two targets have a patch of that name")
    parser.add_argument("--pin", metavar="VERSION", help="another recorded pin of the target")
    parser.add_argument(
        "--clone", metavar="DIR|URL", help="a clone of upstream, fetched lately (default: one in the cache)"
    )
    parser.add_argument(
        "--main", metavar="REV", help="upstream's branch in the clone (default: origin/main, origin/master)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where the draft goes (default: the current directory)"
    )


def execute(args: argparse.Namespace, manifest: Manifest, report: Report) -> int:
    target, pin, series = find_patch(manifest, args.slug, args.target, args.pin)
    patch = series[-1]
    files = overlay_of(manifest, target, patch)
    clone = find_clone(target, args.clone, report)
    tree = cache_dir() / "upstream" / f"{target.id}-{patch.slug}"
    work = Work(
        target, pin, patch, series, files, clone, find_main(clone, args.main), tree, f"fp8-colocate/{patch.slug}"
    )
    _refuse_branch(work)
    how = _carry(manifest, work, report)
    if how is None:
        report.line(f"{target.id} {patch.slug}: already upstream in {_main_text(work)}; nothing to do")
        report.line('next: set "Upstream-Status: Backport [url]" and drop the patch when the pin has it')
        report.put(target=target.id, slug=patch.slug, already_upstream=True, main=work.main)
        return 0
    commit = _commit(work)
    git.run(clone, "fetch", "--quiet", "--no-tags", "--no-write-fetch-head", str(tree), f"{work.branch}:{work.branch}")
    draft = _write_draft(work, (args.out or Path.cwd()).expanduser(), how)
    _tell(work, commit, draft, how, report)
    shutil.rmtree(tree)
    return 0


def _tell(work: Work, commit: str, draft: Path, how: str, report: Report) -> None:
    commands = commands_of(work)
    report.line(
        f"{work.target.id} {work.patch.slug}: branch {work.branch} in {work.clone}, on {_main_text(work)}: {how}"
    )
    report.line(f"  {len(work.files)} overlay files with it; draft of the pull request: {draft}")
    if work.earlier:
        report.line(
            f"  warning: it may need {', '.join(work.earlier)}, which change the same files and are not in the branch"
        )
    report.line("next, by you (read it, run upstream's tests, sign off only what you may certify):")
    for command in commands:
        report.line(f"  {command}")
    report.put(
        target=work.target.id,
        slug=work.patch.slug,
        already_upstream=False,
        branch=work.branch,
        commit=commit,
        main=work.main,
        merge=how,
        may_need=work.earlier,
        files=sorted(work.files),
        draft=str(draft),
        commands=commands,
    )


def commands_of(work: Work) -> list[str]:
    """What is left to a person."""
    there = f"git -C {work.clone}"
    return [
        f"{there} switch {work.branch}",
        f"{there} commit --amend --no-edit --signoff",
        f"{there} push YOUR_FORK {work.branch}",
    ]


# What


def find_patch(
    manifest: Manifest, slug: str, target_id: str | None, version: str | None
) -> tuple[Target, Pin, tuple[PatchMail, ...]]:
    """The target and pin that hold `slug`, and their series up to it.

    Raises:
        UsageError: no patch, or patches of two targets, have that name.
    """
    found = []
    for target in manifest.targets.values():
        if target_id in (None, target.id):
            pin = manifest.pin(target, version if version in target.pins else None)
            patches = mailformat.existing_mails(manifest.patch_dir(target, pin.version))
            at = next((i for i, p in enumerate(patches) if p.slug == slug), None)
            if at is not None:
                found.append((target, pin, tuple(patches[: at + 1])))
    if len(found) == 1:
        return found[0]
    raise UsageError(
        "no patch of this name" if not found else "two targets have a patch of this name",
        found=slug if not found else ", ".join(t.id for t, _, _ in found),
        next_step="python apply.py list"
        if not found
        else f"python apply.py upstream {slug} --target {found[0][0].id}",
    )


def overlay_of(manifest: Manifest, target: Target, patch: PatchMail) -> dict[str, Path]:
    """Overlay files that belong to a patch: below its `Overlay:` prefixes, and the tests its `Fails-Without:` name.

    Raises:
        SeriesInvalid: a trailer matches no overlay file.
    """
    own = {path: file for path, file in manifest.overlay_files(target).items() if path not in target.shared}
    tests = [value.split("::", 1)[0] for value in patch.trailer_values("Fails-Without")]
    found: dict[str, Path] = {}
    for name, prefixes in (("Overlay", patch.trailer_values("Overlay")), ("Fails-Without", tests)):
        for prefix in prefixes:
            matching = {p: f for p, f in own.items() if p == prefix or p.startswith(prefix.rstrip("/") + "/")}
            if not matching:
                raise SeriesInvalid(
                    f"a {name} trailer names no overlay file",
                    target=target.id,
                    patch=patch.slug,
                    expected=f"a file or directory of overlay/{target.id}/",
                    found=prefix,
                )
            found |= matching
    return dict(sorted(found.items()))


# Where


def find_clone(target: Target, named: str | None, report: Report) -> Path:
    """A local clone of upstream: the named directory; else one in the cache, cloned or brought up to date.

    Raises:
        UsageError: the named directory is no repository.
        DownloadFailed: no network.
    """
    if named is not None and Path(named).expanduser().is_dir():
        place = Path(named).expanduser().absolute()
        if git.run(place, "rev-parse", "--git-dir", check=False).returncode != 0:
            raise UsageError("no repository there", target=target.id, path=str(place))
        return place
    if named is not None and "://" not in named and "@" not in named:
        raise UsageError("no such directory", target=target.id, path=named, expected="a clone, or a URL")
    url = named or worktree.repository(target)
    cached = worktree.cached_clone(target)
    report.progress(f"{target.id}: fetching {url}")
    if cached.is_dir():
        git.run(cached, "config", "remote.origin.url", url)
        done = git.run(cached, "fetch", "--quiet", "--prune", "origin", env=worktree.network(), check=False)
    else:
        cached.parent.mkdir(parents=True, exist_ok=True)
        clone = ("clone", "--quiet", "--no-checkout", "--template=", url, str(cached))
        done = git.run(cached.parent, *clone, env=worktree.network(), check=False)
    if done.returncode != 0:
        raise DownloadFailed(
            "upstream's repository cannot be fetched",
            target=target.id,
            path=url,
            found=done.stderr.decode(errors="replace").strip(),
            cause="no network",
            next_step="name a clone of yours: --clone DIR",
        )
    return cached


def find_main(clone: Path, named: str | None) -> str:
    """The commit of upstream's main branch in `clone`.

    Raises:
        UsageError: it has none of the usual names, or not the one given.
    """
    for ref in [named] if named else _MAINS:
        done = git.run(clone, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}", check=False)
        if done.returncode == 0:
            return done.stdout.decode().strip()
    raise UsageError(
        "the clone has no main branch",
        path=str(clone),
        expected=named or ", ".join(_MAINS),
        next_step="add --main REV",
    )


def _main_text(work: Work) -> str:
    return git.text(work.clone, "log", "-1", "--format=%h of %as", work.main)


def _refuse_branch(work: Work) -> None:
    ref = f"refs/heads/{work.branch}"
    if git.run(work.clone, "rev-parse", "--verify", "--quiet", ref, check=False).returncode == 0:
        raise UsageError(
            "the clone has this branch already",
            target=work.target.id,
            patch=work.patch.slug,
            path=str(work.clone),
            found=git.text(work.clone, "log", "-1", "--format=%h %s", ref),
            next_step=f"git -C {work.clone} branch -D {work.branch}",
        )


# How


def _carry(manifest: Manifest, work: Work, report: Report) -> str | None:
    """Pick the patch onto main. Returns "applied as it is" or "merged", None when nothing is left of it.

    Raises:
        PatchConflict: the merge needs a person, or an overlay file exists on main; the repository is left for him.
    """
    tree = work.tree
    shutil.rmtree(tree, ignore_errors=True)
    worktree.create(tree)
    _borrow_objects(work)
    wheel = worktree.wheel_of(manifest, work.target, work.pin, report)
    base = worktree.import_wheel(tree, work.target, work.pin.version, wheel, work.pin.wheel.sha256)
    worktree.show_only(tree, [*(f.path for p in work.series for f in p.files), *work.files])
    git.run(tree, "checkout", "--quiet", "-B", "series", base)
    commit = worktree.apply_mails(tree, work.series, work.target.id)[-1]
    git.run(tree, "checkout", "--quiet", "-B", work.branch, work.main)
    there = worktree.overlay_upstream(tree, work.main, work.files)
    done = git.run(tree, "cherry-pick", commit, env=worktree.identity(), check=False)
    if done.returncode != 0 and not git.text(tree, "ls-files", "--unmerged"):
        shutil.rmtree(tree)
        return None
    if done.returncode != 0 or there:
        _refuse_conflict(work, there, done.stderr.decode(errors="replace"))
    files = {f.path: data for f in work.patch.files if (data := worktree.blob(tree, work.main, f.path)) is not None}
    return "merged: the context differs from the pin's" if scratch.explain(work.patch, files) else "applied as it is"


def _borrow_objects(work: Work) -> None:
    objects = Path(git.text(work.clone, "rev-parse", "--git-path", "objects"))
    objects = objects if objects.is_absolute() else work.clone / objects
    (work.tree / ".git" / "objects" / "info" / "alternates").write_text(f"{objects.resolve()}\n")
    shallow = Path(git.text(work.clone, "rev-parse", "--git-path", "shallow"))
    shallow = shallow if shallow.is_absolute() else work.clone / shallow
    if shallow.is_file():
        shutil.copyfile(shallow, work.tree / ".git" / "shallow")


def _refuse_conflict(work: Work, there: list[str], said: str) -> None:
    earlier = work.earlier
    details = [f"exists on main: {path}" for path in there]
    details += [line for line in said.splitlines() if line.startswith(("error:", "CONFLICT"))]
    details += [
        f"unmerged: {line}" for line in git.text(work.tree, "diff", "--name-only", "--diff-filter=U").splitlines()
    ]
    raise PatchConflict(
        "the patch does not go onto upstream's main by itself",
        target=work.target.id,
        patch=work.patch.slug,
        path=str(work.tree),
        cause=f"it stands on {', '.join(earlier)}" if earlier else "upstream changed these lines since the pin",
        next_step=f"refresh the target first; or port it by hand: the merge is in {work.tree}",
        details=details,
    )


def _commit(work: Work) -> str:
    """The picked commit with the overlay files in it and the message upstream should see."""
    tree = work.tree
    for path, file in work.files.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, tree / path)
    if work.files:
        git.run(tree, "add", "--force", "--sparse", "--", *work.files)
    message = mailformat.public_message(git.run(tree, "log", "-1", "--format=%B").stdout.decode())
    name, email, date = git.text(tree, "log", "-1", "--format=%an%x00%ae%x00%ad", "--date=raw").split("\0")
    author = {"GIT_COMMITTER_NAME": name, "GIT_COMMITTER_EMAIL": email, "GIT_COMMITTER_DATE": date}
    commit = ("commit", "--quiet", "--amend", "--no-verify", "--cleanup=verbatim", "--file=-")
    git.run(tree, *commit, stdin=message.encode(), env=author)
    return git.text(tree, "rev-parse", "HEAD")


# The draft


def _write_draft(work: Work, directory: Path, how: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{work.target.id}-{work.patch.slug}.md"
    path.write_text(draft(work, _main_text(work), how), encoding="utf-8")
    return path


def draft(work: Work, main: str, how: str) -> str:
    """Title and body of a pull request, in Markdown: what and why from the mail, how tested from its trailers."""
    patch = work.patch
    tests = patch.trailer_values("Fails-Without")
    files = list(dict.fromkeys(test.split("::", 1)[0] for test in tests))
    listed = [f"- `{test}`" for test in tests] or ["- (name the tests)"]
    new = [f"- `{path}` (new)" for path in work.files if path not in files]
    changed = [f"- `{f.path}` (+{f.added} -{f.removed})" for f in patch.files]
    needs = [f"May need, not in this branch: {', '.join(work.earlier)}."] if work.earlier else []
    parts = [
        f"# {patch.subject}",
        "## What and why",
        _unwrapped(patch.body) or "(say what and why)",
        "## Changes",
        "\n".join([*changed, *new, *(f"- `{path}` (tests)" for path in files)]),
        *needs,
        "## How tested",
        f"Made for {work.target.dist} {work.pin.version}, put onto {main}: {how}. On the former these tests fail "
        "without the change and pass with it:",
        "\n".join(listed),
        "Not run on main by the tool that wrote this draft. Run, and say so here:",
        f"```\npytest {' '.join(files) or 'TESTS'}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _unwrapped(text: str) -> str:
    """One line a paragraph: a forge shows each line break of a message. Lists, code and tables stay as they are."""
    paragraphs = text.strip().split("\n\n")
    plain = [all(line[:1].isalpha() or line[:1] in "`(\"'" for line in p.splitlines()) for p in paragraphs]
    return "\n\n".join(" ".join(p.splitlines()) if ok else p for p, ok in zip(paragraphs, plain, strict=True))
