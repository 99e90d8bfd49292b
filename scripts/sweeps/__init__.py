"""Many runs: grids, searches, their jobs and the leaderboard."""
