# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Repositories of ours that hold an upstream version as a base commit and the series as commits on top.

They serve `dev`, `export`, `refresh` and `upstream`; apply never needs one. Everything that makes a commit id is fixed
(committer, dates, file bytes), so two machines get the same ids. A user's git works in them too: the repository's own
configuration and attributes switch off what would change bytes behind his back.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchset import download, git, scratch
from patchset.errors import Drift, FileSystemError, Interrupted, PatchConflict, SeriesInvalid, StateInvalid, UsageError
from patchset.manifest import Manifest, cache_dir
from patchset.relock import open_wheel
from patchset.report import Report
from patchset.target import locate
from patchset.types import Located, PatchMail, Pin, Target, sha256

BRANCH = "fp8-colocate"
RECORD = "fp8-colocate.json"
NAME, EMAIL, _DATE = "fp8-colocate", "fp8-colocate@users.noreply.invalid", "946684800 +0000"
_BUILD_PRODUCTS = (".so", ".pyd", ".pyc")
_LOCAL_CONFIG = {
    "core.autocrlf": "false",
    "core.eol": "lf",
    "core.safecrlf": "false",
    "apply.whitespace": "nowarn",
    "commit.gpgSign": "false",
    "merge.conflictStyle": "merge",
    "gc.auto": "0",
}
# outranks every .gitattributes of upstream: bytes go in and out as they are, diffs look the same everywhere
_ATTRIBUTES = "* -text !eol -ident -filter -working-tree-encoding !diff !merge\n"

Files = Mapping[str, tuple[str, bytes]]  # upstream path -> (git mode, bytes)


class Unexported(Drift):
    """A worktree holds commits or edits that are not in patches/ or overlay/ yet."""


@dataclass(frozen=True)
class Record:
    """What a worktree was made from, kept in its git directory."""

    target: str
    version: str
    base: str  # commit of the pin's files
    source: str  # "wheel sha256:<hex>" or "tag <commit>"
    head: str  # HEAD when worktree and patches/ were last the same
    mails: tuple[tuple[str, str], ...]  # (slug, sha256) at that moment, in series order
    links: tuple[str, ...] = ()  # overlay paths linked into the worktree


def create(directory: Path) -> None:
    """Make `directory` an empty repository in which no configuration of the user changes bytes.

    Raises:
        FileSystemError: it cannot be created.
    """
    try:
        git.init(directory)
        (directory / ".git" / "info").mkdir(exist_ok=True)
        (directory / ".git" / "info" / "attributes").write_text(_ATTRIBUTES)
    except OSError as error:
        raise FileSystemError("a worktree cannot be made", path=str(directory), found=error.strerror) from error
    for key, value in _LOCAL_CONFIG.items():
        git.run(directory, "config", key, value)


def record_path(directory: Path) -> Path:
    """Where the record of a worktree lies; the file need not exist."""
    return (git.git_dir(directory) or directory / ".git") / RECORD


def read_record(directory: Path) -> Record | None:
    """The record of a worktree, None when this is no worktree of ours.

    Raises:
        StateInvalid: the record is damaged.
    """
    path = record_path(directory)
    try:
        body = json.loads(path.read_bytes())
        mails = tuple((slug, digest) for slug, digest in body.pop("mails"))
        return Record(mails=mails, links=tuple(body.pop("links")), **body)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateInvalid(
            "the record of a worktree is damaged",
            path=str(path),
            found=f"{type(error).__name__}: {error}",
            next_step=f"save your commits (git -C {directory} format-patch ...), remove {directory}, run dev again",
        ) from error


def write_record(directory: Path, record: Record) -> None:
    """Write the record in one step."""
    path = record_path(directory)
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(record.__dict__, indent=1) + "\n")
    os.replace(new, path)


# An upstream version as a commit


def upstream_path(target: Target, installed: str) -> str | None:
    """The inverse of `Target.installed_path`; None for what no layout prefix covers (dist-info, other packages)."""
    prefixes = sorted(target.layout.items(), key=lambda item: -len(item[1]))
    return next((up + installed[len(inst) :] for up, inst in prefixes if installed.startswith(inst)), None)


def wheel_files(target: Target, wheel: Path, expected_sha256: str | None) -> dict[str, tuple[str, bytes]]:
    """Every source file of a wheel at its upstream path. Build products are left out: no patch can touch them.

    Raises:
        WheelInvalid: not the expected bytes, or not a zip.
    """
    with open_wheel(target, wheel, expected_sha256) as archive:
        names = ((info, upstream_path(target, info.filename)) for info in archive.infolist() if not info.is_dir())
        return {
            path: (_zip_mode(info), archive.read(info))
            for info, path in names
            if path is not None and not path.endswith(_BUILD_PRODUCTS)
        }


