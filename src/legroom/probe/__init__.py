"""`legroom probe`: measures this machine's GPU in a minute and stores the result for later plans."""
