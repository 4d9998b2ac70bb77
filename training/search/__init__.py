"""Search: better hyper-parameters by many runs, with Optuna's samplers, pruners and storage."""
