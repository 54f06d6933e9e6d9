"""Real servers that the tests start, on loopback ports they choose themselves.  Each ends with the test, and with the test process if that is killed."""
