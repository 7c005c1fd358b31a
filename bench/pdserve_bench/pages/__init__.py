"""A benchmark's results for people: plots, one self-contained HTML page, PNGs. Measures nothing, and judges nothing."""
