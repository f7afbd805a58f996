# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Every kind of tree: found by looking, patched, left alone by a rerun, and given back to the byte."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from patchset import git as tool_git
from patchset import manifest
from patchset.errors import UsageError
from patchset.target import editable_origin, locate
from patchset.types import Kind
from tests.tool import kit
from tests.tool.kit import Home, accepted, refused


def cycle(home: Home, target: str, named: Path, root: Path, kind: Kind, watched: Path | None = None) -> None:
    """apply, status, rerun, --check, --revert on `named`, whose files lie below `root`; `watched` must come back."""
    watched = watched or root
    flag = f"--{target}"
    before = kit.snapshot(watched)
    accepted(home.run(flag, named, "--check"), kind.value, "would be patched")
    assert kit.snapshot(watched) == before
    accepted(home.run(flag, named), kind.value, str(root), ": patched: 3 patches")
    check_patched(home, target, root, kind)
    patched, written = kit.snapshot(watched), kit.stamps(watched)
    accepted(home.run(flag, named), "already patched")
    accepted(home.run(flag, named, "--check"), "already patched")
    accepted(home.run("status", flag, named), f"{kind.value} {root}: patched")
    assert kit.stamps(watched) == written, "a rerun wrote something"
    accepted(home.run(flag, named, "--revert", "--check"), "would be pristine")
    assert kit.snapshot(watched) == patched
    accepted(home.run(flag, named, "--revert"), ": pristine: 3 patches")
    assert kit.difference(before, kit.snapshot(watched)) == []
    written = kit.stamps(watched)
    accepted(home.run(flag, named, "--revert"), "already pristine")
    refused(home.run("status", flag, named), 3, "pristine", "not patched")
    assert kit.stamps(watched) == written


def check_patched(home: Home, target: str, root: Path, kind: Kind) -> None:
    prefix, installed = kit.TARGETS[target][2:4]
    below = root / (installed if kind in (Kind.SITE, Kind.WHEEL, Kind.PACKAGE) else prefix)
    loader = (below / "loader.py").read_bytes()
    assert b"loader_5b = 2\n" in loader and b"loader_30" not in loader and loader.endswith(kit.NOTICE)
    assert (below / "sub" / "deep.py").read_bytes().startswith(b"deep_0 = 'first'\n")
    assert (below / "layerwise" / "inner" / "session.py").is_file() and (below / "fp8_colocate.py").is_file()
    assert (root / "test" / "unit" / "test_layerwise.py").exists() == (kind is Kind.CHECKOUT)
    if kind in (Kind.SITE, Kind.WHEEL):
        assert kit.record_faults(root) == []


@pytest.mark.parametrize("target", kit.TARGETS)
def test_checkout(home: Home, tmp_path: Path, target: str) -> None:
    root = kit.checkout(tmp_path / "clone", home.upstream[target])
    cycle(home, target, root, root, Kind.CHECKOUT)
    assert kit.git(root, "status", "--porcelain") == ""


def test_checkout_that_is_dirty_elsewhere(home: Home, tree: Path) -> None:
    (tree / "pyproject.toml").write_text("edited = true\n")
    (tree / "python/alpha/data.txt").write_text("staged")
    kit.git(tree, "add", "python/alpha/data.txt")
    (tree / "untracked.txt").write_text("mine")
    before = kit.git(tree, "status", "--porcelain")
    cycle(home, "alpha", tree, tree, Kind.CHECKOUT)
    assert kit.git(tree, "status", "--porcelain") == before


def test_checkout_keeps_head_index_and_hooks(home: Home, tree: Path) -> None:
    """The user's repository is never committed to, reset or staged in: .git is the same but for our own directory."""
    hook = tree / ".git" / "hooks" / "pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\ntouch /nonexistent/ran; exit 1\n")
    hook.chmod(0o755)
    before = kit.snapshot(tree / ".git")
    accepted(home.run("--alpha", tree))
    assert kit.difference(before, kit.snapshot(tree / ".git", skip=["fp8-colocate"])) == []
    assert sorted(p.name for p in (tree / ".git" / "fp8-colocate" / "alpha").iterdir()) == ["pristine", "state.json"]
    changed = {line[3:] for line in kit.git(tree, "status", "--porcelain", "-uall").splitlines()}
    assert {p for p in changed if "layer" not in p and "fp8" not in p} == {
        "python/alpha/engine.py", "python/alpha/loader.py", "python/alpha/sub/deep.py"
    }  # fmt: skip


