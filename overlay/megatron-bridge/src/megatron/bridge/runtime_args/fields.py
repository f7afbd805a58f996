# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""What each provider field means to a runtime argument.

Every dataclass field of every model provider is in exactly one of four classes. A field in no class is refused at run
time and by the unit tests, so that a new upstream field is noticed by a test, not by somebody's run.

``MODEL``
    Part of the architecture, read from the Hugging Face checkpoint. Never overwritten: an explicit value that differs
    is a contradiction.
``RUNTIME``
    How the model is trained. Set if, and only if, the user gave it.
``ALWAYS``
    The parallel layout. It has to match ``parallel_state``, which is built from the same arguments, so it is set
    whether or not the user typed it.
``IGNORED``
    Not settable from arguments, with the reason.
"""

from enum import Enum


class FieldClass(Enum):
    """How an explicit argument that names a provider field is treated; see the module docstring."""

    MODEL = "model"
    RUNTIME = "runtime"
    ALWAYS = "always"
    IGNORED = "ignored"


MODEL_FIELDS = frozenset(
    """
    activation_func activation_func_clamp_value add_bias_linear add_qkv_bias apply_query_key_layer_scaling
    apply_residual_connection_post_layernorm attention_output_gate beta_fast beta_slow
    experimental_attention_variant ffn_hidden_size gated_linear_unit glu_linear_offset heterogeneous_block_specs
    hidden_size is_hybrid_model kv_channels kv_lora_rank layernorm_epsilon layernorm_zero_centered_gamma
    normalization num_attention_heads num_layers num_moe_experts num_query_groups q_lora_rank qk_head_dim qk_l2_norm
    qk_layernorm qk_pos_emb_head_dim multi_latent_attention softmax_scale softmax_type v_head_dim
    window_attn_skip_freq window_size dsa_indexer_head_dim dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32
    dsa_indexer_n_heads dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu
    dsa_indexer_skip_topk_offset dsa_indexer_topk dsa_indexer_topk_freq linear_attention_freq linear_conv_kernel_dim
    linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim mamba_head_dim
    mamba_num_groups mamba_num_heads mamba_state_dim moe_apply_probs_on_input moe_ffn_hidden_size moe_latent_size
    moe_layer_freq moe_router_enable_expert_bias moe_router_group_topk moe_router_num_groups moe_router_pre_softmax
    moe_router_score_function moe_router_topk moe_router_topk_limited_devices moe_router_topk_scaling_factor
    moe_shared_expert_gate moe_shared_expert_intermediate_size mtp_hybrid_override_pattern mtp_num_layers
    mtp_use_repeated_layer mup_attn_scale_power mup_base_head_dim mup_base_hidden_size mup_embedding_mult
    mup_output_mult mup_width_mult use_mup mrope_section mscale mscale_all_dim no_rope_freq
    original_max_position_embeddings position_embedding_type rope_scaling rope_scaling_factor rope_type rotary_base
    rotary_interleaved rotary_percent rotary_scaling_factor seq_len_interpolation_factor yarn_beta_fast
    yarn_beta_slow yarn_correction_range_round_to_int yarn_mscale yarn_mscale_all_dim
    yarn_original_max_position_embeddings yarn_rotary_scaling_factor max_position_embeddings
    share_embeddings_and_output_weights vocab_size hybrid_attention_ratio hybrid_layer_pattern hybrid_mlp_ratio
    hybrid_override_pattern encoder_num_layers relative_attention_max_distance relative_attention_num_buckets

    A_init_dist A_init_range D_has_hdim attention_in_multiplier attention_k_eq_v attention_other_setting
    attention_out_multiplier attention_value_scale attn_logit_softcapping chunk_size conv_bias conv_init d_conv
    decoder_sparse_step deepstack_visual_indexes dt_init dt_init_floor dt_max dt_min dt_scale embedding_multiplier
    expand falconh1_ratio final_logit_softcapping full_attention_rope_base full_attention_rope_partial_factor
    full_attn_num_query_groups global_head_dim global_kv_channels global_rotary_percent head_dim head_wise_attn_gate
    hybrid_attention_pattern index_head_dim index_n_heads interleaved_attn_pattern is_vision_language key_multiplier
    layer_types lightning_indexer_layers lm_head_multiplier mlp_multipliers mlp_only_layers mm_tokens_per_image
    moe_intermediate_size norm_before_gate num_global_key_value_heads num_global_query_groups num_kv_shared_layers
    num_position_embeddings out_hidden_size per_layer_embed_dim per_layer_embed_vocab_size position_id_per_seconds
    query_pre_attn_scalar rmsnorm rotary_base_per_layer scale_embeddings_by_hidden_size seconds_per_chunk
    sliding_attention_setting sliding_window_rope_base ssm_in_multiplier ssm_multipliers ssm_out_multiplier
    swa_num_query_groups use_attention use_double_wide_mlp use_mamba use_mlp

    audio_end_token_id audio_start_token_id audio_token_id bos_token_id eos_token_id image_end_token_id
    image_special_token_id image_start_token_id image_token_id image_token_index img_end_token_id img_start_token_id
    ignore_index mask_token_id media_placeholder_token_id pad_token_id sound_context_token_id video_end_token_id
    video_start_token_id video_token_id vision_end_token_id vision_start_token_id vision_token_id has_sound
    in_channels language_model_type multimodal_projector_bias out_channels patch_size projector_bias
    projector_hidden_size separate_video_embedder sound_hidden_size sound_model_type sound_projection_hidden_size
    spatial_merge_size temporal_patch_dim temporal_patch_size understand_projector_stride vision_class_token_len
    vision_model_type vision_proj_ffn_hidden_size vision_projector_input_size vision_soft_tokens_per_image

    apply_llama4_style_query_key_layer_scaling axes_dims_rope context_dim crossattn_emb_size freq_dim guidance_embed
    layernorm_across_heads model_channels num_joint_layers num_single_layers patch_spatial patch_temporal text_dim
    text_len vec_in_dim
    """.split()
)

RUNTIME_FIELDS = frozenset(
    """
    fp8 fp8_amax_compute_algo fp8_amax_history_len fp8_backward_override fp8_dot_product_attention fp8_interval
    fp8_frozen_base_store fp8_frozen_base_per_layer_free
    fp8_margin fp8_multi_head_attention fp8_output_proj fp8_param fp8_param_gather fp8_quantizer_factory fp8_recipe
    fp8_wgrad fp4 fp4_param fp4_quantizer_factory fp4_recipe first_last_layers_bf16 num_layers_at_end_in_bf16
    num_layers_at_start_in_bf16 quant_recipe tp_only_amax_red activation_func_fp8_input_store
    disable_parameter_transpose_cache kitchen_attention_backend use_kitchen use_kitchen_attention autocast_dtype
    bf16 enable_autocast fp16 fp16_lm_cross_entropy fp32_residual_connection params_dtype pipeline_dtype
    attention_softmax_in_fp32 disable_bf16_reduced_precision_matmul keep_mtp_spec_in_bf16

    distribute_saved_activations moe_layer_recompute num_microbatches_with_partial_activation_checkpoints
    recompute_granularity recompute_method recompute_modules recompute_num_layers recompute_vision
    vision_recompute_granularity vision_recompute_method vision_recompute_num_layers vit_gradient_checkpointing
    activation_offload_fraction cpu_offloading cpu_offloading_activations cpu_offloading_double_buffering
    cpu_offloading_num_layers cpu_offloading_retain_pinned_cpu_buffers cpu_offloading_weights
    delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks fine_grained_activation_offloading
    fine_grained_offloading_max_inflight_offloads min_offloaded_tensor_size offload_modules

    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split barrier_with_L1_time batch_p2p_comm
    batch_p2p_sync calculate_per_token_loss clone_scatter_output_in_embedding cp_comm_type
    deallocate_pipeline_outputs defer_embedding_wgrad_compute delay_wgrad_compute
    encoder_pipeline_model_parallel_size hierarchical_context_parallel_sizes high_priority_a2a_comm_stream
    hybrid_context_parallel async_tensor_model_parallel_allreduce max_seqlen_per_dp_cp_rank
    microbatch_group_size_per_vp_stage num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
    overlap_dispatch_backward_with_experts_wgrad overlap_moe_expert_parallel_comm overlap_p2p_comm
    overlap_p2p_comm_warmup_flush parallel_output pipeline_model_parallel_comm_backend
    pipeline_model_parallel_layout scatter_embedding_sequence_parallel symmetric_ar_type tp_comm_atomic_ag
    tp_comm_atomic_rs tp_comm_bootstrap_backend tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap
    tp_comm_overlap_ag tp_comm_overlap_cfg tp_comm_overlap_disable_fc1 tp_comm_overlap_disable_qkv
    tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs use_ring_exchange_p2p
    variable_seq_lengths wgrad_deferral_limit ep_overlap_early_attn_memory_release dist_train

    apply_rope_fusion apply_rotary_pos_emb_in_fp32 attention_backend batch_invariant_mode bias_activation_fusion
    bias_dropout_fusion cache_mla_latents cross_entropy_fusion_impl cross_entropy_loss_fusion dense_grouped_gemm
    deterministic_mode dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss dsa_kernel_backend flash_attention_version
    flash_decode fused_residual_rmsnorm fused_single_qkv_rope gradient_accumulation_fusion
    hetereogenous_dist_checkpoint log_max_attention_logit mamba_chunk_size mamba_training_ssm_states_dtype
    masked_softmax_fusion memory_efficient_layer_norm mla_down_proj_fusion mlp_chunks_for_prefill
    mlp_chunks_for_training multimodal_attn_impl persist_layer_norm transformer_impl use_arbitrary_attention_mask
    use_fused_weighted_squared_relu use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert
    use_hf_vision_model use_mamba_mem_eff_path use_mg_vit use_te_activation_func use_te_rng_tracker
    use_transformer_engine_full_layer_spec use_transformer_engine_op_fuser use_vision_backbone_fp8_arch
    cuda_graph_impl cuda_graph_modules cuda_graph_retain_backward_graph cuda_graph_use_single_mempool
    cuda_graph_warmup_steps max_vision_cuda_graph_seq_length vision_cuda_graph_impl vision_cuda_graph_scope

    moe_aux_loss_coeff moe_deepep_num_sms moe_enable_deepep moe_enable_routing_replay moe_expert_capacity_factor
    moe_expert_rank_capacity_factor moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms moe_grouped_gemm
    moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms
    moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs moe_input_jitter_eps
    moe_mlp_glu_interleave_size moe_ncclep_static_shape moe_ncclep_zero_copy moe_pad_expert_input_to_capacity
    moe_pad_experts_for_cuda_graph_inference moe_paged_stash moe_paged_stash_buffer_size_factor_cpu
    moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size moe_per_layer_logging moe_permute_fusion
    moe_permute_fusion_into_hybridep moe_router_bias_update_rate moe_router_dtype moe_router_force_biased
    moe_router_force_load_balancing moe_router_fusion moe_router_load_balancing_type moe_router_padding_for_fp8
    moe_router_padding_for_quantization moe_router_quantile_balancing_ema moe_shared_expert_glu_interleave_size
    moe_shared_expert_overlap moe_single_grouped_bias moe_single_grouped_weight moe_token_dispatcher_type
    moe_token_drop_policy moe_token_dropping moe_z_loss_coeff

    attention_dropout hidden_dropout mtp_detach_heads mtp_enabled mtp_loss_scaling_factor mtp_standalone qk_clip
    qk_clip_alpha qk_clip_threshold freeze_audio_model freeze_audio_projection freeze_language_model
    freeze_modality_encoders freeze_modality_projections freeze_mtp_model freeze_sound_encoder
    freeze_sound_projection freeze_vision_model freeze_vision_projection restore_modelopt_state
    embedding_init_method_std init_method init_method_std init_model_with_meta_device perform_initialization
    use_cpu_initialization make_vocab_size_divisible_by seq_length seq_length_dec should_pad_vocab
    language_max_sequence_length trust_remote_code return_dict add_decoder add_encoder vision_dp_when_cp
    dynamic_resolution radio_cpe_aspect_ratio_select radio_disable_cpe radio_force_cpe_eval_mode
    radio_force_eval_mode radio_interpolate_only_cpe temporal_ckpt_compat config_logger_dir test_mode
    inference_cuda_graph_scope inference_disable_triton_nvls_kernels inference_fuse_tp_communication
    inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
    inference_rng_tracker inference_sampling_seed nccl_all_reduce_for_prefill use_inference_optimized_layers
    ar_loss_weight block_size ckpt_path different_seed_per_dp dlm_loss_weight dlm_paradigm do_convert_from_hf
    guidance_scale load_dist_ckpt qkv_format save_converted_model_to
    """.split()
)

ALWAYS_FIELDS = frozenset(
    """
    tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
    context_parallel_size expert_model_parallel_size expert_tensor_parallel_size sequence_parallel
    tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards
    """.split()
)

_IGNORED_BY_REASON = {
    "a callable or handle that the training loop installs": """
        _cpu_offloading_context embedding_init_method experimental_attention_variant_loss_scale_func
        finalize_model_grads_func grad_scale_func grad_sync_func moe_grad_scale_func mtp_grad_scale_func no_sync_func
        output_layer_init_method param_sync_func timers""",
    "process groups are attached when the model is built": "_grids _pg_collection",
    "derived by finalize() from the number of weight shards": "expert_gtp_weight_remat_size gtp_weight_remat_size",
    "deprecated spelling; it is forwarded as cuda_graph_impl": "enable_cuda_graph external_cuda_graph",
    "deprecated spelling; it is forwarded as cuda_graph_modules": "cuda_graph_scope",
    "a module specification, chosen by the provider": """
        falconh1_stack_spec hybrid_stack_spec language_model_spec mamba_stack_spec modality_submodules_spec
        transformer_layer_spec vision_encoder_module vision_encoder_params""",
    "a nested configuration that comes with the checkpoint": """
        audio_config code2wav_config generation_config hf_config hf_config_dict hf_text_config language_config
        sound_config talker_config text_config thinker_config token2wav_config vision_config
        vision_projector_config""",
    "names the checkpoint that the provider was made from": """
        hf_model_id hf_model_path hf_model_revision pretrained_model_name""",
    "the block layout comes with the checkpoint and a file of another format cannot be compared with it": """
        heterogeneous_layers_config_encoded_json heterogeneous_layers_config_path per_block_parameters""",
    "the provider's multimodal token layout, another thing than Megatron's --tokenizer-type": "tokenizer_type",
    "wiring between several providers": """
        distill_submodule kd_config megatron_mimo_parallelism_config module_output_ndim special_token_ids
        standard_provider teacher topology""",
}

IGNORED_FIELDS: dict[str, str] = {
    name: reason for reason, names in _IGNORED_BY_REASON.items() for name in names.split()
}
"""Field name to the reason why no argument sets it."""

PATCHED_FIELDS = frozenset(
    {"fp8_backward_override", "fp8_frozen_base_store", "fp8_frozen_base_per_layer_free"}
)
"""Classified fields that exist only on a Megatron-Core with the patch that adds them."""


def is_classified(name: str) -> bool:
    """Tell whether `name` is a field of some provider that is in a class."""
    return name in MODEL_FIELDS or name in RUNTIME_FIELDS or name in ALWAYS_FIELDS or name in IGNORED_FIELDS


def classify(name: str) -> FieldClass:
    """Return the class of a provider field.

    Raises:
        KeyError: the field is in no class, which means that upstream added it and nobody decided what an argument may
            do to it.
    """
    if name in MODEL_FIELDS:
        return FieldClass.MODEL
    if name in RUNTIME_FIELDS:
        return FieldClass.RUNTIME
    if name in ALWAYS_FIELDS:
        return FieldClass.ALWAYS
    if name in IGNORED_FIELDS:
        return FieldClass.IGNORED
    raise KeyError(f"provider field {name!r} is in no class; add it to megatron.bridge.runtime_args.fields")
