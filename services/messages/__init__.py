"""Messages of the ring, the work that they request, and the records that they carry."""
