"""What training costs in time, money and energy."""
