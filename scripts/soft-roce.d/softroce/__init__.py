"""Real soft-RoCE for tests: in virtual machines, or with the host's rdma_rxe."""
