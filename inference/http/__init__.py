"""The HTTP side: routes, limits, errors, logs and metrics."""
