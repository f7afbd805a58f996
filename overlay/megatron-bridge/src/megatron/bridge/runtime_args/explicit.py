# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Which arguments did the user give?

Megatron's argument defaults are not the defaults of ``TransformerConfig`` (rotary fusion, dropout fusion, softmax
precision and others differ), so a namespace cannot be copied onto a provider: only what was asked for may be. argparse
does not keep that, so the command line is parsed once more with every default suppressed.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron.bridge.runtime_args.fields import ALWAYS_FIELDS


NAMESPACE_KEY = "explicit_runtime_args"
"""Attribute of an argument namespace in which `remember_explicit_args` keeps its result."""

_FILLED_BY_VALIDATION = frozenset(
    """
    add_qkv_bias apply_rope_fusion bias_gelu_fusion expert_tensor_parallel_num_weight_shards
    expert_tensor_parallel_size ffn_hidden_size inference_cuda_graph_scope kv_channels moe_ffn_hidden_size
    overlap_p2p_comm tensor_parallel_num_weight_shards
    """.split()
)
"""Destinations that ``validate_args`` changes by itself; another value than the default proves nothing."""


@dataclass(frozen=True)
class ExplicitArgs(Mapping[str, Any]):
    """The arguments the user gave: a read-only mapping of argparse destination (or provider field) to value as typed.

    Attributes:
        given: destination to value.
        origin: where they were found: ``"command line"``, ``"yaml"``, ``"namespace"`` or ``"mapping"``.
        unrecognised: command-line words that the parser did not know. They belong to somebody else, or the parser was
            rebuilt without the function that adds them (`extra_args_provider`).
        undecided: destinations that differ from their default but may have been rewritten by validation; only a bare
            namespace has these. They are not treated as given, and reported.
    """

    given: Mapping[str, Any]
    origin: str
    unrecognised: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.given[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.given)

    def __len__(self) -> int:
        return len(self.given)


def _megatron_parser(
    extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None,
) -> argparse.ArgumentParser:
    """Build the parser of ``megatron.training.arguments.parse_args``, abbreviations off as there."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return parser if extra_args_provider is None else extra_args_provider(parser)


def _nested_parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for nested in {id(choice): choice for choice in action.choices.values()}.values():
                yield from _nested_parsers(nested)


def _raise_value_error(message: str) -> None:
    raise ValueError(f"the command line does not parse a second time: {message}")


@contextmanager
def _without_defaults(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Suppress all defaults of `parser` and its subparsers, and undo it: the parser may be the caller's own."""
    parsers = list(_nested_parsers(parser))
    actions = [action for nested in parsers for action in nested._actions]
    saved_actions = [(action, action.default, action.required) for action in actions]
    saved_defaults = [(nested, nested._defaults) for nested in parsers]
    try:
        for action in actions:
            action.default, action.required = argparse.SUPPRESS, False
        for nested in parsers:
            nested._defaults = {}
            nested.error = _raise_value_error
        yield
    finally:
        for action, default, required in saved_actions:
            action.default, action.required = default, required
        for nested, defaults in saved_defaults:
            nested._defaults = defaults
            del nested.error


def explicit_args(
    argv: Sequence[str] | None = None,
    *,
    extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
    parser: argparse.ArgumentParser | None = None,
) -> ExplicitArgs:
    """Find the arguments that a command line gives explicitly.

    The command line is parsed with the same parser as the run's, but with no defaults, so ``--flag=value``, flags that
    store a constant or a negation, lists and (where the parser allows them) abbreviations are all understood as
    argparse understands them. A flag given with its default value counts as given. With ``--yaml-cfg`` Megatron
    ignores the command line; the keys of that file are then the explicit ones.

    Args:
        argv: words of the command line without the program name; None means ``sys.argv[1:]``. In a worker process
            (Ray, torch.multiprocessing) that is the worker's own command line: call this in the driver and use
            `remember_explicit_args`.
        extra_args_provider: the function given to Megatron's ``parse_args``, if any.
        parser: a complete parser to use instead of Megatron's; left as it was.

    Raises:
        ValueError: the command line does not parse, or both `parser` and `extra_args_provider` are given.
    """
    if parser is not None and extra_args_provider is not None:
        raise ValueError("give parser or extra_args_provider, not both: a complete parser has its extra arguments")
    parser = _megatron_parser(extra_args_provider) if parser is None else parser
    with _without_defaults(parser):
        typed, unrecognised = parser.parse_known_args(list(sys.argv[1:] if argv is None else argv))
    if getattr(typed, "yaml_cfg", None) is not None:
        return explicit_args_from_yaml(typed.yaml_cfg)
    return ExplicitArgs(vars(typed), "command line", tuple(unrecognised))


