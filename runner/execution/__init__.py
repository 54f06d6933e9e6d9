"""What happens: survey the world, execute a plan on hosts, stage and commit files.  The only floor that loads a driver."""