def test_shallow_clone(home: Home, tree: Path, tmp_path: Path) -> None:
    (tree / "README.md").write_text("# next\n")
    kit.commit(tree, "second")
    kit.git(tmp_path, "clone", "-q", "--depth=1", f"file://{tree}", "shallow")
    cycle(home, "alpha", tmp_path / "shallow", tmp_path / "shallow", Kind.CHECKOUT)


def test_worktree_has_a_state_of_its_own(home: Home, tree: Path, tmp_path: Path) -> None:
    kit.git(tree, "worktree", "add", "-q", tmp_path / "work", "HEAD")
    main = kit.snapshot(tree, skip=[".git"])
    cycle(home, "alpha", tmp_path / "work", tmp_path / "work", Kind.CHECKOUT)
    accepted(home.run("--alpha", tmp_path / "work"))
    assert kit.snapshot(tree, skip=[".git"]) == main
    assert (tree / ".git" / "worktrees" / "work" / "fp8-colocate" / "alpha" / "state.json").is_file()
    refused(home.run("status", "--alpha", tree), 3, "pristine")


def test_submodule(home: Home, tree: Path, tmp_path: Path) -> None:
    outer = kit.checkout(tmp_path / "outer", {"a.txt": b"a\n"})
    kit.git(outer, "submodule", "--quiet", "add", tree, "third_party/alpha")
    kit.commit(outer, "add")
    cycle(
        home, "alpha", outer / "third_party" / "alpha", outer / "third_party" / "alpha", Kind.CHECKOUT, watched=outer
    )


def test_git_directory_elsewhere(home: Home, tree: Path, tmp_path: Path) -> None:
    """`git init --separate-git-dir`, and a .git that is a symbolic link."""
    shutil.move(tree / ".git", tmp_path / "elsewhere")
    (tree / ".git").symlink_to(tmp_path / "elsewhere")
    cycle(home, "alpha", tree, tree, Kind.CHECKOUT, watched=tmp_path)
    (tree / ".git").unlink()
    (tree / ".git").write_text(f"gitdir: {tmp_path / 'elsewhere'}\n")
    cycle(home, "alpha", tree, tree, Kind.CHECKOUT, watched=tmp_path)


@pytest.mark.parametrize("target", kit.TARGETS)
def test_source_tree(home: Home, tmp_path: Path, target: str) -> None:
    root = kit.source_tree(tmp_path / "sdist", home.upstream[target])
    cycle(home, target, root, root, Kind.SOURCE)


def test_sdist_that_is_cut_at_the_package(home: Home, tmp_path: Path) -> None:
    """An sdist built from the python/ directory has the installed layout and a PKG-INFO."""
    kit.write_files(tmp_path / "alpha-1.0", {"PKG-INFO": b"Name: alpha-engine\nVersion: 1.0\n"})
    kit.write_files(
        tmp_path / "alpha-1.0",
        {p.removeprefix("python/"): d for p, d in home.upstream["alpha"].items() if p.startswith("python/")},
    )
    cycle(home, "alpha", tmp_path / "alpha-1.0", tmp_path / "alpha-1.0", Kind.PACKAGE)


@pytest.mark.parametrize("target", kit.TARGETS)
def test_unpacked_wheel(home: Home, tmp_path: Path, target: str) -> None:
    root = kit.unpacked_wheel(tmp_path / "unpacked", home.wheels[target])
    cycle(home, target, root, root, Kind.WHEEL)


@pytest.mark.parametrize("target", kit.TARGETS)
def test_site_packages_by_pip(home: Home, site: Path, target: str) -> None:
    cycle(home, target, site, site, Kind.SITE)


def test_one_directory_with_both_parts_of_a_namespace(home: Home, site: Path) -> None:
    """megatron.core and megatron.bridge lie in one directory: each has its own state and disturbs no other."""
    before = kit.snapshot(site)
    accepted(home.run("--beta", site, "--gamma", site))
    assert kit.record_faults(site) == []
    both = kit.snapshot(site)
    accepted(home.run("--beta", site, "--revert"), "pristine")
    accepted(home.run("status", "--gamma", site), "patched")
    refused(home.run("status", "--beta", site), 3, "pristine")
    accepted(home.run("--beta", site))
    assert kit.difference(both, kit.snapshot(site)) == []
    accepted(home.run("--gamma", site, "--beta", site, "--revert"))
    assert kit.difference(before, kit.snapshot(site)) == []


