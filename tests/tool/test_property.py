# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Random edit series over random files: lock, apply and revert are the identity, and a second apply writes nothing.

Derandomised, so that a red run is red again: `HYPOTHESIS_PROFILE=search` looks further.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patchset import engine, series, state
from patchset.errors import PatchsetError, SeriesInvalid
from tests.tool import kit
from tests.tool.kit import Home

settings.register_profile(
    "ci", derandomize=True, max_examples=15, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile("search", max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
PROFILE = settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# lines that look like parts of a diff, blanks, carriage returns, repeated lines, no ASCII, bytes that are no UTF-8
OF_A_DIFF = [
    "-- ",
    "--- a/x",
    "+++ b/x",
    "@@ -1 +1 @@",
    "\\ No newline at end of file",
    "diff --git a/x b/x",
    "From 0 Mon",
]
LINE = st.sampled_from(["a", "b", "b", "", " ", "\t", "trailing  ", "cr\r", "#", "é", "\udcff", "x" * 200, *OF_A_DIFF])
LINES = st.lists(LINE, min_size=1, max_size=12)
PATHS = [f"python/alpha/{name}" for name in ("a.py", "sub/b.py", "c_c.py")]


def to_bytes(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode("utf-8", errors="surrogateescape")


@st.composite
def histories(draw: st.DrawFn) -> list[dict[str, bytes]]:
    """States of a small tree, each different from the one before in at least one file."""
    now = {path: draw(LINES) for path in PATHS}
    states = [now]
    for _ in range(draw(st.integers(1, 4))):
        now = dict(now)
        for path in draw(st.lists(st.sampled_from(PATHS), min_size=1, max_size=3, unique=True)):
            lines = list(now[path])
            at = draw(st.integers(0, len(lines)))
            lines[at : at + draw(st.integers(0, 3))] = draw(st.lists(LINE, max_size=4))
            now[path] = lines or ["left"]
        if now != states[-1]:
            states.append(now)
    return [{path: to_bytes(lines) for path, lines in state_.items()} for state_ in states]


@settings(PROFILE)
@given(histories())
def test_lock_apply_revert_is_the_identity(history: list[dict[str, bytes]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        home = Home(Path(name) / "home", ["alpha"])
        home.upstream["alpha"] |= history[0]
        home.wheels["alpha"] = kit.build_wheel(home.directory / "dists", "alpha", "1.0", home.upstream["alpha"])
        home.write_manifest()
        home.series("alpha", {f"step-{n}": files for n, files in enumerate(history[1:])})
        home.overlay("alpha", {"python/alpha/new/one.py": b"NEW = 1\n"})
        home.lock()
        root = kit.unpacked_wheel(Path(name) / "tree", home.wheels["alpha"])
        run_both_ways(home, root, history)


def run_both_ways(home: Home, root: Path, history: list[dict[str, bytes]]) -> None:
    requests = [engine.Request(home.manifest.target("alpha"), root)]
    pristine = kit.snapshot(root)
    [done] = engine.run(home.manifest, requests, engine.plan_apply, 0, False)
    assert done.state.value == "patched"
    touched = {f.path for patch in series.load_series(home.pin_directory("alpha")) for f in patch.files}
    for path, data in history[-1].items():
        expected = data + kit.NOTICE if path in touched else data
        assert (root / path.removeprefix("python/")).read_bytes() == expected
    assert kit.record_faults(root) == []
    written = kit.stamps(root)
    [again] = engine.run(home.manifest, requests, engine.plan_apply, 0, False)
    assert again.written == [] and kit.stamps(root) == written
    (root / ".fp8-colocate/alpha/state.json").unlink()  # un-apply the series instead of copying back
    [back] = engine.run(home.manifest, requests, engine.plan_revert, 0, False)
    assert back.state.value == "pristine"
    assert kit.difference(pristine, kit.snapshot(root)) == []


RECORD_PATHS = st.lists(
    st.sampled_from(["a.py", "b,c.py", 'q"q.py', "d/e.py", "é.py", "i-1.dist-info/RECORD"]), unique=True
)


@settings(PROFILE, max_examples=100)
@given(RECORD_PATHS, st.dictionaries(st.sampled_from(["a.py", "b,c.py", "new.py"]), st.none() | st.binary(max_size=5)))
def test_record_keeps_every_other_row(paths: list[str], changes: dict[str, bytes | None]) -> None:
    rows = [state._csv_line(state.record_line(path, b"old")) for path in paths]
    record = "".join(f"{row}\n" for row in rows).encode()
    rewritten = state.rewrite_record(record, changes)
    kept = [path for path in paths if changes.get(path, b"") is not None]
    assert state.record_paths(rewritten)[: len(kept)] == kept
    assert set(state.record_paths(rewritten)) == set(kept) | {p for p, d in changes.items() if d is not None}
    assert [row for row in rows if state._row_path(row) not in changes] == [
        row for row in rewritten.decode().splitlines() if state._row_path(row) not in changes
    ]
    assert state.rewrite_record(rewritten, changes) == rewritten


@settings(PROFILE, max_examples=200)
@given(st.binary(max_size=300), st.integers(0, 2000), st.integers(0, 30))
def test_a_damaged_mail_is_an_error_of_ours(home: Home, junk: bytes, at: int, cut: int) -> None:
    """Whatever bytes a patch file holds: parsed, or refused as SeriesInvalid."""
    good = (home.pin_directory("alpha") / "second-touch.patch").read_bytes()
    damaged = good[:at] + junk + good[at + cut :]
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "x.patch"
        path.write_bytes(damaged)
        try:
            series.parse_mail(path)
        except SeriesInvalid as error:
            assert str(path) in str(error)


@pytest.mark.parametrize(
    "header",
    [
        "Content-Type: multipart/mixed; boundary=x",
        "Content-Transfer-Encoding: base64",
        "From: <<<",
        "Subject: =?utf-8?q?=?=",
    ],
)
def test_odd_mail_headers(tmp_path: Path, header: str) -> None:
    path = tmp_path / "x.patch"
    path.write_text(f"From 0 Mon\n{header}\n\nbody\n\ndiff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n")
    try:
        series.parse_mail(path)
    except PatchsetError as error:
        assert isinstance(error, SeriesInvalid)
