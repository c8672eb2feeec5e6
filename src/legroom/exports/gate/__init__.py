"""What sets the gate up in a cluster."""
