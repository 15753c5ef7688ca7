"""Connections that carry messages between hosts, in compiled code."""
