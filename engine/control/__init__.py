"""Requests to a running run: drain, stop, scale, set, and what it waits for."""
