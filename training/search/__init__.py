"""Search: better hyperparameters with many runs, with Optuna's samplers, pruners and storage."""
