"""Requests to a running run: drain, stop, scale, change settings, and show what it waits for."""
