"""Should this load be served with prefill and decode apart? Measured, explained and reported."""
