"""Command-line tools: the demo and the benchmarks. They use the public API only."""
