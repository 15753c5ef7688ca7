"""Ops of TensorFlow that are written in Python: `operations.register`, without a compiler."""
