"""Numbers that modules state once: limits, units, seconds, formats of files.

A user notices most of them, and a page or a comment gives their reasons: a
change is deliberate, here and there.
"""

import ast
import pathlib

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[1] / "jdist"
_ROOMS = sorted(
  x.name for x in _ROOT.iterdir() if x.is_dir() and (x / "__init__.py").exists()
)
_NUMBERS = {
  "advice/_advise.py": {
    "_MEASURED_BYTES": 2**30, "_LONGEST_MEAN": 2**26, "_TRIED_S": 1.5,
    "_TURNS": 5,
    "_STREAM_STEPS": (1, 2, 4, 8, 16),
  },
  "advice/_prediction.py": {"_LEFT_OUT": 0.07},
  "channel/_connection.py": {
    "_NONCE": 32, "_MAX_NOTE": 2**24, "_PATIENCE_S": 10.0, "_PENDING": 64,
    "_PROBES": {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3},
  },
  "cluster/_virtual_network.py": {"_ROUNDING": 1e-9, "_CLOCK_ROUNDING": 1e-15},
  "codecs/_bits.py": {
    "MAX_WIDTH": 32,
    "_TRIT_QUOTIENTS": (
      (1, 0), (171, 9), (57, 9), (19, 9), (203, 14), (0, 0)
    ),
  },
  "codecs/_blocks.py": {"_ROW": 256},
  "codecs/_gpu.py": {"_BLOCK, _PER_WARP": (4096, 1024)},
  "codecs/_largest.py": {
    "NAN_KEY": 0x7F800001, "_SHORT": 16_384, "_SAMPLED_HITS": 32,
    "_FIRST_STEP": 2**19,
  },
  "codecs/_sparse.py": {"_MAX_SIZE": 2**30},
  "collectives/_axis.py": {"_BUCKET_BYTES": 25 * 2**20},
  "collectives/_exchange.py": {"ALONE_BYTES": 2**20, "_SUMMED_BYTES": 32_768},
  "collectives/_leaf_order.py": {
    "_MULTIPLIERS, _MIXERS": (
      (0x9E3779B1, 0x85EBCA77), (0x7FEB352D, 0x846CA68B)
    ),
  },
  "collectives/_substrate.py": {"_MOST_CPU_DEVICES": 64},
  "collectives/processes/_lifeline.py": {
    "EXIT_STATUS": 75, "_GRACE_S": 8.0, "_VERDICT_S": 5.0,
  },
  "collectives/processes/_process_group.py": {"_HEARTBEAT_S": 86_400},
  "collectives/processes/_stop_agreement.py": {"_LIMIT_S": 60.0},
  "data/_prepare.py": {"_CHUNK": 1000},
  "data/_sample_stream.py": {
    "_PARTITION_KEY": 1, "_LARGEST_ALPHA": 1e100, "_ORDER_KEY": 2,
  },
  "models/_layered_network.py": {"_LARGEST_SMALL_IMAGE": 64},
  "models/_patches.py": {"MOST_CHANNELS": 8},
  "prediction/_collector.py": {"_STEPS_KEY": 3},
  "prediction/_cut.py": {"_NUM_NAMES": 4},
  "prediction/_evaluate.py": {"_PART": 2**24},
  "prediction/_parameter_set.py": {"_FORMAT": 1},
  "prediction/_permutation.py": {"_IMAGES_KEY, _ORDER_KEY": (6, 7)},
  "prediction/_predictor.py": {
    "_GRID": 8, "_NUM_CHANNELS": 8, "_NUM_SQUEEZED": 2, "_NUM_BLOCKS": 3,
  },
  "prediction/_predictor_fit.py": {"_SAMPLES_KEY": 5},
  "profiling/_hlo.py": {
    "_BITS": {"pred": 8, "bf16": 16, "c64": 64, "c128": 128, "s1": 1, "u1": 1},
  },
  "profiling/_timeline.py": {
    "_PARTS": {"dynamic-update-slice": 1, "scatter": 2},
  },
  "storage/array_files.py": {"_FORMAT": 3},
  "storage/hashes.py": {"_PART": 2**24},
  "storage/lease.py": {"_BEAT_S": 3.0, "_PATIENCE_S": 15.0, "_SETTLE_S": 1.0},
  "transforms/intervals/_policy.py": {"LONGEST": 2**30},
  "transforms/local/_delayed.py": {"_USUAL_STEPS": 16},
  "transforms/local/_iterates.py": {"_NONE": -1},
  "transforms/local/_sync_state.py": {"NEVER": 2**30},
  "reducers/_all_to_all.py": {"_SMALL": 262_144},
  "reducers/_hierarchical.py": {"_ALL_BYTES": 2**62},
  "reducers/_majority_vote.py": {"_BYTE": 8},
  "reducers/_power_sgd.py": {"_SHIFTS": (1e-5, 1e-6)},
  "reducers/_scheduled.py": {"DGC_RATIOS": (0.25, 0.0625, 0.015625, 0.004)},
  "training/_checkpoint_directory.py": {
    "NOTHING, ALL_DAMAGED": (-1, -2), "_FORMAT": 2,
  },
  "training/_gradient.py": {"IGNORED": -100},
  "training/loop/_watchdog.py": {"EXIT_STATUS": 75},
  "server/_driver.py": {"_MAX_REFUSED": 3},
  "server/decoupled/_decoupled_diloco.py": {"KEPT_MERGES": 8},
  "server/gradients/_merge.py": {"_MOST": 8},
  "server/gradients/_packed.py": {"_MAX_BYTES": 65_536},
  "server/h_ps/_bit_plans.py": {"_BITS": (32, 16, 8, 4)},
  "server/run/_run_checkpoints.py": {"_KEPT": 2},
  "server/run/_server_run.py": {"_FORMAT": 1},
  "server/runtime/_envelope.py": {
    "_LENGTH_BYTES": 4, "_MAX_HEADER_BYTES": 1_048_576,
  },
  "server/runtime/_live_server.py": {"_SAVE_S": 15.0},
  "server/runtime/_live_session.py": {"_POLL_S": 0.1, "_MAX_TRIES": 3},
  "server/runtime/_server_core.py": {"_SAVE_S": 5.0},
  "server/runtime/_worker_loop.py": {"_AGAIN_S": 0.25},
  "server/runtime/ray_actors/_ray_actors.py": {
    "_LAST": 4, "_ASK_S, _SILENCE_S": (5.0, 20.0),
    "_PIECE_S, _REST": (0.25, 0.05), "_MIN_PIECE_BYTES": 2**18,
  },
  "server/runtime/ray_actors/_ray_engine.py": {
    "_START_S": 900.0, "_HOME_S": 5.0, "_SPARE_S": 8.0,
    "_MIN_STORE_BYTES": 78 * 2**20,
  },
  "pipeline/planning/_bottleneck.py": {"_ROUNDING": 1e-9},
  "pipeline/planning/_candidate.py": {
    "_FULL": 12, "_MOST_PASSES": 4000, "_ORDERS": 4800, "_TURNS": 3, "LIVE": 32,
    "EQUAL, ROUNDING": (0.005, 1e-9), "CHUNKS": {"interleaved": 2, "zb_v": 2},
  },
  "pipeline/planning/_placement.py": {
    "_MOST_LAYOUTS": 1000, "_MOST_EXHAUSTIVE": 8, "_MOST_TIES": 500,
    "_ROUNDING": 1e-9,
  },
  "pipeline/planning/_plan_search.py": {
    "_MOST_MICROBATCHES": 8, "_SEND_FACTORS": (1.5, 2.0, 3.0, 4.0),
    "_REFINED, _SLOWER": (6, 0.75), "_MOST_ACTIONS": 60_000, "_FEW": 8,
    "_NUMBERS": 8,
  },
  "pipeline/processes/_peers.py": {"_MAX_BODY": 2**40},
  "pipeline/processes/_stage_files.py": {"_MAX_STEPS": 16},
  "pipeline/schedule/_table.py": {"_MOST_PASSES": 100_000},
  "cli/_compare.py": {"_TUNING_SEED": 10_000},
  "cli/_help.py": {"_COLUMN": 30},
  "cli/_interrupts.py": {"_AGAIN_S": 0.05},
  "cli/_methods.py": {"STREAM_STEPS": (1, 2, 4, 8, 16), "_HIGHEST": 16},
  "cli/_run_end.py": {
    "DIVERGED": 3, "AGAIN": 75, "TERMINATED": 143, "UNREAD": 141,
  },
  "cli/_workload.py": {"_EVALUATED": 131_072, "_LARGE_PIXELS": 16},
  "cli/launch/_launch.py": {"_PORT": 29400},
  "cli/launch/_local_run.py": {
    "_FINAL": (0, 2, 3, 141), "_MAX_BACKOFF_S": 60.0, "_PATIENCE_S": 20.0,
    "_PATIENCE_KILLED_S": 5.0, "_SAVING_S": 120.0, "_POLL_S": 0.05,
  },
  "cli/pipelines/_pipeline.py": {"_ITERATIONS": 12},
  "cli/pipelines/_process_run.py": {"_CONNECT_S, _TIMEOUT_S": (900.0, 3600.0)},
  "cli/programs/_advise.py": {"_SERVER_STEPS": 40},
  "cli/programs/_bytes.py": {"_QUICKLY": {"xla_backend_optimization_level": 0}},
  "cli/programs/_overlap_inputs.py": {
    "_VOCABULARY": 50_257,
    "_GPT2": {"num_layers": 12, "width": 768, "num_heads": 12, "tied": True},
  },
  "cli/report/_page.py": {"_MAX_LANES, _MAX_SPANS": (40, 1500)},
  "cli/report/_status.py": {"_FILE_S, _PAGE_S": (2.0, 20.0)},
  "cli/servers/_server_parts.py": {"_EIGHTHS": (1, 2, 3, 5, 8)},
  "cli/servers/_simulate.py": {"_DRAWN_TASKS": 20},
}  # fmt: skip


def _is_number(value):
  """Returns whether a value is a number, or holds numbers alone."""
  if isinstance(value, dict):
    value = tuple(value.values())
  if isinstance(value, tuple):
    return bool(value) and all(map(_is_number, value))
  return isinstance(value, int | float)


def _stated(path):
  """Returns the numbers that a module gives names in capital letters."""
  found = {}
  for node in ast.parse(path.read_text()).body:
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
      target = node.targets[0] if isinstance(node, ast.Assign) else node.target
      name = ast.unparse(target).strip("()")
      code = compile(ast.Expression(node.value), str(path), "eval")
      # Numbers without names in them: `2**30`, and not `math.inf`.
      if name.isupper() and not code.co_names:
        value = eval(code)
        found |= {name: value} if _is_number(value) else {}
  return found


@pytest.mark.parametrize("room", _ROOMS)
def test_every_number_of_a_room_is_the_stated_one(room):
  found = {
    str(path.relative_to(_ROOT)): numbers
    for path in sorted((_ROOT / room).rglob("*.py"))
    if (numbers := _stated(path))
  }
  assert found == {
    name: numbers
    for name, numbers in _NUMBERS.items()
    if name.startswith(f"{room}/")
  }
