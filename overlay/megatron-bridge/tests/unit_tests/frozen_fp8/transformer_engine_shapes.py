# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Transformer Engine's modules with their parameters and without their kernels, for tests that only look at shapes.

With `install()` Megatron-Core defines its own Transformer Engine classes and builds them on the meta device of a
machine where the library is not installed. Whatever runs a forward must not use it. Names that are not here are
placeholder classes.
"""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType

import torch


class _Shapes(torch.nn.Module):
    """What all constructors have in common: sizes a rank, parameters on the device that was asked for."""

    def __init__(self, in_features, out_features, *, tp_size=1, parallel_mode=None, bias=True, **kwargs):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.tp_size, self.use_bias = tp_size, bias
        if parallel_mode == "column":
            self.out_features //= tp_size
        if parallel_mode == "row":
            self.in_features //= tp_size
        self._factory = {"device": kwargs["device"], "dtype": kwargs["params_dtype"]}

    def _add(self, name, *shape):
        setattr(self, name, torch.nn.Parameter(torch.empty(shape, **self._factory)))


class Linear(_Shapes):
    """One weight [out, in]."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._add("weight", self.out_features, self.in_features)
        if self.use_bias:
            self._add("bias", self.out_features)


class LayerNormLinear(Linear):
    """As `Linear`, and the norm of its input."""

    def __init__(self, *args, normalization="LayerNorm", **kwargs):
        super().__init__(*args, **kwargs)
        self._add("layer_norm_weight", self.in_features)
        if normalization == "LayerNorm":
            self._add("layer_norm_bias", self.in_features)


class GroupedLinear(_Shapes):
    """One weight for each expert: weight0, weight1, ... Or all in one."""

    def __init__(self, num_gemms, *args, single_grouped_weight=False, **kwargs):
        super().__init__(*args, **kwargs)
        self.num_gemms = num_gemms
        if single_grouped_weight:
            raise NotImplementedError("a single grouped weight is a tensor class of the library's own")
        for index in range(num_gemms):
            self._add(f"weight{index}", self.out_features, self.in_features)
            if self.use_bias:
                self._add(f"bias{index}", self.out_features)


class RMSNorm(torch.nn.Module):
    """One weight."""

    def __init__(self, normalized_shape=None, *, hidden_size=None, device=None, params_dtype=None, **kwargs):
        super().__init__()
        shape = hidden_size if normalized_shape is None else normalized_shape
        self.weight = torch.nn.Parameter(torch.empty(shape, device=device, dtype=params_dtype))


class LayerNorm(RMSNorm):
    """Weight and bias."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.bias = torch.nn.Parameter(torch.empty_like(self.weight))


class DotProductAttention(torch.nn.Module):
    """No parameters."""

    def __init__(self, *args, **kwargs):
        super().__init__()


_CLASSES = {c.__name__: c for c in (Linear, LayerNormLinear, GroupedLinear, RMSNorm, LayerNorm, DotProductAttention)}


_ABSENT = ("get_cpu_offload_context",)  # called by constructors; Megatron-Core does without
_PACKAGES = ("transformer_engine", "transformer_engine.common", "transformer_engine.pytorch")


class _Placeholder(type):
    """A class nobody instantiates here; its attributes are placeholders too."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder(name, (), {"__module__": cls.__module__})


class _Module(ModuleType):
    def __getattr__(self, name):
        if name.startswith("__") or name in _ABSENT:
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if name in _CLASSES and self.__name__ == "transformer_engine.pytorch":
            value = _CLASSES[name]
        elif name.islower() and self.__name__ in _PACKAGES:
            value = importlib.import_module(full)
        else:
            value = _Placeholder(name, (), {"__module__": self.__name__})
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] != "transformer_engine" or name.rpartition(".")[2] in _ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        if module.__name__ == "transformer_engine":
            module.__version__ = "2.17.1"


def install():
    """Make `import transformer_engine` find this, for the rest of the process. Before Megatron-Core is imported."""
    if "megatron.core" in sys.modules:
        raise RuntimeError("install() must run before megatron.core is imported")
    for module_class in _CLASSES.values():
        module_class.__module__ = f"transformer_engine.pytorch.{module_class.__name__.lower()}"
    sys.meta_path.insert(0, _Finder())
