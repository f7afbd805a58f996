# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Apply, check, revert and inspect: verify every target in scratch first, then swap them one after the other."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from patchset import lock as lockfile
from patchset import plan, scratch, state, swap
from patchset.errors import Drift, HashMismatch, NotPatched, PatchsetError, UsageError, WrongVersion
from patchset.manifest import Manifest
from patchset.target import locate, tree_version
from patchset.types import Applied, FileState, Kind, Located, Lock, PatchMail, Target, TargetState, sha256


@dataclass(frozen=True)
class Inspection:
    """What was found at a target, judged against one pin."""

    manifest: Manifest
    found: Located
    lock: Lock
    patches: tuple[PatchMail, ...]
    applied: Applied | None
    data: Mapping[str, bytes | None]  # upstream path -> bytes on disk
    files: Mapping[str, FileState]
    interrupted: bool

    @property
    def state(self) -> TargetState:
        summary = plan.summarise(self.files, self.lock)
        doubtful = summary is TargetState.DRIFTED or not self.vouched
        return TargetState.UNKNOWN if doubtful and self.other_version else summary

    @property
    def other_version(self) -> str | None:
        """The version the tree says it is, when that is not the pin's."""
        said = tree_version(self.found)
        return said if said is not None and not _same_release(said, self.lock.version) else None

    @property
    def vouched(self) -> bool:
        """Whether the bytes of at least one file of the pin were looked at: new files alone prove no version."""
        return any(path in self.lock.files for path in self.files)


@dataclass
class Outcome:
    """What a verb did, or would do, to one target."""

    found: Located
    version: str
    digest: str
    state: TargetState
    patches: int = 0
    written: list[str] = field(default_factory=list)
    recovered: str | None = None

    def as_dict(self) -> dict:
        return {
            "target": self.found.target.id,
            "path": str(self.found.root),
            "kind": self.found.kind.value,
            "version": self.version,
            "digest": self.digest,
            "state": self.state.value,
            "patches": self.patches,
            "written": self.written,
            "recovered": self.recovered,
        }


def _same_release(said: str, pinned: str) -> bool:
    """Whether a tree that says `said` is the pin: local parts and trailing zeros do not count."""
    return re.sub(r"(\.0)+$", "", said.split("+")[0]) == re.sub(r"(\.0)+$", "", pinned)


def inspect(manifest: Manifest, found: Located, version: str | None = None) -> Inspection:
    """Judge a located target against `version`, or against the pin that fits it best. Writes nothing."""
    versions = [version] if version else _pins_in_order(found)
    best: tuple[float, Inspection] | None = None
    for candidate in versions:
        inspection = _inspect_pin(manifest, found, candidate)
        share = plan.matching(inspection.files.values())
        if share == 1.0:
            return inspection
        if best is None or share > best[0]:
            best = (share, inspection)
    if best is None:
        raise UsageError("the target has no pin", target=found.target.id)
    return best[1]


def _pins_in_order(found: Located) -> list[str]:
    said = (tree_version(found) or "").split("+")[0]
    return sorted(found.target.pins, key=lambda v: (v != said, v != found.target.pin, v))


def _inspect_pin(manifest: Manifest, found: Located, version: str) -> Inspection:
    pin = manifest.pin(found.target, version)
    lock, patches = lockfile.load(manifest, found.target, pin)
    applied = state.load(found)
    paths = [p for p in plan.touched(lock, applied) if found.place(p) is not None]
    data = {path: swap.read_optional(_place(found, path)) for path in paths}
    digests = {path: None if d is None else sha256(d) for path, d in data.items()}
    files = plan.classify(digests, lock, applied)
    interrupted = swap.interrupted(found.root, found.state_dir, found.target.id) is not None
    return Inspection(manifest, found, lock, tuple(patches), applied, data, files, interrupted)


def _place(found: Located, upstream_path: str) -> Path:
    place = found.place(upstream_path)
    if place is None:
        raise AssertionError(f"{upstream_path} has no place in a {found.kind.value}")
    return place


