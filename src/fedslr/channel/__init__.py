"""Everything between a client and the server: encoding, measuring and transporting messages."""
