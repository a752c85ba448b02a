"""The ledger: what each engine's prefix cache holds, kept from the KV events that engines publish."""
