# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Runtime arguments reach the model provider, checked.

    args = parse_args()
    provider = bridge.to_megatron_provider(runtime_args=RuntimeArgs.from_args(args, sys.argv[1:]))

Arguments the user gave are set on the provider; those that describe the architecture are compared with the checkpoint;
what was asked is verified after ``finalize()`` and on the built model. See `fields` for what each field's class means.
"""

from typing import Any

from megatron.bridge.runtime_args.apply import (
    RuntimeArgsConflict,
    apply_runtime_args,
    plan,
    runtime_args_report,
)
from megatron.bridge.runtime_args.arguments import KEEP, Pin, RuntimeArgs
from megatron.bridge.runtime_args.explicit import (
    ExplicitArgs,
    explicit_args,
    explicit_args_from_namespace,
    explicit_args_from_yaml,
    remember_explicit_args,
)
from megatron.bridge.runtime_args.fields import FieldClass, classify
from megatron.bridge.runtime_args.guard import FINALIZED_KEY, check_attribute
from megatron.bridge.runtime_args.report import Change, RuntimeArgsReport
from megatron.bridge.runtime_args.verify import RuntimeArgsRewritten, verify_finalized, verify_model


__all__ = [
    "KEEP",
    "Change",
    "ExplicitArgs",
    "FieldClass",
    "Pin",
    "RuntimeArgs",
    "RuntimeArgsConflict",
    "RuntimeArgsReport",
    "RuntimeArgsRewritten",
    "apply_runtime_args",
    "check_attribute",
    "classify",
    "explicit_args",
    "explicit_args_from_namespace",
    "explicit_args_from_yaml",
    "finalized",
    "plan",
    "remember_explicit_args",
    "runtime_args_report",
    "verify_finalized",
    "verify_model",
]


def finalized(config: Any) -> None:
    """Called by ``finalize()`` at its end: verify a provider's runtime arguments and mark it as finalized.

    Does nothing to a config that is no model provider.

    Raises:
        RuntimeArgsRewritten: see `verify_finalized`.
    """
    if hasattr(type(config), "provide_distributed_model"):
        verify_finalized(config)
        vars(config)[FINALIZED_KEY] = True
