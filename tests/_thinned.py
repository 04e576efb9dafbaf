"""Parameters of tests: a few in the default set, all in the slow one."""

import collections
import itertools

import pytest

# Tests that compile for seconds: the default set runs every so many of their
# cases, in their order, and none with 0; the slow set runs all others. The
# numbers follow from the processor time of each test: a test with cases takes
# about a second by default, and what takes five alone is here where another
# test holds its law. The oracle holds most laws for the product of all options.
EVERY = {
  "cli/launch/test_cluster_file.py": {
    "test_jobset_is_valid_for_kubernetes": 2,
  },
  "cli/launch/test_identity.py": {
    "test_processes_with_other_options_do_not_train": 2,
    "test_strangers_on_all_sockets_change_no_bit_of_a_run": 0,
  },
  "cli/test_commands.py": {
    "test_same_command_resumes_a_run": 0,
  },
  "cli/test_divergence.py": {
    "test_tuning_never_chooses_a_diverged_rate": 0,
    "test_unknown_loss_is_no_divergence": 0,
  },
  "cli/test_elastic.py": {
    "test_row_and_output_name_the_members": 0,
  },
  "cli/test_errors.py": {
    "test_bad_input_is_refused_in_one_line": 3,
    "test_taken_port_and_wrong_address_have_other_statuses": 2,
  },
  "cli/test_interrupts.py": {
    "test_interrupt_during_garbage_collection_is_not_lost": 0,
    "test_other_unraisable_errors_are_reported_as_usual": 0,
  },
  "cli/test_methods.py": {
    "test_method_trains_towards_its_target": 24,
    "test_sparse_codec_with_feedback_minimizes_a_square": 12,
  },
  "cli/test_overlap.py": {
    "test_every_model_has_a_batch": 3,
  },
  "cli/test_pipeline_run.py": {
    "test_bad_stages_are_refused_in_one_line": 2,
    "test_pipeline_train_is_train_with_stages": 0,
  },
  "cli/test_resumed.py": {
    "test_core_alone_trains_and_names_missing_extras": 0,
    "test_resumed_run_may_be_longer_and_have_other_workers": 0,
  },
  "cli/test_server_run.py": {
    "test_codec_compresses_pushes": 0,
    "test_h_ps_pipelines_after_a_share_of_the_run": 0,
  },
  "cli/test_texts.py": {
    "test_methods_are_tuned_and_compared_on_a_text": 0,
    "test_options_that_do_not_match_are_refused": 6,
  },
  "cli/test_wrong_commands.py": {
    "test_wrong_value_ends_with_one_message": 10,
  },
  "codecs/test_bits.py": {
    "test_every_width_is_recovered_from_the_fewest_bytes": 32,
    "test_high_bits_and_other_integer_dtypes_do_no_harm": 2,
  },
  "codecs/test_conformance.py": {
    "test_16_bit_arrays_are_recovered": 4,
    "test_any_array_is_within_the_bound": 4,
    "test_denormal_entries_stay_small": 10,
    "test_errors_stay_within_the_bound": 31,
    "test_scalars_and_empty_arrays": 16,
    "test_shard_map_equals_a_loop_over_workers": 8,
    "test_unbiased_codecs_have_the_right_mean": 8,
    "test_zeros_and_equal_entries": 16,
  },
  "codecs/test_dct.py": {
    "test_all_coefficients_are_the_identity": 6,
    "test_narrow_arrays_and_values": 2,
    "test_tiles_have_the_largest_divisors_as_sides": 10,
  },
  "codecs/test_largest.py": {
    "test_any_length_is_searched": 12,
    "test_exactly_the_largest_are_found": 52,
    "test_kernel_finds_the_largest_of_short_rows": 2,
    "test_sampled_threshold_keeps_its_bounds": 26,
  },
  "codecs/test_quantize.py": {
    "test_codes_agree_with_a_float64_reference": 6,
  },
  "codecs/test_random_k.py": {
    "test_all_entries_are_the_identity": 2,
    "test_mean_is_the_array": 8,
    "test_small_arrays": 2,
  },
  "codecs/test_sign.py": {
    "test_signs_match_hand_computation": 4,
  },
  "codecs/test_top_k.py": {
    "test_all_entries_are_the_identity": 4,
    "test_nan_and_infinity_stay_visible": 8,
    "test_one_per_cent_is_at_least_95_times_smaller": 4,
    "test_only_largest_entries_are_decoded": 4,
    "test_payloads_are_added_without_dense_arrays": 2,
    "test_sampled_threshold_sends_nearly_k_of_the_largest": 6,
    "test_small_arrays": 2,
    "test_values_are_sent_by_their_codec": 4,
    "test_vmap_equals_a_loop_on_the_device": 0,
  },
  "collectives/test_lifeline.py": {
    "test_mismatched_processes_are_refused": 2,
  },
  "collectives/test_operations.py": {
    "test_collectives_work_in_conditionals_and_scans": 3,
    "test_gradients_of_own_parameters_are_local": 3,
    "test_leaves_share_a_message_between_cpu_hosts": 2,
    "test_operations_match_numpy": 10,
    "test_payloads_of_any_dtype_are_sent_unchanged": 4,
    "test_values_that_are_equal_on_all_workers_are_treated_as_their_own": 4,
  },
  "collectives/test_processes.py": {
    "test_four_processes_match_numpy": 0,
    "test_worker_may_span_processes": 0,
  },
  "collectives/test_workers.py": {
    "test_gradient_through_a_collective_counts_every_worker": 4,
    "test_loop_or_branch_with_constants_differentiates": 26,
    "test_number_without_a_dtype_of_its_own_compiles_no_second_step": 2,
    "test_step_compiles_once_and_keeps_state_sharding": 3,
    "test_typed_keys_are_placed_like_other_leaves": 6,
  },
  "data/test_augmentation.py": {
    "test_all_allowed_augmentations_occur": 2,
    "test_augmentation_is_equal_on_all_substrates": 6,
  },
  "data/test_load.py": {
    "test_statistics_are_those_of_the_train_split": 5,
    "test_train_split_has_the_published_order": 4,
  },
  "elastic/test_protocol.py": {
    "test_rounds_end_whoever_comes_and_goes": 2,
  },
  "elastic/test_rounds.py": {
    "test_undisturbed_run_matches_the_collective_method": 5,
  },
  "experiments/test_comparisons.py": {
    "test_protocols_are_compared_in_virtual_time": 0,
    "test_smoke_preset_runs_and_is_reported": 0,
  },
  "experiments/test_h_ps_schedule.py": {
    "test_cosine_is_as_long_as_the_run": 0,
  },
  "experiments/test_layer_moves.py": {
    "test_moved_layers_keep_their_bits": 0,
    "test_state_of_an_optimizer_of_all_leaves_moves_to_the_first_stage": 0,
  },
  "experiments/test_mp2.py": {
    "test_rows_have_the_bytes_of_the_traced_step": 0,
  },
  "experiments/test_msdpu_stability.py": {
    "test_training_diverges_above_the_limit_only": 2,
  },
  "experiments/test_nowcasters.py": {
    "test_each_kind_has_its_network": 0,
    "test_jump_follows_every_fifth_epoch": 0,
    "test_training_beats_the_last_value_on_held_out_tracks": 0,
  },
  "experiments/test_one_core.py": {
    "test_gradients_in_turn_match_vectorized_gradients": 0,
  },
  "experiments/test_own_models.py": {
    "test_network_learns_digits": 0,
    "test_only_adapters_are_sent": 0,
    "test_sharded_worker_takes_the_same_steps": 0,
    "test_whole_loop_of_one_worker_is_plain_jax": 0,
  },
  "experiments/test_pipeline_accuracy.py": {
    "test_report_runs_over_the_rows": 0,
    "test_smoke_preset_runs_and_is_reported": 0,
  },
  "experiments/test_pipeline_plans.py": {
    "test_equal_machines_have_the_gains_of_the_formulas": 0,
    "test_flushed_tables_have_no_delay_and_a_bubble": 0,
    "test_slow_machine_slows_the_papers_partitions_only": 0,
  },
  "experiments/test_resumed_commands.py": {
    "test_each_row_is_found_by_a_command_of_its_page": 8,
  },
  "experiments/test_step_times.py": {
    "test_step_without_messages_is_measured": 0,
  },
  "methods/test_compressed_gradients.py": {
    "test_method_matches_numpy": 12,
  },
  "methods/test_conformance.py": {
    "test_compression_of_every_bit_changes_nothing": 4,
    "test_host_ends_rounds_where_the_device_would": 4,
    "test_streamed_method_equals_whole_to_the_bit": 4,
  },
  "methods/test_diloco.py": {
    "test_fragments_are_sent_and_applied_one_by_one": 3,
    "test_method_with_neutral_arguments_equals_simpler_one": 2,
    "test_muloco_survives_two_bits": 0,
    "test_residuals_are_each_workers_own_and_the_anchor_is_not": 2,
    "test_sparse_loco_converges_with_sparse_progress": 0,
  },
  "methods/test_local_sgd.py": {
    "test_late_control_variates_are_means_of_gradients_too": 4,
    "test_late_control_variates_settle_at_the_optimum": 3,
    "test_method_with_neutral_arguments_equals_simpler_one": 3,
    "test_rounds_match_the_paper": 4,
    "test_slow_mo_treats_momenta_as_configured": 2,
  },
  "methods/test_overlapped.py": {
    "test_rounds_match_the_paper": 2,
  },
  "methods/test_resumed_runs.py": {
    "test_state_alone_resumes_a_run": 6,
  },
  "methods/test_sent_bytes.py": {
    "test_compiled_program_sends_counted_bytes": 4,
  },
  "methods/test_wrappers.py": {
    "test_accumulation_in_inner_chain_is_accepted": 6,
    "test_integers_and_bools_pass_through": 6,
    "test_nested_method_takes_its_own_steps": 6,
    "test_only_trained_leaves_are_sent": 27,
    "test_plateau_receives_the_mean_loss": 10,
    "test_transformations_behind_an_anchor_are_refused": 6,
    "test_wrappers_inside_hold_what_they_freeze": 18,
  },
  "models/test_build.py": {
    "test_bfloat16_parameters_and_images_compute_in_bfloat16": 20,
    "test_every_batch_normalization_is_given_the_mask": 2,
    "test_form_follows_the_size_of_the_images": 6,
    "test_half_precision_is_close_to_float32": 6,
    "test_leaves_are_in_the_order_of_the_layers": 6,
    "test_logits_have_the_stated_shape": 4,
    "test_mirrored_image_has_other_logits": 2,
    "test_models_overfit_a_few_digits": 4,
    "test_parameters_are_float32_in_plain_dicts": 4,
    "test_resnet_without_normalization_starts_as_its_first_layers": 4,
    "test_same_seed_gives_the_same_bits_and_another_seed_others": 10,
    "test_training_and_evaluation_return_equal_shapes": 9,
    "test_weights_start_with_the_stated_deviation": 3,
  },
  "models/test_counting.py": {
    "test_abstract_model_has_the_shapes_of_a_real_one": 18,
    "test_parameter_counts_match_hand_counts": 3,
  },
  "models/test_layered_network.py": {
    "test_layers_make_the_program_of_the_model": 18,
    "test_layers_partition_the_tree_of_the_model": 3,
  },
  "models/test_normalization.py": {
    "test_padding_at_any_place_does_not_count": 3,
    "test_variance_is_exact_with_a_large_mean": 2,
  },
  "models/test_patches.py": {
    "test_halving_is_max_pooling": 6,
    "test_values_and_gradients_equal_those_of_xla": 12,
  },
  "models/test_transformer.py": {
    "test_attention_is_causal": 2,
    "test_transformer_overfits_a_few_sequences": 0,
  },
  "optimizers/test_optimizers.py": {
    "test_outcome_is_that_of_the_page": 28,
  },
  "pipeline/cells/test_bfloat16.py": {
    "test_bfloat16_gradients_match_unsplit_model": 2,
  },
  "pipeline/cells/test_late_cells.py": {
    "test_processes_match_delayed_gradients": 4,
  },
  "pipeline/cells/test_synchronous_cells.py": {
    "test_gradients_match_unsplit_model": 24,
  },
  "pipeline/cells/test_worker_cells.py": {
    "test_streamed_rounds_match_those_of_whole_models": 0,
  },
  "pipeline/planning/test_layer_costs.py": {
    "test_costs_of_an_mlp_match_hand_counts": 2,
  },
  "pipeline/planning/test_model_cuts.py": {
    "test_stages_compute_the_model_and_its_gradients": 2,
  },
  "pipeline/planning/test_placement.py": {
    "test_placement_of_200_layers_on_64_machines_takes_seconds": 0,
  },
  "pipeline/planning/test_plan_search.py": {
    "test_asynchronous_plan_reaches_the_bottleneck_with_the_least_delay": 0,
    "test_plan_is_as_fast_as_the_best_of_all_cuts_and_machines": 3,
  },
  "pipeline/planning/test_simulator.py": {
    "test_bubbles_match_the_formulas": 4,
  },
  "pipeline/processes/test_stage_process.py": {
    "test_asynchronous_table_reads_the_versions_that_it_names": 2,
    "test_dropout_is_replayed_in_the_backward_pass": 0,
    "test_inputs_draw_from_their_key": 0,
    "test_overlapping_iterations_match_the_unsplit_model": 4,
    "test_synchronous_table_matches_unsplit_model": 4,
    "test_tied_parameters_receive_the_sum_of_their_gradients": 3,
  },
  "pipeline/processes/test_stage_program.py": {
    "test_only_the_input_part_recomputes": 3,
  },
  "pipeline/runtime/test_chains.py": {
    "test_clip_norm_matches_unsplit_model": 2,
    "test_equal_stages_accept_optimizers_of_whole_leaves": 0,
  },
  "pipeline/runtime/test_gpu_programs.py": {
    "test_late_sends_overlap_the_conditionals_of_their_tick": 2,
    "test_sends_between_ticks_do_not_overlap_the_conditionals": 2,
  },
  "pipeline/runtime/test_one_program.py": {
    "test_drain_applies_every_gradient": 0,
    "test_masked_micro_batches_count_by_their_samples": 0,
    "test_memory_of_1f1b_does_not_grow_with_micro_batches": 0,
    "test_parameter_sized_buffers_do_not_grow_with_micro_batches": 2,
    "test_synchronous_table_matches_unsplit_model": 2,
    "test_window_with_a_correction_matches_delayed_gradients_with_it": 0,
  },
  "pipeline/runtime/test_split_backward.py": {
    "test_both_parts_cost_as_much_as_the_whole": 7,
    "test_both_parts_match_the_whole_backward_pass": 9,
    "test_both_parts_match_to_twelve_digits_in_float64": 6,
    "test_only_the_weight_part_multiplies_for_parameters": 4,
  },
  "pipeline/runtime/test_table_change.py": {
    "test_window_continues_from_1f1b": 0,
  },
  "pipeline/runtime/test_tied_leaves.py": {
    "test_copies_receive_the_sum_of_their_gradients": 2,
    "test_differently_rounded_copies_receive_the_first_ones_update": 0,
  },
  "pipeline/runtime/test_trained.py": {
    "test_resumed_run_has_the_same_bits": 0,
  },
  "pipeline/runtime/test_whole_model.py": {
    "test_apply_if_finite_agrees_over_stages": 0,
    "test_state_of_any_size_is_cut_and_joined": 2,
  },
  "pipeline/schedule/test_tables.py": {
    "test_every_table_can_run_in_all_sizes": 3,
  },
  "prediction/test_collector.py": {
    "test_collector_saves_averaged_fronts_of_every_cut": 2,
    "test_killed_collection_resumes_to_the_same_bytes": 2,
  },
  "prediction/test_cut.py": {
    "test_models_of_jdist_are_cut_in_order_of_execution": 3,
    "test_published_counts_match": 2,
  },
  "prediction/test_exchange.py": {
    "test_mp2_equals_the_published_protocol_on_equal_replicas": 2,
  },
  "prediction/test_predictor.py": {
    "test_all_workers_predict_the_same_on_every_substrate": 2,
    "test_loss_of_completed_network_reaches_every_parameter": 0,
    "test_predicted_convolution_has_its_rank": 2,
    "test_prediction_matches_formulas": 2,
  },
  "prediction/test_predictor_fit.py": {
    "test_mapped_networks_equal_scanned_ones": 0,
    "test_predictor_learns_to_complete_unseen_networks": 0,
  },
  "prediction/test_saved_predictor.py": {
    "test_unusable_parameters_are_not_saved": 3,
  },
  "profiling/test_abstract.py": {
    "test_abstract_state_matches_init_state": 2,
  },
  "reducers/test_all_to_all.py": {
    "test_rows_hold_every_leaf_once": 3,
  },
  "reducers/test_chunked.py": {
    "test_chunk_equals_its_own_reduction": 2,
    "test_nothing_is_lost": 6,
  },
  "reducers/test_compressed.py": {
    "test_compiled_program_has_few_collectives_and_those_bytes": 4,
    "test_nonfinite_values_reach_all_and_do_not_stay": 9,
    "test_num_bits_equals_sent_bytes": 10,
  },
  "reducers/test_compression.py": {
    "test_drain_applies_the_residuals_of_a_feedback": 2,
    "test_feedback_of_exact_means_changes_nothing": 4,
    "test_gradients_may_have_another_dtype_than_the_parameters": 6,
    "test_local_steps_are_those_of_numpy": 4,
    "test_no_progress_is_lost": 4,
    "test_round_ends_under_a_conditional": 3,
  },
  "reducers/test_feedback.py": {
    "test_cast_error_of_mean_is_kept": 4,
    "test_complex_residual_excludes_sent_part": 4,
    "test_exact_compression_equals_plain_averaging": 2,
    "test_labels_say_what_is_equal": 14,
    "test_memories_are_float32_and_outputs_are_like_gradients": 8,
    "test_nan_at_one_worker_is_reported_and_does_not_stay": 4,
    "test_nothing_is_lost": 4,
    "test_sent_whole_momentum_correction_is_momentum": 2,
    "test_substrates_agree": 14,
  },
  "reducers/test_law.py": {
    "test_int4_loses_mass_without_owner_feedback": 4,
    "test_law_holds_on_other_substrates": 9,
    "test_nothing_is_lost": 12,
    "test_nothing_is_lost_in_bfloat16_on_devices": 0,
  },
  "reducers/test_majority_vote.py": {
    "test_vote_has_sign_of_sum_of_own_shares": 2,
  },
  "reducers/test_power_sgd.py": {
    "test_columns_are_orthonormal_and_span_the_same_space": 2,
    "test_factors_may_go_by_leaf_or_in_parts": 0,
    "test_rough_factors_still_find_the_mean_with_feedback": 0,
  },
  "reducers/test_scheduled.py": {
    "test_inactive_phase_sends_nothing": 2,
    "test_phase_is_its_reducer": 2,
  },
  "reducers/test_sharded_feedback.py": {
    "test_drain_includes_owner_residuals": 4,
    "test_every_device_reduces_its_own_shards": 0,
    "test_local_steps_send_shards": 0,
  },
  "server/test_decoupled.py": {
    "test_a_run_with_failures_learns": 0,
  },
  "server/test_gradients.py": {
    "test_one_worker_matches_plain_optax": 6,
    "test_padding_changes_only_rounding": 0,
  },
  "server/test_h_ps_gradients.py": {
    "test_one_worker_foresees_its_server": 2,
    "test_pipeline_matches_updates_by_hand": 5,
  },
  "server/test_live_fragments.py": {
    "test_full_quorum_trains_as_on_the_clock": 2,
    "test_replayed_run_ends_with_the_same_bits": 2,
  },
  "server/test_live_gradients.py": {
    "test_replayed_run_ends_with_the_same_bits": 4,
  },
  "server/test_local_step.py": {
    "test_foresight_keeps_the_largest_stable_rate": 4,
    "test_one_worker_with_a_late_pipeline_matches_synchronous_sgd": 2,
  },
  "server/test_message_codec.py": {
    "test_message_and_residual_sum_to_the_input": 8,
    "test_receiver_sees_nan_where_a_leaf_is_not_finite": 2,
    "test_without_feedback_each_leaf_is_its_decoded_payload": 8,
  },
  "server/test_one_fragment_pair.py": {
    "test_engine_trains_by_the_law": 12,
  },
  "server/test_one_pair.py": {
    "test_refused_worker_keeps_nothing_that_is_not_finite": 2,
  },
  "server/test_protocols.py": {
    "test_each_push_is_applied_once_or_discarded": 8,
  },
  "server/test_ray_engine.py": {
    "test_engine_that_cannot_run_raises_one_line": 8,
  },
  "server/test_server_run.py": {
    "test_resumed_run_ends_with_the_same_bits": 2,
  },
  "server/test_task_order.py": {
    "test_gradients_are_computed_at_the_versions_of_the_clock": 4,
  },
  "test_house.py": {
    "test_in_the_library": 11,
  },
  "test_wrong_calls.py": {
    "test_right_call_is_right": 42,
  },
  "training/loop/test_shapes.py": {
    "test_buffer_that_a_loader_refills_changes_nothing": 4,
    "test_each_shape_compiles_programs_of_its_own": 4,
    "test_known_shapes_are_not_reported_again": 0,
    "test_second_call_compiles_no_step_again": 2,
    "test_too_many_shapes_are_refused_and_the_state_is_kept": 2,
  },
  "training/loop/test_trainer.py": {
    "test_resumed_run_has_the_records_of_an_uninterrupted_one": 0,
  },
  "training/loop/test_watchdog.py": {
    "test_hanging_step_ends_the_process_with_a_message": 2,
  },
  "training/test_checkpoints.py": {
    "test_checkpoint_is_restored_on_other_substrates": 0,
    "test_every_state_is_restored_to_the_bit": 4,
    "test_leaves_split_over_the_inner_axis_are_restored_split": 0,
    "test_only_the_last_checkpoints_are_kept": 2,
    "test_resumed_run_matches_uninterrupted_run": 0,
    "test_run_continues_while_its_state_is_written": 0,
  },
  "training/test_damaged_checkpoints.py": {
    "test_damaged_checkpoint_warns_and_the_previous_one_is_used": 10,
  },
  "training/test_fragments.py": {
    "test_host_ends_rounds_of_many_fragments_where_the_device_does": 3,
  },
  "training/test_gradient.py": {
    "test_label_out_of_range_gives_nan": 3,
    "test_micro_batches_and_workers_are_weighted_by_their_labels": 0,
    "test_padding_changes_no_gradient": 4,
    "test_weighted_mean_equals_the_mean_over_all_samples": 2,
  },
  "training/test_host_rounds.py": {
    "test_host_begins_a_delay_where_the_device_would": 0,
    "test_host_ends_rounds_where_the_device_would": 6,
    "test_no_program_is_compiled_during_a_run": 0,
    "test_partial_mean_is_not_applied": 2,
    "test_run_resumes_in_the_middle_of_a_round": 0,
    "test_statistics_are_averaged_where_the_host_ends_a_round": 0,
  },
  "training/test_independent.py": {
    "test_optimizer_that_never_sends_raises": 4,
    "test_part_of_the_axis_of_workers_that_share_a_device_raises": 2,
  },
  "training/test_killing.py": {
    "test_run_killed_in_a_write_ends_with_the_same_bits": 0,
  },
  "training/test_language_model.py": {
    "test_text_loss_is_the_mean_over_unmasked_tokens": 3,
    "test_transformer_learns_a_text": 0,
  },
  "training/test_laws.py": {
    "test_constants_pass_through_steps_unchanged": 3,
  },
  "training/test_processes.py": {
    "test_every_process_raises_if_all_checkpoints_are_damaged": 0,
    "test_processes_match_workers_in_one_process": 0,
  },
  "training/test_resize.py": {
    "test_gradients_in_flight_are_not_lost": 0,
    "test_residuals_of_gradients_keep_their_mean": 0,
    "test_resizing_loses_no_mass": 2,
    "test_state_on_several_devices_is_resized_on_one": 0,
  },
  "training/test_round_host.py": {
    "test_round_host_chooses_the_programs_of_the_trainer": 0,
  },
  "training/test_step.py": {
    "test_batch_normalization_is_averaged_once_per_round": 0,
    "test_batch_statistics_are_averaged_when_a_round_ends": 2,
    "test_evaluation_uses_the_anchor_and_each_sample_once": 6,
    "test_micro_batches_match_one_batch": 0,
    "test_round_ends_exactly_on_the_anchor": 4,
    "test_update_first_inside_another_transformation_raises": 2,
  },
  "training/test_streaming.py": {
    "test_evaluation_applies_messages_in_flight": 2,
    "test_no_collective_of_a_streamed_step_waits_for_the_batch": 2,
    "test_resumed_host_chooses_the_same_programs": 12,
    "test_stream_without_effect_raises": 4,
    "test_streamed_batch_statistics_match_the_simple_form": 0,
    "test_streamed_run_resumes_in_the_middle_of_a_round": 0,
    "test_the_host_knows_the_round_of_each_step": 0,
  },
  "transforms/test_weight_prediction.py": {
    "test_prediction_is_the_end_of_steps_with_zero_gradients": 2,
  },
  "transforms/intervals/test_intervals.py": {
    "test_loss_changes_the_interval_two_rounds_later": 2,
  },
  "transforms/local/test_chunked_stream.py": {
    "test_first_late_round_changes_no_state": 0,
    "test_no_collective_waits_for_the_step_or_a_conditional": 2,
    "test_stream_encodes_its_parts_in_place_of_leaves": 4,
  },
  "transforms/local/test_delayed.py": {
    "test_a_slow_host_makes_rounds_longer_and_loses_nothing": 4,
    "test_delay_of_whole_round_equals_round_late": 2,
    "test_steps_match_formulas": 12,
    "test_streamed_mean_equals_late_mean_to_the_bit": 2,
    "test_sub_tensors_go_through_a_codec": 0,
  },
  "transforms/local/test_identities.py": {
    "test_interval_1_is_synchronous_where_linear": 12,
    "test_one_worker_is_plain_optax_to_the_bit": 10,
  },
  "transforms/local/test_iterates.py": {
    "test_dual_averages_do_not_undo_rounds": 2,
    "test_late_round_moves_distances_as_parameters": 2,
    "test_lookahead_takes_part_with_both_of_its_parameters": 2,
    "test_schedule_free_is_evaluated_at_the_mean_of_the_targets": 6,
  },
  "transforms/local/test_local_steps.py": {
    "test_a_round_ends_on_the_anchor_to_the_bit": 4,
    "test_msdpu_is_what_its_formulas_say": 2,
    "test_nothing_is_lost": 2,
    "test_rounds_match_formulas": 16,
  },
  "transforms/local/test_matrix.py": {
    "test_a_mean_at_the_end_of_its_round": 9,
    "test_streamed_late_mean_equals_late_mean": 3,
  },
  "transforms/local/test_optax_rounds.py": {
    "test_rounds_of_an_optax_optimizer_are_those_of_plain_jax": 24,
  },
  "transforms/local/test_streaming.py": {
    "test_front_layers_are_sent_first": 2,
    "test_no_progress_is_lost_for_any_host_choice": 0,
    "test_splitting_changes_no_bit": 0,
    "test_streamed_mean_equals_late_mean_to_the_bit": 0,
    "test_streamed_parts_and_step_are_independent": 6,
  },
  "transforms/test_clipping.py": {
    "test_norm_whose_squares_are_out_of_range_is_clipped": 15,
  },
  "transforms/test_conformance.py": {
    "test_anchors_are_equal_to_the_bit": 3,
    "test_continuous_arguments_may_be_injected_in_a_chain": 27,
    "test_equal_workers_are_one_worker": 20,
    "test_fresh_state_may_be_donated": 27,
    "test_no_collective_crosses_the_inner_axis": 12,
    "test_scan_over_steps_is_the_same": 12,
    "test_shared_leaves_are_equal_at_every_step": 52,
    "test_state_keeps_its_form": 12,
    "test_step_is_compiled_once": 2,
    "test_substrates_agree": 20,
    "test_unknown_values_are_not_nan": 28,
    "test_updates_have_the_dtype_of_the_gradients": 4,
  },
  "transforms/test_control.py": {
    "test_host_chooses_the_number_of_stream_steps": 2,
    "test_host_ends_rounds": 8,
    "test_trainer_refuses_stream_steps_without_a_stream": 2,
  },
  "transforms/test_drain.py": {
    "test_anchor_that_is_late_takes_both_means": 2,
    "test_control_variates_and_their_mean_agree_when_drained": 2,
    "test_drain_keeps_accumulated_gradients": 2,
    "test_drain_keeps_states_of_other_leaves": 3,
    "test_drain_loses_nothing": 6,
    "test_drained_round_equals_a_shorter_one": 4,
    "test_drained_workers_are_on_the_anchor_and_continue": 12,
    "test_owners_residuals_move_to_the_feedback": 4,
  },
  "transforms/test_mean_loss.py": {
    "test_use_of_own_gradient_or_function_raises": 3,
    "test_workers_with_different_losses_stay_equal": 2,
  },
  "transforms/test_predicted.py": {
    "test_front_of_mp2_in_few_bits": 0,
    "test_host_control_leaves_rounds_of_the_rest_to_the_device": 4,
    "test_mp2_by_hand": 2,
    "test_replicas_are_equal_to_the_bit": 6,
    "test_residual_in_few_bits_is_equal_on_all_workers": 0,
  },
  "transforms/test_skip_nonfinite.py": {
    "test_nan_of_one_worker_skips_the_step_of_all": 2,
  },
  "transforms/test_state.py": {
    "test_round_ends_under_a_conditional": 2,
  },
  "transforms/test_update_first.py": {
    "test_drain_in_between_changes_nothing": 2,
    "test_gradients_of_another_dtype_are_held_in_the_parameters": 2,
    "test_loss_reaches_the_optimizer_as_the_mean": 2,
    "test_sharded_worker_sends_its_own_parts": 3,
    "test_update_first_is_synchronous_sgd": 12,
  },
  "zoo/test_zoo.py": {
    "test_form_trains_as_in_plain_jax": 57,
  },
}


