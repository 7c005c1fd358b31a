"""Fleets side by side: on the same cores, under the same load, in turns, and what may be concluded from that."""
