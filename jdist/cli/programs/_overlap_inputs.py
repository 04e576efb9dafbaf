"""Inputs of `jdist overlap`: machine, model, batch and methods."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdist import (
  cluster,
  collectives,
  methods,
  models,
  profiling,
  training,
  transforms,
)
from jdist.cli import _commands, _methods, _options

# Methods with several forms; the first one is meant without a colon.
FORMS: dict[str, tuple[str, ...]] = {
  "ssgd": ("after", "first", "scattered", "hybrid"),
  "msdpu": ("streamed", "simple"),
}
# Models for gray images of 28x28 and for images of 32x32; others are made for
# 224x224.
_GRAY = ("mlp", "lenet")
_SMALL = ("cnn", "resnet8", "resnet20")
# GPT-2's smallest model.
_VOCABULARY = 50_257
_GPT2 = {"num_layers": 12, "width": 768, "num_heads": 12, "tied": True}

# Collectives in flight at once, for the compiler's latency-hiding scheduler.
_IN_FLIGHT = "xla_gpu_experimental_parallel_collective_overlap_limit"
_COMBINE = "xla_gpu_all_reduce_combine_threshold_bytes"


@dataclasses.dataclass(frozen=True)
class OneStep:
  """A model and one GPU's batch as shapes, with its loss.

  The `unit` is the plural noun for samples.
  """

  model: models.Model
  loss: Callable[..., Any]
  batch: dict[str, jax.ShapeDtypeStruct]
  unit: str


def check(
  options: _commands.Overlap,
) -> tuple[profiling.GpuTarget, cluster.Device, cluster.Link]:
  """Checks the options and returns the stated GPUs and their link."""
  _options.check_names("--methods", options.methods, "methods")
  names = [split(method)[0] for method in options.methods]
  forms = {split(method)[1] for method in options.methods}
  text = options.model == "transformer"
  for used, name, where in (
    (text, "length", "with images"),
    (not text, "image_size", "with a text"),
    (forms & {*FORMS["ssgd"][1:]}, "message_mb", "without such a form of ssgd"),
    ("hybrid" in forms, "pending", "without ssgd:hybrid"),
  ):
    if not used:
      _options.check_left_out(options, (name,), where)
  _options.check_name("--model", options.model, models.MODELS)
  try:
    topology = profiling.gpu_target(options.topology)
  except ValueError as error:
    raise ValueError(f"`--topology`: {error}") from None
  # Two forms of a method are one method here.
  names = list(dict.fromkeys(names))
  _methods.check("--methods", options, names)
  gpu = profiling.GPUS[topology.kind]
  device = gpu.device(options.dtype, options.launch_us / 1e6)
  if options.tflop_per_s is not None:
    device = dataclasses.replace(device, flops_per_s=options.tflop_per_s * 1e12)
  if options.memory_gb_per_s is not None:
    device = dataclasses.replace(
      device, memory_bytes_per_s=options.memory_gb_per_s * 1e9
    )
  link = gpu.link(topology.nodes, options.latency_us / 1e6)
  if options.bandwidth_gbit_per_s is not None:
    link = dataclasses.replace(
      link, bandwidth_bits_per_s=options.bandwidth_gbit_per_s * 1e9
    )
  return topology, device, link


def split(method: str) -> tuple[str, str | None]:
  """Splits `msdpu:simple` into a method's name and its form."""
  name, _, form = method.partition(":")
  _options.check_name("--methods", name, methods.registry)
  if name == _methods.TRAINED:
    raise ValueError(
      f"`--methods` must be one without trained networks, got {name}. `jdist "
      "bytes` counts what it sends."
    )
  forms = FORMS.get(name, ())
  # A misspelled form would otherwise silently be the first one.
  if form and form not in forms:
    raise ValueError(
      f"`--methods` {name} has "
      f"{'the forms ' + ', '.join(forms) if forms else 'one form only'}, got "
      f"{method!r}."
    )
  return name, form or next(iter(forms), None)


def make_task(options: _commands.Overlap) -> OneStep:
  """Returns the model, its losses and its batch."""
  norm: dict[str, Any] = {} if options.norm is None else {"norm": options.norm}
  size = options.batch_size
  if options.model == "transformer":
    length = (options.length,)
    model = models.build(
      "transformer", input_shape=length, num_classes=_VOCABULARY,
      abstract=True, **_GPT2, **norm,
    )  # fmt: skip
    tokens = jax.ShapeDtypeStruct((size, *length), jnp.int32)
    batch, unit = {"tokens": tokens, "targets": tokens}, "sequences"
  else:
    model, shape = image_model(options.model, options.image_size, **norm)
    batch, unit = (
      {
        "image": jax.ShapeDtypeStruct((size, *shape), jnp.float32),
        "label": jax.ShapeDtypeStruct((size,), jnp.int32),
      },
      "images",
    )
  dtype = jnp.dtype(options.dtype)
  loss = training.classification_loss(model.apply, compute_dtype=dtype)
  return OneStep(model, loss, batch, unit)


def image_model(
  name: str, size: int | None = None, **options: Any
) -> tuple[models.Model, tuple[int, int, int]]:
  """Returns a model as shapes, and the shape of the images that suit it."""
  if size is None:
    size = 28 if name in _GRAY else 32 if name in _SMALL else 224
  shape = (size, size, 1 if name in _GRAY else 3)
  model = models.build(
    name, input_shape=shape, num_classes=10 if size <= 32 else 1000,
    abstract=True, **options,
  )  # fmt: skip
  return model, shape


def make_optimizer(
  method: str, options: _commands.Overlap, axis: collectives.Axis
) -> optax.GradientTransformation:
  """Returns a method's chain, in one of its forms."""
  name, form = split(method)
  common = _methods.common(
    options, stream=form == "streamed", interval_policy="fixed"
  )
  # The run must be longer than any round, of which the last is cut short.
  run = _methods.run_of(common, 1_000_000, 0, optax.constant_schedule(0.1))
  if form not in ("first", "scattered", "hybrid"):
    more: dict[str, Any] = {}
    if (late := methods.registry[name].late) is not None:
      stream = transforms.Stream() if form == "streamed" else None
      more["overlap"] = dataclasses.replace(
        late, steps=None, after_step=0, stream=stream
      )
    return _methods.build_method(name, common, run, axis, **more)
  sized: dict[str, Any] = {}
  if options.message_mb is not None:
    sized["max_bytes"] = max(8, int(options.message_mb * 1e6))
  # Without an axis the method is the worker's own optimizer, and `update_first`
  # adds the communication.
  return transforms.update_first(
    _methods.build_method(name, common, run, None), axis=axis,
    in_flight=options.in_flight or 1, scatter=form == "scattered",
    pending=options.pending if form == "hybrid" else 1.0, **sized,
  )  # fmt: skip


def compiler_flags(options: _commands.Overlap) -> dict[str, int]:
  """Returns flags for the messages at once, and the bytes that are combined."""
  flags = {}
  if options.in_flight is not None:
    flags[_IN_FLIGHT] = options.in_flight
  if options.combine_mb is not None:
    flags[_COMBINE] = int(options.combine_mb * 1e6)
  return flags


def memory_bytes(program: Any) -> int:
  """Returns the memory that a compiled program needs on a device."""
  memory = program.memory_analysis()
  return int(
    memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    - memory.alias_size_in_bytes
    + memory.temp_size_in_bytes
  )
