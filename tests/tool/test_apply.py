# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Refusals leave the tree as it was; upgrades, lost records and half-done trees end where an undisturbed run ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from patchset import engine, state
from patchset.errors import UsageError
from tests.tool import kit
from tests.tool.kit import Home, accepted, refused

LOADER, ENGINE, TWINS = (f"python/alpha/{name}.py" for name in ("loader", "engine", "twins"))
SESSION = "python/alpha/layerwise/inner/session.py"


def edit(path: Path, *pairs: tuple[bytes, bytes]) -> None:
    path.write_bytes(kit.replaced(path.read_bytes(), *pairs))


# Drift: one case a kind of change, each on a checkout and on a site-packages


def crlf(root: Path, home: Home) -> None:
    (root / "loader.py").write_bytes((root / "loader.py").read_bytes().replace(b"\n", b"\r\n"))


def local_edit(root: Path, home: Home) -> None:
    edit(root / "loader.py", (b"loader_20 = 20\n", b"loader_20 = 21\n"))


def blank_at_line_end(root: Path, home: Home) -> None:
    edit(root / "engine.py", (b"engine_9 = 9\n", b"engine_9 = 9 \n"))


def emptied(root: Path, home: Home) -> None:
    (root / "engine.py").write_bytes(b"")


def deleted(root: Path, home: Home) -> None:
    (root / "loader.py").unlink()


def already_upstream(root: Path, home: Home) -> None:
    """The change of one patch, made by hand, and another change beside it."""
    edit(root / "sub/deep.py", (b"deep_0 = 0\n", b"deep_0 = 'first'\n"), (b"deep_20 = 20\n", b"deep_20 = 0\n"))


def in_the_way(root: Path, home: Home) -> None:
    kit.write_files(root, {"layerwise/__init__.py": b"mine = True\n"})


def patched_and_edited(root: Path, home: Home) -> None:
    edit(root / "loader.py", (b"loader_5 = 5\n", b"loader_5 = 'patched'\nloader_5b = 2\n"))


DRIFTS = [
    (crlf, "loader.py", ("CRLF line endings", "loader-calls-the-overlay, second-touch")),
    (local_edit, "loader.py", ("a local edit", "expected:", "found:")),
    (blank_at_line_end, "engine.py", ("a local edit", "second-touch")),
    (emptied, "engine.py", ("a local edit", "0 bytes")),
    (deleted, "loader.py", ("a file of the pin was deleted", "no file", "missing: ")),
    (already_upstream, "sub/deep.py", ("the change of deep-one is already in this file",)),
    (in_the_way, "layerwise/__init__.py", ("in the way: ", "move ", "no file, or sha256")),
    (patched_and_edited, "loader.py", ("changed: ",)),
]


@pytest.mark.parametrize("kind", ["checkout", "site"])
@pytest.mark.parametrize(("change", "file", "parts"), DRIFTS)
def test_drift_is_refused_and_the_tree_untouched(
    home: Home, tmp_path: Path, kind: str, change: Callable, file: str, parts: tuple[str, ...], request
) -> None:
    root = request.getfixturevalue("tree" if kind == "checkout" else "site")
    package = root / ("python/alpha" if kind == "checkout" else "alpha")
    change(package, home)
    before, written = kit.snapshot(root), kit.stamps(root)
    message = refused(home.run("--alpha", root), 3, "target:       alpha", str(package / file), "next:", *parts)
    assert ("git -C" if kind == "checkout" else "pip install") in message or change in (
        in_the_way,
        already_upstream,
        crlf,
    )
    assert refused(home.run("--alpha", root, "--check"), 3, *parts) == message
    assert refused(home.run("--alpha", root, "--revert"), 3, *parts)
    status = home.run("status", "--alpha", root)
    refused(status, 3, "drifted")
    assert file in status.stdout
    assert kit.snapshot(root) == before and kit.stamps(root) == written


def test_duplicate_block_trap(home: Home, tmp_path: Path) -> None:
    """X5: upstream dropped the first of two equal blocks; git would patch the second one and return 0."""
    mine = home.copy(tmp_path / "home")
    twins = mine.upstream["alpha"][TWINS]
    mine.series("alpha", {"first-block": {TWINS: kit.replaced(twins, (b"y = x + 1", b"y = x + 2"))}})
    mine.lock("alpha")
    root = kit.checkout(tmp_path / "tree", mine.upstream["alpha"] | {TWINS: twins.removeprefix(kit.BLOCK)})
    patch = mine.pin_directory("alpha") / "first-block.patch"
    kit.git(root, "apply", patch)  # the trap: plain git accepts it
    assert b"x + 2" in (root / TWINS).read_bytes()
    kit.git(root, "checkout", "-q", ".")
    before = kit.snapshot(root)
    refused(mine.run("--alpha", root), 3, "first-block", "a local edit")
    assert kit.snapshot(root) == before


