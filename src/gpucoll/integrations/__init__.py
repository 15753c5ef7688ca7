"""Integrations of gpucoll with other frameworks. They use only the public API."""
