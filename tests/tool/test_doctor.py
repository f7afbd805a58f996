# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""`doctor` on real installs: what it finds, what it calls a problem, and that it imports nothing."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from patchset import doctor
from patchset.manifest import Manifest
from tests.tool import kit

Runner = Callable[..., dict]


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A venv with nothing in it."""
    venv = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    return venv


@pytest.fixture
def ask(project: Path, bare: Path) -> Runner:
    """doctor's JSON for the bare venv with `path` on PYTHONPATH; `code` holds the exit code."""
    return functools.partial(_ask, project, bare)


def _ask(project: Path, bare: Path, *path: Path, env: Mapping[str, str] | None = None) -> dict:
    clean = {"PYTHONPATH": os.pathsep.join(map(str, path)), "NO_VCS_VERSION": "", **(env or {})}
    done = kit.run_tool(project, "doctor", "--json", "--python", bare, env={k: v for k, v in clean.items() if v})
    assert "Traceback" not in done.stderr, done.stderr
    answer = json.loads(done.stdout)
    assert (done.returncode == 3) == any(f["level"] == "problem" for f in answer["findings"])
    return answer


def problems(answer: dict, subject: str = "") -> str:
    return "\n".join(
        f["what"] for f in answer["findings"] if f["level"] == "problem" and f["subject"].startswith(subject)
    )


def facts(answer: dict, target: str) -> dict:
    return next(t for t in answer["targets"] if t["target"] == target)


@pytest.fixture
def mine(installed: Path, tmp_path: Path) -> Path:
    """A copy of the site with all three patched wheels; hard links, so cheap: replace files, never edit them."""
    return Path(shutil.copytree(installed, tmp_path / "site", copy_function=os.link))


def test_patched_wheels_are_healthy(ask: Runner, installed: Path, pins: Manifest) -> None:
    answer = ask(installed)
    assert problems(answer) == ""
    assert answer["exit_code"] == 0
    for target in pins.targets.values():
        found = facts(answer, target.id)
        assert found["state"] == "patched"
        assert found["runtime_version"] == found["metadata_version"] == pins.local_version(target.pin)
        assert found["root"] == str(installed)
    assert [p["path"] for p in answer["namespaces"]["megatron"]] == [str(installed / "megatron")]


def test_nothing_installed(ask: Runner) -> None:
    answer = ask()
    assert problems(answer).count("is not importable") == 3
    assert all(f["next"] for f in answer["findings"])


def test_official_wheels_are_pristine(ask: Runner, official_site: Path) -> None:
    answer = ask(official_site)
    for target in ("sglang", "megatron", "megatron-bridge"):
        assert facts(answer, target)["state"] == "pristine"
        assert "the patch set is not on it" in problems(answer, target)


def test_applied_tree_is_healthy(ask: Runner, project: Path, linked: Path, pins: Manifest) -> None:
    """Links: pristine files are shared with another tree, patched ones are not any more."""
    before = ask(linked)
    assert facts(before, "megatron-bridge")["links"], "the touched files are hard links"
    assert any(f["level"] == "note" and "hard links" in f["what"] for f in before["findings"])
    kit.accepted(kit.run_tool(project, *(f"--{t}={linked}" for t in pins.targets)))
    answer = ask(linked)
    assert problems(answer) == ""
    for target in pins.targets:
        assert facts(answer, target)["state"] == "patched"
        assert facts(answer, target)["links"] == {}


def test_drift(ask: Runner, mine: Path) -> None:
    path = mine / "megatron" / "bridge" / "fp8_colocate.py"
    path.unlink()
    path.write_text("GUARD = None\n")
    said = problems(ask(mine), "megatron-bridge")
    assert "drifted: 1 files are nobody's" in said
    assert "1 files differ from the wheel's record, as megatron/bridge/fp8_colocate.py" in said


