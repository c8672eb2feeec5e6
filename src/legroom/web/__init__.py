"""`legroom ui`: one page over one set of endpoints, served or run in the visitor's browser."""
