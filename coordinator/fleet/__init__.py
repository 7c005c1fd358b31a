"""The workers: who belongs, how loaded they are, and the connections to them. Protobuf ends here."""
