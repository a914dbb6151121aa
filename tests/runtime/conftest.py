"""Whole runs use the generators, trainers and plans of other folders' tests."""

import sys
from pathlib import Path

OTHERS = ("actors", "gateway", "storage", "workers")
sys.path += [str(Path(__file__).resolve().parent.parent / folder) for folder in OTHERS]
