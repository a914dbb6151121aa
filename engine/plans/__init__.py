"""Builds a run's plan from its configuration: checks its files and functions, and makes its processes' parts.

The command line, `engine.api` and the launch of a run on Ray call it, and the processes of a run call what the plan
refers to. Must never import Ray, because a run in one process needs none; torch comes late, with the models.
"""
