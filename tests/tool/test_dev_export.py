# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""dev and export: patches to commits and back, on real repositories."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from patchset import mailformat
from patchset.manifest import load
from patchset.series import parse_mail
from tests.tool import kit, refresh_kit
from tests.tool.refresh_kit import MODULE, PATCHED, PREFIX, TRAILERS, Workshop, commit, hostile_user, ids

LOADER = PREFIX + "loader.py"
ENGINE = PREFIX + "engine.py"


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    """Two patches, one of them overlapping the other's file, and an overlay file."""
    made = Workshop(tmp_path)
    loader = kit.replaced(made.upstream[LOADER], (b"loader_5 = 5\n", b"loader_5 = 'a'\n"))
    again = kit.replaced(loader, (b"loader_5 = 'a'\n", b"loader_5 = 'b'\n"))
    made.home.overlay("alpha", {PREFIX + "new/thing.py": kit.SPDX.encode()})
    made.series({"first-one": {LOADER: loader, PREFIX + "module.py": PATCHED}, "second-one": {LOADER: again}})
    return made


def test_round_trip_writes_nothing(shop: Workshop) -> None:
    before = kit.stamps(shop.pin)
    shop.dev()
    kit.accepted(shop.run("export", "alpha"), "2 patches", "nothing to write")
    assert kit.stamps(shop.pin) == before


def test_one_commit_a_patch_with_the_same_ids_everywhere(shop: Workshop, tmp_path: Path) -> None:
    first = shop.dev()
    other = shop.dev("--dir", tmp_path / "other")
    again = shop.run("dev", "alpha", "--dir", tmp_path / "third", **hostile_user(tmp_path / "hostile"))
    assert again.returncode == 0, again.stderr
    assert [line.split(" ", 2)[2] for line in ids(first)] == [
        "alpha: second one",
        "alpha: first one",
        "alpha-engine 1.0",
    ]
    assert ids(first) == ids(other) == ids(tmp_path / "third")
    author = kit.git(first, "log", "-1", "--format=%an %ad", "--date=iso").strip()
    assert author == "fp8-colocate maintainers 2026-01-01 00:00:00 +0000"


def test_overlay_files_are_links_and_git_does_not_see_them(shop: Workshop) -> None:
    tree = shop.dev()
    link = tree / PREFIX / "new/thing.py"
    assert link.resolve() == (shop.home.directory / "overlay/alpha" / PREFIX / "new/thing.py").resolve()
    assert kit.git(tree, "status", "--short") == ""
    link.write_text("X = 1\n")
    done = kit.accepted(shop.run("export", "alpha"), "lock.json")
    assert "first-one" not in done
    assert shop.run("list").returncode == 0  # the lock is fresh again


def test_overlay_copy_with_other_bytes_is_refused(shop: Workshop) -> None:
    tree = shop.dev()
    place = tree / PREFIX / "new/thing.py"
    place.unlink()
    place.write_text("EDITED = 1\n")
    kit.refused(shop.run("export", "alpha"), 3, "copies that differ", f"cp {place}")
    kit.refused(shop.run("dev", "alpha"), 3, "copies that differ")
    assert place.read_text() == "EDITED = 1\n"


def test_edited_commit_is_exported_under_its_slug(shop: Workshop) -> None:
    tree = shop.dev()
    kit.write_files(tree, {LOADER: kit.replaced((tree / LOADER).read_bytes(), (b"'b'", b"'better'"))})
    kit.git(tree, "commit", "-q", "-a", "--amend", "--no-edit")
    kit.accepted(shop.run("export", "alpha"), "second-one.patch", "lock.json")
    assert b"loader_5 = 'better'" in (shop.pin / "second-one.patch").read_bytes()
    kit.accepted(shop.run("export", "alpha"), "nothing to write")


def test_reworded_commit_keeps_its_slug(shop: Workshop) -> None:
    tree = shop.dev()
    kit.git(tree, "commit", "-q", "--amend", "-F", "-", stdin=f"alpha: said better\n\nWhy.\n\n{TRAILERS}".encode())
    kit.accepted(shop.run("export", "alpha"), "second-one.patch")
    assert parse_mail(shop.pin / "second-one.patch").subject == "alpha: said better"


