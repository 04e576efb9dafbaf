"""`jdist report`: a folder's runs as one page, and the state of a run."""
