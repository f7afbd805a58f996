# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""`--fetch`: cache, damage, offline, wrong hash, no pip; `--from-git` with local repositories.

pip is real and offline: PIP_FIND_LINKS names a directory with the pinned wheels, PIP_NO_INDEX closes the network.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from patchset import download, manifest
from patchset.errors import DownloadFailed, FileSystemError, ToolMissing, WheelInvalid
from patchset.manifest import Manifest
from patchset.report import Report
from patchset.types import sha256
from tests.tool import kit

Runner = Callable[..., subprocess.CompletedProcess[str]]
QUIET = Report(quiet=True)


@pytest.fixture
def run(project: Path) -> Runner:
    return functools.partial(kit.run_tool, project)


@pytest.fixture
def offline(dists: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip finds the pinned wheels in a directory and nothing else; the tool's cache is new: its path is returned."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(dists))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fp8-colocate" / "dists"


@pytest.fixture
def empty_index(offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Like `offline`, and pip finds nothing."""
    (tmp_path / "nothing").mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    return offline


def bring(pins: Manifest, name: str) -> Path:
    target = pins.target(name)
    return download.wheel_path(pins, target, pins.pin(target), QUIET)


def is_pinned(path: Path, pins: Manifest, name: str) -> bool:
    return sha256(path.read_bytes()) == pins.pin(pins.target(name)).wheel.sha256


@pytest.mark.parametrize("name", ["sglang", "megatron", "megatron-bridge"])
def test_brings_the_pinned_file_and_only_once(
    name: str, pins: Manifest, offline: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """This machine's Python and platform do not matter: the wheels are for 3.12."""
    path = bring(pins, name)
    assert path.parent == offline
    assert is_pinned(path, pins, name)
    assert [p.name for p in offline.iterdir()] == [path.name], "no partial directory stays"
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "gone"))
    assert bring(pins, name) == path


def test_damaged_and_partial_files_are_fetched_again(pins: Manifest, offline: Path) -> None:
    path = bring(pins, "megatron-bridge")
    (offline / ".partial-of-a-killed-run").mkdir()
    (offline / ".partial-of-a-killed-run" / "half.whl").write_bytes(b"PK")
    for damage in (path.read_bytes()[:1000], b"", path.read_bytes()[:-1] + b"x"):
        path.write_bytes(damage)
        assert is_pinned(bring(pins, "megatron-bridge"), pins, "megatron-bridge")
    assert [p.name for p in offline.iterdir()] == [path.name]


def test_hostile_pip_settings(pins: Manifest, offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "constraints.txt").write_text("megatron-bridge==0.1\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "constraints.txt"))
    monkeypatch.setenv("PIP_REQUIRE_VIRTUALENV", "1")
    monkeypatch.setenv("PIP_NO_BINARY", ":all:")
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "elsewhere"))
    assert is_pinned(bring(pins, "megatron-bridge"), pins, "megatron-bridge")


