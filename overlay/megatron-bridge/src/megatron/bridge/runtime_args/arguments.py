# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""`RuntimeArgs`: what a run asks of a model provider, independent of where the wishes came from."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.bridge.runtime_args.explicit import (
    NAMESPACE_KEY,
    ExplicitArgs,
    explicit_args,
    explicit_args_from_namespace,
)


class _Keep:
    """The type of `KEEP`; one instance per process, also after pickling."""

    def __repr__(self) -> str:
        return "the provider's value"

    def __reduce__(self) -> str:
        return "KEEP"


KEEP = _Keep()
"""A pin's value that leaves the provider's own."""


@dataclass(frozen=True)
class Pin:
    """A provider field that the program decides, whatever the arguments say.

    Attributes:
        reason: why; printed in the report whenever an argument asked for something else.
        value: what the field is set to; `KEEP` leaves what the provider has.
    """

    reason: str
    value: Any = KEEP


@dataclass(frozen=True)
class RuntimeArgs:
    """Explicit arguments, the namespace they belong to, and pins.

    Attributes:
        explicit: destination (or provider field) to value as typed.
        ambient: all values of the namespace, after validation if the caller validated; empty for a mapping. Supplies
            the parallel layout and the final value of what was typed.
        pins: provider field to `Pin`.
    """

    explicit: ExplicitArgs
    ambient: Mapping[str, Any] = field(default_factory=dict)
    pins: Mapping[str, Pin] = field(default_factory=dict)

    @classmethod
    def from_args(
        cls,
        args: argparse.Namespace,
        argv: Sequence[str] | None = None,
        *,
        explicit: ExplicitArgs | None = None,
        pins: Mapping[str, Pin] | None = None,
        **options: Any,
    ) -> "RuntimeArgs":
        """Take a parsed namespace.

        What the user typed comes from, in this order: `explicit`; `argv`, parsed again; what `remember_explicit_args`
        left on the namespace; else `explicit_args_from_namespace`, which guesses. ``sys.argv`` is never read here: in
        a worker process it is not the command line of the run.

        Args:
            args: parsed by Megatron's parser or one that extends it; validated or not.
            argv: the command line it was parsed from, without the program name.
            explicit: the result of one of the functions of `megatron.bridge.runtime_args.explicit`.
            pins: provider fields that the program decides.
            **options: `extra_args_provider` or `parser`, passed on.
        """
        if explicit is None and argv is not None:
            explicit = explicit_args(argv, **options)
        if explicit is None:
            explicit = getattr(args, NAMESPACE_KEY, None)
        if explicit is None:
            explicit = explicit_args_from_namespace(args, **options)
        ambient = {name: value for name, value in vars(args).items() if name != NAMESPACE_KEY}
        return cls(explicit, ambient, dict(pins or {}))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, pins: Mapping[str, Pin] | None = None) -> "RuntimeArgs":
        """Take a plain mapping of provider fields (or Megatron destinations) to values; every key counts as given."""
        return cls(ExplicitArgs(dict(values), "mapping"), {}, dict(pins or {}))

    def gives(self, name: str) -> bool:
        """Tell whether the user gave `name`."""
        return name in self.explicit

    def value(self, name: str, default: Any = None) -> Any:
        """Return the value of `name`: the namespace's, else the one typed, else `default`."""
        if name in self.ambient:
            return self.ambient[name]
        return self.explicit.get(name, default)
