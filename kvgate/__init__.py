"""The `kvgate` command: the one package that may import all others."""

__version__ = "0.1.0"
