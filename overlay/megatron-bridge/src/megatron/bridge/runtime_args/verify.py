# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""The second look: does what was asked still hold after ``finalize()``, and on the model that was built?"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron.bridge.runtime_args.apply import RECORD_KEY, Record, _rebuild_error
from megatron.bridge.runtime_args.compare import same_value
from megatron.bridge.runtime_args.report import Change
from megatron.bridge.runtime_args.sources import Request


class RuntimeArgsRewritten(ValueError):
    """A value that was asked for did not survive.

    Attributes:
        changes: one `Change` a field: `before` is what was asked, `after` what was found, the note the likely rule.
    """

    def __init__(self, where: str, changes: list[Change]) -> None:
        self.changes = changes
        lines = [
            f"  {change.field}: asked {change.before!r} ({', '.join(change.sources) or 'pinned'}), "
            f"found {change.after!r}; {change.note}"
            for change in changes
        ]
        super().__init__(
            f"{len(changes)} runtime argument(s) do not hold {where}:\n"
            + "\n".join(lines)
            + "\nAsk for the value found, or pin the field with a reason (megatron.bridge.runtime_args.Pin)."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_error, (type(self), str(self), {"changes": self.changes})


@dataclass(frozen=True)
class Rewrite:
    """A rule of Megatron-Core or Bridge that changes a field behind the caller's back.

    Attributes:
        why: the rule, for the message.
        harmless: whether the run does the same thing as asked, or could not do anything else. A harmless rewrite is
            reported, any other is an error.
        applies: (config, asked, found) -> whether this rule explains the change.
    """

    why: str
    harmless: bool = False
    applies: Callable[[Any, Any, Any], bool] = lambda config, asked, found: True


_DTYPE_RULE = Rewrite(
    "provide_distributed_model(fp16=, bf16=) and apply_overrides_and_finalize(dtype=) set the precision"
)

REWRITES: Mapping[str, tuple[Rewrite, ...]] = {
    "apply_rope_fusion": (
        Rewrite("the provider turns rotary fusion off where the kernel is missing or incompatible"),
    ),
    "attention_softmax_in_fp32": (Rewrite("finalize() turns it on together with apply_query_key_layer_scaling"),),
    "bf16": (_DTYPE_RULE,),
    "fp16": (_DTYPE_RULE,),
    "params_dtype": (_DTYPE_RULE,),
    "autocast_dtype": (_DTYPE_RULE,),
    "calculate_per_token_loss": (Rewrite("vision-language providers turn it on with context parallelism"),),
    "cross_entropy_fusion_impl": (Rewrite("distillation needs the native cross entropy"),),
    "cuda_graph_impl": (
        Rewrite("deprecated scopes in cuda_graph_modules choose the implementation"),
        Rewrite("loading a hybrid checkpoint turns CUDA graphs off"),
    ),
    "cuda_graph_modules": (
        Rewrite(
            "finalize() moves deprecated scopes to cuda_graph_impl and inference_cuda_graph_scope",
            harmless=True,
            applies=lambda config, asked, found: _moved_scopes(asked, found),
        ),
    ),
    "expert_tensor_parallel_size": (
        Rewrite("finalize() reads None as 1 with expert parallelism, where Megatron reads the tensor parallel size"),
    ),
    "moe_flex_dispatcher_backend": (Rewrite("moe_enable_deepep, which is deprecated, selects deepep"),),
    "moe_hybridep_pad_uneven_dispatch_inputs": (Rewrite("packed HybridEP recipes turn padding on"),),
    "mtp_standalone": (Rewrite("pipeline_model_parallel_layout decides whether the MTP layer stands alone"),),
    "pipeline_dtype": (
        Rewrite(
            "with fp32_residual_connection the stages exchange fp32",
            harmless=True,
            applies=lambda config, asked, found: config.fp32_residual_connection and found == torch.float32,
        ),
        _DTYPE_RULE,
    ),
    "pipeline_model_parallel_layout": (Rewrite("the provider chooses a layout of its own when none is set"),),
    "recompute_granularity": (Rewrite("moe_layer_recompute, which is deprecated, selects selective recomputation"),),
    "recompute_modules": (
        Rewrite(
            "moe_layer_recompute adds the module moe",
            harmless=True,
            applies=lambda config, asked, found: config.moe_layer_recompute and set(found) == {*(asked or []), "moe"},
        ),
    ),
    "sequence_parallel": (
        Rewrite(
            "finalize() turns it off without tensor parallelism, where it would do nothing",
            harmless=True,
            applies=lambda config, asked, found: asked and config.tensor_model_parallel_size <= 1,
        ),
        Rewrite("the provider needs it with tensor parallelism"),
    ),
    "use_cpu_initialization": (
        Rewrite("provide_distributed_model(use_cpu_initialization=) sets it, and its default is False"),
    ),
    "variable_seq_lengths": (Rewrite("finalize() turns it on for in-batch packing with pipeline parallelism"),),
    "virtual_pipeline_model_parallel_size": (
        Rewrite(
            "finalize() takes it from pipeline_model_parallel_layout",
            harmless=True,
            applies=lambda config, asked, found: asked is None and config.pipeline_model_parallel_layout is not None,
        ),
    ),
}
"""Provider field to the known rules that rewrite it."""

_UNKNOWN = Rewrite(
    "something set it after the runtime arguments were applied: an override, a hook or the provider itself"
)


def _moved_scopes(asked: Any, found: Any) -> bool:
    from megatron.core.transformer.cuda_graph_config import normalize_cuda_graph_modules

    kept, moved, _ = normalize_cuda_graph_modules(asked)
    return bool(moved) and kept == list(found)


def _rule(request: Request, config: Any, found: Any) -> Rewrite:
    for rule in REWRITES.get(request.field, ()):
        if rule.applies(config, request.value, found):
            return rule
    return _UNKNOWN


def rewrites(config: Any, asked: Iterable[Request]) -> tuple[list[Change], list[Change]]:
    """Compare `config` with what was asked of it. Pure.

    A field that `config` does not have is skipped.

    Returns:
        The rewrites that matter and the harmless ones. A parallel mode that nobody typed (``sequence_parallel``)
        counts as harmless; a parallel size does not, it must match ``parallel_state``.
    """
    bad, harmless = [], []
    for request in asked:
        if not hasattr(config, request.field):
            continue
        found = getattr(config, request.field)
        if same_value(request.field, request.value, found, config):
            continue
        rule = _rule(request, config, found)
        change = Change(request.field, request.value, found, request.sources, rule.why, request.typed)
        untyped_mode = request.field == "sequence_parallel" and not request.typed
        (harmless if rule.harmless or untyped_mode else bad).append(change)
    return bad, harmless


def _verify(config: Any, record: Record, where: str) -> None:
    bad, harmless = rewrites(config, record.asked.values())
    known = {change.field for change in record.report.rewritten}
    record.report.rewritten.extend(change for change in harmless if change.field not in known)
    if bad:
        raise RuntimeArgsRewritten(where, bad)


def verify_finalized(provider: Any) -> None:
    """Check a finalized provider against the runtime arguments it was given; nothing to do if it was given none.

    Raises:
        RuntimeArgsRewritten: a value that was asked for does not hold, and the rewrite is not a harmless one.
    """
    record = getattr(provider, RECORD_KEY, None)
    if isinstance(record, Record):
        _verify(provider, record, f"after {type(provider).__name__}.finalize()")


def verify_model(provider: Any, model: Iterable[Any]) -> None:
    """Check the config of each model chunk against the runtime arguments that `provider` was given.

    Args:
        provider: what built the model.
        model: the chunks, wrapped or not.

    Raises:
        RuntimeArgsRewritten: a value that was asked for does not hold, and the rewrite is not a harmless one.
    """
    from megatron.core.utils import get_model_config

    record = getattr(provider, RECORD_KEY, None)
    if not isinstance(record, Record):
        return
    for index, chunk in enumerate(model):
        config = get_model_config(chunk)
        record.report.unchecked.update(name for name in record.asked if not hasattr(config, name))
        _verify(config, record, f"in the config of model chunk {index} ({type(config).__name__})")
