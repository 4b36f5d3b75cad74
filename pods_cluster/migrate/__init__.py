"""Settings of TRL, verl and OpenRLHF → a configuration, and what of them did not carry over."""
