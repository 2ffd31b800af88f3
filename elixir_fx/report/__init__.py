"""What people read: plans and results as text."""
