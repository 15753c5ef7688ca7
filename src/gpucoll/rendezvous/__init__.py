"""The rendezvous: how the ranks of a job find each other and agree on what all must know."""
