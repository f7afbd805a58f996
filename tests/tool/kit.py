# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""What the tests of the tool are made of: small upstream projects with real git histories and wheels, a patch set for
them in a home of its own, trees of every kind, and snapshots that see every byte, mode and directory.

A home holds a copy of the tool, so `home.run("--alpha", tree)` is what a user types.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from patchset import manifest, relock
from patchset.download import pip_command

ROOT = Path(__file__).resolve().parents[2]
SPDX = "# SPDX-License-Identifier: Apache-2.0\n# Copyright 2026 The fp8-colocate authors\n"
NOTICE = b"# Modified by fp8-colocate; fp8_colocate.py in this package says how to list the changes.\n"
TRAILERS = (
    "Upstream-Status: Pending\nDrop-When: upstream does it\nOrigin: vendor\nLicense: Apache-2.0\n"
    "Fails-Without: test/unit/test_layerwise.py::test_it\n"
)

# Upstream layouts as the three real targets have them: below python/, at the same path, below src/ in a namespace
TARGETS = {
    "alpha": ("alpha-engine", "alpha", "python/alpha/", "alpha/", "python/alpha/version.py"),
    "beta": ("beta-core", "beta.core", "beta/core/", "beta/core/", "beta/core/package_info.py"),
    "gamma": ("beta-bridge", "beta.bridge", "src/beta/bridge/", "beta/bridge/", "src/beta/bridge/package_info.py"),
}


def numbered(name: str, count: int = 40) -> bytes:
    """A module of `count` lines that differ from each other."""
    return "".join(f"{name}_{i} = {i}\n" for i in range(count)).encode()


BLOCK = b"def step(x):\n    y = x + 1\n    return y\n\n\n"


def upstream_files(target: str, version: str = "1.0") -> dict[str, bytes]:
    """The files of one small upstream project, by upstream path."""
    _, _, prefix, _, marker = TARGETS[target]
    files = {
        f"{prefix}__init__.py": b'"""A package."""\n',
        f"{prefix}engine.py": numbered("engine"),
        f"{prefix}loader.py": numbered("loader"),
        f"{prefix}sub/deep.py": numbered("deep"),
        f"{prefix}sub/__init__.py": b"",
        f"{prefix}twins.py": BLOCK + BLOCK + numbered("tail", 10),
        f"{prefix}data.txt": b"no newline at the end",
        "README.md": b"# upstream\n",
        "pyproject.toml": b"[project]\nname = 'x'\n",
        "test/test_engine.py": b"def test(): pass\n",
    }
    major, minor = version.split(".")[:2]
    files[marker] = (
        f'__version__ = "{version}"\n' if target == "alpha" else f"MAJOR = {major}\nMINOR = {minor}\nPATCH = 0\n"
    ).encode()
    return files


def replaced(data: bytes, *pairs: tuple[bytes, bytes]) -> bytes:
    """`data` with each first occurrence replaced; a text that is not there is a fault of the test."""
    for old, new in pairs:
        if old not in data:
            raise AssertionError(f"{old!r} is not in the file")
        data = data.replace(old, new, 1)
    return data


# git


def git_env(**extra: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    who = {
        "NAME": "fp8-colocate maintainers",
        "EMAIL": "maintainers@example.invalid",
        "DATE": "2026-01-01T00:00:00+00:00",
    }
    env |= {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in who.items()}
    return env | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", **extra}


def git(directory: Path, *args: str | Path, stdin: bytes | None = None) -> str:
    command = ["git", "-c", "init.defaultBranch=main", "-c", "protocol.file.allow=always", "-c", "core.autocrlf=false"]
    done = subprocess.run(
        [*command, *map(str, args)], cwd=directory, env=git_env(), input=stdin, capture_output=True, check=False
    )
    if done.returncode != 0:
        raise AssertionError(f"git {args} in {directory}: {done.stderr.decode()}")
    return done.stdout.decode(errors="surrogateescape")


def commit(directory: Path, message: str) -> str:
    git(directory, "add", "-A", "-f")
    git(directory, "commit", "-q", "--no-verify", "-F", "-", stdin=message.encode())
    return git(directory, "rev-parse", "HEAD").strip()


def format_patch(repository: Path, sha: str) -> bytes:
    flags = "--zero-commit --full-index --no-signature --no-stat -N --no-attach --stdout -1".split()
    mail = git(repository, "-c", "diff.renames=true", "-c", "format.signature=", "format-patch", *flags, sha)
    return mail.encode(errors="surrogateescape")


def write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    for path, data in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data)


