# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""The patch set's own files: each way in which they can be wrong has one message, code 7 (or 4, 5), and no effect."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from patchset import git as tool_git
from patchset import lock, manifest, relock, scratch, series, state
from patchset.errors import LockInvalid, ManifestInvalid, PatchConflict, SeriesInvalid, UsageError, WheelInvalid
from patchset.types import sha256
from tests.tool import kit
from tests.tool.kit import Home, accepted, refused

LOADER, ENGINE, DEEP = (f"python/alpha/{name}.py" for name in ("loader", "engine", "sub/deep"))


@pytest.fixture
def mine(home: Home, tmp_path: Path) -> Home:
    return home.copy(tmp_path / "home")


# series


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (b"Bad_Slug\n", ("not a patch slug", "series:1", "Bad_Slug")),
        (b"# fine\ndeep-one\n\ndeep-one # again\n", ("a slug stands twice", "series:4", "deep-one")),
        (b"deep-one\nnot-there\n", ("names a patch that is not there", "series:2", "not-there.patch")),
        (b"../deep-one\n", ("not a patch slug",)),
        (b"\xff\xfe\n", ("not UTF-8",)),
    ],
)
def test_malformed_series(mine: Home, tree: Path, text: bytes, parts: tuple[str, ...]) -> None:
    (mine.pin_directory("alpha") / "series").write_bytes(text)
    before = kit.snapshot(tree)
    refused(mine.run("--alpha", tree), 7, *parts)
    refused(mine.run("list"), 7, *parts)
    assert kit.snapshot(tree) == before


def test_series_may_be_commented_or_absent(tmp_path: Path) -> None:
    assert series.read_series(tmp_path) == []
    (tmp_path / "a-b.patch").write_text("x")
    (tmp_path / "series").write_text("# order matters\n\n  a-b  # why\n")
    assert series.read_series(tmp_path) == ["a-b"]


# mails


def no_mail(data: bytes) -> bytes:
    return data.replace(b"From ", b"Form ", 1)


def no_diff(data: bytes) -> bytes:
    return data.partition(b"\ndiff --git")[0]


def cr_in_header(data: bytes) -> bytes:
    return data.replace(b"Subject", b"\rSubject", 1)


def short_hunk(data: bytes) -> bytes:
    return data.replace(b"@@ -1,4 +1,4 @@", b"@@ -1,9 +1,9 @@", 1)


def cut_file(data: bytes) -> bytes:
    return data[: data.rindex(b"\n", 0, -1) + 1]


def long_hunk(data: bytes) -> bytes:
    return data.replace(b"@@ -1,4 +1,4 @@", b"@@ -1,4 +1,3 @@", 1)


def bad_hunk_header(data: bytes) -> bytes:
    return data.replace(b"@@ -1,4 +1,4 @@", b"@@ -one +two @@", 1)


def bad_file_header(data: bytes) -> bytes:
    return data.replace(b"diff --git a/", b"diff --git x/", 1)


def bad_mime(data: bytes) -> bytes:
    return data.replace(b"Subject", b"Content-Type: message/rfc822\nSubject", 1)


MAILS = [
    (no_mail, "not a git format-patch mail"),
    (no_diff, "not a git format-patch mail"),
    (cr_in_header, "carriage return in a patch header"),
    (short_hunk, "a hunk is shorter or longer than its header says"),
    (cut_file, "a hunk is shorter or longer than its header says"),
    (long_hunk, "a hunk is shorter or longer than its header says"),
    (bad_hunk_header, "a hunk header cannot be read"),
    (bad_file_header, "a file header cannot be read"),
    (bad_mime, "a patch header cannot be read"),
]


@pytest.mark.parametrize(("damage", "what"), MAILS)
def test_malformed_mail(mine: Home, tree: Path, damage: Callable[[bytes], bytes], what: str) -> None:
    path = mine.pin_directory("alpha") / "deep-one.patch"
    good = path.read_bytes()
    assert damage(good) != good
    path.write_bytes(damage(good))
    before = kit.snapshot(tree)
    refused(mine.run("--alpha", tree), 7, what, "deep-one.patch")
    assert kit.snapshot(tree) == before


