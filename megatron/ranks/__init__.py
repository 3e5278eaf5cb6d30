"""The processes (ranks) of a run: device, rendezvous, consistency checks between ranks, errors and signals."""
