"""Parameters of tests: a few in the default set, all in the slow one."""

import collections
import itertools

import pytest

# Tests whose cases compile a program each, seconds in all: the default set runs
# every so many of the cases, in their order, and the slow set all others. The
# oracle holds most of their laws for the product of all options, too.
EVERY = {
  "cli/test_errors.py": {
    "test_bad_input_is_refused_in_one_line": 2,
  },
  "cli/test_methods.py": {
    "test_method_trains_towards_its_target": 4,
    "test_sparse_codec_with_feedback_minimizes_a_square": 4,
  },
  "codecs/test_bits.py": {
    "test_every_width_is_recovered_from_the_fewest_bytes": 2,
    "test_high_bits_and_other_integer_dtypes_do_no_harm": 2,
  },
  "codecs/test_conformance.py": {
    "test_16_bit_arrays_are_recovered": 2,
    "test_shard_map_equals_a_loop_over_workers": 2,
    "test_vmap_equals_a_loop": 3,
  },
  "codecs/test_dct.py": {
    "test_all_coefficients_are_the_identity": 2,
    "test_tiles_have_the_largest_divisors_as_sides": 2,
  },
  "codecs/test_largest.py": {
    "test_any_length_is_searched": 2,
    "test_exactly_the_largest_are_found": 2,
    "test_sampled_threshold_keeps_its_bounds": 2,
  },
  "codecs/test_quantize.py": {
    "test_codes_agree_with_a_float64_reference": 2,
  },
  "codecs/test_random_k.py": {
    "test_mean_is_the_array": 2,
  },
  "codecs/test_top_k.py": {
    "test_nan_and_infinity_stay_visible": 2,
    "test_one_per_cent_is_at_least_95_times_smaller": 2,
    "test_only_largest_entries_are_decoded": 2,
    "test_sampled_threshold_sends_nearly_k_of_the_largest": 2,
    "test_values_are_sent_by_their_codec": 2,
    "test_vmap_equals_a_loop_on_the_device": 2,
  },
  "collectives/test_operations.py": {
    "test_operations_match_numpy": 2,
  },
  "collectives/test_workers.py": {
    "test_loop_or_branch_with_constants_differentiates": 2,
    "test_typed_keys_are_placed_like_other_leaves": 2,
  },
  "data/test_augmentation.py": {
    "test_augmentation_is_equal_on_all_substrates": 2,
  },
  "experiments/test_own_models.py": {
    "test_network_learns_digits": 2,
    "test_whole_loop_of_one_worker_is_plain_jax": 2,
  },
  "experiments/test_pipeline_accuracy.py": {
    "test_report_runs_over_the_rows": 2,
  },
  "experiments/test_resumed_commands.py": {
    "test_each_row_is_found_by_a_command_of_its_page": 2,
  },
  "methods/test_compressed_gradients.py": {
    "test_method_matches_numpy": 3,
  },
  "methods/test_conformance.py": {
    "test_compression_of_every_bit_changes_nothing": 2,
    "test_host_ends_rounds_where_the_device_would": 2,
    "test_streamed_method_equals_whole_to_the_bit": 2,
  },
  "methods/test_resumed_runs.py": {
    "test_state_alone_resumes_a_run": 2,
  },
  "methods/test_wrappers.py": {
    "test_accumulation_in_inner_chain_is_accepted": 2,
    "test_integers_and_bools_pass_through": 2,
    "test_nested_method_takes_its_own_steps": 3,
    "test_only_trained_leaves_are_sent": 3,
    "test_plateau_receives_the_mean_loss": 2,
    "test_transformations_behind_an_anchor_are_refused": 2,
    "test_wrappers_inside_hold_what_they_freeze": 2,
  },
  "models/test_build.py": {
    "test_bfloat16_parameters_and_images_compute_in_bfloat16": 4,
    "test_form_follows_the_size_of_the_images": 2,
    "test_half_precision_is_close_to_float32": 2,
    "test_leaves_are_in_the_order_of_the_layers": 2,
    "test_logits_have_the_stated_shape": 2,
    "test_models_overfit_a_few_digits": 2,
    "test_resnet_without_normalization_starts_as_its_first_layers": 2,
    "test_same_seed_gives_the_same_bits_and_another_seed_others": 2,
  },
  "models/test_counting.py": {
    "test_abstract_model_has_the_shapes_of_a_real_one": 2,
  },
  "models/test_layered_network.py": {
    "test_layers_make_the_program_of_the_model": 2,
  },
  "models/test_patches.py": {
    "test_values_and_gradients_equal_those_of_xla": 2,
  },
  "optimizers/test_optimizers.py": {
    "test_outcome_is_that_of_the_page": 4,
  },
  "pipeline/cells/test_late_cells.py": {
    "test_processes_match_delayed_gradients": 2,
  },
  "pipeline/cells/test_synchronous_cells.py": {
    "test_gradients_match_unsplit_model": 4,
  },
  "pipeline/planning/test_simulator.py": {
    "test_bubbles_match_the_formulas": 2,
  },
  "pipeline/processes/test_stage_process.py": {
    "test_overlapping_iterations_match_the_unsplit_model": 2,
    "test_synchronous_table_matches_unsplit_model": 2,
    "test_tied_parameters_receive_the_sum_of_their_gradients": 2,
  },
  "pipeline/runtime/test_split_backward.py": {
    "test_both_parts_match_the_whole_backward_pass": 3,
    "test_both_parts_match_to_twelve_digits_in_float64": 2,
    "test_only_the_weight_part_multiplies_for_parameters": 2,
  },
  "reducers/test_chunked.py": {
    "test_nothing_is_lost": 3,
  },
  "reducers/test_compressed.py": {
    "test_compiled_program_has_few_collectives_and_those_bytes": 2,
    "test_nonfinite_values_reach_all_and_do_not_stay": 3,
    "test_num_bits_equals_sent_bytes": 2,
  },
  "reducers/test_compression.py": {
    "test_feedback_of_exact_means_changes_nothing": 2,
    "test_gradients_may_have_another_dtype_than_the_parameters": 3,
    "test_local_steps_are_those_of_numpy": 2,
    "test_no_progress_is_lost": 2,
  },
  "reducers/test_feedback.py": {
    "test_labels_say_what_is_equal": 2,
    "test_memories_are_float32_and_outputs_are_like_gradients": 2,
  },
  "reducers/test_law.py": {
    "test_int4_loses_mass_without_owner_feedback": 2,
    "test_law_holds_on_other_substrates": 3,
    "test_nothing_is_lost": 4,
    "test_nothing_is_lost_in_bfloat16_on_devices": 4,
  },
  "reducers/test_sharded_feedback.py": {
    "test_drain_includes_owner_residuals": 2,
    "test_every_device_reduces_its_own_shards": 2,
  },
  "server/test_gradients.py": {
    "test_one_worker_matches_plain_optax": 2,
  },
  "server/test_live_gradients.py": {
    "test_replayed_run_ends_with_the_same_bits": 2,
  },
  "server/test_local_step.py": {
    "test_foresight_keeps_the_largest_stable_rate": 2,
  },
  "server/test_message_codec.py": {
    "test_message_and_residual_sum_to_the_input": 4,
    "test_without_feedback_each_leaf_is_its_decoded_payload": 4,
  },
  "server/test_one_fragment_pair.py": {
    "test_engine_trains_by_the_law": 2,
  },
  "server/test_one_pair.py": {
    "test_engine_trains_by_the_law": 2,
  },
  "server/test_protocols.py": {
    "test_each_push_is_applied_once_or_discarded": 2,
  },
  "server/test_ray_engine.py": {
    "test_engine_that_cannot_run_raises_one_line": 2,
  },
  "server/test_task_order.py": {
    "test_gradients_are_computed_at_the_versions_of_the_clock": 2,
  },
  "training/loop/test_shapes.py": {
    "test_buffer_that_a_loader_refills_changes_nothing": 2,
    "test_each_shape_compiles_programs_of_its_own": 2,
  },
  "training/loop/test_trainer.py": {
    "test_sent_bytes_of_phases_match_hand_computation": 2,
  },
  "training/test_checkpoints.py": {
    "test_every_state_is_restored_to_the_bit": 2,
    "test_resumed_run_matches_uninterrupted_run": 2,
  },
  "training/test_damaged_checkpoints.py": {
    "test_damaged_checkpoint_warns_and_the_previous_one_is_used": 2,
  },
  "training/test_fragments.py": {
    "test_host_ends_rounds_of_many_fragments_where_the_device_does": 2,
  },
  "training/test_gradient.py": {
    "test_padding_changes_no_gradient": 2,
  },
  "training/test_host_rounds.py": {
    "test_host_ends_rounds_where_the_device_would": 3,
  },
  "training/test_independent.py": {
    "test_optimizer_that_never_sends_raises": 2,
  },
  "training/test_step.py": {
    "test_evaluation_uses_the_anchor_and_each_sample_once": 2,
    "test_round_ends_exactly_on_the_anchor": 2,
  },
  "training/test_streaming.py": {
    "test_resumed_host_chooses_the_same_programs": 3,
    "test_stream_without_effect_raises": 2,
  },
  "transforms/local/test_chunked_stream.py": {
    "test_stream_encodes_its_parts_in_place_of_leaves": 2,
  },
  "transforms/local/test_delayed.py": {
    "test_a_slow_host_makes_rounds_longer_and_loses_nothing": 2,
    "test_delay_begins_with_first_longer_round": 2,
    "test_steps_match_formulas": 2,
  },
  "transforms/local/test_identities.py": {
    "test_interval_1_is_synchronous_where_linear": 2,
    "test_one_worker_is_plain_optax_to_the_bit": 2,
  },
  "transforms/local/test_iterates.py": {
    "test_schedule_free_is_evaluated_at_the_mean_of_the_targets": 2,
  },
  "transforms/local/test_local_steps.py": {
    "test_rounds_match_formulas": 2,
  },
  "transforms/local/test_matrix.py": {
    "test_a_mean_at_the_end_of_its_round": 3,
    "test_streamed_late_mean_equals_late_mean": 4,
  },
  "transforms/local/test_optax_rounds.py": {
    "test_rounds_of_an_optax_optimizer_are_those_of_plain_jax": 4,
  },
  "transforms/test_conformance.py": {
    "test_continuous_arguments_may_be_injected_in_a_chain": 3,
    "test_equal_workers_are_one_worker": 2,
    "test_no_collective_crosses_the_inner_axis": 3,
    "test_scan_over_steps_is_the_same": 3,
    "test_state_keeps_its_form": 2,
  },
  "transforms/test_drain.py": {
    "test_drain_loses_nothing": 2,
    "test_drained_round_equals_a_shorter_one": 2,
    "test_drained_workers_are_on_the_anchor_and_continue": 3,
    "test_owners_residuals_move_to_the_feedback": 2,
  },
  "transforms/test_predicted.py": {
    "test_host_control_leaves_rounds_of_the_rest_to_the_device": 2,
    "test_replicas_are_equal_to_the_bit": 2,
  },
  "transforms/test_state.py": {
    "test_round_ends_under_a_conditional": 2,
  },
  "transforms/test_update_first.py": {
    "test_update_first_is_synchronous_sgd": 3,
  },
  "zoo/test_zoo.py": {
    "test_form_trains_as_in_plain_jax": 4,
  },
}


def leave_out(items):
  """Marks as slow what `EVERY` leaves out of the default set."""
  seen = collections.Counter()
  for item in items:
    path, _, name = item.nodeid.partition("[")[0].partition("::")
    every = EVERY.get(path.removeprefix("tests/"), {}).get(name, 1)
    marks = {mark.name for mark in item.iter_markers()}
    if not marks & {"slow", "smoke"}:
      if seen[path, name] % every:
        item.add_marker(pytest.mark.slow)
      seen[path, name] += 1


def thinned(*axes, rounds=1):
  """Returns the product of axes, most of it marked slow.

  In the default set each value of each axis occurs: the first of all of them,
  the second of all of them, and so on, shorter axes again from their start and
  each shifted by its own round; with more `rounds` that goes on.  What is left
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
