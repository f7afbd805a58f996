# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""pytest plugin: what SGLang 0.5.17 needs to build models on a machine without CUDA.

Use it as ``-p tests.plugins.sglang_cpu`` from the repository's root. With CUDA it changes nothing. Without CUDA:

``vllm._custom_ops.rotary_embedding``
    ``RotaryEmbedding.__init__`` imports it when SGLang sees no platform that it knows (``rotary_embedding/base.py``).
    A stand-in is put in its place that raises when it is called: constructing models works, no forward does.
    A real vLLM, where there is one, is used instead.
``sgl_per_tensor_quant_fp8``
    ``sglang.kernels.ops.quantization.fp8_kernel`` imports this kernel under CUDA and MUSA only, so that online FP8 of
    MoE layers ends in a NameError. A plain-torch reference of the same signature takes its name.
``SGLANG_USE_CPU_ENGINE``
    Must not be on: with it SGLang imports the CPU build of ``sgl_kernel``, which no package index has; it is an error.

What runs here tests loading, not kernels.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable

import pytest
import torch


def _rotary_embedding(*args: object, **kwargs: object) -> None:
    """Stands for ``vllm._custom_ops.rotary_embedding``; there is no forward on this machine."""
    raise RuntimeError(
        "vllm._custom_ops.rotary_embedding is a stand-in of tests/plugins/sglang_cpu.py: SGLang models can be built "
        "and loaded without CUDA, but not run. Run this test on a machine with CUDA."
    )


def _module(name: str, *, is_package: bool) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=is_package)
    if is_package:
        module.__path__ = []
    return module


def install_rotary_stand_in() -> bool:
    """Make ``from vllm._custom_ops import rotary_embedding`` work; True if the stand-in was needed."""
    if importlib.util.find_spec("vllm") is not None:
        return False
    package, ops = _module("vllm", is_package=True), _module("vllm._custom_ops", is_package=False)
    ops.rotary_embedding = _rotary_embedding
    package._custom_ops = ops
    sys.modules.update({"vllm": package, "vllm._custom_ops": ops})
    return True


def per_tensor_quant_fp8(input: torch.Tensor, output_q: torch.Tensor, output_s: torch.Tensor, is_static: bool) -> None:
    """Quantise `input` with one scale in plain torch, in place of SGLang's CUDA kernel.

    Args:
        input: float tensor of any shape, on any device.
        output_q: float8 tensor of the same shape; written.
        output_s: float32 tensor of one element, "multiply to get back": read if `is_static`, else written as
            ``amax / max(float8)``.
        is_static: the scale is given.
    """
    limit = torch.finfo(output_q.dtype).max
    value = input.detach().float()
    if not is_static:
        output_s.fill_(value.abs().max().item() / limit)
    scaled = value / output_s if output_s.item() > 0 else torch.zeros_like(value)
    output_q.copy_(scaled.clamp(-limit, limit).to(output_q.dtype))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls `patch(module)` once, right after the module `name` has been executed."""

    def __init__(self, name: str, patch: Callable[[types.ModuleType], None]) -> None:
        self.name, self.patch = name, patch

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> object:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                self.patch(module)

            spec.loader.exec_module = exec_module
        return spec


def _add_missing_quant(module: types.ModuleType) -> None:
    if not hasattr(module, "sgl_per_tensor_quant_fp8"):
        module.sgl_per_tensor_quant_fp8 = per_tensor_quant_fp8


def pytest_configure(config: pytest.Config) -> None:
    if torch.cuda.is_available():
        return
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0").lower() not in ("", "0", "false"):
        raise pytest.UsageError(
            "SGLANG_USE_CPU_ENGINE is set, but without CUDA these tests need it unset: SGLang would import the CPU "
            "build of sgl_kernel, which is not on PyPI. Run `unset SGLANG_USE_CPU_ENGINE` and try again."
        )
    install_rotary_stand_in()
    sys.meta_path.insert(0, _AfterImport("sglang.kernels.ops.quantization.fp8_kernel", _add_missing_quant))
