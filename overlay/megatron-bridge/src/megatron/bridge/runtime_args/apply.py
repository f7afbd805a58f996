# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Put explicit arguments on a provider: plan (pure), then set."""

import difflib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from megatron.bridge.runtime_args.arguments import KEEP, RuntimeArgs
from megatron.bridge.runtime_args.compare import same_value
from megatron.bridge.runtime_args.fields import IGNORED_FIELDS, FieldClass, classify
from megatron.bridge.runtime_args.report import Change, RuntimeArgsReport
from megatron.bridge.runtime_args.sources import Asked, Request, collect, sizes_position_embeddings


logger = logging.getLogger(__name__)

RECORD_KEY = "_runtime_args_record"
"""Private provider attribute that holds the `Record` for the later checks."""


class RuntimeArgsConflict(ValueError):
    """Explicit arguments contradict the checkpoint.

    Attributes:
        conflicts: one `Change` a field: `before` is the checkpoint's value, `after` the argument's.
    """

    def __init__(self, provider: str, conflicts: list[Change]) -> None:
        self.conflicts = conflicts
        lines = [
            f"  {change.field}: the checkpoint has {change.before!r}, the arguments ({', '.join(change.sources)}) say "
            f"{change.after!r}"
            for change in conflicts
        ]
        super().__init__(
            f"{len(conflicts)} argument(s) contradict the architecture that {provider} got from the checkpoint:\n"
            + "\n".join(lines)
            + "\nDrop these arguments, load the checkpoint they describe, or pin the fields with a reason "
            "(megatron.bridge.runtime_args.Pin)."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_error, (type(self), str(self), {"conflicts": self.conflicts})


def _rebuild_error(cls: type[ValueError], message: str, state: dict[str, Any]) -> ValueError:
    """Unpickle an error whose constructor takes no message."""
    error = cls.__new__(cls, message)
    error.args = (message,)
    error.__dict__.update(state)
    return error


@dataclass
class Record:
    """What a provider was asked, kept on it for the checks after ``finalize()`` and after the build."""

    asked: dict[str, Request]
    report: RuntimeArgsReport


def closest(name: str, names: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the name most like `name`, or an empty string."""
    match = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else ""


def _field_class(name: str, provider: Any) -> FieldClass:
    if name == "seq_length" and sizes_position_embeddings(provider):
        return FieldClass.MODEL
    try:
        return classify(name)
    except KeyError as error:
        raise ValueError(
            f"{error.args[0]}, or pin it: an argument names it and nobody decided what may set it"
        ) from None


def _check_pins(args: RuntimeArgs, provider: Any) -> None:
    names = {item.name for item in fields(provider)}
    for name in args.pins:
        if name not in names:
            raise ValueError(f"pin {name!r} is no field of {type(provider).__name__}{closest(name, names)}")


def _check_mapping(args: RuntimeArgs, asked: Asked, report: RuntimeArgsReport, provider: Any) -> None:
    """Refuse mapping keys that name nothing: a mapping is written for the provider, a command line has more in it."""
    if args.explicit.origin == "mapping" and report.unnamed:
        names = {item.name for item in fields(provider)}
        wrong = ", ".join(f"{name!r}{closest(name, names)}" for name in report.unnamed)
        raise ValueError(f"runtime arguments name no field of {type(provider).__name__}: {wrong}")


def _new_report(args: RuntimeArgs, asked: Asked, provider: Any) -> RuntimeArgsReport:
    explicit = args.explicit
    report = RuntimeArgsReport(type(provider).__name__, explicit.origin)
    report.undecided, report.unrecognised = explicit.undecided, explicit.unrecognised
    names = {item.name for item in fields(provider)}
    for name in sorted(explicit):
        if name in IGNORED_FIELDS and name in names and name not in asked.consumed:
            report.ignored[name] = IGNORED_FIELDS[name]
        elif name not in asked.consumed and name not in args.pins:
            report.unnamed.append(name)
        if name in args.ambient and not same_value(name, explicit[name], args.ambient[name], provider):
            report.adjusted[name] = (explicit[name], args.ambient[name])
    return report


def _pin_change(name: str, args: RuntimeArgs, request: Request | None, provider: Any) -> Change:
    pin, before = args.pins[name], getattr(provider, name)
    after = before if pin.value is KEEP else pin.value
    note = pin.reason
    if request is not None and request.typed and not same_value(name, request.value, after, provider):
        note += f"; the arguments asked for {request.value!r}"
    return Change(name, before, after, request.sources if request else (), note)


def _sort_request(request: Request, provider: Any, report: RuntimeArgsReport, conflicts: list[Change]) -> None:
    before = getattr(provider, request.field)
    change = Change(request.field, before, request.value, request.sources, typed=request.typed)
    kind = _field_class(request.field, provider)
    if kind is FieldClass.IGNORED:
        report.ignored[request.field] = IGNORED_FIELDS[request.field]
    elif same_value(request.field, before, request.value, provider):
        layout = request.field == "hybrid_layer_pattern" and before != request.value  # differs in pipeline bars only
        (report.changed if layout else report.equal).append(change)
    elif kind is FieldClass.MODEL:
        conflicts.append(change)
    else:
        report.changed.append(change)


def plan(provider: Any, args: RuntimeArgs) -> Record:
    """Decide what `args` does to `provider`, without touching it.

    Args:
        provider: a model provider dataclass, made from a checkpoint, not finalized.
        args: what is asked.

    Returns:
        The requests to verify later, and the report.

    Raises:
        RuntimeArgsConflict: arguments contradict the checkpoint; all of them are named.
        ValueError: two arguments disagree, a pin or a mapping's key names no field, or an argument names a field that
            is in no class.
    """
    _check_pins(args, provider)
    asked = collect(args, provider)
    report, conflicts = _new_report(args, asked, provider), []
    _check_mapping(args, asked, report, provider)
    kept: dict[str, Request] = {}
    for name in (item.name for item in fields(provider)):
        request = asked.requests.get(name)
        if name in args.pins:
            change = _pin_change(name, args, request, provider)
            report.pinned.append(change)
            kept[name] = Request(name, change.after, change.sources, True)
        elif request is not None:
            _sort_request(request, provider, report, conflicts)
            if name not in report.ignored:
                kept[name] = request
    if conflicts:
        raise RuntimeArgsConflict(type(provider).__name__, conflicts)
    return Record(kept, report)


def apply_runtime_args(provider: Any, args: RuntimeArgs) -> RuntimeArgsReport:
    """Set what the arguments ask on `provider`, before ``finalize()``.

    The provider remembers it: the same values are verified at the end of ``finalize()`` and on the model that
    ``provide_distributed_model()`` returns.

    Args:
        provider: a model provider made from a checkpoint. Changed in place; untouched if anything raises here.
        args: what is asked.

    Returns:
        The report, also in the log at INFO and from `runtime_args_report` later, when it includes the later rewrites.

    Raises:
        RuntimeArgsConflict: arguments contradict the checkpoint; all of them are named.
        ValueError: two arguments disagree, a pin or a mapping's key names no field, or an argument names a field that
            is in no class.
    """
    record = plan(provider, args)
    for change in (*record.report.changed, *record.report.pinned):
        setattr(provider, change.field, change.after)
    earlier = getattr(provider, RECORD_KEY, None)
    if earlier is not None:  # a second set of arguments: where they overlap the later one holds
        record.asked = earlier.asked | record.asked
    setattr(provider, RECORD_KEY, record)
    logger.info("%s", record.report)
    return record.report


def runtime_args_report(provider: Any) -> RuntimeArgsReport | None:
    """Return the report of a provider's runtime arguments, or None if it was given none."""
    record = getattr(provider, RECORD_KEY, None)
    return None if record is None else record.report