def test_mail_is_read(home: Home) -> None:
    patch = series.parse_mail(home.pin_directory("alpha") / "second-touch.patch")
    assert (patch.slug, patch.subject) == ("second-touch", "alpha: second touch")
    assert patch.author == "fp8-colocate maintainers <maintainers@example.invalid>"
    assert patch.body.endswith("The reason.")
    assert patch.trailer("Upstream-Status") == "Pending" and patch.trailer("Nothing") is None
    assert patch.trailer_values("Origin") == ["vendor"]
    assert [(f.path, f.added, f.removed, len(f.hunks)) for f in patch.files] == [(ENGINE, 2, 2, 2), (LOADER, 1, 2, 2)]


def test_folded_repeated_and_no_trailers(tmp_path: Path) -> None:
    head = (
        "From 0 Mon\nFrom: A <a@b>\nSubject: [PATCH 2/3] area: a\n subject\n\nWhy: not a trailer, other paragraph.\n\n"
    )
    diff = "\ndiff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"
    path = tmp_path / "x.patch"
    path.write_text(f"{head}Drop-When: one\n two\nOrigin: a\nOrigin: b\n---\n{diff}")
    patch = series.parse_mail(path)
    assert patch.subject == "area: a subject"
    assert patch.trailers == (("Drop-When", "one two"), ("Origin", "a"), ("Origin", "b"))
    path.write_text(f"{head}Drop-When: one\nand prose\n---\n{diff}")
    assert series.parse_mail(path).trailers == ()


# lock.json


def lock_of(home: Home) -> Path:
    return home.pin_directory("alpha") / "lock.json"


def rewrite_lock(home: Home, change: Callable[[dict], object], sign: bool = True) -> None:
    body = json.loads(lock_of(home).read_bytes())
    change(body)
    if sign:
        body["digest"] = lock.digest_of(body)
    lock_of(home).write_text(json.dumps(body))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", '{"schema": 1}', "<<<<<<< HEAD\n{}\n", "[" * 100_000, "\xff"]
)
def test_corrupt_lock(mine: Home, tree: Path, text: str) -> None:
    lock_of(mine).write_bytes(text.encode("latin-1"))
    before = kit.snapshot(tree)
    refused(mine.run("--alpha", tree), 7, "lock.json cannot be read", str(lock_of(mine)), "export")
    refused(mine.run("status", "--alpha", tree), 7, "lock.json cannot be read")
    assert kit.snapshot(tree) == before


def unsorted_sources(body: dict) -> None:
    body["files"][LOADER]["post"] = {"sdist": "0" * 64}


def no_sources(body: dict) -> None:
    body["files"][LOADER] |= {"pre": {}, "post": {}}


def no_hash(body: dict) -> None:
    body["overlay"]["python/alpha/fp8_colocate.py"] = "0"


def list_of_files(body: dict) -> None:
    body["files"] = []


@pytest.mark.parametrize("change", [unsorted_sources, no_sources, no_hash, list_of_files])
def test_lock_that_is_signed_but_makes_no_sense(mine: Home, tree: Path, change: Callable[[dict], None]) -> None:
    rewrite_lock(mine, change)
    before = kit.snapshot(tree)
    refused(mine.run("--alpha", tree), 7, "lock.json cannot be read")
    assert kit.snapshot(tree) == before


def test_missing_other_schema_and_edited_lock(mine: Home, tree: Path) -> None:
    before = kit.snapshot(tree)
    rewrite_lock(mine, lambda body: body["overlay"].popitem(), sign=False)
    refused(mine.run("--alpha", tree), 7, "lock.json was edited by hand or damaged", "expected:     digest")
    rewrite_lock(mine, lambda body: body.update(schema=2))
    refused(mine.run("--alpha", tree), 7, "lock of another schema", "expected:     1", "found:        2")
    lock_of(mine).unlink()
    refused(mine.run("--alpha", tree), 7, "no lock for this pin", "export alpha")
    assert kit.snapshot(tree) == before


