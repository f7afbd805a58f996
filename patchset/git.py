# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""The only place that starts git, always in a directory of ours, never with the user's configuration.

A user's `apply.whitespace=fix`, `core.autocrlf`, hooks, signing, GIT_DIR, or a repository further up the
directory tree would each change what git does without a word. None of them reaches it from here.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from patchset.errors import PatchsetError, ToolMissing

_CONFIG = (
    "core.autocrlf=false",
    "core.eol=lf",
    "core.safecrlf=false",
    "core.hooksPath=/dev/null",
    "core.attributesFile=/dev/null",
    "core.fsmonitor=false",
    "core.quotePath=false",
    "apply.whitespace=nowarn",
    "commit.gpgSign=false",
    "diff.noprefix=false",
    "diff.mnemonicPrefix=false",
    "diff.renames=true",
    "gc.auto=0",
    "init.defaultBranch=main",
    "safe.directory=*",
    "advice.detachedHead=false",
)


class GitFailed(PatchsetError):
    """A git command ended with an error where none was expected."""


def environment(directory: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment git runs in: no GIT_* of the caller, no configuration outside ours, no parent repository."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env |= {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_CEILING_DIRECTORIES": str(directory.resolve().parent),
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_OPTIONAL_LOCKS": "0",
        "LC_ALL": "C",
    }
    return env | dict(extra or {})


def run(
    directory: Path,
    *args: str,
    stdin: bytes | None = None,
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[bytes]:
    """Run git in `directory` and return the finished process, output captured as bytes.

    Raises:
        ToolMissing: git is not installed.
        GitFailed: `check` is set and git returned non-zero.
    """
    command = ["git", *_flags(), *args]
    try:
        done = subprocess.run(
            command, cwd=directory, input=stdin, capture_output=True, env=environment(directory, env), check=False
        )
    except FileNotFoundError as error:
        if not directory.is_dir():
            raise GitFailed("the directory git should run in is gone", path=str(directory)) from error
        raise ToolMissing("git is not installed", expected="git >= 2.32 on PATH", next_step="install git") from error
    if check and done.returncode != 0:
        raise GitFailed(
            f"git {args[0]} failed with exit code {done.returncode}",
            path=str(directory),
            found=done.stderr.decode(errors="replace").strip() or done.stdout.decode(errors="replace").strip(),
        )
    return done


def text(directory: Path, *args: str, **kwargs) -> str:
    """Standard output of `run`, decoded and stripped."""
    return run(directory, *args, **kwargs).stdout.decode(errors="replace").strip()


def init(directory: Path) -> None:
    """Make `directory` an empty repository without templates or hooks."""
    directory.mkdir(parents=True, exist_ok=True)
    run(directory, "init", "--quiet", "--template=")


def clone(url: str, tag: str, place: Path, quiet: bool) -> subprocess.CompletedProcess[bytes]:
    """Clone one tag, without history, into the new directory `place`; git's progress goes to our stderr.

    Unlike the rest this talks to a network: the caller's GIT_SSL_*, GIT_SSH*, GIT_HTTP_* and GIT_PROXY_* reach it.
    The result is not checked; `stdout` is empty and `stderr` is what git said.

    Raises:
        ToolMissing: git is not installed.
    """
    network = ("GIT_SSL_", "GIT_SSH", "GIT_HTTP_", "GIT_PROXY_")
    env = environment(place.parent, {k: v for k, v in os.environ.items() if k.startswith(network)})
    options = ["--depth=1", "--single-branch", f"--branch={tag}", "--template=", "--quiet" if quiet else "--progress"]
    command = ["git", *_flags(), "clone", *options, "--", url, str(place)]
    said = bytearray()
    try:
        with subprocess.Popen(
            command, cwd=place.parent, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env
        ) as process:
            while process.stderr and (piece := process.stderr.read1(4096)):  # type: ignore[attr-defined]
                said += piece
                if not quiet:
                    os.write(2, piece)
    except FileNotFoundError as error:
        raise ToolMissing("git is not installed", expected="git >= 2.32 on PATH", next_step="install git") from error
    return subprocess.CompletedProcess(command, process.returncode, b"", bytes(said))


def _flags() -> Sequence[str]:
    return [flag for setting in _CONFIG for flag in ("-c", setting)]


def git_dir(root: Path) -> Path | None:
    """The git directory of the checkout at `root`, found without git; None when `root` is not a checkout's top.

    A worktree or a submodule has a `.git` *file* that names its directory.
    """
    dot_git = root / ".git"
    if dot_git.is_dir():
        return dot_git.resolve()
    if not dot_git.is_file():
        return None
    content = dot_git.read_text(encoding="utf-8", errors="surrogateescape").strip()
    if not content.startswith("gitdir:"):
        return None
    path = root / content.removeprefix("gitdir:").strip()
    return path.resolve() if path.is_dir() else None
