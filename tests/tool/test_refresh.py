# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""refresh: a series carried onto another upstream version, in every way it can end."""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path

import pytest

from patchset.carry import misfits_of, scope_of
from patchset.series import parse_diff, parse_mail
from tests.tool import kit
from tests.tool.refresh_kit import MODULE, PATCHED, PREFIX, Workshop, commit, hostile_user, ids

ENGINE = PREFIX + "engine.py"
LOADER = PREFIX + "loader.py"
NAME = PREFIX + "module.py"
SHIFTED = b"import os\n\n\n" + MODULE


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    """Two patches: `check-weights` in a method, `engine-three` in another file."""
    made = Workshop(tmp_path)
    engine = kit.replaced(made.upstream[ENGINE], (b"engine_3 = 3\n", b"engine_3 = 'x'\n"))
    made.series({"check-weights": {NAME: PATCHED}, "engine-three": {ENGINE: engine}})
    return made


def states(shop: Workshop, wheel: Path) -> dict[str, str]:
    done = shop.refresh(wheel, "--dry-run", "--json")
    return {p["slug"]: p["state"] for p in json.loads(done.stdout)["patches"]}


def test_clean_writes_the_new_pin(shop: Workshop) -> None:
    old = kit.snapshot(shop.pin)
    wheel = shop.wheel("2.0", {NAME: SHIFTED})
    done = kit.accepted(shop.refresh(wheel), "clean", "check-weights", "engine-three", "patchset.toml")
    assert done.count("clean") == 2
    new = shop.home.pin_directory("alpha", "2.0")
    assert sorted(p.name for p in new.iterdir()) == [
        "check-weights.patch",
        "engine-three.patch",
        "lock.json",
        "series",
    ]
    assert kit.snapshot(shop.pin) == old
    table = tomllib.loads((shop.home.directory / "patchset.toml").read_text())["target"]["alpha"]
    assert table["pins"]["2.0"]["wheel"]["file"] == wheel.name
    assert table["pins"]["2.0"]["tag"] == "v2.0"
    assert table["pin"] == "1.0"
    assert parse_mail(new / "check-weights.patch").trailer("Drop-When") == "upstream does it"
    target = kit.checkout(shop.root / "target", {**kit.upstream_files("alpha", "2.0"), NAME: SHIFTED}, "v2.0")
    kit.accepted(shop.run("--alpha", target), "alpha 2.0")
    assert (target / NAME).read_bytes() == b"import os\n\n\n" + PATCHED + kit.NOTICE
    shop.dev("--pin", "2.0")
    kit.accepted(shop.run("export", "alpha", "--pin", "2.0"), "nothing to write")


def test_dry_run_writes_nothing(shop: Workshop) -> None:
    before = kit.snapshot(shop.home.directory, ["dists"])
    kit.accepted(shop.refresh(shop.wheel("2.0", {NAME: SHIFTED}), "--dry-run"), "clean", "lock: 2 files")
    assert kit.difference(before, kit.snapshot(shop.home.directory, ["dists", "patchset/__pycache__"])) == []
    assert list((shop.root / "cache/fp8-colocate/refresh").iterdir()) == []


def test_same_change_upstream_drops_the_patch(shop: Workshop) -> None:
    kit.accepted(shop.refresh(shop.wheel("2.0", {NAME: PATCHED})), "already upstream")
    assert (shop.home.pin_directory("alpha", "2.0") / "series").read_text().splitlines()[-1] == "engine-three"
    assert not (shop.home.pin_directory("alpha", "2.0") / "check-weights.patch").exists()


def test_same_change_in_moved_code_is_upstream_too(shop: Workshop) -> None:
    close = b"def close(engine):\n    engine.weights = None\n    return True\n"
    moved = close + b"\n\n" + kit.replaced(PATCHED, (b"\n\n" + close, b""))
    new = kit.replaced(moved, (b"        write(path, self.weights)\n", b"        write(path, self.weights, True)\n"))
    found = states(shop, shop.wheel("2.0", {NAME: new}))
    assert found == {"check-weights": "already upstream", "engine-three": "clean"}


def test_context_that_changed_is_merged(shop: Workshop) -> None:
    new = kit.replaced(MODULE, (b"        return True\n\n    def save", b"        return self\n\n    def save"))
    assert states(shop, shop.wheel("2.0", {NAME: new})) == {"check-weights": "merged", "engine-three": "clean"}


