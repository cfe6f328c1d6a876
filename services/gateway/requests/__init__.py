"""What is open at this gateway: admitted, told, remembered, ended. Knows no transport."""