_YAML_ACTIVATION_FLAGS = {"swiglu": "swiglu", "squaredrelu": "squared_relu"}


def explicit_args_from_yaml(path: str) -> ExplicitArgs:
    """Take every key of a Megatron ``--yaml-cfg`` file as given, ``language_model`` and ``model_parallel`` flattened.

    Raises:
        ValueError: two sections give one key different values.
    """
    from megatron.training.yaml_arguments import load_yaml

    document = vars(load_yaml(path))
    sections = [vars(document.pop(name)) for name in ("language_model", "model_parallel") if name in document]
    values = {name: value for name, value in document.items() if not name.startswith("_") and name != "yaml_cfg"}
    for section in sections:
        for name, value in section.items():
            if name in values and values[name] != value:
                raise ValueError(f"{path} gives {name!r} twice: {values[name]!r} and {value!r}")
            values[name] = value
    _translate_yaml_names(values)
    return ExplicitArgs(values, "yaml")


def _translate_yaml_names(values: dict[str, Any]) -> None:
    """Replace the names that stand for functions in Megatron's YAML by the flags with the same meaning."""
    activation = values.pop("activation_func", None)
    if activation in _YAML_ACTIVATION_FLAGS:
        values[_YAML_ACTIVATION_FLAGS[activation]] = True
    elif activation is not None:
        from megatron.bridge.utils.activation_map import str_to_callable

        values["activation_func"] = str_to_callable(activation)
    if values.get("init_method") == "xavier_uniform":
        values["init_method_xavier_uniform"] = True
    if isinstance(values.get("init_method"), str):
        del values["init_method"]


def _defaults(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The values of an empty command line, as argparse makes them: the first action of a destination decides."""
    defaults: dict[str, Any] = {}
    for action in parser._actions:
        value = action.default
        if value is not argparse.SUPPRESS and action.dest not in defaults:
            defaults[action.dest] = parser._get_value(action, value) if isinstance(value, str) else value
    return parser._defaults | defaults


def explicit_args_from_namespace(
    args: argparse.Namespace,
    *,
    parser: argparse.ArgumentParser | None = None,
    extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
) -> ExplicitArgs:
    """Guess the explicit arguments of a namespace whose command line is lost: those that differ from their default.

    Two things cannot be known this way, and `explicit_args` should be preferred: an argument given with its default
    value looks absent, and a destination that Megatron's ``validate_args`` fills in looks given. The latter are listed
    as `undecided` and not used.

    Args:
        args: parsed arguments, validated or not.
        parser: the parser that made them; None means Megatron's own.
        extra_args_provider: what Megatron's ``parse_args`` was given, to complete its own parser.
    """
    parser = _megatron_parser(extra_args_provider) if parser is None else parser
    values, undecided = {}, []
    for name, default in _defaults(parser).items():
        if not hasattr(args, name) or getattr(args, name) == default:
            continue
        if name not in _FILLED_BY_VALIDATION:
            values[name] = getattr(args, name)
        elif name not in ALWAYS_FIELDS:  # a parallel size is set whoever chose it
            undecided.append(name)
    return ExplicitArgs(values, "namespace", undecided=tuple(undecided))


def remember_explicit_args(
    args: argparse.Namespace, explicit: ExplicitArgs | None = None, **options: Any
) -> ExplicitArgs:
    """Keep the explicit arguments on the namespace, so that they travel to workers with it.

    Args:
        args: the parsed namespace; gains the attribute ``explicit_runtime_args``.
        explicit: what to keep; None calls `explicit_args` with `options` on this process's command line.
        **options: passed to `explicit_args`.
    """
    explicit = explicit_args(**options) if explicit is None else explicit
    setattr(args, NAMESPACE_KEY, explicit)
    return explicit