def test_version_file_against_the_record(ask: Runner, mine: Path) -> None:
    path = mine / "megatron" / "core" / "package_info.py"
    text = path.read_text()
    path.unlink()
    path.write_text(text.replace("0.19.2+fc8.1", "0.19.3"))
    said = problems(ask(mine), "megatron")
    assert "__version__ is 0.19.3, METADATA says 0.19.2+fc8.1" in said
    assert "differ from the wheel's record, as megatron/core/package_info.py" in said


def test_namespace_that_hides_its_parts(ask: Runner, mine: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "megatron").mkdir(parents=True)
    (other / "megatron" / "__init__.py").write_text("raise SystemExit('imported')\n")
    answer = ask(other, mine)
    assert "makes megatron one package and hides 1 other parts" in problems(answer, "megatron")
    assert "megatron.bridge is not importable" in problems(answer)
    (other / "megatron" / "__init__.py").unlink()
    (other / "megatron" / "rl").mkdir()
    answer = ask(other, mine)
    assert problems(answer) == ""
    assert len(answer["namespaces"]["megatron"]) == 2


def test_two_dist_infos(ask: Runner, mine: Path) -> None:
    old = mine / "megatron_bridge-0.6.1.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-bridge\nVersion: 0.6.1\n")
    said = problems(ask(mine), "megatron-bridge")
    assert "2 dist-info directories" in said


def test_unrelated_repository(ask: Runner, official_site: Path, tmp_path: Path) -> None:
    """An official install below somebody's repository: upstream's version gets its hash."""
    kit.git(tmp_path, "init", "-q")
    (tmp_path / "mine.txt").write_text("unrelated\n")
    head = kit.commit(tmp_path, "unrelated")[:7]
    site = Path(shutil.copytree(official_site, tmp_path / "venv", copy_function=os.link))
    said = problems(ask(site), "megatron")
    assert f"__version__ is 0.19.2+{head}: the hash is that of an unrelated repository" in said
    assert "unrelated repository" not in problems(ask(site, env={"NO_VCS_VERSION": "1"}))


def test_version_of_a_checkout_without_metadata(ask: Runner, official_site: Path, tmp_path: Path) -> None:
    root = tmp_path / "python"
    shutil.copytree(official_site / "sglang", root / "sglang", copy_function=os.link)
    (root / "sglang" / "_version.py").unlink()
    assert "__version__ will be 0.0.0.dev0" in problems(ask(root), "sglang")


def test_wheel_hidden_by_a_checkout(ask: Runner, installed: Path, official_site: Path, tmp_path: Path) -> None:
    tree = tmp_path / "checkout" / "src"
    shutil.copytree(official_site / "megatron" / "bridge", tree / "megatron" / "bridge", copy_function=os.link)
    said = problems(ask(tree, installed), "megatron-bridge")
    assert f"is hidden by {tmp_path / 'checkout'}" in said
    assert "editable or PYTHONPATH" in said


def test_editable_install(ask: Runner, official_site: Path, tmp_path: Path) -> None:
    """An editable install as pip makes it: a .pth file and a dist-info that points to the checkout."""
    tree, site = tmp_path / "checkout", tmp_path / "site"
    shutil.copytree(official_site / "megatron" / "bridge", tree / "src" / "megatron" / "bridge", copy_function=os.link)
    dist_info = next(official_site.glob("megatron_bridge-*.dist-info"))
    shutil.copytree(dist_info, site / dist_info.name)
    direct = {"url": f"file://{tree}", "dir_info": {"editable": True}}
    (site / dist_info.name / "direct_url.json").write_text(json.dumps(direct))
    found = facts(ask(tree / "src", site), "megatron-bridge")
    assert found["editable"] == f"file://{tree}"
    assert found["root"] == str(tree)


