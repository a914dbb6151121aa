"""The configuration of a run: schema, loading, checking. The only place that knows YAML and pydantic."""

from engine.config.check import check_backend, check_config
from engine.config.extensions import load_extensions, load_extensions_of
from engine.config.loading import load_config, parse_config
from engine.config.schema import Config

__all__ = [
    "Config",
    "check_backend",
    "check_config",
    "load_config",
    "load_extensions",
    "load_extensions_of",
    "parse_config",
]
