# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""kill -9, a failing call or Ctrl-C at every step of the swap; a rerun ends where an undisturbed run ends.

A child process runs the tool with the file-system calls of os counted, and dies at the n-th one, for n = 1, 2, ...
until it lives through. Half of a write is a step of its own. The series is run once a test: it is a pure function.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from patchset import engine, scratch, swap
from patchset.errors import Interrupted, PatchsetError
from tests.tool import kit
from tests.tool.kit import Home, accepted, refused

COUNTED = ("replace", "unlink", "mkdir", "rmdir", "open", "fsync", "fchmod", "fdopen")


def small_home(directory: Path) -> Home:
    """One patched file, one new file in a new directory and the guard for each target: few steps of every sort."""
    home = Home(directory)
    for target in home.targets:
        prefix = kit.TARGETS[target][2]
        loader = kit.replaced(home.upstream[target][f"{prefix}loader.py"], (b"loader_5 = 5\n", b"loader_5 = 'a'\n"))
        home.series(target, {"one": {f"{prefix}loader.py": loader}})
        home.overlay(target, {f"{prefix}new/inner/session.py": kit.SPDX.encode() + b"STATE = 1\n"})
    home.lock()
    return home


def later_home(home: Home, directory: Path) -> Home:
    """Another file is patched, the first one no more; another new file, the first one gone."""
    later = home.copy(directory)
    for target in later.targets:
        prefix = kit.TARGETS[target][2]
        file = kit.replaced(later.upstream[target][f"{prefix}engine.py"], (b"engine_5 = 5\n", b"engine_5 = 'a'\n"))
        later.series(target, {"two": {f"{prefix}engine.py": file}})
        later.overlay(target, {f"{prefix}new/inner/session.py": None, f"{prefix}newer/other.py": kit.SPDX.encode()})
    later.lock()
    return later


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return small_home(tmp_path_factory.mktemp("small") / "home")


@pytest.fixture(scope="module")
def later(small: Home, tmp_path_factory: pytest.TempPathFactory) -> Home:
    return later_home(small, tmp_path_factory.mktemp("later") / "home")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: the tree is made anew for every step."""
    with fast_directory(tmp_path) as directory:
        yield directory


@contextlib.contextmanager
def fast_directory(otherwise: Path) -> Iterator[Path]:
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield otherwise
        return
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)


@pytest.fixture(autouse=True)
def remembered_series(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[tuple, dict[str, bytes]] = {}

    def remember(function: Callable) -> Callable:
        def call(patches, files, target):
            key = (function.__name__, tuple(p.sha256 for p in patches), tuple(sorted(files.items())))
            if key not in known:
                known[key] = function(patches, files, target)
            return dict(known[key])

        return call

    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # counted still; SIGKILL loses nothing that was written
    for name in ("apply_series", "revert_series"):
        monkeypatch.setattr(scratch, name, remember(getattr(scratch, name)))


class Scene:
    """A tree with one or three targets, a command to disturb, and the end states it may have."""

    def __init__(self, small: Home, later: Home, place: Path, num_targets: int, action: str) -> None:
        self.place, self.root = place, place / "work"
        self.home = later if action == "upgrade" else small
        self.planner = engine.plan_revert if action == "revert" else engine.plan_apply
        self.targets = kit.TARGETS if num_targets == 3 else ["beta"]
        start = place / "start"
        files = small.upstream["alpha"]
        if "alpha" in self.targets:
            kit.checkout(start / "clone", {p: d for p, d in files.items() if p.count("/") > 1 and "sub" not in p})
        for target in self.targets:
            if target != "alpha":
                kit.unpacked_wheel(start / "site", small.wheels[target])
        for info in (start / "site").glob("*.dist-info"):
            (info / "INSTALLER").write_text("pip\n")
        shutil.copytree(start, self.root)
        self.pristine = kit.snapshot(self.root)
        if action != "apply":
            self.run_all(small, engine.plan_apply)
            shutil.rmtree(start)
            shutil.copytree(self.root, start)
        self.before = kit.snapshot(self.root)
        self.run()
        self.goal = kit.snapshot(self.root)

    def requests(self, home: Home) -> list[engine.Request]:
        places = {"alpha": self.root / "clone", "beta": self.root / "site", "gamma": self.root / "site"}
        return [engine.Request(home.manifest.target(t), places[t]) for t in self.targets]

    def run_all(self, home: Home, planner: engine.Planner, check: bool = False) -> list[engine.Outcome]:
        return engine.run(home.manifest, self.requests(home), planner, 10, check)

    def run(self) -> list[engine.Outcome]:
        return self.run_all(self.home, self.planner)

    def reset(self) -> None:
        shutil.rmtree(self.root)
        shutil.copytree(self.place / "start", self.root, symlinks=True)

    def journals(self) -> list[Path]:
        return list(self.root.rglob(swap.JOURNAL))

    def check_no_half_file(self) -> None:
        """Every file of the tree holds its bytes before or after, and nothing but ours came or went."""
        for path, seen in kit.snapshot(self.root).items():
            ours = ".fc8-" in path or "fp8-colocate/" in path
            if seen[0] == "file" and not ours:
                assert seen in (self.before.get(path), self.goal.get(path)), path

    def check_rerun(self) -> None:
        """The same command again ends at the goal; a revert then gives upstream's tree."""
        self.run()
        assert kit.difference(self.goal, kit.snapshot(self.root)) == []
        self.run_all(self.home, engine.plan_revert)
        assert kit.difference(self.pristine, kit.snapshot(self.root)) == []