# Refusals


def refuse_drift(inspection: Inspection) -> None:
    """Raise when a file holds bytes nobody recorded.

    Raises:
        WrongVersion: the tree says it is another version.
        Drift: a local edit, CRLF line endings, a missing file, a patch that is already upstream, a file in the way.
    """
    bad = plan.refused(inspection.files)
    found, lock = inspection.found, inspection.lock
    if inspection.other_version and (bad or not inspection.vouched):
        raise _wrong_version(inspection, bad)
    if not bad:
        return
    path, file_state = next(iter(bad.items()))
    cause, next_step = _likely_cause(inspection, path, file_state)
    raise Drift(
        f"{len(bad)} files are neither {found.target.dist} {lock.version}'s nor the patch set's",
        target=found.target.id,
        patch=_patches_of(inspection, path),
        path=str(_place(found, path)),
        expected=_expected(inspection, path),
        found=_found(inspection, path),
        cause=cause,
        next_step=next_step,
        details=_listed(found, bad),
    )


def _listed(found: Located, bad: Mapping[str, FileState]) -> list[str]:
    return [f"{s.value}: {_place(found, p)}" for p, s in bad.items()]


def _wrong_version(inspection: Inspection, bad: Mapping[str, FileState]) -> WrongVersion:
    found, lock = inspection.found, inspection.lock
    path = next(iter(bad), None)
    return WrongVersion(
        f"{len(bad)} files are not those of {found.target.dist} {lock.version}"
        if bad
        else f"this is not {found.target.dist} {lock.version}",
        target=found.target.id,
        patch=_patches_of(inspection, path) if path else None,
        path=str(_place(found, path) if path else found.root),
        expected=f"{found.target.dist} {lock.version}" + _pins_text(found),
        found=f"{found.target.dist} {inspection.other_version} ({found.kind.value})",
        cause="another version of the target",
        next_step=_install_hint(found, lock.version),
        details=_listed(found, bad),
    )


def _refuse_version(inspection: Inspection) -> None:
    """Another release whose touched files happen to be the pin's is still not the pin: nobody tested that pair."""
    found, lock = inspection.found, inspection.lock
    said = tree_version(found)
    if said is None or _same_release(said, lock.version) or plan.refused(inspection.files):
        return
    raise WrongVersion(
        f"this is not {found.target.dist} {lock.version}, though every touched file is",
        target=found.target.id,
        path=str(found.root),
        expected=f"{found.target.dist} {lock.version}" + _pins_text(found),
        found=f"{found.target.dist} {said} ({found.kind.value})",
        cause="another version of the target",
        next_step=f"{_install_hint(found, lock.version)}; or: python apply.py refresh {found.target.id} --to {said}",
    )


def _pins_text(found: Located) -> str:
    others = [v for v in found.target.pins if v != found.target.pin]
    return f" (also pinned: {', '.join(others)})" if others else ""


def _patches_of(inspection: Inspection, path: str) -> str | None:
    return ", ".join(p.slug for p in inspection.patches if any(f.path == path for f in p.files)) or None


def _expected(inspection: Inspection, path: str) -> str:
    if path in inspection.lock.files:
        hashes = dict.fromkeys(inspection.lock.files[path].pre.values())
        return "sha256 " + " or ".join(f"{h[:16]}..." for h in hashes)
    return f"no file, or sha256 {inspection.lock.overlay.get(path, 'none')[:16]}..."


def _found(inspection: Inspection, path: str) -> str:
    data = inspection.data[path]
    return "no file" if data is None else f"sha256 {sha256(data)[:16]}..., {len(data)} bytes"


def _install_hint(found: Located, version: str) -> str:
    target = found.target
    if found.installed_layout:
        again = " --force-reinstall" if found.version is not None and _same_release(found.version, version) else ""
        return f"pip install --no-deps{again} {target.dist}=={version}"
    if found.kind is Kind.CHECKOUT:
        return f"git -C {found.root} checkout {target.pins[version].tag}"
    return f"python apply.py --fetch DIR   brings {target.dist} {version}"