def overlay_edited(home: Home) -> str:
    home.overlay("alpha", {"python/alpha/layerwise/__init__.py": b"# edited\n"})
    return "overlay python/alpha/layerwise/__init__.py: lock "


def overlay_added(home: Home) -> str:
    home.overlay("alpha", {"python/alpha/more.py": b"# new\n"})
    return "overlay python/alpha/more.py: lock none, found "


def overlay_gone(home: Home) -> str:
    home.overlay("alpha", {"python/alpha/layerwise/__init__.py": None})
    return "found none"


def patch_edited(home: Home) -> str:
    path = home.pin_directory("alpha") / "deep-one.patch"
    path.write_bytes(path.read_bytes().replace(b"The reason.", b"Another reason."))
    return "deep-one.patch: lock "


def series_reordered(home: Home) -> str:
    path = home.pin_directory("alpha") / "series"
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    return "series: lock ['loader-calls-the-overlay', 'second-touch', 'deep-one'], found ['deep-one',"


def other_wheel(home: Home) -> str:
    path = home.directory / "patchset.toml"
    digest = sha256(home.wheels["alpha"].read_bytes())
    path.write_text(path.read_text().replace(digest, "0" * 64))
    return f"wheel: lock {digest}, patchset.toml 0000"


def other_pin(home: Home) -> str:
    shutil.copy(home.pin_directory("beta") / "lock.json", lock_of(home))
    return "made for beta 1.0, used for alpha 1.0"


STALE = [overlay_edited, overlay_added, overlay_gone, patch_edited, series_reordered, other_wheel, other_pin]


@pytest.mark.parametrize("change", STALE)
def test_stale_lock(mine: Home, tree: Path, change: Callable[[Home], str]) -> None:
    detail = change(mine)
    before = kit.snapshot(tree)
    refused(
        mine.run("--alpha", tree),
        7,
        "differ from what lock.json was made from",
        "python apply.py export alpha",
        detail,
    )
    assert kit.snapshot(tree) == before


def test_byte_code_in_the_overlay_is_no_overlay(mine: Home, tree: Path) -> None:
    kit.write_files(
        mine.directory / "overlay/alpha/python/alpha", {"__pycache__/x.cpython-311.pyc": b"x", "y.pyc": b"y"}
    )
    accepted(mine.run("--alpha", tree), "patched")


def test_the_lock_is_reproducible(mine: Home) -> None:
    before = lock_of(mine).read_bytes()
    mine.lock()
    assert lock_of(mine).read_bytes() == before
    made = lock.parse(before, lock_of(mine))
    assert lock.to_json(made) == before
    assert [slug for slug, _ in made.patches] == ["loader-calls-the-overlay", "second-touch", "deep-one"]
    assert made.files[LOADER].source_of(sha256(mine.upstream["alpha"][LOADER]), "pre") == "wheel"


# 4 and 5: a lock that is signed and fresh, and wrong about the bytes


def believed(home: Home, path: str, data: bytes) -> None:
    """Make the lock take `data` for the pin's bytes of `path`."""
    rewrite_lock(home, lambda body: body["files"][path]["pre"].update(wheel=sha256(data)))


