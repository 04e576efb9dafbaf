"""Prediction of parameters: some layers are sent, the others predicted.

And all of them from their past: weight nowcasters.

Ordinary runs are collected, a predictor learns from them what is behind the
cut, and in other runs only the front travels:

    import jdist, optax
    from jdist import data, models, prediction, training, transforms

    train, test = (data.load("digits", split) for split in ("train", "test"))
    build = dict(name="mlp", input_shape=(8, 8, 1), num_classes=10)
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
      prediction.predictor(cut), model, collect(seed=0),
      train.images, train.labels, held_out=collect(seed=1),
      test_images=test.images, test_labels=test.labels,
      fit=prediction.PredictorFit(2, 10, images_per_batch=50, image_batches=20),
      normalize=train.normalize, directory="fit",
    )
    predictor = prediction.predictor(cut)
    prediction.save_predictor("predictor", predictor, fitted.params)

    predictor, params = prediction.load_predictor("predictor", cut)
    optimizer = transforms.mp2(
      optax.adam(1e-3), cut, predictor.apply, params, axis=workers.axis
    )
    state, records = run(optimizer, seed=2)
"""

from jdist.prediction._assembling import assemble as assemble
from jdist.prediction._assembling import (
  evaluate_predictor as evaluate_predictor,
)
from jdist.prediction._choosing import choose_cut as choose_cut
from jdist.prediction._choosing import depths as depths
from jdist.prediction._choosing import score_cuts as score_cuts
from jdist.prediction._choosing import ScoredCut as ScoredCut
from jdist.prediction._collecting import choose_steps as choose_steps
from jdist.prediction._collecting import Collector as Collector
from jdist.prediction._counting import Traffic as Traffic
from jdist.prediction._counting import traffic as traffic
from jdist.prediction._cutting import Cut as Cut
from jdist.prediction._cutting import cut as cut
from jdist.prediction._fitting import Epoch as Epoch
from jdist.prediction._fitting import fit_predictor as fit_predictor
from jdist.prediction._fitting import FittedPredictor as FittedPredictor
from jdist.prediction._fitting import PredictorFit as PredictorFit
from jdist.prediction._jumping import nowcast_weights as nowcast_weights
from jdist.prediction._jumping import NowcastState as NowcastState
from jdist.prediction._layering import Layer as Layer
from jdist.prediction._layering import Leaf as Leaf
from jdist.prediction._nowcast_fitting import fit_nowcaster as fit_nowcaster
from jdist.prediction._nowcast_fitting import fit_nowcasters as fit_nowcasters
from jdist.prediction._nowcast_fitting import Fitted as Fitted
from jdist.prediction._nowcast_fitting import load_nowcasters as load_nowcasters
from jdist.prediction._nowcast_fitting import NowcastFit as NowcastFit
from jdist.prediction._nowcast_fitting import save_nowcasters as save_nowcasters
from jdist.prediction._nowcasting import init_nowcaster as init_nowcaster
from jdist.prediction._nowcasting import init_nowcasters as init_nowcasters
from jdist.prediction._nowcasting import kind_of as kind_of
from jdist.prediction._nowcasting import nowcast as nowcast
from jdist.prediction._nowcasting import nowcast_entries as nowcast_entries
from jdist.prediction._predictor import Predictor as Predictor
from jdist.prediction._predictor import predictor as predictor
from jdist.prediction._publishing import PUBLISHED as PUBLISHED
from jdist.prediction._publishing import published_cut as published_cut
from jdist.prediction._publishing import published_model as published_model
from jdist.prediction._sampling import ParameterSet as ParameterSet
from jdist.prediction._saving import load_predictor as load_predictor
from jdist.prediction._saving import save_predictor as save_predictor
from jdist.prediction._serving import Server as Server
from jdist.prediction._serving import ServerState as ServerState
from jdist.prediction._tracking import load_tracks as load_tracks
from jdist.prediction._tracking import save_tracks as save_tracks
from jdist.prediction._tracking import Tracker as Tracker
from jdist.prediction._tracking import Tracks as Tracks
