"""The pages and plots that are made of the JSON files of benchmark runs: `python -m benchmarks.report`."""
