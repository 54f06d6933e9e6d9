"""The steps of one run: judged, started, ended and committed by one loop, until nothing is left."""
