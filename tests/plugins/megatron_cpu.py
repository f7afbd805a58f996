# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors

"""Pytest plugin: run Megatron-Core and Bridge tests on a CPU with gloo.

Use from the repository root: `python -m pytest -p tests.plugins.megatron_cpu PATH`. With CUDA the plugin
does nothing. Without, it replaces, for the duration of the session, what has no meaning on a CPU; each
`_shim_*` function says what and why. Nothing the patches or the overlay change is replaced. Pytest processes
that a test starts itself (two ranks, say) inherit the plugin through PYTEST_ADDOPTS and PYTHONPATH.

The plugin imports nothing of Megatron-Core: a shim of one of its modules goes in when that module is imported.
"""

import contextlib
import copy
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
_environment = pytest.MonkeyPatch()


class CpuStream:
    """A stream or event where every kernel is done when it returns: waiting is nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, *args: Any) -> None:
        pass

    wait_event = wait = synchronize = record = wait_stream

    def record_event(self, event: Any = None) -> "CpuStream":
        return event or CpuStream()

    def query(self) -> bool:
        return True


def _shim_current_device(patch: pytest.MonkeyPatch) -> None:
    """Scratch is allocated on `torch.cuda.current_device()`; where an index does, a device does too."""
    patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))


def _shim_streams(patch: pytest.MonkeyPatch) -> None:
    """Token dispatchers and weight prefetch use side streams; a CPU has one order of execution."""
    patch.setattr(torch.cuda, "Stream", CpuStream)
    patch.setattr(torch.cuda, "Event", CpuStream)
    patch.setattr(torch.cuda, "current_stream", lambda *args, **kwargs: CpuStream())
    patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    patch.setattr(torch.cuda, "synchronize", lambda *args, **kwargs: None)
    patch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)


def _shim_seed(patch: pytest.MonkeyPatch) -> None:
    """The "CUDA" random state is the CPU's, so that Megatron-Core's tracker, forks and recompute work for real."""
    patch.setattr(torch.cuda, "manual_seed", torch.manual_seed)
    patch.setattr(torch.cuda, "get_rng_state", lambda *args, **kwargs: torch.get_rng_state())


def _shim_rng(patch: pytest.MonkeyPatch, random: ModuleType) -> None:
    """As `_shim_seed`, for the functions by which Megatron-Core reaches the generators of a device."""
    patch.setattr(random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state())
    patch.setattr(random, "_set_cuda_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state))


def _shim_split_sizes(patch: pytest.MonkeyPatch, token_dispatcher: ModuleType) -> None:
    """Megatron-Core turns split sizes into numpy only if they come from a GPU; gloo wants integers too."""
    original = token_dispatcher.maybe_move_tensor_to_cpu

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if torch.is_tensor(tensor) and as_numpy and not tensor.is_cuda:
            return tensor.numpy()
        return original(tensor, as_numpy, record_stream)

    patch.setattr(token_dispatcher, "maybe_move_tensor_to_cpu", move)


def _shim_norm(patch: pytest.MonkeyPatch, torch_norm: ModuleType) -> None:
    """The torch norm refuses sequence parallelism for its weight gradient's sake; a frozen one has none.

    A test that trains a norm under sequence parallelism must not rely on this plugin.
    """
    original = torch_norm.WrappedTorchNorm.__new__

    def build(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if config.sequence_parallel:
            config = copy.copy(config)
            config.sequence_parallel = False
        return original(cls, config, *args, **kwargs)

    patch.setattr(torch_norm.WrappedTorchNorm, "__new__", staticmethod(build))


def _shim_l2norm(patch: pytest.MonkeyPatch, common: ModuleType) -> None:
    """Gated delta net normalises q and k with a Triton kernel; this is its formula in torch."""

    def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
        x_fp32 = x.float()
        return (x_fp32 * torch.rsqrt(x_fp32.square().sum(-1, keepdim=True) + eps)).to(x.dtype)

    patch.setattr(common, "l2norm", l2norm)


def _gather(
    shard: torch.Tensor,
    group: torch.distributed.ProcessGroup,
    async_op: bool = False,
    quantizer: None = None,
    output_tensor: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.distributed.Work | None]:
    if quantizer is not None or output_tensor is None:
        raise NotImplementedError("CPU stand-in: gathers an unquantised shard into a given buffer only")
    work = torch.distributed.all_gather_into_tensor(output_tensor, shard.detach(), group=group, async_op=async_op)
    return output_tensor, work


def _reduce_scatter(
    full: torch.Tensor,
    group: torch.distributed.ProcessGroup,
    async_op: bool = False,
    output: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.distributed.Work | None]:
    if output is None:
        output = full.new_empty(full.shape[0] // group.size(), *full.shape[1:])
    work = torch.distributed.reduce_scatter_tensor(output, full.contiguous(), group=group, async_op=async_op)
    return output, work


def _shim_transformer_engine_collectives(patch: pytest.MonkeyPatch, gtp: ModuleType) -> None:
    """Generalised tensor parallelism takes its collectives from Transformer Engine, mocked where that is missing.

    Only the names that Megatron-Core imports from there are filled in, for unquantised weights: gather and
    reduce-scatter along dim 0 over the real process group, "not recomputing in FP8", a gradient that is zero,
    and profiler ranges that do nothing.
    """
    if gtp.HAVE_TE:
        return
    patch.setattr(gtp, "gather_along_first_dim", _gather)
    patch.setattr(gtp, "reduce_scatter_along_first_dim", _reduce_scatter)
    patch.setattr(gtp, "in_fp8_activation_recompute_phase", lambda: False)
    patch.setattr(gtp, "get_dummy_wgrad", lambda shape, dtype: torch.zeros(shape, dtype=dtype, device="cpu"))
    patch.setattr(gtp, "nvtx_range_push", lambda label: None)
    patch.setattr(gtp, "nvtx_range_pop", lambda label=None: None)
    patch.setattr(gtp, "QuantizedTensor", type("QuantizedTensor", (), {}))  # isinstance() must answer no


TORCH_SHIMS = (_shim_current_device, _shim_streams, _shim_seed)
MODULE_SHIMS: dict[str, Callable[[pytest.MonkeyPatch, ModuleType], None]] = {
    "megatron.core.tensor_parallel.random": _shim_rng,
    "megatron.core.tensor_parallel.generalized_tensor_parallelism": _shim_transformer_engine_collectives,
    "megatron.core.transformer.moe.token_dispatcher": _shim_split_sizes,
    "megatron.core.transformer.torch_norm": _shim_norm,
    "megatron.core.ssm.gated_delta_net.common": _shim_l2norm,
}


class ShimOnImport(importlib.abc.MetaPathFinder):
    """Finds a module of MODULE_SHIMS as it would be found without, and shims it right after it ran."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in MODULE_SHIMS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        exec_module = spec.loader.exec_module

        def exec_and_shim(module: ModuleType) -> None:
            exec_module(module)
            MODULE_SHIMS[name](self.patch, module)

        spec.loader.exec_module = exec_and_shim  # type: ignore[method-assign]
        return spec


def install(patch: pytest.MonkeyPatch) -> None:
    """Put in every shim: torch's and those of imported modules now, the others on import. `patch` undoes all."""
    for torch_shim in TORCH_SHIMS:
        torch_shim(patch)
    for name, module_shim in MODULE_SHIMS.items():
        if name in sys.modules:
            module_shim(patch, sys.modules[name])
    patch.setattr(sys, "meta_path", [ShimOnImport(patch), *sys.meta_path])


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker and hand the plugin on to pytest processes started by a test."""
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    if torch.cuda.is_available():
        return
    option = f"-p {__name__}"
    inherited = os.environ.get("PYTEST_ADDOPTS", "")
    if option not in inherited:
        _environment.setenv("PYTEST_ADDOPTS", f"{inherited} {option}".strip())
    _environment.setenv("PYTHONPATH", os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)])))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Take the environment back."""
    _environment.undo()


@pytest.fixture(scope="session", autouse=True)
def megatron_cpu() -> Iterator[None]:
    """Install the shims before the first test and remove them after the last; nothing with CUDA."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            install(patch)
        yield
