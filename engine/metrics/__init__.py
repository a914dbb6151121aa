"""The reports of a run: Prometheus metrics, `metrics.jsonl`, and the status for the live view.

All modules read the scheduler and never change it. `collector.RunMetrics` counts; the other modules publish.
"""