def test_overlapping_patches_are_seen_as_applied(home: Home, tree: Path) -> None:
    """X7: two patches touch the same lines, so reversing the first one alone would say that it is not applied."""
    accepted(home.run("--alpha", tree))
    first = home.pin_directory("alpha") / "loader-calls-the-overlay.patch"
    with pytest.raises(AssertionError, match="patch does not apply"):
        kit.git(tree, "apply", "--check", "-R", first)
    accepted(home.run("status", "--alpha", tree), "patched")


@pytest.mark.parametrize("kind", ["checkout", "site", "source"])
def test_wrong_version(home: Home, tmp_path: Path, kind: str) -> None:
    files = kit.upstream_files("alpha", "1.1")
    files[LOADER] = kit.numbered("loader", 50)
    make = {
        "checkout": lambda: kit.checkout(tmp_path / "tree", files),
        "source": lambda: kit.source_tree(tmp_path / "tree", files | {"python/PKG-INFO": b""}),
        "site": lambda: kit.pip_install(tmp_path / "tree", kit.build_wheel(tmp_path, "alpha", "1.1", files)),
    }
    make[kind]()
    root = tmp_path / "tree"
    if kind == "source":
        (root / "PKG-INFO").write_text("Version: 1.1\n")
    before = kit.snapshot(root)
    hint = {"checkout": "checkout v1.0", "site": "pip install --no-deps alpha-engine==1.0", "source": "--fetch"}[kind]
    refused(
        home.run("--alpha", root), 3, "another version", "alpha-engine 1.0", "found:        alpha-engine 1.1", hint
    )
    assert "unknown" in home.run("status", "--alpha", root).stdout
    refused(home.run("status", "--alpha", root), 3, "unknown")
    assert kit.snapshot(root) == before


def test_new_files_alone_prove_no_version(home: Home, tmp_path: Path) -> None:
    """With an empty series nothing of the pin is compared: the version the tree names must then be the pin's."""
    mine = home.copy(tmp_path / "home")
    mine.series("alpha", {})
    mine.lock("alpha")
    other = kit.checkout(tmp_path / "other", kit.upstream_files("alpha", "1.1"))
    before = kit.snapshot(other)
    refused(mine.run("--alpha", other), 3, "this is not alpha-engine 1.0", "alpha-engine 1.1")
    refused(mine.run("status", "--alpha", other), 3, "found:        unknown")
    assert kit.snapshot(other) == before
    accepted(mine.run("--alpha", kit.checkout(tmp_path / "right", mine.upstream["alpha"])), "patched")


# Links, permissions, the disk


def file_is_a_link(root: Path, outside: Path) -> str:
    shutil.move(root / LOADER, outside / "loader.py")
    (root / LOADER).symlink_to(outside / "loader.py")
    return LOADER


def directory_is_a_link(root: Path, outside: Path) -> str:
    shutil.move(root / "python/alpha/sub", outside / "sub")
    (root / "python/alpha/sub").symlink_to(outside / "sub")
    return "python/alpha/sub"


def new_file_is_a_dangling_link(root: Path, outside: Path) -> str:
    (root / "python/alpha/fp8_colocate.py").symlink_to(outside / "not-there.py")
    return "fp8_colocate.py"


def new_directory_is_a_link(root: Path, outside: Path) -> str:
    (root / "python/alpha/layerwise").symlink_to(outside)
    return "layerwise"


def state_is_a_link(root: Path, outside: Path) -> str:
    (root / ".fp8-colocate").symlink_to(outside)
    return ".fp8-colocate"


@pytest.mark.parametrize(
    "change",
    [file_is_a_link, directory_is_a_link, new_file_is_a_dangling_link, new_directory_is_a_link, state_is_a_link],
)
def test_links_are_not_followed(home: Home, tmp_path: Path, change: Callable[[Path, Path], str]) -> None:
    root, outside = kit.source_tree(tmp_path / "tree", home.upstream["alpha"]), tmp_path / "outside"
    outside.mkdir()
    name = change(root, outside)
    before = kit.snapshot(tmp_path)
    refused(home.run("--alpha", root), 1, "symbolic link", name)
    refused(home.run("--alpha", root, "--check"), 1, "symbolic link", name)
    assert kit.snapshot(tmp_path) == before


