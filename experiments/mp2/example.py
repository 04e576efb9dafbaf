"""MP² in few lines: runs are collected, a predictor is trained, and used.

    python experiments/mp2/example.py

Writes its data set and its predictor into the present folder.
"""

import optax

import jdist
from jdist import data, methods, models, prediction, training

train, test = (data.load("digits", split) for split in ("train", "test"))
build = {"name": "mlp", "input_shape": (8, 8, 1), "num_classes": 10}
model, workers = models.build(**build), jdist.workers(4)
cut = prediction.cut(model, 1)  # Behind the first layer.
batches = data.Batches(train, 4, 16, seed=0)
epoch_steps = int(batches.steps_per_epoch)
loss = training.classification_loss(model.apply, normalize=train.normalize)


def run(optimizer, seed, **options):
  params = models.build(**build, seed=seed).params
  state = training.init_state(workers, optimizer, params)
  step = training.make_step(loss, optimizer, axis=workers.axis)
  trainer = training.Trainer(workers, step)
  return trainer.fit(state, batches.iterate, 2 * epoch_steps, **options)


def collect(seed):
  ssgd = jdist.ssgd(optax.adam(1e-3), axis=workers.axis)
  steps = prediction.choose_steps(2, epoch_steps, per_epoch=10)
  folder = f"run-{seed}"
  collector = prediction.Collector(folder, workers, [cut], steps)
  run(ssgd, seed, evaluate=collector, evaluate_every=1)
  return prediction.ParameterSet(folder).fronts(cut)


fitted = prediction.fit_predictor(
  prediction.predictor(cut),
  model,
  collect(seed=0),
  train.images,
  train.labels,
  held_out=collect(seed=1),
  test_images=test.images,
  test_labels=test.labels,
  fit=prediction.PredictorFit(2, 10, images_per_batch=50, image_batches=20),
  normalize=train.normalize,
  directory="fit",
)
predictor = prediction.predictor(cut)
prediction.save_predictor("predictor", predictor, fitted.params)

predictor, params = prediction.load_predictor("predictor", cut)
optimizer = methods.mp2(
  optax.adam(1e-3), cut, predictor.apply, params, axis=workers.axis
)
state, records = run(optimizer, seed=2)
