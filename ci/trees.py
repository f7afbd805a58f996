#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Run the patches' own tests on patched trees, then each patch's tests on a tree that lacks just this patch.

Without --sglang, --megatron, --megatron-bridge the pinned wheels are unpacked below .cache/trees in upstream's layout
and patched by apply.py. With them, the trees named are tested as they are and nothing is written into them; the second
half is left out then.

Second half: the tests that a patch names in its `Fails-Without:` trailers must fail when every other patch of the
series and the overlay are there and it alone is not. Later patches that no longer apply without it are left out too;
the output names them. A test that passes, that skips (but for want of a GPU) or that is not collected is red.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a script in ci/; the tool is a package of the clone

from patchset import download, git, manifest, relock, scratch, series, target  # noqa: E402
from patchset.errors import PatchConflict, PatchsetError  # noqa: E402
from patchset.report import Report  # noqa: E402
from patchset.types import PatchMail, Target  # noqa: E402
from tests.plugins.lanes import GPU_REASON  # noqa: E402

TREES = ROOT / ".cache" / "trees"
RESULTS = ROOT / ".cache" / "ci" / "trees"
# one pytest process each: importing SGLang costs many seconds, and Bridge needs Megatron-Core
GROUPS = {"sglang": ("sglang",), "megatron": ("megatron", "megatron-bridge")}
TEST_DIRS = ("tests", "test")


@dataclass(frozen=True)
class Tree:
    """One target as it is tested: `root` in upstream's layout or a site-packages, `path` what goes onto sys.path."""

    target: Target
    root: Path
    path: Path
    ours: bool  # made here, so that it may be changed


@dataclass
class Outcome:
    """What the whole run found."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)


def say(text: str) -> None:
    print(f"trees: {text}", flush=True)


# Trees


def pinned_trees(patch_set: manifest.Manifest, wanted: Sequence[str]) -> dict[str, Tree]:
    """Unpack the pinned wheels in upstream's layout and patch them with apply.py, as a user would."""
    trees = {}
    command = [sys.executable, str(ROOT / "apply.py")]
    for target_id in wanted:
        found = patch_set.target(target_id)
        wheel = download.wheel_path(patch_set, found, patch_set.pin(found), Report())
        root = TREES / target_id
        started = time.monotonic()
        unpack(found, wheel, root)
        say(f"{target_id} {found.pin}: unpacked in {time.monotonic() - started:.1f} s")
        command += [f"--{target_id}", str(root)]
        trees[target_id] = Tree(found, root, import_root(found, root), ours=True)
    started = time.monotonic()
    if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        raise SystemExit("trees: apply.py failed on the pinned trees; see above")
    say(f"apply.py took {time.monotonic() - started:.1f} s")
    return trees


def unpack(found: Target, wheel: Path, root: Path) -> None:
    """The package files of `wheel` at upstream's paths below `root`, dated as in the wheel, in an empty repository.

    The dates keep byte code of an earlier run valid. The repository makes it a checkout, so that tests are installed.
    """
    shutil.rmtree(root, ignore_errors=True)
    upstream = {installed: prefix for prefix, installed in found.layout.items()}
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            prefix = next((p for p in upstream if info.filename.startswith(p)), None)
            if prefix is None or info.is_dir():
                continue
            place = root / (upstream[prefix] + info.filename[len(prefix) :])
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(archive.read(info))
            dated = time.mktime((*info.date_time, 0, 0, -1))
            os.utime(place, (dated, dated))
    git.init(root)


def import_root(found: Target, root: Path) -> Path:
    """The directory of a tree that goes onto sys.path."""
    located = target.locate(found, root)
    marker = located.place(found.marker)
    installed = Path(found.installed_path(found.marker) or found.marker)
    if marker is None:
        raise AssertionError(f"{found.marker} has no place in {root}")
    return marker.resolve().parents[len(installed.parts) - 1]


def given_trees(patch_set: manifest.Manifest, paths: Mapping[str, Path]) -> dict[str, Tree]:
    """The trees named on the command line."""
    trees = {}
    for target_id, path in paths.items():
        found = patch_set.target(target_id)
        root = target.locate(found, path).root
        trees[target_id] = Tree(found, root, import_root(found, root), ours=False)
    return trees


# pytest


def group_of(target_id: str) -> str:
    return next(name for name, members in GROUPS.items() if target_id in members)


def test_paths(target_id: str) -> list[str]:
    """The test directories of a target's overlay, relative to the clone."""
    base = ROOT / "overlay" / target_id
    found = [base / name for name in TEST_DIRS]
    return [str(p.relative_to(ROOT)) for p in found if any(p.rglob("test_*.py"))]


