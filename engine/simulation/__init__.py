"""A small world under the production driver and scheduler: virtual clock, seeded latencies, injected faults, true
books."""
