# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""`apply.py --fetch`: bring what the pins name, patch it, and leave wheels; `--from-git`: leave patched clones.

FP8_COLOCATE_REPO_SGLANG, _MEGATRON and _MEGATRON_BRIDGE name another repository (a mirror, a file:// URL) to clone.
What is cloned is judged by lock.json like any other tree, so a mirror need not be trusted.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from patchset import engine, git, wheel
from patchset.download import wheel_path
from patchset.errors import DownloadFailed, FileSystemError, UsageError, os_failure
from patchset.manifest import Manifest
from patchset.report import Report
from patchset.types import Pin, Target
from patchset.verbs import pins_of

__all__ = ["execute", "repository", "wheel_path"]


def execute(args: argparse.Namespace, manifest: Manifest, report: Report) -> int:
    """Run `apply.py --fetch [DIR] [--from-git] [--pin TARGET=VERSION]`."""
    _refuse_flags(args, manifest)
    versions = pins_of(args.pin, manifest)
    out = args.fetch.expanduser()
    if args.from_git:
        return _from_git(manifest, versions, out, args.lock_timeout, report)
    targets = list(manifest.targets.values())
    for target in targets:  # all of them first: the slow part, and the one that fails
        wheel_path(manifest, target, manifest.pin(target, versions.get(target.id)), report)
    built = wheel.repack_all(manifest, targets, versions, None, out, report)
    wheel.say(built, report)
    report.line(f"next: {wheel.install_command(built)}")
    return 0


def _refuse_flags(args: argparse.Namespace, manifest: Manifest) -> None:
    named = [f"--{t}" for t in manifest.targets if getattr(args, f"path_{t}") is not None]
    named += [f"--{flag}" for flag in ("check", "revert") if getattr(args, flag)]
    if named:
        raise UsageError(
            "--fetch brings trees of its own",
            expected="--fetch [DIR] [--from-git] [--pin TARGET=VERSION]",
            found=" ".join(named),
            next_step="run it and `python apply.py --TARGET PATH` one after the other",
        )


# Clones


def repository(target: Target) -> str:
    """Where to clone `target` from: FP8_COLOCATE_REPO_<TARGET>, else upstream."""
    return os.environ.get(f"FP8_COLOCATE_REPO_{target.id.upper().replace('-', '_')}") or target.repo


def _from_git(manifest: Manifest, versions: dict[str, str], out: Path, wait_s: float, report: Report) -> int:
    requests = []
    for target in manifest.targets.values():
        pin = manifest.pin(target, versions.get(target.id))
        place = out / target.id
        if not place.exists():
            _clone(target, pin, place, report)
        requests.append(engine.Request(target, place, pin.version))
    outcomes = engine.run(manifest, requests, engine.plan_apply, wait_s, check=False)
    for one in outcomes:
        what = f"{one.patches} patches, {len(one.written)} files written" if one.written else "already patched"
        report.line(f"{one.found.target.id} {one.version}  {one.found.root}: {what}, digest {one.digest[:12]}")
    report.put(targets=[o.as_dict() for o in outcomes])
    report.line(f"next: python apply.py status {' '.join(f'--{o.found.target.id} {o.found.root}' for o in outcomes)}")
    return 0


def _clone(target: Target, pin: Pin, place: Path, report: Report) -> None:
    """Clone the pin's tag beside `place` and move it there when it is whole.

    Raises:
        DownloadFailed: git failed, or the tag is not the recorded commit.
        FileSystemError: the directory cannot be written.
    """
    if pin.tag is None:
        raise UsageError("this pin has no tag to clone", target=target.id, found=pin.version)
    url, partial = repository(target), place.parent / f".{place.name}.partial"
    report.progress(f"{target.id}: cloning {url} at {pin.tag}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        if partial.exists():
            shutil.rmtree(partial)  # of a run that was killed
        done = git.clone(url, pin.tag, partial, quiet=report.quiet or report.as_json)
        if done.returncode != 0:
            raise _clone_failure(target, pin, url, done.stderr.decode(errors="replace"))
        _check_commit(target, pin, url, partial)
        os.replace(partial, place)
    except OSError as error:
        raise os_failure("a clone cannot be written", error, path=place, target=target.id) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _clone_failure(target: Target, pin: Pin, url: str, said: str) -> DownloadFailed | FileSystemError:
    fields = {"target": target.id, "path": url, "details": [line for line in said.splitlines() if line][-5:]}
    if "No space left on device" in said:
        return FileSystemError(
            "the clone does not fit", cause="the disk is full", next_step="name another DIR", **fields
        )
    variable = f"FP8_COLOCATE_REPO_{target.id.upper().replace('-', '_')}"
    return DownloadFailed(
        f"git could not clone {target.dist} at {pin.tag}",
        cause="no network, or a mirror without this tag",
        next_step=f"set {variable} to a repository that has it, or use --fetch without --from-git",
        **fields,
    )


def _check_commit(target: Target, pin: Pin, url: str, clone: Path) -> None:
    head = git.text(clone, "rev-parse", "HEAD")
    if pin.commit is not None and head != pin.commit:
        raise DownloadFailed(
            f"the tag {pin.tag} is another commit than the recorded one",
            target=target.id,
            path=url,
            expected=pin.commit,
            found=head,
            cause="the tag was moved, or the mirror has a tag of its own",
        )