def test_a_linked_dist_info_is_not_followed(home: Home, site: Path, tmp_path: Path) -> None:
    info = site / "alpha_engine-1.0.dist-info"
    shutil.move(info, tmp_path / "info")
    info.symlink_to(tmp_path / "info")
    before = kit.snapshot(tmp_path)
    refused(home.run("--alpha", site), 1, "symbolic link", info)
    assert kit.snapshot(tmp_path) == before


@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_what_is_no_file_stands_in_a_files_place(home: Home, tree: Path, kind: str) -> None:
    (tree / LOADER).unlink()
    os.mkfifo(tree / LOADER) if kind == "pipe" else (tree / LOADER).mkdir()
    before = kit.snapshot(tree)
    refused(home.run("--alpha", tree), 1, "not a regular file", LOADER)
    assert kit.snapshot(tree) == before


def test_a_file_stands_in_a_directorys_place(home: Home, tree: Path) -> None:
    (tree / "python/alpha/layerwise").write_text("mine")
    before = kit.snapshot(tree)
    refused(home.run("--alpha", tree), 1, "a directory is needed where a file is", "layerwise")
    assert kit.snapshot(tree) == before


def test_modes_are_kept(home: Home, tree: Path) -> None:
    """A read-only and an executable file are patched and stay what they are."""
    (tree / LOADER).chmod(0o444)
    (tree / ENGINE).chmod(0o755)
    before = kit.snapshot(tree)
    accepted(home.run("--alpha", tree))
    assert (tree / LOADER).stat().st_mode & 0o7777 == 0o444 and (tree / ENGINE).stat().st_mode & 0o7777 == 0o755
    accepted(home.run("--alpha", tree, "--revert"))
    assert kit.difference(before, kit.snapshot(tree)) == []


NOBODY = 65534
AS_NOBODY = """
import os, sys, tempfile
sys.path.insert(0, sys.argv[1])
from patchset import cli, lock, manifest
pins = manifest.load()
[lock.load(pins, t, pins.pin(t)) for t in pins.targets.values()]  # imports whatever is imported late
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
sys.exit(cli.main(sys.argv[3:]))
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that another user can reach; pytest's own are private."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def run_as_nobody(home: Path, *args: object) -> subprocess.CompletedProcess[str]:
    """The tool as a user without privileges: root steps down after the imports, anybody else is one already."""
    command = [sys.executable, "-c", AS_NOBODY, str(home), str(NOBODY), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")


@pytest.mark.parametrize("place", ["python/alpha/sub", "python/alpha", ".git"])
def test_unwritable_directory(home: Home, public: Path, place: str) -> None:
    mine, root = home.copy(public / "home"), kit.checkout(public / "tree", home.upstream["alpha"])
    if os.geteuid() == 0:
        subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", root], check=True)
    if place == ".git":
        shutil.rmtree(root / ".git" / "fp8-colocate", ignore_errors=True)
    (root / place).chmod(0o555)
    before = kit.snapshot(root)
    for flags in ([], ["--check"]):
        done = run_as_nobody(mine.directory, "--alpha", root, *flags)
        refused(done, 1, "cannot be written", str(root / place), "no permission", "nothing was changed")
        assert kit.snapshot(root) == before
    (root / place).chmod(0o755)
    accepted(run_as_nobody(mine.directory, "--alpha", root), "patched")


def test_unreadable_file_and_directory(home: Home, public: Path) -> None:
    mine, root = home.copy(public / "home"), kit.checkout(public / "tree", home.upstream["alpha"])
    if os.geteuid() == 0:
        subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", root], check=True)
    before = kit.snapshot(root)
    (root / LOADER).chmod(0)
    refused(run_as_nobody(mine.directory, "--alpha", root), 1, "a file cannot be read", LOADER, "no permission")
    (root / LOADER).chmod(0o644)
    (root / "python").chmod(0)
    refused(run_as_nobody(mine.directory, "--alpha", root), 1, "no permission", str(root / "python"))
    (root / "python").chmod(0o755)
    root.chmod(0)
    refused(run_as_nobody(mine.directory, "--alpha", root), 1, "no permission", str(root))
    refused(
        run_as_nobody(mine.directory, "--alpha", root / "python"), 1, "a path cannot be looked at", "no permission"
    )
    root.chmod(0o755)
    assert kit.snapshot(root) == before


def test_root_does_not_lock_the_owner_out(home: Home, public: Path) -> None:
    """`sudo python apply.py` on a user's tree: what it creates belongs to the user, who can revert it."""
    if os.geteuid() != 0:
        pytest.skip("only root can write files for another user")
    mine, root = home.copy(public / "home"), kit.checkout(public / "tree", home.upstream["alpha"])
    subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", root], check=True)
    before = kit.snapshot(root)
    accepted(mine.run("--alpha", root))
    owners = {str(p.relative_to(root)): p.lstat().st_uid for p in [root, *root.rglob("*")]}
    assert set(owners.values()) == {NOBODY}, [p for p, uid in owners.items() if uid != NOBODY]
    accepted(run_as_nobody(mine.directory, "--alpha", root, "--revert"), "pristine")
    assert kit.difference(before, kit.snapshot(root)) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 KB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = os.geteuid() == 0 and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "none", place], capture_output=True, check=False
    )
    if not mounted or mounted.returncode != 0:
        pytest.skip("a small tmpfs cannot be mounted here")
    yield place
    subprocess.run(["umount", place], check=True)


