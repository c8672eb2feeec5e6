"""The door: bounds each request and admits by what the KV pool can hold."""
