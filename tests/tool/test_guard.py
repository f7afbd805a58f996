# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""The run-time guard on the real patched wheels and on real trees: it passes when all is as recorded, else raises."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from patchset import lock
from patchset.manifest import Manifest
from tests.tool import kit

GUARD = kit.ROOT / "overlay" / "shared" / "fp8_colocate.py"


@pytest.fixture(scope="session")
def digests(pins: Manifest) -> dict[str, str]:
    """Target id -> digest of its lock."""
    return {t.id: lock.load(pins, t, pins.pin(t))[0].digest for t in pins.targets.values()}


@pytest.fixture
def official(pins: Manifest, dists: Path, tmp_path: Path) -> Path:
    """The official Bridge wheel, unpacked."""
    return kit.unpacked_wheel(tmp_path / "w", dists / pins.pin(pins.target("megatron-bridge")).wheel.file)


def ask(*path: Path, dist: str = "megatron-bridge", wanted: str | None = None, cwd: Path | None = None) -> str:
    """What `require` says in a fresh interpreter with `path` first: "ok ..." or the error's text."""
    code = (
        "import importlib.util, sys\n"
        f"sys.path[:0] = {[str(p) for p in path]!r}\n"
        f"spec = importlib.util.spec_from_file_location('guard', {str(GUARD)!r})\n"
        "guard = importlib.util.module_from_spec(spec); sys.modules['guard'] = guard; spec.loader.exec_module(guard)\n"
        "try:\n"
        f"    found = guard.require({dist!r}, {wanted!r})\n"
        "    print('ok', found.digest, found.num_files, found.record)\n"
        "except guard.PatchSetError as error:\n"
        "    print(error)\n"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def provenance(site: Path) -> Path:
    return next(site.glob("megatron_bridge-*.dist-info")) / "fp8-colocate" / "provenance.json"


@pytest.fixture
def site(installed: Path, tmp_path: Path) -> Path:
    """A site-packages of one's own with the patched Bridge alone."""
    place = tmp_path / "site"
    shutil.copytree(installed / "megatron" / "bridge", place / "megatron" / "bridge")
    dist_info = next(installed.glob("megatron_bridge-*.dist-info"))
    shutil.copytree(dist_info, place / dist_info.name)
    return place


@pytest.mark.parametrize("name", ["sglang", "megatron", "megatron-bridge"])
def test_installed_wheels_pass(name: str, pins: Manifest, installed: Path, digests: dict[str, str]) -> None:
    said = ask(installed, dist=pins.target(name).dist).split()
    assert said[:2] == ["ok", digests[name]]
    assert int(said[2]) >= 2, "at least the guard itself and the version file"
    assert "provenance.json" in said[3]


def test_the_installed_guard_is_this_one(installed: Path) -> None:
    for place in ("sglang", "megatron/core", "megatron/bridge"):
        assert (installed / place / "fp8_colocate.py").read_bytes() == GUARD.read_bytes()


def test_digest_can_be_asked_for(installed: Path, digests: dict[str, str]) -> None:
    full = digests["megatron-bridge"]
    assert ask(installed, wanted=full).startswith("ok")
    assert ask(installed, wanted=full[:12]).startswith("ok")
    for wrong in ("0" * 64, full[:11], ""):
        assert f"another revision of the patch set: expected digest {wrong}" in ask(installed, wanted=wrong)


def test_one_byte(site: Path) -> None:
    path = site / "megatron" / "bridge" / "fp8_colocate.py"
    assert ask(site).startswith("ok")
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    said = ask(site)
    assert f"{path} is not the patched file: expected sha256" in said


@pytest.mark.parametrize("which", ["files", "version_files"])
def test_one_byte_in_a_changed_file(site: Path, which: str) -> None:
    entry = next(iter(json.loads(provenance(site).read_text())[which].values()))
    with (site / entry["at"]).open("ab") as file:
        file.write(b"\n")
    assert f"{entry['at']} is not the patched file" in ask(site)


def test_missing_file(site: Path) -> None:
    (site / "megatron" / "bridge" / "package_info.py").unlink()
    assert "package_info.py cannot be read (No such file or directory)" in ask(site)


def test_missing_record(site: Path) -> None:
    shutil.rmtree(provenance(site).parent)
    assert "carries no fp8-colocate record: the package there is not patched" in ask(site)


def _set(**values: object) -> Callable[[dict], None]:
    return lambda body: body.update(values)


def _drop_a_file(body: dict) -> None:
    body["files"].pop(next(iter(body["files"])))


def _other_hash(body: dict) -> None:
    next(iter(body["files"].values()))["post"] = "0" * 64


def _edit_lock(body: dict) -> None:
    body["lock"]["overlay"]["src/megatron/bridge/fp8_colocate.py"] = "0" * 64


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (_set(digest="0" * 64), "is damaged: ValueError: digest 000"),
        (_set(dist="sglang"), "it is for sglang"),
        (_set(wheel_version="9+fc8.1"), "it is for version 9+fc8.1, found in megatron_bridge-"),
        (_set(files={}), "files differ from its lock's"),
        (_set(files=None), "is damaged: AttributeError"),
        (_set(lock={}), "is damaged: KeyError"),
        (_drop_a_file, "files differ from its lock's"),
        (_other_hash, "hashes differ from its lock's"),
        (_edit_lock, "its lock says"),
    ],
)
def test_damaged_record(site: Path, edit: Callable[[dict], None], says: str) -> None:
    path = provenance(site)
    body = json.loads(path.read_text())
    edit(body)
    path.write_text(json.dumps(body))
    said = ask(site)
    assert says in said
    assert not said.startswith("ok")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00"])
