# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors

"""Which arguments were given: command lines, YAML files, namespaces, mappings."""

import argparse
import copy
import pickle

import pytest


def names(line, **options):
    from megatron.bridge.runtime_args import explicit_args

    return set(explicit_args(line.split(), **options))


@pytest.mark.parametrize(
    "line, expected",
    [
        ("", set()),
        ("--recompute-granularity full", {"recompute_granularity"}),
        ("--recompute-granularity=full", {"recompute_granularity"}),
        ("--recompute-modules mlp moe", {"recompute_modules"}),
        ("--no-rope-fusion --sequence-parallel", {"apply_rope_fusion", "sequence_parallel"}),
        ("--disable-bias-linear", {"add_bias_linear"}),
        ("--fp8-format e4m3 --fp8-param-gather", {"fp8", "fp8_param_gather"}),
        ("--norm-epsilon 1e-6 --apply-layernorm-1p", {"layernorm_epsilon", "layernorm_zero_centered_gamma"}),
        ("--inference-disable-ep-consensus", {"inference_disable_ep_consensus"}),
    ],
)
def test_typed_destinations(line, expected):
    assert names(line) == expected


def test_a_flag_with_its_default_value_counts_as_typed():
    assert names("--attention-dropout 0.1 --tensor-model-parallel-size 1") == {
        "attention_dropout",
        "tensor_model_parallel_size",
    }


def test_abbreviations_follow_the_parser():
    from megatron.bridge.runtime_args import explicit_args

    assert explicit_args(["--recompute-granu", "full"]).unrecognised == ("--recompute-granu", "full")
    lenient = argparse.ArgumentParser()
    lenient.add_argument("--recompute-granularity")
    assert set(explicit_args(["--recompute-granu", "full"], parser=lenient)) == {"recompute_granularity"}


def test_own_arguments_come_through_the_provider_function_and_others_are_listed():
    from megatron.bridge.runtime_args import explicit_args

    def add_own(parser):
        parser.add_argument("--rollout-batch-size", type=int, required=True)
        return parser

    line = ["--rollout-batch-size", "8", "--bf16"]
    assert explicit_args(line).unrecognised == ("--rollout-batch-size", "8")
    assert dict(explicit_args(line, extra_args_provider=add_own)) == {"rollout_batch_size": 8, "bf16": True}
    assert dict(explicit_args([], extra_args_provider=add_own)) == {}


def test_a_parser_of_the_caller_is_left_as_it_was():
    from megatron.bridge.runtime_args import explicit_args

    parser = argparse.ArgumentParser()
    parser.add_argument("--alpha", type=int, default=3)
    parser.set_defaults(beta=4)
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("train").add_argument("--gamma", default=5)
    before = vars(parser.parse_args(["train"]))
    assert dict(explicit_args(["--alpha", "3", "train", "--gamma", "1"], parser=parser)) == {
        "alpha": 3,
        "command": "train",
        "gamma": "1",
    }
    assert dict(explicit_args([], parser=parser)) == {}
    assert vars(parser.parse_args(["train"])) == before
    with pytest.raises(SystemExit):
        parser.parse_args(["--alpha", "x"])


def test_a_command_line_that_does_not_parse_is_an_error_not_an_exit():
    from megatron.bridge.runtime_args import explicit_args

    with pytest.raises(ValueError, match="does not parse.*recompute-granularity"):
        explicit_args(["--recompute-granularity", "sometimes"])
    with pytest.raises(ValueError, match="not both"):
        explicit_args([], parser=argparse.ArgumentParser(), extra_args_provider=lambda parser: parser)


def test_yaml_replaces_the_command_line(tmp_path):
    from megatron.bridge.runtime_args import explicit_args

    path = tmp_path / "run.yaml"
    path.write_text(
        "language_model:\n  num_layers: 2\n  activation_func: swiglu\n  init_method: xavier_uniform\n"
        "  recompute_granularity: full\nmodel_parallel:\n  tensor_model_parallel_size: 2\nlr: 0.1\n"
    )
    explicit = explicit_args(["--yaml-cfg", str(path), "--bf16"])
    assert explicit.origin == "yaml"
    assert dict(explicit) == {
        "num_layers": 2,
        "swiglu": True,
        "init_method_xavier_uniform": True,
        "recompute_granularity": "full",
        "tensor_model_parallel_size": 2,
        "lr": 0.1,
    }