def dist(site: Path, name: str, version: str, tag: str = "py3-none-any") -> None:
    """Metadata of some distribution."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "WHEEL").write_text(f"Wheel-Version: 1.0\nTag: {tag}\n")


@pytest.mark.parametrize(
    ("name", "version", "subject", "says"),
    [
        ("torch", "2.12.0", "sglang", "needs torch==2.11.0, installed is 2.12.0"),
        ("transformers", "5.13.0", "sglang", "needs transformers==5.12.1, installed is 5.13.0"),
        ("transformers", "5.13.0", "megatron-bridge", "needs transformers<=5.12.1,>=5.8, installed is 5.13.0"),
        ("flashinfer-python", "0.6.8.post1", "megatron-bridge", "needs flashinfer-python==0.6.15.post1"),
        ("transformer-engine", "2.16.0", "transformer-engine", "the patch set is made for 2.17.1"),
    ],
)
def test_bad_combinations(
    name: str, version: str, subject: str, says: str, ask: Runner, mine: Path, tmp_path: Path
) -> None:
    pytest.importorskip("packaging")
    (tmp_path / "more").mkdir()
    dist(tmp_path / "more", name, version)
    answer = ask(mine, tmp_path / "more")
    assert says in problems(answer, subject)
    assert all(f["next"] for f in answer["findings"])


def test_good_combination(ask: Runner, mine: Path, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    for name, version in (("torch", "2.11.0+cu130"), ("transformers", "5.12.1"), ("transformer_engine", "2.17.1")):
        dist(tmp_path / "more", name, version)
    assert problems(ask(mine, tmp_path / "more")) == ""


def test_overrides_count_for_official_wheels(
    ask: Runner, project: Path, linked: Path, pins: Manifest, tmp_path: Path
) -> None:
    """Official metadata under a patched tree asks for what the patch set makes of it."""
    kit.accepted(kit.run_tool(project, *(f"--{t}={linked}" for t in pins.targets)))
    (tmp_path / "more").mkdir()
    dist(tmp_path / "more", "flashinfer-python", "0.6.15.post1")
    assert problems(ask(linked, tmp_path / "more")) == ""


def test_too_new_for_this_libc(ask: Runner, mine: Path, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    dist(tmp_path / "more", "nvidia-resiliency-ext", "0.6.0", "cp312-cp312-manylinux_2_99_x86_64")
    dist(tmp_path / "more", "fine", "1", "cp312-cp312-manylinux_2_17_x86_64")
    said = problems(ask(mine, tmp_path / "more"))
    assert "0.6.0 needs glibc 2.99, this machine has" in said
    assert "fine" not in said


def test_nothing_heavy_is_imported(ask: Runner, mine: Path) -> None:
    """Each package would end the interpreter if it were imported."""
    for package in ("sglang", "megatron/core", "megatron/bridge"):
        init = mine / package / "__init__.py"
        init.unlink()
        init.write_text("raise SystemExit('imported')\n")
    assert facts(ask(mine), "sglang")["runtime_version"]


def test_text_and_bad_python(project: Path, bare: Path, tmp_path: Path) -> None:
    done = kit.run_tool(project, "doctor", "--python", bare / "bin" / "python")
    assert done.returncode == 3
    assert "problem: sglang: sglang is not importable" in done.stdout
    assert "  next: " in done.stdout
    kit.refused(kit.run_tool(project, "doctor", "--python", tmp_path / "no"), 2, "no such Python")
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho oops >&2\nexit 1\n")
    broken.chmod(0o755)
    kit.refused(kit.run_tool(project, "doctor", "--python", broken), 1, "this Python does not answer", "oops")


def test_without_packaging(monkeypatch: pytest.MonkeyPatch, pins: Manifest) -> None:
    """In a bare container the rest still works, and it says what was not looked at."""
    monkeypatch.setattr(doctor, "_packaging", lambda: None)
    probe = {"distributions": [], "markers": {}}
    (finding,) = doctor._requirements(pins, probe)
    assert (finding.level, finding.subject) == ("note", "requirements")
    assert "neither packaging nor pip" in finding.what
