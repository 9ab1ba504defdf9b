"""What can be decided: axes, layouts, schedules, and the rules of what is legal."""
