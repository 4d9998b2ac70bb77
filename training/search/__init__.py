"""Search: better hyper-parameters with many runs, with Optuna's samplers, pruners and storage."""
