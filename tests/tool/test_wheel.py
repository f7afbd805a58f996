# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""`wheel` on the real pinned wheels: what comes out, that it installs, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from patchset import archive, lock, metadata, scratch, wheel
from patchset.errors import ManifestInvalid, SeriesInvalid, UsageError, WheelInvalid
from patchset.manifest import Manifest
from patchset.report import Report
from patchset.types import Requirement, Target, sha256
from tests.tool import kit

TARGET_IDS = ("sglang", "megatron", "megatron-bridge")
QUIET = Report(quiet=True)
Runner = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(params=TARGET_IDS)
def target(request: pytest.FixtureRequest, pins: Manifest) -> Target:
    return pins.target(request.param)


@pytest.fixture
def core(pins: Manifest, dists: Path) -> Path:
    return dists / pins.pin(pins.target("megatron")).wheel.file


@pytest.fixture
def bridge(pins: Manifest, dists: Path) -> Path:
    return dists / pins.pin(pins.target("megatron-bridge")).wheel.file


@pytest.fixture
def run(project: Path) -> Runner:
    return functools.partial(kit.run_tool, project)


Pair = tuple[archive.Wheel, archive.Wheel]


def info(built: archive.Wheel, name: str) -> bytes:
    data = built.read(f"{built.dist_info}/{name}")
    assert data is not None, name
    return data


@pytest.fixture
def pair(target: Target, pins: Manifest, dists: Path, patched_wheels: Mapping[str, Path]) -> Pair:
    """(official, patched) of one target."""
    return archive.read(dists / pins.pin(target).wheel.file), archive.read(patched_wheels[target.id])


# What comes out


def test_version_agrees_everywhere(target: Target, pair: Pair, pins: Manifest) -> None:
    _, built = pair
    version = f"{target.pin}+fc8.{pins.revision}"
    assert built.version == version
    assert metadata.header(info(built, "METADATA"), "Version") == [version]
    for path in target.version_files:
        data = built.read(target.installed_path(path) or "") or b""
        found = metadata.literals(data, path)
        assert found.version == version
        assert found.version_tuple in (None, (*map(int, target.pin.split(".")), f"fc8.{pins.revision}"))
        assert b"subprocess" not in data
        assert data.endswith(scratch.notice(path))


def test_only_what_the_lock_says_differs(target: Target, pair: Pair, pins: Manifest) -> None:
    """Every other byte, mode and tag is upstream's."""
    old, built = pair
    recorded, _ = lock.load(pins, target, pins.pin(target))
    changed = {target.installed_path(p) for p in (*recorded.files, *target.version_files)}
    new = {target.installed_path(p) for p in recorded.overlay} - {None}
    body = {n: m for n, m in built.members.items() if not n.startswith(f"{built.dist_info}/")}
    before = {n: m for n, m in old.members.items() if not n.startswith(f"{old.dist_info}/")}
    assert body.keys() - before.keys() == new
    assert before.keys() <= body.keys()
    differ = {n for n in before if (before[n].data, before[n].external_attr) != (body[n].data, body[n].external_attr)}
    assert differ == changed - {None}
    assert info(built, "WHEEL") == info(old, "WHEEL")
    assert [n for n in body if n in before] == list(before), "upstream's order"


def test_bytes_are_those_of_apply(target: Target, pair: Pair, pins: Manifest) -> None:
    _, built = pair
    recorded, _ = lock.load(pins, target, pins.pin(target))
    for path, entry in recorded.files.items():
        assert sha256(built.read(target.installed_path(path) or "") or b"") == entry.post["wheel"], path
    for path, digest in recorded.overlay.items():
        place = target.installed_path(path)
        assert place is None or sha256(built.read(place) or b"") == digest, path


def test_metadata_lines_are_kept_but_for_the_overrides(target: Target, pair: Pair, pins: Manifest) -> None:
    old, built = (info(w, "METADATA").decode().split("\n") for w in pair)
    swaps = metadata.overrides(pins, target)
    removed = [line for line in old if line not in built]
    added = [line for line in built if line not in old]
    assert removed == [f"Version: {target.pin}", *(line for line in removed if line.startswith("Requires-Dist: "))]
    assert set(removed[1:]) == {f"Requires-Dist: {s.upstream}" for s in swaps if s.upstream}
    allowed = {f"Requires-Dist: {s.replace}" for s in swaps if s.replace} | {
        f"Version: {pins.local_version(target.pin)}"
    }
    assert {line for line in added if not line.startswith(("License-File: ", "Provides-Extra: "))} == allowed