def leave_out(items):
  """Marks as slow what `EVERY` leaves out of the default and the smoke set."""
  seen = collections.Counter()
  for item in items:
    path, _, name = item.nodeid.partition("[")[0].partition("::")
    every = EVERY.get(path.removeprefix("tests/"), {}).get(name, 1)
    if item.get_closest_marker("slow") is None:
      if not every or seen[path, name] % every:
        item.own_markers[:] = [x for x in item.own_markers if x.name != "smoke"]
        item.add_marker(pytest.mark.slow)
      seen[path, name] += 1


def thinned(*axes, rounds=1):
  """Returns the product of axes, most of it marked slow.

  In the default set each value of each axis occurs: the first of all of them,
  the second of all of them, and so on, shorter axes again from their start and
  each shifted by its own round; `rounds` repeats that.  What is left
  out runs by `./scripts/test.sh -m slow`.
  """
  longest = max(map(len, axes))
  kept = {
    tuple(
      (i + k * (i // len(axis))) % len(axis) for k, axis in enumerate(axes, 1)
    )
    for i in range(rounds * longest)
  }
  found = []
  for places in itertools.product(*(range(len(axis)) for axis in axes)):
    values = [axis[i] for axis, i in zip(axes, places, strict=True)]
    marks = () if places in kept else pytest.mark.slow
    found.append(pytest.param(*values, marks=marks))
  return found


def some(values, kept, smoke=()):
  """Returns values as parameters, those that are not in `kept` marked slow.

  A value of several arguments is a tuple of them.  Those of `smoke` are kept,
  and in that set, too.
  """

  def marks(value):
    if value in smoke:
      return pytest.mark.smoke
    return () if value in kept else pytest.mark.slow

  missing = [x for x in (*kept, *smoke) if x not in values]
  assert not missing, missing
  return [
    pytest.param(
      *(x if isinstance(x, tuple) else (x,)),
      marks=marks(x),
    )
    for x in values
  ]
