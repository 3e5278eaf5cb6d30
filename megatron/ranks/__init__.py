"""The processes of a run: device, rendezvous, agreement between ranks, shared errors and signals."""
