# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Shared by the tests of dev, export, refresh and upstream: a home with its own cache, commits as people make them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.tool import kit

PREFIX = "python/alpha/"
TRAILERS = kit.TRAILERS.rsplit("Fails-Without", 1)[0]
MODULE = b"""class Engine:
    def load(self, path):
        weights = read(path)
        self.weights = weights
        return True

    def save(self, path):
        write(path, self.weights)
        return True


def close(engine):
    engine.weights = None
    return True
"""
PATCHED = kit.replaced(
    MODULE, (b"        self.weights = weights\n", b"        check(weights)\n        self.weights = weights\n")
)


class Workshop:
    """One small upstream project, its patch set, and a cache of its own."""

    def __init__(self, root: Path, files: Mapping[str, bytes] | None = None) -> None:
        self.root = root
        self.env = {"XDG_CACHE_HOME": str(root / "cache"), "HOME": str(root / "user")}
        (root / "user").mkdir(parents=True)
        self.home = kit.Home(root / "home", ["alpha"])
        self.home.upstream["alpha"] = {**kit.upstream_files("alpha"), PREFIX + "module.py": MODULE, **(files or {})}
        self.home.wheels["alpha"] = kit.build_wheel(root / "home" / "dists", "alpha", "1.0", self.upstream)
        self.home.write_manifest()
        self.dists = root / "cache" / "fp8-colocate" / "dists"
        self.dists.mkdir(parents=True)
        shutil.copy(self.home.wheels["alpha"], self.dists)

    @property
    def upstream(self) -> dict[str, bytes]:
        return self.home.upstream["alpha"]

    @property
    def pin(self) -> Path:
        return self.home.pin_directory("alpha")

    def series(self, edits: Mapping[str, Mapping[str, bytes]]) -> None:
        self.home.series("alpha", edits)
        self.home.lock()

    def run(self, *args: object, **env: str) -> subprocess.CompletedProcess[str]:
        return self.home.run(*args, env={**self.env, **env})

    def json(self, *args: object) -> dict:
        return json.loads(self.run(*args, "--json").stdout)

    def dev(self, *args: object) -> Path:
        done = self.run("dev", "alpha", *args)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == 1
        return Path(done.stdout.strip())

    def wheel(self, version: str, files: Mapping[str, bytes | None]) -> Path:
        """A later upstream version: `files` over the first one's; None removes a file."""
        new = {**self.upstream, **kit.upstream_files("alpha", version)}
        new |= {PREFIX + "module.py": self.upstream[PREFIX + "module.py"], **files}
        new = {path: data for path, data in new.items() if data is not None}
        return kit.build_wheel(self.root / "later", "alpha", version, new)

    def refresh(self, wheel: Path, *args: object) -> subprocess.CompletedProcess[str]:
        return self.run("refresh", "alpha", "--to", "2.0", "--wheel", wheel, *args)

    @property
    def refreshing(self) -> Path:
        return self.root / "cache" / "fp8-colocate" / "refresh" / "alpha-2.0" / "tree"


def commit(tree: Path, subject: str, files: Mapping[str, bytes], trailers: str = TRAILERS, *flags: str) -> str:
    """A commit of a maintainer."""
    kit.write_files(tree, files)
    kit.git(tree, "add", "--", *files)
    kit.git(tree, "commit", "-q", *flags, "-F", "-", stdin=f"{subject}\n\nThe reason.\n\n{trailers}".encode())
    return kit.git(tree, "rev-parse", "HEAD").strip()


def ids(tree: Path) -> list[str]:
    return kit.git(tree, "log", "--format=%H %T %s").splitlines()


def hostile_user(directory: Path) -> dict[str, str]:
    """The environment of a user whose git changes bytes, signs, runs hooks, and whose shell sets GIT_DIR."""
    hooks = directory / "hooks"
    hooks.mkdir(parents=True)
    for name in ("pre-commit", "commit-msg", "applypatch-msg", "post-checkout", "reference-transaction"):
        (hooks / name).write_text("#!/bin/sh\nexit 1\n")
        (hooks / name).chmod(0o755)
    (directory / "attributes").write_text("* text eol=crlf\n*.py diff=python\n")
    (directory / ".gitconfig").write_text(
        "[core]\n autocrlf = true\n safecrlf = true\n hooksPath = " + str(hooks) + "\n"
        " attributesFile = " + str(directory / "attributes") + "\n"
        "[apply]\n whitespace = fix\n[commit]\n gpgSign = true\n[user]\n signingKey = none\n"
        "[diff]\n noprefix = true\n context = 1\n algorithm = patience\n[format]\n signOff = true\n attach = true\n"
        "[am]\n threeWay = true\n[merge]\n conflictStyle = diff3\n[rebase]\n autoStash = true\n"
    )
    return {"HOME": str(directory), "GIT_DIR": str(directory / "nowhere"), "GIT_INDEX_FILE": str(directory / "index")}


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, **extra}
