"""Prediction of parameters: some layers are sent, the others are predicted.

A `Collector` stores the parameters of ordinary runs, a predictor learns from
them the layers behind the cut, and other runs send only the layers in front of
it: `experiments/mp2/example.py`.
"""

from jdist.prediction._collector import choose_steps as choose_steps
from jdist.prediction._collector import Collector as Collector
from jdist.prediction._cut import Cut as Cut
from jdist.prediction._cut import cut as cut
from jdist.prediction._cut import PUBLISHED as PUBLISHED
from jdist.prediction._cut import published_cut as published_cut
from jdist.prediction._cut import published_model as published_model
from jdist.prediction._evaluate import evaluate_predictor as evaluate_predictor
from jdist.prediction._parameter_set import ParameterSet as ParameterSet
from jdist.prediction._predictor import Predictor as Predictor
from jdist.prediction._predictor import predictor as predictor
from jdist.prediction._predictor_fit import fit_predictor as fit_predictor
from jdist.prediction._predictor_fit import PredictorFit as PredictorFit
from jdist.prediction._saved_predictor import load_predictor as load_predictor
from jdist.prediction._saved_predictor import save_predictor as save_predictor
