"""Tools around the core: launch, plan, doctor, verify, report, convert and write."""