def test_unreadable_record(site: Path, text: str) -> None:
    provenance(site).write_text(text)
    assert "the record" in ask(site)


def test_official_wheel_is_not_patched(official: Path) -> None:
    assert "carries no fp8-colocate record" in ask(official)


def test_nothing_there_and_unknown_name(tmp_path: Path) -> None:
    assert "megatron.bridge is not importable" in ask(tmp_path)
    assert "unknown distribution 'vllm': expected one of sglang" in ask(tmp_path, dist="vllm")


def test_two_dist_infos(site: Path) -> None:
    shutil.copytree(provenance(site).parents[1], site / "megatron_bridge-0.6.1.dist-info")
    assert "2 dist-info directories in" in ask(site)


def test_a_sibling_distribution_is_not_a_second_one(installed: Path, tmp_path: Path) -> None:
    """sglang_kernel-... must not be taken for sglang-..."""
    place = tmp_path / "s"
    place.mkdir()
    for path in [installed / "sglang", *installed.glob("sglang-*.dist-info")]:
        (place / path.name).symlink_to(path)
    (place / "sglang_kernel-0.4.5.dist-info").mkdir()
    assert ask(place, dist="sglang").startswith("ok")


def test_editable_dist_info(site: Path) -> None:
    direct = {"url": "file:///somewhere", "dir_info": {"editable": True}}
    (provenance(site).parents[1] / "direct_url.json").write_text(json.dumps(direct))
    assert "is of an editable install" in ask(site)


def test_wheel_hidden_by_a_checkout(site: Path, tmp_path: Path, official: Path) -> None:
    """A patched wheel is installed, an editable install or PYTHONPATH brings another copy first."""
    tree = tmp_path / "checkout" / "src"
    shutil.copytree(official / "megatron", tree / "megatron")
    said = ask(tree, site)
    assert "but Python imports" in said and str(tree) in said
    assert ask(site, tree).startswith("ok")


def test_hidden_by_a_namespace_that_is_none(site: Path, tmp_path: Path) -> None:
    (tmp_path / "other" / "megatron").mkdir(parents=True)
    (tmp_path / "other" / "megatron" / "__init__.py").write_text("")
    assert "megatron.bridge is not importable" in ask(tmp_path / "other", site)


def apply(project: Path, tree: Path) -> None:
    kit.accepted(kit.run_tool(project, "--megatron-bridge", tree))


@pytest.mark.parametrize("kind", ["checkout", "source", "site", "unpacked"])
def test_trees_that_apply_made(
    kind: str, tmp_path: Path, project: Path, digests: dict[str, str], official: Path
) -> None:
    """The same guard reads what `apply` records, in every kind of tree, and fails when a file is edited after."""
    tree, root = tmp_path / "w", tmp_path / "w"
    if kind in ("checkout", "source"):
        tree, root = tmp_path / "t", tmp_path / "t" / "src"
        root.mkdir(parents=True)
        shutil.copytree(official / "megatron", root / "megatron")
    if kind == "checkout":
        kit.git(tree, "init", "-q")
        kit.commit(tree, "release")
    if kind == "site":
        (next(tree.glob("*.dist-info")) / "INSTALLER").write_text("pip\n")
    assert "carries no fp8-colocate record" in ask(root)
    apply(project, tree)
    assert ask(root).startswith(f"ok {digests['megatron-bridge']}")
    (root / "megatron" / "bridge" / "fp8_colocate.py").write_text("")
    assert "is not the patched file" in ask(root)


def test_worktree(tmp_path: Path, project: Path, official: Path) -> None:
    tree = tmp_path / "t"
    shutil.copytree(official / "megatron", tree / "src" / "megatron")
    kit.git(tree, "init", "-q")
    kit.commit(tree, "release")
    kit.git(tree, "worktree", "add", "-q", str(tmp_path / "linked"))
    apply(project, tmp_path / "linked")
    assert ask(tmp_path / "linked" / "src").startswith("ok")
    assert "carries no fp8-colocate record" in ask(tree / "src")


def test_command_lists_changes(installed: Path, pins: Manifest) -> None:
    """What the notice at the end of each changed file promises."""
    env = {**os.environ, "PYTHONPATH": str(installed)}
    script = installed / "megatron" / "core" / "fp8_colocate.py"
    done = subprocess.run(
        [sys.executable, "-P", str(script), "--changes"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    for target in pins.targets.values():
        recorded, patches = lock.load(pins, target, pins.pin(target))
        assert f"patched      {target.dist} {target.pin}" in done.stdout
        for path in (*recorded.files, *target.version_files):
            place = target.installed_path(path)
            assert place is None or f"changed  {place}\n" in done.stdout
        assert all(f"patch    {p.slug}: " in done.stdout for p in patches)


def test_command_fails_closed(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-P", "-S", str(GUARD)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert done.stdout.count("not patched") == 3