def counted(at: int, strike: Callable[[], None], names: tuple[str, ...] = COUNTED) -> contextlib.ExitStack:
    """os with the calls that change a file system counted; the `at`-th one strikes before it is made."""
    left = [at]
    stack = contextlib.ExitStack()

    def wrap(name: str, real: Callable) -> Callable:
        def call(*args, **kwargs):
            if name == "open" and not args[1] & os.O_CREAT:
                return real(*args, **kwargs)
            left[0] -= 1
            if left[0] == 0:
                strike()
            return Half(real(*args, **kwargs), left, strike) if name == "fdopen" else real(*args, **kwargs)

        return call

    for name in names:
        real = getattr(os, name)
        stack.callback(setattr, os, name, real)
        setattr(os, name, wrap(name, real))
    return stack


class Half:
    """A file whose write may be struck after half of its bytes."""

    def __init__(self, file, left: list[int], strike: Callable[[], None]) -> None:
        self.file, self.left, self.strike = file, left, strike

    def __enter__(self) -> Half:
        return self

    def __exit__(self, *error) -> None:
        self.file.close()

    def write(self, data: bytes) -> None:
        self.left[0] -= 1
        if self.left[0] == 0:
            self.file.write(data[: len(data) // 2])
            self.file.flush()
            self.strike()
        self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_at(scene: Scene, at: int) -> bool:
    """Run the command in a child that dies at its `at`-th step; False when it lived through."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with counted(at, die):
                scene.run()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.waitstatus_to_exitcode(status) == 0
    return False


def steps(try_at: Callable[[int], bool], stride: int = 1) -> Iterator[int]:
    """1, 1 + stride, ... as long as the command does not live through."""
    at = 1
    while try_at(at):
        yield at
        at += stride
    assert at > 40, "the swap was hardly counted"


ACTIONS = pytest.mark.parametrize("action", ["apply", "revert", "upgrade"])
TARGETS = pytest.mark.parametrize("num_targets", [1, 3])


@ACTIONS
@TARGETS
def test_kill_at_every_step(small: Home, later: Home, place: Path, num_targets: int, action: str) -> None:
    scene = Scene(small, later, place, num_targets, action)
    seen = set()

    def try_at(at: int) -> bool:
        scene.reset()
        return killed_at(scene, at)

    for at in steps(try_at, stride=1 if num_targets == 1 else 10):
        scene.check_no_half_file()
        seen.add(bool(scene.journals()))
        if scene.journals() and at % 5 == 0:
            left = kit.snapshot(scene.root)
            with pytest.raises(Interrupted, match="an earlier run was interrupted here"):
                scene.run_all(scene.home, scene.planner, check=True)
            states = [s.value for _, s in engine.status(scene.home.manifest, scene.requests(scene.home))]
            assert "mixed" in states
            assert kit.snapshot(scene.root) == left, "looking changed something"
        scene.check_rerun()
    assert kit.difference(scene.goal, kit.snapshot(scene.root)) == []
    assert seen == {True, False}


@ACTIONS
def test_kill_during_recovery(small: Home, later: Home, place: Path, action: str) -> None:
    """The run is killed, the next one is killed while it recovers, the third one ends at the goal."""
    scene = Scene(small, later, place, 3, action)
    chance = random.Random(f"recovery {action}")
    num_killed_twice = 0
    for _ in range(20):
        scene.reset()
        assert killed_at(scene, chance.randint(10, 200)), "fewer steps than thought"
        num_killed_twice += killed_at(scene, chance.randint(1, 60))
        scene.check_no_half_file()
        scene.check_rerun()
    assert num_killed_twice > 10


def files_of(snapshot: dict[str, tuple]) -> dict[str, tuple]:
    """The files of a snapshot that are upstream's or new, without our own bookkeeping."""
    ours = (".fc8-", "fp8-colocate/", ".fp8-colocate", "RECORD")
    return {path: seen for path, seen in snapshot.items() if seen[0] == "file" and not any(o in path for o in ours)}


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def control_c() -> None:
    raise KeyboardInterrupt


@ACTIONS
@pytest.mark.parametrize("strike", [no_space, control_c])
def test_failing_call_at_every_step(small: Home, later: Home, place: Path, action: str, strike: Callable) -> None:
    """All targets or none: an error before the last file is in place takes everything back, directories included."""
    scene = Scene(small, later, place, 3, action)
    untouched = 0
    # an rmdir that fails is how the tool learns that a directory is not empty
    names = tuple(name for name in COUNTED if name != "rmdir" or strike is control_c)

    def try_at(at: int) -> bool:
        struck.clear()
        scene.reset()
        with contextlib.suppress(OSError, PatchsetError, KeyboardInterrupt), counted(at, note_and_strike, names):
            scene.run()
        return bool(struck)

    struck: list[bool] = []

    def note_and_strike() -> None:
        struck.append(True)
        strike()

    for _ in steps(try_at, stride=5):
        left = kit.snapshot(scene.root)
        if left == scene.before:
            untouched += 1
            continue
        assert files_of(left) in (files_of(scene.before), files_of(scene.goal)), "some targets only"
        scene.check_rerun()
    assert untouched > 20


def test_random_kills_of_the_real_command(small: Home, later: Home, place: Path) -> None:
    scene = Scene(small, later, place, 3, "apply")
    flags = ["--alpha", scene.root / "clone", "--beta", scene.root / "site", "--gamma", scene.root / "site"]
    scene.reset()
    started = time.monotonic()
    accepted(small.run(*flags))
    usual_s = time.monotonic() - started
    assert kit.difference(scene.goal, kit.snapshot(scene.root)) == []
    chance, num_killed, num_runs = random.Random(20), 0, 0
    while num_killed < 20 and num_runs < 60:
        num_runs += 1
        scene.reset()
        run = subprocess.Popen(
            [sys.executable, small.directory / "apply.py", *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(timeout=chance.uniform(0.1, 1.0) * usual_s)
        run.kill()
        num_killed += run.wait() == -signal.SIGKILL
        scene.check_no_half_file()
        scene.check_rerun()
    assert num_killed >= 5


# What an interrupted run left, and what others made of it


@pytest.fixture(scope="module")
def interrupted(small: Home, later: Home, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A tree whose run was killed in the middle of the replacements: one file is new, the others are old."""
    with fast_directory(tmp_path_factory.mktemp("halfway")) as directory:
        scene = Scene(small, later, directory, 1, "apply")
        fresh, at = 0, 20
        while fresh < 4:
            scene.reset()
            assert killed_at(scene, at), "no commit phase seen"
            journals = scene.journals()
            fresh += bool(journals) and json.loads(journals[0].read_bytes())["phase"] == "commit"
            at += 1
        yield scene


@pytest.fixture
def halfway(tmp_path: Path, interrupted: Scene) -> Scene:
    """The same in a place of its own."""
    scene = copy.copy(interrupted)
    scene.place, scene.root = tmp_path, tmp_path / "work"
    shutil.copytree(interrupted.root, scene.root)
    return scene


def flags_of(scene: Scene) -> list[object]:
    return ["--beta", scene.root / "site"]


def test_the_next_run_says_what_it_did(small: Home, halfway: Scene) -> None:
    status = small.run("status", *flags_of(halfway))
    refused(status, 3, "mixed")
    assert "an interrupted run waits for recovery" in status.stdout
    refused(small.run("--check", *flags_of(halfway)), 6, "interrupted", "finishes or undoes it")
    accepted(small.run(*flags_of(halfway)), "already patched", "an interrupted run was finished first")
    assert kit.difference(halfway.goal, kit.snapshot(halfway.root)) == []


def test_a_file_was_changed_after_the_interruption(small: Home, halfway: Scene) -> None:
    loader = halfway.root / "site/beta/core/loader.py"
    saved = loader.read_bytes()
    loader.write_bytes(b"edited = True\n")
    before = kit.snapshot(halfway.root)
    message = refused(small.run(*flags_of(halfway)), 6, "changed since", str(loader), f"to {loader}")
    assert refused(small.run("--revert", *flags_of(halfway)), 6, "changed since") == message
    assert kit.snapshot(halfway.root) == before
    loader.write_bytes(saved)
    halfway.check_rerun()


def journal_of(*paths: object, phase: str = "prepare", directories: object = ()) -> str:
    entries = [{"path": path, "before": None, "after": None} for path in paths]
    return json.dumps({"phase": phase, "directories": directories, "entries": entries})


DAMAGED = ["", "{", "[]", "{}", "null", "\xff\xfe", '{"phase": "prepare"}', journal_of(phase="later")]
DAMAGED += [journal_of(["root", "../../x"]), journal_of(["root", "/etc/x"]), journal_of("beta/core")]
DAMAGED += [journal_of(directories=[["away", "x"]])]


@pytest.mark.parametrize("text", DAMAGED)
def test_damaged_journal(small: Home, halfway: Scene, text: str) -> None:
    journal = halfway.journals()[0]
    good = journal.read_bytes()
    journal.write_bytes(text.encode("latin-1"))
    before = kit.snapshot(halfway.root)
    for command in ([], ["--check"], ["--revert"], ["status"]):
        message = refused(
            small.run(*command, *flags_of(halfway)), 6, "the journal of an interrupted run cannot be read"
        )
        assert str(journal) in message and "target:       beta" in message
    assert kit.snapshot(halfway.root) == before
    journal.write_bytes(good)
    halfway.check_rerun()


def test_a_copy_of_an_interrupted_tree_leaves_the_original_alone(small: Home, halfway: Scene) -> None:
    copy = halfway.place / "copy"
    shutil.copytree(halfway.root, copy)
    before = kit.snapshot(halfway.root)
    accepted(small.run("--beta", copy / "site"))
    assert kit.difference(halfway.goal, kit.snapshot(copy)) == []
    assert kit.snapshot(halfway.root) == before


def test_an_interrupted_tree_may_be_moved(small: Home, halfway: Scene) -> None:
    moved = halfway.root.with_name("moved")
    halfway.root.rename(moved)
    accepted(small.run("--beta", moved / "site"))
    assert kit.difference(halfway.goal, kit.snapshot(moved)) == []


def test_a_directory_became_a_link_after_the_interruption(small: Home, halfway: Scene) -> None:
    core = halfway.root / "site/beta/core"
    core.rename(halfway.place / "core")
    core.symlink_to(halfway.place / "core")
    before = kit.snapshot(halfway.place)
    refused(small.run(*flags_of(halfway)), 1, "symbolic link", str(core))
    assert kit.snapshot(halfway.place) == before


def test_changed_between_planning_and_swapping(small: Home, later: Home, place: Path) -> None:
    """The bytes on disk are compared once more at the moment of the swap; a stranger's change undoes it all."""
    scene = Scene(small, later, place, 1, "apply")
    loader = scene.root / "site/beta/core/loader.py"
    for seen_by in ("prepare", "commit"):
        scene.reset()
        real = getattr(swap.Swap, seen_by)

        def meddle(self, real=real) -> None:
            loader.write_bytes(b"stranger = 1\n")
            real(self)

        with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted, match="a file changed while"):
            patch.setattr(swap.Swap, seen_by, meddle)
            scene.run()
        assert loader.read_bytes() == b"stranger = 1\n"
        assert [d for d in kit.difference(scene.before, kit.snapshot(scene.root)) if "loader.py" not in d] == []