def test_requirements_are_valid_and_extras_are_offered(pair: Pair) -> None:
    requirements = pytest.importorskip("packaging.requirements")
    data = info(pair[1], "METADATA")
    offered = set(metadata.header(data, "Provides-Extra"))
    for line in metadata.header(data, "Requires-Dist"):
        parsed = requirements.Requirement(line)
        wanted = {part.split('"')[1] for part in str(parsed.marker or "").split("extra == ")[1:]}
        assert wanted <= offered, line


def test_bridge_asks_for_the_patched_core(patched_wheels: Mapping[str, Path], pins: Manifest) -> None:
    data = info(archive.read(patched_wheels["megatron-bridge"]), "METADATA")
    core = f"megatron-core[dev,mlm]=={pins.local_version(pins.target('megatron').pin)}"
    assert core in metadata.header(data, "Requires-Dist")


def test_licences(target: Target, pair: Pair, pins: Manifest) -> None:
    _, built = pair
    named = metadata.header(info(built, "METADATA"), "License-File")
    inside = [n.removeprefix(f"{built.dist_info}/licenses/") for n in built.members if "dist-info/licenses/" in n]
    assert sorted(named) == sorted(n for n in inside if n and not n.endswith("/"))
    assert b"Apache License" in info(built, "licenses/fp8-colocate/Apache-2.0.txt")
    assert "LICENSE" in named, "upstream's own, or the one that upstream's wheel leaves out"
    notice = info(built, "licenses/fp8-colocate/NOTICE").decode()
    recorded, patches = lock.load(pins, target, pins.pin(target))
    for path in (*recorded.files, *recorded.overlay, *target.version_files):
        place = target.installed_path(path)
        assert place is None or f"  {place}\n" in notice
    assert all(p.subject in notice for p in patches)


def test_core_gets_the_licence_that_its_wheel_lacks(patched_wheels: Mapping[str, Path], core: Path) -> None:
    old = archive.read(core)
    assert not [n for n in old.members if "LICENSE" in n], "upstream ships one now: drop ours"
    text = info(archive.read(patched_wheels["megatron"]), "licenses/LICENSE").decode()
    assert "Copyright (c) 2023, NVIDIA CORPORATION. All rights reserved." in text
    assert "Redistributions in binary form must reproduce the above copyright notice" in text
    assert "<year>" not in text


def test_provenance_tells_all(target: Target, pair: Pair, pins: Manifest) -> None:
    _, built = pair
    recorded, patches = lock.load(pins, target, pins.pin(target))
    body = json.loads(info(built, "fp8-colocate/provenance.json"))
    assert (body["dist"], body["version"], body["wheel_version"]) == (target.dist, target.pin, built.version)
    assert body["digest"] == recorded.digest == lock.digest_of(body["lock"])
    assert body["upstream"]["sha256"] == pins.pin(target).wheel.sha256
    assert [(p["slug"], p["sha256"], p["status"]) for p in body["patches"]] == [
        (p.slug, p.sha256, p.trailer("Upstream-Status")) for p in patches
    ]
    assert [(o["upstream"], o["reason"]) for o in body["overrides"]] == [
        (r.upstream, r.reason) for r in target.requires
    ]
    for entry in [*body["files"].values(), *body["version_files"].values()]:
        assert sha256(built.read(entry["at"]) or b"") == entry["post"] != entry["pre"]
    listed = {*body["files"], *body["overlay"], *body["not_installed"]}
    assert listed == {*recorded.files, *recorded.overlay}


def test_sbom_names_ancestor_and_patches(target: Target, pair: Pair, pins: Manifest) -> None:
    _, patches = lock.load(pins, target, pins.pin(target))
    body = json.loads(info(pair[1], "sboms/fp8-colocate.cdx.json"))
    assert (body["bomFormat"], body["specVersion"]) == ("CycloneDX", "1.6")
    component = body["metadata"]["component"]
    assert component["purl"] == f"pkg:pypi/{target.dist}@{target.pin}%2Bfc8.{pins.revision}"
    assert component["pedigree"]["ancestors"][0]["hashes"][0]["content"] == pins.pin(target).wheel.sha256
    texts = [p["diff"]["text"]["content"].encode() for p in component["pedigree"]["patches"]]
    assert [sha256(text) for text in texts] == [p.sha256 for p in patches]


