"""`legroom run`: the self-healing launch and the supervisor that stays with the server."""
