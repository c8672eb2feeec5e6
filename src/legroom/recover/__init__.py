"""`legroom recover`: what a dead server still holds, and freeing it."""