def fill(place: Path, free_bytes: int) -> None:
    ballast = place / "ballast"
    ballast.unlink(missing_ok=True)
    room = os.statvfs(place)
    ballast.write_bytes(b"\0" * max(0, room.f_bavail * room.f_frsize - free_bytes))


def test_full_disk(home: Home, small_disk: Path) -> None:
    """With any amount of free space: done, or exit 1 and the tree as it was; likewise on the way back."""
    root = kit.unpacked_wheel(small_disk / "tree", home.wheels["alpha"])
    pristine, codes = kit.snapshot(root), []
    for flags, goal in (([], None), (["--revert"], pristine)):
        before = kit.snapshot(root)
        for pages in range(0, 60, 1 if flags else 3):
            fill(small_disk, pages * 4096)
            done = home.run("--alpha", root, *flags)
            codes.append(done.returncode)
            if done.returncode == 0:
                break
            refused(done, 1, "No space left on device", "the disk is full", "nothing was changed")
            assert kit.difference(before, kit.snapshot(root)) == []
        assert goal is None or kit.difference(goal, kit.snapshot(root)) == []
    assert codes.count(0) == 2 and codes.count(1) >= 2


def test_full_scratch_directory(home: Home, tree: Path, tmp_path: Path, small_disk: Path) -> None:
    """The verification needs space of its own: a full TMPDIR, met by us or by git, is no conflict."""
    mine = home.copy(tmp_path / "home")
    mine.series("alpha", {"long": {LOADER: mine.upstream["alpha"][LOADER] + kit.numbered("more", 2000)}})
    mine.lock("alpha")
    before, codes = kit.snapshot(tree), []
    for pages in range(1, 60):  # with no byte at all, Python takes another directory by itself
        fill(small_disk, pages * 4096)
        done = mine.run("--alpha", tree, "--check", env={"TMPDIR": str(small_disk)})
        codes.append(done.returncode)
        if done.returncode == 0:
            break
        refused(done, 1, "No space left on device", "TMPDIR")
    assert codes[-1] == 0 and codes.count(1) >= 2, codes
    assert kit.snapshot(tree) == before


# Several targets


def test_the_second_target_fails_and_the_first_is_untouched(home: Home, site: Path, tree: Path) -> None:
    edit(site / "beta/core/loader.py", (b"loader_5 = 5\n", b"loader_5 = 6\n"))
    edit(site / "beta/bridge/engine.py", (b"engine_2 = 2\n", b"engine_2 = 3\n"))
    before = kit.snapshot(tree), kit.snapshot(site)
    message = refused(home.run("--alpha", tree, "--beta", site, "--gamma", site), 3)
    assert "beta/core/loader.py" in message and "beta/bridge/engine.py" in message, "every failing target is named"
    assert (kit.snapshot(tree), kit.snapshot(site)) == before


def test_the_second_target_cannot_be_written_and_the_first_is_untouched(home: Home, public: Path) -> None:
    mine, root = home.copy(public / "home"), kit.checkout(public / "tree", home.upstream["alpha"])
    other = kit.checkout(public / "other", home.upstream["beta"])
    if os.geteuid() == 0:
        subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", root, other], check=True)
    (other / "beta/core/sub").chmod(0o555)
    before = kit.snapshot(root)
    refused(run_as_nobody(mine.directory, "--alpha", root, "--beta", other), 1, str(other / "beta/core/sub"))
    assert kit.snapshot(root) == before


def test_one_tree_named_twice(home: Home, tree: Path) -> None:
    refused(home.run("--alpha", tree, "--alpha", tree), 2, "--alpha is given twice")
    alpha = home.manifest.target("alpha")
    with pytest.raises(UsageError, match="the same tree is named twice"):
        engine.run(
            home.manifest,
            [engine.Request(alpha, tree), engine.Request(alpha, tree / "python")],
            engine.plan_apply,
            wait_s=0,
            check=True,
        )


# Upgrades


