"""Shared by all ports that a run listens on: accepted hosts, and limits on connections."""
