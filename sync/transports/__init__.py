"""One file per transport; the contract is the docstring of `sync.transport`."""
