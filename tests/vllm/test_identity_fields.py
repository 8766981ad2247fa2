"""Each field of vLLM's configuration decides the bytes of a block, or none: both lists together are all fields.

A release that has another field fails here. Look at what it does, and write it into `SAID` or `IMPLIED` of
`kvcache.integrations.vllm.identity`, or into the list of the fields that decide no bytes.
"""

import dataclasses
import re

import pytest
from vllm import config, envs

from kvcache.integrations.vllm.identity import IMPLIED, SAID

CLASSES = {
    "cache_config": config.CacheConfig,
    "model_config": config.ModelConfig,
    "parallel_config": config.ParallelConfig,
    "load_config": config.LoadConfig,
    "lora_config": config.LoRAConfig,
    "multimodal_config": config.MultiModalConfig,
    "speculative_config": config.SpeculativeConfig,
    "attention_config": config.AttentionConfig,
    "mamba_config": config.MambaConfig,
    "vllm_config": config.VllmConfig,
}
# Fields of ModelConfig that only make a MultiModalConfig.
OF_MULTIMODAL = [field.name for field in dataclasses.fields(config.MultiModalConfig)]
# They decide which blocks are kept, when they are computed or how results are rounded, or nothing about blocks.
NO_BYTES = {
    "cache_config": "DEFAULT_BLOCK_SIZE _block_size_resolved cache_hit_alignment_tokens effective_attention_block_size "
    "enable_mamba_shared_prefix_checkpoint enable_prefix_caching gpu_memory_utilization kv_cache_max_concurrency "
    "kv_cache_memory_bytes kv_cache_size_tokens kv_offloading_backend kv_offloading_size num_cpu_blocks num_gpu_blocks "
    "num_gpu_blocks_override prefix_cache_retention_interval simple_cpu_offload_num_blocks user_specified_block_size "
    # Part of the keys: blocks of another algorithm are not found.
    "prefix_caching_hash_algo "
    # Layers that own no cache skip tokens.
    "kv_sharing_fast_prefill "
    # Without "align", nothing is cached.
    "mamba_cache_mode",
    "model_config": "allow_deprecated_quantization allowed_local_media_path allowed_media_domains convert "
    "disable_cascade_attn enable_cumem_allocator enable_nccl_comm_suspend enable_sleep_mode enable_trace_replay "
    "enforce_eager hf_token io_processor_plugin is_submodel_config limit_mm_per_prompt "
    "logits_processors logprobs_mode max_logprobs pooler_config renderer_num_workers "
    "return_sampling_mask runner served_model_name skip_tokenizer_init sleep_mode_backend sleep_mode_offload_cudagraph "
    "sleep_preserve_parameter_names spec_target_max_model_len use_fp64_gumbel word_embeddings_untied_by_checkpoint "
    # Keys cover token ids and embeddings. The device of a processor is added to the processor's arguments.
    "enable_prompt_embeds mm_processor_device tokenizer tokenizer_mode tokenizer_revision " + " ".join(OF_MULTIMODAL),
    "parallel_config": "_allow_auto_resolve_cp_interleave_size _api_process_count _api_process_rank _coord_store_port "
    "_data_parallel_master_port_list all2all_backend assigned_physical_gpu_ids cpu_distributed_timeout_seconds "
    "data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb data_parallel_index "
    "data_parallel_master_ip data_parallel_master_port data_parallel_rank data_parallel_rank_local "
    "data_parallel_rpc_port data_parallel_size data_parallel_size_local dbo_decode_token_threshold "
    "dbo_prefill_token_threshold dcp_comm_backend dcp_q_replicate disable_custom_all_reduce "
    "disable_nccl_for_dp_synchronization distributed_executor_backend distributed_timeout_seconds dp_sync_interval "
    "elastic_ep_max_dp_size enable_batch_sharded_sampling enable_dbo enable_elastic_ep enable_ep_weight_filter "
    "enable_eplb enable_expert_parallel enable_fault_tolerance enable_hc_sp enable_shm_tensor_arena eplb_config "
    "expert_placement_strategy fault_tolerance_config is_moe_model master_addr master_port "
    "max_parallel_loading_workers nnodes node_rank numa_bind numa_bind_cpus numa_bind_nodes placement_group rank "
    "ray_runtime_env ray_workers_use_nsight ubatch_size worker_cls worker_extension_cls world_size",
    "load_config": "device download_dir pt_load_map_location safetensors_load_strategy safetensors_prefetch_block_size "
    "safetensors_prefetch_num_threads use_tqdm_on_load",
    "lora_config": "fully_sharded_loras max_cpu_loras max_lora_cls_labels max_lora_rank max_loras "
    "specialize_active_lora",
    "multimodal_config": "allow_missing_mm_embeddings enable_mm_embeds interleave_mm_strings language_model_only "
    "limit_per_prompt mm_encoder_attn_backend mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path "
    "mm_encoder_only mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb "
    "mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_tensor_ipc skip_mm_profiling",
    "speculative_config": "attention_backend disable_eagle_block_drop disable_lookahead_block_hashes "
    "disable_padded_drafter_batch draft_lm_head_quantization draft_sample_method dspark_draft_topk "
    "enable_adaptive_verification enforce_eager fly_entropy_threshold fly_entropy_top_k fly_window_size "
    "index_share_for_mtp_iteration moe_backend num_speculative_tokens_per_batch_size prompt_lookup_max "
    "prompt_lookup_min rejection_sample_method suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor "
    "suffix_decoding_max_tree_depth suffix_decoding_min_token_prob synthetic_acceptance_length "
    "synthetic_acceptance_rates target_model_config target_parallel_config tensor_parallel_size "
    "use_local_argmax_reduction xpress_topc",
    "attention_config": "disable_flashinfer_q_quantization flash_attn_max_num_splits_for_cuda_graph flash_attn_version "
    "flex_attn_block_m flex_attn_block_n flex_attn_kv_block_size flex_attn_q_block_size indexer_sparse_logits "
    "indexer_tp_shard_min_rows minimax_m3_indexer_cp minimax_m3_msa_decode_backend mla_prefill_backend "
    "sparse_mla_force_mqa sparse_mla_prefill_workspace_factor tokenspeed_mla_min_split_kv "
    "tq_max_kv_splits_for_cuda_graph trtllm_ragged_backend use_prefill_query_quantization use_trtllm_attention",
    "mamba_config": "backend enable_stochastic_rounding ssu_algorithm stochastic_rounding_philox_rounds",
    # `kv_transfer_config` has our own options; other configurations that decide bytes have a table above.
    "vllm_config": "aux_output_config compilation_config device_config diffusion_config ec_manager_config "
    "ec_transfer_config engram_config instance_id kernel_config kv_events_config kv_transfer_config logging_config "
    "observability_config offload_config optimization_level performance_mode profiler_config reasoning_config "
    "scheduler_config shutdown_timeout structured_outputs_config watchdog_config watermark_config "
    "weight_transfer_config " + " ".join(CLASSES),
    # Padding, selection of kernels, and what groups and `layout` say.
    "envs": "VLLM_KV_CACHE_LAYOUT VLLM_FLOAT32_MATMUL_PRECISION VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE "
    "VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE "
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB",
}
OF_BYTES = r"LAYOUT|QUANT|DTYPE|PRECISION|_STATE|RUNNER|PARTITION|EMULATION|ROUTING|LOADER_BACKEND|W4A8|MLA_DISABLE"


def fields_of(name):
    if name == "envs":
        return {name for name in envs.environment_variables if re.search(OF_BYTES, name)}
    return set(CLASSES[name].__dataclass_fields__)


@pytest.mark.parametrize("name", [*CLASSES, "envs"])
def test_fields_are_in_one_list(name):
    fields, no_bytes = fields_of(name), set(NO_BYTES[name].split())
    said, implied = set(SAID.get(name, "").split()), set(IMPLIED.get(name, {}))
    assert fields - said - implied - no_bytes == set()
    # All releases have the fields that decide bytes.
    assert name == "envs" or said | implied <= fields
    assert not said & implied
    assert not (said | implied) & (no_bytes - set(CLASSES))


@pytest.mark.parametrize("name", sorted(IMPLIED.keys() - {"envs", "vllm_config"}))
def test_implied_values_are_defaults(name):
    """A release with another default has other bytes: its engines must not find those of an earlier one."""
    for field, implied in IMPLIED[name].items():
        default = CLASSES[name].__dataclass_fields__[field]
        value = getattr(default.default, "default", default.default)
        factory = getattr(default.default, "default_factory", None) or default.default_factory
        assert (value if factory in (None, dataclasses.MISSING) else factory()) in implied
