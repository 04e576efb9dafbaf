"""Commands of pipelines: `pipeline draw`, `check` and `simulate`."""
