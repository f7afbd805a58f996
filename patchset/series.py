# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Parse a series file and its patch mails: bytes in, types out, no side effects.

A patch is one `git format-patch --full-index` mail: header, message with trailers as its last paragraph, unified diff.
"""

from __future__ import annotations

import email
import email.errors
import email.policy
import re
from pathlib import Path

from patchset.errors import SeriesInvalid
from patchset.types import FileDiff, Hunk, PatchMail, sha256

# what the email package raises on a malformed header
_HEADER_FAULTS = (ValueError, LookupError, TypeError, AttributeError, RecursionError, email.errors.MessageError)
SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_TRAILER = re.compile(r"([A-Z][A-Za-z-]*): (.+)")
# `git diff --git` headers of plain paths; quoted paths (control characters, non-ASCII) are refused by lint
_DIFF = re.compile(r"diff --git a/(.+) b/(.+)")


def read_series(directory: Path) -> list[str]:
    """Slugs of `directory`/series in order; an absent file is an empty series.

    Raises:
        SeriesInvalid: a line is not a slug, a slug comes twice, or its .patch file is not there.
    """
    path = directory / "series"
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise SeriesInvalid("the series is not UTF-8 text", path=str(path), found=str(error)) from error
    slugs: list[str] = []
    for number, line in enumerate(lines, start=1):
        slug = line.split("#", 1)[0].strip()
        if not slug:
            continue
        where = f"{path}:{number}"
        if not SLUG.fullmatch(slug):
            raise SeriesInvalid("not a patch slug", path=where, expected="lower-case-words-with-dashes", found=slug)
        if slug in slugs:
            raise SeriesInvalid("a slug stands twice in the series", path=where, found=slug)
        if not (directory / f"{slug}.patch").is_file():
            raise SeriesInvalid("the series names a patch that is not there", path=where, expected=f"{slug}.patch")
        slugs.append(slug)
    return slugs


def load_series(directory: Path) -> list[PatchMail]:
    """Every patch of `directory`/series, parsed, in order."""
    return [parse_mail(directory / f"{slug}.patch") for slug in read_series(directory)]


def parse_mail(path: Path) -> PatchMail:
    """Parse one patch mail.

    Raises:
        SeriesInvalid: not a format-patch mail, a CR in its header, or a malformed diff.
    """
    raw = path.read_bytes()
    head, separator, diff = raw.partition(b"\ndiff --git ")
    if not raw.startswith(b"From ") or not separator:
        raise SeriesInvalid(
            "not a git format-patch mail", path=str(path), expected="'From <hash>' first, then a 'diff --git' part"
        )
    if b"\r" in head:
        raise SeriesInvalid("carriage return in a patch header", path=str(path), cause="saved with CRLF line endings")
    try:
        message = email.message_from_bytes(head.partition(b"\n")[2], policy=email.policy.default)
        subject, author = (str(message[name] or "") for name in ("Subject", "From"))
        body, trailers = _split_trailers(message)
    except _HEADER_FAULTS as error:
        raise SeriesInvalid(
            "a patch header cannot be read", path=str(path), found=f"{type(error).__name__}: {error}"
        ) from error
    return PatchMail(
        slug=path.stem,
        path=path,
        subject=re.sub(r"^\[PATCH[^]]*\]\s*", "", " ".join(subject.split())),
        author=author,
        body=body,
        trailers=tuple(trailers),
        files=tuple(parse_diff(b"diff --git " + diff, path)),
        sha256=sha256(raw),
    )


def _split_trailers(message: email.message.EmailMessage) -> tuple[str, list[tuple[str, str]]]:
    text = message.get_payload(decode=True).decode("utf-8", errors="replace")
    text = re.split(r"(?m)^---\s*$", text, maxsplit=1)[0].rstrip()
    body, _, last = text.rpartition("\n\n")
    trailers: list[tuple[str, str]] = []
    for line in last.splitlines():
        match = _TRAILER.fullmatch(line)
        if match:
            trailers.append((match[1], match[2].strip()))
        elif line.startswith((" ", "\t")) and trailers:  # folded trailer
            trailers[-1] = (trailers[-1][0], f"{trailers[-1][1]} {line.strip()}")
        else:
            return text, []
    return body, trailers


def parse_diff(diff: bytes, path: Path) -> list[FileDiff]:
    """Parse the unified diffs of a patch, one `FileDiff` a file, hunk lengths checked.

    Raises:
        SeriesInvalid: a header or hunk is malformed; the message gives the line within the diff.
    """
    lines = diff.decode("utf-8", errors="surrogateescape").split("\n")
    files: list[FileDiff] = []
    at = 0
    while at < len(lines):
        if not lines[at].startswith("diff --git "):
            at += 1
            continue
        parsed, at = _parse_file(lines, at, path)
        files.append(parsed)
    return files


def _parse_file(lines: list[str], at: int, path: Path) -> tuple[FileDiff, int]:
    match = _DIFF.fullmatch(lines[at])
    if match is None:
        raise SeriesInvalid("a file header cannot be read", path=str(path), found=lines[at])
    old: str | None = match[1]
    new: str | None = match[2]
    modes: dict[str, str] = {}
    at += 1
    while at < len(lines) and not lines[at].startswith(("@@ ", "diff --git ")):
        words = lines[at].split(" ")
        if lines[at].startswith("new file mode"):
            old, modes["new"] = None, words[-1]
        elif lines[at].startswith("deleted file mode"):
            new, modes["old"] = None, words[-1]
        elif lines[at].startswith(("old mode", "new mode")):
            modes[words[0]] = words[-1]
        at += 1
    hunks: list[Hunk] = []
    while at < len(lines) and lines[at].startswith("@@ "):
        hunk, at = _parse_hunk(lines, at, path)
        hunks.append(hunk)
    body = [line for hunk in hunks for line in hunk.lines]
    added, removed = (sum(line.startswith(sign) for line in body) for sign in "+-")
    return FileDiff(old, new, added, removed, tuple(hunks), modes.get("old"), modes.get("new")), at


def _parse_hunk(lines: list[str], at: int, path: Path) -> tuple[Hunk, int]:
    match = _HUNK.match(lines[at])
    if match is None:
        raise SeriesInvalid("a hunk header cannot be read", path=str(path), found=lines[at])
    old_start, old_len, new_start, new_len = (int(g) if g is not None else 1 for g in match.groups())
    left_old, left_new = old_len, new_len
    body: list[str] = []
    at += 1
    end = len(lines) - (lines[-1] == "")  # what follows the last newline is no line
    while at < end and (left_old > 0 or left_new > 0 or lines[at].startswith("\\")):
        sign = lines[at][:1]
        if sign not in (" ", "+", "-", "\\", ""):
            break
        left_old -= sign in (" ", "-", "")
        left_new -= sign in (" ", "+", "")
        body.append(lines[at] if sign else " ")
        at += 1
    if left_old or left_new:
        raise SeriesInvalid(
            "a hunk is shorter or longer than its header says",
            path=str(path),
            expected=f"{old_len} old and {new_len} new lines after {match[0]!r}",
            found=f"{old_len - left_old} old and {new_len - left_new} new",
        )
    return Hunk(old_start, old_len, new_start, new_len, tuple(body)), at
