"""What every port that a run listens on has in common: which hosts it answers for, and its bounds."""
