# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Fixtures of the tool's tests. What is made once a session is read only; a test that edits it takes `home.copy`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from patchset import manifest, relock, wheel
from patchset.report import Report
from tests.tool import kit


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> kit.Home:
    """The standard patch set for the small upstream projects."""
    return kit.standard_home(tmp_path_factory.mktemp("standard") / "home")


@pytest.fixture(scope="session")
def shared_site(home: kit.Home, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory that pip installed all three small projects into; copy it before use."""
    site = tmp_path_factory.mktemp("site") / "site"
    kit.pip_install(site, *home.wheels.values())
    return site


@pytest.fixture
def site(shared_site: Path, tmp_path: Path) -> Path:
    """A site-packages of its own, with all three small projects."""
    return Path(shutil.copytree(shared_site, tmp_path / "site", symlinks=True))


@pytest.fixture
def tree(home: kit.Home, tmp_path: Path) -> Path:
    """A checkout of alpha."""
    return kit.checkout(tmp_path / "alpha", home.upstream["alpha"])


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory, dists: Path) -> Path:
    """The project's own patch set, locked again from the official wheels: a stale lock is lint's matter alone."""
    directory = tmp_path_factory.mktemp("project") / "home"
    directory.mkdir()
    kit.copy_tool(directory)
    shutil.copy2(kit.ROOT / "patchset.toml", directory)
    shutil.copy2(kit.ROOT / "NOTICE", directory)
    for name in ("patches", "overlay", "LICENSES"):
        shutil.copytree(kit.ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    pins = manifest.load(directory)
    for target in pins.targets.values():
        pin = pins.pin(target)
        source = relock.wheel_source(target, dists / pin.wheel.file, pin.wheel.sha256)
        relock.write(pins, target, relock.make_lock(pins, target, pin, {"wheel": source}))
    return directory


@pytest.fixture(scope="session")
def official_site(tmp_path_factory: pytest.TempPathFactory, dists: Path) -> Path:
    """One directory that pip installed the three official wheels into. Copies may share its inodes: see `linked`."""
    site = tmp_path_factory.mktemp("official") / "site"
    pins = manifest.load()
    kit.pip_install(site, *(dists / pins.pin(t).wheel.file for t in pins.targets.values()))
    return site


@pytest.fixture
def linked(official_site: Path, tmp_path: Path) -> Path:
    """A site-packages of its own whose files are hard links to `official_site`, as uv makes it from its cache."""
    return Path(shutil.copytree(official_site, tmp_path / "official", copy_function=os.link, symlinks=True))


@pytest.fixture(scope="session")
def pins(project: Path) -> manifest.Manifest:
    """patchset.toml of `project`."""
    return manifest.load(project)


@pytest.fixture(scope="session")
def patched_wheels(pins: manifest.Manifest, dists: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Target id -> its patched wheel, built once from the pinned ones."""
    out = tmp_path_factory.mktemp("wheels")
    targets = list(pins.targets.values())
    return {
        t.id: wheel.repack_all(pins, [t], {}, dists / pins.pin(t).wheel.file, out, Report(quiet=True))[0].path
        for t in targets
    }


@pytest.fixture(scope="session")
def installed(patched_wheels: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory with all three patched wheels, as pip installs them. Read only: copy before changing it."""
    site = tmp_path_factory.mktemp("site")
    kit.pip_install(site, *patched_wheels.values())  # in one go: pip --target replaces a directory that is there
    return site
