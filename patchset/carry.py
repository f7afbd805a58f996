# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Carry commits onto another base, one by one, and say what became of each. State survives between runs.

A merge without conflict is not yet right: where two equal blocks stand in a file, a change can land in the wrong one.
So the function or class around every added and removed line is compared before and after, and a difference stops.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path

from patchset import git, mailformat, pindir, scratch, worktree
from patchset.errors import Interrupted, SeriesInvalid, StateInvalid, UsageError
from patchset.series import parse_mail
from patchset.types import FileDiff, Hunk, PatchMail, Target

STATE = "state.json"
WAITING = "waiting"
CLEAN = "clean"  # the same lines in the same context; line numbers may differ
MERGED = "merged"  # the context or the path changed
UPSTREAM = "already upstream"
CONFLICT = "conflict"
DELETED = "dropped by patch"  # upstream deleted a file that the patch changes
MOVED = "moved"  # merged into another function
RESOLVED = "resolved"
SKIPPED = "skipped"
_SLACK = 10  # lines that upstream may have put into a hunk's place


@dataclass
class Carried:
    """One patch on its way."""

    slug: str
    subject: str
    mail: str  # path of the mail
    commit: str  # on the old base
    state: str = WAITING
    note: str = ""
    result: str | None = None  # on the new base; None: left out, or not there yet
    before: str | None = None  # HEAD of the new branch before this patch
    hunks: list[dict] = field(default_factory=list)  # where it does not fit: file, hunk, line, expected, found

    @property
    def stops(self) -> bool:
        """Whether a person must decide."""
        return self.state in (CONFLICT, DELETED, MOVED)

    def as_dict(self) -> dict:
        """For the report."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in ("mail", "before")}


@dataclass
class Job:
    """A refresh: what is carried where. `place` holds state.json and tree/."""

    place: Path
    target: str
    old: str
    new: str
    old_base: str
    new_base: str
    tag: str | None
    wheel: str | None
    from_git: bool
    patches: list[Carried]
    overlay: list[str]
    done: bool = False
    dry_run: bool = False

    @property
    def tree(self) -> Path:
        return self.place / "tree"

    @property
    def stopped(self) -> Carried | None:
        """The patch that waits for a person."""
        return next((one for one in self.patches if one.stops), None)


def write_job(job: Job) -> None:
    """Write the state in one step."""
    body = dataclasses.asdict(job) | {"place": str(job.place)}
    new = job.place / (STATE + ".new")
    new.write_text(json.dumps(body, indent=1) + "\n")
    os.replace(new, job.place / STATE)


def read_job(place: Path, target: Target, version: str) -> Job:
    """The state of a refresh.

    Raises:
        UsageError: there is none.
        StateInvalid: it is damaged.
    """
    try:
        body = json.loads((place / STATE).read_bytes())
        patches = [Carried(**one) for one in body.pop("patches")]
        return Job(**(body | {"place": place, "patches": patches}))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(
            f"no refresh to {version} is under way",
            target=target.id,
            path=str(place),
            next_step=f"python apply.py refresh {target.id} --to {version}",
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateInvalid(
            "the state of the refresh is damaged",
            target=target.id,
            path=str(place / STATE),
            found=f"{type(error).__name__}: {error}",
            next_step=f"python apply.py refresh {target.id} --to {version} --abort",
        ) from error


def carry_all(job: Job) -> None:
    """Carry every waiting patch; stop at the first that needs a person, or with `dry_run` leave it out and go on."""
    for one in job.patches:
        if one.state == WAITING:
            _carry(job, one)
            if one.stops and job.dry_run:
                _leave_out(job, one)
            write_job(job)
        if one.stops and not job.dry_run:
            return


def _carry(job: Job, one: Carried) -> None:
    tree = job.tree
    one.before = git.text(tree, "rev-parse", "HEAD")
    write_job(job)  # a kill during the pick is then a pick that waits for a person
    date = git.text(tree, "log", "-1", "--format=%ad", "--date=raw", one.commit)
    done = git.run(tree, "cherry-pick", one.commit, env=worktree.identity(date), check=False)
    if done.returncode == 0:
        _judge(job, one)
        return
    unmerged = _unmerged(tree)
    if not unmerged:
        _take_empty(tree, one, done.stderr.decode(errors="replace"))
    elif _holds_already(job, one):
        _leave_out(job, one)
        one.state, one.note = UPSTREAM, "its lines are there, elsewhere in the file"
    else:
        deleted = [path for path, stages in unmerged.items() if "2" not in stages]
        one.state = DELETED if deleted else CONFLICT
        one.note = f"file deleted upstream: {', '.join(deleted)}" if deleted else f"in {', '.join(unmerged)}"
        one.hunks = _misfits(job, one)


def _unmerged(tree: Path) -> dict[str, set[str]]:
    """path -> stages ("1" base, "2" upstream, "3" patch) of every unmerged path."""
    found: dict[str, set[str]] = {}
    for entry in git.run(tree, "ls-files", "--unmerged", "-z").stdout.decode(errors="surrogateescape").split("\0"):
        if entry:
            head, path = entry.split("\t", 1)
            found.setdefault(path, set()).add(head.split(" ")[2])
    return found


def _take_empty(tree: Path, one: Carried, said: str) -> None:
    if worktree.edits(tree):
        raise Interrupted("git could not pick a patch", patch=one.slug, path=str(tree), found=said.strip())
    git.run(tree, "cherry-pick", "--skip")
    one.state, one.note = UPSTREAM, "nothing is left of it"


def _leave_out(job: Job, one: Carried) -> None:
    git.run(job.tree, "cherry-pick", "--quit", check=False)
    git.run(job.tree, "reset", "--quiet", "--hard", one.before or job.new_base)
    one.result = None


def _holds_already(job: Job, one: Carried) -> bool:
    """Whether the patch applies backwards to the new files, and did not to the old ones."""
    mail = parse_mail(Path(one.mail))
    old = _files(job.tree, f"{one.commit}^", mail)
    new = _files(job.tree, one.before or job.new_base, mail)
    return scratch.applies_in_reverse(mail, new) and not scratch.applies_in_reverse(mail, old)


def _files(tree: Path, commit: str, mail: PatchMail) -> dict[str, bytes]:
    return {f.path: data for f in mail.files if (data := worktree.blob(tree, commit, f.path)) is not None}


# Judging a merge that had no conflict


def _judge(job: Job, one: Carried) -> None:
    one.result = git.text(job.tree, "rev-parse", "HEAD")
    old, new = parse_mail(Path(one.mail)), _mail_of(job.tree, one.result)
    old_paths, new_paths = [f.path for f in old.files], [f.path for f in new.files]
    if mailformat.same_change(old, new):
        one.state = CLEAN
    else:
        one.state, one.note = MERGED, "the context changed"
    if old_paths != new_paths:
        gone, come = sorted(set(old_paths) - set(new_paths)), sorted(set(new_paths) - set(old_paths))
        renamed = [f"{a} -> {b}" for a, b in zip(gone, come, strict=False)]
        one.note = f"renamed upstream: {', '.join(renamed)}" if renamed else one.note
    if _size(new) < _size(old):
        one.note = "a part of it is upstream"
    moved = _moved(job.tree, (one.commit, old), (one.result, new))
    if moved:
        one.state, one.note = MOVED, moved


def _size(mail: PatchMail) -> int:
    return sum(f.added + f.removed for f in mail.files)


def _mail_of(tree: Path, commit: str) -> PatchMail:
    data = git.run(tree, "format-patch", *mailformat.FORMAT, commit).stdout
    with pindir.parsed({"patch": data}) as parsed:
        return parsed[0]


def _moved(tree: Path, old: tuple[str, PatchMail], new: tuple[str, PatchMail]) -> str:
    """Which changed line stands in another function or class than before, "" for none."""
    before, after = (Counter(_places(tree, commit, mail)) for commit, mail in (old, new))
    texts = {text for text, _ in (before - after)} & {text for text, _ in (after - before)}
    for text in sorted(texts):
        was = sorted({scope for t, scope in before - after if t == text})
        now = sorted({scope for t, scope in after - before if t == text})
        return f"{text[1:].strip()!r} was in {', '.join(was)}, is now in {', '.join(now)}"
    return ""


def _places(tree: Path, commit: str, mail: PatchMail) -> Iterator[tuple[str, str]]:
    """(signed line, the functions and classes around it) of every changed line that is not blank."""
    for diff in mail.files:
        if diff.path.endswith((".py", ".pyi")):
            old = _lines(worktree.blob(tree, f"{commit}^", diff.path))
            new = _lines(worktree.blob(tree, commit, diff.path))
            yield from _places_in(diff, old, new)


def _lines(data: bytes | None) -> list[str]:
    return (data or b"").decode("utf-8", errors="replace").split("\n")


def _places_in(diff: FileDiff, old: list[str], new: list[str]) -> Iterator[tuple[str, str]]:
    for hunk in diff.hunks:
        at_old, at_new = hunk.old_start - 1, hunk.new_start - 1
        for line in hunk.lines:
            if line.startswith("+"):
                if line[1:].strip():
                    yield line, scope_of(new, at_new)
                at_new += 1
            elif line.startswith("-"):
                if line[1:].strip():
                    yield line, scope_of(old, at_old)
                at_old += 1
            elif line.startswith(" "):
                at_old, at_new = at_old + 1, at_new + 1


_DEFINITION = re.compile(r"(?:async\s+def|def|class)\s+(\w+)")


def scope_of(lines: list[str], at: int) -> str:
    """Dotted names of the functions and classes around line `at` (0-based) of a Python file, by indentation."""
    indent = len(lines[at]) - len(lines[at].lstrip())
    names: list[str] = []
    for line in reversed(lines[:at]):
        stripped = line.lstrip()
        depth = len(line) - len(stripped)
        if stripped and depth < indent and not stripped.startswith(("#", ")", "]", "}")):
            indent = depth
            match = _DEFINITION.match(stripped)
            if match:
                names.append(match[1])
        if indent == 0:
            break
    return ".".join(reversed(names)) or "the module"


# Explaining a conflict


def _misfits(job: Job, one: Carried) -> list[dict]:
    mail = parse_mail(Path(one.mail))
    files = _files(job.tree, one.before or job.new_base, mail)
    found = [misfit for diff in mail.files for misfit in misfits_of(diff, files.get(diff.path))]
    return found or [place for diff in mail.files for place in _elsewhere(diff, files[diff.path])]


def misfits_of(diff: FileDiff, data: bytes | None) -> list[dict]:
    """Each hunk whose old lines are nowhere in the file: which of them are missing, and what stands there instead.

    Returns:
        Dicts with file, hunk (from 1), line (of the file as it is), expected and found (lists of lines).
    """
    current = None if data is None else _text_lines(data)
    misfits = []
    for number, hunk in enumerate(diff.hunks, start=1):
        expected = _old_lines(hunk)
        if current is None:
            at, missing, found = hunk.old_start, expected, []
        elif _find(current, expected) is None:
            at, missing, found = _compare(current, expected, hunk.old_start - 1)
        else:
            continue
        misfits.append({"file": diff.path, "hunk": number, "line": at, "expected": missing, "found": found})
    return misfits


def _elsewhere(diff: FileDiff, data: bytes) -> list[dict]:
    """For a conflict in which every hunk's lines do exist: where they stand now."""
    current = _text_lines(data)
    places = []
    for number, hunk in enumerate(diff.hunks, start=1):
        at = _find(current, _old_lines(hunk)) or 0
        note = f"these lines stand in {scope_of(current, at)} now; git does not take it for the same place"
        found = {"expected": _old_lines(hunk), "found": [], "note": note}
        places.append({"file": diff.path, "hunk": number, "line": at + 1, **found})
    return places


