"""One module per family of architectures, found by `architectures`; each offers its parser as `FAMILY`."""
