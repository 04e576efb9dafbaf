"""MP²: the front of a network is sent, a predictor gives the rest."""
