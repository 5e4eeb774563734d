"""What an optimizer step takes on machines that one does not have: time, bytes, memory and balance, before renting."""
