"""Where torch chooses ops and collectives by the device: what is tested, and what has no effect.

`TESTED` maps tests of simulated CUDA worlds, in `tests/world`, to the functions of torch whose CUDA
branch they take. `WITHOUT_EFFECT` maps reasons to functions whose branches change no op and no
collective of a training program, or cannot be taken without a GPU. A trailing `*` stands for any
rest of the name, and `C++:` for a kernel of an aten op.
"""

from __future__ import annotations

TESTED: dict[str, tuple[str, ...]] = {
    # collectives
    "test_simulated_cuda.py::test_moving_a_shard_to_another_dim": (
        "distributed/tensor/_collective_utils.py:shard_dim_alltoall",
    ),
    "test_gathers_with_gradients_are_reduced_and_scattered_in_backward": (
        "distributed/nn/functional.py:_AllGather.backward",
        "distributed/nn/functional.py:_AllGatherBase.backward",
    ),
    "test_exchanges_with_gradients_are_all_to_all": (
        "distributed/nn/functional.py:_AlltoAll.forward",
    ),
    "test_monitored_barriers_need_a_group_of_gloo": (
        "distributed/distributed_c10d.py:monitored_barrier",
    ),
    "test_messages_of_a_batch_and_barriers": (
        "distributed/distributed_c10d.py:barrier",
        "distributed/distributed_c10d.py:batch_isend_irecv",
    ),
    "test_broadcast_of_float8": ("distributed/distributed_c10d.py:broadcast",),
    "test_subgroups_are_the_devices_of_a_host": ("distributed/distributed_c10d.py:new_subgroups",),
    "test_objects_are_sent_as_tensors_of_the_device": (
        "distributed/distributed_c10d.py:broadcast_object_list",
        "distributed/distributed_c10d.py:recv_object_list",
        "distributed/distributed_c10d.py:send_object_list",
    ),
    "test_simulated_cuda.py::test_synchronized_batch_norm": (
        "nn/modules/_functions.py:SyncBatchNorm.forward",
        "nn/modules/batchnorm.py:SyncBatchNorm.forward",
    ),
    "test_ddp_on_a_device": (
        "nn/parallel/distributed.py:DistributedDataParallel.__init__",
        "nn/parallel/distributed.py:DistributedDataParallel._passing_sync_batchnorm_handle",
        "distributed/utils.py:_recursive_to.to_map",
        "distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py:powerSGD_hook.decompress",
        "distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py:batched_powerSGD_hook.decompress",
    ),
    "test_simulated_ddp.py::test_a_hook_reduces_in_bfloat16_as_it_may_on_cuda": (
        "nn/parallel/distributed.py:DistributedDataParallel._check_comm_hook",
    ),
    # FSDP
    "test_fsdp1_gathers_into_a_tensor": (
        "distributed/fsdp/_common_utils.py:_FSDPDeviceHandle.from_device",
        "distributed/fsdp/_flat_param.py:FlatParamHandle._all_gather_flat_param",
        "distributed/fsdp/_init_utils.py:_get_compute_device",
        "distributed/fsdp/_init_utils.py:_get_device_from_device_id",
        "distributed/fsdp/_init_utils.py:_init_device_handle",
        "distributed/fsdp/_runtime_utils.py:_lazy_init",
    ),
    "test_simulated_cuda.py::test_fully_shard": (
        "distributed/fsdp/_fully_shard/_fsdp_param_group.py:FSDPParamGroup.post_backward",
    ),
    "test_simulated_cuda.py::test_the_default_mesh_of_fsdp_is_on_the_device": (
        "distributed/fsdp/_fully_shard/_fsdp_init.py:_get_device_from_mesh",
        "distributed/fsdp/_fully_shard/_fsdp_init.py:_move_states_to_device",
    ),
    "test_simulated_cuda.py::test_fsdp_moves_the_inputs_of_its_root_to_the_device": (
        "distributed/fsdp/_fully_shard/_fsdp_state.py:FSDPState._root_pre_forward",
    ),
    "test_simulated_cuda.py::test_parameters_that_fsdp_offloads_are_materialized_on_the_host": (
        "distributed/fsdp/_fully_shard/_fsdp_param_group.py:FSDPParamGroup._validate_cpu_offload_params",
    ),
    "test_gradient_scalers_are_enabled": (
        "amp/grad_scaler.py:GradScaler.__init__",
        "cuda/amp/common.py:amp_definitely_not_available",
        "distributed/fsdp/sharded_grad_scaler.py:ShardedGradScaler.unscale_",
        "distributed/fsdp/sharded_grad_scaler.py:_is_supported_device",
    ),
    "test_state_dicts_are_gathered_on_the_device_and_offloaded": (
        "distributed/_state_dict_utils.py:_gather_state_dict.dtensor_func",
    ),
    # DTensor
    "test_dtensors_are_moved_to_the_device_of_their_mesh": (
        "distributed/tensor/_api.py:DTensor.from_local",
        "distributed/tensor/_api.py:distribute_tensor",
    ),
    "test_random_ops_on_dtensors_draw_by_offsets": (
        "distributed/tensor/_dispatch.py:OpDispatcher._dispatch_get_local_results_slow_path",
        "distributed/tensor/_random.py:OffsetBasedRNGTracker.__init__",
        "distributed/tensor/_random.py:OffsetBasedRNGTracker._distribute_region",
        "distributed/tensor/_random.py:_RNGStateTracker.__init__",
        "_prims/rng_prims.py:register_run_dtensor_rng_op.impl_backend_select",
    ),
    "test_costs_of_redistribution_are_of_hosts_with_eight_devices": (
        "distributed/tensor/_collective_utils.py:MeshTopoInfo.build_from_mesh",
    ),
    "test_simulated_cuda.py::test_context_parallel_attention": (
        "distributed/tensor/experimental/_context_parallel/_attention.py:_create_cp_block_mask",
    ),
    # optimizers
    "test_optimizers_choose_lists_of_tensors_and_count_steps_on_the_device": (
        *(
            f"optim/{name}.py:_{kind}_tensor_{name}"
            for name in (
                *("adadelta", "adam", "adamax", "asgd"),
                *("nadam", "radam", "rmsprop", "rprop"),
            )
            for kind in ("single", "multi")
        ),
        "optim/adagrad.py:_multi_tensor_adagrad",
        "optim/optimizer.py:_default_to_fused_or_foreach",
    ),
    "test_simulated_cuda.py::test_gradient_scalers_step_as_without_overflow": (
        "optim/optimizer.py:_device_dtype_check_for_fused",
    ),
    "test_compiled_optimizers_count_steps_on_the_device": (
        "_dynamo/variables/optimizer.py:OptimizerVariable._safe_to_set_capturable",
        "_dynamo/variables/optimizer.py:OptimizerVariable._set_capturable.safe_to_set_capturable",
        "_dynamo/variables/optimizer.py:OptimizerVariable.move_step_if_cpu",
        "optim/optimizer.py:_disable_dynamo_if_unsupported.wrapper.maybe_fallback",
    ),
    "test_averages_and_norms_are_of_lists_of_tensors": (
        "optim/swa_utils.py:AveragedModel.update_parameters",
        "utils/_foreach_utils.py:_device_has_foreach_support",
    ),
    # autocast, checkpoints and random states
    "test_custom_functions_cast_their_inputs": ("amp/autocast_mode.py:_cast",),
    "test_simulated_cuda.py::test_autocast_has_the_policies_of_cuda": (
        "amp/autocast_mode.py:autocast.__init__",
    ),
    "test_checkpoints_without_tensors_recompute_under_autocast": (
        "utils/checkpoint.py:CheckpointFunction.backward",
        "utils/checkpoint.py:DefaultDeviceType.get_device_type",
        "utils/checkpoint.py:_checkpoint_without_reentrant_generator.recompute_fn",
        "utils/checkpoint.py:_checkpoint_without_reentrant_generator_impl.recompute_fn",
        "utils/checkpoint.py:_get_autocast_kwargs",
        "utils/checkpoint.py:_infer_device_type",
    ),
    "test_simulated_cuda.py::test_checkpointing": (
        "utils/checkpoint.py:_infer_device_type.add_device_types",
        "utils/checkpoint.py:get_device_states.add_device_ids",
        "utils/checkpoint.py:set_device_states",
    ),
    "test_forked_random_states_are_of_all_devices": ("random.py:fork_rng",),
    # ops that Python chooses
    "test_deterministic_ops_are_composed": (
        "nn/functional.py:interpolate",
        "nn/functional.py:max_pool3d_with_indices",
        "nn/functional.py:pad",
    ),
    "test_flex_attention_is_trained": (
        "nn/attention/flex_attention.py:_apply_kernel_options",
        "nn/attention/flex_attention.py:_validate_device",
        "nn/attention/flex_attention.py:create_block_mask",
        "nn/attention/flex_attention.py:create_mask",
    ),
    "test_attention_of_sequences_of_different_lengths": (
        "nn/attention/varlen.py:_cudnn_rejection_reasons",
        "nn/attention/varlen.py:_varlen_attn",
        "nn/attention/varlen.py:_varlen_attn_backward",
        "nn/attention/varlen.py:_varlen_attn_out",
    ),
    "test_chunked_cross_entropy_is_one_op": (
        "nn/modules/linear_cross_entropy.py:_ChunkContext.build",
        "nn/modules/linear_cross_entropy.py:_ChunkViews.logits_upcast",
        "nn/modules/linear_cross_entropy.py:_ChunkViews.weight_grad_input",
        "nn/modules/linear_cross_entropy_options.py:LinearCrossEntropyOptions._resolve_auto_acc_dtype",
        "nn/modules/linear_cross_entropy_options.py:_auto_acc_policy",
    ),
    "test_data_parallel_is_refused": ("nn/parallel/data_parallel.py:DataParallel.__init__",),
    "test_tensors_saved_on_the_host_come_back": (
        "autograd/graph.py:save_on_cpu.__init__.pack_to_cpu",
    ),
    "test_scans_combine_pointwise": (
        "_higher_order_ops/associative_scan.py:associative_scan._validate_input",
    ),
    # ops that C++ chooses, by the test of the op
    "test_kernels_that_cpp_chooses": (
        "C++:grid_sampler",
        "C++:gru",
        "C++:gru_cell",
        "C++:log_softmax",
        "C++:lstm",
        "C++:lstm_cell",
        "C++:rnn_relu",
        "C++:rnn_tanh",
        "C++:softmax",
    ),
    "test_simulated_cuda.py::test_fused_kernels": (
        "C++:dropout",
        "C++:rms_norm",
        "C++:scaled_dot_product_attention",
    ),
    "test_simulated_cuda.py::test_batch_norm_is_of_cudnn": ("C++:batch_norm",),
    # shapes and dtypes of results: torch asks for the device of a fake tensor, in Python
    "test_results_have_the_shapes_and_dtypes_of_cuda": (
        "_decomp/decompositions.py:*",
        "_meta_registrations.py:*",
        "_refs/__init__.py:*",
    ),
    # compiled graphs
    "test_passes_over_compiled_graphs": (
        "_inductor/decomposition.py:addmm",
        "_inductor/decomposition.py:bmm",
        "_inductor/decomposition.py:mm",
        "_inductor/fx_passes/joint_graph.py:bmm_to_mm",
        "_inductor/fx_passes/post_grad.py:ConstructorMoverPass.__call__",
        "_inductor/fx_passes/post_grad.py:ConstructorMoverPass.get_cpu_indeg_count.add_cpu_inp",
        "_inductor/fx_passes/post_grad.py:ConstructorMoverPass.is_cpu_scalar_tensor",
        "_inductor/fx_passes/post_grad.py:ConstructorMoverPass.is_on_target_device",
        "_inductor/fx_passes/post_grad.py:prepare_softmax_extra_check",
        "_inductor/fx_passes/post_grad.py:should_prefer_unfused_addmm",
        "_inductor/fx_passes/post_grad.py:unfuse_bias_add_to_pointwise",
        "_inductor/fx_passes/pre_grad.py:fuse_fx",
    ),
    "test_gradients_of_biases_of_compiled_convolutions_are_sums": (
        "_inductor/decomposition.py:convolution_backward",
    ),
    "test_attention_written_as_products_is_fused": (
        "_inductor/fx_passes/fuse_attention.py:_get_sfdp_patterns",
        "_inductor/fx_passes/fuse_attention.py:_sfdp_extra_check.fn",
        "_inductor/fx_passes/fuse_attention.py:_sfdp_params_check",
        "_inductor/fx_passes/fuse_attention.py:_sfdp_replacement_16",
    ),
    "test_simulated_compile.py::test_asynchronous_tensor_parallel_fuses_collectives_with_matrix_"
    "products": (
        "_inductor/fx_passes/micro_pipeline_tp.py:fuse_all_gather_matmul",
        "_inductor/fx_passes/micro_pipeline_tp.py:fuse_matmul_reduce_scatter",
    ),
    "test_simulated_compile.py::test_overlapped_collectives_go_by_estimates": (
        "_inductor/fx_passes/fsdp.py:pre_bucket_fsdp_collectives",
        "_inductor/fx_passes/memory_estimator.py:MemoryTracker.__init__",
        "_inductor/fx_passes/memory_estimator.py:device_filter",
        "_inductor/fx_passes/memory_estimator.py:get_fwd_bwd_interactions",
        "_inductor/fx_passes/node_runtime_estimation.py:can_benchmark_collective",
    ),
    "test_compiled_checkpoints_draw_twice_from_the_same_state": (
        "_functorch/_aot_autograd/utils.py:supports_graphsafe_rng",
        "_functorch/partitioners.py:functionalize_rng_ops",
        "_functorch/partitioners.py:functionalize_rng_ops.get_device",
        "_functorch/partitioners.py:functionalize_rng_ops.get_sample_rng_state",
        "_prims/rng_prims.py:get_device",
        "_prims/rng_prims.py:register_graphsafe_run_with_rng_state_op.impl_backend_select",
    ),
}
WITHOUT_EFFECT: dict[str, tuple[str, ...]] = {
    "copies, streams and pinned memory order work on a device and issue nothing": (
        "_dynamo/guards.py:GuardBuilder.CURRENT_STREAM_MATCH*",
        "_dynamo/guards.py:_guard_device_index_is_current",
        "_dynamo/guards.py:_stream_is_current",
        "_dynamo/symbolic_convert.py:InstructionTranslatorBase._maybe_emit_sync_dealloc",
        "_dynamo/utils.py:clone_input.is_pinned_cpu_tensor",
        "_dynamo/utils.py:timed",
        "_dynamo/variables/streams.py:*",
        "_dynamo/variables/tensor.py:TensorVariable.method_is_pinned",
        "_dynamo/variables/torch.py:TorchInGraphFunctionVariable._get_handlers.handle_synchronize",
        "_functorch/_aot_autograd/streams.py:*",
        "autograd/_functions/tensor.py:Type.forward",
        "distributed/algorithms/model_averaging/utils.py:average_parameters",
        "distributed/fsdp/_common_utils.py:_no_dispatch_record_stream",
        "distributed/fsdp/_flat_param.py:FlatParamHandle.to_cpu",
        "distributed/fsdp/_fully_shard/_fsdp_collectives.py:record_grad_output_stream",
        "distributed/fsdp/_runtime_utils.py:_init_streams",
        "distributed/fsdp/_state_dict_utils.py:_common_pre_state_dict_hook",
        "distributed/fsdp/_state_dict_utils.py:_pre_load_state_dict_hook",
        "nn/utils/rnn.py:PackedSequence.*",
    ),
    "random states are saved and restored; a simulated device has states without a meaning": (
        "_dynamo/__init__.py:reset",
        "_dynamo/convert_frame.py:preserve_global_state._fn",
        "_dynamo/utils.py:checkpoint_params*",
        "_dynamo/utils.py:preserve_rng_state",
        "distributed/collective_utils.py:_check_rng_sync_internal",
        "distributed/pipelining/schedules.py:_PipelineSchedule._initialize_pp_stages",
    ),
    "a check whose outcome is an error or a warning, never another op": (
        "_dynamo/backends/cudagraphs.py:get_device_index",
        "_dynamo/decorators.py:_allow_in_graph_einops",
        "_dynamo/utils.py:is_compile_supported",
        "_dynamo/variables/builder.py:_coor_check_tensor_device",
        "_higher_order_ops/utils.py:check_meta_consistency.diff_meta_pairs.diff_device",
        "_inductor/compile_fx.py:_check_triton_bf16_support",
        "_inductor/compile_fx.py:_warn_tf32_disabled",
        "_inductor/compile_fx.py:is_tf32_warning_applicable",
        "_inductor/fx_passes/fuse_attention.py:_warn_tf32_disabled",
        "amp/autocast_mode.py:custom_bwd",
        "amp/autocast_mode.py:custom_fwd",
        "amp/grad_scaler.py:GradScaler.update",
        "distributed/fsdp/sharded_grad_scaler.py:ShardedGradScaler.update",
        "distributed/device_mesh.py:DeviceMesh.__eq__",
        "distributed/device_mesh.py:DeviceMesh.__init__",
        "distributed/device_mesh.py:init_device_mesh",
        "distributed/pipelining/_p2p.py:_warn_if_eager_nccl",
        "functional.py:norm",
        "nn/modules/activation.py:_check_arg_device",
        "nn/modules/transformer.py:*",
        "nn/utils/convert_parameters.py:_check_param_device",
        "nn/utils/rnn.py:_packed_sequence_init_args",
        "optim/optimizer.py:Optimizer._accelerator_graph_capture_health_check",
    ),
    "creates or ends groups: simulated ones have no connections": (
        "_dynamo/distributed.py:get_compile_sync_pg",
        "distributed/device_mesh.py:DeviceMesh._init_one_process_group",
        "distributed/device_mesh.py:DeviceMesh.abort",
        "distributed/distributed_c10d.py:Backend.register_backend",
        "distributed/distributed_c10d.py:BackendConfig.__init__",
        "distributed/distributed_c10d.py:_abort_process_group",
        "distributed/distributed_c10d.py:_add_ephemeral_timeout_for_all_pgs",
        "distributed/distributed_c10d.py:_create_*",
        "distributed/distributed_c10d.py:_get_backend_name_for_device",
        "distributed/distributed_c10d.py:_get_process_group_uid",
        "distributed/distributed_c10d.py:_get_split_source",
        "distributed/distributed_c10d.py:_maybe_attach_flight_recorder",
        "distributed/distributed_c10d.py:_new_process_group_helper",
        "distributed/distributed_c10d.py:_parse_backend_string",
        "distributed/distributed_c10d.py:_resolve_torchcomms_*",
        "distributed/distributed_c10d.py:_set_pg_timeout",
        "distributed/distributed_c10d.py:_validate_shrink_backend_requirements",
        "distributed/distributed_c10d.py:get_backend_impl",
        "distributed/distributed_c10d.py:split_group",
        "distributed/pipelining/_p2p.py:_build_p2p_edge_groups",
        "distributed/pipelining/_p2p.py:_initialize_additional_parent_backends",
    ),
    "only with TORCH_DISTRIBUTED_DEBUG=DETAIL, which a simulated world lowers": (
        "distributed/distributed_c10d.py:_object_to_tensor",
        "distributed/distributed_c10d.py:_tensor_to_object",
    ),
    "writes or reads files, which needs data": (
        "_tensor.py:*",
        "distributed/_state_dict_utils.py:_all_gather_sharded_tensor",
        "distributed/_state_dict_utils.py:_broadcast_tensors",
        "distributed/checkpoint/*",
        "distributed/fsdp/_optim_utils.py:_communicate_optim_state",
        "distributed/fsdp/_shard_utils.py:_get_remote_device_str",
        "distributed/fsdp/_state_dict_utils.py:_sharded_pre_load_state_dict_hook",
    ),
    "moves data between the devices of one process, or within symmetric memory of real devices": (
        "distributed/_symmetric_memory/*",
        "nn/parallel/_functions.py:*",
        "nn/parallel/comm.py:reduce_add",
        "nn/parallel/data_parallel.py:data_parallel",
        "nn/parallel/parallel_apply.py:parallel_apply",
    ),
    "needs a package or a kernel that runs on a GPU only, and is chosen by the user": (
        "_dynamo/backends/tvm.py:tvm",
        "_higher_order_ops/cudagraph_conditional_nodes.py:*",
        "_higher_order_ops/inline_asm_elementwise.py:*",
        "nn/attention/_fa3.py:*",
        "nn/attention/_fa4.py:*",
        "nn/attention/experimental/*",
        "nn/attention/flex_attention.py:_enforce_mem_layouts",
        "nn/attention/varlen.py:_cudnn_supports_head_dims",
        "nn/attention/varlen.py:_cudnn_version",
    ),
    "generated code, which a simulated world does not run": (
        "_inductor/compile_fx.py:_compile_fx_inner",
        "_inductor/compile_fx.py:compile_fx",
        "_inductor/compile_fx.py:get_cuda_device_context",
        "_inductor/compile_fx.py:get_input_idxs_to_check",
        "_inductor/decomposition.py:_preserve_bf16x9_matmul*",
        "_inductor/fx_passes/replace_random.py:*",
        "_dynamo/variables/optimizer.py:_is_static_for_cudagraphs",
    ),
    "kernels are timed to decide, which a simulated device cannot do": (
        "_inductor/fx_passes/pad_mm.py:*",
    ),
    "off unless an option of Inductor is set; reads the device of a fake tensor": (
        "_inductor/fx_passes/b2b_gemm.py:*",
        "_inductor/fx_passes/decompose_mem_bound_mm.py:*",
        "_inductor/fx_passes/group_batch_fusion.py:*",
        "_inductor/fx_passes/low_contention_collectives.py:*",
        "_inductor/fx_passes/pre_grad.py:_resolve_pre_grad_fusion_options",
        "_inductor/fx_passes/reduced_atomic_contention.py:*",
        "_inductor/fx_passes/slice_scatter_chunking.py:*",
    ),
    "inference: frozen or quantized weights, or ops of oneDNN, which are for the CPU": (
        "_higher_order_ops/out_dtype.py:is_int_mm",
        "_inductor/fx_passes/freezing_patterns.py:*",
        "_inductor/fx_passes/mkldnn_fusion.py:*",
        "_inductor/fx_passes/post_grad.py:_can_fold_scaled_mm_output_scale",
        "_inductor/fx_passes/post_grad.py:check_shape_cuda_and_fused_int_mm_mul_enabled",
        "_inductor/fx_passes/quantization.py:*",
    ),
    "pointwise ops become other pointwise ops, by the device of a fake tensor": (
        "_decomp/decompositions_for_jvp.py:*",
        "_decomp/decompositions_for_rng.py:*",
        "_inductor/decomposition.py:index_add",
        "_inductor/decomposition.py:index_reduce",
        "_inductor/fx_passes/joint_graph.py:fix_iota_device",
        "_inductor/fx_passes/misc_patterns.py:*",
        "_inductor/fx_passes/post_grad.py:_is_addcdiv_fma_eligible",
        "_inductor/fx_passes/post_grad.py:_is_quack_symmetric_mm",
        "_inductor/fx_passes/post_grad.py:is_index_put_and_requires_h2d_sync_for_gpu_value",
        "_inductor/fx_passes/post_grad.py:is_valid_mm_plus_mm",
        "_inductor/fx_passes/post_grad.py:should_prefer_unfused_baddbmm",
        "_inductor/fx_passes/post_grad.py:unfuse_bias_baddbmm_to_pointwise",
        "_prims/__init__.py:_svd_meta",
        "_prims/rng_prims.py:register_philox_rand._philox_rand",
        "_refs/fft.py:*",
        "_refs/nn/functional/__init__.py:channel_shuffle",
    ),
    "dynamo reads the device as the program does": (
        "_dynamo/convert_frame.py:trace_frame",
        "_dynamo/graph_utils.py:*",
        "_dynamo/output_graph.py:*",
        "_dynamo/variables/ctx_manager.py:AutocastModeVariable.create",
        "_dynamo/variables/distributed.py:*",
        "_dynamo/variables/tensor.py:*",
        "_dynamo/variables/torch.py:TorchInGraphFunctionVariable._get_handlers.handle_tensor_split",
        "_functorch/_aot_autograd/autograd_cache.py:*",
        "_functorch/_aot_autograd/graph_capture_wrappers.py:disable_autocast",
    ),
    "compiled autograd does not take tensors without data on any device": (
        "_dynamo/compiled_autograd.py:*",
    ),
    "weights are copied into one buffer for cuDNN, once and without a collective": (
        "nn/modules/rnn.py:RNNBase.flatten_parameters",
    ),
    "text": ("nn/modules/container.py:*",),
    "refused by C++ as on the CPU: cast to float32": ("C++:fft_* of float16",),
    "reads lengths from data: the world stops and names --data": (
        "C++:ctc_loss",
        "optim/_adafactor.py:_multi_tensor_adafactor",
    ),
}