def test_renamed_file_is_followed(shop: Workshop) -> None:
    wheel = shop.wheel("2.0", {NAME: None, PREFIX + "inner/renamed.py": SHIFTED})
    kit.accepted(shop.refresh(wheel), "merged", f"{NAME} -> {PREFIX}inner/renamed.py")
    mail = parse_mail(shop.home.pin_directory("alpha", "2.0") / "check-weights.patch")
    assert [f.path for f in mail.files] == [PREFIX + "inner/renamed.py"]


def test_patch_upstreamed_in_part(shop: Workshop) -> None:
    both = kit.replaced(PATCHED, (b"    engine.weights = None\n", b"    engine.weights = 0\n"))
    shop.series({"two-places": {NAME: both}})
    done = shop.refresh(shop.wheel("2.0", {NAME: PATCHED}), "--dry-run")
    kit.accepted(done, "merged", "a part of it is upstream")


CONFLICT = kit.replaced(
    MODULE,
    (b"        weights = read(path)\n        self.weights = weights\n", b"        self.weights = read(path, 1)\n"),
)


def test_conflict_says_all_there_is(shop: Workshop) -> None:
    before = kit.snapshot(shop.home.directory, ["patchset", "dists"])
    done = shop.refresh(shop.wheel("2.0", {NAME: CONFLICT}), "--json")
    assert done.returncode == 4
    answer = json.loads(done.stdout)
    first = answer["patches"][0]
    assert (first["slug"], first["state"], answer["patches"][1]["state"]) == ("check-weights", "conflict", "waiting")
    hunk = first["hunks"][0]
    assert (hunk["file"], hunk["hunk"], hunk["line"]) == (NAME, 1, 3)
    assert hunk["expected"] == ["        weights = read(path)", "        self.weights = weights"]
    assert hunk["found"] == ["        self.weights = read(path, 1)"]
    assert answer["worktree"] == str(shop.refreshing)
    assert answer["next"].endswith("refresh alpha --to 2.0 --continue") or "--continue" in answer["next"]
    assert b"<<<<<<<" in (shop.refreshing / NAME).read_bytes()
    assert (shop.refreshing / LOADER).is_file()  # the whole tree is there for a person
    assert kit.snapshot(shop.home.directory, ["patchset", "dists"]) == before
    assert "expected" in done.stderr and "--continue" in done.stderr


def test_continue_after_resolving(shop: Workshop) -> None:
    wheel = shop.wheel("2.0", {NAME: CONFLICT})
    kit.refused(shop.refresh(wheel), 4, "check-weights", "conflict")
    kit.refused(shop.refresh(wheel), 6, "waits for a decision", "--continue", "--skip", "--abort")
    kit.refused(shop.refresh(wheel, "--continue"), 6, "not resolved", NAME)
    kit.git(shop.refreshing, "add", NAME)
    kit.refused(shop.refresh(wheel, "--continue"), 7, "markers are left")
    solved = kit.replaced(CONFLICT, (b"        self.weights", b"        check(path)\n        self.weights"))
    (shop.refreshing / NAME).write_bytes(solved)
    kit.refused(shop.refresh(wheel, "--continue"), 6, "not added")
    kit.git(shop.refreshing, "add", NAME)
    kit.accepted(shop.refresh(wheel, "--continue"), "resolved", "clean", "patchset.toml")
    mail = parse_mail(shop.home.pin_directory("alpha", "2.0") / "check-weights.patch")
    assert mail.subject == "alpha: check weights"
    assert mail.author == "fp8-colocate maintainers <maintainers@example.invalid>"
    assert [line for line in mail.files[0].hunks[0].lines if line[0] in "+-"] == ["+        check(path)"]


def test_continue_after_the_user_committed_himself(shop: Workshop) -> None:
    wheel = shop.wheel("2.0", {NAME: CONFLICT})
    kit.refused(shop.refresh(wheel), 4)
    (shop.refreshing / NAME).write_bytes(CONFLICT + b"END = 1\n")
    kit.git(shop.refreshing, "commit", "-q", "-a", "--no-edit")
    kit.git(shop.refreshing, "commit", "-q", "--allow-empty", "-m", "one too many")
    kit.refused(shop.refresh(wheel, "--continue"), 7, "must be one commit", "one too many")
    kit.git(shop.refreshing, "reset", "-q", "--hard", "HEAD^")
    kit.accepted(shop.refresh(wheel, "--continue"), "resolved")