def test_any_subset_of_the_flags(home: Home, site: Path, tree: Path) -> None:
    before = kit.snapshot(site)
    done = home.run("--alpha", tree, "--gamma", site, "--json")
    body = json.loads(accepted(done))
    assert [(t["target"], t["kind"], t["state"]) for t in body["targets"]] == [
        ("alpha", "git checkout", "patched"), ("gamma", "site-packages", "patched")
    ]  # fmt: skip
    changed = [line.split(":")[0] for line in kit.difference(before, kit.snapshot(site))]
    assert changed and all("beta/core" not in name and "alpha" not in name for name in changed)


@pytest.mark.parametrize("below", ["python/alpha", "python"])
def test_package_directory_in_a_checkout_means_the_checkout(home: Home, tree: Path, below: str) -> None:
    cycle(home, "alpha", tree / below, tree, Kind.CHECKOUT)


@pytest.mark.parametrize("below", ["beta/core", "beta"])
def test_package_directory_in_a_site_packages(home: Home, site: Path, below: str) -> None:
    cycle(home, "beta", site / below, site, Kind.SITE)


def test_package_directory_without_any_dist_info(home: Home, tmp_path: Path) -> None:
    root = kit.unpacked_wheel(tmp_path / "copied", home.wheels["beta"])
    shutil.rmtree(next(root.glob("*.dist-info")))
    cycle(home, "beta", root / "beta" / "core", root, Kind.PACKAGE)


def test_site_packages_named_python(home: Home, tmp_path: Path) -> None:
    """`pip install --target python`: the directory's name must not make it a checkout's python/."""
    kit.pip_install(tmp_path / "python", home.wheels["alpha"])
    cycle(home, "alpha", tmp_path / "python", tmp_path / "python", Kind.SITE)


def test_relative_path_and_link_to_the_tree(home: Home, tree: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tree)
    accepted(home.run("--alpha", "link", cwd=tmp_path), str(tree))
    accepted(home.run("--alpha", ".", "--revert", cwd=tree), str(tree))


# Virtual environments


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    return tmp_path / "venv"


def site_of(environment: Path) -> Path:
    return next(environment.glob("lib/python*/site-packages"))


def install(environment: Path, *wheels: Path) -> None:
    kit.pip("--python", environment / "bin" / "python", "install", "--quiet", "--no-deps", "--no-index", *wheels)


