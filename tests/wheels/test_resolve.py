# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""The three patched wheels resolve together, and each override of patchset.toml is needed for it.

uv resolves from metadata alone, against the package index, for a platform it is told: nothing is installed, and no
wheel but the three is read. About 30 s of CPU with uv's cache warm. The index must be reachable: an answer other than
a resolution or "no solution" fails the test instead of counting as either.
"""

from __future__ import annotations

import os
import subprocess
import zipfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.version import Version

from patchset import manifest as manifests
from patchset import metadata
from patchset.types import Requirement, Target

MANIFEST = manifests.load()
TARGETS = list(MANIFEST.targets.values())

LOWEST = "x86_64-manylinux_2_34"  # the tag of SGLang's own wheel: nothing else may ask for a newer glibc
NVRX = "x86_64-manylinux_2_39"  # the tag of nvidia-resiliency-ext >= 0.5.0
PURE_SOURCE = ("antlr4-python3-runtime", "wget")  # published as source only, but pure Python: they build anywhere
NVRX_MINIMUM = Version("0.6.0")  # megatron.core.dist_checkpointing.strategies.nvrx raises at import below it
OVERRIDES = [
    pytest.param(t, i, id=f"{t.id}-{metadata.requirement_name(r.upstream)}")
    for t in TARGETS
    for i, r in enumerate(t.requires)
]


class Resolution(NamedTuple):
    """What uv answered: normalised name -> version, or why there is no solution."""

    versions: dict[str, str]
    refusal: str


def resolve(requirements: Iterable[str], links: Path | None, platform: str, source: Iterable[str] = ()) -> Resolution:
    """Resolve for Python 3.12 on `platform` from `links` and the index; only PURE_SOURCE and `source` may be built."""
    command = [os.environ.get("UV", "uv"), "pip", "compile", "-", "--no-header", "--no-annotate", "--quiet"]
    command += ["--python-version", "3.12", "--python-platform", platform, "--only-binary", ":all:"]
    command += [word for name in (*PURE_SOURCE, *source) for word in ("--no-binary", name)]
    command += ["--find-links", str(links)] if links else []
    done = subprocess.run(command, input="\n".join(requirements), capture_output=True, text=True, check=False)
    if done.returncode and "No solution found" not in done.stderr:
        pytest.fail(f"uv could not answer (is the index reachable?): {done.stderr.strip()}")
    if done.returncode:
        return Resolution({}, " ".join(done.stderr.split()))
    return Resolution(dict(line.split("==") for line in done.stdout.splitlines() if "==" in line), "")


def faults(found: Resolution) -> list[str]:
    """What is wrong with an environment that holds `found`; empty when it works."""
    if found.refusal:
        return [found.refusal]
    ours = {t.dist: MANIFEST.local_version(t.pin) for t in TARGETS}
    wrong = [f"{n} {v} is not the patched one" for n, v in found.versions.items() if ours.get(n, v) != v]
    nvrx, cubin = found.versions.get("nvidia-resiliency-ext"), found.versions.get("flashinfer-cubin")
    if nvrx and Version(nvrx) < NVRX_MINIMUM:
        wrong.append(f"nvidia-resiliency-ext {nvrx} stops megatron.core.dist_checkpointing at import")
    if cubin and cubin != found.versions["flashinfer-python"]:
        wrong.append(f"flashinfer-cubin {cubin} stops flashinfer {found.versions['flashinfer-python']} at import")
    return wrong


def patched(target: Target, extra: str = "") -> str:
    return f"{target.dist}{extra}=={MANIFEST.local_version(target.pin)}"


def wheel_of(folder: Path, target: Target) -> Path:
    name = f"{metadata.normalise(target.dist).replace('-', '_')}-{MANIFEST.local_version(target.pin)}-*.whl"
    found = list(folder.glob(name))
    assert len(found) == 1, f"expected one {name} in {folder}, found {sorted(p.name for p in folder.iterdir())}"
    return found[0]


def metadata_only(wheel: Path, folder: Path, edit: Callable[[str], str]) -> None:
    """A wheel of the same name in `folder` that holds nothing but the dist-info, METADATA edited."""
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(folder / wheel.name, "w") as new:
        for name in old.namelist():
            if name.endswith((".dist-info/METADATA", ".dist-info/WHEEL", ".dist-info/RECORD")):
                text = old.read(name).decode()
                new.writestr(name, edit(text) if name.endswith("METADATA") else text)


def undo(override: Requirement, text: str) -> str:
    """METADATA with upstream's line again in place of that override."""
    line = f"Requires-Dist: {override.upstream}\n"
    if not override.replace:
        return text.replace("Requires-Dist: ", line + "Requires-Dist: ", 1)
    ours = f"Requires-Dist: {override.replace}\n"
    assert ours in text, f"the wheel was not made from this patchset.toml: no {ours!r}"
    return text.replace(ours, line)


def test_the_three_wheels_resolve_together(patched_wheels: Path) -> None:
    found = resolve([patched(t) for t in TARGETS], patched_wheels, LOWEST)

    assert faults(found) == []
    assert {t.dist for t in TARGETS} <= set(found.versions)


def test_the_extras_that_were_split_off_resolve_too(patched_wheels: Path) -> None:
    extras = {"megatron": "[dsa]", "megatron-bridge": "[nvrx]"}
    wanted = [patched(t, extras.get(t.id, "")) for t in TARGETS]

    found = resolve(wanted, patched_wheels, NVRX, source=["fast-hadamard-transform"])

    assert faults(found) == []
    assert {"fast-hadamard-transform", "nvidia-resiliency-ext"} <= set(found.versions)


def test_the_upstream_wheels_do_not_resolve() -> None:
    """If they ever do, the overrides can go."""
    found = resolve([f"{t.dist}=={t.pin}" for t in TARGETS], None, NVRX)

    assert "flashinfer-python" in found.refusal


def test_bridge_refuses_the_stock_core(patched_wheels: Path, tmp_path: Path) -> None:
    bridge = MANIFEST.target("megatron-bridge")
    metadata_only(wheel_of(patched_wheels, bridge), tmp_path, edit=str)

    found = resolve([patched(bridge)], tmp_path, LOWEST)

    assert f"megatron-core[dev]=={MANIFEST.local_version(MANIFEST.target('megatron').pin)}" in found.refusal


@pytest.mark.parametrize(("target", "number"), OVERRIDES)
def test_every_override_is_needed(target: Target, number: int, patched_wheels: Path, tmp_path: Path) -> None:
    override = metadata.overrides(MANIFEST, target)[number]
    # A line that ties one target to another matters where the other patched wheel is not to be seen.
    shown = [target] if "{" in target.requires[number].replace else TARGETS
    for each in shown:
        edit = partial(undo, override) if each == target else str
        metadata_only(wheel_of(patched_wheels, each), tmp_path, edit)

    assert faults(resolve([patched(t) for t in shown], tmp_path, LOWEST)) != []
