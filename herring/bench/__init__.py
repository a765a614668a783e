"""`herring bench`: microbenchmarks in the manner of nccl-tests, with peers measured in the same run.

Private: the command line (herring/_cli.py) is the interface; docs/benchmarks.md says how things are measured.
"""