def _zip_mode(info: zipfile.ZipInfo) -> str:
    return "100755" if (info.external_attr >> 16) & 0o111 else "100644"


def tree_files(target: Target, root: Path) -> dict[str, tuple[str, bytes]]:
    """Every source file of a tree on disk (checkout, sdist, unpacked wheel, site-packages) at its upstream path.

    Raises:
        UsageError: nothing of the target is there.
    """
    found = locate(target, root)
    files: dict[str, tuple[str, bytes]] = {}
    for prefix in target.layout:
        place = found.place(prefix)
        if place is not None and place.is_dir():
            files |= _files_below(found, prefix, place)
    return files


def _files_below(found: Located, prefix: str, place: Path) -> Iterator[tuple[str, tuple[str, bytes]]]:
    for file in sorted(place.rglob("*")):
        if file.is_symlink() or not file.is_file() or file.suffix in _BUILD_PRODUCTS:
            continue
        mode = "100755" if file.stat().st_mode & 0o111 else "100644"
        yield prefix + file.relative_to(place).as_posix(), (mode, file.read_bytes())


def import_commit(repository: Path, files: Files, message: str, parent: str | None = None) -> str:
    """Store `files` as one commit, byte for byte, past every attribute and ignore rule. Returns its id."""
    ref = "refs/fp8-colocate/import"
    parts = [f"reset {ref}\n".encode()] if parent is None else []
    parts += [f"commit {ref}\nmark :1\ncommitter {NAME} <{EMAIL}> {_DATE}\n".encode(), _data(message.encode())]
    parts += [f"from {parent}\n".encode()] if parent else []
    parts.append(b"deleteall\n")
    for path, (mode, data) in sorted(files.items()):
        parts += [f"M {mode} inline {path}\n".encode(), _data(data)]
    git.run(repository, "fast-import", "--quiet", "--force", "--date-format=raw", stdin=b"".join(parts))
    commit = git.text(repository, "rev-parse", ref)
    git.run(repository, "update-ref", "-d", ref)
    git.run(repository, "update-ref", f"refs/fp8-colocate/base/{commit}", commit)  # keeps it from being collected
    return commit


def _data(data: bytes) -> bytes:
    return b"data %d\n%s\n" % (len(data), data)


def import_wheel(
    repository: Path, target: Target, version: str, wheel: Path, expected: str | None, parent=None
) -> str:
    """The files of a wheel as a commit named after it."""
    message = f"{target.dist} {version}\n\nFiles of {wheel.name}, sha256 {sha256(wheel.read_bytes())}\n"
    return import_commit(repository, wheel_files(target, wheel, expected), message, parent)


def fetch_tag(repository: Path, clone: str, tag: str) -> str:
    """Bring one tag, without its history, from a clone or URL. Returns its commit.

    Raises:
        GitFailed: no such clone or tag, or no network.
    """
    where = str(Path(clone).resolve()) if Path(clone).exists() else clone
    ref = f"refs/fp8-colocate/tag/{tag}"
    git.run(repository, "fetch", "--quiet", "--depth=1", "--no-tags", where, f"+refs/tags/{tag}:{ref}", env=network())
    return git.text(repository, "rev-parse", f"{ref}^{{commit}}")


def network() -> dict[str, str]:
    """The caller's git variables that a transfer may need: keys, certificates, proxies."""
    return {k: v for k, v in os.environ.items() if k.startswith(("GIT_SSL_", "GIT_SSH", "GIT_HTTP_", "GIT_PROXY_"))}


def repository(target: Target) -> str:
    """Where upstream's repository is: FP8_COLOCATE_REPO_<TARGET>, else as patchset.toml says."""
    return os.environ.get(f"FP8_COLOCATE_REPO_{target.id.upper().replace('-', '_')}") or target.repo


def cached_clone(target: Target) -> Path:
    """Where a clone of upstream's repository is kept, if there is one."""
    return cache_dir() / "git" / target.id


def has_tag(clone: Path, tag: str | None) -> bool:
    """Whether a clone is there and holds `tag`."""
    if tag is None or not clone.is_dir():
        return False
    return (
        git.run(clone, "rev-parse", "--verify", "--quiet", f"refs/tags/{tag}^{{commit}}", check=False).returncode == 0
    )


def wheel_of(manifest: Manifest, target: Target, pin: Pin, report: Report) -> Path:
    """The pinned wheel: from the cache when its bytes are right, else fetched.

    Raises:
        DownloadFailed: pip could not bring it.
    """
    return download.wheel_path(manifest, target, pin, report)


