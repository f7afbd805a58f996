# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors

"""What was asked is verified after ``finalize()`` and on the built model."""

import copy
import os
import pickle

import pytest
import torch


@pytest.fixture
def provider(make_bridge, from_argv):
    """Return a function: command line, model, pins -> provider, not finalized."""

    def make(line, model="qwen3", **options):
        return make_bridge(model).to_megatron_provider(load_weights=False, runtime_args=from_argv(line, **options))

    return make


def test_a_rewrite_by_hand_is_caught(provider):
    from megatron.bridge.runtime_args import RuntimeArgsRewritten

    made = provider("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    made.recompute_method = "block"
    with pytest.raises(RuntimeArgsRewritten) as caught:
        made.finalize()
    assert [change.field for change in caught.value.changes] == ["recompute_method"]
    for text in ("asked 'uniform' (recompute_method), found 'block'", "GPTModelProvider.finalize()", "an override"):
        assert text in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_rewrite_by_finalize_is_caught_and_explained(provider):
    from megatron.bridge.runtime_args import Pin, RuntimeArgsRewritten

    made = provider(
        "--context-parallel-size 2", "qwen3_vl", pins={"calculate_per_token_loss": Pin("the loss is a mean", False)}
    )
    with pytest.raises(RuntimeArgsRewritten, match="vision-language providers turn it on with context parallelism"):
        made.finalize()


def test_overrides_that_contradict_are_caught(provider):
    from megatron.bridge.runtime_args import RuntimeArgsRewritten

    with pytest.raises(RuntimeArgsRewritten, match=r"bf16.*apply_overrides_and_finalize\(dtype=\)"):
        provider("--bf16").apply_overrides_and_finalize(dtype=torch.float16)


def test_harmless_rewrites_are_reported(provider):
    from megatron.bridge.runtime_args import runtime_args_report

    made = provider("--sequence-parallel --fp32-residual-connection --bf16 --cuda-graph-modules full_iteration")
    made.finalize()
    assert made.sequence_parallel is False and made.pipeline_dtype == torch.float32
    rewritten = {change.field for change in runtime_args_report(made).rewritten}
    assert {"sequence_parallel", "pipeline_dtype"} <= rewritten
    assert "turns it off without tensor parallelism" in str(runtime_args_report(made))
    made.finalize()
    fields = [change.field for change in runtime_args_report(made).rewritten]
    assert len(fields) == len(set(fields))


def test_other_spellings_are_no_rewrites(provider):
    from megatron.bridge.runtime_args import runtime_args_report

    line = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tL --cuda-graph-modules attn"
    made = provider(line + " --attention-backend unfused --bf16")
    made.finalize()
    assert not isinstance(made.pipeline_model_parallel_layout, str)
    assert runtime_args_report(made).rewritten == []


def test_a_copy_is_verified_too(provider):
    from megatron.bridge.runtime_args import RuntimeArgsRewritten

    made = provider("--recompute-granularity selective")
    for twin in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        twin.recompute_granularity = None
        with pytest.raises(RuntimeArgsRewritten):
            twin.finalize()
    made.finalize()


def test_arguments_that_come_in_two_parts_are_both_verified(provider):
    from megatron.bridge.runtime_args import RuntimeArgs, RuntimeArgsRewritten, apply_runtime_args

    made = provider("--recompute-granularity selective --deterministic-mode")
    apply_runtime_args(made, RuntimeArgs.from_mapping({"deterministic_mode": False, "attention_dropout": 0.25}))
    made.finalize()
    made.recompute_granularity, made.attention_dropout = None, 0.0
    with pytest.raises(RuntimeArgsRewritten) as caught:
        made.finalize()
    assert {change.field for change in caught.value.changes} == {"recompute_granularity", "attention_dropout"}


def test_a_value_that_is_none_of_the_field_reaches_finalize_which_refuses_it(make_bridge):
    from megatron.bridge.runtime_args import RuntimeArgs

    args = RuntimeArgs.from_mapping({"cuda_graph_modules": ["no_such_module"]})
    made = make_bridge().to_megatron_provider(load_weights=False, runtime_args=args)
    with pytest.raises(KeyError, match="no_such_module"):
        made.finalize()


def test_every_rewrite_rule_explains_itself():
    from megatron.bridge.runtime_args.verify import REWRITES

    assert all(rule.why for rules in REWRITES.values() for rule in rules)
    assert all(rule.applies.__code__ for rules in REWRITES.values() for rule in rules if rule.harmless)


@pytest.fixture
def one_rank():
    """A gloo world of one, and Megatron's groups in it."""
    from megatron.core import parallel_state

    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29611")
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def small_model_provider(change=None):
    """A provider whose model is one linear layer, so that the real build runs on any machine."""
    from dataclasses import dataclass

    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.core.transformer.module import MegatronModule

    class Model(MegatronModule):
        def __init__(self, config):
            super().__init__(config)
            self.linear = torch.nn.Linear(2, 2)

    @dataclass
    class SmallProvider(GPTModelProvider):
        def provide(self, pre_process=None, post_process=None, vp_stage=None):
            config = self if change is None else copy.deepcopy(self)
            if change is not None:
                change(config)
            return Model(config)

    return SmallProvider(num_layers=2, hidden_size=64, num_attention_heads=4, position_embedding_type="rope")


BUILD = {"wrap_with_ddp": False, "use_cpu_initialization": True}


def test_the_built_model_is_verified(one_rank, from_argv):
    from megatron.bridge.runtime_args import RuntimeArgsRewritten, apply_runtime_args

    args = from_argv("--recompute-granularity selective --use-cpu-initialization")
    good = small_model_provider()
    apply_runtime_args(good, args)
    good.finalize()
    assert good.provide_distributed_model(**BUILD)[0].config.recompute_granularity == "selective"

    bad = small_model_provider(change=lambda config: setattr(config, "recompute_granularity", None))
    apply_runtime_args(bad, args)
    bad.finalize()
    with pytest.raises(RuntimeArgsRewritten, match=r"in the config of model chunk 0 \(SmallProvider\)"):
        bad.provide_distributed_model(**BUILD)


def test_build_options_that_overrule_an_argument_are_caught(one_rank, from_argv):
    from megatron.bridge.runtime_args import RuntimeArgsRewritten, apply_runtime_args

    built = small_model_provider()
    apply_runtime_args(built, from_argv("--use-cpu-initialization"))
    built.finalize()
    with pytest.raises(RuntimeArgsRewritten, match=r"provide_distributed_model\(use_cpu_initialization=\) sets it"):
        built.provide_distributed_model(
            wrap_with_ddp=False, use_cpu_initialization=None, init_model_with_meta_device=True
        )


def test_a_config_without_the_field_is_said_to_be_unchecked(from_argv):
    from megatron.bridge.runtime_args import apply_runtime_args, runtime_args_report, verify_model
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

    made = small_model_provider()
    apply_runtime_args(made, from_argv("--seq-length 64 --recompute-granularity selective"))
    config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, recompute_granularity="selective")
    verify_model(made, [MegatronModule(config)])
    report = runtime_args_report(made)
    assert report.unchecked == {"seq_length"} and "verified on the provider only: seq_length" in str(report)


def test_a_real_gpt_model_keeps_what_was_asked(one_rank, from_argv):
    from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
    from megatron.bridge.runtime_args import apply_runtime_args, runtime_args_report

    made = GPTModelProvider(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        vocab_size=256,
        position_embedding_type="rope",
        transformer_layer_spec=local_layer_spec,
        gradient_accumulation_fusion=False,
    )
    line = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --use-cpu-initialization"
    apply_runtime_args(made, from_argv(line))
    made.finalize()
    model = made.provide_distributed_model(**BUILD)
    assert model[0].config.recompute_granularity == "full"
    assert runtime_args_report(made).rewritten == [] and runtime_args_report(made).unchecked == set()
