"""The machines as tables, the records they drive, the ledger that counts them and the laws they keep."""
