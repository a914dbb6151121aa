"""The version of the distribution, for records, clusters and `engine --version`; pyproject.toml has the same."""

__version__ = "0.1.0"
