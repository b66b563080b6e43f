"""kvgeom: one KV-cache page geometry for SGLang, as a patch series and the tool that applies it."""

__version__ = "0.1.0"
