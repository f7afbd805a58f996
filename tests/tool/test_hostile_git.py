# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""No configuration of the user's git, and no repository around the tree, reaches the tool.

Each case first shows that the trap is real: plain git falls into it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.tool import kit
from tests.tool.kit import Home, accepted, refused

LOADER = "python/alpha/loader.py"


@pytest.fixture(scope="module")
def blanks(home: Home, tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A patch whose added lines end in blanks, hold tabs after blanks, and sit at the end of the file."""
    mine = home.copy(tmp_path_factory.mktemp("blanks") / "home")
    loader = mine.upstream["alpha"][LOADER]
    loader = kit.replaced(loader, (b"loader_5 = 5\n", b"loader_5 = 'x'   \n \t= 1\n")) + b"last = 1\n\n\n"
    mine.series("alpha", {"blanks": {LOADER: loader}})
    mine.lock("alpha")
    return mine


@pytest.fixture
def goal(blanks: Home, tmp_path: Path) -> dict[str, tuple]:
    """The tree after an undisturbed run."""
    root = kit.source_tree(tmp_path / "goal", blanks.upstream["alpha"])
    accepted(blanks.run("--alpha", root))
    return kit.snapshot(root)


def plain_git(directory: Path, *args: object, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    everything = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | dict(env)
    return subprocess.run(
        ["git", *map(str, args)], cwd=directory, env=everything, capture_output=True, text=True, check=False
    )


def inside_a_repository(root: Path, site: Path) -> None:
    kit.checkout(root, {"unrelated.txt": b"x\n"})
    shutil.copytree(site, root / "venv" / "site", symlinks=True)


def test_x1_below_an_unrelated_repository(blanks: Home, site: Path, tmp_path: Path) -> None:
    """git apply skips every file below the top of an unrelated repository and returns 0."""
    inside_a_repository(tmp_path / "project", site)
    place, patch = tmp_path / "project/venv/site", blanks.pin_directory("alpha") / "blanks.patch"
    before = kit.snapshot(tmp_path / "project")
    env = {"GIT_CONFIG_GLOBAL": os.devnull}
    trapped = plain_git(place, "apply", "-p2", patch, env=env)
    assert trapped.returncode == 0 and kit.snapshot(tmp_path / "project") == before
    assert plain_git(place, "apply", "-p2", "--reverse", "--check", patch, env=env).returncode == 0  # X1b
    refused(blanks.run("status", "--alpha", place), 3, "pristine")
    accepted(blanks.run("--alpha", place), "patched: 1 patches")
    assert b"loader_5 = 'x'" in (place / "alpha/loader.py").read_bytes()
    accepted(blanks.run("status", "--alpha", place), "site-packages", ": patched")
    accepted(blanks.run("--alpha", place, "--revert"))
    assert kit.difference(before, kit.snapshot(tmp_path / "project")) == []


def test_scratch_directory_below_an_unrelated_repository(blanks: Home, tmp_path: Path, goal: dict[str, tuple]) -> None:
    """X1 from the other side: TMPDIR lies in a repository, with attributes and an ignore file of its own."""
    files = {".gitattributes": b"* text eol=crlf\n", ".gitignore": b"*\n"}
    repository = kit.checkout(tmp_path / "repository", files)
    (repository / "tmp").mkdir()
    root = kit.source_tree(tmp_path / "tree", blanks.upstream["alpha"])
    accepted(blanks.run("--alpha", root, env={"TMPDIR": str(repository / "tmp")}))
    assert kit.difference(goal, kit.snapshot(root)) == []
    assert not any((repository / "tmp").iterdir())


# Each makes files below a directory and gives the environment that makes git read them


def whitespace_fix(place: Path) -> dict[str, str]:
    (place / "config").write_text("[apply]\n\twhitespace = fix\n[core]\n\twhitespace = tab-in-indent,trailing-space\n")
    return {"GIT_CONFIG_GLOBAL": str(place / "config")}


def line_endings(place: Path) -> dict[str, str]:
    (place / ".gitconfig").write_text("[core]\n\tautocrlf = true\n\teol = crlf\n")
    return {"HOME": str(place)}


def home_attributes(place: Path) -> dict[str, str]:
    kit.write_files(place, {"git/attributes": b"*.py text eol=crlf\n"})
    return {"XDG_CONFIG_HOME": str(place), "HOME": str(place)}


def named_attributes(place: Path) -> dict[str, str]:
    kit.write_files(place, {"attributes": b"*.py text eol=crlf\n"})
    (place / ".gitconfig").write_text(f"[core]\n\tattributesFile = {place / 'attributes'}\n")
    return {"HOME": str(place)}


def injected(place: Path) -> dict[str, str]:
    keys = {"core.autocrlf": "true", "apply.whitespace": "fix", "core.eol": "crlf"}
    env = {"GIT_CONFIG_COUNT": str(len(keys))}
    for number, (key, value) in enumerate(keys.items()):
        env |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return env


def parameters(place: Path) -> dict[str, str]:
    return {"GIT_CONFIG_PARAMETERS": "'apply.whitespace'='fix' 'core.autocrlf'='true'"}


def repository_by_environment(place: Path) -> dict[str, str]:
    other = kit.checkout(place / "other", {"a.txt": b"a\n"})
    return {"GIT_DIR": str(other / ".git"), "GIT_WORK_TREE": str(other), "GIT_INDEX_FILE": str(other / "index")}


TRAPS = [whitespace_fix, line_endings, home_attributes, named_attributes, injected, parameters]


@pytest.mark.parametrize("trap", [*TRAPS, repository_by_environment])
def test_configuration_of_the_user(
    blanks: Home, tmp_path: Path, goal: dict[str, tuple], trap: Callable[[Path], dict[str, str]]
) -> None:
    """X11 and its kin: configuration by file, by attribute, by environment, and another repository by environment."""
    (tmp_path / "trap").mkdir()
    env = trap(tmp_path / "trap")
    if trap in TRAPS:
        alone = kit.source_tree(tmp_path / "alone", blanks.upstream["alpha"])
        plain_git(alone, "apply", blanks.pin_directory("alpha") / "blanks.patch", env=env)
        patched_by_git = (alone / LOADER).read_bytes()
    root = kit.source_tree(tmp_path / "tree", blanks.upstream["alpha"])
    before = kit.snapshot(tmp_path / "trap"), kit.snapshot(root)
    accepted(blanks.run("--alpha", root, env=env), "patched")
    assert kit.difference(goal, kit.snapshot(root)) == []
    assert trap not in TRAPS or patched_by_git + kit.NOTICE != (root / LOADER).read_bytes(), "the trap is not set"
    accepted(blanks.run("status", "--alpha", root, env=env))
    accepted(blanks.run("--alpha", root, "--revert", env=env))
    assert (kit.snapshot(tmp_path / "trap"), kit.snapshot(root)) == before


def test_configuration_that_would_run_or_sign_something(home: Home, tree: Path, tmp_path: Path) -> None:
    """Hooks, signing, templates, prefixes, fsmonitor: nothing is started, and patches keep their meaning."""
    ran, script = tmp_path / "ran", tmp_path / "hook"
    script.write_text(f"#!/bin/sh\necho $0 >> {ran}\nexit 1\n")
    script.chmod(0o755)
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for name in ("pre-commit", "post-checkout", "applypatch-msg", "pre-applypatch", "post-index-change"):
        (hooks / name).symlink_to(script)
    (tmp_path / ".gitconfig").write_text(
        f"[core]\n\thooksPath = {hooks}\n\tfsmonitor = {script}\n\tpager = {script}\n[commit]\n\tgpgSign = true\n"
        f"[gpg]\n\tprogram = {script}\n[init]\n\ttemplateDir = {hooks}\n"
        f"[diff]\n\tnoprefix = true\n\texternal = {script}\n"
        f"[apply]\n\tignoreWhitespace = change\n[alias]\n\tapply = !{script}\n"
    )
    before = kit.snapshot(tree)
    accepted(home.run("--alpha", tree, env={"HOME": str(tmp_path), "GIT_EXTERNAL_DIFF": str(script)}))
    accepted(home.run("--alpha", tree, "--revert", env={"HOME": str(tmp_path)}))
    assert kit.difference(before, kit.snapshot(tree)) == []
    assert not ran.exists()


def test_x2_a_failing_series_leaves_nothing_behind(home: Home, tmp_path: Path) -> None:
    """`git apply good bad` writes the first patch and fails at the second; nothing of ours does."""
    upstream = home.upstream["alpha"]
    good = home.pin_directory("alpha") / "loader-calls-the-overlay.patch"
    bad = home.pin_directory("alpha") / "deep-one.patch"
    edited = upstream | {"python/alpha/sub/deep.py": b"other = 1\n"}
    alone = kit.source_tree(tmp_path / "alone", edited)
    assert plain_git(alone, "apply", good, bad, env={"GIT_CONFIG_GLOBAL": os.devnull}).returncode == 1
    root = kit.source_tree(tmp_path / "tree", edited)
    before = kit.snapshot(root)
    refused(home.run("--alpha", root), 3, "deep-one")
    assert kit.snapshot(root) == before


def test_x6_crlf_and_a_lenient_git(home: Home, tmp_path: Path) -> None:
    """--ignore-whitespace would patch a CRLF file into mixed line endings; it is refused instead."""
    upstream = home.upstream["alpha"]
    files = upstream | {LOADER: upstream[LOADER].replace(b"\n", b"\r\n")}
    alone = kit.source_tree(tmp_path / "alone", files)
    patch = home.pin_directory("alpha") / "loader-calls-the-overlay.patch"
    done = plain_git(alone, "apply", "--ignore-whitespace", patch, env={"GIT_CONFIG_GLOBAL": os.devnull})
    mixed = (alone / LOADER).read_bytes()
    assert done.returncode == 0 and 0 < mixed.count(b"\r\n") < mixed.count(b"\n")
    root = kit.source_tree(tmp_path / "tree", files)
    before = kit.snapshot(root)
    refused(home.run("--alpha", root), 3, "CRLF line endings (core.autocrlf)")
    assert kit.snapshot(root) == before


def test_git_is_not_installed(home: Home, tree: Path, tmp_path: Path) -> None:
    before = kit.snapshot(tree)
    refused(home.run("--alpha", tree, env={"PATH": str(tmp_path)}), 1, "git is not installed", "install git")
    assert kit.snapshot(tree) == before
    refused(home.run("status", "--alpha", tree, env={"PATH": str(tmp_path)}), 3, "pristine")  # needs no git


def test_x16_version_of_the_enclosing_repository(home: Home, site: Path, tmp_path: Path) -> None:
    """The commit of a repository around a site-packages is no part of its version."""
    inside_a_repository(tmp_path / "project", site)
    place = tmp_path / "project/venv/site"
    accepted(home.run("--beta", place, "--gamma", place), "beta 1.0", "gamma 1.0")
    assert not (tmp_path / "project/.git/fp8-colocate").exists()
    assert (place / "beta_core-1.0.dist-info/fp8-colocate/state.json").is_file()
