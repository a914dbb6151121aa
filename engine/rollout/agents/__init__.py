"""Multi-turn rollouts: agents behind the gateway, and programs that run in the replica."""