def test_continue_with_nothing_left(shop: Workshop) -> None:
    wheel = shop.wheel("2.0", {NAME: CONFLICT})
    kit.refused(shop.refresh(wheel), 4)
    kit.git(shop.refreshing, "checkout", "-q", "--ours", "--", NAME)
    kit.git(shop.refreshing, "add", NAME)
    kit.accepted(shop.refresh(wheel, "--continue"), "already upstream", "resolved to upstream's lines")


def test_a_resolution_that_adds_a_file(shop: Workshop) -> None:
    wheel = shop.wheel("2.0", {NAME: CONFLICT})
    kit.refused(shop.refresh(wheel), 4)
    kit.write_files(shop.refreshing, {NAME: CONFLICT + b"END = 1\n", PREFIX + "extra.py": b"x = 1\n"})
    kit.git(shop.refreshing, "add", NAME, PREFIX + "extra.py")
    kit.refused(shop.refresh(wheel, "--continue"), 7, "may only modify", "extra.py")


def test_skip_leaves_the_patch_out(shop: Workshop) -> None:
    wheel = shop.wheel("2.0", {NAME: CONFLICT})
    kit.refused(shop.refresh(wheel), 4)
    kit.accepted(shop.refresh(wheel, "--skip"), "skipped", "clean")
    assert not (shop.home.pin_directory("alpha", "2.0") / "check-weights.patch").exists()


def test_abort_leaves_nothing(shop: Workshop) -> None:
    before = kit.snapshot(shop.home.directory, ["patchset", "dists"])
    wheel = shop.wheel("2.0", {NAME: CONFLICT})
    kit.refused(shop.refresh(wheel), 4)
    kit.accepted(shop.refresh(wheel, "--abort"), "given up")
    assert not shop.refreshing.parent.exists()
    assert kit.snapshot(shop.home.directory, ["patchset", "dists"]) == before
    kit.refused(shop.refresh(wheel, "--abort"), 2, "no refresh")
    kit.refused(shop.refresh(wheel, "--continue"), 2, "no refresh")


def test_remembered_resolution(shop: Workshop) -> None:
    """git rerere across refreshes: the second time the worktree holds the resolution, and still a person looks."""
    wheel = shop.wheel("2.0", {NAME: CONFLICT})
    solved = kit.replaced(CONFLICT, (b"        self.weights", b"        check(path)\n        self.weights"))
    kit.refused(shop.refresh(wheel), 4)
    (shop.refreshing / NAME).write_bytes(solved)
    kit.git(shop.refreshing, "add", NAME)
    kit.git(shop.refreshing, "rerere")
    kit.accepted(shop.refresh(wheel, "--abort"), "given up")
    kit.refused(shop.refresh(wheel), 4)
    assert (shop.refreshing / NAME).read_bytes() == solved


def test_file_deleted_upstream(shop: Workshop) -> None:
    wheel = shop.wheel("2.0", {NAME: None})
    said = kit.refused(shop.refresh(wheel), 4, "dropped by patch", "file deleted upstream", NAME)
    assert "--skip" in said
    kit.accepted(shop.refresh(wheel, "--skip"), "skipped")


def test_duplicate_block_trap(tmp_path: Path) -> None:
    """Upstream deletes the block that the patch changes; its twin must not be changed instead."""
    shop = Workshop(tmp_path)
    block = b"        self.count = 0\n        self.total = 0\n        self.last = 0\n        return self\n\n"
    twin = b"    def reset(self):\n" + block
    classes = b"class A:\n" + twin + b"\nclass B:\n" + twin
    shop.upstream[PREFIX + "twice.py"] = classes
    rebuilt = kit.build_wheel(shop.home.directory / "dists", "alpha", "1.0", shop.upstream)
    kit.write_files(shop.dists, {rebuilt.name: rebuilt.read_bytes()})
    shop.home.write_manifest()
    shop.series({"reset-more": {PREFIX + "twice.py": classes.replace(b"self.total = 0", b"self.total = 1", 1)}})
    gone = b"class B:\n" + twin
    wheel = shop.wheel("2.0", {PREFIX + "twice.py": gone})
    done = shop.refresh(wheel, "--dry-run", "--json")
    assert done.returncode == 4, done.stdout
    assert json.loads(done.stdout)["patches"][0]["state"] in ("conflict", "moved")