def _text_lines(data: bytes) -> list[str]:
    return data.decode("utf-8", errors="surrogateescape").split("\n")


def _old_lines(hunk: Hunk) -> list[str]:
    return [line[1:] for line in hunk.lines if line[:1] in (" ", "-")]


def _find(current: list[str], wanted: list[str]) -> int | None:
    return next((i for i in range(len(current) - len(wanted) + 1) if current[i : i + len(wanted)] == wanted), None)


def _compare(current: list[str], expected: list[str], near: int) -> tuple[int, list[str], list[str]]:
    """Line number, missing lines and lines found instead, at the place that shares the longest run with `expected`."""
    longest = SequenceMatcher(None, current, expected, autojunk=False).find_longest_match()
    start = max(0, longest.a - longest.b) if longest.size else min(near, len(current))
    window = current[start : start + len(expected) + _SLACK]
    steps = SequenceMatcher(None, expected, window, autojunk=False).get_opcodes()
    while steps and steps[-1][0] == "insert":
        steps.pop()  # what follows the hunk
    changed = [step for step in steps if step[0] != "equal"]
    missing = [line for _, a, b, _, _ in changed for line in expected[a:b]]
    found = [line for _, _, _, a, b in changed for line in window[a:b]]
    return start + 1 + (changed[0][3] if changed else 0), missing, found