def show_only(repository: Path, paths: Sequence[str]) -> None:
    """Check out `paths` alone from now on: merging needs no more, and a whole tree takes seconds."""
    (repository / ".git" / "info" / "sparse-checkout").write_text(
        "".join(f"/{path}\n" for path in dict.fromkeys(paths))
    )
    git.run(repository, "config", "core.sparseCheckout", "true")


def show_all(repository: Path) -> None:
    """Check out the whole tree, for a person. Unmerged files stay as they are."""
    git.run(repository, "sparse-checkout", "disable")


# The series as commits


def identity(date: str = _DATE) -> dict[str, str]:
    """Environment of a commit made by the tool: fixed committer, `date` as its date."""
    return {
        "GIT_COMMITTER_NAME": NAME,
        "GIT_COMMITTER_EMAIL": EMAIL,
        "GIT_COMMITTER_DATE": date,
    }


def apply_mails(repository: Path, patches: Sequence[PatchMail], target: str) -> list[str]:
    """One commit a patch on HEAD, author, date and message from the mail. Returns the ids.

    Raises:
        PatchConflict: a patch does not apply to the base.
    """
    commits = []
    for patch in patches:
        env = {k: v for k, v in identity().items() if k != "GIT_COMMITTER_DATE"}
        flags = ("--quiet", "--keep-cr", "--keep-non-patch", "--no-3way", "--no-scissors", "--no-message-id")
        mail = str(patch.path.resolve())
        done = git.run(repository, "am", *flags, "--committer-date-is-author-date", mail, env=env, check=False)
        if done.returncode != 0:
            git.run(repository, "am", "--abort", check=False)
            files = {f.path: data for f in patch.files if (data := blob(repository, "HEAD", f.path)) is not None}
            raise PatchConflict(
                "a patch does not apply to its pin",
                target=target,
                patch=patch.slug,
                found=done.stderr.decode(errors="replace").strip().partition("\n")[0],
                cause="the patch, or one before it in the series, was edited by hand",
                next_step=f"mend {patch.path}, or take it from git again",
                details=scratch.explain(patch, files),
            )
        commits.append(git.text(repository, "rev-parse", "HEAD"))
    return commits


def blob(repository: Path, commit: str, path: str) -> bytes | None:
    """Bytes of a file in a commit, None when it is not there."""
    done = git.run(repository, "cat-file", "blob", f"{commit}:{path}", check=False)
    return done.stdout if done.returncode == 0 else None


def commits_between(repository: Path, base: str, head: str = "HEAD") -> list[str]:
    """Commits after `base` up to `head`, oldest first.

    Raises:
        Drift: `base` is not an ancestor of `head`, or a merge lies between.
    """
    if git.run(repository, "merge-base", "--is-ancestor", base, head, check=False).returncode != 0:
        raise Drift(
            "the commits do not stand on the pin",
            path=str(repository),
            expected=f"{base[:12]} (the pin's files) below HEAD",
            found=git.text(repository, "log", "-1", "--format=%h %s", head),
            cause="rebased onto another version; going to a new version is `refresh`",
            next_step=f"git -C {repository} rebase --onto {base[:12]} ...",
        )
    merges = git.text(repository, "log", "--merges", "--format=%h %s", f"{base}..{head}")
    if merges:
        raise Drift(
            "a merge commit cannot become a patch",
            path=str(repository),
            found=merges.splitlines()[0],
            next_step=f"git -C {repository} rebase {base[:12]}",
        )
    return git.text(repository, "rev-list", "--reverse", f"{base}..{head}").split()


def check_commit(repository: Path, commit: str) -> list[str]:
    """Upstream paths that a commit modifies.

    Raises:
        SeriesInvalid: it is empty, or creates, deletes, renames or changes the mode of a file.
    """
    flags = ("-r", "--raw", "-z", "--no-renames", "--no-commit-id", "--no-abbrev")
    fields = git.run(repository, "diff-tree", *flags, commit).stdout.decode(errors="surrogateescape").split("\0")
    paths = []
    subject = git.text(repository, "log", "-1", "--format=%h %s", commit)
    for raw, path in zip(fields[::2], fields[1::2], strict=False):
        old_mode, new_mode, _, _, status = raw.lstrip(":").split(" ")
        if status != "M" or old_mode != new_mode:
            raise SeriesInvalid(
                "a commit may only modify files",
                patch=subject,
                path=path,
                found={"A": "a new file", "D": "a deleted file", "T": "another type"}.get(status, "a mode change"),
                next_step="put new files into overlay/ and take them out of the commit",
            )
        paths.append(path)
    if not paths:
        raise SeriesInvalid(
            "an empty commit cannot become a patch",
            patch=subject,
            next_step=f"git -C {repository} rebase -i and drop it",
        )
    return paths


