# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors

"""Megatron Bridge imports where Transformer Engine does not, and says so where it is needed."""

import json
import subprocess
import sys

import pytest


MODULES = [
    "megatron.bridge",
    "megatron.bridge.peft.lora",
    "megatron.bridge.peft.canonical_lora",
    "megatron.bridge.peft.lora_layers",
    "megatron.bridge.peft.utils",
    "megatron.bridge.models",
    "megatron.bridge.models.conversion.peft_bridge",
    "megatron.bridge.models.gpt_full_te_layer_autocast_spec",
    "megatron.bridge.models.gpt_provider",
]

# Runs in its own interpreter: an import that went through once cannot be taken back.
PROBE = """
import importlib, json, sys, traceback
sys.modules["transformer_engine"] = None  # makes every import of it raise ModuleNotFoundError
imports, uses = {}, {}
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
        imports[name] = "ok"
    except Exception:
        imports[name] = traceback.format_exc()

def use(label, call):
    try:
        uses[label] = ["returned", repr(call())]
    except Exception as exc:
        kind = "ImportError" if isinstance(exc, ImportError) else type(exc).__name__
        uses[label] = [kind, str(exc)]

if set(imports.values()) == {"ok"}:
    import torch
    from megatron.bridge.models import gpt_full_te_layer_autocast_spec as spec
    from megatron.bridge.peft.lora_layers import LoRALinear, TEFusedLoRALinear
    linear = torch.nn.Linear(2, 2, device="cpu")
    use("TEFusedLoRALinear", lambda: TEFusedLoRALinear(linear, linear))
    use("AutocastTransformerLayer", lambda: spec.AutocastTransformerLayer(8, 8, 1e-5, 1, None, None, 0.0, 0.0))
    use("TETransformerLayerAutocast", lambda: spec.TETransformerLayerAutocast(None))
    use("get_gpt_full_te_layer_autocast_spec", lambda: spec.get_gpt_full_te_layer_autocast_spec(None))
    use("LoRALinear", lambda: LoRALinear(linear, linear))
print("PROBE" + json.dumps([imports, uses]))
"""


@pytest.fixture(scope="module")
def probe() -> tuple[dict[str, str], dict[str, list[str]]]:
    """(module -> "ok" or traceback, object -> [error class, message]) seen without Transformer Engine."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(MODULES)], capture_output=True, text=True, timeout=300
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("PROBE")]
    assert lines, f"the probe died with exit code {done.returncode}:\n{done.stderr[-4000:]}"
    imports, uses = json.loads(lines[0].removeprefix("PROBE"))
    return imports, uses


def test_package_imports(probe):
    imports, _ = probe
    failed = {name: trace for name, trace in imports.items() if trace != "ok"}
    assert not failed, "\n".join(failed.values())


def test_needing_transformer_engine_raises_import_error(probe):
    _, uses = probe
    for label in (
        "TEFusedLoRALinear",
        "AutocastTransformerLayer",
        "TETransformerLayerAutocast",
        "get_gpt_full_te_layer_autocast_spec",
    ):
        kind, message = uses.get(label, ["import failed", ""])
        assert kind == "ImportError", (label, kind, message)
        assert label in message and "Transformer Engine" in message


def test_plain_lora_needs_no_transformer_engine(probe):
    _, uses = probe
    assert uses.get("LoRALinear", ["import failed"])[0] == "returned", uses
