"""Lines of those features that the library had before it was rebuilt."""

import ast
import pathlib
from collections.abc import Iterator

from house import _sources

# Rooms that files have moved between since the tree b390ebc, by their row.
_MOVED = {
  "codecs": ("codecs",),
  "collectives, reducers, profiling": (
    "collectives", "reducers", "profiling", "cluster",
  ),
  "transforms, methods": ("transforms", "methods"),
  "training, prediction, storage": ("training", "prediction", "storage"),
  "data, models": ("data", "models"),
  "cli": ("cli",),
  "checks, states": (".",),
}  # fmt: skip
# Features that the tree b390ebc had not: folders, files, path:definition,
# path:class.method.
_LATER = {
  "delays that begin late": """transforms/intervals/_growth.py
    transforms/delays/_stability.py""",
  "pipelines": """pipeline/ cli/pipelines/ collectives/_model_parts.py
    cli/programs/_stages_overlap.py
    cli/_groups.py:StageOptions cli/_options.py:Pipeline
    cli/_options.py:check_left_out cli/__init__.py:_pipeline_trained
    cli/_train.py:_Prepared
    training/loop/_training_run.py:TrainingRun.count_from
    models/_layered_network.py
    models/_functional.py:Layer models/_layers.py:head_parts
    models/_alexnet.py:_run_conv models/_lenet.py:_run_conv
    models/_resnet.py:_run_first models/_resnet.py:_run_head
    models/_transformer.py:_run_first models/_transformer.py:_run_last
    models/_vgg.py:_run_conv profiling/_timeline.py:Loop
    models/_alexnet.py:AlexNet.parts models/_lenet.py:LeNet.parts
    models/_resnet.py:ResNet.parts models/_vgg.py:VGG.parts
    models/_transformer.py:Transformer.parts
    transforms/delays/_delayed_gradients.py:_chosen
    collectives/_workers.py:Workers.inner_axes
    profiling/_timeline.py:read_loop transforms/delays/_leaf_delays.py
    transforms/delays/_weight_prediction.py transforms/delays/_look_ahead.py
    transforms/delays/_delay_rate.py
    transforms/delays/_delay_compensation.py""",
  "servers": """server/ cluster/_cluster.py cluster/_cluster_file.py
    cluster/_failures.py
    cluster/_gantt.py cluster/_node.py cluster/_profile.py
    cluster/_topology.py cluster/_trace.py cluster/_virtual_network.py
    cli/servers/ cli/_options.py:Simulate
    data/_sample_stream.py training/_gradient.py
    training/_losses.py:masked_mean training/_step.py:_weighted
    training/_evaluation.py:Evaluator.measure
    data/_dataset.py:Dataset.select data/_dataset.py:Dataset.batch
    profiling/_forecast.py:Forecast.trace
    profiling/_model_profile.py prediction/mp2/_exchange_learner.py""",
  "one comparison, from experiments": """training/comparison/
    training/loop/_progress.py:Progress.extend
    training/loop/_progress.py:Progress.aside""",
  "registry, compression of every method": """methods/_method.py
    methods/_method_registry.py cli/_composition.py
    cli/_groups.py:MeanOptions cli/_groups.py:OuterOptions""",
  "means between CPU hosts in one buffer, programs of late means": """
    collectives/_operations.py:_sends_leaf_by_leaf
    transforms/_state.py:arrives_after
    transforms/_predicted.py:PredictRestState.due_after
    transforms/local/_round_state.py:SyncState.due_after""",
  "fragments that a host streams": """
    transforms/local/_fragments.py:_controls_of
    transforms/local/_fragments.py:FragmentsState.streams
    transforms/local/_fragments.py:FragmentsState.ahead""",
  "texts": """data/_text.py data/_text_dataset.py cli/_presets.py
    training/_losses.py:language_model_loss
    training/_losses.py:label_loss training/_plots.py:_quality
    training/_losses.py:labels_of cli/_compare.py:_is_text cli/_compare.py:_bits
    data/_records.py:decode_text cli/_datasets.py:named
    cli/_datasets.py:words cli/_datasets.py:quality cli/_datasets.py:speed
    cli/_datasets.py:evaluation_batch""",
  "divergence, workers apart, warm-ups": """cli/_divergence.py
    cli/_compare.py:_tell_diverged transforms/_skip_nonfinite.py
    cli/_run_end.py:DivergedError cli/_run_end.py:check
    training/_train_state.py:is_finite
    training/loop/_training_run.py:is_diverged
    training/loop/_compiled_step.py:CompiledStep.is_finite
    training/loop/_compiled_step.py:CompiledStep.check_communicates
    training/_step.py:_check_communicates collectives/_traffic.py:communicates
    collectives/_traffic.py:_has_collective
    transforms/intervals/_scheduled_interval.py:_check_falls""",
  "launched processes, and how they end": """cli/launch/
    collectives/processes/_lifeline.py
    collectives/processes/_stop_agreement.py collectives/processes/_streams.py
    collectives/processes/_process_group.py:leave_processes
    collectives/processes/_process_group.py:processes_stop
    collectives/processes/_process_group.py:watches_processes
    collectives/processes/_process_group.py:await_verdict
    training/loop/_preemption.py training/_checkpoints.py:OtherWorkers
    cli/__init__.py:_parse_launch cli/_interrupts.py:raised_by_sigterm
    cli/__init__.py:_processes cli/_interrupts.py:SigtermError
    cli/_run_end.py:TerminatedError cli/_train.py:_resumed
    training/_checkpoints.py:Checkpoints._restore_other
    cli/_experiment.py:Prepared.other_workers""",
  "files of models, boards of metrics": """training/_model_file.py
    training/_metrics_writer.py cli/_train.py:_save_model""",
  "loops of one's own": """training/loop/_round_host.py
    training/loop/_compiled_step.py:_takes_control
    training/_step.py:step_by training/_step.py:synchronize_statistics""",
  "wrong calls, wrappers of Optax's": """checks.py:check_extras
    training/_checkpoints.py:Checkpoints._written
    checks.py:install cli/_experiment.py:_check_extras
    collectives/_workers.py:Workers._in_team
    collectives/_workers.py:_check_context
    collectives/_workers.py:_is_explicit
    collectives/_workers.py:check_workers
    collectives/_operations.py:_arrays
    collectives/_manual_axes.py:team_of collectives/_manual_axes.py:bound_names
    collectives/_manual_axes.py:same_form
    collectives/_manual_axes.py:check_alike
    collectives/_manual_axes.py:for_workers
    collectives/_manual_axes.py:_left_out
    collectives/_manual_axes.py:_is_array_tree
    collectives/_manual_axes.py:_retraced
    collectives/_manual_axes.py:_evaluate
    collectives/_manual_axes.py:_apply
    transforms/local/_anchor.py:_check_last
    transforms/local/_anchor.py:accumulates
    transforms/local/_anchor.py:_kind
    transforms/local/_anchor.py:_not_last
    transforms/local/_anchor.py:is_trained
    transforms/local/_anchor.py:over
    transforms/local/_anchor.py:only_floats
    transforms/local/_anchor.py:check_anchor""",
}


def same_features(sources: _sources.Sources) -> dict[str, int]:
  """Counts the lines of each row of rooms without later features."""
  later = {x for places in _LATER.values() for x in places.split()}
  rows = dict.fromkeys(_MOVED, 0)
  for path, source in sources.items():
    folders = {f"{x}/" for x in map(str, pathlib.PurePosixPath(path).parents)}
    if later & {path, *folders}:
      continue
    spans = [
      (node.end_lineno or 0) - node.lineno + 1
      for name, node in _definitions_in(source.tree)
      if f"{path}:{name}" in later
    ]
    room = path.split("/")[0] if "/" in path else "."
    (row,) = (name for name, rooms in _MOVED.items() if room in rooms)
    rows[row] += _sources.num_lines(source) - sum(spans)
  return rows


def _definitions_in(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
  """Yields a file's functions, classes and methods by their names."""
  for node in tree.body:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      yield node.name, node
    if isinstance(node, ast.ClassDef):
      for inner in node.body:
        if isinstance(inner, ast.FunctionDef):
          yield f"{node.name}.{inner.name}", inner
