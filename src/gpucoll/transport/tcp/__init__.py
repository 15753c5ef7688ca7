"""TCP between the hosts of a job: who may talk on a connection, and what came as it was sent."""