def test_yaml_sections_must_agree(tmp_path):
    from megatron.bridge.runtime_args import explicit_args_from_yaml

    path = tmp_path / "run.yaml"
    path.write_text("language_model:\n  bf16: true\nmodel_parallel:\n  bf16: false\n")
    with pytest.raises(ValueError, match="gives 'bf16' twice"):
        explicit_args_from_yaml(str(path))


def test_a_bare_namespace_gives_what_differs_and_lists_what_it_cannot_tell(parser):
    from megatron.bridge.runtime_args import explicit_args_from_namespace

    args = parser.parse_args(["--recompute-granularity", "full", "--fp8-format", "e4m3", "--attention-dropout", "0.1"])
    args.ffn_hidden_size, args.kv_channels = 256, 16
    explicit = explicit_args_from_namespace(args)
    assert dict(explicit) == {"fp8": "e4m3", "recompute_granularity": "full"}
    assert set(explicit.undecided) == {"ffn_hidden_size", "kv_channels"}


def test_what_validation_fills_in_is_not_taken_for_the_users(parser, make_bridge):
    from megatron.bridge.runtime_args import RuntimeArgs, apply_runtime_args
    from megatron.training.arguments import validate_args

    line = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
        "--micro-batch-size 1 --recompute-activations"
    )
    args = parser.parse_args(line.split())
    args.rank, args.world_size, args._is_global_batch_size_explicitly_specified = 0, 1, False
    validate_args(args)
    provider = make_bridge().to_megatron_provider(load_weights=False)
    report = apply_runtime_args(provider, RuntimeArgs.from_args(args))
    assert report.origin == "namespace"
    assert {change.field for change in report.changed if change.typed} == {"recompute_granularity", "seq_length"}
    assert {"ffn_hidden_size", "kv_channels", "overlap_p2p_comm"} <= set(report.undecided)


def test_explicit_arguments_travel_with_the_namespace(parser):
    from megatron.bridge.runtime_args import RuntimeArgs, remember_explicit_args

    argv = ["--attention-dropout", "0.1"]
    args = parser.parse_args(argv)
    remember_explicit_args(args, argv=argv)
    for arrived in (pickle.loads(pickle.dumps(args)), copy.deepcopy(args)):
        assert dict(RuntimeArgs.from_args(arrived).explicit) == {"attention_dropout": 0.1}
        assert "explicit_runtime_args" not in RuntimeArgs.from_args(arrived).ambient


def test_runtime_arguments_and_their_errors_can_be_pickled(make_bridge, from_argv):
    from megatron.bridge.runtime_args import KEEP, Pin, RuntimeArgsConflict

    args = from_argv("--bf16 --num-layers 4", pins={"moe_grouped_gemm": Pin("always on", True), "fp8": Pin("why")})
    again = pickle.loads(pickle.dumps(args))
    assert again == args and again.pins["fp8"].value is KEEP
    with pytest.raises(RuntimeArgsConflict) as caught:
        make_bridge().to_megatron_provider(load_weights=False, runtime_args=args)
    error = pickle.loads(pickle.dumps(caught.value))
    assert str(error) == str(caught.value) and error.conflicts == caught.value.conflicts


def test_a_bare_namespace_of_an_extended_parser():
    import argparse

    from megatron.bridge.runtime_args import RuntimeArgs
    from megatron.training.arguments import add_megatron_arguments

    def extended(parser):
        parser.add_argument("--own-knob", type=int, default=1)
        return parser

    parser = extended(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    args, _ = parser.parse_known_args(["--own-knob", "3", "--recompute-granularity", "full"])
    found = RuntimeArgs.from_args(args, extra_args_provider=extended)
    assert found.gives("own_knob") and found.value("own_knob") == 3
    assert found.gives("recompute_granularity")
