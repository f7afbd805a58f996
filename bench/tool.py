#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Measure the tool on the real pinned trees: `python bench/tool.py`. It measures; it never passes or fails on a time.

Each step runs `--runs` times as its own process, as a user starts it, and the median counts. Every timed apply
starts from a site-packages freshly unpacked from the three official wheels and ends in a check by `status`, outside
the clock. The yardstick beside apply is what people do by hand: `git apply` of the same patches plus a copy of the new
files, in a throw-away repository. It verifies nothing and cannot be undone. Prints a Markdown table and writes
bench/results/tool.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a script in bench/; the tool is a package of the clone

from patchset import download, git, lock, manifest  # noqa: E402
from patchset.report import Report  # noqa: E402

APPLY = [sys.executable, str(ROOT / "apply.py")]


def call(command: Sequence[str], expect: int = 0) -> None:
    """Run a command in silence; any exit code but `expect` ends the benchmark with what was said."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != expect:
        raise SystemExit(f"bench: {' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")


def timed(work: Callable[[], None], runs: int, before: Callable[[], None], after: Callable[[], None]) -> list[float]:
    """Seconds of each run of `work`; `before` and `after` are not on the clock."""
    seconds = []
    for _ in range(runs):
        before()
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
        after()
    return seconds


def nothing() -> None:
    pass


class Bench:
    """One site directory that holds all three targets, and the steps measured on it."""

    def __init__(self, place: Path, runs: int) -> None:
        self.place, self.runs = place, runs
        self.patch_set = manifest.load()
        self.targets = list(self.patch_set.targets.values())
        self.wheels = [download.wheel_path(self.patch_set, t, self.patch_set.pin(t), Report()) for t in self.targets]
        self.original, self.site, self.by_hand = place / "original", place / "site", place / "by-hand"
        for wheel in self.wheels:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(self.original)
        for dist_info in self.original.glob("*.dist-info"):
            (dist_info / "INSTALLER").write_text("pip\n", encoding="utf-8")
        self.flags = [word for t in self.targets for word in (f"--{t.id}", str(self.site))]

    def fresh(self) -> None:
        shutil.rmtree(self.site, ignore_errors=True)
        shutil.copytree(self.original, self.site)

    def fresh_by_hand(self) -> None:
        shutil.rmtree(self.by_hand, ignore_errors=True)
        shutil.copytree(self.original, self.by_hand)
        git.init(self.by_hand)

    def apply(self) -> None:
        call([*APPLY, "-q", *self.flags])

    def revert(self) -> None:
        call([*APPLY, "-q", "--revert", *self.flags])

    def status(self) -> None:
        call([*APPLY, "status", *self.flags])

    def pristine(self) -> None:
        call([*APPLY, "status", *self.flags], expect=3)

    def check(self) -> None:
        call([*APPLY, "-q", "--check", *self.flags])

    def wheel(self) -> None:
        call([*APPLY, "wheel", "--out", str(self.place / "dist")])

    def git_apply(self) -> None:
        """The same patches and new files with git and cp alone, into the installed layout."""
        for target in self.targets:
            version = self.patch_set.pin(target).version
            _, patches = lock.load(self.patch_set, target, self.patch_set.pin(target))
            upstream_prefix, installed_prefix = next(iter(target.layout.items()))
            strip = 1 + upstream_prefix.count("/") - installed_prefix.count("/")
            for patch in patches:
                path = self.patch_set.patch_dir(target, version) / f"{patch.slug}.patch"
                call(["git", "-C", str(self.by_hand), "apply", f"-p{strip}", str(path)])
            for upstream, source in self.patch_set.overlay_files(target).items():
                installed = target.installed_path(upstream)
                if installed is not None:
                    (self.by_hand / installed).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source, self.by_hand / installed)

    def measure(self) -> dict[str, list[float]]:
        """Seconds of every run of every step."""
        steps: dict[str, tuple[Callable[[], None], Callable[[], None], Callable[[], None]]] = {
            "apply, three targets": (self.fresh, self.apply, self.status),
            "by hand: git apply and cp, nothing verified": (self.fresh_by_hand, self.git_apply, nothing),
            "check on pristine trees": (self.fresh, self.check, self.pristine),
            "apply again (nothing to write)": (nothing, self.apply, self.status),
            "status of patched trees": (nothing, self.status, nothing),
            "revert": (self.apply, self.revert, self.pristine),
            "three patched wheels": (nothing, self.wheel, nothing),
        }
        measured = {}
        for name, (before, work, after) in steps.items():
            if name == "apply again (nothing to write)":
                self.apply()
            measured[name] = timed(work, self.runs, before, after)
            print(f"bench: {name}: {statistics.median(measured[name]):.3f} s", file=sys.stderr, flush=True)
        return measured

    def sizes(self) -> dict[str, dict[str, int]]:
        """Patches, patched files and new files of each target."""
        counts = {}
        for target in self.targets:
            locked, patches = lock.load(self.patch_set, target, self.patch_set.pin(target))
            counts[target.id] = {"patches": len(patches), "patched": len(locked.files), "new": len(locked.overlay)}
        return counts


def machine() -> str:
    """Processor, cores and system, from the system itself."""
    names = [line for line in _read("/proc/cpuinfo").splitlines() if line.startswith("model name")]
    processor = names[0].split(":", 1)[1].strip() if names else platform.processor() or platform.machine()
    return f"{os.cpu_count()} cores of {processor}, {platform.system()}"


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8") if Path(path).exists() else ""


def versions(bench: Bench) -> dict[str, str]:
    git_version = subprocess.run(["git", "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]
    pins = {t.dist: bench.patch_set.pin(t).version for t in bench.targets}
    return {"python": platform.python_version(), "git": git_version, **pins}


def table(body: dict) -> str:
    """The results as Markdown: median, spread and, where it means something, the ratio to the work by hand."""
    by_hand = body["steps"]["by hand: git apply and cp, nothing verified"]["median_s"]
    lines = ["| step | median | lowest to highest | to by hand |", "|---|---|---|---|"]
    for name, step in body["steps"].items():
        ratio = f"{step['median_s'] / by_hand:.1f} x" if name.startswith(("apply, three", "by hand")) else ""
        low, high = min(step["all_s"]), max(step["all_s"])
        lines.append(f"| {name} | {step['median_s']:.2f} s | {low:.2f} to {high:.2f} s | {ratio} |")
    sizes = "; ".join(
        f"{t} {s['patches']} patches, {s['patched']} + {s['new']} files" for t, s in body["sizes"].items()
    )
    said = ", ".join(f"{name} {version}" for name, version in body["versions"].items())
    return "\n".join([*lines, "", f"Median of {body['runs']}. {body['machine']}; {said}. {sizes}."])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="runs of each step; the median counts (default 7)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "bench" / "results" / "tool.json", help="where the JSON goes"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fp8-colocate-bench-") as name:
        bench = Bench(Path(name), args.runs)
        measured = bench.measure()
    steps = {
        n: {"median_s": round(statistics.median(s), 4), "all_s": [round(x, 4) for x in s]} for n, s in measured.items()
    }
    facts = {"machine": machine(), "versions": versions(bench), "runs": args.runs, "sizes": bench.sizes()}
    body = facts | {"steps": steps}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
    print(table(body))
    return 0


if __name__ == "__main__":
    sys.exit(main())