def test_patch_that_does_not_apply(mine: Home, tmp_path: Path) -> None:
    files = dict(mine.upstream["alpha"])
    files[DEEP] = kit.replaced(files[DEEP], (b"deep_1 = 1\n", b"other_1 = 1\n"))
    files[ENGINE] = kit.replaced(files[ENGINE], (b"engine_36 = 36\n", b"other = 1\n"))
    for path in (DEEP, ENGINE):
        believed(mine, path, files[path])
    root = kit.checkout(tmp_path / "tree", files)
    before = kit.snapshot(root)
    parts = (
        "2 of 3 patches do not apply",
        "second-touch, deep-one",
        f"{DEEP}:2 (hunk 1): expected 'deep_1 = 1'",
        "found    'other_1 = 1'",
        f"{ENGINE}:37 (hunk 2): expected 'engine_36 = 36'",
        "python apply.py dev alpha",
    )
    refused(mine.run("--alpha", root), 4, *parts)
    refused(mine.run("--alpha", root, "--check"), 4, *parts)
    assert kit.snapshot(root) == before


def test_patch_that_gives_other_bytes(mine: Home, tree: Path) -> None:
    rewrite_lock(mine, lambda body: body["files"][DEEP]["post"].update(wheel="0" * 64))
    before = kit.snapshot(tree)
    refused(
        mine.run("--alpha", tree),
        5,
        "not the recorded one",
        "deep-one",
        DEEP,
        "expected:     sha256 0000",
        "export alpha",
    )
    assert kit.snapshot(tree) == before


def test_un_applying_that_gives_other_bytes(mine: Home, tree: Path) -> None:
    accepted(mine.run("--alpha", tree))
    shutil.rmtree(tree / ".git/fp8-colocate")
    rewrite_lock(mine, lambda body: body["files"][DEEP]["pre"].update(wheel="0" * 64))
    before = kit.snapshot(tree)
    refused(mine.run("--alpha", tree, "--revert"), 5, "un-applying the series does not give upstream's bytes", DEEP)
    assert kit.snapshot(tree) == before


# Making a lock


