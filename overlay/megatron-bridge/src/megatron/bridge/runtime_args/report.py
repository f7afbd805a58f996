# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""What happened to each argument, readable with ``print``."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Change:
    """One provider field and the arguments that decided it.

    Attributes:
        field: provider field.
        before: the provider's value before.
        after: the value now; for a contradiction, the value that was refused.
        sources: argument destinations it came from.
        note: why it did not come out as asked; empty if it did.
        typed: False for a parallel size that nobody typed.
    """

    field: str
    before: Any
    after: Any
    sources: tuple[str, ...]
    note: str = ""
    typed: bool = True

    def __str__(self) -> str:
        origin = "" if self.sources in ((), (self.field,)) else f" [{', '.join(self.sources)}]"
        note = f" ({self.note})" if self.note else ""
        return f"{self.field}{origin}: {_short(self.before)} -> {_short(self.after)}{note}"


@dataclass
class RuntimeArgsReport:
    """Every explicit argument is in one of these lists; a rewritten field also stays in its first one.

    Attributes:
        provider: class name of the provider.
        origin: where the explicit arguments came from.
        changed: fields that were set to another value.
        equal: fields that already had the value asked for.
        pinned: fields that the program decides; `after` is the pin, the note has its reason and what was asked.
        rewritten: fields that ``finalize()`` or the build changed in a way that is known to be harmless.
        ignored: explicit names of fields that no argument sets, with the reason.
        unnamed: explicit names that are no field of this provider (learning rate, data, ...).
        adjusted: explicit names whose value the argument parser's validation changed: name to (typed, used).
        undecided: names that could not be told from a default; see `explicit_args_from_namespace`.
        unrecognised: command-line words the parser did not know.
        unchecked: fields that a built model's config does not have, so that only the provider could be verified.
    """

    provider: str
    origin: str
    changed: list[Change] = field(default_factory=list)
    equal: list[Change] = field(default_factory=list)
    pinned: list[Change] = field(default_factory=list)
    rewritten: list[Change] = field(default_factory=list)
    ignored: dict[str, str] = field(default_factory=dict)
    unnamed: list[str] = field(default_factory=list)
    adjusted: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    undecided: tuple[str, ...] = ()
    unrecognised: tuple[str, ...] = ()
    unchecked: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        lines = [f"Runtime arguments of {self.provider} (from the {self.origin}):"]
        for title, changes in (
            ("set", self.changed),
            ("decided by the program", self.pinned),
            ("rewritten, harmless", self.rewritten),
        ):
            lines += [f"  {title}:"] + [f"    {change}" for change in changes] if changes else []
        adjusted = [f"{name}: typed {_short(a)}, used {_short(b)}" for name, (a, b) in sorted(self.adjusted.items())]
        ignored = [f"{name}: {reason}" for name, reason in sorted(self.ignored.items())]
        for title, items in (
            ("changed by argument validation", adjusted),
            ("not settable", ignored),
        ):
            lines += [f"  {title}:"] + [f"    {item}" for item in items] if items else []
        for title, names in (
            ("already so", [change.field for change in self.equal]),
            ("no field of this provider", self.unnamed),
            ("cannot tell from a default, not used", self.undecided),
            ("unknown to the parser", self.unrecognised),
            ("not in the built model's config, verified on the provider only", sorted(self.unchecked)),
        ):
            lines += [f"  {title}: {', '.join(names)}"] if names else []
        return "\n".join(lines if len(lines) > 1 else [*lines, "  none"])


def _short(value: Any, limit: int = 80) -> str:
    text = getattr(value, "__name__", None) or repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
