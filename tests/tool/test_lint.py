# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Every rule of `lint` finds its fault, names file and rule, and stays silent on a clean patch set."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from patchset import lint, manifest
from patchset.series import parse_diff
from tests.tool import kit
from tests.tool.kit import Home, accepted, refused

LOADER, ENGINE, DEEP = (f"python/alpha/{name}.py" for name in ("loader", "engine", "sub/deep"))
PATCH = "patches/alpha/1.0/deep-one.patch"


@pytest.fixture(scope="module")
def clean(home: Home, tmp_path_factory: pytest.TempPathFactory) -> Home:
    """The standard patch set without the patch for two files that the trailers of all share."""
    return home.copy(tmp_path_factory.mktemp("clean") / "home")


@pytest.fixture
def mine(clean: Home, tmp_path: Path) -> Home:
    return clean.copy(tmp_path / "home")


def linted(home: Home, env: dict[str, str] | None = None):
    return home.run("lint", env={"XDG_CACHE_HOME": str(home.directory.parent / "cache"), **(env or {})})


def edit_patch(home: Home, *pairs: tuple[bytes, bytes]) -> None:
    path = home.directory / PATCH
    path.write_bytes(kit.replaced(path.read_bytes(), *pairs))


def test_a_clean_patch_set(clean: Home) -> None:
    out = accepted(linted(clean), "alpha 1.0  deep-one", "+1 -1  1 files", "alpha 1.0  3 patches, +6 -6")
    assert "warning" not in out
    done = clean.run("lint", "--json", env={"XDG_CACHE_HOME": os.devnull})
    body = json.loads(accepted(done))
    assert body["findings"] == [] and len(body["patches"]) == 9
    assert body["patches"][0] == {
        "target": "alpha", "version": "1.0", "slug": "loader-calls-the-overlay", "added": 2, "removed": 1, "files": 1
    }  # fmt: skip


# Mails: (text in the patch, what becomes of it, rule, part of the finding)

MAIL_FAULTS = [
    (
        b"From 0000000000000000000000000000000000000000",
        b"From 1111111111111111111111111111111111111111",
        "mail",
        "--zero-commit",
    ),
    (b"Subject: [PATCH] ", b"Subject: [PATCH 3/3] ", "mail", "format-patch -N"),
    (b"\n\ndiff", b"\n---\n x.py | 2 +-\n 1 file changed\n\ndiff", "mail", "--no-stat"),
    (b" deep_3 = 3\n", b" deep_3 = 3\n-- \n2.39.5\n\n", "mail", "--no-signature"),
    (b"index ", b"index abc..def\nindex ", "full-index", "40 digits"),
    (b"alpha: deep one", b"Deep one.", "subject", "found 'Deep one.'"),
    (b"alpha: deep one", b"alpha: Deep one", "subject", "lower case"),
    (b"The reason.\n\n", b"", "message", "says no reason"),
    (b"Upstream-Status: Pending\n", b"", "trailers", "Upstream-Status must stand once, found 0 times"),
    (b"Origin: vendor\n", b"Origin: vendor\nOrigin: vendor\n", "trailers", "Origin must stand once, found 2 times"),
    (b"Drop-When: upstream", b"Drop-when: upstream", "trailers", "unknown trailer Drop-when"),
    (b"Upstream-Status: Pending", b"Upstream-Status: Sent", "trailers", "Submitted [url]"),
    (b"Upstream-Status: Pending", b"Upstream-Status: Submitted", "trailers", "found 'Submitted'"),
    (b"Upstream-Status: Pending", b"Upstream-Status: Denied [no]", "trailers", "found 'Denied [no]'"),
    (b"Upstream-Status: Pending", b"Upstream-Status: Inappropriate", "trailers", "Inappropriate [reason]"),
    (b"Origin: vendor", b"Origin: somewhere", "trailers", "Origin: expected vendor"),
    (b"License: Apache-2.0", b"License: MIT", "trailers", "License: expected Apache-2.0"),
    (b"Fails-Without: test/unit/test_layerwise.py::test_it\n", b"", "fails-without", "no Fails-Without trailer"),
    (b"test_layerwise.py::test_it", b"test_layerwise.py", "fails-without", "expected path::test"),
    (b"test_layerwise.py::test_it", b"test_other.py::test_it", "fails-without", "no such file in overlay/alpha"),
    (b"test/unit/test_layerwise.py::test_it", b"../../patchset.toml::x", "fails-without", "no such file"),
    (b"::test_it", b"::test_that", "fails-without", "has no test_that"),
    (b"::test_it", b"::TestIt::test_it", "fails-without", "has no TestIt::test_it"),
    (b"Subject", b"Subject\r", "mail", "carriage return in a patch header"),
    (b"@@ -1,4", b"@@ -1,5", "mail", "a hunk is shorter or longer"),
    (b"diff --git a/python", b'diff --git "a/python', "mail", "a file header cannot be read"),
]