def next_revision(home: Home, directory: Path) -> Home:
    """A patch changed, one dropped, one added; an overlay file changed, one gone, one new; everything re-locked."""
    new = home.copy(directory)
    for target in new.targets:
        prefix, upstream = kit.TARGETS[target][2], new.upstream[target]
        loader = kit.replaced(upstream[f"{prefix}loader.py"], (b"loader_5 = 5\n", b"loader_5 = 'rev 2'\n"))
        twins = kit.replaced(upstream[f"{prefix}twins.py"], (b"tail_3 = 3\n", b"tail_3 = 'new'\n"))
        engine_ = kit.replaced(
            upstream[f"{prefix}engine.py"],
            (b"engine_2 = 2\n", b"engine_2 = 'a'\n"),
            (b"engine_37 = 37\n", b"engine_37 = 'b'\n"),
        )
        new.series(target, {
            "loader-calls-the-overlay": {f"{prefix}loader.py": loader},
            "same-engine": {f"{prefix}engine.py": engine_},
            "added": {f"{prefix}twins.py": twins},
        })  # fmt: skip
        new.overlay(target, {
            f"{prefix}layerwise/__init__.py": kit.SPDX.encode() + b"REVISION = 2\n",
            f"{prefix}layerwise/inner/session.py": None,
            f"{prefix}layerwise/other.py": kit.SPDX.encode(),
        })  # fmt: skip
    new.lock()
    return new


@pytest.fixture(scope="session")
def newer(home: Home, tmp_path_factory: pytest.TempPathFactory) -> Home:
    return next_revision(home, tmp_path_factory.mktemp("newer") / "home")


def trees(home: Home, tmp_path: Path, kind: str) -> tuple[str, Path]:
    if kind == "checkout":
        return "alpha", kit.checkout(tmp_path / "tree", home.upstream["alpha"])
    if kind == "wheel":
        return "gamma", kit.unpacked_wheel(tmp_path / "tree", home.wheels["gamma"])
    kit.pip_install(tmp_path / "tree", home.wheels["beta"], home.wheels["gamma"])
    return "beta", tmp_path / "tree"


@pytest.mark.parametrize("kind", ["checkout", "site", "wheel"])
def test_upgrade_and_back(home: Home, newer: Home, tmp_path: Path, kind: str) -> None:
    target, root = trees(home, tmp_path, kind)
    flags = (f"--{target}", root)
    pristine = kit.snapshot(root)
    accepted(newer.run(*flags))
    goal = kit.snapshot(root)
    accepted(newer.run(*flags, "--revert"))
    assert kit.difference(pristine, kit.snapshot(root)) == []
    accepted(home.run(*flags))
    old = kit.snapshot(root)
    refused(newer.run("status", *flags), 3, "mixed")
    accepted(newer.run(*flags, "--check"), "would be patched")
    accepted(newer.run(*flags), "patched")
    assert kit.difference(goal, kit.snapshot(root)) == [], "an upgrade ends where a fresh apply ends"
    assert kit.record_faults(root) == [] or kind == "checkout"
    accepted(newer.run(*flags), "already patched")
    accepted(home.run(*flags), "patched")
    assert kit.difference(old, kit.snapshot(root)) == []
    accepted(newer.run(*flags, "--revert"), "pristine")  # of the older revision
    assert kit.difference(pristine, kit.snapshot(root)) == []


def test_the_pristine_copy_of_an_older_revision_is_lost(home: Home, newer: Home, tree: Path) -> None:
    accepted(home.run("--alpha", tree))
    kept = tree / ".git/fp8-colocate/alpha/pristine/python/alpha"
    (kept / "loader.py").write_bytes(b"damaged")
    (kept / "sub/deep.py").unlink()
    before = kit.snapshot(tree)
    for flags in ([], ["--revert"]):
        refused(newer.run("--alpha", tree, *flags), 3, "pristine copy", "missing or damaged", "checkout v1.0")
        assert kit.snapshot(tree) == before
    accepted(home.run("--alpha", tree, "--revert"), "pristine")  # its own revision can un-apply


def test_rerun_with_a_new_revision_of_the_overlay_alone(home: Home, tmp_path: Path, tree: Path) -> None:
    accepted(home.run("--alpha", tree))
    new = home.copy(tmp_path / "new")
    new.overlay("alpha", {SESSION: kit.SPDX.encode() + b"STATE = 2\n"})
    new.lock("alpha")
    done = json.loads(accepted(new.run("--alpha", tree, "--json")))
    assert done["targets"][0]["written"] == [str(tree / SESSION)]
    accepted(new.run("--alpha", tree), "already patched")


# Lost and mixed


