"""Parts of the serving benchmarks: servers, load, machine limit, page."""
