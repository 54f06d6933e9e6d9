"""Delivering what runs have to tell: the outbox to its receivers, over HTTP, by a program, by chat.  Knows the store, never a plan or a host."""
