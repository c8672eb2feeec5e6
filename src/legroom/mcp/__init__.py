"""legroom for agents: its questions as tools of the Model Context Protocol."""