@pytest.mark.parametrize("kind", ["checkout", "site", "wheel"])
def test_lost_record(home: Home, tmp_path: Path, kind: str) -> None:
    """The record is gone: revert un-applies the series; apply writes the record again, for the guard reads it."""
    target, root = trees(home, tmp_path, kind)
    flags = (f"--{target}", root)
    pristine = kit.snapshot(root)
    accepted(home.run(*flags))
    patched = kit.snapshot(root)
    where = next(p for p in root.rglob("state.json")).parent
    shutil.rmtree(where)
    accepted(home.run("status", *flags), "patched")
    accepted(home.run(*flags), "patched")
    assert (where / "state.json").is_file()
    assert {p for p in patched if not p.startswith(str(where.relative_to(root)))} <= kit.snapshot(root).keys()
    accepted(home.run(*flags), "already patched")
    accepted(home.run(*flags, "--revert"), "pristine")
    assert kit.difference(pristine, kit.snapshot(root)) == []
    accepted(home.run(*flags))
    shutil.rmtree(where)
    accepted(home.run(*flags, "--revert"), "pristine")
    assert [d for d in kit.difference(pristine, kit.snapshot(root)) if ".fp8-colocate" not in d] == []


@pytest.mark.parametrize(
    "damage", ["{", "[]", '{"schema": 1}', '{"schema": 0, "target": "alpha"}', "[" * 100_000, "\xff"]
)
def test_damaged_record(home: Home, tree: Path, damage: str) -> None:
    accepted(home.run("--alpha", tree))
    patched = kit.snapshot(tree)
    record = tree / ".git/fp8-colocate/alpha/state.json"
    record.write_bytes(damage.encode("latin-1"))
    before = kit.snapshot(tree)
    for flags in ([], ["--revert"], ["--check"]):
        refused(home.run("--alpha", tree, *flags), 7, "the record of what was applied is damaged", f"remove {record}")
    assert kit.snapshot(tree) == before
    record.unlink()
    accepted(home.run("--alpha", tree))
    assert kit.difference(patched, kit.snapshot(tree)) == []