def test_a_change_that_lands_in_another_function_stops(shop: Workshop) -> None:
    wheel = shop.wheel("2.0", {NAME: MODULE.replace(b"def load", b"def read_in")})
    kit.refused(shop.refresh(wheel), 4, "moved", "Engine.load", "Engine.read_in", "git -C")
    kit.accepted(shop.refresh(wheel, "--continue"), "merged", "accepted")


def test_overlay_file_that_upstream_has_now(shop: Workshop) -> None:
    shop.home.overlay("alpha", {PREFIX + "taken.py": kit.SPDX.encode()})
    shop.home.lock()
    wheel = shop.wheel("2.0", {PREFIX + "taken.py": b"theirs = 1\n"})
    kit.refused(shop.refresh(wheel), 4, "overlay files exist", PREFIX + "taken.py")
    done = shop.refresh(wheel, "--dry-run", "--json")
    assert json.loads(done.stdout)["overlay_upstream"] == [PREFIX + "taken.py"]
    assert not shop.refreshing.parent.exists()


def test_carriage_returns_upstream(tmp_path: Path) -> None:
    dos = MODULE.replace(b"\n", b"\r\n")
    shop = Workshop(tmp_path, {PREFIX + "dos.py": dos})
    shop.series({"touch-dos": {PREFIX + "dos.py": PATCHED.replace(b"\n", b"\r\n")}})
    wheel = shop.wheel("2.0", {PREFIX + "dos.py": b"import os\r\n" + dos})
    kit.accepted(shop.refresh(wheel, "--dry-run"), "clean")
    to_unix = shop.wheel("2.0", {PREFIX + "dos.py": MODULE})
    kit.refused(shop.refresh(to_unix, "--dry-run"), 4, "conflict")


def test_hostile_git_configuration(shop: Workshop, tmp_path: Path) -> None:
    wheel = shop.wheel("2.0", {NAME: SHIFTED})
    done = shop.run("refresh", "alpha", "--to", "2.0", "--wheel", wheel, **hostile_user(tmp_path / "hostile"))
    kit.accepted(done, "clean")
    mail = (shop.home.pin_directory("alpha", "2.0") / "check-weights.patch").read_bytes()
    assert b"Signed-off-by" not in mail and b"diff --git a/" in mail and b"\r" not in mail


def test_from_git_merges_tags(shop: Workshop, tmp_path: Path) -> None:
    clone = kit.checkout(tmp_path / "clone", shop.upstream)
    kit.write_files(clone, {NAME: SHIFTED, "docs/new.md": b"x\n"})
    kit.commit(clone, "two")
    kit.git(clone, "tag", "v2.0")
    wheel = shop.wheel("2.0", {NAME: SHIFTED})
    kit.accepted(shop.refresh(wheel, "--from-git", clone), "clean")
    lock = json.loads((shop.home.pin_directory("alpha", "2.0") / "lock.json").read_text())
    assert list(lock["files"][NAME]["pre"]) == ["wheel", "tag"]
    table = tomllib.loads((shop.home.directory / "patchset.toml").read_text())["target"]["alpha"]["pins"]["2.0"]
    assert table["commit"] == kit.git(clone, "rev-parse", "v2.0").strip()


def test_a_tree_without_a_wheel_writes_no_pin(shop: Workshop, tmp_path: Path) -> None:
    tree = kit.checkout(tmp_path / "main", {**shop.upstream, NAME: SHIFTED})
    kit.accepted(shop.run("refresh", "alpha", "--to", "2.0", "--tree", tree), "clean", "no pin is written")
    assert not shop.home.pin_directory("alpha", "2.0").exists()
    assert len(ids(shop.refreshing)) == 4


def test_tree_that_is_not_the_wheel(shop: Workshop, tmp_path: Path) -> None:
    tree = kit.checkout(tmp_path / "main", {**shop.upstream, NAME: SHIFTED})
    kit.refused(shop.refresh(shop.wheel("2.0", {}), "--tree", tree), 5, "on the new wheel", NAME)
    assert not shop.home.pin_directory("alpha", "2.0").exists()


