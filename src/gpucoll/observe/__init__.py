"""Looking into running jobs from outside: nothing here stops a rank or takes its interpreter."""