# After a person decided


def resume(job: Job, skip: bool) -> None:
    """Take the decision on the stopped patch: leave it out, or take what was made of it.

    Raises:
        UsageError: no patch waits.
        Interrupted: paths are still unmerged or not added.
        SeriesInvalid: conflict markers are left, or the result is more than a modification of files.
    """
    one = job.stopped or next((p for p in job.patches if p.state == WAITING and p.before is not None), None)
    if one is None:
        return  # killed between two patches, or stopped while it wrote the pin: just go on
    if skip:
        _leave_out(job, one)
        one.state, one.note = SKIPPED, f"was: {one.state}" + (f", {one.note}" if one.note else "")
    elif one.state == WAITING:
        _leave_out(job, one)  # killed during the pick
    else:
        _take_resolution(job, one)
    write_job(job)


def _take_resolution(job: Job, one: Carried) -> None:
    tree = job.tree
    _refuse_unresolved(job, one)
    if _picking(tree):
        if not worktree.edits(tree):  # resolved to upstream's side
            git.run(tree, "cherry-pick", "--skip")
            one.state, one.note = UPSTREAM, "resolved to upstream's lines"
            return
        _refuse_markers(job, one, git.run(tree, "diff", "--cached", "-U0").stdout)
        date = git.text(tree, "log", "-1", "--format=%ad", "--date=raw", one.commit)
        git.run(tree, "cherry-pick", "--continue", env=worktree.identity(date) | {"GIT_EDITOR": "true"})
    head = git.text(tree, "rev-parse", "HEAD")
    if head == one.before:
        one.state, one.note = UPSTREAM, "resolved to upstream's lines"
        return
    if git.text(tree, "rev-parse", "HEAD^") != one.before:
        raise SeriesInvalid(
            "the resolution must be one commit",
            target=job.target,
            patch=one.slug,
            path=str(tree),
            found=git.text(tree, "log", "--format=%h %s", f"{one.before}..HEAD"),
            next_step=f"git -C {tree} reset --soft {one.before} && git -C {tree} commit -C {one.commit}",
        )
    _refuse_markers(job, one, git.run(tree, "show", "--format=", "-U0", head).stdout)
    head = _without_conflict_note(tree, head)
    mailformat.format_commits(tree, [head])
    one.note = f"accepted: {one.note}" if one.state == MOVED else ""
    one.state, one.result, one.hunks = (MERGED if one.state == MOVED else RESOLVED), head, []