@pytest.mark.parametrize(("old", "new", "rule", "part"), MAIL_FAULTS)
def test_mail_faults(mine: Home, old: bytes, new: bytes, rule: str, part: str) -> None:
    edit_patch(mine, (old, new))
    message = refused(linted(mine), 7, f"{PATCH}: {rule}: ", part, "mend them and run lint again")
    assert message.count("deep-one.patch: ") >= 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"Upstream-Status: Pending", b"Upstream-Status: Submitted [https://example.invalid/1]"),
        (b"Upstream-Status: Pending", b"Upstream-Status: Backport [https://example.invalid/1]"),
        (b"Upstream-Status: Pending", b"Upstream-Status: Inappropriate [only for colocation]"),
        (b"Origin: vendor", b"Origin: other https://example.invalid/repo@0123abc"),
        (b"License: Apache-2.0\n", b"License: Apache-2.0\nSigned-off-by: A Person <a@example.invalid>\n"),
        (b"::test_it", b"::test_it[param::x]"),
        (b"alpha: deep one", b"alpha, sub/deep: GTP shards are kept"),
    ],
)
def test_good_trailers(mine: Home, old: bytes, new: bytes) -> None:
    edit_patch(mine, (old, new))
    mine.lock()
    accepted(linted(mine))


# What a patch does, as edits of a file: (file, edits, rule, part of the finding)


def python_home(mine: Home, before: bytes, after: bytes, path: str = LOADER) -> Home:
    """The patch set with one patch that turns `before` into `after`."""
    mine.upstream["alpha"] |= {path: before}
    mine.wheels["alpha"] = kit.build_wheel(mine.directory / "dists", "alpha", "1.0", mine.upstream["alpha"])
    mine.write_manifest()
    mine.series("alpha", {"deep-one": {path: after}})
    return mine


IMPORTS = b"import os\nimport sys\nfrom a import b\n\n\ndef f(x):\n    return g(x, 1)\n\n\nlast = 1\n"
EDIT_FAULTS = [
    ((b"    return g(x, 1)", b"        return g(x,  1)"), "reformatting", "only blanks and line breaks change"),
    ((b"    return g(x, 1)", b"    return g(\n        x, 1)"), "reformatting", "only blanks and line breaks change"),
    ((b"last = 1\n", b"last = 1  \nmore = 2\n"), "reformatting", "only the blanks at the end change: 'last = 1'"),
    ((b"last = 1\n", b"\nlast = 1\n"), "reformatting", "only blank lines change"),
    ((b"import os\nimport sys\n", b"import sys\nimport os\n"), "import-churn", "moved only: import os"),
    ((b"import os\nimport sys\n", b"import os, sys, re\n"), "import-churn", "2 import lines removed"),
]


@pytest.mark.parametrize(("pair", "rule", "part"), EDIT_FAULTS)
def test_edit_faults(mine: Home, pair: tuple[bytes, bytes], rule: str, part: str) -> None:
    home = python_home(mine, IMPORTS, kit.replaced(IMPORTS, pair))
    home.lock("alpha")
    refused(linted(home), 7, f"{PATCH}: {rule}: ", LOADER, part)


GOOD_EDITS = [
    (b"    return g(x, 1)", b"    if x:\n        return g(x, 2)\n    return g(x, 1)"),
    (b"from a import b\n", b"from a import b, c\n"),
    (b"from a import b\n", b"from a import b\nfrom alpha.layerwise import session\n"),
    (b"\n\nlast = 1\n", b"\n\ndef new():\n    pass\n\n\nlast = 1\n"),
    (
        b"import os\nimport sys\nfrom a import b\n\n\ndef f(x):\n",
        b"import os\nimport sys\nfrom a import b\n\n\ndef f(x):\n    x = 1\n",
    ),
]


@pytest.mark.parametrize("pair", GOOD_EDITS)
def test_good_edits(mine: Home, pair: tuple[bytes, bytes]) -> None:
    home = python_home(mine, IMPORTS, kit.replaced(IMPORTS, pair))
    home.lock("alpha")
    accepted(linted(home))


def test_a_moved_line_is_no_reformatting() -> None:
    text = (
        b"diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -1,4 +1,4 @@\n-a = 1\n b = 1\n c = 1\n+a = 1\n d = 1\n"
    )
    [diff] = parse_diff(text, Path("x"))
    assert list(lint._hunk_rules(diff.hunks[0])) == []


