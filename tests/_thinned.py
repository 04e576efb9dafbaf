"""Parameters of tests: a few in the default set, all in the slow one."""

import collections
import itertools

import pytest

# Tests whose cases compile a program each, and most of whose laws the oracle
# holds for the product of all options, too: the default set runs every so many
# cases, in their order, and the slow set all others.
EVERY = {
  "cli/test_methods.py": {
    "test_method_trains_towards_its_target": 3,
    "test_sparse_codec_with_feedback_minimizes_a_square": 3,
  },
  "codecs/test_conformance.py": {
    "test_vmap_equals_a_loop": 2,
    "test_errors_stay_within_the_bound": 2,
  },
  "experiments/test_own_models.py": {
    "test_network_learns_digits": 2,
    "test_whole_loop_of_one_worker_is_plain_jax": 2,
  },
  "methods/test_compressed_gradients.py": {
    "test_method_matches_numpy": 2,
  },
  "methods/test_wrappers.py": {
    "test_nested_method_takes_its_own_steps": 2,
    "test_only_trained_leaves_are_sent": 2,
  },
  "models/test_build.py": {
    "test_bfloat16_parameters_and_images_compute_in_bfloat16": 3,
    "test_models_overfit_a_few_digits": 2,
  },
  "optimizers/test_optimizers.py": {
    "test_outcome_is_that_of_the_page": 3,
  },
  "pipeline/cells/test_synchronous_cells.py": {
    "test_gradients_match_unsplit_model": 3,
  },
  "pipeline/runtime/test_split_backward.py": {
    "test_both_parts_match_the_whole_backward_pass": 2,
  },
  "reducers/test_chunked.py": {
    "test_nothing_is_lost": 2,
  },
  "reducers/test_compressed.py": {
    "test_nonfinite_values_reach_all_and_do_not_stay": 2,
  },
  "reducers/test_compression.py": {
    "test_gradients_may_have_another_dtype_than_the_parameters": 2,
  },
  "reducers/test_law.py": {
    "test_law_holds_on_other_substrates": 2,
    "test_nothing_is_lost": 3,
    "test_nothing_is_lost_in_bfloat16_on_devices": 4,
  },
  "reducers/test_sharded_feedback.py": {
    "test_every_device_reduces_its_own_shards": 2,
  },
  "server/test_message_codec.py": {
    "test_message_and_residual_sum_to_the_input": 3,
    "test_without_feedback_each_leaf_is_its_decoded_payload": 3,
  },
  "training/test_checkpoints.py": {
    "test_every_state_is_restored_to_the_bit": 2,
    "test_resumed_run_matches_uninterrupted_run": 2,
  },
  "training/test_gradient.py": {
    "test_padding_changes_no_gradient": 2,
  },
  "training/test_host_rounds.py": {
    "test_host_ends_rounds_where_the_device_would": 2,
  },
  "training/test_streaming.py": {
    "test_resumed_host_chooses_the_same_programs": 2,
  },
  "transforms/local/test_chunked_stream.py": {
    "test_stream_encodes_its_parts_in_place_of_leaves": 2,
  },
  "transforms/local/test_matrix.py": {
    "test_a_mean_at_the_end_of_its_round": 2,
    "test_streamed_late_mean_equals_late_mean": 3,
  },
  "transforms/local/test_optax_rounds.py": {
    "test_rounds_of_an_optax_optimizer_are_those_of_plain_jax": 4,
  },
  "transforms/test_conformance.py": {
    "test_continuous_arguments_may_be_injected_in_a_chain": 2,
    "test_no_collective_crosses_the_inner_axis": 2,
    "test_scan_over_steps_is_the_same": 2,
    "test_shared_leaves_are_equal_at_every_step": 3,
    "test_anchors_are_equal_to_the_bit": 3,
  },
  "transforms/test_drain.py": {
    "test_drained_workers_are_on_the_anchor_and_continue": 2,
  },
  "transforms/test_update_first.py": {
    "test_update_first_is_synchronous_sgd": 2,
  },
  "zoo/test_zoo.py": {
    "test_form_trains_as_in_plain_jax": 3,
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