def test_virtual_environment_by_pip(home: Home, environment: Path) -> None:
    """The path of the environment is enough; byte code of touched files goes, that of others stays."""
    install(environment, *home.wheels.values())
    site = site_of(environment)
    cached = {p.name.split(".")[0] for p in (site / "alpha" / "__pycache__").iterdir()}
    assert {"loader", "twins"} <= cached, "pip compiles what it installs"
    accepted(home.run("--alpha", environment), f"site-packages {site}", "patched")
    left = {p.name.split(".")[0] for p in (site / "alpha" / "__pycache__").iterdir()}
    assert cached - left == {"loader", "engine"}
    check_patched(home, "alpha", site, Kind.SITE)
    code = "import alpha.loader as m, alpha.layerwise.inner.session as s; print(m.loader_5b, s.STATE)"
    ran = subprocess.run([environment / "bin/python", "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "2 1\n"
    accepted(home.run("--alpha", environment, "--revert"))
    assert kit.record_faults(site) == []
    assert not (site / "alpha" / "layerwise").exists(), "byte code of new files was left behind"


def test_pip_uninstall_leaves_nothing_behind(home: Home, environment: Path) -> None:
    """What pip leaves of an untouched install (the empty directory of the namespace) is what it leaves of ours."""
    site, python = site_of(environment), environment / "bin/python"
    left = []
    for patched in (False, True):
        install(environment, home.wheels["beta"], home.wheels["gamma"])
        modules = "beta.core.sub.deep, beta.bridge.loader"
        if patched:
            accepted(home.run("--beta", site, "--gamma", site))
            modules += ", beta.core.layerwise.inner.session"
        subprocess.run([python, "-c", f"import {modules}"], check=True)
        kit.pip("--python", python, "uninstall", "--yes", "beta-core", "beta-bridge")
        left.append(kit.snapshot(site))
    assert kit.difference(*left) == []
    assert list(left[0]) == ["beta"]


def uv(*args: str | Path, cache: Path) -> None:
    program = os.environ.get("UV") or shutil.which("uv") or ""
    if not program or subprocess.run([program, "--version"], capture_output=True, check=False).returncode != 0:
        pytest.skip("uv is not installed")
    env = {**os.environ, "UV_CACHE_DIR": str(cache)}
    done = subprocess.run([program, *map(str, args)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_hard_links_of_uv(home: Home, tmp_path: Path) -> None:
    """X12: uv links two environments and its cache together; patching one of them changes no byte of the others."""
    cache = tmp_path / "cache"
    sites = []
    for name in ("one", "two"):
        uv("venv", "--quiet", "--python", sys.executable, tmp_path / name, cache=cache)
        flags = [
            "--quiet",
            "--no-deps",
            "--no-index",
            "--link-mode=hardlink",
            "--python",
            tmp_path / name / "bin/python",
        ]
        uv("pip", "install", *flags, *home.wheels.values(), cache=cache)
        sites.append(site_of(tmp_path / name))
    loader = "alpha/loader.py"
    assert (sites[0] / loader).stat().st_ino == (sites[1] / loader).stat().st_ino, "uv did not link"
    links = (sites[1] / loader).stat().st_nlink
    others = kit.snapshot(sites[1]), kit.snapshot(cache)
    cycle(home, "alpha", tmp_path / "one", sites[0], Kind.SITE)
    accepted(home.run("--alpha", tmp_path / "one", "--beta", sites[0], "--gamma", sites[0]))
    assert (kit.snapshot(sites[1]), kit.snapshot(cache)) == others
    assert (sites[0] / loader).stat().st_nlink == 1 and (sites[1] / loader).stat().st_nlink == links - 1
    assert (sites[0] / "alpha/twins.py").stat().st_nlink == links, "a file no patch touches stays linked"


# The official distributions and the project's own patch set


def test_the_three_official_distributions_in_one_site_packages(
    project: Path, linked: Path, official_site: Path
) -> None:
    before = kit.snapshot(linked)
    flags = ["--sglang", linked, "--megatron", linked, "--megatron-bridge", linked]
    accepted(kit.run_tool(project, *flags), "sglang 0.5.17", "megatron 0.19.2", "megatron-bridge 0.6.2", ": patched")
    assert kit.record_faults(linked) == []
    for dist_info in linked.glob("*.dist-info"):
        state = kit.state_of(dist_info / "fp8-colocate")
        for entry in state["files"].values():
            assert hashlib.sha256((linked / entry["at"]).read_bytes()).hexdigest() == entry["post"]
    written = kit.stamps(linked)
    accepted(kit.run_tool(project, *flags), "already patched")
    accepted(kit.run_tool(project, "status", *flags))
    assert kit.stamps(linked) == written
    accepted(kit.run_tool(project, *flags, "--revert"), ": pristine")
    assert kit.difference(before, kit.snapshot(linked)) == []
    assert kit.snapshot(official_site) == before, "the hard-linked twin was written to"


@pytest.mark.parametrize("target", ["megatron", "megatron-bridge"])
def test_checkout_of_an_official_distribution(project: Path, official_site: Path, tmp_path: Path, target: str) -> None:
    """The wheel's files in upstream's repository layout, as a clone of the tag has them."""
    pins = manifest.load(project)
    files = {}
    for prefix, installed in pins.target(target).layout.items():
        for path in (official_site / installed).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                files[prefix + path.relative_to(official_site / installed).as_posix()] = path.read_bytes()
    root = kit.checkout(tmp_path / "clone", files)
    before = kit.snapshot(root)
    accepted(kit.run_tool(project, f"--{target}", root), "git checkout", ": patched")
    overlay = pins.overlay_files(pins.target(target))
    assert all((root / path).read_bytes() == file.read_bytes() for path, file in overlay.items())
    accepted(kit.run_tool(project, f"--{target}", root), "already patched")
    accepted(kit.run_tool(project, f"--{target}", root, "--revert"))
    assert kit.difference(before, kit.snapshot(root)) == []


def test_unpacked_official_wheel(project: Path, dists: Path, tmp_path: Path) -> None:
    wheel = next(dists.glob("megatron_core-*.whl"))
    root = kit.unpacked_wheel(tmp_path / "unpacked", wheel)
    before = kit.snapshot(root)
    accepted(kit.run_tool(project, "--megatron", root / "megatron" / "core"), "unpacked wheel", ": patched")
    accepted(kit.run_tool(project, "--megatron", root, "--revert"))
    assert kit.difference(before, kit.snapshot(root)) == []


# What is no target


def test_editable_install_names_its_origin(home: Home, tree: Path, environment: Path) -> None:
    info = site_of(environment) / "alpha_engine-1.0.dist-info"
    direct = {"url": f"file://{tree}/python", "dir_info": {"editable": True}}
    kit.write_files(info, {"METADATA": b"Name: alpha-engine\n", "direct_url.json": json.dumps(direct).encode()})
    message = refused(home.run("--alpha", site_of(environment)), 2, "editable", f"--alpha {tree}/python")
    assert refused(home.run("--alpha", environment), 2, f"--alpha {tree}/python").splitlines()[0] in message
    accepted(home.run("--alpha", tree / "python"), f"git checkout {tree}")


@pytest.mark.parametrize("text", ["{", "[]", '{"dir_info": 3}', '{"dir_info": {"editable": true}}', "{}"])
def test_odd_direct_url_is_no_editable_install(tmp_path: Path, text: str) -> None:
    (tmp_path / "direct_url.json").write_text(text)
    assert editable_origin(tmp_path) is None


def wheel_file(home: Home, tmp_path: Path) -> Path:
    return home.wheels["alpha"]


def missing(home: Home, tmp_path: Path) -> Path:
    return tmp_path / "nowhere"


def empty(home: Home, tmp_path: Path) -> Path:
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


def other_project(home: Home, tmp_path: Path) -> Path:
    return kit.checkout(tmp_path / "beta", home.upstream["beta"])


def loop(home: Home, tmp_path: Path) -> Path:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    return tmp_path / "loop"


def pipe(home: Home, tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (wheel_file, ("a tree is patched, a wheel is repacked", "python apply.py wheel alpha --from")),
        (missing, ("no such path", "nowhere")),
        (empty, ("no alpha-engine here", "python/alpha/version.py", "alpha/version.py")),
        (other_project, ("no alpha-engine here",)),
        (loop, ("no such path", "loop")),
        (pipe, ("neither a file nor a directory",)),
    ],
)
def test_no_target(home: Home, tmp_path: Path, make: Callable[[Home, Path], Path], parts: tuple[str, ...]) -> None:
    path = make(home, tmp_path)
    before = kit.snapshot(tmp_path)
    refused(home.run("--alpha", path), 2, *parts)
    refused(home.run("status", "--alpha", path), 2, *parts)
    assert kit.snapshot(tmp_path) == before


def test_two_dist_infos_are_refused(home: Home, site: Path) -> None:
    (site / "alpha_engine-0.9.dist-info").mkdir()
    before = kit.snapshot(site)
    refused(home.run("--alpha", site), 2, "2 dist-info", "alpha_engine-0.9.dist-info", "pip install --force-reinstall")
    assert kit.snapshot(site) == before


def test_locate_accepts_a_tilde(home: Home, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tree.parent))
    assert locate(home.manifest.target("alpha"), Path("~/alpha")).root == tree
    with pytest.raises(UsageError, match="no such path"):
        locate(home.manifest.target("alpha"), Path("~nobody-of-that-name/alpha"))


def test_git_directory_without_git(tree: Path, tmp_path: Path) -> None:
    assert tool_git.git_dir(tree) == tree / ".git"
    assert tool_git.git_dir(tmp_path) is None
    (tmp_path / ".git").write_text("not what git writes\n")
    assert tool_git.git_dir(tmp_path) is None
    (tmp_path / ".git").write_text("gitdir: gone\n")
    assert tool_git.git_dir(tmp_path) is None


def test_a_venv_with_two_pythons_that_hold_the_target(home: Home, tmp_path: Path) -> None:
    place = tmp_path / "env"
    for python in ("python3.11", "python3.12"):
        kit.pip_install(place / "lib" / python / "site-packages", home.wheels["beta"])
    (place / "pyvenv.cfg").write_text("home = /nowhere\n")
    before = kit.snapshot(place)
    refused(home.run("--beta", place), 2, "2 Pythons", "python3.11", "python3.12")
    assert kit.snapshot(place) == before


def test_a_copied_worktree_waits_for_the_interrupted_original(home: Home, tmp_path: Path) -> None:
    root = kit.checkout(tmp_path / "main", home.upstream["alpha"])
    kit.git(root, "worktree", "add", "-q", tmp_path / "one", "-b", "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two", symlinks=True)
    state = root / ".git/worktrees/one/fp8-colocate/alpha"
    state.mkdir(parents=True)
    journal = {"phase": "prepare", "root": str(tmp_path / "one"), "directories": [], "entries": []}
    (state / "journal.json").write_text(json.dumps(journal))
    refused(home.run("--alpha", tmp_path / "two"), 6, "shares this git directory", str(tmp_path / "one"))
    accepted(home.run("--alpha", tmp_path / "one"), "undone")
    assert not (state / "journal.json").exists()