def _without_conflict_note(tree: Path, head: str) -> str:
    """`git commit --no-edit` keeps the "# Conflicts:" lines, behind the trailers. Amends them away; returns HEAD."""
    message = git.run(tree, "log", "-1", "--format=%B", head).stdout
    plain = re.sub(rb"\n# Conflicts:\n(#.*\n)*\s*\Z", b"\n", message)
    if plain == message:
        return head
    date = git.text(tree, "log", "-1", "--format=%ad", "--date=raw", head)
    amend = ("commit", "--quiet", "--amend", "--no-verify", "--cleanup=whitespace", "--file=-")
    git.run(tree, *amend, stdin=plain, env=worktree.identity(date))
    return git.text(tree, "rev-parse", "HEAD")


def _picking(tree: Path) -> bool:
    return git.run(tree, "rev-parse", "--verify", "--quiet", "CHERRY_PICK_HEAD", check=False).returncode == 0


def _refuse_unresolved(job: Job, one: Carried) -> None:
    left = [*_unmerged(job.tree)]
    unstaged = git.text(job.tree, "diff", "--name-only").splitlines()
    if left or unstaged:
        raise Interrupted(
            "the conflict is not resolved",
            target=job.target,
            patch=one.slug,
            path=str(job.tree),
            found=f"{len(left)} unmerged paths, {len(unstaged)} files not added",
            next_step=f"git -C {job.tree} add {' '.join(dict.fromkeys([*left, *unstaged]))}, then --continue",
            details=list(dict.fromkeys([*left, *unstaged])),
        )


def _refuse_markers(job: Job, one: Carried, diff: bytes) -> None:
    markers = [line for line in diff.splitlines() if re.match(rb"\+(<{7} |>{7} )", line)]
    if markers:
        raise SeriesInvalid(
            "conflict markers are left",
            target=job.target,
            patch=one.slug,
            path=str(job.tree),
            found=markers[0][1:].decode(errors="replace"),
            next_step="edit the file, git add it (git commit --amend, where you committed), then --continue",
        )


def share_resolutions(job: Job, directory: Path) -> None:
    """Let git remember how a conflict was resolved, for the next refresh of the target (git rerere).

    A remembered resolution is put into the worktree; the conflict still stops, so that a person looks at it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (job.tree / ".git" / "rr-cache").symlink_to(directory)
    git.run(job.tree, "config", "rerere.enabled", "true")


def range_diff(job: Job) -> str:
    """git's comparison of the series before and after; "" while nothing is carried."""
    if not any(one.result for one in job.patches):
        return ""
    last = job.patches[-1].commit
    flags = ("--no-color", "--creation-factor=90")
    done = git.run(job.tree, "range-diff", *flags, f"{job.old_base}..{last}", f"{job.new_base}..HEAD", check=False)
    return done.stdout.decode(errors="replace")
