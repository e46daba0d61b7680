"""Generates pages and plots from the JSON files of benchmark runs: `python -m benchmarks.report`."""
