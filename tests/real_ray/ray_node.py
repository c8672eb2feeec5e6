"""What a node of the tests' cluster has."""

NODE = {"num_cpus": 1, "object_store_memory": 80_000_000}
