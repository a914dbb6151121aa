"""Grafana boards of a run, written as code: `python -m dashboards.generate` writes their JSON.

Beside them: alert rules with their unit tests, and what brings Prometheus and Grafana up around them.
"""