def test_other_bytes_under_the_same_name(
    pins: Manifest, offline: Path, dists: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mirror that rebuilt the wheel: exit 7, both hashes, nothing cached."""
    name = pins.pin(pins.target("megatron-bridge")).wheel.file
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    shutil.copy(dists / name, mirror)
    with (mirror / name).open("ab") as file:
        file.write(b"\0")
    monkeypatch.setenv("PIP_FIND_LINKS", str(mirror))
    with pytest.raises(WheelInvalid) as caught:
        bring(pins, "megatron-bridge")
    assert pins.pin(pins.target("megatron-bridge")).wheel.sha256 in str(caught.value)
    assert sha256((mirror / name).read_bytes()) in str(caught.value)
    assert list(offline.iterdir()) == []


def test_nothing_on_the_index(pins: Manifest, empty_index: Path) -> None:
    with pytest.raises(DownloadFailed) as caught:
        bring(pins, "sglang")
    message = str(caught.value)
    assert "pip could not bring sglang 0.5.17" in message
    assert "the index does not have this file, or cannot be reached" in message
    assert str(empty_index) in message, "where to put the file by hand"


def test_no_network(pins: Manifest, offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: nobody listens
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("PIP_TIMEOUT", "2")
    with pytest.raises(DownloadFailed) as caught:
        bring(pins, "megatron")
    assert "no network, or a proxy in the way" in str(caught.value)


def test_no_pip_and_no_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(download, "find_spec", lambda name: None)
    download.pip_command.cache_clear()
    try:
        with pytest.raises(ToolMissing) as caught:
            download.pip_command()
    finally:
        download.pip_command.cache_clear()
    for part in (sys.executable, "python3 on PATH", "uv", "ensurepip"):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["python3", "uv"])
def test_another_pip(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one of its own the tool takes that of `python3`, then the one that uv runs."""
    program = tmp_path / name
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(download, "find_spec", lambda name: None)
    download.pip_command.cache_clear()
    try:
        assert download.pip_command()[0] == str(program)
    finally:
        download.pip_command.cache_clear()


def test_cache_cannot_be_made(pins: Manifest, offline: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file is in the way")
    with pytest.raises(FileSystemError) as caught:
        bring(pins, "megatron-bridge")
    assert "XDG_CACHE_HOME" in str(caught.value)


def test_full_disk(pins: Manifest, offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of 1 MiB: exit 1, the cause by name, nothing cached."""
    place = tmp_path / "cache"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small tmpfs cannot be mounted here")
    try:
        with pytest.raises(FileSystemError) as caught:
            bring(pins, "megatron-bridge")
        assert "the disk is full" in str(caught.value)
        assert list(offline.iterdir()) == []
    finally:
        subprocess.run(["umount", str(place)], check=True)


# The whole command


def test_fetch_leaves_three_wheels_and_the_next_command(
    run: Runner, patched_wheels: Mapping[str, Path], offline: Path, tmp_path: Path
) -> None:
    done = run("--fetch", tmp_path / "out")
    said = kit.accepted(done, "next: python3.12 -m pip install ")
    names = {p.name for p in patched_wheels.values()}
    assert {p.name for p in (tmp_path / "out").iterdir()} == names
    assert all(str(tmp_path / "out" / name) in said.splitlines()[-1] for name in names)
    for path in patched_wheels.values():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    assert "fetching sglang-" in done.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--check"], "--check"),
        (["--sglang", "x"], "--sglang"),
        (["--pin", "sglang=9"], "9 is not pinned"),
    ],
)
def test_usage(run: Runner, flags: list[str], says: str, offline: Path) -> None:
    kit.refused(run("--fetch", "out", *flags), 2, says)
    assert not offline.exists(), "refused before anything is fetched"


def test_json(run: Runner, empty_index: Path, tmp_path: Path) -> None:
    done = run("--fetch", tmp_path / "out", "--json")
    assert done.returncode == 1
    assert '"error": "DownloadFailed"' in done.stdout
    assert not (tmp_path / "out").exists()


# --from-git


@pytest.fixture(scope="session")
def mirrors(pins: Manifest, dists: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """FP8_COLOCATE_REPO_* for local repositories with the pins' tags, made from the official wheels."""
    variables = {}
    for target in pins.targets.values():
        repository = tmp_path_factory.mktemp("mirror") / target.id
        official = kit.unpacked_wheel(repository.parent / "wheel", dists / pins.pin(target).wheel.file)
        for upstream, installed in target.layout.items():
            shutil.copytree(official / installed, repository / upstream)
        kit.git(repository, "init", "-q")
        kit.commit(repository, "release")
        kit.git(repository, "tag", pins.pin(target).tag or "")
        (repository / "later.txt").write_text("after the release\n")
        kit.commit(repository, "later")
        variables[f"FP8_COLOCATE_REPO_{target.id.upper().replace('-', '_')}"] = f"file://{repository}"
    return variables


def test_from_git(run: Runner, pins: Manifest, mirrors: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "trees"
    kit.accepted(run("--fetch", out, "--from-git", env=mirrors), "next: python apply.py status --sglang")
    assert sorted(p.name for p in out.iterdir()) == sorted(pins.targets)
    for target in pins.targets.values():
        assert not (out / target.id / "later.txt").exists(), "the tag, not the branch"
        assert kit.git(out / target.id, "rev-list", "--count", "HEAD").strip() == "1", "shallow"
    kit.accepted(run("status", *(f"--{t}={out / t}" for t in pins.targets)))
    before = kit.stamps(out)
    again = run("--fetch", out, "--from-git", env=dict.fromkeys(mirrors, "file:///gone"))
    kit.accepted(again, "already patched")
    assert kit.stamps(out) == before, "a rerun clones nothing and writes nothing"


def test_from_git_of_the_wrong_tree(run: Runner, mirrors: dict[str, str], tmp_path: Path) -> None:
    """A mirror need not be trusted: what it serves is judged by the lock, and no tree is patched."""
    where = tmp_path / "evil"
    kit.git(tmp_path, "clone", "-q", mirrors["FP8_COLOCATE_REPO_MEGATRON_BRIDGE"], where)
    for path in (where / "src").rglob("*.py"):
        path.write_bytes(path.read_bytes() + b"import os\n")
    kit.commit(where, "changed")
    kit.git(where, "tag", "-f", "v0.6.2")
    env = mirrors | {"FP8_COLOCATE_REPO_MEGATRON_BRIDGE": f"file://{where}"}
    done = run("--fetch", tmp_path / "out", "--from-git", "-q", env=env)
    kit.refused(done, 3, "megatron-bridge")
    kit.refused(run("status", "--megatron", tmp_path / "out" / "megatron"), 3, "pristine")


def test_from_git_without_the_tag(run: Runner, mirrors: dict[str, str], tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    kit.git(bare, "init", "-q")
    env = mirrors | {"FP8_COLOCATE_REPO_SGLANG": f"file://{bare}"}
    done = run("--fetch", tmp_path / "out", "--from-git", "-q", env=env)
    kit.refused(done, 1, "git could not clone sglang at v0.5.17", "FP8_COLOCATE_REPO_SGLANG")
    assert list((tmp_path / "out").iterdir()) == []


def test_from_git_needs_fetch(run: Runner) -> None:
    kit.refused(run("--from-git"), 2, "--from-git goes with --fetch")


def test_the_tree_is_the_projects(project: Path) -> None:
    """These tests run a copy of the tool; it must be this one."""
    assert manifest.load(project).targets.keys() == manifest.load().targets.keys()
