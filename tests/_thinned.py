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
  "cli/test_interrupts.py": {
    "test_interrupt_during_garbage_collection_is_not_lost": 0,
    "test_other_unraisable_errors_are_reported_as_usual": 0,
  },
  "cli/test_methods.py": {
    "test_method_trains_towards_its_target": 24,
    "test_sparse_codec_with_feedback_minimizes_a_square": 12,
  },
  "cli/test_pipeline_run.py": {
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
  },
  "cli/test_wrong_commands.py": {
    "test_wrong_value_ends_with_one_message": 10,
  },
  "codecs/test_conformance.py": {
    "test_shard_map_equals_a_loop_over_workers": 8,
  },
  "codecs/test_dct.py": {
    "test_tiles_have_the_largest_divisors_as_sides": 10,
  },
  "codecs/test_largest.py": {
    "test_exactly_the_largest_are_found": 52,
    "test_sampled_threshold_keeps_its_bounds": 26,
  },
  "codecs/test_quantize.py": {
    "test_codes_agree_with_a_float64_reference": 6,
  },
  "codecs/test_random_k.py": {
    "test_mean_is_the_array": 8,
  },
  "codecs/test_top_k.py": {
    "test_nan_and_infinity_stay_visible": 8,
    "test_only_largest_entries_are_decoded": 4,
    "test_payloads_are_added_without_dense_arrays": 2,
    "test_sampled_threshold_sends_nearly_k_of_the_largest": 6,
    "test_values_are_sent_by_their_codec": 4,
    "test_vmap_equals_a_loop_on_the_device": 0,
  },
  "collectives/test_lifeline.py": {
    "test_mismatched_processes_are_refused": 2,
  },
  "collectives/test_operations.py": {
    "test_operations_match_numpy": 10,
  },
  "collectives/test_processes.py": {
    "test_four_processes_match_numpy": 0,
    "test_worker_may_span_processes": 0,
  },
  "collectives/test_workers.py": {
    "test_loop_or_branch_with_constants_differentiates": 26,
  },
  "data/test_augmentation.py": {
    "test_augmentation_is_equal_on_all_substrates": 6,
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
  "methods/test_conformance.py": {
    "test_compression_of_every_bit_changes_nothing": 4,
    "test_host_ends_rounds_where_the_device_would": 4,
    "test_streamed_method_equals_whole_to_the_bit": 4,
  },
  "methods/test_diloco.py": {
    "test_muloco_survives_two_bits": 0,
    "test_residuals_are_each_workers_own_and_the_anchor_is_not": 2,
    "test_sparse_loco_converges_with_sparse_progress": 0,
  },
  "methods/test_resumed_runs.py": {
    "test_state_alone_resumes_a_run": 6,
  },
  "methods/test_wrappers.py": {
    "test_accumulation_in_inner_chain_is_accepted": 6,
    "test_integers_and_bools_pass_through": 6,
    "test_nested_method_takes_its_own_steps": 6,
    "test_plateau_receives_the_mean_loss": 10,
    "test_transformations_behind_an_anchor_are_refused": 6,
    "test_wrappers_inside_hold_what_they_freeze": 18,
  },
  "models/test_build.py": {
    "test_half_precision_is_close_to_float32": 6,
    "test_models_overfit_a_few_digits": 4,
    "test_resnet_without_normalization_starts_as_its_first_layers": 4,
  },
  "models/test_patches.py": {
    "test_halving_is_max_pooling": 6,
    "test_values_and_gradients_equal_those_of_xla": 12,
  },
  "models/test_transformer.py": {
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
  "pipeline/planning/test_model_cuts.py": {
    "test_stages_compute_the_model_and_its_gradients": 2,
  },
  "pipeline/planning/test_placement.py": {
    "test_placement_of_200_layers_on_64_machines_takes_seconds": 0,
  },
  "pipeline/planning/test_plan_search.py": {
    "test_asynchronous_plan_reaches_the_bottleneck_with_the_least_delay": 0,
  },
  "pipeline/processes/test_stage_process.py": {
    "test_asynchronous_table_reads_the_versions_that_it_names": 2,
    "test_dropout_is_replayed_in_the_backward_pass": 0,
    "test_inputs_draw_from_their_key": 0,
    "test_overlapping_iterations_match_the_unsplit_model": 4,
    "test_synchronous_table_matches_unsplit_model": 4,
    "test_tied_parameters_receive_the_sum_of_their_gradients": 3,
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
    "test_both_parts_match_the_whole_backward_pass": 9,
    "test_both_parts_match_to_twelve_digits_in_float64": 6,
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
  },
  "prediction/test_collector.py": {
    "test_collector_saves_averaged_fronts_of_every_cut": 2,
    "test_killed_collection_resumes_to_the_same_bytes": 2,
  },
  "prediction/test_exchange.py": {
    "test_mp2_equals_the_published_protocol_on_equal_replicas": 2,
  },
  "prediction/test_predictor.py": {
    "test_loss_of_completed_network_reaches_every_parameter": 0,
  },
  "prediction/test_predictor_fit.py": {
    "test_mapped_networks_equal_scanned_ones": 0,
    "test_predictor_learns_to_complete_unseen_networks": 0,
  },
  "prediction/test_saved_predictor.py": {
    "test_unusable_parameters_are_not_saved": 3,
  },
  "reducers/test_chunked.py": {
    "test_chunk_equals_its_own_reduction": 2,
    "test_nothing_is_lost": 6,
  },
  "reducers/test_compressed.py": {
    "test_compiled_program_has_few_collectives_and_those_bytes": 4,
    "test_nonfinite_values_reach_all_and_do_not_stay": 9,
  },
  "reducers/test_compression.py": {
    "test_drain_applies_the_residuals_of_a_feedback": 2,
    "test_feedback_of_exact_means_changes_nothing": 4,
    "test_gradients_may_have_another_dtype_than_the_parameters": 6,
    "test_local_steps_are_those_of_numpy": 4,
  },
  "reducers/test_feedback.py": {
    "test_labels_say_what_is_equal": 14,
    "test_memories_are_float32_and_outputs_are_like_gradients": 8,
    "test_nan_at_one_worker_is_reported_and_does_not_stay": 4,
  },
  "reducers/test_law.py": {
    "test_law_holds_on_other_substrates": 9,
    "test_nothing_is_lost": 12,
    "test_nothing_is_lost_in_bfloat16_on_devices": 0,
  },
  "reducers/test_power_sgd.py": {
    "test_factors_may_go_by_leaf_or_in_parts": 0,
    "test_rough_factors_still_find_the_mean_with_feedback": 0,
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
  "server/test_live_fragments.py": {
    "test_replayed_run_ends_with_the_same_bits": 2,
  },
  "server/test_live_gradients.py": {
    "test_replayed_run_ends_with_the_same_bits": 4,
  },
  "server/test_message_codec.py": {
    "test_message_and_residual_sum_to_the_input": 8,
    "test_receiver_sees_nan_where_a_leaf_is_not_finite": 2,
    "test_without_feedback_each_leaf_is_its_decoded_payload": 8,
  },
  "server/test_one_fragment_pair.py": {
    "test_engine_trains_by_the_law": 12,
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
  "training/loop/test_shapes.py": {
    "test_each_shape_compiles_programs_of_its_own": 4,
    "test_known_shapes_are_not_reported_again": 0,
  },
  "training/loop/test_trainer.py": {
    "test_resumed_run_has_the_records_of_an_uninterrupted_one": 0,
  },
  "training/test_checkpoints.py": {
    "test_checkpoint_is_restored_on_other_substrates": 0,
    "test_every_state_is_restored_to_the_bit": 4,
    "test_leaves_split_over_the_inner_axis_are_restored_split": 0,
    "test_resumed_run_matches_uninterrupted_run": 0,
    "test_run_continues_while_its_state_is_written": 0,
  },
  "training/test_fragments.py": {
    "test_host_ends_rounds_of_many_fragments_where_the_device_does": 3,
  },
  "training/test_gradient.py": {
    "test_micro_batches_and_workers_are_weighted_by_their_labels": 0,
    "test_padding_changes_no_gradient": 4,
  },
  "training/test_host_rounds.py": {
    "test_host_begins_a_delay_where_the_device_would": 0,
    "test_host_ends_rounds_where_the_device_would": 6,
    "test_no_program_is_compiled_during_a_run": 0,
    "test_run_resumes_in_the_middle_of_a_round": 0,
    "test_statistics_are_averaged_where_the_host_ends_a_round": 0,
  },
  "training/test_killing.py": {
    "test_run_killed_in_a_write_ends_with_the_same_bits": 0,
  },
  "training/test_language_model.py": {
    "test_transformer_learns_a_text": 0,
  },
  "training/test_processes.py": {
    "test_every_process_raises_if_all_checkpoints_are_damaged": 0,
    "test_processes_match_workers_in_one_process": 0,
  },
  "training/test_resize.py": {
    "test_gradients_in_flight_are_not_lost": 0,
    "test_residuals_of_gradients_keep_their_mean": 0,
    "test_state_on_several_devices_is_resized_on_one": 0,
  },
  "training/test_round_host.py": {
    "test_round_host_chooses_the_programs_of_the_trainer": 0,
  },
  "training/test_step.py": {
    "test_batch_normalization_is_averaged_once_per_round": 0,
    "test_evaluation_uses_the_anchor_and_each_sample_once": 6,
    "test_micro_batches_match_one_batch": 0,
    "test_round_ends_exactly_on_the_anchor": 4,
  },
  "training/test_streaming.py": {
    "test_evaluation_applies_messages_in_flight": 2,
    "test_resumed_host_chooses_the_same_programs": 12,
    "test_streamed_batch_statistics_match_the_simple_form": 0,
    "test_streamed_run_resumes_in_the_middle_of_a_round": 0,
    "test_the_host_knows_the_round_of_each_step": 0,
  },
  "transforms/test_weight_prediction.py": {
    "test_prediction_is_the_end_of_steps_with_zero_gradients": 2,
  },
  "transforms/local/test_chunked_stream.py": {
    "test_first_late_round_changes_no_state": 0,
    "test_no_collective_waits_for_the_step_or_a_conditional": 2,
    "test_stream_encodes_its_parts_in_place_of_leaves": 4,
  },
  "transforms/local/test_delayed.py": {
    "test_steps_match_formulas": 6,
    "test_streamed_mean_equals_late_mean_to_the_bit": 2,
    "test_sub_tensors_go_through_a_codec": 0,
  },
  "transforms/local/test_identities.py": {
    "test_interval_1_is_synchronous_where_linear": 12,
    "test_one_worker_is_plain_optax_to_the_bit": 10,
  },
  "transforms/local/test_iterates.py": {
    "test_late_round_moves_distances_as_parameters": 2,
    "test_schedule_free_is_evaluated_at_the_mean_of_the_targets": 6,
  },
  "transforms/local/test_local_steps.py": {
    "test_a_round_ends_on_the_anchor_to_the_bit": 4,
  },
  "transforms/local/test_matrix.py": {
    "test_a_mean_at_the_end_of_its_round": 9,
    "test_streamed_late_mean_equals_late_mean": 3,
  },
  "transforms/local/test_optax_rounds.py": {
    "test_rounds_of_an_optax_optimizer_are_those_of_plain_jax": 24,
  },
  "transforms/local/test_streaming.py": {
    "test_no_progress_is_lost_for_any_host_choice": 0,
    "test_splitting_changes_no_bit": 0,
    "test_streamed_mean_equals_late_mean_to_the_bit": 0,
  },
  "transforms/test_clipping.py": {
    "test_norm_whose_squares_are_out_of_range_is_clipped": 15,
  },
  "transforms/test_conformance.py": {
    "test_continuous_arguments_may_be_injected_in_a_chain": 27,
    "test_equal_workers_are_one_worker": 20,
    "test_no_collective_crosses_the_inner_axis": 12,
    "test_scan_over_steps_is_the_same": 12,
    "test_shared_leaves_are_equal_at_every_step": 52,
    "test_substrates_agree": 20,
  },
  "transforms/test_drain.py": {
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