def _likely_cause(inspection: Inspection, path: str, file_state: FileState) -> tuple[str, str]:
    found, lock = inspection.found, inspection.lock
    data = inspection.data[path]
    restore = (
        f"git -C {found.root} diff -- {_place(found, path).relative_to(found.root)}"
        if found.kind is Kind.CHECKOUT
        else f"pip install --no-deps --force-reinstall {found.target.dist}=={lock.version}"
    )
    if file_state is FileState.MISSING:
        return "a file of the pin was deleted", restore.replace("diff --", "checkout --")
    if _from_wheel(inspection):
        wheel = f"{found.target.dist.replace('-', '_')}-{found.version}-*.whl"
        return (
            f"a local edit, or the patched wheel {found.version} is of another digest than {lock.digest[:12]}",
            f"python apply.py --fetch dist, then pip install --no-deps --force-reinstall dist/{wheel}",
        )
    if file_state is FileState.EXTRA:
        return "a local file, or a newer upstream that brings it", f"move {_place(found, path)} away"
    if data is not None and b"\r\n" in data:
        unix = sha256(data.replace(b"\r\n", b"\n"))
        if path in lock.files and (
            lock.files[path].source_of(unix, "pre") or lock.files[path].source_of(unix, "post")
        ):
            return "CRLF line endings (core.autocrlf)", "git config core.autocrlf false, then check the file out again"
    if inspection.applied is not None and path in inspection.applied.files:
        kept = state.pristine_path(found, path)
        return "a local edit since it was patched", f"save the edit, copy {kept} to the file, then run again"
    for patch in inspection.patches:
        if data is not None and scratch.applies_in_reverse(patch, {path: data}):
            return (
                f"the change of {patch.slug} is already in this file: upstream or by hand",
                f"python apply.py refresh {found.target.id} --to NEWER-VERSION",
            )
    return "a local edit", restore


# Planning


def plan_apply(inspection: Inspection) -> list[swap.Change]:
    """Every file change that takes the target to the patched state, verified against the lock; empty when it is there.

    Raises:
        Drift, WrongVersion: see `refuse_drift`.
        PatchConflict, HashMismatch: the series does not give the recorded bytes.
    """
    _refuse_version(inspection)
    refuse_drift(inspection)
    base = _base(inspection)
    done = all(s is FileState.PATCHED for s in inspection.files.values())
    if done and (_recorded(inspection) or _from_wheel(inspection)):
        return []
    patched = _patched(inspection, base)
    dropped = _dropped(inspection)
    changes = [
        *(_change(inspection, p, d) for p, d in _overlay(inspection).items()),
        *(_change(inspection, p, d) for p, d in (patched | dropped).items()),
    ]
    changes = [c for c in changes if c.after is None or c.before_sha256 != sha256(c.after)]
    return changes + _bookkeeping(inspection, base, patched, changes)


def _recorded(inspection: Inspection) -> bool:
    return inspection.applied is not None and inspection.applied.digest == inspection.lock.digest


def _from_wheel(inspection: Inspection) -> bool:
    """Whether the tree is an installed or unpacked patched wheel, whose record is its provenance."""
    version = inspection.found.version
    return version is not None and f"+{inspection.manifest.tag}." in version and inspection.applied is None


def _base(inspection: Inspection) -> dict[str, bytes]:
    """Pristine bytes of the files to patch: from the tree, or kept by the earlier run."""
    base: dict[str, bytes] = {}
    for path, file_state in inspection.files.items():
        if path not in inspection.lock.files:
            continue
        data = inspection.data[path]
        if file_state is FileState.PRISTINE and data is not None:
            base[path] = data
        elif file_state is FileState.OLD:
            base[path] = _kept(inspection, path)
    return base


