"""Measurements of collapse itself, one subcommand a file; `scripts/bench NAME` runs `benchmarks.NAME.main`."""
