"""What speaks HTTP: routes, limits, errors, logs and metrics."""
