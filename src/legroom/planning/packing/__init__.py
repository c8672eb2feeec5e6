"""Several servers on one machine: which card each gets, how large its KV pool is, and that all start in any order."""
