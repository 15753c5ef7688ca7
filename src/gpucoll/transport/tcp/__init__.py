"""TCP between the hosts of a job: authentication, and data that arrives as it was sent."""
