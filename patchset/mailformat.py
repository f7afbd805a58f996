# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Commits to patch mails and back: the same bytes on every machine, slugs that stay, trailers that are ours."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from patchset import git, worktree
from patchset.errors import SeriesInvalid
from patchset.series import load_series, parse_mail
from patchset.types import PatchMail

# as Electron found out: without these a mail depends on the machine, the git version and the user's configuration
FORMAT = ("--zero-commit", "--full-index", "--no-signature", "--no-stat", "-N", "--no-attach", "--stdout", "-1")
REQUIRED_TRAILERS = ("Upstream-Status", "Drop-When", "Origin", "License")
# not for upstream's eyes: they speak of this patch set
PRIVATE_TRAILERS = (*REQUIRED_TRAILERS, "Fails-Without", "Overlay")
_SLUG_LENGTH = 60
SERIES_HEADER = "# one patch slug a line, applied in this order\n"


@dataclass(frozen=True)
class Formatted:
    """One commit as the mail it becomes."""

    commit: str
    data: bytes
    mail: PatchMail  # parsed; its slug is a placeholder until one is assigned
    paths: tuple[str, ...]


def format_commits(repository: Path, commits: Sequence[str]) -> list[Formatted]:
    """Turn commits into mails and check that each survives the way back.

    Raises:
        SeriesInvalid: a commit does more than modify files, lacks a trailer, or its message does not survive a mail.
    """
    formatted = []
    with tempfile.TemporaryDirectory(prefix="fp8-colocate-") as name:
        for commit in commits:
            paths = worktree.check_commit(repository, commit)
            data = git.run(repository, "format-patch", *FORMAT, commit).stdout
            file = Path(name) / f"{commit}.patch"
            file.write_bytes(data)
            mail = parse_mail(file)
            _check_message(repository, commit, data, Path(name))
            _check_trailers(mail, commit)
            formatted.append(Formatted(commit, data, mail, tuple(paths)))
    return formatted


def _check_message(repository: Path, commit: str, data: bytes, directory: Path) -> None:
    body = directory / "message"
    git.run(repository, "mailinfo", "-b", str(body), str(directory / "diff"), stdin=data)
    expected = git.run(repository, "log", "-1", "--format=%b", commit).stdout.strip()
    found = body.read_bytes().strip()
    if found != expected:
        lost = next((line for line in expected.splitlines() if line not in found.splitlines()), b"")
        raise SeriesInvalid(
            "a commit message cannot be carried by a mail",
            patch=git.text(repository, "log", "-1", "--format=%h %s", commit),
            found=lost.decode(errors="replace") or "the order of lines changes",
            cause="a line `---`, `diff --git ...`, or a first line that looks like a header",
            next_step="reword the message",
        )


def _check_trailers(mail: PatchMail, commit: str) -> None:
    missing = [name for name in REQUIRED_TRAILERS if not mail.trailer(name)]
    if missing:
        raise SeriesInvalid(
            "a commit lacks trailers",
            patch=f"{commit[:12]} {mail.subject}",
            expected=", ".join(f"{name}: ..." for name in REQUIRED_TRAILERS),
            found="without " + ", ".join(missing),
            cause="they must be the last paragraph of the message, without a blank line between them",
            next_step="git rebase -i and reword it; docs/making-a-patch.md",
        )


# Slugs