# Wheels and installs


def wheel_bytes_of(target: str, version: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The members of the wheel of an upstream project."""
    dist, _, prefix, installed, _ = TARGETS[target]
    name = dist.replace("-", "_")
    info = f"{name}-{version}.dist-info"
    members = {installed + path.removeprefix(prefix): data for path, data in files.items() if path.startswith(prefix)}
    members[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n".encode()
    members[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    rows = [f"{path},sha256={_b64(data)},{len(data)}\n" for path, data in members.items()]
    members[f"{info}/RECORD"] = ("".join(rows) + f"{info}/RECORD,,\n").encode()
    return members


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def build_wheel(directory: Path, target: str, version: str, files: Mapping[str, bytes]) -> Path:
    dist = TARGETS[target][0]
    path = directory / f"{dist.replace('-', '_')}-{version}-py3-none-any.whl"
    directory.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in wheel_bytes_of(target, version, files).items():
            archive.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0)), data)
    return path


def pip(*args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run pip offline."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    flags = ["--disable-pip-version-check", "--no-input"]
    done = subprocess.run(
        [*pip_command(), *flags, *map(str, args)], env=env, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise AssertionError(f"pip {args}: {done.stdout}{done.stderr}")
    return done


def pip_install(site: Path, *wheels: Path, compile: bool = False) -> None:
    """`pip install --target`, for whatever Python a wheel is made for."""
    flags = ["--no-deps", "--no-index", "--upgrade", "--quiet", "--ignore-requires-python"]
    platform = "--only-binary=:all: --python-version=3.12 --implementation=cp --abi=cp312 --abi=none".split()
    platform += [f"--platform={p}" for p in ("manylinux_2_34_x86_64", "manylinux_2_28_x86_64", "any")]
    pip("install", *flags, *platform, "--compile" if compile else "--no-compile", "--target", site, *wheels)


def record_faults(site: Path) -> list[str]:
    """Rows of every RECORD that disagree with the files, and files of a package that no RECORD lists."""
    faults, listed = [], set()
    for record in site.glob("*.dist-info/RECORD"):
        for path, hashed, size in csv.reader(record.read_text(encoding="utf-8").splitlines()):
            listed.add(path)
            if path.startswith("../") or not hashed:
                continue
            data = (site / path).read_bytes() if (site / path).exists() else b"(missing)"
            if hashed != f"sha256={_b64(data)}" or int(size) != len(data):
                faults.append(f"{record.parent.name}: {path}")
    for path in site.rglob("*"):
        name = path.relative_to(site).as_posix()
        if path.is_file() and "__pycache__" not in name and name.split("/")[0] != "bin" and name not in listed:
            faults.append(f"not listed: {name}")
    return faults


# Snapshots


def snapshot(root: Path, skip: Sequence[str] = ()) -> dict[str, tuple]:
    """Every file, directory and link below `root`: kind, mode, and sha256 or link target."""
    seen: dict[str, tuple] = {}
    for place, directories, files in os.walk(root):
        for name in (*directories, *files):
            path = Path(place, name)
            relative = path.relative_to(root).as_posix()
            if any(relative == s or relative.startswith(s + "/") for s in skip):
                continue
            seen[relative] = _describe(path)
    return seen


def _describe(path: Path) -> tuple:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return ("link", os.readlink(path))
    if stat.S_ISREG(mode):
        return ("file", stat.S_IMODE(mode), hashlib.sha256(path.read_bytes()).hexdigest())
    return ("directory" if stat.S_ISDIR(mode) else "other", stat.S_IMODE(mode))


def stamps(root: Path) -> dict[str, tuple]:
    """Inode, mtime and ctime of everything below `root`: a write shows, even one of equal bytes."""
    seen = {}
    for place, directories, files in os.walk(root):
        for name in ("", *directories, *files):
            info = Path(place, name).lstat()
            seen[os.path.join(place, name)] = (info.st_ino, info.st_mtime_ns, info.st_ctime_ns)
    return seen


def difference(before: Mapping[str, tuple], after: Mapping[str, tuple]) -> list[str]:
    """What differs between two snapshots, for a readable failure."""
    names = sorted(before.keys() | after.keys())
    return [f"{n}: {before.get(n)} -> {after.get(n)}" for n in names if before.get(n) != after.get(n)]


# The patch set


class Home:
    """A patch set for the small upstream projects, in a directory of its own, with a copy of the tool."""

    def __init__(self, directory: Path, targets: Sequence[str] = tuple(TARGETS)) -> None:
        self.directory = directory
        self.targets = tuple(targets)
        self.upstream = {target: upstream_files(target) for target in self.targets}
        self.wheels: dict[str, Path] = {}
        directory.mkdir(parents=True)
        copy_tool(directory)
        for target in self.targets:
            self.wheels[target] = build_wheel(directory / "dists", target, "1.0", self.upstream[target])
            self.pin_directory(target).mkdir(parents=True)
        self.write_manifest()
        write_files(directory / "overlay" / "shared", {"fp8_colocate.py": SPDX.encode() + b"GUARD = True\n"})

    def pin_directory(self, target: str, version: str = "1.0") -> Path:
        return self.directory / "patches" / target / version

    def write_manifest(self, extra_pins: Mapping[str, str] | None = None) -> None:
        """patchset.toml; `extra_pins` maps a target to one more pinned version, whose wheel is in dists/."""
        lines = ["schema = 1", 'name = "fp8-colocate"', 'tag = "fc8"', "revision = 1"]
        for target in self.targets:
            dist, module, prefix, installed, marker = TARGETS[target]
            lines += [f"[target.{target}]", f'dist = "{dist}"', f'module = "{module}"', 'repo = "https://invalid"']
            lines += ['licence = "Apache-2.0"', 'pin = "1.0"', f'marker = "{marker}"', f'version_files = ["{marker}"]']
            lines += [f"[target.{target}.layout]", f'"{prefix}" = "{installed}"']
            lines += [f"[target.{target}.shared]", f'"{prefix}fp8_colocate.py" = "fp8_colocate.py"']
            for version in ("1.0", *([extra_pins[target]] if extra_pins and target in extra_pins else [])):
                wheel = next((self.directory / "dists").glob(f"{dist.replace('-', '_')}-{version}-*.whl"))
                digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
                lines += [f'[target.{target}.pins."{version}"]', f'tag = "v{version}"']
                lines += [f'wheel = {{ file = "{wheel.name}", sha256 = "{digest}" }}']
        (self.directory / "patchset.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")

    @property
    def manifest(self) -> manifest.Manifest:
        return manifest.load(self.directory)

    def series(self, target: str, edits: Mapping[str, Mapping[str, bytes]], version: str = "1.0") -> None:
        """Replace the series: slug -> {upstream path: its bytes after that patch}, each patch a real commit."""
        place = self.pin_directory(target, version)
        place.mkdir(parents=True, exist_ok=True)
        for old in place.glob("*.patch"):
            old.unlink()
        repository = self.directory / "dev"
        shutil.rmtree(repository, ignore_errors=True)
        repository.mkdir()
        git(repository, "init", "-q")
        write_files(repository, self.upstream[target] if version == "1.0" else upstream_files(target, version))
        commit(repository, "upstream")
        for slug, files in edits.items():
            write_files(repository, files)
            sha = commit(repository, f"{target}: {slug.replace('-', ' ')}\n\nThe reason.\n\n{TRAILERS}")
            (place / f"{slug}.patch").write_bytes(format_patch(repository, sha))
        (place / "series").write_text("".join(f"{slug}\n" for slug in edits), encoding="utf-8")
        shutil.rmtree(repository)

    def overlay(self, target: str, files: Mapping[str, bytes | None]) -> None:
        """Write (or with None remove) overlay files."""
        root = self.directory / "overlay" / target
        write_files(root, {p: d for p, d in files.items() if d is not None})
        for path in (p for p, d in files.items() if d is None):
            (root / path).unlink()

    def lock(self, *targets: str, version: str = "1.0") -> None:
        """Write lock.json of every (named) target."""
        pins = self.manifest
        for target_id in targets or self.targets:
            target = pins.target(target_id)
            pin = pins.pin(target, version)
            source = relock.wheel_source(target, self.directory / "dists" / pin.wheel.file, pin.wheel.sha256)
            relock.write(pins, target, relock.make_lock(pins, target, pin, {"wheel": source}))

    def run(self, *args: object, **kwargs) -> subprocess.CompletedProcess[str]:
        """`python apply.py ARGS` as a user runs it."""
        return run_tool(self.directory, *args, **kwargs)

    def copy(self, directory: Path) -> Home:
        """The same patch set somewhere else, to be changed."""
        shutil.copytree(self.directory, directory)
        twin = object.__new__(Home)
        twin.__dict__ |= self.__dict__ | {"directory": directory}
        twin.upstream = {target: dict(files) for target, files in self.upstream.items()}
        twin.wheels = {t: directory / "dists" / w.name for t, w in self.wheels.items()}
        return twin


def copy_tool(directory: Path) -> None:
    """The launcher and the package, as a clone of the project has them."""
    shutil.copy2(ROOT / "apply.py", directory / "apply.py")
    shutil.copytree(ROOT / "patchset", directory / "patchset", ignore=shutil.ignore_patterns("__pycache__"))


def run_tool(
    home: Path, *args: object, env: Mapping[str, str] | None = None, **kwargs
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(home / "apply.py"), *map(str, args)]
    return subprocess.run(
        command,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        **kwargs,
    )


def standard_home(directory: Path) -> Home:
    """The patch set most tests use: overlapping patches, new files in new directories, a test for checkouts only."""
    home = Home(directory)
    for target in home.targets:
        prefix = TARGETS[target][2]
        upstream = home.upstream[target]
        loader = replaced(
            upstream[f"{prefix}loader.py"], (b"loader_5 = 5\n", b"loader_5 = 'patched'\nloader_5b = 1\n")
        )
        again = replaced(loader, (b"loader_5b = 1\n", b"loader_5b = 2\n"), (b"loader_30 = 30\n", b""))
        engine = replaced(
            upstream[f"{prefix}engine.py"],
            (b"engine_2 = 2\n", b"engine_2 = 'a'\n"),
            (b"engine_37 = 37\n", b"engine_37 = 'b'\n"),
        )
        deep = replaced(upstream[f"{prefix}sub/deep.py"], (b"deep_0 = 0\n", b"deep_0 = 'first'\n"))
        home.series(target, {
            "loader-calls-the-overlay": {f"{prefix}loader.py": loader},
            "second-touch": {f"{prefix}loader.py": again, f"{prefix}engine.py": engine},
            "deep-one": {f"{prefix}sub/deep.py": deep},
        })  # fmt: skip
        home.overlay(target, {
            f"{prefix}layerwise/__init__.py": SPDX.encode(),
            f"{prefix}layerwise/inner/session.py": SPDX.encode() + b"STATE = 1\n",
            "test/unit/test_layerwise.py": SPDX.encode() + b"def test_it(): pass\n",
        })  # fmt: skip
    home.lock()
    return home


# Trees


def checkout(directory: Path, files: Mapping[str, bytes], tag: str = "v1.0") -> Path:
    """A clone with one commit, as an upstream release is."""
    directory.mkdir(parents=True)
    git(directory, "init", "-q")
    write_files(directory, files)
    commit(directory, "release")
    git(directory, "tag", tag)
    return directory


def source_tree(directory: Path, files: Mapping[str, bytes]) -> Path:
    """Upstream's layout without a .git: an unpacked archive."""
    write_files(directory, {**files, "PKG-INFO": b"Metadata-Version: 2.1\nName: x\nVersion: 1.0\n"})
    return directory


def unpacked_wheel(directory: Path, wheel: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    return directory


def state_of(directory: Path) -> dict:
    return json.loads((directory / "state.json").read_bytes())


# Expectations


def refused(done: subprocess.CompletedProcess[str], code: int, *parts: str) -> str:
    """The command failed with `code` and one readable message that holds every part; returns the message."""
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert done.stderr.startswith(("error: ", "waiting ")), done.stderr
    for part in parts:
        assert str(part) in done.stderr, (part, done.stderr)
    return done.stderr


def accepted(done: subprocess.CompletedProcess[str], *parts: str) -> str:
    """The command succeeded and said every part on stdout."""
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    for part in parts:
        assert str(part) in done.stdout, (part, done.stdout)
    return done.stdout
