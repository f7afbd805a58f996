# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""upstream: a branch and a draft from one patch, in clones of every kind. Never a push, never a sign-off."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from patchset import mailformat
from tests.tool import kit
from tests.tool.refresh_kit import MODULE, PATCHED, PREFIX, TRAILERS, Workshop, commit, hostile_user

NAME = PREFIX + "module.py"
ENGINE = PREFIX + "engine.py"
OVERLAY = {
    PREFIX + "checks/__init__.py": kit.SPDX.encode() + b"def check(weights): ...\n",
    PREFIX + "other/thing.py": kit.SPDX.encode(),
    "test/unit/test_checks.py": kit.SPDX.encode() + b"def test_it(): pass\n",
}
FAILS = "Fails-Without: test/unit/test_checks.py::test_it\n"


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    """A patch that needs an overlay package and has a test, on top of another patch of another file."""
    made = Workshop(tmp_path)
    made.home.overlay("alpha", OVERLAY)
    made.series({})
    tree = made.dev()
    commit(
        tree, "alpha: first", {ENGINE: kit.replaced(made.upstream[ENGINE], (b"engine_3 = 3\n", b"engine_3 = 'x'\n"))}
    )
    commit(
        tree,
        "alpha: check weights",
        {NAME: PATCHED},
        f"{TRAILERS}Overlay: {PREFIX}checks\n{FAILS}Co-authored-by: A <a@b.c>\n",
    )
    kit.accepted(made.run("export", "alpha"), "alpha-check-weights.patch")
    return made


@pytest.fixture
def clone(shop: Workshop, tmp_path: Path) -> Path:
    """A contributor's clone: upstream's main has moved on, he is on a branch of his own with an edited file."""
    origin = kit.checkout(tmp_path / "origin", shop.upstream)
    kit.write_files(origin, {NAME: b"import os\n\n\n" + MODULE, "docs/x.md": b"x\n"})
    kit.commit(origin, "main moved on")
    kit.git(tmp_path, "clone", "-q", str(origin), str(tmp_path / "clone"))
    kit.git(tmp_path / "clone", "checkout", "-q", "-b", "mine")
    (tmp_path / "clone" / "README.md").write_text("edited\n")
    return tmp_path / "clone"


def upstream(shop: Workshop, clone: Path | str, *args: object, **env: str) -> subprocess.CompletedProcess[str]:
    return shop.run("upstream", "alpha-check-weights", "--clone", clone, "--out", shop.root / "out", *args, **env)


def test_branch_message_and_files(shop: Workshop, clone: Path) -> None:
    before = kit.snapshot(clone, [".git"]), kit.git(clone, "status", "--short", "--branch")
    kit.accepted(
        upstream(shop, clone), "fp8-colocate/alpha-check-weights", "--signoff", "push YOUR_FORK", "applied as it is"
    )
    assert (kit.snapshot(clone, [".git"]), kit.git(clone, "status", "--short", "--branch")) == before
    branch = "fp8-colocate/alpha-check-weights"
    assert kit.git(clone, "rev-parse", f"{branch}^") == kit.git(clone, "rev-parse", "origin/main")
    changed = kit.git(clone, "diff", "--name-only", "origin/main", branch).split()
    assert changed == sorted([NAME, PREFIX + "checks/__init__.py", "test/unit/test_checks.py"])
    assert kit.git(clone, "show", f"{branch}:{NAME}").encode() == b"import os\n\n\n" + PATCHED
    assert kit.git(clone, "log", "-1", "--format=%B", branch).strip() == (
        "alpha: check weights\n\nThe reason.\n\nCo-authored-by: A <a@b.c>"
    )
    assert (
        kit.git(clone, "log", "-1", "--format=%an %cn", branch).strip()
        == "fp8-colocate maintainers fp8-colocate maintainers"
    )
    draft = (shop.root / "out" / "alpha-alpha-check-weights.md").read_text()
    for part in (
        "# alpha: check weights",
        "The reason.",
        "test/unit/test_checks.py::test_it",
        "pytest test/unit/test_checks.py",
    ):
        assert part in draft
    for private in ("Upstream-Status", "Drop-When", "Overlay:", "Signed-off-by"):
        assert private not in draft
    assert kit.git(clone, "fsck", "--no-dangling") == ""
    assert list((shop.root / "cache/fp8-colocate/upstream").iterdir()) == []


def test_an_earlier_patch_of_the_same_file_is_named(shop: Workshop, clone: Path) -> None:
    tree = shop.dev()
    more = kit.replaced(PATCHED, (b"    engine.weights = None\n", b"    engine.weights = 0\n"))
    commit(tree, "alpha: on top", {NAME: more}, TRAILERS)
    kit.accepted(shop.run("export", "alpha"), "alpha-on-top.patch")
    done = shop.run("upstream", "alpha-on-top", "--clone", clone, "--out", shop.root / "out")
    kit.accepted(done, "may need alpha-check-weights")
    assert "alpha-check-weights" in (shop.root / "out" / "alpha-alpha-on-top.md").read_text()