def test_new_commit_gets_a_slug_from_its_subject(shop: Workshop) -> None:
    tree = shop.dev()
    engine = kit.replaced(shop.upstream[ENGINE], (b"engine_3 = 3\n", b"engine_3 = 'x'\n"))
    commit(tree, "[Alpha] engine: 2nd thing, `done`", {ENGINE: engine})
    kit.accepted(shop.run("export", "alpha"), "alpha-engine-2nd-thing-done.patch", "series")
    assert (shop.pin / "series").read_text() == "first-one\nsecond-one\nalpha-engine-2nd-thing-done\n"
    assert ids(shop.dev("--dir", tree.parent / "b"))[0].endswith("[Alpha] engine: 2nd thing, `done`")
    site = kit.checkout(shop.root / "target", shop.upstream)
    kit.accepted(shop.run("--alpha", site), "patched")
    assert (site / ENGINE).read_bytes() == engine + kit.NOTICE


def test_dropped_commit_removes_its_patch(shop: Workshop) -> None:
    (shop.pin / "notes.txt").write_text("kept")
    tree = shop.dev()
    kit.git(tree, "reset", "-q", "--hard", "HEAD^")
    kit.refused(shop.run("dev", "alpha"), 3, "dropped or reordered")
    kit.accepted(shop.run("export", "alpha"), "second-one.patch")
    assert sorted(p.name for p in shop.pin.iterdir()) == ["first-one.patch", "lock.json", "notes.txt", "series"]
    kit.accepted(shop.run("export", "alpha"), "1 patches", "nothing to write")


def test_series_comments_stay() -> None:
    before = "# head\n# more\na  # why\n# about b\nb\nc\n# end\n"
    assert mailformat.series_text(["a", "b", "c"], before) == before
    assert mailformat.series_text(["b", "d", "a"], before) == "# head\n# more\n# about b\nb\nd\na  # why\n# end\n"
    assert mailformat.series_text(["a"], "") == mailformat.SERIES_HEADER + "a\n"
    assert mailformat.series_text(["a"], mailformat.SERIES_HEADER) == mailformat.SERIES_HEADER + "a\n"


def test_unexported_work_is_never_overwritten(shop: Workshop) -> None:
    tree = shop.dev()
    commit(tree, "alpha: mine", {ENGINE: b"mine = 1\n"})
    (tree / LOADER).write_bytes(b"edited = 1\n")
    before = kit.snapshot(tree, [".git"])
    kit.refused(shop.run("dev", "alpha"), 3, "alpha: mine", LOADER, "export")
    assert kit.snapshot(tree, [".git"]) == before
    kit.git(tree, "checkout", "-q", "--", LOADER)
    kit.refused(shop.run("dev", "alpha"), 3, "alpha: mine")
    kit.accepted(shop.run("export", "alpha"), "alpha-mine.patch")
    assert shop.dev() == tree


def test_patches_that_changed_elsewhere_are_not_undone(shop: Workshop) -> None:
    tree = shop.dev()
    shop.series({"first-one": {LOADER: kit.replaced(shop.upstream[LOADER], (b"loader_9 = 9\n", b"loader_9 = 'z'\n"))}})
    kit.refused(shop.run("export", "alpha"), 3, "second-one", "changed since")
    assert not (shop.pin / "second-one.patch").exists()
    assert len(ids(shop.dev())) == 2  # nothing of the user in it: rebuilt
    assert b"'z'" in (tree / LOADER).read_bytes()


