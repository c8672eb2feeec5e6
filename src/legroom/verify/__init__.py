"""`legroom verify`: proving that a server holds what was planned under load."""