def test_a_record_that_leads_out_of_the_tree(home: Home, tree: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim.py"
    victim.write_bytes(b"precious\n")
    accepted(home.run("--alpha", tree))
    record = tree / ".git/fp8-colocate/alpha/state.json"
    body = json.loads(record.read_bytes())
    body["overlay"]["../victim.py"] = kit._describe(victim)[2]
    record.write_text(json.dumps(body))
    before = kit.snapshot(tmp_path)
    refused(home.run("--alpha", tree, "--revert"), 7, "leads out of the tree", "victim.py")
    assert kit.snapshot(tmp_path) == before


def test_a_record_of_a_newer_tool(home: Home, tree: Path) -> None:
    accepted(home.run("--alpha", tree))
    record = tree / ".git/fp8-colocate/alpha/state.json"
    record.write_text(json.dumps(json.loads(record.read_bytes()) | {"schema": 9}))
    refused(home.run("--alpha", tree, "--revert"), 7, "newer revision of this tool", "schema 9")


@pytest.mark.parametrize("link", ["journal.d", "."])
def test_a_link_where_the_journal_lies_is_not_followed(home: Home, tree: Path, tmp_path: Path, link: str) -> None:
    precious = tmp_path / "precious"
    kit.write_files(precious, {"journal.d/0": b"mine\n", "0": b"mine\n"})
    state = tree / ".git/fp8-colocate/alpha"
    state.parent.mkdir(parents=True)
    if link == ".":
        state.symlink_to(precious)
    else:
        state.mkdir()
        (state / link).symlink_to(precious)
    before = kit.snapshot(tmp_path)
    for flags in ([], ["--revert"]):
        refused(home.run("--alpha", tree, *flags), 1, "symbolic link")
    assert kit.snapshot(tmp_path) == before


def test_another_release_with_the_same_touched_files_is_not_the_pin(home: Home, tmp_path: Path) -> None:
    target, root = trees(home, tmp_path, "site")
    for info in list(root.glob("*.dist-info")):
        info.rename(info.with_name(info.name.replace("-1.0.", "-1.1.")))
    before = kit.snapshot(root)
    message = refused(home.run(f"--{target}", root), 3, "though every touched file is", "1.1")
    assert f"refresh {target} --to 1.1" in message
    assert kit.snapshot(root) == before


def test_directories_of_the_overlay_can_be_read_by_who_reads_the_package(home: Home, tmp_path: Path) -> None:
    target, root = trees(home, tmp_path, "site")
    before = os.umask(0o077)
    try:
        accepted(home.run(f"--{target}", root))
    finally:
        os.umask(before)
    modes = {p.stat().st_mode & 0o777 for p in root.rglob("layerwise") if p.is_dir()}
    assert modes and all(mode & 0o055 == 0o055 for mode in modes), modes


@pytest.mark.parametrize("flags", [["-P"], ["-I"]])
def test_a_python_that_does_not_look_beside_the_script(home: Home, flags: list[str]) -> None:
    command = [sys.executable, *flags, str(home.directory / "apply.py"), "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "without python -P" in done.stderr


@pytest.mark.parametrize("kind", ["checkout", "site"])
def test_mixed_tree_is_finished(home: Home, tmp_path: Path, kind: str) -> None:
    target, root = trees(home, tmp_path, kind)
    flags = (f"--{target}", root)
    pristine_files = {p: (root / p).read_bytes() for p in kit.snapshot(root) if p.endswith("loader.py")}
    pristine = kit.snapshot(root)
    accepted(home.run(*flags))
    patched = kit.snapshot(root)
    for path, data in pristine_files.items():
        (root / path).write_bytes(data)
    next(root.rglob("session.py")).unlink()
    refused(home.run("status", *flags), 3, "mixed")
    accepted(home.run(*flags), "patched")
    assert kit.difference(patched, kit.snapshot(root)) == []
    for path, data in pristine_files.items():
        (root / path).write_bytes(data)
    accepted(home.run(*flags, "--revert"), "pristine")
    assert kit.difference(pristine, kit.snapshot(root)) == []


def test_everything_restored_by_git(home: Home, tree: Path) -> None:
    """`git checkout .` takes the patches but not the new files and not our record."""
    pristine = kit.snapshot(tree)
    accepted(home.run("--alpha", tree))
    patched = kit.snapshot(tree, skip=[".git"])
    kit.git(tree, "checkout", "-q", ".")
    accepted(home.run("--alpha", tree), "patched")
    assert kit.difference(patched, kit.snapshot(tree, skip=[".git"])) == []
    kit.git(tree, "checkout", "-q", ".")
    kit.git(tree, "clean", "-fdq")
    accepted(home.run("--alpha", tree, "--revert"))
    assert kit.difference(pristine, kit.snapshot(tree) | {".git/index": pristine[".git/index"]}) == []


def patched_wheel(home: Home, directory: Path, target: str = "alpha") -> Path:
    """A wheel as `wheel` makes it: patched files under the version X+fc8.N."""
    root = kit.unpacked_wheel(directory / "unpacked", home.wheels[target])
    accepted(home.run(f"--{target}", root))
    prefix, installed = kit.TARGETS[target][2:4]
    files = {
        prefix + p.relative_to(root / installed).as_posix(): p.read_bytes() for p in (root / installed).rglob("*.*")
    }
    return kit.build_wheel(directory, target, "1.0+fc8.1", files)


def test_installed_patched_wheel(home: Home, newer: Home, tmp_path: Path) -> None:
    site = tmp_path / "site"
    kit.pip_install(site, patched_wheel(home, tmp_path))
    before, written = kit.snapshot(site), kit.stamps(site)
    accepted(home.run("--alpha", site), "already patched")
    accepted(home.run("status", "--alpha", site), "patched")
    refused(home.run("--alpha", site, "--revert"), 3, "installed from a patched wheel", "pip install --no-deps")
    refused(newer.run("--alpha", site), 3, "the patched wheel 1.0+fc8.1 is of another digest", "--fetch dist")
    assert kit.snapshot(site) == before and kit.stamps(site) == written


# Pins


@pytest.fixture(scope="session")
def two_pins(home: Home, tmp_path_factory: pytest.TempPathFactory) -> Home:
    """alpha is pinned at 1.0 and 1.1, where a patched file went away and another one moved on."""
    mine = home.copy(tmp_path_factory.mktemp("pins") / "home")
    files = later_files()
    kit.build_wheel(mine.directory / "dists", "alpha", "1.1", files)
    mine.write_manifest({"alpha": "1.1"})
    place = mine.pin_directory("alpha", "1.1")
    place.mkdir()
    loader = kit.replaced(files[LOADER], (b"loader_5 = 5\n", b"loader_5 = 'later'\n"))
    upstream = mine.upstream
    mine.upstream = upstream | {"alpha": files}
    saved = mine.pin_directory("alpha")
    shutil.copytree(saved, mine.directory / "saved")
    mine.series("alpha", {"loader-calls-the-overlay": {LOADER: loader}})
    for name in ("series", "loader-calls-the-overlay.patch"):
        shutil.move(saved / name, place / name)
    shutil.rmtree(saved)
    shutil.move(mine.directory / "saved", saved)
    mine.upstream = upstream
    mine.lock("alpha", version="1.1")
    return mine


def later_files() -> dict[str, bytes]:
    files = kit.upstream_files("alpha", "1.1")
    del files["python/alpha/sub/deep.py"]
    files[LOADER] = b"first = 0\n" + files[LOADER]
    files[ENGINE] = kit.numbered("rewritten")
    return files


def test_the_pin_is_found_by_the_files(two_pins: Home, tmp_path: Path) -> None:
    old = kit.checkout(tmp_path / "old", two_pins.upstream["alpha"])
    new = kit.checkout(tmp_path / "new", later_files(), tag="v1.1")
    accepted(two_pins.run("--alpha", old), "alpha 1.0")
    before = kit.snapshot(new)
    refused(
        two_pins.run("--alpha", new, "--pin", "alpha=1.0"),
        3,
        "alpha-engine 1.0 (also pinned: 1.1)",
        "alpha-engine 1.1",
    )
    assert kit.snapshot(new) == before
    accepted(two_pins.run("--alpha", new), "alpha 1.1")
    accepted(two_pins.run("--alpha", new, "--revert", "--pin", "alpha=1.1"))
    assert kit.difference(before, kit.snapshot(new)) == []


def test_a_clone_that_moved_on_under_the_record(two_pins: Home, tree: Path) -> None:
    """Patched at 1.0, then checked out at 1.1: what the old record says of files that 1.1 rewrote matters no more."""
    accepted(two_pins.run("--alpha", tree), "alpha 1.0")
    kit.git(tree, "stash", "-q", "--include-untracked")
    kit.git(tree, "stash", "drop", "-q")
    for path in (LOADER, ENGINE, "python/alpha/version.py"):
        (tree / path).write_bytes(later_files()[path])
    (tree / "python/alpha/sub/deep.py").unlink()
    kit.commit(tree, "1.1")
    before = kit.snapshot(tree, skip=[".git/fp8-colocate"])
    accepted(two_pins.run("--alpha", tree), "alpha 1.1", "patched")
    accepted(two_pins.run("--alpha", tree), "already patched")
    accepted(two_pins.run("--alpha", tree, "--revert"), "pristine")
    assert kit.difference(before, kit.snapshot(tree)) == []


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--pin", "alpha=0.9"], ("alpha 0.9 is not pinned", "expected:     1.0", "refresh alpha --to 0.9")),
        (["--pin", "omega=1.0"], ("no target 'omega'", "alpha, beta, gamma")),
        (["--pin", "alpha"], ("--pin cannot be read", "TARGET=VERSION")),
        (["--pin", "alpha="], ("--pin cannot be read",)),
        (["--pin", "beta=1.0"], ("--pin for a target that is not named", "beta")),
    ],
)
def test_wrong_pins(home: Home, tree: Path, flags: list[str], parts: tuple[str, ...]) -> None:
    before = kit.snapshot(tree)
    refused(home.run("--alpha", tree, *flags), 2, *parts)
    assert kit.snapshot(tree) == before