def test_dev_refuses_a_directory_that_is_not_its_own(shop: Workshop, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_text("x")
    kit.refused(shop.run("dev", "alpha", "--dir", tmp_path / "mine"), 2, "not a worktree", "mine")
    kit.refused(shop.run("export", "alpha", "--from", tmp_path / "mine"), 2, "no repository")
    kit.refused(shop.run("dev", "nobody"), 2, "nobody")


def test_dev_of_an_overlay_path_that_upstream_has(shop: Workshop) -> None:
    shop.home.overlay("alpha", {ENGINE: b"x = 1\n"})
    shop.home.lock()
    kit.refused(shop.run("dev", "alpha"), 7, "exist upstream", ENGINE)


@pytest.mark.parametrize(
    ("make", "code", "said"),
    [
        (lambda t: commit(t, "new file", {PREFIX + "extra.py": b"x = 1\n"}), 7, "a new file"),
        (lambda t: (kit.git(t, "rm", "-q", ENGINE), commit(t, "gone", {})), 7, "a deleted file"),
        (lambda t: (kit.git(t, "mv", ENGINE, PREFIX + "e2.py"), commit(t, "moved", {})), 7, "may only modify"),
        (lambda t: ((t / ENGINE).chmod(0o755), kit.git(t, "commit", "-qam", "mode")), 7, "a mode change"),
        (lambda t: commit(t, "no trailers", {ENGINE: b"x = 1\n"}, "End.\n"), 7, "lacks trailers"),
        (
            lambda t: commit(t, "no licence", {ENGINE: b"x = 1\n"}, TRAILERS.rsplit("License", 1)[0]),
            7,
            "without License",
        ),
        (lambda t: commit(t, "empty", {}, TRAILERS, "--allow-empty"), 7, "empty commit"),
        (lambda t: commit(t, "alpha: first one", {ENGINE: b"x = 1\n"}), 7, "same subject"),
        (lambda t: commit(t, "cut", {ENGINE: b"x = 1\n"}, "---\nmore\n\n" + TRAILERS), 7, "cannot be carried"),
        (lambda t: (t / ENGINE).write_bytes(b"edited\n"), 3, "uncommitted"),
        (lambda t: _merge(t), 3, "merge commit"),
        (lambda t: _other_base(t), 3, "do not stand on the pin"),
    ],
    ids=str,
)
def test_what_cannot_become_a_patch(shop: Workshop, make, code: int, said: str) -> None:
    make(shop.dev())
    before = kit.stamps(shop.pin.parent)
    kit.refused(shop.run("export", "alpha"), code, said)
    assert kit.snapshot(shop.pin.parent) and kit.stamps(shop.pin) == {
        k: v for k, v in before.items() if k in kit.stamps(shop.pin)
    }


def _merge(tree: Path) -> None:
    kit.git(tree, "checkout", "-q", "-b", "side", "HEAD^")
    commit(tree, "side", {ENGINE: b"x = 1\n"})
    kit.git(tree, "checkout", "-q", "fp8-colocate")
    kit.git(tree, "merge", "-q", "--no-ff", "-m", "merged", "side")


def _other_base(tree: Path) -> None:
    kit.git(tree, "checkout", "-q", "--orphan", "other")
    kit.git(tree, "commit", "-q", "-m", "another root")


def test_half_done_rebase(shop: Workshop) -> None:
    tree = shop.dev()
    commit(tree, "x", {LOADER: b"x = 1\n"})
    subprocess.run(
        ["git", "rebase", "-q", "--onto", "HEAD~2", "HEAD~1"], cwd=tree, env=kit.git_env(), capture_output=True
    )
    kit.refused(shop.run("export", "alpha"), 6, "rebase", "--continue")
    kit.refused(shop.run("dev", "alpha"), 6, "rebase")


def test_export_from_any_repository_checks_its_base(shop: Workshop, tmp_path: Path) -> None:
    good = kit.checkout(tmp_path / "good", shop.upstream)
    engine = kit.replaced(shop.upstream[ENGINE], (b"engine_3 = 3\n", b"engine_3 = 'x'\n"))
    commit(good, "alpha: lone", {ENGINE: engine})
    kit.refused(shop.run("export", "alpha", "--from", good), 2, "--base")
    kit.accepted(shop.run("export", "alpha", "--from", good, "--base", "v1.0"), "alpha-lone.patch")
    other = {**shop.upstream, ENGINE: b"first = 1\n" + shop.upstream[ENGINE]}
    bad = kit.checkout(tmp_path / "bad", other)
    commit(bad, "alpha: lone", {ENGINE: b"first = 1\n" + engine})
    kit.refused(
        shop.run("export", "alpha", "--from", bad, "--base", "v1.0"), 3, "base of the commits is not the pin", ENGINE
    )


def test_base_from_a_git_tag_is_one_more_source(shop: Workshop, tmp_path: Path) -> None:
    tag = {**shop.upstream, PREFIX + "engine.py": shop.upstream[ENGINE], "docs/only-in-git.md": b"x\n"}
    tag[LOADER] = shop.upstream[LOADER] + b"only_in_git = 1\n"
    clone = kit.checkout(tmp_path / "clone", tag)
    tree = shop.dev("--from-git", clone)
    assert (tree / "docs/only-in-git.md").is_file()
    assert kit.git(tree, "rev-parse", "HEAD~2") == kit.git(clone, "rev-parse", "v1.0")
    kit.accepted(shop.run("export", "alpha"), "lock.json")
    files = json.loads((shop.pin / "lock.json").read_text())["files"]
    assert list(files[LOADER]["pre"]) == ["wheel", "tag"]
    assert files[LOADER]["pre"]["wheel"] != files[LOADER]["pre"]["tag"]
    site = kit.checkout(tmp_path / "target", tag)
    kit.accepted(shop.run("--alpha", site), "patched")


def test_a_source_that_is_not_at_hand_stays_in_the_lock(shop: Workshop, tmp_path: Path) -> None:
    shop.dev("--from-git", kit.checkout(tmp_path / "clone", shop.upstream))
    shop.run("export", "alpha")
    before = (shop.pin / "lock.json").read_bytes()
    assert b'"tag"' in before
    kit.accepted(shop.run("export", "alpha", "--lock-only"), "nothing to write")
    assert (shop.pin / "lock.json").read_bytes() == before


def test_overlay_edit_locks_every_pin_again(shop: Workshop) -> None:
    kit.build_wheel(shop.home.directory / "dists", "alpha", "2.0", kit.upstream_files("alpha", "2.0"))
    shop.home.write_manifest({"alpha": "2.0"})
    shop.home.pin_directory("alpha", "2.0").mkdir()
    shop.home.lock(version="2.0")  # its wheel is not in the cache: not needed, for no patch changed
    shop.home.overlay("alpha", {PREFIX + "new/more.py": kit.SPDX.encode()})
    kit.refused(shop.run("list"), 7, "overlay")
    kit.accepted(shop.run("export"), "alpha/1.0/lock.json", "alpha/2.0/lock.json")
    assert shop.run("list").returncode == 0


def test_carriage_returns_survive(tmp_path: Path) -> None:
    crlf = MODULE.replace(b"\n", b"\r\n")
    shop = Workshop(tmp_path, {PREFIX + "dos.py": crlf})
    shop.series({"touch-dos": {PREFIX + "dos.py": PATCHED.replace(b"\n", b"\r\n")}})
    tree = shop.dev()
    assert (tree / PREFIX / "dos.py").read_bytes() == PATCHED.replace(b"\n", b"\r\n")
    mixed = kit.replaced(shop.upstream[ENGINE], (b"engine_3 = 3\n", b"engine_3 = '\r'\r\n"))
    commit(tree, "alpha: a carriage return in lines", {ENGINE: mixed})
    kit.accepted(shop.run("export", "alpha"), "alpha-a-carriage-return-in-lines.patch")
    assert "touch-dos.patch" not in shop.run("export", "alpha").stdout
    assert (shop.dev("--dir", tmp_path / "b") / ENGINE).read_bytes() == mixed
    site = kit.checkout(tmp_path / "target", shop.upstream)
    kit.accepted(shop.run("--alpha", site), "patched")
    assert (site / ENGINE).read_bytes() == mixed + kit.NOTICE


def test_hostile_git_configuration_changes_nothing(shop: Workshop, tmp_path: Path) -> None:
    hostile = hostile_user(tmp_path / "hostile")
    tree = shop.dev()
    engine = kit.replaced(shop.upstream[ENGINE], (b"engine_3 = 3\n", b"engine_3 = 'x'   \n\tfirst = 1\n"))
    commit(tree, "alpha: trailing space", {ENGINE: engine})
    done = shop.run("export", "alpha", **hostile)
    kit.accepted(done, "alpha-trailing-space.patch")
    assert "first-one.patch" not in done.stdout
    expected = kit.format_patch(tree, "HEAD")
    assert (shop.pin / "alpha-trailing-space.patch").read_bytes() == expected
    kit.accepted(shop.run("export", "alpha"), "nothing to write")


def test_a_users_git_in_the_worktree_keeps_bytes(shop: Workshop, tmp_path: Path) -> None:
    """core.autocrlf of the user is outranked in the worktree: a checkout writes no carriage return."""
    tree = shop.dev()
    env = kit.git_env(GIT_CONFIG_GLOBAL=str(tmp_path / "config"))
    (tmp_path / "config").write_text("[core]\n autocrlf = true\n")
    (tree / LOADER).unlink()
    subprocess.run(["git", "checkout", "--", LOADER], cwd=tree, env=env, check=True)
    assert b"\r" not in (tree / LOADER).read_bytes()


def test_killed_export_leaves_the_old_or_the_new_state(shop: Workshop) -> None:
    """SIGKILL before the n-th change of patches/ (mkdir, write, fsync, exchange, remove), for each n there is."""
    tree = shop.dev()
    commit(
        tree, "alpha: mine", {ENGINE: kit.replaced(shop.upstream[ENGINE], (b"engine_3 = 3\n", b"engine_3 = 'x'\n"))}
    )
    record, saved = tree / ".git/fp8-colocate.json", shop.root / "saved"
    shutil.copytree(shop.pin, saved)
    before, old = record.read_bytes(), kit.snapshot(shop.pin)
    seen = []
    for call in range(1, 40):
        command = [sys.executable, "-c", _KILLER, str(call), str(shop.home.directory), "export", "alpha"]
        done = subprocess.run(command, env=refresh_kit.environment(shop.env), capture_output=True, check=False)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
        found = kit.snapshot(shop.pin)
        assert shop.run("list").returncode == 0  # series, mails and lock agree
        kit.accepted(shop.run("export", "alpha"))
        assert found in (old, kit.snapshot(shop.pin))
        seen.append(found == old)
        assert [p.name for p in shop.pin.parent.iterdir()] == ["1.0"]
        shutil.rmtree(shop.pin)
        shutil.copytree(saved, shop.pin)
        record.write_bytes(before)
    assert seen == sorted(seen, reverse=True) and {True, False} == set(seen) and len(seen) > 10


_KILLER = """
import os, shutil, signal, sys
sys.path.insert(0, sys.argv[2])
left = int(sys.argv[1])
def counted(function):
    def call(*args, **kwargs):
        global left
        if any('/patches/' in str(a) or isinstance(a, int) for a in args[:2]):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call
from pathlib import Path
from patchset import pindir
os.fsync, os.rename = counted(os.fsync), counted(os.rename)
pindir._exchange, shutil.rmtree = counted(pindir._exchange), counted(shutil.rmtree)
Path.write_bytes, Path.mkdir = counted(Path.write_bytes), counted(Path.mkdir)
from patchset.cli import main
sys.exit(main(sys.argv[3:]))
"""


def test_two_renames_where_directories_cannot_be_exchanged(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kill between the two renames leaves is put back by the next export."""
    shop.dev()
    os.rename(shop.pin, shop.pin.with_name(".1.0.old"))
    (shop.pin.with_name(".1.0.staged")).mkdir()
    assert shop.run("export", "alpha", "--lock-only").returncode == 0
    assert sorted(p.name for p in shop.pin.parent.iterdir()) == ["1.0"]
    kit.accepted(shop.run("export", "alpha"), "nothing to write")


def test_patches_directory_that_cannot_be_written(shop: Workshop) -> None:
    tree = shop.dev()
    commit(tree, "alpha: mine", {ENGINE: b"mine = 1\n"})
    old = kit.snapshot(shop.pin)
    shop.pin.with_name(".1.0.staged").write_text("in the way")
    kit.refused(shop.run("export", "alpha"), 1, "patch directory cannot be written", ".1.0.staged")
    assert kit.snapshot(shop.pin) == old


def test_killed_dev_is_built_again(shop: Workshop) -> None:
    """SIGKILL while dev runs, at growing times: the next dev ends with the same commits."""
    expected = ids(shop.dev("--dir", shop.root / "reference"))
    command = [
        sys.executable,
        str(shop.home.directory / "apply.py"),
        "dev",
        "alpha",
        "--dir",
        str(shop.root / "killed"),
    ]
    for delay in (0.05, 0.15, 0.25, 0.4):
        process = subprocess.Popen(
            command, env=refresh_kit.environment(shop.env), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        time.sleep(delay)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for lock in (shop.root / "killed").rglob("*.lock"):
            lock.unlink()  # git's own, of a killed git
        done = shop.run("dev", "alpha", "--dir", shop.root / "killed")
        assert done.returncode == 0, done.stderr
        assert ids(shop.root / "killed") == expected


def test_slugs() -> None:
    assert (
        mailformat.slug_of("peft, models: import without transformer engine")
        == "peft-models-import-without-transformer-engine"
    )
    assert mailformat.slug_of("2 3 fix: x") == "fix-x"
    assert len(mailformat.slug_of("word " * 40)) <= 60
    assert mailformat.slug_of("a" * 100) == "a" * 60


def test_the_projects_own_patches_survive_the_round_trip(project: Path, dists: Path, tmp_path: Path) -> None:
    """The real series on the real distributions: dev, then export, writes nothing."""
    cache = tmp_path / "cache" / "fp8-colocate"
    cache.mkdir(parents=True)
    (cache / "dists").symlink_to(dists)
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    before = kit.snapshot(project / "patches")
    for target in load(project).targets:
        assert kit.run_tool(project, "dev", target, env=env).returncode == 0
    done = kit.run_tool(project, "export", env=env)
    kit.accepted(done, "nothing to write")
    assert kit.difference(before, kit.snapshot(project / "patches")) == []
