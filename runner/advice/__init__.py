"""What is known to go wrong with a training, and what it will cost in memory, time and money.  Advises; decides and runs nothing."""