# Two runs at once


def test_a_held_tree_is_not_entered(home: Home, tree: Path) -> None:
    before = kit.snapshot(tree)
    with state.hold([tree], 0):
        message = refused(
            home.run("--alpha", tree, "--lock-timeout", "0"), 6, "another run holds this tree", str(tree)
        )
        assert "raise --lock-timeout" in message
        refused(home.run("status", "--alpha", tree), 3, "pristine")  # looking needs no lock
    assert kit.snapshot(tree) == before
    accepted(home.run("--alpha", tree, "--lock-timeout", "0"))


def test_a_second_run_waits(home: Home, tree: Path) -> None:
    command = [sys.executable, home.directory / "apply.py", "--alpha", tree]
    with state.hold([tree], 0):
        waiting = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        said = waiting.stderr.readline()
        time.sleep(0.2)
        assert waiting.poll() is None and said == f"waiting for another run to leave {tree}\n"
    out, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == 0 and "patched" in out


def test_eight_runs_at_once(home: Home, site: Path, tmp_path: Path) -> None:
    alone = Path(shutil.copytree(site, tmp_path / "alone"))
    accepted(home.run("--beta", alone, "--gamma", alone))
    command = [sys.executable, home.directory / "apply.py"]
    orders = [["--beta", site, "--gamma", site], ["--gamma", site, "--beta", site]] * 4
    runs = [
        subprocess.Popen([*command, *o], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for o in orders
    ]
    results = [(*run.communicate(timeout=120), run.returncode) for run in runs]
    assert [code for _, _, code in results] == [0] * 8, results
    assert sum(": patched: " in out for out, _, _ in results) == 1, "one of them did the work"
    assert kit.difference(kit.snapshot(alone), kit.snapshot(site)) == []