def raised_by_lock(home: Home, kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        home.lock("alpha")
    return str(caught.value)


def test_a_patch_may_only_modify_files(mine: Home) -> None:
    mine.series("alpha", {"adds": {"python/alpha/added.py": b"x = 1\n"}})
    assert "put new files into overlay/" in raised_by_lock(mine, SeriesInvalid)


def test_a_patch_of_a_file_that_is_not_there(mine: Home) -> None:
    mine.series("alpha", {"uninstalled": {"README.md": b"# other\n"}})
    message = raised_by_lock(mine, SeriesInvalid)
    assert "no source of the pin has a file that a patch touches" in message and "README.md" in message


def test_a_patched_file_must_carry_a_notice(mine: Home) -> None:
    mine.series("alpha", {"text": {"python/alpha/data.txt": b"a newline\n"}})
    assert "must be able to carry a change notice" in raised_by_lock(mine, SeriesInvalid)
    mine.upstream["alpha"] |= {LOADER: b"a = 1"}
    mine.wheels["alpha"] = kit.build_wheel(mine.directory / "dists", "alpha", "1.0", mine.upstream["alpha"])
    mine.write_manifest()
    mine.series("alpha", {"ends": {LOADER: b"a = 2"}})
    assert "must end in a newline" in raised_by_lock(mine, SeriesInvalid)


def test_a_patch_of_other_bytes(mine: Home) -> None:
    files = mine.upstream["alpha"] | {DEEP: kit.numbered("altogether_other")}
    mine.wheels["alpha"] = kit.build_wheel(mine.directory / "dists", "alpha", "1.0", files)
    mine.write_manifest()
    assert "1 of 3 patches do not apply" in raised_by_lock(mine, PatchConflict)


def test_wheel_that_is_not_the_pinned_one(mine: Home) -> None:
    target = mine.manifest.target("alpha")
    mine.wheels["alpha"].write_bytes(b"PK no zip")
    assert "this is not the pinned wheel" in raised_by_lock(mine, WheelInvalid)
    with pytest.raises(WheelInvalid, match="not a wheel"):
        relock.wheel_source(target, mine.wheels["alpha"], None)


def test_several_sources(mine: Home, tmp_path: Path) -> None:
    """A tag whose file differs from the wheel's: the lock knows both, and either tree is patched and reverted."""
    files = mine.upstream["alpha"] | {LOADER: b"# only in the tag\n" + mine.upstream["alpha"][LOADER]}
    root = kit.checkout(tmp_path / "clone", files)
    pins = mine.manifest
    target, pin = pins.target("alpha"), pins.pin(pins.target("alpha"))
    sources = {
        "wheel": relock.wheel_source(target, mine.wheels["alpha"], pin.wheel.sha256),
        "tag": relock.git_source(root, "v1.0"),
    }
    assert relock.write(pins, target, relock.make_lock(pins, target, pin, sources))
    made = lock.parse(lock_of(mine).read_bytes(), lock_of(mine))
    assert made.files[LOADER].pre["tag"] != made.files[LOADER].pre["wheel"]
    assert made.files[DEEP].pre["tag"] == made.files[DEEP].pre["wheel"]
    before = kit.snapshot(root)
    accepted(mine.run("--alpha", root), "patched")
    assert (root / LOADER).read_bytes().startswith(b"# only in the tag\n")
    accepted(mine.run("--alpha", root, "--revert"))
    assert kit.difference(before, kit.snapshot(root)) == []


def test_the_projects_own_locks_are_what_the_tool_makes(dists: Path) -> None:
    """Fresh and reproducible from the official wheels: `export` would change nothing."""
    pins = manifest.load()
    for target in pins.targets.values():
        for pin in target.pins.values():
            made, patches = lock.load(pins, target, pin)
            source = relock.wheel_source(target, dists / pin.wheel.file, pin.wheel.sha256)
            again = relock.make_lock(pins, target, pin, {"wheel": source}, patches)
            assert {p: (f.pre["wheel"], f.post["wheel"]) for p, f in made.files.items()} == {
                p: (f.pre["wheel"], f.post["wheel"]) for p, f in again.files.items()
            }
            assert made.overlay == again.overlay and made.patches == again.patches


# scratch


def test_reverse_check_of_nothing_is_no(home: Home) -> None:
    patch = series.parse_mail(home.pin_directory("alpha") / "deep-one.patch")
    assert not scratch.applies_in_reverse(patch, {})
    assert not scratch.applies_in_reverse(patch, {DEEP: home.upstream["alpha"][DEEP]})
    assert scratch.applies_in_reverse(
        patch, {DEEP: home.upstream["alpha"][DEEP].replace(b"deep_0 = 0", b"deep_0 = 'first'")}
    )


def test_explain_names_what_is_missing(home: Home) -> None:
    patch = series.parse_mail(home.pin_directory("alpha") / "second-touch.patch")
    assert scratch.explain(patch, {}) == [f"{ENGINE}: no such file", f"{LOADER}: no such file"]
    lines = scratch.explain(patch, {ENGINE: b"", LOADER: b""})
    assert lines[1] == f"{ENGINE}:1 (hunk 1): found    '(end of file)'"


def test_no_git_directory(tmp_path: Path) -> None:
    with pytest.raises(tool_git.GitFailed, match="the directory git should run in is gone"):
        tool_git.run(tmp_path / "gone", "status")
    with pytest.raises(tool_git.GitFailed, match="git rev-parse failed with exit code"):
        tool_git.run(tmp_path, "rev-parse", "HEAD")


# patchset.toml


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("schema = 1", "schema = 2", "this tool reads 1"),
        ("schema = 1", "", "KeyError: 'schema'"),
        ("schema = 1", "schema = ", "not valid TOML"),
        ('dist = "alpha-engine"', "", "dist"),
        ('dist = "alpha-engine"', 'distribution = "alpha-engine"', "distribution, which nothing reads"),
        ('tag = "v1.0"', 'hash = "1"', "hash, which nothing reads"),
        ('name = "fp8-colocate"', 'name = "fp8-colocate"\nextra = 1', "extra, which nothing reads"),
        ('pin = "1.0"', 'pin = "9"', "target.alpha.pin = '9' has no"),
        ('sha256 = "', 'sha256 = "x', "is not 64 hex digits"),
        ("revision = 1", 'revision = "one"', "ValueError"),
    ],
)
def test_malformed_manifest(mine: Home, tree: Path, old: str, new: str, part: str) -> None:
    path = mine.directory / "patchset.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    before = kit.snapshot(tree)
    refused(mine.run("--alpha", tree), 7, "patchset.toml", part)
    assert kit.snapshot(tree) == before