def pytest(args: argparse.Namespace, trees: Sequence[Tree], words: Sequence[str | Path]) -> int:
    """One pytest process in which the targets come from `trees`; its exit code."""
    group = group_of(trees[0].target.id)
    command = [args.python, "-m", "pytest", "-p", "tests.plugins.trees", "-p", f"tests.plugins.{group}_cpu"]
    for tree in trees:
        command += ["--tree", f"{tree.target.module}={tree.path}"]
    env = {k: v for k, v in os.environ.items() if k not in ("PYTEST_ADDOPTS", "PYTHONDONTWRITEBYTECODE")}
    env["PYTHONPATH"] = os.pathsep.join(str(tree.path) for tree in trees)
    env["PYTHONPYCACHEPREFIX"] = str(pycache())
    return subprocess.run([*map(str, command), *map(str, words)], cwd=ROOT, env=env, check=False).returncode


def pycache() -> Path:
    return ROOT / ".cache" / "pycache"


def run_patched(args: argparse.Namespace, trees: Mapping[str, Tree], outcome: Outcome) -> None:
    """All tests of the overlay, one process a group, on the patched trees."""
    for group, members in GROUPS.items():
        present = [trees[m] for m in members if m in trees]
        paths = [path for tree in present for path in test_paths(tree.target.id)]
        if not paths:
            if present:
                say(f"{group}: no tests in the overlay")
            continue
        results = RESULTS / f"{group}.json"
        results.unlink(missing_ok=True)
        marks = ["-m", args.marks] if args.marks else []
        say(f"{group}: {' '.join(paths)} on the patched trees")
        started = time.monotonic()
        code = pytest(
            args, present, ["--disable-warnings", "--lane", args.lane, "--lane-results", results, *marks, *paths]
        )
        counts = json.loads(results.read_text()) if results.exists() else {}
        outcome.counts.update({k: v for k, v in counts.items() if k != "exit"})
        if code != 0 and not (code == 5 and args.marks):  # 5: no test has the mark
            outcome.problems.append(f"{group}: pytest on the patched trees ended with exit code {code}")
        say(f"{group}: {time.monotonic() - started:.0f} s")


# Without one patch


def run_without_each(
    args: argparse.Namespace, patch_set: manifest.Manifest, trees: Mapping[str, Tree], outcome: Outcome
) -> None:
    """Each patch's own tests, on trees that lack it."""
    for tree in trees.values():
        pin = patch_set.pin(tree.target)
        patches = series.load_series(patch_set.patch_dir(tree.target, pin.version))
        wheel = download.wheel_path(patch_set, tree.target, pin, Report())
        source = relock.wheel_source(tree.target, wheel, pin.wheel.sha256)
        base = {path: source(path) or b"" for path in relock.touched_paths(patches)}
        for patch in patches:
            if args.only and patch.slug not in args.only:
                continue
            rest, fallen = without(patches, patch, base, tree.target.id)
            with replaced(tree, rest, base):
                judge(args, trees, tree, patch, fallen, outcome)


def without(
    patches: Sequence[PatchMail], left_out: PatchMail, base: Mapping[str, bytes], target_id: str
) -> tuple[list[PatchMail], list[PatchMail]]:
    """The series without one patch: (what still applies, the later patches that do not apply without it)."""
    rest = [p for p in patches if p is not left_out]
    try:
        scratch.apply_series(rest, base, target_id)
        return rest, []
    except PatchConflict:
        pass
    rest, fallen = [], []
    for patch in patches:
        if patch is left_out:
            continue
        try:
            scratch.apply_series([*rest, patch], base, target_id)
            rest.append(patch)
        except PatchConflict:
            fallen.append(patch)
    return rest, fallen


@contextmanager
def replaced(tree: Tree, patches: Sequence[PatchMail], base: Mapping[str, bytes]) -> Iterator[None]:
    """While the block runs, the patched files of `tree` are those of a shorter series; then they are as before."""
    if not tree.ours:
        raise AssertionError(f"{tree.root} is not ours to change")
    kept = {path: (tree.root / path).read_bytes() for path in base}
    shorter = scratch.apply_series(patches, base, tree.target.id)
    touched = {file.path for patch in patches for file in patch.files}
    try:
        _write(tree, {path: shorter[path] if path in touched else base[path] for path in base})
        yield
    finally:
        _write(tree, kept)


def _write(tree: Tree, files: Mapping[str, bytes]) -> None:
    """Write files and drop their byte code, which a rewrite within a second and of the same size would leave valid."""
    for path, data in files.items():
        place = tree.root / path
        if place.read_bytes() == data:
            continue
        place.write_bytes(data)
        cached = pycache() / place.resolve().relative_to("/")
        for stale in cached.parent.glob(f"{place.stem}.*.pyc"):
            stale.unlink()


