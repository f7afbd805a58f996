#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Write the generated parts of README.md: the table of patches and the measured results. `--check` only compares."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]  # a script in ci/; the tool and the benchmark are of the clone

import tool  # noqa: E402

from patchset import manifest, series  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "tool.json"


def patches() -> str:
    """One row a patch, in series order."""
    patch_set = manifest.load()
    rows = ["| target | patch | what it does | dropped when |", "|---|---|---|---|"]
    for target in patch_set.targets.values():
        directory = patch_set.patch_dir(target, target.pin)
        for mail in series.load_series(directory):
            link = f"[{mail.slug}]({mail.path.relative_to(ROOT).as_posix()})"
            rows.append(f"| {target.id} | {link} | {mail.subject} | {mail.trailer('Drop-When') or '-'} |")
    return "\n".join(rows)


def measured() -> str:
    """The table of the last recorded run of bench/tool.py."""
    return tool.table(json.loads(RESULTS.read_text(encoding="utf-8"))) if RESULTS.exists() else "Not measured yet."


def renewed(text: str) -> str:
    """`text` with both parts written anew."""
    for name, body in (("patches", patches()), ("bench", measured())):
        pattern = rf"(<!-- {name}: begin[^\n]*-->\n).*?(<!-- {name}: end -->)"
        text, count = re.subn(pattern, lambda m, body=body: f"{m[1]}{body}\n{m[2]}", text, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"README.md: expected one part between '<!-- {name}: begin' and 'end', found {count}")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 when README.md is not up to date")
    args = parser.parse_args()
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    new = renewed(text)
    if new == text:
        return 0
    if args.check:
        print("README.md is not up to date; next: python ci/readme.py", file=sys.stderr)
        return 1
    readme.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
