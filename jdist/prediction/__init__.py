"""Prediction of parameters: some layers are sent, the others predicted."""

from jdist.prediction._cutting import Cut as Cut
from jdist.prediction._cutting import cut as cut
from jdist.prediction._cutting import Layer as Layer
from jdist.prediction._cutting import Leaf as Leaf
from jdist.prediction._cutting import PUBLISHED as PUBLISHED
from jdist.prediction._cutting import published_cut as published_cut
from jdist.prediction._cutting import published_model as published_model
from jdist.prediction._predictor import Predictor as Predictor
from jdist.prediction._predictor import predictor as predictor
