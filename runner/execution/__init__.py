"""What happens: a run is asked for, submitted, claimed and worked on until its end; `steps` has the loop."""
