"""The fixtures of these tests; `backends.py` holds them and what they are made of."""

from backends import end_of_engines, kind, make_backend, open_gates

__all__ = ["kind", "make_backend", "end_of_engines", "open_gates"]