def test_two_builds_are_the_same_bytes(
    run: Runner, pins: Manifest, dists: Path, patched_wheels: Mapping[str, Path], tmp_path: Path
) -> None:
    """Another directory, umask, time zone and hash seed; SOURCE_DATE_EPOCH is the one thing that may show."""
    env = {"PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "SOURCE_DATE_EPOCH": ""}
    for name in ("megatron", "megatron-bridge"):
        flags = ("--from", dists / pins.pin(pins.target(name)).wheel.file, "--out", tmp_path / "again")
        done = run("wheel", name, *flags, env=env, umask=0o077)
        kit.accepted(done)
        again = tmp_path / "again" / patched_wheels[name].name
        assert sha256(again.read_bytes()) == sha256(patched_wheels[name].read_bytes())


def test_source_date_epoch(patched_wheels: Mapping[str, Path], tmp_path: Path, bridge: Path, run: Runner) -> None:
    flags = ("wheel", "megatron-bridge", "-q", "--from", bridge, "--out", tmp_path)
    kit.accepted(run(*flags, env={"SOURCE_DATE_EPOCH": "1767225600"}))
    built = tmp_path / patched_wheels["megatron-bridge"].name
    with zipfile.ZipFile(built) as opened:
        assert {i.date_time for i in opened.infolist()} == {(2026, 1, 1, 0, 0, 0)}
    kit.refused(run(*flags, env={"SOURCE_DATE_EPOCH": "yesterday"}), 2, "SOURCE_DATE_EPOCH", "yesterday")


# Installing


def python(site: Path, code: str, cwd: Path | None = None, **env: str) -> str:
    """Run `code` with `site` alone on the path, beside the standard library."""
    command = [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(site)!r}); {code}"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "GIT_", "NO_VCS"))} | env
    done = subprocess.run(command, cwd=cwd or site, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_three_wheels_share_one_site(installed: Path, pins: Manifest) -> None:
    assert kit.record_faults(installed) == []
    assert not (installed / "megatron" / "__init__.py").exists()
    code = "import importlib.metadata as m; print(*map(m.version, ('sglang', 'megatron-core', 'megatron-bridge')))"
    assert python(installed, code).split() == [pins.local_version(t.pin) for t in pins.targets.values()]
    record = "m.distribution('megatron-core').read_text('fp8-colocate/provenance.json')"
    code = f"import importlib.metadata as m; print({record})"
    assert json.loads(python(installed, code))["dist"] == "megatron-core"


@pytest.mark.parametrize("name", ["megatron", "megatron-bridge"])
def test_literal_version_inside_an_unrelated_repository(
    name: str, dists: Path, installed: Path, tmp_path: Path, pins: Manifest
) -> None:
    """The official file answers with the hash of whatever repository is around it; ours does not."""
    target = pins.target(name)
    path = target.installed_path(target.version_files[0]) or ""
    kit.git(tmp_path, "init", "-q")
    (tmp_path / "mine.txt").write_text("unrelated\n")
    head = kit.commit(tmp_path, "unrelated")[:7]
    place = tmp_path / "venv" / path
    place.parent.mkdir(parents=True)
    code = f"import runpy; print(runpy.run_path({str(place)!r})['__version__'])"
    place.write_bytes(archive.read(dists / pins.pin(target).wheel.file).members[path].data)
    assert python(tmp_path, code, cwd=tmp_path) == f"{target.pin}+{head}", "upstream mended it: drop the literal"
    shutil.copy(installed / path, place)
    assert python(tmp_path, code, cwd=tmp_path) == pins.local_version(target.pin)


def test_uninstall_leaves_nothing(patched_wheels: Mapping[str, Path], tmp_path: Path) -> None:
    """In a real venv: pip removes by RECORD, so a file that RECORD misses stays behind."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    site = next(venv.glob("lib/python*/site-packages"))
    before = kit.snapshot(venv)
    flags = ["--python", venv / "bin" / "python"]
    bridge = patched_wheels["megatron-bridge"]
    kit.pip(*flags, "install", "--no-deps", "--no-index", "--ignore-requires-python", bridge)
    assert (site / "megatron" / "bridge" / "fp8_colocate.py").is_file()
    kit.pip(*flags, "uninstall", "-y", "megatron-bridge")
    left = {path: entry for path, entry in kit.snapshot(venv).items() if entry[0] != "directory"}
    assert kit.difference({p: e for p, e in before.items() if e[0] != "directory"}, left) == []


# Refusals: exit code, message, and nothing published


def damaged(source: Path, directory: Path, name: str, data: bytes) -> Path:
    """A copy with one member replaced and RECORD left as it was."""
    directory.mkdir()
    path = directory / source.name
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            new.writestr(member, data if member.filename == name else old.read(member))
    return path


def refuse(run: Runner, path: Path, out: Path) -> str:
    done = run("wheel", "megatron-bridge", "--from", path, "--out", out)
    message = kit.refused(done, 7, "this is not the pinned wheel", path)
    assert list(out.glob("*")) == [] if out.exists() else True
    return message


def test_truncated_wheel(tmp_path: Path, bridge: Path, run: Runner) -> None:
    path = tmp_path / bridge.name
    path.write_bytes(bridge.read_bytes()[:-1000])
    assert "the wheel is damaged" in refuse(run, path, tmp_path / "out")


def test_flipped_byte(tmp_path: Path, bridge: Path, run: Runner) -> None:
    data = bytearray(bridge.read_bytes())
    data[len(data) // 2] ^= 0x01
    path = tmp_path / bridge.name
    path.write_bytes(data)
    assert "the wheel is damaged" in refuse(run, path, tmp_path / "out")


def test_record_lies(tmp_path: Path, bridge: Path, run: Runner) -> None:
    """A sound zip with a changed member: the message names the member."""
    path = damaged(bridge, tmp_path / "in", "megatron/bridge/__init__.py", b"import os\n")
    message = refuse(run, path, tmp_path / "out")
    assert "disagree in 2 places" in message
    assert "megatron/bridge/__init__.py: RECORD says sha256=" in message


def test_wrong_version_wrong_project_and_patched_again(
    patched_wheels: Mapping[str, Path], tmp_path: Path, core: Path, run: Runner
) -> None:
    assert "a wheel of megatron_core" in refuse(run, core, tmp_path / "out")
    assert "it is patched already" in refuse(run, patched_wheels["megatron-bridge"], tmp_path / "out")


def test_not_there_and_usage(tmp_path: Path, run: Runner) -> None:
    kit.refused(run("wheel", "sglang", "--from", tmp_path / "no.whl", "--out", tmp_path), 2, "no such wheel", "no.whl")
    kit.refused(run("wheel", "vllm"), 2, "no target 'vllm'", "sglang")
    kit.refused(run("wheel", "--from", "x.whl"), 2, "--from is for one target")
    kit.refused(run("wheel", "megatron", "--build"), 2, "--build needs a source tree", "--source TREE")
    kit.refused(run("wheel", "megatron", "--source", "x"), 2, "go with --build")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small tmpfs cannot be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_full_disk(small_disk: Path, bridge: Path, run: Runner) -> None:
    """A directory of 1 MiB: no half wheel stays behind."""
    done = run("wheel", "megatron-bridge", "-q", "--from", bridge, "--out", small_disk)
    kit.refused(done, 1, "the wheels cannot be written", "the disk is full", small_disk)
    assert list(small_disk.iterdir()) == []


def test_read_only_directory(tmp_path: Path, bridge: Path, run: Runner) -> None:
    if os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    tmp_path.chmod(0o555)
    kit.refused(run("wheel", "megatron-bridge", "--from", bridge, "--out", tmp_path / "x"), 1, "no permission")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (("megatron/bridge/__init__.py", "md5=abc", "1"), "no sha256 or stronger"),
        (("megatron/bridge/ghost.py", "sha256=abc", "1"), "in RECORD, not in the archive"),
        (None, "in the archive, not in RECORD"),
    ],
)
def test_record_problems(row: tuple[str, str, str] | None, problem: str, bridge: Path) -> None:
    sound = archive.read(bridge)
    assert archive.record_problems(sound) == []
    name = f"{sound.dist_info}/RECORD"
    text = sound.members[name].data.decode()
    lines = [line for line in text.splitlines() if not line.startswith("megatron/bridge/__init__.py,")]
    if row is not None:
        lines.append(",".join(row))
    broken = sound.with_files({name: ("\n".join(lines) + "\n").encode()})
    assert any(problem in found for found in archive.record_problems(broken))


@pytest.mark.parametrize("name", ["../outside.py", "/etc/passwd", "a\\b.py"])
def test_unsafe_member_names(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as new:
        new.writestr("x-1.dist-info/RECORD", "")
        new.writestr(name, b"")
    with pytest.raises(WheelInvalid) as caught:
        archive.read(path)
    assert any("unsafe path" in line for line in caught.value.details)


# The policy


def test_override_must_be_upstreams_words(tmp_path: Path, pins: Manifest, bridge: Path) -> None:
    target = pins.target("megatron-bridge")
    wrong = dataclasses.replace(target, requires=(Requirement("wandb==0.28.0", "wandb", "because"),))
    with pytest.raises(ManifestInvalid) as caught:
        wheel.repack_all(pins, [wrong], {}, bridge, tmp_path / "out", QUIET)
    assert "wandb==0.29.0" in str(caught.value), "the line that upstream has"
    assert list((tmp_path / "out").iterdir()) == []


def test_override_adds_drops_and_offers_an_extra() -> None:
    before = (
        b"Metadata-Version: 2.4\nName: x\nVersion: 1\n"
        b"Requires-Dist: a==1\nRequires-Dist: b\nProvides-Extra: old\n\nBody\n"
    )
    swaps = [
        Requirement("a==1", 'a==2; extra == "new"', "r"),
        Requirement("b", "", "r"),
        Requirement("", 'c; extra == "old"', "r"),
    ]
    after = metadata.edit(before, "1+fc8.1", swaps, ["LICENSE"], "x").decode()
    assert after == (
        "Metadata-Version: 2.4\nName: x\nVersion: 1+fc8.1\nLicense-File: LICENSE\n"
        'Requires-Dist: a==2; extra == "new"\nRequires-Dist: c; extra == "old"\nProvides-Extra: new\n'
        "Provides-Extra: old\n\nBody\n"
    )


def test_native_change_is_refused(pins: Manifest) -> None:
    target = dataclasses.replace(pins.target("megatron-bridge"), native=("src/megatron/bridge/",))
    recorded, _ = lock.load(pins, target, pins.pin(target))
    with pytest.raises(UsageError) as caught:
        wheel.refuse_native(target, recorded)
    assert "--build --source TREE" in str(caught.value)
    assert next(iter(recorded.files)) in str(caught.value)


def test_overlay_may_not_exist_upstream(tmp_path: Path, pins: Manifest, bridge: Path, project: Path) -> None:
    target = pins.target("megatron-bridge")
    shared = {"src/megatron/bridge/__init__.py": "fp8_colocate.py"}
    recorded, _ = lock.load(pins, target, pins.pin(target))
    guard = sha256((project / "overlay" / "shared" / "fp8_colocate.py").read_bytes())
    clash = dataclasses.replace(target, shared=shared)
    bad_lock = dataclasses.replace(recorded, overlay={"src/megatron/bridge/__init__.py": guard})
    source = archive.read(bridge)
    with pytest.raises(SeriesInvalid) as caught:
        wheel.finish(pins, clash, pins.pin(target), bad_lock, [], source, {}, {}, "wheel", tmp_path)
    assert "megatron/bridge/__init__.py" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (b"MAJOR = 1\n", "does not assign"),
        (b"__version__ = '1'\n__version__ += 'x'\n", "does not assign"),
        (b"__version__ = '1'\n__version__ = '2'\n", "does not assign"),
        (b"__version__ = (\n", "not Python"),
    ],
)
def test_version_file_of_another_shape(text: bytes, cause: str) -> None:
    with pytest.raises(WheelInvalid, match=cause):
        metadata.set_version(text, "1+fc8.1", "v.py")


def test_version_tuple() -> None:
    assert metadata.version_tuple("0.5.17+fc8.1") == (0, 5, 17, "fc8.1")
    assert metadata.version_tuple("0.5.15.post1") == (0, 5, 15, "post1")


# --build


def test_build_needs_the_build_package(tmp_path: Path, core: Path, run: Runner) -> None:
    tree = tmp_path / "tree"
    kit.unpacked_wheel(tree, core)
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    flags = ("--build", "--source", tree, "--out", tmp_path / "out", "--python", venv / "bin" / "python")
    message = kit.refused(
        run("wheel", "megatron", *flags), 1, "--build needs the `build` package", "pip install build"
    )
    assert "No module named" in message
    assert not (tmp_path / "out").exists()
