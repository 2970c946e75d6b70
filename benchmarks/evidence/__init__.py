"""Experiments behind the claims of docs/results.md; see ``python -m benchmarks.evidence --help``."""
