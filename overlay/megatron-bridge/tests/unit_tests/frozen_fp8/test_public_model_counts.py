# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Which weights of the two public Qwen3.5-MoE models become FP8, and what that frees a rank.

The models are built by Bridge, on the meta device; the expectation is counted here from the HF configs alone.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest


HERE = Path(__file__).parent
LAYOUTS = {"Qwen3.5-35B-A3B": (2, 8), "Qwen3.5-122B-A10B": (2, 16)}
BLOCK = 128


@pytest.fixture(scope="module")
def counted():
    """What `count_on_meta.py` says, by model. In a process of its own: fake process groups, other module classes."""
    arguments = [str(item) for model, layout in LAYOUTS.items() for item in (model, *layout)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "count_on_meta.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["model"]: line for line in lines}


def _gated(hidden, inner):
    """[rows, columns] of fc1 and fc2 of an MLP with a gate."""
    return [(2 * inner, hidden), (hidden, inner)]


def _attention(text, tp):
    """qkv with an output gate of the query's size, and proj."""
    heads, kv = text.num_attention_heads // tp, max(1, text.num_key_value_heads // tp)
    return [
        ((2 * heads + 2 * kv) * text.head_dim, text.hidden_size),
        (text.hidden_size, heads * text.head_dim),
    ]


def _linear_attention(text, tp):
    """in_proj of q, k, v, z and the two numbers a head, ragged; and out_proj."""
    keys = text.linear_num_key_heads * text.linear_key_head_dim // tp
    values = text.linear_num_value_heads * text.linear_value_head_dim // tp
    return [
        (2 * keys + 2 * values + 2 * text.linear_num_value_heads // tp, text.hidden_size),
        (text.hidden_size, values),
    ]


def expected(text, vision, tp, ep):
    """Shapes a rank, by part of the model, from the HF config."""
    moe = _gated(text.hidden_size, text.moe_intermediate_size) * (text.num_experts // ep)
    moe += _gated(text.hidden_size, text.shared_expert_intermediate_size // tp)
    mixers = {"linear_attention": _linear_attention(text, tp), "full_attention": _attention(text, tp)}
    width, inner = vision.hidden_size, vision.intermediate_size // tp
    vision_layer = [(3 * width // tp, width), (width, width // tp), (inner, width), (width, inner)]
    return {
        "language_model.decoder": [shape for kind in text.layer_types for shape in mixers[kind] + moe],
        "language_model.mtp": mixers["full_attention"] + moe,
        "vision_model.decoder": vision_layer * vision.depth,
    }


@pytest.mark.parametrize(
    "model, num_tensors, saved_gib", [("Qwen3.5-35B-A3B", 2896, 4.70), ("Qwen3.5-122B-A10B", 1872, 9.25)]
)
def test_counts_and_bytes_of_a_rank(counted, model, num_tensors, saved_gib):
    found = counted[model]
    text, vision = (SimpleNamespace(**found["config"][part]) for part in ("text_config", "vision_config"))
    shapes = expected(text, vision, *LAYOUTS[model])
    every = [shape for part in shapes.values() for shape in part]
    scales = sum(-(-rows // BLOCK) * -(-columns // BLOCK) for rows, columns in every)
    elements = sum(rows * columns for rows, columns in every)
    assert found["devices"] == ["meta"]
    assert found["tensors"] == {part: len(listed) for part, listed in shapes.items()}
    assert (found["bf16_bytes"], found["fp8_bytes"]) == (2 * elements, elements + 4 * scales)
    # the numbers that were published for these models and layouts
    assert found["num_tensors"] == num_tensors
    assert abs(found["saved_gib"] - saved_gib) < 0.005


def test_every_linear_class_of_the_models_is_known(counted):
    for found in counted.values():
        assert found["classes"] == [
            "TEColumnParallelGroupedLinear",
            "TEColumnParallelLinear",
            "TELayerNormColumnParallelLinear",
            "TERowParallelGroupedLinear",
            "TERowParallelLinear",
        ]