def refuse_operation(repository: Path) -> None:
    """Raise when a rebase, am, cherry-pick or merge is half done.

    Raises:
        Interrupted: it names the operation and how to end it.
    """
    git_directory = git.git_dir(repository)
    marks = {
        "rebase-merge": "rebase",
        "rebase-apply": "am",
        "CHERRY_PICK_HEAD": "cherry-pick",
        "MERGE_HEAD": "merge",
        "REVERT_HEAD": "revert",
    }
    for mark, name in marks.items():
        if git_directory is not None and (git_directory / mark).exists():
            raise Interrupted(
                f"a {name} is half done in the worktree",
                path=str(repository),
                next_step=f"git -C {repository} {name} --continue   (or --abort)",
            )


def edits(repository: Path) -> list[str]:
    """Tracked files with uncommitted changes, as `git status --short` lines."""
    flags = ("--porcelain", "--untracked-files=no", "--no-renames")
    return git.run(repository, "status", *flags).stdout.decode(errors="replace").splitlines()


def untracked(repository: Path) -> list[str]:
    """New files that are neither committed nor overlay nor ignored."""
    return git.text(repository, "ls-files", "--others", "--exclude-standard").splitlines()


# Overlay files beside the patches


def link_overlay(manifest: Manifest, target: Target, directory: Path, before: Sequence[str]) -> tuple[str, ...]:
    """Put a symbolic link to each overlay file at its upstream path; drop links whose file is gone.

    An edit through the link is an edit of overlay/. The links are excluded from git by .git/info/exclude.

    Raises:
        SeriesInvalid: an overlay path exists in the base.
        Unexported: a place holds a file with other bytes: some editors replace a link by a copy.
    """
    overlay = manifest.overlay_files(target)
    refuse_overlay_upstream(directory, "HEAD", overlay, target)
    refuse_overlay_copies(directory, overlay, target)
    for path in set(before) - set(overlay):
        if (directory / path).is_symlink():
            (directory / path).unlink()
    for path, file in overlay.items():
        place = directory / path
        if not _is_link_to(place, file):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            place.symlink_to(file.resolve())
    (directory / ".git" / "info" / "exclude").write_text("".join(f"/{path}\n" for path in overlay))
    return tuple(overlay)


def _is_link_to(place: Path, file: Path) -> bool:
    return place.is_symlink() and Path(os.readlink(place)) == file.resolve()


def refuse_overlay_copies(directory: Path, overlay: Mapping[str, Path], target: Target) -> None:
    """Raise when a worktree holds an overlay file as a copy with other bytes.

    Raises:
        Unexported: names each file and the command that saves it.
    """
    copies = []
    for path, file in overlay.items():
        place = directory / path
        if place.is_file() and not place.is_symlink() and place.read_bytes() != file.read_bytes():
            copies.append(f"cp {place} {file}")
    if copies:
        raise Unexported(
            f"{len(copies)} overlay files in the worktree are copies that differ from overlay/",
            target=target.id,
            path=str(directory),
            expected="links into overlay/",
            cause="an editor or `sed -i` replaced the link by a file",
            next_step="copy what you want to keep, remove the copies, run dev again",
            details=copies,
        )


def refuse_overlay_upstream(directory: Path, commit: str, overlay: Mapping[str, Path], target: Target) -> None:
    """Raise when upstream has a file at an overlay path.

    Raises:
        SeriesInvalid: names the paths.
    """
    there = overlay_upstream(directory, commit, overlay)
    if there:
        raise SeriesInvalid(
            f"{len(there)} overlay files exist upstream",
            target=target.id,
            path=there[0],
            expected="new files only",
            next_step="rename the overlay file, or make a patch of the change",
            details=there,
        )


def overlay_upstream(directory: Path, commit: str, overlay: Mapping[str, Path]) -> list[str]:
    """Overlay paths that `commit` holds too."""
    done = git.run(directory, "ls-tree", "-r", "-z", "--name-only", commit)
    tracked = set(done.stdout.decode(errors="surrogateescape").split("\0"))
    return [path for path in overlay if path in tracked]


def usage_of_foreign(directory: Path, target: Target) -> UsageError:
    """The error for a directory that is not a worktree of `target`."""
    record = read_record(directory) if directory.is_dir() else None
    return UsageError(
        "this directory is not a worktree that `dev` made for this pin",
        target=target.id,
        path=str(directory),
        found=f"{record.target} {record.version}" if record else "other files",
        next_step=f"python apply.py dev {target.id} --dir NEW_DIRECTORY",
    )
