"""The catalog, read: entries as typed objects, counted rates, search, and the record other knowledge bases take."""
