"""Advice on methods and links, predicted from measurements on this machine."""

from jdist.advice._advise import advise as advise
from jdist.advice._advise import measure_link as measure_link
from jdist.advice._prediction import Advice as Advice
from jdist.advice._prediction import MethodCosts as MethodCosts