def test_wrong_wheel_wrong_version_known_pin(shop: Workshop, tmp_path: Path) -> None:
    kit.refused(shop.run("refresh", "alpha", "--to", "1.0"), 2, "already")
    kit.refused(shop.refresh(shop.home.wheels["alpha"]), 7, "another version", "alpha-engine-2.0")
    (tmp_path / "bad.whl").write_bytes(b"no zip")
    kit.refused(shop.refresh(tmp_path / "bad.whl"), 7, "not a wheel")
    kit.refused(shop.refresh(tmp_path / "none.whl"), 7, "cannot be read")
    kit.accepted(shop.refresh(shop.wheel("2.0", {})), "clean")
    kit.refused(shop.refresh(shop.wheel("2.0", {})), 2, "has this version already")


def test_no_network_and_no_wheel(shop: Workshop) -> None:
    done = shop.run("refresh", "alpha", "--to", "9.9", "-q", PIP_NO_INDEX="1", PIP_INDEX_URL="http://127.0.0.1:1/")
    kit.refused(done, 1, "alpha-engine 9.9", "--wheel FILE")


def test_commits_added_by_hand(shop: Workshop) -> None:
    wheel = shop.wheel(
        "2.0", {NAME: CONFLICT, ENGINE: shop.upstream[ENGINE].replace(b"engine_3 = 3", b"engine_3 = 33")}
    )
    kit.refused(shop.refresh(wheel), 4, "check-weights")
    kit.refused(shop.refresh(wheel, "--skip"), 4, "engine-three")
    commit(shop.refreshing, "x", {LOADER: b"x = 1\n", ENGINE: b"y = 1\n"})
    commit(shop.refreshing, "y", {LOADER: b"x = 2\n"})
    kit.refused(shop.refresh(wheel, "--continue"), 7, "must be one commit")


def test_scopes() -> None:
    lines = PATCHED.decode().split("\n")
    assert scope_of(lines, lines.index("        check(weights)")) == "Engine.load"
    assert scope_of(lines, lines.index("    engine.weights = None")) == "close"
    assert scope_of(lines, 0) == "the module"


def test_misfit_of_an_inserted_line() -> None:
    diff = parse_diff(
        b"diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -1,3 +1,4 @@\n a\n b\n+new\n c\n", Path("x")
    )[0]
    assert misfits_of(diff, b"a\nb\nc\n") == []
    found = misfits_of(diff, b"0\na\nb\ninserted\nc\n")
    assert found == [{"file": "x.py", "hunk": 1, "line": 4, "expected": [], "found": ["inserted"]}]
    assert misfits_of(diff, None)[0]["expected"] == ["a", "b", "c"]


def test_range_diff_is_shown(shop: Workshop) -> None:
    new = kit.replaced(MODULE, (b"        return True\n\n    def save", b"        return self\n\n    def save"))
    done = shop.refresh(shop.wheel("2.0", {NAME: new}), "--dry-run", "-v")
    kit.accepted(done, "1:  ", "alpha: check weights", "2:  ")


def test_killed_refresh_goes_on(shop: Workshop) -> None:
    """A state that says "picking" with the pick half done: --continue picks again."""
    wheel = shop.wheel("2.0", {NAME: CONFLICT})
    kit.refused(shop.refresh(wheel), 4)
    path = shop.refreshing.parent / "state.json"
    body = json.loads(path.read_text())
    body["patches"][0] |= {"state": "waiting", "hunks": [], "note": ""}
    path.write_text(json.dumps(body))
    kit.refused(shop.refresh(wheel, "--continue"), 4, "check-weights", "conflict")
    path.write_text("{")
    kit.refused(shop.refresh(wheel, "--continue"), 7, "damaged", "--abort")


def test_the_projects_own_series_onto_its_own_version(project: Path, dists: Path, tmp_path: Path) -> None:
    """Real patches, real trees: from the wheel onto an equal tree every patch is clean."""
    cache = tmp_path / "cache" / "fp8-colocate"
    cache.mkdir(parents=True)
    (cache / "dists").symlink_to(dists)
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    wheel = next(dists.glob("megatron_bridge-*.whl"))
    tree = kit.unpacked_wheel(tmp_path / "tree", wheel)
    done: subprocess.CompletedProcess[str] = kit.run_tool(
        project, "refresh", "megatron-bridge", "--to", "99.0", "--tree", tree, "--dry-run", "--json", env=env
    )
    assert done.returncode == 0, done.stderr
    assert {p["state"] for p in json.loads(done.stdout)["patches"]} <= {"clean"}