def _is_kept(inspection: Inspection, path: str) -> bool:
    recorded = inspection.applied.files.get(path) if inspection.applied else None
    data = swap.read_optional(state.pristine_path(inspection.found, path)) if recorded else None
    return data is not None and recorded is not None and sha256(data) == recorded[0]


def _kept(inspection: Inspection, path: str) -> bytes:
    """The pristine bytes of `path` that the earlier run put aside, checked by hash."""
    place = state.pristine_path(inspection.found, path)
    data = swap.read_optional(place)
    recorded = inspection.applied.files[path][0] if inspection.applied else None
    if data is None or sha256(data) != recorded:
        raise Drift(
            "the pristine copy of a patched file is missing or damaged",
            target=inspection.found.target.id,
            path=str(place),
            expected=f"sha256 {recorded}",
            found="no file" if data is None else f"sha256 {sha256(data)}",
            next_step=_install_hint(inspection.found, inspection.lock.version),
        )
    return data


def _patched(inspection: Inspection, base: Mapping[str, bytes]) -> dict[str, bytes]:
    target_id, lock = inspection.found.target.id, inspection.lock
    result = scratch.apply_series(inspection.patches, base, target_id)
    for path, data in result.items():
        source = lock.files[path].source_of(sha256(base[path]), "pre")
        expected = lock.files[path].post.get(source or "")
        if sha256(data) != expected:
            raise HashMismatch(
                "a patched file is not the recorded one",
                target=target_id,
                patch=_patches_of(inspection, path),
                path=path,
                expected=f"sha256 {expected}",
                found=f"sha256 {sha256(data)}",
                cause="lock.json was made by another version of the tool",
                next_step=f"python apply.py export {target_id}",
            )
    return result


def _overlay(inspection: Inspection) -> dict[str, bytes | None]:
    """Overlay bytes for every overlay path this kind of tree carries; None for one that only an old revision knew."""
    sources = inspection.manifest.overlay_files(inspection.found.target)
    result: dict[str, bytes | None] = {p: sources[p].read_bytes() for p in inspection.files if p in sources}
    old_files = inspection.applied.files if inspection.applied else {}
    for path, file_state in inspection.files.items():
        if path not in sources and path not in old_files and file_state is FileState.OLD:
            result[path] = None
    return result


def _dropped(inspection: Inspection) -> dict[str, bytes]:
    """Files that an earlier revision patched and this one does not: back to their pristine bytes."""
    old = [p for p, s in inspection.files.items() if s is FileState.OLD and p not in inspection.lock.files]
    old_files = inspection.applied.files if inspection.applied else {}
    return {path: _kept(inspection, path) for path in old if path in old_files}


def _change(inspection: Inspection, upstream_path: str, after: bytes | None) -> swap.Change:
    before = inspection.data[upstream_path]
    return swap.Change(_place(inspection.found, upstream_path), None if before is None else sha256(before), after)


def _bookkeeping(
    inspection: Inspection, base: Mapping[str, bytes], patched: Mapping[str, bytes], changes: Sequence[swap.Change]
) -> list[swap.Change]:
    """State file, pristine copies and RECORD that go with `changes`."""
    found, lock, applied = inspection.found, inspection.lock, inspection.applied
    files = {path: (sha256(base[path]), sha256(patched[path])) for path in base}
    for path, file_state in inspection.files.items():  # patched before: keep what is known of their pristine bytes
        if path in lock.files and path not in files and file_state is FileState.PATCHED:
            post = sha256(inspection.data[path] or b"")
            source = lock.files[path].source_of(post, "post") or ""
            files[path] = (lock.files[path].pre[source], post)
    overlay = {p: h for p, h in lock.overlay.items() if found.place(p) is not None}
    record = Applied(found.target.id, lock.version, lock.digest, files, overlay)
    kept: list[swap.Change] = []
    for path, data in base.items():
        kept += _state_change(state.pristine_path(found, path), data)
    for path in applied.files if applied else ():
        if path not in lock.files:
            kept += _state_change(state.pristine_path(found, path), None)
    if found.kind not in (Kind.SITE, Kind.CHECKOUT):
        kept += _state_change(found.state_dir / ".gitignore", b"*\n")
    last = _state_change(found.state_dir / state.STATE, state.to_json(record, found))
    return kept + _record_changes(inspection, [*changes, *kept, *last]) + last


