"""From a client's request to sequences, and from their tokens to its text and usage. Knows no HTTP and no gRPC."""
