# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors

"""Explicit arguments of Megatron's own parser reach providers that Bridge makes from tiny checkpoints."""

import argparse
import copy
import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F


@functools.cache
def megatron_actions():
    """Megatron's argparse actions with the name of a TransformerConfig field, by that name."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    names = {item.name for item in dataclasses.fields(MLATransformerConfig)}
    return {action.dest: action for action in parser._actions if action.dest in names}


# Values that argparse cannot tell us: its type functions and free strings accept only some.
WORDS = {
    "cp_comm_type": ["a2a"],
    "cuda_graph_modules": ["attn"],
    "hierarchical_context_parallel_sizes": ["2", "4"],
    "inference_cuda_graph_scope": ["layer"],
    "linear_attention_freq": ["2"],
    "mamba_training_ssm_states_dtype": ["fp32"],
    "moe_layer_freq": ["2"],
    "moe_router_load_balancing_type": ["sinkhorn"],
    "mrope_section": ["8", "4", "4"],
    "no_rope_freq": ["2"],
    "offload_modules": ["core_attn"],
    "pipeline_model_parallel_layout": ["Et|tL"],
    "recompute_modules": ["mlp"],
    "window_attn_skip_freq": ["2"],
    "window_size": ["16,0"],
}
# Where Megatron stores another type than it parses.
STORED = {
    "cp_comm_type": "a2a",
    "mamba_training_ssm_states_dtype": torch.float32,
    "moe_aux_loss_coeff": 3.0,
    "moe_router_load_balancing_type": "sinkhorn",
}
REDIRECTED = {
    "enable_cuda_graph": ("cuda_graph_impl", "local"),
    "external_cuda_graph": ("cuda_graph_impl", "transformer_engine"),
}


def words(action):
    """Command-line words that give `action` a legal value other than its default."""
    flag = action.option_strings[0]
    if action.nargs == 0:
        return [flag]
    if action.dest in WORDS:
        return [flag, *WORDS[action.dest]]
    if action.choices:
        choice = next(item for item in action.choices if item != action.default)
        return [flag, getattr(choice, "name", str(choice))]
    if action.type in (int, float):
        return [flag, str(action.type(3) if action.default != 3 else action.type(5))]
    return [flag, "some_text"]


def provider_for(name):
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.models.mla_provider import MLAModelProvider

    fields = {item.name for item in dataclasses.fields(GPTModelProvider)}
    cls = GPTModelProvider if name in fields else MLAModelProvider
    return cls(num_layers=4, hidden_size=64, num_attention_heads=4, vocab_size=256, position_embedding_type="rope")


@pytest.mark.parametrize("name", sorted(megatron_actions()))
def test_each_flag_does_what_its_class_says(name, parser, from_argv):
    from megatron.bridge.runtime_args import FieldClass, RuntimeArgsConflict, apply_runtime_args, classify

    line = words(megatron_actions()[name])
    args, kind, provider = from_argv(line), classify(name), provider_for(name)
    before = copy.deepcopy(provider)
    value = STORED.get(name, args.value(name))
    if kind is FieldClass.MODEL and getattr(provider, name) != value:
        with pytest.raises(RuntimeArgsConflict) as caught:
            apply_runtime_args(provider, args)
        assert name in {change.field for change in caught.value.conflicts}
        assert provider == before
        return
    report = apply_runtime_args(provider, args)
    field, value = REDIRECTED.get(name, (name, value))
    assert getattr(provider, field) == value
    if kind is not FieldClass.MODEL:
        handled = {change.field for change in (*report.changed, *report.equal)}
        assert field in handled and not report.unnamed and not report.ignored


def test_the_flags_of_the_test_above_are_not_an_empty_set():
    from megatron.bridge.runtime_args import FieldClass, classify

    kinds = [classify(name) for name in megatron_actions()]
    assert kinds.count(FieldClass.RUNTIME) >= 150 and kinds.count(FieldClass.MODEL) >= 80


RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe", "deepseek_v3", "qwen3_vl", "qwen3_5"])
def test_recompute_arguments_arrive(model, make_bridge, from_argv):
    provider = make_bridge(model).to_megatron_provider(load_weights=False, runtime_args=from_argv(RECOMPUTE))
    assert (provider.recompute_granularity, provider.recompute_method, provider.recompute_num_layers) == (
        "full",
        "uniform",
        1,
    )
    provider.moe_permute_fusion = False  # needs Transformer Engine
    provider.finalize()
    assert provider.recompute_granularity == "full"


def test_precision_arguments_arrive(make_bridge, from_argv):
    line = (
        "--fp8-format hybrid --fp8-recipe blockwise --fp8-param-gather --first-last-layers-bf16 "
        "--num-layers-at-start-in-bf16 2 --num-layers-at-end-in-bf16 3"
    )
    provider = make_bridge().to_megatron_provider(load_weights=False, runtime_args=from_argv(line))
    assert provider.fp8 == "hybrid" and provider.fp8_recipe == "blockwise" and provider.fp8_param is True
    assert provider.first_last_layers_bf16 is True
    assert (provider.num_layers_at_start_in_bf16, provider.num_layers_at_end_in_bf16) == (2, 3)


def test_a_quantisation_recipe_file_arrives(make_bridge, from_argv, tmp_path):
    pytest.importorskip("yaml")
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "configs:\n  bf16: {}\n"
        "matchers:\n  all:\n    type: glob\n    enabled: true\n    pattern: '*'\n    config: bf16\n"
    )
    args = from_argv(["--te-precision-config-file", str(path)])
    provider = make_bridge().to_megatron_provider(load_weights=False, runtime_args=args)
    assert set(provider.quant_recipe.configs) == {"bf16"}
    copy.deepcopy(provider).finalize()


def comparable(value):
    return (value.func, value.args, value.keywords) if isinstance(value, functools.partial) else value


@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe", "deepseek_v3", "qwen3_vl", "qwen3_5"])
def test_without_runtime_arguments_nothing_changes(model, make_bridge):
    bridge = make_bridge(model)
    plain = bridge._model_bridge.provider_bridge(bridge._provider_bridge_input)
    provider = bridge.to_megatron_provider(load_weights=False)
    for item in dataclasses.fields(plain):
        if item.name not in ("hf_model_id", "hf_model_revision", "vision_config", "hf_text_config"):
            assert comparable(getattr(plain, item.name)) == comparable(getattr(provider, item.name)), item.name
    assert "_runtime_args_record" not in vars(provider)


@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe", "deepseek_v3", "qwen3_vl", "qwen3_5"])
def test_what_nobody_typed_is_left_alone(model, make_bridge, from_argv):
    bridge = make_bridge(model)
    provider = bridge.to_megatron_provider(load_weights=False, runtime_args=from_argv(""))
    plain = bridge.to_megatron_provider(load_weights=False)
    differing = {
        name
        for name, action in megatron_actions().items()
        if hasattr(plain, name) and action.default != getattr(plain, name)
    }
    assert {"apply_rope_fusion", "attention_softmax_in_fp32", "bias_dropout_fusion"} & differing
    layout = {"expert_tensor_parallel_size"}  # None means the tensor parallel size to Megatron
    for name in differing - layout:
        assert getattr(provider, name) == getattr(plain, name), name
    assert provider.expert_tensor_parallel_size == 1


def test_renamed_negated_and_derived_arguments(make_bridge, from_argv):
    line = (
        "--no-persist-layer-norm --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1 "
        "--recompute-activations --cpu-offloading-num-layers 1 --no-bias-swiglu-fusion --te-rng-tracker --seed 7 "
        "--init-method-xavier-uniform --no-overlap-p2p-communication --cuda-graph-scope attn"
    )
    provider = make_bridge().to_megatron_provider(load_weights=False, runtime_args=from_argv(line))
    assert provider.persist_layer_norm is False
    assert provider.num_layers_in_first_pipeline_stage == provider.num_layers_in_last_pipeline_stage == 1
    assert provider.recompute_granularity == "selective"
    assert provider.cpu_offloading is True and provider.cpu_offloading_num_layers == 1
    assert provider.bias_activation_fusion is False
    assert provider.use_te_rng_tracker is True and provider.inference_sampling_seed == 7
    assert provider.init_method is torch.nn.init.xavier_uniform_
    assert provider.overlap_p2p_comm is False and provider.batch_p2p_comm is True
    assert [getattr(item, "name", item) for item in provider.cuda_graph_modules] == ["attn"]


@pytest.mark.parametrize("flag, dtype", [("--bf16", torch.bfloat16), ("--fp16", torch.float16)])
def test_training_precision_is_set_as_a_whole(flag, dtype, make_bridge, from_argv):
    provider = make_bridge().to_megatron_provider(load_weights=False, runtime_args=from_argv(flag))
    assert provider.bf16 is (dtype == torch.bfloat16) and provider.fp16 is (dtype == torch.float16)
    assert provider.params_dtype == provider.pipeline_dtype == dtype
    provider.finalize()
    assert provider.autocast_dtype == dtype


def test_parallel_sizes_are_set_although_nobody_typed_them(make_bridge, from_argv):
    provider = make_bridge("qwen3_moe").to_megatron_provider(
        load_weights=False,
        runtime_args=from_argv("--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --sequence-parallel"),
    )
    assert (provider.tensor_model_parallel_size, provider.expert_model_parallel_size) == (2, 2)
    provider.moe_permute_fusion = False  # needs Transformer Engine
    provider.finalize()
    # Bridge alone would read the unset size as 1 and disagree with parallel_state.
    assert provider.expert_tensor_parallel_size == 2 and provider.sequence_parallel is True


def test_virtual_pipeline_size_is_derived(make_bridge, from_argv):
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.runtime_args import apply_runtime_args

    for line, expected in (
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", 2),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", 4),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4", None),
        ("--pipeline-model-parallel-size 2", None),
    ):
        provider = GPTModelProvider(num_layers=8, hidden_size=64, num_attention_heads=4)
        apply_runtime_args(provider, from_argv(line))
        assert provider.virtual_pipeline_model_parallel_size == expected, line


def test_all_contradictions_are_in_one_error_and_nothing_is_touched(make_bridge, from_argv):
    from megatron.bridge.runtime_args import RuntimeArgsConflict, apply_runtime_args

    line = f"--num-layers 4 --hidden-size 64 --normalization LayerNorm --num-experts 8 --squared-relu {RECOMPUTE}"
    provider = make_bridge().to_megatron_provider(load_weights=False)
    before = copy.deepcopy(provider)
    with pytest.raises(RuntimeArgsConflict) as caught:
        apply_runtime_args(provider, from_argv(line))
    assert {change.field for change in caught.value.conflicts} == {
        "num_layers",
        "normalization",
        "num_moe_experts",
        "activation_func",
    }
    for text in ("num_layers: the checkpoint has 2", "say 4", "(num_experts) say 8", "'RMSNorm'", "Pin"):
        assert text in str(caught.value)
    assert provider == before


def test_a_full_matching_architecture_is_no_contradiction(make_bridge, from_argv):
    line = (
        "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --group-query-attention "
        "--num-query-groups 2 --kv-channels 16 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu "
        "--disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope "
        "--rotary-base 10000 --rotary-percent 1.0 --vocab-size 256 --qk-layernorm --moe-layer-freq ([1]*2) "
        "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --seq-length 128 --max-position-embeddings 128"
    )
    args = from_argv(line)
    provider = make_bridge("qwen3_moe").to_megatron_provider(load_weights=False, runtime_args=args)
    assert provider.activation_func is F.silu and provider.seq_length == 128


def test_an_integer_layer_frequency_equals_its_list(make_bridge, from_argv):
    from megatron.bridge.runtime_args import RuntimeArgsConflict

    bridge = make_bridge("qwen3_5")
    for same in ("4", "[1,1,1,0]"):
        bridge.to_megatron_provider(load_weights=False, runtime_args=from_argv(f"--linear-attention-freq {same}"))
    with pytest.raises(RuntimeArgsConflict, match="linear_attention_freq"):
        bridge.to_megatron_provider(load_weights=False, runtime_args=from_argv("--linear-attention-freq 2"))


def test_learned_position_embeddings_are_part_of_the_model(from_argv):
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.runtime_args import RuntimeArgsConflict, apply_runtime_args

    provider = GPTModelProvider(num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=512)
    report = apply_runtime_args(provider, from_argv("--seq-length 128 --max-position-embeddings 512"))
    assert provider.seq_length == 512 and report.unnamed == ["seq_length"]
    with pytest.raises(RuntimeArgsConflict, match="seq_length: the checkpoint has 512"):
        apply_runtime_args(provider, from_argv("--max-position-embeddings 1024"))


def test_pins_outrank_arguments_and_say_so(make_bridge, from_argv):
    from megatron.bridge.runtime_args import Pin, runtime_args_report

    pins = {
        "variable_seq_lengths": Pin("packed batches", True),
        "moe_token_dispatcher_type": Pin("the rollout replays routing", "alltoall"),
        "vocab_size": Pin("the checkpoint's embedding is padded"),
    }
    line = "--moe-token-dispatcher-type flex --vocab-size 250"
    args = from_argv(line, pins=pins)
    provider = make_bridge("qwen3_moe").to_megatron_provider(load_weights=False, runtime_args=args)
    assert provider.variable_seq_lengths is True and provider.moe_token_dispatcher_type == "alltoall"
    assert provider.vocab_size == 256
    notes = {change.field: change.note for change in runtime_args_report(provider).pinned}
    assert notes["moe_token_dispatcher_type"] == "the rollout replays routing; the arguments asked for 'flex'"
    assert notes["vocab_size"].endswith("asked for 250") and notes["variable_seq_lengths"] == "packed batches"


def test_misspelt_pins_and_mapping_keys_are_refused(make_bridge, from_argv):
    from megatron.bridge.runtime_args import Pin, RuntimeArgs

    bridge = make_bridge()
    with pytest.raises(ValueError, match="pin 'recompute_granularty' is no field.*mean 'recompute_granularity'"):
        bridge.to_megatron_provider(
            load_weights=False, runtime_args=from_argv("", pins={"recompute_granularty": Pin("why", "full")})
        )
    with pytest.raises(ValueError, match="'recompute_metod'; did you mean 'recompute_method'"):
        bridge.to_megatron_provider(
            load_weights=False, runtime_args=RuntimeArgs.from_mapping({"recompute_metod": "x"})
        )


def test_a_mapping_sets_fields_without_any_parser(make_bridge):
    from megatron.bridge.runtime_args import RuntimeArgs

    values = {"recompute_granularity": "full", "attention_backend": "flash", "params_dtype": "fp16", "num_layers": 2}
    provider = make_bridge().to_megatron_provider(load_weights=False, runtime_args=RuntimeArgs.from_mapping(values))
    assert provider.recompute_granularity == "full" and provider.attention_backend.name == "flash"
    assert provider.fp16 is True and provider.bf16 is False and provider.pipeline_dtype == torch.float16
    assert provider.tensor_model_parallel_size == 1


def test_two_arguments_that_disagree_are_refused(make_bridge, from_argv):
    with pytest.raises(ValueError, match="recompute_granularity and recompute_activations ask for different values"):
        make_bridge().to_megatron_provider(
            load_weights=False, runtime_args=from_argv("--recompute-granularity full --recompute-activations")
        )


def test_the_report_names_every_explicit_argument(make_bridge, parser):
    from megatron.bridge.runtime_args import Pin, RuntimeArgs, runtime_args_report

    argv = f"{RECOMPUTE} --lr 0.1 --bf16 --attention-dropout 0.0 --vocab-size 250 --enable-cuda-graph".split()
    args = parser.parse_args(argv)
    args.recompute_num_layers = 2  # as a validation would
    runtime_args = RuntimeArgs.from_args(args, argv, pins={"vocab_size": Pin("padded")})
    report = runtime_args_report(make_bridge().to_megatron_provider(load_weights=False, runtime_args=runtime_args))
    changes = (*report.changed, *report.equal, *report.pinned)
    told = {source for change in changes for source in change.sources} | {*report.unnamed, *report.ignored}
    assert set(runtime_args.explicit) <= told
    assert report.unnamed == ["lr"] and report.adjusted == {"recompute_num_layers": (1, 2)}
    text = str(report)
    for expected in (
        "recompute_granularity: None -> 'full'",
        "cuda_graph_impl [enable_cuda_graph]: 'none' -> 'local'",
        "no field of this provider: lr",
        "vocab_size: 256 -> 256 (padded; the arguments asked for 250)",
        "recompute_num_layers: typed 1, used 2",
        "already so: ",
    ):
        assert expected in text, text


def test_a_field_that_nothing_may_set_is_reported_with_the_reason(make_bridge):
    from megatron.bridge.runtime_args import RuntimeArgs, runtime_args_report

    args = RuntimeArgs.from_mapping({"timers": print})
    provider = make_bridge().to_megatron_provider(load_weights=False, runtime_args=args)
    assert provider.timers is None
    assert "timers: a callable or handle" in str(runtime_args_report(provider))