def _state_change(path: Path, after: bytes | None) -> list[swap.Change]:
    before = swap.read_optional(path)
    if before == after:
        return []
    return [swap.Change(path, None if before is None else sha256(before), after)]


def _record_changes(inspection: Inspection, changes: Sequence[swap.Change]) -> list[swap.Change]:
    """The rewritten RECORD of a site-packages or an unpacked wheel, and a copy of the original one.

    It is made from the original one, so that it is the same whatever was applied in between; unless the installer has
    written rows of its own since.
    """
    found = inspection.found
    record = None if found.dist_info is None else swap.read_optional(found.dist_info / state.RECORD)
    if found.dist_info is None or record is None:
        return []
    place = found.state_dir / state.PRISTINE / state.RECORD
    original = swap.read_optional(place)
    kept = [] if original is not None else [swap.Change(place, None, record)]
    rows = _final_rows(inspection, [*changes, *kept])
    rewritten = state.rewrite_record(_record_base(inspection, record, original, rows), rows)
    again = [swap.Change(found.dist_info / state.RECORD, sha256(record), rewritten)] if rewritten != record else []
    return kept + again


def _record_base(inspection: Inspection, record: bytes, original: bytes | None, rows: Mapping[str, object]) -> bytes:
    """The RECORD to start from: the original one where all rows that are not ours are still the same."""
    state_rows = inspection.found.state_dir.relative_to(inspection.found.root).as_posix() + "/"
    mine = {*rows, *(path for path in state.record_paths(record) if path.startswith(state_rows))}
    theirs = [state.record_rows(state.rewrite_record(r, dict.fromkeys(mine))) for r in (record, original or b"")]
    if original is not None and sorted(theirs[0]) == sorted(theirs[1]):
        return original
    return state.rewrite_record(record, {path: None for path in mine if path not in rows})


def _final_rows(inspection: Inspection, changes: Sequence[swap.Change]) -> dict[str, bytes | None]:
    """Path below the root -> bytes after `changes`, for every file the tool knows of, its state included."""
    found = inspection.found
    files: dict[Path, bytes | None] = {_place(found, path): data for path, data in inspection.data.items()}
    files |= {p: swap.read_optional(p) for p in _state_files(found)}
    files |= {c.path: c.after for c in changes}
    rows = {path.relative_to(found.root).as_posix(): data for path, data in files.items()}
    return dict(sorted(rows.items()))


def _state_files(found: Located) -> list[Path]:
    """The record, the pristine copies, and what git needs to overlook them."""
    kept = (p for p in (found.state_dir / state.PRISTINE).rglob("*") if not p.is_dir())
    single = (found.state_dir / name for name in (state.STATE, ".gitignore"))
    return [*sorted(kept), *(p for p in single if p.exists())]


def plan_revert(inspection: Inspection) -> list[swap.Change]:
    """Every file change that takes the target back to upstream's bytes; empty when it is there.

    Raises:
        Drift, WrongVersion: a file holds bytes nobody recorded, or the tree came from a patched wheel.
    """
    lock = inspection.lock
    if inspection.applied is None and inspection.state is TargetState.PRISTINE:
        return []
    refuse_drift(inspection)
    _refuse_wheel_install(inspection)
    back: dict[str, bytes | None] = {}
    overlays: dict[str, bytes | None] = {}
    unkept: dict[str, bytes] = {}
    old_files = inspection.applied.files if inspection.applied else {}
    for path, file_state in inspection.files.items():
        data = inspection.data[path]
        if data is None or file_state not in (FileState.PATCHED, FileState.OLD):
            continue
        if path not in lock.files and path not in old_files:
            overlays[path] = None
        elif file_state is FileState.PATCHED and not _is_kept(inspection, path):
            unkept[path] = data
        else:
            back[path] = _kept(inspection, path)
    back |= _unpatched(inspection, unkept)
    changes = [_change(inspection, p, d) for p, d in (back | overlays).items()]
    return changes + _forget(inspection, changes)


