# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""apply, status and list: the verbs that need nothing but git and the standard library."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from patchset import engine, plan
from patchset.errors import UsageError
from patchset.lock import load as load_lock
from patchset.manifest import Manifest
from patchset.report import Report
from patchset.types import TargetState


def add_target_flags(parser: argparse.ArgumentParser, manifest: Manifest) -> None:
    """--sglang P --megatron P --megatron-bridge P and --pin."""
    for target in manifest.targets.values():
        parser.add_argument(
            f"--{target.id}",
            metavar="PATH",
            type=_path,
            action=_Once,
            dest=f"path_{target.id}",
            help=f"checkout, unpacked sdist or wheel, site-packages or venv with {target.dist}",
        )
    parser.add_argument(
        "--pin", action="append", default=[], metavar="TARGET=VERSION", help="use another recorded pin of a target"
    )


class _Once(argparse.Action):
    """Store the value; a second one is refused, not preferred in silence."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option_string} is given twice: {getattr(namespace, self.dest)} and {values}")
        setattr(namespace, self.dest, values)


def _path(text: str) -> Path:
    if not text:  # an unset shell variable; Path("") would be the current directory
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def _seconds(text: str) -> float:
    value = float(text)
    if not value >= 0:
        raise ValueError(text)
    return value


def requests_of(args: argparse.Namespace, manifest: Manifest) -> list[engine.Request]:
    """The targets named on the command line.

    Raises:
        UsageError: none is named, or a --pin is malformed, unknown, or for a target that is not named.
    """
    pins = pins_of(args.pin, manifest)
    requests = []
    for target in manifest.targets.values():
        path = getattr(args, f"path_{target.id}")
        if path is not None:
            requests.append(engine.Request(target, path, pins.pop(target.id, None)))
    if not requests:
        flags = " ".join(f"--{t} PATH" for t in manifest.targets)
        raise UsageError(
            "no target is named", expected=f"any of {flags}, or --fetch", next_step="python apply.py --help"
        )
    if pins:
        raise UsageError(
            "--pin for a target that is not named", found=", ".join(pins), next_step="add its --TARGET PATH"
        )
    return requests


def pins_of(values: Sequence[str], manifest: Manifest) -> dict[str, str]:
    """Target id -> version, from the values of --pin."""
    pins: dict[str, str] = {}
    for value in values:
        target_id, separator, version = value.partition("=")
        if not separator or not version:
            raise UsageError("--pin cannot be read", expected="TARGET=VERSION, as sglang=0.5.17", found=value)
        manifest.pin(manifest.target(target_id), version)
        if pins.setdefault(target_id, version) != version:
            raise UsageError("two pins for one target", target=target_id, found=f"{pins[target_id]} and {version}")
    return pins


def configure_apply(parser: argparse.ArgumentParser, manifest: Manifest) -> None:
    add_target_flags(parser, manifest)
    parser.add_argument("--check", action="store_true", help="verify that it would apply (or revert); write nothing")
    parser.add_argument("--revert", action="store_true", help="take the patch set off again")
    parser.add_argument(
        "--lock-timeout", type=_seconds, default=30.0, metavar="S", help="seconds to wait for another run (default 30)"
    )
    parser.add_argument(
        "--fetch",
        nargs="?",
        const=Path("dist"),
        type=_path,
        metavar="DIR",
        help="bring the pinned distributions, patch them and build the wheels into DIR (default dist/)",
    )
    parser.add_argument(
        "--from-git",
        action="store_true",
        help="with --fetch: clone the tags into DIR/TARGET and patch the clones "
        "(FP8_COLOCATE_REPO_<TARGET> names a mirror)",
    )


def execute_apply(args: argparse.Namespace, manifest: Manifest, report: Report) -> int:
    if args.fetch is not None:
        from patchset import fetch  # the only verb that needs pip or a network

        return fetch.execute(args, manifest, report)
    if args.from_git:
        raise UsageError("--from-git goes with --fetch", next_step="python apply.py --fetch DIR --from-git")
    planner = engine.plan_revert if args.revert else engine.plan_apply
    outcomes = engine.run(manifest, requests_of(args, manifest), planner, args.lock_timeout, args.check)
    for outcome in outcomes:
        report.line(_sentence(outcome, args))
        for path in outcome.written:
            report.detail(f"  {'would write' if args.check else 'wrote'} {path}")
    report.put(targets=[o.as_dict() for o in outcomes], checked=args.check, reverted=args.revert)
    return 0


def _sentence(outcome: engine.Outcome, args: argparse.Namespace) -> str:
    what = f"{outcome.found.target.id} {outcome.version}  {outcome.found.kind.value} {outcome.found.root}"
    count = f"{outcome.patches} patches, {len(outcome.written)} files"
    end = "pristine" if args.revert else "patched"
    recovered = f" (an interrupted run was {outcome.recovered} first)" if outcome.recovered else ""
    if not outcome.written:
        return f"{what}: already {end}, digest {outcome.digest[:12]}{recovered}"
    if args.check:
        return f"{what}: would be {end}: {count}, digest {outcome.digest[:12]}"
    return f"{what}: {end}: {count}, digest {outcome.digest[:12]}{recovered}"


def configure_status(parser: argparse.ArgumentParser, manifest: Manifest) -> None:
    add_target_flags(parser, manifest)


def execute_status(args: argparse.Namespace, manifest: Manifest, report: Report) -> int:
    inspections = engine.status(manifest, requests_of(args, manifest))
    for inspection, target_state in inspections:
        found = inspection.found
        note = "  (an interrupted run waits for recovery)" if inspection.interrupted else ""
        report.line(
            f"{found.target.id} {inspection.lock.version}  {found.kind.value} {found.root}: {target_state.value}{note}"
        )
        bad = plan.refused(inspection.files)
        for path, file_state in inspection.files.items():
            if report.verbose or path in bad or target_state is TargetState.MIXED:
                report.line(f"  {file_state.value:<12} {path}")
    report.put(targets=[_status_dict(i, s) for i, s in inspections])
    engine.refuse_unpatched(inspections)
    return 0


def _status_dict(inspection: engine.Inspection, target_state: TargetState) -> dict:
    return {
        "target": inspection.found.target.id,
        "path": str(inspection.found.root),
        "kind": inspection.found.kind.value,
        "version": inspection.lock.version,
        "digest": inspection.lock.digest,
        "state": target_state.value,
        "interrupted": inspection.interrupted,
        "files": {path: s.value for path, s in inspection.files.items()},
    }


def configure_list(parser: argparse.ArgumentParser, manifest: Manifest) -> None:
    parser.add_argument("--target", choices=list(manifest.targets), help="only this target")
    parser.add_argument("--status", metavar="WORD", help="only patches whose Upstream-Status starts with WORD")


def execute_list(args: argparse.Namespace, manifest: Manifest, report: Report) -> int:
    listed = []
    for target in manifest.targets.values():
        if args.target not in (None, target.id):
            continue
        for pin in target.pins.values():
            lock, patches = load_lock(manifest, target, pin)
            shown = [p for p in patches if _wanted(p.trailer("Upstream-Status"), args.status)]
            report.line(f"{target.id} {pin.version}  digest {lock.digest[:12]}, {len(lock.overlay)} overlay files")
            for patch in shown:
                report.line(f"  {patch.slug:<40} {patch.trailer('Upstream-Status') or '-':<12} {patch.subject}")
                report.detail(f"    drop when: {patch.trailer('Drop-When')}")
            listed.append(
                {
                    "target": target.id,
                    "version": pin.version,
                    "digest": lock.digest,
                    "overlay": sorted(lock.overlay),
                    "patches": [{"slug": p.slug, "subject": p.subject, "trailers": dict(p.trailers)} for p in shown],
                }
            )
    report.put(pins=listed)
    return 0


def _wanted(status: str | None, word: str | None) -> bool:
    return word is None or (status or "").lower().startswith(word.lower())