def assign_slugs(repository: Path, formatted: Sequence[Formatted], existing: Sequence[PatchMail]) -> list[str]:
    """A slug for each commit: that of the existing patch with its subject, else with its diff, else from the subject.

    Raises:
        SeriesInvalid: two commits share a subject, or a subject has no word a slug could be made of.
    """
    twice = [subject for subject, count in Counter(f.mail.subject for f in formatted).items() if count > 1]
    if twice:
        raise SeriesInvalid(
            "two commits have the same subject", found=twice[0], next_step="git rebase -i and reword one"
        )
    by_subject = {p.subject: p.slug for p in existing}
    slugs = {f.commit: by_subject.pop(f.mail.subject) for f in formatted if f.mail.subject in by_subject}
    left = [p for p in existing if p.slug in by_subject.values()]
    by_diff = dict(zip(patch_ids(repository, [p.path.read_bytes() for p in left]), left, strict=True))
    for entry in formatted:
        if entry.commit not in slugs and by_diff:
            same = by_diff.pop(patch_ids(repository, [entry.data])[0], None)
            if same is not None:
                slugs[entry.commit] = same.slug
    for entry in formatted:
        if entry.commit not in slugs:
            slugs[entry.commit] = _free(slug_of(entry.mail.subject), set(slugs.values()))
    return [slugs[entry.commit] for entry in formatted]


def slug_of(subject: str) -> str:
    """Lower-case words with dashes, cut at a word, without a leading number.

    Raises:
        SeriesInvalid: nothing is left.
    """
    words = re.findall(r"[a-z0-9]+", subject.lower())
    while words and words[0].isdigit():
        words.pop(0)
    slug = ""
    for word in words:
        if slug and len(slug) + 1 + len(word) > _SLUG_LENGTH:
            break
        slug = f"{slug}-{word}" if slug else word[:_SLUG_LENGTH]
    if not slug:
        raise SeriesInvalid("no slug can be made of a subject", found=subject, next_step="reword the commit")
    return slug


def _free(slug: str, taken: set[str]) -> str:
    suffixes = ("", *(f"-{chr(letter)}" for letter in range(ord("b"), ord("z") + 1)))
    return next(slug + suffix for suffix in suffixes if slug + suffix not in taken)


def patch_ids(repository: Path, mails: Sequence[bytes]) -> list[str]:
    """git's stable patch id of each mail: the same for the same change, whatever the message and line numbers."""
    return [git.run(repository, "patch-id", "--stable", stdin=mail).stdout.decode().split(" ")[0] for mail in mails]


def series_text(slugs: Sequence[str], before: str) -> str:
    """A series file with `slugs`; comments of the one before stay with the slug they precede."""
    lines = before.splitlines(keepends=True)
    old = [slug for line in lines if (slug := line.split("#", 1)[0].strip())]
    if old == list(slugs) and before:
        return before
    head: list[str] = []
    blocks: dict[str, list[str]] = {}
    pending: list[str] = []
    for line in lines:
        slug = line.split("#", 1)[0].strip()
        pending.append(line if line.endswith("\n") else line + "\n")
        if slug:
            head, pending = (head, pending) if blocks else _split_head(pending)
            blocks[slug] = pending
            pending = []
    head = head if blocks else pending
    body = [line for slug in slugs for line in blocks.get(slug, [f"{slug}\n"])]
    return "".join([*(head if before else [SERIES_HEADER]), *body, *(pending if blocks else [])])


def _split_head(lines: list[str]) -> tuple[list[str], list[str]]:
    return lines[:-1], lines[-1:]


# Messages


def public_message(message: str) -> str:
    """A commit message without the trailers that speak of this patch set."""
    body, _, last = message.rstrip().rpartition("\n\n")
    kept: list[str] = []
    dropping = False
    for line in last.splitlines():
        folded = line.startswith((" ", "\t"))
        dropping = dropping if folded else line.split(":", 1)[0] in PRIVATE_TRAILERS
        if not dropping:
            kept.append(line)
    return "\n\n".join(part for part in (body, "\n".join(kept)) if part) + "\n"


def existing_mails(directory: Path) -> list[PatchMail]:
    """The series of a pin directory; an absent directory is an empty series."""
    return load_series(directory) if directory.is_dir() else []


def same_change(old: PatchMail, new: PatchMail) -> bool:
    """Whether two mails change the same lines in the same context; line numbers and blob ids may differ."""
    return [(f.path, [h.lines for h in f.hunks]) for f in old.files] == [
        (f.path, [h.lines for h in f.hunks]) for f in new.files
    ]
