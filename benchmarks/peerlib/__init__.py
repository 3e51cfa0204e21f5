"""The parts of ``benchmarks/peers.py``: environments, models, workers, schedule, report."""