def judge(
    args: argparse.Namespace,
    trees: Mapping[str, Tree],
    tree: Tree,
    patch: PatchMail,
    fallen: Sequence[PatchMail],
    outcome: Outcome,
) -> None:
    """Run the tests of one patch where it is missing and record what became of each."""
    prefix = f"overlay/{tree.target.id}/"
    name = f"{tree.target.id}/{patch.slug}"
    wanted = [prefix + value for value in patch.trailer_values("Fails-Without")]
    also = f" (and without {', '.join(p.slug for p in fallen)}, which build on it)" if fallen else ""
    if not wanted:
        outcome.problems.append(f"{name}: no Fails-Without trailer")
        return
    files = sorted({value.partition("::")[0] for value in wanted})
    missing = [file for file in files if not (ROOT / file).is_file()]
    if missing:
        outcome.problems += [f"{name}: Fails-Without names {file}, which does not exist" for file in missing]
        return
    say(f"without {name}{also}: {len(wanted)} tests must fail")
    asked, verdicts = RESULTS / "fails-without.json", RESULTS / f"{tree.target.id}-{patch.slug}.json"
    asked.write_text(json.dumps(wanted), encoding="utf-8")
    verdicts.unlink(missing_ok=True)
    present = [trees[m] for m in GROUPS[group_of(tree.target.id)] if m in trees]
    started = time.monotonic()
    code = pytest(
        args,
        present,
        ["-q", "--tb=no", "--disable-warnings", "--fails-without", asked, "--verdicts", verdicts, *files],
    )
    found = json.loads(verdicts.read_text()) if verdicts.exists() else {}
    if not found:
        outcome.problems.append(f"{name}: pytest without the patch ended with exit code {code} and no verdict")
    for nodeid, (what, reason) in found.items():
        _record(outcome, name, nodeid.removeprefix(prefix), what, reason)
    say(f"without {name}: {time.monotonic() - started:.0f} s")


def _record(outcome: Outcome, name: str, nodeid: str, what: str, reason: str) -> None:
    line = f"{name}: {nodeid}: {what}: {reason}"
    if what == "fails":
        outcome.counts["fail without their patch"] += 1
    elif what == "skipped" and GPU_REASON in reason:
        outcome.counts["not judged without a GPU"] += 1
    else:
        outcome.problems.append(line)
    outcome.verdicts.append(line)


# Command line


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for target_id in ("sglang", "megatron", "megatron-bridge"):
        parser.add_argument(f"--{target_id}", type=Path, metavar="PATH", dest=target_id, help="test this patched tree")
    parser.add_argument("--python", default=sys.executable, help="the Python that runs the tests (default: this one)")
    parser.add_argument("--targets", nargs="+", metavar="TARGET", help="only these of the pinned targets")
    parser.add_argument("--only", nargs="+", metavar="SLUG", help="only these patches in the second half")
    parser.add_argument("--skip-patched", action="store_true", help="leave out the first half")
    parser.add_argument("--skip-without", action="store_true", help="leave out the second half")
    parser.add_argument(
        "-m", dest="marks", metavar="EXPR", help="only tests with these marks, as pytest's -m; implies --skip-without"
    )
    parser.add_argument("--lane", default="trees", help="whose skip list counts: ci/skips/LANE.txt (default trees)")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write the counts as JSON")
    return parser.parse_args()


def run(args: argparse.Namespace) -> Outcome:
    patch_set = manifest.load()
    paths = {t: getattr(args, t) for t in patch_set.targets if getattr(args, t) is not None}
    trees = (
        given_trees(patch_set, paths) if paths else pinned_trees(patch_set, args.targets or list(patch_set.targets))
    )
    RESULTS.mkdir(parents=True, exist_ok=True)
    outcome = Outcome()
    if not args.skip_patched:
        run_patched(args, trees, outcome)
    if paths or args.marks:
        say("the half 'without each patch' runs on the pinned trees only, with all tests; left out")
    elif not args.skip_without:
        run_without_each(args, patch_set, trees, outcome)
    return outcome


def main() -> int:
    args = parse()
    try:
        outcome = run(args)
    except PatchsetError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    for line in outcome.verdicts:
        say(line)
    say("; ".join(f"{number} {name}" for name, number in outcome.counts.items()) or "nothing ran")
    for problem in outcome.problems:
        say(f"RED {problem}")
    if args.results:
        args.results.parent.mkdir(parents=True, exist_ok=True)
        args.results.write_text(json.dumps(dict(outcome.counts), indent=2) + "\n", encoding="utf-8")
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
