"""Programs that other steps make up on one device: compared with it by random numbers."""
