"""Tools around the core: launch, plan, doctor, verify, report, simulate, convert and write."""