def test_missing_manifest_and_override_without_reason(mine: Home) -> None:
    path = mine.directory / "patchset.toml"
    entry = '[[target.alpha.requires_dist]]\nupstream = "x==1"\nreplace = "x==2"\nreason = " "\n'
    path.write_text(path.read_text() + entry)
    with pytest.raises(ManifestInvalid, match="gives no reason"):
        manifest.load(mine.directory)
    path.unlink()
    refused(mine.run("list"), 7, "patchset.toml cannot be read")


def test_manifest_answers(home: Home) -> None:
    pins = home.manifest
    assert pins.local_version("1.0") == "1.0+fc8.1"
    with pytest.raises(UsageError, match="no target 'x'"):
        pins.target("x")
    with pytest.raises(UsageError, match="is not pinned"):
        pins.pin(pins.target("alpha"), "2")
    assert pins.target("alpha").installed_path("python/alpha/x.py") == "alpha/x.py"
    assert pins.target("alpha").installed_path("test/x.py") is None


def test_lock_parse_reports_where(tmp_path: Path) -> None:
    with pytest.raises(LockInvalid) as caught:
        lock.parse(b"{", tmp_path / "lock.json")
    assert caught.value.as_dict()["file"] == str(tmp_path / "lock.json")


# list


def test_list(home: Home, mine: Home) -> None:
    out = accepted(
        home.run("list", "--target", "alpha", "-v"),
        "alpha 1.0  digest",
        "loader-calls-the-overlay",
        "drop when: upstream does it",
    )
    assert "beta" not in out
    body = json.loads(accepted(home.run("list", "--json", "--status", "pend")))
    assert [p["target"] for p in body["pins"]] == ["alpha", "beta", "gamma"]
    assert body["pins"][0]["patches"][1] == {
        "slug": "second-touch",
        "subject": "alpha: second touch",
        "trailers": {"Upstream-Status": "Pending", "Drop-When": "upstream does it", "Origin": "vendor",
                     "License": "Apache-2.0", "Fails-Without": "test/unit/test_layerwise.py::test_it"},
    }  # fmt: skip
    assert json.loads(accepted(home.run("list", "--json", "--status", "Denied")))["pins"][0]["patches"] == []
    mine.series("alpha", {})
    mine.lock("alpha")
    accepted(mine.run("list", "--target", "alpha"), "alpha 1.0")


RECORDS = [
    b"a.py,sha256=x,1\n\nb.py,,\n",  # a blank row
    b"a.py,sha256=x,1\r\nb.py,,\n",  # mixed line ends
    b"a.py,sha256=x,1\nb.py,,",  # no final line end
    "a\u0085b.py,sha256=x,1\nb\u2028.py,,\n".encode(),  # separators that are no line feeds
    b"",
]


@pytest.mark.parametrize("record", RECORDS)
def test_rows_that_are_not_ours_keep_their_bytes(record: bytes) -> None:
    added = state.rewrite_record(record, {"new.py": b"x = 1\n"})
    assert added.rstrip(b"\r\n").startswith(record.rstrip(b"\r\n"))
    assert added.count(b"new.py,sha256=") == 1
    back = state.rewrite_record(added, {"new.py": None})
    assert back.rstrip(b"\r\n") == record.rstrip(b"\r\n")


def test_a_row_with_a_leading_dot_is_the_same_file() -> None:
    assert state.rewrite_record(b"./a.py,sha256=x,1\n", {"a.py": None}) == b""