def test_long_patch_is_a_warning(mine: Home) -> None:
    home = python_home(mine, IMPORTS, IMPORTS + kit.numbered("more", 41))
    home.lock("alpha")
    accepted(linted(home), f"warning: {PATCH}: size: 41 added lines, more than 40")
    body = json.loads(home.run("lint", "--json", env={"XDG_CACHE_HOME": os.devnull}).stdout)
    assert [(f["rule"], f["warning"]) for f in body["findings"]] == [("size", True)]


def test_patch_that_creates_and_patch_of_the_uninstalled(mine: Home) -> None:
    mine.series(
        "alpha",
        {"deep-one": {"python/alpha/new.py": b"x\n", "README.md": b"# other\n", "python/alpha/data.txt": b"x\n"}},
    )
    message = refused(linted(mine), 7)
    assert "modify-only: python/alpha/new.py: a patch only modifies files" in message
    assert "uninstalled: README.md is in no wheel" in message
    assert "notice: python/alpha/data.txt: a patched file must be able to carry a change notice" in message


def test_paths_that_git_would_take_for_patterns(mine: Home) -> None:
    mine.upstream["alpha"] |= {"python/alpha/a[b].py": b"a = 1\n"}
    mine.series("alpha", {"deep-one": {"python/alpha/a[b].py": b"a = 2\n"}})
    mine.overlay("alpha", {"python/alpha/new*.py": kit.SPDX.encode()})
    message = refused(linted(mine), 7, "path: 'python/alpha/a[b].py'")
    assert "overlay/alpha/python/alpha/new*.py: path: " in message


def test_namespace_files(mine: Home) -> None:
    mine.upstream["gamma"] |= {"src/beta/__init__.py": b"a = 1\n"}
    mine.series("gamma", {"deep-one": {"src/beta/__init__.py": b"a = 2\n"}})
    mine.overlay("beta", {"beta/__init__.py": kit.SPDX.encode()})
    message = refused(linted(mine), 7, "would hide the other parts of the namespace package")
    assert "patches/gamma/1.0/deep-one.patch: namespace: src/beta/__init__.py" in message
    assert "overlay/beta/beta/__init__.py: namespace: beta/__init__.py" in message


def test_native_code_is_a_warning(mine: Home) -> None:
    path = mine.directory / "patchset.toml"
    path.write_text(
        path.read_text().replace('licence = "Apache-2.0"', 'licence = "Apache-2.0"\nnative = ["python/alpha/sub/"]', 1)
    )
    accepted(linted(mine), f"warning: {PATCH}: native: {DEEP}")


# Series, lock, strays


def test_series_and_files_are_the_same(mine: Home) -> None:
    directory = mine.pin_directory("alpha")
    shutil.copy(directory / "deep-one.patch", directory / "unused.patch")
    (directory / "notes.txt").write_text("x")
    message = refused(linted(mine), 7, "patches/alpha/1.0/unused.patch: series: not in the series")
    assert "patches/alpha/1.0/notes.txt: series: " in message
    (directory / "series").write_text("gone\n")
    refused(
        linted(mine), 7, "patches/alpha/1.0/series: series: the series names a patch that is not there", "gone.patch"
    )


def test_stale_and_missing_lock(mine: Home) -> None:
    mine.overlay("alpha", {"python/alpha/layerwise/__init__.py": kit.SPDX.encode() + b"# edited\n"})
    (mine.pin_directory("beta") / "lock.json").unlink()
    message = refused(
        linted(mine), 7, "patches/alpha/1.0/lock.json: lock: 1 files differ", "python apply.py export alpha"
    )
    assert "patches/beta/1.0/lock.json: lock: no lock for this pin" in message
    assert "2 things to mend" in message


def test_everything_is_listed_at_once(mine: Home) -> None:
    edit_patch(mine, (b"From 0", b"Form 0"))
    mine.overlay("alpha", {"python/alpha/bare.py": b"x = 1\n"})
    (mine.directory / "patches/omega").mkdir()
    (mine.directory / "overlay/omega").mkdir()
    (mine.directory / "patches/alpha/0.9").mkdir()
    message = refused(linted(mine), 7, "not a git format-patch mail", "bare.py: spdx")
    assert "patches/omega: stray: " in message and "overlay/omega: stray: " in message
    assert "patches/alpha/0.9: stray: alpha has no such pin" in message
    body = json.loads(mine.run("lint", "--json").stdout)
    assert body["error"] == "LintFailed" and body["exit_code"] == 7
    assert {"mail", "spdx", "stray"} <= {f["rule"] for f in body["findings"]}


@pytest.mark.parametrize("version", ["2", "1.0", None])
def test_revision(mine: Home, version: str | None) -> None:
    line = f'version = "{version}"\n' if version else ""
    (mine.directory / "pyproject.toml").write_text(f'[project]\nname = "x"\n{line}')
    refused(linted(mine), 7, "pyproject.toml: revision: version", "patchset.toml has revision 1")
    (mine.directory / "pyproject.toml").write_text('[project]\nversion = "1"\n')
    accepted(linted(mine))
    path = mine.directory / "patchset.toml"
    path.write_text(path.read_text().replace("revision = 1", "revision = 0"))
    refused(linted(mine), 7, "patchset.toml: revision: counted from 1")


