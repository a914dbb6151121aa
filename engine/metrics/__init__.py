"""What a run reports to the outside: Prometheus metrics, `metrics.jsonl`, and the status for the live view.

Everything here reads the scheduler and never changes it. `collector.RunMetrics` counts; the other modules show.
"""
