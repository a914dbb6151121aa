"""What a run tells the outside: Prometheus metrics, `metrics.jsonl` and the status a live view draws.

Everything here reads the scheduler and never changes it. `collector.RunMetrics` counts, the other modules show.
"""