# Overlay


def no_header(home: Home) -> str:
    home.overlay("alpha", {"python/alpha/bare.cuh": b"\n\n\n// SPDX-License-" + b"Identifier: Apache-2.0\n"})
    return "overlay/alpha/python/alpha/bare.cuh: spdx: "


def link_to_a_file(home: Home) -> str:
    (home.directory / "overlay/alpha/python/alpha/link.py").symlink_to("fp8_colocate.py")
    return "overlay/alpha/python/alpha/link.py: symlink: "


def link_to_a_directory(home: Home) -> str:
    (home.directory / "overlay/alpha/python/alpha/linked").symlink_to("layerwise")
    return "overlay/alpha/python/alpha/linked: symlink: "


def hidden(home: Home) -> str:
    home.overlay("alpha", {"test/.pytest_cache/x.txt": b"x"})
    return "overlay/alpha/test/.pytest_cache/x.txt: hidden: "


def shared_file_is_gone(home: Home) -> str:
    (home.directory / "overlay/shared/fp8_colocate.py").unlink()
    return "overlay/shared/fp8_colocate.py: missing: "


@pytest.mark.parametrize("change", [no_header, link_to_a_file, link_to_a_directory, hidden, shared_file_is_gone])
def test_overlay_faults(mine: Home, change: Callable[[Home], str]) -> None:
    part = change(mine)
    refused(linted(mine), 7, part)


def test_overlay_path_that_exists_upstream(mine: Home, tmp_path: Path) -> None:
    mine.overlay("alpha", {"python/alpha/twins.py": kit.SPDX.encode()})
    mine.lock("alpha")
    accepted(linted(mine))  # without the wheel nothing can be said
    cache = mine.directory.parent / "cache/fp8-colocate/dists"
    cache.mkdir(parents=True)
    shutil.copy(mine.wheels["alpha"], cache)
    part = "overlay/alpha/python/alpha/twins.py: exists-upstream: alpha-engine 1.0 has alpha/twins.py; make it a patch"
    refused(linted(mine), 7, part)
    (cache / mine.wheels["alpha"].name).write_bytes(b"no zip")
    accepted(linted(mine))


# Texts

ROOT_PATH, WORK_PATH, PYENV = "/" + "root/x", "/" + "work/main", "~/." + "pyenv/versions"
NOTE = "[" + "Note: "


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize(
    "text", [f"see {ROOT_PATH}\n", f"cd {WORK_PATH}\n", f"'{PYENV}'\n", "as this " + "workplace has it\n"]
)
def test_machine_paths(mine: Home, text: str, tracked: bool) -> None:
    kit.write_files(
        mine.directory, {"docs/how.md": b"fine\n\n" + text.encode(), "docs/binary.bin": b"\0" + text.encode()}
    )
    if tracked:
        kit.git(mine.directory, "init", "-q")
    refused(linted(mine), 7, "docs/how.md:3: machine: ")
    if tracked:
        (mine.directory / ".gitignore").write_text("docs/\n")
        accepted(linted(mine))


def test_paths_that_only_look_so(mine: Home) -> None:
    fine = b"https://example.invalid/work/x a/root/b $HOME/work/ **/work/** the root/ directory\n"
    kit.write_files(mine.directory, {"docs/how.md": fine})
    accepted(linted(mine))


def test_notes_resolve(mine: Home) -> None:
    cites = f"see {NOTE}who frees it] and {NOTE}stable storage]; the form is {NOTE}...]\n"
    kit.write_files(mine.directory, {"docs/a.md": cites.encode()})
    defines = kit.SPDX + f"# {NOTE}stable storage]\n# pointers stay.\n"
    mine.overlay("alpha", {"python/alpha/layerwise/__init__.py": defines.encode()})
    mine.lock("alpha")
    message = refused(linted(mine), 7, "docs/a.md:1: note: the note 'who frees it' is cited and nowhere written")
    assert "stable storage" not in message and "1 things to mend" in message


# The project itself


def test_the_project_is_clean() -> None:
    pins = manifest.load()
    findings = [f for target in pins.targets.values() for f in lint.overlay_findings(pins, target)]
    assert [str(f) for f in [*findings, *lint.text_findings(pins.home)]] == []


def test_the_project_passes_lint(project: Path) -> None:
    """All rules on the project's own patches and overlay, with locks made anew."""
    done = kit.run_tool(project, "lint")
    assert done.returncode == 0, done.stderr
