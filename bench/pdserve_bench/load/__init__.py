"""Load on one server: what is sent when, and what came back. Knows no fleet, and judges nothing."""