def test_already_upstream(shop: Workshop, clone: Path) -> None:
    commit(clone, "taken", {NAME: b"import os\n\n\n" + PATCHED})
    kit.accepted(upstream(shop, clone, "--main", "mine"), "already upstream")
    assert "fp8-colocate" not in kit.git(clone, "branch", "--list")


def test_merged_where_the_context_differs(shop: Workshop, clone: Path) -> None:
    other = kit.replaced(MODULE, (b"        return True\n\n    def save", b"        return self\n\n    def save"))
    commit(clone, "changed", {NAME: other})
    kit.accepted(upstream(shop, clone, "--main", "mine"), "merged")


def test_conflict_names_the_patch_and_leaves_the_clone(shop: Workshop, clone: Path) -> None:
    commit(
        clone,
        "rewritten",
        {NAME: kit.replaced(MODULE, (b"        self.weights = weights\n", b"        keep(weights)\n"))},
    )
    said = kit.refused(upstream(shop, clone, "--main", "mine"), 4, "alpha-check-weights", NAME, "upstream changed")
    assert "merge is in" in said
    assert "fp8-colocate" not in kit.git(clone, "branch", "--list")


def test_overlay_file_that_main_has(shop: Workshop, clone: Path) -> None:
    commit(clone, "theirs", {PREFIX + "checks/__init__.py": b"theirs = 1\n"})
    kit.refused(upstream(shop, clone, "--main", "mine"), 4, f"exists on main: {PREFIX}checks/__init__.py")


def test_an_existing_branch_is_kept(shop: Workshop, clone: Path) -> None:
    kit.git(clone, "branch", "fp8-colocate/alpha-check-weights")
    before = kit.git(clone, "for-each-ref")
    kit.refused(upstream(shop, clone), 2, "branch already", "branch -D")
    assert kit.git(clone, "for-each-ref") == before


def test_unknown_slug_clone_and_main(shop: Workshop, clone: Path, tmp_path: Path) -> None:
    kit.refused(shop.run("upstream", "nothing"), 2, "no patch of this name", "list")
    kit.refused(upstream(shop, tmp_path / "none"), 2, "no such directory")
    (tmp_path / "empty").mkdir()
    kit.refused(upstream(shop, tmp_path / "empty"), 2, "no repository")
    kit.refused(upstream(shop, clone, "--main", "none"), 2, "no main branch")


def test_a_trailer_that_names_nothing(shop: Workshop, clone: Path) -> None:
    tree = shop.dev()
    kit.git(
        tree,
        "commit",
        "-q",
        "--amend",
        "-F",
        "-",
        stdin=f"alpha: check weights\n\nWhy.\n\n{TRAILERS}Overlay: no/where\n".encode(),
    )
    kit.accepted(shop.run("export", "alpha"))
    kit.refused(upstream(shop, clone), 7, "Overlay trailer", "no/where")


def test_shallow_clone_and_worktree(shop: Workshop, clone: Path, tmp_path: Path) -> None:
    kit.git(tmp_path, "clone", "-q", "--depth=1", f"file://{tmp_path}/origin", "shallow")
    kit.accepted(upstream(shop, tmp_path / "shallow"), "fp8-colocate/")
    assert (
        kit.git(tmp_path / "shallow", "log", "--format=%s", "fp8-colocate/alpha-check-weights").split("\n")[0]
        == "alpha: check weights"
    )
    kit.git(clone, "worktree", "add", "-q", str(tmp_path / "worktree"), "-b", "third")
    kit.accepted(upstream(shop, tmp_path / "worktree"), "fp8-colocate/")


def test_a_url_is_cloned_into_the_cache_and_fetched_again(shop: Workshop, clone: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/origin"
    kit.accepted(upstream(shop, url), "cache/fp8-colocate/git/alpha")
    kit.write_files(tmp_path / "origin", {NAME: PATCHED})
    kit.commit(tmp_path / "origin", "taken")
    cached = shop.root / "cache/fp8-colocate/git/alpha"
    kit.git(cached, "branch", "-D", "fp8-colocate/alpha-check-weights")
    kit.accepted(upstream(shop, url), "already upstream")
    kit.refused(upstream(shop, f"file://{tmp_path}/gone", "-q"), 1, "cannot be fetched", "--clone DIR")


def test_hostile_git_configuration(shop: Workshop, clone: Path, tmp_path: Path) -> None:
    kit.accepted(upstream(shop, clone, **hostile_user(tmp_path / "hostile")), "fp8-colocate/")
    branch = "fp8-colocate/alpha-check-weights"
    assert kit.git(clone, "show", f"{branch}:{NAME}").encode() == b"import os\n\n\n" + PATCHED
    assert "Signed-off-by" not in kit.git(clone, "log", "-1", "--format=%B", branch)


def test_public_message() -> None:
    message = (
        f"subject\n\nbody\n\nwith two parts\n\n{TRAILERS}Fails-Without: a::b\n  folded\nSigned-off-by: B <b@c.d>\n"
    )
    assert mailformat.public_message(message) == "subject\n\nbody\n\nwith two parts\n\nSigned-off-by: B <b@c.d>\n"
    assert mailformat.public_message(f"subject\n\nbody\n\n{TRAILERS}") == "subject\n\nbody\n"