def _refuse_wheel_install(inspection: Inspection) -> None:
    found = inspection.found
    if _from_wheel(inspection):
        raise Drift(
            "this was installed from a patched wheel; there is nothing of `apply` to take back",
            target=found.target.id,
            path=str(found.root),
            expected=f"{found.target.dist} {inspection.lock.version}",
            found=f"{found.target.dist} {found.version}",
            next_step=f"pip install --no-deps {found.target.dist}=={inspection.lock.version}",
        )


def _unpatched(inspection: Inspection, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Pristine bytes computed by un-applying the series, for a tree whose state record was lost."""
    result = scratch.revert_series(inspection.patches, files, inspection.found.target.id)
    for path, data in result.items():
        if inspection.lock.files[path].source_of(sha256(data), "pre") is None:
            raise HashMismatch(
                "un-applying the series does not give upstream's bytes",
                target=inspection.found.target.id,
                path=path,
                expected="sha256 " + " or ".join(inspection.lock.files[path].pre.values()),
                found=f"sha256 {sha256(data)}",
                next_step=_install_hint(inspection.found, inspection.lock.version),
            )
    return result


def _forget(inspection: Inspection, changes: Sequence[swap.Change]) -> list[swap.Change]:
    """Removal of the state, and RECORD as it was."""
    found = inspection.found
    gone = [change for path in _state_files(found) for change in _state_change(path, None)]
    return _record_back(inspection, [*changes, *gone]) + gone


def _record_back(inspection: Inspection, changes: Sequence[swap.Change]) -> list[swap.Change]:
    found = inspection.found
    record = None if found.dist_info is None else swap.read_optional(found.dist_info / state.RECORD)
    if found.dist_info is None or record is None:
        return []
    original = swap.read_optional(found.state_dir / state.PRISTINE / state.RECORD)
    rows = _final_rows(inspection, changes)
    base = _record_base(inspection, record, original, rows)
    # the very bytes, also where upstream's rows have no hash
    rewritten = base if base == original else state.rewrite_record(base, rows)
    return [swap.Change(found.dist_info / state.RECORD, sha256(record), rewritten)] if rewritten != record else []


# Running


@dataclass(frozen=True)
class Request:
    """One target as the user named it."""

    target: Target
    path: Path
    version: str | None = None


Planner = Callable[[Inspection], list[swap.Change]]


def run(
    manifest: Manifest, requests: Sequence[Request], planner: Planner, wait_s: float, check: bool
) -> list[Outcome]:
    """Plan every target, then change all of them; nothing is written before every target has been verified.

    Args:
        planner: `plan_apply` or `plan_revert`.
        check: verify and report only; nothing is written, not even a recovery.

    Raises:
        PatchsetError: any refusal or failure; the trees are then as they were.
    """
    located = [(locate(r.target, r.path), r.version) for r in requests]
    _refuse_repeats(located)
    with state.hold([place for f, _ in located for place in _places_to_hold(f)], wait_s):
        recovered = {} if check else _recover_all(f for f, _ in located)
        inspections = [inspect(manifest, f, version) for f, version in located]
        if check:
            _refuse_interrupted(inspections)
        plans = _plan_together(inspections, planner)
        if not check:
            _swap_all([(i.found, changes) for i, changes in zip(inspections, plans, strict=True) if changes])
        return [
            _outcome(manifest, i, changes, recovered.get(i.found.state_dir), check, planner)
            for i, changes in zip(inspections, plans, strict=True)
        ]


def _recover_all(targets: Iterable[Located]) -> dict[Path, str | None]:
    return {f.state_dir: swap.recover(f.root, f.state_dir, f.target.id) for f in targets}


def _places_to_hold(found: Located) -> list[Path]:
    """The tree, and a git directory outside it: a copied worktree shares that one with the original."""
    git_directory = found.state_dir.parents[1]
    outside = found.kind is Kind.CHECKOUT and not found.state_dir.is_relative_to(found.root)
    return [found.root, git_directory] if outside else [found.root]


def _plan_together(inspections: Sequence[Inspection], planner: Planner) -> list[list[swap.Change]]:
    plans, errors = [], []
    for inspection in inspections:
        try:
            changes = planner(inspection)
            swap.check_places(inspection.found.root, inspection.found.state_dir, changes)
            plans.append(changes)
        except PatchsetError as error:
            errors.append(error)
    if errors:
        first, others = errors[0], errors[1:]
        first.details += [line for error in others for line in str(error).splitlines()]
        raise first
    return plans


def _refuse_repeats(located: Sequence[tuple[Located, str | None]]) -> None:
    seen = [(f.target.id, f.root) for f, _ in located]
    repeated = next((pair for pair in seen if seen.count(pair) > 1), None)
    if repeated:
        raise UsageError("the same tree is named twice for one target", target=repeated[0], path=str(repeated[1]))


def _refuse_interrupted(inspections: Sequence[Inspection]) -> None:
    for inspection in inspections:
        if inspection.interrupted:
            found = inspection.found
            raise swap.Interrupted(
                "an earlier run was interrupted here",
                target=found.target.id,
                path=str(found.root),
                next_step=f"python apply.py --{found.target.id} {found.root}   finishes or undoes it",
            )


def _swap_all(work: Sequence[tuple[Located, list[swap.Change]]]) -> None:
    swaps = [swap.Swap(found.root, found.state_dir, changes) for found, changes in work]
    prepared: list[swap.Swap] = []
    try:
        for one in swaps:
            one.prepare()
            prepared.append(one)
        for one in swaps:
            one.commit()
    except BaseException:
        for one in reversed(prepared):
            with contextlib.suppress(OSError):
                one.undo()
        raise
    for one in swaps:
        one.finish()


def _outcome(
    manifest: Manifest,
    before: Inspection,
    changes: Sequence[swap.Change],
    recovered: str | None,
    check: bool,
    planner: Planner,
) -> Outcome:
    after = (
        before if check or not changes else _verified(inspect(manifest, before.found, before.lock.version), planner)
    )
    written = [str(c.path) for c in changes if not c.path.is_relative_to(before.found.state_dir)]
    return Outcome(
        before.found, before.lock.version, before.lock.digest, after.state, len(before.patches), written, recovered
    )


def _verified(after: Inspection, planner: Planner) -> Inspection:
    """`after` itself, once reading the tree again shows that nothing is left to do."""
    if planner(after):
        raise HashMismatch(
            "the tree is not as it was just written",
            target=after.found.target.id,
            path=str(after.found.root),
            found=after.state.value,
            cause="another program changes it at the same time",
            next_step="stop that and run again",
        )
    return after


def status(manifest: Manifest, requests: Sequence[Request]) -> list[tuple[Inspection, TargetState]]:
    """Inspect every target; writes nothing and takes no lock."""
    inspections = [inspect(manifest, locate(r.target, r.path), r.version) for r in requests]
    return [(i, TargetState.MIXED if i.interrupted else i.state) for i in inspections]


def refuse_unpatched(inspections: Sequence[tuple[Inspection, TargetState]]) -> None:
    """Raise `NotPatched` unless every target is patched.

    A file of the pin that is missing is reported as drift by `apply`; here it is just "not patched".
    """
    bad = [(i, s) for i, s in inspections if s is not TargetState.PATCHED]
    if bad:
        first, first_state = bad[0]
        raise NotPatched(
            f"{len(bad)} of {len(inspections)} targets are not patched",
            target=first.found.target.id,
            path=str(first.found.root),
            expected="patched",
            found=first_state.value,
            next_step=f"python apply.py --{first.found.target.id} {first.found.root}",
        )
