"""A simulated world for the production driver and scheduler: virtual clock, seeded latencies, injected faults."""
